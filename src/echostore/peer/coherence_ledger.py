"""What a root of thin clients must not forget, in the party's own feeds.db.

    thin/<root>/ticks              how many ticks are reserved
    thin/<root>/system/<path>      a system: whose it is, the question it was named by, its arcs and their releases
    thin/<root>/batch/<path>.<gen> how many batches of an arc are in the feed, and what of them was rejected

An account row is written in the same commit as the blocks of its batch: whatever a crash leaves, a batch is in the feed
exactly if its row says so. Ticks are reserved in advance, so that most ticks write nothing, and a restart goes on
behind the reserved ones: no tick ever names two states. A root that writes another feed has another name and begins
anew (`root_system`).
"""

import hashlib
from collections.abc import Iterable

import msgspec

from echostore.kernel.coherence.arcs import NONCES_MAX, ArcLedger, Granted
from echostore.kernel.coherence.batches import REJECTIONS_MAX, Batches
from echostore.kernel.coherence.messages import Arc, IssuedId, RejectOp, RejectReason, SystemId
from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import PartyKey
from echostore.kernel.reasons import Reason
from echostore.store.feed_store import FeedStore
from echostore.wire.system_owners import Owner, SystemOwners

TICKS_RESERVED = 4096
"""Ticks for one durable write."""

ROOT_TAG = b"echostore:thin-root\0"

_REASONS: dict[str, RejectReason | Reason] = {
    **{each.value: each for each in Reason},
    **{each.value: each for each in RejectReason},
}


class _SystemRow(msgspec.Struct):
    nonce: str | None
    asked: str | None
    arcs: list[tuple[int, int, int | None]]
    """Gen, base, release."""
    owner: tuple[str, str] | None = None
    """Key and capability, in hex."""


class _AccountRow(msgspec.Struct):
    applied: int
    rejected: list[tuple[int, int, int, str]]
    """Tick, gen and number of the operation, reason."""


def root_system(party: PartyKey, writer: bytes) -> SystemId:
    """The name of a root: a party, and the key it writes with."""
    return SystemId(hashlib.sha256(ROOT_TAG + party + writer).digest()[:16])


class CoherenceLedger:
    """The rows of one root."""

    def __init__(self, feeds: FeedStore, system: SystemId) -> None:
        self._feeds = feeds
        self._system = system
        self._prefix = f"thin/{system.root.hex()}/"
        self.owners = SystemOwners()

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
                    batches.rejections[arc] = tuple(
                        (tick, RejectOp(IssuedId(Arc(arc.system, of), n), _REASONS[reason]))
                        for tick, of, n, reason in row.rejected
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
                self.owners.note(system, Owner(bytes.fromhex(row.owner[0]), bytes.fromhex(row.owner[1])))
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
            known = self.owners.owners.get(system)
            row = _SystemRow(
                None if nonce is None else str(nonce),
                None if asked is None else str(asked),
                granted,
                None if known is None else (known.key.hex(), known.capability.hex()),
            )
            rows[f"{self._prefix}system/{_path(system)}"] = msgspec.json.encode(row)
        self._feeds.set_about(rows)

    def account_row(self, arc: Arc, batch: int, rejections: Iterable[tuple[int, RejectOp]]) -> tuple[str, bytes]:
        """The row that says how far an arc is applied, for the commit that holds the batch."""
        rejected = [(tick, told.op.arc.gen, told.op.n, told.reason.value) for tick, told in rejections]
        row = _AccountRow(batch, rejected[-REJECTIONS_MAX:])
        return f"{self._prefix}batch/{_path(arc.system)}.{arc.gen}", msgspec.json.encode(row)


def _path(system: SystemId) -> str:
    return ".".join(map(str, system.path))
