"""`echostore party`: make, list and look at parties. What ends or moves a party is in `party_life`."""

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group

from echostore.cli import (
    party_capability,
    party_children,
    party_group,
    party_life,
    party_network,
    party_policy,
    party_revive,
)
from echostore.cli.feed import INTEGRITY_BROKEN
from echostore.cli.opening import (
    NOTHING_CAME,
    home_path,
    looking,
    open_party,
    party_key,
    reading,
    writing,
    wrote,
)
from echostore.cli.options import (
    FLAG,
    IN_PARTY,
    LISTING,
    LISTING_IN_PARTY,
    OPTIONS,
    InParty,
    Listing,
    ListingInParty,
    Options,
    examples,
    named_party,
)
from echostore.cli.output import Column, Output, counted, size
from echostore.cli.values import iso_ms, one_line, short, short_place
from echostore.kernel.errors import NotFound, UsageError

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.status import PartyStatus

app = App(
    name="party",
    help="Parties: data sets with their members.",
    help_prologue=examples('echostore party create "Road trip"', "echostore party list"),
)

PARTIES = (
    Column("party", "PARTY", short, style="cyan"),
    Column("title", "TITLE"),
    Column("default", "DEFAULT", lambda chosen: "yes" if chosen else ""),
    Column("state", "STATE"),
    Column("kind", "KIND"),
    Column("created", "CREATED"),
    Column("bytes", "SIZE", size, right=True),
)


def _device(device: dict[str, Any]) -> str:
    return f"{short(device['device'])} (revoked)" if device["revoked"] else short(device["device"])


MEMBERS = (
    Column("identity", "MEMBER", short, style="cyan"),
    Column("name", "NAME"),
    Column("role", "ROLE"),
    Column("status", "STATUS"),
    Column("creator", "CREATOR"),
    Column("devices", "DEVICES", lambda devices: ", ".join(_device(device) for device in devices)),
)
STEPS = (
    Column("act", "CREDENTIAL"),
    Column("about", "ABOUT", short, style="cyan"),
    Column("issuer", "ISSUER", short),
    Column("place", "AT", short_place),
    Column("valid", "VALID", lambda valid: "yes" if valid else "no"),
    Column("because", "BECAUSE"),
)

REJECTS = (
    Column("feed", "FEED", short, style="cyan"),
    Column("seq", "SEQ", right=True),
    Column("operation", "OPERATION", lambda number: "all" if number is None else str(number), right=True),
    Column("credential", "CREDENTIAL", lambda act: act or ""),
    Column("reason", "REASON"),
    Column("detail", "DETAIL"),
)


@app.command(
    help_prologue=examples(
        'echostore party create "Road trip"',
        "echostore party create Notes --local --json",
        "echostore party create Chess --below @Trip",
    )
)
def create(
    title: str,
    /,
    *,
    local: Annotated[bool, FLAG] = False,
    below: str | None = None,
    name: str | None = None,
    options: Options = OPTIONS,
) -> None:
    """Make a party with this peer as its owner; the home is made too if there is none.

    Parameters
    ----------
    title
        What the party is called.
    local
        For this device alone, without an identity; it can be adopted later.
    below
        A party, by key, unique prefix or @title: the new one is a light-weight party of it. It has the same members, and
        feeds, history, epochs and undo of its own.
    name
        What others see this peer as, if the home is new.
    """
    output = Output.of(options)
    fresh = not (home_path(options) / "keys").exists()
    if local and below is not None:
        raise UsageError("a light-weight party has the members of the one above it", next_step="Leave out --local.")
    with writing(options, create=below is None, name=name) as peer:
        above = open_party(peer, below) if below is not None else None
        party = peer.create_party(title, local=local) if above is None else peer.create_child(above, title)
        party.flush()
        fields: dict[str, Any] = {"party": party.key.hex(), "title": party.title, "local": local}
        if above is not None:
            fields["child_of"] = above.key.hex()
    if fresh:
        output.note(f"made a home at {home_path(options)}")
    output.document(fields, short(fields["party"]))


@app.command(name="list", help_prologue=examples("echostore party list", "echostore party list --json"))
def list_parties(*, options: Listing = LISTING) -> None:
    """List the parties of this peer, without opening them."""
    output = Output.of(options)
    with reading(options) as peer:
        chosen = peer.default_party
        records = [
            {
                "party": known.key.hex(),
                "title": known.title,
                "default": known.key == chosen,
                "state": str(known.state),
                "kind": "local" if known.local else "child" if known.child_of else "shared",
                "child_of": known.child_of.hex() if known.child_of else None,
                "created": iso_ms(known.created_ms),
                "bytes": party_life.disk_bytes(peer.home.party(known.key).path),
            }
            for known in peer.parties()
        ]
    output.table("parties", PARTIES, records, empty="no party here; make one with `echostore party create TITLE`")


@app.command(help_prologue=examples('echostore party use "@Road trip"', "echostore party use --clear"))
def use(party: str | None = None, /, *, clear: Annotated[bool, FLAG] = False, options: InParty = IN_PARTY) -> None:
    """Choose the party that commands take when none is named; without a party, show which one they take.

    The home keeps the choice. ECHOSTORE_PARTY and --party go before it.

    Parameters
    ----------
    party
        Key, unique prefix or @title; --party says the same.
    clear
        Forget the choice.
    """
    output = Output.of(options)
    which = named_party(options, party)
    if clear and which is not None:
        raise UsageError("--clear takes no party")
    if clear or which is not None:
        with writing(options) as peer:
            peer.use_party(None if which is None else party_key(peer, which))
    with reading(options) as peer:
        try:
            taken = None if clear else party_key(peer, None)
        except (UsageError, NotFound):  # several, and none chosen; or none at all
            taken = None
        title = None if taken is None else peer.meta.party(taken).title
    fields = {"party": None if taken is None else taken.hex(), "title": title}
    output.document(fields, "no default" if taken is None else f"{short(taken.hex())} {one_line(title or '')}")


@app.command(help_prologue=examples("echostore party show", 'echostore party show "@Road trip" --snapshot'))
def show(
    party: str | None = None,
    /,
    *,
    snapshot: Annotated[bool, FLAG] = False,
    options: InParty = IN_PARTY,
) -> int:
    """Show one party: what is held and processed, who writes, what was rejected.

    The exit status is 6 when blobs are lost of the epoch that the party stands on; what is lost and what to do is told.

    Parameters
    ----------
    party
        Key, unique prefix or @title; --party says the same. Without it, the default party.
    snapshot
        Compute the CID of its state: equal on every peer with the same messages.
    """
    output = Output.of(options)
    with looking(options) as peer:
        fields = party_fields(peer.held(party_key(peer, named_party(options, party))))
    if snapshot and not fields["lost"]:
        with reading(options) as peer:
            fields["snapshot"] = open_party(peer, fields["party"]).snapshot().cid
    lines = [
        f"party      {fields['party']}",
        f"title      {one_line(fields['title'])}",
        f"state      {fields['state']}",
        f"truth      {fields['truth']}",
    ]
    lines += [f"{name:<10} {fields[name]}" for name in ("items", "members") if fields[name] is not None]
    lines += [f"{name:<10} {fields[name]}" for name in ("epoch", "began") if fields[name] is not None]
    lines += [f"{name:<10} {fields[name]}" for name in ("next_step",) if fields[name] is not None]
    lines += [f"snapshot   {fields['snapshot']}"] if "snapshot" in fields else []
    for feed in fields["feeds"]:
        counts = f"{feed['held']} held, {feed['processed']} processed, {feed['known']} known"
        counts += f", on disk from {feed['start']} on" if feed["start"] else ""
        lines.append(f"feed       {short(feed['feed'])} {feed['kind']} of {one_line(feed['owner']) or '?'}: {counts}")
    output.document(fields, lines)
    return INTEGRITY_BROKEN if fields["lost"] else 0


@app.command(
    help_prologue=examples('echostore party rename "Summer trip"', "echostore party rename Chess --party @Games")
)
def rename(title: str, /, *, options: InParty = IN_PARTY) -> None:
    """Give a party another title, for all members.

    Parameters
    ----------
    title
        What the party is called from now on.
    """
    output = Output.of(options)
    with writing(options) as peer:
        party = open_party(peer, options.party)
        before = party.title
        party.title = title
        wrote(output, party, {"title": party.title, "before": before}, one_line(party.title))


@app.command(help_prologue=examples("echostore party members", "echostore party members @Trip --json"))
def members(party: str | None = None, /, *, options: ListingInParty = LISTING_IN_PARTY) -> None:
    """List who is or was a member, with role, status and devices.

    Parameters
    ----------
    party
        Key, unique prefix or @title; --party says the same. Without it, the default party.
    """
    output = Output.of(options)
    with reading(options) as peer:
        records = [
            {
                "identity": member.identity.hex(),
                "name": member.name,
                "role": member.role.label if member.role else None,
                "status": str(member.status),
                "creator": member.creator,
                "devices": [
                    {"device": device.device.hex(), "name": device.name, "revoked": device.revoked}
                    for device in member.devices
                ],
            }
            for member in open_party(peer, named_party(options, party)).members.all()
        ]
    output.table("members", MEMBERS, records)


@app.command(help_prologue=examples("echostore party rejected", "echostore party rejected @Trip --reason fork --json"))
def rejected(
    party: str | None = None, /, *, reason: str | None = None, options: ListingInParty = LISTING_IN_PARTY
) -> None:
    """List what is held and does not count, each block, operation or credential with its reason.

    Parameters
    ----------
    party
        Key, unique prefix or @title; --party says the same. Without it, the default party.
    reason
        Only those with this reason.
    """
    output = Output.of(options)
    with reading(options) as peer:
        opened = open_party(peer, named_party(options, party))
        records = [
            {
                "feed": reject.feed.hex(),
                "seq": reject.seq,
                "operation": reject.position if reject.position >= 0 else None,
                "credential": None,
                "reason": str(reject.reason),
                "detail": reject.detail,
            }
            for reject in opened.rejected()
        ]
        records += [
            {
                "feed": refused.feed.hex(),
                "seq": refused.seq,
                "operation": refused.position if refused.position >= 0 else None,
                "credential": refused.act or None,
                "reason": str(refused.reason),
                "detail": refused.detail,
            }
            for refused in (opened.members.rejected() if opened.runtime.processor.parent is None else ())
        ]
        records = [record for record in records if reason is None or record["reason"] == reason]
    output.table("rejected", REJECTS, records, empty="nothing was rejected")


@app.command(help_prologue=examples("echostore party why @Laptop", "echostore party why 1f3a --party @Trip --json"))
def why(key: str, /, *, options: InParty = IN_PARTY) -> None:
    """Show why a member, device or feed counts or does not: the chain of credentials, each with its verdict.

    Parameters
    ----------
    key
        Key in hex or a unique prefix of it, or @name of a member.
    """
    output = Output.of(options)
    with reading(options) as peer:
        opened = open_party(peer, options.party)
        steps = opened.members.why(key)
        keys = {feed: cursor.key.hex() for feed, cursor in opened.runtime.processor.orderer.cursors.items()}
        records = [
            {
                "act": step.act,
                "about": step.key.hex(),
                "issuer": step.issuer.hex(),
                "device": step.device.hex(),
                "place": f"{keys[step.feed]}:{step.seq}",
                "feed": keys[step.feed],
                "seq": step.seq,
                "valid": step.reason is None,
                "reason": str(step.reason) if step.reason else None,
                "because": step.detail if step.reason is None else f"{step.reason} {step.detail}".strip(),
            }
            for step in steps
        ]
    output.table("steps", STEPS, records)


def _add(group: Group, verb: Any, lines: tuple[str, ...], name: str | None = None) -> None:
    app.command(verb, name=name, help_prologue=examples(*lines), group=group)


LIFE, PEOPLE, MOVE = (
    Group(title, sort_key=place)
    for place, title in enumerate(("Pause and end", "People and rights", "Move and bring back"), 1)
)
for _verb in (party_life.pause, party_life.resume, party_life.close, party_life.forget):
    _add(LIFE, _verb, party_life.EXAMPLES[_verb.__name__])
_add(MOVE, party_life.export, party_life.EXAMPLES["export"])
_add(MOVE, party_life.import_, party_life.EXAMPLES["import"], "import")
_add(MOVE, party_revive.revive, party_revive.EXAMPLES)
_add(PEOPLE, party_group.group, party_group.EXAMPLES["group"])
_add(PEOPLE, party_group.groups, party_group.EXAMPLES["groups"])
_add(PEOPLE, party_children.children, party_children.EXAMPLES["children"])
_add(PEOPLE, party_children.enter, party_children.EXAMPLES["enter"])
_add(PEOPLE, party_policy.policy, party_policy.EXAMPLES["policy"])
party_capability.app.group = (PEOPLE,)
app.command(party_capability.app)
for _name, _function in party_network.VERBS.items():
    _add(PEOPLE, _function, party_network.EXAMPLES[_name], _name)


def party_fields(party: "Party") -> dict[str, Any]:
    """What `party show` and `status` tell of a party."""
    status = party.status
    reasons: dict[str, int] = {}
    for reject in party.rejected():
        reasons[reject.reason] = reasons.get(reject.reason, 0) + 1
    return {
        "party": party.key.hex(),
        "title": status.title,
        "state": str(party.peer.meta.party(party.key).state),
        "items": None if status.closed else status.items,
        "members": len(party.members.all()),
        "rejected": status.rejected,
        "rejected_by_reason": reasons,
        "unshared": status.unshared,
        "arrived": status.arrived,
        "failure": status.failure or None,
        "disk_full": status.disk_full,
        "unstored": status.unstored,
        "standing": status.standing or None,
        "epoch": status.epoch,
        "began": status.began or None,
        "lost": status.lost or None,
        "next_step": status.next_step or None,
        "truth": truth(status),
        "feeds": [feed_fields(feed) for feed in status.feeds],
    }


def feed_fields(feed: Any) -> dict[str, Any]:
    """One feed of a party's status."""
    return {
        "feed": feed.key.hex(),
        "kind": str(feed.kind),
        "owner": feed.owner,
        "own": feed.own,
        "start": feed.start,
        "held": feed.held,
        "processed": feed.processed,
        "known": feed.known,
        "waits_for": feed.waits_for or None,
        "ended": feed.ended or None,
        "excluded": feed.excluded or None,
        "over_quota": feed.over_quota,
        "slowed": feed.slowed,
        "others": [
            {"device": other.device.hex(), "held": other.held, "processed": other.processed} for other in feed.others
        ],
    }


def truth(status: "PartyStatus") -> str:
    """One sentence on what is where. It never says "synced", and says of others only what they said."""
    from echostore.peer.status import REMOVED, REVOKED

    held, known = sum(feed.held for feed in status.feeds), sum(feed.known for feed in status.feeds)
    waiting = sum(feed.held - feed.processed for feed in status.feeds)
    if known:
        parts = [f"all {counted(held, 'block')} held" if held == known else f"{held:,} of {known:,} known blocks held"]
        parts.append("all processed" if not waiting else f"{waiting:,} not processed")
    else:
        parts = [NOTHING_CAME]
    inside = sum(min(feed.start, feed.held) for feed in status.feeds)
    if inside:
        parts.append(f"{inside:,} of them only as " + ("an epoch" if status.epoch is None else f"epoch {status.epoch}"))
    if status.lost:
        parts.insert(0, status.lost)
    if status.standing in (REMOVED, REVOKED):
        parts.insert(0, f"you are not in this party any more ({status.standing})")
    if not status.arrived:
        parts.append("no other peer has taken the admission of this device: what it writes counts nowhere else yet")
    if status.unshared:
        parts.append(f"{status.unshared:,} of your own not known to be on another peer")
    if status.rejected:
        parts.append(f"{status.rejected:,} rejected")
    if status.failure:
        parts.append(f"the {'disk is full' if status.disk_full else 'store failed'}: {status.failure}")
    return "; ".join(parts)
