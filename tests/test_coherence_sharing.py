"""Links that stand alike are told the same, worked out once: nobody is told anything else than alone."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.coherence.directory import SHARED_MAX, Directory
from echostore.kernel.coherence.events import (
    Advanced,
    ChildOpened,
    Evaluate,
    Evaluated,
    EvictEntry,
    EvictRecord,
    Flush,
    Forget,
    LinkId,
    Received,
    Send,
    Writable,
)
from echostore.kernel.coherence.messages import (
    Acquire,
    Arc,
    Attach,
    FollowsEpoch,
    IndexValue,
    Spec,
    SystemId,
    Touched,
    Update,
    WaitForEpoch,
)
from echostore.kernel.coherence.root import Root
from echostore.testing.coherence_models import PLAIN
from echostore.testing.coherence_search import freeze

OTHER = Arc(SystemId(b"o" * 16))
LINKS = [LinkId(name) for name in "abcde"]
SPECS = [Spec(name.encode()) for name in ("tasks", "notes", "lists")]

actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["all", "all", "acquire", "advance", "advance", "forget", "evict", "drop", "touch", "stop", "wait"]
        ),
        st.sampled_from(LINKS),
        st.sampled_from(SPECS),
        st.integers(0, 3),
    ),
    max_size=30,
)


class World:
    """A root with links, and values that change."""

    def __init__(self) -> None:
        self.root = Root(SystemId(b"r" * 16), PLAIN)
        self.values = dict.fromkeys(SPECS, IndexValue(b"0"))
        self.watched: set[Spec] = set()
        for number, link in enumerate(LINKS):
            self.root.receive(ChildOpened(link, number + 1))
            self.root.receive(Received(link, number + 1, Attach(number + 1, None, False, 0)))

    def act(self, action: str, link: LinkId, spec: Spec, number: int) -> None:
        root = self.root
        generation = root.serving.generations[link]
        match action:
            case "acquire":
                for effect in root.receive(Received(link, generation, Acquire(spec))):
                    if isinstance(effect, Evaluate):
                        cur = root.holdings.cur
                        self.watched.add(spec)
                        root.receive(Evaluated(spec, cur, cur, self.values[spec]))
            case "advance":
                changed = [(each, IndexValue(str(number).encode())) for each in SPECS[:number] if each in self.watched]
                self.values.update(changed)
                tick = root.holdings.cur + 1
                follows = (FollowsEpoch(OTHER, tick),) if number == 2 else ()
                root.receive(Advanced(tick, tuple(changed), follows))
            case "all":
                for each in LINKS:
                    self.act("acquire", each, spec, number)
            case "forget":
                root.receive(Forget(link, spec))
            case "evict":
                root.receive(EvictRecord(link, spec))
            case "drop":
                self.watched.discard(spec)
                root.receive(EvictEntry(spec))
            case "touch":
                root.receive(Received(link, generation, Touched((spec,))))
            case "stop":
                root.receive(Writable(link, writable=number > 0))
            case _:
                root.receive(Received(link, generation, WaitForEpoch(root.clock, root.holdings.cur + number)))


def copied(root: Root) -> Root:
    return copy.deepcopy(root, {id(PLAIN): PLAIN})


@given(actions)
def test_many_at_once_are_told_what_each_would_be_told_alone(actions: list[tuple[str, LinkId, Spec, int]]) -> None:
    """U1 to U5 hold for every link as if it were the only one: the same updates, the same records, the same marks."""
    world = World()
    for each in actions:
        world.act(*each)
        alone = copied(world.root)
        one_by_one = [effect for link in alone.serving.due() for effect in alone.receive(Flush(link))]
        together = copied(world.root)
        assert together.serving.tell() == one_by_one
        assert freeze(together) == freeze(alone)
        if each[3] % 2:
            world.root = together


def told(world: World) -> dict[LinkId, Update]:
    sent = [effect for effect in world.root.serving.tell() if isinstance(effect, Send)]
    return {each.link: each.message for each in sent if isinstance(each.message, Update)}


def test_links_that_stand_alike_are_told_one_and_the_same_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its bytes are made once; a link that was granted at another tick is told its own."""
    world = World()
    for link in LINKS[:4]:
        world.act("acquire", link, SPECS[0], 0)
    world.act("advance", LINKS[0], SPECS[0], 0)
    world.act("acquire", LINKS[4], SPECS[0], 0)
    examined = []
    examine = Directory._examine

    def counted(self: Directory, *more: object) -> object:
        examined.append(self)
        return examine(self, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Directory, "_examine", counted)
    first = told(world)
    assert set(first) == set(LINKS)
    assert len(examined) == 2, "once for four links, once for the one that was granted later"
    assert {id(first[link]) for link in LINKS[:4]} == {id(first[LINKS[0]])} != {id(first[LINKS[4]])}
    examined.clear()
    world.act("advance", LINKS[0], SPECS[0], 1)
    second = told(world)
    assert set(second) == set(LINKS)
    assert len(examined) == 1, "by now all five stand alike"
    assert len({id(update) for update in second.values()}) == 1


def test_links_with_many_marks_are_told_each_for_itself() -> None:
    """Comparing them would cost more than it saves, and memory for each."""
    world = World()
    specs = [Spec(f"spec {number:02}".encode()) for number in range(SHARED_MAX + 1)]
    world.values = dict.fromkeys(specs, IndexValue(b"0"))
    for link in LINKS[:2]:
        for spec in specs:
            world.act("acquire", link, spec, 0)
    world.act("advance", LINKS[0], specs[0], 0)
    updates = told(world)
    assert updates[LINKS[0]] == updates[LINKS[1]]
    assert updates[LINKS[0]] is not updates[LINKS[1]]
    assert len(updates[LINKS[0]].items) == SHARED_MAX + 1
