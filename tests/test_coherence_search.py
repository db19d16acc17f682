"""The coherence protocol, searched: real machines through every order of events, and one rule off at a time.

`at_least` is part of what is promised: together the searches below see more than a million states, and all but the
last are complete.
"""

from collections.abc import Callable
from itertools import combinations, permutations, product
from typing import NamedTuple

import pytest

from coherence_attack_mutants import ATTACK_MUTANTS
from coherence_mutants import BROKEN, MUTANTS, Mutant
from coherence_root_mutants import ROOT_MUTANTS
from echostore.kernel.coherence.messages import Arc, Frame, Invalidate, MessageId, Spec, SystemId, Update
from echostore.kernel.coherence.posting import Receiver
from echostore.kernel.coherence.updates import UpdateReader, frames_of
from echostore.testing.coherence_attack_models import AttackModel
from echostore.testing.coherence_models import IndexModel
from echostore.testing.coherence_root_models import RootsModel
from echostore.testing.coherence_search import Model, clone, freeze, search
from echostore.testing.coherence_write_models import PinModel, PostModel, TwoRootsModel, WaitModel, WriteModel


class Case(NamedTuple):
    name: str
    at_least: int
    model: Callable[[str], Model]


CASES = [
    Case("a link, three ticks", 233_000, lambda name: IndexModel(name, ticks=3)),
    Case("a link, the root crashes", 248_000, lambda name: IndexModel(name, ticks=2, crashes=(1, 0))),
    Case(
        "a link, everybody evicts",
        51_000,
        lambda name: IndexModel(name, ticks=2, forgets=True, evicts=True, leaf_evicts=True),
    ),
    Case("a link, two indexes", 42_000, lambda name: IndexModel(name, specs=2, ticks=1, forgets=True)),
    Case(
        "an ordered link, loss and crash",
        58_000,
        lambda name: IndexModel(
            name, ticks=3, ordered=True, forgets=True, evicts=True, leaf_evicts=True, crashes=(1, 0)
        ),
    ),
    Case("a tree, two ticks", 189_000, lambda name: IndexModel(name, edge=True, ticks=2, always_changes=True)),
    Case("a tree with two leaves", 174_000, lambda name: IndexModel(name, edge=True, ticks=1, leaves=2)),
    Case(
        "an ordered tree, the edge crashes",
        36_000,
        lambda name: IndexModel(name, edge=True, ticks=2, ordered=True, crashes=(0, 1)),
    ),
    Case("lanes", 21_000, lambda name: IndexModel(name, ticks=1, specs=2, lanes=2)),
    Case(
        "frames in order",
        2_300,
        lambda name: IndexModel(name, ticks=2, specs=2, lanes=1, ordered=True, always_changes=True),
    ),
    Case("deltas", 12_000, lambda name: IndexModel(name, ticks=2, deltas=True, evicts=True)),
    Case("pins and a short memory", 81_000, lambda name: PinModel(name, ticks=2, window=1, always_changes=True)),
    Case("a leaf that only waits", 600, lambda name: WaitModel(name, ticks=3, crashes=(1, 0), always_changes=True)),
    Case("a leaf that only waits, behind an edge", 30, lambda name: WaitModel(name, ticks=2, edge=True)),
    Case("writes", 700, lambda name: WriteModel(name, batches=2, edges=0)),
    Case(
        "writes, the root crashes",
        5_900,
        lambda name: WriteModel(name, batches=2, edges=1, ticks=1, root_crashes=1, ordered=True),
    ),
    Case(
        "arcs granted again",
        18_000,
        lambda name: WriteModel(name, batches=2, edges=1, ticks=1, regrants=1, ordered=True),
    ),
    Case(
        "a leaf that loses all it knew",
        80_000,
        lambda name: WriteModel(name, batches=2, edges=0, ticks=1, leaf_crashes=1),
    ),
    Case("two roots", 21_000, lambda name: TwoRootsModel(name, ticks=2, reconnects=1)),
    Case("messages", 3_500, lambda name: PostModel(name, ticks=2)),
    Case("messages through an edge", 800, lambda name: PostModel(name, ticks=1, edge=True)),
    Case("attackers on every link", 101_000, lambda name: AttackModel(name)),
    Case("messages between roots", 1_000, lambda name: RootsModel(name, partings=1)),
    Case("messages between roots, the sender's falls over", 11_000, lambda name: RootsModel(name, crashes=(1, 0))),
    Case("messages between roots, the target's falls over", 8_000, lambda name: RootsModel(name, crashes=(0, 1))),
    Case(
        "messages between roots, some are given up",
        13_000,
        lambda name: RootsModel(name, gives_up=1, partings=1),
    ),
    Case(
        "messages between roots, said once",
        100,
        lambda name: RootsModel(name, crashes=(1, 1), repeats=False, ordered=True),
    ),
]


def test_the_searches_see_a_million_states() -> None:
    assert sum(case.at_least for case in CASES) >= 1_000_000


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_state_is_sound_and_no_state_is_stuck(case: Case) -> None:
    """C1 to C9 on every state, L1 to L4 from every state."""
    found = search(case.model(case.name))
    assert found.violation is None, "\n".join([found.violation or "", *found.trace])
    assert found.complete
    assert found.stuck == 0, "\n".join(found.stuck_trace)
    assert found.states >= case.at_least


def test_a_leaf_that_moves_between_edges_sees_its_batches_once() -> None:
    """Too large to be complete: the first 60,000 states, nearest first."""
    found = search(WriteModel("moves", batches=2, edges=2, ticks=1, moves=1), limit=60_000, liveness=False)
    assert found.violation is None, "\n".join([found.violation or "", *found.trace])
    assert found.states >= 60_000


@pytest.mark.parametrize("mutant", [*MUTANTS, *ROOT_MUTANTS, *ATTACK_MUTANTS], ids=lambda mutant: mutant.name)
def test_no_rule_can_be_left_out(mutant: Mutant) -> None:
    with mutant.applied():
        found = search(mutant.model(), limit=300_000, liveness=mutant.fault != BROKEN)
    if mutant.fault == BROKEN:
        assert found.violation is not None
    else:
        assert found.violation is None
        assert found.complete
        assert found.stuck > 0


CLOCK = Arc(SystemId(b"r" * 16))


def two_updates() -> list[Frame]:
    """Two updates in a row over two lanes, as their frames."""
    items = tuple(Invalidate(Spec(bytes([each]))) for each in range(3))
    first = Update(CLOCK, 0, 1, (), items)
    second = Update(CLOCK, 1, 2, (), items[:2])
    return [*frames_of(first, 2), *frames_of(second, 2)]


def reached(frames: list[Frame]) -> list[Update]:
    reader, at, whole = UpdateReader(), 0, []
    for frame in frames:
        assert reader.take(frame, at) is None
        while (update := reader.next(CLOCK, at)) is not None:
            whole.append(update)
            at = update.tick
    return whole


def test_what_is_read_depends_on_the_set_of_frames_alone() -> None:
    """Every subset of the frames: in order, backwards and each twice, they give the same updates, whole or none."""
    frames = two_updates()
    seen = set()
    for count in range(len(frames) + 1):
        for chosen in combinations(frames, count):
            forwards = reached(list(chosen))
            assert forwards == reached(list(reversed(chosen))) == reached([*chosen, *chosen])
            ticks = tuple(update.tick for update in forwards)
            assert ticks in ((), (1,), (1, 2))
            assert (1 in ticks) == set(frames[:4]).issubset(chosen)
            assert (2 in ticks) == (len(chosen) == len(frames))
            assert all(len(update.items) == {1: 3, 2: 2}[update.tick] for update in forwards)
            seen.add(ticks)
    assert seen == {(), (1,), (1, 2)}


def test_all_deliveries_of_four_messages_have_their_effect_once() -> None:
    """Permutations of four messages, with any of them repeated at the end: each has its effect once."""
    sender = SystemId(b"r" * 16, (1,))
    deliveries = 0
    for order in permutations(range(1, 5)):
        for again in product((False, True), repeat=4):
            receiver, effects = Receiver(), []
            for seq in [*order, *(seq for seq, twice in zip(order, again, strict=True) if twice)]:
                if receiver.take(MessageId(sender, 1, seq), 1):
                    effects.append(seq)
            assert sorted(effects) == [1, 2, 3, 4]
            (window,) = receiver.windows.values()
            assert window == (4, frozenset())
            deliveries += 1
    assert deliveries == 384


def test_a_clone_shares_nothing_that_changes() -> None:
    """The search stands on this: a machine with a number is never changed."""
    model = IndexModel("clone")
    state = model.initial()
    root = model.machines[state[0][0]]
    copy = clone(root)
    assert freeze(copy) == freeze(root)
    assert copy.core.serving.holdings is copy.core.holdings
    copy.core.holdings.cur += 1
    assert freeze(copy) != freeze(root)
    assert root.core.holdings.cur == 0
