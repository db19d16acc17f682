"""What Spark says when something fails, as typed errors.

A stage that raises an `EchoError` in a worker arrives on the driver as the text of a traceback inside a Java exception.
Here it becomes the same error again. Everything else becomes `EngineFailed` with the first line that says why, and the
path of a file with Spark's own words.
"""

import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from echostore.kernel import errors
from echostore.kernel.errors import EchoError, EngineFailed, StorageFailed, UsageError
from echostore.pipeline.output.record import CommitLost

UNCHANGED = "Nothing was committed; what was there before is as it was."

_OURS = re.compile(r"echostore\.kernel\.errors\.(\w+): (.+)")
_PYTHON = re.compile(r"^(\w+(?:\.\w+)*(?:Error|Exception|Exit)): (.+)$", re.MULTILINE)
_MEMORY = re.compile(r"OutOfMemoryError|Could not reserve enough space|MemoryError|Cannot allocate memory")
_DISK = re.compile(r"No space left on device|Disk quota exceeded|ENOSPC")
_WORKER_DIED = re.compile(r"Python worker exited unexpectedly|crashed")
_MASTERS = re.compile(r"All masters are unresponsive|Could not parse Master URL")


@contextlib.contextmanager
def typed(words: Path) -> Iterator[None]:
    """Exceptions of Spark that leave the block become `EchoError`s; `words` is the file with Spark's output."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException, ConnectionError) as error:
        raise of(error, words) from error


def of(error: Exception, words: Path) -> EchoError:
    """The typed error for an exception of Spark."""
    text = str(error)
    told = text + _tail(words)
    ours = _OURS.search(text)
    if ours is not None:
        kind = getattr(errors, ours[1], EngineFailed)
        known = isinstance(kind, type) and issubclass(kind, EchoError)
        return (kind if known else EngineFailed)(ours[2].strip(), unchanged="")
    if _DISK.search(told):
        return StorageFailed(
            "Spark has no space left on disk.",
            unchanged=UNCHANGED,
            next_step="Free space, or name a roomier folder in SPARK_LOCAL_DIRS, and run it again.",
        )
    if _MEMORY.search(told):
        return EngineFailed(
            "Spark ran out of memory.",
            unchanged=UNCHANGED,
            next_step="Give it more with --memory, or fewer tasks at a time with --master local[1].",
        )
    if _MASTERS.search(told):
        return EngineFailed("The Spark master does not answer.", unchanged=UNCHANGED, next_step="Check --master.")
    kept = _kept(words)
    step = f"Spark's own words are in {kept}." if kept else "Run `echostore doctor`."
    if _WORKER_DIED.search(text):
        return EngineFailed("A Python worker of Spark died.", unchanged=UNCHANGED, next_step=step)
    return EngineFailed(f"Spark failed: {_why(text)}.", unchanged=UNCHANGED, next_step=step)


def is_sparks(error: Exception) -> bool:
    """Whether Spark raised it."""
    if "pyspark" not in sys.modules:  # a run without Spark does not load it to find that out
        return False
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return isinstance(error, Py4JError | PySparkException)


def of_a_party(error: Exception, *, tasks_here: bool = False) -> EchoError | None:
    """The error, if somebody's blocks can be its cause; None when it is the engine's or the run's. `tasks_here`: whether
    tasks run in this process, so that what they raise arrives as it is."""
    if is_sparks(error):
        raised = of(error, Path())
        # A Python exception in a worker is somebody's blocks; what else goes wrong in Spark is Spark's.
        if isinstance(raised, EngineFailed) and "Python worker" not in str(error):
            return None
        return None if isinstance(raised, StorageFailed) else raised
    if isinstance(error, EchoError):
        return None if isinstance(error, CommitLost | StorageFailed | EngineFailed | UsageError) else error
    if isinstance(error, MemoryError | OSError):
        return None
    blamed = tasks_here or isinstance(error, AssertionError | ValueError)
    return EchoError(f"{type(error).__name__}: {error}") if blamed else None


def _why(text: str) -> str:
    """The line of a long text that says what went wrong."""
    raised = _PYTHON.findall(text)
    if raised:
        return f"{raised[-1][0]}: {raised[-1][1]}"[:300].rstrip(".")
    for line in text.splitlines():
        if line.strip() and not line.startswith("An error occurred while calling"):
            return line.strip().lstrip(": ")[:300].rstrip(".")
    return "no reason was given"


def _tail(words: Path) -> str:
    try:
        return words.read_text(errors="replace")[-20_000:]
    except OSError:
        return ""


def _kept(words: Path) -> Path | None:
    """A copy of Spark's output that outlives the session."""
    try:
        if not words.stat().st_size:
            return None
        kept = Path(tempfile.mkstemp(prefix="echostore-spark-", suffix=".log")[1])
        shutil.copyfile(words, kept)
    except OSError:
        return None
    return kept
