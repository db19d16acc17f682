"""A standalone Spark cluster on loopback, from the installed package: a master and workers as child processes.

with cluster(tmp_path, workers=2) as master:
    ... spark_session("x", SparkOptions(master=master))
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from echostore.pipeline.java import find_java, spark_home

START_S = 90


@contextmanager
def cluster(folder: Path, *, workers: int = 2, memory: str = "1g") -> Iterator[str]:
    """The URL of a master that has its workers."""
    port, folder = _free_port(), folder / "cluster"
    folder.mkdir()
    url = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
        master = stack.enter_context(_daemon(folder, "master", "master.Master", arguments))
        _wait(lambda: _listens(port), "the master listens", folder)
        for number in range(workers):
            arguments = ["--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", memory]
            arguments += ["--work-dir", str(folder / f"work-{number}"), url]
            stack.enter_context(_daemon(folder, f"worker-{number}", "worker.Worker", arguments))
        log = folder / "master.log"
        _wait(lambda: log.read_text().count("Registering worker") >= workers, "the workers are known", folder)
        assert master.poll() is None
        yield url


@contextmanager
def _daemon(folder: Path, name: str, kind: str, arguments: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java().home),
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "PYSPARK_PYTHON": sys.executable,
    }
    command = [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}", *arguments]
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def descendants(pid: int) -> dict[int, str]:
    """The command lines of all processes below one, by pid. Others are never looked at."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            below.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found: dict[int, str] = {}
    front = [pid]
    while front:
        for child in below.get(front.pop(), ()):
            try:
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            front.append(child)
    return found


def executors(pid: int) -> list[int]:
    """The executors among the descendants of a process, and no others."""
    return [child for child, line in descendants(pid).items() if re.search(r"CoarseGrainedExecutorBackend", line)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(ready: object, what: str, folder: Path) -> None:
    until = time.monotonic() + START_S
    while not ready():  # type: ignore[operator]  # a function without arguments
        if time.monotonic() > until:
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
            raise AssertionError(f"after {START_S} s it is not so that {what}:\n{logs}")
        time.sleep(0.1)
