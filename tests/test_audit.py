"""The audit of the locked dependencies: a vulnerability fails it, a source out of reach does not and is said."""

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "tools" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def clean(name: str) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": []}


def unknown(name: str) -> dict[str, Any]:
    return {"name": name, "skip_reason": "not found"}


def bad(name: str) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1"]}]}


def answers(**of: Any) -> Callable[[str], str]:
    """What each source says: rows, a text that is no answer, or an error."""

    def ask(source: str) -> str:
        said = of[source]
        if isinstance(said, Exception):
            raise said
        return said if isinstance(said, str) else json.dumps({"dependencies": said})

    return ask


def test_a_vulnerability_is_named_and_fails(audit: ModuleType) -> None:
    said, status = audit.audit(answers(pypi=[clean("a"), bad("b")]))
    assert status == 1
    assert said[0] == "audit: b 1.0 has CVE-1, mended in 1.1"


def test_clean_dependencies_pass(audit: ModuleType) -> None:
    assert audit.audit(answers(pypi=[clean("a")])) == (
        ["audit: 1 locked dependencies audited by pypi, 0 with a vulnerability"],
        0,
    )


@pytest.mark.parametrize(
    "nothing",
    [[unknown("a"), unknown("b")], "", "[]", "{}", OSError("no route"), subprocess.TimeoutExpired("pip-audit", 1)],
    ids=["knows none", "empty", "no object", "no rows", "no program", "too slow"],
)
def test_when_no_source_can_be_reached_one_line_says_so_and_it_passes(audit: ModuleType, nothing: Any) -> None:
    said, status = audit.audit(answers(pypi=nothing, osv=nothing))
    assert status == 0
    assert len(said) == 1
    assert "NOT DONE: no advisory source could be reached" in said[0]


def test_the_next_source_is_asked_when_one_is_out_of_reach(audit: ModuleType) -> None:
    assert audit.audit(answers(pypi=OSError(), osv=[bad("b")]))[1] == 1


def test_what_a_source_does_not_know_is_named(audit: ModuleType) -> None:
    said, status = audit.audit(answers(pypi=[clean("a"), unknown("b")]))
    assert status == 0
    assert said[0] == "audit: pypi does not know 1 of 2: b"


def test_every_change_is_audited() -> None:
    assert "make audit\n" in (ROOT / ".ci" / "run").read_text()
    assert "tools/audit.py" in (ROOT / "Makefile").read_text()
