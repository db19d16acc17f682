"""Groups of a party: several identities that are admitted, changed and removed as one. `party group` and `party groups`."""

from typing import TYPE_CHECKING, Any

from echostore.cli.opening import open_party, reading, writing
from echostore.cli.options import IN_PARTY, LISTING_IN_PARTY, InParty, ListingInParty
from echostore.cli.output import Column, Output, counted
from echostore.cli.values import one_line, short
from echostore.kernel.errors import NotFound, UsageError

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

EXAMPLES = {
    "group": ("echostore party group Drivers @Ann @Bob", "echostore party group Guests 5c1e... --role reader -p @Trip"),
    "groups": ("echostore party groups", "echostore party groups -p @Trip --json"),
}
GROUPS = (
    Column("group", "GROUP", short, style="cyan"),
    Column("name", "NAME"),
    Column("role", "ROLE", lambda role: role or "removed"),
    Column("members", "MEMBERS", lambda members: ", ".join(one_line(each["name"], 20) for each in members)),
)


def group(name: str, /, *member: str, role: str = "editor", options: InParty = IN_PARTY) -> None:
    """Admit several identities to a party as one. `party role` and `party remove` take the group's key or @name too.

    Someone who is not in the party yet needs an invitation as well, for the feeds of a device; the role comes from here.

    Parameters
    ----------
    name
        What the group is called.
    member
        Identity keys in hex; or a unique prefix, or @name, of a member of this or another party.
    role
        What they may do: owner, admin, editor or reader. A member with another role has the greater one.
    """
    output = Output.of(options)
    with writing(options) as peer:
        opened = open_party(peer, options.party)
        named = [_identity(peer, opened, each) for each in member]
        key = opened.members.new_group(name, role, named)
        opened.flush()
        fields: dict[str, Any] = {
            "group": key.hex(),
            "party": opened.key.hex(),
            "name": name,
            "role": role,
            "members": [each.hex() for each in sorted(set(named))],
        }
    output.note(f"{one_line(name)!r} has {counted(len(fields['members']), 'member')}")
    output.document(fields, short(fields["group"]))


def groups(*, options: ListingInParty = LISTING_IN_PARTY) -> None:
    """List the groups of a party, with their roles and members."""
    output = Output.of(options)
    with reading(options) as peer:
        opened = open_party(peer, options.party)
        names = {member.identity: member.name for member in opened.members.all()}
        records = [
            {
                "group": each.group.hex(),
                "name": each.name,
                "role": each.role.label if each.role else None,
                "members": [
                    {"identity": identity.hex(), "name": names.get(identity) or short(identity.hex())}
                    for identity in each.members
                ],
            }
            for each in opened.members.groups()
        ]
    output.table("groups", GROUPS, records, empty="no group in this party")


def _identity(peer: "Peer", party: "Party", text: str) -> bytes:
    """An identity by key, or by prefix or @name among those that this peer knows."""
    known = {bytes(member.identity): member.name for member in party.members.all()}
    known |= {bytes(contact.identity): contact.name for contact in peer.contacts if contact.identity not in known}
    if text.startswith("@"):
        found = [identity for identity, name in known.items() if name == text[1:]]
    else:
        found = [identity for identity in known if text and identity.hex().startswith(text.lower())]
    if len(found) > 1:
        raise UsageError(f"{len(found)} people match {text!r}", next_step="Give more of the key.")
    if found:
        return found[0]
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise NotFound(f"no one is known as {text!r}", next_step="`echostore contact list` shows who is.")
    return key
