"""The local socket, on the side that has the peer: other programs of this machine use its objects from outside.

    client thread  --connection-->  one thread here, which does what that thread would have done in this process

One thread per connection: the peer's lock is re-entrant per thread, so that a batch of one client keeps others out
and lets its own calls in. A client that goes away in a batch loses it, like a program that raises in one; so does one
that leaves it open and says nothing for `BATCH_IDLE_S`, because nobody else could write meanwhile.

Requests: [verb, number of the object, ...]; answers: ["ok", value], ["fail", error] or ["end"] (of an iteration).
Between the two come ["ask", function, arguments] for a function of the client whose answer is awaited here, and
["tell", ...] where this process can't wait for it.
"""

import contextlib
import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from echostore.kernel.errors import EchoError, Refused, TimedOut, TooLarge, UsageError
from echostore.peer.local_rights import check_offered, check_settable
from echostore.peer.local_socket import PROTOCOL_VERSION, Disconnected, Frames, Silent, listen_locally
from echostore.peer.local_values import Codec, living_name, pack_error, unpack_error
from echostore.peer.query_live import Watch

if TYPE_CHECKING:
    from echostore.peer.peer import Peer

_log = logging.getLogger("echostore.local")

CONNECTIONS_MAX: Final = 256
OBJECTS_MAX: Final = 1_000_000
"""Living objects that one client may hold at a time; each costs a few hundred bytes here."""
BATCH_IDLE_S: Final = 30.0
HELLO_S: Final = 5.0
PEER: Final = 0
"""The number of the peer itself."""
_LIST_ITERATOR: Final[Any] = type(iter([]))
"""What is there as a whole is sent as a whole; what is made on the way, piece by piece."""


class LocalServer:
    """Owns the socket of a home and the threads that serve it."""

    def __init__(self, peer: "Peer") -> None:
        self._peer = peer
        self.instance = secrets.token_bytes(8)
        """Tells clients whether they reached the process again that has their objects."""
        self._sessions: dict[bytes, _Session] = {}
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._closing = False
        self._listening = listen_locally(peer.home.path)
        self._thread = threading.Thread(target=self._accept, name="echostore-local", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """End all conversations; open batches are undone. The socket's file stays for the next process to replace."""
        self._closing = True
        with contextlib.suppress(OSError):  # it was never reached
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.hang_up()
        for connection in connections:
            connection.thread.join(timeout=5.0)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connected, _ = self._listening.accept()
            except OSError as error:
                if not self._closing:
                    _log.error("the local socket failed", extra={"why": str(error)})
                return
            with self._lock:
                if len(self._connections) >= CONNECTIONS_MAX:
                    connected.close()
                    continue
                connection = _Connection(self, Frames(connected))
                self._connections.add(connection)
            connection.thread.start()

    def session(self, token: bytes) -> "_Session":
        """The objects of one client program, shared by its connections."""
        with self._lock:
            found = self._sessions.setdefault(token, _Session(self._peer))
            found.connections += 1
            return found

    def gone(self, connection: "_Connection", token: bytes | None) -> None:
        over = None
        with self._lock:
            self._connections.discard(connection)
            if token is not None:
                session = self._sessions[token]
                session.connections -= 1
                if not session.connections:
                    over = self._sessions.pop(token)
        if over is not None:
            over.close()


class _Session:
    """What one client program holds."""

    def __init__(self, peer: "Peer") -> None:
        self.connections = 0
        self._numbers = itertools.count(PEER + 1)
        self._objects: dict[int, Any] = {PEER: peer}

    def hold(self, value: Any) -> int:
        if value is self._objects[PEER]:
            return PEER
        if len(self._objects) >= OBJECTS_MAX:
            raise Refused(f"this program holds {OBJECTS_MAX:,} objects of the running peer", next_step="Let some go.")
        number = next(self._numbers)
        self._objects[number] = value
        return number

    def get(self, number: Any) -> Any:
        try:
            return self._objects[number]
        except (KeyError, TypeError):
            raise UsageError("an object of the running peer that is not there any more") from None

    def drop(self, numbers: list[int]) -> None:
        for number in numbers:
            if number != PEER:
                self._objects.pop(number, None)

    def close(self) -> None:
        for value in self._objects.values():
            if isinstance(value, Watch):
                value.close()
        self._objects.clear()


class _Connection:
    """One thread of a client, and the thread here that acts for it."""

    def __init__(self, server: LocalServer, frames: Frames) -> None:
        self._server = server
        self._frames = frames
        self._sending = threading.Lock()
        self._open: list[tuple[int, AbstractContextManager[Any]]] = []
        self._session: _Session
        self._codec = Codec(self._outgoing, self._incoming)
        self.thread = threading.Thread(target=self._run, name="echostore-client", daemon=True)

    def hang_up(self) -> None:
        self._frames.close()

    def _run(self) -> None:
        token: bytes | None = None
        try:
            token = self._hello()
            self._serve()
        except (Disconnected, Silent) as why:
            _log.debug("a local client has gone", extra={"why": str(why)})
        except Exception:  # noqa: BLE001  # one client's failure must not end the service
            _log.exception("a local client's connection failed")
        finally:
            self._unwind()
            self._frames.close()
            self._server.gone(self, token)

    def _hello(self) -> bytes:
        hello = self._frames.receive(HELLO_S)
        well_formed = (
            isinstance(hello, list) and len(hello) == 3 and hello[0] == "attach" and isinstance(hello[2], bytes)
        )
        if not well_formed or hello[1] != PROTOCOL_VERSION:
            error = Refused(
                "the running peer speaks another version of the local protocol",
                next_step="Restart `echostore serve` with the version that is installed.",
            )
            self._frames.send(["fail", pack_error(error)])
            raise Disconnected("another version")
        token: bytes = hello[2]
        self._session = self._server.session(token)
        self._frames.send(["ok", self._server.instance])
        return token

    def _serve(self) -> None:
        while True:
            self._answer(self._frames.receive(BATCH_IDLE_S if self._open else None))

    def _answer(self, request: Any) -> None:
        try:
            answer = self._request(request)
        except (Disconnected, Silent):
            raise
        except StopIteration:
            answer = ["end"]
        except Exception as error:  # noqa: BLE001  # it is the client's to handle
            if not isinstance(error, (EchoError, LookupError, ValueError, TypeError, AttributeError)):
                _log.exception("a local client's call failed")
            answer = ["fail", pack_error(error)]
        try:
            self._send(answer)
        except TooLarge as error:
            self._send(["fail", pack_error(error)])

    def _request(self, request: Any) -> list[Any]:
        if not isinstance(request, list) or len(request) < 2 or not isinstance(request[0], str):
            raise Disconnected("not a request")
        verb, number, *rest = request
        if verb == "drop":
            self._session.drop(rest)
            return ["ok", None]
        target = self._session.get(number)
        if verb == "call":
            name, positional, named = rest
            check_offered(target, name)
            result = getattr(target, name)(*self._codec.unpack(positional), **self._codec.unpack(named))
        elif verb == "get":
            check_offered(target, rest[0])
            result = getattr(target, rest[0])
        elif verb == "set":
            check_settable(target, rest[0])
            setattr(target, rest[0], self._codec.unpack(rest[1]))
            result = None
        elif verb == "iterate":
            check_offered(target, "__iter__")
            found = iter(target)
            result = list(found) if type(found) is _LIST_ITERATOR else found
        elif verb == "next":
            if living_name(type(target)) is None:
                self._check_kind(target, Iterator)
            else:
                check_offered(target, "__next__")
            result = next(target)
        elif verb == "enter":
            self._check_kind(target, AbstractContextManager)
            result = target.__enter__()
            self._open.append((number, target))
        elif verb == "exit":
            result = self._exit(number, self._codec.unpack(rest[0]))
        else:
            raise UsageError(f"the running peer does not know {verb!r:.40}")
        return ["ok", self._codec.pack(result)]

    def _check_kind(self, target: Any, kind: type) -> None:
        """Iterators and contexts that calls gave out are used as such; living objects are not: a peer's end is everybody's."""
        if living_name(type(target)) is not None or not isinstance(target, kind):
            raise Refused(f"a {type(target).__name__} can't be used like that by other programs")

    def _exit(self, number: int, packed: Any) -> bool:
        """Leave a context, as the client left it. True when the client's own error goes on."""
        if not self._open or self._open[-1][0] != number:
            raise UsageError("contexts are left in the reverse of the order in which they were entered")
        _, context = self._open.pop()
        if packed is None:
            context.__exit__(None, None, None)
            return False
        error = unpack_error(packed)
        return not context.__exit__(type(error), error, None)

    def _unwind(self) -> None:
        """The client is gone: what it had open ends as if it had raised."""
        while self._open:
            _, context = self._open.pop()
            error = TimedOut("the program that opened this has gone or fallen silent")
            try:
                context.__exit__(type(error), error, None)
                _log.info("what a local client had open was undone")
            except Exception:  # noqa: BLE001  # the other contexts and the connection must end all the same
                _log.exception("what a local client had open could not be undone")

    # values

    def _outgoing(self, value: Any) -> list[Any] | None:
        name = living_name(type(value))
        if name is not None:
            return ["r", self._session.hold(value), name, self._facts(value)]
        if isinstance(value, AbstractContextManager) and not isinstance(value, Iterator):
            return ["c", self._session.hold(value)]
        if isinstance(value, Iterator):
            return ["i", self._session.hold(value)]
        return None

    def _facts(self, value: Any) -> dict[str, Any]:
        """What never changes about an object and is asked often."""
        from echostore.peer.items import Item
        from echostore.peer.party import Party

        facts: dict[str, Any] = {"same": id(value)}
        if isinstance(value, Item):
            return {**facts, "id": bytes(value.id), "of": bytes(value.party.key)}
        if isinstance(value, Party):
            return {**facts, "key": bytes(value.key)}
        return facts

    def _incoming(self, named: list[Any]) -> Any:
        if named[0] == "f":
            return self._function(named[1])
        if named[0] == "g":
            return self._pieces(self._function(named[1]))
        return self._session.get(named[1])

    def _pieces(self, give: Callable[[], tuple[Any, ...]]) -> Iterator[Any]:
        """What an iterator of the client gives, asked for piece by piece."""
        while piece := give():
            yield piece[0]

    def _function(self, number: int) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            packed = [number, self._codec.pack(positional), self._codec.pack(named)]
            if threading.current_thread() is not self.thread:
                # The client waits for the call in which this happens, and this thread can't wait for the client.
                self._send(["tell", *packed])
                return None
            self._send(["ask", *packed])
            while True:
                answer = self._frames.receive(BATCH_IDLE_S)
                if isinstance(answer, list) and answer and answer[0] == "answer":
                    return self._codec.unpack(answer[1])
                if isinstance(answer, list) and answer and answer[0] == "raised":
                    raise unpack_error(answer[1])
                self._answer(answer)  # the function uses the peer itself

        return call

    def _send(self, frame: list[Any]) -> None:
        with self._sending:
            self._frames.send(frame)
