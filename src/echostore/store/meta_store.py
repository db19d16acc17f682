"""MetaStore: what this peer knows about itself: its parties and their feeds, its settings, its contacts.

Nothing here is the only copy of anything that can't be said again: if meta.db is lost, `rebuild` reads the parties
back from their folders (each feeds.db carries an `about` table with the same facts). Settings and contacts' names are
then gone, and only those.

States of a party: active -> paused -> active, closed, forgotten. Forgetting removes the party's folder for good:

    1  state `forgotten` is durable           crash after: `finish_forgetting` goes on from here at the next start
    2  the folder is renamed to <hex>.gone    one step, so no half a party is ever taken for a whole one
    3  the renamed folder is deleted          crash after: leftovers are deleted at the next start
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import msgspec

from echostore.kernel.errors import Corrupt, EchoError, NotFound, Refused
from echostore.kernel.ids import FeedKey, IdentityKey, PartyKey
from echostore.store.durable_file import file_error, sync_folder
from echostore.store.feed_store import FeedStore
from echostore.store.feed_tables import FeedKind
from echostore.store.home import GONE_SUFFIX, Home
from echostore.store.sqlite import Connect, Database, Row, Schema, connect_file

SCHEMA = Schema(
    application_id=0x45434F6D,
    steps=(
        (
            """CREATE TABLE parties (
                key BLOB PRIMARY KEY, title TEXT NOT NULL, genesis_feed BLOB, state TEXT NOT NULL,
                local INTEGER NOT NULL, child_of BLOB, created_ms INTEGER NOT NULL) WITHOUT ROWID""",
            """CREATE TABLE feeds (
                party BLOB NOT NULL, key BLOB NOT NULL, kind TEXT NOT NULL, own INTEGER NOT NULL,
                PRIMARY KEY (party, key)) WITHOUT ROWID""",
            """CREATE TABLE settings (
                party BLOB NOT NULL, name TEXT NOT NULL, value BLOB NOT NULL,
                PRIMARY KEY (party, name)) WITHOUT ROWID""",
            """CREATE TABLE contacts (
                identity BLOB PRIMARY KEY, name TEXT NOT NULL, note TEXT NOT NULL) WITHOUT ROWID""",
        ),
    ),
)

INVITATIONS = "invitations"
"""The setting with the invitations that this peer has made: `peer.inviting`."""

_PEER = b""
"""The owner of settings that belong to no party."""


class PartyState(StrEnum):
    """What this peer does with a party."""

    ACTIVE = "active"
    PAUSED = "paused"
    CLOSED = "closed"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class KnownParty:
    """A party of this peer. `child_of` is set for a light-weight party, `local` for one without an identity."""

    key: PartyKey
    title: str
    genesis_feed: FeedKey | None
    created_ms: int
    state: PartyState = PartyState.ACTIVE
    local: bool = False
    child_of: PartyKey | None = None

    def about(self) -> dict[str, bytes]:
        """What the party's feeds.db is told, so that `rebuild` can read it back."""
        facts = {
            "title": self.title.encode(),
            "created_ms": str(self.created_ms).encode(),
            "local": b"1" if self.local else b"0",
        }
        if self.genesis_feed is not None:
            facts["genesis_feed"] = self.genesis_feed
        if self.child_of is not None:
            facts["child_of"] = self.child_of
        return facts


@dataclass(frozen=True, slots=True)
class KnownFeed:
    """A feed that this peer knows of, held or not."""

    party: PartyKey
    key: FeedKey
    kind: FeedKind
    own: bool


@dataclass(frozen=True, slots=True)
class Contact:
    """An identity and what this peer's owner calls it."""

    identity: IdentityKey
    name: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What `rebuild` read back, and the folders it could not read, with the reason."""

    parties: tuple[KnownParty, ...]
    unreadable: tuple[tuple[PartyKey, str], ...]


class MetaStore:
    """meta.db of one home."""

    def __init__(self, path: Path, *, writable: bool = True, connect: Connect = connect_file) -> None:
        self._db = Database(path, SCHEMA, writable=writable, connect=connect)
        if writable:
            self._db.rows("PRAGMA secure_delete = ON")  # settings hold what lets guests in while an invitation is open

    # -- parties and feeds ---------------------------------------------------------------------------------------

    def put_party(self, party: KnownParty) -> None:
        """Add a party, or change what is known of it; durable on return. A forgotten one comes back by this."""
        with self._db.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO parties VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    party.key,
                    party.title,
                    party.genesis_feed,
                    party.state,
                    int(party.local),
                    party.child_of,
                    party.created_ms,
                ),
            )

    def party(self, key: PartyKey) -> KnownParty:
        row = self._db.row("SELECT * FROM parties WHERE key = ?", (key,))
        if row is None:
            raise NotFound(f"There is no party {key.hex()} here.")
        return _party(row)

    def parties(self, *, forgotten: bool = False) -> list[KnownParty]:
        """The parties of this peer, oldest first; with `forgotten`, also those that were."""
        parties = [_party(row) for row in self._db.rows("SELECT * FROM parties ORDER BY created_ms, key")]
        return [party for party in parties if forgotten or party.state is not PartyState.FORGOTTEN]

    def set_state(self, key: PartyKey, state: PartyState) -> None:
        """Pause, resume or close a party. Forgetting has its own verb, because it deletes."""
        assert state is not PartyState.FORGOTTEN, "use forget"
        self.put_party(replace(self.party(key), state=state))

    def remember(self, party: KnownParty, feeds: Sequence[KnownFeed], settings: Mapping[str, Any]) -> None:
        """A party that is new here, with its own feeds and settings, in one transaction."""
        with self._db.transaction():
            self.put_party(party)
            for feed in feeds:
                self.put_feed(feed)
            for name, value in settings.items():
                self.set_setting(name, value, party=party.key)

    def put_feed(self, feed: KnownFeed) -> None:
        with self._db.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO feeds VALUES (?, ?, ?, ?)", (feed.party, feed.key, feed.kind, int(feed.own))
            )

    def feeds(self, party: PartyKey) -> list[KnownFeed]:
        rows = self._db.rows("SELECT party, key, kind, own FROM feeds WHERE party = ? ORDER BY key", (party,))
        return [KnownFeed(PartyKey(owner), FeedKey(key), kind, bool(own)) for owner, key, kind, own in rows]

    # -- settings and contacts -----------------------------------------------------------------------------------

    def setting(self, name: str, default: Any = None, *, party: PartyKey | None = None) -> Any:
        """A setting of the peer, or of the peer for one party."""
        row = self._db.row("SELECT value FROM settings WHERE party = ? AND name = ?", (party or _PEER, name))
        if row is None:
            return default
        return _setting(name, row[0])

    def set_setting(self, name: str, value: Any, *, party: PartyKey | None = None) -> None:
        """Keep a JSON value; None removes the setting."""
        with self._db.transaction():
            if value is None:
                self._db.execute("DELETE FROM settings WHERE party = ? AND name = ?", (party or _PEER, name))
            else:
                self._db.execute(
                    "INSERT OR REPLACE INTO settings VALUES (?, ?, ?)",
                    (party or _PEER, name, msgspec.json.encode(value)),
                )

    def settings(self, *, party: PartyKey | None = None) -> dict[str, Any]:
        rows = self._db.rows("SELECT name FROM settings WHERE party = ? ORDER BY name", (party or _PEER,))
        return {name: self.setting(name, party=party) for (name,) in rows}

    def wipe_log(self) -> None:
        """Take what was overwritten or deleted out of the write-ahead log; from the file itself it goes at once."""
        self._db.checkpoint()

    def wipe_free_pages(self) -> None:
        """Write the file anew, without what was deleted while it was not wiped."""
        self._db.shrink()

    def put_contact(self, contact: Contact) -> None:
        with self._db.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO contacts VALUES (?, ?, ?)", (contact.identity, contact.name, contact.note)
            )

    def remove_contact(self, identity: IdentityKey) -> None:
        with self._db.transaction():
            self._db.execute("DELETE FROM contacts WHERE identity = ?", (identity,))

    def contacts(self) -> list[Contact]:
        rows = self._db.rows("SELECT identity, name, note FROM contacts ORDER BY name, identity")
        return [Contact(IdentityKey(identity), name, note) for identity, name, note in rows]

    def check(self) -> None:
        """Read everything once; Corrupt when something can't be. It is little: a few rows per party and contact."""
        damage = self._db.row("PRAGMA quick_check(1)")
        if damage is None or damage[0] != "ok":
            raise Corrupt(f"{self._db.path} is damaged: {damage[0] if damage else 'it can not be read'}.")
        self.parties(forgotten=True)
        for name, value in self._db.rows("SELECT name, value FROM settings"):
            _setting(name, value)

    # -- forgetting and rebuilding -------------------------------------------------------------------------------

    def forget(self, home: Home, key: PartyKey) -> None:
        """Remove a party and its folder. Its stores must be closed. What others hold of it is not affected."""
        party = self.party(key)
        with self._db.transaction():
            self.put_party(replace(party, state=PartyState.FORGOTTEN))
            self._db.execute("DELETE FROM feeds WHERE party = ?", (key,))
            self._db.execute("DELETE FROM settings WHERE party = ?", (key,))
        _remove_folder(home, key)

    def take_back(self, home: Home, key: PartyKey) -> None:
        """Undo `remember` of a party that could not be made. The folder goes first: on a full disk that makes space."""
        _remove_folder(home, key)
        with self._db.transaction():
            for table, column in (("parties", "key"), ("feeds", "party"), ("settings", "party")):
                self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (key,))

    def finish_forgetting(self, home: Home) -> int:
        """At start: finish what a crash left of `forget`; returns how many folders went."""
        forgotten = [party.key for party in self.parties(forgotten=True) if party.state is PartyState.FORGOTTEN]
        unfinished = [key for key in forgotten if os.path.lexists(home.party(key).path)]
        for key in unfinished:
            _remove_folder(home, key)
        leftovers = home.gone_folders()
        for folder in leftovers:
            _delete_tree(folder)
        return len(unfinished) + len(leftovers)

    def rebuild(self, home: Home) -> Rebuilt:
        """Read the parties back from their folders. What is known already stays as it is."""
        known = {party.key for party in self.parties(forgotten=True)}
        found: list[KnownParty] = []
        unreadable: list[tuple[PartyKey, str]] = []
        for key in home.party_keys():
            if key in known:
                continue
            try:
                party, feeds = _read_party(home, key)
            except EchoError as error:
                unreadable.append((key, error.what))
                continue
            with self._db.transaction():
                self.put_party(party)
                for feed in feeds:
                    self.put_feed(feed)
            found.append(party)
        return Rebuilt(tuple(found), tuple(unreadable))

    @property
    def failure(self) -> str | None:
        """Why the store takes no more writes, once that is so."""
        return self._db.failure

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _party(row: Row) -> KnownParty:
    key, title, genesis_feed, state, local, child_of, created_ms = row
    try:
        return KnownParty(
            key=PartyKey(key),
            title=title,
            genesis_feed=None if genesis_feed is None else FeedKey(genesis_feed),
            created_ms=created_ms,
            state=PartyState(state),
            local=bool(local),
            child_of=None if child_of is None else PartyKey(child_of),
        )
    except ValueError as error:
        raise Corrupt("An entry of meta.db is damaged.", next_step="Run `echostore init`: it is rebuilt.") from error


def _setting(name: str, value: bytes) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, TypeError) as error:
        raise Corrupt(f"The setting {name!r} in meta.db is damaged.", next_step="Run `echostore init`.") from error


def _read_party(home: Home, key: PartyKey) -> tuple[KnownParty, list[KnownFeed]]:
    """What a party's feeds.db says of it. Opened for reading: a rebuild changes nothing in the folders."""
    with FeedStore(home.party(key).feeds, key, writable=False) as store:
        genesis_feed, child_of = store.about("genesis_feed"), store.about("child_of")
        created = store.about("created_ms") or b"0"
        party = KnownParty(
            key=key,
            title=(store.about("title") or b"").decode("utf-8", "replace"),
            genesis_feed=None if genesis_feed is None else FeedKey(genesis_feed),
            created_ms=int(created) if created.isdigit() else 0,
            local=store.about("local") == b"1",
            child_of=None if child_of is None else PartyKey(child_of),
        )
        return party, [KnownFeed(key, feed.key, feed.kind, feed.own) for feed in store.feeds()]


def _remove_folder(home: Home, key: PartyKey) -> None:
    """Remove the folder of a party, all of it or nothing that counts. Its stores must be closed."""
    folder = home.party(key).path
    gone = folder.with_name(folder.name + GONE_SUFFIX)
    if not os.path.lexists(folder):
        return
    if folder.is_symlink():
        raise Refused(f"{folder} is a symbolic link.", next_step="Remove the link; what it points to is left alone.")
    _delete_tree(gone)
    try:
        os.rename(folder, gone)
        sync_folder(home.parties)
    except OSError as error:
        raise file_error(error, f"remove {folder}") from error
    _delete_tree(gone)


def _delete_tree(folder: Path) -> None:
    """Delete a folder and what is in it. Links inside are removed, never followed (rmtree works by descriptors)."""
    assert folder.name.endswith(GONE_SUFFIX), f"{folder} is not on its way out"
    if not os.path.lexists(folder):
        return
    try:
        shutil.rmtree(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise file_error(error, f"delete {folder}") from error
