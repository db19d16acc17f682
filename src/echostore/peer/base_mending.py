"""Getting back what is lost of the epoch that a party stands on, by the way that newcomers get an epoch.

    look     what is missing? all of it is read, once, when a party comes onto the network
    mend     heads, tree, large states: what is here and sound stays, what is damaged goes, the rest is asked for;
             then the items are made anew from the base, and all blocks above it folded on top

Every blob is checked against its CID before it is kept, and the CIDs come from the name of the base in the FeedStore: nobody
can hand in another state. A kill in the middle leaves the blobs that came and the mark that some are missing.
`Bootstraps` decides when, and what to do when nobody has it any more.
"""

import contextlib
from typing import TYPE_CHECKING

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid
from echostore.peer.base_damage import notice, truncated
from echostore.peer.base_following import stand_on
from echostore.peer.control_floor import mend_floor
from echostore.peer.epoch_agreement import record_of
from echostore.peer.epoch_fetching import Fetch, Progress, fetch_heads, fetch_tree, keep_placements, survey
from echostore.peer.whole_epochs import check_base, check_live
from echostore.wire.base_epoch import BaseEpoch, BaseName
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.control_blobs import chunks_named
from echostore.wire.epochs import cut_pages, encode_epoch_record

if TYPE_CHECKING:
    from echostore.mesh.blob_exchange import Follow
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime
    from echostore.store.blob_store import BlobStore


def look(party: "Party") -> None:
    """Notice blobs of the base and of the trees of live items that are gone; what follows from the items is made again."""
    with party.reading() as runtime:
        processor, blobs = runtime.processor, runtime.blobs
        if processor.base is None or processor.damage is not None or blobs is None or not truncated(processor):
            return
        base = processor.base
    seen = survey(base.name, blobs)
    with party.reading():
        if processor.base is not base or runtime.closed:
            return
        if blobs.broken:
            notice(processor, "blobs.db is damaged")
        with contextlib.suppress(Corrupt):  # noticed, and told by who asks for it
            check_base(runtime, seen)
            check_live(runtime)
            make_records(runtime)


def mend(party: "Party", name: BaseName, fetch: Fetch, progress: Progress = lambda done, total: None) -> None:
    """Fetch what is missing of the base, and stand on it again. The lock is taken for short looks and at the end."""
    runtime = party.runtime
    blobs = runtime.blobs
    assert blobs is not None
    with party.reading():
        if blobs.broken:
            blobs.renew()
    getting = anew(fetch, blobs)
    fetch_heads(blobs, name, getting)
    fetch_tree(blobs, name, getting, progress)
    base = BaseEpoch(name, blobs.get, runtime.processor.factory)
    keep_placements(base, blobs)
    with party.reading():
        stand_on(runtime, base)


def make_records(runtime: "PartyRuntime") -> list[Cid]:
    """Make the records again that are gone of the epochs around the base; returns those that have to come from others."""
    processor, blobs = runtime.processor, runtime.blobs
    if processor.base is None or blobs is None or not runtime.writable:
        return []
    chain = processor.membership.machine.epoch_tally(processor.child_key).chain
    before = {each.hash: each.genesis for each in chain}
    near = [each.genesis for each in chain if each.number >= processor.base.name.number - 1]
    named = [Cid(genesis.record) for genesis in near if genesis.record]
    blobs.drop_damaged(named)
    made = [
        encode_epoch_record(record_of(genesis, runtime.party, before.get(genesis.previous)))
        for genesis in near
        if genesis.record and not blobs.has(Cid(genesis.record))
    ]
    lost = set(blobs.missing(named))
    blobs.put_many({cid: data for data in made if (cid := cid_of(data, PROTOBUF)) in lost})
    return blobs.missing(named)


def mend_control(party: "Party", fetch: Fetch) -> None:
    """Have what newcomers are given where control feeds begin later: made here, else fetched."""
    with party.reading() as runtime:
        blobs = runtime.blobs
        wanted = None if blobs is None else mend_floor(runtime.processor, blobs)
    if wanted is not None and blobs is not None:
        anew(fetch, blobs)([wanted], chunks_named)


def mend_beside(party: "Party", fetch: Fetch) -> None:
    """Records and cuts of the epochs around the base: the way back from it, and where the next gc may begin."""
    with party.reading() as runtime:
        processor, blobs = runtime.processor, runtime.blobs
        chain = processor.membership.machine.epoch_tally(processor.child_key).chain
    if processor.base is None or blobs is None:
        return
    near = [each.genesis for each in chain if each.number >= processor.base.name.number - 1]
    getting = anew(fetch, blobs)
    getting([Cid(cid) for genesis in near for cid in (genesis.record, genesis.cut) if cid])
    getting([page for genesis in near if genesis.cut for page in cut_pages(blobs.get(Cid(genesis.cut)))])


def anew(fetch: Fetch, blobs: "BlobStore") -> Fetch:
    """A `Fetch` that also gets what is here and is not what its CID says."""

    def getting(cids: list[Cid], follow: "Follow | None" = None) -> None:
        def following(cid: Cid, data: bytes) -> list[Cid]:
            assert follow is not None
            below = list(follow(cid, data))
            blobs.drop_damaged(below)
            return below

        blobs.drop_damaged(cids)
        fetch(cids, None if follow is None else following)

    return getting
