"""`echostore serve`: run this home's peer as a service."""

import signal
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from echostore.cli.opening import serving
from echostore.cli.options import FLAG, OPTIONS, Options, examples
from echostore.cli.output import Output, flush_results

app = App(
    name="serve",
    help_prologue=examples(
        "echostore serve",
        "echostore --home ./data serve --listen 127.0.0.1:4711 --metrics 127.0.0.1:9471 --log json",
    ),
)


@app.default
def serve(
    *,
    listen: Annotated[tuple[str, ...], Parameter(consume_multiple=False)] = (),
    connect: Annotated[tuple[str, ...], Parameter(consume_multiple=False)] = (),
    bot: Annotated[bool, FLAG] = False,
    metrics: str | None = None,
    lan: Annotated[bool, FLAG] = False,
    thin: str | None = None,
    thin_origin: Annotated[tuple[str, ...], Parameter(consume_multiple=False)] = (),
    log: Literal["text", "json"] = "text",
    name: str | None = None,
    options: Options = OPTIONS,
) -> None:
    """Run this peer as a service until ^C or SIGTERM: members reach it, commands and programs of this machine too.

    Prints the addresses in use on stdout; the log goes to stderr. The home is made if there is none.

    Parameters
    ----------
    listen
        host:port to take connections at; may be given several times. Without it, all addresses of this machine.
    connect
        host:port of a member to connect to, again and again; those that were met by a ticket are remembered.
    bot
        Fetch and keep the content of every file that items point to, for members that hold little.
    metrics
        host:port on the loopback for /metrics (Prometheus) and /healthz.
    lan
        Find members on the local network, and be found, by mDNS; strangers see no party, name or identity.
    thin
        host:port for thin clients (browsers and small programs) over WebSocket. Prints a link that opens the planner page in
        a browser, with a capability for the only party here; of others, `party capability issue` prints one.
    thin_origin
        Origin of web pages that are not the service's own and may connect, like https://app.example; may be given several
        times. Its host is a name that the service goes by: needed behind a proxy.
    log
        How the log is written: text or json, one line per event.
    name
        What others see this peer as, if the home is new.
    """
    from echostore.cli.page_link import planner_link, show_code
    from echostore.cli.service_log import log_to_stderr
    from echostore.peer.service import Service

    output = Output.of(options)
    log_to_stderr(log, quiet=options.quiet)
    stop = threading.Event()
    _stop_on_signals(stop)
    with serving(options, name=name) as peer:
        service = Service(peer, listen=listen, connect=connect, bot=bot, metrics=metrics, lan=lan, thin=thin)
        try:
            page, why_not = planner_link(peer, service.thin_url) if service.thin_url is not None else (None, None)
            fields: dict[str, Any] = {
                "home": str(Path(peer.home.path)),
                "addresses": service.addresses,
                "device": peer.device.hex(),
                "metrics": service.http.address if service.http is not None else None,
                "thin": service.thin_url,
                "page": page,
            }
            output.document(fields, [*service.addresses, *(each for each in (service.thin_url, page) if each)])
            flush_results()
            if why_not is not None:
                output.note(
                    f"the page has no capability yet: {why_not} `echostore party capability issue` prints a link."
                )
            elif page is not None:
                show_code(output, page)
            service.run(stop)
        finally:
            service.close()


def _stop_on_signals(stop: threading.Event) -> None:
    """The first signal ends the service in order; a second one ends the process."""

    def heard(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, heard)
