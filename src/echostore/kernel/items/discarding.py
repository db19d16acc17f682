"""What an epoch leaves out: the same on every peer, because it follows from the state at the cut and the genesis alone.

    stable       what the latest message of every feed that still counts had processed: nobody can write beside it any more
    before_ms    `discard_before` of the genesis; ages are compared with it, never with a clock

D1  Only what is stable goes.
D2  An item goes when it, or something that it hangs below, was deleted before `before_ms`, and all below it goes too.
D3  A log loses posts by its own retention: older than its age before `before_ms`, or beyond its count and older than that.
D4  Texts and lists lose the history of what was written before `before_ms`; what stands stays (`_laying_ground`).
D5  What is written later on discarded ground is refused with the reason `discarded`.
D6  What an item may still lose it *waits* for: as it is, it loses nothing under a horizon that ends none of its waits. So
    the next epoch looks at items that were written since and at those whose waits are over, and finds what looking at all
    would find. Waits say something of a state and nothing of how it came about; they are no part of it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from echostore.kernel.ids import FeedId, ItemId
from echostore.kernel.items.record import DELETED_AT_KEY, DELETED_KEY, ItemRecord
from echostore.kernel.items.state import PartyState
from echostore.kernel.models.base import NO_WAIT, Horizon, Wait
from echostore.kernel.models.factory import BASE_MODELS
from echostore.kernel.models.threaded_log import ThreadedLog
from echostore.kernel.party.admission import Admission, FeedAdmission
from echostore.kernel.party.credentials import FeedKind, Role

Waits = Mapping[ItemId, tuple[Wait, ...]]
"""What the items of a state wait for; those that can lose nothing while nobody writes them are not in it."""

FirstBelow = Callable[[AbstractSet[ItemId]], Iterable[ItemId]]
"""At least the items whose genesis put them below one of some."""


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


@dataclass(frozen=True, slots=True)
class Discarded:
    """What was left out of a state."""

    changed: set[ItemId]
    """Items that lost something, or went."""
    waits: dict[ItemId, tuple[Wait, ...]]
    """Of the items that were looked at."""
    left_out: LeftOut


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


def may_lose(model: str, version: int, *, has_metadata: bool) -> bool:
    """Whether an item that has no operation any more could lose something, or go before what it hangs below does."""
    return has_metadata or hasattr(BASE_MODELS.get((model, version)), "discard")


def discard(state: PartyState, horizon: Horizon, items: Iterable[ItemId], first_below: FirstBelow) -> Discarded:
    """Leave out what may go of these items, which must be all that D2 to D4 could concern but for what hangs below them."""
    posts: dict[ItemId, int] = {}
    histories: set[ItemId] = set()
    doomed: set[ItemId] = set()
    waits: dict[ItemId, tuple[Wait, ...]] = {}
    for item in items:
        record = state.record(item)
        if record is None:
            continue
        waiting: list[Wait] = []
        deletion = _deletion(record)
        if deletion is not None and horizon.ends(deletion):
            doomed.add(item)
            waiting.append(NO_WAIT)  # should it stay, that is for the sake of others
        elif deletion is not None:
            waiting.append(deletion)
        model = record.model
        shorten = getattr(model, "discard", None)
        if shorten is not None:
            before = model.post_count if isinstance(model, ThreadedLog) else 0
            shorter = shorten(horizon)
            if shorter and isinstance(model, ThreadedLog):
                posts[item] = before - model.post_count
            elif shorter:
                histories.add(item)
            waiting += model.waits(horizon)
        if waiting:
            waits[item] = tuple(waiting)
    if doomed:
        doomed = _closed(state, doomed, first_below)
        state.drop(frozenset(doomed))
    changed = {*posts, *histories}
    state.dirty |= changed
    state.changed |= changed
    left_out = LeftOut(len(doomed), sum(posts[each] for each in posts.keys() - doomed), len(histories - doomed))
    return Discarded(changed | doomed, {item: waits[item] for item in waits if item not in doomed}, left_out)


def _deletion(record: ItemRecord) -> Wait | None:
    """What a deleted item waits for; None for one that is not, or does not say since when."""
    if not record.deleted:
        return None
    stamp, _ = record.metadata.writes((DELETED_KEY,))[0]
    at = record.metadata.get((DELETED_AT_KEY,))
    return Wait(stamp.feed, stamp.seq, at) if isinstance(at, int) else None


def _closed(state: PartyState, doomed: set[ItemId], first_below: FirstBelow) -> set[ItemId]:
    """Those that go with all that hangs below them; what is embedded elsewhere stays, and so does what it hangs below."""
    moved: dict[ItemId, list[ItemId]] = defaultdict(list)
    for item, home in state.tree.moved.items():
        if home is not None:
            moved[home].append(item)
    found = set(doomed)
    front = set(doomed)
    while front:
        near = {*first_below(front), *(item for parent in front for item in moved.get(parent, ()))} - found
        front = {item for item in near if state.record(item) is not None and state.home(item) in front}
        found |= front
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
