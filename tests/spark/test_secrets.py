"""What Spark gets to see (FAULTS X8, K4): no secret key, and of a pickle only that it is no message."""

import base64
import pickle
from pathlib import Path
from typing import Any

from echostore.pipeline.lake.publish import publish
from echostore.pipeline.run import RunRequest
from echostore.store.key_store import KeyStore
from peer_builder import Circle, Liar
from spark.engines import Engines


class Payload:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.marker,)


def test_no_secret_reaches_spark_and_no_pickle_is_opened(engines: Engines, tmp_path: Path) -> None:
    marker = tmp_path / "opened"
    with Circle(tmp_path, "ann", "bob") as circle:
        party = circle.party("ann")
        party.create("property-set", type="task", n=1)
        party.create("text").insert(0, "hello")
        circle.meet_all()
        evil = pickle.dumps(Payload(marker))
        liar = Liar.of(circle, "bob")
        liar.send(evil)
        party.flush()
        cid, rejected = party.snapshot().cid, party.rejected()
        publish(tmp_path / "ann", tmp_path / "lake")
    assert [str(reject.reason) for reject in rejected] == ["invalid"]

    result = engines.run(RunRequest(lake=tmp_path / "lake", out=tmp_path / "out"))
    assert [built.cid for built in result.results()] == [cid]
    assert not marker.exists()

    stores = [KeyStore.open(tmp_path / home / "keys") for home in ("ann", "bob")]
    secrets = [store.key(own.public).seed for store in stores for own in store.own()]
    assert len(secrets) >= 6
    shapes = [shape for seed in secrets for shape in (seed, seed.hex().encode(), base64.b64encode(seed)[:40])]
    local = [Path(folder) for folder in engines.session.conf.get("spark.local.dir", "").split(",") if folder]
    searched = 0
    for folder in (tmp_path / "lake", tmp_path / "out", *local):
        for file in (path for path in folder.rglob("*") if path.is_file()):
            data = file.read_bytes()
            searched += len(data)
            assert not any(shape in data for shape in shapes), file
    assert searched > 10_000
    assert any(shape in (tmp_path / "ann" / "keys").read_bytes() for shape in shapes), "the search finds a key"
