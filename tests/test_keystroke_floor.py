"""The floor of a keystroke, as the benchmark of the network prints it."""

from pathlib import Path

import pytest

from echostore.bench import keystroke_floor as floors


def test_every_step_of_both_ends_is_in_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "KEYSTROKES", 3)
    monkeypatch.setattr(floors, "PAUSE_S", 0.0)
    floor = floors.keystroke_floor(tmp_path)
    assert list(floor.writer) == [
        *("letter into the text", "its change", "message", "two hashes", "sign", "commit and sync", "encrypt"),
    ]
    assert list(floor.receiver) == ["decrypt", "message", "two hashes", "verify", "commit", "change into the text"]
    assert floor.seconds == sum(floor.writer.values()) + sum(floor.receiver.values()) > 0
