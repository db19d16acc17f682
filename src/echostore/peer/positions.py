"""Where a party stands in its feeds: its timeframes, and what a new message must name as processed.

What counts of a feed is decided by the admission: blocks beyond a cut were processed by the orderer but are in neither
a timeframe nor a dependency, so that a peer that never gets them is not kept waiting. Nor is a control feed that no
credential names: it may have been taken in here and be passed on to nobody. One that was admitted in vain reaches everybody,
and data may build on it; so it is named, or no moment that contains such data would be closed.
"""

from collections.abc import Iterable, Mapping

from echostore.kernel.ids import FeedId, FeedKey, feed_id
from echostore.kernel.order import CONTROL, DATA, Cut, FeedCursor, Orderer
from echostore.kernel.party.admission import Admission, reach
from echostore.kernel.party.credentials import Role
from echostore.kernel.timeframe import Dependency, Position, Timeframe, link_prefix
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.control import Membership
from echostore.wire.epochs import FeedCut
from echostore.wire.membership import read_membership


def data_timeframe(orderer: Orderer, admission: Admission) -> Timeframe:
    """Of each data feed the last processed block that counts."""
    positions = (
        (feed, allowed_last(orderer, admission, cursor))
        for feed, cursor in orderer.cursors.items()
        if cursor.kind == DATA
    )
    return Timeframe.of((feed, position) for feed, position in positions if position is not None)


def control_timeframe(orderer: Orderer, control: Admission, membership: Membership) -> Timeframe:
    """The last processed blocks of the control feeds that are followed, and of others what those have seen.

    What comes later of others is named by nobody, and an epoch may not name what is not in its past. `control` is the
    admission that control feeds are in: of a child party, its parent's.
    """
    cursors = {feed: cursor for feed, cursor in orderer.cursors.items() if cursor.kind == CONTROL and cursor.length}
    followed = {feed for feed in cursors if control.follows(feed) is not None}
    found = [(feed, Position(cursors[feed].length - 1, cursors[feed].link)) for feed in followed]
    others = cursors.keys() - followed
    seen = [membership.clock(feed, cursors[feed].length - 1) for feed in followed] if others else []
    for feed in others:
        begun = membership.first(feed) - 1  # a control state contains what lies below
        last = min(max([begun, *(clock.get(feed, -1) for clock in seen)]), cursors[feed].length - 1)
        if last >= 0:
            found.append((feed, Position(last, orderer.mark(feed, last).link)))
    return Timeframe.of(found)


def allowed_last(orderer: Orderer, admission: Admission, cursor: FeedCursor) -> Position | None:
    """The last processed block of a data feed that counts; None when none does. What the base holds counts for good."""
    record = admission.by_id.get(cursor.id)
    base = orderer.base.get(cursor.id)
    best = base.length - 1 if base is not None else -1
    for interval in record.intervals if record is not None else ():
        if interval.role is Role.READER or interval.start >= cursor.length:
            continue
        end = cursor.length if interval.end is None else min(interval.end, cursor.length)
        if end > interval.start:
            best = max(best, end - 1)
    if best < 0:
        return None
    if best == cursor.length - 1:
        return Position(best, cursor.link)
    return Position(best, orderer.mark(cursor.id, best).link)


def dependencies(
    orderer: Orderer, admission: Admission, control: Admission, own: FeedCursor, moved: Iterable[FeedId]
) -> tuple[Dependency, ...]:
    """What a message of `own` must name of the feeds that moved, in ascending order of feed; `control` as above."""
    found = []
    for feed in sorted(moved):
        cursor = orderer.cursors.get(feed)
        if cursor is None or cursor is own or (own.kind == CONTROL and cursor.kind != CONTROL):
            continue
        if cursor.kind == DATA:
            position = allowed_last(orderer, admission, cursor)
        elif control.follows(feed) is None:
            continue
        else:
            position = Position(cursor.length - 1, cursor.link)
        known = own.asserted.get(feed)
        if position is None or position.seq < 0 or (known is not None and position.seq <= known.seq):
            continue
        depth = cursor.depth if position.seq == cursor.length - 1 else orderer.mark(feed, position.seq).depth
        found.append(Dependency(feed, position.seq, link_prefix(position.link), depth))
    return tuple(found)


def length_at(data: Timeframe, admission: Admission, key: FeedKey, length: int) -> int:
    """How much of a data feed of some length is looked at to fold the state at a timeframe."""
    record = admission.by_id.get(feed_id(key))
    intervals = record.intervals if record is not None else ()
    counted = [(start, end) for start, end, role in intervals if role is not Role.READER]
    found = reach(data.length(feed_id(key)), counted)
    return length if found is None else min(length, found)


def cursor_at(key: FeedKey, kind: str, cut: FeedCut | None) -> FeedCursor:
    """A cursor that stands at a cut; without one, at the beginning."""
    if cut is None:
        return FeedCursor(key, kind)
    asserted = {known.feed: known for known in cut.asserted}
    return FeedCursor(key, kind, length=cut.length, link=cut.link, depth=cut.depth, asserted=asserted)


def mirror_control(mine: Orderer, parents: Orderer) -> set[FeedId]:
    """Let the control cursors of a child party stand where those of its parent do; returns which have moved."""
    moved = set()
    for feed, cursor in parents.cursors.items():
        if cursor.kind != CONTROL:
            continue
        mirror = mine.cursors.get(feed)
        if mirror is None:
            mirror = FeedCursor(cursor.key, CONTROL)
            mine.add(mirror)
        if mirror.length != cursor.length:
            moved.add(feed)
        mirror.length = mirror.held = cursor.length
        mirror.link, mirror.depth = cursor.link, cursor.depth
        mirror.marks_start, mirror.marks = cursor.marks_start, cursor.marks
    return moved


def order_cuts(base: BaseEpoch | None, floor: Mapping[FeedId, FeedCut]) -> dict[FeedId, Cut]:
    """Where the base ends, or where control feeds begin, if that is later."""
    found = base.order_cuts if base is not None else {}
    for feed, cut in floor.items():
        if feed not in found or found[feed].length < cut.length:
            found[feed] = Cut(cut.length, cut.link, cut.depth)
    return found


def counts_alike(base: BaseEpoch, admission: Admission) -> bool:
    """Whether the blocks inside an earlier epoch count under an admission as they did in it."""
    state = read_membership(base.root.membership_root, base.blob)
    before = {
        feed_id(FeedKey(each.feed)): [
            (interval.start, None if interval.open else interval.end, interval.role) for interval in each.intervals
        ]
        for each in state.feeds
    }
    for feed, cut in base.cuts.items():
        if cut.control:
            continue
        record = admission.by_id.get(feed)
        if _up_to(before.get(feed, ()), cut.length) != _up_to(record.intervals if record else (), cut.length):
            return False
    return True


def _up_to(intervals: Iterable[tuple[int, int | None, int]], length: int) -> list[tuple[int, int, int]]:
    """Intervals as far as they lie below a length, joined where the role goes on."""
    found: list[tuple[int, int, int]] = []
    for start, end, role in intervals:
        stop = length if end is None else min(end, length)
        if start >= stop or role == Role.READER:
            continue
        if found and found[-1][1] == start and found[-1][2] == role:
            found[-1] = (found[-1][0], stop, role)
        else:
            found.append((start, stop, int(role)))
    return found
