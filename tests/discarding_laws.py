"""The laws of discarding history of texts and lists, as checks over a story; `test_discarded_history` runs them."""

import random
from typing import Any

from echostore.kernel.ids import FeedId
from echostore.kernel.models.base import Horizon
from sequence_story import FEEDS, ITEM, Kind, Step, Story, Written, causal_order, covers, finish, go_on, groups, tell


def meet(story: Story, chance: random.Random) -> None:
    """Everybody hears everything, and says something: from then on all that was before is stable."""
    finish(story)
    for who, replica in enumerate(story.replicas):
        story.kind.edit(replica.model, *(chance.randrange(256) for _ in range(3)))
        story.seal(who)


def stable(story: Story) -> dict[FeedId, int]:
    """What everybody's last operation had seen of each feed: the frontier of `kernel.items.discarding`."""
    last = [operations[-1].past if operations else (0,) * len(FEEDS) for operations in story.written]
    return {
        FEEDS[feed]: min(
            [len(story.written[feed]), *(last[other][feed] for other in range(len(FEEDS)) if other != feed)]
        )
        - 1
        for feed in range(len(FEEDS))
    }


def shown(model: Any) -> Any:
    """What a reader sees, marks included."""
    return model.to_delta() if hasattr(model, "to_delta") else model.value()


def fold(story: Story, model: Any, operations: list[Written], chance: random.Random) -> Any:
    """Operations on top of a model, in some order, in some groups; all of them are taken."""
    for group in groups([story.decode(operation) for operation in causal_order(operations, chance)], chance):
        assert model.apply_many(group) == [None] * len(group)
    return model


def folds(story: Story, base: bytes | None, operations: list[Written], chance: random.Random) -> list[Any]:
    """The same operations folded on three ways: at once, over a cached document, over a restored state."""
    codec, kind = story.kind.codec, story.kind.model

    def start() -> Any:
        return story.fresh() if base is None else codec.decode_state(ITEM, base)

    found = [fold(story, start(), operations, chance)]
    for again in (
        lambda model: kind.from_native(ITEM, model.native()),
        lambda model: codec.decode_state(ITEM, story.state(model)),
    ):
        order = causal_order(operations, chance)
        cut = chance.randrange(len(order) + 1)
        model = again(fold(story, start(), order[:cut], chance))
        found.append(fold(story, model, order[cut:], chance))
    return found


def check_discarding(kind: Kind, steps: list[Step], more: list[Step], seed: int) -> bool:
    """History goes at a random frontier; then everything goes on as if it had not. Whether anything went."""
    chance = random.Random(seed)
    story = tell(kind, steps[: len(steps) // 2])
    meet(story, chance)
    go_on(story, steps[len(steps) // 2 :])
    before = story.all()
    went, base = discarded(story, None, before, chance)
    lengths = [len(operations) for operations in story.written]
    # Some stand on what is left at once, some later, some never; all have it before they do.
    for replica in story.replicas:
        if chance.random() < 0.5:
            stand_on(story, replica, base, lengths)
    go_on(story, more[: len(more) // 2])
    for replica in story.replicas:
        if chance.random() < 0.5:
            stand_on(story, replica, base, lengths)
    meet(story, chance)
    go_on(story, more[len(more) // 2 :])
    check_same(story, base, lengths, chance)
    # And once more, from what is left.
    horizon = horizon_of(story, chance)
    tail = [operation for operation in story.all() if operation.number >= lengths[operation.writer]]
    states = set()
    for model in folds(story, base, tail, chance):
        went |= model.discard(horizon)
        states.add(story.state(model))
    assert len(states) == 1
    (again,) = states
    whole = fold(story, story.fresh(), story.all(), chance)
    if whole.discard(horizon) and whole.ground.ends == kind.codec.decode_state(ITEM, again).ground.ends:
        assert story.state(whole) == again, "in two steps or in one"
    return went


def discarded(story: Story, base: bytes | None, operations: list[Written], chance: random.Random) -> tuple[bool, bytes]:
    """What is left, the same whatever the order in which operations came."""
    horizon = horizon_of(story, chance)
    states, went = set(), set()
    for model in folds(story, base, operations, chance):
        seen = shown(model)
        went.add(model.discard(horizon))
        assert shown(model) == seen
        states.add(story.state(model))
        assert not model.discard(horizon), "at once or not at all"
        check_waits(story, model, horizon, chance)
    assert len(states) == len(went) == 1
    return went.pop(), states.pop()


def check_waits(story: Story, model: Any, horizon: Horizon, chance: random.Random) -> None:
    """Under a horizon that ends none of its waits, further on or further back, nothing more goes."""
    waits = model.waits(horizon)
    for _ in range(8):
        seqs = {feed: chance.choice([stable, chance.randrange(-1, 20)]) for feed, stable in horizon.stable.items()}
        other = Horizon(chance.choice([horizon.before_ms, horizon_of(story, chance).before_ms]), seqs)
        if not any(map(other.ends, waits)):
            assert not story.kind.codec.decode_state(ITEM, story.state(model)).discard(other)


def horizon_of(story: Story, chance: random.Random) -> Horizon:
    times = [operation.time_ms for operation in story.all()]
    late = max(times, default=0) + 1
    return Horizon(chance.choice([late, late, *times]), stable(story))


def stand_on(story: Story, replica: Any, base: bytes, lengths: list[int]) -> None:
    if replica.model.ground is not None or not covers(replica.delivered, lengths):
        return
    who = story.replicas.index(replica)
    model = story.kind.codec.decode_state(ITEM, base)
    tail = [
        operation
        for operation in story.all()
        if lengths[operation.writer] <= operation.number < replica.delivered[operation.writer]
    ]
    fold(story, model, tail, random.Random(0))
    assert shown(model) == shown(replica.model)
    model.begin(FEEDS[who], 0)
    replica.model = model


def check_same(story: Story, base: bytes, lengths: list[int], chance: random.Random) -> None:
    """Who discarded and who did not see the same; who discarded has the same bytes."""
    finish(story)
    tail = [operation for operation in story.all() if operation.number >= lengths[operation.writer]]
    whole = fold(story, story.fresh(), story.all(), chance)
    models = folds(story, base, tail, chance)
    assert len({story.state(model) for model in models}) == 1
    for model in (*models, *(replica.model for replica in story.replicas)):
        assert shown(model) == shown(whole)
    lefts = [replica.model for replica in story.replicas if replica.model.ground is not None]
    assert {story.state(model) for model in lefts} <= {story.state(models[0])}
