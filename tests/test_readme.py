"""The README's blocks run one after another in one shell, and print what they say."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTS = re.compile(r"^\s*print\(.*\)\s*# (.+)$")


def blocks() -> list[tuple[str, str]]:
    """The blocks that run, in their order: language and content."""
    return BLOCK.findall(README.read_text(encoding="utf-8"))


def example() -> str:
    (code,) = [content for language, content in blocks() if language == "python"]
    return code


def promised(code: str) -> list[str]:
    return [match.group(1).strip() for line in code.splitlines() if (match := PRINTS.match(line))]


def script() -> str:
    """All blocks as one script. A Python block is the file that the text before it names."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for number, (language, content) in enumerate(blocks()):
        if language == "sh":
            lines.append(f"echo '=== block {number}'\n{content}")
        else:
            lines.append(f"cat > trip.py <<'END_OF_BLOCK'\n{content}END_OF_BLOCK")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What each block of commands printed."""
    folder = tmp_path_factory.mktemp("readme")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ECHOSTORE_")},
        "ECHOSTORE_STATE": str(folder / "state"),
        "TMPDIR": str(folder),
        "PYTHONWARNINGS": "error",
    }
    done = subprocess.run(
        ["bash", "-c", script()], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=230, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts = re.split(r"^=== block (\d+)\n", done.stdout, flags=re.MULTILINE)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


def printed(ran: dict[int, str], command: str) -> str:
    """What the block printed that holds a command."""
    (number,) = [number for number, (_, content) in enumerate(blocks()) if command in content]
    return ran[number]


def test_the_example_prints_what_it_says(ran: dict[int, str]) -> None:
    code = example()
    assert printed(ran, "python trip.py").splitlines() == promised(code)
    assert len(promised(code)) == code.count("print(") >= 5


def test_commands_see_what_the_program_wrote(ran: dict[int, str]) -> None:
    out = printed(ran, "echostore item create")
    assert "tickets" in out
    assert "pack the tent" in out
    assert "Road trip" in out.splitlines()[-1], "the status names the party"


def test_a_guest_gets_what_the_host_has(ran: dict[int, str]) -> None:
    out = printed(ran, "echostore party join")
    assert "tickets" in out
    assert "pack the tent" in out


def test_a_capability_is_printed(ran: dict[int, str]) -> None:
    assert printed(ran, "echostore party capability issue").strip()


def test_the_pipeline_ends_in_tables(ran: dict[int, str]) -> None:
    out = printed(ran, "echostore pipeline run")
    assert "pack the tent" in out
    assert "baf" in out, "a CID"
