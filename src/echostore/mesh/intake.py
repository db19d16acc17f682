"""What this peer takes in, in turns: no member's flood keeps the blocks of others waiting. See `kernel.sync.turns`.

    PartyChannel ── range arrived ──► Intake ── its turn ──► store

Who is within its quota is served at once. The others get one turn after each round of the loop, so that what came from
everybody else meanwhile is seen first. A session has asked for a few megabytes at most and asks for no more while these wait,
so that a flood stays where it comes from.

Lives in the node's loop.
"""

import asyncio
from collections.abc import Callable

from echostore.kernel.ids import DeviceKey, FeedKey
from echostore.kernel.sync.events import Ingest
from echostore.kernel.sync.turns import Cost, Quotas, Turns


class Intake:
    """One for all links of a node."""

    def __init__(self) -> None:
        self.turns: Turns[Callable[[], None]] = Turns()
        self._scheduled = False

    def set_quotas(self, quotas: Quotas) -> None:
        self.turns.quotas = quotas

    def arrived(self, device: DeviceKey, arrived: Ingest, act: Callable[[], None]) -> None:
        """Do what has to be done with a range, now or when its turn has come."""
        loop = asyncio.get_running_loop()
        cost = Cost(arrived.feed, device, len(arrived.payloads), sum(map(len, arrived.payloads)))
        if self.turns.take(cost, act, loop.time()):
            act()
        elif not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._turn, loop)

    def last(self, feed: FeedKey, now: float) -> bool:
        """Whether a feed is asked for after all others."""
        return self.turns.feed_over(feed, now)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = False
        act = self.turns.next(loop.time())
        if len(self.turns):
            self._scheduled = True
            loop.call_soon(self._turn, loop)
        if act is not None:
            act()
