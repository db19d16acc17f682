"""Epochs below where this peer's control feeds begin: found by their records, of which each names the one before.

    chain as control tells it        4 ◄── 5 ◄── 6          their geneses are here
    records           1 ◄── 2 ◄── 3 ◄┘                      number, snapshot, the record before: small blobs

Members attested the record of epoch 4 with its genesis, and with it all records below. So what is found that way is what the
party agreed on, whoever gives it. `epoch gc` keeps the records of the last epochs; who lacks them asks for them. A snapshot
that was fetched can be read as its moment. Who the members were then was said by control messages that are gone: nobody is told.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NoReturn

from echostore.kernel.errors import Compacted, Corrupt, NotFound
from echostore.kernel.ids import Cid, feed_id
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.kernel.order import CONTROL
from echostore.kernel.party.epoch_chain import Epoch
from echostore.kernel.timeframe import Position, Timeframe
from echostore.peer.asking_past import EpochNotHere
from echostore.peer.control_standing import fold_whole
from echostore.peer.history import PastProcessor
from echostore.peer.party import Party
from echostore.peer.runtime import PartyRuntime
from echostore.peer.snapshots import Snapshot, open_snapshot
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.cids import cid_text
from echostore.wire.epochs import EpochRecord, read_epoch_record

if TYPE_CHECKING:
    from echostore.peer.members import Members

RECORDS_KEPT_MAX: Final = 1024
"""Records that `epoch gc` keeps, the newest: some 200 kB. Older ones are asked for."""

Get = Callable[[Cid], bytes]


def first_known(runtime: PartyRuntime) -> Epoch | None:
    """The first epoch that control tells of here, where that is not the party's first; None where all are known."""
    chain = _chain(runtime)
    return chain[0] if chain and chain[0].number > 1 else None


def _chain(runtime: PartyRuntime) -> list[Epoch]:
    fold_whole(runtime.processor)
    return runtime.processor.membership.machine.epoch_tally(runtime.processor.child_key).chain


def is_older(runtime: PartyRuntime, number: int) -> bool:
    """Whether an epoch lies below the first that control tells of here."""
    first = first_known(runtime)
    return first is not None and 0 < number < first.number


def record_of_older(runtime: PartyRuntime, number: int, get: Get) -> EpochRecord:
    """The record of an epoch below the first that control tells of. `get` gives a blob, or raises NotFound."""
    first = first_known(runtime)
    assert first is not None, number
    assert 0 < number < first.number, number
    at, cid = first.number, Cid(first.genesis.record)
    while True:
        record = read_epoch_record(get(cid))
        if record.party != runtime.party or record.number != at:
            raise Corrupt(f"the record of epoch {at} is that of another one")
        if at == number:
            return record
        if record.previous_record is None:
            raise Corrupt(f"the record of epoch {at} does not name the one before")
        at, cid = at - 1, record.previous_record


def back_to(number: int) -> Callable[[Cid, bytes], list[Cid]]:
    """What a record leads to, for who fetches all of them down to an epoch."""

    def follow(cid: Cid, data: bytes) -> list[Cid]:
        record = read_epoch_record(data)
        before = record.previous_record
        return [before] if before is not None and record.number > number else []

    return follow


def kept_records(runtime: PartyRuntime) -> list[Cid]:
    """The newest records: of the epochs that control tells of, and of those below as far as they are here."""
    chain, blobs = _chain(runtime), runtime.blobs
    assert blobs is not None
    found = [Cid(epoch.genesis.record) for epoch in chain[-1 : -RECORDS_KEPT_MAX - 1 : -1]]
    cid = found[-1] if found else None
    while cid is not None and len(found) < RECORDS_KEPT_MAX:
        data = blobs.get_some([cid], BLOB_BYTES_MAX).get(cid)  # nothing where it is lost, or damaged
        cid = read_epoch_record(data).previous_record if data is not None else None
        found += [cid] if cid is not None else []
    return found


# reading one


def party_at_older(party: Party, number: int) -> Party | None:
    """The party at the moment of an epoch that ends below where control begins; EpochNotHere without its snapshot.

    None for an epoch whose moment control can be folded to, and for one that is not known.
    """
    live = party.runtime
    blobs = live.blobs
    epoch = next((each for each in _chain(live) if each.number == number), None)
    if blobs is None or not (is_older(live, number) if epoch is None else _ends_below(live, epoch)):
        return None
    try:
        snapshot = record_of_older(live, number, blobs.get).snapshot if epoch is None else epoch.genesis.snapshot
        base = BaseEpoch.of_snapshot(number, snapshot, blobs.get, live.processor.factory)
        base.reader.check()
    except NotFound:
        raise EpochNotHere(number) from None
    data = Timeframe.of((feed_id(each.feed_key), Position(each.seq, each.link)) for each in base.root.timeframe)
    processor = PastProcessor(live.processor, data, _control_begins(live), base=base)
    processor.open()
    past = PartyRuntime(processor, feeds=live.feeds, items=None, blobs=None, now_ms=live.now_ms, writable=False)
    return PartyOfSnapshot(party, past, number, snapshot)


def _ends_below(runtime: PartyRuntime, epoch: Epoch) -> bool:
    """Whether an epoch that control tells of is from before what it can be folded to."""
    ends = {entry.feed: entry.seq + 1 for entry in epoch.genesis.control_timeframe}
    feeds = runtime.processor.feeds_of(CONTROL)
    return any(held.base > ends.get(held.key, 0) for held in feeds.feeds() if held.kind == CONTROL)


def _control_begins(runtime: PartyRuntime) -> Timeframe:
    """The earliest moment of which control can be folded."""
    feeds, entries = runtime.processor.feeds_of(CONTROL), []
    for held in feeds.feeds():
        link = feeds.link_at(held.key, held.base - 1) if held.kind == CONTROL and held.base else None
        if link is not None:
            entries.append((feed_id(held.key), Position(held.base - 1, link)))
    return Timeframe.of(entries)


class PartyOfSnapshot(Party):
    """A party as a snapshot has it: its items, and nothing that only control messages could tell."""

    def __init__(self, party: Party, past: PartyRuntime, number: int, cid: Cid) -> None:
        super().__init__(party.peer, past, title=party._title, lock=party.lock)
        self._live, self._number, self._cid = party.runtime, number, cid

    def snapshot(self) -> Snapshot:
        with self.reading():
            return open_snapshot(self._live, cid_text(self._cid))

    @property
    def members(self) -> "Members":
        self._gone()

    def _gone(self) -> NoReturn:
        raise Compacted(
            f"who belonged to the party at epoch {self._number} was said by control messages that are gone here",
            next_step="Ask a member that kept its history.",
        )
