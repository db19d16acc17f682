"""The checker of running thin systems finds each kind of bad history; and machines over two roots keep C4 under it."""

from collections import deque
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from echostore.kernel.coherence.directory import Directory, Record
from echostore.kernel.coherence.events import Advanced, ChildOpened, Effect, Opening, Received, Send
from echostore.kernel.coherence.events import LinkId as Link
from echostore.kernel.coherence.holdings import Holdings, Version
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import (
    Acquire,
    Arc,
    Delta,
    FollowsEpoch,
    IndexValue,
    IssuedId,
    Linked,
    Message,
    MessageId,
    Patch,
    PublishOp,
    Spec,
    SystemId,
    Update,
    UserMessage,
    Witness,
)
from echostore.kernel.coherence.root import Root
from echostore.kernel.coherence.serving import Serving
from echostore.testing import coherence_checker
from echostore.testing.coherence_checker import CoherenceChecker
from echostore.testing.coherence_models import PLAIN

CLOCK, OTHER = Arc(SystemId(b"r" * 16)), Arc(SystemId(b"s" * 16))
ARC = Arc(SystemId(b"r" * 16, (1,)), 1)
HOME, SIDE = Link("home"), Link("side")
A, B = Spec(b"a"), Spec(b"b")
TRUE, FALSE = IndexValue(b"the true value"), IndexValue(b"another value")


def checker() -> CoherenceChecker:
    made = CoherenceChecker((A, B), lambda: None)  # type: ignore[arg-type, return-value]  # nothing is evaluated
    made.truth = {tick: {A: TRUE, B: TRUE} for tick in range(1, 4)}
    return made


def holding(value: IndexValue, cur: int = 2) -> Holdings:
    holdings = Holdings(cur)
    holdings.learn(A, Version(1, cur, value, live=True))
    return holdings


def leaf_at(tick: int, *, link: Link = HOME, clock: Arc = CLOCK) -> Leaf:
    leaf = Leaf(PLAIN, HOME)
    leaf.systems[HOME] = ARC.system
    show(leaf, tick, link=link, clock=clock)
    return leaf


def show(
    leaf: Leaf, tick: int, *, link: Link = HOME, clock: Arc = CLOCK, follows: tuple[FollowsEpoch, ...] = ()
) -> None:
    leaf.join(link)
    cache = leaf.caches[link]
    cache.opening = 1
    assert cache.open(1, Linked(clock, tick, follows)) == []


def serving(record: Record, holdings: Holdings, *, marked: bool = False) -> Serving:
    made = Serving(holdings, PLAIN, CLOCK)
    directory = made.links[HOME] = Directory(1, holdings.cur)
    directory.records[A] = record
    if marked:
        directory.marks.add(A)
    return made


def c1(value: IndexValue) -> None:
    checker().check_holdings(holding(value))


def c2(value: IndexValue) -> None:
    checker().check_transaction(2, {A: TRUE, B: value})


def c3(value: IndexValue) -> None:
    found = checker()
    found.check_leaf("one", leaf_at(3))
    found.check_leaf("one", leaf_at(3 if value is TRUE else 2))


def c4_batches(value: IndexValue) -> None:
    """The leaf is at tick 2 and says that it includes batch 1; batch 2 is part of tick 2 or of tick 3."""
    found, leaf = checker(), leaf_at(2)
    found.committed(ARC, 1, 2)
    found.committed(ARC, 2, 3 if value is TRUE else 2)
    leaf.caches[HOME].follow([FollowsEpoch(ARC, 1)])
    found.check_leaf("one", leaf)


def c4_too_early(value: IndexValue) -> None:
    found, leaf = checker(), leaf_at(2)
    found.committed(ARC, 1, 2 if value is TRUE else 3)
    leaf.caches[HOME].follow([FollowsEpoch(ARC, 1)])
    found.check_leaf("one", leaf)


def c4_messages(value: IndexValue) -> None:
    context = ((Witness(CLOCK, 2 if value is TRUE else 3), Witness(ARC, 7)),)
    note = UserMessage(MessageId(ARC.system, 0, 1), 0, ARC.system, context, "note", b"")
    checker().delivered(leaf_at(2), note)


def c4_two_roots(value: IndexValue) -> None:
    """The other root's tick 3 includes tick 2 of this one: the leaf that is at 1 may not offer both as one view."""
    found, leaf = checker(), leaf_at(2 if value is TRUE else 1)
    show(leaf, 3, link=SIDE, clock=OTHER)  # and this link did not say so
    found.followed[OTHER, 3] = {CLOCK: 2}
    found.check_causal(leaf)
    assert found.checked["C4"] == 1


def c5_both(value: IndexValue) -> None:
    found, leaf = checker(), leaf_at(2)
    leaf.outbox.add(ARC, (PublishOp(IssuedId(ARC, 1), b"item", b"make"),))
    leaf.caches[HOME].follow([FollowsEpoch(ARC, 0 if value is TRUE else 1)])
    found.check_leaf("one", leaf)


def c5_twice(value: IndexValue) -> None:
    leaf = leaf_at(2)
    leaf.outbox.add(ARC, (PublishOp(IssuedId(ARC, 1), b"item", b"make"),))
    leaf.outbox.batches *= 1 if value is TRUE else 2
    checker().check_leaf("one", leaf)


def c6_again(value: IndexValue) -> None:
    found = checker()
    found.committed(ARC, 1, 2)
    found.committed(ARC, 2 if value is TRUE else 1, 3)


def c6_gap(value: IndexValue) -> None:
    found = checker()
    found.committed(ARC, 1, 2)
    found.committed(ARC, 2 if value is TRUE else 3, 3)


def c7(value: IndexValue) -> None:
    found = checker()
    found.made(b"one")
    found.made(b"two" if value is TRUE else b"one")


def c8(value: IndexValue) -> None:
    """A live record, and the value above is held, or ended without a mark."""
    holdings = holding(TRUE)
    if value is not TRUE:
        holdings.end(A)
        holdings.cur = 3
    made = checker()
    made.check_serving(serving(Record(live=True), holdings))
    assert made.checked["C8"] == 1
    holdings.evict(A)
    made.check_serving(serving(Record(live=True), holdings, marked=True))  # it will be said with the next update


def c8_delta(value: IndexValue) -> None:
    holdings = holding(TRUE)
    if value is not TRUE:
        holdings.evict(A)
    checker().updated(Directory(1, 1), Update(CLOCK, 1, 2, (), (Delta(A, 1, Patch(b"p")),)), holdings)


def c9(value: IndexValue) -> None:
    made = serving(Record(), holding(TRUE))
    made.links[HOME].marks.add(A if value is TRUE else B)
    checker().check_serving(made)


def c10(value: IndexValue) -> None:
    """Two deltas of half the value each may be; a third may not, until the index is read."""
    holdings, directory, found = holding(TRUE), Directory(1, 1), checker()
    part = Patch(b"p" * (len(TRUE) // 2))
    update = Update(CLOCK, 1, 2, (), (Delta(A, 1, part),))
    found.updated(directory, update, holdings)
    found.updated(directory, update, holdings)
    if value is TRUE:
        found.spent.clear()
    found.updated(directory, update, holdings)


HISTORIES: list[tuple[str, Callable[[IndexValue], None]]] = [
    ("C1", c1),
    ("C2", c2),
    ("C3", c3),
    ("C4", c4_batches),
    ("C4", c4_too_early),
    ("C4", c4_messages),
    ("C4", c4_two_roots),
    ("C5", c5_both),
    ("C5", c5_twice),
    ("C6", c6_again),
    ("C6", c6_gap),
    ("C7", c7),
    ("C8", c8),
    ("C8", c8_delta),
    ("C9", c9),
    ("C10", c10),
]


@pytest.mark.parametrize(("rule", "history"), HISTORIES, ids=[each.__name__ for _, each in HISTORIES])
def test_a_bad_history_is_found_and_a_good_one_is_not(rule: str, history: Callable[[IndexValue], None]) -> None:
    history(TRUE)
    with pytest.raises(AssertionError, match=f"^{rule}: "):
        history(FALSE)


def test_what_machines_do_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks, commits, deltas, grants, reads and messages come to the checker by themselves."""
    monkeypatch.setattr(coherence_checker, "fresh_answer", lambda spec, source: TRUE)
    found = checker()
    found.truth.clear()
    with found.watching():
        root = Root(CLOCK.system, PLAIN)
        root.receive(Advanced(1, (), (FollowsEpoch(OTHER, 4),)))
        root.receive(Advanced(2))
        assert found.truth == {1: {A: TRUE, B: TRUE}, 2: {A: TRUE, B: TRUE}}
        assert found.followed[CLOCK, 2] == {OTHER: 4}
        directory = Directory(1, 1)
        found.spent[directory, A] = found.spent[directory, B] = 5
        directory.grant(Acquire(A), Version(1, 1, TRUE, live=False), PLAIN)
        directory.touch(B)
        assert found.spent == {}
        with pytest.raises(AssertionError, match="names two states"):
            found.exposed(2)


class TwoRoots:
    """Two roots that follow each other's ticks, and a leaf with a link to each; every message takes its time."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.leaf = Leaf(PLAIN, HOME)
        self.leaf.join(SIDE)
        self.roots = {HOME: Root(CLOCK.system, PLAIN), SIDE: Root(OTHER.system, PLAIN)}
        self.lanes: dict[tuple[Link, bool], deque[tuple[int, Message]]] = {
            (link, down): deque() for link in (HOME, SIDE) for down in (True, False)
        }
        for link, root in self.roots.items():
            self.carry(link, root.receive(ChildOpened(link, 1)), down=True)
            self.carry(link, self.leaf.receive(Opening(link, 1, 7)), down=False)

    def carry(self, link: Link, effects: list[Effect], *, down: bool) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.lanes[effect.link if not down else link, down].append((effect.generation, effect.message))

    def step(self) -> None:
        """A root goes on, having seen some of the other's ticks; or a message arrives."""
        link = self.random.choice((HOME, SIDE))
        if self.random.random() < 0.3:
            root, other = self.roots[link], self.roots[SIDE if link == HOME else HOME]
            seen = self.random.randint(max(0, other.holdings.cur - 2), other.holdings.cur)
            follows = (FollowsEpoch(other.clock, seen),) if seen else ()
            self.carry(link, root.receive(Advanced(root.holdings.cur + 1, (), follows)), down=True)
            self.carry(link, root.serving.tell(), down=True)
            return
        down = self.random.random() < 0.7
        lane = self.lanes[link, down]
        if lane:
            generation, message = lane.popleft()
            taker: Any = self.leaf if down else self.roots[link]
            self.carry(link, taker.receive(Received(link, generation, message)), down=not down)


def test_c4_a_view_over_two_roots_is_offered_only_when_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots that include ticks of each other; the leaf hears of either at its own pace."""
    found = CoherenceChecker((), lambda: SimpleNamespace())  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(found, "exposed", lambda tick: None)
    offered = refused = 0
    with found.watching():
        for seed in range(20):
            found.followed.clear()
            story = TwoRoots(seed)
            for _ in range(200):
                story.step()
                found.check_causal(story.leaf)
                offered += story.leaf.is_causal()
                refused += not story.leaf.is_causal()
    assert found.checked["C4"] > 500
    assert refused > 100, "the links were never apart, and nothing was tried"
    assert offered > 100
