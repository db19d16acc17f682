"""An update on the wire: cut into frames by its sender, put together by its receiver.

    ordered link      BeginUpdate  item  item  item  EndUpdate
    lanes             lane 0   EndUpdate(prev, tick, follows, [(0, 1), (1, 2)])     may come first, last or twice
                      lane 0   item 0
                      lane 1   item 0   item 1

EndUpdate is a manifest: it says how many items travel on each lane. What a receiver makes of its frames depends on the
*set* of frames alone, not on their order or number: an update is whole when its manifest is there and all it counts.
Ends on each lane without counts would not do: a lane that lost its last items looks complete.
"""

from typing import NamedTuple

from echostore.kernel.coherence.messages import (
    Arc,
    BeginUpdate,
    EndUpdate,
    FollowsEpoch,
    Frame,
    LaneItem,
    NullUpdate,
    Update,
    UpdateItem,
)

LANES_MAX = 64
"""Lanes of one link: more than any transport has use for."""

PENDING_UPDATES_MAX = 256
"""Updates that are begun and not whole, or whole and not next. An honest sender has as many ticks as its window."""

PENDING_ITEMS_MAX = 100_000
"""Items in them: what one update says of a full directory."""


def frames_of(update: Update, lanes: int = 1) -> list[Frame]:
    """The frames of an update. One lane is an ordered link, where BeginUpdate comes first."""
    if not update.items and not update.follows:
        return [NullUpdate(update.clock, update.prev, update.tick)]
    counts = [0] * lanes
    items: list[Frame] = []
    for place, item in enumerate(update.items):
        lane = place % lanes
        items.append(LaneItem(update.clock, update.tick, lane, counts[lane], item))
        counts[lane] += 1
    manifest = tuple((lane, count) for lane, count in enumerate(counts) if count)
    end = EndUpdate(update.clock, update.prev, update.tick, update.follows, manifest, update.signature)
    begin: list[Frame] = [BeginUpdate(update.clock, update.prev, update.tick)] if lanes == 1 else []
    return [*begin, *items, end]


class Manifest(NamedTuple):
    """What EndUpdate says."""

    prev: int
    follows: tuple[FollowsEpoch, ...]
    lanes: tuple[tuple[int, int], ...]
    signature: bytes = b""


class UpdateReader:
    """Frames in, whole updates out, in the order of their chain."""

    __slots__ = ("items", "items_count", "manifests")

    def __init__(self) -> None:
        self.items: dict[tuple[Arc, int], dict[tuple[int, int], UpdateItem]] = {}
        self.manifests: dict[tuple[Arc, int], Manifest] = {}
        self.items_count = 0

    def clear(self) -> None:
        self.items.clear()
        self.manifests.clear()
        self.items_count = 0

    def take(self, frame: Frame, reached: int) -> str | None:
        """Keep a frame of an update beyond `reached`; why not, when no honest sender sends it."""
        key = (frame.clock, frame.tick)
        if frame.tick <= reached or isinstance(frame, BeginUpdate):
            return None
        if isinstance(frame, LaneItem):
            return self._take_item(key, frame)
        said = Manifest(frame.prev, (), ())
        if isinstance(frame, EndUpdate):
            said = Manifest(frame.prev, frame.follows, frame.lanes, frame.signature)
        if len({lane for lane, _ in said.lanes}) != len(said.lanes) or any(lane >= LANES_MAX for lane, _ in said.lanes):
            return "a manifest with a lane twice, or with one that can't be"
        if self.manifests.setdefault(key, said) != said:
            return "two manifests for one tick"
        return "too many updates wait" if len(self.manifests) > PENDING_UPDATES_MAX else None

    def _take_item(self, key: tuple[Arc, int], frame: LaneItem) -> str | None:
        gathered = self.items.setdefault(key, {})
        place = (frame.lane, frame.index)
        if place in gathered:
            return None if gathered[place] == frame.item else "two items in one place"
        gathered[place] = frame.item
        self.items_count += 1
        if self.items_count > PENDING_ITEMS_MAX or len(self.items) > PENDING_UPDATES_MAX:
            return "too many items wait"
        return None

    def next(self, clock: Arc, reached: int) -> Update | None:
        """The update that follows `reached`, once it is whole. It is handed out once."""
        for (other, tick), manifest in self.manifests.items():
            if other == clock and manifest.prev == reached:
                items = self._whole(other, tick, manifest)
                if items is None:
                    return None
                self._forget(clock, tick)
                return Update(clock, manifest.prev, tick, manifest.follows, items, manifest.signature)
        return None

    def _whole(self, clock: Arc, tick: int, manifest: Manifest) -> tuple[UpdateItem, ...] | None:
        gathered = self.items.get((clock, tick), {})
        places = [(lane, index) for lane, count in manifest.lanes for index in range(count)]
        if len(places) > len(gathered) or any(place not in gathered for place in places):
            return None
        return tuple(gathered[place] for place in sorted(places))

    def _forget(self, clock: Arc, tick: int) -> None:
        """An update that was handed out, and whatever of the same clock lies before it."""
        for key in [key for key in self.manifests if key[0] == clock and key[1] <= tick]:
            del self.manifests[key]
        for key in [key for key in self.items if key[0] == clock and key[1] <= tick]:
            self.items_count -= len(self.items.pop(key))
