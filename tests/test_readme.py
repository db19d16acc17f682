"""The README's example runs, and prints what its comments say."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
PRINTS = re.compile(r"^\s*print\(.*\)\s*# (.+)$")


def example() -> str:
    """Return the first Python block of the README."""
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, "the README has no Python example"
    return found.group(1)


def promised(code: str) -> list[str]:
    return [match.group(1).strip() for line in code.splitlines() if (match := PRINTS.match(line))]


def test_the_example_prints_what_it_says(tmp_path: Path) -> None:
    code = example()
    environment = {**os.environ, "ECHOSTORE_STATE": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == promised(code)
    assert (tmp_path / "laptop-data" / "meta.db").exists()


def test_every_print_of_the_example_makes_a_promise() -> None:
    code = example()
    assert len(promised(code)) == code.count("print(") >= 5


def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    section = README.read_text(encoding="utf-8").partition("## On the command line")[2].partition("\n## ")[0]
    lines = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    assert 5 <= len(lines) <= 7
    script = "set -e\n" + "\n".join(
        line.replace("echostore ", f"'{sys.executable}' -m echostore ", 1) if line.startswith("echostore ") else line
        for line in lines
    )
    environment = {**os.environ, "ECHOSTORE_STATE": str(tmp_path / "state")}
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tickets" in done.stdout, "the query finds the task"
    assert "Road trip" in done.stdout.splitlines()[-1], "the status names the party"
