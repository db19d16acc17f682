"""What a leaf wrote, the root took, and the party leaves out later: its leaf is told, once, with the reason."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.coherence.messages import Linked, NotifyReplicated, RejectReason
from echostore.kernel.query.spec import QuerySpec
from echostore.kernel.reasons import Reason
from echostore.thin.thin_party import connect
from echostore.wire.leaf_operations import TextEdit, edit_delta
from edge_process import RunningEdge
from network_peers import until
from peer_builder import Circle
from thin_client import ThinClient

TASKS = QuerySpec.start("task")


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    """Bob is an editor of ann's party, and serves thin clients."""
    with Circle(tmp_path, "ann", "bob") as made:
        yield made


def capability(circle: Circle, **terms: Any) -> str:
    """Of ann, so that it is worth something whatever becomes of bob."""
    return circle.party("ann").capability(**{"read": "*", "write": "*", **terms}).text


def serve(circle: Circle) -> str:
    return circle.peers["bob"].serve_thin("127.0.0.1:0")


def ready(client: ThinClient) -> ThinClient:
    """With a link, and ids to write with."""
    client.until(lambda: client.leaf.arcs.arc is not None)
    return client


def told(client: ThinClient) -> list[tuple[bytes, str]]:
    return [(each.object, each.reason.value) for each in client.told]


def rows(circle: Circle) -> int:
    """Blocks of bob's whose operations may be told as excluded yet."""
    with circle.party("bob").reading() as runtime:
        return sum("/op/" in name for name in runtime.feeds.about_under("thin/"))


def test_a_rule_that_was_there_first_is_told_as_the_reason(circle: Circle) -> None:
    """Ann's rule stands before the leaf's write in the order of the party, and bob hears of it afterwards."""
    task = circle.party("ann").create(type="task", n=0)
    circle.meet("ann", "bob")
    with ThinClient(serve(circle), capability(circle)) as client:
        spec = client.spec(TASKS)
        circle.get("ann", task).restrict(roles=["owner"])
        circle.party("bob").create(type="note")  # bob's next block comes after the rule
        ready(client).publish(client.setting(task.id, n=1))
        mine = client.create("task", n=7)
        client.settle()
        client.sees(spec, lambda items: {each.item: each.values["n"] for each in items} == {task.id: 1, mine: 7})
        assert client.told == []
        circle.meet("ann", "bob")
        client.until(lambda: client.told)
        client.sees(spec, lambda items: {each.item: each.values["n"] for each in items} == {task.id: 0, mine: 7})
        assert told(client) == [(task.id, Reason.DENIED.value)]
        client.drop()
        client.open()
        client.create("task", n=8)
        client.settle()
        assert told(client) == [(task.id, Reason.DENIED.value)], "told once"


def test_a_removed_root_tells_its_leaves_what_was_cut_off(circle: Circle) -> None:
    """A leaf that is away hears of it when it is back, also from a root that was restarted; and no second time."""
    circle.party("ann").create(type="task", n=0)
    circle.meet("ann", "bob")
    url, given = serve(circle), capability(circle)
    client = ThinClient(url, given).open()
    kept = client.create("task", n=1)
    client.settle()
    circle.meet("ann", "bob")
    lost, text = client.create("task", n=2), client.new_item()
    client.publish(client.genesis(text, "text", "text"), (text, edit_delta(TextEdit(0, "", "hello", ""))))
    client.settle()
    client.drop()
    before = rows(circle)
    circle.party("ann").members.remove(circle.peers["bob"].identity)
    circle.meet("ann", "bob")
    until(lambda: rows(circle) == before - 2)  # both blocks are told by now, or will be: that is on disk
    circle.restart("bob")
    client.url = serve(circle)
    client.open()
    cut = Reason.BEYOND_CUT.value
    assert told(client) == [(lost, cut), (lost, cut), (text, cut), (text, cut)], "with the link itself"
    assert kept in {each.item for each in client.want(client.spec(TASKS))}
    assert lost not in {each.item for each in client.want(client.spec(TASKS))}
    late = client.new_item()
    client.publish(client.genesis(late, "task"))
    client.settle()
    assert told(client)[4:] == [(late, RejectReason.EXCLUDED.value)]
    client.drop()
    client.open()
    assert len(client.told) == 5
    client.close()


def test_what_was_excluded_while_nobody_served_is_found_at_the_start(circle: Circle) -> None:
    client = ThinClient(serve(circle), capability(circle)).open()
    item = client.create("task", n=1)
    client.settle()
    client.drop()
    circle.peers["bob"].thin_services[0].close()
    circle.party("ann").members.remove(circle.peers["bob"].identity)
    circle.meet("ann", "bob")
    circle.restart("bob")
    client.url = serve(circle)
    client.open()
    client.until(lambda: len(client.told) == 2)
    assert told(client) == [(item, Reason.BEYOND_CUT.value)] * 2
    client.close()


def test_leaves_behind_edges_are_told_wherever_they_come_back(circle: Circle) -> None:
    url, given = serve(circle), capability(circle, messages=True, edge=True)
    with RunningEdge([url], given) as one, RunningEdge([url], given) as two:
        here, away = ThinClient(one.url, given).open(), ThinClient(two.url, given).open()
        mine, theirs = here.create("task", n=1), away.create("task", n=2)
        here.settle()
        away.settle()
        away.drop()
        circle.party("ann").members.remove(circle.peers["bob"].identity)
        circle.meet("ann", "bob")
        here.until(lambda: len(here.told) == 2)
        away.url = one.url
        away.open()
        assert told(away) == [(theirs, Reason.BEYOND_CUT.value)] * 2
        for client, item in ((here, mine), (away, theirs)):
            client.drop()
            client.url = two.url
            client.open()
            client.close()
            assert told(client) == [(item, Reason.BEYOND_CUT.value)] * 2, "once each, whichever way it comes"
        linked = [each for each in away.received if isinstance(each, Linked)]
        assert [len(each.rejected) for each in linked] == [0, 2, 0]


def test_text_that_is_issued_again_is_not_told_as_rejected(tmp_path: Path) -> None:
    """The leaf's words stood in a text of cat's, whose edit is cut off: bob writes them again."""
    with Circle(tmp_path, "ann", "bob", "cat") as circle:
        text = circle.party("ann").create("text", type="text")
        circle.meet_all()
        circle.get("cat", text).insert(0, "shopping list: ")
        circle.meet("bob", "cat")
        with ThinClient(serve(circle), capability(circle)) as client:
            ready(client).publish((text.id, edit_delta(TextEdit(15, "", "milk", "list: "))))
            client.publish((text.id, edit_delta(TextEdit(0, "shop", "", ""))))
            client.settle()
            assert str(circle.get("bob", text)) == "ping list: milk"
            circle.party("ann").members.remove(circle.peers["cat"].identity)
            circle.meet("ann", "bob")
            assert str(circle.get("bob", text)) == "milk"
            client.until(lambda: client.told)
            last = client.create("task", n=1)
            client.settle()
            assert told(client) == [(text.id, Reason.BUILDS_ON_EXCLUDED.value)], "what it removed was never there"
            assert last in {each.id for each in circle.party("bob").query("task").all()}


def test_a_release_fence_comes_after_the_rejections_of_what_it_waited_for(circle: Circle, tmp_path: Path) -> None:
    """And they outlive the leaf's program: what was told stays told."""
    url, given = serve(circle), capability(circle, write=["task"])
    with connect(url, given, path=tmp_path / "leaf.db") as leaf:
        heard: list[Any] = []
        leaf.on_rejected(heard.append)
        for _ in range(20):
            refused = leaf.create(type="note", n=1)
            leaf.fence("release")
            assert leaf.rejected()[-1].item == refused.id, "known by the time the fence is passed"
        allowed = leaf.create(type="task", n=1)
        leaf.fence("release")
        before = leaf.rejected()
        assert {each.reason for each in before} == {RejectReason.NOT_ALLOWED, RejectReason.NO_ITEM}
        until(lambda: len(heard) == len(before))
    circle.party("ann").members.remove(circle.peers["bob"].identity)
    circle.meet("ann", "bob")
    with connect(url, given, path=tmp_path / "leaf.db") as leaf:
        assert leaf.rejected()[: len(before)] == before
        until(lambda: len(leaf.rejected()) == len(before) + 2)
        after = leaf.rejected()[len(before) :]
        assert {(each.item, each.reason) for each in after} == {(allowed.id, Reason.BEYOND_CUT)}
    with connect(url, given, path=tmp_path / "leaf.db") as leaf:
        leaf.wait_connected()
        assert leaf.rejected() == [*before, *after]


def test_rows_of_operations_are_for_the_blocks_that_hold_them(circle: Circle) -> None:
    """A batch that leaves nothing in the feed leaves no row either."""
    with ThinClient(serve(circle), capability(circle, write=["task"])) as client:
        client.create("note", n=1)
        client.settle()
        assert rows(circle) == 0
        client.create("task", n=1)
        client.settle()
        assert rows(circle) == 1
        assert [each.reason for each in client.told] == [RejectReason.NOT_ALLOWED, RejectReason.NO_ITEM]
        assert any(isinstance(each, NotifyReplicated) for each in client.received)


def test_rows_go_when_the_party_stands_on_an_epoch_that_holds_their_blocks(
    circle: Circle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThinClient(serve(circle), capability(circle)) as client:
        for number in range(4):
            client.create("task", n=number)
            client.settle()
        assert rows(circle) == 4
        with circle.party("bob").reading() as runtime:
            assert runtime.data is not None
            last = runtime.data.cursor.length - 1
            monkeypatch.setattr(runtime.processor, "base_length", lambda feed: last)
        (service,) = circle.peers["bob"].thin_services

        async def sweep() -> None:
            for root in service._roots.values():
                root.sweep()

        service.call(sweep())
        assert rows(circle) == 1, "only the last block may be excluded yet"
