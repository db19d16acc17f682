"""How a party gets its members over the network: invite, invitations, uninvite, join, remove and role of `echostore party`.

While `echostore serve` runs, it is the host and the guest. Without it, `invite` listens by itself until the invitation is
used, and `join` connects, fetches what there is, and ends.
"""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from echostore.cli.moments import parse_duration_s
from echostore.cli.opening import from_dash, home_path, looking, open_party, writing
from echostore.cli.options import (
    FLAG,
    IN_PARTY,
    LISTING,
    OPTIONS,
    YES,
    InParty,
    Listing,
    Name,
    Options,
    named_party,
    party_and,
)
from echostore.cli.output import Column, Output, counted, flush_results, if_interrupted
from echostore.cli.values import iso_ms, one_line, short
from echostore.kernel.errors import NotFound, TimedOut, Unreachable, UsageError

if TYPE_CHECKING:
    from echostore.peer.inviting import Invitation
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

EXAMPLES = {
    "invite": (
        "echostore party invite @Trip",
        "echostore party invite --role reader --uses 5 --expires 1h --open --json",
    ),
    "invitations": ("echostore party invitations", "echostore party invitations --json"),
    "uninvite": ("echostore party uninvite 5c1e", "echostore party uninvite 5c1e --json"),
    "join": ("echostore party join echo1... --passcode 123456", "echostore --home ./data party join - < ticket.txt"),
    "remove": ("echostore party remove @Trip @Tablet --dry-run", "echostore party remove @Trip 1f3a9c02 --yes"),
    "role": ("echostore party role @Trip @Tablet admin", "echostore party role @Trip 1f3a9c02 reader --json"),
}
INVITATIONS = (
    Column("invitation", "INVITATION", short, style="cyan"),
    Column("party", "FOR", lambda party: short(party) if party else "device"),
    Column("kind", "KIND"),
    Column("role", "ROLE"),
    Column("uses_left", "USES", right=True),
    Column("tries_left", "TRIES", right=True),
    Column("expires", "EXPIRES"),
    Column("state", "STATE"),
    Column("events", "LAST", lambda events: one_line(events[-1], 60) if events else ""),
)
POLL_S = 0.2
TELL_S = 1.0
"""How often a joiner is told where it stands."""
LAST_GUEST_S = 30.0
"""How long a host that is about to end waits for a guest who takes nothing any more."""


def invite(
    party: str | None = None,
    /,
    *,
    role: str = "editor",
    uses: int = 1,
    expires: str = "10m",
    for_: Annotated[str | None, Parameter(name="--for")] = None,
    open_: Annotated[bool, Parameter(name="--open", negative=(), show_default=False)] = False,
    wait: Annotated[bool, FLAG] = False,
    listen: Annotated[tuple[str, ...], Parameter(consume_multiple=False)] = (),
    options: InParty = IN_PARTY,
) -> None:
    """Make a ticket for a guest, and a passcode to tell by another way.

    While `echostore serve` runs, that is all. Without it, this command is the host: it waits until the ticket is used.

    Parameters
    ----------
    party
        Key, unique prefix or @title; --party says the same. Without it, the default party.
    role
        What the guest may do: owner, admin, editor or reader.
    uses
        How many guests may use it.
    expires
        How long it counts: 10m, 2h, 1d.
    for_
        The identity or device key of the guest, in hex; then there is no passcode.
    open_
        Whoever has the ticket may enter, and any admin honours it; no passcode.
    wait
        Wait until it has been used, also while `echostore serve` runs.
    listen
        host:port to take guests at; `echostore serve`, if it runs, listens there too.
    """
    output = Output.of(options)
    lifetime_s = parse_duration_s(expires)
    key = _key(for_) if for_ is not None else None
    with writing(options) as peer:
        opened = open_party(peer, named_party(options, party))
        hosting = not peer.network.addresses
        if hosting and not listen:
            from echostore.peer.service import listen_as_before

            listen_as_before(peer)
        for address in listen:
            peer.listen(address)
        made = opened.invite(role, key=key, uses=uses, expires_s=lifetime_s, open=open_)
        state = made.state
        fields = {
            "invitation": made.id,
            "party": opened.key.hex(),
            "role": role,
            "uses": uses,
            "expires": iso_ms(state.expires_ms),
            "ticket": made.ticket,
            "passcode": made.passcode,
        }
        output.document(fields, [made.ticket, *([f"passcode {made.passcode}"] if made.passcode else [])])
        flush_results()
        if made.passcode:
            output.note("give the ticket to the guest, and the passcode by another way")
        if hosting or wait:
            with if_interrupted("The invitation still counts while `echostore serve` runs."):
                wait_for_guests(output, peer, made)
                if hosting:
                    _until_taken(output, peer, opened)


def wait_for_guests(output: Output, peer: "Peer", made: "Invitation") -> None:
    """Until the invitation has ended, telling what happens to it."""
    told = 0
    while True:
        state = made.state
        for event in state.events[told:]:
            output.note(event)
        told = len(state.events)
        if state.ended == "used":
            return
        if state.ended:
            raise TimedOut(f"the invitation has ended: {state.ended}", unchanged="Who was admitted stays a member.")
        if time.time() * 1000 > state.expires_ms:
            raise TimedOut("nobody has used the invitation in time", unchanged="Who was admitted stays a member.")
        try:
            made.wait(timeout=min(1.0, max(0.0, state.expires_ms / 1000 - time.time())) + 0.01)
        except TimedOut:
            continue  # looked at again from the start


def _until_taken(output: Output, peer: "Peer", party: "Party") -> None:
    """Stay until the guest holds what is here, as long as it takes something."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < LAST_GUEST_S:
        rows = [feed for feed in party.status.feeds if feed.held]
        taken = sum(min(feed.held, max((other.held for other in feed.others), default=0)) for feed in rows)
        if taken >= sum(feed.held for feed in rows):
            return
        if taken != before:
            before, since = taken, time.monotonic()
        time.sleep(POLL_S)
    output.warn("the guest does not hold everything yet; run `echostore serve` to let it go on")


def invitations(*, options: Listing = LISTING) -> None:
    """List the invitations of this peer, those that have ended too."""
    from echostore.peer.inviting import kept_invitations

    output = Output.of(options)
    with looking(options) as peer:
        kept, now_ms = kept_invitations(peer.meta), time.time() * 1000
    records = [
        {
            "invitation": each.invitation,
            "party": each.party or None,
            "purpose": str(each.purpose),
            "kind": str(each.kind),
            "role": each.role,
            "uses_left": each.uses_left,
            "tries_left": each.tries_left,
            "expires": iso_ms(each.expires_ms),
            "state": each.ended or ("expired" if now_ms > each.expires_ms else "open"),
            "ticket": each.ticket,
            "events": list(each.events),
        }
        for each in kept
    ]
    output.table("invitations", INVITATIONS, records, empty="no invitation was made here")


def uninvite(invitation: str, /, *, options: Options = OPTIONS) -> None:
    """Cancel an invitation; a guest who comes later is told so.

    Parameters
    ----------
    invitation
        Its id, or a unique prefix of it.
    """
    output = Output.of(options)
    with writing(options) as peer:
        inviting = peer.network.inviting
        inviting.cancel(invitation)
        state = inviting.issued(invitation)
    output.document({"invitation": state.invitation, "state": state.ended}, f"{short(state.invitation)} {state.ended}")


def join(
    ticket: Name,
    /,
    *,
    passcode: str | None = None,
    timeout: str = "60s",
    name: str | None = None,
    options: Options = OPTIONS,
) -> None:
    """Enter a party with a ticket, and wait until it can be written here (read, for a reader) and has caught up.

    Without a passcode that the ticket needs, it is asked for on a terminal. The home is made if there is none.

    Parameters
    ----------
    ticket
        The line that `party invite` printed; - reads it from standard input.
    passcode
        The digits that belong to it.
    timeout
        How long to wait for the host, and later for the next block: 60s, 5m.
    name
        What others see this peer as, if the home is new.
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
        with if_interrupted("`echostore party list` says whether the host had admitted this peer by then."):
            party = peer.join(ticket, passcode, timeout=patience_s, wait=False)
        output.note(f"joined {short(party.key.hex())} {one_line(party.title)!r}")
        left = "This peer is a member; what came is kept, and `echostore serve` fetches the rest."
        with if_interrupted(left), output.progress(f"fetching {one_line(party.title, 30)}") as bar:
            catch_up(output, peer, party, patience_s, bar, left)
            party.wait_admitted(patience_s)
        status = party.status
        fields: dict[str, Any] = {
            "party": party.key.hex(),
            "title": party.title,
            "blocks": sum(feed.held for feed in status.feeds),
            "items": status.items,
            "epoch": status.epoch,
            "began": status.began or None,
            "role": status.standing,
            "writable": status.writable,
        }
    if fields["began"]:
        output.note(f"began {fields['began']}")
    output.note(f"{counted(fields['blocks'], 'block')}, {counted(fields['items'], 'item')}")
    output.document(fields, short(fields["party"]))


def catch_up(output: Output, peer: "Peer", party: "Party", patience_s: float, bar: Any, left: str) -> None:
    """Until all that is known is held and processed. Told as a real fraction, at least once a second.

    Unreachable or TimedOut when nothing came for so long, by whether a member is connected.
    """
    best, moved, told, settled = (-1, -1), time.monotonic(), time.monotonic(), 0
    while settled < 2:
        progress = peer.network.progress(party.key)
        bar(progress.held, progress.known)
        settled = settled + 1 if progress.caught_up else 0
        now = time.monotonic()
        if (progress.held, progress.processed) > best:
            best, moved = (progress.held, progress.processed), now
        elif now - moved > patience_s and not settled:
            text = f"{progress.held:,} of {progress.known:,} known blocks are here"
            if not peer.network.connected_members(party.key):
                raise Unreachable(
                    f"{text}, and no member of the party is connected any more: the host went away",
                    unchanged=left,
                    next_step="Ask the host to run `echostore serve`, and run it here too.",
                )
            raise TimedOut(f"{text}, and no more came for {patience_s:g} s", unchanged=left)
        if now - told >= TELL_S and not sys.stderr.isatty():
            told = now
            text = f"{progress.held:,} of {progress.known:,} known blocks held, {progress.processed:,} processed"
            alone = "" if peer.network.connected_members(party.key) else "; no member is connected"
            output.note(text + alone)
        time.sleep(POLL_S)


def ask_passcode() -> str:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("this ticket needs its passcode", next_step="Give it with --passcode.")
    sys.stderr.write("Passcode: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip()


def remove(
    party_or_member: str,
    member: str | None = None,
    /,
    *,
    dry_run: Annotated[bool, FLAG] = False,
    yes: Annotated[bool, YES] = False,
    options: InParty = IN_PARTY,
) -> None:
    """Remove a member from a party. What they wrote and this peer has not seen leaves the state, and is kept aside.

    Parameters
    ----------
    party_or_member
        The party, by key, unique prefix or @title; or the member, when --party or the default names the party.
    member
        Key of an identity or group, unique prefix or @name.
    dry_run
        Only tell who would be removed.
    yes
        Do it without asking; needed where nobody can be asked.
    """
    output = Output.of(options)
    party, whom = party_and(options, party_or_member, member)
    with looking(options) as peer:
        opened = open_party(peer, party)
        found = _member(opened, whom or "")
        fields: dict[str, Any] = {
            "party": opened.key.hex(),
            "member": found.identity.hex(),
            "name": found.name,
            "devices": found.devices,
        }
        unseen = opened.members.unseen_children(found.identity)
    label = f"{short(fields['member'])} {one_line(found.name)!r}"
    what = (
        counted(found.devices, "device") if found.devices else f"what gave a role to {counted(found.members, 'member')}"
    )
    output.note(f"this removes {label} with {what}, for every member")
    for title in unseen:
        output.note(
            f"what they wrote in {one_line(title)!r} leaves it too: enter it first (`party enter`) to keep that"
        )
    if dry_run:
        output.document({**fields, "removed": False}, f"would remove {label}")
        return
    if not output.confirm(f"Remove {label}?", yes=yes):
        output.document({**fields, "removed": False}, "nobody removed")
        return
    with writing(options) as peer:
        opened = open_party(peer, fields["party"])
        opened.members.remove(bytes.fromhex(fields["member"]))
        opened.flush()
    output.document({**fields, "removed": True}, f"removed {label}")


def role(party_or_member: str, member_or_role: str, role: str | None = None, /, *, options: InParty = IN_PARTY) -> None:
    """Give a member another role. What they wrote before, as seen here, counts under the old one.

    Parameters
    ----------
    party_or_member
        The party, by key, unique prefix or @title; or the member, when --party or the default names the party.
    member_or_role
        The member: key of an identity or group, unique prefix or @name; or the role.
    role
        owner, admin, editor or reader.
    """
    output = Output.of(options)
    party, whom, given = party_and(options, party_or_member, member_or_role, role)
    wanted = given or ""
    with writing(options) as peer:
        opened = open_party(peer, party)
        found = _member(opened, whom or "")
        unseen = opened.members.unseen_children(found.identity)
        opened.members.change_role(found.identity, wanted)
        opened.flush()
        fields = {
            "party": opened.key.hex(),
            "member": found.identity.hex(),
            "name": found.name,
            "before": found.role.label if found.role else None,
            "role": wanted,
        }
    for title in unseen:
        output.note(f"what they wrote in {one_line(title)!r}, which is not here, counts as written in the new role")
    output.document(fields, f"{short(fields['member'] or '')} {wanted}")


class _Subject(NamedTuple):
    """A member or a group: what can be removed and given another role."""

    identity: bytes
    name: str
    role: Any
    devices: int
    members: int


def _member(party: "Party", text: str) -> _Subject:
    """A member or group by key, prefix or @name."""
    known = [_Subject(each.identity, each.name, each.role, len(each.devices), 1) for each in party.members.all()]
    known += [_Subject(each.group, each.name, each.role, 0, len(each.members)) for each in party.members.groups()]
    if text.startswith("@"):
        found = [member for member in known if member.name == text[1:]]
    else:
        found = [member for member in known if text and member.identity.hex().startswith(text.lower())]
    if not found:
        raise NotFound(f"no member {text!r} in the party", next_step="`echostore party members` shows them.")
    if len(found) > 1:
        raise UsageError(f"{len(found)} members match {text!r}", next_step="Give more of the key.")
    return found[0]


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise UsageError(
            "a key is 64 hex digits", next_step="The guest's `echostore identity show` prints identity and device."
        )
    return key


VERBS: dict[str, Callable[..., None]] = {
    "invite": invite,
    "invitations": invitations,
    "uninvite": uninvite,
    "join": join,
    "remove": remove,
    "role": role,
}
