"""`echostore mesh`: the thin clients of a running peer or edge."""

import json
import urllib.request
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.error import URLError

from cyclopts import App, Parameter, validators

from echostore.cli.opening import served
from echostore.cli.options import OPTIONS, Options, examples
from echostore.cli.output import Output
from echostore.cli.values import short
from echostore.kernel.errors import NotFound, Unreachable

app = App(name="mesh", help_prologue=examples("echostore mesh", "echostore mesh --at 127.0.0.1:4791 --messages 20"))

ANSWER_S = 10.0


@app.default
def mesh(
    *,
    at: str | None = None,
    messages: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=2048))] = 0,
    options: Options = OPTIONS,
) -> None:
    """Show who is connected, which indexes are held and how often they answered, and the last messages.

    Parameters
    ----------
    at
        host:port that an edge was given as --status; without it, the peer that `echostore serve --thin` runs here.
    messages
        So many of the last messages.
    """
    output = Output.of(options)
    told = _of_peer(options, messages) if at is None else _of_edge(at, messages)
    output.document(told, _lines(told))


def _of_peer(options: Options, trace: int) -> dict[str, Any]:
    running = served(options)
    if running is None:
        raise NotFound("no `echostore serve` runs on this home", next_step="Start `echostore serve --thin host:port`.")
    with running as peer:
        services = peer.thin_services
        if not services:
            raise NotFound(
                "the running peer serves no thin clients", next_step="Start it with `echostore serve --thin host:port`."
            )
        links = [
            {
                "link": each.link,
                "party": each.party,
                "address": each.address,
                "indexes": each.indexes,
                "live": each.live,
                "tick": each.sent_tick,
                "buffered": each.buffered,
                "capability": each.capability,
            }
            for service in services
            for each in service.links()
        ]
        indexes = [
            {
                "party": each.party,
                "up": None,
                "tick": each.tick,
                "held": each.watched,
                "systems": each.systems,
                "asked": each.acquires,
                "passed_on": each.evaluations,
                "hit_rate": each.hit_rate,
                "refused": dict(each.refusals),
                "roots": list(each.roots),
                "mail_out": each.mail_out,
                "mail_in": each.mail_in,
            }
            for service in services
            for each in service.indexes()
        ]
        messages = [list(each) for service in services for each in service.trace(trace)]
    return {"links": links, "indexes": indexes, "trace": messages}


def _of_edge(at: str, trace: int) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://{at}/?trace={trace}", timeout=ANSWER_S) as answer:
            told: dict[str, Any] = json.load(answer)
    except (URLError, OSError, ValueError) as error:
        raise Unreachable(
            f"no edge answers at {at}: {error}", next_step="Give the address that `echostore edge --status` printed."
        ) from None
    return told


def _lines(told: dict[str, Any]) -> list[str]:
    lines = []
    for each in told["indexes"]:
        rate = "-" if each["hit_rate"] is None else f"{each['hit_rate']:.1%}"
        lines.append(
            f"party {short(each['party'])}: tick {each['tick']}, {each['held']} indexes held, "
            f"{each['asked']} questions, {rate} answered from them"
        )
        if each.get("roots") or each.get("mail_out") or each.get("mail_in"):
            lines.append(
                f"  {len(each['roots'])} other roots connected, {each['mail_out']} messages wait for roots, "
                f"{each['mail_in']} for clients here"
            )
        lines += [f"  refused {count} x {reason}" for reason, count in sorted(each["refused"].items())]
    for each in told["links"]:
        lines.append(
            f"link {each['link']} {each['address']}: {each['indexes']} indexes, {each['live']} live, "
            f"tick {each['tick']}, {each['buffered']} bytes wait"
        )
    for time_ms, link, direction, kind, size in told["trace"]:
        moment = datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]
        lines.append(f"{moment} {link} {direction:3} {kind} {size}")
    return lines or ["no thin client is connected"]
