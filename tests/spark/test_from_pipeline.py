"""`epoch create --from-pipeline`, from outside: what Spark built becomes an epoch of the party."""

import json
from pathlib import Path
from typing import Any

import pytest

from echostore.cli.app import run as run_command


def test_a_peer_declares_what_the_pipeline_built_while_the_party_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shared_session: Any
) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    home, lake, out = (str(tmp_path / name) for name in ("home", "lake", "out"))

    def told(*arguments: str, status: int = 0) -> Any:
        assert run_command([*arguments, "--home", home, "--json"]) == status, capsys.readouterr().err
        shown = capsys.readouterr()
        return json.loads((shown.out or shown.err).splitlines()[-1])

    told("init", "--name", "Ann")
    told("party", "create", "Trip")
    told("item", "create", "property-set", "--type", "task", "text=tickets")
    create = ("epoch", "create", "--from-pipeline", out)
    assert told(*create, status=3)["error"]["code"] == "E-NOT-FOUND"
    told("lake", "publish", "--lake", lake)
    assert run_command(["pipeline", "run", "--lake", lake, "--out", out, "--json"]) == 0
    [built] = json.loads(capsys.readouterr().out.splitlines()[-1])["parties"]
    first = built["cid"]
    assert told("party", "show", "--snapshot")["snapshot"] == first, "Spark's CID is the peer's"
    assert told(*create, "--discard-before", "1d", status=2)["error"]["code"] == "E-USAGE"

    told("item", "create", "text", "one more")  # the party goes on meanwhile
    told(*create)
    [epoch] = told("epoch", "list")["epochs"]
    assert (epoch["number"], epoch["cid"], epoch["final"]) == (1, first, True)
    assert told("epoch", "verify", "1")["verdict"] == "attested"
    assert first in {blob["cid"] for blob in told("blob", "list")["blobs"]}, "its blobs are here"
    assert told("party", "show", "--snapshot")["snapshot"] != first, "what was written since is there too"
