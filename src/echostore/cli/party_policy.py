"""`echostore party policy`: how a party makes its epochs, shown and set."""

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from echostore.cli.moments import parse_span, span
from echostore.cli.opening import open_party, reading, writing
from echostore.cli.options import IN_PARTY, InParty
from echostore.cli.output import Output, counted
from echostore.cli.values import short
from echostore.kernel.errors import NotFound, UsageError
from echostore.kernel.party import epoch_policy

if TYPE_CHECKING:
    from echostore.kernel.party.epoch_policy import EpochPolicy
    from echostore.peer.party import Party

EXAMPLES = {
    "policy": (
        "echostore party policy",
        "echostore party policy --declarers elect --messages 10000 --age 1d --party @Trip",
    ),
}

LEAST_QUORUM = 3
"""Fewer are never more than a majority, however many members there are."""
_QUORUMS = f"Give `majority`, or a number from {LEAST_QUORUM} on."

_Whole = Annotated[int | None, Parameter(validator=validators.Number(gte=0, lt=10**epoch_policy.NUMBER_DIGITS_MAX))]


def policy(
    *,
    declarers: str | None = None,
    bot: tuple[str, ...] = (),
    messages: _Whole = None,
    size: _Whole = None,
    age: str | None = None,
    grace: str | None = None,
    join_attests: _Whole = None,
    truncate_quorum: str | None = None,
    silence: str | None = None,
    discard_after: str | None = None,
    options: InParty = IN_PARTY,
) -> None:
    """Show how the party makes its epochs; with options, change that. Only owners and admins change it.

    Parameters
    ----------
    declarers
        Who declares epochs: `admins`, `elect` (an editor's device, by lot), `bot`, or keys of members or devices (or
        @name), separated by commas.
    bot
        Key or @name of a device or member that `bot` means; several times for several.
    messages
        An epoch after so many messages; 0: not by count.
    size
        An epoch after so many bytes; 0: not by size.
    age
        An epoch when the oldest news is so old, like 1d or 12h; 0: not by age.
    grace
        How long the next device waits for the one before it.
    join_attests
        How many members besides the declarer a newcomer wants to stand for an epoch; a majority is always enough.
    truncate_quorum
        How many members must have attested before history is deleted: `majority`, or a number from 3 on, which counts
        where it is above a majority and so many are members.
    silence
        After how long a silent feed may be retired; 0: never.
    discard_after
        How old deleted items, posts that logs let go, and the history of texts and lists become before epochs leave them
        out, like 30d; 0 or none: they are kept.
    """
    output = Output.of(options)
    given = {
        epoch_policy.EPOCH_MESSAGES: messages,
        epoch_policy.EPOCH_BYTES: size,
        epoch_policy.EPOCH_AGE: _seconds(age),
        epoch_policy.EPOCH_GRACE: _seconds(grace),
        epoch_policy.EPOCH_JOIN_ATTESTS: join_attests,
        epoch_policy.EPOCH_SILENCE: _seconds(silence),
        epoch_policy.EPOCH_DISCARD_AGE: _seconds("0" if discard_after == "none" else discard_after),
    }
    entries = {key: str(value).encode() for key, value in given.items() if value is not None}
    if truncate_quorum is not None:
        entries[epoch_policy.EPOCH_TRUNCATE_QUORUM] = _quorum(truncate_quorum)
    if entries or declarers is not None or bot:
        with writing(options) as peer:
            party = open_party(peer, options.party)
            if declarers is not None:
                entries[epoch_policy.EPOCH_DECLARERS] = _declarers(party, declarers)
            if bot:
                entries[epoch_policy.EPOCH_BOTS] = b"".join(party.members.find_key(each) for each in bot)
            party.members.set_policy(entries)
            _show(output, party, peer.epochs(party.key).policy)
        return
    with reading(options) as peer:
        party = open_party(peer, options.party)
        _show(output, party, peer.epochs(party.key).policy)


def _show(output: Output, party: "Party", policy: "EpochPolicy") -> None:
    record: dict[str, Any] = {
        "party": party.key.hex(),
        "declarers": policy.declarers,
        "named": sorted(key.hex() for key in policy.named),
        "messages": policy.messages,
        "bytes": policy.bytes_,
        "age_s": policy.age_s,
        "grace_s": policy.grace_s,
        "join_attests": policy.join_attests,
        "truncate_quorum": policy.truncate_quorum or "majority",
        "silence_s": policy.silence_s,
        "discard_after_s": policy.discard_age_s,
        "by_itself": policy.by_itself,
    }
    named = ", ".join(short(key) for key in record["named"])
    triggers = [
        f"{policy.messages:,} messages" if policy.messages else "",
        f"{policy.bytes_:,} bytes" if policy.bytes_ else "",
        span(policy.age_s) if policy.age_s else "",
    ]
    more = f", and at least {policy.truncate_quorum:,} where so many are members" if policy.truncate_quorum else ""
    lines = [
        f"declared by    {policy.declarers}{f' ({named})' if named else ''}",
        f"an epoch after {' or '.join(each for each in triggers if each) or 'somebody asks for one'}",
        f"grace          {span(policy.grace_s)}",
        f"a newcomer     wants {_wanted(policy.join_attests)} besides the declarer's word",
        f"truncation     a majority must have attested{more}",
        f"silent feeds   {f'may be retired after {span(policy.silence_s)}' if policy.silence_s else 'are kept'}",
        f"old history    {f'is left out after {span(policy.discard_age_s)}' if policy.discard_age_s else 'is kept'}",
    ]
    if policy.declarers == epoch_policy.BOT and not policy.named:
        output.warn("no bot is named: nobody can declare an epoch before --bot names one")
    output.document(record, "\n".join(lines))


def _wanted(attests: int | None) -> str:
    return "1 attest, once there are 3 devices," if attests is None else counted(attests, "attest")


def _declarers(party: "Party", text: str) -> bytes:
    if text in (epoch_policy.ADMINS, epoch_policy.ELECT, epoch_policy.BOT):
        return text.encode()
    next_step = (
        "Give admins, elect, bot, or keys or @names, separated by commas; `echostore party members` lists the members."
    )
    if not text.strip():
        raise UsageError("nobody is named who may declare epochs", next_step=next_step)
    try:
        return b"".join(party.members.find_key(each.strip()) for each in text.split(","))
    except NotFound as error:
        raise NotFound(error.what, next_step=next_step) from None


def _seconds(span: str | None) -> int | None:
    if span is None or span == "0":
        return None if span is None else 0
    seconds = parse_span(span)
    if seconds != int(seconds):
        raise UsageError(f"{span!r} is not a number of whole seconds", next_step="Write 30s, 10m or 1d; 0 for none.")
    return int(seconds)


def _quorum(text: str) -> bytes:
    if text != "majority" and not (text.isascii() and text.isdigit() and len(text) <= epoch_policy.NUMBER_DIGITS_MAX):
        raise UsageError(f"{text!r} is no quorum", next_step=_QUORUMS)
    if text != "majority" and int(text) < LEAST_QUORUM:
        raise UsageError(f"a quorum of {int(text)} says nothing: a majority is always asked for", next_step=_QUORUMS)
    return text.encode()
