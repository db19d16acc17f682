"""Files with the content of a party are for their owner alone, whatever the umask says."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_process import Cli
from echostore.peer.transfer import export_party
from two_peers import open_quiet


@pytest.fixture(autouse=True)
def _generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_exported_party_is_private(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        (tmp_path / "trip.car.partial").write_bytes(b"left over by a process that died")
        export_party(party, tmp_path / "trip.car")
    assert mode(tmp_path / "trip.car") == 0o600
    assert not (tmp_path / "trip.car.partial").exists()


def test_the_command_exports_a_private_file(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("party", "create", "Trip").ok()
    cli("party", "export", "@Trip", str(tmp_path / "trip.car")).ok()
    assert mode(tmp_path / "trip.car") == 0o600


def test_a_file_that_was_saved_is_private_and_replaces_another_one(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        photo = party.files.add(b"photo", name="photo")
        (tmp_path / "photo").write_bytes(b"another one")
        party.files.save(photo, tmp_path / "photo")
    assert (tmp_path / "photo").read_bytes() == b"photo"
    assert mode(tmp_path / "photo") == 0o600
    assert not (tmp_path / "photo.part").exists()


def test_all_files_of_a_home_are_private(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        party.create(type="note", n=1)
        party.files.add(b"photo")
        party.snapshot()
        loose = [file for file in (tmp_path / "home").rglob("*") if file.is_file() and mode(file) != 0o600]
    assert loose == []
