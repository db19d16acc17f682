"""A loopback endpoint that tells how an edge is.

GET / answers one JSON document, `?trace=N` with the last messages; GET /metrics what Prometheus reads.
"""

import ipaddress
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from echostore.kernel.errors import Refused, UsageError
from echostore.mesh.coherence_numbers import ThinNumbers, metrics_text

TRACE_MAX: Final = 2048


class StatusServer:
    """Answers until it is closed. Nothing but the loopback is listened on: links tell who is connected."""

    def __init__(self, tell: Callable[[int], dict[str, Any]], numbers: Callable[[], ThinNumbers]) -> None:
        self._tell = tell
        self._numbers = numbers
        self._server: Server | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen; returns host:port in use."""
        if not _is_loopback(host):
            raise Refused(
                f"{host} is not on the loopback, and whoever can reach it would see who is connected",
                next_step="Use 127.0.0.1:0, and a tunnel from elsewhere.",
            )
        self._server = await serve(_refuse, host, port, process_request=self._answer)
        address = self._server.sockets[0].getsockname()
        return f"{address[0]}:{address[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def _answer(self, connection: ServerConnection, request: Request) -> Response:
        parts = urlsplit(request.path)
        if parts.path == "/metrics":
            return _response("text/plain; version=0.0.4; charset=utf-8", metrics_text(self._numbers()).encode())
        if parts.path != "/":
            return connection.respond(HTTPStatus.NOT_FOUND, "not found\n")
        asked = parse_qs(parts.query).get("trace", ["0"])[0]
        last = min(TRACE_MAX, int(asked)) if asked.isdecimal() and len(asked) < 9 else 0
        return _response("application/json", msgspec.json.encode(self._tell(last)))


def _response(kind: str, data: bytes) -> Response:
    headers = Headers({"Content-Type": kind, "Content-Length": str(len(data)), "Connection": "close"})
    return Response(HTTPStatus.OK.value, HTTPStatus.OK.phrase, headers, data)


async def _refuse(connection: ServerConnection) -> None:
    await connection.close()


def _is_loopback(host: str) -> bool:
    return (
        host == "localhost"
        or (host.replace(".", "").isdigit() and ipaddress.ip_address(host).is_loopback)
        or host == "::1"
    )


def parse_host_port(address: str) -> tuple[str, int]:
    """`host:port`, or `[host]:port` for IPv6."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{address!r} is not an address", next_step="Write host:port, as in 127.0.0.1:4790.")
    return host, int(port)
