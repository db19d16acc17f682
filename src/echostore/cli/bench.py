"""`echostore bench`: measure this build against its goals."""

import tempfile
from pathlib import Path

from cyclopts import App

from echostore.cli.options import LISTING, Listing, examples
from echostore.cli.output import Column, Output, if_interrupted
from echostore.kernel.errors import UsageError

app = App(name="bench", help_prologue=examples("echostore bench", "echostore bench write open --json"))

MEASURES = (
    Column("name", "NAME"),
    Column("ratio", "RATIO", lambda ratio: f"{ratio:.2f}", right=True),
    Column("goal", "GOAL", lambda goal: f"{goal:.2f}", right=True),
    Column("ok", "OK", lambda ok: "yes" if ok else "NO"),
    Column("detail", "DETAIL"),
)


@app.default
def bench(*names: str, options: Listing = LISTING) -> int:
    """Measure this build: each figure is a ratio against bare library calls of the same run; lower is better.

    The exit status is 1 when a goal is missed. --json prints a list of {name, ratio, goal, ok, detail}.

    Parameters
    ----------
    names
        Which ones to run; without any, all of them.
    """
    from echostore.bench import BENCHES, run

    output = Output.of(options)
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        raise UsageError(f"there is no benchmark {unknown[0]!r}", next_step=f"Known ones: {', '.join(BENCHES)}.")
    with (
        tempfile.TemporaryDirectory(prefix="echostore-bench-") as folder,
        if_interrupted("The benchmark can be started again."),
    ):
        measures = run(list(names), Path(folder), output.note)
    records = [
        {
            "name": measure.name,
            "ratio": round(measure.ratio, 4),
            "goal": measure.goal,
            "ok": measure.ok,
            "detail": measure.detail,
        }
        for measure in measures
    ]
    output.table(None, MEASURES, records)
    return 0 if all(measure.ok for measure in measures) else 1
