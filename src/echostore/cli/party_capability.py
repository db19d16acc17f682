"""`echostore party capability`: what thin clients may read and write, given out and taken back."""

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App

from echostore.cli.moments import parse_span
from echostore.cli.opening import open_party, reading, writing
from echostore.cli.options import FLAG, IN_PARTY, LISTING_IN_PARTY, InParty, ListingInParty, examples
from echostore.cli.output import Column, Output, flush_results
from echostore.cli.page_link import page_link, show_code
from echostore.cli.values import short
from echostore.kernel.errors import UsageError

if TYPE_CHECKING:
    from echostore.peer.capabilities import IssuedCapability

app = App(name="capability", help="What thin clients may read and write: issue, list, revoke.")

CAPABILITIES = (
    Column("id", "CAPABILITY", short, style="cyan"),
    Column("name", "NAME"),
    Column("read", "READ", ", ".join),
    Column("write", "WRITE", ", ".join),
    Column("state", "STATE"),
    Column("expires", "UNTIL"),
)


@app.command(
    help_prologue=examples(
        "echostore party capability issue --read task --write task --for 12h",
        "echostore party capability issue --name kiosk --messages -p @Trip > kiosk.capability",
    )
)
def issue(
    *,
    read: tuple[str, ...] = (),
    write: tuple[str, ...] = (),
    messages: Annotated[bool, FLAG] = False,
    edge: Annotated[bool, FLAG] = False,
    for_: str = "30d",
    holder: str | None = None,
    name: str = "",
    options: InParty = IN_PARTY,
) -> None:
    """Make a capability and print it, with a link to click while `echostore serve --thin` runs.

    A thin client that shows it may do what it says.

    Whoever has the text can use it, unless --holder names a key. Revoke it by its id.

    Parameters
    ----------
    read
        A type of items that may be read; several times for several. Without it, everything.
    write
        A type of items that may be made and changed; several times for several, * for all. Without it, none.
    messages
        Whether the client may send messages to others and offer services.
    edge
        Whether it is for `echostore edge`: to pass on what other clients read and write, each by its own capability.
    for_
        How long it lasts, like 12h or 30d.
    holder
        The key of the one client that may use it, in hex.
    name
        A name to find it by in the list.
    """
    output = Output.of(options)
    with writing(options) as peer:
        issued = open_party(peer, options.party).capability(
            read=read or "*",
            write=write,
            messages=messages,
            edge=edge,
            expires_s=parse_span(for_),
            holder=None if holder is None else _key(holder),
            name=name,
        )
        services = [] if edge else peer.thin_services
        link = page_link(services[0].url, issued.text) if services else None
        fields = _fields(issued) | {"text": issued.text, "link": link}
    output.note(f"capability {short(issued.id)}, until {fields['expires']}: keep it secret")
    output.document(fields, issued.text)
    flush_results()
    if link is not None:
        output.note(f"open in a browser: {link}")
        show_code(output, link)
    elif not edge:
        output.note("`echostore serve --thin HOST:PORT` serves it; run this beside it for a link to click.")


@app.command(
    name="list",
    help_prologue=examples("echostore party capability list", "echostore party capability list -p @Trip --json"),
)
def list_(*, options: ListingInParty = LISTING_IN_PARTY) -> None:
    """List the capabilities that were issued here, with what became of them."""
    output = Output.of(options)
    with reading(options) as peer:
        records = [_fields(each) for each in open_party(peer, options.party).capabilities.issued()]
    output.table("capabilities", CAPABILITIES, records, empty="no capability was issued here")


@app.command(
    help_prologue=examples(
        "echostore party capability revoke 1f3a9c", "echostore party capability revoke 1f3a9c -p @Trip --json"
    )
)
def revoke(capability: str, /, *, options: InParty = IN_PARTY) -> None:
    """Take a capability back, for good. Clients that are connected by it are cut off, here and at every peer and edge.

    Parameters
    ----------
    capability
        Its id, or enough of it; of one that another device issued, the whole id, and the role of an admin.
    """
    output = Output.of(options)
    with writing(options) as peer:
        opened = open_party(peer, options.party)
        id = opened.capabilities.revoke(capability)
        fields = {"id": id, "party": opened.key.hex(), "state": "revoked"}
    output.note(f"capability {short(id)} is revoked")
    output.document(fields, short(id))


def _key(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise UsageError(f"{text[:70]!r} is not a key", next_step="A key is 64 hex digits.") from None


def _fields(issued: "IssuedCapability") -> dict[str, Any]:
    now_ms = time.time_ns() // 1_000_000
    over = "revoked" if issued.revoked_ms is not None else "expired" if issued.expires_ms <= now_ms else "good"
    return {
        "id": issued.id,
        "name": issued.name,
        "read": list(issued.read),
        "write": list(issued.write),
        "messages": issued.messages,
        "edge": issued.edge,
        "holder": issued.holder or None,
        "state": over,
        "issued_ms": issued.issued_ms,
        "expires_ms": issued.expires_ms,
        "expires": _day(issued.expires_ms),
        "revoked_ms": issued.revoked_ms,
    }


def _day(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
