"""The guides' examples run."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def test_the_guide_to_two_peers_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    (example,) = re.findall(r"```python\n(.+?)```", (DOCS / "two-peers.md").read_text(), re.DOTALL)
    exec(compile(example, "two-peers.md", "exec"), {})
    assert "1 new message" in capsys.readouterr().out


def test_the_guide_to_items_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    examples = re.findall(r"```python\n(.+?)```", (DOCS / "items.md").read_text(), re.DOTALL)
    exec(compile("\n".join(examples), "items.md", "exec"), {})


def test_the_guide_to_epochs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    examples = re.findall(r"```python\n(.+?)```", (DOCS / "epochs.md").read_text(), re.DOTALL)
    exec(compile("\n".join(examples), "epochs.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "elect 1000" in printed
    assert "1 0 0" in printed, "one item was left out"
    assert "echo://" in printed
