"""Epochs that nobody accepts, with real peers: they block no later epoch, no recovery and no invitation."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import echostore
from echostore.kernel.errors import Refused
from echostore.kernel.ids import Link
from echostore.kernel.party.credentials import EpochGenesis
from echostore.kernel.party.epoch_chain import genesis_of
from echostore.kernel.party.epoch_policy import EpochPolicy
from echostore.peer.bootstrap import believable, control_settled, release
from echostore.testing.inmemory import link
from test_epoch_agreement import Circle, state

__all__ = ["state"]

FUTURE_MS = 10**15


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    """The hostile admin is d; a founded the party."""
    made = Circle(tmp_path, "abcd")
    yield made
    made.close()


def lie(circle: Circle, kind: str) -> None:
    """Let d declare an epoch that nobody will attest."""
    members = circle.party("d").members
    issue = type(members).issue_claim

    def issue_lie(self: object, said: object) -> None:
        assert isinstance(said, EpochGenesis)
        issue(members, _false(said, kind))

    circle.party("d").create("property-set", type="bait")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(members), "issue_claim", issue_lie)
        circle.epochs("d").create()
    circle.meet()


def _false(said: EpochGenesis, kind: str) -> EpochGenesis:
    match kind:
        case "ahead":
            first, *others = said.timeframe
            return replace(said, timeframe=(replace(first, seq=first.seq + 1000, link=Link(bytes(32))), *others))
        case "discards":
            return replace(said, discard_before_ms=FUTURE_MS)
        case "models":
            return replace(said, models=(*said.models, ("unheard-of", 1)))
        case "encoding":
            return replace(said, encoding_version=9_999)
    raise AssertionError(kind)


LIES = ["ahead", "discards", "models", "encoding"]
PATIENCE_MS = 600_000


def write(circle: Circle, name: str = "a") -> None:
    circle.party(name).create("property-set", type="task")
    circle.meet()


@pytest.mark.parametrize("kind", LIES)
def test_an_epoch_that_nobody_accepts_is_passed_over_and_the_next_becomes_final(circle: Circle, kind: str) -> None:
    lie(circle, kind)
    circle.review()
    write(circle)
    circle.now_ms += PATIENCE_MS
    made = circle.epochs("a").create()
    circle.meet()
    circle.review()
    assert made.number == 1, "it has the number of the one that is passed over"
    assert {tuple(chain) for chain in circle.chains()} == {(made.hash,)}
    assert all(circle.epochs(name).all()[0].final for name in "abcd")
    write(circle)
    assert circle.epochs("b").create().number == 2, "the next one rests on it"


@pytest.mark.parametrize("kind", ["ahead", "models"])
def test_a_peer_waits_for_the_partys_patience_before_it_passes_over_an_epoch(circle: Circle, kind: str) -> None:
    lie(circle, kind)
    circle.review()
    circle.now_ms += PATIENCE_MS - 1
    before = circle.party("a").runtime.processor.control_timeframe
    with pytest.raises(Refused, match="epoch 1, declared by d, can't be judged here yet") as refused:
        circle.epochs("a").create()
    assert "try again in 1 min" in str(refused.value)
    assert circle.party("a").runtime.processor.control_timeframe == before
    circle.now_ms += 1
    assert circle.epochs("a").create().number == 1


def test_a_refused_epoch_is_passed_over_at_once(circle: Circle) -> None:
    lie(circle, "discards")
    assert circle.epochs("a").create().number == 1
    circle.meet()
    circle.review()
    assert circle.epochs("b").all()[0].final


def test_an_epoch_that_discards_up_to_a_little_ahead_of_a_clock_does_not_stop_the_next(circle: Circle) -> None:
    write(circle)
    circle.now_ms += 500_000
    circle.epochs("d").create(discard_before_ms=circle.now_ms)
    circle.now_ms -= 300_000
    circle.meet()
    circle.review()
    assert circle.epochs("a").all()[0].final, "clocks may differ by ten minutes"
    write(circle)
    assert circle.epochs("a").create().number == 2


def test_an_epoch_of_a_removed_declarer_is_waited_for_by_nobody(circle: Circle) -> None:
    lie(circle, "ahead")
    circle.review()
    circle.party("a").members.remove(circle.peers["d"].identity)
    circle.meet()
    assert circle.chains()[:3] == [[], [], []], "it had no quorum"
    made = circle.epochs("b").create()
    circle.meet()
    circle.review()
    assert circle.chains()[:3] == [[made.hash]] * 3
    assert circle.epochs("c").all()[0].final


@pytest.mark.parametrize("kind", LIES)
def test_epochs_that_a_policy_makes_go_on(circle: Circle, kind: str) -> None:
    circle.party("a").members.set_policy({"epoch.messages": b"2", "epoch.grace_s": b"60"})
    circle.meet()
    lie(circle, kind)
    for _ in range(3):
        write(circle)
    declared: list[tuple[str, int]] = []
    for _ in range(20):
        circle.now_ms += 60_000
        declared += [each for each in circle.tick() if each[0] != "d"]
        if declared:
            break
    assert [number for _, number in declared] == [1]
    circle.tick()
    assert all(circle.epochs(name).all()[0].final for name in "abc")


def test_how_long_an_epoch_was_waited_for_survives_a_restart(circle: Circle) -> None:
    lie(circle, "ahead")
    circle.review()
    circle.now_ms += PATIENCE_MS
    circle.peers["a"].close()
    home = circle.peers["a"].home.path
    circle.peers["a"] = echostore.open(home, name="a", background=False, now_ms=lambda: circle.now_ms)
    assert circle.epochs("a").create().number == 1


def test_an_epoch_whose_blocks_come_late_is_attested_while_no_other_has_its_number(circle: Circle) -> None:
    circle.apart("d")
    circle.party("d").create("property-set", type="task")
    circle.epochs("d").create()
    with pytest.MonkeyPatch.context() as patch:  # the control feed comes first, the blocks much later
        patch.setattr("echostore.peer.epoch_agreement._holds", lambda runtime, genesis: False)
        circle.together()
        circle.review()
        circle.now_ms += PATIENCE_MS
        here = circle.epochs("a").all()[0].here
        assert here == "waits: blocks of it are not here; passed over"
    circle.review()
    assert circle.epochs("a").all()[0].final


def test_the_keeper_looks_again_when_its_patience_ends(circle: Circle) -> None:
    lie(circle, "ahead")
    keeper = circle.peers["b"].epoch_keeper
    circle.tick()
    assert keeper._look_s == 600.0
    circle.now_ms += PATIENCE_MS - 5_000
    keeper.tick()
    assert keeper._look_s == 5.0
    circle.now_ms += 5_000
    circle.epochs("a").create()
    circle.meet()
    keeper.tick()
    assert keeper._look_s is None
    circle.meet()
    assert circle.epochs("b").all()[0].here == "attested"


def test_no_policy_makes_peers_wait_for_ever() -> None:
    assert EpochPolicy().patience_s == 600
    assert EpochPolicy(grace_s=0).patience_s == 10
    assert EpochPolicy(grace_s=10**15).patience_s == 3_600


def test_many_epochs_of_one_declarer_are_passed_over_together(circle: Circle) -> None:
    lie(circle, "ahead")
    (first,) = (genesis_of(act) for act in circle.epochs("d").tally.declared)
    for number in range(1, 5):
        circle.party("d").members.issue_claim(replace(first, created_ms=first.created_ms + number))
    circle.meet()
    assert len(circle.epochs("a").tally.declared) == 5
    circle.review()
    circle.now_ms += PATIENCE_MS
    write(circle)
    made = circle.epochs("a").create()
    circle.meet()
    circle.review()
    assert circle.epochs("b").all()[0].hash == made.hash
    assert circle.epochs("b").all()[0].final


@pytest.mark.parametrize("kind", LIES)
def test_a_newcomer_gets_the_party_whatever_a_hostile_admin_declared(circle: Circle, tmp_path: Path, kind: str) -> None:
    task = circle.party("a").create("property-set", type="task", n=1)
    circle.meet()
    lie(circle, kind)
    guest = echostore.open(tmp_path / "guest", name="guest", background=False, now_ms=lambda: circle.now_ms)
    try:
        guest.enter(circle.party("a").members.admit(guest.request_join(circle.key)))
        circle.peers["a"].flush()
        joined = link(guest, circle.peers["a"], circle.key)
        guest.party(circle.key).runtime.data_held = True
        joined.pump()
        assert control_settled(guest.party(circle.key))
        assert believable(guest.party(circle.key).runtime) is None, "nobody but its declarer stands for it"
        release(guest.party(circle.key))
        joined.pump()
        assert guest.party(circle.key).get(task.id)["n"] == 1
        assert guest.party(circle.key).snapshot().cid == circle.party("a").snapshot().cid
    finally:
        guest.close()
