"""`echostore serve` as tests run it: a process of its own on the loopback, and commands on its home."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli_process import Cli

PATIENCE_S = 30.0


def until(condition: Callable[[], Any], *, seconds: float = PATIENCE_S) -> Any:
    """Wait for something to become true; it must within the time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


class Serve:
    """A running service."""

    def __init__(self, cli: Cli, *arguments: str) -> None:
        self.cli = cli
        self.arguments = arguments
        self.log = cli.home.parent / f"{cli.home.name}.log"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "echostore",
                    "serve",
                    "--json",
                    "--log",
                    "json",
                    *arguments,
                    "--home",
                    str(cli.home),
                ],
                env=cli.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # A suite that was started in the background ignores ^C; what it starts here must not.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.told: dict[str, Any] = json.loads(line)
        self.address: str = self.told["addresses"][0]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        status = self.process.wait(timeout=PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def events(self) -> list[dict[str, Any]]:
        """The log."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def serve(folder: Path, name: str, *arguments: str, listen: str = "127.0.0.1:0") -> Iterator[Serve]:
    """A service on a home below a folder, stopped at the end."""
    cli = Cli(folder / name, folder / "state")
    running = Serve(cli, "--listen", listen, *(() if cli.home.exists() else ("--name", name)), *arguments)
    try:
        yield running
    finally:
        running.stop()


def cid(cli: Cli, party: str) -> str:
    """The CID of a party's state, as the command tells it."""
    found: str = cli("party", "show", party, "--snapshot", "--json").ok().json()["snapshot"]
    return found


def agreed(party: str, *clis: Cli) -> str:
    """All homes come to the same state."""
    until(lambda: len({cid(cli, party) for cli in clis}) == 1)
    return cid(clis[0], party)


def let_in(host: Serve, party: str, guest: Serve, *options: str) -> None:
    """A guest joins by ticket and passcode, by the command line on both sides."""
    told = host.cli("party", "invite", party, "--json", *options).ok().json()
    secret = ("--passcode", told["passcode"]) if told["passcode"] else ()
    guest.cli("party", "join", told["ticket"], *secret, "--json").ok()
