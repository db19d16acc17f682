"""`echostore pipeline stream`: item tables that follow a lake, and epochs by policy."""

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App

from echostore.cli.moments import parse_duration_s
from echostore.cli.opening import home_path
from echostore.cli.options import FLAG, OPTIONS, Count, Options, examples
from echostore.cli.output import Column, Output, counted
from echostore.cli.pipeline import LakeFolder, OutFolder, engine_session, let_tasks_import_from_here, pipeline_extras
from echostore.kernel.errors import UsageError

if TYPE_CHECKING:
    from echostore.pipeline.output.record import Commit
    from echostore.pipeline.streaming.stream import Progress, StreamRequest

app = App(
    name="stream",
    help_prologue=examples(
        "echostore pipeline stream --lake lake --out out",
        "echostore --home data pipeline stream --lake lake --out out --publish --trigger 1s --json",
    ),
)

_FIELDS = "batch overlay commit rows seconds lag_p50_s lag_p95_s waiting deferred since_epoch"
STEPS = tuple(Column(name, name.upper()) for name in _FIELDS.split())

TRIGGER_MIN_S = 0.1


@app.default
def stream(
    *,
    lake: LakeFolder,
    out: OutFolder,
    publish: Annotated[bool, FLAG] = False,
    party: tuple[str, ...] = (),
    master: str = "local[*]",
    memory: str = "",
    models: str | None = None,
    trigger: str = "1s",
    epoch_every: Count = 1_000_000,
    epoch_age: str = "10m",
    once: Annotated[bool, FLAG] = False,
    options: Options = OPTIONS,
) -> None:
    """Keep the item tables of an output fresh, while blocks are added to a lake.

    What is new reaches the tables items, properties and links some seconds after it was published, and costs what is new.
    Now and then an epoch is built beside: an ordinary run, which gives the CIDs and all other tables. Ends with ^C or SIGTERM
    between two steps. However it ends, the next start goes on from what was published; nothing is lost or taken twice.

    Parameters
    ----------
    lake
        Folder of the lake.
    out
        Folder of the results; made when it is missing. One stream at a time works on it.
    publish
        Publish what the peer of --home writes to the lake, all the while. The peer may be running.
    party
        Only this party with its children, by key or unique prefix. May be given several times.
    master
        Where Spark runs: local[*], local[2], spark://HOST:PORT.
    memory
        Heap of Spark's driver, such as 2g.
    models
        Python module whose function register(models) makes custom models known.
    trigger
        How often to look for new blocks, at most: 0.5, 1s, 10s.
    epoch_every
        Build an epoch after so many messages.
    epoch_age
        Build an epoch when something is new and the last one is so old: 10m, 1h.
    once
        Take in what is there now, build an epoch of it, and end.
    """
    output = Output.of(options)
    with pipeline_extras():
        from echostore.pipeline.session import SparkOptions
        from echostore.pipeline.streaming.stream import StreamRequest, check_stream, run_stream, stopped_by_signals
    trigger_s = parse_duration_s(trigger)
    if trigger_s < TRIGGER_MIN_S:
        raise UsageError(f"--trigger is {TRIGGER_MIN_S} s at the least, and not {trigger!r}")
    request = StreamRequest(
        lake=lake,
        out=out,
        home=home_path(options) if publish else None,
        parties=party,
        models=models,
        trigger_s=trigger_s,
        epoch_messages=epoch_every,
        epoch_age_s=parse_duration_s(epoch_age),
        once=once,
    )
    if models is not None:
        let_tasks_import_from_here()
    check_stream(request)

    def tell(step: "Progress") -> None:
        output.row(STEPS, step.document(), step_line(step))

    with engine_session(output, "stream", SparkOptions(master=master, memory=memory), bar=False) as spark:
        with stopped_by_signals() as stop:
            output.note("streaming; ^C ends it" if not once else "streaming what is there")
            commit = run_stream(spark, request, tell=tell, note=output.note, stop=stop)
        _tell_end(output, request, commit)


def step_line(step: "Progress") -> str:
    """A step in a line for people."""
    lag = "" if step.lag_p95_s is None else f", {step.lag_p50_s:.1f} s behind ({step.lag_p95_s:.1f} s at most for 95 %)"
    waiting = f", {counted(step.waiting, 'block')} waiting" if step.waiting else ""
    deferred = f", {step.deferred} put off until the next epoch" if step.deferred else ""
    return f"{counted(step.rows, 'message')} in {step.seconds:.1f} s{lag}{waiting}{deferred}"


def _tell_end(output: Output, request: "StreamRequest", commit: "Commit | None") -> None:
    from echostore.pipeline.output.results import party_results

    if output.machine:
        parties: list[dict[str, Any]] = []
        if commit is not None:
            parties = [result.document() for result in party_results(request.out, commit)]
        output.row((), {"ended": True, "commit": 0 if commit is None else commit.number, "parties": parties})
    else:
        output.note("ended" if commit is None else f"ended; the last epoch is in commit {commit.number}")
