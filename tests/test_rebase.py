"""What a device did on a feed that was retired meanwhile, done again on a new one: deletes, sets, moves, marks and more."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echostore.peer.epochs import Epochs
from echostore.peer.retiring import Rebased, rebase_retired, retire_silent
from network_peers import cid
from peer_builder import Circle, reasons
from test_discarding import Clock, discarded, seen_by_all
from test_stale_messages import agreed_epoch
from two_peers import _copy, sync


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Away:
    """Ann and Bob go on while Cat is away; Ann retires Cat's feed; Cat writes, and comes back."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.circle = Circle(folder, "ann", "bob", "cat", now_ms=self.clock)
        self.ann, self.cat = self.circle.party("ann"), self.circle.party("cat")
        self.text, self.list = self.ann.create("text"), self.ann.create("growable-array")
        self.text.insert(0, "one two three")
        self.list.append("a", "b", "c", "d")
        self.things = self.ann.create("property-set")
        self.things.add("tags", "red")
        self.log = self.ann.create("threaded-log")
        self.circle.meet_all()

    def of_cat(self, item: Any) -> Any:
        return self.circle.get("cat", item)

    def retire(self) -> None:
        self.clock.hours(30)
        self.ann.members.set_policy({"epoch.silence_s": b"86400"})
        self.ann.system_item["alive"] = 1
        self.circle.party("bob").system_item["bob"] = 1
        sync(self.ann, self.circle.party("bob"))
        assert len(retire_silent(self.ann)) == 1

    def back(self) -> Rebased:
        """Cat comes back, and everybody agrees."""
        self.cat.flush()
        self.circle.meet_all()
        Epochs(self.cat).review()
        rebased = rebase_retired(self.cat)
        assert rebased is not None
        self.circle.meet_all()
        assert len({cid(self.circle.party(name)) for name in self.circle.names}) == 1
        return rebased


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Away]:
    made = Away(tmp_path)
    with made.circle:
        yield made


def test_deletes_of_a_text_are_done_again(away: Away) -> None:
    away.retire()
    away.text.insert(0, "zero ")
    away.of_cat(away.text).delete(4, 4)
    assert away.back().left == 0
    assert str(away.text) == "zero one three"


def test_deletes_of_what_others_deleted_are_not(away: Away) -> None:
    away.retire()
    away.text.delete(0, 4)
    away.of_cat(away.text).delete(0, 4)
    assert away.back().left == 1, "there is nothing to do"
    assert str(away.text) == "two three"


def test_marks_are_put_again_and_new_text_keeps_its_own(away: Away) -> None:
    away.text.mark(0, 3, "note", "old")
    away.circle.meet_all()
    away.retire()
    away.text.mark(0, 1, "note", "by ann")
    theirs = away.of_cat(away.text)
    theirs.mark(4, 7, "bold", True)
    theirs.unmark(0, 3, "note")
    theirs.insert(13, "!!")
    theirs.mark(14, 15, "big", 7)
    assert away.back().left == 0
    shown = [(run.text, run.marks) for run in away.text.runs()]
    assert shown == [
        ("o", {"note": "by ann"}),
        ("ne ", {}),
        ("two", {"bold": True}),
        (" three!", {}),
        ("!", {"big": 7}),
    ], "what Ann marked meanwhile stays"


def test_moves_of_a_list_are_done_again(away: Away) -> None:
    away.retire()
    away.list.insert(0, "new")
    away.of_cat(away.list).move_element(0, 2)
    assert away.back().left == 0
    assert away.list.to_list() == ["new", "b", "c", "a", "d"]


def test_what_others_moved_stays_where_they_put_it(away: Away) -> None:
    away.retire()
    away.list.move_element(0, 3)
    away.of_cat(away.list).move_element(0, 1)
    assert away.back().left == 1
    assert away.list.to_list() == ["b", "c", "d", "a"]


def test_sets_and_deletes_of_a_list_are_done_again(away: Away) -> None:
    away.retire()
    away.list[2] = "by ann"
    theirs = away.of_cat(away.list)
    theirs[1] = "by cat"
    theirs[2] = "too late"
    del theirs[3]
    theirs.append("more")
    assert away.back().left == 0
    assert away.list.to_list() == ["a", "by cat", "by ann", "more"]


def test_an_element_that_others_moved_is_not_deleted_again(away: Away) -> None:
    away.retire()
    away.list.move_element(0, 3)
    del away.of_cat(away.list)[0]
    assert away.back().left == 1
    assert away.list.to_list() == ["b", "c", "d", "a"]


def test_marks_of_a_text_that_was_made_on_the_old_feed_go_with_it(away: Away) -> None:
    away.retire()
    mine = away.cat.create("text", type="mine")
    mine.insert(0, "plain and bold")
    mine.mark(10, 14, "bold", True)
    assert away.back().left == 0
    (found,) = away.ann.query(type="mine").all()
    assert [(run.text, run.marks) for run in found.runs()] == [("plain and ", {}), ("bold", {"bold": True})]


def test_taking_out_of_a_set_is_done_again(away: Away) -> None:
    away.retire()
    theirs = away.of_cat(away.things)
    theirs.remove("tags", "red")
    theirs.add("tags", "blue")
    theirs.add("tags", "green")
    theirs.remove("tags", "blue")
    assert away.back().left == 0
    assert away.things["tags"] == ["green"]


def test_posts_are_retracted_where_they_were_posted_again(away: Away) -> None:
    theirs = away.of_cat(away.log)
    theirs.post("counts")
    away.circle.meet_all()
    away.retire()
    assert away.cat.undo()  # of the post that counts
    theirs.post("mistake")
    assert away.cat.undo()
    theirs.post("meant")
    assert away.back().left == 1, "only the feed that wrote a post retracts it"
    assert [post["body"] for post in away.log.value()] == ["counts", "meant"]


def test_edits_beside_discarded_history_are_done_again_where_that_is_still_here(away: Away) -> None:
    theirs = away.of_cat(away.text)
    seen_by_all(away.circle)
    away.retire()
    away.text.delete(0, 4)
    for _ in range(2):
        for name in ("ann", "bob"):
            away.circle.party(name).system_item["again"] = name
            sync(away.ann, away.circle.party("bob"))
    away.clock.hours(1)
    theirs.insert(3, " by cat")
    theirs.delete(len("one by cat two"), 6)
    away.cat.flush()
    discarded(away.circle, "ann", "bob")
    record = away.text._record()
    assert record.model.ground is not None
    assert record.model.ground.text == "two three"
    rebased = away.back()
    assert set(reasons(away.ann)) == {"retired"}
    assert rebased.left == 0
    assert str(away.text) == " by cattwo"


def test_edits_of_what_was_moved_in_the_same_go_are_done_again(away: Away) -> None:
    """The move is on the new feed, and not durable yet, when the text is looked at."""
    away.retire()
    theirs = away.of_cat(away.text)
    theirs.move(away.of_cat(away.things))
    theirs.insert(0, "zero ")
    assert away.back().left == 0
    assert str(away.text) == "zero one two three"
    assert away.text.parent.id == away.things.id


def test_edits_on_blocks_that_are_gone_stay_behind_and_are_listed(away: Away) -> None:
    """The index names blocks above the base that are not here any more."""
    agreed_epoch(away.circle, *away.circle.names)
    away.text.insert(0, "new ")
    away.circle.meet_all()
    away.retire()
    away.of_cat(away.text).insert(2, "er, n")
    away.of_cat(away.things)["kept"] = 1
    away.cat.flush()
    away.circle.meet_all()
    feeds, processor = away.cat.runtime.feeds, away.cat.runtime.processor
    written = {feed for feed, _ in processor.touched.places(frozenset({away.text.id}))}
    assert away.cat.runtime.data is not None
    others = [processor.feed_key(feed) for feed in written - {away.cat.runtime.data.feed}]
    feeds.begin_at({key: (feeds.length(key), feeds.feed(key).last_link) for key in others})
    rebased = rebase_retired(away.cat)
    assert rebased is not None
    assert (rebased.operations, rebased.left) == (1, 1)
    assert {reject.reason for reject in away.cat.rejected()} == {"retired"}
    assert away.of_cat(away.things)["kept"] == 1


def test_who_may_only_read_by_now_opens_the_party_and_writes_again_once_it_may(away: Away) -> None:
    """Its feed was retired, and then it was made a reader: what it wrote stays where it is until it is an editor again."""
    away.of_cat(away.things)["late"] = 7
    away.cat.flush()
    away.retire()
    away.ann.members.change_role(away.circle.peers["cat"].identity, "reader")
    away.circle.meet_all()
    assert rebase_retired(away.cat) is None
    own = away.cat.runtime.data
    assert own is not None
    party = away.circle.restart("cat")
    assert party.runtime.data is not None
    assert party.runtime.data.feed == own.feed, "no feed is opened in vain"
    assert "late" not in away.things
    away.ann.members.change_role(away.circle.peers["cat"].identity, "editor")
    away.circle.meet_all()
    rebased = rebase_retired(party)
    assert rebased is not None
    assert (rebased.operations, rebased.left) == (1, 0)
    away.circle.meet_all()
    assert away.things["late"] == 7
    assert len({cid(away.circle.party(name)) for name in away.circle.names}) == 1


def test_an_epoch_is_adopted_with_own_blocks_that_are_not_durable_yet(away: Away) -> None:
    Epochs(away.ann).create()
    away.circle.meet_all()
    away.things["n"] = 1
    for name in ("bob", "cat"):
        Epochs(away.circle.party(name)).review()
        away.circle.party(name).flush()
    while _copy(away.circle.party("bob"), away.ann):  # without flushing
        pass
    base = away.ann.runtime.processor.base
    assert base is not None
    assert base.name.number == 1
    assert away.things["n"] == 1
