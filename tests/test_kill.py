"""FAULTS S6: a real process killed at a random moment loses nothing that it acknowledged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 100
HERE = Path(__file__).parent


@pytest.mark.timeout(620)
def test_a_hundred_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    environment = {**os.environ, "ECHOSTORE_STATE": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, str(HERE / "kill_rounds.py"), str(tmp_path), str(KILLS), "7"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [outcome for outcome in rounds if not outcome["ok"]] == []
    assert len(rounds) == KILLS
    assert rounds[-1]["n"] > 0, "the victims got to write"
