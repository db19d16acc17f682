"""Pause, resume, close, forget; and that a party which is left alone costs nothing and holds nobody up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import echostore
from echostore.kernel.errors import Corrupt, NotFound, Refused, StorageFailed
from echostore.kernel.ids import FeedId
from echostore.kernel.timeframe import Dependency
from echostore.peer import opening
from echostore.store.meta_store import PartyState
from echostore.testing.inmemory import link
from peer_builder import Circle, Liar


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob") as made:
        yield made


def decodes(party: echostore.Party) -> int:
    processor = party.runtime.processor
    return processor.reader.decodes + processor.state.loads


# paused


def paused_with_news(circle: Circle) -> tuple[echostore.Item, str]:
    """Bob is paused and holds something of Ann's that he has not processed; returns the item and Bob's CID."""
    item = circle.party("ann").create(type="note", n=1)
    circle.meet_all()
    circle.party("bob").pause()
    cid = circle.party("bob").snapshot().cid
    item["n"] = 2
    circle.meet_all()
    return item, cid


def test_a_paused_party_holds_blocks_and_does_not_process_them(circle: Circle) -> None:
    item, cid = paused_with_news(circle)
    bob = circle.party("bob")
    assert bob.snapshot().cid == cid
    assert bob.get(item.id)["n"] == 1
    assert any(feed.held > feed.processed for feed in bob.status.feeds), "held"


@pytest.mark.parametrize(
    "restart", [{}, {"crash": True}, {"lose": ("items.db",)}], ids=["restart", "kill", "items lost"]
)
def test_a_paused_party_stays_where_it_was_over_a_restart(circle: Circle, restart: dict[str, object]) -> None:
    item, cid = paused_with_news(circle)
    bob = circle.restart("bob", **restart)
    assert bob.snapshot().cid == cid
    assert bob.get(item.id)["n"] == 1
    item["n"] = 3
    circle.meet_all()
    assert circle.get("bob", item)["n"] == 1


def test_resuming_processes_what_was_held(circle: Circle) -> None:
    item, _ = paused_with_news(circle)
    circle.peers["bob"].resume_party(circle.key)
    assert circle.get("bob", item)["n"] == 2
    assert circle.agree_after_loss()


def test_resuming_after_a_restart_processes_what_was_held(circle: Circle) -> None:
    item, _ = paused_with_news(circle)
    circle.peers["bob"].close()
    circle.peers["bob"] = circle._open("bob")
    assert circle.peers["bob"].resume_party(circle.key).get(item.id)["n"] == 2
    circle.agree()


def test_own_writes_go_on_in_a_paused_party_and_fit_when_it_resumes(circle: Circle) -> None:
    item, _ = paused_with_news(circle)
    circle.get("bob", item)["mine"] = 1
    circle.party("bob").members.set_profile("Robert")
    assert circle.get("bob", item)["n"] == 1, "writing does not let others' blocks in"
    circle.restart("bob", crash=False)
    circle.get("bob", item)["mine"] = 2
    circle.peers["bob"].resume_party(circle.key)
    circle.agree_after_loss()
    assert circle.get("ann", item).to_dict() == {"n": 2, "mine": 2}


def test_a_feed_that_is_admitted_meanwhile_waits_for_the_end_of_the_pause(circle: Circle, tmp_path: Path) -> None:
    paused_with_news(circle)
    with echostore.open(tmp_path / "cat", name="cat", background=False) as cat:
        party = cat.enter(circle.party("ann").members.admit(cat.request_join(circle.key)))
        link(circle.peers["ann"], cat, circle.key).pump().cut()
        made = party.create(type="note", by="cat")
        party.flush()
        link(circle.peers["ann"], cat, circle.key).pump().cut()
    circle.meet_all()
    assert not circle.party("bob").has(made.id)
    circle.peers["bob"].resume_party(circle.key)
    circle.agree_after_loss()
    assert circle.party("bob").has(made.id)


# what others have processed


def elsewhere(circle: Circle, name: str, other: str) -> dict[bytes, tuple[int, int]]:
    """What a peer knows of another one: per feed, blocks held and processed there."""
    device = circle.peers[other].device
    return {
        feed.key: (told.held, told.processed)
        for feed in circle.party(name).status.feeds
        for told in feed.others
        if told.device == device
    }


def own_data(circle: Circle, name: str) -> bytes:
    return next(feed.key for feed in circle.party(name).status.feeds if feed.own and feed.kind == "data")


def test_a_peer_learns_what_another_holds_and_what_it_has_processed(circle: Circle) -> None:
    item = circle.party("ann").create(type="note", n=1)
    circle.meet_all()
    feed = own_data(circle, "ann")
    length = {status.key: status.held for status in circle.party("ann").status.feeds}[feed]
    assert elsewhere(circle, "ann", "bob")[feed] == (length, length)
    circle.party("bob").pause()
    item["n"] = 2
    circle.party("ann").flush()
    joined = link(circle.peers["ann"], circle.peers["bob"], circle.key).pump()
    assert elsewhere(circle, "ann", "bob")[feed] == (length + 1, length), "held, and not processed"
    circle.peers["bob"].resume_party(circle.key)
    joined.pump()
    assert elsewhere(circle, "ann", "bob")[feed] == (length + 1, length + 1)
    circle.get("bob", item)["n"] = 3
    circle.party("bob").flush()
    joined.pump()
    theirs = own_data(circle, "bob")
    assert elsewhere(circle, "bob", "ann")[theirs] == elsewhere(circle, "ann", "bob")[theirs]
    assert elsewhere(circle, "bob", "ann")[theirs][1] > 0
    joined.cut()


def test_a_new_connection_tells_what_was_processed_before_it(circle: Circle) -> None:
    circle.party("ann").create(type="note", n=1)
    circle.meet_all()
    feed = own_data(circle, "ann")
    before = elsewhere(circle, "ann", "bob")[feed]
    circle.restart("ann")
    assert elsewhere(circle, "ann", "bob") == {}, "what others said is not kept over a restart"
    circle.meet("ann", "bob")
    assert elsewhere(circle, "ann", "bob")[feed] == before
    assert before[0] == before[1]


def test_a_block_that_waits_is_held_and_processed_when_its_cause_comes(tmp_path: Path) -> None:
    """The feed that is processed is not the one that arrives: its news come by themselves."""
    with Circle(tmp_path, "ann", "bob", "cat") as circle:
        first = circle.party("ann").create(type="note", n=1)
        circle.party("ann").flush()
        circle.meet("ann", "cat")
        circle.get("cat", first)["n"] = 2  # cat's message names ann's, which bob lacks
        circle.party("cat").flush()
        # Bob gets cat's feed alone, over a port that keeps ann's back.
        cats = own_data(circle, "cat")
        bob, cat = circle.party("bob"), circle.party("cat")
        start = bob.runtime.feeds.length(cats)
        found = cat.sync_port.read(cats, start, 100, 1 << 20, cat.runtime.feeds.feed(cats).last_link)
        assert found is not None
        bob.sync_port.ingest(cats, "data", start, found[0], found[1])
        assert bob.sync_port.processed_length(cats) == start
        heard: list[tuple[bytes, int]] = []
        stop = bob.sync_port.on_grow(lambda key, length: heard.append((key, bob.sync_port.processed_length(key))))
        circle.meet("ann", "bob")
        stop()
        assert (cats, start + 1) in heard


# closed


def test_a_closed_party_stays_closed_until_it_is_resumed(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    cid = circle.party("ann").snapshot().cid
    circle.party("ann").close()
    for _ in range(2):
        with pytest.raises(Refused, match="closed") as refused:
            circle.party("ann")
        assert "Resume" in refused.value.next_step
        assert [known.state for known in circle.peers["ann"].parties()] == [PartyState.CLOSED]
        circle.peers["ann"].close()
        circle.peers["ann"] = circle._open("ann")
    party = circle.peers["ann"].resume_party(circle.key)
    assert party.get(item.id)["n"] == 1
    assert party.snapshot().cid == cid


def test_handles_of_a_closed_party_say_so(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    circle.party("ann").close()
    with pytest.raises(echostore.EchoError, match="closed"):
        item["n"]
    with pytest.raises(echostore.EchoError, match="closed"):
        item["n"] = 2


def test_links_into_a_closed_party_dangle(circle: Circle) -> None:
    peer = circle.peers["ann"]
    other = peer.create_party("Other")
    far = other.create(n=1)
    edge = circle.party("ann").create(n=2).link(far)
    assert edge.target == far
    other.close()
    assert edge.target is None
    assert edge.dangling


# forgotten


def test_a_forgotten_party_is_gone_for_good(circle: Circle, tmp_path: Path) -> None:
    bob = circle.peers["bob"]
    bob.forget_party(circle.key)
    for _ in range(2):
        assert bob.parties() == []
        assert not (tmp_path / "bob" / "parties" / circle.key.hex()).exists()
        with pytest.raises(NotFound):
            bob.party(circle.key)
        bob.close()
        bob = circle.peers["bob"] = circle._open("bob")


def test_a_party_can_be_joined_again_after_it_was_forgotten(circle: Circle) -> None:
    item = circle.party("ann").create(n=1)
    circle.meet_all()
    circle.get("bob", item)["n"] = 2
    circle.meet_all()
    bob = circle.peers["bob"]
    bob.forget_party(circle.key)
    bob.enter(circle.party("ann").members.admit(bob.request_join(circle.key)))
    circle.meet_all()
    circle.get("bob", item)["n"] = 3
    circle.agree_after_loss()
    assert circle.get("ann", item)["n"] == 3


def test_forgetting_one_party_leaves_the_others(circle: Circle) -> None:
    other = circle.peers["ann"].create_party("Other")
    kept = other.create(n=1)
    circle.peers["ann"].forget_party(circle.key)
    assert kept["n"] == 1


# what is not used costs nothing


def test_opening_a_peer_opens_no_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with echostore.open(tmp_path / "ann", name="ann", background=False) as peer:
        keys = [peer.create_party(f"Party {number}").key for number in range(50)]
    opened = []
    store = opening.FeedStore
    monkeypatch.setattr(opening, "FeedStore", lambda *args, **more: opened.append(args) or store(*args, **more))
    with echostore.open(tmp_path / "ann", background=False) as peer:
        assert len(peer.parties()) == 50
        assert [known.title for known in peer.parties()][:2] == ["Party 0", "Party 1"]
        assert opened == []
        peer.party(keys[7])
        assert len(opened) == 1


def test_opening_a_party_decodes_no_item_and_no_data_block(circle: Circle) -> None:
    for number in range(200):
        circle.party("ann").create(type="note", n=number)
    party = circle.restart("ann")
    assert party.runtime.processor.state.loads == 0
    control = sum(feed.held for feed in party.status.feeds if feed.kind == "control")
    assert party.runtime.processor.reader.decodes <= control


def test_a_query_over_stored_items_decodes_none_of_them(circle: Circle) -> None:
    for number in range(200):
        circle.party("ann").create(type="note", n=number)
    party = circle.restart("ann")
    assert party.query(type="note").where(n=7).count() == 1
    assert party.runtime.processor.state.loads == 0


def test_touching_one_item_decodes_that_one(circle: Circle) -> None:
    items = [circle.party("ann").create(type="note", n=number) for number in range(200)]
    party = circle.restart("ann")
    party.get(items[3].id)["n"] = 1000
    assert party.runtime.processor.state.loads == 1


def test_a_party_that_is_left_alone_decodes_nothing_while_another_one_works(circle: Circle) -> None:
    peer = circle.peers["ann"]
    idle = circle.party("ann")
    before = decodes(idle)
    busy = peer.create_party("Busy")
    for number in range(100):
        busy.create(n=number)
    peer.flush()
    assert decodes(idle) == before


# one that fails holds nobody up


def test_a_party_with_damaged_feeds_delays_no_other(circle: Circle, tmp_path: Path) -> None:
    other = circle.peers["ann"].create_party("Other")
    item = other.create(n=1)
    circle.peers["ann"].close()
    file = tmp_path / "ann" / "parties" / circle.key.hex() / "feeds.db"
    file.write_bytes(b"garbage" * 1000)
    peer = circle.peers["ann"] = circle._open("ann")
    with pytest.raises(Corrupt):
        peer.party(circle.key)
    peer.party(other.key).get(item.id)["n"] = 2
    peer.flush()
    assert peer.party(other.key).get(item.id)["n"] == 2
    assert len(peer.parties()) == 2


def test_a_store_that_fails_in_one_party_does_not_keep_others_from_being_durable(
    circle: Circle, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, broken = circle.peers["ann"], circle.party("ann")
    parties = [peer.create_party(f"Other {number}") for number in range(2)]

    def full(appends: object, about: object) -> None:
        raise StorageFailed("no space left")

    monkeypatch.setattr(broken.runtime.feeds, "append_many", full)
    broken.create(n=1)
    items = [party.create(n=1) for party in parties]
    with pytest.raises(StorageFailed):
        peer.flush()
    assert all(party.runtime.data.open_blocks == 0 for party in parties)
    with pytest.raises(StorageFailed):
        broken.create(n=2)
    for item in items:
        item["n"] = 2
    peer.close()
    peer = circle.peers["ann"] = circle._open("ann")
    assert [peer.party(party.key).get(item.id)["n"] for party, item in zip(parties, items, strict=True)] == [2, 2]


def test_a_feed_that_waits_for_ever_delays_no_other_feed_and_no_other_party(circle: Circle) -> None:
    liar = Liar.of(circle, "bob")
    item = circle.party("ann").create(n=1)
    liar.send(liar.message(after=[Dependency(FeedId(b"nobody!!"), 5, bytes(16), 9)]))
    item["n"] = 2
    other = circle.peers["ann"].create_party("Other")
    assert other.create(n=1)["n"] == 1
    assert item["n"] == 2
    circle.restart("ann")
    assert circle.get("ann", item)["n"] == 2


# light-weight parties: members of the parent, feeds and undo of their own


class Games:
    """Ann has made a light-weight party below the circle's, and Bob has entered it."""

    def __init__(self, circle: Circle) -> None:
        self.circle = circle
        self.ann = circle.peers["ann"].create_child(circle.party("ann"), "Chess")
        self.key = self.ann.key
        self.board = self.ann.create(type="board", n=1)
        circle.meet_all()
        self.bob = circle.peers["bob"].enter_child(circle.party("bob"), self.key)
        circle.meet_all()
        self.meet()

    def meet(self) -> None:
        for name in self.circle.names:
            self.circle.peers[name].party(self.key).flush()
        link(self.circle.peers["ann"], self.circle.peers["bob"], self.key).pump().cut()

    def agree(self) -> str:
        self.meet()
        cids = {self.circle.peers[name].party(self.key).snapshot().cid for name in self.circle.names}
        assert len(cids) == 1
        return cids.pop()

    def reopened(self, name: str, **restart: object) -> echostore.Party:
        self.circle.restart(name, **restart)
        return self.circle.peers[name].party(self.key)


@pytest.fixture
def games(circle: Circle) -> Games:
    return Games(circle)


def test_members_of_a_party_find_and_share_its_light_weight_parties(circle: Circle, games: Games) -> None:
    assert circle.party("bob").child_parties() == [(games.key, "Chess")]
    assert games.bob.get(games.board.id)["n"] == 1
    games.bob.get(games.board.id)["n"] = 2
    games.agree()
    assert games.board["n"] == 2
    assert [member.name for member in games.bob.members] == [member.name for member in circle.party("ann").members]


def test_a_light_weight_party_has_data_feeds_and_a_state_of_its_own(circle: Circle, games: Games) -> None:
    before = circle.party("ann").snapshot().cid
    games.board["n"] = 5
    assert circle.party("ann").snapshot().cid == before
    assert {feed.kind for feed in games.ann.status.feeds} == {"data"}
    assert games.ann.runtime.data.feed != circle.party("ann").runtime.data.feed


def test_a_light_weight_party_has_its_own_undo(circle: Circle, games: Games) -> None:
    item = circle.party("ann").create(n=1)
    games.board["n"] = 2
    item["n"] = 2
    assert games.ann.undo()
    assert (games.board["n"], item["n"]) == (1, 2)


def test_its_title_is_shared(games: Games) -> None:
    games.bob.title = "Go"
    games.agree()
    assert games.ann.title == "Go"


def test_a_light_weight_party_survives_restarts_and_lost_stores(circle: Circle, games: Games) -> None:
    cid = games.agree()
    for lose in ((), ("items.db",), ("meta.db",)):
        assert games.reopened("ann", lose=lose).snapshot().cid == cid
        assert games.reopened("bob", lose=lose).snapshot().cid == cid
    circle.peers["bob"].party(games.key).get(games.board.id)["n"] = 3
    games.agree()
    assert circle.peers["ann"].party(games.key).get(games.board.id)["n"] == 3


def test_a_role_in_the_parent_holds_in_the_light_weight_party(circle: Circle, games: Games) -> None:
    circle.party("ann").members.change_role(circle.peers["bob"].identity, "reader")
    circle.meet_all()
    with pytest.raises(Refused, match="reader"):
        games.bob.get(games.board.id)["n"] = 3
    games.agree()


def test_control_goes_on_while_a_light_weight_party_is_closed(circle: Circle, games: Games) -> None:
    games.ann.close()
    circle.party("ann").members.set_profile("Anna")
    with pytest.raises(Refused):
        circle.peers["ann"].party(games.key)
    again = circle.peers["ann"].resume_party(games.key)
    again.get(games.board.id)["n"] = 7
    circle.meet_all()
    games.agree()


def test_closing_the_parent_closes_its_light_weight_parties(circle: Circle, games: Games) -> None:
    cid = games.ann.snapshot().cid
    circle.party("ann").close()
    with pytest.raises(echostore.EchoError):
        games.board["n"] = 2
    with pytest.raises(Refused):
        circle.peers["ann"].party(games.key)
    circle.peers["ann"].resume_party(circle.key)
    assert circle.peers["ann"].party(games.key).snapshot().cid == cid


def test_a_control_feed_that_waits_does_not_stop_a_light_weight_party(circle: Circle, games: Games) -> None:
    liar = Liar.of(circle, "bob", "control")
    liar.send(liar.message(after=[Dependency(FeedId(b"nobody!!"), 5, bytes(16), 9)]))
    games.board["n"] = 2
    circle.party("ann").members.set_profile("Anna")
    assert games.reopened("ann").get(games.board.id)["n"] == 2


def test_the_past_of_a_light_weight_party(circle: Circle, games: Games) -> None:
    anchor, cid = games.ann.anchor(), games.ann.snapshot().cid
    games.board["n"] = 2
    circle.party("ann").members.set_profile("Anna")
    for _ in range(3):
        assert games.ann.as_of(anchor).snapshot().cid == cid
    assert len(circle.party("ann").runtime.processor.children) == 1, "looking back leaves nothing behind"


def test_a_light_weight_party_has_none_of_its_own(circle: Circle, games: Games) -> None:
    with pytest.raises(Refused):
        circle.peers["ann"].create_child(games.ann, "Deeper")
    with pytest.raises(NotFound):
        circle.peers["bob"].enter_child(circle.party("bob"), circle.key)


# local parties


def test_a_local_party_needs_no_identity_and_can_be_given_one(tmp_path: Path) -> None:
    ann = echostore.open(tmp_path / "ann", name="ann", background=False)
    party = ann.create_party("Notes", local=True)
    item = party.create(n=1)
    assert [bytes(member.identity) for member in party.members] == [bytes(ann.device)]
    item["n"] = 2
    assert party.undo()
    party.members.adopt()
    assert ann.identity in [member.identity for member in party.members]
    with echostore.open(tmp_path / "bob", name="bob", background=False) as bob:
        joined = bob.enter(party.members.admit(bob.request_join(party.key)))
        link(ann, bob, party.key).pump().cut()
        joined.get(item.id)["n"] = 3
        joined.flush()
        link(ann, bob, party.key).pump().cut()
        assert item["n"] == 3
        assert joined.snapshot().cid == party.snapshot().cid
        ann.close()
        ann = echostore.open(tmp_path / "ann", background=False)
        again = ann.party(party.key)
        again.get(item.id)["n"] = 4
        again.members.set_profile("Ann")
        again.flush()
        link(ann, bob, party.key).pump().cut()
        assert joined.get(item.id)["n"] == 4
        assert joined.snapshot().cid == again.snapshot().cid
    ann.close()
