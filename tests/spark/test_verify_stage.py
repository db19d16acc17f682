"""The verify stage: envelopes by column against the one-by-one decoder, and what is held against a peer's FeedStore."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.ids import NO_LINK
from echostore.kernel.limits import APPEND_BLOCKS_MAX, OPERATIONS_MAX
from echostore.kernel.order import DATA, Envelope
from echostore.kernel.reasons import Reason
from echostore.pipeline import schemas
from echostore.pipeline.lake import Lake, LakeWriter
from echostore.pipeline.stages import envelopes
from echostore.pipeline.stages.envelopes import NAMED_DEPTH_MAX, read_envelopes
from echostore.pipeline.stages.holding import HeldFeed, Stretch, hold
from echostore.pipeline.stages.planning import BUCKET, Before, plan_pieces
from echostore.pipeline.stages.verify import COLUMNS, Piece, verify_piece, verify_runs
from echostore.store.feed_store import FeedStore
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.links import chain
from echostore.wire.messages import decode_envelope
from echostore.wire.signing import verify
from feed_builder import PARTY, Writer
from spark.signed_story import message

# envelopes


def envelopes_of(payloads: list[bytes]) -> tuple[list[tuple[int, list[tuple[Any, ...]]]], Reason | None]:
    found = read_envelopes(pa.array(payloads, pa.binary()), payloads)
    rows: list[tuple[int, list[tuple[Any, ...]]]] = [(int(depth), []) for depth in found.depths]
    for at in range(len(found.block)):
        named = int(found.names[at]).to_bytes(8, "big"), int(found.named_seqs[at]), bytes(found.named_links[at])
        rows[found.block[at]][1].append((*named, int(found.named_depths[at])))
    return rows, found.fault


def expected_of(payloads: list[bytes]) -> tuple[list[tuple[int, list[tuple[Any, ...]]]], Reason | None]:
    rows = []
    for payload in payloads:
        envelope = decode_envelope(payload, DATA)
        if not isinstance(envelope, Envelope):
            return rows, envelope
        named = [(*each[:3], min(each.depth, NAMED_DEPTH_MAX)) for each in envelope.dependencies]
        rows.append((envelope.depth, named))
    return rows, None


@st.composite
def odd_payloads(draw: st.DrawFn) -> bytes:
    """Messages that are nearly right: random columns, then bytes put in, taken out or written twice."""
    count = draw(st.integers(0, 3))
    found = (
        pb.Message(
            dependency_feeds=draw(
                st.sampled_from([b"", bytes(range(8 * count)), bytes(8 * count), b"x" * (8 * count + 1)])
            ),
            dependency_seqs=draw(
                st.lists(st.integers(0, (1 << 64) - 1) | st.integers(0, 99), min_size=count, max_size=count)
            )
            if draw(st.booleans())
            else [1] * count,
            dependency_links=bytes(16 * count + draw(st.sampled_from([0, 0, 0, 1]))),
            dependency_depths=draw(st.lists(st.sampled_from([1, 2, (1 << 64) - 1]), min_size=count, max_size=count)),
            depth=draw(st.sampled_from([0, 1, 5, 1 << 53, (1 << 64) - 1])),
            time_ms=draw(st.integers(-5, 5)),
        )
        if not draw(st.booleans())
        else message([], draw(st.integers(1, 9)))
    )
    for _ in range(draw(st.integers(0, 2))):
        found.operations.add(local=draw(st.integers(0, 9))).property_set.SetInParent()
    if draw(st.integers(0, 9)) == 0:
        found.credentials.add(claim=b"c")
    data = found.SerializeToString()
    at = draw(st.integers(0, len(data)))
    extra = draw(
        st.sampled_from(
            [
                b"",
                b"",
                b"",
                b"\x28\x07",
                b"\x28\x80\x00",
                b"\xa8\x00\x05",
                b"\x2a\x01\x05",
                b"\x10\x01",
                b"\x7a\x01z",
                b"\x3a\x00",
                b"\x42\x00",
                b"\xc2\x00\x00",
                b"\x3a\x02\x1a\x05",
                b"\x0b\x0c",
                b"\xff",
                b"\x50\x01",
            ]
        )
    )
    return data[:at] + extra + data[at:] if draw(st.booleans()) else data + extra


@given(st.lists(odd_payloads(), min_size=1, max_size=6))
def test_columns_say_what_the_decoder_says(payloads: list[bytes]) -> None:
    assert envelopes_of(payloads) == expected_of(payloads)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_give_the_decoders_verdict(payloads: list[bytes]) -> None:
    assert envelopes_of(payloads) == expected_of(payloads)


def test_too_many_operations_are_oversize() -> None:
    big = pb.Message(depth=1, operations=[pb.Operation(local=1)] * (OPERATIONS_MAX + 1)).SerializeToString()
    assert envelopes_of([big])[1] is Reason.OVERSIZE


class Misreading:
    """A column parser that takes one number wrong, or gives up."""

    def __init__(self, *, gives_up: bool) -> None:
        self._real = envelopes._handler()
        self._gives_up = gives_up

    def array_to_record_batch(self, payloads: pa.Array) -> pa.RecordBatch:
        if self._gives_up:
            raise ValueError("beyond me")
        batch = self._real.array_to_record_batch(payloads)
        depths = batch["depth"].to_pylist()
        depths[1] += 1
        at = batch.schema.get_field_index("depth")
        return batch.set_column(at, batch.schema.field(at), pa.array(depths, batch.schema.field(at).type))

    def record_batch_to_array(self, batch: pa.RecordBatch) -> pa.Array:
        return self._real.record_batch_to_array(batch)


@pytest.mark.parametrize("gives_up", [False, True], ids=["wrong", "gives up"])
def test_a_column_parser_that_errs_changes_nothing(monkeypatch: pytest.MonkeyPatch, gives_up: bool) -> None:
    """Columns are taken only where they encode to the payload again; what is not goes through the decoder."""
    payloads = [message([], depth).SerializeToString() for depth in (1, 2, 3)]
    wrong = Misreading(gives_up=gives_up)
    monkeypatch.setattr(envelopes, "_handler", lambda: wrong)
    assert envelopes_of(payloads) == expected_of(payloads)


# what is held


def rows_of(writer: Writer, start: int, end: int, heads: dict[int, bytes], depths: bool = True) -> list[dict[str, Any]]:
    return [
        {
            "seq": seq,
            "link": writer.links[seq],
            "depth": _depth(writer.payloads[seq]) if depths else 0,
            "payload": writer.payloads[seq],
            "signature": heads.get(seq + 1),
        }
        for seq in range(start, end)
    ]


def _depth(payload: bytes) -> int:
    envelope = decode_envelope(payload, DATA)
    return envelope.depth if isinstance(envelope, Envelope) else 0


def stretch_of(
    writer: Writer, start: int, rows: list[dict[str, Any]], number: int = 0, previous: bytes | None = None
) -> Stretch:
    before = previous if previous is not None else (writer.links[start - 1] if start else NO_LINK)
    piece = Piece(number, writer.party, writer.key, start, start + len(rows), "f", 0, before, None)
    schema = pa.schema([schemas.BLOCKS.field(name) for name in COLUMNS])
    middle = len(rows) // 2
    batches = [pa.RecordBatch.from_pylist(part, schema) for part in (rows[:middle], rows[middle:]) if part]
    return Stretch.of(verify_piece(piece, iter(batches), verify)[0])


def written(count: int, name: str = "ann") -> Writer:
    writer = Writer(name)
    writer.write(*(message([], seq + 1).SerializeToString() for seq in range(count)))
    return writer


def length(held: HeldFeed) -> int:
    return max((piece.end for piece in held.pieces), default=0)


def heads(writer: Writer, *lengths: int) -> dict[int, bytes]:
    return {at: writer.head(at).signature for at in lengths}


def test_blocks_are_held_up_to_the_last_signed_head() -> None:
    writer = written(10)
    held = hold([stretch_of(writer, 0, rows_of(writer, 0, 10, heads(writer, 4, 7)))])
    assert length(held) == 7
    assert held.unheld == [(7, 10, Reason.BAD_SIGNATURE, "no signed head covers it")]


def test_a_head_in_a_later_piece_covers_the_earlier_one() -> None:
    writer = written(10)
    pieces = [
        stretch_of(writer, 0, rows_of(writer, 0, 5, {})),
        stretch_of(writer, 5, rows_of(writer, 5, 10, heads(writer, 9)), 1),
    ]
    held = hold(pieces)
    assert length(held) == 9
    assert {piece.twig for piece in held.pieces} == {0}


def test_a_false_signature_covers_nothing_and_a_later_true_one_all() -> None:
    writer = written(10)
    false = {4: bytes(64), 6: writer.head(5).signature}
    held = hold([stretch_of(writer, 0, rows_of(writer, 0, 10, false))])
    assert length(held) == 0
    assert held.unheld[0].reason is Reason.BAD_SIGNATURE
    assert "the head at 4" in held.unheld[0].detail
    held = hold([stretch_of(writer, 0, rows_of(writer, 0, 10, {**false, **heads(writer, 8)}))])
    assert length(held) == 8


def test_a_signature_for_another_party_covers_nothing() -> None:
    writer = written(3)
    other = Writer("ann", type(PARTY)(bytes(32)), writer.payloads, writer.links)
    assert length(hold([stretch_of(writer, 0, rows_of(writer, 0, 3, heads(other, 3)))])) == 0


@pytest.mark.parametrize("column", ["link", "payload", "depth", "seq"])
def test_a_row_that_lies_ends_what_is_held_before_it(column: str) -> None:
    writer = written(10)
    rows = rows_of(writer, 0, 10, heads(writer, 3, 6, 10))
    rows[7][column] = {"link": bytes(32), "payload": b"other", "depth": 99, "seq": 70}[column]
    held = hold([stretch_of(writer, 0, rows)])
    assert length(held) == 6
    assert held.unheld[0][:3] == (6, 10, Reason.BAD_LINK)
    assert "block 7" in held.unheld[0].detail


def test_a_gap_and_a_wrong_predecessor_are_told_apart() -> None:
    writer = written(20)
    pieces = [
        stretch_of(writer, 0, rows_of(writer, 0, 8, heads(writer, 8))),
        stretch_of(writer, 12, rows_of(writer, 12, 20, heads(writer, 20)), 1),
        stretch_of(writer, 8, rows_of(writer, 8, 10, heads(writer, 10)), 2, previous=bytes(32)),
    ]
    held = hold(pieces)
    assert length(held) == 8
    assert [(each.start, each.end, each.reason) for each in held.unheld] == [
        (8, 10, Reason.BAD_LINK),
        (12, 20, Reason.GAP),
    ]


def test_more_blocks_than_an_append_may_have_under_one_head_are_not_held() -> None:
    writer = written(APPEND_BLOCKS_MAX + 10)
    end = len(writer.payloads)
    assert length(hold([stretch_of(writer, 0, rows_of(writer, 0, end, heads(writer, end)))])) == 0
    assert length(hold([stretch_of(writer, 0, rows_of(writer, 0, end, heads(writer, 10, end)))])) == end
    cut = [
        stretch_of(writer, 0, rows_of(writer, 0, 600, {})),
        stretch_of(writer, 600, rows_of(writer, 600, end, heads(writer, end)), 1),
    ]
    found = hold(cut)
    assert length(found) == 0
    assert Reason.OVERSIZE in {each.reason for each in found.unheld}
    near = [cut[0], stretch_of(writer, 600, rows_of(writer, 600, end, heads(writer, 1000, end)), 1)]
    assert length(hold(near)) == end


def test_a_damaged_copy_beside_a_good_one_is_no_fork() -> None:
    writer = written(10)
    damaged = rows_of(writer, 0, 10, heads(writer, 5, 10))
    damaged[7]["payload"] = b"other"
    held = hold(
        [
            stretch_of(writer, 0, damaged),
            stretch_of(writer, 0, rows_of(writer, 0, 10, heads(writer, 10)), 1),
            stretch_of(writer, 0, rows_of(writer, 0, 10, heads(writer, 5)), 2),
        ]
    )
    assert (length(held), held.fork) == (10, None)
    assert [(each.start, each.reason) for each in held.unheld] == [(7, Reason.BAD_LINK)]


def test_branches_are_twigs_of_their_own() -> None:
    left = written(6)
    right = left.branch(4)
    right.write(*(message([], seq + 1, note="r").SerializeToString() for seq in range(4, 9)))
    held = hold(
        [
            stretch_of(left, 0, rows_of(left, 0, 4, {})),
            stretch_of(left, 4, rows_of(left, 4, 6, heads(left, 6)), 1),
            stretch_of(right, 4, rows_of(right, 4, 9, heads(right, 9)), 2),
        ]
    )
    assert held.fork == 4
    assert {piece.stretch.piece: piece.path for piece in held.pieces} == {0: (0,), 1: (0, 1), 2: (0, 2)}
    assert [piece.stretch.piece for piece in held.main()] == [0, 2], "the longer branch is processed"


def test_random_feeds_are_held_as_a_feed_store_holds_them(tmp_path: Path) -> None:
    """Ranges with false links, heads and gaps: the lake's pieces and the store's ranges are the same bytes."""
    chance = random.Random("held")
    for number in range(60):
        writer = written(chance.randrange(1, 40), f"writer {number}")
        end = len(writer.payloads)
        edges = sorted({0, end, *(chance.randrange(end + 1) for _ in range(4))})
        store = FeedStore(tmp_path / f"{number}.db", PARTY)
        store.add_feed(writer.key, "data")
        pieces = []
        for index, (start, stop) in enumerate(pairwise(edges)):
            if chance.random() < 0.15:
                continue  # a gap
            payloads, head = writer.range(start, stop)
            rows = rows_of(writer, start, stop, {stop: head.signature})
            fate = chance.random()
            if fate < 0.15:
                at = chance.randrange(len(payloads))
                payloads[at] = rows[at]["payload"] = message([], 7, note="forged").SerializeToString()
                rows[at]["depth"] = 7
            elif fate < 0.3:
                head = replace(head, signature=chance.randbytes(64))
                rows[-1]["signature"] = head.signature
            store.ingest(writer.key, start, payloads, head, verify)
            pieces.append(stretch_of(writer, start, rows, index))
        # What waits behind a false head comes again with the next good one, as replication would send it.
        for stop in edges:
            if stop > store.length(writer.key) and any(p.end == stop and p.last_head == stop for p in pieces):
                start = store.length(writer.key)
                if _whole(pieces, start, stop):
                    store.ingest(writer.key, start, *writer.range(start, stop), verify)
        assert length(hold(pieces)) == store.length(writer.key), number
        store.close()


def _whole(pieces: list[Stretch], start: int, stop: int) -> bool:
    """Whether undamaged pieces lead from one place to another."""
    at = start
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start <= at < piece.end and piece.good_end == piece.end:
            at = piece.end
    return at >= stop


# the plan, and the job


def runs(*stretches: tuple[int, int, bytes, bytes]) -> pa.Table:
    rows = [
        {
            "party": PARTY,
            "feed": bytes(32),
            "control": False,
            "start": start,
            "end": end,
            "previous": previous,
            "last_link": last,
            "last_depth": end,
            "file": f"f{number}",
            "row": 0,
            "bytes": 100 * (end - start),
        }
        for number, (start, end, previous, last) in enumerate(stretches)
    ]
    return pa.Table.from_pylist(rows, schemas.RUNS)


def spans(table: pa.Table) -> list[tuple[int, int, bool]]:
    return list(zip(*(table[name].to_pylist() for name in ("start", "end", "old")), strict=True))


def test_pieces_end_at_buckets_and_at_the_previous_cut() -> None:
    found = plan_pieces(
        runs((0, BUCKET + 50, NO_LINK, b"l" * 32)), before={(PARTY, bytes(32)): Before(100, b"c" * 32, 7)}
    )
    assert spans(found.pieces) == [(0, 100, True), (100, BUCKET, False), (BUCKET, BUCKET + 50, False)]
    assert found.pieces["previous"].to_pylist() == [NO_LINK, b"c" * 32, None]
    assert found.pieces["row"].to_pylist() == [0, 100, BUCKET]
    assert found.bases == {0: ((PARTY, bytes(32)), Before(100, b"c" * 32, 7))}


def test_overlapping_runs_are_cut_where_any_begins_and_read_whole() -> None:
    found = plan_pieces(
        runs((0, 90, NO_LINK, b"l" * 32), (40, 60, b"m" * 32, b"r" * 32)),
        before={(PARTY, bytes(32)): Before(80, b"c" * 32, 7)},
    )
    assert spans(found.pieces) == [(0, 40, False), (40, 60, False), (60, 90, False), (40, 60, False)]
    assert found.forked == {(PARTY, bytes(32))}
    assert not found.bases


def test_a_cut_that_the_runs_do_not_lead_to_is_not_believed() -> None:
    before = {(PARTY, bytes(32)): Before(50, b"other" + bytes(27), 7)}
    found = plan_pieces(runs((0, 50, NO_LINK, b"l" * 32), (50, 90, b"l" * 32, b"m" * 32)), before=before)
    assert spans(found.pieces) == [(0, 50, False), (50, 90, False)]


def test_a_limit_reads_one_append_more() -> None:
    found = plan_pieces(runs((0, 9000, NO_LINK, b"l" * 32)), limits={(PARTY, bytes(32)): 100})
    assert spans(found.pieces) == [(0, 100 + APPEND_BLOCKS_MAX, False)]


def big_feed(count: int) -> tuple[Writer, pa.RecordBatch]:
    writer = Writer("big")
    payloads = [pb.Message(depth=seq + 1).SerializeToString() for seq in range(count)]
    writer.payloads, writer.links = payloads, chain(writer.key, 0, NO_LINK, payloads)
    signed = {at: writer.head(at).signature for at in (*range(1000, count, 1000), count)}
    columns = {
        "party": [PARTY] * count,
        "feed": [writer.key] * count,
        "control": [False] * count,
        "seq": list(range(count)),
        "link": writer.links,
        "depth": list(range(1, count + 1)),
        "payload": payloads,
        "signature": [signed.get(seq + 1) for seq in range(count)],
        "previous": [NO_LINK, *[None] * (count - 1)],
        "previous_depth": [0, *[None] * (count - 1)],
    }
    arrays = [pa.array(columns[field.name], field.type) for field in schemas.BLOCKS]
    return writer, pa.RecordBatch.from_arrays(arrays, schema=schemas.BLOCKS)


def test_one_feed_is_verified_by_several_tasks(spark: Any, tmp_path: Path) -> None:
    """A feed across two buckets: each piece takes the link before it from the row before it, and they meet."""
    count = BUCKET + 3000
    writer, batch = big_feed(count)
    lake = Lake.create(tmp_path / "lake")
    LakeWriter(lake).write([batch])
    plan = plan_pieces(lake.at().runs(), tasks_min=2)
    frame = verify_runs(spark, str(lake.path), plan.pieces)
    stretches = [Stretch.of(row) for row in frame.toArrow().to_pylist()]
    assert sorted((each.start, each.end) for each in stretches) == [(0, BUCKET), (BUCKET, count)]
    held = hold(stretches)
    assert (length(held), held.unheld, held.fork) == (count, [], None)
    assert held.pieces[-1].stretch.last_link == writer.links[-1]
    assert all(piece.bad is None for piece in held.pieces)


def test_the_depth_of_a_pieces_first_block_is_checked_against_the_piece_before() -> None:
    writer = Writer("ann")
    depths = [1, 2, 3, 9, 10]
    writer.write(*(message([], depth).SerializeToString() for depth in depths))
    pieces = [
        stretch_of(writer, 0, rows_of(writer, 0, 3, {})),
        stretch_of(writer, 3, rows_of(writer, 3, 5, heads(writer, 5)), 1),
    ]
    held = hold(pieces)
    assert [piece.bad for piece in held.pieces] == [None, (3, Reason.LYING_DEPTH, True)]
