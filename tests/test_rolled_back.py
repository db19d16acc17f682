"""A batch that raised: nothing of it is there, its ids are never used again, and handles of what it made say so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.errors import NotFound
from echostore.peer.party import Party
from echostore.thin.thin_party import connect
from peer_builder import Circle
from thin_server import ThinServer, capability
from two_peers import open_quiet


class Mistake(Exception):
    """What the program raises in its batch."""


def roll_back(party: Any, work: Callable[[], Any]) -> Any:
    """What `work` made in a batch that raised after it."""
    made: list[Any] = []

    def batch() -> None:
        with party.batch():
            made.append(work())
            raise Mistake

    with pytest.raises(Mistake):
        batch()
    return made[0]


def test_an_item_made_later_never_gets_the_id_of_one_that_was_rolled_back(tmp_path: Path) -> None:
    with open_quiet(tmp_path) as peer:
        party = peer.create_party("Trip")
        gone = [roll_back(party, lambda: party.create(type="draft")) for _ in range(3)]
        other = party.create(type="other")
        with party.batch():
            more = [party.create(type="other") for _ in range(3)]
        assert len({item.id for item in (*gone, other, *more)}) == 7
        for item in gone:
            with pytest.raises(NotFound, match="rolled back"):
                item["secret"] = 1
        assert [item.to_dict() for item in party.query(type="other")] == [{}] * 4


@pytest.mark.parametrize(
    "use",
    [
        lambda item: item["n"],
        lambda item: item.update(n=1),
        lambda item: item.type,
        lambda item: item.deleted,
        lambda item: item.children(),
        lambda item: item.links(),
        lambda item: item.value(),
        lambda item: item.delete(),
        lambda item: item.move(None),
        lambda item: item.party.create(parent=item),
        lambda item: item.link(item),
    ],
)
def test_a_handle_of_a_rolled_back_item_raises(tmp_path: Path, use: Callable[[Any], Any]) -> None:
    with open_quiet(tmp_path) as peer:
        party = peer.create_party("Trip")
        item = roll_back(party, lambda: party.create(type="draft", n=1))
        party.create(type="other", n=2)
        with pytest.raises(NotFound, match="the batch that made it was rolled back"):
            use(item)


@pytest.mark.parametrize(
    ("model", "write"),
    [
        ("text", lambda item: item.insert(0, "x")),
        ("growable-array", lambda item: item.append(1)),
        ("threaded-log", lambda item: item.post("x")),
    ],
)
def test_a_handle_of_a_rolled_back_text_list_or_log_raises(
    tmp_path: Path, model: str, write: Callable[[Any], Any]
) -> None:
    def made_and_written(party: Party) -> Any:
        item = party.create(model)
        write(item)
        return item

    with open_quiet(tmp_path) as peer:
        party = peer.create_party("Trip")
        item = roll_back(party, lambda: made_and_written(party))
        party.create(model)
        with pytest.raises(NotFound, match="rolled back"):
            write(item)


def test_the_id_of_a_rolled_back_post_is_not_used_again(tmp_path: Path) -> None:
    with open_quiet(tmp_path) as peer:
        party = peer.create_party("Trip")
        log = party.create("threaded-log")
        gone = roll_back(party, lambda: log.post("draft"))
        kept = log.post("kept")
        assert kept != gone
        assert [post.body for post in log.posts()] == ["kept"]


def test_a_rolled_back_batch_writes_nothing_until_the_next_write(tmp_path: Path) -> None:
    with open_quiet(tmp_path) as peer:
        party = peer.create_party("Trip")
        before = party.snapshot().cid
        roll_back(party, lambda: party.create(type="draft"))
        party.flush()
        assert party.snapshot().cid == before
    with open_quiet(tmp_path) as peer:
        assert peer.party("@Trip").snapshot().cid == before


def test_other_peers_take_the_empty_message_and_agree(tmp_path: Path) -> None:
    circle = Circle(tmp_path, "ann", "bob")
    party = circle.party("ann")
    roll_back(party, lambda: party.create(type="draft"))
    item = party.create(type="other", n=1)
    circle.agree()
    assert circle.get("bob", item)["n"] == 1
    assert circle.party("bob").rejected() == []
    assert circle.party("ann").query().ids() == circle.party("bob").query().ids() == [item.id]


def test_undo_and_redo_pass_over_a_rolled_back_batch(tmp_path: Path) -> None:
    with open_quiet(tmp_path) as peer:
        party = peer.create_party("Trip")
        item = party.create(type="task", n=1)
        item["n"] = 2
        assert party.undo()
        roll_back(party, lambda: party.create(type="draft"))
        party.flush()
        assert party.redo()
        assert item["n"] == 2
        roll_back(party, lambda: party.create(type="draft"))
        party.flush()
        assert party.undo()
        assert item["n"] == 1


def test_a_batch_that_made_nothing_leaves_no_message(tmp_path: Path) -> None:
    with open_quiet(tmp_path) as peer:
        party = peer.create_party("Trip")
        item = party.create(type="task", n=1)
        before = party.flush().anchor
        roll_back(party, lambda: item.update(n=2))
        assert party.flush().anchor == before
        assert item["n"] == 1


def test_a_thin_handle_of_a_rolled_back_item_raises_and_others_show_what_was_before() -> None:
    with ThinServer() as server:
        server.create("task", title="kept")
        with connect(server.url, capability()) as party:
            kept = party.query(type="task").one()

            def work() -> Any:
                kept["title"] = "changed"
                draft = party.create(type="task", title="draft")
                draft["n"] = 1
                return draft

            draft = roll_back(party, work)
            assert kept["title"] == "kept"
            assert repr(draft).endswith("not here>")
            for use in (
                lambda: draft["title"],
                lambda: draft.update(n=2),
                lambda: draft.delete(),
                lambda: party.create(type="task", parent=draft),
                lambda: party.link(kept, draft),
                lambda: party.link(draft, kept),
                lambda: kept.move(draft),
            ):
                with pytest.raises(NotFound, match="rolled back"):
                    use()
            assert party.create(type="task").id != draft.id
            party.fence("release")
            assert party.rejected() == []
