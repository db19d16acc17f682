"""ConcurrentText: editing, and the laws of models over random stories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.errors import Corrupt, UsageError
from echostore.kernel.ids import Stamp
from echostore.kernel.models.text import ConcurrentText, TextRun
from echostore.wire.models import text as codec
from sequence_laws import check_convergence, check_exclusion, check_restore
from sequence_story import FEEDS, ITEM, STEPS, Kind, Step, finish, tell

SNIPPETS = ["a", "bc", "é", "𝄞𝄞", "hello world", "\n", "\x00", "e\u0301"]
KEYS = ["bold", "link"]


def edit(model: ConcurrentText, what: int, where: int, how: int) -> None:
    length = len(model)
    position = where * (length + 1) // 256
    if what < 130 or length == 0:
        model.insert(position, SNIPPETS[how % len(SNIPPETS)])
    elif what < 200:
        position = min(position, length - 1)
        model.delete(position, min(1 + how % 5, length - position))
    elif what < 235:
        position = min(position, length - 1)
        model.mark(position, min(position + 1 + how % 7, length), KEYS[how % 2], [True, "x", 3, None][how % 4])
    else:
        position = min(position, length - 1)
        model.unmark(position, min(position + 1 + how % 7, length), KEYS[how % 2])


KIND = Kind(ConcurrentText, codec, edit)


def text(content: str = "", writer: int = 0) -> ConcurrentText:
    model = ConcurrentText(ITEM)
    model.begin(FEEDS[writer], 0)
    if content:
        model.insert(0, content)
    return model


def stamp(writer: int, depth: int = 1) -> Stamp:
    return Stamp(depth, FEEDS[writer], depth - 1, 0)


@given(STEPS, st.integers(0, 1 << 32))
def test_text_converges_in_every_order_and_grouping(steps: list[Step], seed: int) -> None:
    check_convergence(KIND, steps, seed)


@given(STEPS, st.integers(0, 1 << 32))
def test_a_restored_text_continues_as_the_original(steps: list[Step], seed: int) -> None:
    check_restore(KIND, steps, seed)


@given(STEPS, st.integers(0, 1 << 32))
def test_what_builds_on_excluded_text_is_refused_in_every_order(steps: list[Step], seed: int) -> None:
    check_exclusion(KIND, steps, seed)


@given(STEPS)
def test_the_marks_of_text_converge(steps: list[Step]) -> None:
    story = tell(KIND, steps)
    finish(story)
    runs = story.replicas[0].model.to_delta()
    assert all(replica.model.to_delta() == runs for replica in story.replicas)
    assert "".join(run.text for run in runs) == str(story.replicas[0].model)


def test_positions_count_code_points() -> None:
    model = text("a𝄞é\u0301b")
    assert len(model) == 5
    model.delete(1, 1)
    model.insert(3, "𝄢")
    assert str(model) == "aé\u0301𝄢b"
    model.splice(0, 2, "XY")
    model.append("!")
    assert model.value() == "XY\u0301𝄢b!"


def test_marks_are_runs_and_grow_at_their_end() -> None:
    model = text("one two")
    model.mark(0, 3, "bold")
    model.insert(3, "!")
    model.mark(5, 8, "link", "somewhere")
    model.unmark(0, 1, "bold")
    assert model.to_delta() == [
        TextRun("o", {}),
        TextRun("ne!", {"bold": True}),
        TextRun(" ", {}),
        TextRun("two", {"link": "somewhere"}),
    ]


def test_a_cursor_keeps_its_place() -> None:
    model = text("hello world")
    before, end = model.cursor(6), model.cursor(11)
    model.insert(0, ">> ")
    assert model.cursor_position(before) == 9
    assert model.cursor_position(end) == 14
    model.delete(7, 4)
    assert model.cursor_position(before) == 7


def test_edits_outside_the_text_are_refused_with_a_typed_error() -> None:
    model = text("abc")
    for call in (
        lambda: model.insert(9, "x"),
        lambda: model.insert(-1, "x"),
        lambda: model.delete(2, 5),
        lambda: model.splice(2, 5, "x"),
        lambda: model.mark(2, 9, "bold"),
        lambda: model.mark(2, 2, "bold"),
        lambda: model.mark(0, 2, ""),
        lambda: model.mark(0, 2, "bold", 1.5),  # type: ignore[arg-type]
        lambda: model.insert(0, "\ud800"),
        lambda: model.cursor(9),
        lambda: model.cursor_position(b"nonsense"),
    ):
        with pytest.raises(UsageError):
            call()
    assert str(model) == "abc"


def test_editing_needs_a_writer() -> None:
    model = ConcurrentText(ITEM)
    for call in (lambda: model.insert(0, "x"), lambda: model.delete(0, 0), lambda: model.mark(0, 1, "bold")):
        with pytest.raises(UsageError, match="begin"):
            call()
    assert model.seal() is None


def test_seal_takes_what_is_new_and_nothing_twice() -> None:
    model = text("abc")
    assert model.has_open_edits
    first = model.seal()
    model.stamped(stamp(0), 0)
    assert not model.has_open_edits
    assert model.seal() is None
    model.insert(3, "d")
    second = model.seal()
    model.stamped(stamp(0, 2), 0)
    other = ConcurrentText(ITEM)
    other.apply(first, stamp(0), 0)
    other.apply(second, stamp(0, 2), 0)
    assert str(other) == "abcd"
    assert codec.encode_state(other) == codec.encode_state(model)


def test_open_edits_are_seen_but_not_in_the_state() -> None:
    model = text("abc")
    model.seal()
    sealed = codec.encode_state(model)
    model.insert(0, "x")
    assert str(model) == "xabc"
    assert codec.encode_state(model) == sealed
    assert model.has_open_edits


def test_remote_operations_come_in_between_open_edits() -> None:
    left, right = text("shared"), text(writer=1)
    right.apply(left.seal(), stamp(0), 0)
    left.stamped(stamp(0), 0)
    right.insert(6, " text")
    remote = right.seal()
    right.stamped(stamp(1, 2), 0)
    left.insert(0, "our ")
    left.apply(remote, stamp(1, 2), 0)
    left.insert(len(left), "!")
    operation = left.seal()
    left.stamped(stamp(0, 3), 0)
    right.apply(operation, stamp(0, 3), 0)
    assert str(left) == str(right) == "our shared text!"
    assert codec.encode_state(left) == codec.encode_state(right)


def test_damaged_states_are_named_corrupt() -> None:
    model = text("abc")
    model.seal()
    state = codec.encode_state(model)
    for data in (state[:-1], b"\xff" + state, state + b"\x0a\x01"):
        with pytest.raises(Corrupt):
            codec.decode_state(ITEM, data)
    with pytest.raises(Corrupt):
        ConcurrentText.from_native(ITEM, b"loro?")


# Undo


def test_undo_keeps_the_work_of_others() -> None:
    mine, other = text("hello brave world"), text(writer=1)
    other.apply(mine.seal(), stamp(0), 0)
    mine.delete(6, 6)
    mine.insert(0, ">> ")
    mine.mark(3, 8, "bold")
    step = mine.seal()
    other.delete(8, 2)
    other.append("!")
    mine.apply(other.seal(), stamp(1), 0)
    mine.undo_operation(step)
    assert str(mine) == "hello bre world!"
    assert mine.to_delta() == [TextRun("hello bre world!", {})]
    undo = mine.seal()
    mine.undo_operation(undo)
    assert str(mine) == ">> hello world!"
    assert mine.to_delta()[1] == TextRun("hello", {"bold": True})


@given(STEPS, st.integers(0, 200))
def test_undo_right_after_a_seal_restores_the_text_and_redo_brings_it_back(steps: list[Step], place: int) -> None:
    story = tell(KIND, steps)
    model = story.replicas[0].model
    before = model.to_delta()
    edit(model, place, place, place)
    edit(model, (place * 7) % 256, (place * 5) % 256, place)
    after = model.to_delta()
    step = model.seal()
    if step is None:
        return
    model.undo_operation(step)
    assert model.to_delta() == before
    undo = model.seal()
    if undo is not None:
        model.undo_operation(undo)
    assert model.to_delta() == after


@given(STEPS, st.integers(0, 1 << 16))
def test_undo_of_any_operation_leaves_what_others_inserted(steps: list[Step], choice: int) -> None:
    """Each writer types letters of its own; the undo of one operation takes only that operation's letters."""

    def type_own(model: ConcurrentText, what: int, where: int, how: int) -> None:
        letter = chr(ord("a") + letters[id(model)])
        if what < 200 or len(model) == 0:
            model.insert(where * (len(model) + 1) // 256, letter * (1 + how % 3))
        else:
            model.delete(where * len(model) // 256, 1)

    letters: dict[int, int] = {}

    class Letters(ConcurrentText):
        def begin(self, feed: object, generation: int = 0) -> None:
            letters[id(self)] = FEEDS.index(feed) if feed in FEEDS else 0  # type: ignore[arg-type]
            super().begin(feed, generation)  # type: ignore[arg-type]

    story = tell(Kind(Letters, codec, type_own), steps)
    finish(story)
    if not story.all():
        return
    operation = story.all()[choice % len(story.all())]
    model = story.replicas[operation.writer].model
    before = str(model)
    model.undo_operation(story.decode(operation)[0])
    after = str(model)
    sealed = model.seal()
    reader = story.replicas[(operation.writer + 1) % 3].model
    if sealed is not None:
        model.stamped(story.stamp_after(operation.writer), 0)
        reader.apply(sealed, story.stamp_after(operation.writer), 0)
    assert str(reader) == after
    assert story.state(reader) == story.state(model)
    inserted = sum(
        len(run.text) for change in story.decode(operation)[0].update for run in change.runs if hasattr(run, "text")
    )
    own = chr(ord("a") + operation.writer)
    assert before.count(own) - inserted <= after.count(own)
    for letter in "abc":
        if letter != own:
            assert after.count(letter) >= before.count(letter)
