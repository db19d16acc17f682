"""`echostore epoch`: snapshots that a party's members agree on: create, list, show, verify."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App

from echostore.cli.feed import INTEGRITY_BROKEN
from echostore.cli.moments import parse_moment
from echostore.cli.opening import NOTHING_CAME, looking, open_party, reading, writing
from echostore.cli.options import FLAG, IN_PARTY, LISTING_IN_PARTY, YES, InParty, ListingInParty, examples
from echostore.cli.output import Column, Output, counted, size
from echostore.cli.values import iso_ms, short
from echostore.kernel.errors import NotFound, UsageError

if TYPE_CHECKING:
    from datetime import datetime

    from echostore.kernel.items.discarding import LeftOut
    from echostore.peer.epochs import EpochView
    from echostore.peer.party import Party

app = App(
    name="epoch",
    help="Epochs: moments of a party whose state its members agree on.",
    help_prologue=examples("echostore epoch create", "echostore epoch list"),
)

EPOCHS = (
    Column("number", "NUMBER", right=True),
    Column("cid", "CID"),
    Column("items", "ITEMS", right=True),
    Column("blocks", "BLOCKS", right=True),
    Column("declarer", "DECLARED BY"),
    Column("attests", "ATTESTS"),
    Column("final", "FINAL", lambda final: "yes" if final else "no"),
    Column("new_bytes", "NEW BYTES", lambda count: "" if count is None else size(count), right=True),
    Column("here", "HERE"),
    Column("created", "CREATED"),
)
REFUSED = 4
"""Exit status where this peer does not judge an epoch."""


@app.command(
    help_prologue=examples(
        "echostore epoch create",
        "echostore epoch create --discard-before 30d --dry-run",
        "echostore epoch create --party @Trip --from-pipeline out",
    )
)
def create(
    *,
    discard_before: str | None = None,
    from_pipeline: Path | None = None,
    dry_run: Annotated[bool, FLAG] = False,
    yes: Annotated[bool, YES] = False,
    options: InParty = IN_PARTY,
) -> None:
    """Declare an epoch: this party's state as it is now, under its CID, signed by this device.

    Parameters
    ----------
    discard_before
        Leave out what is older (30d, 2026-05-01, epoch:3) and seen by all: deleted items, posts that logs let go, the
        history of texts and lists. What stands stays. They are gone for all members, so this asks first.
        Without it the policy says how old these become (--discard-after).
    from_pipeline
        Folder that `echostore pipeline run` wrote. Its snapshot is declared, with its blobs, if this peer's own
        state at that place has the same CID; otherwise nothing is.
    dry_run
        Only tell what would be declared and left out.
    yes
        Leave it out without asking; needed where nobody can be asked.
    """
    output = Output.of(options)
    before = None if discard_before is None else _moment(discard_before)
    if from_pipeline is not None and (before is not None or dry_run):
        raise UsageError("a pipeline's snapshot leaves nothing out", next_step="Give --from-pipeline alone.")
    before_ms = None
    if before is not None or dry_run:
        plan, before_ms = _planned(options, before)
        if before is not None:
            for line in _loss_lines(plan):
                output.aside(line)
        if dry_run:
            output.document(plan, f"would declare epoch {plan['number']} with {counted(plan['items'], 'item')}")
            return
        lossless = not (plan["left_out"] or plan["silent"])
        if not lossless and not output.confirm(f"Declare epoch {plan['number']} without these?", yes=yes):
            output.document(plan, "no epoch declared")
            return
    with writing(options) as peer:
        party = open_party(peer, options.party)
        epochs = peer.epochs(party.key)
        if from_pipeline is None:
            made = epochs.create(discard_before_ms=before_ms)
        else:
            made = _from_pipeline(party, epochs, from_pipeline)
        record = {"party": party.key.hex(), **_record(made), "declared": True}
        output.document(record, f"epoch {made.number} of {short(party.key.hex())}: {made.cid}")


def _moment(text: str) -> "datetime | int":
    """A time, or the number of the epoch whose time is meant."""
    next_step = "Write 30d (ago), 2026-05-01T10:00, or epoch:3 for the time of an epoch."
    try:
        moment = parse_moment(text)
    except UsageError as error:
        raise UsageError(error.what, next_step=next_step) from None
    if not isinstance(moment, str):
        return moment
    kind, _, number = moment.partition(":")
    if kind != "epoch" or not (number.isascii() and number.isdigit() and number != "0"):
        raise UsageError(f"{text[:60]!r} is not a time", next_step=next_step)
    return int(number)


def _planned(options: InParty, before: "datetime | int | None") -> tuple[dict[str, Any], int | None]:
    """What would be declared and left out, as this peer's own fold has it, and up to which time."""
    from echostore.peer.epochs import Epochs

    with reading(options) as peer:
        party = open_party(peer, options.party)
        epochs = Epochs(party)
        if isinstance(before, int):
            before_ms: int | None = epochs.get(before).genesis.created_ms
        else:
            before_ms = None if before is None else int(before.timestamp() * 1000)
        plan = epochs.plan(discard_before_ms=before_ms)
    lost = asdict(plan.left_out)
    record = {"party": party.key.hex(), "number": plan.number, "items": plan.items, "declared": False}
    return {**record, "left_out": lost if plan.left_out else None, "silent": plan.silent}, before_ms


def _loss_lines(plan: dict[str, Any]) -> list[str]:
    lost = plan["left_out"]
    lines = [f"epoch {plan['number']} would leave nothing out"]
    if lost is not None:
        lines = [f"epoch {plan['number']} leaves out, for all members and for good:"]
        if lost["items"]:
            lines.append(f"  {counted(lost['items'], 'deleted item')}, which can't be restored any more")
        if lost["posts"]:
            lines.append(f"  {counted(lost['posts'], 'post')} that logs let go")
        if lost["histories"]:
            lines.append(f"  the history of {_shared(lost['histories'])}; what stands in them stays")
    if plan["silent"]:
        lines.append(f"  {counted(plan['silent'], 'silent feed')} would be retired before, which may let more go")
    return lines


def _shared(histories: int) -> str:
    return "1 text or list" if histories == 1 else f"{histories:,} texts and lists"


def _left_out_line(left_out: "LeftOut | None") -> str:
    if left_out is None:
        return "can't be told: not all that it sums up is here"
    parts = [
        counted(left_out.items, "deleted item") if left_out.items else "",
        counted(left_out.posts, "post") if left_out.posts else "",
        f"the history of {_shared(left_out.histories)}" if left_out.histories else "",
    ]
    return ", ".join(part for part in parts if part) or "nothing beyond what those before it did"


def _from_pipeline(party: "Party", epochs: Any, out: Path) -> "EpochView":
    from echostore.cli.lake import arrow_extra

    with arrow_extra():
        from echostore.pipeline.output.epochs import latest

    ready = latest(out, party.key)
    if ready is None:
        raise NotFound(
            f"{out} holds no snapshot of party {short(party.key.hex())}",
            next_step="Run `echostore lake publish` and `echostore pipeline run` first; `pipeline show` says what is there.",
        )
    made: EpochView = epochs.create_from(ready.cid, ready.blobs())
    return made


@app.command(name="list", help_prologue=examples("echostore epoch list", "echostore epoch list --party @Trip --json"))
def list_epochs(*, options: ListingInParty = LISTING_IN_PARTY) -> None:
    """List the epochs of a party, from the first on: who stands for them, what each added, what this peer says.

    Epoch 0 is the party's genesis and holds nothing.
    """
    from echostore.peer.epochs import Epochs

    output = Output.of(options)
    with reading(options) as peer:
        party = open_party(peer, options.party)
        epochs = Epochs(party)
        sizes = epochs.sizes()
        records = [_record(epoch) | {"new_bytes": sizes.get(epoch.number)} for epoch in epochs.all()]
        begun = party.runtime.processor.membership.machine.genesis is not None
        empty = "no epoch yet: echostore epoch create" if begun else NOTHING_CAME
        output.table("epochs", EPOCHS, records, empty=empty, party=party.key.hex())


@app.command(help_prologue=examples("echostore epoch show 1", "echostore epoch show 2 --party @Trip --json"))
def show(number: int, /, *, options: InParty = IN_PARTY) -> None:
    """Show one epoch: its snapshot, who stands for it, and where it ends in each feed.

    Parameters
    ----------
    number
        Counts from 1; 0 is the party's genesis.
    """
    from echostore.kernel.ids import Cid
    from echostore.peer.epochs import Epochs
    from echostore.wire.cids import cid_text

    output = Output.of(options)
    with reading(options) as peer:
        party = open_party(peer, options.party)
        epochs = Epochs(party)
        if number == 0:
            zero = epochs.zero()
            zero["created"] = iso_ms(zero.pop("created_ms"))
            output.document(zero, "\n".join(f"{name:12} {value}" for name, value in zero.items()))
            return
        epoch = epochs.get(number)
        view = next(view for view in epochs.all() if view.number == number)
        record: dict[str, Any] = {"party": party.key.hex(), **_record(view)}
        record["previous"] = epoch.genesis.previous.hex() or None
        record["previous_snapshot"] = epochs.previous_snapshot(epoch)
        record["new_bytes"] = epochs.sizes().get(number)
        record["stands_for_it"] = epochs.names(epoch.attested_by)
        record["disputes"] = epochs.disputes(epoch)
        record["rival_epochs"] = [_rival(each) for each in epochs.rivals(epoch)]
        record["admission"] = epoch.genesis.admission_digest.hex()
        record["control"] = cid_text(Cid(epoch.genesis.control)) if epoch.genesis.control else None
        record["encoding"] = epoch.genesis.encoding_version
        record["models"] = [f"{model}@{version}" for model, version in epoch.genesis.models]
        before_ms = epoch.genesis.discard_before_ms
        record["discard_before"] = iso_ms(before_ms) if before_ms else None
        left_out = epochs.left_out(epoch)
        record["left_out"] = None if left_out is None else asdict(left_out)
        record["timeframe"] = [
            {"feed": entry.feed.hex(), "seq": entry.seq, "link": entry.link.hex()} for entry in epoch.genesis.timeframe
        ]
        listed = ("left_out", "timeframe", "stands_for_it", "disputes", "models", "rival_epochs")
        lines = [f"{name:17} {value}" for name, value in record.items() if name not in listed and value is not None]
        if before_ms:
            lines += [f"{'left out':17} {_left_out_line(left_out)}"]
        lines += [f"{'models':17} {', '.join(record['models'])}"]
        lines += [f"{'stands for it':17} {', '.join(record['stands_for_it'])}"]
        lines += [f"{'disputed by':17} {each['by']}: {each['detail']}" for each in record["disputes"]]
        lines += [f"{'rival':17} {_rival_line(each)}" for each in record["rival_epochs"]]
        lines += [f"{'ends at':17} {short(entry['feed'])}:{entry['seq']}" for entry in record["timeframe"]]
        output.document(record, "\n".join(lines))


@app.command(help_prologue=examples("echostore epoch verify 1", "echostore epoch verify 2 --party @Trip --json"))
def verify(number: int, /, *, options: InParty = IN_PARTY) -> int:
    """Recompute one epoch from the messages held here and say whether its snapshot is right. Nothing is written.

    The exit status is 0 when it is, 6 when it is not, and 4 when this peer can't tell, with the reason.

    Parameters
    ----------
    number
        Counts from 1.
    """
    output = Output.of(options)
    with looking(options) as peer:
        party = open_party(peer, options.party)
        found = peer.epochs(party.key).verify(number)
        record = {"party": party.key.hex(), "number": number, "verdict": str(found.verdict), "detail": found.detail}
    word = {"attested": "right: this peer's own state is the same", "disputed": "WRONG"}.get(str(found.verdict))
    detail = f": {found.detail}" if found.detail else ""
    output.document(record, f"epoch {number} is {word}{detail}" if word else f"epoch {number}: {found.verdict}{detail}")
    return {"attested": 0, "disputed": INTEGRITY_BROKEN}.get(str(found.verdict), REFUSED)


def _rival(rival: dict[str, Any]) -> dict[str, Any]:
    return {
        "created": iso_ms(rival["created_ms"]),
        **{name: said for name, said in rival.items() if name != "created_ms"},
    }


def _rival_line(rival: dict[str, Any]) -> str:
    against = f", against it {', '.join(rival['disputed_by'])}" if rival["disputed_by"] else ""
    own = " (with you)" if rival["own"] else ""
    return f"by {rival['declarer']}: {rival['cid']}, for it {', '.join(rival['stands_for_it'])}{own}{against}"


def _record(epoch: "EpochView") -> dict[str, Any]:
    record = asdict(epoch)
    record["attests"] = f"{epoch.attested_by} of {epoch.electorate}" + (
        f", {epoch.disputed_by} against" if epoch.disputed_by else ""
    )
    record["created"] = iso_ms(record.pop("created_ms"))
    return record
