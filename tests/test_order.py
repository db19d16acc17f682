"""The orderer against the slow oracle of section 4: causal delivery, faults, forks, base epochs, and what it costs."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dag_story import CountingOrderer, History, Mind, Peer, feed_key, name, random_history
from echostore.kernel import order
from echostore.kernel.ids import LINK_PREFIX_BYTES, FeedId, Link, Stamp
from echostore.kernel.limits import DEPTH_MAX
from echostore.kernel.order import CONTROL, DATA, Cut, Envelope, FeedCursor
from echostore.kernel.reasons import Reason
from echostore.kernel.timeframe import Dependency
from reference import orderer as oracle

SEEDS = st.integers(0, 2**32)
UNKNOWN = FeedId(b"\xffnobody\xff")


def receive(peer: Peer, history: History, chance: random.Random, *, share: float = 1.0) -> None:
    """All blocks, or a share of each branch, in chunks and in random order; some arrive long before they are run."""
    events: list[Mind] = []
    target: dict[int, int] = {}
    for number, mind in enumerate(history.minds):
        target[number] = len(mind.blocks) if chance.random() < share else chance.randrange(len(mind.blocks) + 1)
        events += [mind] * chance.randrange(1, 5)
    chance.shuffle(events)
    numbers = {id(mind): number for number, mind in enumerate(history.minds)}
    quiet: list[FeedId] = []
    for mind in events:
        end = target[numbers[id(mind)]]
        peer.hold(mind, chance.randrange(end + 1))
        if chance.random() < 0.2:
            quiet.append(mind.id)
        else:
            peer.run([mind.id, *quiet], limit=chance.choice([None, None, 1]))
            quiet = []
    for number, mind in enumerate(history.minds):
        peer.hold(mind, target[number])
    peer.run([mind.id for mind in history.minds])


def assert_agrees(peer: Peer, history: History) -> None:
    """The peer stands where the oracle says a peer with these blocks must stand."""
    outcome = oracle.settle(history.feeds(peer.held()), peer.base)
    assert {place: cursor.length for place, cursor in peer.cursors.items()} == outcome.lengths
    assert {place: c.ended for place, c in peer.cursors.items() if c.ended is not None} == outcome.ended
    waiting = {(cursor.id, cursor.branch): cursor.waits_for for cursor in peer.orderer.waiting()}
    assert waiting == outcome.missing
    assert {(event.cursor.id, 0): event.reason for event in peer.ends} == {
        place: reason for place, reason in outcome.ended.items() if place[1] == 0
    }
    assert_delivered_well(peer)


def assert_delivered_well(peer: Peer) -> None:
    """Every feed in its own order, each block once, nothing left out, causes before effects (checked on the way)."""
    seqs: dict[FeedId, list[int]] = {}
    for delivery in peer.delivered:
        seqs.setdefault(delivery.cursor.id, []).append(delivery.seq)
    for (feed, branch), cursor in peer.cursors.items():
        if branch == 0:
            start = peer.base[feed].length if feed in peer.base else 0
            assert seqs.get(feed, []) == list(range(start, cursor.length))


# any arrival order


@given(SEEDS, st.integers(2, 5), st.integers(1, 25), st.integers(0, 2), st.integers(0, 2))
def test_small_histories_in_any_arrival_order(seed: int, feeds: int, steps: int, control: int, forks: int) -> None:
    chance = random.Random(seed)
    history = random_history(chance, feeds=feeds, steps=steps, control=control, forks=forks)
    for share in (1.0, 0.6):
        peer = Peer(history)
        receive(peer, history, chance, share=share)
        assert_agrees(peer, history)


@settings(max_examples=20)
@given(SEEDS)
def test_histories_of_fifty_feeds_in_any_arrival_order(seed: int) -> None:
    chance = random.Random(seed)
    history = random_history(chance, feeds=50, steps=200, control=8, forks=2, reads=8)
    peer = Peer(history)
    receive(peer, history, chance, share=0.9)
    assert_agrees(peer, history)


@given(SEEDS, st.integers(2, 8), st.integers(1, 40))
def test_everything_honest_is_delivered_and_depth_is_the_longest_chain_of_causes(
    seed: int, feeds: int, steps: int
) -> None:
    chance = random.Random(seed)
    history = random_history(chance, feeds=feeds, steps=steps, control=1)
    peer = Peer(history)
    receive(peer, history, chance)
    assert len(peer.delivered) == steps
    pasts = oracle.pasts(history.feeds())
    assert pasts == history.pasts  # what receivers compute is what writers had processed
    depths = oracle.depths(pasts)
    stamps = {d.link: Stamp(d.envelope.depth, d.cursor.id, d.seq, 0) for d in peer.delivered}
    assert {link: stamp.depth for link, stamp in stamps.items()} == depths
    canonical = sorted(stamps, key=lambda link: stamps[link])
    done: set[bytes] = set()
    for link in canonical:  # the canonical order is a linear extension of happened-before
        assert pasts[link] <= done
        done.add(link)


@given(SEEDS, st.integers(1, 3))
def test_a_caller_that_stops_listening_loses_nothing(seed: int, limit: int) -> None:
    """`run` may be left after any event and called again with the same feeds."""
    chance = random.Random(seed)
    history = random_history(chance, feeds=4, steps=20, control=1, forks=1)
    peer = Peer(history)
    minds = list(history.minds)
    chance.shuffle(minds)
    for mind in minds:
        peer.hold(mind, len(mind.blocks))
        while True:
            before = len(peer.delivered) + len(peer.ends)
            peer.run([mind.id], limit=limit)
            if len(peer.delivered) + len(peer.ends) - before < limit:
                break
    assert_agrees(peer, history)


# faults


def broken(history: History, chance: random.Random, fault: str) -> tuple[Mind, Reason | None]:
    """Append a faulty block and two honest ones after it to some feed; returns its writer and why it must end."""
    kind = CONTROL if fault == "control on data" else DATA
    liar = chance.choice([mind for mind in history.minds if mind.kind == kind and mind.branch == 0])
    history.write(liar)
    dependencies = list(history.news(liar))
    depth = 1 + max([liar.depth, *(dependency.depth for dependency in dependencies)])
    reason: Reason | None = Reason.LYING_DEPTH
    envelope_fault: Reason | None = None
    others = [mind for mind in history.minds if mind.id != liar.id and mind.kind == DATA and mind.branch == 0]
    other = chance.choice(others)
    for _ in range(2):  # which the liar has not named yet
        history.write(other)
    last = len(other.blocks) - 1
    if fault == "own depth":
        depth += chance.choice([-1, 1, 1000, DEPTH_MAX])
    elif fault == "named depth":
        wrong = name(other, last)
        wrong = wrong._replace(depth=wrong.depth + chance.choice([-1, 1, 1000]))
        dependencies, depth = [wrong], 1 + max(liar.depth, wrong.depth)
    elif fault in ("backwards", "named twice"):
        known = name(other, last)
        liar.append((known,), 1 + max(liar.depth, known.depth))
        history.places[liar.blocks[-1].link] = (liar, len(liar.blocks) - 1)
        history.pasts[liar.blocks[-1].link] = frozenset()
        dependencies = [name(other, last - 1 if fault == "backwards" else last)]
        depth, reason = 1 + max(liar.depth, dependencies[0].depth), Reason.TIMEFRAME_BACKWARDS
    elif fault == "own feed":
        dependencies, depth = [name(liar, len(liar.blocks) - 1)], liar.depth + 1
        reason = Reason.TIMEFRAME_BACKWARDS
    elif fault == "wrong link":
        wrong = name(other, last)._replace(link_prefix=bytes(LINK_PREFIX_BYTES))
        dependencies, depth, reason = [wrong], 1 + max(liar.depth, wrong.depth), None
    elif fault == "unknown feed":
        dependencies, depth, reason = [Dependency(UNKNOWN, 3, bytes(16), 9)], max(10, liar.depth + 1), None
    elif fault == "the future":
        wrong = name(other, last)._replace(seq=last + 8)
        dependencies, depth, reason = [wrong], 1 + max(liar.depth, wrong.depth), None
    elif fault == "control on data":
        dependencies, depth = [name(other, 0)], 1 + max(liar.depth, other.blocks[0].depth)
        reason = Reason.WRONG_KIND
    else:
        envelope_fault = reason = Reason.UNDECODABLE
    liar.append(tuple(dependencies), depth, envelope_fault)
    for _ in range(2):
        liar.append((), liar.depth + 1)
    return liar, reason


FAULTS = [
    "own depth",
    "named depth",
    "backwards",
    "named twice",
    "own feed",
    "wrong link",
    "unknown feed",
    "the future",
    "control on data",
    "undecodable",
]


@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=40)
@given(seed=SEEDS)
def test_a_faulty_block_ends_or_stops_its_feed_alone(fault: str, seed: int) -> None:
    chance = random.Random(seed)
    history = random_history(chance, feeds=4, steps=12, control=2)
    honest = {mind.id: len(mind.blocks) for mind in history.minds}
    liar, reason = broken(history, chance, fault)
    bad = len(liar.blocks) - 3
    # An accomplice builds on the bad block: that can never be delivered either.
    accomplice = chance.choice([mind for mind in history.minds if mind.id != liar.id and mind.kind == DATA])
    tip = name(liar, bad)
    known = accomplice.asserted.get(liar.id)
    assert known is None or known.seq < bad
    accomplice.append((tip,), 1 + max(accomplice.depth, tip.depth))
    for _ in range(3):
        peer = Peer(history)
        receive(peer, history, chance)
        assert_agrees(peer, history)
        cursor = peer.cursors[liar.id, 0]
        assert (cursor.length, cursor.ended) == (bad, reason)
        assert [(event.cursor.id, event.seq) for event in peer.ends] == ([(liar.id, bad)] if reason else [])
        for mind in history.minds:
            assert peer.cursors[mind.id, 0].length >= honest[mind.id]


def test_a_block_that_waits_for_an_unknown_feed_is_delivered_once_the_feed_is_followed() -> None:
    history = History(3)
    late, writer, bystander = history.minds
    for _ in range(4):
        history.write(late)
    history.process(writer, late, 3)
    history.write(writer)
    history.write(bystander)
    peer = Peer(history)
    peer.arrive(writer)
    peer.arrive(bystander)
    assert [delivery.cursor.id for delivery in peer.delivered] == [bystander.id]
    assert [cursor.waits_for for cursor in peer.orderer.waiting()] == [(late.id, 2)]
    peer.arrive(late, 2)
    assert peer.cursors[writer.id, 0].length == 0
    peer.arrive(late, 3)
    assert peer.cursors[writer.id, 0].length == 1
    assert not list(peer.orderer.waiting())
    assert_agrees(peer, history)


def test_a_followed_feed_that_is_already_processed_releases_what_waited_for_it() -> None:
    """A cursor restored from a checkpoint has nothing to deliver itself."""
    history = History(2)
    late, writer = history.minds
    history.write(late)
    history.process(writer, late, 1)
    history.write(writer)
    peer = Peer(history)
    peer.arrive(writer)
    cursor = peer.follow(late)
    cursor.length = cursor.held = 1
    cursor.link, cursor.depth = Link(late.blocks[0].link), late.blocks[0].depth
    peer.run([late.id])
    assert peer.cursors[writer.id, 0].length == 1
    assert peer.lookups == 1


def test_control_that_waits_for_a_feed_which_turns_out_to_be_data_is_of_the_wrong_kind() -> None:
    history = History(2, control=1)
    writer, data = history.minds
    history.write(data)
    writer.append((name(data, 0),), 2)
    peer = Peer(history)
    peer.arrive(writer)
    assert peer.cursors[writer.id, 0].ended is None
    peer.follow(data)  # known, though nothing of it is held yet
    peer.run([data.id])
    assert peer.cursors[writer.id, 0].ended is Reason.WRONG_KIND
    assert_agrees(peer, history)


def test_a_cycle_of_guessed_links_waits_and_stops_nobody() -> None:
    """With links inside the timeframe a cycle can't be closed; who tries waits for a block that never comes."""
    history = History(3)
    one, two, bystander = history.minds
    one.append((Dependency(two.id, 0, b"guess" * 3 + b"!", 1),), 2)
    two.append((name(one, 0),), 3)
    history.write(bystander)
    for arrival in ([one, two, bystander], [two, bystander, one]):
        peer = Peer(history)
        for mind in arrival:
            peer.arrive(mind)
        assert [delivery.cursor.id for delivery in peer.delivered] == [bystander.id]
        assert_agrees(peer, history)


def test_a_writer_that_hides_what_it_knew_is_merely_concurrent() -> None:
    history = History(2)
    known, hiding = history.minds
    for _ in range(5):
        history.write(known)
    history.process(hiding, known, 5)
    hiding.append((), 1)
    peer = Peer(history)
    peer.arrive(hiding)
    assert [delivery.envelope.depth for delivery in peer.delivered] == [1]


def test_depth_stops_at_its_limit() -> None:
    key = feed_key(0)
    orderer = CountingOrderer(fetch=lambda cursor, seq: None, lookup=lambda cursor, seq: None)  # type: ignore[arg-type,return-value]
    cursor = FeedCursor(key, DATA, length=5, depth=DEPTH_MAX)
    orderer.add(cursor)
    assert orderer._check(cursor, Envelope((), DEPTH_MAX + 1, None)) is Reason.LYING_DEPTH


def test_data_may_depend_on_control() -> None:
    history = History(2, control=1)
    control, data = history.minds
    history.write(control)
    history.process(data, control, 1)
    history.write(data)
    peer = Peer(history)
    peer.arrive(data)
    peer.arrive(control)
    assert [delivery.cursor.kind for delivery in peer.delivered] == [CONTROL, DATA]


# forks


def forked() -> tuple[History, Mind, Mind, Mind]:
    """Feed f with a shared block and two more on either side; a reader that has written nothing."""
    history = History(2)
    left, reader = history.minds
    history.write(left)
    right = history.fork(left)
    for _ in range(2):
        history.write(left)
        history.write(right)
    return history, left, right, reader


@pytest.mark.parametrize("side", [0, 1])
def test_a_dependency_on_either_branch_is_met_but_only_one_is_delivered(side: int) -> None:
    history, left, right, reader = forked()
    seen = (left, right)[side]
    history.process(reader, seen, 3)
    history.write(reader)
    assert reader.blocks[0].dependencies == (name(seen, 2),)
    peer = Peer(history)
    peer.arrive(reader)
    peer.arrive(left)
    assert peer.cursors[reader.id, 0].length == (1 if side == 0 else 0)
    peer.arrive(right)
    assert peer.cursors[reader.id, 0].length == 1
    assert [delivery.link for delivery in peer.delivered if delivery.cursor.id == left.id] == [
        block.link for block in left.blocks
    ]
    assert_agrees(peer, history)


def test_a_branch_that_arrives_first_is_followed_without_its_main() -> None:
    history, left, right, reader = forked()
    history.process(reader, right, 3)
    history.write(reader)
    peer = Peer(history)
    peer.arrive(right)
    peer.arrive(reader)
    assert not peer.delivered  # until the feed itself is followed, nobody can say of which kind it is
    peer.arrive(left, 1)
    assert peer.cursors[reader.id, 0].length == 1


@pytest.mark.parametrize("arrival", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]])
def test_a_timeframe_that_changes_branch_ends_its_feed(arrival: list[int]) -> None:
    history, left, right, reader = forked()
    reader.append((name(left, 1),), left.blocks[1].depth + 1)
    reader.append((name(right, 2),), max(reader.depth, right.blocks[2].depth) + 1)
    reader.append((), reader.depth + 1)
    peer = Peer(history)
    for number in arrival:
        peer.arrive([left, right, reader][number])
    assert (peer.cursors[reader.id, 0].length, peer.cursors[reader.id, 0].ended) == (1, Reason.TIMEFRAME_BRANCH)
    assert_agrees(peer, history)


def test_a_timeframe_may_go_from_the_shared_blocks_to_either_branch() -> None:
    history, left, right, reader = forked()
    reader.append((name(left, 0),), 2)
    reader.append((name(right, 1),), max(reader.depth, right.blocks[1].depth) + 1)
    reader.append((name(right, 2),), max(reader.depth, right.blocks[2].depth) + 1)
    peer = Peer(history)
    for mind in (reader, left, right):
        peer.arrive(mind)
    assert peer.cursors[reader.id, 0].length == 3
    assert_agrees(peer, history)


def test_the_depth_of_a_block_on_another_branch_counts() -> None:
    history, left, right, reader = forked()
    tip = name(right, 2)
    reader.append((tip._replace(depth=tip.depth + 1),), tip.depth + 2)
    peer = Peer(history)
    for mind in (left, right, reader):
        peer.arrive(mind)
    assert peer.cursors[reader.id, 0].ended is Reason.LYING_DEPTH


def test_a_faulty_block_on_another_branch_ends_that_branch_quietly() -> None:
    history, left, right, reader = forked()
    right.append((), right.depth + 5)
    reader.append((name(right, 3),), right.depth + 1)
    peer = Peer(history)
    for mind in (reader, right, left):
        peer.arrive(mind)
    assert peer.cursors[right.id, 1].ended is Reason.LYING_DEPTH
    assert not peer.ends
    assert_agrees(peer, history)


# base epochs (O8)


def closed_cut(history: History, chance: random.Random) -> dict[FeedId, Cut]:
    """A random timeframe that contains all that its blocks depend on, as cuts."""
    inside: set[bytes] = set()
    for mind in history.minds:
        length = chance.randrange(len(mind.blocks) + 1)
        if length:
            link = mind.blocks[length - 1].link
            inside |= history.pasts[link] | {link}
    cuts = {}
    for mind in history.minds:
        length = sum(block.link in inside for block in mind.blocks)
        if length:
            last = mind.blocks[length - 1]
            cuts[mind.id] = Cut(length, Link(last.link), last.depth)
    return cuts


@given(SEEDS, st.integers(2, 6), st.integers(4, 40))
def test_from_a_base_epoch_the_rest_is_delivered_without_a_look_below_the_cut(
    seed: int, feeds: int, steps: int
) -> None:
    chance = random.Random(seed)
    history = random_history(chance, feeds=feeds, steps=steps)
    peer = Peer(history, base=closed_cut(history, chance))
    receive(peer, history, chance)
    assert_agrees(peer, history)
    assert len(peer.delivered) == steps - sum(cut.length for cut in peer.base.values())


@pytest.mark.parametrize(
    ("back", "lie", "expected"),
    [(0, 0, None), (2, 0, None), (2, -1, None), (2, 1, Reason.LYING_DEPTH), (0, 1, Reason.LYING_DEPTH)],
)
def test_below_the_cut_only_the_bound_decides(back: int, lie: int, expected: Reason | None) -> None:
    history = History(2)
    old, writer = history.minds
    for _ in range(5):
        history.write(old)
    cut = Cut(4, Link(old.blocks[3].link), old.blocks[3].depth)
    named = name(old, 3 - back)
    named = named._replace(depth=named.depth + lie, link_prefix=bytes(LINK_PREFIX_BYTES))  # can't be checked either
    writer.append((named,), 1 + named.depth)
    for start_with in (old, writer):
        peer = Peer(history, base={old.id: cut})
        peer.follow(old)
        peer.arrive(start_with)
        peer.arrive(writer)
        assert peer.cursors[writer.id, 0].ended is expected
        assert peer.lookups == 0


@pytest.mark.parametrize("first", [0, 1])
def test_below_the_cut_causes_that_are_here_are_delivered_first(first: int) -> None:
    """Control feeds are folded from before the cut of the epoch that a party stands on."""
    history = History(2)
    old, writer = history.minds
    for _ in range(3):
        history.write(old)
    writer.append((name(old, 2),), 1 + old.blocks[2].depth)
    peer = Peer(history)
    peer.orderer.set_base(
        {mind.id: Cut(len(mind.blocks), mind.blocks[-1].link, mind.blocks[-1].depth) for mind in history.minds}
    )
    for mind in history.minds:
        peer.hold(mind, len(mind.blocks))
    peer.run([history.minds[first].id, history.minds[1 - first].id])
    assert [(event.cursor.id, event.seq) for event in peer.delivered] == [
        (old.id, 0),
        (old.id, 1),
        (old.id, 2),
        (writer.id, 0),
    ]


def test_below_the_cut_nobody_waits_for_a_feed_that_has_ended() -> None:
    history = History(2)
    old, writer = history.minds
    for _ in range(3):
        history.write(old)
    writer.append((name(old, 2),), 1 + old.blocks[2].depth)
    old.blocks[1] = replace(old.blocks[1], fault=Reason.INVALID)
    peer = Peer(history)
    peer.orderer.set_base(
        {mind.id: Cut(len(mind.blocks), mind.blocks[-1].link, mind.blocks[-1].depth) for mind in history.minds}
    )
    for mind in history.minds:
        peer.hold(mind, len(mind.blocks))
    peer.base = peer.orderer.base  # cursors stand before it; what is below is met by its bound
    peer.run([writer.id, old.id])
    assert peer.cursors[old.id, 0].ended is Reason.INVALID
    assert peer.cursors[writer.id, 0].length == 1


def test_below_the_cut_a_depth_of_nothing_is_a_lie() -> None:
    history = History(2)
    old, writer = history.minds
    history.write(old)
    writer.append((name(old, 0)._replace(depth=0),), 1)
    peer = Peer(history, base={old.id: Cut(1, Link(old.blocks[0].link), 1)})
    peer.follow(old)
    peer.arrive(writer)
    assert peer.cursors[writer.id, 0].ended is Reason.LYING_DEPTH


def test_a_branch_is_not_compared_with_what_lies_below_the_cut() -> None:
    """A peer that no longer has the block could not, so nobody does."""
    history, left, right, reader = forked()
    reader.append((name(left, 0),), 2)
    reader.append((name(right, 2),), max(reader.depth, right.blocks[2].depth) + 1)
    cut = {left.id: Cut(1, Link(left.blocks[0].link), left.blocks[0].depth)}
    peer = Peer(history, base=cut)
    for mind in (left, right, reader):
        peer.arrive(mind)
    assert peer.cursors[reader.id, 0].length == 2
    assert peer.lookups == 0
    assert_agrees(peer, history)


# the window of marks


@settings(max_examples=60)
@given(SEEDS)
def test_dependencies_older_than_the_window_are_looked_up(seed: int) -> None:
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "MARKS_MAX", 2)
        history = random_history(chance, feeds=4, steps=40, forks=1)
        peer = Peer(history)
        receive(peer, history, chance)
        assert_agrees(peer, history)
        for cursor in peer.cursors.values():
            assert len(cursor.marks) <= 4
            mind = peer.minds[cursor.id, cursor.branch]
            for index, mark in enumerate(cursor.marks):
                block = mind.blocks[cursor.marks_start + index]
                assert mark == (block.link, block.depth)


def test_a_dependency_far_below_the_window_is_met_by_lookup_and_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MARKS_MAX", 3)
    history = History(3)
    old, honest, liar = history.minds
    for _ in range(50):
        history.write(old)
    honest.append((name(old, 1),), old.blocks[1].depth + 1)
    liar.append((name(old, 1)._replace(depth=40),), 41)
    peer = Peer(history)
    peer.arrive(old)
    assert peer.lookups == 0
    peer.arrive(honest)
    peer.arrive(liar)
    assert peer.cursors[honest.id, 0].length == 1
    assert peer.cursors[liar.id, 0].ended is Reason.LYING_DEPTH
    assert peer.lookups == 2


# own writes


def test_own_blocks_count_at_once_and_can_be_depended_on() -> None:
    history = History(2)
    own, other = history.minds
    peer = Peer(history)
    peer.follow(own)
    for _ in range(3):
        block = history.write(own)
        peer.orderer.advance_own(
            peer.cursors[own.id, 0], Link(block.link), Envelope(block.dependencies, block.depth, 0)
        )
    history.process(other, own, 3)
    history.write(other)
    peer.arrive(other)
    assert peer.cursors[other.id, 0].length == 1
    assert peer.orderer.mark(own.id, 1) == (own.blocks[1].link, own.blocks[1].depth)


# what it costs (O7)


def checks_of_a_chain(blocks: int) -> int:
    """Two feeds that answer each other, the second one held first."""
    history = History(2)
    ping, pong = history.minds
    for _ in range(blocks // 2):
        history.process(ping, pong, len(pong.blocks))
        history.write(ping)
        history.process(pong, ping, len(ping.blocks))
        history.write(pong)
    peer = Peer(history)
    peer.arrive(pong)
    peer.arrive(ping)
    assert len(peer.delivered) == blocks
    return peer.orderer.checks


def checks_of_a_fan_in(feeds: int) -> int:
    """One block that names every other feed and arrives before all of them."""
    history = History(feeds)
    reader, *others = history.minds
    for mind in others:
        mind.append((), 1)
    reader.append(tuple(sorted(name(mind, 0) for mind in others)), 2)
    peer = Peer(history)
    peer.arrive(reader)
    for mind in sorted(others, key=lambda mind: mind.id):  # the order in which they are named: the worst case
        peer.arrive(mind)
    assert len(peer.delivered) == feeds
    assert peer.orderer.dependency_checks <= 2 * feeds
    return peer.orderer.checks


def checks_of_a_fan_out(feeds: int) -> int:
    """Every other feed waits for the same block, whose feed grows one block at a time."""
    history = History(feeds)
    source = history.minds[0]
    for depth in range(1, feeds + 1):
        source.append((), depth)
    for mind in history.minds[1:]:
        mind.append((name(source, feeds - 1),), feeds + 1)
    peer = Peer(history)
    peer.follow(source)
    for mind in history.minds[1:]:
        peer.arrive(mind)
    for length in range(1, feeds + 1):
        peer.arrive(source, length)
    assert len(peer.delivered) == 2 * feeds - 1
    return peer.orderer.checks


def checks_of_growing_while_waiting(blocks: int) -> int:
    """A feed grows block by block while its first one waits; then what it waits for comes block by block."""
    history = History(2)
    source, reader = history.minds
    for length in range(1, blocks + 1):
        history.write(source)
        history.process(reader, source, length)
        history.write(reader)
    peer = Peer(history)
    peer.follow(source)
    for mind in (reader, source):
        for length in range(1, blocks + 1):
            peer.arrive(mind, length)
    assert len(peer.delivered) == 2 * blocks
    return peer.orderer.checks


def checks_of_wrong_links(blocks: int) -> int:
    """A hostile feed waits for a block that is there with another content; its target goes on and on."""
    history = History(2)
    source, hostile = history.minds
    for _ in range(blocks):
        history.write(source)
    hostile.append((name(source, 0)._replace(link_prefix=bytes(16)),), 2)
    peer = Peer(history)
    peer.follow(source)
    peer.arrive(hostile)
    for length in range(1, blocks + 1):
        peer.arrive(source, length)
    assert len(peer.delivered) == blocks
    return peer.orderer.checks


@pytest.mark.parametrize(
    ("story", "size", "checks_max"),
    [
        # A block is looked at when it comes and when what it waits for is followed, or comes.
        (checks_of_a_chain, 1000, 2 * 1000),
        (checks_of_a_fan_in, 300, 3 * 300),
        (checks_of_a_fan_out, 300, 4 * 300),
        (checks_of_growing_while_waiting, 500, 4 * 500),
        (checks_of_wrong_links, 500, 500 + 3),
    ],
)
def test_the_number_of_looks_grows_with_the_number_of_blocks(story, size: int, checks_max: int) -> None:  # type: ignore[no-untyped-def]
    assert story(size) <= checks_max
    assert story(size // 2) <= checks_max // 2 + 3


def test_a_thousand_feeds_cost_a_look_per_block_and_wait() -> None:
    history = History(1000)
    chance = random.Random(1)
    for number, mind in enumerate(history.minds):
        others = chance.sample(history.minds[:number], min(number, 3))
        dependencies = tuple(sorted(name(other, 0) for other in others))
        mind.append(dependencies, 1 + max((dependency.depth for dependency in dependencies), default=0))
    peer = Peer(history)
    arrival = list(history.minds)
    chance.shuffle(arrival)
    for mind in arrival:
        peer.arrive(mind)
    assert len(peer.delivered) == 1000
    assert peer.orderer.checks <= 1000 + sum(len(mind.blocks[0].dependencies) for mind in history.minds)
