"""Demux without Spark: columns say what the wire module says, blocks that do not count are rejects, branches are told apart."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import FeedId, ItemId
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.party.admission import Admission, FeedAdmission, Interval
from echostore.kernel.party.credentials import FeedKind, Role
from echostore.kernel.reasons import Reason
from echostore.kernel.values import EPOCH, BlobRef, Reference
from echostore.pipeline.generate.lakes import generate
from echostore.pipeline.generate.shape import Shape
from echostore.pipeline.lake import Lake
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import Place
from echostore.pipeline.schemas import BLOCKS, CUTS, PLAIN_CHANGES, REJECTS, RUNS, SLICES
from echostore.pipeline.stages import demux
from echostore.pipeline.stages.control import fold_control
from echostore.pipeline.stages.demux import Demux, Standing, combined, plan_slices, slices_of
from echostore.pipeline.stages.frames import frame_of
from echostore.pipeline.stages.operation_columns import concerned, read_operations
from echostore.pipeline.stages.order import order_blocks
from echostore.pipeline.stages.parcels import bucket_nibbles, unpacked
from echostore.pipeline.stages.value_columns import canonical_values
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.messages import decode_operations
from echostore.wire.values import MalformedValue, value_bytes, value_from_bytes
from spark.bucket_world import PARTY, RandomParty

FEED = FeedId(b"feed-one")


def test_every_operation_of_random_messages_is_told_once_or_its_message_is_malformed() -> None:
    """Plain and rest together are what the wire module decodes, item by item and place by place."""
    for seed in range(30):
        party = RandomParty(seed, feeds=1, odd=0.3)
        party.write(60)
        feed = party.writers[0].feed
        payloads = pa.array([block.payload for block in party.blocks], pa.binary())
        found = read_operations(payloads, np.arange(60), party=PARTY, feed=feed)
        told = {(*row,) for table in (found.plain, found.rest) for row in _places(table)}
        wanted, malformed, alone = set(), set(), set()
        for block in party.blocks:
            message = pb.Message.FromString(block.payload)
            try:
                operations = decode_operations(message, party=PARTY, feed=feed, seq=block.seq)
            except OperationRefused:
                malformed.add(block.seq)
                if len(message.operations) == 1:
                    alone.add(block.seq)
                continue
            wanted |= {(operation.item, block.seq << 16 | at) for at, operation in enumerate(operations)}
        assert wanted <= told
        assert {place >> 16 for _, place in told - wanted} <= alone  # the kernel finds these out
        assert {seq for seq, _ in found.malformed} | {place >> 16 for _, place in told - wanted} == malformed


def _places(table: pa.Table) -> list[tuple[bytes, int]]:
    halves = zip(table["creator"].to_pylist(), table["local"].to_pylist(), table["place"].to_pylist(), strict=True)
    return [(creator.to_bytes(8, "big") + local.to_bytes(8, "big"), place) for creator, local, place in halves]


def test_what_can_not_be_decoded_at_all_was_to_be_stopped_before() -> None:
    with pytest.raises(Corrupt, match="block 1 of feed"):
        read_operations(pa.array([b"(\x01", b"\xff\xff"], pa.binary()), np.arange(2), party=PARTY, feed=FEED)


def test_fields_in_a_strange_spelling_mean_the_same() -> None:
    """Two members of a oneof, a field twice, an unknown field: the wire module's word counts."""
    change = b"\x0a\x08\x0a\x01a\x12\x03\x2a\x01x"  # set a = "x"
    both = b"\x10\x05" + b"\x22" + bytes([len(change)]) + change + b"\x4a\x01z"  # property set, then custom
    twice = b"\x10\x05\x22" + bytes([len(change)]) + change + b"\x10\x07"  # item 5, then item 7
    future = b"\x10\x05\x22" + bytes([len(change)]) + change + b"\xa2\x06\x01!"
    for operation, item, plain in ((both, 5, False), (twice, 7, False), (future, 5, False), (twice[:-2], 5, True)):
        payload = b"\x28\x01\x3a" + bytes([len(operation)]) + operation
        found = read_operations(pa.array([payload], pa.binary()), np.array([4]), party=PARTY, feed=FEED)
        (decoded,) = decode_operations(pb.Message.FromString(payload), party=PARTY, feed=FEED, seq=4)
        assert decoded.item == FEED + item.to_bytes(8, "big")
        assert _places(found.plain if plain else found.rest) == [(decoded.item, 4 << 16)]
        assert found.plain.num_rows == plain


_plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3),
    max_leaves=8,
)
_values = _plain_values | st.sampled_from(
    [EPOCH, Reference(ItemId(b"i" * 16)), Reference(ItemId(b"i" * 16), PARTY), BlobRef((), 3, "text/plain", "n")]
)


@given(st.lists(_values, min_size=1, max_size=6), st.integers(0), st.integers(0, 255))
def test_canonical_values_are_those_that_the_wire_module_writes(values: list[Any], at: int, byte: int) -> None:
    """Each as it is written, and once more with one byte changed."""
    data = [value_bytes(value) for value in values]
    changed = []
    for one in data:
        spoilt = bytearray(one)
        if spoilt:
            spoilt[at % len(spoilt)] = byte
        changed.append(bytes(spoilt))
    given_bytes = data + changed
    found = canonical_values(pa.array(given_bytes, pa.binary()))
    assert found.tolist() == [_canonical(one) for one in given_bytes]


def _canonical(data: bytes) -> bool:
    try:
        return value_bytes(value_from_bytes(data, bytes_max=None)) == data
    except MalformedValue:
        return False


def test_odd_values_are_not_canonical() -> None:
    deep: Any = 1
    for _ in range(33):
        deep = [deep]
    nan = b"\x21" + struct.pack("<Q", 0x7FF8000000000001)
    data = [b"", b"\x08\x00", b"\x10\x02", b"\x18\x80\x00", nan, value_bytes(deep), value_bytes(deep[0]), b"\x38" + b"\xff" * 9 + b"\x01"]  # fmt: skip
    unsorted = b"\x4a\x10\x0a\x01b\x0a\x01a\x12\x02\x10\x01\x12\x02\x10\x01"
    assert canonical_values(pa.array([*data, unsorted], pa.binary())).tolist() == [
        _canonical(one) for one in [*data, unsorted]
    ]


def test_combining_keeps_what_the_kernel_would_keep_in_any_grouping() -> None:
    chance = random.Random(5)
    paths = ["a", "b", "a\0x", "a\0x\0y", "a\0z", "a\x01"]
    rows = [
        (1, 1, False, 7, depth, depth << 16, 0, chance.choice(paths), chance.choice((b"\x10\x01", None)))
        for depth in range(200)
    ]
    columns = list(zip(*rows, strict=True))
    table = pa.table([pa.array(each, field.type) for each, field in zip(columns, PLAIN_CHANGES, strict=True)], schema=PLAIN_CHANGES)  # fmt: skip
    whole = combined(table)
    parts = [combined(table.slice(start, 13)) for start in range(0, 200, 13)]
    again = combined(pa.concat_tables(parts))
    assert sorted(whole["place"].to_pylist()) == sorted(again["place"].to_pylist())
    kept: dict[str, int] = {}
    for row in rows:
        kept = {path: at for path, at in kept.items() if not path.startswith(row[7] + "\0")}
        kept[row[7]] = row[5]
    assert sorted(whole["place"].to_pylist()) == sorted(kept.values())


def test_within_one_operation_the_later_change_counts() -> None:
    rows = [(1, 1, False, 7, 3, 9, 0, "a\0x", None), (1, 1, False, 7, 3, 9, 1, "a", None), (1, 1, False, 7, 3, 9, 2, "a\0y", None)]  # fmt: skip
    columns = zip(*rows, strict=True)
    table = pa.table([pa.array(each, field.type) for each, field in zip(columns, PLAIN_CHANGES, strict=True)], schema=PLAIN_CHANGES)  # fmt: skip
    assert sorted(combined(table)["path"].to_pylist()) == ["a", "a\0y"]


def test_blocks_that_concern_an_item_are_all_found() -> None:
    party = RandomParty(3, feeds=1, odd=0.3)
    party.write(80)
    feed = party.writers[0].feed
    payloads = pa.array([block.payload for block in party.blocks], pa.binary())
    for item, _ in party.items[:10]:
        halves = pl.DataFrame(
            {"creator": [int.from_bytes(item[:8], "big")], "local": [int.from_bytes(item[8:], "big")]},
            schema={"creator": pl.UInt64, "local": pl.UInt64},
        )
        found = concerned(payloads, np.arange(80), feed, halves)
        for block in party.blocks:
            try:
                operations = decode_operations(
                    pb.Message.FromString(block.payload), party=PARTY, feed=feed, seq=block.seq
                )
            except OperationRefused:
                continue
            if any(operation.item == item for operation in operations):
                assert found[block.seq]


# which blocks count


@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(list(Role))), max_size=4),
    st.none() | st.integers(0, 14),
    st.sampled_from([None, Reason.FORK, Reason.RETIRED]),
)
def test_standing_is_the_admission_s(cuts: list[tuple[int, Role]], end: int | None, reason: Reason | None) -> None:
    starts = sorted(dict(cuts).items())
    ends: list[int | None] = [*(start for start, _ in starts[1:]), end][: len(starts)]
    intervals = tuple(
        Interval(start, stop, role)
        for (start, role), stop in zip(starts, ends, strict=True)
        if stop is None or stop > start
    )
    key = b"feed-one" + bytes(24)
    admitted = FeedAdmission(key, FeedKind.DATA, b"i" * 32, b"d" * 32, None, intervals, reason)  # type: ignore[arg-type]
    admission = Admission.of(PARTY, None, [admitted])
    rows = [[start, stop, role.label] for start, stop, role in intervals] or [[0, None, None]]
    standing = Standing.of(json.dumps({"intervals": rows, "end_reason": reason, "admitted": True}))
    seqs = np.arange(16)
    for seq, counts in zip(seqs.tolist(), standing.counts(seqs).tolist(), strict=True):
        why = admission.why_excluded(FEED, seq)
        assert counts == (why is None)
        if why is not None:
            assert standing.why_excluded(seq) == why
    assert Standing.of('{"intervals": [], "end_reason": null, "admitted": false}').why_excluded(0) == Reason.UNADMITTED


def _run(start: int, end: int, previous: bytes, last: bytes, file: str = "f", **more: Any) -> dict[str, Any]:
    values = {
        "party": PARTY,
        "feed": b"feed-one" + bytes(24),
        "control": False,
        "last_depth": 1,
        "row": start,
        "bytes": 1,
    }
    assert set(values) | {"start", "end", "previous", "last_link", "file"} == set(RUNS.names)
    plan = {"length": 20, "link": b"end", "after": 5, "messages": 10, "intervals": None, "end_reason": None}
    return {**values, "start": start, "end": end, "previous": previous, "last_link": last, "file": file, **plan, **more}


def test_slices_follow_the_branch_that_was_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        _run(0, 10, b"", b"ten"),
        _run(10, 20, b"other", b"bad", "wrong"),
        _run(10, 20, b"ten", b"end", "right"),
        _run(12, 30, b"12", b"x", "g"),
    ]
    monkeypatch.setattr(demux, "read_rows", lambda *_: iter([pa.record_batch({"link": [b"no"]})]))
    found = [(each["start"], each["end"], each["file"], each["row"]) for each in slices_of("lake", runs)]
    assert found == [(5, 10, "f", 5), (10, 20, "right", 10)]
    with pytest.raises(Corrupt, match="is in no run of the lake any more"):
        list(slices_of("lake", runs[:2]))


def test_long_stretches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demux, "SLICE_BLOCKS", 8)
    found = [(each["start"], each["end"]) for each in slices_of("lake", [_run(0, 20, b"", b"end")])]
    assert found == [(5, 13), (13, 20)]


def test_a_task_tells_excluded_and_malformed_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    party = RandomParty(8, feeds=1, odd=0.0, models=("property-set",))
    party.write(10)
    feed = party.writers[0].feed + bytes(24)
    bad = pb.Message(depth=1)
    bad.operations.add(feed=b"short").custom = b"x"
    payloads = [block.payload for block in party.blocks] + [bad.SerializeToString(), party.blocks[0].payload]
    blocks = pa.record_batch({"feed": [feed] * 12, "seq": list(range(12)), "payload": payloads}, schema=pa.schema([BLOCKS.field(n) for n in ("feed", "seq", "payload")]))  # fmt: skip
    monkeypatch.setattr(
        demux, "read_rows", lambda lake, file, start, end, columns: iter([blocks.slice(start, end - start)])
    )
    (tmp_path / "a").mkdir()
    standing = json.dumps({"intervals": [[0, 11, "editor"]], "end_reason": "retired", "admitted": True})
    row = {
        "party": PARTY,
        "feed": feed,
        "start": 0,
        "end": 12,
        "file": "f",
        "row": 0,
        "nibbles": 0,
        "standing": standing,
    }
    sent = list(Demux("lake", Place(str(tmp_path), "a"))(iter([pa.RecordBatch.from_pylist([row], SLICES)])))
    parcels = [parcel for batch in sent for parcel in batch.to_pylist()]
    told = json.loads(parcels[-1]["note"])
    assert told["blocks"] == 12
    rejects = read_table(tmp_path, NamedFile(**told["rejects"][0]), REJECTS).to_pylist()
    places = sorted((each["seq"], each["position"], each["reason"]) for each in rejects)
    assert places == [(10, -1, "malformed"), (11, -1, "retired")]
    assert sum(parcel["rows"] for parcel in parcels) > 0
    assert all(unpacked(parcel["rest"])["place"].to_numpy().max() >> 16 < 10 for parcel in parcels if parcel["rest"])
    row["start"] = 1  # the file holds other blocks than its runs say
    with pytest.raises(Corrupt, match="has other blocks"):
        list(Demux("lake", Place(str(tmp_path), "a"))(iter([pa.RecordBatch.from_pylist([row], SLICES)])))


def test_small_parties_are_one_bucket() -> None:
    assert [bucket_nibbles(count) for count in (0, 8192, 8193, 131072, 131073, 10**9)] == [0, 0, 1, 1, 2, 2]


def test_slices_are_the_same_planned_here_and_by_spark(spark: Any, tmp_path: Path) -> None:
    """At once and on top of earlier cuts, with feeds that are cut short, forked or not admitted."""
    lake = Lake.create(tmp_path / "lake")
    generate(Shape(parties=2, feeds=4, messages=400, items=30, faults=12), lake)
    version = lake.at()
    control = fold_control(spark, version)
    order = order_blocks(spark, version, control)
    runs, cuts, admission = version.runs(control=False), order.cuts.toArrow(), control.admission.toArrow()
    earlier = cuts.set_column(cuts.schema.get_field_index("length"), CUTS.field("length"), pc.divide(cuts["length"], 2))
    for before in (None, earlier):
        here = plan_slices(spark, str(lake.path), runs, cuts, admission, before)
        frames = [None if table is None else frame_of(spark, table) for table in (cuts, admission, before)]
        there = plan_slices(spark, str(lake.path), runs, *frames)
        assert isinstance(here, pa.Table)
        wanted = [{**row, "standing": json.loads(row["standing"])} for row in there.toArrow().to_pylist()]
        found = [{**row, "standing": json.loads(row["standing"])} for row in here.to_pylist()]
        for row in (*wanted, *found):
            row["standing"]["intervals"].sort(key=lambda interval: interval[0])
        assert sorted(found, key=_slice_place) == sorted(wanted, key=_slice_place)
        assert len(found) > 6
    order.close()
    control.close()


def _slice_place(row: dict[str, Any]) -> tuple[bytes, bytes, int]:
    return row["party"], row["feed"], row["start"]


def test_slices_are_dealt_out_evenly(spark: Any) -> None:
    rows = [
        {"party": b"p", "feed": bytes([feed]), "start": 0, "end": 10, "file": "f", "row": 10 * feed, "nibbles": 0, "standing": "{}"}
        for feed in range(12)
    ]  # fmt: skip
    dealt = demux._dealt(spark, pa.Table.from_pylist(rows, SLICES), 4).select("task", "feed").toArrow().to_pylist()
    tasks = [sorted(row["feed"][0] for row in dealt if row["task"] == task) for task in range(4)]
    assert tasks == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], "neighbours in a file go to one task"
    assert demux._dealt(spark, SLICES.empty_table(), 4).count() == 0
