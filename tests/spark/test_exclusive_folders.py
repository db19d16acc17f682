"""Lakes and outputs lie where a name can be taken once and for all; elsewhere they are refused before any work."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.errors import Refused, StorageFailed, UsageError
from echostore.pipeline.lake import Lake
from echostore.pipeline.output.attempt import Attempt
from echostore.pipeline.run import RunRequest, plan_run


@pytest.mark.parametrize(
    "address", ["s3://bucket/lake", "s3a:/bucket/lake", "hdfs://name:9000/lake", "file:///tmp/lake"]
)
def test_addresses_of_stores_are_refused_and_nothing_is_made(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (address, Path(address)):
        with pytest.raises(UsageError, match="the lake is a folder"):
            Lake.create(given)
        with pytest.raises(UsageError, match="the lake is a folder"):
            Lake.open(given)
        with pytest.raises(UsageError, match="output is a folder"):
            Attempt.begin(Path(given))
        with pytest.raises(UsageError, match="output is a folder"):
            plan_run(RunRequest(lake=tmp_path, out=Path(given)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_refused_before_any_work(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(Refused, match="without hard links"):
        Lake.create(tmp_path / "lake")
    with pytest.raises(Refused, match="without hard links"):
        Attempt.begin(tmp_path / "out")
    assert not (tmp_path / "lake" / "log").exists(), "no lake"
    assert not list((tmp_path / "out" / "commits").iterdir())
    monkeypatch.undo()
    assert Lake.create(tmp_path / "lake").version() == 0
    with Attempt.begin(tmp_path / "out"):
        assert not list((tmp_path / "out" / "commits").iterdir())


def test_a_full_disk_is_no_lack_of_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StorageFailed):
        Lake.create(tmp_path / "lake")
