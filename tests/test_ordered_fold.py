"""Models of an application's own: folded in canonical order, kept whole when unknown, and alone when they fail."""

import random
import sys
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.kernel.errors import Corrupt, ModelFailed, UsageError
from echostore.kernel.ids import FeedId, Stamp, item_id
from echostore.kernel.items.record import Genesis, ItemRecord
from echostore.kernel.limits import VALUE_BYTES_MAX
from echostore.kernel.models import step_budget
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.ordered_fold import CommutingFold, OrderedFold
from echostore.kernel.models.property_set import PropertySet
from echostore.kernel.models.step_budget import OutOfSteps, StepBudget
from echostore.kernel.reasons import Reason
from echostore.wire.items import decode_model, decode_record, encode_model, encode_record
from echostore.wire.values import value_bytes, value_from_bytes

FEEDS = [FeedId(bytes([65 + number]) * 8) for number in range(3)]
ITEM = item_id(FEEDS[0], 3)
SEEDS = st.integers(0, 2**32)


class Journal:
    """Order matters: keeps what it is told as a list."""

    name: ClassVar[str] = "journal"
    version: ClassVar[int] = 1
    applied: ClassVar[int] = 0

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def apply(self, operation: Any, stamp: Stamp) -> None:
        type(self).applied += 1
        if operation == "refuse":
            raise OperationRefused(Reason.MALFORMED, "not today")
        if operation == "fail":
            raise ZeroDivisionError("seven")
        self.lines.append([operation, stamp.seq])

    def value(self) -> Any:
        if self.lines and self.lines[-1][0] == "unreadable":
            raise KeyError("value")
        return list(self.lines)


class Tally:
    """Order does not matter: counts."""

    name: ClassVar[str] = "tally"
    version: ClassVar[int] = 1
    commutes: ClassVar[bool] = True

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def apply(self, operation: Any, stamp: Stamp) -> None:
        if operation is None:
            raise OperationRefused(Reason.MALFORMED)
        self.counts[str(operation)] = self.counts.get(str(operation), 0) + 1 // (operation != "fail")

    def value(self) -> Any:
        return dict(self.counts)

    def snapshot(self) -> Any:
        return dict(self.counts)

    def restore(self, state: Any) -> None:
        self.counts = dict(state)


def factory(*models: Any) -> ModelFactory:
    made = ModelFactory(value_from_bytes)
    for model in models:
        made.register(model)
    return made


Told = tuple[bytes, Stamp, int]


def story(chance: random.Random, count: int, *, words: tuple[Any, ...] = ("a", "b", 3, "refuse")) -> list[Told]:
    """Operations by several feeds in canonical order, with bytes that are no value among them."""
    told = []
    for number in range(count):
        stamp = Stamp(1 + number // 2, FEEDS[number % 3], number // 3, chance.randrange(3))
        operation = b"\xff\xff" if chance.random() < 0.1 else value_bytes(chance.choice(words))
        told.append((operation, stamp, chance.randrange(-5, 2**40)))
    return sorted(told, key=lambda one: one[1])


def fold(model: Any, told: list[Told]) -> Any:
    for operation, stamp, time_ms in told:
        model.apply(operation, stamp, time_ms)
    return model


def expected(told: list[Told]) -> list[Any]:
    lines = []
    for operation, stamp, _ in sorted(told, key=lambda one: one[1]):
        word = None if operation == b"\xff\xff" else value_from_bytes(operation)
        if word not in (None, "refuse"):
            lines.append([word, stamp.seq])
    return lines


# the laws


@given(SEEDS, st.integers(0, 30))
def test_any_arrival_order_is_folded_in_canonical_order(seed: int, count: int) -> None:
    chance = random.Random(seed)
    told = story(chance, count)
    arrival = list(told)
    chance.shuffle(arrival)
    model = factory(Journal).create("journal", 1, ITEM)
    for number, (operation, stamp, time_ms) in enumerate(arrival):
        model.apply(operation, stamp, time_ms)
        if chance.random() < 0.5:
            assert model.value() == expected(arrival[: number + 1])
    assert model.value() == expected(told)
    assert encode_model(model) == encode_model(fold(factory(Journal).create("journal", 1, ITEM), told))


@settings(max_examples=100)
@given(SEEDS, st.integers(0, 20))
def test_a_restored_fold_goes_on_as_before(seed: int, count: int) -> None:
    chance = random.Random(seed)
    told = story(chance, count)
    chance.shuffle(told)
    at = chance.randrange(count + 1)
    models = factory(Journal)
    live = fold(models.create("journal", 1, ITEM), told[:at])
    data = encode_model(live)
    loaded = decode_model(models, "journal", 1, ITEM, data)
    assert encode_model(loaded) == data
    assert isinstance(loaded, OrderedFold)
    assert loaded.value() == live.value()
    assert fold(loaded, told[at:]).value() == fold(live, told[at:]).value()
    assert encode_model(loaded) == encode_model(live)


@settings(max_examples=100)
@given(SEEDS, st.integers(0, 20))
def test_an_unknown_model_keeps_every_byte_and_is_revived(seed: int, count: int) -> None:
    chance = random.Random(seed)
    told = story(chance, count)
    chance.shuffle(told)
    knows, ignorant = factory(Journal), factory()
    unknown = fold(ignorant.create("journal", 1, ITEM), told)
    assert unknown.opaque
    assert unknown.value() is None
    assert not ignorant.known("journal", 1)
    assert {(one.operation, one.stamp, one.time_ms) for one in unknown.operations} == set(told)
    data = encode_model(unknown)
    assert data == encode_model(fold(knows.create("journal", 1, ITEM), told))
    assert encode_model(decode_model(ignorant, "journal", 1, ITEM, data)) == data
    revived = decode_model(knows, "journal", 1, ITEM, data)
    assert isinstance(revived, OrderedFold)
    assert not revived.opaque
    assert revived.value() == expected(told)


@given(SEEDS, st.integers(0, 20))
def test_a_commuting_model_keeps_its_own_snapshot_alone(seed: int, count: int) -> None:
    chance = random.Random(seed)
    told = [one for one in story(chance, count, words=("a", "b", 3)) if one[0] != b"\xff\xff"]
    at = chance.randrange(len(told) + 1)
    models = factory(Tally)
    in_order = fold(models.create("tally", 1, ITEM), told)
    chance.shuffle(told)
    live = fold(models.create("tally", 1, ITEM), told[:at])
    assert isinstance(live, CommutingFold)
    loaded = decode_model(models, "tally", 1, ITEM, encode_model(live))
    assert encode_model(fold(loaded, told[at:])) == encode_model(fold(live, told[at:])) == encode_model(in_order)
    assert live.value() == in_order.value()


# one behaviour each


def test_a_late_operation_makes_the_next_read_replay_and_an_ordinary_one_does_not() -> None:
    model = factory(Journal).create("journal", 1, ITEM)
    stamps = [Stamp(depth, FEEDS[0], depth, 0) for depth in range(5)]
    for stamp in stamps[1:4]:
        model.apply(value_bytes("x"), stamp, 0)
    model.value()
    before = Journal.applied
    model.apply(value_bytes("x"), stamps[4], 0)
    model.value()
    assert Journal.applied == before + 1
    model.apply(value_bytes("first"), stamps[0], 0)
    assert model.value()[0] == ["first", 0]
    assert Journal.applied == before + 1 + 5


def test_an_operation_that_can_not_be_read_or_is_refused_changes_nothing_and_says_why() -> None:
    model = factory(Journal).create("journal", 1, ITEM)
    stamps = [Stamp(depth, FEEDS[0], depth, 0) for depth in range(4)]
    for stamp, operation in zip(
        stamps, [value_bytes("a"), b"\xff", value_bytes("refuse"), value_bytes("b")], strict=True
    ):
        model.apply(operation, stamp, 0)
    assert model.value() == [["a", 0], ["b", 3]]
    refusals = model.refusals()
    assert sorted(refusals) == stamps[1:3]
    assert refusals[stamps[1]].reason is Reason.MALFORMED
    assert "not today" in refusals[stamps[2]].detail
    assert len(model.operations) == 4


@pytest.mark.parametrize("word", ["fail", "unreadable"])
def test_a_model_that_raises_takes_its_item_out_and_keeps_its_operations(word: str) -> None:
    model = factory(Journal).create("journal", 1, ITEM)
    model.apply(value_bytes("a"), Stamp(1, FEEDS[0], 0, 0), 0)
    model.apply(value_bytes(word), Stamp(2, FEEDS[0], 1, 0), 0)
    data = encode_model(model)
    for _ in range(2):
        with pytest.raises(ModelFailed, match=r"journal@1 of item [0-9a-f]{8} raised"):
            model.value()
    assert encode_model(model) == data
    model.apply(value_bytes("b"), Stamp(3, FEEDS[0], 2, 0), 0)
    if word == "unreadable":
        assert len(model.value()) == 3
    else:
        with pytest.raises(ModelFailed):
            model.value()


def test_a_commuting_model_refuses_one_operation_at_a_time() -> None:
    model = factory(Tally).create("tally", 1, ITEM)
    model.apply(value_bytes("a"), Stamp(1, FEEDS[0], 0, 0), 0)
    for operation, reason in [
        (value_bytes("fail"), Reason.MODEL_FAILED),
        (b"\xff", Reason.MODEL_FAILED),
        (value_bytes(None), Reason.MALFORMED),
    ]:
        with pytest.raises(OperationRefused) as caught:
            model.apply(operation, Stamp(2, FEEDS[0], 1, 0), 0)
        assert caught.value.reason is reason
    assert model.value() == {"a": 1}


class Looper:
    """Told to, it never comes back, wherever it is asked."""

    name: ClassVar[str] = "looper"
    version: ClassVar[int] = 1
    applied: ClassVar[int] = 0

    def __init__(self) -> None:
        self.told: list[Any] = []

    def apply(self, operation: Any, stamp: Stamp) -> None:
        type(self).applied += 1
        self.told.append(operation)
        if operation == "loop":
            self._loop()
        if operation == "recursion":
            self.apply(operation, stamp)

    def value(self) -> Any:
        return self._loop() if "loop in value" in self.told else len(self.told)

    def _loop(self) -> Any:
        while True:
            try:
                self.told = list(self.told)
            except Exception:  # noqa: BLE001  # such models exist
                continue


class CommutingLooper(Looper):
    name: ClassVar[str] = "commuting-looper"
    commutes: ClassVar[bool] = True

    def snapshot(self) -> Any:
        if "loop in snapshot" in self.told:
            self._loop()
        return self if "unwritable" in self.told else sorted(self.told)

    def restore(self, state: Any) -> None:
        if "loop in restore" in state:
            self._loop()
        self.told = list(state)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_budget, "STEPS_MAX", 5000)


@pytest.mark.parametrize("word", ["loop", "recursion", "loop in value"])
@pytest.mark.usefixtures("few_steps")
def test_a_model_that_does_not_come_back_takes_its_item_out_alone(word: str) -> None:
    models = factory(Looper)
    bad, good = (models.create("looper", 1, ITEM) for _ in range(2))
    stamps = [Stamp(1 + seq, FEEDS[0], seq, 0) for seq in range(3)]
    bad.apply(value_bytes(word), stamps[1], 0)
    for fold in (bad, good):
        fold.apply(value_bytes("a"), stamps[2], 0)
    data = encode_model(bad)
    for _ in range(2):
        with pytest.raises(ModelFailed, match=r"looper@1 .*(more than 5000 steps|RecursionError)"):
            bad.value()
    assert encode_model(bad) == data, "its operations are kept"
    assert good.value() == 1
    Looper.applied = 0
    with pytest.raises(ModelFailed):
        bad.value()
    assert Looper.applied == 0, "what failed is not tried again"
    bad.apply(value_bytes("b"), stamps[0], 0)
    with pytest.raises(ModelFailed):
        bad.value()
    assert Looper.applied or word == "loop in value", "an operation before it might have changed that"


@pytest.mark.usefixtures("few_steps")
def test_the_budget_is_that_of_one_operation_and_steps_are_counted_the_same_each_time() -> None:
    models = factory(Looper)
    fold = models.create("looper", 1, ITEM)
    for seq in range(3000):
        fold.apply(value_bytes("a"), Stamp(1 + seq, FEEDS[0], seq, 0), 0)
    assert fold.value() == 3000
    counts = set()
    for _ in range(3):
        with pytest.raises(OutOfSteps), StepBudget():
            Looper().apply("loop", Stamp(1, FEEDS[0], 0, 0))
        budget = StepBudget()
        with budget:
            Looper().apply("a", Stamp(1, FEEDS[0], 0, 0))
        counts.add(budget._left)
    assert len(counts) == 1
    assert sys.gettrace() is None


@pytest.mark.usefixtures("few_steps")
def test_a_commuting_model_that_loops_is_refused_one_operation() -> None:
    fold = factory(CommutingLooper).create("commuting-looper", 1, ITEM)
    with pytest.raises(OperationRefused) as caught:
        fold.apply(value_bytes("loop"), Stamp(1, FEEDS[0], 0, 0), 0)
    assert caught.value.reason is Reason.MODEL_FAILED
    fold.apply(value_bytes("a"), Stamp(2, FEEDS[0], 1, 0), 0)
    assert fold.value() == 2


@pytest.mark.parametrize("word", ["loop in snapshot", "unwritable", "loop in restore"])
@pytest.mark.usefixtures("few_steps")
def test_a_commuting_model_that_can_not_write_or_read_its_snapshot_is_out_and_its_record_is_written(word: str) -> None:
    models = factory(CommutingLooper)
    fold = models.create("commuting-looper", 1, ITEM)
    fold.apply(value_bytes(word), Stamp(1, FEEDS[0], 0, 0), 0)
    data = encode_model(fold)
    if word != "loop in restore":
        with pytest.raises(ModelFailed):
            fold.state()
    loaded = decode_model(models, "commuting-looper", 1, ITEM, data)
    assert isinstance(loaded, CommutingFold)
    for ask in (loaded.value, loaded.state):
        with pytest.raises(ModelFailed, match="commuting-looper@1"):
            ask()
    with pytest.raises(OperationRefused) as caught:
        loaded.apply(value_bytes("a"), Stamp(2, FEEDS[0], 1, 0), 0)
    assert caught.value.reason is Reason.MODEL_FAILED
    assert encode_model(loaded) == b""
    assert encode_model(models.create("commuting-looper", 1, ITEM)) != b"", "an empty state is another thing"


def test_a_snapshot_larger_than_a_property_can_be_loaded_again() -> None:
    models = factory(Tally)
    model = models.create("tally", 1, ITEM)
    for seq in range(VALUE_BYTES_MAX // 1000):
        model.apply(value_bytes(f"{seq:01000}"), Stamp(1 + seq, FEEDS[0], seq, 0), 0)
    data = encode_model(model)
    assert len(data) > VALUE_BYTES_MAX
    loaded = decode_model(models, "tally", 1, ITEM, data)
    assert isinstance(loaded, CommutingFold)
    assert loaded.value() == model.value()


def test_a_record_of_an_unknown_model_survives_the_store() -> None:
    genesis = Genesis(ITEM, "journal", 1, "note", None, 4)
    told = story(random.Random(1), 9)
    record = ItemRecord(genesis, fold(factory().create("journal", 1, ITEM), told), PropertySet(ITEM))
    data = encode_record(record).SerializeToString(deterministic=True)
    for models in (factory(), factory(Journal)):
        loaded = decode_record(data, models)
        assert loaded.genesis == genesis
        assert encode_record(loaded).SerializeToString(deterministic=True) == data


@pytest.mark.parametrize("data", [b"\xff", b"\x62\x01\xff"])
def test_a_record_that_can_not_be_read_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_record(data, factory())


# the factory


def test_the_factory_knows_what_was_registered_and_nothing_is_registered_twice() -> None:
    models = factory(Journal)
    assert models.register(Journal) is Journal
    assert models.known("journal", 1)
    assert models.known("property-set", 1)
    assert not models.known("journal", 2)
    assert models.latest("journal") == 1
    assert models.latest("nothing") is None
    assert ("journal", 1) in models.names()

    class Other(Journal):
        pass

    class Usurper(Journal):
        name: ClassVar[str] = "property-set"

    for model in (Other, Usurper):
        with pytest.raises(UsageError, match="registered already"):
            models.register(model)


@pytest.mark.parametrize(("name", "version"), [("", 1), (None, 1), ("x", 0), ("x", "1")])
def test_a_model_needs_a_name_and_a_version(name: Any, version: Any) -> None:
    model = type("Model", (Journal,), {"name": name, "version": version})
    with pytest.raises(UsageError, match="needs a class attribute"):
        factory(model)


def test_another_version_of_a_base_model_is_an_unknown_model() -> None:
    model = factory().create("property-set", 2, ITEM)
    assert isinstance(model, OrderedFold)
    assert model.opaque
