"""How an identity gets one more device: invite and join of `echostore device`.

While `echostore serve` runs, it is the host and the guest. Without it, `invite` listens by itself until the ticket is used
and the new device holds what there is, and `join` connects, fetches that, and ends.
"""

import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from echostore.cli.moments import parse_duration_s
from echostore.cli.opening import from_dash, home_path, writing
from echostore.cli.options import FLAG, OPTIONS, Name, Options
from echostore.cli.output import Output, counted, flush_results, if_interrupted
from echostore.cli.party_network import LAST_GUEST_S, POLL_S, ask_passcode, catch_up, wait_for_guests
from echostore.cli.values import iso_ms, one_line, short
from echostore.kernel.errors import TimedOut

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

TOLD_S = 10.0
"""How long a device that is about to end waits for another one to hold that it is there."""

EXAMPLES = {
    "invite": ("echostore device invite", "echostore device invite --expires 1h --json"),
    "join": ("echostore device join echo1... --passcode 123456", "echostore --home ./data device join - < ticket.txt"),
}


def invite(
    *,
    expires: str = "10m",
    wait: Annotated[bool, FLAG] = False,
    listen: Annotated[tuple[str, ...], Parameter(consume_multiple=False)] = (),
    options: Options = OPTIONS,
) -> None:
    """Make a ticket for one more device of this identity, and a passcode to type there.

    The new device gets into all parties of the identity, now and later, and acts there as this one does. It does not get
    the identity's own key. While `echostore serve` runs, that is all; without it, this command is the host and waits.

    Parameters
    ----------
    expires
        How long it counts: 10m, 2h, 1d.
    wait
        Wait until it has been used, also while `echostore serve` runs.
    listen
        host:port to take the device at; `echostore serve`, if it runs, listens there too.
    """
    output = Output.of(options)
    lifetime_s = parse_duration_s(expires)
    with writing(options) as peer:
        hosting = not peer.network.addresses
        if hosting and not listen:
            from echostore.peer.service import listen_as_before

            listen_as_before(peer)
        for address in listen:
            peer.listen(address)
        made = peer.invite_device(expires_s=lifetime_s)
        fields = {
            "invitation": made.id,
            "identity": peer.identity.hex(),
            "expires": iso_ms(made.state.expires_ms),
            "ticket": made.ticket,
            "passcode": made.passcode,
        }
        output.document(fields, [made.ticket, f"passcode {made.passcode}"])
        flush_results()
        output.note("on the other device: echostore device join TICKET")
        if hosting or wait:
            with if_interrupted("The invitation still counts while `echostore serve` runs."):
                wait_for_guests(output, peer, made)
                if hosting:
                    _until_taken(output, peer)


def _until_taken(output: Output, peer: "Peer") -> None:
    """Stay until the new device holds what is here, as long as it takes something."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < LAST_GUEST_S:
        lacking, taken = _lacking(peer)
        if not lacking and peer.network.connections():
            return
        if taken != before:
            before, since = taken, time.monotonic()
        time.sleep(POLL_S)
    output.warn("the device does not hold everything yet; run `echostore serve` to let it go on")


def _lacking(peer: "Peer") -> tuple[int, int]:
    """Of all blocks here, how many the devices of this identity that are connected lack, and how many they hold."""
    connected = {each.device for each in peer.network.connections()}
    lacking = taken = 0
    for known in peer.parties():
        if known.local or known.child_of is not None or known.state == "closed":
            continue
        party = peer.party(known.key)
        mine = {bytes(d.device) for m in party.members.all() if m.identity == peer.identity for d in m.devices}
        for feed in party.status.feeds:
            held = {other.device: other.held for other in feed.others}
            best = max((held.get(device, 0) for device in mine & connected), default=0)
            lacking += feed.held - min(best, feed.held)
            taken += best
    return lacking, taken


def join(
    ticket: Name,
    /,
    *,
    passcode: str | None = None,
    timeout: str = "60s",
    name: str | None = None,
    options: Options = OPTIONS,
) -> None:
    """Make this home a device of another identity with its ticket, and fetch that identity's parties.

    The home must be empty, or its own identity in no party. Without a passcode, it is asked for on a terminal. The home is
    made if there is none.

    Parameters
    ----------
    ticket
        The line that `device invite` printed; - reads it from standard input.
    passcode
        The digits that belong to it.
    timeout
        How long to wait for the host, and later for the next block: 60s, 5m.
    name
        What this device is called, if the home is new.
    """
    from echostore.mesh.ticket import Kind, read_ticket

    output = Output.of(options)
    ticket = from_dash(ticket)
    patience_s = parse_duration_s(timeout)
    if read_ticket(ticket).kind is Kind.PASSCODE and not passcode:
        passcode = ask_passcode()
    fresh = not (home_path(options) / "keys").exists()
    with writing(options, create=True, name=name) as peer:
        if fresh:
            output.note(f"made a home at {home_path(options)}")
        with if_interrupted("If the host had let this device in, the parties come while `echostore serve` runs."):
            entered = peer.join_device(ticket, passcode, timeout=patience_s, wait=False)
        tell_entered(output, peer, entered, patience_s)


def tell_entered(output: Output, peer: "Peer", entered: "list[Party]", patience_s: float) -> None:
    """Fetch the parties that this device has just entered, and tell what is here now."""
    output.note(f"this is a device of {short(peer.identity.hex())} {one_line(peer.name)!r} now")
    left = "This device is in these parties; what came is kept, and `echostore serve` fetches the rest."
    records: list[dict[str, Any]] = []
    with if_interrupted(left):
        for party in entered:
            with output.progress(f"fetching {one_line(party.title, 30)}") as bar:
                catch_up(output, peer, party, patience_s, bar, left)
                party.wait_admitted(patience_s)
            try:
                party.flush().wait(held_by=1, timeout=TOLD_S)
            except TimedOut:
                output.note(f"nobody else holds yet that this device is in {one_line(party.title)!r}; it is told later")
            status = party.status
            records.append(
                {
                    "party": party.key.hex(),
                    "title": party.title,
                    "blocks": sum(feed.held for feed in status.feeds),
                    "items": status.items,
                }
            )
    fields = {"identity": peer.identity.hex(), "device": peer.device.hex(), "name": peer.name, "parties": records}
    lines = [
        f"{short(each['party'])} {one_line(each['title'])}: {counted(each['blocks'], 'block')}, "
        f"{counted(each['items'], 'item')}"
        for each in records
    ]
    output.document(fields, lines or "no party yet")
