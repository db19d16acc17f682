"""`echostore pipeline`: verified tables out of a block lake: run, stream, audit, show."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from echostore.cli.feed import INTEGRITY_BROKEN
from echostore.cli.options import LISTING, OPTIONS, Count, Listing, Options, examples
from echostore.cli.output import Column, Output, Tell, age, counted, if_interrupted
from echostore.cli.values import short
from echostore.kernel.errors import EngineFailed, NotFound, UsageError

if TYPE_CHECKING:
    from echostore.pipeline.engines import Engine
    from echostore.pipeline.run import At, RunResult
    from echostore.pipeline.session import SparkOptions

app = App(
    name="pipeline",
    help="The data pipeline: verified items, snapshots and tables out of a block lake, on Spark or in one process.",
    help_prologue=examples(
        "echostore pipeline run --lake lake --out out", "echostore pipeline audit --lake lake --json"
    ),
)

EngineName = Literal["auto", "local", "spark"]
LakeFolder = Annotated[Path, Parameter(name="--lake")]
OutFolder = Annotated[Path, Parameter(name="--out")]

app.command(
    "echostore.cli.pipeline_stream:app",
    name="stream",
    help="Keep the item tables of an output fresh, while blocks are added to a lake.",
)

PARTIES = (
    Column("party", "PARTY", short, style="cyan"),
    Column("epoch", "EPOCH", str, right=True),
    Column("cid", "CID", lambda cid: cid or "-"),
    Column("messages", "MESSAGES", str, right=True),
    Column("items", "ITEMS", str, right=True),
    Column("rejected", "REJECTED", str, right=True),
    Column("waiting", "WAITING", str, right=True),
    Column("error", "NOTE"),
)
STAGES = (
    Column("name", "STAGE"),
    Column("rows", "ROWS", lambda rows: f"{rows:,}", right=True),
    Column("seconds", "SECONDS", lambda seconds: f"{seconds:.2f}", right=True),
)
COMMITS = (
    Column("commit", "COMMIT", str, right=True),
    Column("created_ms", "AGE", age, right=True),
    Column("lake_version", "LAKE", str, right=True),
    Column("parties", "PARTIES", str, right=True),
    Column("messages", "MESSAGES", str, right=True),
    Column("items", "ITEMS", str, right=True),
    Column("rejected", "REJECTED", str, right=True),
    Column("waiting", "WAITING", str, right=True),
    Column("files", "FILES", str, right=True),
    Column("seconds", "SECONDS", lambda seconds: f"{seconds:.1f}", right=True),
)
FINDINGS = (
    Column("party", "PARTY", short, style="cyan"),
    Column("feed", "FEED", short),
    Column("seq", "SEQ", str, right=True),
    Column("blocks", "BLOCKS", str, right=True),
    Column("reason", "REASON"),
    Column("detail", "DETAIL"),
)

PARTIES_TOLD_MAX = 20
"""Parties that a person is shown; programs get all of them."""


@app.command(
    help_prologue=examples(
        "echostore pipeline run --lake lake --out out",
        "echostore pipeline run --lake lake --out out --engine spark --master local[2] --json",
    )
)
def run(
    *,
    lake: LakeFolder,
    out: OutFolder,
    party: tuple[str, ...] = (),
    engine: EngineName = "auto",
    master: str | None = None,
    memory: str = "",
    models: str | None = None,
    at: str | None = None,
    tables: str | None = None,
    options: Options = OPTIONS,
) -> int:
    """Build the items, snapshots and tables of the parties in a lake, on top of the last commit.

    Costs what is new since then. The result becomes visible with one commit at the end: before that nothing changes, and
    what an interrupted run wrote is collected by a later one. A party that can't be built is told as such and keeps what
    it had; the exit status is 6 when that is because its blocks are damaged. A party with a model that is not known gets
    no CID.

    With nothing new no engine is started. The result is the same on both engines, and each goes on from what the other
    committed.

    Parameters
    ----------
    lake
        Folder of the lake.
    out
        Folder of the results; made when it is missing.
    party
        Only this party, by key or unique prefix. May be given several times.
    engine
        Where the stages run: local, in this process and without Java; spark; or auto, which is local while the parties to
        build have at most 100,000 blocks, and neither --master nor --memory is given.
    master
        Where Spark runs: local[*], local[2], spark://HOST:PORT. Without it, local[*].
    memory
        Heap of Spark's driver, such as 2g.
    models
        Python module whose function register(models) makes custom models known.
    at
        Build the state at this anchor, which names one party.
    tables
        Which tables to write, by name and with commas; all for all of them, none for none.
    """
    output = Output.of(options)
    with pipeline_extras():
        from echostore.pipeline.engines import Engine
        from echostore.pipeline.run import RunRequest, chosen_tables, plan_run, run_pipeline
        from echostore.pipeline.session import SparkOptions
    wanted = asked_engine(engine, master, memory)
    request = RunRequest(lake=lake, out=out, parties=party, models=models, at=_anchor(at), tables=chosen_tables(tables))
    if models is not None:
        let_tasks_import_from_here()
    stopped = if_interrupted("Nothing was committed; the output is as it was, and the next run goes on from there.")
    plan = plan_run(request)
    if (unchanged := plan.unchanged) is not None:
        _tell_run(output, unchanged)
        return 0
    blocks = plan.blocks()
    decided = wanted.decided(blocks)
    output.aside(f"engine {decided}: {counted(blocks, 'block')} in the parties to build")
    spark_options = None if decided is Engine.LOCAL else SparkOptions(master=master or "local[*]", memory=memory)
    with stopped, engine_session(output, "run", spark_options) as spark:
        done = run_pipeline(spark, request, note=output.note)
        _tell_run(output, done)
    return INTEGRITY_BROKEN if done.failed else 0


@app.command(
    help_prologue=examples(
        "echostore pipeline audit --lake lake", "echostore pipeline audit --lake lake --party 7c01 --nl"
    )
)
def audit(
    *,
    lake: LakeFolder,
    party: tuple[str, ...] = (),
    engine: EngineName = "auto",
    master: str | None = None,
    memory: str = "",
    options: Listing = LISTING,
) -> int:
    """Check every block of a lake: files, links, signatures, gaps, forks, depth, order, admission.

    Prints what is not in order, by feed and the first block it concerns. The exit status is 6 when something is broken:
    a file, a link, a signature, a gap, a fork or an invalid block. Blocks that are whole and merely do not count (a
    reader's, beyond a cut, of a feed that nobody admitted) or still wait are listed, and break nothing.

    Parameters
    ----------
    lake
        Folder of the lake.
    party
        Only this party, by key or unique prefix. May be given several times.
    engine
        Where the work is done: local, spark, or auto, as with `pipeline run`: by the blocks that are checked.
    master
        Where Spark runs: local[*], local[2], spark://HOST:PORT. Without it, local[*].
    memory
        Heap of Spark's driver, such as 2g.
    """
    output = Output.of(options)
    with pipeline_extras():
        from echostore.pipeline.audit import audit_lake, blocks_of
        from echostore.pipeline.engines import Engine
        from echostore.pipeline.lake import Lake
        from echostore.pipeline.parties import chosen_parties
        from echostore.pipeline.session import SparkOptions
    wanted = asked_engine(engine, master, memory)
    version = Lake.open(lake).at()
    # What is not there is told before Spark is started.
    decided = wanted.decided(blocks_of(version.runs(parties=chosen_parties(version, party))))
    spark_options = None if decided is Engine.LOCAL else SparkOptions(master=master or "local[*]", memory=memory)
    stopped = if_interrupted("The audit can be started again.")
    with stopped, engine_session(output, "audit", spark_options) as spark:
        report = audit_lake(spark, lake, party)
        output.table(
            "findings",
            FINDINGS,
            report.findings,
            empty="everything is in order",
            lake=str(lake),
            lake_version=report.lake_version,
            parties=report.parties,
            feeds=report.feeds,
            blocks=report.blocks,
            checked=report.checked,
            counts=report.counts,
            sound=report.sound,
        )
    checked = counted(report.blocks, "block")
    if report.checked < report.blocks:
        checked = f"{report.checked:,} of {checked}, without the parties in damaged files,"
    else:
        checked += f" of {counted(report.feeds, 'feed')}"
    output.note(f"{checked} checked: " + ("sound" if report.sound else "BROKEN"))
    return 0 if report.sound else INTEGRITY_BROKEN


@app.command(
    help_prologue=examples(
        "echostore pipeline show --out out", "echostore pipeline show --out out --last 1 --parties --json"
    )
)
def show(
    *,
    out: OutFolder,
    last: Count = 10,
    parties: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    verify: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    options: Listing = LISTING,
) -> int:
    """Print the last commits, newest first. The exit status is 6 when --verify finds damage.

    Parameters
    ----------
    out
        Folder of the results.
    last
        How many commits.
    parties
        The parties of the newest commit instead.
    verify
        Follow the whole chain of commits and hash every file they name.
    """
    output = Output.of(options)
    with pipeline_extras():
        from echostore.pipeline.output import reading
        from echostore.pipeline.output.results import party_results
    if not out.is_dir():
        raise NotFound(f"there is no folder {out}", next_step="`echostore pipeline run` makes one.")
    if verify:
        broken = [{"file": each.path, "what": each.problem} for each in reading.verify(out)]
        columns = (Column("file", "FILE"), Column("what", "DAMAGE"))
        output.table("damage", columns, broken, empty="everything is as the commits say", sound=not broken)
        return INTEGRITY_BROKEN if broken else 0
    if parties:
        commit, _ = reading.newest(out)
        found = () if commit is None else party_results(out, commit)
        output.table("parties", PARTIES, (result.document() for result in found), empty="no commit yet")
        return 0
    records = (
        {
            "commit": commit.number,
            "created_ms": commit.created_ms,
            "lake_version": commit.lake.version,
            **commit.totals,
            "files": sum(len(files) for files in commit.files.values()),
            "seconds": sum(stage.seconds for stage in commit.stages),
            "stages": [{"name": s.name, "rows": s.rows, "seconds": s.seconds} for s in commit.stages],
        }
        for commit in reading.commits(out, last=last)
    )
    output.table("commits", COMMITS, records, empty="no commit yet")
    return 0


def _tell_run(output: Output, done: "RunResult") -> None:
    stages = [{"name": s.name, "rows": s.rows, "seconds": round(s.seconds, 3)} for s in done.stages]
    if output.machine:
        parties = [result.document() for result in done.results()]
        output.document({"parties": parties, "stages": stages})
        return
    shown = [result.document() for _, result in zip(range(PARTIES_TOLD_MAX), done.results(), strict=False)]
    output.table("parties", PARTIES, shown, empty="no party in the lake")
    if done.parties > len(shown):
        output.note(f"... and {counted(done.parties - len(shown), 'party')} more: echostore pipeline show --parties")
    if done.new:
        output.table("stages", STAGES, stages)
    told = f"commit {done.commit}" if done.new else f"nothing new since commit {done.commit}"
    output.note(f"{told}: {counted(done.parties, 'party')}")


def _anchor(text: str | None) -> "At | None":
    if text is None:
        return None
    from echostore.peer.anchors import Anchor
    from echostore.pipeline.run import At

    anchor = Anchor.parse(text)
    return At(
        party=anchor.party,
        data={feed: position.seq + 1 for feed, position in anchor.data.entries.items()},
        control={feed: position.seq + 1 for feed, position in anchor.control.entries.items()},
        text=str(anchor),
    )


def asked_engine(name: str, master: str | None, memory: str) -> "Engine":
    """The engine that options name. Who says where Spark runs, or with how much memory, wants Spark."""
    from echostore.pipeline.engines import Engine

    wanted = Engine(name)
    if not (master or memory):
        return wanted
    if wanted is Engine.LOCAL:
        raise UsageError("--master and --memory are of Spark, and --engine local is given")
    return Engine.SPARK


@contextlib.contextmanager
def engine_session(output: Output, verb: str, options: "SparkOptions | None", *, bar: bool = True) -> Iterator[Any]:
    """A session of Spark whose start and, with a `bar`, progress are shown; without options None, for the stages in this
    process."""
    from echostore.pipeline.session import spark_session, termination_interrupts

    if options is None:
        with termination_interrupts(), output.progress(verb):
            yield None
        return
    with contextlib.ExitStack() as stack:
        shown: list[Tell] = []

        def tell(done: int, total: int) -> None:
            for each in shown:
                each(done, total)

        with output.waiting(f"starting Spark on {options.master}") as step:
            session = spark_session(f"pipeline {verb}", options, tell=tell, step=step)
            spark = stack.enter_context(session)
        if bar:
            shown.append(stack.enter_context(output.progress(verb)))
        yield spark


def let_tasks_import_from_here() -> None:
    """Make modules of the current folder known here and to the Python workers that Spark starts on this machine."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    known = os.environ.get("PYTHONPATH", "")
    if here not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{known}{os.pathsep}{here}" if known else here


@contextlib.contextmanager
def pipeline_extras() -> Iterator[None]:
    """The pipeline needs packages that are an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pyarrow", "numpy", "pyspark", "polars", "ptars"):
            raise
        raise EngineFailed(f"{error.name} is not installed.", next_step="Install the extra `pipeline`.") from None
