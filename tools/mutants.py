"""Plant the catalogued bugs one by one, and see the tests fail that docs/map.md names for the rule they break.

    python tools/mutants.py                 all of them
    python tools/mutants.py --row B15 S3    those of some rules
    python tools/mutants.py --sample 4      a few, another few for each commit
    python tools/mutants.py --list          what there is

A mutant is a text edit in tests/mutants/*.toml: a file below src, the lines that are there, the lines that stand there
instead, and the tests that have to notice. The edit is made in a copy of src; the tests run against the copy. A mutant that
no test notices is a survivor, and so is one whose lines are not found any more: the exit status is 1 then.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CATALOGUE = ROOT / "tests" / "mutants"
MAP = ROOT / "docs" / "map.md"
TIMEOUT_S = 600
"""For the tests of one mutant: a bug may also make them hang."""


@dataclass(frozen=True)
class Mutant:
    """One planted bug."""

    row: str
    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def plant(self, source: Path) -> None:
        """Make the edit below a copy of src; ValueError when its lines are not there exactly once."""
        path = source / self.file
        text = path.read_text()
        if text.count(self.find) != 1:
            raise ValueError(f"{self.file} has the lines of {self.row} {self.name!r} {text.count(self.find)} times")
        path.write_text(text.replace(self.find, self.replace))


def catalogue() -> list[Mutant]:
    """All mutants, in the order of their files."""
    found = []
    for path in sorted(CATALOGUE.glob("*.toml")):
        for each in tomllib.loads(path.read_text())["mutant"]:
            found.append(Mutant(**{**each, "tests": tuple(each["tests"])}))
    return found


def claimed_tests() -> dict[str, set[str]]:
    """The tests that docs/map.md names, by the first column of their rows."""
    found: dict[str, set[str]] = {}
    for line in MAP.read_text().splitlines():
        if line.startswith("| "):
            found.setdefault(line.split("|")[1].strip(), set()).update(re.findall(r"`(tests/[^`]+::[^`]+)`", line))
    return found


def sample(mutants: list[Mutant], count: int) -> list[Mutant]:
    """A few of them, chosen by the commit: all come round as commits do."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    seed = done.stdout.strip() or "none"
    return sorted(mutants, key=lambda each: hashlib.sha256(f"{seed} {each.row} {each.name}".encode()).digest())[:count]


def run(mutant: Mutant, jobs: int) -> str:
    """Plant one and run its tests: "killed", "survived" or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="echostore-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        try:
            mutant.plant(source)
        except (ValueError, OSError) as error:
            return f"not planted: {error}"
        arguments = ["-q", "-x", "-p", "no:cacheprovider", *(["-n", str(jobs)] if jobs > 1 else [])]
        environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *arguments, *mutant.tests],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "killed (the tests hang)"
        if done.returncode == 1:
            return "killed"
        return (
            "survived" if done.returncode == 0 else f"the tests did not run: {done.stdout[-300:]}{done.stderr[-300:]}"
        )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--row", nargs="+", default=[], help="only of these rows of the map")
    options.add_argument("--sample", type=int, help="so many, chosen by the commit")
    options.add_argument("--jobs", type=int, default=1, help="processes of one test run")
    options.add_argument("--list", action="store_true", help="name them, and plant none")
    given = options.parse_args()
    mutants = [each for each in catalogue() if not given.row or each.row in given.row]
    if given.sample is not None:
        mutants = sample(mutants, given.sample)
    if not mutants:
        sys.exit("mutants: there is none of these")
    if given.list:
        for each in mutants:
            print(f"{each.row:<4} {each.name}")
        return 0
    failed = 0
    for number, each in enumerate(mutants, 1):
        began = time.monotonic()
        result = run(each, given.jobs)
        failed += not result.startswith("killed")
        print(
            f"mutants: {number} of {len(mutants)}  {each.row:<4} {each.name}: {result} ({time.monotonic() - began:.0f} s)"
        )
        sys.stdout.flush()
    print(f"mutants: {len(mutants) - failed} killed, {failed} not")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
