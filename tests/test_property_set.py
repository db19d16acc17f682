"""PropertySet: the laws of models against a slow oracle, undo, and what a peer must refuse."""

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

import echostore
from echostore.kernel.ids import FeedId, Stamp, item_id
from echostore.kernel.limits import DEPTH_MAX, KEY_CHARACTERS_MAX, PATH_STEPS_MAX, SEQ_MAX
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.property_set import (
    ADDED,
    DELETED,
    INCREMENT,
    REMOVED,
    SET,
    Add,
    Change,
    Entry,
    EntryKey,
    Increment,
    Layer,
    Operation,
    PropertySet,
    Remove,
    Restore,
    Set,
    undo_of,
)
from echostore.kernel.reasons import Reason
from echostore.kernel.values import Value
from echostore.wire.generated import property_set_pb2 as pb
from echostore.wire.models import property_set as codec
from echostore.wire.values import MalformedValue, encode_value, value_bytes
from reference.property_set import Written, value_of

FEEDS = [FeedId(bytes([65 + number]) * 8) for number in range(4)]
A, B, C, D = FEEDS
ITEM = item_id(A, 7)

PATHS = [("t",), ("m",), ("m", "x"), ("m", "x", "y"), ("m", "é"), ("s",), ("s", "in"), ("n",), ("n", "m")]
VALUES: list[Value] = [0, 1, -5, 2.5, "", "text", None, True, b"\0", [1, [2]], {}, {"x": 1}, {"x": {"y": 2}, "é": 3}]
ELEMENTS: list[Value] = ["red", "blue", 1, 1.0]
DELTAS: list[int | float] = [1, -2, 10, 0.5, -0.5, 2.25]


def over_the_wire(operation: Operation, stamp: Stamp) -> Operation:
    """What another peer makes of an operation's bytes; our own bytes are canonical."""
    data = codec.encode_operation(operation).SerializeToString(deterministic=True)
    decoded = codec.decode_operation(pb.PropertySetOperation.FromString(data), stamp)
    assert codec.encode_operation(decoded).SerializeToString(deterministic=True) == data
    return decoded


def reload(model: PropertySet) -> PropertySet:
    data = codec.encode_state(model)
    loaded = codec.decode_state(model.item, data)
    assert loaded.layers == model.layers
    assert codec.encode_state(loaded) == data
    return loaded


def exact(value: Value) -> bytes:
    """Tells 1 from 1.0 and True, which Python's equality does not."""
    return value_bytes(value)


# stories


@dataclass
class Told:
    """One operation of a story: what its writer meant, what it sent, and what it had seen."""

    written: Written
    operation: Operation
    past: frozenset[int]


@dataclass
class Writer:
    """A feed's device: applies what it hears in the order it hears it."""

    feed: FeedId
    model: PropertySet = field(default_factory=lambda: PropertySet(ITEM))
    heard: list[int] = field(default_factory=list)
    depth: int = 0
    length: int = 0
    undo_stack: list[tuple[Stamp, Layer, Layer]] = field(default_factory=list)
    redo_stack: list[tuple[Stamp, Layer, Layer]] = field(default_factory=list)


class Story:
    """Writers that change one item, hear of each other now and then, and change their minds."""

    def __init__(self, feeds: int = 3) -> None:
        self.writers = [Writer(feed) for feed in FEEDS[:feeds]]
        self.told: list[Told] = []

    def hear(self, reader: Writer, of: Writer, count: int) -> None:
        """Take in some of what another one has heard, in its order."""
        known = set(reader.heard)
        for number in [number for number in of.heard if number not in known][:count]:
            told = self.told[number]
            stamp = told.written.stamp
            reader.model.apply(over_the_wire(told.operation, stamp), stamp, 0)
            reader.heard.append(number)
            reader.depth = max(reader.depth, stamp.depth)

    def write(self, writer: Writer, *changes: Change, more: tuple[Change, ...] = ()) -> None:
        """One message of one operation, or of two."""
        stamp = Stamp(writer.depth + 1, writer.feed, writer.length, 0)
        before = dict(writer.model.layers.get(writer.feed, {}))
        self._tell(writer, Written(stamp, changes), changes)
        if not more:
            writer.undo_stack.append((stamp, before, dict(writer.model.layers.get(writer.feed, {}))))
        else:
            writer.undo_stack.clear()  # only single operations are undone here
            second = stamp._replace(position=1)
            self._tell(writer, Written(second, more), more)
        writer.redo_stack.clear()
        writer.depth, writer.length = stamp.depth, writer.length + 1

    def take_back(self, writer: Writer, *, redo: bool) -> None:
        stack, other = (writer.redo_stack, writer.undo_stack) if redo else (writer.undo_stack, writer.redo_stack)
        if not stack:
            return
        target, before, after = stack.pop()
        operation = undo_of(before, after)
        if not operation:  # it changed nothing, so there is no message to say that it is undone; none before it is
            stack.clear()
            return
        stamp = Stamp(writer.depth + 1, writer.feed, writer.length, 0)
        assert writer.model.layers.get(writer.feed, {}) == after
        self._tell(writer, Written(stamp, undoes=target), operation)
        assert writer.model.layers.get(writer.feed, {}) == before
        writer.depth, writer.length = stamp.depth, writer.length + 1
        other.append((stamp, after, before))

    def _tell(self, writer: Writer, written: Written, operation: Operation) -> None:
        self.told.append(Told(written, operation, frozenset(writer.heard)))
        writer.heard.append(len(self.told) - 1)
        writer.model.apply(operation, written.stamp, 0)  # a writer folds its own operation as it made it

    def arrival(self, chance: random.Random, keep: set[int] | None = None) -> list[int]:
        """A random order in which causes come before effects and each feed keeps its own."""
        left = set(range(len(self.told))) if keep is None else set(keep)
        order: list[int] = []
        while left:
            feeds: dict[FeedId, int] = {}
            for number in sorted(left):
                feeds.setdefault(self.told[number].written.stamp.feed, number)
            free = [number for number in feeds.values() if not self.told[number].past & left]
            order.append(chance.choice(free))
            left.discard(order[-1])
        return order

    def fold(self, numbers: list[int], model: PropertySet | None = None) -> PropertySet:
        model = model or PropertySet(ITEM)
        for number in numbers:
            told = self.told[number]
            model.apply(over_the_wire(told.operation, told.written.stamp), told.written.stamp, 0)
        return model

    def expected(self, numbers: Any) -> bytes:
        return exact(value_of([self.told[number].written for number in numbers]))


def random_story(seed: int, *, feeds: int = 3, steps: int = 50, conflicts: bool = True) -> Story:
    """Steps at random; with `conflicts`, places may be a value, a map, a set and a number by turns."""
    chance = random.Random(seed)
    story = Story(feeds)
    for _ in range(steps):
        writer = chance.choice(story.writers)
        action = chance.random()
        if action < 0.3:
            story.hear(writer, chance.choice(story.writers), chance.randrange(1, 12))
        elif action < 0.4:
            story.take_back(writer, redo=False)
        elif action < 0.45:
            story.take_back(writer, redo=True)
        elif action < 0.5:
            sets = tuple(_set(chance) for _ in range(chance.randrange(2, 4)))
            story.write(writer, *sets, more=(_change(chance, writer, conflicts),) if chance.random() < 0.5 else ())
        else:
            story.write(writer, _change(chance, writer, conflicts))
    return story


def _set(chance: random.Random) -> Set:
    return Set(chance.choice(PATHS), chance.choice([DELETED, *VALUES]))


def _change(chance: random.Random, writer: Writer, conflicts: bool) -> Change:
    kind = chance.randrange(6)
    if kind < 2:
        return _set(chance)
    if kind < 4:
        path = chance.choice(PATHS) if conflicts and chance.random() < 0.3 else ("s",)
        element = chance.choice(ELEMENTS)
        key = value_bytes(element)
        if kind == 2:
            return Add(path, element, key)
        return Remove(path, element, key, writer.model.additions(path, key))
    path = chance.choice(PATHS) if conflicts and chance.random() < 0.3 else chance.choice([("n",), ("n", "m")])
    return Increment(path, chance.choice(DELTAS), writer.model.standing_write(path))


# the laws

SEEDS = st.integers(0, 2**32)


@given(SEEDS)
def test_the_state_depends_on_the_set_of_operations_and_the_value_is_the_oracles(seed: int) -> None:
    story = random_story(seed)
    chance = random.Random(seed + 1)
    everything = list(range(len(story.told)))
    models = [story.fold(story.arrival(chance)) for _ in range(3)]
    states = {codec.encode_state(model) for model in models}
    assert len(states) == 1
    assert exact(models[0].value()) == story.expected(everything)
    assert exact(models[0].value()) == exact(models[1].value())


@settings(max_examples=100)
@given(SEEDS, st.integers(2, 4))
def test_every_writer_sees_what_the_oracle_makes_of_what_it_heard(seed: int, feeds: int) -> None:
    story = random_story(seed, feeds=feeds)
    for writer in story.writers:
        assert exact(writer.model.value()) == story.expected(writer.heard)
        assert codec.encode_state(writer.model) == codec.encode_state(story.fold(sorted(writer.heard)))


@settings(max_examples=100)
@given(SEEDS)
def test_a_restored_snapshot_goes_on_as_the_state_it_was_made_from(seed: int) -> None:
    story = random_story(seed)
    chance = random.Random(seed + 1)
    order = story.arrival(chance)
    at = chance.randrange(len(order) + 1)
    live = story.fold(order[:at])
    live.value()
    loaded = reload(live)
    assert exact(loaded.value()) == exact(live.value())
    for number in order[at:]:
        story.fold([number], live)
        story.fold([number], loaded)
        assert exact(loaded.value()) == exact(live.value())
    assert codec.encode_state(loaded) == codec.encode_state(live)


@settings(max_examples=100)
@given(SEEDS)
def test_a_value_that_is_kept_up_to_date_equals_a_fresh_one(seed: int) -> None:
    story = random_story(seed)
    chance = random.Random(seed + 1)
    kept = PropertySet(ITEM)
    for number in story.arrival(chance):
        story.fold([number], kept)
        if chance.random() < 0.7:
            assert exact(kept.value()) == exact(PropertySet(ITEM, kept.layers).value())


@settings(max_examples=100)
@given(SEEDS)
def test_excluding_the_end_of_a_feed_equals_folding_without_it(seed: int) -> None:
    """What others built on the excluded operations stays, and so do their own."""
    story = random_story(seed)
    chance = random.Random(seed + 1)
    removed = chance.choice(FEEDS[:3])
    cut = chance.randrange(8)
    keep = {
        number
        for number, told in enumerate(story.told)
        if told.written.stamp.feed != removed or told.written.stamp.seq < cut
    }
    models = [story.fold(story.arrival(chance, keep)) for _ in range(2)]
    assert codec.encode_state(models[0]) == codec.encode_state(models[1])
    assert exact(models[0].value()) == story.expected(keep)


@settings(max_examples=60)
@given(SEEDS)
def test_operations_may_be_read_between_arrivals_in_any_grouping(seed: int) -> None:
    story = random_story(seed, conflicts=False)
    chance = random.Random(seed + 1)
    order = story.arrival(chance)
    one_by_one, in_bulk = PropertySet(ITEM), story.fold(order)
    for number in order:
        story.fold([number], one_by_one)
        one_by_one = reload(one_by_one) if chance.random() < 0.1 else one_by_one
        one_by_one.value()
    assert codec.encode_state(one_by_one) == codec.encode_state(in_bulk)
    assert exact(one_by_one.value()) == exact(in_bulk.value())


# one behaviour each


def folded(*written: tuple[Stamp, Change | tuple[Change | Restore, ...]]) -> PropertySet:
    model = PropertySet(ITEM)
    for stamp, change in written:
        operation = change if isinstance(change, tuple) else (change,)
        model.apply(over_the_wire(operation, stamp), stamp, 0)
    return model


def at(depth: int, feed: FeedId = A, seq: int | None = None, position: int = 0) -> Stamp:
    return Stamp(depth, feed, depth if seq is None else seq, position)


def add(element: Value, path: tuple[str, ...] = ("s",)) -> Add:
    return Add(path, element, value_bytes(element))


def remove(element: Value, *observed: Stamp, path: tuple[str, ...] = ("s",)) -> Remove:
    return Remove(path, element, value_bytes(element), observed)


def test_the_last_writer_wins_by_depth_then_feed() -> None:
    assert folded((at(2, A), Set(("t",), "a")), (at(1, B), Set(("t",), "b"))).value() == {"t": "a"}
    assert folded((at(2, B), Set(("t",), "b")), (at(2, A), Set(("t",), "a"))).value() == {"t": "b"}


def test_a_late_write_below_loses_against_a_higher_stamped_one_above() -> None:
    model = folded((at(5, A), Set(("m",), {"x": 1})), (at(3, B), Set(("m", "z"), 2)), (at(4, B), Set(("m", "x"), 3)))
    assert model.value() == {"m": {"x": 1}}


def test_a_write_below_changes_one_key_of_a_map_that_was_written_whole() -> None:
    model = folded((at(1, A), Set(("m",), {"x": {"y": 1}, "z": 2})), (at(2, B), Set(("m", "x", "y"), 3)))
    assert model.value() == {"m": {"x": {"y": 3}, "z": 2}}
    assert model.get(("m", "x", "y")) == 3
    assert model.get(("m", "q"), "nothing") == "nothing"


def test_a_write_above_forgets_the_own_entries_below() -> None:
    model = folded((at(1), Set(("m", "x"), 1)), (at(2), Set(("m",), 5)), (at(3), Set(("m",), DELETED)))
    assert list(model.layers[A]) == [EntryKey(("m",), SET, b"", None)]
    assert model.value() == {}


def test_the_last_change_of_an_operation_wins_though_they_share_a_stamp() -> None:
    assert folded((at(1), (Set(("m", "x"), 1), Set(("m",), 2)))).value() == {"m": 2}
    assert folded((at(1), (Set(("m",), 2), Set(("m", "x"), 1)))).value() == {"m": {"x": 1}}
    assert folded((at(1), (Set(("m",), 2), Set(("m",), 3)))).value() == {"m": 3}
    assert folded((at(1), (add("red"), Set(("s",), 3)))).value() == {"s": 3}


@pytest.mark.parametrize("deleter", [A, B])
def test_what_was_overwritten_leaves_no_trace_whoever_wrote_it(deleter: FeedId) -> None:
    model = folded((at(1, C), Set(("m",), 5)), (at(2), Set(("m", "x"), 1)), (at(3, deleter), Set(("m", "x"), DELETED)))
    assert model.value() == {"m": 5}
    model = folded((at(2), Set(("m", "x", "y"), 1)), (at(3, deleter), Set(("m", "x"), DELETED)))
    assert model.value() == {}


def test_an_addition_survives_a_removal_that_had_not_seen_it() -> None:
    first, second = at(1, A), at(2, A, seq=2)
    model = folded((first, add("red")), (second, add("red")), (at(5, B), remove("red", first)))
    assert model.value() == {"s": ["red"]}
    model = folded((first, add("red")), (second, add("red")), (at(5, B), remove("red", second)))
    assert model.value() == {}


def test_a_removal_takes_each_observed_addition_and_no_other_element() -> None:
    model = folded((at(1, A), add("red")), (at(1, B), add("red")), (at(1, C), add("red")), (at(1, D), add("blue")))
    seen = model.additions(("s",), value_bytes("red"))
    assert seen == (at(1, A), at(1, B), at(1, C))
    model.apply((remove("red", *seen[:2]),), at(2, D), 0)
    assert model.value() == {"s": ["blue", "red"]} or model.value() == {"s": ["red", "blue"]}
    model.apply((remove("red", *seen),), at(3, D), 0)
    assert model.value() == {"s": ["blue"]}


def test_a_removal_that_arrives_after_a_later_one_does_not_weaken_it() -> None:
    first, second = at(1, A), at(2, A, seq=2)
    model = folded((first, add("red")), (second, add("red")), (at(5, B), remove("red", second)))
    model.apply((remove("red", first),), at(6, B), 0)
    assert model.value() == {}


def test_elements_are_told_apart_by_their_canonical_bytes() -> None:
    model = folded((at(1), (add(1), add(1.0), add(True), add("1"))))
    assert sorted(map(repr, model.value()["s"])) == ["'1'", "1", "1.0", "True"]


def test_a_later_one_decides_what_a_place_is() -> None:
    assert folded((at(1), Set(("s", "in"), 1)), (at(2, B), add("red"))).value() == {"s": ["red"]}
    assert folded((at(1), add("red")), (at(2, B), Set(("s", "in"), 1))).value() == {"s": {"in": 1}}
    both = folded((at(1), Set(("s", "in"), 1)), (at(2, B), add("red")), (at(3, C), Set(("s", "out"), 2)))
    assert both.value() == {"s": {"out": 2}}


def test_concurrent_increments_add_up() -> None:
    base = at(1, A)
    model = folded(
        (base, Set(("n",), 10)),
        (at(2, A), Increment(("n",), 1, base)),
        (at(2, B), Increment(("n",), 2, base)),
        (at(3, B), Increment(("n",), -5, base)),
        (at(2, C), Increment(("n",), 0.5, base)),
    )
    assert model.value() == {"n": 8.5}
    assert len(model.layers[B]) == 1


def test_an_increment_without_a_base_counts_from_nothing() -> None:
    model = folded((at(1, A), Increment(("n",), 2, None)), (at(1, B), Increment(("n",), 3, None)))
    assert model.value() == {"n": 5}
    assert model.standing_write(("n",)) is None


def test_an_increment_falls_with_the_write_it_was_based_on() -> None:
    base = at(1, A)
    model = folded((base, Set(("n",), 10)), (at(3, B), Increment(("n",), 1, base)), (at(2, C), Set(("n",), 0)))
    assert model.value() == {"n": 0}
    assert model.standing_write(("n",)) == at(2, C)


@pytest.mark.parametrize("deleter", [A, B])
def test_a_deleted_counter_is_gone_and_starts_again_from_nothing(deleter: FeedId) -> None:
    model = folded((at(1, A), Increment(("n",), 5, None)), (at(2, deleter), Set(("n",), DELETED)))
    assert model.value() == {}
    assert model.standing_write(("n",)) == at(2, deleter)
    model.apply((Increment(("n",), 1, at(2, deleter)),), at(3, C), 0)
    assert model.value() == {"n": 1}


def test_the_base_of_a_number_inside_a_map_is_the_write_of_the_map() -> None:
    model = folded((at(1, A), Set(("m",), {"x": 1})))
    assert model.standing_write(("m", "x")) == model.standing_write(("m", "new")) == at(1, A)
    model.apply((Increment(("m", "x"), 1, at(1, A)), Increment(("m", "new"), 7, at(1, A))), at(2, B), 0)
    assert model.value() == {"m": {"x": 2, "new": 7}}
    model.apply((Set(("m",), {}),), at(3, C), 0)
    assert model.value() == {"m": {}}


@pytest.mark.parametrize("other", ["text", True, None, [1], {"k": 1}])
def test_an_increment_leaves_what_is_no_number_alone(other: Value) -> None:
    model = folded((at(1, A), Set(("n",), other)), (at(2, B), Increment(("n",), 1, at(1, A))))
    assert model.value() == {"n": other}


def test_an_increment_never_replaces_what_stands_in_its_way() -> None:
    model = folded((at(3, A), add("red", ("n",))), (at(2, B), Increment(("n", "m"), 1, None)))
    assert model.value() == {"n": ["red"]}
    model = folded((at(1, A), Set(("n",), "text")), (at(2, B), Increment(("n", "m"), 1, at(1, A))))
    assert model.value() == {"n": "text"}


# numbers at their limits


def test_integers_wrap_at_64_bits_and_the_state_can_still_be_written() -> None:
    top = (1 << 63) - 1
    model = folded((at(1), Increment(("n",), top, None)), (at(2), Increment(("n",), 1, None)))
    assert model.value() == {"n": -(1 << 63)}
    assert reload(model).value() == model.value()
    across = folded((at(1, A), Increment(("n",), top, None)), (at(2, B), Increment(("n",), 1, None)))
    assert across.value() == {"n": -(1 << 63)}


def test_a_float_sum_beyond_all_bounds_stays_a_number_that_can_be_stored() -> None:
    model = folded((at(1), Increment(("n",), 1e308, None)), (at(2), Increment(("n",), 1e308, None)))
    assert math.isfinite(model.layers[A][EntryKey(("n",), INCREMENT, b"", None)].value)
    assert reload(model).value() == model.value()


def test_a_sum_of_floats_does_not_depend_on_who_came_first() -> None:
    numbers = [1e308, 1e308, -1e308, -1e308, 0.1]
    feeds = [FeedId(bytes([number]) * 8) for number in range(5)]
    values = set()
    for seed in range(20):
        order = list(zip(feeds, numbers, strict=True))
        random.Random(seed).shuffle(order)
        model = folded(*[(Stamp(1, feed, 1, 0), Increment(("n",), number, None)) for feed, number in order])
        values.add(repr(model.value()))
    assert len(values) == 1


@pytest.mark.parametrize("deltas", [[0.0], [-0.0], [1.5, -1.5], [0.5, -0.5, -0.0], [0]])
def test_a_sum_of_nothing_is_the_same_before_and_after_the_wire(deltas: list[float]) -> None:
    own = PropertySet(ITEM)
    base = at(1, B)
    own.apply((Set(("n",), 1),), base, 0)
    for number, delta in enumerate(deltas):
        own.apply((Increment(("n",), delta, base),), at(2 + number), 0)
    other = folded(
        (base, Set(("n",), 1)),
        *[(at(2 + number), Increment(("n",), delta, base)) for number, delta in enumerate(deltas)],
    )
    assert codec.encode_state(own) == codec.encode_state(other)
    assert exact(own.value()) == exact(other.value()) == exact(reload(own).value())


def test_infinite_and_undefined_properties_survive() -> None:
    model = folded((at(1), (Set(("i",), math.inf), Set(("u",), math.nan), Set(("z",), -0.0))))
    loaded = codec.decode_state(ITEM, codec.encode_state(model))
    assert exact(loaded.value()) == exact(model.value())
    assert math.copysign(1, loaded.value()["z"]) == -1


# undo


def undo(model: PropertySet, before: Layer, after: Layer, stamp: Stamp) -> None:
    model.apply(over_the_wire(undo_of(before, after), stamp), stamp, 0)


def test_undo_brings_back_the_best_remaining_write_of_anybody() -> None:
    model = folded((at(1, A), Set(("t",), "mine")), (at(2, B), Set(("t",), "theirs")))
    before = dict(model.layers[A])
    model.apply((Set(("t",), "mine again"),), at(3, A), 0)
    assert model.value() == {"t": "mine again"}
    undo(model, before, dict(model.layers[A]), at(4, A))
    assert model.value() == {"t": "theirs"}
    assert model.layers[A] == before


def test_undo_of_the_only_write_leaves_nothing_behind() -> None:
    model = folded((at(1, A), Set(("t",), "mine")))
    undo(model, {}, dict(model.layers[A]), at(2, A))
    assert model.layers == {}
    assert codec.encode_state(model) == b""
    assert model.value() == {}


def test_undo_of_a_write_above_brings_the_entries_below_back() -> None:
    seen = at(1, B)
    model = folded(
        (seen, add("red", ("m", "set"))),
        (at(2), Set(("m", "x"), 1)),
        (at(3), remove("red", seen, path=("m", "set"))),
        (at(4), Increment(("m", "n"), 3, None)),
        (at(5), add("own", ("m", "set"))),
    )
    before, shown = dict(model.layers[A]), exact(model.value())
    model.apply((Set(("m",), DELETED),), at(6), 0)
    assert model.value() == {}
    undo(model, before, dict(model.layers[A]), at(7))
    assert exact(model.value()) == shown
    assert model.value() == {"m": {"n": 3, "set": ["own"], "x": 1}}


def test_undo_keeps_what_others_wrote_meanwhile() -> None:
    model = folded((at(1, A), Set(("t",), "mine")), (at(5, B), Set(("t",), "later")))
    undo(model, {}, dict(model.layers[A]), at(6, A))
    assert model.value() == {"t": "later"}


# what the codec refuses


def refused(message: pb.PropertySetOperation, stamp: Stamp) -> OperationRefused:
    with pytest.raises(OperationRefused) as caught:
        codec.decode_operation(message, stamp)
    assert caught.value.reason is Reason.MALFORMED
    return caught.value


TITLE = EntryKey(("t",), SET, b"", None)


def restoring(entry: Entry, key: EntryKey = TITLE) -> pb.PropertySetOperation:
    return codec.encode_operation((Restore(key, entry),))


NOW = Stamp(20, A, 10, 3)


@pytest.mark.parametrize(
    "forged",
    [
        Stamp(5, A, 10, 0),  # of the message itself
        Stamp(5, A, 11, 0),  # of the future
        Stamp(20, A, 9, 0),  # as deep as the message
        Stamp(19, A, 8, 0),  # the block after it must have had that depth
        Stamp(DEPTH_MAX, A, 3, 0),
        Stamp(DEPTH_MAX + 1, A, 3, 0),
        Stamp(5, A, SEQ_MAX + 1, 0),
        Stamp(5, A, 3, 1 << 16),
    ],
)
def test_a_restored_entry_must_be_one_its_writer_can_have_written(forged: Stamp) -> None:
    refused(restoring(Entry(forged, "forged")), NOW)


def test_a_restore_can_only_speak_of_the_writers_own_layer() -> None:
    """The wire form has no room for another feed: a named one is not looked at."""
    message = restoring(Entry(Stamp(5, B, 3, 0), "forged"))
    message.restores[0].entry.stamp.feed = B
    (restore,) = codec.decode_operation(message, NOW)
    assert isinstance(restore, Restore)
    assert restore.entry is not None
    assert restore.entry.stamp == Stamp(5, A, 3, 0)


@pytest.mark.parametrize("seen", [Stamp(20, B, 1, 0), Stamp(DEPTH_MAX, B, 1, 0), Stamp(20, A, 10, 4)])
def test_nothing_is_built_on_operations_that_are_still_to_come(seen: Stamp) -> None:
    past = Stamp(5, A, 3, 0)
    refused(codec.encode_operation((remove("red", seen),)), NOW)
    refused(codec.encode_operation((remove("red", Stamp(1, C, 1, 0), seen),)), NOW)
    refused(codec.encode_operation((Increment(("n",), 1, seen),)), NOW)
    refused(restoring(Entry(past, 1), EntryKey(("n",), INCREMENT, b"", seen)), NOW)
    key = EntryKey(("s",), REMOVED, value_bytes("red"), seen.feed)
    refused(restoring(Entry(past, "red", seen), key), NOW)


def test_an_operation_may_build_on_its_own_message_and_on_its_past() -> None:
    for seen in (Stamp(20, A, 10, 3), Stamp(20, A, 10, 0), Stamp(19, B, 99, 0)):
        codec.decode_operation(codec.encode_operation((Increment(("n",), 1, seen), remove("red", seen))), NOW)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_an_increment_is_a_number(number: float) -> None:
    refused(codec.encode_operation((Increment(("n",), number, None),)), NOW)


@pytest.mark.parametrize(
    "path", [(), ("",), ("a", ""), ("x" * (KEY_CHARACTERS_MAX + 1),), ("a",) * (PATH_STEPS_MAX + 1)]
)
def test_paths_have_limits(path: tuple[str, ...]) -> None:
    refused(codec.encode_operation((Set(path, 1),)), NOW)
    assert codec.decode_operation(codec.encode_operation((Set(("é" * KEY_CHARACTERS_MAX,) * PATH_STEPS_MAX, 1),)), NOW)


def test_malformed_operations_are_refused_with_a_reason() -> None:
    value = encode_value(1)
    refused(pb.PropertySetOperation(), NOW)
    refused(pb.PropertySetOperation(changes=[pb.PropertyChange(path=["a"])]), NOW)
    refused(pb.PropertySetOperation(changes=[pb.PropertyChange(path=["a"], set={})]), NOW)
    unequal = pb.RemoveElement(element=value, feeds=[B], depths=[1], seqs=[1])
    refused(pb.PropertySetOperation(changes=[pb.PropertyChange(path=["a"], remove=unequal)]), NOW)
    short = pb.RemoveElement(element=value, feeds=[b"short"], depths=[1], seqs=[1], positions=[1])
    refused(pb.PropertySetOperation(changes=[pb.PropertyChange(path=["a"], remove=short)]), NOW)
    refused(pb.PropertySetOperation(restores=[pb.PropertyRestore()]), NOW)
    no_kind = pb.PropertyEntry(path=["a"], stamp=pb.PropertyStamp(depth=1, seq=1))
    refused(pb.PropertySetOperation(restores=[pb.PropertyRestore(entry=no_kind)]), NOW)


def test_restores_of_every_kind_of_entry_round_trip() -> None:
    past, seen = Stamp(5, A, 3, 1), Stamp(4, B, 9, 2)
    red = value_bytes("red")
    keys = [
        (EntryKey(("t",), SET, b"", None), Entry(past, {"x": 1})),
        (EntryKey(("t",), SET, b"", None), Entry(past, DELETED)),
        (EntryKey(("s",), ADDED, red, None), Entry(past, "red")),
        (EntryKey(("s",), REMOVED, red, B), Entry(past, "red", seen)),
        (EntryKey(("n",), INCREMENT, b"", None), Entry(past, -7)),
        (EntryKey(("n",), INCREMENT, b"", seen), Entry(past, 2.5)),
    ]
    for key, entry in keys:
        for operation in ((Restore(key, entry),), (Restore(key, None),)):
            assert over_the_wire(operation, NOW) == operation


def test_states_that_can_not_be_read_are_malformed() -> None:
    good = codec.encode_state(folded((at(1), Set(("t",), "x")), (at(2, B), add("red"))))
    assert codec.decode_state(ITEM, good).value() == {"s": ["red"], "t": "x"}
    for data in (b"\xff", good[:-1], pb.PropertySetState(layers=[pb.PropertyLayer(feed=b"short")]).SerializeToString()):
        with pytest.raises(MalformedValue):
            codec.decode_state(ITEM, data)


@settings(max_examples=300)
@given(SEEDS)
def test_a_damaged_operation_is_refused_or_folds_and_nothing_else(seed: int) -> None:
    """Bytes from others may be anything: the answer is an operation that the model takes, or a typed refusal."""
    chance = random.Random(seed)
    story = random_story(seed % 50, steps=12)
    if not story.told:
        return
    told = chance.choice(story.told)
    data = bytearray(codec.encode_operation(told.operation).SerializeToString())
    for _ in range(chance.randrange(1, 4)):
        at_byte = chance.randrange(len(data) + 1)
        action = chance.randrange(3)
        if action == 0:
            data[at_byte:at_byte] = chance.randbytes(chance.randrange(1, 4))
        elif action == 1:
            del data[at_byte : at_byte + chance.randrange(1, 4)]
        elif data:
            data[at_byte % len(data)] = chance.randrange(256)
    try:
        message = pb.PropertySetOperation.FromString(bytes(data))
    except DecodeError:
        return
    stamp = told.written.stamp
    try:
        operation = codec.decode_operation(message, stamp)
    except OperationRefused:
        return
    model = PropertySet(ITEM)
    model.apply(operation, stamp, 0)
    assert exact(model.value()) == exact(codec.decode_state(ITEM, codec.encode_state(model)).value())


# through a peer


def test_undo_passes_over_a_message_that_changed_nothing(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "laptop") as peer:
        item = peer.create_party("x").create("property-set")
        item["title"] = "Trip"
        item.remove("tags", "never added")
        assert item.party.undo()
        assert item.to_dict() == {}


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_peer_writes_no_increment_that_others_would_refuse(tmp_path: Path, number: float) -> None:
    with echostore.open(tmp_path / "laptop") as peer:
        item = peer.create_party("x").create("property-set", n=1)
        with pytest.raises(echostore.EchoError, match="increment takes a number"):
            item.increment("n", number)
        assert item.to_dict() == {"n": 1}
