"""A party as the root of thin clients: values equal fresh queries at every tick, batches are in the feed exactly once."""

import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.coherence.arcs import ARC_IDS_BITS
from echostore.kernel.coherence.events import Want
from echostore.kernel.coherence.messages import IssuedId, PublishOp, RejectReason, Update
from echostore.kernel.coherence.updates import frames_of
from echostore.kernel.ids import ARC_BIT, ItemId, item_id
from echostore.kernel.items.operations import METADATA, PLACEMENT, ItemOperation
from echostore.kernel.items.tree import MOVE
from echostore.kernel.models.property_set import DELETED, Add, Increment, Remove, Set
from echostore.kernel.models.threaded_log import Post
from echostore.kernel.query.evaluate import evaluate
from echostore.kernel.query.fields import parse_field
from echostore.kernel.query.filters import And, Compare, Op, Or
from echostore.kernel.query.spec import Order, QuerySpec, Stage, Step
from echostore.kernel.reasons import Reason
from echostore.peer.coherence_batches import list_place, text_place
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.peer.query import Query
from echostore.wire.index_spec import IndexQuery, index_seal, index_spec, seal_statement
from echostore.wire.leaf_operations import ListEdit, TextEdit, edit_delta, operation_delta
from echostore.wire.signing import verify
from echostore.wire.values import value_bytes
from network_peers import until
from thin_client import HOME, ThinClient

TASKS = QuerySpec.start("task")


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home", name="Root") as opened:
        yield opened


def served(peer: Peer, **terms: Any) -> tuple[Party, str, str]:
    party = peer.create_party("Thin")
    url = peer.serve_thin("127.0.0.1:0")
    return party, url, party.capability(**{"read": "*", "write": "*", "messages": True, **terms}).text


def tasks(party: Party) -> list[dict[str, Any]]:
    return sorted(party.query("task").rows(), key=lambda row: value_bytes(row))


def test_a_leaf_reads_and_follows(peer: Peer) -> None:
    party, url, capability = served(peer)
    task = party.create(type="task", title="tickets", done=False)
    with ThinClient(url, capability) as client:
        spec = client.spec(TASKS)
        assert [each.values for each in client.want(spec)] == [{"title": "tickets", "done": False}]
        task["done"] = True
        client.sees(spec, lambda items: items[0].values["done"] is True)
        other = party.create(type="task", title="map")
        client.sees(spec, lambda items: [each.item for each in items] == sorted([task.id, other.id]))
        task.delete()
        client.sees(spec, lambda items: [each.item for each in items] == [other.id])
        assert client.want(client.item_spec(task.id))[0].deleted
        assert client.want(client.item_spec(ItemId(b"n" * 16))) == []


def test_a_leaf_writes_and_links_what_it_made(peer: Peer) -> None:
    party, url, capability = served(peer)
    with ThinClient(url, capability) as client:
        client.want(client.spec(TASKS))
        board, task, link = client.new_item(), client.new_item(), client.new_item()
        client.publish(
            client.genesis(board, "board"), client.genesis(task, "task"), client.setting(task, title="from afar")
        )
        client.publish(client.genesis(link, "part", source=board, target=task))
        moved = ItemOperation(task, PLACEMENT, (MOVE, board))
        client.publish((task, operation_delta(client.feed, moved)))
        client.settle()
        assert client.told == []
    found = party.get(task)
    assert (found["title"], found.parent.id) == ("from afar", board)
    assert [each.id for each in party.query("board").links().all()] == [link]
    assert party.get(link).type == "part"


def test_operations_of_every_kind(peer: Peer) -> None:
    party, url, capability = served(peer)
    text = party.create("text", type="note")
    text.insert(0, "one three")
    numbers = party.create("growable-array", type="numbers")
    numbers.append(1, 2, 3)
    log = party.create("threaded-log", type="log")
    task = party.create(type="task", title="t", count=1)
    task.add("tags", "old")
    party.flush()
    with ThinClient(url, capability) as client:

        def on(item: Any, field: str, body: Any) -> tuple[bytes, bytes]:
            return item.id, operation_delta(client.feed, ItemOperation(item.id, field, body))

        client.until(lambda: client.leaf.arcs.arc)
        client.publish(
            (text.id, edit_delta(TextEdit(4, "", "two ", "one "))),
            (numbers.id, edit_delta(ListEdit(1, (2,), (20, 21)))),
            on(log, "threaded-log", Post({"said": "hello"}, None)),
            on(task, "property-set", (Set(("title",), "T"), Increment(("count",), 2, None))),
            on(task, "property-set", (Add(("tags",), "new", value_bytes("new")),)),
            on(task, "property-set", (Remove(("tags",), "old", value_bytes("old"), ()),)),
            on(task, METADATA, (Set(("display_name",), "Named"),)),
        )
        client.settle()
        assert client.told == []
        assert str(text) == "one two three"
        assert numbers.to_list() == [1, 20, 21, 3]
        assert [entry.body for entry in log.posts()] == [{"said": "hello"}]
        assert (task["title"], task["count"], task["tags"], task.name) == ("T", 3, ["new"], "Named")
        client.publish(on(task, METADATA, (Set(("deleted",), True),)))
        client.settle()
        assert task.deleted
        client.publish(on(task, "property-set", (Set(("title",), DELETED),)))
        client.settle()
        assert "title" not in task


def test_what_may_not_be_is_told_with_its_reason_and_the_rest_stands(peer: Peer) -> None:
    party, url, capability = served(peer, write=["task"])
    board = party.create(type="board")
    task = party.create(type="task", title="t")
    text = party.create("text", type="task")
    text.insert(0, "abc")
    party.flush()
    with ThinClient(url, capability) as client:
        mine = client.new_item()
        arc = client.leaf.arcs
        feed = client.feed
        foreign = item_id(feed, ARC_BIT | ((arc.base >> ARC_IDS_BITS) + 1 << ARC_IDS_BITS) + 1)
        own_number = item_id(feed, 77 << 16)
        system = party.system_item
        assert system is not None
        wrong: list[tuple[tuple[bytes, bytes], RejectReason | Reason]] = [
            (client.setting(board.id, a=1), RejectReason.NOT_ALLOWED),
            (client.genesis(client.new_item(), "board"), RejectReason.NOT_ALLOWED),
            (client.genesis(client.new_item(), "system"), RejectReason.NOT_ALLOWED),
            (client.setting(system.id, title="Mine"), RejectReason.NOT_ALLOWED),
            (client.genesis(foreign, "task"), RejectReason.OUTSIDE_ARC),
            (client.genesis(own_number, "task"), RejectReason.OUTSIDE_ARC),
            (client.setting(ItemId(b"n" * 16), a=1), RejectReason.NO_ITEM),
            ((task.id, b"\xff\xff"), RejectReason.MALFORMED),
            ((b"short", client.setting(task.id, a=1)[1]), RejectReason.MALFORMED),
            ((board.id, client.setting(task.id, a=1)[1]), RejectReason.NOT_ALLOWED),
            ((mine, client.setting(task.id, a=1)[1]), RejectReason.MALFORMED),
            ((text.id, edit_delta(TextEdit(0, "xyz", ""))), RejectReason.CONFLICT),
            ((task.id, edit_delta(TextEdit(0, "", "x"))), Reason.WRONG_MODEL),
            (client.setting(text.id, a=1), Reason.WRONG_MODEL),
            (client.genesis(client.new_item(), "task", "no-such-model"), Reason.WRONG_MODEL),
            (client.genesis(task.id, "task"), RejectReason.OUTSIDE_ARC),
            (
                (task.id, operation_delta(feed, ItemOperation(task.id, METADATA, (Set(("access",), {}),)))),
                RejectReason.NOT_ALLOWED,
            ),
        ]
        client.publish(client.genesis(mine, "task"), *(op for op, _ in wrong), client.setting(mine, title="stands"))
        client.publish(client.genesis(mine, "task"))
        client.settle()
        told = {each.op.n: each.reason for each in client.told}
        first = min(told)
        expected = [reason for _, reason in wrong]
        assert [told[first + place] for place in range(len(wrong))] == expected
        assert told[max(told)] is Reason.DUPLICATE
        assert len(told) == len(wrong) + 1
    assert party.get(mine)["title"] == "stands"
    assert (board.to_dict(), task.to_dict(), str(text)) == ({}, {"title": "t"}, "abc")


def test_what_breaks_a_schema_is_refused(peer: Peer) -> None:
    party, url, capability = served(peer)
    party.schemas.define("task", {"title": {"type": "string", "required": True}, "n": "int"})
    with ThinClient(url, capability) as client:
        good = client.create("task", title="x", n=1)
        bare = client.create("task", n=1)
        client.publish(client.setting(good, n="many"))
        client.settle()
        reasons = [each.reason for each in client.told]
    assert reasons == [RejectReason.NOT_ALLOWED, RejectReason.NO_ITEM, RejectReason.NOT_ALLOWED]
    assert party.get(good).to_dict() == {"title": "x", "n": 1}
    assert not party.has(bare)


@pytest.mark.parametrize("seed", range(3))
def test_held_values_equal_fresh_queries_at_their_tick(peer: Peer, seed: int) -> None:
    """Random specs, random changes at the root: whatever a leaf holds at its tick is what a query says there."""
    rng = random.Random(seed)
    party, url, capability = served(peer)
    specs = [
        TASKS,
        QuerySpec.start("task").normal(),
        *[
            QuerySpec((Stage(filter=And((_eq("@type", "task"), _eq("kind", kind)))),), **more)
            for kind in range(3)
            for more in ({}, {"order": (Order(parse_field("rank"), descending=True),), "limit": 3})
        ],
        QuerySpec((Stage(filter=Or((_eq("kind", 1), _eq("rank", 2)))),), select=(parse_field("rank"),)),
        QuerySpec((Stage(filter=_eq("@type", "board")), Stage(Step.CHILDREN))),
    ]
    boards = [party.create(type="board", n=n) for n in range(2)]
    items = [party.create(type="task", parent=rng.choice(boards), kind=n % 3, rank=n) for n in range(6)]
    with ThinClient(url, capability) as client:
        asked = [index_spec(IndexQuery(party.key, spec)) for spec in specs]
        for _ in range(12):
            with party.batch():
                for _ in range(rng.randrange(1, 4)):
                    _change(rng, party, items, boards)
            peer.thin_services[0].call(_cut(peer))
            tick = peer.thin_services[0].indexes()[0].tick
            for spec, query in zip(asked, specs, strict=True):
                shown = client.sees(spec, partial(_reached, client, tick))
                with party.reading() as runtime:
                    fresh = [row.item for _, row in evaluate(query.normal(), runtime.source).rows]
                rows = Query(party.live, query).rows()
                assert [each.item for each in shown] == fresh
                assert [each.values for each in shown] == rows


def _eq(field: str, value: Any) -> Compare:
    return Compare(parse_field(field), Op.EQ, value)


def _change(rng: random.Random, party: Party, items: list[Any], boards: list[Any]) -> None:
    item = rng.choice(items)
    what = rng.randrange(6)
    if what == 0:
        items.append(party.create(type="task", parent=rng.choice(boards), kind=rng.randrange(3), rank=rng.randrange(9)))
    elif what == 1:
        item.restore() if item.deleted else item.delete()
    elif what == 2:
        item.move(rng.choice(boards))
    elif what == 3:
        item["rank"] = rng.randrange(9)
    else:
        item["kind"] = rng.choice([0, 1, 2, 1.0, "1", None])


def _reached(client: ThinClient, tick: int, items: object) -> bool:
    return client.tick >= tick


async def _cut(peer: Peer) -> None:
    for root in peer.thin_services[0]._roots.values():
        root.cut()


def test_an_older_tick_is_answered_or_gone(peer: Peer) -> None:
    party, url, capability = served(peer)
    task = party.create(type="task", n=0)
    board = party.create(type="board", n=0)
    with ThinClient(url, capability) as client:
        spec, boards = client.spec(TASKS), client.spec(QuerySpec.start("board"))
        client.want(spec)
        then = client.tick
        task["n"] = 1
        client.sees(spec, lambda items: items[0].values["n"] == 1)
        assert client.tick > then
        assert client.want(boards, then)[0].values == {"n": 0}, "no board has changed since, so the answer still holds"
        board["n"] = 1
        task["n"] = 2
        client.sees(spec, lambda items: items[0].values["n"] == 2)
        unseen = client.spec(QuerySpec((Stage(filter=And((_eq("@type", "board"), _eq("n", 0)))),)))
        client.give(Want(HOME, unseen, then))
        client.until(lambda: client.lost)
        assert (client.lost[0].spec, client.lost[0].at, client.lost[0].reason) == (unseen, then, None)


def test_a_sealed_answer_carries_records_and_the_roots_signature(peer: Peer) -> None:
    party, url, capability = served(peer)
    task = party.create(type="task", n=0)
    with ThinClient(url, capability) as client:
        spec = client.spec(TASKS, sealed=True)
        for number in range(3):
            shown = client.sees(spec, partial(_numbered, number))
            version = client.leaf.read(client.leaf.home, spec)
            assert version is not None
            assert all(each.record for each in shown)
            assert verify(bytes.fromhex(client.ok["device"]), seal_statement(spec, shown), index_seal(version.value))
            task["n"] = number + 1


def _numbered(number: int, items: list[Any]) -> bool:
    return bool(items[0].values["n"] == number)


def test_more_than_a_value_holds_is_denied(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echostore.peer.coherence_watch.ITEMS_MAX", 3)
    party, url, capability = served(peer)
    for number in range(3):
        party.create(type="task", n=number)
    with ThinClient(url, capability) as client:
        spec = client.spec(TASKS)
        assert len(client.want(spec)) == 3
        party.create(type="task", n=3)
        client.until(lambda: client.shown(spec) is None)
        client.give(Want(HOME, spec))
        client.until(lambda: client.lost)
        assert client.lost[0].reason is RejectReason.TOO_LARGE
        limited = client.spec(QuerySpec(TASKS.stages, limit=2))
        assert len(client.want(limited)) == 2


SERVER = """
    import sys, os
    import echostore
    from echostore.store.feed_store import FeedStore
    home, when, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    peer = echostore.open(home, name="Root")
    party = peer.party("@Thin") if peer.parties() else peer.create_party("Thin")
    kept = party.capabilities.issued()
    text = kept[0].text if kept else party.capability(write="*", messages=True).text
    party.flush()
    append = FeedStore.append_many
    seen = 0
    def dying(self, appends, about=None):
        global seen
        batch = any("/batch/" in name for name in about or {})
        seen += batch
        if batch and seen == count and when == "before":
            os.kill(os.getpid(), 9)
        append(self, appends, about)
        if batch and seen == count and when == "after":
            os.kill(os.getpid(), 9)
    FeedStore.append_many = dying
    print(peer.serve_thin("127.0.0.1:0"), text, flush=True)
    sys.stdin.read()
    peer.close()
"""


class Served:
    """A root in a process of its own, which ends with the block at the latest."""

    def __init__(self, home: Path, when: str = "never", count: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SERVER), str(home), when, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url, self.capability = self.process.stdout.readline().split()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        self.process.communicate("", timeout=30)
        assert self.process.returncode == 0

    def died(self) -> None:
        assert self.process.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_batch_is_in_the_feed_once_whenever_the_root_is_killed(tmp_path: Path, when: str) -> None:
    """Killed just before and just after the commit that holds the batch and its account, before anybody heard of it."""
    with Served(tmp_path / "home", when, 2) as first:
        client = ThinClient(first.url, first.capability).open()
        spec = client.spec(TASKS)
        client.want(spec)
        one = client.create("task", title="one")
        client.settle()
        tick = client.tick
        client.publish(client.setting(one, title="two"), client.setting(ItemId(b"n" * 16), a=1))
        closed = client.until_closed()
        assert closed.code == 1006
        first.died()
        assert client.leaf.outbox.to_send(), "it heard nothing"

    with Served(tmp_path / "home") as second:
        client.url = second.url
        client.open()
        client.settle()
        assert client.tick > tick
        assert list(client.leaf.caches[HOME].follows.values()) == [2]
        client.sees(spec, lambda items: [each.values for each in items] == [{"title": "two"}])
        assert [each.reason for each in client.told] == [RejectReason.NO_ITEM]
        three = client.create("task", title="three")
        client.settle()
        client.close()
        second.stop()

    with echostore.open(tmp_path / "home") as peer:
        party = peer.party("@Thin")
        assert tasks(party) == sorted([{"title": "two"}, {"title": "three"}], key=value_bytes)
        assert three != one
        written = [
            operation
            for message in party.stream()
            for operation in message.operations
            if operation.item == one and operation.field == "property-set"
        ]
        assert len(written) == 2, "each batch once"


def test_ticks_names_and_arcs_are_never_used_again(tmp_path: Path) -> None:
    ticks: list[int] = []
    systems, items = set(), set()
    old: ThinClient | None = None
    for _ in range(3):
        with echostore.open(tmp_path / "home", name="Root") as peer:
            party = peer.party("@Thin") if peer.parties() else peer.create_party("Thin")
            url = peer.serve_thin("127.0.0.1:0")
            fresh = ThinClient(url, party.capability(write="*").text)
            old = old or fresh
            old.url, old.capability = url, fresh.capability
            for client in {id(each): each for each in (fresh, old)}.values():
                with client:
                    ticks.append(client.tick)
                    items.add(client.create("task"))
                    client.settle()
                    ticks.append(client.tick)
                    systems.add(client.leaf.systems[HOME])
    assert ticks == sorted(ticks)
    assert [ticks[1] < ticks[2], ticks[5] < ticks[6]] == [True, True], "a restart goes on behind all that was told"
    assert len(systems) == 3, "the old leaf has kept its name"
    assert len(items) == 5


@pytest.mark.parametrize("writes", range(1, 6))
def test_a_root_starts_behind_all_ticks_it_ever_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    monkeypatch.setattr("echostore.peer.coherence_ledger.TICKS_RESERVED", 2)
    told = []
    for _ in range(2):
        with echostore.open(tmp_path / "home", name="Root") as peer:
            party = peer.party("@Thin") if peer.parties() else peer.create_party("Thin")
            with ThinClient(peer.serve_thin("127.0.0.1:0"), party.capability(write="*").text) as client:
                told.append(client.tick)
                for _ in range(writes):
                    client.create("task")
                    client.settle()
                told.append(client.tick)
    assert told[1] == told[0] + writes
    assert told[2] > told[1]


def test_a_leaf_with_no_memory_of_its_batches_does_no_harm(peer: Peer) -> None:
    """A repeated batch, a gap, another system's clock: nothing is written twice, or at all."""
    party, url, capability = served(peer)
    with ThinClient(url, capability) as client, ThinClient(url, capability) as other:
        item = client.create("task", n=0)
        client.settle()
        sent = [message for message in client.sent if isinstance(message, Update)]
        assert len(sent) == 1
        for message in [*sent, *frames_of(sent[0])]:
            client.send(message)
            other.send(message)
        clock = client.leaf.arcs.arc
        assert clock is not None
        forged = Update(clock, 1, 2, (), (PublishOp(IssuedId(clock, 99), *other.setting(item, n=66)),))
        other.send(forged)
        refused = {RejectReason.UNKNOWN_SYSTEM.value: 2 + len(frames_of(sent[0]))}
        until(lambda: dict(peer.thin_services[0].indexes()[0].refusals) == refused)
        gap = Update(clock, 7, 8, (), (PublishOp(IssuedId(clock, 98), *client.setting(item, n=77)),))
        client.send(gap)
        client.publish(client.setting(item, n=1))
        client.settle()
        other.create("task", n=2)
        other.settle()
        links = client.leaf.systems[HOME], other.leaf.systems[HOME]
        assert links[0] != links[1]
    assert tasks(party) == [{"n": 1}, {"n": 2}]


def test_text_and_list_edits_find_their_place() -> None:
    text = "the quick brown fox and the slow fox"
    assert text_place(text, TextEdit(4, "quick", "", "the ")) == 4
    assert text_place("oh, " + text, TextEdit(4, "quick", "", "the ")) == 8
    assert text_place(text, TextEdit(33, "fox", "", "slow ")) == 33
    assert text_place(text, TextEdit(30, "fox", "")) == 33
    assert text_place(text, TextEdit(10, "fox", "")) == 16
    assert text_place(text, TextEdit(5, "cat", "")) is None
    assert text_place("", TextEdit(50, "", "x", "gone")) == 0
    assert text_place(text, TextEdit(2, "", "x")) == 2
    assert list_place([1, 2, 3, 2], ListEdit(3, (2,), ())) == 3
    assert list_place([1, 2, 3, 2], ListEdit(0, (2, 3), ())) == 1
    assert list_place([1, 2], ListEdit(0, (2.0,), ())) is None
    assert list_place([1, 2], ListEdit(9, (), (5,))) == 2
