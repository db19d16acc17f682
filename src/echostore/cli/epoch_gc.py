"""`echostore epoch gc`: frees what lies below epochs that the members agreed on."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from echostore.cli.epoch import app
from echostore.cli.opening import open_party, writing
from echostore.cli.options import IN_PARTY, InParty, examples
from echostore.cli.output import Output

if TYPE_CHECKING:
    from echostore.peer.epoch_gc import Freed

__all__ = ["app"]


@app.command(help_prologue=examples("echostore epoch gc --dry-run", "echostore epoch gc --party @Trip"))
def gc(*, dry_run: bool = False, options: InParty = IN_PARTY) -> None:
    """Delete blocks and blobs that an epoch stands for, and say how many bytes that frees.

    Blocks go below an epoch that the policy's quorum attested and that is one epoch old: those of data feeds, and those
    of control feeds where the epoch names its control state. The state stays as it is; what goes is history. Files
    that people added stay.

    Parameters
    ----------
    dry_run
        Say what would go, and delete nothing.
    """
    output = Output.of(options)
    with writing(options) as peer:
        party = open_party(peer, options.party)
        freed = peer.epochs(party.key).gc(dry_run=dry_run)
        output.document({"party": party.key.hex(), "dry_run": dry_run, **asdict(freed)}, _lines(freed))


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
