"""The catalogue of planted bugs: each can be planted, and names tests that the map claims for its rule."""

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutants = load()
CATALOGUE = mutants.catalogue()


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda each: f"{each.row} {each.name}")
def test_a_mutant_can_be_planted_and_names_claimed_tests(mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / "src" / mutant.file).read_text())
    mutant.plant(tmp_path)
    compile(copy.read_text(), mutant.file, "exec")
    assert mutant.tests
    assert set(mutant.tests) <= mutants.claimed_tests()[mutant.row], (
        "a test that docs/map.md does not name for the rule"
    )


def test_names_are_unique_and_rows_have_two_or_more() -> None:
    assert len({(each.row, each.name) for each in CATALOGUE}) == len(CATALOGUE)
    counts = Counter(each.row for each in CATALOGUE)
    assert not [row for row, count in counts.items() if count < 2]


def test_every_row_of_the_fault_model_has_mutants() -> None:
    rows = {row for row in mutants.claimed_tests() if re.fullmatch(r"[SNBK]\d+", row)}
    assert rows - {each.row for each in CATALOGUE} == set()


def test_samples_differ_from_commit_to_commit_and_have_their_size() -> None:
    chosen = mutants.sample(CATALOGUE, 3)
    assert len(chosen) == min(3, len(CATALOGUE))
    assert chosen == mutants.sample(CATALOGUE, 3)


def test_a_planted_bug_that_tests_notice_is_killed_and_one_they_miss_survives() -> None:
    kind = type(CATALOGUE[0])
    found = kind(
        "X",
        "lost name",
        "echostore/errors.py",
        '    "NotFound",\n',
        "",
        ("tests/test_public_api.py::test_all_kinds_of_errors_are_exported",),
    )
    assert mutants.run(found, 1) == "killed"
    harmless = kind("X", "comment", "echostore/errors.py", '"""The errors that', '"""The  errors that', found.tests)
    assert mutants.run(harmless, 1) == "survived"
    gone = kind("X", "gone", "echostore/errors.py", "no such line", "", found.tests)
    assert mutants.run(gone, 1).startswith("not planted")
