"""The change graph: its normal form, its bytes, and operations made by forgers (FAULTS B21)."""

import gc
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.ids import Stamp
from echostore.kernel.models._loro import LoroDocument
from echostore.kernel.models._shared_sequence import writer_id
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.change_graph import (
    Change,
    ChangeBuilder,
    Delete,
    InsertElements,
    InsertText,
    Mark,
    Move,
    Run,
    SetElement,
    atom_count,
)
from echostore.kernel.models.text import ConcurrentText, TextOperation
from echostore.kernel.reasons import Reason
from echostore.wire.models import text as text_codec
from echostore.wire.models.change_graph import MalformedGraph, decode_graph, encode_graph
from sequence_story import FEEDS, ITEM, Kind, causal_order, finish, tell
from test_growable_array import KIND as ARRAY
from test_text import KIND as TEXT

FORGERIES = 2_500
"""For each model; B21 asks for 2,000."""

# Normal form


def atoms(run: Run) -> list[tuple[Any, ...]]:
    """The oracle of runs: one tuple for each atom."""
    if isinstance(run, InsertText):
        return [("insert", run.position + index, letter) for index, letter in enumerate(run.text)]
    if isinstance(run, Delete) and run.length > 0:
        return [("delete", run.position, run.writer, run.counter + index) for index in range(run.length)]
    assert isinstance(run, Delete)
    size = -run.length
    return [("delete", run.position - index, run.writer, run.counter + size - 1 - index) for index in range(size)]


def cut(run: Run, chance: random.Random) -> list[Run]:
    """The same atoms in two runs, as loro may have it after another commit."""
    size = atom_count(run)
    at = chance.randrange(size + 1)
    if at in (0, size):
        return [run]
    if isinstance(run, InsertText):
        return [InsertText(run.position, run.text[:at]), InsertText(run.position + at, run.text[at:])]
    assert isinstance(run, Delete)
    if run.length > 0:
        return [
            Delete(run.position, at, run.writer, run.counter),
            Delete(run.position, size - at, run.writer, run.counter + at),
        ]
    return [
        Delete(run.position, -at, run.writer, run.counter + size - at),
        Delete(run.position - at, -(size - at), run.writer, run.counter),
    ]


RUNS = st.lists(
    st.one_of(
        st.builds(InsertText, st.integers(0, 4), st.text("ab", min_size=1, max_size=3)),
        st.builds(
            Delete,
            st.integers(4, 6),
            st.integers(-3, 3).filter(bool),
            st.integers(1, 2),
            st.integers(0, 4),
        ),
    ),
    min_size=1,
    max_size=8,
)


def normal(runs: list[Run]) -> tuple[Run, ...]:
    builder = ChangeBuilder(1)
    for run in runs:
        builder.add(run)
    (change,) = builder.changes()
    return change.runs


@given(RUNS, st.integers(0, 1 << 32))
def test_the_normal_form_depends_on_atoms_alone(runs: list[Run], seed: int) -> None:
    chance = random.Random(seed)
    pieces = [piece for run in runs for half in cut(run, chance) for piece in cut(half, chance)]
    assert normal(pieces) == normal(runs)
    assert normal(list(normal(runs))) == normal(runs)
    assert [atom for run in normal(runs) for atom in atoms(run)] == [atom for run in runs for atom in atoms(run)]


def test_a_change_starts_only_where_foreign_news_comes_in() -> None:
    builder = ChangeBuilder(1)
    builder.change(0, after_own=False, dependencies=())
    builder.add(InsertText(0, "a"))
    builder.change(1, after_own=True, dependencies=())
    builder.add(InsertText(1, "b"))
    builder.change(2, after_own=True, dependencies=((3, 9), (2, 4)))
    builder.add(InsertText(2, "c"))
    assert builder.changes() == [
        Change(1, 0, False, (), (InsertText(0, "ab"),)),
        Change(1, 2, True, ((2, 4), (3, 9)), (InsertText(2, "c"),)),
    ]


# Bytes

GRAPH = (
    Change(5, 0, False, (), (InsertText(0, "héllo"), Delete(4, -2, 5, 3), Mark(0, 2, "bold", True))),
    Change(9, 3, True, ((5, 7),), (Delete(1, 1, 5, 0), InsertText(7, "𝄞"), Mark(1, 9, "link", None))),
)
GOLDEN = (
    "0a1005000000000000000900000000000000120201011a020003220203032a0200033201003a010742060001020100024a06"
    "000105010c0d52060a03040202105a020000620206056a0a68c3a96c6c6ff09d849e7a04626f6c647a046c696e6b82010210"
    "018201020801"
)


def test_a_graph_has_one_encoding() -> None:
    message = encode_graph(GRAPH)
    assert message.SerializeToString(deterministic=True).hex() == GOLDEN
    assert decode_graph(message, of_text=True) == GRAPH
    assert encode_graph(reversed(GRAPH)).SerializeToString() == message.SerializeToString()


def test_a_graph_of_a_list_keeps_its_runs() -> None:
    graph = (
        Change(5, 0, False, (), (InsertElements(0, ("sa", "j1", "j1.0")), Move(0, 2, 5, 0), SetElement(5, 1, "jnull"))),
    )
    assert decode_graph(encode_graph(graph), of_text=False) == graph


@pytest.mark.parametrize(
    "damage",
    [
        {"writers": [9, 5]},
        {"writers": [5]},
        {"change_counts": [2, 1]},
        {"run_counts": [3, 4]},
        {"run_counts": [3, 2]},
        {"dependency_counts": [0, 5]},
        {"dependency_counts": [0, 1]},
        {"dependency_writers": [7]},
        {"kinds": b"\x00\x01\x02\x01\x00\x09"},
        {"kinds": b"\x00\x01\x02\x01\x00"},
        {"positions": [0]},
        {"lengths": [0, -2, 2, 1, 1, 8]},
        {"lengths": [9, -2, 2, 1, 1, 8]},
        {"targets": [3, 0, 0]},
        {"target_writers": [4, 0]},
        {"text": "hé"},
        {"mark_keys": []},
        {"mark_values": []},
    ],
)
def test_columns_that_do_not_fit_are_refused(damage: dict[str, Any]) -> None:
    message = encode_graph(GRAPH)
    for name, value in damage.items():
        message.ClearField(name)  # type: ignore[arg-type]
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    with pytest.raises(MalformedGraph):
        decode_graph(message, of_text=True)


# B21


def scene(kind: Kind, seed: int) -> tuple[Any, Any, Any]:
    """A model that has heard a story, and the next two operations of writer 2, the first of them applied."""
    chance = random.Random(seed)
    steps = [tuple(chance.randrange(256) for _ in range(5)) for _ in range(60)]
    story = tell(kind, steps)  # type: ignore[arg-type]
    finish(story)
    forger = story.replicas[2].model
    operations = []
    for _ in range(2):
        for _ in range(5):
            kind.edit(forger, chance.randrange(256), chance.randrange(256), chance.randrange(256))
        kind.edit(forger, 0, 0, 0)
        operations.append(forger.seal())
    model = story.fresh()
    for operation in causal_order(story.all(), chance):
        model.apply(*story.decode(operation))
    model.apply(operations[0], Stamp(99, FEEDS[2], 1000, 0), 0)
    return model, operations[0], operations[1]


def forgeries(kind: Kind, model: Any, old: Any, good: Any, chance: random.Random) -> Iterator[tuple[str, Any]]:
    """Operations that are wrong in one way each."""
    update = good.update
    first = update[0]
    victim = writer_id(FEEDS[0], ITEM, 0)
    ends = model._ends

    def with_first(**changes: Any) -> Any:
        return replace(good, update=(replace(first, **changes), *update[1:]))

    yield "writer of another feed", replace(good, update=tuple(replace(c, writer=victim) for c in update))
    yield "writer of nobody", replace(good, update=tuple(replace(c, writer=chance.getrandbits(64)) for c in update))
    yield "other generation", replace(good, generation=good.generation + 1 + chance.randrange(9))
    yield (
        "another writer continued",
        replace(
            good,
            update=(Change(victim, ends.get(victim, 0), ends.get(victim, 0) > 0, (), first.runs),),
        ),
    )
    yield "same operation again", old
    back = chance.randrange(1, first.counter + 1)
    yield "counters used before", with_first(counter=first.counter - back)
    again = old.update[0]
    yield (
        "old counters, other content",
        replace(old, update=(replace(again, runs=(*again.runs, again.runs[chance.randrange(len(again.runs))])),)),
    )
    yield "counters skipped", with_first(counter=first.counter + chance.randrange(1, 9))
    yield (
        "gap between changes",
        replace(
            good, update=(first, replace(first, counter=first.counter_end + chance.randrange(1, 9), after_own=True))
        ),
    )
    other = next(writer for writer in ends if writer != first.writer)
    yield "unknown dependency", with_first(dependencies=((other, ends[other] + chance.randrange(9)),))
    yield "unknown writer as dependency", with_first(dependencies=((chance.getrandbits(63), 0),))
    yield "dependency said twice", with_first(dependencies=((other, chance.randrange(ends[other])),))
    yield "itself as dependency", with_first(dependencies=((first.writer, first.counter - 1),))
    yield "no predecessor", with_first(after_own=not first.after_own)
    yield "no changes", replace(good, update=())
    yield "no runs", with_first(runs=())
    wrong: list[Run] = [
        InsertElements(0, ("sx",)) if kind is TEXT else InsertText(0, "x"),
        SetElement(other, 0, "sx") if kind is TEXT else Mark(0, 1, "bold", True),
        Move(0, 0, other, 0) if kind is TEXT else InsertText(0, "x"),
    ]
    yield "run of the other model", with_first(runs=(*first.runs, chance.choice(wrong)))
    length = len(model.value())
    insert: Run = InsertText(0, "x") if kind is TEXT else InsertElements(0, ("sx",))
    far = 3 * length + 400 + chance.randrange(1 << chance.randrange(1, 32))
    yield "insert far outside", with_first(runs=(insert._replace(position=far),))
    yield "insert before the start", with_first(runs=(insert._replace(position=-1 - chance.randrange(9)),))
    yield "insert of nothing", with_first(runs=(InsertText(0, "") if kind is TEXT else InsertElements(0, ()),))
    yield "delete of what it never saw", with_first(runs=(Delete(0, 1, other, ends[other] + chance.randrange(99)),))
    yield "delete of a stranger's", with_first(runs=(Delete(0, 1, chance.getrandbits(63), 0),))
    yield "delete of nothing", with_first(runs=(Delete(0, 0, other, 0),))
    yield "delete backwards out of the list", with_first(runs=(Delete(0, -2, other, 0),))
    yield "delete far outside", with_first(runs=(Delete(far, 1, other, 0),))
    yield "delete of more than there is", with_first(runs=(Delete(0, 1 << 30, other, 0),))
    if kind is TEXT:
        yield "text that is not Unicode", with_first(runs=(InsertText(0, "\ud800"),))
        yield "mark that ends before it starts", with_first(runs=(Mark(1, 1 - chance.randrange(2), "bold", True),))
        yield "mark outside", with_first(runs=(Mark(0, far, "bold", True),))
        yield "mark without a key", with_first(runs=(Mark(0, 1, "", True),))
    else:
        yield "set of an unknown element", with_first(runs=(SetElement(other, 1 << 30, "sx"),))
        yield "set of a stranger's element", with_first(runs=(SetElement(chance.getrandbits(63), 0, "sx"),))
        yield "move of an unknown element", with_first(runs=(Move(0, 0, other, 1 << 30),))
        yield "move to far outside", with_first(runs=(insert, Move(0, far, first.writer, 0)))
        yield "lamport out of range", with_first(runs=(SetElement(other, -1, "sx"),))


@pytest.mark.parametrize("kind", [TEXT, ARRAY], ids=["text", "growable-array"])
def test_forged_operations_are_refused_and_leave_the_document_as_it_was(kind: Kind) -> None:
    tried: Counter[str] = Counter()
    reasons: Counter[Reason] = Counter()
    seed = 0
    while tried.total() < FORGERIES:
        seed += 1
        chance = random.Random(seed)
        model, old, good = scene(kind, seed)
        state, value = kind.codec.encode_state(model), model.value()
        stamp = Stamp(100, FEEDS[2], 1001, 0)
        for name, operation in forgeries(kind, model, old, good, chance):
            with pytest.raises(OperationRefused) as refused:
                model.apply(operation, stamp, 0)
            assert refused.value.reason in (Reason.FORGED_WRITER, Reason.MALFORMED, Reason.BUILDS_ON_EXCLUDED), name
            if "writer of" in name or "generation" in name or "again" in name or ("before" in name and "used" in name):
                assert refused.value.reason is Reason.FORGED_WRITER, name
            (batched,) = model.apply_many([(operation, stamp, 0)])
            assert batched is not None
            assert batched.reason is refused.value.reason
            tried[name] += 1
            reasons[refused.value.reason] += 1
        assert kind.codec.encode_state(model) == state
        assert model.value() == value
        model.apply(good, stamp, 0)  # nothing of the forgeries has stayed behind to disturb it
        clean = kind.codec.decode_state(ITEM, state)
        clean.apply(good, stamp, 0)
        assert kind.codec.encode_state(clean) == kind.codec.encode_state(model)
        assert clean.value() == model.value()
    assert set(reasons) == {Reason.FORGED_WRITER, Reason.MALFORMED, Reason.BUILDS_ON_EXCLUDED}
    assert len(tried) >= 28


@pytest.mark.parametrize("kind", [TEXT, ARRAY], ids=["text", "growable-array"])
def test_damaged_update_bytes_never_do_more_than_be_refused(kind: Kind) -> None:
    """Garbage, cuts and flipped bits: refused, or an operation that this writer could have written, on all replicas."""
    refusals = 0
    for seed in range(8):
        chance = random.Random(seed)
        model, _, good = scene(kind, seed)
        twin = kind.model.from_native(ITEM, model.native())
        message = kind.codec.encode_operation(good)
        data = message.update
        for _ in range(150):
            damaged = bytearray(data)
            for _ in range(chance.randrange(1, 4)):
                damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
            message.update = chance.choice(
                [bytes(damaged), data[: chance.randrange(len(data))], chance.randbytes(chance.randrange(200))]
            )
            answers = []
            for replica in (model, twin):
                try:
                    replica.apply(kind.codec.decode_operation(message), Stamp(100, FEEDS[2], 1001, 0), 0)
                    answers.append(None)
                except OperationRefused as refused:
                    answers.append(refused.reason)
            assert answers[0] == answers[1]
            if answers[0] is None:  # start again from before it
                model, twin = scene(kind, seed)[0], scene(kind, seed)[0]
            else:
                refusals += 1
        assert kind.codec.encode_state(model) == kind.codec.encode_state(twin)
        assert model.value() == twin.value()
    assert refusals > 600


def test_an_update_in_the_own_form_of_loro_is_refused() -> None:
    message = text_codec.encode_operation(scene(TEXT, 1)[2])
    message.update = ConcurrentText(ITEM).native()
    with pytest.raises(OperationRefused) as refused:
        text_codec.decode_operation(message)
    assert refused.value.reason is Reason.MALFORMED


def test_a_batch_with_one_bad_operation_takes_the_others() -> None:
    model, _, good = scene(TEXT, 3)
    stamp = Stamp(100, FEEDS[2], 1001, 0)
    bad = replace(good, update=(replace(good.update[0], runs=(InsertText(1 << 20, "x"),)),))
    other = ConcurrentText.from_native(ITEM, model.native())
    other.begin(FEEDS[1], 0)
    other.insert(0, "other")
    sibling = other.seal()
    outcomes = model.apply_many([(bad, stamp, 0), (sibling, Stamp(100, FEEDS[1], 9, 0), 0), (good, stamp, 0)])
    assert [answer and answer.reason for answer in outcomes] == [Reason.MALFORMED, None, None]


# A document that loro has lost complains once more when it is freed; that is all it can do.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_operation_that_breaks_loro_is_refused_and_the_document_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark that ends before it starts makes loro panic. The checks would stop it, so it is smuggled past them."""
    model = ConcurrentText(ITEM)
    model.begin(FEEDS[0], 0)
    model.insert(0, "hello world")
    model.seal()
    model.stamped(Stamp(1, FEEDS[0], 0, 0), 0)
    model.insert(0, "open ")
    state = text_codec.encode_state(model)
    sound = Change(writer_id(FEEDS[1], ITEM, 0), 0, False, ((writer_id(FEEDS[0], ITEM, 0), 10),), (InsertText(0, "x"),))
    stamp = Stamp(5, FEEDS[1], 0, 0)

    def smuggle(document: LoroDocument, changes: list[Change]) -> None:
        monkeypatch.undo()
        document.import_changes([replace(changes[0], runs=(Mark(5, 2, "bold", True),))])

    monkeypatch.setattr(LoroDocument, "import_changes", smuggle)
    (refused,) = model.apply_many([(TextOperation((sound,), 0), stamp, 0)])
    assert refused is None, "the batch failed, and then the operation came in alone"
    assert str(model) == "open xhello world"

    monkeypatch.setattr(LoroDocument, "import_changes", smuggle)
    more = Change(sound.writer, 1, True, (), (InsertText(0, "y"),))
    assert outcome_reason(model, TextOperation((more,), 0), stamp) is Reason.MODEL_FAILED
    gc.collect()
    assert str(model) == "open xhello world"
    assert text_codec.encode_state(model) != state
    model.insert(0, "still ")
    model.apply(TextOperation((more,), 0), stamp, 0)
    assert str(model) == "still open yxhello world"
    assert model.seal() is not None


def outcome_reason(model: ConcurrentText, operation: TextOperation, stamp: Stamp) -> Reason | None:
    try:
        model.apply(operation, stamp, 0)
    except OperationRefused as refused:
        return refused.reason
    return None
