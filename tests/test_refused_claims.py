"""What a device may not say is refused before it is written: a signed block stays for good, and goes to all others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_process import Cli
from echostore.kernel.errors import Refused
from echostore.kernel.party.credentials import Policy
from echostore.kernel.party.epoch_policy import EPOCH_DECLARERS, EPOCH_MESSAGES
from echostore.peer.epochs import Epochs
from peer_builder import Circle


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Circle]:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob") as made:
        made.party("ann").create(type="note", n=1)
        made.meet_all()
        yield made


def control_length(circle: Circle, name: str) -> int:
    control = circle.party(name).runtime.control
    assert control is not None
    return control.cursor.length


def test_an_editor_may_neither_declare_nor_change_the_policy_and_writes_nothing(circle: Circle) -> None:
    length = control_length(circle, "bob")
    bob = circle.party("bob")
    with pytest.raises(Refused, match="declaring an epoch is refused: not-authorised: needs admin") as declared:
        Epochs(bob).create()
    assert "party policy" in declared.value.next_step
    with pytest.raises(Refused, match="changing the policy is refused: not-authorised") as changed:
        bob.members.set_policy({EPOCH_MESSAGES: b"3"})
    assert changed.value.unchanged == "Nothing was changed."
    with pytest.raises(Refused, match="removing a member is refused"):
        bob.members.remove(circle.peers["ann"].identity)
    assert control_length(circle, "bob") == length
    circle.party("ann").members.set_policy({EPOCH_DECLARERS: b"elect"})
    circle.meet_all()
    assert Epochs(bob).create().number == 1, "who may declare is the policy's business"


def test_what_others_wrote_all_the_same_is_listed(circle: Circle) -> None:
    bob = circle.party("bob")
    bob.runtime.issue([bob.members._sign(Policy(((EPOCH_MESSAGES, b"3"),)))])
    circle.meet_all()
    circle.close()
    for name in ("ann", "bob"):
        cli = Cli(circle.folder / name, circle.folder / "state")
        (listed,) = cli("party", "rejected", "--json").ok().json()["rejected"]
        assert (listed["credential"], listed["reason"]) == ("Policy", "not-authorised")
        assert "Policy" in cli("party", "rejected", "--reason", "not-authorised").ok().out
        assert cli("party", "rejected", "--reason", "fork", "--json").ok().json()["rejected"] == []


def test_a_policy_that_stands_is_not_written_again(circle: Circle) -> None:
    ann = circle.party("ann").members
    ann.set_policy({EPOCH_MESSAGES: b"3"})
    length = control_length(circle, "ann")
    ann.set_policy({EPOCH_MESSAGES: b"3"})
    assert control_length(circle, "ann") == length
    ann.set_policy({EPOCH_MESSAGES: b"3", EPOCH_DECLARERS: b"elect"})
    assert control_length(circle, "ann") == length + 1
    with pytest.raises(Refused, match="changing the policy"):
        circle.party("bob").members.set_policy({EPOCH_MESSAGES: b"3"})


def test_a_removed_member_is_told_so(circle: Circle) -> None:
    Epochs(circle.party("ann")).create()
    circle.party("ann").members.remove(circle.peers["bob"].identity)
    circle.meet_all()
    with pytest.raises(Refused, match="this identity was removed from the party"):
        Epochs(circle.party("bob")).create()
    with pytest.raises(Refused, match="this identity was removed from the party"):
        circle.party("bob").members.set_policy({EPOCH_MESSAGES: b"3"})
