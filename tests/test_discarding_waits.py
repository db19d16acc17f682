"""Epochs after a discarding one look at what was written and at what waited, and leave out what looking at all would."""

import random
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from echostore.kernel.errors import Corrupt, EchoError, Refused
from echostore.kernel.ids import FeedId, ItemId, Stamp
from echostore.kernel.items.discarding import Waits
from echostore.kernel.models.base import Horizon
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.threaded_log import Post, Retention, Retract, Revive, ThreadedLog, post_id
from echostore.kernel.party.epoch_chain import Epoch
from echostore.peer.discard_waits import KEPT_MAX, kept_waits
from echostore.peer.epoch_fold import Folded, fold_to
from echostore.peer.epoch_states import EpochStates
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.wire.base_epoch import BaseEpoch, BaseName
from echostore.wire.models import threaded_log as log_codec
from echostore.wire.placements import PlacementReader
from echostore.wire.tree_reader import NodeReader, TreeReader
from peer_builder import Circle
from reference.discarding import discard_looking_at_all
from sequence_story import FEEDS, ITEM
from test_discarded_history import Writer
from test_discarding import Clock, seen_by_all

KINDS = ("property-set", "text", "growable-array", "threaded-log")
VERBS = (
    "make make write write write write delete delete restore move embed unembed meet speak speak time epoch epoch join"
)
Step = tuple[int, int, int, int]
STEPS = st.lists(st.tuples(*[st.integers(0, 255)] * 4), min_size=15, max_size=45)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob", now_ms=Clock()) as made:
        yield made


def base_of(party: Party, epoch: Epoch) -> BaseEpoch | None:
    """The epoch before one, as this peer has it."""
    blobs = party.runtime.blobs
    assert blobs is not None
    before = next((each for each in Epochs(party).own_chain() if each.hash == epoch.genesis.previous), None)
    if before is None:
        return None
    return BaseEpoch(BaseName.of(before.genesis, before.hash), blobs.get, party.runtime.processor.factory)


def looking_at_all(party: Party, epoch: Epoch) -> Folded:
    """What an epoch should say, by the slow account."""
    with mock.patch("echostore.peer.epoch_fold.discard_at", discard_looking_at_all):
        found = fold_to(
            epoch.genesis,
            party.key,
            feeds=party.runtime.feeds,
            factory=party.runtime.processor.factory,
            base=base_of(party, epoch),
        )
    assert found is not None
    blobs = party.runtime.blobs
    assert blobs is not None
    items = TreeReader(found.root.index_root, lambda cid: found.blobs.get(cid) or blobs.get(cid)).items()
    assert set(found.root.models) == {(state.model, state.version) for _, state in items}
    return found


def looked_at(party: Party, epoch: Epoch) -> int:
    """How many items this peer looks at to make the state of an epoch."""
    found = EpochStates(party, party.peer.opener.identity_in(party)).at(epoch.genesis)
    assert isinstance(found, Folded)
    assert found.cid == epoch.genesis.snapshot
    assert found.settled is not None
    return found.settled.looked


class Tale:
    """A party of two, later three, that writes, deletes and discards as some numbers say."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.circle = Circle(folder, "ann", "bob", now_ms=self.clock)
        self.items: list[ItemId] = [self.circle.party("ann").create("property-set").id]
        self.epochs = self.gone = self.looked = self.there = 0

    def tell(self, steps: list[Step]) -> None:
        verbs = VERBS.split()
        for verb, who, which, amount in steps:
            party = self.circle.party(self.circle.names[who % len(self.circle.names)])
            action = getattr(self, verbs[verb % len(verbs)])
            if action in (self.epoch, self.make):
                action(party, which, amount)
                continue
            with suppress(EchoError):  # what is not there, or not allowed: as people try things
                action(party, which, amount)
        for _ in range(2):
            self.speak()
            self.epoch(self.circle.party("ann"), 0, 1)

    def _item(self, party: Party, which: int) -> Any:
        return party.get(self.items[which % len(self.items)])

    def make(self, party: Party, which: int, amount: int) -> None:
        known = [item for item in self.items if party.has(item)]
        parent = party.get(known[which % len(known)]) if known and amount % 3 else None
        made = party.create(KINDS[(which + amount) % len(KINDS)], parent=parent)
        if made.model == "threaded-log":
            made.set_retention(**({"count_max": 1} if amount % 2 else {"age_ms_max": 50_000}))
        self.items.append(made.id)

    def write(self, party: Party, which: int, amount: int) -> None:
        item = self._item(party, which)
        if item.model == "property-set":
            item["n"] = amount
        elif item.model == "text" and amount % 3 == 0 and len(item) > 1:
            item.delete(amount % (len(item) - 1), 1)
        elif item.model == "text":
            item.insert(amount % (len(item) + 1), "abc"[: 1 + amount % 3])
        elif item.model == "threaded-log":
            item.post(amount)
        elif len(item) > 2 and amount % 2:
            item.move_element(amount % len(item), (amount // 2) % len(item))
        else:
            item.append(amount, amount + 1)

    def delete(self, party: Party, which: int, amount: int) -> None:
        self._item(party, which).delete()

    def restore(self, party: Party, which: int, amount: int) -> None:
        self._item(party, which).restore()

    def move(self, party: Party, which: int, amount: int) -> None:
        self._item(party, which).move(self._item(party, amount) if amount % 4 else None)

    def embed(self, party: Party, which: int, amount: int) -> None:
        self._item(party, which).embed_in(self._item(party, amount))

    def unembed(self, party: Party, which: int, amount: int) -> None:
        self._item(party, which).unembed_from(self._item(party, amount))

    def time(self, party: Party, which: int, amount: int) -> None:
        self.clock.now += 1000 * amount

    def meet(self, *_: object) -> None:
        self.circle.meet_all()

    def speak(self, *_: object) -> None:
        seen_by_all(self.circle)

    def join(self, *_: object) -> None:
        """From now on nothing is stable, until this one has written too."""
        if "cat" not in self.circle.names:
            self.circle.meet_all()
            cat, ann = self.circle._open("cat"), self.circle.party("ann")
            cat.enter(ann.members.admit(cat.request_join(self.circle.key), role="editor"))
            self.circle.peers["cat"] = cat
            self.circle.names = (*self.circle.names, "cat")
            self.circle.meet_all()

    def epoch(self, party: Party, which: int, amount: int) -> None:
        """By the founder; everybody says the same, now or later."""
        ann = self.circle.party("ann")
        before = (None, self.clock() - 1, self.clock.now - 1000 * which)[amount % 3]
        items = len(ann.runtime.all_items())
        try:
            made = Epochs(ann).create(discard_before_ms=before)
        except Refused:
            return  # nothing has changed, or others may have chosen another
        epoch = Epochs(ann).get(made.number)
        said = looking_at_all(ann, epoch)
        assert (said.cid, said.cut) == (epoch.genesis.snapshot, epoch.genesis.cut)
        self.epochs += 1
        self.gone += max(0, items - said.root.item_count)
        if epoch.genesis.discard_before_ms:
            self.looked += looked_at(ann, epoch)
            self.there += items
        if amount % 4:
            self.circle.meet_all()
            for name in self.circle.names[1:]:
                assert all(judged.verdict != "disputed" for judged in Epochs(self.circle.party(name)).review())
            self.circle.meet_all()


def told(steps: list[Step]) -> Tale:
    with tempfile.TemporaryDirectory() as folder:
        tale = Tale(Path(folder))
        try:
            tale.tell(steps)
            for name in tale.circle.names[1:]:
                assert not any(view.disputed_by for view in Epochs(tale.circle.party(name)).all())
        finally:
            tale.circle.close()
    return tale


@settings(max_examples=12, phases=(Phase.generate,))  # homes on disk: too slow to make a story smaller
@given(steps=STEPS)
def test_epochs_of_random_parties_leave_out_what_looking_at_all_items_would(steps: list[Step]) -> None:
    told(steps)


def test_in_such_parties_something_goes_and_not_all_is_looked_at() -> None:
    tales = []
    for seed in range(4):
        chance = random.Random(seed)
        tales.append(told([tuple(chance.randrange(256) for _ in range(4)) for _ in range(60)]))  # type: ignore[misc]
    assert sum(tale.epochs for tale in tales) >= 8
    assert sum(tale.gone for tale in tales) >= 4
    assert sum(tale.looked for tale in tales) < sum(tale.there for tale in tales)


# one thing each


def kept_of(party: Party, epoch: Epoch) -> Waits | None:
    """What a peer keeps of what items wait for at an epoch."""
    return kept_waits(party.runtime.feeds, epoch.number, epoch.genesis.snapshot)


def epoch_of(circle: Circle, *, discard: bool = False) -> Epoch:
    """The next epoch, by ann, that all stand for; by a new time or by the one before."""
    ann = circle.party("ann")
    number = Epochs(ann).create(discard_before_ms=ann.runtime.now_ms() if discard else None).number
    circle.meet_all()
    for name in circle.names[1:]:
        assert [str(judged.verdict) for judged in Epochs(circle.party(name)).review()] == ["attested"]
    circle.meet_all()
    epoch = Epochs(ann).get(number)
    assert epoch.final
    assert looking_at_all(ann, epoch).cid == epoch.genesis.snapshot
    return epoch


def grown(circle: Circle, count: int) -> list[Any]:
    """So many items that can lose nothing."""
    ann = circle.party("ann")
    with ann.batch():
        return [ann.create("property-set", n=number, text="x" * 500) for number in range(count)]


def test_a_deletion_that_waited_for_somebody_takes_along_what_hangs_below(circle: Circle) -> None:
    ann = circle.party("ann")
    grown(circle, 30)
    gone = ann.create("property-set")
    child = ann.create("property-set", parent=gone)
    seen_by_all(circle)
    gone.delete()
    circle.meet_all()
    first = epoch_of(circle, discard=True)
    assert ann.has(gone.id), "bob has not said that he knows of it"
    ann.system_item["n"] = 1
    epoch_of(circle)
    assert ann.has(gone.id)
    seen_by_all(circle)
    epoch = epoch_of(circle)
    assert not any(ann.has(item.id) for item in (gone, child))
    assert epoch.genesis.discard_before_ms == first.genesis.discard_before_ms
    for name in circle.names:
        assert looked_at(circle.party(name), epoch) < 10
    with mock.patch.object(PlacementReader, "at_each", side_effect=Corrupt("lost")):
        looked_at(ann, epoch)  # without the placements of the epoch before, its items say the same


def test_what_is_embedded_elsewhere_goes_when_that_goes(circle: Circle) -> None:
    ann = circle.party("ann")
    gone, guest, host, other = (ann.create("property-set") for _ in range(4))
    guest.embed_in(host)
    guest.delete()
    child = ann.create("property-set")
    child.move(gone)
    child.embed_in(other)
    gone.delete()
    seen_by_all(circle)
    epoch_of(circle, discard=True)
    assert ann.has(guest.id), "what is embedded in something that stays is kept"
    assert ann.has(gone.id), "and so is what it hangs below"
    host.delete()
    child.unembed_from(other)
    seen_by_all(circle)
    epoch_of(circle, discard=True)
    assert not any(ann.has(item.id) for item in (gone, guest, host, child))
    assert ann.has(other.id)


def lost(party: Party, item: ItemId) -> bool:
    """Whether an item of `writings` is without its history."""
    model = party.runtime.state.record(item).model  # type: ignore[union-attr]  # it is there
    return len(model.entries()) == 1 if isinstance(model, ThreadedLog) else model.ground is not None


def writings(party: Party) -> list[ItemId]:
    """One item of each model that has something to lose."""
    made = [party.create(model) for model in KINDS[1:]]
    for item in made:
        for number in range(3):
            item.append(f"word {number} ")
    made[-1].set_retention(count_max=1)
    return [item.id for item in made]


def test_history_that_waited_for_somebody_goes_when_they_have_seen_it(circle: Circle) -> None:
    ann = circle.party("ann")
    seen_by_all(circle)
    held = writings(ann)
    circle.meet_all()
    first = epoch_of(circle, discard=True)
    assert set(held) <= set(kept_of(ann, first) or ())
    ann.system_item["n"] = 1
    assert looked_at(ann, epoch_of(circle)) < len(held), "who waits is left alone"
    assert not any(lost(ann, item) for item in held)
    seen_by_all(circle)
    last = epoch_of(circle)
    for name in circle.names:
        assert all(lost(circle.party(name), item) for item in held)
        assert kept_of(circle.party(name), last) == {}, "nothing is left to wait for"


def test_history_that_was_too_young_goes_by_a_later_time(circle: Circle) -> None:
    ann = circle.party("ann")
    epoch_of(circle, discard=True)
    held = writings(ann)
    seen_by_all(circle)
    epoch_of(circle)
    ann.system_item["n"] = 1
    assert looked_at(ann, epoch_of(circle)) < len(held), "who waits is left alone"
    assert not any(lost(ann, item) for item in held)
    ann.system_item["n"] = 2
    epoch_of(circle, discard=True)
    assert all(lost(circle.party(name), item) for item in held for name in circle.names)


def test_who_has_no_list_looks_at_all_that_may_lose_something_once(circle: Circle) -> None:
    ann, bob = circle.party("ann"), circle.party("bob")
    items = grown(circle, 30)
    texts = [ann.create("text") for _ in range(5)]
    for text in texts:
        text.insert(0, "a text")
    seen_by_all(circle)
    epoch_of(circle, discard=True)
    bob.runtime.feeds.set_about(dict.fromkeys(bob.runtime.feeds.about_names("waits/")))
    items[0]["n"] = -1
    second = epoch_of(circle)
    assert len(texts) <= looked_at(bob, second) < len(items)
    bob.runtime.feeds.set_about(dict.fromkeys(bob.runtime.feeds.about_names("waits/0000000001"), b"not a list"))
    assert looked_at(bob, second) >= len(texts), "what can't be read is no list"
    items[1]["n"] = -1
    assert looked_at(circle.restart("bob"), epoch_of(circle)) < len(texts), "kept, and also after a restart"


def test_lists_of_old_epochs_go(circle: Circle) -> None:
    ann = circle.party("ann")
    for number in range(KEPT_MAX + 2):
        ann.system_item["n"] = number
        epoch_of(circle, discard=True)
    chain = Epochs(ann).chain()
    assert [kept_of(ann, epoch) is not None for epoch in chain] == [False] * 2 + [True] * KEPT_MAX
    looked_at(ann, chain[1])
    assert [kept_of(ann, epoch) is not None for epoch in chain] == [False] * 2 + [True] * KEPT_MAX


# what it costs


def costs(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch, *, later: bool) -> tuple[int, int]:
    """Items looked at and nodes of trees read by an epoch after ten items were written and one deleted, in a party of so many.

    By a later time, by which the deleted one goes; or by an old one, beside texts that are too young to lose anything.
    """
    with Circle(folder, "ann", now_ms=Clock()) as circle:
        ann = circle.party("ann")
        ann.create("property-set").delete()
        epoch_of(circle, discard=True)
        items = grown(circle, count)
        with ann.batch():
            for _ in range(0 if later else count // 10):
                ann.create("text").insert(0, "a text")
        epoch_of(circle)
        for item in items[:10]:
            item["n"] = -1
        items[10].delete()
        ann.flush()
        read = 0
        parse = NodeReader.open_bytes

        def counted(reader: NodeReader[Any], *arguments: Any) -> Any:
            nonlocal read
            read += 1
            return parse(reader, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(NodeReader, "open_bytes", counted)
            made = Epochs(ann).create(discard_before_ms=ann.runtime.now_ms() if later else None)
        assert ann.has(items[10].id) != later
        return looked_at(ann, Epochs(ann).get(made.number)), read


@pytest.mark.parametrize("later", [False, True])
def test_an_epoch_looks_at_what_was_written_whatever_the_party_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    small, large = (costs(tmp_path / str(count), count, monkeypatch, later=later) for count in (400, 4000))
    assert small[0] == large[0] == 11
    assert large[1] < 4 * small[1], "the paths to them are longer in a larger tree, which has ten times the nodes"


# the law itself, for logs; `discarding_laws` has it for texts and lists

ANN, BOB = FeedId(b"feed-ann"), FeedId(b"feed-bob")
HORIZONS = st.builds(
    lambda before_ms, ann, bob: Horizon(before_ms, {ANN: ann, BOB: bob}),
    st.integers(1, 200),
    st.integers(-1, 12),
    st.integers(-1, 12),
)


@given(
    acts=st.lists(st.tuples(st.sampled_from([ANN, BOB]), st.integers(0, 9), st.integers(0, 99)), max_size=20),
    first=HORIZONS,
    then=HORIZONS,
)
def test_a_log_loses_nothing_while_it_waits(acts: list[tuple[FeedId, int, int]], first: Horizon, then: Horizon) -> None:
    made = ThreadedLog(ItemId(b"i" * 16))
    made.apply(Retention(30, 2), Stamp(0, BOB, 0, 0), 0)
    posts: dict[FeedId, list[Stamp]] = {ANN: [], BOB: []}
    for depth, (feed, act, number) in enumerate(acts, 2):
        stamp = Stamp(depth, feed, depth // 2, depth % 2)
        own = posts[feed]
        if act == 0:
            made.apply(Retention(number % 3 * 30, number % 4), stamp, number)
        elif act == 1 and own:
            made.apply((Retract, Revive)[number % 2](post_id(own[number % len(own)])), stamp, number)
        else:
            made.apply(Post(number), stamp, number)
            own.append(stamp)
    made.discard(first)
    waits = made.waits(first)
    left = log_codec.decode_state(made.item, log_codec.encode_state(made))
    if not any(map(then.ends, waits)):
        assert not left.discard(then)


def test_a_list_that_kept_its_history_may_lose_some_when_the_frontier_goes_back() -> None:
    """Two moved one element at once, which leaves a place that holds nothing; what came before could go on its own."""
    ann, bob = Writer(GrowableArray(ITEM), FEEDS[0]), Writer(GrowableArray(ITEM), FEEDS[1])
    ann.model.insert(0, "x")
    ann.model.insert(1, "y")
    ann.model.insert(2, "z")
    bob.model.apply(*ann.seal())
    ann.model.move(0, 2)
    bob.model.move(0, 1)
    moves = ann.seal(time_ms=100_000), bob.seal(depth=2, time_ms=100_000)
    ann.model.apply(*moves[1])
    bob.model.apply(*moves[0])
    ann.model.insert(0, "w")
    ann.seal(depth=9, time_ms=200_000)
    whole, some = Horizon(300_000, {FEEDS[0]: 2, FEEDS[1]: 0}), Horizon(300_000, {FEEDS[0]: 0})
    assert not ann.model.discard(whole)
    assert any(map(some.ends, ann.model.waits(whole)))
    assert ann.model.discard(some)
