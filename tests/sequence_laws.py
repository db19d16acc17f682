"""The laws that text and list share, as checks over a story; `test_text` and `test_growable_array` run them."""

import random
from typing import Any

from echostore.kernel.models.base import OperationRefused
from echostore.kernel.reasons import Reason
from sequence_story import FEEDS, ITEM, Kind, Step, Story, Written, causal_order, finish, groups, tell


def check_convergence(kind: Kind, steps: list[Step], seed: int) -> None:
    """M1: equal sets of operations, equal state bytes and equal values, whatever the order and the grouping."""
    chance = random.Random(seed)
    story = tell(kind, steps)
    finish(story)
    expected = story.state(story.replicas[0].model)
    value = story.replicas[0].model.value()
    for replica in story.replicas[1:]:
        assert story.state(replica.model) == expected
        assert replica.model.value() == value
    for one_by_one in (True, False):
        model = story.fresh()
        entries = [story.decode(operation) for operation in causal_order(story.all(), chance)]
        for group in groups(entries, chance):
            if one_by_one:
                for entry in group:
                    model.apply(*entry)
            else:
                assert model.apply_many(group) == [None] * len(group)
        assert story.state(model) == expected
        assert model.value() == value


def check_restore(kind: Kind, steps: list[Step], seed: int) -> None:
    """M2: a restored model continues exactly as the original would, also as a writer."""
    chance = random.Random(seed)
    story = tell(kind, steps)
    order = causal_order(story.all(), chance)
    cut = chance.randrange(len(order) + 1)
    original = story.fresh()
    for operation in order[:cut]:
        original.apply(*story.decode(operation))
    state = story.state(original)
    copies = [kind.codec.decode_state(ITEM, state), kind.model.from_native(ITEM, original.native())]
    for copy in copies:
        assert story.state(copy) == state
        assert copy.value() == original.value()
    for operation in order[cut:]:
        entry = story.decode(operation)
        for model in (original, *copies):
            model.apply(*entry)
    edits = [(chance.randrange(256), chance.randrange(256), chance.randrange(256)) for _ in range(6)]
    sealed = []
    for model in (original, *copies):
        model.begin(FEEDS[1], 0)
        for edit in edits:
            kind.edit(model, *edit)
        sealed.append(model.seal())
    assert sealed[0] == sealed[1] == sealed[2]
    assert len({story.state(model) for model in (original, *copies)}) == 1
    assert original.value() == copies[0].value() == copies[1].value()


def check_exclusion(kind: Kind, steps: list[Step], seed: int) -> None:
    """A suffix of one writer is excluded: what builds on it is refused, the same in every order; the rest converges."""
    chance = random.Random(seed)
    story = tell(kind, steps)
    operations = story.all()
    if not operations:
        return
    victim = chance.choice(operations)
    kept = [op for op in operations if op.writer != victim.writer or op.number < victim.number]
    expected = refused_by_definition(story, kept)
    states, values = set(), []
    for one_by_one in (True, True, False, False):
        model = story.fresh()
        order = causal_order(kept, chance)
        outcomes: list[OperationRefused | None] = []
        for group in groups(order, chance):
            entries = [story.decode(operation) for operation in group]
            outcomes += [outcome(model, entry) for entry in entries] if one_by_one else model.apply_many(entries)
        refused = {op for op, answer in zip(order, outcomes, strict=True) if answer is not None}
        assert refused == expected
        assert {answer.reason for answer in outcomes if answer is not None} <= {Reason.BUILDS_ON_EXCLUDED}
        states.add(story.state(model))
        values.append(model.value())
    assert len(states) == 1
    assert all(value == values[0] for value in values)
    # The rest alone gives the same state: nothing of what was refused has stayed behind.
    clean = story.fresh()
    for operation in causal_order([op for op in kept if op not in expected], chance):
        clean.apply(*story.decode(operation))
    assert {story.state(clean)} == states
    # The writer whose work was excluded goes on under its next generation.
    clean.begin(FEEDS[victim.writer], 1)
    kind.edit(clean, 0, 0, 0)
    kind.edit(clean, 0, 1, 1)
    again = clean.seal()
    if again is not None:
        stamp = story.stamp_after(victim.writer)
        clean.stamped(stamp, 0)
        model.apply(again, stamp, 0)
        assert story.state(model) == story.state(clean)


def refused_by_definition(story: Story, kept: list[Written]) -> set[Written]:
    """The slow oracle: an operation is refused if an atom it needs is made by an operation that is not there."""
    made: dict[tuple[int, int], Written] = {}
    needs: dict[Written, set[tuple[int, int]]] = {}
    for operation in kept:
        update = story.decode(operation)[0].update
        needs[operation] = {atom for change in update for atom in change.dependencies}
        if update[0].counter > 0:
            needs[operation].add((update[0].writer, update[0].counter - 1))
        for change in update:
            for counter in range(change.counter, change.counter_end):
                made[change.writer, counter] = operation
    refused: set[Written] = set()
    while True:
        more = {
            operation
            for operation in kept
            if operation not in refused
            and any(made.get(atom) in refused or atom not in made for atom in needs[operation])
        }
        if not more:
            return refused
        refused |= more


def outcome(model: Any, entry: Any) -> OperationRefused | None:
    try:
        model.apply(*entry)
    except OperationRefused as refused:
        return refused
    return None
