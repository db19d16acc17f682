"""`echostore lake`: block lakes, which Spark reads: publish, compact, stat."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from echostore.cli.feed import INTEGRITY_BROKEN
from echostore.cli.moments import parse_span
from echostore.cli.opening import home_path
from echostore.cli.options import FLAG, OPTIONS, Options, examples
from echostore.cli.output import Output, counted, if_interrupted, size
from echostore.cli.values import short
from echostore.kernel.errors import EngineFailed, UsageError

app = App(
    name="lake",
    help="Block lakes: the blocks of many parties as Parquet, for Spark.",
    help_prologue=examples("echostore lake publish --lake lake", "echostore lake stat --lake lake"),
)

LakeFolder = Annotated[Path, Parameter(name="--lake")]

app.command(
    "echostore.cli.lake_generate:app",
    name="generate",
    help="Make parties with real keys, credentials, links and signatures, and add their blocks to a lake.",
)


@app.command(
    help_prologue=examples(
        "echostore lake publish --home data --lake lake", "echostore lake publish --lake lake --party 7c01 --json"
    )
)
def publish(*, lake: LakeFolder, party: tuple[str, ...] = (), options: Options = OPTIONS) -> int:
    """Add the blocks that a lake lacks, of all parties of the home.

    Works beside a running peer and beside other publishers. Again, without new blocks, it changes nothing. Both branches
    of a forked feed are kept. The exit status is 6 when a party is damaged; the others are published all the same.

    Parameters
    ----------
    lake
        Folder of the lake; made when it is missing.
    party
        Only this party, by key or unique prefix. May be given several times.
    """
    with arrow_extra():
        from echostore.pipeline.lake.publish import publish as publish_home

    output = Output.of(options)
    home = home_path(options)
    chosen = _parties(home, party) if party else None
    stopped = if_interrupted("Nothing of this was published; the lake is as it was.")
    with stopped, output.progress("publishing") as tell:
        done = publish_home(home, lake, parties=chosen, tell=tell)
    for key, what in done.damaged:
        output.warn(f"party {short(key.hex())} is not published whole: {what}")
    for key, gone in done.compacted.items():
        output.warn(
            f"party {short(key.hex())} has no beginning in this lake: {counted(gone, 'block')} were deleted here below an "
            "epoch. What is here was published; publish once from a peer that still has them"
        )
    text = (
        f"version {done.version}: {counted(done.blocks, 'block')} of {counted(done.feeds, 'feed')} added"
        if done.blocks
        else f"version {done.version}: nothing new"
    )
    output.document(
        {
            "lake": str(lake),
            "lake_version": done.version,
            "parties": done.parties,
            "feeds": done.feeds,
            "blocks": done.blocks,
            "files": done.files,
            "bytes": done.bytes,
            "bases": done.bases,
            "damaged": [{"party": key.hex(), "what": what} for key, what in done.damaged],
            "compacted": [{"party": key.hex(), "blocks": gone} for key, gone in done.compacted.items()],
        },
        text,
    )
    return INTEGRITY_BROKEN if done.damaged else 0


@app.command(
    help_prologue=examples(
        "echostore lake compact --lake lake", "echostore lake compact --lake lake --keep 2h --dry-run --json"
    )
)
def compact(
    *,
    lake: LakeFolder,
    keep: str = "1d",
    dry_run: Annotated[bool, FLAG] = False,
    options: Options = OPTIONS,
) -> None:
    """Merge small files, and delete files that only older versions need.

    Readers of the newest version are not disturbed. Readers of an older one have the time that --keep gives them.

    Parameters
    ----------
    lake
        Folder of the lake.
    keep
        For how long versions stay readable: 30m, 2h, 1d.
    dry_run
        Tell what would be done.
    """
    keep_s = parse_span(keep)
    with arrow_extra():
        from echostore.pipeline.lake import Lake
        from echostore.pipeline.lake.compact import compact as compact_lake
        from echostore.pipeline.lake.stat import stat as lake_stat

    output = Output.of(options)
    opened = Lake.open(lake)
    if dry_run:
        found = lake_stat(opened, keep_s=keep_s)
        output.document(
            {
                "dry_run": True,
                "merge_files": found.small_files,
                "delete_files": found.dead_files,
                "delete_bytes": found.dead_bytes,
            },
            f"would merge {counted(found.small_files, 'file')} and delete {counted(found.dead_files, 'file')} "
            f"({size(found.dead_bytes)})",
        )
        return
    stopped = if_interrupted("What was merged so far is a version of the lake; the rest is as it was.")
    with stopped, output.progress("compacting") as tell:
        done = compact_lake(opened, keep_s=keep_s, tell=tell)
    output.document(
        {
            "dry_run": False,
            "lake": str(lake),
            "lake_version": done.version,
            "files_before": done.files_before,
            "files_after": done.files_after,
            "duplicates": done.duplicates,
            "deleted_files": done.deleted_files,
            "deleted_bytes": done.deleted_bytes,
        },
        f"version {done.version}: {counted(done.files_before, 'file')} became {done.files_after:,}; "
        f"{counted(done.deleted_files, 'file')} deleted ({size(done.deleted_bytes)})",
    )


@app.command(help_prologue=examples("echostore lake stat --lake lake", "echostore lake stat --lake lake --full --json"))
def stat(*, lake: LakeFolder, full: Annotated[bool, FLAG] = False, options: Options = OPTIONS) -> int:
    """Tell what is in a lake. The exit status is 6 when --full finds damage.

    Parameters
    ----------
    lake
        Folder of the lake.
    full
        Follow the whole log, hash every file, and compare the runs with the rows.
    """
    with arrow_extra():
        from echostore.pipeline.lake import Lake
        from echostore.pipeline.lake.stat import stat as lake_stat

    output = Output.of(options)
    with if_interrupted("The check can be started again."), output.progress("checking") as tell:
        found = lake_stat(Lake.open(lake), full=full, tell=tell)
    damage = [{"file": file, "what": what} for file, what in found.damage]
    document: dict[str, Any] = {
        "lake": str(lake),
        "lake_version": found.version,
        "parties": found.parties,
        "feeds": found.feeds,
        "forked_feeds": found.forked_feeds,
        "runs": found.runs,
        "blocks": found.blocks,
        "control_blocks": found.control_blocks,
        "files": found.files,
        "small_files": found.small_files,
        "bytes": found.bytes,
        "row_bytes": found.row_bytes,
        "dead_files": found.dead_files,
        "dead_bytes": found.dead_bytes,
        "checked": found.checked,
        "damage": damage,
    }
    feeds = f"{counted(found.feeds, 'feed')} of {counted(found.parties, 'party')}"
    lines = [
        f"version  {found.version}",
        f"blocks   {found.blocks:,} ({found.control_blocks:,} control) in {feeds}, {found.forked_feeds:,} with branches",
        f"files    {found.files:,} ({found.small_files:,} small) with {size(found.bytes)}",
        f"runs     {found.runs:,} with {size(found.row_bytes)} before compression",
        f"dead     {counted(found.dead_files, 'file')} with {size(found.dead_bytes)}",
        *(f"DAMAGED  {each['file']}: {each['what']}" for each in damage),
        *(["checked  everything is as the log says"] if full and not damage else []),
    ]
    output.document(document, lines)
    return INTEGRITY_BROKEN if damage else 0


def _parties(home: Path, wanted: tuple[str, ...]) -> list[Any]:
    """The keys of parties that are named by key or prefix."""
    from echostore.kernel.errors import NotFound
    from echostore.store.home import Home

    keys = Home.open(home).party_keys()
    chosen = []
    for text in wanted:
        found = [key for key in keys if text and key.hex().startswith(text.lower())]
        if not found:
            raise NotFound(f"no party {text!r} is here", next_step="`echostore party list` shows the parties.")
        if len(found) > 1:
            raise UsageError(f"{len(found)} parties match {text!r}", next_step="Give more of the key.")
        chosen += found
    return sorted(set(chosen))


@contextlib.contextmanager
def arrow_extra() -> Iterator[None]:
    """Lakes need Arrow, which is an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pyarrow", "numpy"):
            raise
        raise EngineFailed(f"{error.name} is not installed.", next_step="Install the extra `pipeline`.") from None
