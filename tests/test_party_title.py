"""A party's title: set by any member, kept over restarts, listed and found by it on every peer."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.errors import NotFound, Refused, UsageError
from echostore.peer.local_server import LocalServer
from echostore.peer.peer import Peer
from peer_builder import Circle


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob") as made:
        yield made


def listed(peer: Peer) -> list[str]:
    """Titles as they are listed, without opening a party."""
    return [known.title for known in peer.parties()]


def reopened(circle: Circle, name: str, *, crash: bool = False) -> Peer:
    """The peer after a restart, with no party opened."""
    if crash:
        circle.peers[name]._file_lock.release()  # type: ignore[union-attr]  # the process is gone, its files stay
    else:
        circle.peers[name].close()
    circle.peers[name] = circle._open(name)
    return circle.peers[name]


def test_a_title_is_found_after_a_restart(circle: Circle) -> None:
    circle.party("ann").title = "New"
    peer = reopened(circle, "ann")
    assert listed(peer) == ["New"]
    assert peer.party("@New").title == "New"
    with pytest.raises(NotFound):
        peer.party("@Trip")


def test_a_flushed_title_is_found_after_a_crash(circle: Circle) -> None:
    circle.party("ann").title = "New"
    circle.party("ann").flush()
    peer = reopened(circle, "ann", crash=True)
    assert listed(peer) == ["New"]
    assert peer.party("@New").title == "New"


def test_another_peer_lists_the_new_title(circle: Circle) -> None:
    circle.party("ann").title = "New"
    circle.meet_all()
    assert listed(circle.peers["bob"]) == ["New"]
    assert circle.peers["bob"].party("@New").title == "New"
    peer = reopened(circle, "bob")
    assert listed(peer) == ["New"]
    assert peer.party("@New").title == "New"


def test_every_member_may_rename_and_the_last_title_counts(circle: Circle) -> None:
    circle.party("ann").title = "One"
    circle.meet_all()
    circle.party("bob").title = "Two"
    circle.meet_all()
    assert listed(circle.peers["ann"]) == listed(circle.peers["bob"]) == ["Two"]


def test_a_home_that_kept_an_old_title_learns_the_new_one_at_open(circle: Circle) -> None:
    peer = circle.peers["ann"]
    circle.party("ann").title = "New"
    with peer.meta._db.transaction():  # as versions before left it
        peer.meta._db.execute("UPDATE parties SET title = 'Trip'")
    peer = reopened(circle, "ann")
    assert listed(peer) == ["Trip"]
    assert peer.party(circle.key).title == "New"
    assert listed(peer) == ["New"]


@pytest.mark.parametrize("lose", ["meta.db", "items.db"])
def test_a_title_outlasts_a_lost_store(circle: Circle, lose: str) -> None:
    circle.party("ann").title = "New"
    assert circle.restart("ann", lose=[lose]).title == "New"
    assert listed(circle.peers["ann"]) == ["New"]


def test_a_title_is_kept_while_the_party_is_paused(circle: Circle) -> None:
    circle.party("ann").title = "New"
    circle.party("ann").pause()
    peer = reopened(circle, "ann")
    assert listed(peer) == ["New"]
    assert peer.party("@New").title == "New"
    assert [str(known.state) for known in peer.parties()] == ["paused"]


def test_a_title_of_a_light_weight_party_is_kept(circle: Circle) -> None:
    peer = circle.peers["ann"]
    child = peer.create_child(circle.party("ann"), "Chess")
    child.title = "Go"
    assert reopened(circle, "ann").party("@Go").key == child.key


def test_a_title_of_a_batch_that_was_rolled_back_is_not_kept(circle: Circle) -> None:
    party = circle.party("ann")
    with suppress(ZeroDivisionError), party.batch():
        party.title = "New"
        raise ZeroDivisionError
    assert party.title == "Trip"
    assert listed(reopened(circle, "ann")) == ["Trip"]


def test_undo_takes_a_title_back(circle: Circle) -> None:
    party = circle.party("ann")
    party.title = "New"
    assert party.undo()
    assert (party.title, listed(circle.peers["ann"])) == ("Trip", ["Trip"])


@pytest.mark.parametrize("title", ["", "  ", 5, None, "x" * 5000, b"New"])
def test_a_title_that_is_none_is_refused(circle: Circle, title: object) -> None:
    with pytest.raises(UsageError, match="title"):
        circle.party("ann").title = title  # type: ignore[assignment]  # the mistake
    assert circle.party("ann").title == "Trip"


def test_a_reader_may_not_set_the_title(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "cat", roles={"cat": "reader"}) as circle, pytest.raises(Refused):
        circle.party("cat").title = "Mine"


def test_a_title_of_the_past_changes_no_listing(circle: Circle) -> None:
    party = circle.party("ann")
    then = party.flush().anchor
    party.title = "New"
    assert party.as_of(then).title == "Trip"
    assert listed(circle.peers["ann"]) == ["New"]


def test_an_attached_program_sets_the_title(circle: Circle) -> None:
    server = LocalServer(circle.peers["ann"])
    try:
        with echostore.open(circle.peers["ann"].home.path) as attached:
            attached.party("@Trip").title = "New"
            assert attached.party("@New").title == "New"
    finally:
        server.close()
    assert listed(reopened(circle, "ann")) == ["New"]


def test_the_command_renames_a_party(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("party", "create", "Trip").ok()
    cli("party", "create", "Games").ok()
    assert cli("party", "rename", "Summer", "--party", "@Trip", "--json").ok().json()["before"] == "Trip"
    assert {each["title"] for each in cli("party", "list", "--json").ok().json()["parties"]} == {"Summer", "Games"}
    assert cli("party", "show", "@Summer", "--json").ok().json()["title"] == "Summer"
    assert cli("party", "rename", " ", "--party", "@Summer").status == 2
