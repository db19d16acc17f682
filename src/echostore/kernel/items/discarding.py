"""What an epoch leaves out: the same on every peer, because it follows from the state at the cut and the genesis alone.

    stable       what the latest message of every feed that still counts had processed: nobody can write beside it any more
    before_ms    `discard_before` of the genesis; ages are compared with it, never with a clock

D1  Only what is stable goes.
D2  An item goes when it, or something that it hangs below, was deleted before `before_ms`, and all below it goes too.
D3  A log loses posts by its own retention: older than its age before `before_ms`, or beyond its count and older than that.
D4  Texts and lists lose the history of what was written before `before_ms`; what stands stays (`_laying_ground`).
D5  What is written later on discarded ground is refused with the reason `discarded`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from echostore.kernel.ids import FeedId, ItemId
from echostore.kernel.items.record import DELETED_AT_KEY, DELETED_KEY, ItemRecord
from echostore.kernel.items.state import PartyState
from echostore.kernel.models.base import Horizon
from echostore.kernel.models.threaded_log import ThreadedLog
from echostore.kernel.party.admission import Admission, FeedAdmission
from echostore.kernel.party.credentials import FeedKind, Role


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What an epoch leaves out that stood in the state below it, as people count it."""

    items: int = 0
    """Deleted items, with all below them."""
    posts: int = 0
    histories: int = 0
    """Texts and lists that lost some of their history."""

    def __bool__(self) -> bool:
        return bool(self.items or self.posts or self.histories)


def stable_frontier(
    processed: Mapping[FeedId, Mapping[FeedId, int]], lengths: Mapping[FeedId, int], admission: Admission
) -> dict[FeedId, int]:
    """Per feed the last seq that every feed which still counts had processed with its last message.

    `processed[g][f]` is the last seq of f that g's last message inside the epoch had processed. A feed that never
    wrote has processed nothing, and holds everything up until it writes or is retired.
    """
    writing = [feed for feed, record in admission.by_id.items() if record.kind is FeedKind.DATA and _writes(record)]
    found: dict[FeedId, int] = {}
    for feed, length in lengths.items():
        seen = [processed.get(other, {}).get(feed, -1) for other in writing if other != feed]
        found[feed] = min([length - 1, *seen])
    return found


def discard(state: PartyState, horizon: Horizon, items: Iterable[ItemId]) -> LeftOut:
    """Leave out what may go of these items, which must be all that D2 to D4 could concern; returns what went."""
    posts: dict[ItemId, int] = {}
    histories: set[ItemId] = set()
    doomed: set[ItemId] = set()
    every = list(items)
    for item in every:
        record = state.record(item)
        if record is None:
            continue
        if _deleted_before(record, horizon):
            doomed.add(item)
        model = record.model
        shorten = getattr(model, "discard", None)
        before = model.post_count if isinstance(model, ThreadedLog) else 0
        if shorten is None or not shorten(horizon):
            continue
        if isinstance(model, ThreadedLog):
            posts[item] = before - model.post_count
        else:
            histories.add(item)
    if doomed:
        doomed = _closed(state, doomed, every)
        state.drop(frozenset(doomed))
    changed = {*posts, *histories}
    state.dirty |= changed
    state.changed |= changed
    return LeftOut(len(doomed), sum(posts[each] for each in posts.keys() - doomed), len(histories - doomed))


def _deleted_before(record: ItemRecord, horizon: Horizon) -> bool:
    if not record.deleted:
        return False
    stamp, _ = record.metadata.writes((DELETED_KEY,))[0]
    at = record.metadata.get((DELETED_AT_KEY,))
    return horizon.covers(stamp) and isinstance(at, int) and at < horizon.before_ms


def _closed(state: PartyState, doomed: set[ItemId], every: Iterable[ItemId]) -> set[ItemId]:
    """Those that go with all that hangs below them; what is embedded elsewhere stays, and so does what it hangs below."""
    below: dict[ItemId, list[ItemId]] = defaultdict(list)
    for item in every:
        home = state.home(item)
        if home is not None:
            below[home].append(item)
    found = set(doomed)
    front = list(doomed)
    while front:
        for child in below.get(front.pop(), ()):
            if child not in found:
                found.add(child)
                front.append(child)
    kept = [item for item in found if any(parent not in found for parent in state.tree.embeddings(item))]
    while kept:
        item = kept.pop()
        if item in found:
            found.discard(item)
            home = state.home(item)
            if home is not None:
                kept.append(home)
    return found


def _writes(admitted: FeedAdmission) -> bool:
    """Whether blocks that a feed may still get would count."""
    intervals = admitted.intervals
    return bool(intervals) and intervals[-1].end is None and intervals[-1].role is not Role.READER
