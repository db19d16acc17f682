"""The Spark session: one way to start it, settings with their reasons, quiet, with progress, and safe to interrupt.

with spark_session("pipeline run", master="local[*]") as spark:
    ...

Spark's own words go to a file that is kept only when something failed. ^C cancels the running jobs, stops the session
and goes on as KeyboardInterrupt, whatever the cancelled jobs say meanwhile; results of a job appear with its commit, so
none is half there. SIGTERM does the same, where the program has no plans of its own for it.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echostore.kernel.errors import EchoError, EngineFailed, StorageFailed, UsageError
from echostore.pipeline import engine_errors
from echostore.pipeline.java import find_java, spark_home
from echostore.store.durable_file import file_error

Tell = Callable[[int, int], None]
"""(tasks done, tasks known): how far the running jobs are."""

Step = Callable[[str], None]
"""Told before each step of the start, by what it does."""


def no_step(text: str) -> None:
    """What steps are told to where nobody looks."""


MEMORY_MIN = 512 << 20
"""Spark refuses a heap below 450 MiB."""
MEMORY_DEFAULT_MAX = 2 << 30
"""Bytes pass from Parquet to Python workers without the JVM, so more heap would lie idle."""
MEMORY_BESIDE = 256 << 20
"""What Python workers need at least, next to the heap."""
DISK_MIN = 256 << 20
CONNECT_TIMEOUT_S = 5.0
PROGRESS_EVERY_S = 0.2
LOCAL_DIRS = "SPARK_LOCAL_DIRS"

_LOCAL = re.compile(r"local(\[(\*|[1-9]\d*)(,\s*[1-9]\d*)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*[1-9]\d*\s*,\s*[1-9]\d*\s*,\s*[1-9]\d*\s*\]")
_STANDALONE = re.compile(r"spark://([^:/,\s]+:\d{1,5})(,[^:/,\s]+:\d{1,5})*")
_SIZE = re.compile(r"(\d+)\s*([kmgt]?)b?", re.IGNORECASE)

_LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOptions:
    """How Spark is started."""

    master: str = "local[*]"
    memory: str = ""
    """Heap of the driver, such as 2g. Without it: a quarter of what is free, between 512 MiB and 2 GiB."""
    short: bool = False
    """For tests and commands of seconds: starts in half the time and runs at half the speed."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Spark's own settings; they win over ours."""


@contextlib.contextmanager
def spark_session(
    name: str, options: SparkOptions | None = None, *, tell: Tell | None = None, step: Step = no_step
) -> Iterator[Any]:
    """A session for the block. Spark's exceptions leave it as typed errors. `step` hears how its start goes on, `tell` how
    its jobs do."""
    options = options or SparkOptions()
    before = signal.getsignal(signal.SIGINT)
    with termination_interrupts(), _scratch() as scratch, _quiet_gateway():
        words = scratch / "spark.log"
        spark = _started(name, options, scratch, words, step)
        try:
            with _interruption_wins(), engine_errors.typed(words), _watched(spark, tell):
                yield spark
        finally:
            # After ^C Spark's own handler has cancelled the jobs; stopping ends what is left of them.
            _stop(spark)
            if threading.current_thread() is threading.main_thread() and before is not None:
                signal.signal(signal.SIGINT, before)


# what is given


def check_master(master: str) -> None:
    """Refuse a master that Spark would not understand, or where nobody answers."""
    if _LOCAL.fullmatch(master) or _LOCAL_CLUSTER.fullmatch(master):
        return
    if _STANDALONE.fullmatch(master):
        _answers(master)
        return
    if master == "yarn" or re.fullmatch(r"k8s://\S+", master):
        return
    raise UsageError(
        f"{master!r} is no master of Spark.",
        next_step="Give local[*], local[2], spark://HOST:PORT, yarn or k8s://URL.",
    )


def _answers(master: str) -> None:
    failed = ""
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
        except (OSError, OverflowError) as error:
            failed = str(error)
        else:
            return
    raise EngineFailed(
        f"No Spark master answers at {master}: {failed}.",
        next_step="Start it, or give another --master; local[*] needs none.",
    )


def memory_bytes(text: str) -> int:
    """`2g` as bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text!r} is no amount of memory", next_step="Give for example 2g or 1500m.")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[found[2].lower()]


def free_memory() -> int | None:
    """What processes may still take, as the kernel and a container's limit say; None where that can't be told."""
    known = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                known.append(int(line.split()[1]) << 10)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            known.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError, IndexError):
        return min(known, default=None)
    return min(known, default=None)


def heap(options: SparkOptions) -> int:
    """The driver's heap in bytes, checked against what is free."""
    free = free_memory()
    if options.memory:
        wanted = memory_bytes(options.memory)
        if wanted < MEMORY_MIN:
            raise UsageError(f"Spark needs at least 512m of memory, and {options.memory} is given")
    elif free is None:
        wanted = MEMORY_MIN * 2
    else:
        wanted = max(MEMORY_MIN, min(MEMORY_DEFAULT_MAX, free // 4))
    if free is not None and free < wanted + MEMORY_BESIDE:
        raise EngineFailed(
            f"Too little memory: {free >> 20} MiB are free, and Spark with its workers needs "
            f"{wanted + MEMORY_BESIDE >> 20} MiB.",
            next_step="End other programs, or give Spark less with --memory 512m.",
        )
    return wanted


# starting


def _started(name: str, options: SparkOptions, scratch: Path, words: Path, step: Step) -> Any:
    step(f"checking the master {options.master} and memory")
    check_master(options.master)
    memory = heap(options)
    step("looking for Java")
    java, home = find_java(), spark_home()
    local = options.master.startswith("local")
    os.environ.update(
        JAVA_HOME=str(java.home),
        SPARK_HOME=str(home),
        # Workers run this very Python, with what is installed here.
        PYSPARK_PYTHON=sys.executable,
        PYSPARK_DRIVER_PYTHON=sys.executable,
    )
    if local:
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    if options.short:
        os.environ["SPARK_LAUNCHER_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    step("loading PySpark")
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:  # pyspark has no other way to ask
        raise EngineFailed("A Spark session runs in this process already.", next_step="Use or stop that one.")
    conf = SparkConf()
    for key, value in _settings(name, options, scratch, memory, local=local).items():
        conf.set(key, value)
    try:
        if SparkContext._gateway is None:  # the JVM outlives sessions; a second one reuses it
            step("starting Java")
            _launch(conf, words)
        step("opening the session")
        return SparkSession(SparkContext(conf=conf))
    except EchoError:
        raise
    except KeyboardInterrupt:
        _forget_context()
        raise
    except Exception as error:
        # Half a context would refuse the next session.
        _forget_context()
        raise engine_errors.of(error, words) from error


def _launch(conf: Any, words: Path) -> None:
    """Start the JVM with its output in a file instead of on the terminal."""
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    # It would win over the setting, and the folder of this session lies in it.
    local = os.environ.pop(LOCAL_DIRS, None)
    with _interrupted_later():  # a JVM that is left alone before it is connected never ends
        try:
            with open(words, "ab") as output:
                gateway = launch_gateway(conf, {"stdout": output, "stderr": output})  # type: ignore[no-untyped-call]  # by pyspark
        finally:
            if local is not None:
                os.environ[LOCAL_DIRS] = local
        SparkContext._ensure_initialized(gateway=gateway)  # the constructor calls it without our gateway


def _settings(name: str, options: SparkOptions, scratch: Path, memory: int, *, local: bool) -> dict[str, str]:
    logging = scratch / "log4j2.properties"
    logging.write_text(_LOGGING)
    # C1 alone starts fast and runs at half the speed; a serial collector has no threads to start.
    java_options = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"] if options.short else ["-XX:+UseParallelGC"]
    java_options.append(f"-Dlog4j2.configurationFile={logging.as_uri()}")
    settings = {
        "spark.app.name": f"echostore {name}",
        "spark.master": options.master,
        "spark.submit.deployMode": "client",
        "spark.driver.memory": f"{memory >> 20}m",
        "spark.driver.extraJavaOptions": " ".join(java_options),
        "spark.driver.maxResultSize": "256m",
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Without it a source that takes filters is refused.
        "spark.sql.python.filterPushdown.enabled": "true",
        # Tasks pack rows in the order in which they come, so one that runs again sends other bytes for the same set of
        # rows. All that read them sort first; Spark would take the difference for an error and give the job up.
        "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "false",
        # Spark runs a worker for each core already.
        "spark.executorEnv.POLARS_MAX_THREADS": "1",
        # The other allocator gives memory back, and takes it again, so eagerly that a short task spends a quarter of its
        # time on that.
        "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": "jemalloc",
        # A worker that dies in native code leaves the stack it died on.
        "spark.python.worker.faulthandler.enabled": "true",
    }
    if local:
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if options.short:
        # Small data: partitions and planning rounds cost more than they bring.
        settings |= {"spark.sql.shuffle.partitions": "2", "spark.sql.adaptive.enabled": "false"}
    return settings | dict(options.settings)


def _stop(spark: Any) -> None:
    try:
        spark.stop()
    except Exception:  # noqa: BLE001  # a JVM that is gone can't be stopped; what matters is to forget it
        _forget_context()


def _forget_context() -> None:
    from pyspark import SparkContext

    SparkContext._active_spark_context = None  # as stop() does when the JVM still answers
    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    if gateway is not None:
        with contextlib.suppress(OSError):
            gateway.shutdown()


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A private folder for shuffles and words, gone afterwards."""
    parent = os.environ.get(LOCAL_DIRS, "").split(",")[0] or tempfile.gettempdir()
    try:
        if shutil.disk_usage(parent).free < DISK_MIN:
            raise StorageFailed(
                f"{parent} has less than {DISK_MIN >> 20} MiB free, and Spark keeps shuffled data there.",
                next_step="Free space, or name another folder in SPARK_LOCAL_DIRS.",
            )
        folder = Path(tempfile.mkdtemp(prefix="echostore-spark-", dir=parent))
    except OSError as error:
        raise file_error(error, f"make a folder for Spark in {parent}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# interruption


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """SIGTERM is like ^C: a process that ends at once leaves its folder, with all that was shuffled, behind."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def handler(number: int, frame: Any) -> None:
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # ^C is ignored, as in the background of a script
            raise KeyboardInterrupt
        interrupt(number, frame)

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _interruption_wins() -> Iterator[None]:
    """After ^C nothing else leaves the block: jobs that were cancelled fail, and so may what is done about them."""
    heard = threading.Event()
    with _heard(lambda: heard.set()) as installed:
        try:
            yield
        except Exception as error:
            if installed and heard.is_set():
                raise KeyboardInterrupt from error
            raise


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """The first ^C waits until the block has ended; a second one ends it."""
    presses = 0

    def press() -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    with _heard(press, pass_on=False):
        yield
    if presses:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _heard(told: Callable[[], None], *, pass_on: bool = True) -> Iterator[bool]:
    """Tell of ^C, then do what is done about it otherwise. Not where it is ignored, nor outside of the main thread."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield False
        return

    def handler(number: int, frame: Any) -> None:
        told()
        if pass_on:
            before(number, frame)

    signal.signal(signal.SIGINT, handler)
    try:
        yield True
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, before)


class _WithoutGateway(logging.Handler):
    """Shows what would be shown without it, but for the tracebacks that py4j logs when a call is interrupted."""

    def emit(self, record: logging.LogRecord) -> None:
        if Path(record.pathname).parent.name != "py4j" and logging.lastResort is not None:
            logging.lastResort.handle(record)


@contextlib.contextmanager
def _quiet_gateway() -> Iterator[None]:
    """Keep py4j's log off the terminal. A program that has set up logging sees it where it wants to."""
    root = logging.getLogger()
    if root.handlers:
        yield
        return
    handler = _WithoutGateway(logging.WARNING)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


# progress


@contextlib.contextmanager
def _watched(spark: Any, tell: Tell | None) -> Iterator[None]:
    """Tell how many tasks of the running stages are done, from Spark's own status."""
    if tell is None:
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(spark, tell, over), name="echostore-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(spark: Any, tell: Tell, over: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    while not over.wait(PROGRESS_EVERY_S):
        try:
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except Exception:  # noqa: BLE001  # the JVM is going down; there is nothing to show any more
            return
        known = [stage for stage in stages if stage is not None]
        if known:
            tell(sum(stage.numCompletedTasks for stage in known), sum(stage.numTasks for stage in known))
