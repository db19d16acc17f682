"""A peer that another process has open, used from this one: what `echostore.open` gives while `echostore serve` runs.

    with echostore.open("data") as peer:          # the home is locked by `echostore serve`: attached
        task = peer.party("@Trip").create(type="task", title="Tickets")
        with peer.party("@Trip").batch(): ...

Every object stands for one in the other process (`Remote`); methods, properties, items, iteration and contexts work as
they do there, errors are raised here as the same classes, and `isinstance` says what the object is over there. Each
thread has a connection of its own, because a batch belongs to a thread. What differs is told in docs/operate/serve.md:
a subscriber is told in a thread of its own and shortly after the change, and models can't be registered from here.

When the service ends and another process serves the home, calls reattach with back-off. Parties, items, queries and
attributes are found again there; an iteration, an open batch or a receipt is not. A call whose answer was lost raises,
because it is not known whether it was carried out. Live queries go on (`attached_watch`).
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

from echostore.kernel.errors import Closed, DiskFull, EchoError, Refused, TimedOut, UsageError
from echostore.kernel.values import merge_properties
from echostore.peer.local_server import PEER
from echostore.peer.local_socket import PROTOCOL_VERSION, Disconnected, Frames, Silent, connect_locally
from echostore.peer.local_values import Codec, living_class, pack_error, unpack_error
from echostore.store.home import Home

_log = logging.getLogger("echostore")

SLICE_S: Final = 1.0
"""How long the other process waits at a time for something to happen; then it looks whether this one is still there."""
HELLO_S: Final = 10.0
REATTACH_S: Final = 10.0
"""How long a call waits for another process to serve the home after the one it was attached to has ended."""
BACK_OFF_S: Final = (0.05, 1.0)
"""The first and the longest pause between two tries."""
_DROP_AT: Final = 64
"""Objects that are not used any more are told in groups."""


def attach(home: Home, *, name: str | None = None) -> Any:
    """The peer of a home that another process serves; None when none does."""
    frames = connect_locally(home.path)
    if frames is None:
        return None
    try:
        peer = _peer(Link(home, frames))
    except _NotSent:
        return None
    if name is not None and name != peer.name:
        peer.rename(name)
    return peer


class ConnectionLost(Closed):
    """The process that had the peer open has ended."""

    def __init__(self, what: str = "", *, unchanged: str = "") -> None:
        super().__init__(
            what or "the process that had the peer open has ended",
            unchanged=unchanged or "What it had made durable is kept.",
            next_step="Start `echostore serve` again, or open the home again.",
        )


class _NotSent(Exception):
    """The request did not reach the other process: it may be sent again."""


class _Own(threading.local):
    """What belongs to one thread."""

    def __init__(self) -> None:
        self.frames: Frames | None = None
        self.functions: list[int] = []
        self.entered: list[Frames] = []
        """The connections on which this thread is inside a context, such as a batch."""


class Link:
    """This program's conversation with the running peer: one connection per thread, and one that keeps the objects
    alive when that of a thread is lost."""

    def __init__(self, home: Home, keeper: Frames) -> None:
        self.home = home
        self.closed = False
        self.generation = 0
        """Counts the processes that were attached to; objects of an earlier one are found again when they are used."""
        self._instance = b""
        self._lock = threading.RLock()
        self._token = secrets.token_bytes(16)
        self._own = _Own()
        self._all: weakref.WeakSet[Frames] = weakref.WeakSet()
        self._dropped: deque[int] = deque()
        self._functions: dict[int, Callable[..., Any]] = {}
        self._numbers = iter(range(1 << 62))
        self._codec = Codec(self._outgoing, lambda named: _made(self, named))
        self._keeper: Frames | None = keeper
        self._greet(keeper)

    def _greet(self, frames: Frames) -> Frames:
        """Begin the conversation on a new connection."""
        try:
            frames.send(["attach", PROTOCOL_VERSION, self._token])
            instance = self._answer(frames, HELLO_S)
        except Disconnected:
            raise _NotSent from None
        except Silent:
            raise Closed(f"the process that has {self.home.path} open does not answer") from None
        self._all.add(frames)
        with self._lock:
            if instance != self._instance:
                self._instance = instance
                self.generation += 1
                self._dropped.clear()
                if self.generation > 1:
                    self._keeper = None
            if self._keeper is None:
                self._keeper = connect_locally(self.home.path)
                if self._keeper is None:
                    raise _NotSent
                self._greet(self._keeper)
        return frames

    @property
    def frames(self) -> Frames:
        """The connection of this thread."""
        if self.closed:
            raise Closed("the peer has been closed", next_step="Open it again.")
        if self._own.frames is None:
            if self._own.entered:
                raise ConnectionLost(unchanged="The open batch was undone.")
            fresh = connect_locally(self.home.path)
            if fresh is None:
                raise _NotSent
            self._own.frames = self._greet(fresh)
        return self._own.frames

    def enter(self) -> Frames:
        """This thread is inside a context now, which lasts as long as its connection does."""
        frames = self.frames
        self._own.entered.append(frames)
        return frames

    def leave(self, entered_on: Frames) -> bool:
        """This thread leaves its context. False when the connection was lost, and the context with it."""
        self._own.entered.pop()
        return self._own.frames is entered_on

    def request(self, verb: str, target: Any, *rest: Any, patience_s: float = REATTACH_S) -> Any:
        """One request and its answer. While nobody serves the home it is tried again for `patience_s`."""
        deadline = time.monotonic() + patience_s
        pause_s, longest_s = BACK_OFF_S
        while True:
            try:
                return self._request(verb, target, rest)
            except _NotSent:
                if self._own.entered:
                    raise ConnectionLost(unchanged="The open batch was undone.") from None
                if time.monotonic() + pause_s > deadline:
                    raise ConnectionLost from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _request(self, verb: str, target: Any, rest: tuple[Any, ...]) -> Any:
        functions: list[int] = []
        try:
            frames = self.frames
            number = self._number(target)
            packed = [self._packed(each, functions) for each in rest]
            if len(self._dropped) >= _DROP_AT:
                gone = [self._dropped.popleft() for _ in range(len(self._dropped))]
                self._send(frames, ["drop", PEER, *gone])
                self._answer(frames)
            self._send(frames, [verb, number, *packed])
            return self._answer(frames)
        except Disconnected:
            self._hang_up()
            raise ConnectionLost(
                "the process that had the peer open has ended during a call",
                unchanged="It is not known whether the call was carried out.",
            ) from None
        finally:
            for each in functions:
                del self._functions[each]

    def _send(self, frames: Frames, request: list[Any]) -> None:
        try:
            frames.send(request)
        except Disconnected:
            self._hang_up()
            raise _NotSent from None

    def _number(self, target: Any) -> int:
        """The number of an object in the process that is attached to now."""
        if isinstance(target, int):
            return target
        number, generation = (object.__getattribute__(target, name) for name in ("_number", "_generation"))
        if number == PEER or generation == self.generation:
            return int(number)
        if not isinstance(target, Remote):
            raise ConnectionLost
        return target._find_again()

    @property
    def peer(self) -> Any:
        return _peer(self)

    def missing_item(self, party: bytes, item: bytes) -> Any:
        """What stands for an item that is not in its party any more."""
        return _remote_class("echostore.peer.items:Item")(self, -1, {"id": item, "of": party}, generation=0)

    def drop(self, generation: int, number: int) -> None:
        if generation == self.generation:
            self._dropped.append(number)

    def close(self) -> None:
        self.closed = True
        for frames in list(self._all):
            frames.close()

    def _answer(self, frames: Frames, timeout_s: float | None = None) -> Any:
        while True:
            try:
                kind, *rest = frames.receive(timeout_s)
            except (Disconnected, Silent):
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
        frames, self._own.frames = self._own.frames, None
        if frames is not None:
            frames.close()

    def _packed(self, value: Any, functions: list[int]) -> Any:
        before, self._own.functions = self._own.functions, functions
        try:
            return self._codec.pack(value)
        finally:
            self._own.functions = before

    def _outgoing(self, value: Any) -> list[Any] | None:
        kind = type(value)
        if issubclass(kind, (Remote, _RemoteIterator, _RemoteContext)):
            if object.__getattribute__(value, "_link") is not self:
                raise UsageError("the object belongs to another peer")
            return ["r", self._number(value)]
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


# objects of the other process


class Remote:
    """An object of the other process."""

    __slots__ = ("__weakref__", "_facts", "_found", "_generation", "_link", "_number", "_origin")

    def __init__(self, link: Link, number: int, facts: dict[str, Any], *, generation: int | None = None) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_generation", link.generation if generation is None else generation)
        object.__setattr__(self, "_facts", facts)
        object.__setattr__(self, "_origin", None)
        if number != PEER and self._generation:
            weakref.finalize(self, link.drop, self._generation, number).atexit = False

    _echo_class: type
    """What it is over there."""
    _generation: int
    _origin: Callable[[], Any] | None
    """How to get the same object from another process; parties and items are found by their facts."""

    def _find_again(self) -> int:
        """The number of the same object in another process."""
        facts = self._facts
        if "id" in facts:
            found = _call(_call(_peer(self._link), "party", facts["of"]), "get", facts["id"])
        elif "key" in facts:
            found = _call(_peer(self._link), "party", facts["key"])
        elif self._origin is not None:
            found = self._origin()
        else:
            raise ConnectionLost(
                f"the process has ended that this {self._echo_class.__name__} belonged to", unchanged="Get it again."
            )
        for name in ("_number", "_generation"):
            object.__setattr__(self, name, object.__getattribute__(found, name))
        object.__setattr__(self, "_found", found)  # the other process keeps the object as long as this one does
        return int(self._number)

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
        return _with_origin(self._link.request("get", self, name), lambda: getattr(self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.request("set", self, name, value)

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
        try:
            text: str = _called(self, "__repr__", (), {}, patience_s=0.0)
        except EchoError as error:
            return f"<a {self._echo_class.__name__}: {error.what}>"
        return text


class _RemoteIterator:
    """An iterator of the other process."""

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number, self._generation = link, number, link.generation
        weakref.finalize(self, link.drop, link.generation, number).atexit = False

    def __iter__(self) -> "Iterator[Any]":
        return self

    def __next__(self) -> Any:
        return self._link.request("next", self, patience_s=0.0)


class _RemoteContext:
    """A context manager of the other process, such as a batch. Entered and left by the same thread."""

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number, self._generation = link, number, link.generation
        self._entered_on: Frames | None = None
        weakref.finalize(self, link.drop, link.generation, number).atexit = False

    def __enter__(self) -> Any:
        result = self._link.request("enter", self, patience_s=0.0)
        self._entered_on = self._link.enter()
        return result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        assert self._entered_on is not None, "it was entered"
        if not self._link.leave(self._entered_on):
            if error is None:
                raise ConnectionLost(unchanged="The open batch was undone.")
            return False  # the connection was lost, and the other side has left the context by that
        if error is not None and not isinstance(error, Exception):
            self._link._hang_up()  # ^C: the other side undoes what was open
            return False
        goes_on: bool = self._link.request("exit", self, None if error is None else pack_error(error), patience_s=0.0)
        return error is not None and not goes_on


def _peer(link: Link) -> Any:
    return _made(link, ["r", PEER, "echostore.peer.peer:Peer", {"same": 0}])


def _with_origin(result: Any, origin: Callable[[], Any]) -> Any:
    """Note where an object came from, unless it is found by what it is."""
    if isinstance(result, Remote) and not {"id", "key"} & result._facts.keys():
        object.__setattr__(result, "_origin", origin)
    return result


def _made(link: Link, named: list[Any]) -> Any:
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
    if hasattr(real, "__next__"):
        members["__next__"] = lambda self: self._link.request("next", self, patience_s=0.0)
    if hasattr(real, "__enter__"):
        members["__enter__"] = lambda self: self
        members["__exit__"] = lambda self, kind, error, trace: self.close()
    if (real.__name__, "__arrow_c_stream__") in _LOCAL:
        members["__arrow_c_stream__"] = _LOCAL[real.__name__, "__arrow_c_stream__"]
    return type(real.__name__, (Remote,), members)


def _special(name: str) -> Callable[..., Any]:
    return lambda self, *positional: _call(self, name, *positional)


def _iterated(remote: Remote) -> "Iterator[Any]":
    return iter(remote._link.request("iterate", remote))


def remote_call(remote: Remote, method: str, /, *positional: Any, patience_s: float = REATTACH_S, **named: Any) -> Any:
    """Call a method of an object of the other process; while nobody serves the home, try again for `patience_s`."""
    return _called(remote, method, positional, named, patience_s)


def _call(remote: Remote, method: str, /, *positional: Any, **named: Any) -> Any:
    """As `remote_call`, for named arguments of any name: properties among them."""
    return _called(remote, method, positional, named, REATTACH_S)


def _called(remote: Remote, method: str, positional: tuple[Any, ...], named: dict[str, Any], patience_s: float) -> Any:
    result = remote._link.request("call", remote, method, positional, named, patience_s=patience_s)
    if type(result).__name__ in _PURE:
        return _with_origin(result, lambda: _call(remote, method, *positional, **named))
    return result


_PURE: Final = frozenset({"MultiQuery", "Query"})
"""Objects that a call makes without changing anything: the call may be made again in another process."""


# what is done on this side


def _close(peer: Remote) -> None:
    """Make what was written durable, and leave the running peer to itself. On a full disk that stores it later."""
    if not peer._link.closed:
        try:
            peer._link.request("call", peer, "flush", (), {}, patience_s=0.0)
        except DiskFull as error:
            _log.warning("the running peer has no space: %s %s", error.unchanged, error.next_step)
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


def _watch(query: Remote, *, timeout_s: float | None = None, initial: bool = False) -> Any:
    from echostore.peer.attached_watch import RemoteWatch

    return RemoteWatch(query, timeout_s=timeout_s, initial=initial)


def _subscribe(query: Remote, fn: Callable[[Any], object], *, initial: bool = False) -> Any:
    from echostore.peer.attached_watch import RemoteSubscription

    return RemoteSubscription(_watch(query, initial=initial), fn)


def _to_pandas(query: Remote) -> Any:
    from echostore.peer.query_arrow import to_pandas

    return to_pandas(query.to_arrow())


def _to_polars(query: Remote) -> Any:
    from echostore.peer.query_arrow import to_polars

    return to_polars(query.to_arrow())


def _arrow_stream(query: Remote, requested_schema: object | None = None) -> object:
    return query.to_arrow().__arrow_c_stream__(requested_schema)


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
    **{
        (query, name): function
        for query in ("Query", "MultiQuery")
        for name, function in (
            ("subscribe", _subscribe),
            ("watch", _watch),
            ("to_pandas", _to_pandas),
            ("to_polars", _to_polars),
            ("__arrow_c_stream__", _arrow_stream),
        )
    },
}
"""Methods that are this side's: they take code, paths or time of this program."""
