"""The checks of `echostore doctor`. Each looks at one thing, changes nothing, and survives whatever it finds.

installation    python, libraries
machine         disk space, clock; Java, memory and scratch space for Spark (engine_checkup)
home            key file, lock, instance standing
each party      files, feeds and blobs (all of them with --full), rejects, stalls
"""

import os
import platform
import shutil
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from echostore import __version__
from echostore.cli.output import Output, counted, size
from echostore.cli.values import iso, iso_ms, one_line, short, short_place
from echostore.kernel.errors import Corrupt, EchoError, NotFound, WrongPassphrase

if TYPE_CHECKING:
    from echostore.peer.base_damage import BaseDamage
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer
    from echostore.store.home import Home
    from echostore.store.meta_store import KnownParty

LIBRARIES = ("protobuf", "PyNaCl", "loro", "msgspec", "cyclopts", "rich", "platformdirs")
FREE_BYTES_MIN = 256 * 1024 * 1024
"""Below this a log checkpoint or an epoch may not fit."""
CLOCK_SLACK_MS = 10 * 60 * 1000
"""How far other members' clocks may be ahead before it is worth a word."""
SOUND_CLOCK_MS = 1_767_225_600_000
"""The start of 2026: no clock that is right shows less."""
_ANEW = (
    "Run `echostore init`: it makes meta.db anew from the parties' own files. Then give the name again (`echostore init --name "
    "NAME`), pause or close the parties that were, and meet a member with `echostore serve --connect HOST:PORT`."
)
QUICK_CHECK_BYTES_MAX = 64 * 1024 * 1024
"""Files up to this size are read through also without --full."""


class Level(Enum):
    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    name: str
    what: str
    level: Level = Level.OK
    next_step: str = ""

    def line(self) -> str:
        text = f"{self.level.value:<8} {self.name:<22} {one_line(self.what)}"
        return f"{text}  {one_line(self.next_step)}" if self.next_step else text


def examine(path: Path, output: Output, *, full: bool) -> Iterator[Finding]:
    """All checks of the home at `path`, and of the ground it stands on."""
    from echostore.cli.engine_checkup import engine

    yield from installation()
    yield from engine()
    yield from _space(path)
    yield _clock()
    from echostore.store.home import Home

    try:
        home = Home.open(path)
    except EchoError as error:
        yield Finding("home", _private(error.what), Level.WARNING, error.next_step)
        return
    yield Finding("home", _private(str(home.path)))
    yield _lock(home)
    yield _instance(home)
    yield from _data(home, output, full=full)


# installation and machine


def installation() -> Iterator[Finding]:
    yield Finding("echostore", __version__)
    yield Finding("python", f"{platform.python_version()} {sys.implementation.name} on {platform.platform()}")
    yield Finding("sqlite", sqlite3.sqlite_version)
    for library in LIBRARIES:
        try:
            yield Finding(library, metadata.version(library))
        except metadata.PackageNotFoundError:
            yield Finding(library, "is not installed", Level.WARNING, "Install echostore again.")


def _space(path: Path) -> Iterator[Finding]:
    folder = path.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding("disk space", f"can't be told: {error.strerror}", Level.WARNING)
        return
    low = free < FREE_BYTES_MIN
    yield Finding(
        "disk space", f"{size(free)} free", Level.WARNING if low else Level.OK, "Free some space." if low else ""
    )


def _clock() -> Finding:
    now_ms = time.time_ns() // 1_000_000
    wrong = now_ms < SOUND_CLOCK_MS
    return Finding(
        "clock",
        iso(datetime.now(UTC).replace(microsecond=0)),
        Level.WARNING if wrong else Level.OK,
        "It is behind; set it. Order never depends on it, times shown do." if wrong else "",
    )


# home


def _lock(home: "Home") -> Finding:
    holder = lock_holder(home.path / "lock")
    if holder is None:
        return Finding("lock", "free: nobody writes this home")
    what = (
        "it carries out commands that write" if "echostore serve" in holder else "commands that write will be refused"
    )
    return Finding("lock", f"held by {holder}; {what}")


def lock_holder(path: Path) -> str | None:
    """Who holds the lock, without trying to take it: a try could refuse a writer that comes at that moment."""
    try:
        text = path.read_bytes()[:4096].decode("utf-8", "replace").strip()
        pid = int(text.removeprefix("pid ").partition(":")[0])
        os.kill(pid, 0)
    except (OSError, ValueError):
        return None
    try:
        descriptors = Path(f"/proc/{pid}/fd")
        if descriptors.parent.exists():
            # The pid may have passed on to another process since.
            held = any(_same(descriptor, path) for descriptor in descriptors.iterdir())
            return one_line(text, 80) if held else None
    except OSError:
        pass  # another user's process: its pid is all there is to go by
    return one_line(text, 80)


def _same(descriptor: Path, path: Path) -> bool:
    try:
        return os.path.samefile(descriptor, path)
    except OSError:
        return False


def _instance(home: "Home") -> Finding:
    from echostore.store.instance import Standing, standing_of

    standing = standing_of(home)
    meaning = {
        Standing.SAME: "same: this home goes on with its feeds",
        Standing.FRESH: "fresh: nothing was written yet",
        Standing.COPIED: "copied: the next writer opens new feeds, so that no feed forks",
        Standing.RESTORED: "restored: the next writer opens new feeds, so that no feed forks",
    }[standing]
    doubtful = standing in (Standing.COPIED, Standing.RESTORED)
    return Finding("instance", meaning, Level.WARNING if doubtful else Level.OK)


def _data(home: "Home", output: Output, *, full: bool) -> Iterator[Finding]:
    from echostore.cli.opening import PASSPHRASE_VARIABLE
    from echostore.peer.peer import open_peer

    try:
        peer = open_peer(
            home.path, read_only=True, background=False, passphrase=os.environ.get(PASSPHRASE_VARIABLE) or None
        )
    except WrongPassphrase as error:
        yield Finding("key file", "sealed; the data was not looked at", Level.WARNING, error.next_step)
        return
    except Corrupt as error:
        yield Finding("store", _private(error.what), Level.BROKEN, _repair(home, error))
        return
    except EchoError as error:
        yield Finding("store", _private(error.what), Level.WARNING, error.next_step)
        return
    if not home.meta.exists() and home.party_keys():
        yield Finding("store", "meta.db is missing: parties are told from their own files", Level.WARNING, _ANEW)
    with peer:
        yield Finding("key file", "sealed with a passphrase" if peer.keys.protected else "readable, not sealed")
        try:
            parties = peer.parties()
        except Corrupt as error:
            yield Finding("store", _private(error.what), Level.BROKEN, _repair(home, error))
            return
        wrong = sqlite_check(home.meta, full=True) if full and home.meta.exists() else None
        if wrong is not None:
            yield Finding("store", wrong, Level.BROKEN, _repair(home, Corrupt(str(home.meta))))
        yield Finding("parties", counted(len(parties), "party"))
        for known in parties:
            yield from _party(peer, known, output, full=full)


def _repair(home: "Home", error: Corrupt) -> str:
    """What to do about files of the home itself. `doctor` changes nothing, so it must not send people back to itself."""
    if home.meta.name in error.what:
        return f"{_ANEW} The damaged one is put aside."
    return "" if "echostore doctor" in error.next_step else error.next_step


# one party


def _party(peer: "Peer", known: "KnownParty", output: Output, *, full: bool) -> Iterator[Finding]:
    name = f"party {short(known.key.hex())}"
    damage = list(_files(peer, known, name, full=full))
    yield from damage
    if any(finding.level is Level.BROKEN for finding in damage):
        return
    if full:
        yield from _verified(peer, known, name, output)
        yield from _items(peer, known, name)
    if known.state == "closed":
        yield Finding(name, "closed; its state was not computed")
        return
    try:
        party = peer.held(known.key)
        lost = party.runtime.processor.damage or _base_looked_at(party)
        if lost is not None:
            yield Finding(f"{name} epoch {lost.name.number}", _private(lost.text), Level.BROKEN, lost.next_step)
        if lost is None or not lost.closed:
            yield from _made_again(party, name)
            yield from _standing(party, name)
    except Corrupt as error:
        yield Finding(name, _private(error.what), Level.BROKEN, "Restore the party's folder, or join it again.")
    except EchoError as error:
        yield Finding(name, _private(error.what), Level.WARNING, error.next_step)


def _files(peer: "Peer", known: "KnownParty", name: str, *, full: bool) -> Iterator[Finding]:
    """The files as SQLite sees them. feeds.db is the data; the others are derived, as far as feeds are whole."""
    from echostore.store.feed_store import FeedStore

    folder = peer.home.party(known.key)
    try:
        with FeedStore(folder.feeds, known.key, writable=False) as feeds:
            held = sum(feed.length - feed.base for feed in feeds.feeds())
            truncated = any(feed.base for feed in feeds.feeds())
            if not feeds.feeds():
                raise Corrupt(f"the feeds are gone from {folder.feeds}")
            yield Finding(f"{name} feeds", f"{counted(held, 'block')} in {counted(len(feeds.feeds()), 'feed')}")
    except (Corrupt, NotFound) as error:
        yield Finding(f"{name} feeds", _private(error.what), Level.BROKEN, "Restore feeds.db, or join the party again.")
        return
    # Where blocks were deleted below an epoch, its snapshot is in the blobs alone.
    for path, derived in ((folder.feeds, False), (folder.items, True), (folder.blobs, not truncated)):
        if path.exists() and (full or path.stat().st_size <= QUICK_CHECK_BYTES_MAX):
            wrong = sqlite_check(path, full=full)
            if wrong is not None:
                step = "Remove the file; it is made anew." if derived else "Restore it, or join the party again."
                if path == folder.blobs and truncated:
                    step = (
                        "Connect to a member (`echostore serve --connect HOST:PORT`): what is lost comes from there. Where "
                        "nobody else is in the party: restore it from a backup."
                    )
                yield Finding(f"{name} {path.name}", wrong, Level.BROKEN, step)


def sqlite_check(path: Path, *, full: bool) -> str | None:
    """What SQLite finds wrong with a file, or None; in full, also whether its indexes agree with its tables."""
    from echostore.store.sqlite import connect_file

    try:
        connection = connect_file(path, False)
        try:
            found = connection.execute(f"PRAGMA {'integrity' if full else 'quick'}_check(1)").fetchone()
        finally:
            connection.close()
    except (sqlite3.Error, EchoError) as error:
        return str(error)
    return None if found is None or found[0] == "ok" else str(found[0])


def _verified(peer: "Peer", known: "KnownParty", name: str, output: Output) -> Iterator[Finding]:
    from echostore.cli.blob import verify_blobs
    from echostore.cli.feed import verify_party

    for verdict in verify_party(output, peer, known.key):
        label = f"{name} {short(verdict['feed'] or 'feeds')}"
        if verdict["sound"]:
            yield Finding(label, f"{counted(verdict['blocks'], 'block')} verified")
        else:
            place = "" if verdict["seq"] is None else f"seq {verdict['seq']}: "
            yield Finding(label, place + _private(verdict["damage"]), Level.BROKEN, "Fetch or restore the feed.")
    for verdict in verify_blobs(output, peer, known.key):
        if verdict["sound"]:
            yield Finding(f"{name} blobs", f"{counted(verdict['blobs'], 'blob')} verified")
        else:
            yield Finding(
                f"{name} blobs", _private(verdict["damage"]), Level.BROKEN, "Remove them; they are fetched again."
            )


def _items(peer: "Peer", known: "KnownParty", name: str) -> Iterator[Finding]:
    from echostore.cli.item_checkup import items_as_folded

    try:
        for what in items_as_folded(peer, known):
            yield Finding(f"{name} items", what)
    except Corrupt as error:
        yield Finding(f"{name} items", _private(error.what), Level.BROKEN, _private(error.next_step))
    except EchoError as error:
        yield Finding(f"{name} items", _private(error.what), Level.WARNING, error.next_step)


def _base_looked_at(party: "Party") -> "BaseDamage | None":
    """What is lost of the epoch that a party stands on, where nobody has noticed yet."""
    from echostore.peer.base_damage import BaseDamage, missing
    from echostore.peer.epoch_fetching import holes

    processor, blobs = party.runtime.processor, party.runtime.blobs
    if processor.base is None or blobs is None:
        return None
    name = processor.base.name
    lost = holes(name, blobs)
    return BaseDamage.of(processor, name, missing(lost), closed=False) if lost else None


def _made_again(party: "Party", name: str) -> Iterator[Finding]:
    """Blobs that are lost, and that this peer makes again, or fetches, by itself."""
    from echostore.peer.whole_epochs import lost_beside

    step = "Run `echostore serve`, or `echostore epoch gc`: they are made again, or come from a member."
    for what, count in lost_beside(party.runtime).items():
        yield Finding(f"{name} blobs", f"{counted(count, 'blob')} of {what} missing", Level.BROKEN, step)


def _standing(party: "Party", name: str) -> Iterator[Finding]:
    status = party.status
    yield Finding(f"{name} items", counted(status.items, "item"))
    reasons = Counter(str(reject.reason) for reject in party.rejected())
    if reasons:
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        yield Finding(f"{name} rejects", listed, Level.WARNING, "`echostore party rejected` lists them.")
    else:
        yield Finding(f"{name} rejects", "none")
    stalls = [
        f"{short(feed.key.hex())} {feed.waits_for and 'waits for ' + short_place(feed.waits_for)}"
        f"{feed.ended and ' ended: ' + feed.ended}"
        for feed in status.feeds
        if feed.processed < feed.held
    ]
    if stalls:
        yield Finding(f"{name} stalls", "; ".join(stalls), Level.WARNING, "Connect to a peer that has what is missing.")
    else:
        yield Finding(f"{name} stalls", "none")
    yield from _times(party, name)
    yield from _epoch(party, name)


def _epoch(party: "Party", name: str) -> Iterator[Finding]:
    """Whether the epoch that the MetaStore keeps is the one that the party stands on."""
    from echostore.peer.accepted_base import disagreement

    base = party.runtime.processor.base
    try:
        odd = disagreement(party.runtime.processor, party.peer.epochs(party.key).accepted())
    except Corrupt as error:
        odd = error.what
    step = "Open the party to write (`echostore serve`): it is looked at again."
    if odd:
        yield Finding(f"{name} epoch", odd, Level.WARNING, step)
    elif base is not None:
        yield Finding(f"{name} epoch", f"stands on epoch {base.name.number}")


def _times(party: "Party", name: str) -> Iterator[Finding]:
    """Blocks from the future: this clock is behind, or a writer's is ahead."""
    from echostore.kernel.reasons import Reason
    from echostore.wire.messages import decode_envelope

    newest = 0
    for feed in party.runtime.feeds.feeds():
        if feed.length > feed.base:
            envelope = decode_envelope(party.runtime.feeds.block(feed.key, feed.length - 1).payload, feed.kind)
            if not isinstance(envelope, Reason):
                newest = max(newest, envelope.body.time_ms)
    if newest > time.time_ns() // 1_000_000 + CLOCK_SLACK_MS:
        yield Finding(f"{name} times", f"a block is from {iso_ms(newest)}, which is in the future", Level.WARNING)


def _private(text: str) -> str:
    """A text without the name of the user's own folder."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
