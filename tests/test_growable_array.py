"""GrowableArray: editing, and the laws of models over random stories."""

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import Cid, PartyKey, Stamp
from echostore.kernel.models._elements import element_text, element_value
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.values import BlobRef, Reference, Value
from echostore.wire.models import growable_array as codec
from echostore.wire.values import value_bytes
from sequence_laws import check_convergence, check_exclusion, check_restore
from sequence_story import FEEDS, ITEM, STEPS, Kind, Step, finish, tell

VALUES: list[Value] = [
    0,
    1.0,
    1,
    True,
    None,
    "text",
    "",
    "é𝄞\x00",
    b"\x00\xff",
    -(1 << 63),
    math.inf,
    datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=UTC),
    [1, [2.0, {"k": b"z", "a": None}]],
    {"m": {"m": 1}},
    Reference(ITEM),
    Reference(ITEM, PartyKey(b"p" * 32)),
    BlobRef((Cid(b"c" * 36),), 5, "image/png", "x.png"),
]


def edit(model: GrowableArray, what: int, where: int, how: int) -> None:
    length = len(model)
    index = where * length // 256
    if what < 110 or length == 0:
        model.insert(where * (length + 1) // 256, VALUES[how % len(VALUES)])
    elif what < 160:
        model.delete(index, min(1 + how % 3, length - index))
    elif what < 205:
        model.set(index, VALUES[how % len(VALUES)])
    else:
        model.move(index, how * length // 256)


KIND = Kind(GrowableArray, codec, edit)


def array(*values: Value, writer: int = 0) -> GrowableArray:
    model = GrowableArray(ITEM)
    model.begin(FEEDS[writer], 0)
    for value in values:
        model.append(value)
    return model


def stamp(writer: int) -> Stamp:
    return Stamp(1, FEEDS[writer], 0, 0)


@given(STEPS, st.integers(0, 1 << 32))
def test_lists_converge_in_every_order_and_grouping(steps: list[Step], seed: int) -> None:
    check_convergence(KIND, steps, seed)


@given(STEPS, st.integers(0, 1 << 32))
def test_a_restored_list_continues_as_the_original(steps: list[Step], seed: int) -> None:
    check_restore(KIND, steps, seed)


@given(STEPS, st.integers(0, 1 << 32))
def test_what_builds_on_excluded_elements_is_refused_in_every_order(steps: list[Step], seed: int) -> None:
    check_exclusion(KIND, steps, seed)


@given(STEPS)
def test_one_writer_edits_it_like_a_python_list(steps: list[Step]) -> None:
    model, oracle = array(), []
    for what, where, how, value, end in steps:
        chosen = VALUES[value % len(VALUES)]
        index = where * len(oracle) // 256
        if what < 110 or not oracle:
            model.insert(index, chosen)
            oracle.insert(index, chosen)
        elif what < 150:
            model.delete(index)
            del oracle[index]
        elif what < 200:
            model.set(index, chosen)
            oracle[index] = chosen
        else:
            target = end * len(oracle) // 256
            model.move(index, target)
            oracle.insert(target, oracle.pop(index))
        if how < 50:
            model.seal()
        assert same(model.value(), oracle)
        assert len(model) == len(oracle)
    assert all(same(model.get(index), oracle[index]) for index in range(-len(oracle), len(oracle)))


def same(left: Value, right: Value) -> bool:
    """Equal in type as well: 1, 1.0 and True differ."""
    return value_bytes(left) == value_bytes(right)


@given(st.sampled_from(VALUES))
def test_elements_keep_their_type(value: Value) -> None:
    assert same(element_value(element_text(value)), value)
    model = array(value)
    other = GrowableArray(ITEM)
    other.apply(codec.decode_operation(codec.encode_operation(model.seal())), stamp(0), 0)
    assert same(other.get(0), value)
    assert same(codec.decode_state(ITEM, codec.encode_state(other)).value(), [value])


def test_not_a_number_is_kept() -> None:
    assert math.isnan(array(math.nan).get(0))


def test_a_move_and_a_set_of_one_element_both_take_effect() -> None:
    left, right = array("a", "b", "c"), array(writer=1)
    right.apply(left.seal(), stamp(0), 0)
    left.move(0, 2)
    right.set(0, "A")
    moved, changed = left.seal(), right.seal()
    left.apply(changed, stamp(1), 0)
    right.apply(moved, stamp(0), 0)
    assert left.value() == right.value() == ["b", "c", "A"]


def test_edits_outside_the_list_are_refused_with_a_typed_error() -> None:
    model = array(1, 2, 3)
    for call in (
        lambda: model.insert(9, 1),
        lambda: model.insert(-1, 1),
        lambda: model.delete(2, 5),
        lambda: model.delete(-1),
        lambda: model.set(3, 1),
        lambda: model.move(0, 3),
        lambda: model.move(7, 0),
        lambda: model.get(3),
        lambda: model.append(object()),
    ):
        with pytest.raises(UsageError):
            call()
    assert model.value() == [1, 2, 3]


def test_editing_needs_a_writer() -> None:
    with pytest.raises(UsageError, match="begin"):
        GrowableArray(ITEM).append(1)


# Undo


def test_undo_keeps_the_work_of_others() -> None:
    mine, other = array(1, 2.0, "x", None, True, "end"), array(writer=1)
    other.apply(mine.seal(), stamp(0), 0)
    mine.move(0, 3)
    mine.set(1, "X")
    mine.delete(4)
    mine.insert(2, "new")
    step = mine.seal()
    other.set(0, "one")
    other.append("other")
    mine.apply(other.seal(), stamp(1), 0)
    assert mine.value() == [2.0, "X", "new", None, "one", "end", "other"]
    mine.undo_operation(step)
    assert mine.value() == ["one", 2.0, "x", None, True, "end", "other"]
    mine.undo_operation(mine.seal())
    assert mine.value() == [2.0, "X", "new", None, "one", "end", "other"]


def test_undo_leaves_an_element_that_somebody_set_since() -> None:
    mine, other = array("a"), array(writer=1)
    step = mine.seal()
    other.apply(step, stamp(0), 0)
    other.set(0, "A")
    mine.apply(other.seal(), stamp(1), 0)
    mine.undo_operation(step)
    assert mine.value() == ["A"]


@given(STEPS, st.lists(st.tuples(*[st.integers(0, 255)] * 3), min_size=1, max_size=6))
def test_undo_right_after_a_seal_restores_the_list_and_redo_brings_it_back(
    steps: list[Step], edits: list[tuple[int, int, int]]
) -> None:
    story = tell(KIND, steps)
    model = story.replicas[0].model
    before = model.value()
    for what in edits:
        edit(model, *what)
    after = model.value()
    step = model.seal()
    if step is None:
        return
    model.undo_operation(step)
    assert same(model.value(), before)
    undo = model.seal()
    if undo is not None:
        model.undo_operation(undo)
    assert same(model.value(), after)


@given(STEPS, st.integers(0, 1 << 16))
def test_undo_of_any_operation_is_an_operation_like_any_other(steps: list[Step], choice: int) -> None:
    story = tell(KIND, steps)
    finish(story)
    operation = story.all()[choice % len(story.all())] if story.all() else None
    if operation is None:
        return
    model = story.replicas[operation.writer].model
    model.undo_operation(story.decode(operation)[0])
    sealed = model.seal()
    reader = story.replicas[(operation.writer + 1) % 3].model
    if sealed is not None:
        model.stamped(story.stamp_after(operation.writer), 0)
        reader.apply(sealed, story.stamp_after(operation.writer), 0)
    assert same(reader.value(), model.value())
    assert story.state(reader) == story.state(model)
