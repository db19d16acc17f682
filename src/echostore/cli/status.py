"""`echostore status`: what is where, for every party."""

import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App

from echostore.cli.feed import INTEGRITY_BROKEN
from echostore.cli.moments import parse_duration_s
from echostore.cli.opening import looking, served
from echostore.cli.options import FLAG, OPTIONS, Options, examples
from echostore.cli.output import Form, Output, age, flush_results, if_interrupted
from echostore.cli.values import iso_ms, one_line, short
from echostore.kernel.errors import Corrupt, EchoError, NotFound, UsageError

if TYPE_CHECKING:
    from echostore.peer.peer import Peer

app = App(name="status", help_prologue=examples("echostore status", "echostore --home ./data status --watch --json"))

LEAST_INTERVAL_S = 0.1


@app.default
def status(*, watch: Annotated[bool, FLAG] = False, interval: str = "1s", options: Options = OPTIONS) -> int:
    """Tell what is where: per party, blocks held, processed and known, and what is on no other peer.

    Closed parties are not opened. The exit status is 6 when a party can't be read, or blobs of the epoch that it stands on
    are lost; the others are told. What other
    peers hold, and when they were last seen, is known to a running `echostore serve`; without one it is unknown.

    Parameters
    ----------
    watch
        Tell it again whenever it changes, per feed, until ^C; needs a running `echostore serve`.
    interval
        With --watch, how often to look: 1s, 10s.
    """
    output = Output.of(options)
    if not watch:
        with looking(options) as peer:
            fields, exit_status = _status(output, peer)
        output.document(fields, [_line(party) for party in fields["parties"]] or ["no party here"])
        return exit_status
    pause_s = parse_duration_s(interval)
    if pause_s < LEAST_INTERVAL_S:
        raise UsageError(f"an interval of less than {LEAST_INTERVAL_S:g} s")
    running = served(options)
    if running is None:
        raise NotFound(
            "no `echostore serve` runs for this home",
            next_step="Start it, or use `echostore status` for what is on disk.",
        )
    with running, if_interrupted("The service goes on."):
        _watch(Output(Form.LINES) if output.machine else output, running, pause_s)
    return 0


def _watch(output: Output, peer: "Peer", pause_s: float) -> None:
    before: dict[str, Any] = {}
    while True:
        fields, _ = _status(output, peer)
        if fields != before:
            before = fields
            now_ms = time.time_ns() // 1_000_000
            output.document({"as_of": iso_ms(now_ms), **fields}, _watch_lines(fields, now_ms))
            flush_results()
        time.sleep(pause_s)


def _status(output: Output, peer: "Peer") -> tuple[dict[str, Any], int]:
    from echostore.cli.party import party_fields

    parties: list[dict[str, Any]] = []
    names: dict[bytes, str] = {}
    exit_status = 0
    for known in peer.parties():
        head = {"party": known.key.hex(), "title": known.title, "state": str(known.state)}
        try:
            party = peer.held(known.key) if known.state != "closed" else None
            parties.append({**head, **(party_fields(party) if party is not None else {})})
            if parties[-1].get("lost"):
                output.warn(f"party {short(known.key.hex())}: {parties[-1]['next_step']}")
                exit_status = max(exit_status, INTEGRITY_BROKEN)
            for member in party.members.all() if party is not None else ():
                names.update((bytes(device.device), member.name) for device in member.devices)
        except EchoError as error:
            # One broken party must not hide the others.
            parties.append({**head, "error": {"code": error.code, "what": error.what}})
            output.warn(f"party {short(known.key.hex())}: {error.what}")
            # Files of a known party that are damaged or gone are broken integrity; the rest is as serious as it is.
            broken = isinstance(error, Corrupt | NotFound)
            exit_status = max(exit_status, INTEGRITY_BROKEN if broken else error.exit_status)
    fields = {
        "home": str(peer.home.path),
        "name": peer.name,
        "served": not peer.read_only,
        "devices": None if peer.read_only else _devices(peer, names),
        "parties": parties,
    }
    return fields, exit_status


def _devices(peer: "Peer", names: dict[bytes, str]) -> list[dict[str, Any]]:
    """Who is connected, and who was last seen when."""
    connected = {each.device for each in peer.network.connections()}
    return [
        {
            "device": seen.device.hex(),
            "name": names.get(seen.device, ""),
            "connected": seen.device in connected,
            "address": seen.address,
            "seen": iso_ms(seen.at_ms),
            "seen_ms": seen.at_ms,
            "ended": seen.ended or None,
            **_quota(peer, seen.device),
        }
        for seen in sorted(peer.network.seen.values(), key=lambda seen: seen.device)
    ]


def _quota(peer: "Peer", device: bytes) -> dict[str, Any]:
    left = peer.network.quota_of_device(device)
    return {"over_quota": left is not None and left.over, "slowed": left.slowed if left is not None else 0}


def _line(party: dict[str, Any]) -> str:
    told = party.get("truth") or (f"unreadable: {party['error']['what']}" if "error" in party else "not opened")
    state = "" if party["state"] == "active" else f" ({party['state']})"
    return f"{short(party['party'])}  {one_line(party['title'], 40)}{state}: {told}"


def _watch_lines(fields: dict[str, Any], now_ms: int) -> list[str]:
    lines = [iso_ms(now_ms)]
    for party in fields["parties"]:
        lines.append(_line(party))
        for feed in party.get("feeds", ()):
            counts = f"{feed['held']} held, {feed['processed']} processed, {feed['known']} known"
            over = ", over its quota" if feed["over_quota"] else ""
            lines.append(f"  {short(feed['feed'])} {feed['kind']} of {one_line(feed['owner']) or '?'}: {counts}{over}")
    for device in fields["devices"]:
        when = "connected" if device["connected"] else f"last seen {age(device['seen_ms'], now_ms)} ago"
        over = ", over its quota" if device["over_quota"] else ""
        lines.append(f"{short(device['device'])}  {one_line(device['name']) or '?'}: {when}{over}")
    return lines or ["no party here"]
