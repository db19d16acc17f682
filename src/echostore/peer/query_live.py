"""Following a query: subscriptions and watches over one party or several.

    party applies a batch --> Following: live answer --> outbox --> fn(change), or the backlog of a Watch

Threads: a provider calls its listeners while it holds off readers and writers of its party. The live answer is guarded
by a lock of its own, taken inside the party's. `fn` runs outside of that lock and one call at a time: a change that
comes up meanwhile waits in the outbox, so changes arrive in order, also when `fn` itself writes.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from echostore.kernel.ids import ItemId, PartyKey
from echostore.kernel.query.live import Change, LiveQuery, LiveUnion
from echostore.kernel.query.source import Source
from echostore.kernel.query.spec import QuerySpec

I = TypeVar("I")  # noqa: E741  # the handle of an item, as the peer makes it
Handle = TypeVar("Handle", covariant=True)

WATCH_CHANGES_MAX = 1024
"""Changes a watch keeps for a slow reader. Beyond, it only notes which items changed and catches up with one change."""


class SourceProvider(Protocol[Handle]):
    """A party, as far as queries need it."""

    @property
    def party(self) -> PartyKey: ...

    def source(self) -> Source:
        """What to read; called inside `reading`."""

    def handle(self, item: ItemId) -> Handle:
        """The object that stands for an item to the user; waits for nothing."""

    def reading(self) -> AbstractContextManager[object]:
        """Hold off writers; may be entered again by the thread that is inside."""

    def listen(self, fn: Callable[[Set[ItemId]], None]) -> Callable[[], None]:
        """Call `fn` inside `reading`, once per applied batch, with what `kernel.query.live` asks for; returns the end of it."""


class Following(Generic[I]):
    """A live answer that tells somebody of its changes."""

    def __init__(
        self,
        providers: Sequence[SourceProvider[I]],
        spec: QuerySpec,
        tell: Callable[[Change[I]], object],
        *,
        initial: bool,
        full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tell, self._full = tell, full
        self._lock = threading.Lock()
        self._outbox: deque[Change[I]] = deque()
        self._telling = False
        self._started = False
        self._pending: dict[PartyKey, set[ItemId]] = {}
        self._providers = {provider.party: provider for provider in providers}
        self._live: LiveQuery | LiveUnion = LiveUnion(spec)
        self._ends: list[Callable[[], None]] = []
        if len(providers) == 1:
            self._start_one(providers[0], spec, initial)
        else:
            self._start_union(self._live, spec, initial)
        self._deliver()

    def close(self) -> None:
        """Tell nothing any more."""
        with self._lock:
            ends, self._ends = self._ends, []
            self._started = False
            self._outbox.clear()
        for end in ends:
            end()

    def catch_up(self) -> None:
        """Take in the batches that were only noted while the reader was behind."""
        with self._lock:
            parties = list(self._pending)
        for party in parties:
            with self._providers[party].reading():
                self._batch(party, frozenset())

    def _start_one(self, provider: SourceProvider[I], spec: QuerySpec, initial: bool) -> None:
        with provider.reading():
            self._live = LiveQuery(spec, provider.source())
            first = self._live.start()
            if initial:
                self._outbox.append(first.map(provider.handle))
            self._started = True
            self._ends.append(provider.listen(self._listener(provider.party)))

    def _start_union(self, live: LiveUnion, spec: QuerySpec, initial: bool) -> None:
        """Party by party: there is no moment that several parties share."""
        for party, provider in self._providers.items():
            with provider.reading():
                with self._lock:
                    live.add(party, provider.source())
                self._ends.append(provider.listen(self._listener(party)))
        with self._lock:
            if initial and spec.reduce is not None:
                self._outbox.append(Change(groups=live.groups()))
            elif initial:
                items = [self._providers[party].handle(item) for party, item in live.items()]
                placed = tuple(enumerate(items)) if spec.order else ()
                self._outbox.append(Change(added=tuple(items), positions=placed))
            self._started = True

    def _listener(self, party: PartyKey) -> Callable[[Set[ItemId]], None]:
        return lambda changed: self._batch(party, changed)

    def _batch(self, party: PartyKey, changed: Set[ItemId]) -> None:
        with self._lock:
            if self._started and self._full():
                self._pending.setdefault(party, set()).update(changed)
                return
            changed = changed | self._pending.pop(party, set())
            change = self._update(party, changed)
            if change is not None and self._started:
                self._outbox.append(change)
        self._deliver()

    def _update(self, party: PartyKey, changed: Set[ItemId]) -> Change[I] | None:
        if isinstance(self._live, LiveQuery):
            one = self._live.update(changed)
            return None if one is None else one.map(self._providers[party].handle)
        union = self._live.update(party, changed)
        return None if union is None else union.map(lambda token: self._providers[token[0]].handle(token[1]))

    def _deliver(self) -> None:
        """Tell what waits in the outbox, unless another call is at it, which will then tell this too."""
        while True:
            with self._lock:
                if self._telling or not self._outbox:
                    return
                change = self._outbox.popleft()
                self._telling = True
            try:
                self._tell(change)
            finally:
                with self._lock:
                    self._telling = False


class Subscription:
    """The handle of a subscription: close it, call it, or use it in a with statement."""

    def __init__(self, following: Following[Any]) -> None:
        self._following = following

    def close(self) -> None:
        self._following.close()

    __call__ = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Watch(Generic[I]):
    """An iterator over the changes of an answer, from its making on. It closes when it ends or is forgotten."""

    def __init__(
        self, providers: Sequence[SourceProvider[I]], spec: QuerySpec, *, timeout_s: float | None, initial: bool
    ) -> None:
        self._timeout_s = timeout_s
        self._backlog: _Backlog[I] = _Backlog()
        # The following knows the backlog and not the watch, so that a watch nobody holds any more is collected.
        self._following = Following(providers, spec, self._backlog.put, initial=initial, full=self._backlog.full)
        self._end = weakref.finalize(self, self._following.close)

    def __iter__(self) -> Iterator[Change[I]]:
        return self

    def __next__(self) -> Change[I]:
        change = self._backlog.take(self._timeout_s)
        if change is None:
            self.close()
            raise StopIteration
        self._following.catch_up()
        return change

    def poll(self, wait_s: float) -> Change[I] | None:
        """The next change; None when none has come in that time. Unlike iterating, it does not end the watch."""
        change = self._backlog.take(wait_s)
        if change is not None:
            self._following.catch_up()
        return change

    @property
    def timeout_s(self) -> float | None:
        """How long an iteration waits for a change before it ends."""
        return self._timeout_s

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def close(self) -> None:
        """End the iteration, also for a thread that waits in it."""
        self._end()
        self._backlog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Backlog(Generic[I]):
    """Changes that wait for the reader of a watch."""

    def __init__(self) -> None:
        self._changes: deque[Change[I]] = deque()
        self._closed = False
        self._arrived = threading.Condition()

    def put(self, change: Change[I]) -> None:
        with self._arrived:
            self._changes.append(change)
            self._arrived.notify()

    def full(self) -> bool:
        return len(self._changes) >= WATCH_CHANGES_MAX

    def take(self, timeout_s: float | None) -> Change[I] | None:
        """The next change; None when the time is over or the watch closed."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._changes or self._closed, timeout_s)
            return self._changes.popleft() if self._changes else None

    def close(self) -> None:
        with self._arrived:
            self._closed = True
            self._changes.clear()
            self._arrived.notify_all()
