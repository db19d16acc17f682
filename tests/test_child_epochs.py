"""Light-weight parties have epochs as parties do: agreed on by those who take part, followed, started from, truncated."""

from pathlib import Path

import pytest

from cli_process import Cli
from echostore.kernel.errors import Refused
from echostore.kernel.party.epoch_policy import EpochPolicy
from echostore.peer.epoch_agreement import Verdict
from echostore.peer.epoch_keeper import eligible_devices
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.testing.inmemory import link
from network_peers import cid, converged, invited, peers, until
from peer_builder import Circle
from test_epoch_agreement import declare_a_lie, give_blobs
from two_peers import open_quiet


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def standing(party: Party) -> int:
    base = party.runtime.processor.base
    return base.name.number if base is not None else 0


class Play:
    """Ann has made a light-weight party; those of the circle who are named have entered it, and have met there."""

    def __init__(self, circle: Circle, *players: str) -> None:
        self.circle, self.players = circle, ("ann", *players)
        self.key = circle.peers["ann"].create_child(circle.party("ann"), "Chess").key
        circle.meet_all()
        for name in players:
            circle.peers[name].enter_child(circle.party(name), self.key)
        self.meet()

    def party(self, name: str) -> Party:
        return self.circle.peers[name].party(self.key)

    def epochs(self, name: str) -> Epochs:
        return Epochs(self.party(name))

    def meet(self) -> None:
        self.circle.meet_all()
        for _ in range(2):
            for name in self.players[1:]:
                for each in ("ann", name):
                    self.party(each).flush()
                link(self.circle.peers["ann"], self.circle.peers[name], self.key).pump().cut()

    def settle(self) -> None:
        """Everybody judges what was declared, and hears of it."""
        self.meet()
        for name in self.players:
            self.epochs(name).review()
        self.meet()

    def agree(self) -> str:
        self.meet()
        cids = {name: cid(self.party(name)) for name in self.players}
        assert len(set(cids.values())) == 1, cids
        return cids["ann"]


# over the network


def entered(guest: Peer, parent: Party, child: Party) -> Party:
    until(lambda: child.key in dict(parent.child_parties()))
    party = guest.enter_child(parent, child.key)
    until(lambda: cid(party) == cid(child))
    return party


def test_who_takes_part_agrees_and_follows_while_it_is_open(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        trip = ann.create_party("Trip")
        bobs_trip = invited(ann, trip, bob)
        cats_trip = invited(ann, trip, cat)
        game = ann.create_child(trip, "Chess")
        board = game.create(type="board", n=1)
        theirs = entered(bob, bobs_trip, game)
        handle, told = theirs.get(board.id), list[object]()
        with theirs.query(type="board").subscribe(told.append):
            made = Epochs(game).create()
            assert made.electorate == 2, "cat takes no part, and has no say"
            until(lambda: standing(game) == standing(theirs) == 1)
            assert told == []
            handle["n"] = 2
            until(lambda: told)
        converged(game, theirs)
        assert theirs.get(board.id) == handle
        assert board["n"] == 2
        # A newcomer starts from the epoch, and needs no block below it.
        cats = entered(cat, cats_trip, game)
        assert cat.network.bootstraps.outcomes[game.key].epoch == 1
        bases = {feed.base for feed in cats.runtime.feeds.feeds() if not feed.own}
        assert max(bases) == 2
        board["n"] = 3
        cats.get(board.id)["by"] = "cat"
        converged(game, theirs, cats)


def test_a_newcomer_comes_in_where_the_history_is_gone(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        trip = ann.create_party("Trip")
        bobs_trip = invited(ann, trip, bob)
        cats_trip = invited(ann, trip, cat)
        game = ann.create_child(trip, "Chess")
        board = game.create(type="board", n=0)
        theirs = entered(bob, bobs_trip, game)
        for number in (1, 2):
            board["n"] = number
            converged(game, theirs)
            Epochs(game).create()
            until(lambda number=number: standing(game) == standing(theirs) == number)
        for party in (game, theirs):
            freed = Epochs(party).gc()
            assert freed.epoch == 1
            assert freed.blocks > 0
        assert Epochs(theirs).verify(2).verdict == Verdict.ATTESTED
        board["n"] = 3
        converged(game, theirs)
        cats = entered(cat, cats_trip, game)
        assert cats.get(board.id)["n"] == 3
        assert Epochs(cats).fetch(2).epoch == 2


def test_the_policy_of_the_parent_makes_epochs_of_its_own_accord(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        bobs_trip = invited(ann, trip, bob)
        game = ann.create_child(trip, "Chess")
        theirs = entered(bob, bobs_trip, game)
        trip.members.set_policy({"epoch.messages": b"4", "epoch.grace_s": b"0"})
        for number in range(5):
            theirs.create(type="move", n=number)
        theirs.flush()
        until(lambda: standing(game) == standing(theirs) == 1)
        assert {epoch.declarer for epoch in Epochs(theirs).all()} == {"ann"}


# without


def test_a_lying_epoch_is_disputed_and_the_rival_followed(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob", "cat", "dan", roles={"cat": "admin"}) as circle:
        play = Play(circle, "bob", "cat")
        item = play.party("ann").create(type="board", n=1)
        play.meet()
        declare_a_lie(play.party("cat"), lambda states: states.pop(bytes(item.id)) and None)
        for name in ("ann", "bob"):
            give_blobs(play.party("cat"), play.party(name))
        play.meet()
        assert [[judged.verdict for judged in play.epochs(name).review()] for name in ("ann", "bob")] == [
            [Verdict.DISPUTED],
            [Verdict.DISPUTED],
        ]
        play.meet()
        assert play.epochs("ann").all()[0].disputed_by == 2
        play.epochs("ann").create()
        play.settle()
        assert [standing(play.party(name)) for name in ("ann", "bob")] == [1, 1]
        assert play.party("bob").has(item.id)
        play.agree()


def test_what_an_epoch_leaves_out_goes_from_all_who_have_it_open(tmp_path: Path) -> None:
    clock = [1_700_000_000_000]
    with Circle(tmp_path, "ann", "bob", now_ms=lambda: clock[0]) as circle:
        play = Play(circle, "bob")
        gone, kept = (play.party("ann").create(type="piece", n=number) for number in (1, 2))
        gone.delete()
        for name in ("bob", "ann", "bob"):
            play.meet()
            play.party(name).get(kept.id)["by"] = name
        clock[0] += 60_000
        play.meet()
        told: list[object] = []
        with play.party("bob").query(type="piece").subscribe(told.append):
            play.epochs("ann").create(discard_before_ms=clock[0] - 1_000)
            play.settle()
        assert told == []
        for name in ("ann", "bob"):
            assert standing(play.party(name)) == 1
            assert not play.party(name).has(gone.id)
            assert play.party(name).has(kept.id)
        before = play.agree()
        circle.restart("bob", lose=("items.db",))
        assert cid(play.party("bob")) == before


def test_the_lot_falls_on_those_who_take_part(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob", "cat") as circle:
        play = Play(circle, "bob")
        policy = EpochPolicy(declarers="elect")
        found = eligible_devices(play.party("ann"), policy)
        assert set(found) == {circle.peers[name].device for name in ("ann", "bob")}
        assert len(eligible_devices(circle.party("ann"), policy)) == 3


def test_who_retired_from_it_has_no_say_any_more(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob", "cat") as circle:
        play = Play(circle, "bob", "cat")
        own = play.party("cat").runtime.data
        assert own is not None
        machine = circle.party("ann").runtime.processor.membership.machine
        assert len(machine.electorate_of(play.key)) == 3
        circle.party("ann").members.retire_feed(own.cursor.key)
        assert len(machine.electorate_of(play.key)) == 2
        assert len(machine.electorate) == 3


# the parent's word


@pytest.mark.parametrize("how", ["removed", "reader", "revoked"])
@pytest.mark.parametrize("closed", [False, True])
def test_what_somebody_wrote_stays_when_the_parent_lowers_them(tmp_path: Path, how: str, closed: bool) -> None:
    with Circle(tmp_path, "ann", "bob") as circle:
        play = Play(circle, "bob")
        move = play.party("bob").create(type="move", n=1)
        play.meet()
        play.party("bob").create(type="move", n=2)
        if closed:
            play.party("ann").close()
        ann, bob = circle.party("ann"), circle.peers["bob"]
        if how == "removed":
            ann.members.remove(bob.identity)
        elif how == "reader":
            ann.members.change_role(bob.identity, "reader")
        else:
            ann.members.revoke_device(bob.identity, bob.device)
        if closed:
            circle.peers["ann"].resume_party(play.key)
        circle.meet_all()
        for name in ("ann", "bob"):
            assert [item.id for item in play.party(name).query(type="move").all()] == [move.id], name
        with pytest.raises(Refused):
            play.party("bob").create(type="move", n=3)


def test_who_never_entered_is_told_what_it_can_not_name(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob") as circle:
        child = circle.peers["bob"].create_child(circle.party("bob"), "Chess")
        circle.meet_all()
        members = circle.party("ann").members
        assert members.unseen_children(circle.peers["bob"].identity) == ["Chess"]
        assert members.unseen_children(circle.peers["ann"].identity) == []
        circle.peers["ann"].enter_child(circle.party("ann"), child.key)
        assert members.unseen_children(circle.peers["bob"].identity) == []


def test_a_damaged_one_keeps_nobody_in_who_never_entered_it(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob") as circle:
        play = Play(circle)
        parent, child, bob = circle.party("ann").key, play.key, circle.peers["bob"].identity
    for file in (tmp_path / "ann" / "parties" / child.hex()).glob("feeds.db*"):
        file.unlink()
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.party(parent)
        party.members.remove(bob)
        assert [member.identity for member in party.members.all() if member.role is not None] == [ann.identity]


def test_members_and_policy_are_the_parents_business(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob") as circle:
        play = Play(circle, "bob")
        with pytest.raises(Refused, match="of the party above it") as refused:
            play.party("ann").members.remove(circle.peers["bob"].identity)
        assert circle.key.hex()[:8] in refused.value.next_step
        zero = play.epochs("bob").zero()
        assert (zero["declarer"], zero["party"]) == ("ann", play.key.hex())


# the command


def test_the_commands_know_light_weight_parties(tmp_path: Path) -> None:
    echo = Cli(tmp_path / "home", tmp_path / "state")
    echo("party", "create", "Trip", "--name", "Ann").ok()
    made = echo("party", "create", "Chess", "--below", "@Trip", "--json").ok().json()
    listed = echo("party", "children", "--party", "@Trip", "--json").ok().json()
    assert listed["children"] == [{"party": made["party"], "title": "Chess", "here": True}]
    again = echo("party", "enter", "@Chess", "--party", "@Trip", "--json").ok().json()
    assert (again["party"], again["child_of"], again["standing"]) == (made["party"], made["child_of"], "owner")
    assert echo("epoch", "create", "--party", "@Chess", "--json").ok().json()["number"] == 1
    (epoch,) = echo("epoch", "list", "--party", "@Chess", "--json").ok().json()["epochs"]
    assert (epoch["final"], epoch["attests"]) == (True, "1 of 1")
    echo("epoch", "verify", "1", "--party", "@Chess").ok()
    for status, said, words in (
        (3, "no light-weight party '@Go'", ("party", "enter", "@Go", "--party", "@Trip")),
        (2, "Leave out --local", ("party", "create", "X", "--below", "@Trip", "--local")),
        (4, "no light-weight parties of its own", ("party", "children", "--party", "@Chess")),
        (4, "of the party above it", ("party", "role", "@Chess", "@Ann", "reader")),
    ):
        ran = echo(*words)
        assert (ran.status, said in ran.err) == (status, True), ran
