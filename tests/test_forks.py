"""Forks: never by accident (FAULTS D3, S8), and agreed on when somebody makes one (D2, B3)."""

import itertools
import shutil
from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.peer.opening import PartyOpener
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.testing.inmemory import link


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def open_at(path: Path, name: str) -> Peer:
    return echostore.open(path, name=name, background=False)


def join(founder: Party, peer: Peer, role: str = "editor") -> Party:
    return peer.enter(founder.members.admit(peer.request_join(founder.key), role=role))


def meet(one: Peer, other: Peer, party: Party) -> None:
    for peer in (one, other):
        peer.party(party.key).flush()
    joined = link(one, other, party.key)
    joined.pump()
    joined.cut()


def test_a_copied_home_writes_to_new_feeds_and_nobody_forks(tmp_path: Path) -> None:
    ann, bob = open_at(tmp_path / "ann", "ann"), open_at(tmp_path / "bob", "bob")
    party = ann.create_party("Trip")
    item = party.create("property-set", type="note", n=0)
    joined = join(party, bob)
    meet(ann, bob, party)
    bob.close()
    shutil.copytree(tmp_path / "bob", tmp_path / "clone")
    bob, clone = open_at(tmp_path / "bob", "bob"), open_at(tmp_path / "clone", "bob")
    first, second = bob.party(party.key), clone.party(party.key)
    assert second.runtime.data.cursor.key != first.runtime.data.cursor.key, "the copy got a feed of its own"
    first.get(item.id)["n"] = 1
    second.get(item.id)["m"] = 2
    for one, other in itertools.combinations((ann, bob, clone), 2):
        meet(one, other, party)
    meet(ann, bob, party)
    assert {peer.party(party.key).snapshot().cid for peer in (ann, bob, clone)} == {party.snapshot().cid}
    assert (item["n"], item["m"]) == (1, 2)
    assert party.runtime.feeds.forks() == []
    assert joined.key == party.key
    for peer in (ann, bob, clone):
        peer.close()


def test_a_copy_that_loses_its_metadata_too_still_writes_to_new_feeds(tmp_path: Path) -> None:
    with open_at(tmp_path / "ann", "ann") as ann:
        party = ann.create_party("Trip")
        old_feed = party.runtime.data.cursor.key
    shutil.copytree(tmp_path / "ann", tmp_path / "clone")
    open_at(tmp_path / "clone", "ann").close()  # notices the copy, opens no party
    for file in (tmp_path / "clone").glob("meta.db*"):
        file.unlink()
    with open_at(tmp_path / "clone", "ann") as clone:
        assert clone.party(party.key).runtime.data.cursor.key != old_feed


def test_a_restored_backup_writes_to_new_feeds(tmp_path: Path) -> None:
    with open_at(tmp_path / "ann", "ann") as ann:
        party = ann.create_party("Trip")
        item = party.create("property-set", n=0)
        old_feed = party.runtime.data.cursor.key
    shutil.copytree(tmp_path / "ann", tmp_path / "backup")
    with open_at(tmp_path / "ann", "ann") as ann:
        ann.party(party.key).get(item.id)["n"] = 1
    shutil.rmtree(tmp_path / "ann")
    shutil.copytree(tmp_path / "backup", tmp_path / "ann")
    with open_at(tmp_path / "ann", "ann") as ann:
        restored = ann.party(party.key)
        assert restored.runtime.data.cursor.key != old_feed
        restored.get(item.id)["n"] = 2
        assert restored.get(item.id)["n"] == 2
        assert restored.rejected() == []


def test_a_rolled_back_disk_adopts_its_own_tail_from_others_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = open_at(tmp_path / "ann", "ann"), open_at(tmp_path / "bob", "bob")
    party = ann.create_party("Trip")
    item = party.create("property-set", n=0)
    text = party.create("text")
    join(party, bob)
    meet(ann, bob, party)
    bob.party(party.key).get(item.id)["n"] = 1
    meet(ann, bob, party)
    bob.close()
    shutil.copytree(tmp_path / "bob", tmp_path / "then")
    # The records outside the home are rolled back as well: nothing tells the home that it is an old one.
    monkeypatch.setattr(PartyOpener, "must_renew", lambda opener, feeds: False)
    with open_at(tmp_path / "bob", "bob") as bob:
        bob.party(party.key).get(item.id)["n"] = 2
        bob.party(party.key).get(text.id).insert(0, "lost and found")
        meet(ann, bob, party)
    bob = open_at(tmp_path / "then", "bob")
    joined = bob.party(party.key)
    assert joined.get(item.id)["n"] == 1
    feed, length = joined.runtime.data.cursor.key, joined.runtime.data.cursor.length
    meet(ann, bob, party)
    assert (joined.get(item.id)["n"], str(joined.get(text.id))) == (2, "lost and found")
    assert joined.runtime.feeds.length(feed) == length + 2
    joined.get(item.id)["n"] = 3
    joined.get(text.id).insert(0, "now ")
    meet(ann, bob, party)
    assert joined.runtime.data.cursor.key == feed
    assert (item["n"], str(text)) == (3, "now lost and found")
    assert party.snapshot().cid == joined.snapshot().cid
    for peer in (ann, bob):
        assert peer.party(party.key).runtime.feeds.forks() == []
        assert peer.party(party.key).rejected() == []
        peer.close()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_forked_feed_leaves_the_state_of_every_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    ann, bob, cat = (open_at(tmp_path / name, name) for name in ("ann", "bob", "cat"))
    party = ann.create_party("Trip")
    item = party.create("property-set", n=0)
    text = party.create("text")
    for peer in (bob, cat):
        join(party, peer)
        meet(ann, peer, party)
    meet(ann, bob, party)
    meet(ann, cat, party)
    bob.party(party.key).get(item.id)["before"] = "kept"
    meet(ann, bob, party)
    meet(ann, cat, party)
    bob.close()
    shutil.copytree(tmp_path / "bob", tmp_path / "evil")
    # A device that means it: it claims to be the same instance and goes on with the same feed.
    monkeypatch.setattr(PartyOpener, "must_renew", lambda opener, feeds: False)
    bob, evil = open_at(tmp_path / "bob", "bob"), open_at(tmp_path / "evil", "bob")
    bob.party(party.key).get(item.id)["n"] = "left"
    bob.party(party.key).get(text.id).insert(0, "left ")
    evil.party(party.key).get(item.id)["n"] = "right"
    evil.party(party.key).get(text.id).insert(0, "right ")
    meet(ann, bob, party)
    meet(cat, evil, party)
    cat.party(party.key).get(item.id)["seen"] = cat.party(party.key).get(item.id)["n"]
    party.get(item.id)["also"] = item["n"]
    honest = [ann, cat]
    pairs = [(ann, cat), (ann, bob), (cat, evil)]
    for index in order:
        meet(*pairs[index], party)
    for _ in range(3):
        meet(ann, cat, party)
    cids = {peer.party(party.key).snapshot().cid for peer in honest}
    assert len(cids) == 1, "honest peers agree"
    assert ann.party(party.key).timeframe == cat.party(party.key).timeframe
    assert item["n"] == 0, "neither branch counts"
    assert item["before"] == "kept", "what came before the fork stays"
    assert "left" not in str(text)
    assert "right" not in str(text)
    assert (item["also"], item["seen"]) == ("left", "right"), "others' work stays, though it depends on the branches"
    for peer in honest:
        reasons = {reject.reason for reject in peer.party(party.key).rejected()}
        assert "fork" in reasons
        assert len(peer.party(party.key).runtime.processor.membership.machine.forks) == 1
    for peer in (ann, bob, cat, evil):
        peer.close()


def test_a_removal_that_turns_out_void_brings_back_blocks_that_came_excluded(tmp_path: Path) -> None:
    ann, bob, cat, dan = (open_at(tmp_path / name, name) for name in ("ann", "bob", "cat", "dan"))
    party = ann.create_party("Trip")
    item = party.create("property-set", n=0)
    for peer, role in ((bob, "admin"), (cat, "editor"), (dan, "editor")):
        join(party, peer, role)
    for peer in (bob, cat, dan):
        meet(ann, peer, party)
    # Two acts that know nothing of each other: bob removes cat, ann removes bob. The senior's stands, bob's is void.
    cat.party(party.key).get(item.id)["n"] = "cat's"
    cat.party(party.key).create("property-set", type="note", by="cat")
    bob.party(party.key).members.remove(cat.identity)
    party.members.remove(bob.identity)
    meet(dan, bob, party)
    meet(dan, cat, party)
    on_dan = dan.party(party.key)
    assert on_dan.get(item.id)["n"] == 0, "excluded while bob's removal is all that dan knows"
    assert {reject.reason for reject in on_dan.rejected()} == {"beyond-cut"}
    command = Cli(tmp_path / "dan", tmp_path / "state")
    listed = command("party", "rejected", "--reason", "beyond-cut", "--json").ok().json()["rejected"]
    assert [(bytes.fromhex(each["feed"]), each["seq"]) for each in listed] == [
        (reject.feed, reject.seq) for reject in on_dan.rejected()
    ]
    assert command("party", "rejected", "--reason", "fork", "--json").ok().json()["rejected"] == []
    meet(dan, ann, party)
    assert on_dan.get(item.id)["n"] == "cat's"
    assert on_dan.query(type="note").count() == 1
    assert on_dan.rejected() == []
    assert on_dan.snapshot().cid == party.snapshot().cid
    for peer in (ann, bob, cat, dan):
        peer.close()
