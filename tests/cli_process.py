"""The command line as tests run it: the real one in a process of its own, or in this process where many cases are tried."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from echostore.cli.app import run

TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    def ok(self) -> "Ran":
        assert self.status == 0, self
        return self


@dataclass(frozen=True, slots=True)
class Cli:
    """Commands on one home, with an instance record of their own."""

    home: Path
    state: Path

    def environment(self, **more: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in ("ECHOSTORE_HOME", "NO_COLOR")}
        return {**kept, "ECHOSTORE_STATE": str(self.state), **more}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "echostore", *arguments, "--home", str(self.home)]

    def __call__(self, *arguments: str, stdin: str = "") -> Ran:
        """Run a command in this process: the same function that the command is, without the start of an interpreter."""
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
        with (
            mock.patch.dict(os.environ, self.environment(), clear=True),
            mock.patch("sys.stdin", io.StringIO(stdin)),
            contextlib.redirect_stdout(streams[0]),
            contextlib.redirect_stderr(streams[1]),
        ):
            status = run(self._words(arguments))
        for stream in streams:
            stream.seek(0)
        out, err = (stream.read() for stream in streams)
        assert "Traceback" not in err, err
        return Ran(status, out, err)

    def process(self, *arguments: str, stdin: str | None = None) -> Ran:
        """Run a command as a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "echostore", *self._words(arguments)],
            env=self.environment(),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Ran(done.returncode, done.stdout, done.stderr)

    def _words(self, arguments: tuple[str, ...]) -> list[str]:
        """The command line with this home, put before content that is literal."""
        at = arguments.index("--") if "--" in arguments else len(arguments)
        return [*arguments[:at], "--home", str(self.home), *arguments[at:]]

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A suite that was started in the background ignores ^C; what it starts here must not.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
