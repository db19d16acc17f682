"""What a root of thin clients must not forget, in the party's own feeds.db.

    thin/<root>/ticks              how many ticks are reserved
    thin/<root>/system/<path>      a system: whose it is, the question it was named by, its arcs and their releases
    thin/<root>/batch/<path>.<gen> how many batches of an arc are in the feed, and what of them was rejected
    thin/<root>/op/<seq>           whose operations the block `seq` of the feed holds, and where in it

An account row is written in the same commit as the blocks of its batch: whatever a crash leaves, a batch is in the feed
exactly if its row says so. Ticks are reserved in advance, so that most ticks write nothing, and a restart goes on
behind the reserved ones: no tick ever names two states. A root that writes another feed has another name and begins
anew (`root_system`).

A row of operations is written with its block too, and kept for as long as the block may still be excluded: until the
party stands on an epoch that holds it. What is told as excluded leaves the row in the commit that keeps the rejection.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from echostore.kernel.coherence.arcs import NONCES_MAX, ArcLedger, Granted
from echostore.kernel.coherence.batches import REJECTIONS_MAX, Batches
from echostore.kernel.coherence.messages import Arc, IssuedId, RejectOp, SystemId
from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import PartyKey
from echostore.store.feed_store import FeedStore
from echostore.wire.coherence_names import REASONS

if TYPE_CHECKING:
    from echostore.peer.party import Party

TICKS_RESERVED = 4096
"""Ticks for one durable write."""

ROOT_TAG = b"echostore:thin-root\0"


class _SystemRow(msgspec.Struct):
    nonce: str | None
    asked: str | None
    arcs: list[tuple[int, int, int | None]]
    """Gen, base, release."""
    owner: tuple[str, ...] | None = None
    """The key, in hex. In homes of earlier versions the capability follows, which counts for nothing."""


class _AccountRow(msgspec.Struct):
    applied: int
    rejected: list[tuple[int, int, int, str]]
    """Tick, gen and number of the operation, reason."""
    objects: list[str] = []
    """The items of those, in hex, where they are known; as many or none."""


class PlacedOp(NamedTuple):
    """An operation of a leaf in a block: its number in its arc, and the positions from `start` up to `end`."""

    n: int
    start: int
    end: int
    inserts: bool = False
    """Whether it puts something into a text or a list."""


class _OpsRow(msgspec.Struct):
    arc: tuple[str, int]
    ops: list[PlacedOp]


def root_system(party: PartyKey, writer: bytes) -> SystemId:
    """The name of a root: a party, and the key it writes with."""
    return SystemId(hashlib.sha256(ROOT_TAG + party + writer).digest()[:16])


def ever_served(party: "Party") -> bool:
    """Whether thin clients have been named here, by whichever root."""
    with party.reading() as runtime:
        return any("/system/" in name for name in runtime.feeds.about_under("thin/"))


class CoherenceLedger:
    """The rows of one root."""

    def __init__(self, feeds: FeedStore, system: SystemId) -> None:
        self._feeds = feeds
        self._system = system
        self._prefix = f"thin/{system.root.hex()}/"

    # ticks

    def start(self) -> tuple[int, int]:
        """A tick that was never told, and the first after it that is not reserved, on disk when this returns."""
        kept = self._feeds.about(self._prefix + "ticks")
        tick = 0 if kept is None else int.from_bytes(kept, "big")
        return tick, self.extend(tick)

    def extend(self, tick: int) -> int:
        """Reserve more: the first tick after `tick` that is not reserved."""
        end = tick + TICKS_RESERVED
        self._feeds.set_about({self._prefix + "ticks": end.to_bytes(8, "big")})
        return end

    # systems and batches

    def load(self) -> Batches:
        """The account as it is on disk. The tick a root starts at includes all that is in the feed."""
        arcs = ArcLedger(self._system)
        batches = Batches(arcs)
        try:
            named = self._load_systems(arcs)
            for name, data in self._feeds.about_under(self._prefix + "batch/").items():
                path, _, gen = name.rpartition("/")[2].rpartition(".")
                arc = Arc(self._named(path), int(gen))
                row = msgspec.json.decode(data, type=_AccountRow)
                batches.applied[arc] = batches.exposed[arc] = row.applied
                if row.rejected:
                    objects = [bytes.fromhex(each) for each in row.objects] or [b""] * len(row.rejected)
                    batches.rejections[arc] = tuple(
                        (tick, RejectOp(IssuedId(Arc(arc.system, of), n), REASONS[reason], object))
                        for (tick, of, n, reason), object in zip(row.rejected, objects, strict=True)
                    )
        except (msgspec.MsgspecError, ValueError, KeyError) as error:
            raise Corrupt("The account of thin clients in feeds.db is damaged.") from error
        for number in sorted(named)[-NONCES_MAX:]:
            nonce, system = named[number]
            arcs.nonces[nonce] = system
        return batches

    def _load_systems(self, arcs: ArcLedger) -> dict[int, tuple[int, SystemId]]:
        named = {}
        for name, data in self._feeds.about_under(self._prefix + "system/").items():
            system = self._named(name.rpartition("/")[2])
            row = msgspec.json.decode(data, type=_SystemRow)
            arcs.gens[system] = max((gen for gen, _, _ in row.arcs), default=0)
            for gen, base, release in row.arcs:
                arcs.granted[Arc(system, gen)] = Granted(base, release)
            arcs.arcs_count += len(row.arcs)
            arcs.systems_count = max(arcs.systems_count, system.path[-1])
            if row.owner is not None:
                arcs.owners[system] = bytes.fromhex(row.owner[0])
            if row.asked is not None:
                arcs.asked[system] = int(row.asked)
            if row.nonce is not None:
                named[system.path[-1]] = (int(row.nonce), system)
        return named

    def _named(self, path: str) -> SystemId:
        return SystemId(self._system.root, tuple(int(each) for each in path.split(".")))

    def save_systems(self, systems: Iterable[SystemId], arcs: ArcLedger) -> None:
        """What was named, granted or released is on disk when this returns, and may be told."""
        asked_by = {system: nonce for nonce, system in arcs.nonces.items()}
        rows = {}
        for system in systems:
            nonce, asked = asked_by.get(system), arcs.asked.get(system)
            granted = [(arc.gen, each.base, each.release) for arc, each in arcs.of_system(system)]
            known = arcs.owners.get(system)
            row = _SystemRow(
                None if nonce is None else str(nonce),
                None if asked is None else str(asked),
                granted,
                None if known is None else (known.hex(),),
            )
            rows[f"{self._prefix}system/{_path(system)}"] = msgspec.json.encode(row)
        self._feeds.set_about(rows)

    def account_row(self, arc: Arc, batch: int, rejections: Iterable[tuple[int, RejectOp]]) -> tuple[str, bytes]:
        """The row that says how far an arc is applied, for the commit that holds the batch."""
        last = list(rejections)[-REJECTIONS_MAX:]
        rejected = [(tick, told.op.arc.gen, told.op.n, told.reason.value) for tick, told in last]
        objects = [told.object.hex() for _, told in last] if any(told.object for _, told in last) else []
        row = _AccountRow(batch, rejected, objects)
        return f"{self._prefix}batch/{_path(arc.system)}.{arc.gen}", msgspec.json.encode(row)

    # operations that may be excluded yet

    def ops_row(self, seq: int, arc: Arc, ops: Iterable[PlacedOp]) -> tuple[str, bytes]:
        """The row that says whose operations a block holds, for the commit that holds the block."""
        return self._ops_name(seq), msgspec.json.encode(_OpsRow((_path(arc.system), arc.gen), list(ops)))

    def ops_of(self, seq: int) -> tuple[Arc, list[PlacedOp]] | None:
        """Whose operations a block holds, as far as they were not told as excluded; None: nobody's."""
        data = self._feeds.about(self._ops_name(seq))
        if data is None:
            return None
        try:
            row = msgspec.json.decode(data, type=_OpsRow)
            return Arc(self._named(row.arc[0]), row.arc[1]), row.ops
        except (msgspec.MsgspecError, ValueError) as error:
            raise Corrupt("The account of thin clients in feeds.db is damaged.") from error

    def keep_excluded(
        self,
        batches: Batches,
        told: Mapping[Arc, Iterable[RejectOp]],
        tick: int,
        left: Mapping[int, tuple[Arc, list[PlacedOp]]],
    ) -> None:
        """Operations have no effect from a tick on: their systems' accounts say so, and their blocks' rows no more.

        `left` is what is still in force of each block. All of it is on disk when this returns, or nothing.
        """
        rows: dict[str, bytes | None] = {}
        for arc, rejected in told.items():
            earlier = batches.rejections.get(arc, ())
            account = [*earlier, *((tick, each) for each in rejected)]
            rows.update([self.account_row(arc, batches.applied.get(arc, 0), account)])
        for seq, (arc, ops) in left.items():
            name, row = self.ops_row(seq, arc, ops)
            rows[name] = row if ops else None
        self._feeds.set_about(rows)

    def forget_ops(self, seq: int) -> None:
        """Blocks below `seq` can't be excluded any more."""
        kept = self._feeds.about_under(f"{self._prefix}op/")
        self._feeds.set_about({name: None for name in kept if name < self._ops_name(seq)})

    def _ops_name(self, seq: int) -> str:
        return f"{self._prefix}op/{seq:016x}"


def _path(system: SystemId) -> str:
    return ".".join(map(str, system.path))
