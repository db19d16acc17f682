"""How the module for browsers takes and gives values, in Node over a real socket."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from echostore.wire.capabilities import capability_text
from test_thin_browser import HERE, MODULE, node
from thin_server import ThinServer, capability


@pytest.fixture
def module(tmp_path: Path) -> Path:
    copy = tmp_path / "leaf.mjs"
    shutil.copyfile(MODULE, copy)
    return copy


def checked(module: Path, server: ThinServer, check: str) -> Any:
    """What one check of values.mjs found."""
    ran = subprocess.run(
        [
            node(),
            "--experimental-websocket",
            "--no-warnings",
            HERE / "values.mjs",
            module,
            server.url,
            capability_text(capability()),
            check,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    return json.loads(ran.stdout)


def test_the_browser_refuses_changes_of_values_that_were_read(module: Path) -> None:
    with ThinServer() as server:
        messages, values, elements = checked(module, server, "frozen")
    assert all(messages), messages
    assert values == {"tags": ["a", "b"], "m": {"z": [1]}, "n": 1}
    assert elements == [{"a": [1]}]


def test_the_browser_counts_negative_positions_from_the_end(module: Path) -> None:
    with ThinServer() as server:
        text, elements, far = checked(module, server, "positions")
    assert (text, elements) == ("hello", [1, 2, 3])
    assert far == ["the text has 5 characters", "the list has 3 elements"]


def test_the_browser_keeps_properties_of_any_name(module: Path) -> None:
    with ThinServer() as server:
        kind, values, of_link, stray = checked(module, server, "names")
        kept = next(each for each in server.items.values() if each.type == "thing")
    assert kind == "thing"
    assert values == kept.values == {**of_link, "type": "other"}
    assert of_link["type"] == "the type"
    assert "title is not model, type or parent" in stray
