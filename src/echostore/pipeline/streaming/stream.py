"""stream: what `echostore pipeline stream` does, on a Spark session that is given.

    catch up ──► query: a micro-batch ──► overlay ──► told            until it is stopped, or once
                        └──► epoch, when the policy says so: an ordinary run beside the micro-batches ──► commit

The query's offsets bound a micro-batch and wake the stream; what has been folded is known from commit and overlay. So the
checkpoint may be behind (blocks are looked at again and found to be there) or gone. Only one step runs at a time, and a
stream is stopped between two of them.
"""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echostore.kernel.errors import EchoError, EngineFailed
from echostore.pipeline.exclusive_folders import check_folder
from echostore.pipeline.lake import Lake
from echostore.pipeline.lake.log import read_entry
from echostore.pipeline.models import known_models
from echostore.pipeline.output import reading
from echostore.pipeline.output.files import Step, no_step
from echostore.pipeline.output.overlay import folder_of
from echostore.pipeline.output.record import Commit, CommitLost
from echostore.pipeline.parties import chosen_parties
from echostore.pipeline.run import RunRequest, run_pipeline
from echostore.pipeline.source import register
from echostore.pipeline.staleness import COMPACTION, check_same_lake
from echostore.pipeline.streaming.following import (
    Follower,
    Timeframe,
    changed_parties,
    last_offset,
    offset_of,
    percentile_s,
)
from echostore.pipeline.streaming.home_following import HomeFollower
from echostore.pipeline.streaming.jobs import SparkJobs
from echostore.pipeline.streaming.overlaying import Folded, Overlaying
from echostore.pipeline.streaming.publishing import KEEP_S, only_stream

BATCH_BLOCKS = 50_000
"""Blocks of a micro-batch at most: seconds of work of one task, and some hundred megabytes."""
CATCH_UP_BLOCKS = 200_000
"""When more than this is new at the start, an ordinary run takes it in: it spreads over all cores."""
EPOCH_MESSAGES = 1_000_000
EPOCH_AGE_S = 600.0
DEFERRED_S = 10.0
"""A party that waits for a commit gets one after so long, and again after ten times what the last one took."""
LOOK_EVERY_S = 0.05
STARTS_MAX = 3
CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """What a stream is asked for."""

    lake: Path
    out: Path
    home: Path | None = None
    """A peer's home that is published to the lake all the while."""
    parties: tuple[str, ...] = ()
    models: str | None = None
    trigger_s: float = 1.0
    epoch_messages: int | None = EPOCH_MESSAGES
    """Build an epoch when so many messages were folded since the last; None: not by number."""
    epoch_age_s: float | None = EPOCH_AGE_S
    """Build one when the last is so old and something is new; None: not by age."""
    once: bool = False
    """Take in what is there now, build an epoch of it, and end."""
    batch_blocks: int = BATCH_BLOCKS
    keep_s: float = KEEP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a step did. Lags are from the arrival of blocks in the lake to the published tables."""

    batch: int
    overlay: int
    commit: int
    rows: int
    seconds: float
    lag_p50_s: float | None
    lag_p95_s: float | None
    waiting: int
    deferred: int
    since_epoch: int

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


Tell = Callable[[Progress], None]
Note = Callable[[str], None]


def check_stream(request: StreamRequest) -> None:
    """Refuse what can't be done before an engine is started for it."""
    check_folder(request.out, "output")
    known_models(request.models)
    lake = Lake.create(request.lake) if request.home is not None else Lake.open(request.lake)
    base, _ = reading.newest(request.out)
    if base is not None:
        check_same_lake(lake, base)
    chosen_parties(lake.at(), request.parties)


def run_stream(
    spark: Any, request: StreamRequest, *, tell: Tell, note: Note, stop: threading.Event, step: Step = no_step
) -> Commit | None:
    """Stream until `stop` is set, or once; returns the newest commit. What is published stays, however it ends."""
    with only_stream(request.out):
        return _Stream(spark, request, tell, note, stop, step).run()


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, instead of ending the process in the middle of a step."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: stop.set())
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Stopping(Exception):
    """A micro-batch that came after the stop: it is done again after the next start."""


class _Stream:
    def __init__(
        self, spark: Any, request: StreamRequest, tell: Tell, note: Note, stop: threading.Event, step: Step
    ) -> None:
        self._spark, self._request, self._tell, self._note = spark, request, tell, note
        self._stop, self._step = stop, step
        self._home = None if request.home is None else HomeFollower(request.home, request.lake)
        self._checkpoint = folder_of(request.out) / CHECKPOINT
        self._busy = threading.Lock()
        self._failed: BaseException | None = None
        self._end: Timeframe = {}
        self._batch = -1
        self._epochs = _Epochs(spark, request, note)

    def run(self) -> Commit | None:
        request = self._request
        if self._home is not None:
            self._home.publish()
        self._catch_up()
        roots = chosen_parties(Lake.open(request.lake).at(), request.parties)
        self._follower = Follower(request.lake)
        self._overlaying = Overlaying(
            SparkJobs(self._spark),
            self._follower,
            request.out,
            roots=None if roots is None else frozenset(roots),
            models=request.models,
            keep_s=request.keep_s,
            step=self._step,
        )
        try:
            # What the query had seen when it ended: an overlay that a commit has replaced meanwhile is made again.
            self._advance(last_offset(self._checkpoint), set())
            self._stream()
        finally:
            self._epochs.wait()
        if request.once and self._failed is None and not self._stop.is_set():
            self._last_epoch()
        if self._failed is not None:
            raise self._failed
        return reading.newest(request.out)[0]

    # beginning and end

    def _catch_up(self) -> None:
        """Where there is no commit yet, models changed or much is new, begin with an ordinary run."""
        request = self._request
        lake = Lake.open(request.lake)
        base, _ = reading.newest(request.out)
        version = lake.version()
        after = 0 if base is None else base.lake.version
        models = None if base is None else base.settings.get("known_models")
        if not version:
            return
        many = _blocks_after(lake, after, version) > CATCH_UP_BLOCKS
        if base is None or many or models != known_models(request.models):
            self._note("catching up with a run of the pipeline")
            built = self._epochs.build()
            if not request.parties and built.lake.version > after:
                # Spark's own position is of no use any more: the query begins behind what was built.
                shutil.rmtree(self._checkpoint, ignore_errors=True)

    def _last_epoch(self) -> None:
        base = self._overlaying.base
        self._follower.look()
        if self._overlaying.deferred or self._follower.version > (0 if base is None else base.lake.version):
            self._epochs.build()
            self._advance(self._end, set())

    # the query

    def _stream(self) -> None:
        request = self._request
        register(self._spark)
        base = self._overlaying.base
        self._spark.conf.set("spark.sql.streaming.minBatchesToRetain", "10")
        rows = (
            self._spark.readStream.format("echostore")
            .option("lake", str(request.lake))
            .option("maxBlocksPerTrigger", request.batch_blocks)
            .option("afterVersion", 0 if base is None else base.lake.version)
            .load()
        )
        trigger: dict[str, Any] = {"processingTime": f"{int(request.trigger_s * 1000)} milliseconds"}
        writer = rows.writeStream.foreachBatch(self._micro_batch).option("checkpointLocation", str(self._checkpoint))
        writer = writer.trigger(**({"availableNow": True} if request.once else trigger))
        for left in reversed(range(STARTS_MAX)):
            query = writer.start()
            try:
                self._watch(query)
            finally:
                self._stop_between_batches(query)
            error = query.exception()
            if error is None or self._failed is not None or self._stop.is_set():
                return
            # On a machine that is busy, the worker that looks for offsets may not come up in the time that Spark gives it.
            if not left or "failed to connect back" not in str(error):
                raise EngineFailed(f"the query ended: {str(error)[:500]}", next_step="Start the stream again.")
            self._note("the query did not start; trying again")
            self._closing = False

    def _watch(self, query: Any) -> None:
        """What goes on beside the query: publishing a home, epochs, and stopping."""
        next_look = 0.0
        while query.isActive and self._failed is None and not self._stop.wait(LOOK_EVERY_S):
            if time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + self._request.trigger_s
            if self._home is not None and not self._request.once:
                arrived_ms = self._home.looked_ms
                version = self._home.publish()
                if version is not None:
                    self._follower.came(version, arrived_ms)
            if self._epochs.finished():
                # What the overlay held is in a commit now: begin on top of that, also when nothing new comes.
                self._advance(self._end, set())
            self._policy()

    def _stop_between_batches(self, query: Any) -> None:
        self._closing = True
        with self._busy:
            pass  # the step that is running ends first; later ones find that the stream is closing
        query.stop()

    _closing = False

    def _micro_batch(self, _: Any, batch: int) -> None:
        """Called by the query, in a thread of its own. The frame is not read: tasks read what they need themselves."""
        if self._closing:
            raise _Stopping
        start = offset_of(self._checkpoint, batch - 1) or {}
        end = offset_of(self._checkpoint, batch)
        if end is None:
            raise EngineFailed(f"the checkpoint has no offset of batch {batch}", next_step="Start the stream again.")
        self._batch = batch
        self._advance(end, changed_parties(start, end), start)

    def _advance(self, end: Timeframe, changed: set[bytes], start: Timeframe | None = None) -> None:
        """One step, and what is told of it."""
        with self._busy:
            if self._failed is not None:
                raise _Stopping
            try:
                started = time.perf_counter()
                self._end = end
                folded = self._overlaying.advance(end, changed)
                seconds = time.perf_counter() - started
                self._tell_progress(folded, seconds, end if start is None else start, end)
                self._overlaying.tidy()
            except BaseException as error:
                self._failed = error
                raise

    def _tell_progress(self, folded: Folded, seconds: float, start: Timeframe, end: Timeframe) -> None:
        now_ms = time.time_ns() // 1_000_000
        arrivals = self._follower.arrivals(start, end)
        overlay, base = folded.overlay, self._overlaying.base
        self._tell(
            Progress(
                batch=self._batch,
                overlay=0 if overlay is None else overlay.number,
                commit=0 if base is None else base.number,
                rows=folded.blocks,
                seconds=round(seconds, 3),
                lag_p50_s=percentile_s(arrivals, now_ms, 0.5),
                lag_p95_s=percentile_s(arrivals, now_ms, 0.95),
                waiting=self._overlaying.waiting,
                deferred=len(self._overlaying.deferred),
                since_epoch=0 if overlay is None else overlay.messages,
            )
        )

    # epochs

    def _policy(self) -> None:
        """Begin an epoch when it is time."""
        overlay, base, request = self._overlaying.overlay, self._overlaying.base, self._request
        if request.once or self._epochs.running:
            return
        messages = 0 if overlay is None else overlay.messages
        age_s = time.time() - (0 if base is None else base.created_ms / 1000)
        by_number = request.epoch_messages is not None and messages >= request.epoch_messages
        by_age = request.epoch_age_s is not None and messages > 0 and age_s >= request.epoch_age_s
        waiting = bool(self._overlaying.deferred) and self._epochs.rested()
        if by_number or by_age or waiting:
            self._epochs.begin()


class _Epochs:
    """Builds epochs: ordinary runs of the pipeline, beside the micro-batches."""

    def __init__(self, spark: Any, request: StreamRequest, note: Note) -> None:
        self._spark, self._request, self._note = spark, request, note
        self._thread: threading.Thread | None = None
        self._done = False
        self._ended = time.monotonic()
        self._seconds = 0.0

    def build(self) -> Commit:
        """Build one now."""
        request = self._request
        started = time.monotonic()
        run = RunRequest(lake=request.lake, out=request.out, parties=request.parties, models=request.models)
        try:
            done = run_pipeline(self._spark, run)
        finally:
            self._ended = time.monotonic()
            self._seconds = self._ended - started
        self._note(f"epoch: commit {done.commit} in {self._seconds:.1f} s")
        return done.record

    @property
    def running(self) -> bool:
        return self._thread is not None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._build_beside, name="echostore-epoch", daemon=True)
        self._thread.start()

    def _build_beside(self) -> None:
        try:
            self.build()
        except CommitLost as error:
            self._note(error.what)  # another run was first, which serves as well
        except EchoError as error:
            self._note(f"no epoch: {error.what} The stream goes on.")
        finally:
            self._done = True

    def finished(self) -> bool:
        """Whether one has just ended; told once."""
        if not self._done or self._thread is None:
            return False
        self._thread.join()
        self._thread, self._done = None, False
        return True

    def rested(self) -> bool:
        """Whether the last one is long enough ago to build one for parties that wait."""
        return time.monotonic() - self._ended >= max(DEFERRED_S, 10 * self._seconds)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread, self._done = None, False


def _blocks_after(lake: Lake, after: int, version: int) -> int:
    """Blocks that were published after a version."""
    total = 0
    for number in range(after + 1, version + 1):
        entry, _ = read_entry(lake.path, number)
        if entry.kind != COMPACTION:
            total += sum(each.rows for each in entry.adds)
    return total
