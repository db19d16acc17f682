"""Generated lakes: the same bytes for the same arguments, blocks that a real peer takes, and answers that it gives.

No Spark here: what a peer says of a generated lake is what the pipeline is measured by elsewhere.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from cli_process import Cli
from echostore.cli.lake_generate import IN_MEMORY
from echostore.kernel.errors import UsageError
from echostore.kernel.ids import (
    SYSTEM_TYPE,
    FeedId,
    ItemId,
    Link,
    PartyKey,
    created_item_id,
    feed_id,
    item_creator,
    item_local,
)
from echostore.kernel.items.operations import CUSTOM, GENESIS, METADATA, ItemOperation
from echostore.kernel.models.property_set import Set
from echostore.kernel.models.threaded_log import PostId
from echostore.kernel.order import CONTROL, DATA, Envelope
from echostore.kernel.timeframe import Dependency
from echostore.pipeline.generate.contents import Contents, odd_change, value_for
from echostore.pipeline.generate.encoding import item_head, message, number, property_part
from echostore.pipeline.generate.faults import KINDS
from echostore.pipeline.generate.feeds import SignedFeed
from echostore.pipeline.generate.lakes import MadeLake, generate, generated_rows, party_key
from echostore.pipeline.generate.party import MadeParty
from echostore.pipeline.generate.schedule import DELETE, MOVE, NAME, ODD, SYSTEM, Schedule
from echostore.pipeline.generate.schedule import GENESIS as GENESIS_KIND
from echostore.pipeline.generate.shape import MODELS, Shape, parse_mix
from echostore.pipeline.generate.spool import Spool
from echostore.pipeline.lake import Lake
from echostore.pipeline.schemas import BLOCKS
from echostore.testing.lake_answers import PartyAnswer, lake_answers
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.links import block_link, chain, head_bytes, payload_hash
from echostore.wire.messages import decode_envelope, decode_operations, encode_operation
from echostore.wire.signing import SigningKey, verify
from echostore.wire.varint import varint

MIXED = parse_mix("property-set=40,text=30,growable-array=20,threaded-log=10")


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def rows_of(shape: Shape, folder: Path, **more: Any) -> tuple[list[dict[str, Any]], list[MadeParty]]:
    parties: list[MadeParty] = []
    batches = list(generated_rows(shape, folder, parties, **more))
    return pa.Table.from_batches(batches, BLOCKS).to_pylist(), parties


def digest(shape: Shape, folder: Path, **more: Any) -> str:
    hashed = hashlib.sha256()
    for batch in generated_rows(shape, folder, [], **more):
        for name in BLOCKS.names:
            hashed.update(repr(batch[name].to_pylist()).encode())
    return hashed.hexdigest()


# messages by hand


def test_numbers_are_varints() -> None:
    edges = [0, 1, 127, 128, 16383, 16384, (1 << 28) - 1, 1 << 28, (1 << 42) - 1, 1 << 42, (1 << 63) + 5]
    assert [number(value) for value in edges] == [varint(value) for value in edges]


def test_messages_put_together_by_hand_equal_those_of_the_encoder() -> None:
    chance = random.Random(1)
    own = FeedId(b"ownfeed!")
    for round_ in range(300):
        creator = own if chance.random() < 0.5 else FeedId(chance.randbytes(8))
        item = created_item_id(creator, chance.choice((0, 1, 3, 500, 70_000, 1 << 33)), chance.choice((0, 0, 5)))
        path = chance.choice(("text", "done", "due", "plan", "effort", "priority"))
        changes = (Set((path,), value_for(path, chance)),) if round_ % 3 else odd_change(chance)
        field = METADATA if round_ % 7 == 0 else "property-set"
        named = sorted(
            {
                feed: Dependency(feed, chance.randrange(1 << 30), chance.randbytes(16), chance.randrange(1, 1 << 40))
                for feed in (FeedId(chance.randbytes(8)) for _ in range(chance.randrange(4)))
            }.values()
        )
        depth, time_ms = chance.randrange(1, 1 << 40), chance.randrange(1, 1 << 41)
        operation = encode_operation(own, ItemOperation(item, field, changes))
        expected = pb.Message(depth=depth, time_ms=time_ms, operations=[operation])
        expected.dependency_feeds = b"".join(each.feed for each in named)
        expected.dependency_seqs.extend(each.seq for each in named)
        expected.dependency_links = b"".join(each.link_prefix for each in named)
        expected.dependency_depths.extend(each.depth for each in named)
        part = item_head(item, own=creator == own) + property_part(changes, metadata=field == METADATA)
        assert part == operation.SerializeToString()
        assert message(named, depth, time_ms, [part]) == expected.SerializeToString()


def test_every_message_is_as_the_encoder_would_write_it(tmp_path: Path) -> None:
    rows, _ = rows_of(Shape(feeds=6, messages=900, items=60, mix=MIXED), tmp_path)
    for row in rows:
        read = pb.Message.FromString(row["payload"])
        assert read.SerializeToString() == row["payload"]
        assert len(UnknownFieldSet(read)) == 0


def test_the_pool_makes_messages_of_about_150_bytes(tmp_path: Path) -> None:
    rows, _ = rows_of(Shape(feeds=5, messages=4000, items=100), tmp_path)
    sizes = [len(row["payload"]) for row in rows if not row["control"]]
    assert 130 < sum(sizes) / len(sizes) < 170
    assert len(set(Contents(1).pool)) > 5000


# the schedule


SHAPES = [
    Shape(feeds=1, messages=1, items=0),
    Shape(feeds=1, messages=200, items=40),
    Shape(feeds=3, messages=500, items=60, writers_per_item=2),
    Shape(feeds=8, messages=3000, items=100),
    Shape(feeds=33, messages=4000, items=500, skew=0.5),
    Shape(feeds=50, messages=20, items=10),
    Shape(feeds=4, messages=101, items=100),
    Shape(feeds=100, messages=1500, items=30, seed=5),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.feeds}x{shape.messages}")
def test_a_feed_writes_only_items_that_it_has_heard_of(shape: Shape) -> None:
    schedule = Schedule(shape.part(0))
    heard = schedule.knowledge()
    for feed, (kinds, targets) in enumerate(zip(schedule.kinds, schedule.targets, strict=True)):
        for slot, (kind, target) in enumerate(zip(kinds.tolist(), targets.tolist(), strict=True)):
            if target == SYSTEM:
                continue
            made, creator = int(schedule.items.rounds[target]), target % schedule.feeds
            if kind == GENESIS_KIND:
                assert creator == feed
                assert schedule.items.seqs[target] == schedule.seq(feed, slot)
            elif creator == feed:
                assert schedule.items.seqs[target] < schedule.seq(feed, slot)
            else:
                assert made <= heard[slot // schedule.flush, feed, creator]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.feeds}x{shape.messages}")
def test_messages_and_items_are_as_many_as_asked_for(shape: Shape) -> None:
    schedule = Schedule(shape.part(0))
    assert sum(schedule.lengths) + 1 == shape.messages
    made = np.concatenate(
        [targets[kinds == GENESIS_KIND] for kinds, targets in zip(schedule.kinds, schedule.targets, strict=True)]
    )
    assert sorted(made.tolist()) == list(range(shape.items))


def test_items_are_written_by_few_feeds_and_the_hot_one_by_all() -> None:
    shape = Shape(feeds=20, messages=30_000, items=200, skew=0.4, writers_per_item=4)
    schedule = Schedule(shape.part(0))
    writers: dict[int, set[int]] = {}
    for feed, targets in enumerate(schedule.targets):
        for target in set(targets.tolist()) - {SYSTEM}:
            writers.setdefault(target, set()).add(feed)
    assert len(writers.pop(0)) == 20
    assert max(map(len, writers.values())) == 4
    hot = sum(int((targets == 0).sum()) for targets in schedule.targets)
    assert 0.36 < hot / shape.messages < 0.42


def test_the_hot_item_is_a_property_set_if_there_are_any() -> None:
    for seed in range(5):
        shape = Shape(feeds=3, messages=100, items=20, mix=(("text", 99), ("property-set", 1)), seed=seed)
        assert Schedule(shape.part(0)).items.models[0] == MODELS.index("property-set")
    only = Shape(feeds=3, messages=100, items=20, mix=(("text", 9), ("threaded-log", 1)))
    assert Schedule(only.part(0)).items.models[0] == MODELS.index("text")


def test_late_feeds_write_on_while_they_are_off_line() -> None:
    schedule = Schedule(Shape(feeds=16, messages=16 * 64 * 20, items=200).part(0))
    assert len(schedule.late) == 2
    heard = schedule.knowledge()
    dark = [round_ for round_ in range(schedule.rounds) if schedule.off_line(round_)]
    assert len(dark) >= 3
    for feed in schedule.late:
        assert (heard[dark[0], feed] == heard[dark[-1], feed]).all(), "it hears nothing"
        assert all(heard[round_, 0, feed] < dark[0] for round_ in dark), "nobody hears of it"
        assert heard[schedule.rounds - 1, 0, feed] > dark[-1], "until it is back"
        assert all(schedule.kinds[feed][round_ * schedule.flush] >= 0 for round_ in dark), "and it writes"


def test_all_kinds_of_messages_come_up() -> None:
    schedule = Schedule(Shape(feeds=5, messages=20_000, items=300, mix=MIXED).part(0))
    found = Counter(kind for kinds in schedule.kinds for kind in kinds.tolist())
    assert set(found) == {0, GENESIS_KIND, ODD, NAME, DELETE, MOVE}
    share = Counter(schedule.items.models.tolist())
    assert [share[MODELS.index(model)] > 10 for model, _ in MIXED] == [True] * 4


# blocks


def test_equal_arguments_give_equal_blocks_and_others_give_other_parties(tmp_path: Path) -> None:
    shape = Shape(parties=2, feeds=4, messages=400, items=40, mix=MIXED, faults=19)
    first = digest(shape, tmp_path)
    assert digest(shape, tmp_path) == first
    for other in (
        Shape(parties=2, feeds=4, messages=400, items=40, mix=MIXED, faults=19, seed=2),
        Shape(parties=2, feeds=4, messages=401, items=40, mix=MIXED, faults=19),
    ):
        assert {party_key(shape, n) for n in range(2)}.isdisjoint(party_key(other, n) for n in range(2))


def test_texts_made_by_other_processes_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echostore.pipeline.generate.edits.POOLED_MIN", 1)
    shape = Shape(feeds=3, messages=200, items=12, mix=(("text", 1), ("growable-array", 1)))
    assert digest(shape, tmp_path, processes=2) == digest(shape, tmp_path, processes=1)


def test_links_heads_depths_and_order_are_right(tmp_path: Path) -> None:
    rows, parties = rows_of(Shape(parties=3, feeds=5, messages=2400, items=150), tmp_path)
    places = [(row["party"], not row["control"], row["feed"], row["seq"]) for row in rows]
    assert places == sorted(places), "sorted by party, control first, feed and seq"
    feeds: dict[tuple[bytes, bytes], list[dict[str, Any]]] = {}
    for row in rows:
        feeds.setdefault((row["party"], row["feed"]), []).append(row)
    marks: dict[tuple[bytes, FeedId, int], tuple[Link, int]] = {}
    for (party, feed), blocks in feeds.items():
        links = chain(feed, 0, Link(bytes(32)), [block["payload"] for block in blocks])
        for seq, (block, link) in enumerate(zip(blocks, links, strict=True)):
            assert (block["seq"], block["link"]) == (seq, link)
            marks[party, feed_id(feed), seq] = link, block["depth"]
            if block["signature"]:
                assert verify(feed, head_bytes(PartyKey(party), feed, seq + 1, link), block["signature"])
            assert (block["previous"] is None) == bool(seq)
        assert blocks[-1]["signature"]
        gaps = [block["seq"] for block in blocks if block["signature"]]
        assert max(after - before for before, after in pairwise([-1, *gaps])) <= 64
    named = 0
    for (party, _), blocks in feeds.items():
        depth = 0
        for block in blocks:
            envelope = decode_envelope(block["payload"], CONTROL if block["control"] else DATA)
            assert isinstance(envelope, Envelope)
            for dependency in envelope.dependencies:
                link, real = marks[party, dependency.feed, dependency.seq]
                assert link.startswith(dependency.link_prefix)
                assert dependency.depth == real
                named += 1
            depth = 1 + max([depth, *[dependency.depth for dependency in envelope.dependencies]])
            assert envelope.depth == block["depth"] == depth
    assert named > 100
    assert sum(not row["control"] for row in rows) == 2400
    assert [party.messages for party in parties] == [800] * 3


def test_long_feeds_leave_in_parts_and_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(feeds=3, messages=600, items=20)
    whole = digest(shape, tmp_path)
    monkeypatch.setattr("echostore.pipeline.generate.feeds.ROWS_MAX", 10)
    monkeypatch.setattr("echostore.pipeline.generate.spool.BATCH_ROWS", 64)
    rows, _ = rows_of(shape, tmp_path)
    monkeypatch.undo()
    assert rows == rows_of(shape, tmp_path)[0]
    assert digest(shape, tmp_path) == whole


def test_a_spool_gives_back_what_it_got_by_party_and_feed(tmp_path: Path) -> None:
    keys = [SigningKey.from_seed(bytes([byte]) * 32) for byte in (3, 1, 2)]
    parties = [PartyKey(b"b" * 32), PartyKey(b"a" * 32)]
    with Spool(tmp_path) as spool:
        for party in parties:
            for key in keys:
                for control in (False, True):
                    feed = SignedFeed(party, key, spool.give, control=control)
                    feed.append([b"x", b"y"], [1, 2])
                    feed.flush()
        rows = pa.Table.from_batches(list(spool.batches()), BLOCKS).to_pylist()
    places = [(row["party"], not row["control"], row["feed"], row["seq"]) for row in rows]
    assert places == sorted(places)
    assert len(places) == 24
    assert list(tmp_path.iterdir()) == [], "the file has no name and is gone"


def test_the_first_row_of_every_run_says_what_it_follows(tmp_path: Path) -> None:
    with Spool(tmp_path) as later:
        shape = Shape(feeds=5, messages=600, items=40, faults=len(KINDS))
        rows, (party,) = rows_of(shape, tmp_path, last=0.3, later=later)
        rest = pa.Table.from_batches(list(later.batches()), BLOCKS).to_pylist()
    altered = {fault.feed for fault in party.faults if fault.kind == "bad-link"}
    depths = {(row["feed"], row["seq"], row["link"]): row["depth"] for row in (*rows, *rest)}
    begun = [row for row in (*rows, *rest) if row["previous"] is not None]
    for row in begun:
        if row["feed"] not in altered:
            hashed = payload_hash(row["payload"])
            assert block_link(row["feed"], row["seq"], row["previous"], hashed) == row["link"]
        before = depths.get((row["feed"], row["seq"] - 1, row["previous"]))
        assert row["previous_depth"] == (0 if row["seq"] == 0 else before or row["depth"] - 1)
    assert len(rest) > 100
    assert sum(row["seq"] > 0 for row in begun) == 5 + 3, "five feeds go on later; two forks and a gap"


def test_operations_name_only_what_their_writers_have_heard_of(tmp_path: Path) -> None:
    shape = Shape(feeds=7, messages=1500, items=80, mix=(("threaded-log", 3), ("property-set", 1)))
    rows, (party,) = rows_of(shape, tmp_path)
    clocks: dict[tuple[FeedId, int], dict[FeedId, int]] = {}
    replies = 0
    for row in sorted((row for row in rows if not row["control"]), key=lambda row: row["depth"]):
        envelope = decode_envelope(row["payload"], DATA)
        assert isinstance(envelope, Envelope)
        feed, seq = feed_id(row["feed"]), row["seq"]
        clock = dict(clocks.get((feed, seq - 1), {}))
        for named in envelope.dependencies:
            for other, last in (*clocks.get((named.feed, named.seq), {}).items(), (named.feed, named.seq)):
                clock[other] = max(clock.get(other, -1), last)
        clock[feed] = seq
        clocks[feed, seq] = clock
        for operation in decode_operations(envelope.body, party=party.party, feed=feed, seq=seq):
            assert item_local(operation.item) >> 16 <= clock.get(item_creator(operation.item), -1)
            reply = getattr(operation.body, "reply_to", None)
            if isinstance(reply, PostId):
                assert reply.seq <= clock.get(reply.feed, -1)
                replies += 1
    assert replies > 50


# what a peer says


class Made:
    """A generated lake with the answers of a peer."""

    def __init__(self, folder: Path, shape: Shape, **more: Any) -> None:
        self.lake = Lake.create(folder / "lake")
        self.made: MadeLake = generate(shape, self.lake, **more)
        self.answers = self.ask(folder)

    def ask(self, folder: Path, version: int | None = None) -> list[PartyAnswer]:
        home = (
            IN_MEMORY if IN_MEMORY.is_dir() else folder
        ) / f"observer-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
        try:
            return list(lake_answers(self.lake, home, version=version))
        finally:
            _remove(home)


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def adds_up(answer: PartyAnswer) -> bool:
    unheld = sum(each.end - each.start for each in answer.unheld)
    counted = answer.applied + answer.rejected_blocks + answer.waiting + answer.branches + unheld
    return answer.messages == counted


@pytest.mark.parametrize(
    "shape",
    [
        Shape(feeds=6, messages=1500, items=120),
        Shape(feeds=4, messages=900, items=60, mix=MIXED, skew=0.3),
        Shape(parties=4, feeds=2, messages=120, items=20, mix=MIXED),
        Shape(feeds=3, messages=10, items=9),
        Shape(feeds=1, messages=1, items=0),
    ],
    ids=["properties", "mixed", "parties", "items", "empty"],
)
def test_a_peer_takes_all_of_an_honest_lake(tmp_path: Path, shape: Shape) -> None:
    made = Made(tmp_path, shape)
    assert len(made.answers) == shape.parties
    for answer in made.answers:
        assert (answer.rejected, answer.unheld, answer.waiting) == ((), (), 0)
        assert answer.applied == answer.messages
    assert sum(answer.items for answer in made.answers) == shape.items + shape.parties
    assert sum(answer.messages for answer in made.answers) == shape.messages


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("faulty")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHOSTORE_STATE", str(folder / "state"))
        yield Made(folder, Shape(feeds=5, messages=600, items=40, faults=len(KINDS)))


EXPECTED = {
    # kind: (rows of party.rejected() as (seq, position, reason, detail), blocks that no peer holds)
    "bad-link": ([], (4, 12, "bad-link")),
    "bad-signature": ([], (4, 8, "bad-signature")),
    "gap": ([], (8, 12, "gap")),
    "proven-fork": ([(4, -1, "fork", "")], None),
    "lying-depth": (
        [(4, -1, "invalid", "lying-depth")] + [(seq, -1, "after-invalid", "") for seq in (5, 6, 7)],
        None,
    ),
    "timeframe-backwards": (
        [(4, -1, "invalid", "timeframe-backwards")] + [(seq, -1, "after-invalid", "") for seq in (5, 6, 7)],
        None,
    ),
    "unadmitted": ([], (0, 8, "unadmitted")),
    "beyond-cut": ([(seq, -1, "beyond-cut", "") for seq in (4, 5, 6, 7)], None),
    "reader": ([(seq, -1, "reader", "") for seq in range(8)], None),
    "undecodable": (
        [(4, -1, "invalid", "undecodable")] + [(seq, -1, "after-invalid", "") for seq in (5, 6, 7)],
        None,
    ),
    "malformed": ([(4, -1, "malformed", "an operation without a kind")], None),
    "no-item": ([(4, 0, "no-item", ...)], None),
    "waiting": ([], None),
    "fork": ([], (4, 7, "fork")),
    "no-parent": ([(4, 0, "no-parent", ...), (4, 1, "no-item", ...)], None),
    "wrong-model": ([(4, 1, "wrong-model", ...)], None),
    "forged-writer": ([(4, 1, "forged-writer", ...)], None),
    "denied": ([(seq, 0, "denied", ...) for seq in (5, 6, 7, 8)], None),
    "retired": ([(seq, -1, "retired", "") for seq in (4, 5, 6, 7)], None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_is_answered_by_its_reason_and_concerns_its_own_feed(faulty: Made, kind: str) -> None:
    (answer,) = faulty.answers
    (fault,) = [fault for fault in faulty.made.parties[0].faults if fault.kind == kind]
    rows, unheld = EXPECTED[kind]
    found = [reject for reject in answer.rejected if reject.feed == fault.feed]
    assert [(row.seq, row.position, row.reason) for row in found] == [row[:3] for row in rows]
    for row, (*_, detail) in zip(found, rows, strict=True):
        assert row.detail == detail if detail is not ... else row.detail
    apart = [(each.start, each.end, each.reason) for each in answer.unheld if each.feed == fault.feed]
    assert apart == ([] if unheld is None else [unheld])
    concerned = [row.seq for row in found] + [start for start, _, _ in apart]
    assert min(concerned, default=fault.seq) == fault.seq


def test_faults_leave_everything_else_as_it_is(faulty: Made) -> None:
    (answer,) = faulty.answers
    (party,) = faulty.made.parties
    assert set(KINDS) == set(EXPECTED)
    assert adds_up(answer)
    assert (answer.waiting, answer.branches) == (4, 6)
    assert answer.messages == party.messages + sum(fault.blocks for fault in party.faults)
    named = {fault.feed for fault in party.faults}
    assert {reject.feed for reject in answer.rejected} | {each.feed for each in answer.unheld} <= named
    # Items: the honest ones with the system item, one of each fault that a peer holds the first block of, the two
    # witnesses of the fork, and those that faults make on top.
    assert answer.items == 41 + len(KINDS) - 2 + 2 + 2


def test_kinds_of_faults_take_turns_over_parties() -> None:
    shape = Shape(parties=5, feeds=2, messages=50, items=5, faults=23)
    parts = [shape.part(number) for number in range(5)]
    assert [part.faults for part in parts] == [5, 5, 5, 4, 4]
    assert [part.first_fault() for part in parts] == [0, 5, 10, 15, 19]


def test_the_last_share_is_a_version_of_its_own(tmp_path: Path) -> None:
    shape = Shape(parties=2, feeds=6, messages=900, items=60, mix=(("property-set", 3), ("text", 1)))
    made = Made(tmp_path, shape, last=0.1)
    assert (made.made.first_version, made.made.version) == (1, 2)
    first = made.ask(tmp_path, version=1)
    for before, after in zip(first, made.answers, strict=True):
        assert before.cid != after.cid
        assert (before.waiting, before.rejected, before.unheld) == (0, (), ()), "a closed cut"
        assert 0.05 < (after.messages - before.messages) / after.messages < 0.15
    whole = Made(tmp_path / "whole", shape)
    assert [answer.cid for answer in whole.answers] == [answer.cid for answer in made.answers]


def test_a_shape_lies_beside_others_in_one_lake_and_is_added_once(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    shape = Shape(feeds=3, messages=60, items=6)
    assert generate(shape, lake).version == 1
    assert generate(shape, lake).version == 1, "all of it is there"
    assert generate(Shape(feeds=3, messages=60, items=6, seed=2), lake).version == 2
    assert len(set(lake.at().runs()["party"].to_pylist())) == 2
    rows = sum(each.rows for each in lake.at().files)
    assert rows == 2 * (60 + 2 + 2), "two control messages of the founder, one of each other member"


def test_the_system_item_and_the_genesis_come_first(tmp_path: Path) -> None:
    rows, parties = rows_of(Shape(feeds=3, messages=30, items=3), tmp_path)
    systems = []
    for row in rows:
        if not row["control"]:
            envelope = decode_envelope(row["payload"], DATA)
            assert isinstance(envelope, Envelope)
            feed = feed_id(row["feed"])
            for operation in decode_operations(envelope.body, party=PartyKey(row["party"]), feed=feed, seq=row["seq"]):
                assert operation.field != CUSTOM
                if operation.field == GENESIS and operation.body.type == SYSTEM_TYPE:
                    systems.append((row["seq"], operation.item))
    assert [seq for seq, _ in systems] == [0]
    assert parties[0].title == "Party 1"
    assert systems[0][1] != ItemId(bytes(16))


# arguments


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"items": 1000}, "items need as many messages"),
        ({"parties": 101}, "parties need as many messages"),
        ({"feeds": 0}, "feeds must be 1 to"),
        ({"skew": 1.5}, "skew must be 0 to 1"),
        ({"seed": -1}, "seed must be"),
        ({"writers_per_item": 0}, "writers per item"),
        ({"mix": ()}, "models are"),
        ({"mix": (("sum", 1),)}, "models are"),
    ],
)
def test_shapes_that_can_t_be_made_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Shape(**{"messages": 100, "items": 10, **changed})


@pytest.mark.parametrize("text", ["", "text=", "text=0", "text=-1", "text=x", "text,text", "tex", "text=1;log=2"])
def test_a_mix_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a share of a model"):
        parse_mix(text)
    assert parse_mix(" text , property-set=3 ") == (("text", 1), ("property-set", 3))


# the command


def test_the_command_makes_a_lake_and_writes_the_answers(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    arguments = "lake generate --parties 2 --feeds 3 --messages 120 --items 12 --faults 4 --last 0.2 --json"
    paths = ("--lake", str(tmp_path / "lake"), "--expect", str(tmp_path / "answers.json"))
    made = cli(*arguments.split(), *paths).ok().json()
    assert (made["lake_version"], made["first_version"], made["items"]) == (2, 1, 12)
    assert made["messages"] == 120 + sum({"bad-link": 12, "bad-signature": 8, "gap": 8, "proven-fork": 12}.values())
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert [party["party"] for party in answers["parties"]] == sorted(party["party"] for party in made["parties"])
    assert {fault["kind"] for party in answers["parties"] for fault in party["faults"]} == set(list(KINDS)[:4])
    for party in answers["parties"]:
        unheld = sum(each["end"] - each["start"] for each in party["unheld"])
        assert party["messages"] == sum(
            (party["applied"], party["waiting"], party["branches"], party["rejected_blocks"], unheld)
        )
        assert party["cid"].startswith("bafi")
    assert answers["first"]["lake_version"] == 1
    assert {party["cid"] for party in answers["first"]["parties"]}.isdisjoint(
        party["cid"] for party in answers["parties"]
    )
    assert sum(reject["reason"] == "fork" for party in answers["parties"] for reject in party["rejected"]) == 1


def test_the_command_makes_a_tenth_as_many_items_and_leaves_no_trace_of_the_observer(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    paths = ("--lake", str(tmp_path / "lake"), "--expect", str(tmp_path / "answers.json"))
    ran = cli("lake", "generate", "--feeds", "2", "--messages", "70", *paths).ok()
    assert "70 messages of 1 party" in ran.out
    (party,) = json.loads((tmp_path / "answers.json").read_text())["parties"]
    assert party["items"] == 7 + 1
    assert [path for path in (tmp_path / "state").rglob("*") if path.is_file()] == []
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        ("--models nonsense", 2, "MODEL=WEIGHT"),
        ("--items 5000", 2, "items need as many messages"),
        ("--expect {folder}/nowhere/answers.json", 2, "no folder for"),
        ("--skew 3", 2, "skew"),
    ],
)
def test_the_command_refuses_what_it_can_t_make_and_writes_nothing(
    tmp_path: Path, arguments: str, status: int, told: str
) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    given = [word.format(folder=tmp_path) for word in arguments.split()]
    ran = cli("lake", "generate", "--lake", str(tmp_path / "lake"), *given)
    assert (ran.status, ran.out) == (status, "")
    assert told in ran.err
    assert not (tmp_path / "lake").exists()
