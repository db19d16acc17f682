"""run: from a lake to a commit. What `echostore pipeline run` does, on a Spark session that is given, or without one.

    what is stale ──► an attempt ──► builds ──► one commit ──► garbage of lost attempts

A build that fails because of one party is done again in two halves, until that party is alone: its row in the commit
says what is wrong, and everybody else is built. What concerns the engine and not a party (memory, disk, another run that
was first) ends the run, with nothing committed.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import Corrupt, EchoError, EngineFailed, NotFound, UsageError
from echostore.kernel.ids import FeedId, PartyKey
from echostore.pipeline import engine_errors
from echostore.pipeline.building import Built, Job, build
from echostore.pipeline.clock import Clock
from echostore.pipeline.driver_bytes import DRIVER_BYTES_MAX, DriverBytes
from echostore.pipeline.exclusive_folders import check_folder
from echostore.pipeline.lake import Lake
from echostore.pipeline.lake.versions import LakeVersion
from echostore.pipeline.models import known_models
from echostore.pipeline.output import reading
from echostore.pipeline.output.attempt import Attempt
from echostore.pipeline.output.files import Step, no_step
from echostore.pipeline.output.garbage import collect as collect_garbage
from echostore.pipeline.output.merging import merge_small_files
from echostore.pipeline.output.record import Commit, NamedFile, StageTime
from echostore.pipeline.output.results import FAILED, STRAY, PartyResult, party_results, results_table, totals
from echostore.pipeline.output.table_schemas import DEFAULT_TABLES, PARTIES, RUNS, TABLES, table_kind
from echostore.pipeline.output.writing import Place
from echostore.pipeline.parties import chosen_parties
from echostore.pipeline.stages.control import Limit, fold_control
from echostore.pipeline.stages.frames import chosen, collected, gathered
from echostore.pipeline.staleness import NOWHERE, Stale, check_same_lake, lake_point, stale_parties

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """A moment of one party: how many blocks of each feed there were."""

    party: bytes
    data: Mapping[FeedId, int]
    control: Mapping[FeedId, int]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What a run is asked for."""

    lake: Path
    out: Path
    parties: tuple[str, ...] = ()
    models: str | None = None
    at: At | None = None
    tables: tuple[str, ...] = DEFAULT_TABLES


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came of it. `new`: whether there was anything to commit."""

    out: Path
    record: Commit
    new: bool
    wanted: frozenset[bytes] | None
    failed: int
    driver_bytes: int

    @property
    def commit(self) -> int:
        return self.record.number

    @property
    def stages(self) -> tuple[StageTime, ...]:
        return self.record.stages if self.new else ()

    @property
    def parties(self) -> int:
        return self.record.totals.get("parties", 0) if self.wanted is None else len(self.wanted)

    def results(self) -> Iterator[PartyResult]:
        """The parties that were asked for, ascending."""
        return party_results(self.out, self.record, self.wanted)


def chosen_tables(text: str | None) -> tuple[str, ...]:
    """What `--tables` names."""
    if text is None:
        return DEFAULT_TABLES
    if text.strip() in ("all", "none"):
        return tuple(TABLES) if text.strip() == "all" else ()
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    for name in names:
        if name not in TABLES:
            raise UsageError(f"there is no table {name!r}", next_step=f"Tables: {', '.join(TABLES)}, all or none.")
    return names


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run has to do, found out of the lake's log and the last commit without an engine."""

    request: RunRequest
    version: LakeVersion
    models: list[str]
    base: Commit | None
    wanted: list[bytes] | None
    """Parties that are asked for; None: all."""
    stale: Stale

    @property
    def unchanged(self) -> "RunResult | None":
        """The answer where nothing is new: the newest commit."""
        if self.base is None or not self.stale.nothing:
            return None
        return RunResult(out=self.request.out, record=self.base, new=False, wanted=self.shown, failed=0, driver_bytes=0)

    @property
    def shown(self) -> frozenset[bytes] | None:
        return None if self.wanted is None else frozenset(self.wanted)

    def blocks(self) -> int:
        """How long all feeds are of the parties that are to be built, with what was built of them before: whatever has
        to be read again is no more than that. Blocks that the lake has no more count too: their items are in an epoch."""
        runs = self.version.runs()
        if self.base is not None and self.stale.roots is not None:
            known = {result.party: result.root_party for result in party_results(self.request.out, self.base)}
            built = {party for party, root in known.items() if root in self.stale.roots}
            inside = pc.is_in(
                runs["party"], pa.array(sorted(built | self.stale.roots | self.stale.unknown), pa.binary())
            )
            # Whose child an unknown party is, all of control has to be folded to tell.
            runs = runs.filter(pc.or_(inside, runs["control"]) if self._needs_all_control else inside)
        lengths = runs.group_by(["party", "feed"]).aggregate([("end", "max")])
        return int(pc.sum(lengths["end_max"]).as_py() or 0)

    @property
    def _needs_all_control(self) -> bool:
        return bool(self.stale.unknown) or self.request.at is not None


def plan_run(request: RunRequest) -> RunPlan:
    """Find out what is to be done, and refuse what can't be, before an engine is started for it."""
    check_folder(request.out, "output")
    models = known_models(request.models)
    lake = Lake.open(request.lake)
    base, _ = reading.newest(request.out)
    if base is not None:
        check_same_lake(lake, base)
    version = lake.at()
    wanted = chosen_parties(version, request.parties)
    if request.at is not None:
        if wanted is not None and wanted != [request.at.party]:
            raise UsageError("the anchor names another party than --party")
        wanted = [request.at.party]
    return RunPlan(request, version, models, base, wanted, _stale(request, base, version, wanted, models))


def run_pipeline(
    spark: Any | None, request: RunRequest, *, note: Note | None = None, step: Step = no_step
) -> RunResult:
    """Build what is stale and commit it, on Spark or, without a session, in this process. Without anything stale, the
    newest commit is the answer."""
    plan = plan_run(request)
    if (unchanged := plan.unchanged) is not None:
        return unchanged
    version, models, base, stale = plan.version, plan.models, plan.base, plan.stale
    limits = _limits(spark, request, version)
    counter = DriverBytes(spark)
    clock = Clock(spark, note)
    with Attempt.begin(request.out, step=step) as attempt:
        job = Job(
            spark=spark,
            version=version,
            out=request.out,
            base=attempt.base,
            number=attempt.number,
            place=Place(str(request.out), attempt.folder),
            models=request.models,
            tables=request.tables,
            collect=collected,
            clock=clock,
            limits=limits,
            at=request.at.text if request.at else "",
            builds=_builds(request.out, attempt.base),
        )
        stale, strays = _with_children(job, stale)
        builds, failures = _build_apart(job, stale)
        if stale.roots is None:
            strays = _without_control(version).difference(*(built.keys for built in builds))
        with clock.stage("commit") as told:
            files = _all_files(job, builds)
            rows = [*_failed_rows(job, failures), *_stray_rows(job, strays)]
            files["parties"] += attempt.write("parties", PARTIES, results_table(rows).to_batches())
            built = {**job.builds, **{party: job.number for each in builds for party in each.keys}}
            files = merge_small_files(spark, job.place, files, job.collect, built)
            told.rows = sum(
                file.rows for named in files.values() for file in named if file.path.startswith(attempt.folder)
            )
        driver_bytes = counter.since()
        if driver_bytes > DRIVER_BYTES_MAX:
            raise EngineFailed(
                f"{driver_bytes >> 20} MiB came to the driver, where {DRIVER_BYTES_MAX >> 20} are the most it may be",
                next_step="Build fewer parties at a time with --party.",
            )
        if "runs" in request.tables:
            files.setdefault(table_kind("runs"), []).extend(attempt.write(table_kind("runs"), RUNS, [_run_rows(job)]))
        complete = plan.wanted is None
        record = attempt.commit(
            files=files,
            lake=lake_point(version.lake, version.version) if complete else base.lake if base else NOWHERE,
            stages=clock.times(),
            settings={"tables": list(request.tables), "known_models": models, "at": job.at},
            totals=totals(request.out, files["parties"]),
        )
    _collect(request.out, note)
    return RunResult(
        out=request.out, record=record, new=True, wanted=plan.shown, failed=len(failures), driver_bytes=driver_bytes
    )


# what is asked for


def _limits(spark: Any | None, request: RunRequest, version: LakeVersion) -> dict[PartyKey, Limit]:
    """The limits of an anchor."""
    at = request.at
    if at is None:
        return {}
    root = _root_of(spark, version, at.party)
    limits = {PartyKey(at.party): Limit(at.data, at.control)}
    if root != at.party:
        # Control is the parent's; its data is not looked at.
        limits[PartyKey(root)] = Limit({}, at.control)
        limits[PartyKey(at.party)] = Limit(at.data)
    return limits


def _root_of(spark: Any | None, version: LakeVersion, party: bytes) -> bytes:
    if len(version.runs(parties=[party], control=True)):
        return party
    for child, root in _roots_known(spark, version, [party]).items():
        if child == party:
            return root
    raise NotFound(f"no party {party.hex()[:16]} is in the lake")


def _roots_known(spark: Any | None, version: LakeVersion, parties: Collection[bytes]) -> dict[bytes, bytes]:
    """Whose control each party has, of these and of those that are folded with them."""
    control = fold_control(spark, version, parties, hurt={})
    try:
        rows = gathered(chosen(control.rows["parties"], ["party", "root"])).to_pylist()
    finally:
        control.close()
    return {row["party"]: row["root"] for row in rows}


def _stale(
    request: RunRequest, base: Commit | None, version: LakeVersion, wanted: list[bytes] | None, models: list[str]
) -> Stale:
    if request.at is not None:
        return Stale(frozenset([request.at.party]))
    return stale_parties(request.out, base, version, wanted, models)


def _builds(out: Path, base: Commit | None) -> dict[bytes, int]:
    """The commit of the last build of every party."""
    if base is None:
        return {}
    return {result.party: result.built for result in party_results(out, base) if result.built}


def _with_children(job: Job, stale: Stale) -> tuple[Stale, frozenset[bytes]]:
    """What is stale, with the roots of parties that have no control of their own; and those that nobody knows."""
    candidates = stale.unknown
    if stale.roots is None or not candidates:
        return stale, frozenset()
    # A parent whose control state is damaged is told by its own build; its children are not found till then.
    every = _roots_known(job.spark, job.version, candidates)
    roots = {party: root for party, root in every.items() if party in candidates}
    return Stale(stale.roots | frozenset(roots.values()), stale.anew), candidates - roots.keys()


def _without_control(version: LakeVersion) -> frozenset[bytes]:
    runs = version.runs()
    every = frozenset(runs["party"].unique().to_pylist())
    return every - frozenset(runs.filter(runs["control"])["party"].unique().to_pylist())


# building, one bad party or not


@dataclass(slots=True)
class _Failure:
    """A party that can't be built, and why."""

    party: bytes
    error: EchoError


def _build_apart(job: Job, stale: Stale) -> tuple[list[Built], list[_Failure]]:
    """Build everything that is stale; parties that make a build fail end up alone."""
    done: list[Built] = []
    failures: list[_Failure] = []
    todo: list[frozenset[bytes] | None] = [stale.roots]
    while todo:
        parties = todo.pop()
        if parties is not None and not parties:
            continue
        try:
            done.append(build(job, parties, stale.anew))
        except MemoryError as error:
            if job.spark is not None:
                raise
            raise EngineFailed(
                "This process ran out of memory.",
                unchanged=engine_errors.UNCHANGED,
                next_step="Run it with --engine spark, which reads the lake in parts.",
            ) from error
        except Exception as error:
            typed = engine_errors.of_a_party(error, tasks_here=job.spark is None)
            every = _roots(job.version) if parties is None else parties
            if typed is None or not every:
                raise
            if len(every) == 1:
                failures.append(_Failure(next(iter(every)), typed))
            else:
                todo += _halves(every, typed, job.version)
    if not done and failures and not any(isinstance(failure.error, Corrupt) for failure in failures):
        raise failures[0].error  # what nobody is spared is no party's fault
    return done, failures


def _roots(version: LakeVersion) -> frozenset[bytes]:
    return frozenset(version.runs(control=True)["party"].unique().to_pylist())


def _halves(parties: frozenset[bytes], error: EchoError, version: LakeVersion) -> list[frozenset[bytes] | None]:
    """Two parts of some parties: those that the error speaks of and the others, or simply halves."""
    runs = version.runs(parties=parties)
    suspects: set[bytes] = set()
    for party, feed, file in zip(*(runs[name].to_pylist() for name in ("party", "feed", "file")), strict=True):
        if file in error.what or feed.hex() in error.what or party.hex() in error.what:
            suspects.add(party)
    if suspects and suspects < parties:
        return [parties - suspects, frozenset(suspects)]
    ordered = sorted(parties)
    middle = len(ordered) // 2
    return [frozenset(ordered[:middle]), frozenset(ordered[middle:])]


def _failed_rows(job: Job, failures: Iterable[_Failure]) -> list[PartyResult]:
    """Rows of parties that could not be built: they keep what they had."""
    found = []
    for failure in failures:
        before = next(iter(party_results(job.out, job.base, [failure.party])), None) if job.base else None
        found.append(
            PartyResult(
                party=failure.party,
                root_party=failure.party,
                title=before.title if before else "",
                state=FAILED,
                detail=failure.error.what,
                epoch=before.epoch if before else 0,
                cid=before.cid if before else None,
                models=before.models if before else "",
                messages=before.messages if before else 0,
                applied=before.applied if before else 0,
                rejected=before.rejected if before else 0,
                waiting=before.waiting if before else 0,
                items=before.items if before else 0,
                since=before.since if before else 0,
                built=before.built if before else 0,
                commit=job.number,
            )
        )
    return found


def _stray_rows(job: Job, strays: frozenset[bytes]) -> list[PartyResult]:
    """Rows of parties of which there is data alone: every block of theirs is rejected."""
    found = []
    for party in sorted(strays):
        runs = job.version.runs(parties=[party])
        blocks = int((runs["end"].to_numpy() - runs["start"].to_numpy()).sum())
        found.append(
            PartyResult(
                party=party,
                root_party=party,
                state=STRAY,
                detail="the lake has no control feed of this party, nor of one that it is a child of",
                epoch=0,
                cid=None,
                messages=blocks,
                applied=0,
                rejected=blocks,
                waiting=0,
                items=0,
                since=0,
                built=0,
                commit=job.number,
            )
        )
    return found


# files


def _all_files(job: Job, builds: Iterable[Built]) -> dict[str, list[NamedFile]]:
    """What the commit names: files of the one before, as far as they still count, and what was built."""
    files: dict[str, list[NamedFile]] = {
        kind: list(named) for kind, named in (job.base.files.items() if job.base else ())
    }
    for built in builds:
        for kind, kept in built.instead.items():
            before = set(job.before(kind))
            files[kind] = [file for file in files.get(kind, ()) if file not in before or file in kept]
            files[kind] += [file for file in kept if file not in before]
        for kind, named in built.files.items():
            files.setdefault(kind, []).extend(named)
    files.setdefault("parties", [])
    return files


def _run_rows(job: Job) -> pa.RecordBatch:
    import time

    created = time.time_ns() // 1000
    rows = [
        {
            "commit": job.number,
            "created": created,
            "lake_version": job.version.version,
            "stage": stage.name,
            "rows": stage.rows,
            "seconds": stage.seconds,
        }
        for stage in job.clock.times()
    ]
    return pa.RecordBatch.from_pylist(rows, RUNS)


def _collect(out: Path, note: Note | None) -> None:
    """Remove what lost attempts left. The commit stands, whatever comes of this."""
    try:
        removed = collect_garbage(out)
    except EchoError as error:
        if note is not None:
            note(f"garbage is left: {error.what}")
        return
    if removed.files and note is not None:
        note(f"{removed.files} files of lost attempts removed")
