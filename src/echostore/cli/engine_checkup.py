"""The checks of `echostore doctor` on the ground that the pipeline stands on: libraries, Java, memory, scratch space."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata

from echostore.cli.checkup import Finding, Level
from echostore.cli.output import size
from echostore.kernel.errors import EngineFailed

LIBRARIES = ("pyspark", "pyarrow", "ptars", "polars", "pandas")
SPARK_SERIES = "4.3."
"""What the pipeline was built and tested with."""
PANDAS_BELOW = 3
INSTALL = "Install the extra `pipeline`."


def engine() -> Iterator[Finding]:
    """Whether Spark can run here. Without the extra there is one line and nothing is looked for."""
    versions = {name: _version(name) for name in LIBRARIES}
    if versions["pyspark"] is None:
        yield Finding("pipeline", "pyspark is not installed; lakes and the pipeline need it", next_step=INSTALL)
        return
    for name, version in versions.items():
        if version is None:
            yield Finding(name, "is not installed", Level.WARNING, INSTALL)
        elif name == "pyspark" and not version.startswith(SPARK_SERIES):
            yield Finding(name, f"{version}, and the pipeline is made for {SPARK_SERIES}x", Level.WARNING, INSTALL)
        elif name == "pandas" and int(version.partition(".")[0]) >= PANDAS_BELOW:
            yield Finding(name, f"{version}, and Spark needs one below {PANDAS_BELOW}", Level.WARNING, INSTALL)
        else:
            yield Finding(name, version)
    yield _java()
    yield _memory()
    yield _scratch()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _java() -> Finding:
    from echostore.pipeline.java import find_java

    try:
        found = find_java()
    except EngineFailed as error:
        return Finding("java", error.what, Level.WARNING, error.next_step)
    return Finding("java", f"{found.version}, found by {found.origin}")


def _memory() -> Finding:
    from echostore.pipeline.session import MEMORY_BESIDE, MEMORY_MIN, free_memory

    free = free_memory()
    if free is None:
        return Finding("memory", "can't be told here")
    if free < MEMORY_MIN + MEMORY_BESIDE:
        needed = size(MEMORY_MIN + MEMORY_BESIDE)
        return Finding(
            "memory",
            f"{size(free)} free, Spark needs {needed}",
            Level.WARNING,
            "End other programs before a pipeline run.",
        )
    return Finding("memory", f"{size(free)} free")


def _scratch() -> Finding:
    from echostore.pipeline.session import DISK_MIN, LOCAL_DIRS

    folder = os.environ.get(LOCAL_DIRS, "").split(",")[0] or tempfile.gettempdir()
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("scratch space", f"can't be told: {error.strerror}", Level.WARNING, f"Set {LOCAL_DIRS}.")
    if free < DISK_MIN:
        return Finding(
            "scratch space", f"{size(free)} free", Level.WARNING, f"Name a roomier folder for Spark in {LOCAL_DIRS}."
        )
    return Finding("scratch space", f"{size(free)} free")
