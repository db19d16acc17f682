"""`echostore lake` as a person or a script uses it, and what `doctor` says about Spark's ground."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.cli import engine_checkup
from echostore.cli.checkup import Level
from echostore.kernel.errors import EngineFailed
from echostore.pipeline import java, session
from echostore.pipeline.lake import Lake
from feed_builder import Writer, payloads
from spark.lake_builder import HomeOf, lake_blocks, party_key


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    made = Cli(tmp_path / "home", tmp_path / "state")
    made("init", "--name", "Laptop").ok()
    made("party", "create", "Road trip").ok()
    made("item", "create", "property-set", "n=1").ok()
    return made


def test_publish_stat_and_compact(cli: Cli, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    first = cli.process("lake", "publish", "--lake", lake, "--json").ok().json()
    assert (first["lake_version"], first["parties"], first["damaged"]) == (1, 1, [])
    assert first["blocks"] == len(lake_blocks(Lake.open(lake)))
    assert "nothing new" in cli("lake", "publish", "--lake", lake).ok().out
    cli("item", "create", "property-set", "n=2").ok()
    assert "1 block of 1 feed added" in cli("lake", "publish", "--lake", lake).ok().out
    found = cli("lake", "stat", "--lake", lake, "--full", "--json").ok().json()
    assert (found["lake_version"], found["checked"], found["damage"], found["small_files"]) == (2, True, [], 2)
    assert found["blocks"] == first["blocks"] + 1
    dry = cli("lake", "compact", "--lake", lake, "--dry-run", "--json").ok().json()
    assert (dry["merge_files"], Lake.open(lake).version()) == (2, 2)
    done = cli("lake", "compact", "--lake", lake, "--keep", "0s", "--json").ok().json()
    assert (done["files_before"], done["files_after"], done["lake_version"]) == (3, 2, 3)
    assert done["deleted_files"] > 0
    assert "everything is as the log says" in cli("lake", "stat", "--lake", lake, "--full").ok().out


def test_errors_of_lakes_are_told_like_all_others(cli: Cli, tmp_path: Path) -> None:
    for arguments, status, what in (
        (("stat", "--lake", str(tmp_path / "none")), 3, "There is no lake"),
        (("compact", "--lake", str(tmp_path / "none")), 3, "There is no lake"),
        (("compact", "--lake", str(tmp_path / "none"), "--keep", "soon"), 2, "not a span"),
        (("publish", "--lake", str(tmp_path / "lake"), "--party", "ffffff"), 3, "no party"),
        (("publish", "--lake", str(cli.home)), 4, "other files"),
        (("publish",), 2, "--lake"),
    ):
        ran = cli("lake", *arguments, "--json")
        assert ran.status == status, ran
        assert what in json.loads(ran.err)["error"]["what"]
    cli("lake", "publish", "--lake", str(tmp_path / "lake")).ok()
    file = next((tmp_path / "lake" / "blocks").rglob("*.parquet"))
    os.truncate(file, 100)
    ran = cli("lake", "stat", "--lake", str(tmp_path / "lake"), "--full")
    assert ran.status == 6
    assert f"DAMAGED  {file}" in ran.out


def test_a_damaged_party_ends_with_status_6_and_the_others_are_there(tmp_path: Path) -> None:
    home = HomeOf(tmp_path / "home")
    for number in (1, 2):
        home.hold(Writer(f"w{number}", party_key(number)), *payloads(50))
    path = home.home.party(party_key(1)).feeds
    raw = bytearray(path.read_bytes())
    raw[raw.find(b"block 30 ")] ^= 1
    path.write_bytes(raw)
    cli = Cli(home.path, tmp_path / "state")
    ran = cli("lake", "publish", "--lake", str(tmp_path / "lake"), "--json")
    assert ran.status == 6
    assert [each["party"] for each in ran.json()["damaged"]] == [party_key(1).hex()]
    assert "not published whole" in ran.err
    assert party_key(2) in {block[0] for block in lake_blocks(Lake.open(tmp_path / "lake"))}
    only = cli("lake", "publish", "--lake", str(tmp_path / "other"), "--party", party_key(2).hex()[:8], "--json")
    assert only.ok().json()["blocks"] == 50


def test_publishing_beside_a_running_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    cli = Cli(tmp_path / "home", tmp_path / "state")
    with echostore.open(tmp_path / "home", name="A", background=False) as peer:
        party = peer.create_party("Trip")
        item = party.create("property-set", n=0)
        for number in range(4):
            item["n"] = number
            party.flush()
            cli("lake", "publish", "--lake", str(tmp_path / "lake")).ok()
        item["unflushed"] = True
        expected = HomeOf(tmp_path / "home").blocks()
        assert set(lake_blocks(Lake.open(tmp_path / "lake"))) == expected


def test_interrupted_publishing_leaves_the_lake_as_it_was(tmp_path: Path) -> None:
    home = HomeOf(tmp_path / "home")
    cli = Cli(home.path, tmp_path / "state")
    home.hold(Writer("first", party_key(0)), *payloads(10))
    cli("lake", "publish", "--lake", str(tmp_path / "lake")).ok()
    for number in range(60):
        home.hold(Writer(f"w{number}", party_key(number + 1)), *payloads(1000, size=100))
    process = cli.start("lake", "publish", "--lake", str(tmp_path / "lake"))
    deadline = time.monotonic() + 60
    while not any((tmp_path / "lake" / "writing").iterdir()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "the lake is as it was" in errors
    assert list((tmp_path / "lake" / "writing").iterdir()) == []
    assert len(lake_blocks(Lake.open(tmp_path / "lake"))) == 10


def test_doctor_checks_java_versions_memory_and_space(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {check["name"]: check for check in cli("doctor", "--json").ok().json()["checks"]}
    assert report["java"]["level"] == report["memory"]["level"] == report["pyspark"]["level"] == "ok"
    assert "found by" in report["java"]["what"]

    def none() -> java.Java:
        raise EngineFailed("There is no Java.", next_step="Install one.")

    monkeypatch.setattr(java, "find_java", none)
    monkeypatch.setattr(session, "free_memory", lambda: 100 << 20)
    monkeypatch.setattr(engine_checkup, "_version", lambda name: {"pyspark": "3.5.1", "pandas": "3.0.0"}.get(name))
    monkeypatch.setenv(session.LOCAL_DIRS, str(tmp_path / "nowhere"))
    found = {finding.name: finding for finding in engine_checkup.engine()}
    assert all(finding.level is Level.WARNING and finding.next_step for finding in found.values()), found
    assert found["java"].next_step == "Install one."
    assert "100.0 MiB" in found["memory"].what
    assert "made for 4.3" in found["pyspark"].what
    assert found["pyarrow"].what == "is not installed"
    monkeypatch.setattr(engine_checkup, "_version", lambda name: None)
    (only,) = engine_checkup.engine()
    assert (only.level, only.next_step) == (Level.OK, "Install the extra `pipeline`.")


def test_help_of_lakes_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom echostore.cli.app import run\n"
        "assert [run(['lake', *verb, '--help']) for verb in ((), ('publish',), ('stat',))] == [0, 0, 0]\n"
        "print([name for name in ('pyarrow', 'numpy', 'pyspark', 'sqlite3', 'nacl') if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"
