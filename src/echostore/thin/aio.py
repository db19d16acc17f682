"""The thin client for asyncio. What may wait is awaited; what is local is a plain call.

    async with echostore.thin.aio.connect(url, capability) as party:
        task = party.create(type="task", title="Tickets")
        task["done"] = True
        print(await party.query(type="task").where(done=True).all())
        async for change in party.query(type="task").watch():
            ...

Writing is local: into the outbox, and onto the disk where a path was given. `party.sync` is the party as other threads
use it; both may be used at once.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from concurrent.futures import Future
from typing import Any, Final, Literal, Self, TypeVar

from echostore.kernel.coherence.messages import Spec
from echostore.kernel.errors import EchoError, TimedOut
from echostore.kernel.query.live import Change
from echostore.kernel.values import Value
from echostore.thin.answers import Answer
from echostore.thin.items import ThinItem
from echostore.thin.queries import ThinQuery, difference
from echostore.thin.thin_party import PATIENCE_S, RESTARTS_MAX, ThinParty, Transaction
from echostore.thin.thin_party import connect as connect_sync
from echostore.thin.waiting import Gone

T = TypeVar("T")

_BUILDERS: Final = frozenset(
    ("where", "deleted", "children", "links", "source", "target", "order_by", "limit", "select", "sealed")
)
_LOCAL: Final = frozenset(
    (
        "announce",
        "batch",
        "connected",
        "context",
        "create",
        "deannounce",
        "key",
        "link",
        "on_message",
        "on_rejected",
        "on_undelivered",
        "pending",
        "publish",
        "rejected",
        "send",
        "status",
        "system",
        "tick",
    )
)
"""What a ThinParty does without waiting for anybody."""


def connect(url: Any, capability: str | bytes, **options: Any) -> "Connecting":
    """As `echostore.connect`; use it with `async with`, or await it and close the party later."""
    return Connecting(lambda: connect_sync(url, capability, **options))


class Connecting:
    """A connection that is about to be made."""

    def __init__(self, start: Callable[[], ThinParty]) -> None:
        self._start = start
        self._party: AioParty | None = None

    def __await__(self) -> Generator[Any, None, "AioParty"]:
        return self._connect().__await__()

    async def _connect(self) -> "AioParty":
        return AioParty(await asyncio.to_thread(self._start))

    async def __aenter__(self) -> "AioParty":
        self._party = await self._connect()
        return self._party

    async def __aexit__(self, *exception: object) -> None:
        assert self._party is not None, "it was entered"
        await self._party.close()


class AioParty:
    """A ThinParty whose waiting calls are awaited."""

    def __init__(self, party: ThinParty) -> None:
        self.sync = party

    def __getattr__(self, name: str) -> Any:
        if name not in _LOCAL:
            raise AttributeError(name)
        return getattr(self.sync, name)

    def query(self, /, type: str | None = None, **keywords: Value) -> "AioQuery":
        return AioQuery(self.sync.query(type, **keywords))

    async def get(self, item: Any, *, sealed: bool = False) -> ThinItem:
        return await asyncio.to_thread(self.sync.get, item, sealed=sealed)

    async def transaction(
        self, work: "Callable[[AioTransaction], Awaitable[T]]", *, timeout_s: float = PATIENCE_S
    ) -> T:
        """Await `work` with a transaction: all it reads is one state. When that is forgotten, it starts again."""
        driver = self.sync.driver
        for _ in range(RESTARTS_MAX):
            with driver.lock:
                tick = driver.begin()
                transaction = Transaction(self.sync, tick, timeout_s)
            try:
                return await work(AioTransaction(transaction))
            except Gone as gone:
                moved = driver.wait_for_tick(gone.oldest)
            finally:
                driver.end(tick)
            await asyncio.to_thread(self.sync.wait, moved, timeout_s, "no newer state came")
        raise TimedOut("the state of a transaction was forgotten again and again", next_step="Read less in one.")

    async def fence(
        self,
        kind: Literal["release", "acquire", "full"] = "full",
        context: bytes | None = None,
        *,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        await asyncio.to_thread(self.sync.fence, kind, context, timeout_s=timeout_s)

    async def services(self, prefix: str = "", *, timeout_s: float = PATIENCE_S) -> Any:
        return await asyncio.to_thread(self.sync.services, prefix, timeout_s=timeout_s)

    async def wait_connected(self, timeout_s: float = PATIENCE_S) -> bool:
        return await asyncio.to_thread(self.sync.wait_connected, timeout_s)

    async def close(self) -> None:
        await asyncio.to_thread(self.sync.close)

    def __repr__(self) -> str:
        return f"<aio {self.sync!r}>"


class AioTransaction:
    """Reads of one state, awaited."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self.tick = transaction.tick

    async def all(self, query: "AioQuery") -> Answer:
        return await asyncio.to_thread(self._transaction.all, query.sync)

    async def get(self, item: Any) -> ThinItem | None:
        return await asyncio.to_thread(self._transaction.get, item)


class AioQuery:
    """A ThinQuery whose answer is awaited."""

    __slots__ = ("sync",)

    def __init__(self, query: ThinQuery) -> None:
        self.sync = query

    def __getattr__(self, name: str) -> Any:
        if name not in _BUILDERS:
            raise AttributeError(name)
        build = getattr(self.sync, name)
        return lambda *positional, **named: AioQuery(build(*positional, **named))

    async def all(self) -> Answer:
        """The items; a held answer is given at once, and no thread waits for another one."""
        query, party = self.sync, self.sync.party
        while True:
            with party.driver.lock:
                answer = query.held()
                if answer is not None:
                    return answer
                asked: Future[Any] = party.driver.ask(query.spec)
            try:
                await asyncio.wait_for(asyncio.wrap_future(asked), party.answers.patience_s)
            except EchoError:
                raise
            except TimeoutError:
                raise party.answers.too_late() from None

    async def __aiter__(self) -> AsyncIterator[ThinItem]:
        for item in await self.all():
            yield item

    async def first(self) -> ThinItem | None:
        return next(iter(await self.all()), None)

    async def count(self) -> int:
        return len(await self.all())

    def watch(self, *, initial: bool = False) -> "AioWatch":
        return AioWatch(self, initial=initial)

    def __repr__(self) -> str:
        return f"<aio {self.sync!r}>"


class AioWatch:
    """An asynchronous iterator over the changes of an answer; changes that nobody took merge into one."""

    def __init__(self, query: AioQuery, *, initial: bool) -> None:
        self._query = query
        self._driver = query.sync.party.driver
        self._before: Answer | None = Answer.of([], 0, pending=False) if initial else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._end_watch: Callable[[], None] | None = None

    def __aiter__(self) -> AsyncIterator[Change[ThinItem]]:
        return self

    async def __anext__(self) -> Change[ThinItem]:
        if self._loop is None:
            await self._start()
        while True:
            await self._news.wait()
            if self._end_watch is None:
                raise StopAsyncIteration
            self._news.clear()
            answer = self._query.sync.held()
            if answer is None:
                denied = self._driver.denied.get(self._query.sync.spec)
                if denied is not None:
                    raise denied
                continue
            before, self._before = self._before, answer
            change = difference(before or (), answer)
            if change is not None:
                return change

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end_watch = self._driver.watch(self._query.sync.spec)
        self._driver.listeners.append(self._changed)
        if self._before is None:
            self._before = await self._query.all()
        self._news.set()

    def _changed(self, specs: frozenset[Spec] | None) -> None:
        if (specs is None or self._query.sync.spec in specs) and self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    def close(self) -> None:
        """End the iteration, also for a task that waits in it."""
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None
            self._driver.listeners.remove(self._changed)
        self._news.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()
