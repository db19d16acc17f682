"""A peer that another process has open: its objects used over the local socket, from threads and from asyncio."""

import asyncio
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore import aio
from echostore.kernel.errors import Closed, NotFound, Refused, SchemaViolation, TimedOut, TooLarge, UsageError
from echostore.kernel.ids import Stamp
from echostore.kernel.party.credentials import Role
from echostore.kernel.timeframe import Position
from echostore.peer import local_server, local_socket
from echostore.peer.item_kinds import ArrayItem, PropertySetItem, TextItem
from echostore.peer.items import Item
from echostore.peer.local_rights import OFFERED, check_offered
from echostore.peer.local_server import LocalServer
from echostore.peer.local_values import LIVING, Codec, pack_error, unpack_error
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.peer.transfer import export_party
from echostore.wire.cids import cid_from_text


@dataclass
class Task:
    """What an application stores."""

    title: str
    done: bool = False


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Peer]:
    """The peer itself, served on its home's socket by this process."""
    with echostore.open(tmp_path / "home", name="Own") as peer:
        peer.create_party("Trip")
        server = LocalServer(peer)
        yield peer
        server.close()


@pytest.fixture
def peer(own: Peer) -> Iterator[Peer]:
    """The same peer, attached to."""
    with echostore.open(own.home.path) as attached:
        assert attached is not own
        yield attached


@pytest.fixture
def party(peer: Peer) -> Party:
    return peer.party("@Trip")


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


# objects


def test_objects_look_like_what_they_stand_for(own: Peer, peer: Peer, party: Party) -> None:
    task = party.create(type="task", title="x")
    assert isinstance(peer, Peer)
    assert isinstance(party, Party)
    assert isinstance(task, PropertySetItem)
    assert not isinstance(task, TextItem)
    assert (peer.name, peer.identity, peer.home.path) == ("Own", own.identity, own.home.path)
    assert party.key == own.party("@Trip").key
    assert task == party.get(task.id) == party.query(type="task").one()
    assert len({task, party.get(task.id)}) == 1
    assert task != party.create()
    assert party == peer.party(party.key)
    assert party != peer.create_party("Other")
    assert task.party == party
    assert "Trip" in repr(party)
    assert peer.parties()[0] == own.parties()[0]
    assert not hasattr(task, "nothing_of_this_name")
    with pytest.raises(AttributeError):
        task._record()


def test_items_of_every_kind(own: Peer, party: Party) -> None:
    board = party.create(type="board")
    when = datetime(2026, 5, 1, 10, tzinfo=UTC)
    board["a", "b"] = [1, 2.5, None, True, "x", b"\x00", {"k": when}, board.reference]
    assert board["a"] == {"b": [1, 2.5, None, True, "x", b"\x00", {"k": when}, board.reference]}
    assert board["a", "b"] == board["a"]["b"]
    assert "a" in board
    assert list(board) == board.keys() == ["a"]
    del board["a"]
    assert board.get("a", 7) == 7
    with pytest.raises(KeyError):
        board["a"]
    board.name = "Renamed"
    assert own.party("@Trip").get(board.id).name == "Renamed"
    tasks = party.create("growable-array", parent=board)
    tasks.append(1, board, "x")
    tasks[2] = "y"
    assert list(tasks) == [1, board, "y"]
    assert isinstance(tasks, ArrayItem)
    assert tasks.parent == board
    assert [each.id for each in board.children()] == [tasks.id]
    with pytest.raises(IndexError):
        tasks[9]
    text = party.create("text")
    text.insert(0, "hello")
    text.mark(0, 2, "bold")
    assert (str(text), len(text)) == ("hello", 5)
    assert text.runs()[0].text == "he"
    log = party.create("threaded-log")
    first = log.post("one")
    log.post("two", reply_to=first)
    assert [entry.body for entry in log] == ["one", "two"]
    assert log.threads()[0].replies[0].entry.body == "two"


def test_errors_are_the_same_classes(party: Party) -> None:
    with pytest.raises(NotFound) as missing:
        party.get("abcdef99")
    assert missing.value.unchanged == ""
    with pytest.raises(TooLarge):
        party.create()["x"] = 1 << 80
    with pytest.raises(UsageError, match="not registered"):
        party.create("no-such-model")
    party.schemas.define(Task)
    with pytest.raises(SchemaViolation):
        party.create(type="task", title=5)


def test_dataclasses_of_the_client(own: Peer, party: Party) -> None:
    made = party.create(Task("tickets"))
    assert made.to(Task) == Task("tickets")
    assert party.query(Task).all() == [made]
    assert own.party("@Trip").get(made.id)["title"] == "tickets"


def test_code_does_not_travel(peer: Peer, party: Party) -> None:
    with pytest.raises(Refused, match="code never travels"):
        party.publish_model(Task)
    with pytest.raises(UsageError, match="can't be used through a running peer"):
        party.create(x=object())
    with pytest.raises(Refused, match="for the program that runs the peer"):
        peer.models.names()


def test_what_would_end_the_service_is_refused(own: Peer, peer: Peer) -> None:
    with pytest.raises(Refused, match="for the program that runs the peer"):
        peer._link.request("call", 0, "close", (), {})  # type: ignore[attr-defined]  # as a hostile client would
    with pytest.raises(AttributeError):
        peer._link.request("get", 0, "_file_lock")  # type: ignore[attr-defined]  # as above
    with pytest.raises(UsageError, match="not there"):
        peer._link.request("get", 999, "name")  # type: ignore[attr-defined]  # as above
    assert not own.closed


def test_a_program_can_not_leave_the_peer_and_so_close_it_for_everybody(own: Peer, peer: Peer) -> None:
    for verb, rest in (("enter", ()), ("exit", (None,)), ("next", ()), ("iterate", ())):
        with pytest.raises((Refused, UsageError, AttributeError)):
            peer._link.request(verb, 0, *rest)  # type: ignore[attr-defined]  # as a hostile client would
    assert not own.closed
    assert own.parties() == peer.parties()


def test_a_program_can_not_set_the_clock_or_anything_else_that_is_not_listed(
    own: Peer, peer: Peer, party: Party
) -> None:
    before = own.now_ms
    with pytest.raises(Refused, match="set by the program that runs the peer"):
        peer.now_ms = lambda: 0
    with pytest.raises(Refused, match="set by the program that runs the peer"):
        peer.closed = True
    with pytest.raises(Refused, match="set by the program that runs the peer"):
        party.runtime = None  # type: ignore[assignment]  # as above
    assert own.now_ms is before
    assert not own.closed
    party.title = "Journey"
    assert own.party(party.key).title == "Journey"


@pytest.mark.parametrize("kind", sorted({name for names in LIVING.values() for name in names}))
def test_nothing_is_offered_that_is_not_listed(kind: str) -> None:
    module = next(module for module, names in LIVING.items() if kind in names)
    living = getattr(importlib.import_module(module), kind)
    blank = living.__new__(living)
    for name in dir(living):
        if name in OFFERED[kind]:
            check_offered(blank, name)
            continue
        with pytest.raises((Refused, AttributeError)):
            check_offered(blank, name)
    for name in ("close_peer", "now_ms", "lock", "runtime", "opener", "__class__", "__dict__", "__reduce__"):
        with pytest.raises((Refused, AttributeError)):
            check_offered(blank, name)


def test_locks_and_stores_are_kept_back(peer: Peer, party: Party) -> None:
    for target, name in ((peer, "lock"), (party, "lock"), (party, "reading"), (party, "writing"), (party, "runtime")):
        with pytest.raises(Refused, match="for the program that runs the peer"):
            target._link.request("get", target, name)  # type: ignore[union-attr]  # as a hostile client would


def test_objects_of_another_peer_are_refused(tmp_path: Path, party: Party) -> None:
    with echostore.open(tmp_path / "second") as second:
        second.create_party("Second")
        server = LocalServer(second)
        with echostore.open(tmp_path / "second") as other:
            stranger = other.party("@Second").create()
            with pytest.raises(UsageError, match="another peer"):
                party.create(parent=stranger)
        server.close()


# writing


def test_a_batch_is_one_message_or_nothing(own: Peer, party: Party) -> None:
    before = own.party("@Trip").status.feeds[1].held
    with party.batch(), party.batch():
        task = party.create(type="task")
        task["a"] = 1
        assert task["a"] == 1
    party.flush()
    assert own.party("@Trip").status.feeds[1].held == before + 1

    def broken(error: BaseException) -> None:
        with party.batch():
            task["a"] = 2
            raise error

    with pytest.raises(ZeroDivisionError):
        broken(ZeroDivisionError())
    assert task["a"] == 1
    with pytest.raises(NotFound, match="mine"):
        broken(NotFound("mine"))
    assert task["a"] == 1
    with pytest.raises(KeyboardInterrupt):
        broken(KeyboardInterrupt())
    until(lambda: task["a"] == 1)
    task["a"] = 5
    assert party.undo()
    assert task["a"] == 1


def test_a_batch_keeps_other_threads_out(peer: Peer, party: Party) -> None:
    task = party.create(type="count", n=0)

    def count(times: int) -> None:
        for _ in range(times):
            with party.batch():
                task["n"] = task["n"] + 1

    threads = [threading.Thread(target=count, args=(20,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert task["n"] == 80


def test_a_batch_that_falls_silent_is_undone(own: Peer, party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "BATCH_IDLE_S", 0.2)
    task = party.create(a=1)

    def silent() -> None:
        with party.batch():
            task["a"] = 2
            assert own.lock.acquire(timeout=100)  # others can write again, once the batch is given up
            own.lock.release()
            task["a"] = 3

    with pytest.raises(Closed):
        silent()
    assert task["a"] == 1


def test_receipts_streams_and_the_past(own: Peer, party: Party) -> None:
    task = party.create(type="task", title="x")
    receipt = party.flush()
    assert receipt.durable
    assert receipt.processed
    receipt.wait(held_by=1, timeout=5)
    with pytest.raises(TimedOut, match="1 of the 2"):
        receipt.wait(held_by=2, timeout=0.3)
    # Longer than the other process waits at a time.
    late = threading.Timer(1.2, lambda: own.party("@Trip").acknowledge(b"d" * 32, {receipt.feed: receipt.length}))
    late.start()
    assert receipt.wait(held_by=2, timeout=20).held_by == 2
    late.join()
    stream = party.stream(after=receipt.anchor)
    assert not stream.wait(timeout=0.1)
    task["title"] = "y"
    later = party.flush().anchor
    assert stream.wait(later, timeout=5)
    assert [delivered.operations[0].item for delivered in stream] == [task.id]
    assert stream.reached(later)
    past = party.as_of(receipt.anchor)
    assert past.get(task.id)["title"] == "x"
    assert [revision.author for revision in task.history()] == ["Own", "Own"]
    assert [(diff.before, diff.after) for diff in task.diff(receipt.anchor)] == [("x", "y")]
    assert party.snapshot().cid == party.snapshot().cid
    assert party.snapshot().item_count == 2


def test_functions_of_the_client_are_called(own: Peer, peer: Peer, party: Party, tmp_path: Path) -> None:
    task = party.create(n=1)
    # A function that uses the peer itself, and one that raises.
    assert party.wait_for(lambda: task["n"] == 1, 5)
    with pytest.raises(KeyError):
        party.wait_for(lambda: task["missing"], 5)
    # What a generator of the client gives is asked for piece by piece.
    snapshot = party.snapshot()
    given: list[bytes] = []

    def blobs() -> Iterator[tuple[bytes, bytes]]:
        for cid in (snapshot.root.membership_root,):
            given.append(cid)
            yield cid, snapshot.blob(cid)

    assert peer.epochs(party.key).create_from(cid_from_text(snapshot.cid), blobs()).number == 1
    assert given == [snapshot.root.membership_root]
    export_party(own.party("@Trip"), tmp_path / "trip.car")
    own.forget_party(own.party("@Trip").key)
    told: list[tuple[int, int]] = []
    again = peer.import_party(tmp_path / "trip.car", lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    assert again.get(task.id)["n"] == 1


def test_files(party: Party, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photo.txt").write_bytes(b"x" * 300_000)
    file = party.files.add("photo.txt")
    assert (file.name, file.size, file.media_type) == ("photo.txt", 300_000, "text/plain")
    assert [len(piece) for piece in party.files.chunks(file)] == [262_144, 37_856]
    party.files.save(file, "copy.txt")
    assert Path("copy.txt").read_bytes() == b"x" * 300_000


def test_members_and_invitations(peer: Peer, party: Party) -> None:
    (member,) = party.members
    assert (member.role, member.name, len(party.members)) == (Role.OWNER, "Own", 1)
    with pytest.raises(Refused, match="listens nowhere"):
        party.invite()
    assert peer.listen("127.0.0.1:0").startswith("127.0.0.1:")
    invitation = party.invite("reader", uses=2)
    assert invitation.state.role == "reader"
    with pytest.raises(TimedOut):
        invitation.wait(timeout=0.1)
    invitation.cancel()
    assert invitation.wait(timeout=5).ended == "cancelled"
    assert peer.network.connections() == []


# queries


def test_queries(party: Party) -> None:
    made = [party.create(type="task", n=n, done=n % 2 == 0) for n in range(5)]
    query = party.query(type="task").where(echostore.field("n") >= 1, done=False).order_by("-n")
    assert query.all() == list(query) == [made[3], made[1]]
    assert query.order_by(echostore.field("n")).ids() == [made[1].id, made[3].id]
    assert (query.count(), query.first(), query.limit(1).rows()) == (2, made[3], [{"done": False, "n": 3}])
    assert party.query(type="task").reduce("sum", "n").value() == 10
    with pytest.raises(UsageError, match="more than one"):
        query.one()
    with pytest.raises(UsageError):
        query.limit(1).where(done=True)
    assert party.peer.query(type="task").count() == 5


def test_tables(party: Party) -> None:
    party.create(type="task", n=1)
    query = party.query(type="task")
    assert query.to_arrow()["n"].to_pylist() == [1]
    assert list(query.to_pandas()["n"]) == [1]
    assert query.to_polars()["n"].to_list() == [1]
    pyarrow = pytest.importorskip("pyarrow")
    assert pyarrow.table(query).num_rows == 1


def test_live_queries(own: Peer, party: Party, caplog: pytest.LogCaptureFixture) -> None:
    changes: list[Any] = []

    def told(change: Any) -> None:
        changes.append(change)
        if len(changes) == 2:
            raise ValueError("a subscriber's own fault")

    with party.query(type="task").subscribe(told, initial=True):
        until(lambda: len(changes) == 1)
        task = own.party("@Trip").create(type="task", title="from the peer itself")
        until(lambda: len(changes) == 2)
        assert [item.id for item in changes[1].added] == [task.id]
        assert isinstance(changes[1].added[0], Item)
        task["title"] = "changed"
        until(lambda: len(changes) == 3)
        assert changes[2].changed[0]["title"] == "changed"
    assert "a subscriber of a live query raised" in caplog.text
    task["title"] = "after the end"
    time.sleep(0.2)
    assert len(changes) == 3
    watch = party.query(type="task").watch(timeout_s=0.3)
    task["title"] = "watched"
    assert [change.changed[0]["title"] for change in watch] == ["watched"]


# the conversation


def test_what_is_not_used_any_more_is_let_go(own: Peer, party: Party) -> None:
    server = LocalServer(own)  # takes over the socket; the first one keeps its conversations
    with echostore.open(own.home.path) as peer:
        trip = peer.party("@Trip")
        for _ in range(300):
            trip.create()
        (session,) = server._sessions.values()
        assert len(session._objects) < 100
    until(lambda: not server._sessions)
    server.close()
    assert party.items()


def test_a_client_has_a_bound_on_objects(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [party.create() for _ in range(20)]
    monkeypatch.setattr(local_server, "OBJECTS_MAX", 20)
    with pytest.raises(Refused, match="objects"):
        party.create()
    assert made[0].id


def test_a_value_that_fits_no_frame_is_refused(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    task = party.create(x="y" * 5000)
    monkeypatch.setattr(local_socket, "FRAME_BYTES_MAX", 4000)
    with pytest.raises(TooLarge, match="frame"):
        task["x"]
    monkeypatch.undo()
    assert len(task["x"]) == 5000


def test_opening_with_a_name_changes_it(own: Peer) -> None:
    with echostore.open(own.home.path, name="New") as peer:
        assert (peer.name, own.name) == ("New", "New")


def test_closing_leaves_the_running_peer_alone(own: Peer) -> None:
    peer = echostore.open(own.home.path)
    party = peer.party("@Trip")
    party.create(type="kept")
    peer.close()
    peer.close()
    with pytest.raises(Closed):
        party.items()
    assert "closed" in repr(party)
    assert own.party("@Trip").query(type="kept").count() == 1


# values


def codec() -> Codec:
    return Codec(lambda value: None, lambda named: pytest.fail(f"{named} was not expected"))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, ("a", {"b"}, frozenset({b"c"}))],
        {1: {"x": [None]}},
        datetime(2026, 1, 2, tzinfo=UTC),
        Path("some/where"),
        Role.ADMIN,
        Position(3, b"link"),  # type: ignore[arg-type]  # a Link
        Stamp(1, b"feed", 2, 3),  # type: ignore[arg-type]  # a FeedId
        echostore.Reference(b"i" * 16),  # type: ignore[arg-type]  # an ItemId
    ],
)
def test_values_come_as_they_went(value: Any) -> None:
    found = codec().unpack(codec().pack(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "packed",
    [
        [],
        ["?"],
        ["v", "subprocess:Popen", "true"],
        ["v", "echostore.peer.peer:Peer"],
        ["v", "echostore.kernel.errors:EchoError", "x"],
        ["e", "signal:Signals", 9],
        ["e", "echostore.peer.peer:Peer", 1],
    ],
)
def test_nothing_but_records_is_made(packed: list[Any]) -> None:
    with pytest.raises(UsageError):
        codec().unpack(packed)


def test_no_module_is_loaded_for_a_stranger() -> None:
    for packed in (["v", "this:s", 1], ["e", "this:s", 1], ["v", "echostore.cli.bench:app"]):
        with pytest.raises(UsageError):
            codec().unpack(packed)
    assert "this" not in sys.modules


def test_deep_values_are_refused() -> None:
    value: Any = 1
    for _ in range(100):
        value = [value]
    with pytest.raises(UsageError):
        codec().pack(value)
    packed: Any = 1
    for _ in range(100):
        packed = ["l", packed]
    with pytest.raises(UsageError):
        codec().unpack(packed)


def test_an_error_of_another_kind_is_told_as_a_failure() -> None:
    found = unpack_error(pack_error(RuntimeError("boo")))
    assert type(found) is echostore.EchoError
    assert "RuntimeError: boo" in str(found)
    assert type(unpack_error(pack_error(Closed("x")))) is Closed


# asyncio


def test_asyncio(own: Peer) -> None:
    async def story() -> None:
        async with aio.open(own.home.path) as peer:
            party = await peer.party("@Trip")
            changes = []

            async def follow() -> None:
                async for change in party.query(type="task").watch():
                    changes.append(change)
                    if len(changes) == 2:
                        return

            following = asyncio.create_task(follow())
            await asyncio.sleep(0.2)
            task = await party.create(type="task", title="x")
            async with party.batch():
                await task.set("a", 1)
                await task.update(b=2)
                with pytest.raises(KeyError):
                    await task["missing"]
            async with asyncio.timeout(20):
                await following
            assert await task["title"] == "x"
            assert await task.to_dict() == {"a": 1, "b": 2, "title": "x"}
            assert await changes[1].changed[0]["b"] == 2
            await task.unset("a")
            assert await party.title == "Trip"
            (found,) = await party.query(type="task").where(b=2).all()
            assert await found.id == await task.id
            assert [await each.id async for each in party.query(type="task")] == [await task.id]
            with pytest.raises(NotFound):
                await party.get("abcdef99")
            with pytest.raises(UsageError, match="Await it first"):
                party.create(parent=party.get("x"))

            async def broken() -> None:
                async with party.batch():
                    await task.set("b", 3)
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await broken()
            assert await task["b"] == 2
            listed = await party.create("growable-array", parent=task)
            await listed.append(task)
            assert await (await listed[0]).id == await task.id
            patient = [change async for change in party.query(type="task").watch(timeout_s=0.2)]
            assert patient == []

    asyncio.run(story())
    assert own.party("@Trip").query(type="task").one()["b"] == 2


def test_asyncio_batches_of_two_tasks_wait_for_each_other(own: Peer) -> None:
    async def story() -> int:
        peer = await aio.open(own.home.path)
        party = await peer.party("@Trip")
        task = await party.create(n=0)

        async def count() -> None:
            for _ in range(10):
                async with party.batch():
                    now = await task["n"]
                    await asyncio.sleep(0)
                    await task.set("n", now + 1)

        await asyncio.gather(count(), count(), count())
        found: int = await task["n"]
        await peer.close()
        return found

    assert asyncio.run(story()) == 30


def test_asyncio_with_a_peer_of_its_own(tmp_path: Path) -> None:
    async def story() -> str:
        async with aio.open(tmp_path / "home", name="A") as peer:
            party = await peer.create_party("Solo")
            await party.create(type="task")
            found: str = await party.snapshot().cid
            return found

    found = asyncio.run(story())
    with echostore.open(tmp_path / "home") as peer:
        assert peer.party("@Solo").snapshot().cid == found
