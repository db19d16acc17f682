"""A peer that another process has open, used from this one: what `echostore.open` gives while `echostore serve` runs.

    with echostore.open("data") as peer:          # the home is locked by `echostore serve`: attached
        task = peer.party("@Trip").create(type="task", title="Tickets")
        with peer.party("@Trip").batch(): ...

Every object stands for one in the other process (`Remote`); methods, properties, items, iteration and contexts work as
they do there, errors are raised here as the same classes, and `isinstance` says what the object is over there. Each
thread has a connection of its own, because a batch belongs to a thread. What differs is told in docs/operate/serve.md:
a subscriber is told in a thread of its own and shortly after the change, and models can't be registered from here.
"""

import logging
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from inspect import getattr_static, isfunction
from itertools import islice
from pathlib import Path
from typing import Any, Final

from echostore.kernel.errors import Closed, EchoError, Refused, TimedOut, UsageError
from echostore.kernel.values import merge_properties
from echostore.peer.local_server import PEER
from echostore.peer.local_socket import PROTOCOL_VERSION, Disconnected, Frames, connect_locally
from echostore.peer.local_values import Codec, living_class, pack_error, unpack_error
from echostore.store.home import Home

_log = logging.getLogger("echostore")

SLICE_S: Final = 1.0
"""How long the other process waits at a time for something to happen; then it looks whether this one is still there."""
HELLO_S: Final = 10.0
_DROP_AT: Final = 64
"""Objects that are not used any more are told in groups."""


def attach(home: Home, *, name: str | None = None) -> Any:
    """The peer of a home that another process serves; None when none does."""
    frames = connect_locally(home.path)
    if frames is None:
        return None
    link = _Link(home, frames)
    peer = _made(link, ["r", PEER, "echostore.peer.peer:Peer", {"same": 0}])
    if name is not None and name != peer.name:
        peer.rename(name)
    return peer


class _Link:
    """This program's conversation with the running peer: one connection per thread, and one that keeps the objects
    alive when that of a thread is lost."""

    def __init__(self, home: Home, keeper: Frames) -> None:
        self.home = home
        self.closed = False
        self._token = secrets.token_bytes(16)
        self._own = threading.local()
        self._all: weakref.WeakSet[Frames] = weakref.WeakSet()
        self._dropped: deque[int] = deque()
        self._functions: dict[int, Callable[..., Any]] = {}
        self._numbers = iter(range(1 << 62))
        self._codec = Codec(self._outgoing, lambda named: _made(self, named))
        self._keeper = self._greet(keeper)

    def _greet(self, frames: Frames) -> Frames:
        """Begin the conversation on a new connection."""
        try:
            frames.send(["attach", PROTOCOL_VERSION, self._token])
            self._answer(frames, HELLO_S)
        except Disconnected:
            raise _lost() from None
        except TimeoutError:
            raise Closed(f"the process that has {self.home.path} open does not answer") from None
        self._all.add(frames)
        return frames

    @property
    def frames(self) -> Frames:
        """The connection of this thread."""
        if self.closed:
            raise Closed("the peer has been closed", next_step="Open it again.")
        found: Frames | None = getattr(self._own, "frames", None)
        if found is None:
            fresh = connect_locally(self.home.path)
            if fresh is None:
                raise _lost()
            found = self._own.frames = self._greet(fresh)
        return found

    def current(self) -> Frames | None:
        return getattr(self._own, "frames", None)

    def request(self, verb: str, number: int, *rest: Any) -> Any:
        """One request and its answer."""
        functions: list[int] = []
        packed = [self._packed(each, functions) for each in rest]
        try:
            frames = self.frames
            if len(self._dropped) >= _DROP_AT:
                gone = [self._dropped.popleft() for _ in range(len(self._dropped))]
                frames.send(["drop", PEER, *gone])
                self._answer(frames)
            frames.send([verb, number, *packed])
            return self._answer(frames)
        except Disconnected:
            self._hang_up()
            raise _lost() from None
        finally:
            for each in functions:
                del self._functions[each]

    def drop(self, number: int) -> None:
        self._dropped.append(number)

    def close(self) -> None:
        self.closed = True
        for frames in list(self._all):
            frames.close()

    def _answer(self, frames: Frames, timeout_s: float | None = None) -> Any:
        while True:
            try:
                kind, *rest = frames.receive(timeout_s)
            except (Disconnected, TimeoutError):
                raise
            except BaseException:
                # Interrupted: the answer would come when nobody waits for it. The other side undoes an open batch.
                self._hang_up()
                raise
            if kind == "ok":
                return self._codec.unpack(rest[0])
            if kind == "fail":
                raise unpack_error(rest[0])
            if kind == "end":
                raise StopIteration
            if kind not in ("ask", "tell"):
                raise Disconnected(f"an unexpected {kind!r:.40}")
            self._called_back(frames, kind, *rest)

    def _called_back(self, frames: Frames, kind: str, number: int, positional: Any, named: Any) -> None:
        function = self._functions[number]
        try:
            result = function(*self._codec.unpack(positional), **self._codec.unpack(named))
        except Exception as error:
            if kind == "tell":
                raise
            frames.send(["raised", pack_error(error)])
        else:
            if kind == "ask":
                frames.send(["answer", self._codec.pack(result)])

    def _hang_up(self) -> None:
        frames = self.current()
        if frames is not None:
            self._own.frames = None
            frames.close()

    def _packed(self, value: Any, functions: list[int]) -> Any:
        before = self._own.__dict__.get("functions")
        self._own.functions = functions
        try:
            return self._codec.pack(value)
        finally:
            self._own.functions = before

    def _outgoing(self, value: Any) -> list[Any] | None:
        kind = type(value)
        if issubclass(kind, (Remote, _RemoteIterator, _RemoteContext)):
            number = object.__getattribute__(value, "_number")
            if object.__getattribute__(value, "_link") is not self:
                raise UsageError("the object belongs to another peer")
            return ["r", number]
        if issubclass(kind, type):
            raise Refused(
                f"the class {value.__name__} can't be sent to the running peer: code never travels",
                next_step="Let the process that runs the peer register it.",
            )
        if isinstance(value, Iterator):
            return ["g", self._lent(lambda: tuple(islice(value, 1)))]
        return ["f", self._lent(value)] if callable(value) else None

    def _lent(self, function: Callable[..., Any]) -> int:
        """A number for a function that the other side may call during this request."""
        number = next(self._numbers)
        self._functions[number] = function
        self._own.functions.append(number)
        return number


def _lost() -> Closed:
    return Closed(
        "the process that had the peer open has ended",
        unchanged="What it had made durable is.",
        next_step="Open the home again.",
    )


# objects of the other process


class Remote:
    """An object of the other process."""

    __slots__ = ("__weakref__", "_facts", "_link", "_number")

    def __init__(self, link: _Link, number: int, facts: dict[str, Any]) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_facts", facts)
        if number != PEER:
            weakref.finalize(self, link.drop, number).atexit = False

    _echo_class: type
    """What it is over there."""

    def __getattr__(self, name: str) -> Any:
        facts = object.__getattribute__(self, "_facts")
        if name in ("id", "key") and name in facts:
            return facts[name]
        if name.startswith("_") and name != "_create":
            raise AttributeError(name)
        local = _LOCAL.get((self._echo_class.__name__, name))
        if local is not None:
            return lambda *positional, **named: local(self, *positional, **named)
        if isfunction(getattr_static(self._echo_class, name, None)):
            return lambda *positional, **named: _call(self, name, *positional, **named)
        return self._link.request("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.request("set", self._number, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Remote) or other._link is not self._link:
            return False
        mine, theirs = self._facts, other._facts
        if "id" in mine:
            return (mine["id"], mine["of"]) == (theirs.get("id"), theirs.get("of"))
        return bool(mine["same"] == theirs["same"])

    def __hash__(self) -> int:
        facts = self._facts
        return hash((facts["of"], facts["id"]) if "id" in facts else facts["same"])

    def __repr__(self) -> str:
        if self._link.closed:
            return f"<a {self._echo_class.__name__} of a peer that was closed>"
        text: str = _call(self, "__repr__")
        return text


class _RemoteIterator:
    """An iterator of the other process."""

    def __init__(self, link: _Link, number: int) -> None:
        self._link, self._number = link, number
        weakref.finalize(self, link.drop, number).atexit = False

    def __iter__(self) -> "Iterator[Any]":
        return self

    def __next__(self) -> Any:
        return self._link.request("next", self._number)


class _RemoteContext:
    """A context manager of the other process, such as a batch. Entered and left by the same thread."""

    def __init__(self, link: _Link, number: int) -> None:
        self._link, self._number = link, number
        self._entered_on: Frames | None = None
        weakref.finalize(self, link.drop, number).atexit = False

    def __enter__(self) -> Any:
        result = self._link.request("enter", self._number)
        self._entered_on = self._link.current()
        return result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if self._link.current() is not self._entered_on:
            if error is None:
                raise _lost()
            return False  # the connection was lost, and the other side has left the context by that
        if error is not None and not isinstance(error, Exception):
            self._link._hang_up()  # ^C: the other side undoes what was open
            return False
        goes_on: bool = self._link.request("exit", self._number, None if error is None else pack_error(error))
        return error is not None and not goes_on


def _made(link: _Link, named: list[Any]) -> Any:
    tag, number, *rest = named
    if tag == "i":
        return _RemoteIterator(link, number)
    if tag == "c":
        return _RemoteContext(link, number)
    return _remote_class(rest[0])(link, number, rest[1])


@cache
def _remote_class(name: str) -> type[Remote]:
    """The class of stand-ins for one class of the peer, with the special methods that it has."""
    real = living_class(name)
    members: dict[str, Any] = {
        "__slots__": (),
        "_echo_class": real,
        "__class__": property(lambda self: real),  # isinstance asks for it
        "__doc__": real.__doc__,
    }
    for special in ("__getitem__", "__setitem__", "__delitem__", "__contains__", "__len__", "__str__", "__call__"):
        if getattr(real, special, None) is not getattr(object, special, None):
            members[special] = _special(special)
    if hasattr(real, "__iter__"):
        members["__iter__"] = lambda self: _iterated(self)
    if hasattr(real, "__enter__"):
        members["__enter__"] = lambda self: self
        members["__exit__"] = lambda self, kind, error, trace: self.close()
    if (real.__name__, "__next__") in _LOCAL:
        members["__next__"] = _LOCAL[real.__name__, "__next__"]
        members["__iter__"] = lambda self: self
    if (real.__name__, "__arrow_c_stream__") in _LOCAL:
        members["__arrow_c_stream__"] = _LOCAL[real.__name__, "__arrow_c_stream__"]
    return type(real.__name__, (Remote,), members)


def _special(name: str) -> Callable[..., Any]:
    return lambda self, *positional: _call(self, name, *positional)


def _iterated(remote: Remote) -> "Iterator[Any]":
    return iter(remote._link.request("iterate", remote._number))


def _call(remote: Remote, method: str, /, *positional: Any, **named: Any) -> Any:
    return remote._link.request("call", remote._number, method, positional, named)


# what is done on this side


def _close(peer: Remote) -> None:
    """Make what was written durable, and leave the running peer to itself."""
    if not peer._link.closed:
        try:
            _call(peer, "flush")
        finally:
            peer._link.close()


def _create(party: Remote, model: Any = None, properties: Any = None, /, **named: Any) -> Any:
    if model is None or isinstance(model, str):
        return _call(party, "create", model, properties, **named)
    from echostore.peer.deprecated import deprecated_name
    from echostore.peer.schema import create_from_object

    own = {each: named.pop(each) for each in ("type", "parent") if each in named}
    given = merge_properties(properties, named)
    return create_from_object(party, model, name=deprecated_name(given), properties=given, **own)  # type: ignore[arg-type]  # a party, remotely


def _query(party: Remote, /, type: Any = None, **equals: Any) -> Any:
    from echostore.peer.schema import schema_type

    return _call(party, "query", None if type is None else schema_type(type), **equals)


def _define(schemas: Remote, type: Any, fields: Any = None, **named: Any) -> Any:
    if not isinstance(type, str) and fields is None:
        from echostore.peer.dataclass_mapping import fields_of, type_name

        type, fields = type_name(type), fields_of(type)
    return _call(schemas, "define", type, fields, **named)


def _to(item: Remote, cls: type) -> Any:
    from echostore.peer.dataclass_mapping import to_dataclass

    return to_dataclass(item, cls)  # type: ignore[arg-type]  # a property set, remotely


def _add_file(files: Remote, source: Any, **named: Any) -> Any:
    return _call(files, "add", os.path.abspath(source) if isinstance(source, (str, Path)) else source, **named)


def _save_file(files: Remote, file: Any, path: Any, **named: Any) -> Any:
    return _call(files, "save", file, os.path.abspath(path), **named)


def _import(peer: Remote, path: Any, *more: Any) -> Any:
    return _call(peer, "import_party", os.path.abspath(path), *more)


def _patient(remote: Remote, timeout: float | None, ask: Callable[[float], Any]) -> Any:
    """Wait in slices; the last one says how it ended."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE_S if deadline is None else deadline - time.monotonic()
        last = left < SLICE_S
        try:
            result = ask(max(0.0, min(left, SLICE_S)))
        except TimedOut:
            if last and deadline is not None:
                raise
        else:
            if result is not False or (last and deadline is not None):
                return result


def _wait(remote: Remote, *positional: Any, timeout: float | None = None, **named: Any) -> Any:
    return _patient(remote, timeout, lambda slice_s: _call(remote, "wait", *positional, timeout=slice_s, **named))


def _next_change(watch: Remote) -> Any:
    patience = watch.timeout_s
    deadline = None if patience is None else time.monotonic() + patience
    while True:
        left = SLICE_S if deadline is None else min(SLICE_S, deadline - time.monotonic())
        change = _call(watch, "poll", max(0.0, left))
        if change is not None:
            return change
        if watch.closed or (deadline is not None and time.monotonic() >= deadline):
            _call(watch, "close")
            raise StopIteration


def _subscribe(query: Remote, fn: Callable[[Any], object], *, initial: bool = False) -> "RemoteSubscription":
    return RemoteSubscription(query.watch(initial=initial), fn)


def _to_pandas(query: Remote) -> Any:
    from echostore.peer.query_arrow import to_pandas

    return to_pandas(query.to_arrow())


def _to_polars(query: Remote) -> Any:
    from echostore.peer.query_arrow import to_polars

    return to_polars(query.to_arrow())


def _arrow_stream(query: Remote, requested_schema: object | None = None) -> object:
    return query.to_arrow().__arrow_c_stream__(requested_schema)


class RemoteSubscription:
    """A subscription to a query of the running peer: `fn` is called in a thread of this program."""

    def __init__(self, watch: Any, fn: Callable[[Any], object]) -> None:
        self._watch, self._fn = watch, fn
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="echostore-subscription", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell nothing any more."""
        self._closing = True
        if not self._watch._link.closed:
            self._watch.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * SLICE_S)

    __call__ = close

    def __enter__(self) -> "RemoteSubscription":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            for change in self._watch:
                if self._closing:
                    return
                try:
                    self._fn(change)
                except Exception:  # noqa: BLE001  # as in the peer itself: the next change must be told
                    _log.exception("a subscriber of a live query raised")
        except EchoError as ended:
            if not self._closing and not self._watch._link.closed:
                _log.warning("a live query has ended: %s", ended)


_LOCAL: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("Peer", "close"): _close,
    ("Peer", "import_party"): _import,
    ("Party", "create"): _create,
    ("Party", "query"): _query,
    ("Schemas", "define"): _define,
    ("PropertySetItem", "to"): _to,
    ("Files", "add"): _add_file,
    ("Files", "save"): _save_file,
    ("Receipt", "wait"): _wait,
    ("Invitation", "wait"): _wait,
    ("Stream", "wait"): _wait,
    ("Watch", "__next__"): _next_change,
    **{
        (query, name): function
        for query in ("Query", "MultiQuery")
        for name, function in (
            ("subscribe", _subscribe),
            ("to_pandas", _to_pandas),
            ("to_polars", _to_polars),
            ("__arrow_c_stream__", _arrow_stream),
        )
    },
}
"""Methods that are this side's: they take code, paths or time of this program."""
