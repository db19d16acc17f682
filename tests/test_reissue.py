"""Own text that built on excluded edits is issued again, by the device that wrote it, under the next generation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.models._loro import Element
from echostore.kernel.models.placing_again import places_again
from peer_builder import Circle, reasons


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Scene:
    """Ann founds and removes; Bob and Dan write on top of Cat's text, of which Ann knows nothing."""

    def __init__(self, folder: Path) -> None:
        self.circle = Circle(folder, "ann", "bob", "cat", "dan")
        self.text = self.circle.party("ann").create("text")
        self.text.insert(0, "start. end.")
        self.list = self.circle.party("ann").create("growable-array")
        self.list.append("first")
        self.list.append("last")
        self.circle.meet_all()

    def on(self, name: str) -> Any:
        return self.circle.get(name, self.text)

    def cat_writes(self, position: int, text: str) -> None:
        self.on("cat").insert(position, text)
        self.circle.meet("cat", "bob")

    def remove(self, name: str) -> None:
        """By Ann, who has not seen that one's last edits; then all but the removed one meet."""
        party = self.circle.party("ann")
        party.members.remove(self.circle.peers[name].identity)
        self.circle.names = tuple(other for other in self.circle.names if other != name)

    def generations(self, name: str, item: Any) -> list[int]:
        """Of a peer's own operations on an item, in their order."""
        return self.generations_in(self.circle.party(name), item)

    @staticmethod
    def generations_in(party: Any, item: Any) -> list[int]:
        own = party.runtime.data
        assert own is not None
        processor = party.runtime.processor
        return [
            operation.body.generation
            for seq in sorted(processor.touched.seqs(item.id, own.feed, 0))
            for operation in processor.operations_at(own.feed, seq)
            if operation.item == item.id and hasattr(operation.body, "generation")
        ]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.circle.close()


def test_own_text_on_excluded_text_is_issued_again_where_it_stood(scene: Scene) -> None:
    scene.cat_writes(6, " cat's")
    scene.on("bob").insert(12, " bob's")  # start. cat's bob's end.
    assert str(scene.on("bob")) == "start. cat's bob's end."
    scene.circle.meet("bob", "dan")
    scene.remove("cat")
    scene.circle.agree()
    assert str(scene.text) == "start. bob's end."
    assert scene.generations("bob", scene.text) == [0, 1]
    assert sorted(reasons(scene.circle.party("ann"))) == ["beyond-cut", "builds-on-excluded"]
    scene.circle.agree_after_loss()
    assert scene.generations("bob", scene.text) == [0, 1]


def test_history_says_who_and_why(scene: Scene) -> None:
    scene.cat_writes(6, " cat's")
    scene.on("bob").insert(12, " bob's")
    scene.remove("cat")
    scene.circle.agree()
    last = scene.text.history()[-1]
    assert last.author == "bob"
    assert last.what == ["text written again as generation 1: what it built on before was excluded"]


def test_what_was_deleted_is_not_issued_again(scene: Scene) -> None:
    scene.cat_writes(6, " cat's")
    scene.on("bob").insert(12, " bob's and more")
    scene.on("bob").delete(18, 4)  # start. cat's bob's more end.
    scene.circle.meet("bob", "dan")
    dan = scene.on("dan")
    assert str(dan) == "start. cat's bob's more end."
    dan.delete(18, 5)  # Dan counts, though this edit of his does not
    scene.circle.meet("bob", "dan")
    scene.remove("cat")
    scene.circle.agree()
    assert str(scene.text) == "start. bob's end."


def test_several_stretches_keep_their_surroundings(scene: Scene) -> None:
    scene.cat_writes(0, "C")
    bob = scene.on("bob")
    bob.insert(1, "<")  # C<start. end.
    bob.insert(8, "|")  # C<start.| end.
    bob.append(">")
    assert str(bob) == "C<start.| end.>"
    scene.circle.meet("bob", "dan")
    scene.remove("cat")
    scene.circle.agree()
    assert str(scene.text) == "<start.| end.>"


def test_text_of_which_only_a_part_is_refused_is_issued_in_part(scene: Scene) -> None:
    scene.on("bob").insert(0, "kept ")
    scene.circle.party("bob").flush()
    scene.cat_writes(6, " cat's")
    scene.on("bob").append(" again")
    scene.remove("cat")
    scene.circle.agree()
    assert str(scene.text) == "kept start. end. again"
    assert scene.generations("bob", scene.text) == [0, 0, 1]


def test_elements_of_a_list_are_issued_again(scene: Scene) -> None:
    circle = scene.circle
    circle.get("cat", scene.list).insert(1, "cat's")
    circle.meet("cat", "bob")
    bob = circle.get("bob", scene.list)
    bob.insert(2, "bob's")
    bob.insert(3, {"also": ["bob's"]})
    bob.insert(4, "gone")
    del bob[4]
    bob.move_element(0, 3)  # of Ann's: a move is not content, and is not made again
    scene.remove("cat")
    circle.agree()
    assert scene.list.value() == ["bob's", {"also": ["bob's"]}, "first", "last"]
    circle.agree_after_loss()


def test_it_happens_once_over_a_crash_at_any_moment(scene: Scene) -> None:
    circle = scene.circle
    scene.cat_writes(6, " cat's")
    scene.on("bob").insert(12, " bob's")
    circle.party("bob").flush()
    scene.remove("cat")
    # Bob hears of the removal and issues again; the process is gone before its state is saved.
    circle.meet("ann", "bob")
    circle.restart("bob", crash=True)
    circle.restart("bob", lose=["items.db"])
    circle.restart("bob")
    circle.agree()
    assert str(scene.text) == "start. bob's end."
    assert scene.generations("bob", scene.text) == [0, 1]


@pytest.mark.parametrize("crash", [False, True])
def test_a_crash_between_the_exclusion_and_the_issue_is_made_up_for(scene: Scene, crash: bool) -> None:
    circle = scene.circle
    scene.cat_writes(6, " cat's")
    scene.on("bob").insert(12, " bob's")
    scene.remove("cat")
    circle.party("bob").runtime.processor.after_finish = lambda: None
    circle.meet("ann", "bob")
    assert str(scene.on("bob")) == "start. end."
    circle.restart("bob", crash=crash)
    circle.agree()
    assert str(scene.text) == "start. bob's end."
    assert scene.generations("bob", scene.text) == [0, 1]


def test_a_second_exclusion_issues_the_newest_generation_again(scene: Scene) -> None:
    circle = scene.circle
    scene.cat_writes(6, " cat's")
    scene.on("bob").insert(12, " bob's")
    circle.meet("bob", "dan")
    scene.remove("cat")
    circle.agree()
    circle.get("dan", scene.text).insert(0, "DAN ")
    circle.meet("bob", "dan")
    scene.on("bob").insert(4, "and bob ")
    assert str(scene.on("bob")) == "DAN and bob start. bob's end."
    circle.meet("bob", "dan")
    scene.remove("dan")
    circle.agree()
    assert str(scene.text) == "and bob start. bob's end."
    assert scene.generations("bob", scene.text)[:2] == [0, 1]
    assert scene.generations("bob", scene.text)[-1] == 2
    circle.agree_after_loss()


def test_two_devices_issue_their_own_each(scene: Scene) -> None:
    circle = scene.circle
    scene.cat_writes(6, " cat's")
    scene.on("bob").insert(12, " bob's")
    circle.meet("bob", "dan")
    scene.on("dan").insert(18, " dan's")
    circle.party("dan").flush()
    scene.remove("cat")
    circle.agree()
    text = str(scene.text)
    assert text.startswith("start.")
    assert text.endswith("end.")
    assert text.count("bob's") == text.count("dan's") == 1
    assert scene.generations("dan", scene.text) == [0, 1]
    circle.agree_after_loss()


def test_where_nothing_is_left_the_next_edit_has_a_new_generation(scene: Scene) -> None:
    circle = scene.circle
    scene.cat_writes(6, " cat's")
    scene.on("bob").insert(12, "x")
    scene.on("bob").delete(12, 1)  # nothing of Bob's is left
    scene.remove("cat")
    circle.agree()
    assert scene.generations("bob", scene.text) == [0]
    scene.on("bob").append("!")
    circle.agree()
    assert scene.generations("bob", scene.text) == [0, 1]
    assert str(scene.text) == "start. end.!"
    circle.agree_after_loss()


def test_what_only_excluded_blocks_deleted_is_issued_again(scene: Scene) -> None:
    circle = scene.circle
    scene.cat_writes(6, " cat's")
    scene.on("bob").insert(12, " bob's")
    circle.meet("cat", "bob")
    scene.on("cat").delete(12, 6)
    circle.meet("cat", "bob")
    assert str(scene.on("bob")) == "start. cat's end."
    scene.remove("cat")
    circle.agree()
    assert str(scene.text) == "start. bob's end."


def test_when_an_exclusion_turns_out_void_both_stand_and_the_generation_stays(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob", "cat", "dan", roles={"bob": "admin"}) as circle:
        text = circle.party("ann").create("text")
        text.insert(0, "start. end.")
        circle.meet_all()
        circle.get("cat", text).insert(6, " cat's")
        circle.meet("cat", "dan")
        circle.get("dan", text).insert(12, " dan's")
        circle.party("dan").flush()
        # Two acts that know nothing of each other: bob removes cat, ann removes bob. The senior's stands, bob's is void.
        circle.party("bob").members.remove(circle.peers["cat"].identity)
        circle.party("ann").members.remove(circle.peers["bob"].identity)
        circle.meet("dan", "bob")
        assert str(circle.get("dan", text)) == "start. dan's end."
        circle.meet("dan", "ann")
        circle.names = ("ann", "cat", "dan")
        circle.agree()
        assert str(text).count("cat's") == 1
        assert str(text).count("dan's") == 2
        assert circle.party("dan").rejected() == []
        circle.restart("dan")
        circle.get("dan", text).append("!")
        circle.agree()
        assert Scene.generations_in(circle.party("dan"), text) == [0, 1, 1]


def element(name: str) -> Element:
    return Element((0, ord(name)), name, (0, ord(name)))


@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.sets(st.sampled_from("abcdefgh")))
def test_everything_lost_is_placed_once_and_in_its_order(stood: list[str], there: set[str]) -> None:
    now = [name for name in stood if name in there]
    mine = frozenset(element(name).identity for name in stood if name not in there)
    result = list(now)
    for index, contents in places_again(
        [element(name) for name in stood], [element(name).identity for name in now], mine
    ):
        result[index:index] = [piece.text for piece in contents]
    assert result == stood
