"""Texts and lists without their history: what is left is small, the same everywhere, and goes on as if nothing had gone."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import test_growable_array
import test_text
from discarding_laws import check_discarding
from echostore.kernel.errors import Corrupt, UsageError
from echostore.kernel.ids import FeedId, ItemId, Stamp
from echostore.kernel.models.base import Horizon, OperationRefused
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.text import ConcurrentText
from echostore.kernel.reasons import Reason
from echostore.wire.generated import text_pb2
from echostore.wire.models import growable_array as array_codec
from echostore.wire.models import text as text_codec
from network_peers import cid
from peer_builder import Circle, reasons
from sequence_story import FEEDS, ITEM, STEPS, Step
from test_discarding import discarded, seen_by_all
from test_stale_messages import agreed_epoch, started
from two_peers import open_quiet, sync

MORE = st.lists(st.tuples(*[st.integers(0, 255)] * 5), min_size=20, max_size=40)
ANN, BOB, CAT = FEEDS
ALL = Horizon(1 << 40, dict.fromkeys(FEEDS, 1 << 40))


@settings(max_examples=25)
@given(steps=STEPS, more=MORE, seed=st.integers(0, 1 << 32))
def test_a_text_goes_on_as_if_nothing_had_gone(steps: list[Step], more: list[Step], seed: int) -> None:
    check_discarding(test_text.KIND, steps, more, seed)


@settings(max_examples=25)
@given(steps=STEPS, more=MORE, seed=st.integers(0, 1 << 32))
def test_a_list_goes_on_as_if_nothing_had_gone(steps: list[Step], more: list[Step], seed: int) -> None:
    check_discarding(test_growable_array.KIND, steps, more, seed)


def test_in_such_stories_something_goes() -> None:
    went = 0
    for seed in range(6):
        chance = Random(seed)
        steps, more = ([tuple(chance.randrange(256) for _ in range(5)) for _ in range(30)] for _ in range(2))
        went += check_discarding(test_text.KIND, steps, more, seed)  # type: ignore[arg-type]  # five numbers each
    assert went >= 3


class Writer:
    """One who edits a text or list, and whose operations others get."""

    def __init__(self, model: Any, feed: FeedId) -> None:
        self.model, self.feed, self.seq = model, feed, 0
        model.begin(feed, 0)

    def seal(self, *, depth: int | None = None, time_ms: int = 0) -> tuple[Any, Stamp, int]:
        operation = self.model.seal()
        stamp = Stamp(self.seq + 1 if depth is None else depth, self.feed, self.seq, 0)
        self.seq += 1
        self.model.stamped(stamp, time_ms)
        return operation, stamp, time_ms


def edited_text(edits: int, left: int) -> tuple[ConcurrentText, list[tuple[Any, Stamp, int]]]:
    """A text after many edits of one writer, of which few characters are left; and the operations."""
    chance = Random(7)
    writer = Writer(ConcurrentText(ITEM), ANN)
    text, operations = writer.model, []
    for number in range(edits):
        if len(text) > left and number % 2:
            text.delete(chance.randrange(len(text)), 1)
        else:
            text.insert(chance.randrange(len(text) + 1), "xy"[number % 2])
        if number % 10 == 9:
            operations.append(writer.seal(time_ms=number * 1000))
    if len(text) > left:
        text.delete(left, len(text) - left)
        operations.append(writer.seal(time_ms=edits * 1000))
    return text, operations


def test_a_text_of_many_edits_takes_what_is_seen_of_it() -> None:
    text, _ = edited_text(10_000, 100)
    before, shown = text_codec.encode_state(text), str(text)
    assert len(shown) == 100
    assert text.discard(ALL)
    after = text_codec.encode_state(text)
    assert str(text) == shown
    assert len(before) > 20_000
    assert len(after) < 100 * 12
    again = text_codec.decode_state(ITEM, after)
    assert (str(again), text_codec.encode_state(again)) == (shown, after)
    assert len(text.native()) < len(before) / 4, "what is kept beside it shrinks as well"


def test_a_list_of_many_edits_takes_what_is_seen_of_it() -> None:
    chance = Random(7)
    writer = Writer(GrowableArray(ITEM), ANN)
    tasks = writer.model
    for number in range(3000):
        kind = chance.randrange(4) if len(tasks) > 20 else 0
        place = chance.randrange(len(tasks)) if len(tasks) else 0
        if kind == 0:
            tasks.insert(place, f"task {number}")
        elif kind == 1:
            tasks.set(place, number)
        elif kind == 2:
            tasks.move(place, chance.randrange(len(tasks)))
        else:
            tasks.delete(place)
    writer.seal()
    before, shown = array_codec.encode_state(tasks), tasks.value()
    assert tasks.discard(ALL)
    after = array_codec.encode_state(tasks)
    assert tasks.value() == shown
    assert len(after) < len(before) / 10
    assert len(after) < 30 * len(shown) + 64
    tasks.begin(ANN, 0)
    tasks.move(0, 3)
    tasks.set(1, "after")
    tasks.delete(0)
    copy = array_codec.decode_state(ITEM, after)
    copy.apply(*writer.seal())
    assert copy.value() == tasks.value()
    assert array_codec.encode_state(copy) == array_codec.encode_state(tasks)


# what may go


def two_writers() -> tuple[Writer, Writer]:
    """Ann has written "hello" and deleted the "h", Bob has that."""
    ann, bob = Writer(ConcurrentText(ITEM), ANN), Writer(ConcurrentText(ITEM), BOB)
    ann.model.insert(0, "hello")
    ann.model.delete(0, 1)
    bob.model.apply(*ann.seal(time_ms=70_000))
    return ann, bob


def test_nothing_goes_that_is_not_stable_or_not_old() -> None:
    ann, _ = two_writers()
    text = ann.model
    assert not text.discard(Horizon(1 << 40, {ANN: -1})), "not seen by all"
    assert not text.discard(Horizon(1 << 40, {BOB: 9}))
    assert not text.discard(Horizon(70_000, {ANN: 0})), "not before that time"
    state = text_codec.encode_state(text)
    assert text.ground is None
    assert text.discard(Horizon(70_001, {ANN: 0}))
    assert text.ground is not None
    assert text_codec.encode_state(text) != state
    assert not text.discard(Horizon(70_001, {ANN: 0})), "once"


def test_what_was_written_within_a_minute_becomes_stable_together() -> None:
    writer = Writer(ConcurrentText(ITEM), ANN)
    for number, time_ms in enumerate((60_000, 119_999, 60_500, 120_000, 60_000)):
        writer.model.append(str(number))
        writer.seal(time_ms=time_ms)
    rows = writer.model.dated[0].rows
    assert [tuple(row) for row in rows] == [(3, 2, 119_999), (4, 3, 120_000), (5, 4, 60_000)]
    assert not writer.model.discard(Horizon(1 << 40, {ANN: 1}))
    assert writer.model.discard(Horizon(120_000, {ANN: 4})), "up to the first that is not old"
    assert writer.model.ground.ends == {writer.model.changes()[0].writer: 3}
    assert writer.model.dated[0].rows == rows[1:]


def test_history_is_cut_only_where_all_of_it_comes_together() -> None:
    ann, bob = two_writers()
    bob.model.insert(0, "b")
    from_bob = bob.seal(depth=2)
    ann.model.insert(4, "!")
    from_ann = ann.seal(depth=2)  # beside Bob's
    for model, operation in ((ann.model, from_bob), (bob.model, from_ann)):
        model.apply(*operation)
    horizon = Horizon(1 << 40, {ANN: 1, BOB: -1})
    assert ann.model.discard(horizon)
    assert ann.model.ground.text == "ello", "what Ann wrote beside Bob stays with its history"
    assert len(ann.model.changes()) == 2
    assert bob.model.discard(horizon)
    assert text_codec.encode_state(ann.model) == text_codec.encode_state(bob.model)
    assert str(ann.model) == "bello!"


def test_marks_stay_and_an_empty_one_keeps_its_place() -> None:
    writer = Writer(ConcurrentText(ITEM), ANN)
    text = writer.model
    text.insert(0, "one two three")
    text.mark(0, 7, "bold", True)
    text.mark(4, 13, "link", "x")
    text.mark(2, 5, "bold", None)
    text.delete(4, 4)
    text.mark(1, 3, "note", 7)
    text.delete(1, 2)
    writer.seal()
    twin = text_codec.decode_state(ITEM, text_codec.encode_state(text))
    assert text.discard(ALL)
    assert text.to_delta() == twin.to_delta()
    text.begin(ANN, 0)
    for where in range(len(text) + 1):
        text.insert(where, "+")
    operation = writer.seal()
    twin.apply(*operation)
    assert text.to_delta() == twin.to_delta()


def test_a_delete_reaches_over_the_end_of_the_ground_in_a_text_with_marks() -> None:
    ann = Writer(ConcurrentText(ITEM), ANN)
    ann.model.insert(0, "hello")
    ann.seal()
    left = text_codec.decode_state(ITEM, text_codec.encode_state(ann.model))
    assert left.discard(ALL)
    ann.model.append("!?")
    ann.model.mark(0, 2, "bold", True)
    left.apply(*ann.seal())
    ann.model.delete(4, 2)
    operation, stamp, time_ms = ann.seal()
    assert operation.update[0].runs[0].length == 2
    left.apply(operation, stamp, time_ms)
    assert left.to_delta() == ann.model.to_delta()


def test_a_list_with_a_place_that_holds_nothing_keeps_its_history() -> None:
    ann, bob = Writer(GrowableArray(ITEM), ANN), Writer(GrowableArray(ITEM), BOB)
    for value in "abcd":
        ann.model.append(value)
    bob.model.apply(*ann.seal())
    ann.model.move(0, 3)
    bob.model.move(0, 2)
    from_ann, from_bob = ann.seal(depth=2), bob.seal(depth=2)
    ann.model.apply(*from_bob)
    bob.model.apply(*from_ann)
    shown = ann.model.value()
    assert not ann.model.discard(ALL)
    assert not bob.model.discard(ALL)
    assert ann.model.value() == bob.model.value() == shown


# on discarded ground


def refused(model: Any, entry: tuple[Any, Stamp, int]) -> Reason:
    with pytest.raises(OperationRefused) as caught:
        model.apply(*entry)
    return caught.value.reason


def test_an_edit_beside_what_was_discarded_is_refused() -> None:
    ann, _ = two_writers()
    stranger = Writer(ConcurrentText(ITEM), CAT)
    stranger.model.insert(0, "I saw nothing")
    late = stranger.seal()
    whole = text_codec.decode_state(ITEM, text_codec.encode_state(ann.model))
    whole.apply(*late)  # with its history the text takes it
    assert ann.model.discard(ALL)
    state = text_codec.encode_state(ann.model)
    assert refused(ann.model, late) is Reason.DISCARDED
    assert [outcome and outcome.reason for outcome in ann.model.apply_many([late])] == [Reason.DISCARDED]
    assert text_codec.encode_state(ann.model) == state


def test_an_edit_on_a_part_of_what_was_discarded_is_refused() -> None:
    ann, bob = two_writers()
    ann.model.append("!")
    newer = ann.seal(depth=2)
    bob.model.append("?")
    late = bob.seal(depth=2)  # on the first of Ann's alone
    assert ann.model.discard(ALL)
    assert refused(ann.model, late) is Reason.DISCARDED
    bob.model.apply(*newer)
    bob.model.append("later")
    assert refused(ann.model, bob.seal()) is Reason.BUILDS_ON_EXCLUDED, "its own earlier edit is not there"


@pytest.mark.parametrize("marked", [False, True])
def test_a_delete_of_what_is_gone_is_refused(marked: bool) -> None:
    ann, bob = two_writers()
    if marked:
        ann.model.mark(1, 3, "bold", True)
        bob.model.apply(*ann.seal())
    bob.model.delete(0, 1)
    operation, stamp, _ = bob.seal(depth=3)
    (change,) = operation.update
    (delete,) = change.runs
    forged = type(operation)(
        (type(change)(change.writer, 0, False, change.dependencies, (delete._replace(counter=0),)),), 0
    )
    assert ann.model.discard(ALL)
    assert refused(ann.model, (forged, stamp, 0)) is Reason.DISCARDED
    ann.model.apply(operation, stamp, 0)
    assert str(ann.model) == "llo"


def test_a_set_of_what_is_gone_is_refused() -> None:
    ann, bob = Writer(GrowableArray(ITEM), ANN), Writer(GrowableArray(ITEM), BOB)
    ann.model.append("a")
    ann.model.append("b")
    bob.model.apply(*ann.seal())
    bob.model.set(0, "changed")
    late = bob.seal(depth=2)
    ann.model.delete(0)
    ann.seal(depth=2)
    assert ann.model.discard(ALL)
    assert refused(ann.model, late) is Reason.DISCARDED


def test_undo_passes_over_what_was_discarded_and_takes_back_what_came_later() -> None:
    ann, _ = two_writers()
    first = ann.model
    operation = first.changes()
    assert first.discard(ALL)
    first.begin(ANN, 0)
    writer = Writer(first, ANN)
    writer.seq = 1
    assert not first.holds(operation)
    first.delete(0, 2)
    later, _, _ = writer.seal()
    first.undo_operation(later)
    assert str(first) == "ello", "what stood on the ground comes back"
    kept = first.seal()
    assert kept is not None


def test_a_cursor_keeps_its_place_on_the_ground() -> None:
    ann, _ = two_writers()
    text = ann.model
    cursors = [text.cursor(place) for place in range(5)]
    text.insert(0, "h")
    ann.seal()
    gone = text.cursor(0)
    text.delete(0, 1)
    ann.seal()
    assert text.discard(ALL)
    assert [text.cursor_position(cursor) for cursor in cursors] == [0, 1, 2, 3, 4]
    assert [text.cursor(place) for place in range(5)] == cursors
    text.begin(ANN, 0)
    text.insert(1, "--")
    assert [text.cursor_position(cursor) for cursor in cursors] == [0, 3, 4, 5, 6]
    with pytest.raises(UsageError):
        text.cursor_position(gone)


def test_damaged_grounds_are_named_corrupt() -> None:
    text, _ = edited_text(200, 20)
    assert text.discard(ALL)
    state = text_codec.encode_state(text)
    for damage in (
        {"ends": []},
        {"heads": b""},
        {"heads": b"\x04"},
        {"piece_lengths": [1]},
        {"text": "short"},
        {"mark_starts": [1]},
        {"piece_makers": [0]},
    ):
        message = text_pb2.TextState.FromString(state)
        for name, value in damage.items():
            if isinstance(value, list):
                del getattr(message.ground, name)[:]
                getattr(message.ground, name).extend(value)
            else:
                setattr(message.ground, name, value)
        with pytest.raises(Corrupt):
            text_codec.decode_state(ITEM, message.SerializeToString())
    message = text_pb2.TextState.FromString(state)
    counters = message.ground.piece_counters
    step = counters[1] + message.ground.piece_lengths[0]
    counters[1], counters[2] = counters[1] - step, counters[2] + step  # the second piece is the first once more
    with pytest.raises(Corrupt, match="twice"):
        text_codec.decode_state(ITEM, message.SerializeToString())
    message = text_pb2.TextState.FromString(state)
    message.datings.feeds = b"feed-one"
    with pytest.raises(Corrupt):
        text_codec.decode_state(ITEM, message.SerializeToString())


# in a party


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob", "cat") as made:
        yield made


def long_story(circle: Circle) -> tuple[ItemId, ItemId]:
    """A text and a list that all have edited, much of which is deleted, and that all have seen."""
    ann = circle.party("ann")
    text, tasks = ann.create("text"), ann.create("growable-array")
    text.insert(0, "start ")
    tasks.append("first")
    circle.meet_all()
    for number, name in enumerate(circle.names):
        theirs, list_ = circle.get(name, text), circle.get(name, tasks)
        for each in range(30):
            theirs.insert(len(str(theirs)), f"{name}{each} ")
        theirs.delete(3, 100)
        theirs.mark(0, 2, "bold", number)
        for each in range(8):
            list_.append(f"{name} {each}")
        list_.move_element(2, 5)
        for _ in range(4):
            del list_[0]
        circle.party(name).flush()
        if number == 1:
            circle.meet_all()
    seen_by_all(circle)
    return text.id, tasks.id


def sizes(circle: Circle, name: str, *items: ItemId) -> list[int]:
    codecs = {"text": text_codec, "growable-array": array_codec}
    records = [circle.party(name).get(item)._record() for item in items]
    return [len(codecs[record.model.name].encode_state(record.model)) for record in records]  # type: ignore[attr-defined]


def test_texts_and_lists_lose_their_history_on_every_peer(circle: Circle) -> None:
    items = long_story(circle)
    ann = circle.party("ann")
    before, shown = sizes(circle, "ann", *items), [ann.get(item).value() for item in items]
    discarded(circle, *circle.names)
    assert all(now < was for now, was in zip(sizes(circle, "ann", *items), before, strict=True))
    # They go on together, some before they have heard of it.
    for name in circle.names:
        party = circle.party(name)
        assert [party.get(item).value() for item in items] == shown
        party.get(items[0]).insert(2, name)
        party.get(items[0]).delete(0, 1)
        party.get(items[1]).insert(1, name)
        party.get(items[1]).move_element(0, 2)
    circle.meet_all()
    agreed = circle.agree()
    circle.agree_after_loss()
    ann = circle.party("ann")
    with open_quiet(circle.folder / "dan") as dan:
        theirs = dan.enter(ann.members.admit(dan.request_join(circle.key)))
        started(ann, theirs)
        theirs.get(items[0]).insert(0, "dan ")
        sync(ann, theirs, circle.party("bob"), circle.party("cat"))
        assert cid(theirs) == circle.agree() != agreed


def test_a_party_is_opened_again_on_the_ground(circle: Circle) -> None:
    items = long_story(circle)
    discarded(circle, *circle.names)
    shown = [circle.party("bob").get(item).value() for item in items]
    again = circle.restart("bob")
    assert [again.get(item).value() for item in items] == shown
    again.get(items[0]).append("more")
    again.get(items[1]).append("more")
    circle.meet_all()
    circle.agree()
    assert reasons(circle.party("ann")) == []


def test_the_past_of_a_text_follows_the_earlier_snapshot(circle: Circle) -> None:
    ann = circle.party("ann")
    items = long_story(circle)
    shown = [ann.get(item).value() for item in items]
    agreed_epoch(circle, *circle.names)
    ann.get(items[0]).delete(0, 3)
    del ann.get(items[1])[0]
    seen_by_all(circle)
    discarded(circle, *circle.names)
    assert [ann.as_of(1).get(item).value() for item in items] == shown
    assert [ann.as_of(2).get(item).value() for item in items] == [ann.get(item).value() for item in items] != shown


def test_undo_in_a_party_passes_over_what_was_discarded(circle: Circle) -> None:
    items = long_story(circle)
    discarded(circle, *circle.names)
    ann = circle.party("ann")
    shown = [ann.get(item).value() for item in items]
    ann.get(items[0]).append("again")
    ann.flush()
    assert ann.undo()
    assert [ann.get(item).value() for item in items] == shown
    ann.undo()
    assert [ann.get(item).value() for item in items] == shown, "the edits below are gone"
    circle.meet_all()
    circle.agree()
