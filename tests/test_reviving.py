"""An item that an epoch discarded can be made anew: from whatever still has it, with what was quarantined on top."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.errors import Compacted, NotFound, Refused, UsageError
from echostore.kernel.ids import Cid, ItemId, item_creator, item_text
from echostore.peer import reviving
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.wire.snapshot import read_state_root
from echostore.wire.tree_reader import TreeReader
from network_peers import converged, invited, peers, until
from peer_builder import Circle, reasons
from served import agreed, let_in, serve
from test_discarding import discarded, later, seen_by_all
from test_stale_messages import agreed_epoch


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(reviving, "PATIENCE_S", 0.6)


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob", "cat", roles={"bob": "admin"}) as made:
        yield made


def gone_while_cat_wrote(circle: Circle, write: Any, **made: Any) -> tuple[Party, Any]:
    """Ann's item was discarded while cat, who had not heard of that, wrote to it; all have met since."""
    ann = circle.party("ann")
    item = ann.create(**made)
    item.name = "Tickets"
    ann.flush()
    circle.meet_all()
    return _discarded(circle, item, write), item


def _discarded(circle: Circle, item: Any, write: Any) -> Party:
    ann, cat = circle.party("ann"), circle.party("cat")
    item.delete()
    seen_by_all(circle)
    write(cat.get(item.id))
    cat.flush()
    discarded(circle, "ann", "bob")
    circle.meet_all()
    assert not ann.has(item.id)
    return ann


def test_it_comes_back_with_what_was_quarantined_under_another_id(circle: Circle) -> None:
    def write(item: Any) -> None:
        item.restore()
        item["n"] = 2
        item.add("tags", "late")

    ann, gone = gone_while_cat_wrote(circle, write, type="task", n=1, kept=[1, 2])
    assert reasons(ann) == ["discarded"] * 3
    revived = ann.revive(gone.id)
    assert (revived.old, revived.epoch, revived.operations, revived.left) == (gone.id, None, 3, [])
    made = ann.get(revived.item)
    assert made.value() == {"n": 2, "kept": [1, 2], "tags": ["late"]}
    assert (made.type, made.name, made.deleted, made.parent) == ("task", "Tickets", False, None)
    assert made._record().genesis.forked_from == gone.id
    Epochs(circle.party("cat")).review()
    circle.meet_all()
    circle.agree()
    assert circle.party("bob").get(revived.item)["n"] == 2
    circle.party("bob").get(revived.item).add("tags", "later")
    assert circle.party("bob").get(revived.item)["tags"] == ["late", "later"], "it is a set as before"


def test_a_text_has_its_marks_and_what_was_typed_meanwhile(circle: Circle) -> None:
    ann = circle.party("ann")
    text = ann.create("text")
    text.insert(0, "one two")
    text.mark(0, 3, "bold", True)
    ann.flush()
    circle.meet_all()
    _discarded(circle, text, lambda item: item.insert(7, " three"))
    made = ann.get(ann.revive(text.id).item)
    assert str(made) == "one two three"
    assert next((run.text, dict(run.marks)) for run in made.runs()) == ("one", {"bold": True})


def test_a_list_and_a_log_come_back(circle: Circle) -> None:
    ann = circle.party("ann")
    tasks, posts = ann.create("growable-array"), ann.create("threaded-log")
    tasks.append("first")
    first = posts.post("question")
    posts.post("answer", reply_to=first)
    posts.delete()
    _discarded(circle, tasks, lambda item: item.append("second"))
    assert list(ann.get(ann.revive(tasks.id).item)) == ["first", "second"]
    revived = ann.revive(posts.id)
    (thread,) = ann.get(revived.item).threads()
    assert (thread.entry.body, [reply.entry.body for reply in thread.replies]) == ("question", ["answer"])
    assert revived.left == ["who wrote its posts, and when"]


def test_what_hung_below_comes_back_below_the_one_that_was_made_of_its_parent(circle: Circle) -> None:
    ann = circle.party("ann")
    above = ann.create("property-set", type="list")
    below = ann.create("property-set", type="task", parent=above)
    other = ann.create("property-set", type="task")
    other.move(above)
    _discarded(circle, above, lambda item: item.restore())
    lone = ann.revive(below.id, dry_run=True)
    assert lone.item is None
    assert lone.left == [f"its place: item {item_text(above.id)[:8]}, below which it hung, is not in the party"]
    assert ann.query(type="task").count() == 0, "nothing was written"
    again = ann.get(ann.revive(above.id).item)
    for each in (below, other):
        revived = ann.revive(each.id)
        assert revived.left == []
        assert ann.get(revived.item).parent.id == again.id


def test_it_keeps_who_may_write_it_and_only_they_revive_it(circle: Circle) -> None:
    ann, cat = circle.party("ann"), circle.party("cat")
    item = ann.create("property-set", n=1)
    item.restrict(roles=["admin"])
    ann.flush()
    circle.meet_all()
    item.delete()
    seen_by_all(circle)
    discarded(circle, "ann", "bob")
    circle.meet_all()
    Epochs(cat).review()
    circle.meet_all()
    assert not cat.has(item.id)
    with pytest.raises(Refused, match="only by who might write it"):
        cat.revive(item.id)
    made = circle.party("bob").revive(item.id).item
    circle.meet_all()
    with pytest.raises(Refused):
        cat.get(made)["n"] = 2
    assert ann.get(made)["n"] == 1


def test_what_was_not_discarded_is_not_revived(circle: Circle) -> None:
    ann, gone = gone_while_cat_wrote(circle, lambda item: item.restore())
    kept = ann.create("property-set")
    with pytest.raises(Refused, match="was not discarded: it is in the party"):
        ann.revive(kept.id)
    kept.delete()
    with pytest.raises(Refused, match=r"in the party, deleted.*item restore"):
        ann.revive(item_text(kept.id))
    for unknown in (
        ItemId(item_creator(gone.id) + b"\x00" * 5 + b"\x7f" + b"\x00" * 2),
        ItemId(b"\x07" * 7 + b"\x00" * 9),
    ):
        with pytest.raises(Refused, match="no epoch that this peer stands on"):
            ann.revive(unknown)
    with pytest.raises(UsageError):
        ann.revive(7)
    with pytest.raises(UsageError, match="no discarded items start with"):
        ann.revive("0123")
    with pytest.raises(NotFound, match="no epoch of the party has"):
        ann.revive(ItemId(item_creator(gone.id) + b"\x00" * 6 + b"\x7f\xff"))
    first = ann.revive(item_text(gone.id)[:20])
    with pytest.raises(Refused, match=f"revived before, as {item_text(first.item)}"):
        ann.revive(gone.id)
    ann.get(first.item).delete()
    assert ann.revive(gone.id).item != first.item, "unless that was deleted"


def test_a_reader_revives_nothing(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob", "cat", roles={"bob": "admin", "cat": "reader"}) as circle:
        ann = circle.party("ann")
        gone = ann.create("property-set")
        gone.delete()
        circle.meet_all()
        for name in ("ann", "bob"):
            circle.party(name).system_item[name] = 1
        circle.meet_all()
        discarded(circle, "ann", "bob")
        circle.meet_all()
        Epochs(circle.party("cat")).review()
        with pytest.raises(Refused, match="may not write"):
            circle.party("cat").revive(gone.id)


# from snapshots


def story(party: Party) -> Any:
    """Three epochs: an item is in the first two, and the third leaves it out."""
    gone = party.create("property-set", type="gone", n=0)
    others = [party.create("property-set", number=number, text="x" * 400) for number in range(40)]
    for number in (1, 2):
        gone["n"] = number
        Epochs(party).create()
    for other in others:
        other["text"] = "y" * 400
    gone.delete()
    Epochs(party).create(discard_before_ms=later(party))
    assert not party.has(gone.id)
    return gone


def test_who_started_from_the_epoch_gets_the_snapshot_before_it_from_a_member(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        gone = story(party)
        theirs = invited(ann, party, bob)
        assert theirs.status.began.startswith("from epoch 3")
        second = Epochs(party).get(2).genesis.snapshot
        revived = theirs.revive(gone.id)
        assert revived.epoch == 2, "the newest that has it"
        assert revived.left == ["what was written between epoch 2 and where the blocks begin here"]
        assert theirs.get(revived.item)["n"] == 2
        assert theirs.runtime.blobs.missing(tree_of(party, second)), "only what leads there came"
        assert theirs.as_of(2).get(gone.id)["n"] == 2, "and the snapshot is not taken for whole"
        converged(party, theirs)


def tree_of(party: Party, snapshot: Cid) -> list[Cid]:
    blobs = party.runtime.blobs
    assert blobs is not None
    return list(TreeReader(read_state_root(blobs.get(snapshot)).index_root, blobs.get).reachable())


def test_nobody_has_a_snapshot_with_it(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        gone = story(party)
        invited(ann, party, bob)
    with echostore.open(tmp_path / "bob") as bob:
        theirs = bob.party(party.key)
        with pytest.raises(Compacted, match="nobody was asked: this peer is not on the network") as said:
            theirs.revive(gone.id)
        assert "epoch fetch 2" in said.value.next_step
        bob.listen("127.0.0.1:0")
        with pytest.raises(Compacted, match="nobody who is connected has the others"):
            theirs.revive(gone.id)
        assert theirs.query(type="gone").count() == 0


def test_what_an_earlier_snapshot_here_has_needs_nobody(circle: Circle) -> None:
    ann = circle.party("ann")
    gone = ann.create("property-set", n=1)
    seen_by_all(circle)
    agreed_epoch(circle, *circle.names)
    gone.delete()
    seen_by_all(circle)
    discarded(circle, *circle.names)
    kept = ann.runtime.blobs
    assert kept is not None
    blobs = {cid: kept.get(cid) for cid, _ in kept.list()}
    for _ in range(2):
        ann.create("property-set")
        agreed_epoch(circle, *circle.names)
    assert run_gc(ann).blocks
    with pytest.raises(Compacted, match="nobody was asked"):
        ann.revive(gone.id)
    kept.put_many(blobs)
    assert ann.get(ann.revive(gone.id).item)["n"] == 1


# the command line


def test_the_command_line_revives(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("party", "create", "Trip").ok()
    gone = cli("item", "create", "property-set", "title=Tickets", "--json").ok().json()["item"]
    cli("item", "delete", gone, "--yes").ok()
    assert cli("party", "revive", gone).status == 4
    cli("epoch", "create", "--discard-before", "now", "--yes").ok()
    would = cli("party", "revive", gone, "--dry-run", "--json").ok().json()
    assert (would["item"], would["dry_run"], would["old"]) == (None, True, gone)
    assert "Tickets" not in cli("item", "tree").ok().out
    made = cli("party", "revive", gone, "--json").ok().json()
    assert (made["epoch"], made["operations"], made["left"], made["durable"]) == (None, 0, [], True)
    assert cli("item", "get", made["item"], "title").ok().out == "Tickets\n"
    assert "revived before" in cli("party", "revive", gone).err


def test_the_command_line_revives_through_the_running_service(tmp_path: Path) -> None:
    with serve(tmp_path, "ann") as ann, serve(tmp_path, "bob") as bob:
        party = ann.cli("party", "create", "Trip", "--json").ok().json()["party"]
        gone = ann.cli("item", "create", "property-set", "title=Tickets", "--json").ok().json()["item"]
        ann.cli("epoch", "create").ok()
        ann.cli("item", "delete", gone, "--yes").ok()
        ann.cli("epoch", "create", "--discard-before", "now", "--yes").ok()
        let_in(ann, party, bob)
        agreed(party, ann.cli, bob.cli)
        ran = bob.cli("party", "revive", gone)
        assert "not brought back: what was written between epoch 1" in ran.ok().err
        assert "from epoch 1" in ran.out
        until(lambda: "Tickets" in ann.cli("item", "tree").ok().out)
