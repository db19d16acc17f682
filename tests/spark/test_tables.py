"""The tables that analysts read: what views show of several commits, and the examples of the document."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import echostore
from echostore.kernel.errors import Corrupt, NotFound, UsageError
from echostore.kernel.ids import item_text
from echostore.kernel.models.factory import ModelFactory
from echostore.pipeline import schemas
from echostore.pipeline.output import reading
from echostore.pipeline.output.attempt import Attempt
from echostore.pipeline.output.files import read_table
from echostore.pipeline.output.item_rows import flattened, typed
from echostore.pipeline.output.party_rows import member_rows, placement_rows, reject_rows
from echostore.pipeline.output.record import LakePoint, StageTime
from echostore.pipeline.output.results import BUILT, PartyResult, latest_result, party_results, results_table
from echostore.pipeline.output.table_schemas import DEFAULT_TABLES, MEMBERS, PARTIES, PLACEMENTS, REJECTS, RUNS, TABLES
from echostore.pipeline.output.views import open_views
from echostore.pipeline.output.writing import Place, write_item_tables
from echostore.wire.items import encode_record
from echostore.wire.values import value_from_bytes
from spark.state_rows import state_batch, state_row

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operate" / "tables.md"
FACTORY = ModelFactory(value_from_bytes)


class Story:
    """A peer's party whose changed items are committed as the pipeline does it, without the stages before."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark = spark
        self.out = folder / "out"
        self.peer = echostore.open(folder / "home", name="Ann", background=False)
        self.party = self.peer.create_party("Trip")
        self._before: dict[bytes, bytes] = {}
        self.since = 1

    def commit(self, tables: tuple[str, ...] = DEFAULT_TABLES, gone: tuple[bytes, ...] = ()) -> None:
        rows = []
        for item, state in self.states().items():
            if self._before.get(item) != state and item not in gone:
                record = self.party.runtime.state.record(item)
                rows.append(state_row(self.party.key, item, record.genesis.model, state))
        rows += [state_row(self.party.key, item, "", b"", gone=True) for item in gone]
        self._before = self.states()
        with Attempt.begin(self.out, now_ms=1_700_000_000_000) as attempt:
            number = attempt.number
            states = attempt.write("states", schemas.ITEM_STATES, [state_batch(rows)])
            place = Place(str(self.out), attempt.folder)
            files: dict[str, Any] = write_item_tables(
                self.spark, place, states, number, models=None, tables=tables, collect=lambda frame: frame.collect()
            )
            files["states"] = states
            files["parties"] = attempt.write("parties", PARTIES, results_table([self.result(number)]).to_batches())
            files["table_members"] = attempt.write("table_members", MEMBERS, [self.members(number)])
            files["table_rejects"] = attempt.write("table_rejects", REJECTS, [self.rejects(number)])
            files["table_placements"] = attempt.write("table_placements", PLACEMENTS, [self.placements(number)])
            files["table_runs"] = attempt.write("table_runs", RUNS, [run_rows(number)])
            if attempt.base is not None:
                for kind, carried in attempt.base.files.items():
                    files[kind] = (*carried, *files.get(kind, ()))
            attempt.commit(
                files=files,
                lake=LakePoint(1, ""),
                stages=(StageTime("all", 1, 1.0),),
                settings={"tables": list(tables)},
            )

    def states(self) -> dict[bytes, bytes]:
        self.party.flush()
        runtime = self.party.runtime
        runtime.state.settle()
        return {
            item: encode_record(runtime.state.record(item)).SerializeToString(deterministic=True)
            for item in runtime.all_items()
        }

    def result(self, number: int) -> PartyResult:
        return PartyResult(
            party=self.party.key,
            root_party=self.party.key,
            state=BUILT,
            since=self.since,
            built=number,
            epoch=number,
            cid=self.party.snapshot().cid,
            root=b"root",
            messages=10,
            applied=7,
            rejected=2,
            waiting=1,
            items=len(self.states()),
            commit=number,
        )

    def members(self, number: int) -> pa.RecordBatch:
        row = {"party": self.party.key, "identity": b"\1" * 32, "name": f"Ann {number}", "role": "owner"}
        rows = [{**row, "status": "active", "creator": True, "devices": 1}]
        return member_rows(pa.RecordBatch.from_pylist(rows, schemas.MEMBERS), number)

    def rejects(self, number: int) -> pa.RecordBatch:
        row = {"party": self.party.key, "feed": b"\2" * 8, "position": -1, "detail": "", "item": None}
        rows = [{**row, "seq": seq, "reason": "reader"} for seq in range(number)]
        return reject_rows(pa.RecordBatch.from_pylist(rows, schemas.REJECTS), number)

    def placements(self, number: int) -> pa.RecordBatch:
        state = self.party.runtime.state
        moves = [
            {
                "depth": move.stamp.depth,
                "feed": move.stamp.feed,
                "seq": move.stamp.seq,
                "position": move.stamp.position,
                "item": move.item,
                "kind": move.kind,
                "parent": move.parent,
            }
            for move in state.tree.moves
        ]
        parents = {item: state.record(item).genesis.parent for item in self.states()}
        return placement_rows(self.party.key, moves, parents, number)

    def expected_items(self) -> dict[str, tuple[Any, ...]]:
        found = {}
        for item in self.states():
            record = self.party.runtime.state.record(item)
            home = self.party.runtime.state.home(item)
            parent = None if home is None else item_text(home)
            found[item_text(item)] = (record.genesis.type, record.name, record.deleted, parent)
        return found

    def expected_properties(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {
            (item_text(item), path): typed(value)
            for item in self.states()
            if (record := self.party.runtime.state.record(item)).genesis.model == "property-set"
            for path, value in flattened(record.model.value(), ())
        }


def run_rows(number: int) -> pa.RecordBatch:
    row = {
        "commit": number,
        "created": 1_700_000_000_000_000,
        "lake_version": 1,
        "stage": "all",
        "rows": 1,
        "seconds": 1.0,
    }
    return pa.RecordBatch.from_pylist([row], RUNS)


@pytest.fixture
def story(spark: Any, tmp_path: Path) -> Iterator[Story]:
    made = Story(spark, tmp_path)
    yield made
    made.peer.close()


def fill(story: Story) -> dict[str, Any]:
    party = story.party
    board = party.create("property-set", type="board", title="Summer")
    tasks = [party.create("property-set", type="task", parent=board, title=f"t{n}", done=n % 2 == 0) for n in range(6)]
    notes = party.create("text", parent=tasks[0])
    notes.insert(0, "book early")
    link = party.link(tasks[0], tasks[1], type="before")
    return {"board": board, "tasks": tasks, "notes": notes, "link": link}


def check(story: Story) -> dict[str, Any]:
    views = open_views(story.spark, story.out)
    items = views["items"].collect()
    shown = {row["item"]: (row["type"], row["name"], row["deleted"], row["parent"]) for row in items}
    assert shown == story.expected_items()
    assert len(items) == len(shown)
    properties = views["properties"].collect()
    found = {
        (row["item"], row["path"]): {
            name: row[name] for name in ("kind", "text", "integer", "number", "boolean", "json")
        }
        for row in properties
    }
    assert len(properties) == len(found)
    expected = {
        place: {name: value[name] for name in ("kind", "text", "integer", "number", "boolean", "json")}
        for place, value in story.expected_properties().items()
    }
    assert found == expected
    return views


def test_views_show_what_counts_after_several_commits(story: Story) -> None:
    made = fill(story)
    story.commit()
    views = check(story)
    assert {"commit", "gone"}.isdisjoint(views["items"].columns)
    made["tasks"][0]["done"] = False
    made["tasks"][1]["title"] = "changed"
    del made["tasks"][2]["title"]
    made["tasks"][3].delete()
    made["link"].delete()
    made["tasks"][4].move(made["tasks"][5])
    story.party.create("property-set", type="late", parent=made["tasks"][0])
    story.commit()
    views = check(story)
    assert [row["deleted"] for row in views["links"].collect()] == [True]
    assert [row["name"] for row in views["members"].collect()] == ["Ann 2"]
    assert sorted(row["seq"] for row in views["rejects"].collect()) == [0, 1]
    assert [row["epoch"] for row in views["parties"].collect()] == [2]
    assert sorted(row["commit"] for row in views["runs"].collect()) == [1, 2]
    # A commit stays what it was.
    assert [row["name"] for row in open_views(story.spark, story.out, commit=1)["members"].collect()] == ["Ann 1"]


def test_what_is_gone_is_shown_no_more(story: Story) -> None:
    made = fill(story)
    story.commit()
    gone = made["tasks"][5].id
    story.commit(gone=(gone, made["link"].id))
    views = open_views(story.spark, story.out)
    assert item_text(gone) not in {row["item"] for row in views["items"].collect()}
    assert item_text(gone) not in {row["item"] for row in views["properties"].collect()}
    assert views["links"].collect() == []


def test_rows_from_before_a_build_from_scratch_do_not_count(story: Story) -> None:
    made = fill(story)
    story.commit()
    kept = story.states()
    vanished = made["tasks"][5].id
    # As if the party were built at an earlier moment: all items anew, and one of them was never there.
    story._before = {vanished: kept[vanished]}
    story.since = 2
    story.commit()
    views = open_views(story.spark, story.out)
    assert {row["item"] for row in views["items"].collect()} == {item_text(i) for i in kept if i != vanished}
    assert item_text(vanished) not in {row["item"] for row in views["properties"].collect()}


def test_of_items_that_were_folded_again_the_last_state_is_shown(story: Story) -> None:
    task = story.party.create("property-set", type="task", n=1)
    early = story.states()[task.id]
    task["n"] = 2
    late = story.states()[task.id]
    with Attempt.begin(story.out) as attempt:
        files = [
            attempt.write("states", schemas.ITEM_STATES, [state_batch([state_row(story.party.key, task.id, "property-set", state)])])[0]
            for state in (early, late)
        ]  # fmt: skip
        found = write_item_tables(
            story.spark,
            Place(str(story.out), attempt.folder),
            files,
            1,
            models=None,
            tables=("items", "properties"),
            collect=lambda frame: frame.collect(),
            superseded={files[0].path: frozenset({(story.party.key, task.id)})},
        )
        assert sum(file.rows for file in found["table_items"]) == 1
        [shown] = [read_table(story.out, file, TABLES["properties"]) for file in found["table_properties"]]
    assert shown["integer"].to_pylist() == [2]


def test_only_tables_that_were_asked_for_are_there(story: Story) -> None:
    fill(story)
    story.commit(tables=("items",))
    views = open_views(story.spark, story.out)
    assert "properties" not in views
    assert views["items"].count() == len(story.states())
    with pytest.raises(UsageError, match="no table"):
        open_views(story.spark, story.out, tables=["nothing"])
    with pytest.raises(NotFound):
        open_views(story.spark, story.out / "elsewhere")


def test_a_table_that_is_empty_is_shown_as_such(story: Story) -> None:
    story.commit()
    assert open_views(story.spark, story.out)["links"].collect() == []


def test_a_changed_file_is_found_before_a_row_is_read(story: Story) -> None:
    fill(story)
    story.commit()
    commit, _ = reading.newest(story.out)
    assert commit is not None
    path = story.out / commit.files["table_items"][0].path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(Corrupt, match=commit.files["table_items"][0].sha256[:16]):
        open_views(story.spark, story.out)


def test_many_bytes_are_hashed_by_tasks(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    from echostore.pipeline.output import views

    monkeypatch.setattr(views, "CHECK_HERE_BYTES", 0)
    fill(story)
    story.commit()
    check(story)
    commit, _ = reading.newest(story.out)
    assert commit is not None
    (story.out / commit.files["table_items"][0].path).write_bytes(b"other")
    with pytest.raises(Corrupt, match=commit.files["table_items"][0].sha256[:16]):
        open_views(story.spark, story.out)


def test_results_count_by_their_last_commit(story: Story) -> None:
    story.commit()
    story.commit()
    commit, _ = reading.newest(story.out)
    assert commit is not None
    [result] = party_results(story.out, commit)
    assert (result.epoch, result.root) == (2, None)
    found = latest_result(story.out, commit, story.party.key)
    assert found is not None
    assert (found.epoch, found.root, found.cid) == (2, b"root", story.party.snapshot().cid)
    assert latest_result(story.out, commit, b"\0" * 32) is None
    assert list(found.document()) == ["party", "epoch", "cid", "messages", "items", "rejected", "waiting"]


# the document


def examples() -> list[tuple[str, str]]:
    """The questions of the document: SQL and the DataFrame code after it."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Five questions")[2].partition("\n## ")[0]
    return re.findall(r"```sql\n(.*?)```.*?```python\n(.*?)```", text, re.DOTALL)


def test_the_examples_of_the_document_give_the_same_rows_both_ways(story: Story) -> None:
    made = fill(story)
    made["tasks"][4].move(made["tasks"][5])
    story.party.link(made["tasks"][0], echostore.Reference(made["board"].id[:8] + b"\0" * 7 + b"\x77"), type="nowhere")
    story.commit()
    made["tasks"][1]["done"] = True
    story.commit()
    tables = open_views(story.spark, story.out)
    answers = []
    for sql, code in examples():
        names: dict[str, Any] = {"spark": story.spark, "tables": tables}
        exec(code, names)
        by_sql, by_frame = story.spark.sql(sql), names["answer"]
        assert by_sql.columns == by_frame.columns
        assert by_sql.collect() == by_frame.collect()
        answers.append([tuple(row) for row in by_sql.collect()])
    assert len(answers) == 5
    types, done, children, nowhere, rejected = answers
    assert ("task", "property-set", 6) in types
    assert {row[2] for row in done} == {"t0", "t1", "t2", "t4"}
    assert {(row[2], row[3]) for row in children} >= {(5, 0), (1, 1)}
    assert [row[2] for row in nowhere] == ["nowhere"]
    assert [row[1:] for row in rejected] == [("reader", 2, 1, 1)]


def test_the_document_names_every_column() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, schema in {**TABLES, "parties": PARTIES}.items():
        section = re.search(rf"\*\*{name}\*\*: (.*?)\n\n", text, re.DOTALL)
        assert section is not None, name
        columns = (
            set(schema.names)
            - {"gone", "root", "control", "since", "built"}
            - (set() if name == "runs" else {"commit"})
        )
        if name == "blocks":
            columns.add("control")
        assert sorted(column for column in columns if f"`{column}`" not in section[1]) == [], name
