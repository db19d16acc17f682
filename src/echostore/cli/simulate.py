"""`echostore simulate`: a whole party in one process and in virtual time, with faults, from one seed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter, validators

from echostore.cli.feed import INTEGRITY_BROKEN
from echostore.cli.options import FLAG, LISTING, Listing, examples
from echostore.cli.output import Column, Output, counted, if_interrupted
from echostore.cli.values import compact, short
from echostore.kernel.errors import StorageFailed, UsageError

if TYPE_CHECKING:
    from echostore.testing.epoch_world import EpochWorld
    from echostore.testing.network import Faults
    from echostore.testing.real_epoch_world import RealEpochWorld
    from echostore.testing.world import World

    Replayed = World | EpochWorld | RealEpochWorld

app = App(
    name="simulate",
    help_prologue=examples(
        "echostore simulate --seed 7 --peers 3 --seconds 60",
        "echostore simulate --runs 100 --history worst.jsonl --json",
        "echostore simulate --peers 7 --epochs 20 --seed 7",
        "echostore simulate --real --peers 4 --epochs 4 --runs 10",
    ),
)

RUNS = (
    Column("seed", "SEED", str, right=True),
    Column("peers", "PEERS", str, right=True),
    Column("events", "EVENTS", str, right=True),
    Column("virtual_s", "VIRTUAL", lambda seconds: f"{seconds:.0f} s", right=True),
    Column("agreed", "AGREED", lambda agreed: "yes" if agreed else "NO"),
    Column("good", "HISTORY", lambda good: "good" if good else "BROKEN"),
    Column("violations", "VIOLATIONS", lambda violations: str(len(violations)), right=True),
    Column("digest", "DIGEST", short),
)

EPOCH_RUNS = (
    *RUNS[:2],
    Column("joined_late", "LATE", str, right=True),
    *RUNS[2:-1],
    Column("final_epochs", "FINAL EPOCHS", str, right=True),
    RUNS[-1],
)

VIOLATIONS_MAX, TOLD_MAX = 20, 3
"""Violations of one run that are kept for programs, and told to people."""

SECONDS = 30.0
EPOCH_PEERS_MAX = 20
"""Late joiners come on top, and names are letters."""

_Probability = Annotated[float | None, Parameter(validator=validators.Number(gte=0, lte=1))]


@app.default
def simulate(
    *,
    seed: int = 1,
    runs: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    peers: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=26))] = 3,
    seconds: Annotated[float, Parameter(validator=validators.Number(gte=0))] = SECONDS,
    epochs: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=1000))] = 0,
    loss: _Probability = None,
    duplication: _Probability = None,
    real: Annotated[bool, FLAG] = False,
    no_partitions: Annotated[bool, FLAG] = False,
    no_crashes: Annotated[bool, FLAG] = False,
    history: Path | None = None,
    show_trace: Annotated[bool, FLAG] = False,
    options: Listing = LISTING,
) -> int:
    """Let peers write while links break and processes crash, then heal everything and check that all agree.

    One seed replays one run, event by event; equal digests mean equal runs. Faults are drawn from the seed unless
    given. The exit status is 6 when a promise was broken or the peers did not come to agree.

    Parameters
    ----------
    seed
        Where chance begins.
    runs
        How many runs, with seeds counting up.
    peers
        How many peers; with --epochs, members who join late come on top.
    seconds
        Virtual seconds of faults.
    epochs
        Let the party make epochs until so many are final, with a liar and a disputer among the peers, members who join
        late and one who is removed; 0 makes none. `--seconds`, `--loss` and `--duplication` are of no use then.
    loss
        Part of the messages that are lost.
    duplication
        Part of the messages that come twice.
    real
        With `--epochs`: peers with real stores, signatures, sessions and folds, in a temporary folder. Slower, and they find more.
    no_partitions
        Leave partitions out.
    no_crashes
        Leave crashes out.
    history
        Write what the peers did to a file, one JSON event per line: of the first broken run, else of the last.
    show_trace
        Print every event of the run to stderr.
    """
    output = Output.of(options)
    if epochs and (loss is not None or duplication is not None or seconds != SECONDS):
        raise UsageError(
            "a simulation of epochs has no --seconds, --loss or --duplication", next_step="Leave these options out."
        )
    if real and not epochs:
        raise UsageError("real peers are simulated with epochs", next_step="Give --epochs 4 too.")
    if epochs and peers > EPOCH_PEERS_MAX:
        raise UsageError(f"a simulation of epochs has at most {EPOCH_PEERS_MAX} peers")
    if history is not None:
        _check_writable(history)
    records: list[dict[str, Any]] = []
    world: Replayed
    with (
        if_interrupted("Nothing is kept of a simulation."),
        output.progress("simulate") as tell,
    ):
        for number in range(runs):
            if epochs:
                run_epochs = _run_real if real else _run_epochs
                world, record = run_epochs(
                    seed + number, peers, epochs, partitions=not no_partitions, crashes=not no_crashes
                )
            else:
                world, record = _run(
                    seed + number,
                    peers,
                    seconds,
                    loss,
                    duplication,
                    partitions=not no_partitions,
                    crashes=not no_crashes,
                )
            records.append(record)
            tell(number + 1, runs)
            if show_trace:
                for line in world.trace:
                    output.note(line)
            broken_before = any(not (earlier["good"] and earlier["agreed"]) for earlier in records[:-1])
            if history is not None and not broken_before:
                _save(history, world)
    broken = [record for record in records if not (record["good"] and record["agreed"])]
    output.table("runs", EPOCH_RUNS if epochs else RUNS, records, good=not broken)
    for record in broken:
        told = [f"{len(record['violations'])} violations", *record["violations"][:TOLD_MAX]]
        output.warn(f"seed {record['seed']}: {'; '.join(told) if record['agreed'] else 'the peers did not agree'}")
    late = sum(record.get("joined_late", 0) for record in records)
    joined = f"; to the {counted(peers, 'peer')} {late} came that joined late" if late and runs == 1 else ""
    output.note(f"{counted(len(records), 'run')}, {len(broken)} broken{joined}")
    return INTEGRITY_BROKEN if broken else 0


def _run(
    seed: int,
    peers: int,
    seconds: float,
    loss: float | None,
    duplication: float | None,
    *,
    partitions: bool,
    crashes: bool,
) -> "tuple[World, dict[str, Any]]":
    from echostore.testing.checker import check_events
    from echostore.testing.world import NotSettled, World

    world = World(seed, peers=peers, faults=_faults(seed, loss, duplication))
    agreed = True
    try:
        world.chaos(seconds, partitions=partitions and peers > 1, crashes=crashes).revive().settle()
    except NotSettled:
        agreed = False
    report = check_events(world.history)
    return world, {
        "seed": seed,
        "peers": peers,
        "events": report.events,
        "virtual_s": round(world.now, 3),
        "agreed": agreed,
        "good": report.good,
        "violations": [str(violation) for violation in report.violations[:VIOLATIONS_MAX]],
        "fates": dict(report.fates),
        "digest": world.digest(),
    }


def _run_epochs(
    seed: int, peers: int, epochs: int, *, partitions: bool, crashes: bool
) -> "tuple[EpochWorld, dict[str, Any]]":
    from echostore.testing.epoch_world import EpochWorld
    from echostore.testing.world import NotSettled

    world = EpochWorld(seed, peers=peers, epochs=epochs, partitions=partitions, crashes=crashes)
    agreed = True
    try:
        world.run()
    except NotSettled:
        agreed = False
    return world, _epochs_record(world, peers, agreed=agreed)


def _run_real(
    seed: int, peers: int, epochs: int, *, partitions: bool, crashes: bool
) -> "tuple[RealEpochWorld, dict[str, Any]]":
    from tempfile import TemporaryDirectory

    from echostore.testing.real_epoch_world import RealEpochWorld
    from echostore.testing.world import NotSettled

    agreed = True
    with TemporaryDirectory(prefix="echostore-simulate-") as folder:
        world = RealEpochWorld(Path(folder), seed, peers=peers, epochs=epochs, partitions=partitions, crashes=crashes)
        try:
            with world:
                world.run()
        except NotSettled:
            agreed = False
    return world, _epochs_record(world, peers, agreed=agreed)


def _epochs_record(world: "EpochWorld | RealEpochWorld", peers: int, *, agreed: bool) -> dict[str, Any]:
    from echostore.testing.checker import check_events

    report = check_events(world.history)
    return {
        "seed": world.seed,
        "peers": len(world.nodes),
        "joined_late": len(world.nodes) - peers,
        "events": report.events,
        "virtual_s": round(world.now, 3),
        "agreed": agreed,
        "good": report.good,
        "violations": [str(violation) for violation in report.violations[:VIOLATIONS_MAX]],
        "fates": dict(report.fates),
        "final_epochs": world.finals(),
        "digest": world.digest(),
    }


def _faults(seed: int, loss: float | None, duplication: float | None) -> "Faults":
    import random
    from dataclasses import replace

    from echostore.testing.network import DUPLICATION_MAX, LOSS_MAX, Faults

    for name, value, limit in (("loss", loss, LOSS_MAX), ("duplication", duplication, DUPLICATION_MAX)):
        if value is not None and value > 0.9:
            raise UsageError(f"with a {name} of {value} nothing would ever arrive", next_step=f"Try {limit}.")
    # Another stream of chance than the world's own, so that giving a fault does not change the rest of the run.
    faults = Faults.swarm(random.Random(f"faults {seed}"))
    faults = faults if loss is None else replace(faults, loss=loss)
    return faults if duplication is None else replace(faults, duplication=duplication)


def _check_writable(path: Path) -> None:
    """Whether a history can be written, before a long run is made for it."""
    fresh = not path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if fresh:
            path.unlink()
    except OSError as error:
        raise StorageFailed(f"the history can't be written to {path}: {error.strerror}") from error


def _save(path: Path, world: "Replayed") -> None:
    try:
        path.write_text("".join(compact(event) + "\n" for event in world.history), encoding="utf-8")
    except OSError as error:
        raise StorageFailed(f"the history can't be written to {path}: {error.strerror}") from error
