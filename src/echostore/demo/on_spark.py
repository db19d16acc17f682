"""The demonstration's second half: the same party on Spark. Publish, build, compare, declare, query.

Needs the extra `pipeline`. Without it the peers have still converged, and the story says how to get the rest.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from echostore.kernel.errors import EchoError
from echostore.peer.epochs import Epochs, EpochView
from echostore.peer.party import Party

Say = Callable[[str], None]
Waiting = Callable[[str], AbstractContextManager[Callable[[str], None]]]
"""Shows what is waited for; gives a function that hears each step."""


@contextmanager
def no_waiting(title: str) -> Iterator[Callable[[str], None]]:
    """Show nothing."""
    yield lambda step: None


QUERY = """
SELECT t.text AS task, d.boolean AS done, coalesce(v.integer, 0) AS votes
FROM items i
JOIN properties t ON t.item = i.item AND t.path = 'title'
JOIN properties d ON d.item = i.item AND d.path = 'done'
LEFT JOIN properties v ON v.item = i.item AND v.path = 'votes'
WHERE i.type = 'task' AND NOT i.deleted
ORDER BY task
"""


def installed() -> bool:
    """Whether Spark can be used here."""
    try:
        import pyarrow
        import pyspark
    except ModuleNotFoundError:
        return False
    return bool(pyarrow.__version__ and pyspark.__version__)


def run(home: Path, party: Party, cid: str, say: Say, waiting: Waiting = no_waiting) -> EpochView:
    """Publish a peer's home to a lake, build it on Spark, and declare the result as an epoch of the party."""
    from echostore.pipeline.lake.publish import publish
    from echostore.pipeline.output.epochs import latest
    from echostore.pipeline.run import RunRequest, run_pipeline

    lake, out = home / "lake", home / "pipeline"
    published = publish(party.peer.home.path, lake)
    say(f"   Published {published.blocks} blocks of {published.feeds} feeds to {lake.name}.")
    with _session(waiting) as spark:
        done = run_pipeline(spark, RunRequest(lake=lake, out=out))
        for stage in done.stages:
            say(f"   {stage.name:<9} {stage.rows:>6} rows {stage.seconds:6.1f} s")
        ready = latest(out, party.key)
        if ready is None:
            raise EchoError("the pipeline built no snapshot of the party", unchanged=f"Its output is in {out}.")
        built = next(result for result in done.results() if result.party == party.key)
        say(f"   Spark   snapshot {built.cid}")
        if built.cid != cid:
            raise EchoError(f"Spark computed {built.cid}, the peers {cid}", unchanged=f"The output is in {out}.")
        say("   Spark's CID is the peers' CID.")
        epoch = Epochs(party).create_from(ready.cid, ready.blobs())
        say(f"   The {party.peer.name.lower()} has declared it as epoch {epoch.number}.")
        say("   Tasks, by SQL over the tables that the pipeline wrote:")
        for line in _tasks(spark, out):
            say(f"     {line}")
    return epoch


@contextmanager
def _session(waiting: Waiting) -> Iterator[Any]:
    from echostore.pipeline.session import SparkOptions, spark_session

    with ExitStack() as stack:
        with waiting("starting Spark") as step:
            started = spark_session("demo", SparkOptions(master="local[*]", short=True), step=step)
            spark = stack.enter_context(started)
        yield spark


def _tasks(spark: Any, out: Path) -> list[str]:
    from echostore.pipeline.output.views import open_views

    open_views(spark, out, tables=["properties", "items"])
    rows = spark.sql(QUERY).collect()
    return [f"[{'x' if row['done'] else ' '}] {row['task']:<28} {row['votes']} votes" for row in rows]
