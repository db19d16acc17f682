"""The bucket reducer against the kernel's own fold: bytes of items, rejects, moves; at once and in steps."""

import random
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from echostore.kernel.ids import ItemId, PartyKey, Stamp, created_item_id, item_from_text
from echostore.kernel.items.operations import GENESIS, ItemOperation
from echostore.kernel.items.record import Genesis
from echostore.pipeline.schemas import ASKED_ITEMS, EDGES, ITEM_STATES, PLAIN_CHANGES, REST_OPERATIONS
from echostore.pipeline.stages.fold_rounds import Findings, Items, Round, flagged, run_rounds
from echostore.pipeline.stages.operation_columns import (
    CREATED,
    LACKED,
    WANTED,
    concerned,
    read_operations,
    rows_table,
)
from echostore.pipeline.stages.parcels import pack, parcels_batch, unpack
from echostore.pipeline.stages.property_columns import combine, item_halves
from echostore.pipeline.stages.reduce_bucket import Writers, reduce_bucket
from spark.bucket_world import PARTY, Answer, Block, RandomParty, Writer, factory, oracle, payload_columns

SEEDS = 25


class LocalEngine:
    """Rounds without Spark, over one party. Keeps what a commit would keep, and takes blocks in steps."""

    def __init__(self, party: RandomParty, *, nibbles: int = 0, batch: int = 7) -> None:
        self.party, self.nibbles, self.batch = party, nibbles, batch
        self.factory = factory()
        self.states: dict[bytes, dict[str, Any]] = {}
        self.rejects: dict[tuple[bytes, int, int], dict[str, Any]] = {}
        self.moves: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.blocks: list[Block] = []
        self.rounds = 0

    def take(self, blocks: list[Block]) -> None:
        self.blocks += blocks
        self._new = blocks
        self._results: list[dict[str, Any]] = []
        self._refolded: set[bytes] = set()
        again = run_rounds(self)
        self.rounds = len(self._results)
        dead = {item for _, item in again.history}
        self.rejects = {place: row for place, row in self.rejects.items() if row["item"] not in dead}
        self.moves = {place: row for place, row in self.moves.items() if row["item"] not in dead}
        for number, result in enumerate(self._results, 1):
            for row in result["states"]:
                self.states[row["item"]] = row
            for name, kept, place in (
                ("rejects", self.rejects, ("feed", "seq", "position")),
                ("moves", self.moves, ("depth", "feed", "seq", "position")),
            ):
                for row in result[name]:
                    if again.rounds.get((PARTY, row["item"]), 0) <= number:
                        kept[tuple(row[part] for part in place)] = row
        self.states = {item: row for item, row in self.states.items() if not row["gone"]}

    def run(self, round: Round) -> Findings:
        blocks = self.blocks if round.history else self._new
        wanted = None if round.wanted is None else round.wanted[PARTY]
        parcels: list[dict[str, Any]] = []
        malformed: list[dict[str, Any]] = []
        for feed, (payloads, seqs) in payload_columns(blocks).items():
            plain, rest, asked = [], [], []
            for start in range(0, len(seqs), self.batch):
                part, at = payloads.slice(start, self.batch), seqs[start : start + self.batch]
                if wanted is None:
                    found = read_operations(part, at, party=PARTY, feed=feed)
                else:
                    creators, local = item_halves(pa.array(list(wanted), pa.binary()))
                    items = pl.DataFrame({"creator": creators, "local": local})
                    chosen = concerned(part, at, feed, items)
                    part, at = part.filter(pa.array(chosen)), at[chosen]
                    found = read_operations(part, at, party=PARTY, feed=feed, split=False).of(items)
                plain.append(_combined(found.plain))
                rest.append(found.rest)
                asked.append(found.asked)
                malformed += [
                    {"feed": feed, "seq": seq, "position": -1, "reason": "malformed", "detail": detail, "item": None}
                    for seq, detail in found.malformed
                ]
            parcels += pack(
                PARTY, self.nibbles,
                plain=pa.concat_tables(plain), rest=pa.concat_tables(rest), asked=pa.concat_tables(asked),
            )  # fmt: skip
        parcels += self._questions(wanted)
        random.Random(round.number).shuffle(parcels)
        found = [self._reduce(bucket, parcels, round) for bucket in sorted({parcel["bucket"] for parcel in parcels})]
        joined = {name: [row for each in found for row in getattr(each, name).to_pylist()] for name in _RESULTS}
        joined["rejects"] += malformed
        self._results.append(joined)
        gone = any(row["gone"] and row["item"] in self.states for row in joined["states"])
        if round.history:
            self._refolded |= set(wanted or ())
        edges = pa.concat_tables([each.edges for each in found]) if found else EDGES.empty_table()
        hard = pa.concat_tables([each.hard for each in found])
        return Findings(hard, flagged(edges), frozenset({PARTY} if gone else ()))

    def _reduce(self, bucket: str, parcels: list[dict[str, Any]], round: Round) -> Any:
        mine = pa.Table.from_batches([parcels_batch([parcel for parcel in parcels if parcel["bucket"] == bucket])])
        known = self._standing() if round.history else self.states
        previous = [row for row in known.values() if row["item_key"].hex().startswith(bucket)]
        writers = Writers({PARTY: self.party.role_at}, {PARTY: self.party.identity_of})
        return reduce_bucket(
            unpack(mine, pa.Table.from_pylist(previous, ITEM_STATES)),
            self.factory,
            absent=round.absent,
            writers=None if round.wanted is None else writers,
            history=round.history,
        )

    def _questions(self, wanted: frozenset[ItemId] | None) -> list[dict[str, Any]]:
        if wanted is not None:
            pairs = [(item, item) for item in wanted]
        else:
            pairs = [(missing, item) for _, item, missing in self.lacking(frozenset())]
        rows = [
            (*_halves(about), *_halves(child), 0, 0, 0, LACKED if wanted is None else WANTED) for about, child in pairs
        ]
        return list(
            pack(
                PARTY, self.nibbles, plain=PLAIN_CHANGES.empty_table(), rest=REST_OPERATIONS.empty_table(),
                asked=rows_table(rows, ASKED_ITEMS),
            )
        )  # fmt: skip

    def rivals(self, touched: Items) -> Items:
        return {}  # no two items claim one inception key here

    def edges(self, parties: frozenset[PartyKey]) -> pa.Table:
        rows = [row for result in self._results for row in result["edges"]]
        rows += [
            {
                "party": PARTY,
                "item": row["item"],
                "parent": row["parent"],
                "why": CREATED,
                "absent": False,
                "doubt": False,
            }
            for row in self.states.values()
            if row["parent"] is not None and row["item"] not in self._refolded
        ]
        standing = self._standing()
        gone = {row["item"] for result in self._results for row in result["states"] if row["gone"]}
        for row in rows:
            row["absent"] = row["parent"] not in standing and (row["absent"] or row["parent"] in gone)
        return pa.Table.from_pylist(rows, EDGES)

    def _standing(self) -> dict[bytes, dict[str, Any]]:
        """The states after the rounds so far."""
        latest = {**self.states, **{row["item"]: row for result in self._results for row in result["states"]}}
        return {item: row for item, row in latest.items() if not row["gone"]}

    def lacking(self, parties: frozenset[PartyKey]) -> list[tuple[PartyKey, ItemId, ItemId]]:
        return [
            (PARTY, ItemId(row["item"]), item_from_text(row["detail"]))
            for row in self.rejects.values()
            if row["reason"] in ("no-item", "no-parent")
        ]

    def answer(self) -> Answer:
        return Answer(
            {ItemId(item): row["state"] for item, row in self.states.items()},
            {
                (row["feed"], row["seq"], row["position"], row["reason"], row["detail"])
                for row in self.rejects.values()
            },
            sorted(
                (row["depth"], row["feed"], row["seq"], row["position"], row["item"], row["kind"], row["parent"])
                for row in self.moves.values()
            ),
        )  # fmt: skip


_RESULTS = ("states", "rejects", "moves", "edges")


def _halves(item: bytes) -> tuple[int, int]:
    return int.from_bytes(item[:8], "big"), int.from_bytes(item[8:], "big")


def _combined(plain: pa.Table) -> pa.Table:
    frame = pl.from_arrow(plain).with_columns(party=pl.lit(0, dtype=pl.UInt32))
    return combine(frame).select(PLAIN_CHANGES.names).to_arrow().cast(PLAIN_CHANGES)


def same(found: Answer, wanted: Answer) -> None:
    assert found.items.keys() == wanted.items.keys()
    for item, state in wanted.items.items():
        assert found.items[item] == state, item.hex()
    assert found.rejects == wanted.rejects
    assert found.moves == wanted.moves


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_party_at_once(seed: int) -> None:
    party = RandomParty(seed, feeds=2 + seed % 4)
    party.write(30 + 10 * (seed % 9))
    engine = LocalEngine(party, nibbles=seed % 3, batch=3 + seed % 40)
    engine.take(party.blocks)
    same(engine.answer(), oracle(party, party.blocks))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_party_in_steps(seed: int) -> None:
    """Any split that keeps each feed's order gives what one go gives: nothing else can be known of causes here."""
    party = RandomParty(1000 + seed, feeds=2 + seed % 3)
    party.write(120)
    engine = LocalEngine(party, nibbles=seed % 2, batch=11)
    chance = random.Random(seed)
    left = {writer.feed: [block for block in party.blocks if block.feed == writer.feed] for writer in party.writers}
    while any(left.values()):
        step = []
        for mine in left.values():
            count = chance.randrange(len(mine) + 1) if sum(map(len, left.values())) > 20 else len(mine)
            step += mine[:count]
            del mine[:count]
        engine.take(step)
    same(engine.answer(), oracle(party, party.blocks))


class OnePropertySet(RandomParty):
    """All writers change one property set, in every way there is."""

    def _operation(self, writer: Writer, stamp: Stamp) -> ItemOperation:
        if not self.items:
            item = created_item_id(writer.feed, stamp.seq, stamp.position)
            self.items.append((item, "property-set"))
            return ItemOperation(item, GENESIS, Genesis(item, "property-set", 1, "", None, stamp.depth))
        item, model = self.items[0]
        return ItemOperation(item, model, (self._change(writer, item, stamp),))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_property_set_block_by_block(seed: int) -> None:
    """What a step finds in the state is what the kernel would have there: sums and elements that nobody touched, and those
    that a plain write ends."""
    party = OnePropertySet(seed, feeds=2, odd=0.0)
    party.write(90)
    engine = LocalEngine(party)
    for at, block in enumerate(party.blocks, 1):
        engine.take([block])
        if at % 15 == 0:
            same(engine.answer(), oracle(party, party.blocks[:at]))


def test_an_entry_that_an_undo_put_back_stays_below_a_later_one() -> None:
    """Only what is fresh drops what lies below it."""

    def left(*rows: tuple[str, int, bool]) -> set[tuple[str, int]]:
        columns = {"party": 0, "creator": 1, "local": 1, "metadata": False, "feed": 7, "change": 0}
        frame = pl.DataFrame([{**columns, "path": path, "place": place, "fresh": fresh} for path, place, fresh in rows])
        return set(combine(frame).select("path", "place").iter_rows())

    kept = (("a", 5, False), ("a\0x", 3, False))
    assert left(*kept, ("b", 9, True)) == {("a", 5), ("a\0x", 3), ("b", 9)}
    assert left(*kept, ("a", 9, True)) == {("a", 9)}
    assert left(*kept, ("a\0x", 9, True)) == {("a", 5), ("a\0x", 9)}
