"""`echostore device`: the devices of this peer's identity, and how one of them is shut out."""

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App

from echostore.cli import device_join
from echostore.cli.opening import looking, open_party, writing
from echostore.cli.options import FLAG, IN_PARTY, LISTING, YES, InParty, Listing, examples
from echostore.cli.output import Column, Output, age, counted
from echostore.cli.values import iso_ms, short
from echostore.kernel.errors import NotFound, Refused, UsageError

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

app = App(
    name="device",
    help="Devices of an identity.",
    help_prologue=examples("echostore device invite", "echostore device list"),
)
app.command(device_join.invite, help_prologue=examples(*device_join.EXAMPLES["invite"]))
app.command(device_join.join, help_prologue=examples(*device_join.EXAMPLES["join"]))

DEVICES = (
    Column("device", "DEVICE", short, style="cyan"),
    Column("name", "NAME"),
    Column("this", "THIS"),
    Column("parties", "PARTIES", lambda parties: str(len(parties)), right=True),
    Column("revoked_in", "REVOKED IN", lambda parties: str(len(parties)), right=True),
    Column("connected", "CONNECTED"),
    Column("seen_ms", "LAST SEEN", lambda at: f"{age(at)} ago" if at else ""),
)


@app.command(name="list", help_prologue=examples("echostore device list", "echostore device list --json"))
def list_devices(*, options: Listing = LISTING) -> None:
    """List the devices of this peer's identity: the parties where they count, and where they were revoked.

    When a device was last connected is known while `echostore serve` runs.
    """
    from echostore.peer.own_devices import devices_shown

    output = Output.of(options)
    with looking(options) as peer:
        found: dict[bytes, dict[str, Any]] = {bytes(peer.device): _record(bytes(peer.device), peer.name, this=True)}
        for key, name in devices_shown(peer).items():
            found[key] = _record(key, name, this=False)
        for party in _parties(peer, None):
            for device in _devices(party, peer.identity):
                key = bytes(device.device)
                record = found.setdefault(key, _record(key, device.name, this=False))
                record["name"] = record["name"] or device.name
                record["revoked_in" if device.revoked else "parties"].append(party.key.hex())
        if not peer.read_only:
            for seen in peer.network.seen.values():
                if seen.device in found:
                    found[seen.device] |= {
                        "connected": not seen.ended,
                        "seen_ms": seen.at_ms,
                        "seen": iso_ms(seen.at_ms),
                        "address": seen.address,
                    }
    output.table("devices", DEVICES, sorted(found.values(), key=lambda record: (not record["this"], record["device"])))


@app.command(help_prologue=examples("echostore device revoke 1f3a9c02 --dry-run", "echostore device revoke 1f3a --yes"))
def revoke(
    device: str,
    /,
    *,
    dry_run: Annotated[bool, FLAG] = False,
    yes: Annotated[bool, YES] = False,
    options: InParty = IN_PARTY,
) -> None:
    """Shut a device out: what it wrote and this peer has not seen leaves the state, in every party or in one.

    Of this peer's own identity; with --party also a device of another member there, as far as the role allows.

    Parameters
    ----------
    device
        Device key in hex, or a unique prefix of it.
    dry_run
        Only tell where it would be revoked.
    yes
        Do it without asking; needed where nobody can be asked.
    """
    output = Output.of(options)
    with looking(options) as peer:
        found = _find(peer, device, options.party)
    key, parties = found
    fields: dict[str, Any] = {"device": key.hex(), "parties": [party for party, _ in parties]}
    output.note(f"this revokes {short(fields['device'])} in {counted(len(parties), 'party')}, for every member")
    if dry_run:
        output.document({**fields, "revoked": False}, f"would revoke {short(fields['device'])}")
        return
    if not output.confirm(f"Revoke {short(fields['device'])}?", yes=yes):
        output.document({**fields, "revoked": False}, "nothing revoked")
        return
    with writing(options) as peer:
        if options.party is None:
            peer.revoke_device(key)
        for which, identity in parties if options.party is not None else ():
            party = open_party(peer, which)
            party.members.revoke_device(identity, key)
            party.flush()
    output.document({**fields, "revoked": True}, f"revoked {short(fields['device'])}")


def _find(peer: "Peer", text: str, which: str | None) -> tuple[bytes, list[tuple[str, bytes]]]:
    """The key of a device, and the parties where it still counts, with its identity there."""
    from echostore.peer.own_devices import devices_shown

    found: dict[bytes, list[tuple[str, bytes]]] = {}
    for party in _parties(peer, which):
        for member in party.members.all():
            for device in member.devices if which is not None or member.identity == peer.identity else ():
                if text and device.device.hex().startswith(text.lower()) and not device.revoked:
                    found.setdefault(bytes(device.device), []).append((party.key.hex(), bytes(member.identity)))
    for key in devices_shown(peer) if which is None else ():
        if text and key.hex().startswith(text.lower()):
            found.setdefault(key, [])
    if not found:
        raise NotFound(f"no device {text!r} counts here", next_step="`echostore device list` shows the devices.")
    if len(found) > 1:
        raise UsageError(f"{len(found)} devices start with {text}", next_step="Give more of the key.")
    key, parties = found.popitem()
    if key == bytes(peer.device):
        raise Refused("this is the device that runs the command", next_step="Revoke it from another device.")
    return key, parties


def _parties(peer: "Peer", which: str | None) -> "list[Party]":
    if which is not None:
        return [open_party(peer, which)]
    # A light-weight party has the devices of the party above it.
    known = [each for each in peer.parties() if each.state != "closed" and not each.local and each.child_of is None]
    return [peer.party(each.key) for each in known]


def _devices(party: "Party", identity: bytes) -> list[Any]:
    return [device for member in party.members.all() if member.identity == identity for device in member.devices]


def _record(device: bytes, name: str, *, this: bool) -> dict[str, Any]:
    return {
        "device": device.hex(),
        "name": name,
        "this": this,
        "parties": [],
        "revoked_in": [],
        "connected": False,
        "seen": None,
        "seen_ms": None,
        "address": None,
    }
