"""`echostore contact`: the people this peer shares parties with."""

from typing import Any

from cyclopts import App

from echostore.cli.opening import looking
from echostore.cli.options import LISTING, Listing, examples
from echostore.cli.output import Column, Output, age
from echostore.cli.values import iso_ms, one_line, short

app = App(
    name="contact",
    help="The people this peer shares parties with.",
    help_prologue=examples("echostore contact list", "echostore contact list --json"),
)

CONTACTS = (
    Column("identity", "IDENTITY", short, style="cyan"),
    Column("name", "NAME"),
    Column("parties", "PARTIES", lambda parties: ", ".join(one_line(each["title"], 30) for each in parties)),
    Column("devices", "DEVICES", lambda devices: str(len(devices)), right=True),
    Column("connected", "CONNECTED"),
    Column("seen_ms", "LAST SEEN", lambda at: f"{age(at)} ago" if at else ""),
)


@app.command(name="list", help_prologue=examples("echostore contact list", "echostore contact list --json"))
def list_contacts(*, options: Listing = LISTING) -> None:
    """List who is in a party with this peer now: name, shared parties, devices, when one of these was last connected.

    Contacts follow from the parties; there is nothing to add or remove. When someone was last connected is known on a
    home where `echostore serve` runs or ran.
    """
    output = Output.of(options)
    with looking(options) as peer:
        found = peer.contacts
    records: list[dict[str, Any]] = [
        {
            "identity": each.identity.hex(),
            "name": each.name,
            "parties": [{"party": p.party.hex(), "title": p.title, "role": p.role} for p in each.parties],
            "devices": [
                {
                    "device": d.device.hex(),
                    "name": d.name,
                    "connected": d.connected,
                    "seen": iso_ms(d.seen_ms) if d.seen_ms else None,
                }
                for d in each.devices
            ],
            "connected": each.connected,
            "seen": iso_ms(each.seen_ms) if each.seen_ms else None,
            "seen_ms": each.seen_ms,
        }
        for each in found
    ]
    output.table("contacts", CONTACTS, records, empty="nobody shares a party with this peer")
