"""Undo and redo of any sequence of edits beside those of another: what is own goes, what is theirs stays.

One author edits, undoes and redoes as `echostore.peer.undo` does; another one edits the same text or list, sometimes
without having heard of the first. Every character and element says who made it, so that nothing has to be guessed.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echostore.kernel.ids import Stamp
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.stand_ins import Originals, StandIn
from echostore.kernel.models.text import ConcurrentText
from echostore.kernel.reasons import Reason
from echostore.wire.generated import growable_array_pb2, stand_ins_pb2, text_pb2
from echostore.wire.models import growable_array as array_codec
from echostore.wire.models import text as text_codec
from sequence_story import FEEDS, ITEM

CODECS: dict[type[Any], tuple[Any, Any]] = {
    ConcurrentText: (text_codec, text_pb2.TextOperation),
    GrowableArray: (array_codec, growable_array_pb2.GrowableArrayOperation),
}

EDITS = st.tuples(st.integers(0, 11), st.integers(0, 255), st.integers(0, 255))
SCRIPTS = st.lists(st.tuples(st.integers(0, 9), EDITS), min_size=1, max_size=14)


class Author:
    """A replica with the stacks that `peer.undo` reads off a feed; every operation goes through its wire form."""

    def __init__(self, kind: type[Any], number: int) -> None:
        self.kind = kind
        self.number = number
        self.model = kind(ITEM)
        self.model.begin(FEEDS[number])
        self.written: list[Any] = []
        self.heard = 0
        self.undo_stack: list[Any] = []
        self.redo_stack: list[Any] = []
        self.undos: list[Any] = []

    def seal(self) -> Any:
        sealed = self.model.seal()
        if sealed is None:
            return None
        codec, message = CODECS[self.kind]
        data = codec.encode_operation(sealed).SerializeToString()
        operation = codec.decode_operation(message.FromString(data))
        assert operation == sealed
        self.written.append(operation)
        return operation

    def step(self) -> None:
        operation = self.seal()
        if operation is not None:
            self.undo_stack.append(operation)
            self.redo_stack.clear()

    def undo(self) -> bool:
        return self._take_back(self.undo_stack, self.redo_stack)

    def redo(self) -> bool:
        return self._take_back(self.redo_stack, self.undo_stack)

    def _take_back(self, source: list[Any], target: list[Any]) -> bool:
        while source:
            operation = source.pop()  # one that changes nothing is passed over for good
            originals = Originals()
            for undo in self.undos:
                originals.add(undo.update[0].writer, undo.stand_ins)
            self.model.undo_operation(operation, originals)
            made = self.seal()
            if made is not None:
                target.append(made)
                self.undos.append(made)
                return True
        return False

    def hear(self, other: "Author") -> None:
        for operation in other.written[self.heard :]:
            self.model.apply(operation, Stamp(1, FEEDS[other.number], 0, 0), 0)
        self.heard = len(other.written)


def meet(one: Author, other: Author) -> None:
    one.hear(other)
    other.hear(one)
    assert shown(one.model) == shown(other.model)


def shown(model: Any) -> Any:
    return model.to_delta() if isinstance(model, ConcurrentText) else model.value()


def plain(model: Any) -> list[str]:
    return list(str(model)) if isinstance(model, ConcurrentText) else list(model.value())


class Stage:
    """Own author `me` and another one, who have a text or list in common, and what the other one did to it.

    A character is named by itself, an element by the part of its value before the `=` that a set adds.
    """

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.me, self.other = Author(kind, 0), Author(kind, 1)
        self.made: dict[Author, list[str]] = {self.me: [], self.other: []}
        self.sets = {self.me: 0, self.other: 0}
        self.deleted: set[str] = set()
        self.values: dict[str, str] = {}  # what the other one set
        for place in range(8):
            self.other.model.insert(place, self.new(self.other))
        self.other.seal()
        meet(self.me, self.other)

    def new(self, author: Author) -> str:
        """A character or an element that nobody has made before."""
        made = self.made[author]
        code = (0x1000 if author is self.me else 0x4000) + len(made)
        made.append(chr(code) if self.kind is ConcurrentText else f"{code:x}")
        return made[-1]

    def edit(self, author: Author, what: int, where: int, how: int, bounds: slice = slice(None)) -> None:
        """One edit inside the bounds: insert, delete, and mark or set and move."""
        model = author.model
        start, end, _ = bounds.indices(len(model))
        size = end - start
        if what < 5 or size == 0:
            for offset in range(1 + how % 3):
                model.insert(start + where % (size + 1) + offset, self.new(author))
            return
        index = start + where % size
        count = 1 + how % min(3, end - index)
        if what < 9:
            if author is self.other:
                self.deleted.update(named(value) for value in plain(model)[index : index + count])
            model.delete(index, count)
        elif isinstance(model, ConcurrentText):
            model.mark(index, index + count, "bold" if what < 11 else "tone", how % 3 if how % 4 else None)
        elif what == 9:
            self.sets[author] += 1
            value = f"{named(model.get(index))}={author.number}.{self.sets[author]}"
            if author is self.other:
                self.values[named(value)] = value
            model.set(index, value)
        else:
            if author is self.other:  # one that only an own move had saved: now the other one wants it as well
                self.deleted.discard(named(model.get(index)))
            model.move(index, start + how % size)


def named(value: str) -> str:
    return value.partition("=")[0]


KINDS = pytest.mark.parametrize("kind", [ConcurrentText, GrowableArray], ids=lambda kind: kind.name)


@KINDS
@given(script=SCRIPTS)
def test_every_state_is_passed_again_on_the_way_back_and_forth(kind: type[Any], script: list[Any]) -> None:
    stage = Stage(kind)
    me = stage.me
    states = [shown(me.model)]
    for more, edit in script:
        stage.edit(me, *edit)
        if more < 7:
            me.step()
            states.append(shown(me.model))
    me.step()
    states.append(shown(me.model))
    for _ in range(2):
        assert _walk(me, me.undo) == _without_repeats(states[::-1])
        assert _walk(me, me.redo) == _without_repeats(states)
    meet(me, stage.other)


def _walk(author: Author, step: Callable[[], bool]) -> list[Any]:
    found = [shown(author.model)]
    while step():
        found.append(shown(author.model))
    return _without_repeats(found)


def _without_repeats(states: list[Any]) -> list[Any]:
    return [state for index, state in enumerate(states) if index == 0 or state != states[index - 1]]


@KINDS
@given(script=SCRIPTS)
def test_beside_edits_elsewhere_undo_leaves_what_they_alone_would_have_made(kind: type[Any], script: list[Any]) -> None:
    """Own edits in the first half, the other's in the second."""
    stage, alone = Stage(kind), Stage(kind)
    me, other = stage.me, stage.other
    split = stage.made[other][4]
    for who, edit in script:
        if who < 5:
            stage.edit(me, *edit, bounds=slice(0, plain(me.model).index(split)))
            me.step()
        else:
            start = plain(other.model).index(split) + 1
            stage.edit(other, *edit, bounds=slice(start, None))
            other.seal()
            alone.edit(alone.other, *edit, bounds=slice(5, None))
        if who % 5 == 0:
            meet(me, other)
    meet(me, other)
    before = shown(me.model)
    while me.undo():
        pass
    assert shown(me.model) == shown(alone.other.model)
    while me.redo():
        pass
    assert shown(me.model) == before
    meet(me, other)


@KINDS
@given(script=SCRIPTS)
def test_beside_edits_of_the_same_place_undo_takes_what_is_own_and_leaves_what_is_not(
    kind: type[Any], script: list[Any]
) -> None:
    stage = Stage(kind)
    me, other = stage.me, stage.other
    for who, edit in script:
        if who < 5:
            stage.edit(me, *edit)
            me.step()
        elif who < 9:
            stage.edit(other, *edit)
            other.seal()
        else:
            meet(me, other)
            me.undo()
            meet(me, other)
        if who % 4 == 0:
            meet(me, other)
    meet(me, other)
    before = shown(me.model)
    undone = 0
    while me.undo():
        undone += 1
    meet(me, other)
    _check_what_is_left(stage)
    for _ in range(undone):
        assert me.redo()
    assert shown(me.model) == before
    meet(me, other)


def _check_what_is_left(stage: Stage) -> None:
    left = plain(stage.me.model)
    names = [named(value) for value in left]
    assert len(names) == len(set(names)), "nothing is there twice"
    assert stage.deleted.isdisjoint(names)
    for value, name in zip(left, names, strict=True):
        assert value == stage.values.get(name, name)
        assert name not in stage.made[stage.me] or name in stage.values, "what another one has set stays"
    assert {*stage.made[stage.other]} - stage.deleted <= set(names)


# Cases that chance seldom finds


def pair(*values: str) -> tuple[Author, Author]:
    """Two authors with a list of the other one's making."""
    me, other = Author(GrowableArray, 0), Author(GrowableArray, 1)
    for place, value in enumerate(values):
        other.model.insert(place, value)
    other.seal()
    meet(me, other)
    return me, other


def test_what_another_one_deleted_after_moving_it_away_from_a_deletion_stays_deleted() -> None:
    me, other = pair("a", "b", "c")
    me.model.delete(0)
    me.step()
    other.model.move(0, 2)
    other.seal()
    meet(me, other)
    assert me.model.value() == ["b", "c", "a"], "the move wins"
    other.model.delete(2)
    other.seal()
    meet(me, other)
    me.undo()
    assert me.model.value() == ["b", "c"]


def test_what_another_one_deleted_while_it_was_moved_goes_with_the_undo_of_the_move_and_comes_with_the_redo() -> None:
    me, other = pair("a", "b", "c")
    me.model.move(0, 2)
    me.step()
    other.model.delete(0)
    other.seal()
    meet(me, other)
    assert me.model.value() == ["b", "c", "a"]
    assert me.undo()
    assert me.model.value() == ["b", "c"]
    assert me.redo()
    assert me.model.value() == ["b", "c", "a"]
    meet(me, other)


def test_a_value_that_another_one_set_stays_even_if_it_is_the_same() -> None:
    me, other = pair("a", "b")
    me.model.set(0, "A")
    me.step()
    meet(me, other)
    other.model.set(0, "A")
    other.seal()
    meet(me, other)
    me.undo()
    assert me.model.value() == ["A", "b"]


def test_a_move_by_another_one_outlives_a_deletion_and_its_undo() -> None:
    me, other = pair("a", "b", "c", "d")
    me.model.move(0, 3)
    me.step()
    meet(me, other)
    other.model.move(3, 1)
    other.seal()
    meet(me, other)
    assert me.model.value() == ["b", "a", "c", "d"]
    me.model.delete(1)
    me.step()
    me.undo()
    assert me.model.value() == ["b", "a", "c", "d"]
    me.undo()
    assert me.model.value() == ["b", "a", "c", "d"], "the other one's move stands"


def test_a_mark_that_another_one_has_set_since_stays() -> None:
    stage = Stage(ConcurrentText)
    stage.me.model.mark(0, 4, "bold", 1)
    stage.me.step()
    meet(stage.me, stage.other)
    stage.other.model.mark(0, 2, "bold", 2)
    stage.other.seal()
    meet(stage.me, stage.other)
    assert stage.me.undo()
    assert [(len(run.text), run.marks) for run in shown(stage.me.model)] == [(2, {"bold": 2}), (6, {})]


def test_a_mark_that_another_one_has_set_alike_is_no_step_of_undo() -> None:
    stage = Stage(ConcurrentText)
    for author in (stage.other, stage.me):
        author.model.mark(0, 3, "bold", 2)
        author.step()
    meet(stage.me, stage.other)
    stage.me.model.mark(0, 1, "bold", None)
    stage.me.step()
    assert stage.me.undo()
    assert [(len(run.text), run.marks) for run in shown(stage.me.model)] == [(3, {"bold": 2}), (5, {})]
    assert not stage.me.undo(), "without the own mark it would look the same"
    assert stage.me.redo()
    assert [(len(run.text), run.marks) for run in shown(stage.me.model)] == [(1, {}), (2, {"bold": 2}), (5, {})]


def test_elements_do_not_follow_a_neighbour_that_another_one_has_moved() -> None:
    me, other = pair("a", "b", "c", "d")
    me.model.delete(1)
    me.step()
    meet(me, other)
    other.model.move(0, 2)
    other.seal()
    meet(me, other)
    assert me.model.value() == ["c", "d", "a"]
    me.undo()
    assert me.model.value() == ["b", "c", "d", "a"]


@example([(7, (10, 2, 1)), (0, (10, 0, 1)), (0, (10, 0, 1))])
@example([(0, (10, 1, 0)), (7, (10, 1, 0)), (0, (5, 1, 0))])
@example([(0, (5, 0, 0)), (7, (10, 0, 1)), (0, (10, 0, 1))])
@given(SCRIPTS.filter(lambda script: len(script) < 4))
def test_moves_to_where_an_element_is_leave_no_trace_and_do_no_harm(script: list[Any]) -> None:
    stage = Stage(GrowableArray)
    states = [shown(stage.me.model)]
    for more, edit in script:
        stage.edit(stage.me, *edit)
        if more < 7:
            stage.me.step()
            states.append(shown(stage.me.model))
    stage.me.step()
    states.append(shown(stage.me.model))
    for _ in range(2):
        assert _walk(stage.me, stage.me.undo) == _without_repeats(states[::-1])
        assert _walk(stage.me, stage.me.redo) == _without_repeats(states)


@KINDS
def test_an_operation_that_is_not_in_the_state_is_not_undone(kind: type[Any]) -> None:
    stage = Stage(kind)
    stage.edit(stage.me, 0, 0, 2)
    stage.me.step()
    stage.edit(stage.me, 5, 3, 2)
    stage.me.step()
    before = shown(stage.other.model)
    for operation in stage.me.undo_stack:
        stage.other.model.undo_operation(operation)
    assert shown(stage.other.model) == before
    assert stage.other.model.seal() is None


@KINDS
@pytest.mark.parametrize(
    "columns",
    [
        ([0], [1], [0], []),  # unequal
        ([0], [1], [0], [0]),  # empty
        ([0], [1], [0], [3]),  # beyond the update
        ([5], [1], [0], [1]),
        ([0, 0], [1, 1], [0, 1], [1, 1]),  # not ascending
        ([1, 0], [1, 1], [0, 1], [1, 1]),
        ([0], [1], [1 << 40], [1]),
        ([0], [1], [0], [1 << 40]),
    ],
)
def test_stand_ins_that_are_not_of_the_update_are_malformed(kind: type[Any], columns: tuple[Any, ...]) -> None:
    author = Author(kind, 0)
    for place in range(2):
        author.model.insert(place, "x")
    codec, message = CODECS[kind]
    data = codec.encode_operation(author.model.seal())
    fine = message.FromString(data.SerializeToString())
    fine.stand_ins.CopyFrom(stand_ins_pb2.StandIns(counters=[0, 1], writers=[7, 8], originals=[3, 3], lengths=[1, 1]))
    assert codec.decode_operation(fine).stand_ins == (StandIn(0, 7, 3, 1), StandIn(1, 8, 3, 1))
    names = ("counters", "writers", "originals", "lengths")
    data.stand_ins.CopyFrom(stand_ins_pb2.StandIns(**dict(zip(names, columns, strict=True))))
    with pytest.raises(OperationRefused) as caught:
        codec.decode_operation(data)
    assert caught.value.reason is Reason.MALFORMED
