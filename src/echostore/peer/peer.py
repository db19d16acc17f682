"""Peer: a running process with keys and a store. `echostore.open` makes one.

    peer = echostore.open("data", name="Laptop")      one writer per home; others may open it read-only
    party = peer.create_party("Road trip")            parties open on first use; an untouched one costs nothing

One lock guards the peer. A background thread makes writes durable shortly after they are made; `flush` does it now.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from echostore.kernel.errors import Closed, Corrupt, EchoError, NotFound, Refused, UsageError
from echostore.kernel.ids import DeviceKey, PartyKey
from echostore.kernel.values import kind_of, parse_locator
from echostore.peer import arguments
from echostore.peer.doorstep import open_peer
from echostore.peer.epoch_keeper import EpochKeeper
from echostore.peer.identity import JoinRequest, Welcome, check_title
from echostore.peer.identity import Self as OwnSelf
from echostore.peer.model_registry import PeerModels, forget_unreadable_items
from echostore.peer.opening import PartyOpener
from echostore.peer.party import Party
from echostore.peer.plugins import LoadedModels, load_models
from echostore.peer.query import MultiQuery
from echostore.peer.sync_port import PartySyncPort
from echostore.peer.view_classes import ViewClasses
from echostore.store.home import Home
from echostore.store.instance import check_in
from echostore.store.key_store import KeyStore, KeyUse
from echostore.store.lock import HomeLock
from echostore.store.meta_store import INVITATIONS, KnownParty, MetaStore, PartyState
from echostore.store.sqlite import connect_memory
from echostore.wire.signing import SigningKey

if TYPE_CHECKING:
    from echostore.peer.coherence_service import ThinService
    from echostore.peer.contacts import SharedContact
    from echostore.peer.epochs import Epochs
    from echostore.peer.inviting import Invitation
    from echostore.peer.network import Network

__all__ = ["Peer", "open_peer"]

_log = logging.getLogger("echostore")

FLUSH_AFTER_S = 0.1
"""How long a write may stay in memory alone: a tenth of a second of typing makes one block."""

FULL_RETRY_S = 1.0
"""How often a party on a full disk looks whether there is space again."""

DEFAULT_PARTY = "default_party"
"""The setting of a home that keeps what `use_party` chose."""


class Peer:
    """An open home. Use as a context manager, or call `close`."""

    def __init__(
        self,
        home: Home,
        *,
        name: str | None,
        passphrase: str | None,
        read_only: bool,
        background: bool,
        now_ms: Callable[[], int] | None,
        lock: HomeLock | None = None,
    ) -> None:
        self.home = home
        self.read_only = read_only
        self.lock = threading.RLock()
        self.now_ms = now_ms or (lambda: time.time_ns() // 1_000_000)
        self.models = PeerModels(self)
        self._file_lock = None if read_only else lock or home.lock()
        self.closed = False
        self._parties: dict[PartyKey, Party] = {}
        self._network: Network | None = None
        self._thin: list[ThinService] = []
        self.epoch_keeper = EpochKeeper(self, background=background and not read_only)
        try:
            self.instance = None if read_only else check_in(home)
            self.keys = self._open_keys(passphrase)
            self.meta = self._open_meta()
            self.myself = OwnSelf(self.keys, self.meta, name=name, writable=not read_only)
            self.view_classes = ViewClasses(self.meta)
            self.opener = PartyOpener(self)
        except BaseException:
            self._release()
            raise
        self._due = threading.Event()
        self._stop = threading.Event()
        self._flusher: threading.Thread | None = None
        self._background = background and not read_only

    def _open_keys(self, passphrase: str | None) -> KeyStore:
        if self.home.keys.exists():
            return KeyStore.open(self.home.keys, passphrase)
        if self.read_only:
            raise NotFound(f"there is no key store in {self.home.path}")
        if self.home.party_keys():
            raise Refused(
                f"{self.home.keys} is missing while parties are there",
                next_step="Restore the file from a backup; without it this device can't write to its parties.",
            )
        return KeyStore.create(self.home.keys, passphrase)

    def _open_meta(self) -> MetaStore:
        """The MetaStore. A damaged or empty one is put aside and made anew: the parties' own files say the same.

        Without the file a reader reads the same from the parties' files, into memory.
        """
        if self.read_only and not self.home.meta.exists():
            _log.warning(
                "%s is missing: parties are told from their own files. Run `echostore init` to make it anew",
                self.home.meta,
            )
            meta = MetaStore(self.home.meta, connect=connect_memory)
            meta.rebuild(self.home)
            return meta
        try:
            meta = self._sound_meta()
        except Corrupt:
            if self.read_only:
                raise
            for suffix in ("", "-wal", "-shm"):
                file = self.home.meta.with_name(self.home.meta.name + suffix)
                if file.exists():
                    file.replace(file.with_name(file.name + ".damaged"))
            _log.warning("%s was damaged: it is put aside as meta.db.damaged", self.home.meta)
            meta = MetaStore(self.home.meta)
        if not self.read_only and self.home.party_keys() and not meta.parties(forgotten=True):
            meta.rebuild(self.home)
            _log.warning(
                "%s is made anew from the parties' own files: this peer's name, settings and pauses are to be set again, "
                "and addresses of others are not known any more (`echostore serve --connect HOST:PORT` meets one)",
                self.home.meta,
            )
        if not self.read_only:
            meta.finish_forgetting(self.home)
            if meta.setting(INVITATIONS):
                from echostore.peer.inviting import wipe_passcodes

                wipe_passcodes(meta, self.now_ms())
        return meta

    def _sound_meta(self) -> MetaStore:
        """The MetaStore, every row of which can be read; Corrupt when that is not so."""
        meta = MetaStore(self.home.meta, writable=not self.read_only)
        try:
            meta.check()
        except BaseException:
            meta.close()
            raise
        return meta

    # who

    @property
    def name(self) -> str:
        return self.myself.name

    @property
    def identity(self) -> bytes:
        """This peer's identity key."""
        return self.myself.identity

    @property
    def device(self) -> bytes:
        return self.myself.device

    @property
    def contacts(self) -> "list[SharedContact]":
        """The other members of this peer's parties: who they are, what is shared with them, when they were last seen."""
        from echostore.peer.contacts import contacts

        with self.lock:
            self._check_open()
            return contacts(self, self._network)

    def recovery_phrase(self) -> str:
        """The 24 words that bring this peer's identity back on an empty machine. Whoever has them is this identity."""
        from echostore.peer.recovery import phrase_of

        self._check_writable()
        return phrase_of(self.myself.identity_key)

    def forget_identity_key(self) -> None:
        """Take the identity's key off this device, for good: from then on only its recovery phrase has it."""
        self._check_writable()
        with self.lock:
            _ = self.myself.identity_key
            self.myself.let_go_of_identity_key()

    def rename(self, name: str) -> None:
        """Change the name that parties made or joined from now on see; `members.set_profile` tells one that is there."""
        self._check_writable()
        with self.lock:
            self.myself.rename(name)

    def new_view_key(self) -> bytes:
        """A fresh inception key for a view."""
        key = SigningKey.generate()
        self.keys.add_many([(KeyUse.VIEW, key, "")])
        return key.public

    def keep_feed_keys(self, party: PartyKey, keys: list[SigningKey]) -> None:
        """Feed keys are durable before their first block."""
        self.keys.add_many([(KeyUse.FEED, key, party.hex()) for key in keys])

    def load_models(self, allow: Mapping[str, str]) -> LoadedModels:
        """Load models of installed packages, each allowed by the hash of its source: `{"counter@2": sha256}`."""
        return load_models(self.models, allow)

    # parties

    def create_party(self, title: str, *, local: bool = False) -> Party:
        """A new party with this peer as its owner; a local one needs no identity and can be adopted later."""
        self._check_writable()
        check_title(title)
        with self.lock:
            return self._keep(self.opener.create(title, local=arguments.flag(local, "local")))

    def create_child(self, parent: Party, title: str) -> Party:
        """A light-weight party: it shares the parent's members and has its own feeds, history and undo."""
        self._check_writable()
        check_title(title)
        arguments.instance(parent, Party, "a parent")
        with self.lock:
            return self._keep(self.opener.create_child(parent, title))

    def enter_child(self, parent: Party, key: PartyKey) -> Party:
        """Take part in a light-weight party that a member made below `parent`; see `parent.child_parties()`."""
        self._check_writable()
        arguments.instance(parent, Party, "a parent")
        arguments.key(key, "a party")
        with self.lock:
            if any(known.key == key and known.child_of == parent.key for known in self.parties()):
                return self.party(key)
            return self._keep(self.opener.enter_child(parent, key))

    def parties(self) -> list[KnownParty]:
        """The parties of this peer, without opening them."""
        return [party for party in self.meta.parties() if party.state is not PartyState.FORGOTTEN]

    def party(self, which: PartyKey | str) -> Party:
        """An open party by key, unique prefix of its key in hex, or `@title`."""
        with self.lock:
            party = self.held(which)
            damage = party.runtime.processor.damage
            if damage is not None and damage.closed:
                raise damage.error()
            return party

    def held(self, which: PartyKey | str) -> Party:
        """A party like `party`, also while it has no state: what it stands on is lost here, and has to be fetched."""
        with self.lock:
            self._check_open()
            key = self._party_key(which)
            party = self._parties.get(key)
            if party is not None and self.read_only and party.runtime.processor.closed:
                self._let_go(key)  # the process that writes may have it by now
            if party is None or party.runtime.closed:
                known = self.meta.party(key)
                if known.state is PartyState.CLOSED:
                    raise Refused(f"party {key.hex()[:8]} is closed", next_step="Resume it first.")
                if not self.read_only:
                    forget_unreadable_items(self.home.party(key).items, self.models)
                party = self._keep(self.opener.open(known))
            return party

    def _party_key(self, which: PartyKey | str) -> PartyKey:
        known = self.parties()
        if not isinstance(which, (bytes, str)):
            raise UsageError(f"a party is named by its key, by text or by @title, not by {kind_of(which)}")
        if isinstance(which, bytes):
            found = [party for party in known if party.key == which]
        elif which.startswith("@"):
            found = [party for party in known if self._title_of(party) == which[1:]]
        else:
            found = [party for party in known if which and party.key.hex().startswith(which.lower())]
        if not found:
            shown = which.hex()[:8] if isinstance(which, bytes) else which
            raise NotFound(f"no party {shown!r} here", next_step="`echostore party list` shows the parties.")
        if len(found) > 1:
            raise UsageError(f"{len(found)} parties match {which!r}", next_step="Give more of the key.")
        return found[0].key

    def _title_of(self, known: KnownParty) -> str:
        party = self._parties.get(known.key)
        return party.title if party is not None and not party.runtime.closed else known.title

    def _keep(self, party: Party) -> Party:
        party.runtime.on_write = self._written
        self.epoch_keeper.watch(party)
        self._parties[party.key] = party
        party.remember_title()
        self._parties_changed()
        return party

    def opened(self, key: PartyKey) -> Party | None:
        """A party that is open; None when it is not, or is not here."""
        party = self._parties.get(key)
        return party if party is not None and not party.runtime.closed else None

    def open_parties(self) -> list[Party]:
        """Those that can be read: not those of which so much is lost that they wait for it."""
        return [party for party in self.held_parties() if not party.runtime.processor.closed]

    def held_parties(self) -> list[Party]:
        return [party for party in self._parties.values() if not party.runtime.closed]

    def resolve(self, locator: str) -> Any:
        """The item or view that a locator names; None when it or its party is not here, or the party is closed."""
        party, item = parse_locator(arguments.text(locator, "a locator"))
        try:
            known = self.meta.party(party)
            if known.state is PartyState.CLOSED:
                return None
            return self.party(party).get(item)
        except NotFound:
            return None

    @property
    def default_party(self) -> PartyKey | None:
        """The party that `use_party` chose, if it is still here: commands take it when none is named."""
        chosen = self.meta.setting(DEFAULT_PARTY)
        return next((known.key for known in self.parties() if known.key.hex() == chosen), None)

    def use_party(self, party: PartyKey | None) -> None:
        """Choose the party that commands take when none is named; None forgets the choice."""
        if party is not None:
            self.meta.party(party)  # NotFound when it is not here
        self.meta.set_setting(DEFAULT_PARTY, None if party is None else party.hex())

    def query(self, /, type: str | None = None, **equals: Any) -> MultiQuery[Any]:
        """A query over all active parties."""
        parties = [self.party(known.key) for known in self.parties() if known.state is PartyState.ACTIVE]
        query: MultiQuery[Any] = MultiQuery([party.live for party in parties])
        if type is not None:
            query = query.where(type=type)
        return query.where(**equals) if equals else query

    # joining, over whatever link there is

    def request_join(self, party: PartyKey) -> JoinRequest:
        """Prepare this device's feeds for a party and say what an admin needs to admit it."""
        self._check_writable()
        with self.lock:
            return self.opener.request_join(PartyKey(arguments.key(party, "a party")))

    def enter(self, welcome: Welcome) -> Party:
        """Start following a party that has admitted this device."""
        self._check_writable()
        with self.lock:
            return self._keep(self.opener.enter(arguments.instance(welcome, Welcome, "a welcome")))

    def enter_as_device(self, welcome: Welcome) -> Party:
        """Start following a party of this peer's identity that another device of it is in."""
        self._check_writable()
        with self.lock:
            return self._keep(self.opener.enter_as_device(arguments.instance(welcome, Welcome, "a welcome")))

    def import_party(self, path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> Party:
        """Read a party from a file that `export_party` wrote. Everything in it is checked first."""
        from echostore.peer.transfer import import_party

        return import_party(self, Path(path), progress)

    def epochs(self, which: "PartyKey | str | Party") -> "Epochs":
        """The epochs of a party; docs/epochs.md is the guide to them."""
        from echostore.peer.epochs import Epochs

        return Epochs(self.held(which.key if isinstance(which, Party) else which))

    def sync_port(self, party: PartyKey) -> PartySyncPort:
        """One party as replication sees it."""
        return self.held(party).sync_port

    # on the network

    @property
    def network(self) -> "Network":
        """This peer's connections; made on first use."""
        self._check_writable()
        with self.lock:
            if self._network is None:
                from echostore.peer.network import Network

                self._network = Network(self)
                self.epoch_keeper.wake()
            return self._network

    @property
    def on_network(self) -> bool:
        """Whether this peer listens, or has tried to connect."""
        return self._network is not None

    def listen(self, address: str) -> str:
        """Take connections of other members at `host:port`; port 0 takes a free one. Returns the address in use."""
        return self.network.listen(address)

    def serve_thin(self, address: str, *, origins: Sequence[str] = ()) -> str:
        """Serve thin clients at `host:port` over WebSocket; port 0 takes a free one. Returns the URL they connect to.

        Who may do what is said by `party.capability(...)`. Pages that the service hands out itself may connect; `origins` names
        those of others that may too, like `https://app.example`. Wants the extra `web`.
        """
        self._check_writable()
        try:
            from echostore.peer.coherence_service import ThinService
        except ModuleNotFoundError as error:
            raise Refused(
                f"thin clients need the package {error.name}", next_step="Install it: pip install 'echostore[web]'."
            ) from error
        thin = ThinService(self, arguments.text(address, "an address"), arguments.texts(tuple(origins), "origins"))
        self._thin.append(thin)
        return thin.url

    @property
    def thin_services(self) -> "list[ThinService]":
        """The services for thin clients that run now."""
        return list(self._thin)

    def connect(self, address: str, *, device: bytes | None = None) -> bytes:
        """Connect to another member's peer, and again whenever the connection is lost. Returns its device key."""
        return self.network.connect(address, device=device)

    def join(self, ticket: str, passcode: str | None = None, *, timeout: float = 30.0, wait: bool = True) -> Party:
        """Enter a party with a ticket, and the passcode that belongs to it. Returns when this device may write there, or
        read where it was invited as a reader; with `wait=False` as soon as the host has admitted it. The rest of what the
        members hold follows by itself."""
        return self.network.inviting.join(ticket, passcode, timeout, wait=arguments.flag(wait, "wait"))

    def invite_device(self, *, expires_s: float = 600.0) -> "Invitation":
        """A ticket and a passcode for one more device of this peer's identity."""
        return self.network.inviting.invite_device(expires_s=expires_s)

    def join_device(
        self, ticket: str, passcode: str | None = None, *, timeout: float = 30.0, wait: bool = True
    ) -> list[Party]:
        """Become a device of another identity with a ticket of `invite_device`, and enter its parties.

        This home's own identity must not be in any party. Returns when this device may write in them, or read where its
        member is a reader; with `wait=False` as soon as they are known. What is held elsewhere follows by itself.
        """
        return self.network.inviting.join_device(ticket, passcode, timeout, wait=arguments.flag(wait, "wait"))

    def revoke_device(self, device: bytes) -> list[Party]:
        """Shut a device of this identity out of all its parties, and return those. What it wrote and this peer has not
        seen leaves the state. It is told of no other party."""
        key = DeviceKey(arguments.key(device, "a device"))
        if key == self.device:
            raise Refused("this is the own device", next_step="Revoke it from another device.")
        with self.lock:
            revoked = self.network.own_devices.revoke(key)
        self._parties_changed()
        return revoked

    def recover(
        self, phrase: str, *sources: str, timeout: float = 30.0, lan: bool = False, interfaces: Sequence[str] = ()
    ) -> list[Party]:
        """Become a device of the identity in a recovery phrase, and enter the parties that members know of.

        `sources` are addresses of members, or tickets they made; without them and with `lan`, members are looked for on the
        local network. This home's own identity must not be in any party.
        """
        from echostore.peer.recovery import recover

        self._check_writable()
        return recover(self, arguments.text(phrase, "a phrase"), sources, timeout, lan=lan, interfaces=interfaces)

    def _parties_changed(self) -> None:
        if self._network is not None:
            self._network.parties_changed()

    # life of a party

    def pause_party(self, key: PartyKey) -> None:
        """Hold new blocks of a party without processing them, until `resume_party`."""
        self._check_writable()
        with self.lock:
            party = self.party(key)
            if not party.runtime.processor.paused:
                self.opener.pause(party)
            self.meta.set_state(key, PartyState.PAUSED)

    def resume_party(self, key: PartyKey) -> Party:
        self._set_state(key, PartyState.ACTIVE)
        party = self.party(key)
        with self.lock:
            party.runtime.processor.resume()
            party.report_forks()
        return party

    def close_party(self, key: PartyKey) -> None:
        """Close a party for good, until it is resumed: nothing of it is opened or decoded."""
        self._check_writable()
        with self.lock:
            self.meta.party(PartyKey(arguments.key(key, "a party")))
            self._let_go(key)
            self.meta.set_state(key, PartyState.CLOSED)

    def forget_party(self, key: PartyKey) -> None:
        """Delete everything this peer holds of a party. Other members keep theirs."""
        self._check_writable()
        with self.lock:
            self.meta.party(PartyKey(arguments.key(key, "a party")))
            self._let_go(key)
            self.meta.forget(self.home, key)

    def take_back_party(self, key: PartyKey) -> None:
        """Leave nothing of a party that could not be taken in, also on a full disk."""
        with self.lock:
            party = self._parties.pop(key, None)
            if party is not None:
                party.runtime.abandon()
            self.meta.take_back(self.home, key)
            self._parties_changed()

    def _let_go(self, key: PartyKey) -> None:
        """Release a party's files, its light-weight parties' first: they live by its control feeds."""
        party = self._parties.pop(key, None)
        if party is None:
            return
        for other in list(self._parties.values()):
            if other.runtime.processor.parent is party.runtime.processor:
                self._let_go(other.key)
        party.runtime.close()
        self._parties_changed()

    def _set_state(self, key: PartyKey, state: PartyState) -> None:
        self._check_writable()
        with self.lock:
            self.meta.set_state(PartyKey(arguments.key(key, "a party")), state)

    # durability

    def flush(self) -> None:
        """Make all writes of all parties durable. One that fails stops no other; the first failure is raised."""
        with self.lock:
            _each([party.runtime.flush for party in self.held_parties() if party.runtime.writable])

    def _written(self) -> None:
        if not self._background or self._due.is_set():
            return
        self._due.set()
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._flush_loop, name="echostore-flush", daemon=True)
            self._flusher.start()

    def _flush_loop(self) -> None:
        full = False
        while True:
            if not full:
                self._due.wait()
            if self._stop.wait(FULL_RETRY_S if full else FLUSH_AFTER_S):
                return
            self._due.clear()
            with self.lock:
                if self.closed:
                    return
                for party in self.held_parties():
                    runtime = party.runtime
                    # A failed store shows itself to the next writer; this thread only stops asking. A full disk is no
                    # failure of the store: it is asked again.
                    if (runtime.failure is None or runtime.disk_full) and not runtime.in_batch and runtime.writable:
                        runtime.flush_quietly()
                full = any(party.runtime.disk_full for party in self.held_parties())

    def close(self) -> None:
        """Make everything durable, release the files and the lock. A second call does nothing."""
        self.epoch_keeper.close()
        thin, self._thin = self._thin, []
        for service in thin:
            service.close()  # as below, its thread may be waiting for the lock
        network, self._network = self._network, None
        if network is not None:
            if not self.closed:
                with suppress(EchoError):  # closing the party below says what could not be stored
                    self.flush()
            network.close()  # its thread may be waiting for the lock
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self._stop.set()
            self._due.set()
            try:
                _each([party.runtime.close for party in self._parties.values()])
            finally:
                self._release()
        if self._flusher is not None and self._flusher is not threading.current_thread():
            self._flusher.join()

    def _release(self) -> None:
        meta = getattr(self, "meta", None)
        if meta is not None:
            meta.close()
        if self._file_lock is not None:
            self._file_lock.release()

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("the peer has been closed", next_step="Open it again.")

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise Refused("the peer is open read-only")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<peer {self.name!r} at {Path(self.home.path).name}>"


def _each(steps: list[Callable[[], None]]) -> None:
    """Run every step, whatever the others do; then raise the first failure."""
    failures: list[EchoError] = []
    for step in steps:
        try:
            step()
        except EchoError as error:
            failures.append(error)
    if failures:
        raise failures[0]
