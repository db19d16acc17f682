"""What others said of a party's feeds: how much they hold, have processed and know of. Kept while the party is open."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldElsewhere:
    """What another device said of a feed: blocks on its disk, and applied."""

    device: bytes
    held: int
    processed: int


class Elsewhere:
    """The account of other devices. Lengths only grow: what came late says less than what is known."""

    def __init__(self) -> None:
        self._held: dict[bytes, dict[bytes, int]] = {}
        self._processed: dict[bytes, dict[bytes, int]] = {}
        self._announced: dict[bytes, int] = {}

    def acknowledge(self, device: bytes, held: Mapping[bytes, int], processed: Mapping[bytes, int]) -> None:
        """A device holds feeds up to these lengths, and has applied them up to those."""
        for account, told in ((self._held, held), (self._processed, processed)):
            known = account.setdefault(device, {})
            for feed, length in told.items():
                known[feed] = max(known.get(feed, 0), length)

    def announce(self, feed: bytes, length: int) -> None:
        """A feed is known to be this long, whoever holds it."""
        self._announced[feed] = max(self._announced.get(feed, 0), length)

    def devices(self) -> set[bytes]:
        """Who has said what it holds."""
        return set(self._held)

    def feeds(self) -> set[bytes]:
        """Feeds that anyone said anything of."""
        return set(self._announced).union(*self._held.values())

    def of(self, feed: bytes) -> list[HeldElsewhere]:
        """What is known of a feed, in the order of the devices' keys."""
        return [
            HeldElsewhere(device, held[feed], self._processed.get(device, {}).get(feed, 0))
            for device, held in sorted(self._held.items())
            if feed in held
        ]

    def holders(self, feed: bytes, length: int) -> int:
        """How many devices hold a feed up to a length."""
        return sum(1 for held in self._held.values() if held.get(feed, 0) >= length)

    def shared_length(self, feed: bytes) -> int:
        """Up to which length some device holds a feed."""
        return max((held.get(feed, 0) for held in self._held.values()), default=0)

    def known_length(self, feed: bytes) -> int:
        """The greatest length of a feed that anyone announced."""
        return max(self._announced.get(feed, 0), self.shared_length(feed))
