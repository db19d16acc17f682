"""A simulated peer that takes in so many blocks per virtual second and no more: what a flood competes for.

It does one thing at a time, in the turns of `echostore.kernel.sync.turns`, as the mesh does with its one loop.
"""

from collections.abc import Callable

from echostore.kernel.ids import DeviceKey, FeedKey
from echostore.kernel.sync.events import Ingest
from echostore.kernel.sync.turns import Cost, Quotas, Turns


class PacedIntake:
    """The intake of one node. `after` calls back later, in virtual time."""

    def __init__(
        self,
        blocks_per_s: float,
        quotas: Quotas,
        *,
        clock: Callable[[], float],
        after: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.turns: Turns[tuple[int, Callable[[], None]]] = Turns(quotas)
        self._blocks_per_s = blocks_per_s
        self._clock, self._after = clock, after
        self._busy = False

    def arrived(self, sender: str, arrived: Ingest, act: Callable[[], None]) -> None:
        blocks = len(arrived.payloads)
        cost = Cost(arrived.feed, DeviceKey(sender.encode()), blocks, sum(map(len, arrived.payloads)))
        self.turns.wait(cost, (blocks, act))
        if not self._busy:
            self._go_on()

    def last(self, feed: FeedKey) -> bool:
        return self.turns.feed_over(feed, self._clock())

    def _go_on(self) -> None:
        following = self.turns.next(self._clock())
        self._busy = following is not None
        if following is not None:
            blocks, act = following
            self._after(blocks / self._blocks_per_s, lambda: self._done(act))

    def _done(self, act: Callable[[], None]) -> None:
        act()
        self._go_on()
