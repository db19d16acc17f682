"""Light-weight parties from the command line: `party children` lists those below a party, `party enter` takes part in one."""

from typing import TYPE_CHECKING, Any

from echostore.cli.opening import from_dash, open_party, reading, writing
from echostore.cli.options import IN_PARTY, LISTING_IN_PARTY, InParty, ListingInParty
from echostore.cli.output import Column, Output
from echostore.cli.values import one_line, short
from echostore.kernel.errors import NotFound, Refused, UsageError

if TYPE_CHECKING:
    from echostore.kernel.ids import PartyKey
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

EXAMPLES = {
    "children": ("echostore party children", "echostore party children --party @Trip --json"),
    "enter": ("echostore party enter @Chess", "echostore party enter 5c1e --party @Trip --json"),
}
CHILDREN = (
    Column("party", "PARTY", short, style="cyan"),
    Column("title", "TITLE"),
    Column("here", "HERE", lambda here: "yes" if here else "no"),
)


def children(*, options: ListingInParty = LISTING_IN_PARTY) -> None:
    """List the light-weight parties below a party: its members may take part in each with `party enter`."""
    output = Output.of(options)
    with reading(options) as peer:
        parent = open_party(peer, options.party)
        here = {known.key for known in peer.parties()}
        records = [{"party": key.hex(), "title": title, "here": key in here} for key, title in _children(peer, parent)]
        empty = "no light-weight party is below this one; make one with `echostore party create TITLE --below PARTY`"
        output.table("children", CHILDREN, records, empty=empty, party=parent.key.hex())


def enter(child: str, /, *, options: InParty = IN_PARTY) -> None:
    """Take part in a light-weight party that a member made: this device gets a feed of its own there.

    Members, roles and removals are those of the party above. Data comes as soon as other members are connected, from the
    newest epoch where there is one.

    Parameters
    ----------
    child
        Key, unique prefix or @title; `echostore party children` lists them.
    """
    output = Output.of(options)
    with writing(options) as peer:
        parent = open_party(peer, options.party)
        entered = peer.enter_child(parent, _named(peer, parent, from_dash(child)))
        fields: dict[str, Any] = {
            "party": entered.key.hex(),
            "title": entered.title,
            "child_of": parent.key.hex(),
            "standing": entered.status.standing,
        }
    output.note(f"this device takes part in {one_line(fields['title'])!r}")
    output.document(fields, short(fields["party"]))


def _children(peer: "Peer", parent: "Party") -> "list[tuple[PartyKey, str]]":
    if any(known.child_of is not None for known in peer.parties() if known.key == parent.key):
        raise Refused(
            "a light-weight party has no light-weight parties of its own",
            next_step="Name the party above it with --party.",
        )
    return parent.child_parties()


def _named(peer: "Peer", parent: "Party", which: str) -> "PartyKey":
    """A light-weight party below another by key, prefix or @title."""
    known = _children(peer, parent)
    if which.startswith("@"):
        found = [key for key, title in known if title == which[1:]]
    else:
        found = [key for key, _ in known if which and key.hex().startswith(which.lower())]
    if not found:
        raise NotFound(
            f"no light-weight party {which!r} is below {one_line(parent.title, 30)!r}",
            next_step="`echostore party children` shows them.",
        )
    if len(found) > 1:
        raise UsageError(f"{len(found)} light-weight parties match {which!r}", next_step="Give more of the key.")
    return found[0]
