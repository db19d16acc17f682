"""Work that strangers cause, paced: a share of the loop's thread and no more. See `connection_limits.WorkShare`.

    turn() ── share left? ── yes ──► at once
                   └── no ──► waits: by rank, and of a rank the newest or the oldest first

A handshake that has begun goes before one that has not: half a handshake is of use to nobody. Of those that have not
begun the newest goes first: under a flood the diallers of the old ones have given up, while a member that dials now is
served now. What is measured is time of the clock: on a busy machine strangers have their share of what is left.

Lives in the node's loop.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Hashable
from enum import IntEnum
from typing import Final, TypeVar

from echostore.mesh.connection_limits import WorkShare

PAUSE_MIN_S: Final = 0.001

_T = TypeVar("_T")


class Rank(IntEnum):
    """Who goes first."""

    BEGUN = 0
    PREFERRED = 1
    """Not begun, from an address of known devices."""
    OTHER = 2


class WorkQueue:
    """One kind of work of all strangers."""

    def __init__(self, share: WorkShare) -> None:
        self.share = share
        self._queues: dict[Rank, deque[asyncio.Future[None]]] = {rank: deque() for rank in Rank}
        self._waiters: dict[Hashable, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return sum(not each.done() for queue in self._queues.values() for each in queue)

    def charged(self, act: Callable[[], _T]) -> _T:
        """Do it now, and charge what it takes."""
        begun = time.perf_counter()
        try:
            return act()
        finally:
            self.charge(time.perf_counter() - begun)

    async def turn(self, key: Hashable = None, *, rank: Rank = Rank.BEGUN) -> None:
        """Wait until the next piece of work may begin. Who names itself by a key can be released early."""
        loop = asyncio.get_running_loop()
        queue = self._queues[rank]
        if self._timer is None and not self.share.wait_s(loop.time()):
            return
        waiter: asyncio.Future[None] = loop.create_future()
        queue.append(waiter)
        if key is not None:
            self._waiters[key] = waiter
        self._schedule(loop)
        try:
            await waiter
        finally:
            self._waiters.pop(key, None)
            with contextlib.suppress(ValueError):  # its turn came
                queue.remove(waiter)

    def release(self, key: Hashable) -> None:
        """Let go of who waits under a key: its connection has ended, and it does nothing any more."""
        waiter = self._waiters.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def charge(self, seconds: float) -> None:
        self.share.spent(seconds, asyncio.get_running_loop().time())

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and any(self._queues.values()):
            pause = max(self.share.wait_s(loop.time()), PAUSE_MIN_S)
            self._timer = loop.call_later(pause, self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let one begin; the rest follows what that one costs."""
        self._timer = None
        if not self.share.wait_s(loop.time()):
            rank = next((rank for rank, queue in self._queues.items() if queue), None)
            if rank is not None:
                waiter = self._queues[rank].popleft() if rank is Rank.BEGUN else self._queues[rank].pop()
                if not waiter.done():
                    waiter.set_result(None)
        self._schedule(loop)
