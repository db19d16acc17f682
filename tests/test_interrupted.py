"""^C: exit status 130, a line at most, and nothing that is left lying about."""

import gc
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import echostore
from echostore.kernel.errors import Closed
from echostore.kernel.ids import Cid
from echostore.wire.cids import RAW, cid_of

EARLY = """
import builtins, os, signal, sys
real = builtins.__import__
def interrupted(name, *rest, **named):
    if name == "echostore.cli.app":
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **named)
signal.signal(signal.SIGINT, signal.default_int_handler)
builtins.__import__ = interrupted
from echostore.cli import main
main()
"""
LATE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from echostore.cli import main
sys.argv = ["echostore", "--version"]
try:
    main()
finally:
    os.kill(os.getpid(), signal.SIGINT)
"""


def ran(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)


def test_while_modules_are_loaded_it_ends_quietly() -> None:
    done = ran(EARLY)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_after_the_command_its_status_stands() -> None:
    done = ran(LATE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_closing_ends_a_fetch_that_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    peer = echostore.open(tmp_path / "home", background=False)
    party = peer.create_party("T")
    ended: list[Exception] = []
    begun = threading.Event()

    def fetch() -> None:
        begun.set()
        try:
            network.fetch(party.key, [Cid(cid_of(b"nobody has it", RAW))], patience_s=600)
        except Closed as closed:
            ended.append(closed)

    network = peer.network
    waiting = threading.Thread(target=fetch, daemon=True)
    waiting.start()
    begun.wait()
    while not network.blobs._fetching:
        assert waiting.is_alive()
    with caplog.at_level(logging.ERROR, "asyncio"):
        peer.close()
        waiting.join(30)
        gc.collect()
    assert [type(error) for error in ended] == [Closed]
    assert not caplog.records, "a task was left to be destroyed"
