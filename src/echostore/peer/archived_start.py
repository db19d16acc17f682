"""A party in a file that begins at an epoch: what a peer writes that deleted its history, and how one starts from it.

    the file     evidence and control state   where control feeds are truncated
                 blobs of the epoch           the snapshot that the party stands on
                 blocks                       control from its beginning here on, data from the epoch's cut on

Who imports it does what a newcomer on the network does, with the file in the place of other peers: the control state is
believed by its evidence, the epoch by the control feeds, and every blob is checked.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from echostore.kernel.errors import Compacted, Corrupt, NotFound
from echostore.kernel.ids import Cid, FeedId, feed_id
from echostore.kernel.party.epoch_chain import Epoch, enough_to_join
from echostore.peer.bootstrap import bootstrap
from echostore.peer.control_floor import brings_on, fetch_floor, kept_blobs
from echostore.peer.control_floor import stand_on as stand_on_floor
from echostore.wire.cids import is_cid
from echostore.wire.control_state import EVIDENCE_KEY
from echostore.wire.generated import archive_pb2 as pb

if TYPE_CHECKING:
    from echostore.mesh.blob_exchange import Follow
    from echostore.peer.party import Party
    from echostore.store.feed_store import HeldFeed

_PUT_BLOBS: Final = 256


# writing


class Start:
    """Where a party that was truncated begins in a file."""

    def __init__(self, party: "Party") -> None:
        runtime = party.runtime
        base, blobs = runtime.processor.base, runtime.blobs
        if base is None or blobs is None:
            raise Compacted(
                "this peer holds the party from an epoch on, and not the epoch itself",
                next_step="Export it on another member.",
            )
        self._base, self._blobs = base, blobs
        self._control = kept_blobs(runtime.processor, blobs)
        evidence = runtime.feeds.about(EVIDENCE_KEY) if self._control else None
        self.number = base.name.number
        self.record = pb.ArchivedStart(genesis=base.name.genesis, evidence=evidence or b"")

    def blobs(self) -> Iterator[Cid]:
        """What has to be in the file; one may come more than once."""
        yield from self._control
        yield from self._base.names()

    def of(self, held: "HeldFeed") -> int:
        """From where on blocks of a feed are in the file."""
        feed: FeedId = feed_id(held.key)
        return max(held.base, self._base.length(feed) if held.kind == "data" else 0)


# reading


class Starting:
    """Starts a party from what a file has of it: control first, then the epoch, then what came after."""

    def __init__(self, party: "Party", start: pb.ArchivedStart) -> None:
        self._party, self._start = party, start
        self._staged: dict[Cid, bytes] = {}
        if start.evidence and not is_cid(start.evidence):
            raise Corrupt("the file is not an exported party: its evidence has no name")

    def keep(self, cid: Cid, data: bytes) -> None:
        """A blob of the file, which was checked against its CID."""
        self._staged[cid] = data
        if len(self._staged) >= _PUT_BLOBS:
            self._store()

    def control(self) -> None:
        """Before any control block is taken in: the control state, where there is one."""
        self._store()
        if not self._start.evidence:
            return
        with self._party.writing() as runtime:
            assert runtime.blobs is not None
            try:
                floor = fetch_floor(Cid(self._start.evidence), runtime.processor, runtime.blobs.get)
            except NotFound as error:
                raise Corrupt("the file lacks the control state that it begins at") from error
            if brings_on(runtime.processor, floor):
                runtime.flush()
                stand_on_floor(runtime.processor, floor, runtime.blobs)
                self._party.sync_port.control_begun()

    def epoch(self) -> None:
        """After all control blocks and before any of data: the epoch, if control says that it may be believed."""
        self._store()
        epoch = self._believed()
        base = self._party.runtime.processor.base
        if base is None or base.name.number < epoch.number:
            bootstrap(self._party, epoch, self._fetch)

    def _believed(self) -> Epoch:
        with self._party.reading() as runtime:
            machine = runtime.processor.membership.machine
            chain = machine.epoch_tally(runtime.processor.child_key).chain
            found = next((epoch for epoch in chain if epoch.hash == self._start.genesis), None)
            if found is None or not (
                found.final or enough_to_join(found, machine.epoch_policy, machine.member_devices)
            ):
                raise Corrupt(
                    "the file begins at an epoch that its control feeds do not stand for",
                    unchanged="The party was not imported.",
                    next_step="Export it on another member.",
                )
            return found

    def _fetch(self, cids: list[Cid], follow: "Follow | None" = None) -> None:
        blobs = self._party.runtime.blobs
        assert blobs is not None
        waiting = list(cids)
        while waiting:
            cid = waiting.pop()
            try:
                data = blobs.get(cid)
            except NotFound as error:
                raise Corrupt("the file lacks a blob of the epoch that it begins at") from error
            if follow is not None:
                waiting += follow(cid, data)

    def _store(self) -> None:
        blobs = self._party.runtime.blobs
        assert blobs is not None
        blobs.put_many({cid: self._staged[cid] for cid in blobs.missing(self._staged)})
        self._staged = {}
