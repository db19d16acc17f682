"""echostore for asyncio: the same objects, awaited.

    async with echostore.aio.open("data") as peer:
        party = await peer.party("@Trip")
        task = await party.create(type="task", title="Tickets")
        await task.update(done=True)
        async with party.batch():
            await task.update(a=1)
        print(await party.title, await party.query(type="task").where(done=True).all())
        async for change in party.query(type="task").watch():
            ...

Every expression that starts at an object is a plan; `await` carries it out in a worker thread, as a whole, so that a
chain of calls is one trip and the loop is never held up. What a plan gives is handed over as it is, objects of the peer
wrapped again. Inside `async with party.batch()` the task has a thread of its own, because a batch belongs to a thread.

A call that nobody awaits is not carried out: it warns (RuntimeWarning, with its line), as a coroutine does. What Python
can't await raises at once and names the awaited form: assignments, `in`, `len`, plain `for`, the truth of a plan.
"""

import asyncio
import os
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, Final, NoReturn

from echostore.kernel.errors import UsageError
from echostore.peer.attached import SLICE_S, Remote
from echostore.peer.attached_watch import RemoteSubscription, RemoteWatch
from echostore.peer.local_values import living_name
from echostore.peer.peer import open_peer
from echostore.peer.query_live import Watch

WORKERS_MAX: Final = 16
"""Calls that may wait at the same time, each in a thread."""

_batch_thread: ContextVar[Executor | None] = ContextVar("echostore_batch_thread", default=None)


def open(path: str | os.PathLike[str], **options: Any) -> "Opening":
    """Open a peer, or attach to the one that `echostore serve` runs; options as for `echostore.open`.

    Use it with `async with`, or await it and close the peer later.
    """
    return Opening(lambda: open_peer(path, **options))


class _Workers:
    """The threads of one open peer."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS_MAX, thread_name_prefix="echostore-aio")

    async def run(self, work: Callable[[], Any]) -> Any:
        executor = _batch_thread.get() or self._pool
        return await asyncio.get_running_loop().run_in_executor(executor, _without_stop(work))

    def close(self) -> None:
        self._pool.shutdown(wait=False)


class Opening:
    """A peer that is about to be opened."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._peer: Plan | None = None

    def __await__(self) -> Generator[Any, None, "Plan"]:
        return self._open().__await__()

    async def _open(self) -> "Plan":
        workers = _Workers()
        try:
            return Plan(workers, await workers.run(self._start), ())
        except BaseException:
            workers.close()
            raise

    async def __aenter__(self) -> "Plan":
        self._peer = await self._open()
        return self._peer

    async def __aexit__(self, *exception: object) -> None:
        assert self._peer is not None
        try:
            await self._peer.close()
        finally:
            self._peer._workers.close()


class Plan:
    """An object of a peer and what to do with it. Without steps it is the object itself."""

    __slots__ = ("_called_at", "_context", "_name", "_steps", "_target", "_workers")

    def __init__(
        self,
        workers: _Workers,
        target: Any,
        steps: tuple[Callable[[Any], Any], ...],
        *,
        name: str = "",
        called_at: tuple[str, str, int] | None = None,
    ) -> None:
        self._workers, self._target, self._steps = workers, target, steps
        self._name = name
        """Of the attribute that was asked for last."""
        self._context: _Entered | None = None
        self._called_at = called_at
        """Of a call that is not awaited yet: its name, file and line."""

    # building

    def __getattr__(self, name: str) -> "Plan":
        if name.startswith("_"):
            raise AttributeError(name)
        return self._then(lambda value: getattr(value, name), name=name)

    def __call__(self, /, *positional: Any, **named: Any) -> "Plan":
        plain = [_plain(each) for each in positional]
        plain_named = {key: _plain(each) for key, each in named.items()}
        return self._call(lambda value: value(*plain, **plain_named), self._name or "a call")

    def __getitem__(self, key: Any) -> "Plan":
        return self._then(lambda value: value[key])

    def set(self, key: Any, value: Any) -> "Plan":
        """`await task.set("done", True)` is `task["done"] = True`."""
        given = _plain(value)
        return self._call(lambda target: target.__setitem__(key, given), "set")

    def unset(self, key: Any) -> "Plan":
        """`await task.unset("done")` is `del task["done"]`."""
        return self._call(lambda target: target.__delitem__(key), "unset")

    def _then(
        self, step: Callable[[Any], Any], *, name: str = "", called_at: tuple[str, str, int] | None = None
    ) -> "Plan":
        self._called_at = None  # it is part of a longer plan now
        return Plan(self._workers, self._target, (*self._steps, step), name=name, called_at=called_at)

    def _call(self, step: Callable[[Any], Any], name: str) -> "Plan":
        caller = sys._getframe(2)
        return self._then(step, called_at=(name, caller.f_code.co_filename, caller.f_lineno))

    def __del__(self) -> None:
        if self._called_at is not None and not sys.is_finalizing():
            name, file, line = self._called_at
            text = f"{type(self._target).__name__}: {name}(...) was never awaited, so nothing was done"
            warnings.warn_explicit(text, RuntimeWarning, file, line, source=self)

    # what can't be awaited

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise UsageError("an assignment can't be awaited", next_step=f"Write `await item.set({key!r}, ...)`.")

    def __delitem__(self, key: Any) -> NoReturn:
        raise UsageError("`del` can't be awaited", next_step=f"Write `await item.unset({key!r})`.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Plan.__slots__:
            raise UsageError(f"the assignment of {name} can't be awaited", next_step="Call a method and await it.")
        object.__setattr__(self, name, value)

    def __iter__(self) -> NoReturn:
        raise TypeError("this iterates by `async for`, or over what an `await` returns")

    def __contains__(self, value: Any) -> NoReturn:
        raise TypeError("`in` can't be awaited: await the value, then look into it")

    def __len__(self) -> NoReturn:
        raise TypeError("`len` can't be awaited: await the value, or its count()")

    def __bool__(self) -> bool:
        if self._steps:
            self._called_at = None
            raise TypeError("the plan is not carried out yet: await it, then look at the result")
        return True

    # carrying out

    def __await__(self) -> Generator[Any, None, Any]:
        self._called_at = None
        return self._carry_out().__await__()

    async def _carry_out(self) -> Any:
        return _wrapped(self._workers, await self._workers.run(self._value))

    def _value(self) -> Any:
        value = self._target
        for step in self._steps:
            value = step(value)
        return value

    async def __aiter__(self) -> AsyncIterator[Any]:
        """What the plan gives, piece by piece; changes of a watch as they come."""
        self._called_at = None
        found = await self._workers.run(lambda: _iterable(self._value()))
        if isinstance(found, Watch):
            async for change in self._changes(found):
                yield change
            return
        nothing = object()
        while (piece := await self._workers.run(lambda: next(found, nothing))) is not nothing:
            yield _wrapped(self._workers, piece)

    async def _changes(self, watch: Any) -> AsyncIterator[Any]:
        patience = await self._workers.run(lambda: watch.timeout_s)
        waited = 0.0
        try:
            while patience is None or waited < patience:
                slice_s = SLICE_S if patience is None else min(SLICE_S, patience - waited)
                # In slices, so that a task that is cancelled leaves no thread waiting.
                change = await self._workers.run(partial(watch.poll, slice_s))
                if change is None:
                    waited += slice_s
                    continue
                waited = 0.0
                yield change.map(lambda item: _wrapped(self._workers, item))
        finally:
            await self._workers.run(watch.close)

    # contexts

    async def __aenter__(self) -> Any:
        self._called_at = None
        self._context = _Entered(self._workers, _batch_thread.get())
        return _wrapped(self._workers, await self._context.enter(self._value))

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert self._context is not None
        return await self._context.leave(kind, error)

    def __repr__(self) -> str:
        return f"<plan of {len(self._steps)} steps on {self._target!r}>" if self._steps else f"<aio {self._target!r}>"


class _Entered:
    """A context of the peer that a task is in. The outermost one brings the thread."""

    def __init__(self, workers: _Workers, outer: Executor | None) -> None:
        self._workers = workers
        self._own = ThreadPoolExecutor(1, thread_name_prefix="echostore-aio-batch") if outer is None else None
        self._token: Token[Executor | None] | None = None
        self._context: Any = None

    async def enter(self, make: Callable[[], Any]) -> Any:
        if self._own is not None:
            self._token = _batch_thread.set(self._own)

        def begin() -> Any:
            self._context = make()
            return self._context.__enter__()

        try:
            return await self._workers.run(begin)
        except BaseException:
            self._end()
            raise

    async def leave(self, kind: Any, error: Any) -> bool:
        try:
            swallowed = await asyncio.shield(self._workers.run(lambda: self._context.__exit__(kind, error, None)))
            return bool(swallowed)
        finally:
            self._end()

    def _end(self) -> None:
        if self._token is not None:
            _batch_thread.reset(self._token)
            self._token = None
        if self._own is not None:
            self._own.shutdown(wait=False)


def _plain(value: Any) -> Any:
    """What the peer is given: objects without their wrapping."""
    if isinstance(value, Plan):
        if value._steps:
            value._called_at = None
            raise UsageError("an argument is an unawaited operation", next_step="Await it first, and pass the result.")
        return value._target
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(each) for each in value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _wrapped(workers: _Workers, value: Any) -> Any:
    if isinstance(value, (Remote, RemoteSubscription, RemoteWatch)) or living_name(type(value)) is not None:
        return Plan(workers, value, ())
    if type(value) in (list, tuple):
        return type(value)(_wrapped(workers, each) for each in value)
    if type(value) is dict:
        return {key: _wrapped(workers, each) for key, each in value.items()}
    return value


def _iterable(value: Any) -> Any:
    return value if isinstance(value, Watch) else iter(value)


def _without_stop(work: Callable[[], Any]) -> Callable[[], Any]:
    """A StopIteration can't leave a future; it means that an iteration ended where one more was asked for."""

    def run() -> Any:
        try:
            return work()
        except StopIteration as ended:
            raise RuntimeError("the iteration has ended") from ended

    return run


__all__ = ["Opening", "Plan", "open"]
