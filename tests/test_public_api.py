"""What a program imports, and what the package says of itself."""

import email
import subprocess
import sys
from pathlib import Path

import pytest

import echostore
from echostore import errors
from echostore.kernel.errors import EchoError

ROOT = Path(__file__).parent.parent

BUILT_INS = {
    errors.UsageError: ValueError,
    errors.NotFound: LookupError,
    errors.Refused: PermissionError,
    errors.SchemaViolation: ValueError,
    errors.TooLarge: ValueError,
    errors.TimedOut: TimeoutError,
    errors.Compacted: LookupError,
}


def test_every_public_name_can_be_imported() -> None:
    for name in echostore.__all__:
        assert getattr(echostore, name) is not None, name
    for name in ("Query", "Snapshot", "PropertySetItem", "ArrayItem", "TextItem", "LogItem", "CustomItem", "errors"):
        assert name in echostore.__all__


@pytest.mark.parametrize("kind", BUILT_INS)
def test_errors_are_built_in_errors_too(kind: type[EchoError]) -> None:
    error = kind("it failed", next_step="Try again.")
    assert isinstance(error, BUILT_INS[kind])
    assert (error.what, error.next_step) == ("it failed", "Try again.")
    assert str(error) == "it failed. Try again."


def test_all_kinds_of_errors_are_exported() -> None:
    def kinds(kind: type[EchoError]) -> set[type[EchoError]]:
        return {kind}.union(*(kinds(each) for each in kind.__subclasses__()))

    missing = {kind.__name__ for kind in kinds(EchoError) if kind.__module__ == "echostore.kernel.errors"} - {
        *errors.__all__,
        "DamagedHere",
    }
    assert not missing


def test_errors_reach_a_program_as_built_in_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with echostore.open(tmp_path / "home", background=False) as peer:
        party = peer.create_party("Trip")
        with pytest.raises(LookupError):
            party.get("0" * 32)
        with pytest.raises(ValueError, match="not"):
            party.query(type=5)  # type: ignore[arg-type]  # that is the point
        with pytest.raises(TimeoutError):
            party.flush().wait(held_by=2, timeout=0.01)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_text("x")
    with pytest.raises(PermissionError):
        echostore.open(tmp_path / "other")


def test_the_wheel_says_what_it_is(tmp_path: Path) -> None:
    script = (
        "import setuptools.build_meta as build, sys, os\n"
        "os.chdir(sys.argv[1]); print(build.prepare_metadata_for_build_wheel(sys.argv[2]))"
    )
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    (copy / "src" / "echostore").mkdir(parents=True)
    (copy / "src" / "echostore" / "__init__.py").touch()
    made = subprocess.run(
        [sys.executable, "-c", script, str(copy), str(tmp_path)], check=True, capture_output=True, text=True
    )
    folder = tmp_path / made.stdout.splitlines()[-1]
    told = email.message_from_string((folder / "METADATA").read_text())
    assert told["License-Expression"] == "MIT"
    assert told["License-File"] == "LICENSE"
    assert told["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    assert "two commands" in told.get_payload() or "make demo" in told.get_payload()
