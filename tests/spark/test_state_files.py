"""Item states in files: several buckets in one row group, several turns of one item, buckets that were written whole."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.writing import Place
from echostore.pipeline.schemas import ITEM_STATES, STATE_INDEX, TOPS
from echostore.pipeline.stages import state_files
from echostore.pipeline.stages.parcels import unpacked
from echostore.pipeline.stages.state_files import (
    StateWriter,
    by_bucket,
    index_parcels,
    read_index,
    read_states,
    states_noted,
)
from echostore.pipeline.stages.subtrees import Subtrees

ONE, OTHER = b"\x01" * 32, b"\x02" * 32


def _states(party: bytes, items: dict[int, str | None]) -> pa.Table:
    """States of items by number; None: gone."""
    rows = []
    for number, text in items.items():
        item = number.to_bytes(16, "big")
        blank: dict[str, Any] = dict.fromkeys(ITEM_STATES.names)
        blank |= {"party": party, "item_key": sha256(item).digest(), "item": item, "gone": text is None}
        blank |= {"model": "m", "version": 1, "genesis_depth": 1, "guarded": False, "state": (text or "").encode()}
        rows.append(blank)
    table = pa.Table.from_pylist(rows, ITEM_STATES)
    return table.sort_by([("party", "ascending"), ("item_key", "ascending")])


class Kept:
    """Writes states turn by turn, and reads what counts."""

    def __init__(self, folder: Path, nibbles: dict[bytes, int]) -> None:
        (folder / "a").mkdir()
        self.place, self.nibbles = Place(str(folder), "a"), nibbles
        self.index: list[Any] = []
        self.groups = 0

    def write(self, turn: int, states: pa.Table, *, whole: bool = False, only: str | None = None) -> None:
        parts = [part for part in by_bucket(states, self.nibbles) if only is None or part[1] == only]
        files = StateWriter(self.place, turn).write(parts, whole=whole)
        self.index += files["state_index"]

    def rows(self) -> pa.Table:
        named = [{"path": f.path, "sha256": f.sha256, "bytes": f.bytes, "rows": f.rows} for f in self.index]
        table = read_index(self.place.out, named)
        assert table.schema.equals(STATE_INDEX)
        return table

    def read(self, buckets: dict[bytes, set[str]], depth: int) -> dict[tuple[bytes, int], tuple[str, int]]:
        """(party, item) -> (state, turn), of items that are not gone."""
        parcels = index_parcels(self.rows(), dict.fromkeys(buckets, depth))
        notes = [each["note"] for each in parcels if each["bucket"] in buckets[each["party"]]]
        table, turns = read_states(self.place.out, states_noted(notes), buckets)
        assert table.equals(table.sort_by([("party", "ascending"), ("item_key", "ascending")]))
        return {
            (row["party"], int.from_bytes(row["item"], "big")): (row["state"].decode(), int(turn))
            for row, turn in zip(table.to_pylist(), turns, strict=True)
            if not row["gone"]
        }


def _bucket(number: int, depth: int = 1) -> str:
    return sha256(number.to_bytes(16, "big")).hexdigest()[:depth]


EVERY = {f"{digit:x}" for digit in range(16)}


def test_buckets_share_row_groups_and_are_read_apart(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {ONE: 1})
    kept.write(1, _states(ONE, dict.fromkeys(range(100), "new")))
    index = kept.rows()
    assert len(index) == 16
    assert set(index["group"].to_pylist()) == {0}
    for bucket in sorted(EVERY):
        wanted = {number for number in range(100) if _bucket(number) == bucket}
        assert {number for _, number in kept.read({ONE: {bucket}}, 1)} == wanted


def test_large_buckets_have_row_groups_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "GROUP_ROWS", 10)
    kept = Kept(tmp_path, {ONE: 1})
    kept.write(1, _states(ONE, dict.fromkeys(range(100), "new")))
    groups = kept.rows()["group"].to_pylist()
    assert len(set(groups)) > 7
    assert len(kept.read({ONE: EVERY}, 1)) == 100
    for bucket in sorted(EVERY):
        wanted = {number for number in range(100) if _bucket(number) == bucket}
        assert {number for _, number in kept.read({ONE: {bucket}}, 1)} == wanted


def test_states_ascend_by_key_however_their_files_follow_each_other(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {ONE: 1})
    states = _states(ONE, dict.fromkeys(range(100), "new"))
    kept.write(1, states, only="f")
    kept.write(2, states, only="0")
    wanted = {number for number in range(100) if _bucket(number) in "0f"}
    assert {number for _, number in kept.read({ONE: {"0", "f"}}, 1)} == wanted


def test_a_top_stands_for_the_items_that_are_left(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    made = Subtrees(Place(str(tmp_path), "a"), 7)
    previous = _states(ONE, dict.fromkeys(range(6), "before"))
    made.add_changed(_states(ONE, {2: None, 3: "now", 9: "new", 8: None}), previous, {ONE: 0}, lambda *place: None)
    [file] = made.write()["tops"]
    [top] = read_table(str(tmp_path), file, TOPS).to_pylist()
    entries = dict(zip(*(unpacked(top["entries"])[name].to_pylist() for name in ("item", "encoded")), strict=True))
    left = {0: b"before", 1: b"before", 3: b"now", 4: b"before", 5: b"before", 9: b"new"}
    assert entries == {number.to_bytes(16, "big"): text for number, text in left.items()}
    assert top["count"] == 6


def test_the_latest_turn_counts_and_what_is_gone_stays_gone(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {ONE: 1})
    kept.write(1, _states(ONE, dict.fromkeys(range(50), "new")))
    kept.write(7, _states(ONE, {3: "later", 4: None}))
    found = kept.read({ONE: EVERY}, 1)
    assert found[ONE, 3] == ("later", 7)
    assert found[ONE, 5] == ("new", 1)
    assert (ONE, 4) not in found
    assert len(found) == 49


def test_a_neighbour_in_an_old_row_group_brings_nothing_back(tmp_path: Path) -> None:
    """A bucket that was written whole without an item that is gone: its old row lies beside rows that still count."""
    kept = Kept(tmp_path, {ONE: 1})
    kept.write(1, _states(ONE, dict.fromkeys(range(50), "new")))
    kept.write(2, _states(ONE, {4: None}))
    left = {number: "new" for number in range(50) if number != 4}
    kept.write(3, _states(ONE, left), whole=True, only=_bucket(4))
    found = kept.read({ONE: EVERY}, 1)
    assert {number for _, number in found} == set(left)


def test_parties_that_are_cut_otherwise_share_files(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {ONE: 2, OTHER: 0})
    both = pa.concat_tables(
        [_states(ONE, dict.fromkeys(range(60), "one")), _states(OTHER, dict.fromkeys(range(9), "other"))]
    )
    kept.write(1, both)
    kept.write(2, _states(OTHER, dict.fromkeys(range(8), "whole")), whole=True)
    found = kept.read({ONE: {""}, OTHER: {""}}, 0)
    assert {number for party, number in found if party == ONE} == set(range(60))
    assert {number for party, number in found if party == OTHER} == set(range(8)), "the ninth was not in the whole one"


def test_buckets_that_are_cut_finer_later_find_their_items(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {ONE: 0})
    kept.write(1, _states(ONE, dict.fromkeys(range(100), "new")))
    wanted = {number for number in range(100) if _bucket(number, 2)[0] == "3"}
    buckets = {_bucket(number, 2) for number in wanted}
    assert {number for _, number in kept.read({ONE: buckets}, 2)} == wanted
