"""`echostore edge`: run a caching proxy between a peer and thin clients."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from echostore.cli.options import OPTIONS, Options, examples
from echostore.cli.output import Output, flush_results
from echostore.kernel.errors import EchoError, NotFound, Unreachable, UsageError

app = App(
    name="edge",
    help_prologue=examples(
        "echostore edge --listen 127.0.0.1:4790 --up ws://127.0.0.1:4780/thin --capability edge.capability",
        "echostore edge --listen 127.0.0.1:4790 --up ws://127.0.0.1:4780/thin --capability edge.capability "
        "--status 127.0.0.1:4791",
    ),
)


@app.default
def edge(
    *,
    listen: str,
    up: Annotated[tuple[str, ...], Parameter(consume_multiple=False)],
    capability: Path,
    status: str | None = None,
    origin: Annotated[tuple[str, ...], Parameter(consume_multiple=False)] = (),
    options: Options = OPTIONS,
) -> None:
    """Serve thin clients from a cache, until ^C or SIGTERM. It holds no party: what it does not have it asks for.

    Prints the URL for clients on stdout. Needs no home.

    Parameters
    ----------
    listen
        host:port to take clients at; port 0 takes a free one.
    up
        URL of a peer's thin service, or of another edge; several: when one is lost, the next is taken.
    capability
        File with the edge's own capability, made by `party capability issue --edge`, without --read. Clients need
        capabilities of the same issuer.
    origin
        Origin of web pages that are not the edge's own and may connect, like https://app.example; may be given several times.
        Its host is a name that the edge goes by.
    status
        host:port on the loopback that tells `echostore mesh` how the edge is, and Prometheus at /metrics.
    """
    output = Output.of(options)
    asyncio.run(_run(output, listen, up, _capability(capability), status, origin))


async def _run(
    output: Output,
    listen: str,
    up: tuple[str, ...],
    capability: bytes,
    status: str | None,
    origins: tuple[str, ...],
) -> None:
    from echostore.mesh.coherence_edge import EdgeNode, check_capability
    from echostore.mesh.coherence_status import StatusServer, parse_host_port
    from echostore.mesh.web_rules import BadOrigin

    grants = check_capability(capability)
    try:
        node = EdgeNode(up, capability, now_ms=lambda: time.time_ns() // 1_000_000, origins=origins)
    except BadOrigin as error:
        raise UsageError(str(error), next_step="Like https://app.example, without a path.") from None
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    telling = StatusServer(node.mesh, node.numbers)
    try:
        url = await node.start(*parse_host_port(listen))
        told = None if status is None else await telling.start(*parse_host_port(status))
        fields: dict[str, Any] = {"url": url, "status": told, "party": grants.party.hex()}
        output.document(fields, [url, *([told] if told else [])])
        flush_results()
        await stop.wait()
    except EchoError:
        raise
    except OSError as error:
        raise Unreachable(
            f"the edge can't listen: {error.strerror or error}", next_step="Name another address."
        ) from None
    finally:
        await telling.close()
        await node.close()


def _capability(path: Path) -> bytes:
    from echostore.wire.capabilities import capability_from_text, read_capability
    from echostore.wire.index_spec import MalformedIndex

    try:
        data = capability_from_text(path.read_text(encoding="utf-8", errors="replace"))
        read_capability(data)
    except EchoError:
        raise
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}", next_step="`echostore party capability issue > FILE`") from None
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}") from None
    except MalformedIndex as error:
        raise UsageError(
            f"{path} holds no capability: {error}", next_step="`echostore party capability issue > FILE`"
        ) from None
    return data
