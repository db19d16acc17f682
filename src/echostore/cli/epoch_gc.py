"""`echostore epoch gc`: frees what lies below epochs that the members agreed on."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from echostore.cli.epoch import app
from echostore.cli.opening import open_party, reading, writing
from echostore.cli.options import FLAG, IN_PARTY, YES, InParty, examples
from echostore.cli.output import Output, counted

if TYPE_CHECKING:
    from echostore.peer.epoch_gc import Freed

__all__ = ["app"]


@app.command(help_prologue=examples("echostore epoch gc --dry-run", "echostore epoch gc --party @Trip --yes"))
def gc(
    *, dry_run: Annotated[bool, FLAG] = False, yes: Annotated[bool, YES] = False, options: InParty = IN_PARTY
) -> None:
    """Delete blocks and blobs that an epoch stands for, and say how many bytes that frees.

    Blocks go below an epoch that the policy's quorum attested and that is one epoch old: those of data feeds, and those
    of control feeds where the epoch names its control state. The state stays as it is; what goes is history, so this
    asks first where blocks go. Files that people added stay.

    Parameters
    ----------
    dry_run
        Say what would go, and delete nothing. Needs no lock, and works on read-only media.
    yes
        Delete without asking; needed where nobody can be asked.
    """
    from echostore.peer.epochs import Epochs

    output = Output.of(options)
    with reading(options) as peer:
        party = open_party(peer, options.party)
        plan, key = Epochs(party).gc(dry_run=True), party.key
    if plan.blocks:
        for line in _loss_lines(plan):
            output.note(line)
    record = {"party": key.hex(), "dry_run": dry_run, "deleted": False, **asdict(plan)}
    if dry_run:
        output.document(record, _lines(plan))
        return
    if plan.blocks and not output.confirm("Delete them?", yes=yes, unasked=True):
        output.document(record, "nothing deleted")
        return
    with writing(options) as peer:
        freed = peer.epochs(key).gc()
    output.document({**record, **asdict(freed), "deleted": True}, _lines(freed))


def _loss_lines(plan: "Freed") -> list[str]:
    return [
        f"this deletes {counted(plan.blocks, 'block')} below epoch {plan.epoch} from this machine:",
        "  what was before can't be looked up here any more (item history, moments, undo), nor verified",
        "  a file that `party export` writes then begins at an epoch, too",
    ]


def _lines(freed: "Freed") -> list[str]:
    verb = "would go" if freed.disk_after is None else "went"
    below = f" below epoch {freed.epoch}" if freed.epoch is not None else ""
    lines = [
        f"blocks       {freed.blocks:,} of {freed.block_bytes:,} bytes {verb}{below}",
        f"of control   {freed.control_blocks:,} of them"
        + (f"; {freed.control_why}" if freed.control_why and freed.epoch is not None else ""),
        f"blobs        {freed.blobs:,} of {freed.blob_bytes:,} bytes {verb}",
        f"disk before  {freed.disk_before:,} bytes",
    ]
    if freed.disk_after is not None:
        lines.append(f"disk after   {freed.disk_after:,} bytes")
    if freed.why:
        lines.append(f"blocks stay  {freed.why}")
    return lines
