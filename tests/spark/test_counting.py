"""Steps over small tables, without Spark: what changed, what counts, what is carried on, who is stale."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from echostore.kernel.errors import Corrupt, EngineFailed, UsageError
from echostore.pipeline import kept
from echostore.pipeline.building import Built
from echostore.pipeline.clock import Clock
from echostore.pipeline.counting import MOVED, Comparing, Counting, differences
from echostore.pipeline.engine_errors import of_a_party
from echostore.pipeline.generate.lakes import generate
from echostore.pipeline.generate.shape import Shape
from echostore.pipeline.lake import Lake
from echostore.pipeline.models import known_models, model_factory
from echostore.pipeline.output.record import Commit, CommitLost, LakePoint, NamedFile
from echostore.pipeline.output.results import ABSTAINED, BUILT, PartyResult
from echostore.pipeline.parties import chosen_parties
from echostore.pipeline.rejecting import _still_counting
from echostore.pipeline.run import _all_files, _halves
from echostore.pipeline.stages.by_party import run_by_party
from echostore.pipeline.staleness import _models_differ
from echostore.wire.cids import PROTOBUF, cid_of, cid_text
from echostore.wire.generated import credential_pb2 as credentials

PARTY, FEED, OTHER = b"p" * 32, b"f" * 32, b"g" * 32


def interval(start: int, end: int | None, role: str | None = "editor") -> dict[str, Any]:
    return {"start": start, "end": end, "role": role}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([interval(0, None)], [interval(0, None)], []),
        ([interval(0, None)], [interval(0, 4)], [(4, 10)]),
        ([interval(0, 4)], [interval(0, None)], [(4, 10)]),
        ([interval(0, None)], [interval(0, 12)], []),
        ([], [interval(0, None, "reader")], []),
        ([interval(0, None, "reader")], [interval(3, None)], [(3, 10)]),
        ([interval(0, None, "editor")], [interval(0, None, "admin")], [(0, 10)]),
        ([interval(0, 2), interval(5, None)], [interval(0, None)], [(2, 5)]),
    ],
)
def test_where_standing_differs(old: list[Any], new: list[Any], expected: list[tuple[int, int]]) -> None:
    assert differences(old, new, 10) == expected


def table(rows: list[dict[str, Any]], **types: pa.DataType) -> pa.Table:
    return pa.Table.from_pylist(rows, pa.schema(types))


CUT = {"party": pa.binary(), "feed": pa.binary(), "length": pa.int64(), "link": pa.binary()}
STANDING = {"party": pa.binary(), "feed": pa.binary(), "start": pa.int64(), "end": pa.int64(), "role": pa.string()}


def compared(before: int, now: int | None, *, link: bytes = b"a", forked: bool = False, end: int | None = None) -> Any:
    cut = {"party": PARTY, "feed": FEED, "link": b"a"}
    standing = {"party": PARTY, "feed": FEED, "role": "editor", "start": 0}
    parts = {
        "cut_before": table([{**cut, "length": before}], **CUT),
        "cut": table([] if now is None else [{**cut, "length": now, "link": link}], **CUT),
        "admission_before": table([{**standing, "end": None}], **STANDING),
        "admission": table([{**standing, "end": end}], **STANDING),
    }
    step = Comparing(frozenset({(PARTY, FEED)}) if forked else frozenset())
    rows = run_by_party(None, parts, step, MOVED, 0).to_pylist()
    return [(row["start"], row["end"], row["lost"]) for row in rows]


def test_a_feed_that_lost_ground_is_told() -> None:
    lost = (0, 0, True)
    assert compared(5, 5) == compared(5, 9) == []
    assert compared(5, 4) == compared(5, None) == [lost]
    assert compared(5, 5, link=b"b") == [lost]
    assert compared(5, 9, forked=True) == [lost]
    assert compared(5, 5, forked=True) == []
    assert compared(0, None) == []
    assert compared(5, 9, end=3) == [(3, 5, False)]


ABOUT = {"party": pa.binary(), "root_party": pa.binary(), "title": pa.string()}
HELD = {**CUT, "held": pa.int64(), "state": pa.string()}
STRETCH = {"party": pa.binary(), "feed": pa.binary(), "start": pa.int64(), "end": pa.int64()}
PLACE = {"party": pa.binary(), "feed": pa.binary(), "seq": pa.int64()}
ROOT = {
    "party": pa.binary(),
    "cid": pa.binary(),
    "bytes": pa.binary(),
    "items": pa.int64(),
    "models": pa.string(),
    "unknown": pa.string(),
    "problem": pa.string(),
}
LAST = {"party": pa.binary(), "epoch": pa.int64(), "cid_before": pa.string(), "since": pa.int64()}
CID = cid_of(b"root", PROTOBUF)


def counted(*, last: dict[str, Any] | None = None, anew: bool = False, **root: Any) -> dict[str, Any]:
    def feed(key: bytes, length: int, held: int, state: str) -> dict[str, Any]:
        return {"party": PARTY, "feed": key, "length": length, "held": held, "state": state, "link": b""}

    def standing(key: bytes, start: int, end: int | None, role: str | None) -> dict[str, Any]:
        return {"party": PARTY, "feed": key, "start": start, "end": end, "role": role}

    said = {"cid": CID, "bytes": b"root", "items": 3, "models": "property-set@1", "unknown": "", "problem": ""}
    parts = {
        "about": table([{"party": PARTY, "root_party": PARTY, "title": "Trip"}], **ABOUT),
        # 10 of 14 are processed, of these 2 are a reader's; 4 wait. The other feed ended after 3 of 8.
        "cut": table([feed(FEED, 10, 14, "waiting"), feed(OTHER, 3, 8, "ended")], **HELD),
        "admission": table(
            [
                standing(FEED, 0, 8, "editor"),
                standing(FEED, 8, None, "reader"),
                standing(OTHER, 0, None, "admin"),
            ],
            **STANDING,
        ),
        "outside": table([{"party": PARTY, "feed": OTHER, "start": 8, "end": 10}], **STRETCH),
        "branch": table([{"party": PARTY, "feed": FEED, "start": 5, "end": 6}], **STRETCH),
        "control_cut": table([{"party": PARTY, "feed": b"c" * 32, "length": 2, "link": b"l" * 32}], **CUT),
        "malformed": table([{"party": PARTY, "feed": FEED, "seq": 1}] * 2, **PLACE),
        "root": table([{"party": PARTY, **said, **root}], **ROOT),
        "last": table([] if last is None else [{"party": PARTY, **last}], **LAST),
    }
    step = Counting(4, "", frozenset({PARTY} if anew else ()))
    [row] = run_by_party(None, parts, step, _parties(), 0).to_pylist()
    return dict(row)


def _parties() -> pa.Schema:
    from echostore.pipeline.output.table_schemas import PARTIES

    return PARTIES


def test_every_block_is_counted_once() -> None:
    row = counted()
    assert (row["applied"], row["waiting"]) == (8 + 3 - 1, 4)
    assert row["rejected"] == 2 + 5 + 2 + 1 + 1
    assert row["messages"] == 14 + 8 + 2 + 1 == row["applied"] + row["rejected"] + row["waiting"]
    assert (row["state"], row["items"], row["cid"], row["built"]) == (BUILT, 3, cid_text(CID), 4)
    said = credentials.EpochGenesis.FromString(row["control"])
    assert [(entry.feed_key, entry.seq) for entry in said.control_timeframe] == [(b"c" * 32, 1)]


def test_an_epoch_is_counted_when_the_snapshot_changed() -> None:
    before = {"epoch": 7, "cid_before": "another", "since": 2}
    assert (counted()["epoch"], counted()["since"]) == (1, 4)
    assert (counted(last=before)["epoch"], counted(last=before)["since"]) == (8, 2)
    assert counted(last={**before, "cid_before": cid_text(CID)})["epoch"] == 7
    assert counted(last=before, anew=True)["since"] == 4
    assert counted(last={**before, "since": 0})["since"] == 4


def test_without_a_model_no_cid_is_given() -> None:
    row = counted(unknown="gadget@1", last={"epoch": 7, "cid_before": "x", "since": 1})
    assert (row["state"], row["cid"], row["epoch"]) == (ABSTAINED, None, 7)
    assert "gadget@1" in row["detail"]
    assert counted(cid=None, problem="too large")["state"] == "failed"


def test_which_rejects_are_carried_on() -> None:
    row = {"party": PARTY, "feed": FEED[:8], "reason": "x", "detail": "", "item": None, "commit": 1, "lasting": True}
    rows = [
        {**row, "seq": 1, "position": -1},
        {**row, "seq": 4, "position": -1},
        {**row, "seq": 4, "position": 0, "item": b"i" * 16},
        {**row, "seq": 5, "position": 0, "item": b"j" * 16},
        {**row, "seq": 6, "position": -1, "lasting": False},
    ]
    moved = table([{"party": PARTY, "feed": FEED, "start": 3, "end": 5}], **STRETCH)
    before = pa.Table.from_pylist(rows, kept.KEPT_REJECTS)
    left = _still_counting(before, moved, {(PARTY, b"j" * 16)}).to_pylist()
    assert [(each["seq"], each["position"]) for each in left] == [(1, -1), (4, 0)]


def file(name: str, number: int = 1) -> NamedFile:
    digest = (name * 64)[:64]
    return NamedFile(f"epoch={number}/attempt={'0' * 32}/moves/{digest}.parquet", digest, 1, 1)


def test_files_that_were_written_anew_replace_those_before() -> None:
    a, b, c, d = (file(name) for name in "abcd")
    anew, fresh = file("e", 2), file("f", 2)
    base = Commit(
        number=1, previous="", attempt=uuid4(), created_ms=1, lake=LakePoint(1, ""), files={"moves": (a, b), "cuts": (c,)}
    )  # fmt: skip
    job = SimpleNamespace(base=base, before=lambda kind: base.files.get(kind, ()))
    builds = [
        Built({"moves": [fresh]}, {"moves": (a, anew)}, frozenset()),
        Built({"moves": [d]}, {}, frozenset()),
    ]
    found = _all_files(job, builds)  # type: ignore[arg-type]  # only these two are looked at
    assert found["moves"] == [a, anew, fresh, d]
    assert found["cuts"] == [c]


def result(models: str, state: str = BUILT) -> PartyResult:
    counts = dict.fromkeys(("messages", "applied", "rejected", "waiting", "items", "epoch"), 0)
    rest = {"since": 1, "built": 1, "commit": 1, "cid": None}
    return PartyResult(party=PARTY, root_party=PARTY, state=state, models=models, **counts, **rest)  # type: ignore[arg-type]


def test_a_party_is_built_anew_when_what_is_known_of_its_models_changes() -> None:
    base = SimpleNamespace(settings={"known_models": ["property-set@1", "tally@1"]})
    for models, known, expected in (
        ("property-set@1", ["property-set@1"], False),
        ("tally@1", ["property-set@1"], True),
        ("tally@1", ["property-set@1", "tally@1"], False),
        ("gadget@1", ["property-set@1", "tally@1", "gadget@1"], True),
        ("", ["property-set@1"], False),
    ):
        assert _models_differ(result(models), base, known) is expected, (models, known)  # type: ignore[arg-type]


def test_which_errors_are_a_partys() -> None:
    assert of_a_party(Corrupt("x")) is not None
    assert of_a_party(AssertionError("x")) is not None
    for error in (CommitLost(1, "x"), EngineFailed("x"), UsageError("x"), KeyError("x")):
        assert of_a_party(error) is None


def test_a_bad_party_is_looked_for_where_the_error_points(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    for seed in (1, 2, 3):
        generate(Shape(parties=1, feeds=1, messages=5, items=1, seed=seed), lake)
    version = lake.at()
    runs = version.runs()
    parties = frozenset(runs["party"].to_pylist())
    named = runs["party"][0].as_py()
    name = next(row["file"] for row in runs.to_pylist() if row["party"] == named)
    assert _halves(parties, Corrupt(f"{name} is damaged"), version) == [parties - {named}, frozenset({named})]
    low, high = _halves(parties, Corrupt("something"), version)
    assert low
    assert high
    assert low | high == parties
    assert chosen_parties(version, [named.hex()[:10]]) == [named]
    with pytest.raises(UsageError, match="no key"):
        chosen_parties(version, ["@title"])


def test_models_come_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_models.py").write_text(
        "class Dial:\n    name, version = 'dial', 2\n    def apply(self, operation, stamp): ...\n    def value(self): ...\n"
        "def register(models):\n    models.register(Dial)\n"
    )
    (tmp_path / "bad_models.py").write_text("def register(models):\n    raise RuntimeError('no')\n")
    assert "dial@2" in known_models("some_models")
    assert not model_factory().known("dial", 2)
    for module, words in (("bad_models", "RuntimeError"), ("json", "register"), ("no.such.module", "no module")):
        with pytest.raises(UsageError, match=words):
            model_factory(module)


def test_stages_are_summed_up() -> None:
    notes: list[str] = []
    clock = Clock(None, notes.append)
    for rows in (2, 3):
        with clock.stage("order") as told:
            told.rows = rows
    with clock.stage("reduce", before="demux") as told:
        told.rows, told.rows_before = 1, 9
    assert [(stage.name, stage.rows) for stage in clock.times()] == [("order", 5), ("demux", 9), ("reduce", 1)]
    assert len(notes) == 3
