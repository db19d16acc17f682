"""What a leaf keeps across restarts, in one SQLite file: its key, its name, its ids, its outbox, its messages, and at a
clean end the answers it held.

Order matters: ids and a batch are on disk before the batch is sent, so that a leaf that falls over never issues an id
twice; a batch leaves the disk when the root's state includes it. One process has the file at a time: a second one would
issue the same ids.

Without a path everything is in memory: a leaf that ends then is a new one next time, and its ids are never reused.
"""

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from echostore.kernel.coherence.cache import Cache
from echostore.kernel.coherence.events import Told
from echostore.kernel.coherence.holdings import Version
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import (
    Arc,
    FollowsEpoch,
    IndexValue,
    IssuedId,
    LaneItem,
    PublishOp,
    Spec,
    SystemId,
    UserMessage,
)
from echostore.kernel.coherence.outbox import Batch
from echostore.kernel.coherence.posting import Window
from echostore.kernel.errors import Corrupt, Locked, StorageFailed
from echostore.kernel.ids import FeedId
from echostore.wire.coherence import LinkFrame, decode_frame, encode_frame
from echostore.wire.coherence_names import REASONS
from echostore.wire.signing import SEED_BYTES, SigningKey
from echostore.wire.sync import MalformedFrame

FORMAT: Final = 1

_SCHEMA: Final = """
create table if not exists facts (name text primary key, value text not null) without rowid;
create table if not exists operations (place integer primary key, frame blob not null);
create table if not exists messages (stream integer, seq integer, frame blob not null, primary key (stream, seq));
create table if not exists streams (sender text primary key, mark integer not null, above text not null);
create table if not exists told (gen integer, n integer, told text not null, primary key (gen, n)) without rowid;
create table if not exists held (spec blob primary key, first integer, last integer, value blob not null) without rowid;
"""

HELD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of answers that are kept; those that were learned last come first."""


class LeafStore:
    """The file, and what was last written to it."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = path
        try:
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).touch(mode=0o600)
            self._db = sqlite3.connect(":memory:" if path is None else path, check_same_thread=False, timeout=0.2)
            self._db.execute("pragma locking_mode = exclusive")
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = full")
            self._db.execute("begin immediate")
            self._db.commit()
            self._db.executescript(_SCHEMA)
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise Locked(
                    f"{path} is in use by another program", next_step="Give each leaf a file of its own."
                ) from None
            raise StorageFailed(f"{path} can't be opened: {error}") from error
        except (sqlite3.Error, OSError) as error:
            raise StorageFailed(f"{path} can't be opened: {error}", next_step="Name another file.") from error
        self._facts: dict[str, str] = {}
        self._operations: dict[PublishOp, int] = {}
        self._place = 0
        self._messages: set[tuple[int, int]] = set()
        self._windows: dict[tuple[SystemId, int], Window] = {}
        self._told: set[IssuedId] = set()
        self._told_place = 0

    # The leaf's key

    def signing_key(self) -> SigningKey:
        """The key of this leaf, made when it is first asked for."""
        row = self._db.execute("select value from facts where name = 'seed'").fetchone()
        if row is not None:
            seed = bytes.fromhex(row[0])
            if len(seed) != SEED_BYTES:
                raise Corrupt(f"{self.path} holds a key of {len(seed)} bytes")
            return SigningKey.from_seed(seed)
        key = SigningKey.generate()
        with self._db:
            self._db.execute("insert into facts values ('seed', ?)", (key.seed.hex(),))
        return key

    # The machine's state

    def restore(self, leaf: Leaf) -> None:
        """Put what was kept into a fresh machine."""
        try:
            self._restore(leaf)
        except (ValueError, KeyError, TypeError, MalformedFrame, sqlite3.Error) as error:
            raise Corrupt(
                f"{self.path} can't be read: {error}",
                unchanged="The file was left as it is.",
                next_step="Start with a new file; what was not sent from this one is in it.",
            ) from error

    def _restore(self, leaf: Leaf) -> None:
        facts = {name: value for name, value in self._db.execute("select name, value from facts") if name != "seed"}
        self._facts = dict(facts)
        if json.loads(facts.get("format", str(FORMAT))) != FORMAT:
            raise ValueError("a later format")
        home = leaf.home
        if "system" in facts:
            leaf.systems[home] = _system(json.loads(facts["system"]))
        cache = leaf.caches[home]
        if "clock" in facts:
            cache.clock = _arc(json.loads(facts["clock"]))
        if "cur" in facts:
            cache.holdings.cur = int(facts["cur"])
            cache.follow(FollowsEpoch(_arc(arc), tick) for arc, tick in json.loads(facts["follows"]))
        if "arc" in facts:
            arc, leaf.arcs.base, leaf.arcs.used = json.loads(facts["arc"])
            leaf.arcs.arc = _arc(arc)
        outbox = leaf.outbox
        for name, kept in (("numbers", outbox.numbers), ("durable", outbox.durable), ("released", outbox.released)):
            kept.update({_arc(arc): number for arc, number in json.loads(facts.get(name, "[]"))})
        leaf.sender.seqs.update(dict(json.loads(facts.get("seqs", "[]"))))
        self._restore_batches(leaf)
        self._restore_held(cache)
        self._restore_told(leaf)
        for stream, seq, frame in self._db.execute("select stream, seq, frame from messages"):
            message = decode_frame(frame).message
            if not isinstance(message, UserMessage):
                raise ValueError("a message that is none")
            leaf.sender.unreceived[stream, seq] = message
            self._messages.add((stream, seq))
        for text, mark, above in self._db.execute("select sender, mark, above from streams"):
            system, stream = json.loads(text)
            key = (_system(system), stream)
            leaf.receiver.windows[key] = self._windows[key] = Window(mark, frozenset(json.loads(above)))

    def keep_held(self, leaf: Leaf) -> None:
        """Write the newest value of every index that is held, with its interval: that is true for ever."""
        holdings, left, rows = leaf.caches[leaf.home].holdings, HELD_BYTES_MAX, []
        for spec in reversed(list(holdings.specs())):
            version = holdings.newest(spec)
            if version is not None and len(version.value) <= left:
                left -= len(version.value)
                rows.append((spec, version.min, version.max, version.value))
        try:
            with self._db:
                self._db.execute("delete from held")
                self._db.executemany("insert into held values (?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise StorageFailed(f"{self.path} can't be written: {error}", next_step="Make room.") from error

    def _restore_held(self, cache: Cache) -> None:
        for spec, first, last, value in self._db.execute("select spec, first, last, value from held"):
            if not (isinstance(spec, bytes) and isinstance(value, bytes) and 0 <= first <= last):
                raise ValueError("an answer that is none")
            cache.holdings.learn(Spec(spec), Version(first, last, IndexValue(value), live=False))

    def _restore_told(self, leaf: Leaf) -> None:
        own = leaf.systems.get(leaf.home)
        found = []
        for gen, n, text in self._db.execute("select gen, n, told from told"):
            place, reason, object, dependants = json.loads(text)
            if own is None:
                raise ValueError("a rejection of a leaf without a name")
            ids = tuple(IssuedId(Arc(own, other), number) for other, number in dependants)
            found.append((place, Told(IssuedId(Arc(own, gen), n), REASONS[reason], ids, bytes.fromhex(object))))
        leaf.told.update((told.op, told) for _, told in sorted(found, key=lambda each: each[0]))
        self._told = set(leaf.told)
        self._told_place = max((place for place, _ in found), default=0)

    def _save_told(self, leaf: Leaf, fresh: list[Told]) -> None:
        """In the transaction that writes the tick: who has seen the one has been told the other."""
        for told in fresh:
            self._told_place += 1
            ids = [(each.arc.gen, each.n) for each in told.dependants]
            row = json.dumps([self._told_place, told.reason.value, told.object.hex(), ids])
            self._db.execute("insert or replace into told values (?, ?, ?)", (told.op.arc.gen, told.op.n, row))
        gone = [(op.arc.gen, op.n) for op in self._told if op not in leaf.told]
        self._db.executemany("delete from told where gen = ? and n = ?", gone)

    def _restore_batches(self, leaf: Leaf) -> None:
        batches: dict[tuple[Arc, int], list[PublishOp]] = {}
        for place, frame in self._db.execute("select place, frame from operations order by place"):
            item = decode_frame(frame).message
            if not isinstance(item, LaneItem) or not isinstance(item.item, PublishOp):
                raise ValueError("an operation that is none")
            batches.setdefault((item.clock, item.tick), []).append(item.item)
            self._operations[item.item] = place
            self._place = max(self._place, place)
        leaf.outbox.batches = tuple(Batch(arc, number, tuple(ops)) for (arc, number), ops in batches.items())

    @property
    def feed(self) -> FeedId | None:
        """The root's feed as it was last told: ids that were granted belong to it."""
        text = self._facts.get("feed")
        return None if text is None else FeedId(bytes.fromhex(json.loads(text)))

    def save(self, leaf: Leaf, *, published: Iterable[Batch] = (), feed: FeedId | None = None) -> None:
        """Write what differs from what is on disk, in one transaction. Durable when it returns."""
        outbox, cache = leaf.outbox, leaf.caches[leaf.home]
        facts = _facts(leaf, cache)
        if feed is not None:
            facts["feed"] = json.dumps(feed.hex())
        fresh = {name: value for name, value in facts.items() if self._facts.get(name) != value}
        added = [(batch, op) for batch in published for op in batch.ops]
        kept = {op for batch in outbox.batches for op in batch.ops} if self._operations else set()
        gone = [op for op in self._operations if op not in kept]
        sent = leaf.sender.unreceived
        windows = {key: window for key, window in leaf.receiver.windows.items() if self._windows.get(key) != window}
        arrived, posted = self._messages - sent.keys(), [key for key in sent if key not in self._messages]
        newest = next(reversed(leaf.told), None)
        told = (
            []
            if newest is None or newest in self._told
            else [each for op, each in leaf.told.items() if op not in self._told]
        )
        if not (fresh or added or gone or windows or arrived or posted or told):
            return
        try:
            with self._db:
                self._db.executemany("insert or replace into facts values (?, ?)", list(fresh.items()))
                for batch, op in added:
                    self._place += 1
                    frame = encode_frame(LinkFrame(0, LaneItem(batch.arc, batch.number, 0, 0, op)))
                    self._db.execute("insert into operations values (?, ?)", (self._place, frame))
                    self._operations[op] = self._place
                self._db.executemany(
                    "delete from operations where place = ?", [(self._operations.pop(op),) for op in gone]
                )
                self._db.executemany("delete from messages where stream = ? and seq = ?", list(arrived))
                for key in posted:
                    frame = encode_frame(LinkFrame(0, sent[key]))
                    self._db.execute("insert into messages values (?, ?, ?)", (*key, frame))
                for (system, stream), window in windows.items():
                    sender = json.dumps([_system_json(system), stream])
                    row = (sender, window.mark, json.dumps(sorted(window.above)))
                    self._db.execute("insert or replace into streams values (?, ?, ?)", row)
                if told:
                    self._save_told(leaf, told)
        except sqlite3.Error as error:
            raise StorageFailed(
                f"{self.path} can't be written: {error}", next_step="Make room, or name another file."
            ) from error
        self._facts.update(fresh)
        self._messages = set(sent)
        self._windows.update(windows)
        if told:
            self._told = set(leaf.told)

    def close(self) -> None:
        self._db.close()


def _facts(leaf: Leaf, cache: Cache) -> dict[str, str]:
    """The small things, each as text."""
    outbox = leaf.outbox
    own = leaf.systems.get(leaf.home)
    facts: dict[str, Any] = {"format": FORMAT, "cur": cache.cur}
    facts["follows"] = [
        (_arc_json(arc), tick) for arc, tick in sorted(cache.follows.items()) if arc.system == own and tick
    ]
    if own is not None:
        facts["system"] = _system_json(own)
    if cache.clock is not None:
        facts["clock"] = _arc_json(cache.clock)
    if leaf.arcs.arc is not None:
        facts["arc"] = [_arc_json(leaf.arcs.arc), leaf.arcs.base, leaf.arcs.used]
    for name, kept in (("numbers", outbox.numbers), ("durable", outbox.durable), ("released", outbox.released)):
        facts[name] = [(_arc_json(arc), number) for arc, number in sorted(kept.items())]
    facts["seqs"] = sorted(leaf.sender.seqs.items())
    return {name: json.dumps(value) for name, value in facts.items()}


def _system_json(system: SystemId) -> list[Any]:
    return [system.root.hex(), list(system.path)]


def _arc_json(arc: Arc) -> list[Any]:
    return [_system_json(arc.system), arc.gen]


def _system(value: Any) -> SystemId:
    root, path = value
    return SystemId(bytes.fromhex(root), tuple(path))


def _arc(value: Any) -> Arc:
    system, gen = value
    return Arc(_system(system), gen)
