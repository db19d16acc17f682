"""Epochs of a party: declaring one, and the chain that the control feeds give.

An epoch is a claim: "at this timeframe, under this admission, the state is this snapshot". Declaring one writes three
things: the blobs of the snapshot, the blobs of record and cut (`wire.epochs`), and a credential that names them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echostore.kernel.errors import Corrupt, NotFound, Refused
from echostore.kernel.ids import Cid, FeedId, feed_id
from echostore.kernel.order import CONTROL
from echostore.kernel.party.credentials import EpochGenesis, TimeframeEntry
from echostore.kernel.party.epoch_chain import Epoch, chain
from echostore.kernel.snapshot import StateRoot
from echostore.kernel.timeframe import Dependency
from echostore.wire.cids import PROTOBUF, cid_from_text, cid_of, cid_text, matches
from echostore.wire.epochs import EpochRecord, FeedCut, encode_cut, encode_epoch_record, read_epoch_record
from echostore.wire.snapshot import read_state_root

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime

_PUT_BLOBS = 256


@dataclass(frozen=True, slots=True)
class EpochView:
    """One epoch as people see it."""

    number: int
    cid: str
    hash: str
    declarer: str
    created_ms: int
    attested_by: int
    final: bool
    items: int | None
    """None where the state root is not here."""
    blocks: int
    """Blocks of data feeds that it holds."""
    rivals: int


class Epochs:
    """The epochs of one party."""

    def __init__(self, party: "Party") -> None:
        self._party = party

    def all(self) -> list[EpochView]:
        """The chain, by number from 1 on."""
        names = {member.identity: member.name for member in self._party.members.all()}
        return [self._view(epoch, names.get(epoch.declarer, "")) for epoch in self.chain()]

    def chain(self) -> list[Epoch]:
        with self._party.reading() as runtime:
            machine = runtime.processor.membership.machine
            members = {member.identity for member in machine.members if member.role}
            child = runtime.party if runtime.processor.parent is not None else None
            return chain([*machine.epochs, *machine.attests], members, child=child)

    def get(self, number: int) -> Epoch:
        found = [epoch for epoch in self.chain() if epoch.genesis.number == number]
        if not found:
            raise NotFound(f"the party has no epoch {number}", next_step="`echostore epoch list` shows its epochs.")
        return found[0]

    def record(self, epoch: Epoch) -> EpochRecord:
        return read_epoch_record(self._blob(Cid(epoch.genesis.record)))

    def create(self) -> EpochView:
        """Declare an epoch of the state as it is now."""
        with self._party.writing():
            snapshot = self._party.snapshot()
            return self._declare(snapshot.root, cid_from_text(snapshot.cid))

    def create_from(self, cid: Cid, blobs: "Iterator[tuple[Cid, bytes]]") -> EpochView:
        """Declare an epoch from a snapshot that a pipeline built, after this peer has recomputed it.

        Refused when this peer's own state at that timeframe is another, or it does not hold that history.
        """
        party = self._party
        with party.writing() as runtime:
            mine = self._recompute(runtime, cid)
            if mine != cid:
                raise Refused(
                    f"the pipeline's snapshot is {cid_text(cid)}, and this peer's own is {cid_text(mine)}",
                    next_step="Publish this home to the lake, run the pipeline again, and try again.",
                )
            assert runtime.blobs is not None
            staged: dict[Cid, bytes] = {}
            for each, data in blobs:
                if not matches(each, data):
                    raise Corrupt(f"the pipeline's blob {cid_text(each)} is not what its CID names")
                staged[each] = data
                if len(staged) >= _PUT_BLOBS:
                    runtime.blobs.put_many(staged)
                    staged = {}
            runtime.blobs.put_many(staged)
            return self._declare(read_state_root(self._blob(cid)), cid)

    def _recompute(self, runtime: "PartyRuntime", cid: Cid) -> Cid:
        """This peer's own snapshot; the pipeline's must be of the very same moment."""
        runtime.flush()
        return cid_from_text(self._party.snapshot().cid)

    def _declare(self, root: StateRoot, cid: Cid) -> EpochView:
        party = self._party
        runtime = party.runtime
        processor = runtime.processor
        known = self.chain()
        before = known[-1] if known else None
        if before is not None and before.genesis.snapshot == cid:
            raise Refused(f"nothing has changed since epoch {before.genesis.number}")
        blobs: dict[Cid, bytes] = {}
        created_ms = runtime.now_ms()
        record = EpochRecord(
            number=before.genesis.number + 1 if before else 1,
            party=runtime.party,
            snapshot=cid,
            previous_record=Cid(before.genesis.record) if before else None,
            previous_snapshot=before.genesis.snapshot if before else None,
            created_ms=created_ms,
            discard_before_ms=0,
        )
        data = encode_epoch_record(record)
        record_cid = cid_of(data, PROTOBUF)
        blobs[record_cid] = data
        cut = encode_cut(self._cuts(root), blobs.__setitem__)
        assert runtime.blobs is not None
        runtime.blobs.put_many(blobs)
        genesis = EpochGenesis(
            number=record.number,
            previous=before.hash if before else b"",
            snapshot=cid,
            record=record_cid,
            cut=cut,
            timeframe=tuple(TimeframeEntry(entry.feed_key, entry.seq, entry.link) for entry in root.timeframe),
            control_timeframe=self._control_timeframe(),
            admission_digest=root.admission_digest,
            encoding_version=root.encoding_version,
            models=tuple((each.model, each.version) for each in root.models),
            created_ms=created_ms,
            child=runtime.party if processor.parent is not None else None,
        )
        owner = party if processor.parent is None else party.peer.party(processor.parent.party)
        owner.members.issue_claim(genesis)
        return self.all()[-1]

    def _cuts(self, root: StateRoot) -> list[FeedCut]:
        """Where the epoch ends in each feed: data feeds as the state root says, control feeds as processed here."""
        processor = self._party.runtime.processor
        lengths: dict[FeedId, int] = {feed_id(entry.feed_key): entry.seq + 1 for entry in root.timeframe}
        found = []
        for feed, cursor in processor.orderer.cursors.items():
            length = cursor.length if cursor.kind == CONTROL else lengths.get(feed, 0)
            if not length:
                continue
            mark = processor.orderer.mark(feed, length - 1)
            asserted = cursor.asserted if length == cursor.length else self._asserted_at(feed, length)
            found.append(
                FeedCut(cursor.key, cursor.kind == CONTROL, length, mark.link, mark.depth, tuple(asserted.values()))
            )
        return found

    def _asserted_at(self, feed: FeedId, length: int) -> dict[FeedId, Dependency]:
        """What a feed had processed at an earlier length: of feeds with excluded blocks behind it, which end there."""
        found: dict[FeedId, Dependency] = {}
        for seq in range(length):
            envelope = self._party.runtime.processor.envelope(feed, seq)
            found.update((dependency.feed, dependency) for dependency in envelope.dependencies)
        return found

    def _control_timeframe(self) -> tuple[TimeframeEntry, ...]:
        processor = self._party.runtime.processor
        positions = processor.control_timeframe.entries.items()
        return tuple(TimeframeEntry(processor.feed_key(feed), at.seq, at.link) for feed, at in positions)

    def _view(self, epoch: Epoch, name: str) -> EpochView:
        genesis = epoch.genesis
        try:
            items: int | None = read_state_root(self._blob(genesis.snapshot)).item_count
        except NotFound:
            items = None
        return EpochView(
            number=genesis.number,
            cid=cid_text(genesis.snapshot),
            hash=epoch.hash.hex(),
            declarer=name or epoch.declarer.hex()[:8],
            created_ms=genesis.created_ms,
            attested_by=len(epoch.attested_by),
            final=epoch.final,
            items=items,
            blocks=sum(entry.seq + 1 for entry in genesis.timeframe),
            rivals=len(epoch.rivals),
        )

    def _blob(self, cid: Cid) -> bytes:
        blobs = self._party.runtime.blobs
        if blobs is None:
            raise NotFound("this party keeps no blobs here")
        return blobs.get(cid)
