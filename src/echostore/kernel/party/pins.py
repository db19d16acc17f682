"""Pins: what final epochs contain stays as it was, whatever is said about it later.

    control messages    c0 c1 c2 │ c3 c4 │ r
    final epochs               1 ┘     2 ┘      r removes the writer of c1 and of block 7, of which epoch 2 has 9

    credentials    c1 was contained before r was: r does not void it
    blocks         the writer's feed ends at 9, not at 7: r's bound is raised to what was contained before it

Something is *contained* first by one epoch. It is safe from what is contained later, or never. So a peer that holds
nothing but the newest final epoch, and one that holds all, read the same.

Of epochs whose control messages are gone, those are *given* that something kept asks for (`control_state`).
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from echostore.kernel.ids import FeedId, feed_id
from echostore.kernel.party.credentials import EpochGenesis, TimeframeEntry


class Placed(Protocol):
    """A credential at its place in a control feed."""

    feed: FeedId
    seq: int


@dataclass(frozen=True, slots=True)
class PinnedEpoch:
    """How much of each feed an epoch contains, ascending by feed."""

    hash: bytes
    control: tuple[tuple[FeedId, int], ...]
    data: tuple[tuple[FeedId, int], ...]


class Pins:
    """The final epochs of a party, in the order of their numbers."""

    def __init__(
        self, epochs: Sequence[tuple[bytes, EpochGenesis | PinnedEpoch]] = (), before: "Pins | None" = None
    ) -> None:
        """Epochs by the hash of their genesis. `before` saves work where it is a beginning of the same."""
        self.count: int = len(epochs)
        self.key: tuple[bytes, ...] = tuple(hash for hash, _ in epochs)
        same = before is not None and before.key == self.key[: before.count]
        self._control: list[Mapping[FeedId, int]] = list(before._control) if same and before else []
        self._data: list[Mapping[FeedId, int]] = list(before._data) if same and before else []
        for _, epoch in epochs[len(self._control) :]:
            if isinstance(epoch, PinnedEpoch):
                self._control.append(dict(epoch.control))
                self._data.append(dict(epoch.data))
            else:
                self._control.append(_lengths(epoch.control_timeframe))
                self._data.append(_lengths(epoch.timeframe))

    def epoch(self, at: int) -> PinnedEpoch:
        """One of the epochs, counted from 0."""
        control, data = (tuple(sorted(lengths[at].items())) for lengths in (self._control, self._data))
        return PinnedEpoch(self.key[at], control, data)

    def extends(self, other: "Pins") -> bool:
        """Whether all epochs of the other are among these."""
        return self.key[: other.count] == other.key or set(other.key) <= set(self.key)

    def __bool__(self) -> bool:
        return self.count > 0

    def first(self, place: Placed) -> int:
        """Which epoch contains a credential first, counted from 0; `count` when none does."""
        return bisect_left(self._control, True, key=lambda lengths: place.seq < lengths.get(place.feed, 0))

    def safe(self, act: Placed, removal: Placed) -> bool:
        """Whether an act was contained before the removal that would void it."""
        return self.count > 0 and self.first(act) < self.first(removal)

    def control_length(self, feed: FeedId, before: int) -> int:
        """How much of a control feed the epochs before the given one contain."""
        return self._control[before - 1].get(feed, 0) if before else 0

    def data_length(self, feed: FeedId, before: int) -> int:
        return self._data[before - 1].get(feed, 0) if before else 0


def _lengths(timeframe: Iterable[TimeframeEntry]) -> dict[FeedId, int]:
    return {feed_id(entry.feed): entry.seq + 1 for entry in timeframe}


NO_PINS: Final = Pins()
