"""The Python leaf against a small root: reads, writes ahead, offline, fences, messages, failures."""

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.coherence.messages import Acquire, WaitForEpoch, Witness
from echostore.kernel.errors import (
    Closed,
    Corrupt,
    EchoError,
    Locked,
    NotFound,
    Refused,
    StorageFailed,
    TimedOut,
    Unreachable,
    UsageError,
)
from echostore.kernel.ids import ItemId, item_creator, item_text
from echostore.kernel.query.live import Change
from echostore.thin import aio, operations
from echostore.thin.driver import HOME
from echostore.thin.link import CapabilityRefused
from echostore.thin.overlay import nearest
from echostore.thin.queries import difference
from echostore.thin.thin_party import ThinParty, connect
from echostore.thin.waiting import Gone
from echostore.wire.index_spec import IndexValue
from echostore.wire.leaf_operations import TextEdit
from network_peers import until
from thin_server import FEED, Kept, ThinServer, capability


@pytest.fixture
def server() -> Iterator[ThinServer]:
    with ThinServer() as found:
        yield found


def titles(party: ThinParty, **where: Any) -> list[Any]:
    return [each.values.get("title") for each in party.query(type="task", **where).order_by("title").all()]


def at_root(server: ThinServer) -> list[dict[str, Any]]:
    return [each.values for each in server.items.values() if not each.deleted]


# Reading


def test_a_query_is_answered_by_the_root_and_then_held(server: ThinServer) -> None:
    server.create("task", title="a", done=True)
    server.create("note", title="b")
    with connect(server.url, capability()) as party:
        assert titles(party) == ["a"]
        asked = server.evaluations
        assert titles(party) == ["a"]
        assert server.evaluations == asked
        assert [each.type for each in party.query().all()] == ["task", "note"]


def test_what_changes_at_the_root_is_seen_without_asking(server: ThinServer) -> None:
    item = server.create("task", title="a")
    with connect(server.url, capability()) as party:
        assert titles(party) == ["a"]
        server.change(item, title="b")
        until(lambda: titles(party) == ["b"])
        assert party.get(item)["title"] == "b"
        assert party.tick == server.kept.tick


def test_get_finds_one_item_and_says_when_there_is_none(server: ThinServer) -> None:
    item = server.create("task", title="a")
    with connect(server.url, capability()) as party:
        assert party.get(item).type == "task"
        assert party.get(item_text(item))["title"] == "a"
        with pytest.raises(NotFound):
            party.get(ItemId(b"\x01" * 16))
        with pytest.raises(UsageError):
            party.get("nonsense")


def test_a_question_that_nobody_answers_is_asked_again(server: ThinServer) -> None:
    server.create("task", title="a")
    with connect(server.url, capability()) as party:
        server.deaf = (Acquire,)
        future = party.driver.ask(party.query(type="task").spec)
        party.create(type="note")
        party.fence("release")  # what was sent before it has come, and was not heard
        assert server.evaluations == 0
        server.deaf = ()
        assert future.result(20).value


def test_a_query_that_no_root_takes_is_refused_here_or_there(server: ThinServer) -> None:
    with connect(server.url, capability()) as party:
        with pytest.raises(EchoError):
            party.query(type="task").limit(20_000)
        server.call(lambda: setattr(server, "answer", lambda spec, tick: None))
        with pytest.raises(Refused, match="malformed"):
            party.query(type="task").all()
        watch = party.query(type="other").watch(initial=True, timeout_s=20)
        with pytest.raises(Refused, match="malformed"):
            next(watch)


# Writing


def test_own_writes_are_shown_at_once_and_exactly_once(server: ThinServer) -> None:
    with connect(server.url, capability()) as party:
        assert titles(party) == []
        seen = []
        task = party.create(type="task", title="a")
        for _ in range(50):
            seen.append(titles(party))
        party.fence("full")
        seen.append(titles(party))
        assert seen == [["a"]] * 51
        assert party.pending == 0
        assert at_root(server) == [{"title": "a"}]
        task["title"] = "b"
        assert task["title"] == "b"
        assert titles(party) == ["b"]
        del task["title"]
        assert "title" not in task
        assert titles(party) == [None]


def test_every_model_can_be_written(server: ThinServer) -> None:
    with connect(server.url, capability()) as party:
        text, numbers, log = (party.create(each, type=each) for each in ("text", "growable-array", "threaded-log"))
        text.append("world")
        text.insert(0, "hello ")
        text.splice(0, 5, "Hello")
        numbers.append(1, 2, 3)
        numbers.insert(0, 0)
        del numbers[-1]
        numbers[0] = "zero"
        log.post({"text": "hi"})
        assert (str(text), numbers.to_list(), log.posts()[0]["body"]) == ("Hello world", ["zero", 1, 2], {"text": "hi"})
        assert party.get(text.id).value() == "Hello world"
        party.fence("full")
        assert [str(party.get(text.id)), list(party.get(numbers.id)), len(party.get(log.id).posts())] == [
            "Hello world",
            ["zero", 1, 2],
            1,
        ]
        assert party.rejected() == []


def test_items_move_vanish_and_are_linked(server: ThinServer) -> None:
    with connect(server.url, capability()) as party:
        assert titles(party) == []
        server.silent = True
        board, task = party.create(type="board"), party.create(type="task", title="a")
        task.move(board)
        link = task.link(board, type="on", since=3)
        assert party.query(type="task").order_by("title").all()[0].parent == board.id
        assert (link.source, link.target, link["since"]) == (task.id, board.id, 3)
        board.delete()
        assert titles(party) == []  # what hangs below goes with it
        board.restore()
        assert titles(party) == ["a"]
        server.silent = False
        party.fence("full")
        assert titles(party) == ["a"]


def test_a_batch_is_one_and_nothing_of_it_is_written_when_it_fails(server: ThinServer) -> None:
    with connect(server.url, capability()) as party:
        with party.batch():
            first = party.create(type="task", title="a")
            first["done"] = True
        with pytest.raises(UsageError), party.batch():  # noqa: PT012  # the batch is what is tried
            party.create(type="task", title="b")
            party.create("nonsense")
        party.fence("release")
        assert len(server.kept.applied) == 1
        assert at_root(server) == [{"title": "a", "done": True}]


def test_a_rejected_operation_leaves_the_view_with_what_built_on_it(server: ThinServer) -> None:
    with connect(server.url, capability()) as party:
        told: list[Any] = []
        party.on_rejected(told.append)
        assert party.query(type="forbidden").count() == 0
        server.silent = True
        with party.batch():
            bad = party.create(type="forbidden", title="x")
            bad["title"] = "y"
        assert party.query(type="forbidden").count() == 1
        server.silent = False
        until(lambda: told)
        assert party.query(type="forbidden").count() == 0
        assert party.rejected()[0].reason == "not-allowed"
        assert party.rejected()[0].item == bad.id


def test_wrong_calls_are_refused_before_anything_is_written(server: ThinServer) -> None:
    with connect(server.url, capability()) as party:
        text = party.create("text", type="t")
        for wrong in (
            lambda: party.create("nonsense"),
            lambda: party.create("text", title="a"),
            lambda: text.insert(5, "x"),
            lambda: text.splice(0, 0, 3),  # type: ignore[arg-type]
            lambda: party.create(type="task", when=object()),
            lambda: party.fence("sideways"),  # type: ignore[arg-type]
            lambda: party.send("nobody", "t", b""),
            lambda: party.fence("acquire", b"nonsense"),
            lambda: party.query(type="task").deleted("maybe"),  # type: ignore[arg-type]
        ):
            with pytest.raises(UsageError):
                wrong()
        party.fence("release")
        assert len(server.kept.applied) == 1
    with pytest.raises(UsageError):
        connect("http://127.0.0.1:1", capability())
    with pytest.raises(UsageError):
        connect(server.url, "not a capability")


# What can and what can't be computed here


def test_answers_with_own_edits_are_what_the_root_will_say(server: ThinServer) -> None:
    for number in range(6):
        server.create("task", title=f"t{number}", rank=number)
    with connect(server.url, capability()) as party:
        queries = [
            party.query(type="task", rank__ge=3).order_by("-rank"),
            party.query(type="task").order_by("rank").limit(3),
            party.query().where(title__startswith="t").order_by("title"),
        ]
        for query in queries:
            query.all()
        by_title = {each["title"]: each for each in queries[2].all()}
        by_title["t0"]["rank"] = 9
        by_title["t5"]["rank"] = -1
        party.create(type="task", title="t6", rank=4)
        by_title["t3"].delete()
        ahead = [[each["title"] for each in query.all()] for query in queries]
        assert all(query.all().pending is False for query in queries)
        party.fence("full")
        assert [[each["title"] for each in query.all()] for query in queries] == ahead
        assert ahead == [["t0", "t4", "t6"], ["t5", "t1", "t2"], ["t0", "t1", "t2", "t4", "t5", "t6"]]


def test_what_only_the_root_can_know_is_marked_pending_and_not_guessed(server: ThinServer) -> None:
    for number in range(3):
        server.create("task", title=f"t{number}", rank=number)
    with connect(server.url, capability()) as party:
        walking = party.query(type="task").order_by("title").limit(2)
        selected = party.query(type="task").select("title")
        whole = party.query(type="task")
        assert [len(each.all()) for each in (walking, selected, whole)] == [2, 3, 3]
        server.silent = True
        walking.all()[0].delete()
        assert walking.all().pending
        assert [each["title"] for each in walking.all()] == ["t1"]
        assert selected.all().pending
        assert len(selected.all()) == 3
        assert not whole.all().pending
        assert len(whole.all()) == 2


def test_an_edit_of_an_item_that_was_never_read_makes_answers_pending(server: ThinServer) -> None:
    item = server.create("note", title="n")
    with connect(server.url, capability()) as party:
        tasks = party.query(type="task")
        assert not tasks.all().pending
        server.silent = True
        party.publish([operations.change(FEED, item, {("title",): "m"})])
        assert tasks.all().pending


@pytest.mark.parametrize(
    ("text", "edit", "place"),
    [
        ("hello", TextEdit(5, "", "!", "hello"), 5),
        ("oh hello", TextEdit(5, "", "!", "hello"), 8),
        ("hello hello", TextEdit(6, "", "x", "hello"), 5),
        ("abc", TextEdit(1, "b", "x", "a"), 1),
        ("xxabc", TextEdit(1, "b", "x", "a"), 3),
        ("axc", TextEdit(1, "b", "x", "a"), None),
        ("", TextEdit(4, "", "x", "gone"), 0),
        ("", TextEdit(0, "", "x", ""), 0),
    ],
)
def test_an_edit_finds_its_place_in_a_text_that_others_changed(text: str, edit: TextEdit, place: int | None) -> None:
    assert nearest(text, edit) == place


# Following


def test_a_watch_tells_what_came_changed_went_and_moved(server: ThinServer) -> None:
    first = server.create("task", title="a", rank=1)
    with connect(server.url, capability()) as party:
        watch = party.query(type="task").order_by("rank").watch(initial=True, timeout_s=20)
        assert [each.id for each in next(watch).added] == [first]
        second = server.create("task", title="b", rank=2)
        change = next(watch)
        assert [each.id for each in change.added] == [second]
        server.change(first, rank=3)
        change = next(watch)
        assert [each.id for each in change.changed] == [first]
        assert change.moved
        assert watch.answer is not None
        assert [each.id for each in watch.answer] == [second, first]
        watch.answer[0].delete()
        assert [each.id for each in next(watch).removed] == [second]
        watch.close()
        assert list(watch) == []


def test_differences_replay_to_the_new_answer(server: ThinServer) -> None:
    ids = [server.create("task", rank=number) for number in range(5)]
    with connect(server.url, capability()) as party:
        every = {each.id: each for each in party.query(type="task").all()}
        for before, after in (((0, 1, 2, 3), (3, 0, 2, 4)), ((0, 1), ()), ((), (1, 0)), ((0, 1, 2), (2, 1, 0))):
            old, new = [every[ids[each]] for each in before], [every[ids[each]] for each in after]
            change = difference(old, new)
            assert isinstance(change, Change)
            assert change.replay(old) == new
        assert difference(old, old) is None


def test_a_watched_index_is_asked_for_again_when_it_was_invalidated(server: ThinServer) -> None:
    item = server.create("task", title="a" * 3)
    with connect(server.url, capability()) as party:
        watch = party.query(type="task").watch(timeout_s=20)
        for number in range(20):  # without being read, deltas end and Invalidate comes
            server.change(item, title=f"{number}" * 3)
        until(lambda: watch.poll(0.5) is None and watch.answer[0]["title"] == "191919")


# One state


def test_a_transaction_reads_one_state_whatever_happens_meanwhile(server: ThinServer) -> None:
    one, two = server.create("task", title="a"), server.create("task", title="a")
    with connect(server.url, capability()) as party:

        def work(transaction: Any) -> tuple[Any, Any]:
            first = transaction.get(one)["title"]
            server.change(one, title="b")
            server.change(two, title="b")
            until(lambda: party.tick == server.kept.tick)
            return first, transaction.get(two)["title"]

        party.query(type="task").all()
        assert party.transaction(work) == ("a", "a")
        assert party.driver.leaf.pins[HOME] == ()
        assert party.transaction(lambda each: each.get(two)["title"]) == "b"


def test_a_transaction_starts_again_when_its_state_is_forgotten(server: ThinServer) -> None:
    item = server.create("task", title="a")
    with connect(server.url, capability()) as party:
        ticks: list[int] = []
        at_tick: dict[int, str] = {}

        def work(transaction: Any) -> Any:
            ticks.append(transaction.tick)
            if len(ticks) == 1:
                server.call(lambda: setattr(server.root, "window_ticks", 1))
                for number in range(4):
                    server.change(item, title=str(number))
                    at_tick[server.call(lambda: server.root.holdings.cur)] = str(number)
            return transaction.get(item)["title"]

        # It goes on at a later state, not at the latest: a leaf whose connection was lost meanwhile is somewhere between.
        assert party.transaction(work) == at_tick[ticks[-1]]
        assert len(ticks) >= 2
        assert ticks == sorted(set(ticks))

        def never(transaction: Any) -> None:
            raise Gone("as if")

        with pytest.raises(TimedOut):
            party.transaction(never)


# Fences


def test_a_release_fence_waits_for_the_disk_of_the_root(server: ThinServer) -> None:
    with connect(server.url, capability()) as party:
        server.silent = True
        party.create(type="task", title="a")
        with pytest.raises(TimedOut):
            party.fence("release", timeout_s=0.05)
        server.silent = False
        party.fence("release")
        assert at_root(server) == [{"title": "a"}]


def test_an_acquire_fence_shows_what_another_leaf_wrote(server: ThinServer) -> None:
    with connect(server.url, capability()) as one, connect(server.url, capability()) as two:
        titles(two)
        one.create(type="task", title="a")
        context = one.context()
        two.fence("acquire", context)
        assert titles(two) == ["a"]


def test_a_wait_for_another_leaf_ends_when_its_batch_comes(server: ThinServer) -> None:
    with connect(server.url, capability()) as one, connect(server.url, capability()) as two:
        assert one.driver.leaf.arcs.arc is not None
        waiting = two.driver.wait_for(((Witness(one.driver.leaf.arcs.arc, 1),),))
        two.fence("full")  # the question has come before this one
        server.deaf = (WaitForEpoch,)  # and is not heard again
        one.create(type="task")
        waiting.result(20)


def test_a_full_fence_shows_what_the_root_has_now(server: ThinServer) -> None:
    item = server.create("task", title="a")
    with connect(server.url, capability()) as party:
        assert titles(party) == ["a"]
        server.change(item, title="b")
        party.fence("full")
        assert titles(party) == ["b"]


# Other applications


def test_messages_come_once_and_services_are_found(server: ThinServer, tmp_path: Path) -> None:
    with connect(server.url, capability()) as one, connect(server.url, capability(), path=tmp_path / "two") as two:
        got: list[Any] = []
        for number in range(20):
            one.send(two.system, "hello", b"%d" % number)
        until(lambda: two.driver.leaf.receiver.windows)
        two.on_message(got.append)
        until(lambda: len(got) == 20)
        assert [each.payload for each in got] == [b"%d" % number for number in range(20)]
        assert got[0].sender == one.system
        server.cut_links()
        one.send(two.system, "hello", b"again")
        until(lambda: len(got) == 21)
        two.announce("printer/a", b"third floor")
        until(lambda: [each.name for each in one.services("printer/")] == ["printer/a"])
        assert one.services("printer/")[0].system == two.system
        two.deannounce("printer/a")
        until(lambda: one.services("printer/") == [])


def test_a_function_that_fails_stops_no_other(server: ThinServer) -> None:
    with connect(server.url, capability()) as one, connect(server.url, capability()) as two:
        got: list[bytes] = []
        failures: list[Any] = []

        def take(message: Any) -> None:
            got.append(message.payload)
            raise ValueError("the application's own")

        threading.excepthook, before = failures.append, threading.excepthook
        try:
            two.on_message(take)
            one.send(two.system, "t", b"1")
            one.send(two.system, "t", b"2")
            until(lambda: got == [b"1", b"2"] and len(failures) == 2)
        finally:
            threading.excepthook = before


# Offline and back


def test_offline_reads_and_writes_go_on_and_arrive_once(server: ThinServer) -> None:
    server.create("task", title="a")
    kept, port = server.kept, int(server.url.split(":")[2].split("/")[0])
    with connect(server.url, capability()) as party:
        assert titles(party) == ["a"]
        server.close()
        until(lambda: not party.connected)
        task = party.create(type="task", title="b")
        task["title"] = "c"
        task.link(party.query(type="task").order_by("title").all()[0], type="after")
        assert titles(party) == ["a", "c"]
        unread = party.query(type="never read")
        with pytest.raises(Unreachable):
            party.answers.get(unread.asked, unread.spec, 0.1)
        with ThinServer(kept, port=port) as again:
            party.fence("full", timeout_s=20)
            assert titles(party) == ["a", "c"]
            assert party.pending == 0
            assert len(again.kept.applied) == len(set(again.kept.applied)) == 3
            assert party.status()["links"] == 2


def test_what_was_written_offline_survives_a_restart(tmp_path: Path) -> None:
    path, kept = tmp_path / "leaf" / "file", Kept()
    with ThinServer(kept) as server:
        port = int(server.url.split(":")[2].split("/")[0])
        cap = capability()
        with connect(server.url, cap, path=path) as party:
            name = party.system
            party.create(type="task", title="a")
            party.fence("full")
    with connect(f"ws://127.0.0.1:{port}/thin", cap, path=path) as party:  # nobody is there
        assert not party.connected
        assert party.system == name
        made = party.create(type="task", title="b")
        made["done"] = True
    assert item_creator(made.id) == FEED
    with ThinServer(kept, port=port) as server, connect(server.url, cap, path=path) as party:
        until(lambda: party.connected)
        party.fence("full")
        assert party.system == name
        assert sorted(each["title"] for each in at_root(server)) == ["a", "b"]
        before = set(server.items)
        assert party.create(type="task").id not in before
        assert len(server.kept.applied) == len(set(server.kept.applied))


def test_what_was_read_can_be_read_offline_after_a_restart_and_is_not_sent_again(tmp_path: Path) -> None:
    path, kept = tmp_path / "leaf", Kept()
    with ThinServer(kept) as server:
        port = int(server.url.split(":")[2].split("/")[0])
        cap = capability()
        with connect(server.url, cap, path=path) as party:
            for title in ("a", "b"):
                party.create(type="task", title=title)
            party.fence("full")
            party.query(type="task").all()
    with connect(f"ws://127.0.0.1:{port}/thin", cap, path=path) as party:  # nobody is there
        assert sorted(each["title"] for each in party.query(type="task").all()) == ["a", "b"]
        party.create(type="task", title="c")
        assert len(party.query(type="task").all()) == 3
        assert party.query(type="other").held() is None
    with ThinServer(kept, port=port) as server, connect(server.url, cap, path=path) as party:
        until(lambda: party.connected)
        party.fence("full")
        assert sorted(each["title"] for each in party.query(type="task").all()) == ["a", "b", "c"]


def test_a_leaf_that_fell_over_neither_repeats_a_batch_nor_an_id(tmp_path: Path) -> None:
    with ThinServer() as server:
        cap, ids = capability(), set()
        for round_number in range(3):
            path = tmp_path / "leaf"
            party = connect(server.url, cap, path=path)
            ids.add(party.create(type="task", title=str(round_number)).id)
            if round_number == 1:
                party.fence("release")
            party.driver.store._db.close()  # as if the process had died: nothing more is written
            for writing in ("save", "keep_held"):
                setattr(party.driver.store, writing, lambda *args, **named: None)
            party.close()
        with connect(server.url, cap, path=path) as party:
            party.fence("full")
        assert len(ids) == 3
        assert sorted(each["title"] for each in at_root(server)) == ["0", "1", "2"]
        assert len(server.kept.applied) == len(set(server.kept.applied)) == 3


def test_a_root_that_falls_over_between_commit_and_notice_applies_once(server: ThinServer) -> None:
    kept, port = server.kept, int(server.url.split(":")[2].split("/")[0])
    with connect(server.url, capability()) as party:
        server.silent = True
        party.create(type="task", title="a")
        until(lambda: kept.applied)
        server.close()
        with ThinServer(kept, port=port):
            party.fence("full", timeout_s=20)
            assert kept.applied == [(party.driver.leaf.arcs.arc, 1)]
            assert titles(party) == ["a"]


def test_ticks_never_fall_when_the_leaf_changes_its_address() -> None:
    with ThinServer() as one, ThinServer(one.kept) as two:
        one.create("task", title="a")
        with connect([one.url, two.url], capability(), timeout_s=20) as party:
            assert titles(party) == ["a"]
            assert party.status()["url"] == one.url
            before = party.tick
            two.call(lambda: setattr(two.root.holdings, "cur", one.kept.tick))
            one.close()
            until(lambda: party.connected and party.status()["url"] == two.url)
            assert party.tick >= before
            party.create(type="task", title="b")
            party.fence("release")
            assert sorted(each["title"] for each in at_root(two)) == ["a", "b"]


def test_a_leaf_stays_with_its_root(server: ThinServer, tmp_path: Path) -> None:
    cap = capability()
    with connect(server.url, cap, path=tmp_path / "leaf") as party:
        party.create(type="task")
        party.fence("release")
    import thin_server

    other = thin_server.SystemId(b"\x0b" * 16)
    mine, thin_server.ROOT = thin_server.ROOT, other
    try:
        with ThinServer() as foreign, connect(foreign.url, cap, path=tmp_path / "leaf") as party:
            until(lambda: "another root" in (party.status()["last_error"] or ""))
            assert not party.connected
    finally:
        thin_server.ROOT = mine


# Failures


def test_a_refused_capability_is_told_to_all_who_wait(server: ThinServer) -> None:
    cap = capability()
    with connect(server.url, cap) as party:
        server.silent = True
        waiting = party.driver.ask(party.query(type="task").spec)
        server.refuse.add(cap)
        server.cut_links()
        with pytest.raises(CapabilityRefused, match="revoked"):
            waiting.result(20)
        with pytest.raises(CapabilityRefused):
            party.query(type="other").all()
    with pytest.raises(CapabilityRefused):
        connect(server.url, cap)


def test_nobody_at_the_address_is_said_so() -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1/"):
        connect("ws://127.0.0.1:1/thin", capability(), timeout_s=0.5)


def test_a_value_that_can_t_be_read_is_not_shown_and_the_link_dropped(server: ThinServer) -> None:
    server.create("task", title="a")
    with connect(server.url, capability()) as party:
        server.bend = lambda spec, value: IndexValue(b"\xff" + value)
        with pytest.raises(Corrupt):
            party.query(type="task").all()
        server.bend = lambda spec, value: value
        until(lambda: party.connected and party.status()["links"] == 2)
        assert titles(party) == ["a"]


def test_frames_that_can_t_be_read_end_the_link_and_nothing_else(server: ThinServer) -> None:
    server.create("task", title="a")
    with connect(server.url, capability()) as party:
        assert titles(party) == ["a"]
        server.call(lambda: [each.put_nowait(b"\xff\xff") for each in server.queues.values()])
        until(lambda: party.connected and party.status()["links"] == 2)
        assert titles(party) == ["a"]
        assert party.status()["refusals"] == 1


def test_a_file_is_for_one_leaf_at_a_time(server: ThinServer, tmp_path: Path) -> None:
    cap = capability()
    with (
        connect(server.url, cap, path=tmp_path / "leaf"),
        pytest.raises(Locked),
    ):
        connect(server.url, cap, path=tmp_path / "leaf")
    (tmp_path / "bad").write_bytes(b"not a database at all" * 100)
    with pytest.raises(StorageFailed):
        connect(server.url, cap, path=tmp_path / "bad")


def test_a_damaged_file_is_refused_and_left_alone(server: ThinServer, tmp_path: Path) -> None:
    cap, path = capability(), tmp_path / "leaf"
    with connect(server.url, cap, path=path) as party:
        party.create(type="task")
    with sqlite3.connect(path) as database:
        database.execute("insert into operations values (999, x'ffff')")
    database.close()
    with pytest.raises(Corrupt):
        connect(server.url, cap, path=path)


def test_a_batch_that_the_disk_refuses_is_not_written_at_all(server: ThinServer, tmp_path: Path) -> None:
    with connect(server.url, capability(), path=tmp_path / "leaf") as party:
        save = party.driver.store.save

        def full(*args: Any, **named: Any) -> None:
            raise StorageFailed("the disk is full")

        party.driver.store.save = full  # type: ignore[method-assign]
        with pytest.raises(StorageFailed):
            party.create(type="task", title="lost")
        party.driver.store.save = save  # type: ignore[method-assign]
        assert titles(party) == []
        assert party.pending == 0
        party.create(type="task", title="kept")
        party.fence("full")
        assert at_root(server) == [{"title": "kept"}]


def test_a_closed_party_says_so_also_to_those_who_wait(server: ThinServer) -> None:
    party = connect(server.url, capability())
    titles(party)
    server.silent = True
    waiting = party.driver.ask(party.query(type="never").spec)
    party.close()
    party.close()
    with pytest.raises(Closed):
        waiting.result(20)
    for call in (lambda: titles(party), lambda: party.create(type="task"), lambda: party.query(type="never").all()):
        with pytest.raises(Closed):
            call()


# asyncio


def test_the_same_for_asyncio(server: ThinServer) -> None:
    first = server.create("task", title="a")

    async def story() -> None:
        async with aio.connect(server.url, capability()) as party:
            query = party.query(type="task").order_by("title")
            assert [each["title"] for each in await query.all()] == ["a"]
            assert [each["title"] async for each in query] == ["a"]
            watch = query.watch()
            coming = asyncio.ensure_future(watch.__anext__())
            await asyncio.sleep(0)
            task = party.create(type="task", title="b")
            task["done"] = True
            await party.fence()
            assert (await query.count(), await party.get(first)) == (2, await query.first())
            change = await asyncio.wait_for(coming, 20)
            assert [each["title"] for each in change.added] == ["b"]

            async def work(transaction: Any) -> int:
                return len(await transaction.all(query))

            assert await party.transaction(work) == 2
            watch.close()
            assert [each async for each in watch] == []
            with pytest.raises(AttributeError):
                party.nonsense  # noqa: B018

    asyncio.run(story())


def test_the_name_is_where_people_look_for_it() -> None:
    assert echostore.connect is connect


def test_a_watch_hears_of_changes_also_after_a_reconnection_in_which_nothing_happened(server: ThinServer) -> None:
    item = server.create("task", title="a")
    with connect(server.url, capability()) as party:
        watch = party.query(type="task").watch(timeout_s=20)
        server.cut_links()
        until(lambda: party.status()["links"] == 2)
        server.change(item, title="b")
        assert [each["title"] for each in next(watch).changed] == ["b"]
        assert titles(party) == ["b"]
        server.cut_links()
        until(lambda: party.status()["links"] == 3)
        assert titles(party) == ["b"]  # held, and asked for again behind the scenes
        server.change(item, title="c")
        until(lambda: titles(party) == ["c"])
