"""Receipts: what became of a write."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echostore.kernel.errors import TimedOut, UsageError
from echostore.peer.anchors import Anchor

if TYPE_CHECKING:
    from echostore.peer.party import Party


@dataclass(frozen=True, slots=True)
class Receipt:
    """A write, with the write anchor. A receipt from `flush` is durable; `held_by` counts this peer too."""

    party: "Party"
    anchor: Anchor
    feed: bytes
    length: int

    @property
    def durable(self) -> bool:
        """Whether it survives a crash of this machine."""
        own = self.party.runtime.data
        return own is None or own.durable_length >= self.length

    @property
    def processed(self) -> bool:
        """Whether it is in the state here."""
        return self.party.runtime.processor.timeframe.includes_seqs(self.anchor.data)

    @property
    def held_by(self) -> int:
        """How many peers are known to hold it durably, this one included."""
        others = self.party.acknowledged(self.feed, self.length)
        return others + (1 if self.durable else 0)

    def wait(self, *, held_by: int = 1, timeout: float | None = None) -> "Receipt":
        """Wait until at least `held_by` peers hold it; TimedOut says how many do."""
        if held_by < 1:
            raise UsageError("held_by counts from 1, this peer included")
        if not self.durable:
            self.party.flush()
        if not self.party.wait_for(lambda: self.held_by >= held_by, timeout):
            raise TimedOut(
                f"the write is held by {self.held_by} of the {held_by} peers asked for",
                unchanged="It is durable here and goes on spreading.",
                next_step="Connect to another peer of the party.",
            )
        return self
