"""How a processor comes to stand on a base epoch: at opening, when an epoch becomes final, and when one was fetched.

    stand_on_stored   opening: the base that the FeedStore names
    take_checkpoint   opening: go on from the ItemStore, if it belongs to that base and to these feeds
    start_from_base   opening without a checkpoint: the items of the base, cursors at its cut
    adopt             a peer that has processed all of an epoch: from now on everything is folded from it
    install           a peer that has none of it: the epoch's items take the place of the history
    forsake           a peer that began from an epoch which was not final, and whose blocks count otherwise by now

The base is named durably first, in the FeedStore. Items that do not belong to it are made anew at the next opening, so
a crash between the two costs time and nothing else.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from echostore.kernel.errors import Corrupt, DiskFull, NotFound
from echostore.kernel.ids import NO_LINK, ItemId, item_from_text
from echostore.kernel.items.operations import ItemOperation
from echostore.kernel.order import DATA, FeedCursor
from echostore.peer.base_damage import BaseDamage, is_marked, mark, missing, truncated, unmark, watched_blobs, writes
from echostore.peer.base_install import base_cursors, install_items
from echostore.peer.checkpoints import RULES, RULES_MARK, load_cursors, load_moves
from echostore.peer.epoch_fetching import holes
from echostore.peer.model_registry import COMMUTING_MARK, commuting_mark
from echostore.peer.refolding import LACKING, refold
from echostore.peer.touched import UNREAD_MARK
from echostore.wire.base_epoch import BASE_KEY, BaseEpoch, BaseName, load_base
from echostore.wire.epochs import FeedCut
from echostore.wire.snapshot import OldEncoding

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor
    from echostore.store.feed_store import FeedStore


def stand_on_stored(processor: "PartyProcessor", *, given_up: str = "") -> None:
    """Take up the base that the FeedStore names; one that is lost or of an older encoding is left where it can be.

    It can where the history is whole: everything is folded from that, and the next final epoch is stood on again. Else the
    party waits for it (`processor.damage`). `given_up` says why the base is not even tried.
    """
    if processor.base is None:
        try:
            if given_up:
                raise Corrupt(given_up)
            base = load_base(processor.feeds.about, watched_blobs(processor), processor.factory)
            processor.base = base
            if base is not None and is_marked(processor):
                _look_again(processor, base)
        except (OldEncoding, NotFound, Corrupt) as error:
            processor.base = None
            if truncated(processor):
                if isinstance(error, OldEncoding):
                    raise  # what lies below is nowhere else
                name = BaseName.decode(processor.feeds.about(BASE_KEY) or b"")
                processor.damage = BaseDamage.of(processor, name, error.what, closed=True)
            mark(processor)
    if processor.base is not None:
        processor.orderer.set_base(processor.order_cuts())


def _look_again(processor: "PartyProcessor", base: BaseEpoch) -> None:
    """Blobs of the base were found lost before. Where they are back, the items are made anew from them."""
    lost = holes(base.name, processor.blobs)
    if lost and not truncated(processor):
        raise Corrupt(missing(lost))  # the history gives the same
    if lost:
        processor.damage = BaseDamage.of(processor, base.name, missing(lost), closed=False)
    elif not writes(processor):
        processor.items = None
    elif processor.items is not None:
        processor.items.clear()


def take_checkpoint(processor: "PartyProcessor") -> bool:
    """Go on from the ItemStore; False when it was of no use, and is empty now."""
    items = processor.items
    if items is None:
        return False
    checkpoint = load_cursors(items)
    mark = processor.base.name.genesis if processor.base is not None else b""
    now = (processor.admission.digest, mark, RULES)
    fresh = (checkpoint.admission, checkpoint.base, checkpoint.rules) == now
    if fresh and (checkpoint.cursors or not mark) and _fits(processor, checkpoint.cursors):
        # This reads items: the base is stood on by now, so that a lost page is noticed.
        processor.state.start_over(load_moves(items))
        for cursor in checkpoint.cursors:
            processor.follow(cursor)
        if items.about(UNREAD_MARK):
            processor.touched.unread = processor.base
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
        if processor.damage is None and is_marked(processor):
            unmark(processor)  # all of it was read
        processor.state.start_over(load_moves(processor.items))
    else:
        processor.state.start_over(base.moves)
        processor.state.restore(base.records(), ())
    processor.touched.unread = base
    for cursor in base_cursors(base):
        known = processor.orderer.cursors.get(cursor.id)
        if known is None:
            processor.follow(cursor)
        else:
            put_back(known, cursor)
    processor.orderer.restart()


def adopt(
    processor: "PartyProcessor", base: BaseEpoch, tail: Iterable[ItemOperation], differing: Iterable[ItemId] = ()
) -> None:
    """From now on, fold from an epoch all of whose blocks were processed here.

    Items that were written above its cut (`tail`, see `written_above`) are folded again from it: a rule that came late
    may have changed what was folded below. `differing` are further items that the epoch has in another form, because it
    left something out or a view above its cut had taken the inception key of one below.
    """
    assert covers(processor, base), "an epoch of which blocks are missing is installed, not adopted"
    processor.feeds.set_about({BASE_KEY: base.name.encode()})
    _take(processor, base)
    todo = {operation.item for operation in tail} | set(differing)
    if todo:
        refold(processor, todo)
    processor.advance(list(processor.orderer.cursors))


def install(
    processor: "PartyProcessor", base: BaseEpoch, declared: frozenset[str] = frozenset(), *, anew: bool = False
) -> None:
    """Put an epoch's items in the place of whatever was folded here so far, and go on from its cut.

    `anew`: feeds that begin later than it ends go back to its cut, and their blocks are asked for again.
    """
    items = processor.items
    assert items is not None, "an epoch is installed into an ItemStore"
    former = processor.base
    _rebase_feeds(processor, base, anew=anew)
    _take(processor, base)
    before = {*items.scan("1", ()), *processor.state.dirty}  # what the epoch left out is gone for live queries too
    try:
        install_items(items, base, processor.factory, declared, _about(processor))
    except DiskFull:
        processor.base = former  # the state is still folded from that one; who installs tries again
        processor.orderer.set_base(processor.order_cuts())
        raise
    _begin_again(processor)
    processor.touched.unread = base
    processor.state.start_over(load_moves(items))
    for cursor in base_cursors(base):
        known = processor.orderer.cursors.get(cursor.id)
        if known is None:
            processor.follow(cursor)
        else:
            put_back(known, cursor)
            known.held = max(known.length, processor.held_length(DATA, known.key))
    processor.follow_data()
    processor.state.changed.update(before, items.scan("1", ()))
    processor.reader.forget()
    processor.orderer.restart()
    # The next own message names all of the base as processed.
    processor.advanced.update(feed for feed, cursor in processor.orderer.cursors.items() if cursor.length)
    processor.advance(list(processor.orderer.cursors))


def forsake(processor: "PartyProcessor") -> None:
    """Stand on no epoch any more: everything is folded from the first message on.

    Feeds of others that begin at its cut begin at their first block again, and have none: they are asked for.
    """
    items, feeds = processor.items, processor.feeds
    assert items is not None, "who stands on an epoch that is not final has its items"
    begun = [held.key for held in feeds.feeds() if held.kind == DATA and held.base and not held.own]
    feeds.begin_at(dict.fromkeys(begun, (0, NO_LINK)), {BASE_KEY: b""}, back=True)
    processor.base = None
    processor.orderer.set_base(processor.order_cuts())
    before = {*items.scan("1", ()), *processor.state.dirty}
    items.clear()
    _begin_again(processor)
    processor.touched.unread = None
    processor.moved.update(cursor.id for cursor in processor.orderer.cursors.values() if cursor.kind == DATA)
    processor.state.start_over(())
    processor.state.changed.update(before)
    processor.reader.forget()
    processor.orderer.restart()
    processor.advanced.update(processor.orderer.cursors)
    processor.advance(list(processor.orderer.cursors))


def _begin_again(processor: "PartyProcessor") -> None:
    """Nothing of the data feeds counts as processed any more."""
    processor.touches, processor.new_rejects, processor.gone_rejects = [], [], set()
    processor.views.forget()
    for cursor in processor.orderer.cursors.values():
        if cursor.kind == DATA:
            put_back(cursor, FeedCursor(cursor.key, DATA))
            cursor.held = processor.held_length(DATA, cursor.key)


def _take(processor: "PartyProcessor", base: BaseEpoch) -> None:
    processor.base = base
    base.read_with(watched_blobs(processor))
    processor.orderer.set_base(processor.order_cuts())


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
    commuting = commuting_mark(processor.factory)
    return {"admission": processor.admission.digest, COMMUTING_MARK: commuting, RULES_MARK: RULES}


def _fits(processor: "PartyProcessor", cursors: Iterable[FeedCursor]) -> bool:
    """Whether the feeds still hold what the checkpoint was made from."""
    feeds = processor.feeds
    for cursor in cursors:
        if not feeds.has_feed(cursor.key) or feeds.length(cursor.key) < cursor.length:
            return False
        if cursor.length and feeds.link_at(cursor.key, cursor.length - 1) != cursor.link:
            return False
    return True


def written_above(processor: "PartyProcessor", base: BaseEpoch) -> list[ItemOperation]:
    """The operations of blocks above the cut."""
    processor.before_refold()  # own blocks that are not durable yet are among them
    found: list[ItemOperation] = []
    for feed, cursor in processor.orderer.cursors.items():
        if cursor.kind == DATA:
            for seq in range(base.length(feed), cursor.length):
                found += processor.operations_at(feed, seq)
    return found


def put_back(cursor: FeedCursor, to: FeedCursor) -> None:
    """Let a cursor that others hold stand elsewhere."""
    cursor.length, cursor.link, cursor.depth, cursor.asserted = to.length, to.link, to.depth, to.asserted
    cursor.ended, cursor.waits_for, cursor.checked = None, None, 0
    cursor.marks_start, cursor.marks = 0, []


def _rebase_feeds(processor: "PartyProcessor", base: BaseEpoch, *, anew: bool) -> None:
    """Let the data feeds begin at the cut and name the base: one durable step.

    Who stands on it already, and lost its blobs, keeps the blocks below the cut: others may still ask for them.
    """
    feeds = processor.feeds
    cuts = [cut for cut in base.cuts.values() if not cut.control]
    if feeds.about(BASE_KEY) == base.name.encode():
        cuts = [cut for cut in cuts if not (feeds.has_feed(cut.feed) and _reaches(feeds, cut))]
    beginnings = {cut.feed: (cut.length, cut.link) for cut in cuts}
    if anew:
        others = [held.key for held in feeds.feeds() if held.kind == DATA and held.key not in beginnings]
        beginnings |= dict.fromkeys(others, (0, NO_LINK))
    feeds.begin_at(beginnings, {BASE_KEY: base.name.encode()}, back=anew)


def _reaches(feeds: "FeedStore", cut: FeedCut) -> bool:
    """Whether a feed holds what follows a cut, on the cut's branch."""
    return feeds.length(cut.feed) >= cut.length and feeds.link_at(cut.feed, cut.length - 1) in (cut.link, None)
