"""Placements of items on their way to the placement tree, without Spark: what came and went, lists, buckets and tops."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from echostore.kernel.ids import Cid, FeedId, ItemId, created_item_id
from echostore.kernel.snapshot import Placement, item_key, placement_key, placements_of
from echostore.pipeline.output import merging
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.record import NamedFile
from echostore.pipeline.output.writing import Place, named_files, named_rows
from echostore.pipeline.schemas import BLOBS, PLACE_CHANGES, PLACE_LISTS, PLACE_TOPS
from echostore.pipeline.stages import placement_tops
from echostore.pipeline.stages.operation_columns import rows_table
from echostore.pipeline.stages.parcels import parcels_batch
from echostore.pipeline.stages.placement_changes import AGAIN, place_changes, raw_key, without_void
from echostore.pipeline.stages.placement_lists import CHANGE, PlacementList, array_of, split
from echostore.pipeline.stages.placement_tops import Placing, deal, party_placements, place_tops_to_parcels
from echostore.wire.placements import PlacementReader, build_placements
from echostore.wire.tree import NodeMap
from spark.state_rows import state_batch, state_row

FEED = FeedId(b"feed-one")
PARTY, OTHER = b"p" * 32, b"q" * 32


def item(number: int) -> ItemId:
    return created_item_id(FEED, number, 0)


def placement(number: int, place: int) -> Placement:
    return placements_of(item(number), item(10**6 + place), b"")[0]


def crowd(count: int, places: int, start: int = 0) -> list[Placement]:
    return [placement(number, number % places) for number in range(start, start + count)]


def test_keys_are_those_of_the_tree() -> None:
    for each in crowd(50, 7):
        assert raw_key(each).hex() == placement_key(each)


# what came and went


def states(rows: dict[int, tuple[int | None, bytes] | None], party: bytes = PARTY) -> pa.Table:
    """Item -> its parent and its inception key, or None for one that is gone."""
    found = []
    for number, said in rows.items():
        row = state_row(party, item(number), "property-set", b"")
        parent, inception = said or (None, b"")
        parent_id = None if parent is None else item(parent)
        key = bytes.fromhex(item_key(item(number)))
        found.append(
            {**row, "item_key": key, "gone": said is None, "parent": parent_id, "inception": inception or None}
        )
    found.sort(key=lambda row: row["item_key"])
    return pa.Table.from_batches([state_batch(found)])


def said(changes: pa.Table) -> set[tuple[bytes, Placement, bool]]:
    return {(row["party"], row["placement"], row["gone"]) for row in changes.to_pylist()}


def test_only_items_that_come_go_or_hang_elsewhere_are_told() -> None:
    key = b"k" * 32
    before = states({1: (50, b""), 2: (None, b""), 3: (51, key), 4: (52, b""), 5: None, 6: (53, b"")})
    after = states({1: (50, b""), 2: (None, b""), 3: None, 4: (54, b""), 5: (55, b""), 7: (50, key), 8: (None, b"")})
    changes = place_changes(after, before, {PARTY: 2}, 9)
    below, view = placements_of(item(3), item(51), key)
    wanted = {(PARTY, below, True), (PARTY, view, True)}
    wanted |= {(PARTY, placements_of(item(4), item(52), b"")[0], True)}
    wanted |= {(PARTY, placements_of(item(4), item(54), b"")[0], False)}
    wanted |= {(PARTY, placements_of(item(5), item(55), b"")[0], False)}
    wanted |= {(PARTY, each, False) for each in placements_of(item(7), item(50), key)}
    assert said(changes) == wanted
    for row in changes.to_pylist():
        assert (row["turn"], row["bucket"]) == (9, placement_key(Placement(row["placement"]))[:2])
    again = said(place_changes(after, before, {PARTY: 0}, 9, every=True))
    assert again == wanted | {(PARTY, placements_of(item(1), item(50), b"")[0], False)}


def test_items_of_two_parties_are_not_mixed_up() -> None:
    before = pa.concat_tables([states({1: (50, b"")}), states({2: (50, b"")}, OTHER)])
    after = pa.concat_tables([states({1: (50, b""), 2: (50, b"")}), states({1: (50, b""), 2: None}, OTHER)])
    one, two = (placements_of(item(number), item(50), b"")[0] for number in (1, 2))
    found = place_changes(after, before, {PARTY: 0, OTHER: 1}, 1)
    assert said(found) == {(PARTY, two, False), (OTHER, one, False), (OTHER, two, True)}


def test_what_an_earlier_round_said_of_an_item_that_was_folded_again_is_void() -> None:
    one, two, three = (placement(number, 0) for number in (1, 2, 3))
    rows = [
        (PARTY, "", 100, raw_key(two), two, False),  # before all rounds: it stands
        (PARTY, "", 101, raw_key(one), one, False),
        (PARTY, "", 101, raw_key(three), three, False),
        (OTHER, "", 101, raw_key(one), one, False),
        (PARTY, "", 102, raw_key(one), one, True),
        (PARTY, "", 103, raw_key(two), two, False),
    ]
    again = rows_table([(PARTY, item(1), 3), (PARTY, item(2), 3)], AGAIN)
    changes = rows_table(rows, PLACE_CHANGES)
    found = without_void(changes, 100, again)
    assert found["gone"].to_pylist() == [False, True, False, False, True, False]
    assert found.drop_columns(["gone"]).equals(changes.drop_columns(["gone"]))
    assert without_void(changes, 100, None).equals(changes)


# lists


def listed(placements: Iterable[Placement]) -> PlacementList:
    return PlacementList(array_of(b"".join(sorted(placements, key=raw_key))))


def changes_of(rows: Iterable[tuple[Placement, int, bool]]) -> np.ndarray[Any, Any]:
    found = [(np.frombuffer(raw_key(each), np.uint8), np.frombuffer(each, np.uint8), *more) for each, *more in rows]
    return np.array(found, CHANGE)


@pytest.mark.parametrize(
    ("count", "fresh", "gone"), [(0, 40, 0), (300, 3, 5), (300, 200, 90), (900, 1, 0), (200, 0, 200)]
)
def test_a_list_takes_in_changes_few_and_many(count: int, fresh: int, gone: int) -> None:
    """Also repeated ones, and such that change nothing; of one placement the last word counts."""
    chance = random.Random(count + fresh)
    old = crowd(count, 5)
    new, away = crowd(fresh, 3, start=10_000), chance.sample(old, gone)
    idle = [
        (each, 5, False) for each in chance.sample([each for each in old if each not in away], min(2, count - gone))
    ]
    rows = [(each, 7, False) for each in new] + [(each, 7, True) for each in away] + idle
    rows += [(each, 3, True) for each in new] + [(each, 3, False) for each in away]
    rows += [(placement(77_777, 1), 9, True)]
    chance.shuffle(rows)
    changed = listed(old).changed(changes_of(rows))
    now = {*old, *new} - {*away}
    assert changed.now.placements() == sorted(now, key=raw_key)
    assert split(changed.added) == sorted(new, key=raw_key)
    assert split(changed.gone) == sorted(away, key=raw_key)
    assert bool(changed) == bool(new or away)
    before = listed(old).rows.tobytes()
    replayed = PlacementList.of([(before, b""), (changed.added.tobytes(), changed.gone.tobytes())])
    assert np.array_equal(replayed.rows, changed.now.rows)


@pytest.mark.parametrize("many", [False, True])
def test_a_subtree_is_that_of_its_placements_and_only_new_blobs_are_put(many: bool) -> None:
    old = crowd(3000, 6)
    nodes, blobs = NodeMap(), {}
    build_placements(old, blobs.__setitem__, cache=nodes)
    fresh = [placement(number, 0) for number in range(50_000, 50_900 if many else 50_004)]
    changed = listed(old).changed(changes_of([(each, 1, False) for each in fresh] + [(old[7], 1, True)]))
    assert (changed.keys is not None) is many
    put: dict[Cid, bytes] = {}
    top, _ = changed.subtree("", nodes, put.__setitem__)
    wanted: dict[Cid, bytes] = {}
    assert top == build_placements({*old, *fresh} - {old[7]}, wanted.__setitem__)
    assert wanted.keys() & blobs.keys(), "what hangs at other places stays"
    assert put.keys() == wanted.keys() - blobs.keys()


# buckets


class Bucketed:
    """A party's placements through the task, run after run, as commits would keep them."""

    def __init__(self, out: Path) -> None:
        self._place = Place(str(out), "epoch=1/attempt=" + "0" * 32)
        (out / self._place.folder).mkdir(parents=True)
        self.turn = 0
        self.tops: list[dict[str, Any]] = []
        self.blobs: dict[Cid, bytes] = {}
        self.files: dict[str, list[NamedFile]] = {}

    def run(self, rows: Iterable[tuple[Placement, bool]], messages: int, depth: int) -> None:
        self.turn += 10
        told = [(PARTY, raw_key(each).hex()[:depth], self.turn, raw_key(each), each, gone) for each, gone in rows]
        parcels = list(deal(rows_table(told, PLACE_CHANGES)))
        known = pa.Table.from_pylist(self.tops, PLACE_TOPS)
        known = known.append_column("messages", pa.repeat(pa.scalar(messages), len(known)))
        notes = [row for batch in place_tops_to_parcels(iter(known.to_batches())) for row in batch.to_pylist()]
        parcels = sorted([*parcels, *notes], key=lambda row: (row["party"], row["bucket"]))
        (made,) = Placing(self._place, self.turn)(iter([parcels_batch(parcels)]))
        self.files = named_files(made.to_pylist())
        self.tops += self.rows("place_tops", PLACE_TOPS)
        self.blobs |= {Cid(row["cid"]): row["data"] for row in self.rows("blobs", BLOBS)}

    def merge(self) -> None:
        """As a commit does that finds many small files."""
        file = self._place.write("place_tops", PLACE_TOPS, [pa.RecordBatch.from_pylist(self.tops, PLACE_TOPS)])
        assert file is not None
        (made,) = merging._Merging(self._place, "place_tops", None)(iter([named_rows({"place_tops": [file]})]))
        self.files = named_files(made.to_pylist())
        self.tops = self.rows("place_tops", PLACE_TOPS)

    def rows(self, kind: str, schema: pa.Schema) -> list[dict[str, Any]]:
        return [
            row for file in self.files.get(kind, ()) for row in read_table(self._place.out, file, schema).to_pylist()
        ]

    def check(self, wanted: set[Placement]) -> None:
        """That this is the tree of these placements, and that every blob of it was put."""
        above: dict[Cid, bytes] = {}
        top = party_placements(self.tops, above.__setitem__)
        assert top == build_placements(wanted, {}.__setitem__)
        reader = PlacementReader(top.cid, {**self.blobs, **above}.get)
        assert set(reader.all()) == wanted


DEPTHS = [(100, 0), (9000, 1), (200_000, 2)]
"""Messages, and by how many nibbles a party with so many is spread."""


@pytest.mark.parametrize(("messages", "depth"), DEPTHS)
def test_buckets_joined_are_the_tree_of_all_placements(messages: int, depth: int, tmp_path: Path) -> None:
    chance = random.Random(depth)
    told = Bucketed(tmp_path)
    told.check(set())
    now: set[Placement] = set()
    start = 0
    for fresh, gone in ((0, 0), (20, 0), (900, 10), (5, 5), (3, 0), (0, 880), (400, 30), (0, 403)):
        new = set(crowd(fresh, 9, start=start))
        start += fresh
        away = set(chance.sample(sorted(now), gone))
        told.run([*((each, False) for each in new), *((each, True) for each in away)], messages, depth)
        now = (now | new) - away
        told.check(now)
    assert not now
    assert all(row["count"] == 0 for row in told.tops[-1:])


def test_a_party_that_grows_is_cut_anew_once_with_all_its_placements(tmp_path: Path) -> None:
    told = Bucketed(tmp_path)
    now = set(crowd(700, 40))
    told.run([(each, False) for each in now], *DEPTHS[0])
    for messages, depth in (*DEPTHS[1:], DEPTHS[0]):
        new, away = placement(5000 + depth, 3), min(now)
        told.run([(new, False), (away, True)], messages, depth)
        now = {*now, new} - {away}
        told.check(now)
        assert len(told.rows("place_tops", PLACE_TOPS)) == 16**depth, "empty buckets say so too"
        # And what was there before the cut does not come back.
        told.run([(away, False)], messages, depth)
        now.add(away)
        told.check(now)
        assert len(told.rows("place_tops", PLACE_TOPS)) == 1


def test_a_list_grows_by_what_came_and_is_written_whole_now_and_then(tmp_path: Path) -> None:
    told = Bucketed(tmp_path)
    now = set(crowd(4000, 2))
    told.run([(each, False) for each in now], *DEPTHS[0])
    sizes = []
    for number in range(2 * placement_tops.MERGE_AT + 1):
        new = placement(9000 + number, 0)
        told.run([(new, False)], *DEPTHS[0])
        now.add(new)
        told.check(now)
        ((added, gone),) = ((row["added"], row["gone"]) for row in told.rows("place_lists", PLACE_LISTS))
        assert not gone
        sizes.append(len(added) // 32)
        assert len(told.rows("blobs", BLOBS)) <= 16
    whole = [size for size in sizes if size > 1]
    assert len(whole) == 2
    assert all(size > 4000 for size in whole)
    # Rows below the last whole one are of no use, and go when files are merged.
    last = max(row["turn"] for row in told.tops if row["whole"])
    wanted = [row for row in told.tops if row["turn"] >= last]
    assert 1 < len(wanted) < len(told.tops)
    told.merge()
    assert told.tops == wanted
    told.run([(min(now), True)], *DEPTHS[0])
    told.check(now - {min(now)})


def test_where_nothing_comes_or_goes_nothing_is_written(tmp_path: Path) -> None:
    told = Bucketed(tmp_path)
    now = set(crowd(600, 4))
    told.run([(each, False) for each in now], *DEPTHS[1])
    told.run([*((each, False) for each in now), (placement(70_000, 1), True)], *DEPTHS[1])
    assert told.files == {}
    told.check(now)


def test_one_place_with_very_many_items_is_one_bucket(tmp_path: Path) -> None:
    told = Bucketed(tmp_path)
    now = set(crowd(20_000, 1))
    told.run([(each, False) for each in now], *DEPTHS[2])
    assert len(told.tops) == 1
    told.check(now)
    told.run([(placement(50_000, 0), False)], *DEPTHS[2])
    now.add(placement(50_000, 0))
    told.check(now)
    assert len(told.rows("blobs", BLOBS)) <= 16
