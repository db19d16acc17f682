"""The module for browsers, in Node: the same bytes and the same conclusions as the Python machines, then a real socket."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import echostore
import echostore.thin.browser
from echostore.wire.capabilities import capability_text
from leaf_vectors import vectors
from thin_server import ThinServer, capability

HERE = Path(__file__).parent / "browser"
MODULE = Path(echostore.thin.browser.__file__).parent / "echostore-leaf.js"
NODE_MAJOR = 20


def node() -> str:
    """The Node.js that runs these tests; they fail, with what to do, where there is none."""
    found = os.environ.get("ECHOSTORE_NODE") or shutil.which("node")
    if found is None:
        pytest.fail(
            f"Node.js {NODE_MAJOR} or later runs the tests of the browser's leaf, and there is none: "
            "install it ('apt install nodejs', 'brew install node', nodejs.org) or name it in ECHOSTORE_NODE."
        )
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    major = re.match(r"v(\d+)", version)
    if major is None or int(major[1]) < NODE_MAJOR:
        pytest.fail(f"Node.js {NODE_MAJOR} or later runs these tests, and {found} is {version.strip()}.")
    return found


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A copy with the ending by which Node knows a module."""
    copy = tmp_path / "leaf.mjs"
    shutil.copyfile(MODULE, copy)
    return copy


def test_bytes_and_conclusions_are_those_of_the_python_machines(module: Path, tmp_path: Path) -> None:
    data = tmp_path / "vectors.json"
    data.write_text(json.dumps(vectors()))
    ran = subprocess.run(
        [node(), HERE / "vectors.mjs", module, data], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout[-6000:]
    checks = re.search(r"(\d+) checks", ran.stdout)
    assert checks is not None
    assert int(checks[1]) > 4000


def test_the_whole_module_over_a_real_socket(module: Path) -> None:
    with ThinServer() as server:
        server.create("task", title="at the root", done=False)
        cap = capability()
        told = Told([node(), "--experimental-websocket", HERE / "story.mjs", module, server.url, capability_text(cap)])
        try:
            _story(told, server)
        finally:
            told.end()


def _story(told: "Told", server: ThinServer) -> None:
    assert told.next() == ["read", ["at the root"]]
    kind, ahead, pending, contents, system = told.next()
    assert (kind, ahead, pending) == ("written", ["at the root", "js"], 0)
    assert contents == ["\N{GRINNING FACE} Jello", ["one", 2, 3], 1]
    by_type = {each.type: each for each in server.items.values()}
    assert by_type["note"].values == {"value": contents[0]}
    assert by_type["list"].values == {"value": contents[1]}
    assert by_type["about"].values == {"weight": 3}
    assert by_type["about"].target == by_type["note"].item
    assert told.next() == ["one state", [["at the root", "js"], contents[0]]]
    assert told.next() == ["offline?"]
    applied = len(server.kept.applied)
    assert told.next() == ["offline", ["at the root", "js", "offline"], False]
    assert told.next() == ["back", ["at the root", "js", "offline"], 0]
    assert len(server.kept.applied) == len(set(server.kept.applied)) == applied + 4
    assert told.next() == ["services", [["printer", "0102"]], ["to myself"]]
    kind, titles, again, seen = told.next()
    assert (kind, titles, again) == ("again", ["at the root", "js", "offline"], system)
    assert seen[-1] == titles
    assert ["at the root", "js"] in seen
    assert told.next() == ["refused", "not-allowed", 1]
    assert told.next() == ["wrong", "E-USAGE"]


def test_seals_are_checked_in_the_browser_too(module: Path, tmp_path: Path) -> None:
    with echostore.open(tmp_path / "home", name="Root") as peer:
        party = peer.create_party("Sealed")
        for title in ("truth", "water"):
            party.create(type="task", title=title)
        given = party.capability(read="*", write="*").text
        url = peer.serve_thin("127.0.0.1:0")
        ran = subprocess.run(
            [node(), "--experimental-websocket", "--no-warnings", HERE / "sealed.mjs", module, url, given],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr[-2000:]
    assert json.loads(ran.stdout) == ["ok", 12]


class Told:
    """A program that says what it does in lines of JSON, and waits for a line after each."""

    def __init__(self, command: list[Any]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.waits = False

    def next(self) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.waits:
            self.process.stdin.write("null\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            pytest.fail(f"it ended: {self.process.stderr.read()[-4000:]}")
        self.waits = True
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
