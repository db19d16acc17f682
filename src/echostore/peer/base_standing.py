"""How a processor comes to stand on a base epoch: at opening, when an epoch becomes final, and when one was fetched.

    stand_on_stored   opening: the base that the FeedStore names
    take_checkpoint   opening: go on from the ItemStore, if it belongs to that base and to these feeds
    start_from_base   opening without a checkpoint: the items of the base, cursors at its cut
    adopt             a peer that has processed all of an epoch: from now on everything is folded from it
    install           a peer that has none of it: the epoch's items take the place of the history

The base is named durably first, in the FeedStore. Items that do not belong to it are made anew at the next opening, so
a crash between the two costs time and nothing else.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from echostore.kernel.errors import Corrupt, NotFound
from echostore.kernel.ids import Cid, ItemId, item_from_text
from echostore.kernel.order import DATA, FeedCursor
from echostore.peer.base_install import base_cursors, install_items
from echostore.peer.checkpoints import load_cursors, load_moves
from echostore.peer.model_registry import COMMUTING_MARK, commuting_mark
from echostore.peer.refolding import LACKING, refold
from echostore.wire.base_epoch import BASE_KEY, BaseEpoch, load_base
from echostore.wire.snapshot import OldEncoding

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor


def stand_on_stored(processor: "PartyProcessor") -> None:
    """Take up the base that the FeedStore names; one that is lost or of an older encoding is left where it can be.

    It can where the history is whole: everything is folded from that, and the next final epoch is stood on again.
    """
    if processor.base is None:
        try:
            processor.base = load_base(processor.feeds.about, _blob_of(processor), processor.factory)
        except (OldEncoding, NotFound, Corrupt) as error:
            if any(held.base for held in processor.feeds.feeds() if held.kind == DATA):
                if isinstance(error, OldEncoding):
                    raise  # what lies below is nowhere else
                raise Corrupt(
                    f"the snapshot of the epoch that the party stands on is lost: {error.what}",
                    next_step="Restore blobs.db of the party from a backup, or forget the party here and join it again.",
                ) from error
    if processor.base is not None:
        processor.orderer.set_base(processor.order_cuts())


def _blob_of(processor: "PartyProcessor") -> Callable[[Cid], bytes]:
    blobs = processor.blobs

    def missing(cid: Cid) -> bytes:
        raise NotFound("there is no blobs.db")

    return blobs.get if blobs is not None else missing


def take_checkpoint(processor: "PartyProcessor") -> bool:
    """Go on from the ItemStore; False when it was of no use, and is empty now."""
    items = processor.items
    if items is None:
        return False
    checkpoint = load_cursors(items)
    mark = processor.base.name.genesis if processor.base is not None else b""
    fresh = checkpoint.admission == processor.admission.digest and checkpoint.base == mark
    if fresh and (checkpoint.cursors or not mark) and _fits(processor, checkpoint.cursors):
        for cursor in checkpoint.cursors:
            processor.follow(cursor)
        processor.state.wanted.update(
            item_from_text(reject.detail) for reject in processor.rejects() if reject.reason in LACKING
        )
        return True
    if checkpoint.cursors:
        processor.counters.rebuilds += 1
    if not items.database.writable:
        processor.items = None  # a reader beside the writer can't renew it, and does without
    elif checkpoint.cursors:
        items.clear()
    return False


def start_from_base(processor: "PartyProcessor") -> None:
    """Items and cursors as the base has them."""
    base = processor.base
    if base is None:
        return
    if processor.items is not None:
        install_items(processor.items, base, processor.factory, frozenset(), _about(processor))
        processor.state.start_over(load_moves(processor.items))
    else:
        processor.state.start_over(base.moves)
        processor.state.restore(base.records(), ())
    for cursor in base_cursors(base):
        known = processor.orderer.cursors.get(cursor.id)
        if known is None:
            processor.follow(cursor)
        else:
            put_back(known, cursor)
    processor.orderer.restart()


def adopt(processor: "PartyProcessor", base: BaseEpoch, differing: Iterable[ItemId] = ()) -> None:
    """From now on, fold from an epoch all of whose blocks were processed here.

    Items that were written above its cut are folded again from it: a rule that came late may have changed what was
    folded below. `differing` are further items that the epoch has in another form, because it left something out.
    """
    assert covers(processor, base), "an epoch of which blocks are missing is installed, not adopted"
    tail = _touched_above(processor, base)
    processor.feeds.set_about({BASE_KEY: base.name.encode()})
    processor.base = base
    processor.orderer.set_base(processor.order_cuts())
    todo = tail | set(differing)
    if todo:
        refold(processor, todo)
    processor.advance(list(processor.orderer.cursors))


def install(processor: "PartyProcessor", base: BaseEpoch, declared: frozenset[str] = frozenset()) -> None:
    """Put an epoch's items in the place of whatever was folded here so far, and go on from its cut."""
    items = processor.items
    assert items is not None, "an epoch is installed into an ItemStore"
    _rebase_feeds(processor, base)
    processor.base = base
    processor.orderer.set_base(processor.order_cuts())
    before = {*items.scan("1", ()), *processor.state.dirty}  # what the epoch left out is gone for live queries too
    install_items(items, base, processor.factory, declared, _about(processor))
    processor.touches, processor.new_rejects = [], []
    for cursor in processor.orderer.cursors.values():
        if cursor.kind == DATA:
            put_back(cursor, FeedCursor(cursor.key, DATA))
    processor.state.start_over(load_moves(items))
    for cursor in base_cursors(base):
        known = processor.orderer.cursors.get(cursor.id)
        if known is None:
            processor.follow(cursor)
        else:
            put_back(known, cursor)
            known.held = max(known.length, processor.held_length(DATA, known.key))
    processor.state.changed.update(before, items.scan("1", ()))
    processor.reader.forget()
    processor.orderer.restart()
    # The next own message names all of the base as processed.
    processor.advanced.update(feed for feed, cursor in processor.orderer.cursors.items() if cursor.length)
    processor.advance(list(processor.orderer.cursors))


def covers(processor: "PartyProcessor", base: BaseEpoch) -> bool:
    """Whether every block inside an epoch was processed here, on the same branch."""
    for feed, cut in base.cuts.items():
        cursor = processor.orderer.cursors.get(feed)
        if cursor is None or cursor.length < cut.length:
            return False
        begun = (processor.parent or processor).control_floor.get(feed)
        if begun is not None and cut.length < begun.length:
            continue  # what control was there is agreed on, whoever still has it
        try:
            if processor.orderer.mark(feed, cut.length - 1).link != cut.link:
                return False
        except NotFound:
            return False  # it ends inside what was truncated: a rival of the base
    return True


def _about(processor: "PartyProcessor") -> dict[str, bytes]:
    return {"admission": processor.admission.digest, COMMUTING_MARK: commuting_mark(processor.factory)}


def _fits(processor: "PartyProcessor", cursors: Iterable[FeedCursor]) -> bool:
    """Whether the feeds still hold what the checkpoint was made from."""
    feeds = processor.feeds
    for cursor in cursors:
        if not feeds.has_feed(cursor.key) or feeds.length(cursor.key) < cursor.length:
            return False
        if cursor.length and feeds.link_at(cursor.key, cursor.length - 1) != cursor.link:
            return False
    return True


def _touched_above(processor: "PartyProcessor", base: BaseEpoch) -> set[ItemId]:
    """Items that blocks above the cut write."""
    found: set[ItemId] = set()
    for feed, cursor in processor.orderer.cursors.items():
        if cursor.kind == DATA:
            for seq in range(base.length(feed), cursor.length):
                found.update(operation.item for operation in processor.operations_at(feed, seq))
    return found


def put_back(cursor: FeedCursor, to: FeedCursor) -> None:
    """Let a cursor that others hold stand elsewhere."""
    cursor.length, cursor.link, cursor.depth, cursor.asserted = to.length, to.link, to.depth, to.asserted
    cursor.ended, cursor.waits_for, cursor.checked = None, None, 0
    cursor.marks_start, cursor.marks = 0, []


def _rebase_feeds(processor: "PartyProcessor", base: BaseEpoch) -> None:
    """Let the data feeds begin at the cut, where they do not reach it, and name the base: one durable step."""
    feeds = processor.feeds
    cuts = [cut for cut in base.cuts.values() if not cut.control]
    feeds.begin_at({cut.feed: (cut.length, cut.link) for cut in cuts}, {BASE_KEY: base.name.encode()})
