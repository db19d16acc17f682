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

ONLY_COPY = "this needs a yes: nobody else is in the party, and the only copy of its history would go"


@app.command(help_prologue=examples("echostore epoch gc --dry-run", "echostore epoch gc --party @Trip --yes"))
def gc(
    *, dry_run: Annotated[bool, FLAG] = False, yes: Annotated[bool, YES] = False, options: InParty = IN_PARTY
) -> None:
    """Delete blocks and blobs that an epoch stands for, and say how many bytes that frees.

    Blocks go below an epoch that the policy's quorum attested and that is one epoch old: those of data feeds, and those
    of control feeds where the epoch names its control state. The state stays as it is; what goes is history, so this
    asks first where blocks go. Files that people added stay.

    Where nobody can be asked it goes ahead, because a quorum stands for what it deletes. Not so where nobody else is in
    the party: the only copy of the history would go, and that needs --yes.

    Parameters
    ----------
    dry_run
        Say what would go, and delete nothing. Needs no lock, and works on read-only media.
    yes
        Delete without asking.
    """
    from echostore.peer.base_damage import only_copy
    from echostore.peer.epochs import Epochs

    output = Output.of(options)
    with reading(options) as peer:
        party = open_party(peer, options.party)
        plan, key = Epochs(party).gc(dry_run=True), party.key
        alone = only_copy(party.runtime.processor)
    if plan.blocks:
        for line in _loss_lines(plan, alone=alone):
            output.aside(line)
    record = {"party": key.hex(), "dry_run": dry_run, "deleted": False, **asdict(plan)}
    if dry_run:
        output.document(record, _lines(plan))
        return
    if plan.blocks and not output.confirm("Delete them?", yes=yes, unasked=not alone, needed=ONLY_COPY):
        output.document(record, "nothing deleted")
        return
    with writing(options) as peer:
        freed = peer.epochs(key).gc()
    output.document({**record, **asdict(freed), "deleted": True}, _lines(freed))


def _loss_lines(plan: "Freed", *, alone: bool) -> list[str]:
    lines = [
        f"this deletes {counted(plan.blocks, 'block')} below epoch {plan.epoch} from this machine:",
        "  what was before can't be looked up here any more (item history, moments, undo), nor verified",
        "  a file that `party export` writes then begins at an epoch, too",
    ]
    if alone:
        lines.append("  nobody else is in the party: this is the only copy of that history")
    return lines


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
