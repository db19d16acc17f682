"""The rules of the coherence protocol one by one, and its promises about memory, traffic and questions.

The search in test_coherence_search.py shows that the rules together are right. These tests say what each one does.
"""

from dataclasses import replace

import pytest

from echostore.kernel.coherence import cache as cache_module
from echostore.kernel.coherence import directory as directory_module
from echostore.kernel.coherence.arcs import ARC_IDS_LOW, ARC_IDS_MAX, GENS_OPEN_MAX
from echostore.kernel.coherence.cache import Cache
from echostore.kernel.coherence.directory import Directory
from echostore.kernel.coherence.edge import Edge
from echostore.kernel.coherence.events import (
    UP,
    Advanced,
    Begin,
    ChildOpened,
    Commit,
    Committed,
    Cut,
    Drop,
    Effect,
    Evaluate,
    Evaluated,
    EvictEntry,
    EvictRecord,
    Excluded,
    Flush,
    LinkClosed,
    LinkId,
    Lost,
    Offer,
    Opening,
    Publish,
    Received,
    Refusal,
    Send,
    Told,
    Unanswered,
    Unavailable,
    WaitFor,
    Want,
    Writable,
)
from echostore.kernel.coherence.holdings import Holdings, Version
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import (
    Acquire,
    Arc,
    Attach,
    Attached,
    Below,
    Connectivity,
    Delta,
    Denied,
    EndUpdate,
    FollowsEpoch,
    Gone,
    Grant,
    GrantArc,
    GrantSystemId,
    IndexValue,
    Invalidate,
    IssuedId,
    LaneItem,
    Linked,
    Message,
    MessageId,
    NotifyReplicated,
    NullUpdate,
    Patch,
    Pin,
    PublishOp,
    RejectOp,
    RejectReason,
    ReleaseArc,
    Spec,
    Subscribed,
    SystemId,
    Token,
    Touched,
    Update,
    UserMessage,
    WaitForEpoch,
    Witness,
)
from echostore.kernel.coherence.outbox import Outbox
from echostore.kernel.coherence.quotas import BUCKETS_MAX, Quotas
from echostore.kernel.coherence.root import Root
from echostore.kernel.coherence.services import SERVICES_SPEC
from echostore.kernel.errors import Refused, UsageError
from echostore.kernel.ids import ARC_BIT
from echostore.kernel.reasons import Reason
from echostore.testing.coherence_models import DELTAS, PLAIN

ROOT = SystemId(b"r" * 16)
CLOCK = Arc(ROOT)
HOME, X, Y = LinkId("home"), LinkId("x"), LinkId("y")
A, B = Spec(b"a"), Spec(b"b")
ONE, TWO = IndexValue(b"value 1"), IndexValue(b"value 2")


def linked_cache(tick: int = 0) -> Cache:
    cache = Cache(PLAIN)
    cache.opening = 1
    assert cache.open(1, Linked(CLOCK, tick)) == []
    return cache


def holding(cache: Cache, value: IndexValue = ONE) -> Cache:
    """A value that was granted and subscribed: live from here on."""
    cache.want(A)
    cache.take_grant(Grant(A, None, cache.cur, cache.cur, value))
    cache.apply(update(cache, Subscribed(A, cache.cur)))
    return cache


def update(cache: Cache, *items: object) -> Update:
    return Update(CLOCK, cache.cur, cache.cur + 1, (), items)  # type: ignore[arg-type]  # tests give items as they are


def sent(effects: list[Effect], kind: type | None = None) -> list[Message]:
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message for message in messages if kind is None or isinstance(message, kind)]


def served_root(*links: LinkId, tick: int = 0, window: int = 256) -> Root:
    root = Root(ROOT, PLAIN, tick=tick, window_ticks=window)
    for nonce, link in enumerate(links or (X,)):
        root.receive(ChildOpened(link, 1))
        root.receive(Received(link, 1, Attach(nonce, None, True, 0)))
    return root


def linked_leaf() -> Leaf:
    leaf = Leaf(PLAIN, HOME)
    leaf.receive(Opening(HOME, 1, 7))
    for message in (GrantSystemId(7, SystemId(b"r" * 16, (1,))), Linked(CLOCK, 0), GrantArc(ARC, 1 << 24)):
        leaf.receive(Received(HOME, 1, message))
    return leaf


ARC = Arc(SystemId(b"r" * 16, (1,)), 1)


# The lower end


def test_d1_only_the_next_update_of_the_same_generation_counts() -> None:
    cache = holding(linked_cache())
    assert cache.apply(Update(CLOCK, 0, 5)) is None
    assert cache.apply(Update(CLOCK, 2, 3)) is None
    assert cache.apply(Update(Arc(SystemId(b"s" * 16)), 1, 2)) is None
    assert cache.cur == 1
    leaf = linked_leaf()
    assert leaf.receive(Received(HOME, 2, Update(CLOCK, 0, 1))) == []
    assert leaf.caches[HOME].cur == 0
    leaf.receive(Received(HOME, 1, Update(CLOCK, 0, 1)))
    assert leaf.caches[HOME].cur == 1


def test_d2_an_invalidated_value_is_good_for_the_past() -> None:
    cache = holding(linked_cache())
    cache.apply(update(cache, Invalidate(A)))
    assert cache.read(A) is None
    assert cache.read(A, 1) == Version(0, 1, ONE, False)


def test_d3_a_subscription_to_another_value_ends_the_one_that_is_held() -> None:
    cache = holding(linked_cache())
    cache.apply(update(cache))
    cache.apply(update(cache, Subscribed(A, 9)))
    assert not cache.holdings.is_live(A)
    assert cache.read(A) is None
    assert cache.read(A, 2) is not None


def test_d4_without_an_item_only_live_values_go_on() -> None:
    cache = holding(linked_cache())
    cache.want(B)
    cache.take_grant(Grant(B, None, 1, 1, TWO))
    cache.apply(update(cache))
    assert cache.read(A) == Version(0, 2, ONE, True)
    assert cache.read(B) is None


def test_d5_a_late_grant_joins_what_was_said_of_it() -> None:
    cache = linked_cache()
    cache.want(A)
    cache.apply(update(cache, Subscribed(A, 0)))
    cache.apply(update(cache))
    assert cache.take_grant(Grant(A, None, 0, 0, ONE)) is True
    assert cache.read(A) == Version(0, 2, ONE, True)


def test_d5_a_note_that_was_ended_reaches_no_further() -> None:
    cache = linked_cache()
    cache.want(A)
    cache.apply(update(cache, Subscribed(A, 0)))
    cache.apply(update(cache, Invalidate(A)))
    cache.take_grant(Grant(A, None, 0, 0, ONE))
    assert cache.read(A) is None
    assert cache.read(A, 1) == Version(0, 1, ONE, False)


def test_d6_a_grant_that_nobody_waits_for_is_ignored() -> None:
    cache = linked_cache()
    assert cache.take_grant(Grant(A, None, 0, 0, ONE)) is False
    cache.want(A)
    assert cache.take_grant(Grant(A, 0, 0, 0, ONE)) is False
    assert len(cache.holdings) == 0
    assert cache.take_grant(Grant(A, None, 0, 0, ONE)) is True
    assert cache.take_grant(Grant(A, None, 0, 0, ONE)) is False


def test_d7_nothing_is_read_outside_its_interval() -> None:
    cache = linked_cache(5)
    cache.want(A)
    cache.take_grant(Grant(A, None, 3, 5, ONE))
    assert [cache.read(A, tick) is not None for tick in (2, 3, 5, 6)] == [False, True, True, False]


def test_d8_a_new_generation_asks_again_with_what_is_held() -> None:
    cache = holding(linked_cache())
    cache.want(B)
    cache.apply(update(cache, Subscribed(B, 1)))
    cache.apply(update(cache, Invalidate(A)))
    assert cache.want(A) == Acquire(A, None, Token(ONE))
    cache.opening = 2
    asked = cache.open(2, Linked(CLOCK, 7))
    assert asked == [Acquire(B), Acquire(A, None, Token(ONE))]
    assert cache.cur == 7
    assert cache.notes == {}
    assert not cache.holdings.is_live(A)
    assert cache.take_grant(Grant(A, None, 5, 7, None, Token(ONE))) is True
    assert cache.read(A) == Version(5, 7, ONE, False)


def test_d8_the_value_meant_by_a_hash_is_asked_for_when_it_is_gone() -> None:
    cache = holding(linked_cache())
    cache.apply(update(cache, Invalidate(A)))
    cache.want(A)
    cache.holdings.evict(A)
    assert cache.take_grant(Grant(A, None, 2, 2, None, Token(ONE))) == Acquire(A)
    assert cache.take_grant(Grant(A, None, 2, 2, ONE)) is True


def test_c3_a_link_that_leads_back_is_not_used() -> None:
    cache = holding(linked_cache(5))
    cache.opening = 2
    assert cache.open(2, Linked(CLOCK, 5)) is None
    assert cache.cur == 6


# The upper end


def watching(value: IndexValue = ONE) -> tuple[Holdings, Directory]:
    """A value above, and a link that was granted it and told that it is subscribed."""
    holdings, directory = Holdings(0), Directory(1, 0)
    holdings.floor = 0
    holdings.learn(A, Version(0, 0, value, live=True))
    directory.grant(Acquire(A), Version(0, 0, value, live=True), PLAIN)
    holdings.cur = 1
    told = directory.update(CLOCK, holdings, PLAIN)
    assert told is not None
    assert told.items == (Subscribed(A, 0),)
    return holdings, directory


def change(holdings: Holdings, directory: Directory, value: IndexValue) -> None:
    holdings.end(A)
    holdings.cur += 1
    holdings.learn(A, Version(holdings.cur, holdings.cur, value, live=True))
    directory.mark(A)


def test_u1_a_grant_does_not_clear_live() -> None:
    holdings, directory = watching()
    version = holdings.at(A, 1)
    assert version is not None
    directory.grant(Acquire(A), version, PLAIN)
    assert directory.records[A].live
    change(holdings, directory, TWO)
    told = directory.update(CLOCK, holdings, PLAIN)
    assert told is not None
    assert told.items == (Invalidate(A),)


def test_u2_forgetting_drops_the_grant_and_never_live() -> None:
    holdings, directory = watching()
    version = holdings.at(A, 1)
    assert version is not None
    directory.grant(Acquire(A), version, PLAIN)
    directory.forget(A)
    assert directory.records[A].live
    assert directory.records[A].gm is None
    fresh = Directory(1, 0)
    fresh.grant(Acquire(A), version, PLAIN)
    fresh.forget(A)
    assert fresh.records == {}


def test_u3_what_an_update_says_of_each_record() -> None:
    holdings, directory = watching()
    holdings.cur = 2
    silent = directory.update(CLOCK, holdings, PLAIN)
    assert silent == Update(CLOCK, 1, 2)
    directory.evict(A)
    holdings.cur = 3
    told = directory.update(CLOCK, holdings, PLAIN)
    assert told is not None
    assert told.items == (Invalidate(A),)
    assert directory.records == {}
    version = holdings.at(A, 3)
    assert version is not None
    directory.grant(Acquire(A), version, PLAIN)
    change(holdings, directory, TWO)
    assert directory.update(CLOCK, holdings, PLAIN) == Update(CLOCK, 3, 4)
    assert directory.records == {}


def test_u4_an_edge_that_dropped_a_value_says_so() -> None:
    holdings, directory = watching()
    holdings.evict(A)
    directory.mark(A)
    holdings.cur = 2
    told = directory.update(CLOCK, holdings, PLAIN)
    assert told is not None
    assert told.items == (Invalidate(A),)


def test_u4_a_value_that_is_not_live_above_is_looked_at_with_every_update() -> None:
    holdings, directory = Holdings(0), Directory(1, 0)
    holdings.learn(A, Version(0, 1, ONE, live=False))
    directory.grant(Acquire(A), Version(0, 0, ONE, live=False), PLAIN)
    holdings.cur = 1
    told = directory.update(CLOCK, holdings, PLAIN)
    assert told is not None
    assert told.items == (Subscribed(A, 0),)
    holdings.cur = 2
    told = directory.update(CLOCK, holdings, PLAIN)
    assert told is not None
    assert told.items == (Invalidate(A),)


def test_u5_a_grant_ahead_of_its_link_moves_the_link() -> None:
    root = served_root()
    for tick in (1, 2):
        root.receive(Advanced(tick))
    root.receive(Received(X, 1, Acquire(A)))
    effects = root.receive(Evaluated(A, 2, 2, ONE))
    assert sent(effects) == [Grant(A, None, 2, 2, ONE), Update(CLOCK, 0, 2, (), (Subscribed(A, 2),))]


# Questions


def test_a_herd_of_equal_misses_is_one_question() -> None:
    links = [LinkId(f"leaf {each}") for each in range(1000)]
    root = served_root(*links)
    asked = [effect for link in links for effect in root.receive(Received(link, 1, Acquire(A)))]
    assert asked == [Evaluate(A, None)]
    assert len(sent(root.receive(Evaluated(A, 0, 0, ONE)), Grant)) == 1000
    assert root.serving.asked == {}


def test_an_edge_asks_once_for_all() -> None:
    edge = Edge(PLAIN)
    edge.receive(Opening(UP, 1, 1))
    edge.receive(Received(UP, 1, Linked(CLOCK, 0)))
    for each in range(3):
        link = LinkId(f"leaf {each}")
        edge.receive(ChildOpened(link, 1))
        edge.receive(Received(link, 1, Attach(each, SystemId(b"r" * 16, (each,)), False, 0)))
        edge.serving.open(link, ())
    asked = [edge.receive(Received(LinkId(f"leaf {each}"), 1, Acquire(A))) for each in range(3)]
    assert [sent(effects) for effects in asked] == [[Acquire(A)], [], []]
    assert len(sent(edge.receive(Received(UP, 1, Grant(A, None, 0, 0, ONE))), Grant)) == 3
    assert sent(edge.receive(Received(LinkId("leaf 0"), 1, Acquire(A)))) == [Grant(A, None, 0, 0, ONE)]


def test_l2_a_question_about_the_past_ends_in_a_value_or_in_gone() -> None:
    root = served_root(window=1)
    root.receive(Received(X, 1, Acquire(A)))
    root.receive(Evaluated(A, 0, 0, ONE))
    for tick in (1, 2, 3):
        root.receive(Advanced(tick, ((A, IndexValue(b"%d" % tick)),)))
    assert sent(root.receive(Received(X, 1, Acquire(A, 2)))) == [Grant(A, 2, 2, 2, IndexValue(b"2"))]
    assert sent(root.receive(Received(X, 1, Acquire(A, 0)))) == [Gone(A, 0, 2)]
    assert root.receive(Received(X, 1, Acquire(B, 2))) == [Evaluate(B, 2)]
    assert sent(root.receive(Unavailable(B, 2, None))) == [Gone(B, 2, 2)]


def test_a_pin_keeps_the_past_a_while_longer() -> None:
    root = served_root(window=1)
    root.receive(Received(X, 1, Acquire(A)))
    root.receive(Evaluated(A, 0, 0, ONE))
    root.receive(Received(X, 1, Pin(0)))
    for tick in (1, 2):
        root.receive(Advanced(tick, ((A, IndexValue(b"%d" % tick)),)))
    assert sent(root.receive(Received(X, 1, Acquire(A, 0)))) == [Grant(A, 0, 0, 0, ONE)]
    root.receive(Advanced(3))
    assert sent(root.receive(Received(X, 1, Acquire(A, 0)))) == [Gone(A, 0, 1)]


def test_a_denied_index_is_denied_to_all_who_asked() -> None:
    root = served_root(X, LinkId("y"))
    for link in (X, LinkId("y")):
        root.receive(Received(link, 1, Acquire(A)))
    denied = sent(root.receive(Unavailable(A, None, RejectReason.NOT_ALLOWED)))
    assert denied == [Denied(A, RejectReason.NOT_ALLOWED)] * 2
    leaf = linked_leaf()
    leaf.receive(Want(HOME, A))
    assert leaf.receive(Received(HOME, 1, Denied(A, RejectReason.NOT_ALLOWED))) == [
        Lost(HOME, A, None, None, RejectReason.NOT_ALLOWED)
    ]
    assert leaf.caches[HOME].wanted == {}


# Memory and traffic


def test_c9_a_slow_link_costs_one_record_for_each_index() -> None:
    root = served_root(window=2)
    specs = [Spec(b"%d" % each) for each in range(10)]
    for spec in specs:
        root.receive(Received(X, 1, Acquire(spec)))
        root.receive(Evaluated(spec, 0, 0, ONE))
    root.receive(Advanced(1))
    root.receive(Flush(X))
    root.receive(Writable(X, False))
    for tick in range(2, 1000):
        assert root.receive(Advanced(tick, tuple((spec, IndexValue(b"%d" % tick)) for spec in specs))) == []
        assert root.receive(Flush(X)) == []
    directory = root.serving.links[X]
    assert len(directory.records) == len(directory.marks) == 10
    assert max(len(root.holdings.versions(spec)) for spec in specs) <= 4
    (merged,) = sent(root.receive(Writable(X, True)))
    assert merged == Update(CLOCK, 1, 999, (), tuple(Invalidate(spec) for spec in sorted(specs)))


def test_c9_a_full_directory_evicts_the_oldest_and_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "RECORDS_MAX", 2)
    root = served_root()
    specs = [Spec(b"%d" % each) for each in range(4)]
    for spec in specs[:2]:
        root.receive(Received(X, 1, Acquire(spec)))
        root.receive(Evaluated(spec, 0, 0, ONE))
    root.receive(Advanced(1))
    root.receive(Flush(X))
    root.receive(Received(X, 1, Acquire(specs[2])))
    root.receive(Evaluated(specs[2], 1, 1, ONE))
    root.receive(Advanced(2))
    (told,) = sent(root.receive(Flush(X)), Update)
    assert isinstance(told, Update)
    assert set(told.items) == {Invalidate(specs[0]), Invalidate(specs[1]), Subscribed(specs[2], 1)}
    assert len(root.serving.links[X].records) <= 2


def test_c9_a_full_cache_drops_what_it_learned_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "ENTRIES_MAX", 2)
    leaf = linked_leaf()
    for spec in (A, B, Spec(b"c")):
        leaf.receive(Want(HOME, spec))
        leaf.receive(Received(HOME, 1, Grant(spec, None, 0, 0, ONE)))
    assert list(leaf.caches[HOME].holdings.specs()) == [B, Spec(b"c")]


def test_c10_deltas_cost_at_most_twice_the_better_way() -> None:
    """Against both always telling and never telling, for every rhythm of reads among writes."""

    def cost(reads_every: int) -> tuple[int, int, int]:
        holdings, directory = Holdings(0), Directory(1, 0)
        holdings.floor = 0
        value = IndexValue(b"value 0" + b"." * 20 + b"0")
        holdings.learn(A, Version(0, 0, value, live=True))
        spent = always = never = 0
        held, stale = False, True
        for tick in range(1, 301):
            if (tick - 1) % reads_every == 0:
                if not held:
                    version = holdings.at(A, holdings.cur)
                    assert version is not None
                    directory.grant(Acquire(A), version, DELTAS)
                    spent += len(version.value)
                    held = True
                directory.touch(A)
                never += len(value) if stale else 0
                stale = False
            holdings.end(A)
            holdings.cur = tick
            value = IndexValue(value[:-1] + b"%d" % (tick % 10))
            holdings.learn(A, Version(tick, tick, value, live=True))
            directory.mark(A)
            stale = True
            told = directory.update(CLOCK, holdings, DELTAS)
            assert told is not None
            for item in told.items:
                spent += len(item.patch) if isinstance(item, Delta) else 0
            held = A in directory.records
            always += len(DELTAS.diff(value, value) or b"")
        return spent, always + len(value), never

    for reads_every in (1, 2, 5, 9, 10, 11, 20, 50, 300):
        spent, always, never = cost(reads_every)
        assert spent <= 2 * min(always, never) + 2 * 28, f"a read every {reads_every} writes"


def test_quotas_refuse_a_whole_batch_and_forget_who_is_quiet() -> None:
    quotas = Quotas()
    assert quotas.charge({b"a": 10, b"b": 1}, rate=1.0, burst=10.0, now=0.0) == 0.0
    assert quotas.charge({b"a": 5, b"b": 1}, rate=1.0, burst=10.0, now=2.0) == 3.0
    assert quotas.charge({b"b": 9}, rate=1.0, burst=10.0, now=2.0) == 0.0
    assert quotas.charge({b"a": 5}, rate=1.0, burst=10.0, now=5.0) == 0.0
    for each in range(BUCKETS_MAX + 50):
        quotas.charge({b"%d" % each: 1}, rate=1.0, burst=10.0, now=100.0)
    assert len(quotas) <= BUCKETS_MAX


# Writing


def test_a_batch_is_seen_at_once_sent_until_durable_and_then_in_the_state_alone() -> None:
    leaf = linked_leaf()
    (batch,) = sent(leaf.receive(Publish(((b"item", b"make"), (b"item", b"edit")))))
    assert isinstance(batch, Update)
    assert batch.clock == ARC
    assert [op.delta for op in leaf.outbox.overlay()] == [b"make", b"edit"]
    assert sent(leaf.receive(Unanswered(HOME)), Update) == [batch]
    assert not leaf.released
    leaf.receive(Received(HOME, 1, NotifyReplicated(ARC, 1, ROOT, 1)))
    assert leaf.released
    assert sent(leaf.receive(Unanswered(HOME)), Update) == []
    assert len(list(leaf.outbox.overlay())) == 2
    leaf.receive(Received(HOME, 1, Update(CLOCK, 0, 1, (FollowsEpoch(ARC, 1),))))
    assert list(leaf.outbox.overlay()) == []


def test_ids_last_offline_and_map_to_the_roots_numbers() -> None:
    leaf = Leaf(PLAIN, HOME)
    with pytest.raises(Refused, match="no ids"):
        leaf.receive(Publish(((b"item", b"make"),)))
    leaf = linked_leaf()
    leaf.receive(LinkClosed(HOME))
    assert leaf.receive(Publish(((b"item", b"make"),))) == []
    first, second = leaf.arcs.issue(), leaf.arcs.issue()
    assert (first.n, second.n) == (2, 3)
    assert leaf.arcs.item_number(second) == ARC_BIT | (1 << 24) + 3
    leaf.arcs.used = ARC_IDS_MAX - ARC_IDS_LOW + 1
    assert leaf.arcs.is_short
    leaf.arcs.used = ARC_IDS_MAX
    with pytest.raises(Refused, match="are used"):
        leaf.arcs.issue()


def test_a_greater_arc_is_taken_and_the_lesser_released_after_its_batches() -> None:
    leaf = linked_leaf()
    leaf.receive(Publish(((b"item", b"make"),)))
    second = Arc(ARC.system, 2)
    assert sent(leaf.receive(Received(HOME, 1, GrantArc(second, 2 << 24)))) == [ReleaseArc(ARC, 1)]
    assert leaf.receive(Received(HOME, 1, GrantArc(ARC, 1 << 24))) == []
    assert sent(leaf.receive(Publish(((b"item", b"edit"),)))) == []
    (batch,) = sent(leaf.receive(Received(HOME, 1, NotifyReplicated(ARC, 1, ROOT, 1))))
    assert isinstance(batch, Update)
    assert batch.clock == second


def test_old_gens_are_closed_so_that_losing_state_costs_no_memory() -> None:
    root = served_root()
    system = SystemId(b"r" * 16, (1,))
    for nonce in range(1, 9):
        root.receive(Received(X, 1, Attach(nonce, system, True, 0)))
    arcs = root.batches.arcs
    open_gens = [arc.gen for arc, granted in arcs.granted.items() if granted.release is None]
    assert len(open_gens) == GENS_OPEN_MAX
    assert max(open_gens) == arcs.gens[system] == 9


def publish(root: Root, *ops: PublishOp, number: int = 1, arc: Arc = ARC) -> list[Effect]:
    return root.receive(Received(X, 1, Update(arc, number - 1, number, (), ops)))


def test_c6_a_batch_counts_once_and_in_order() -> None:
    root = served_root()
    op = PublishOp(IssuedId(ARC, 1), b"item", b"make")
    assert publish(root, op, number=2) == []
    assert publish(root, op) == [Commit(ARC, 1, (op,))]
    assert publish(root, op) == []
    assert sent(root.receive(Committed(ARC, 1, 1))) == [NotifyReplicated(ARC, 1, ROOT, 1)]
    assert sent(publish(root, op)) == [NotifyReplicated(ARC, 1, ROOT, 1)]


def test_c7_ids_outside_the_arc_or_after_its_release_are_rejected_with_the_reason() -> None:
    root = served_root()
    stranger = PublishOp(IssuedId(Arc(SystemId(b"r" * 16, (9,)), 1), 1), b"item", b"make")
    assert publish(root, stranger) == [Commit(ARC, 1, (), ((stranger.op, RejectReason.OUTSIDE_ARC),))]
    root.receive(Committed(ARC, 1, 1, ((stranger.op, RejectReason.OUTSIDE_ARC),)))
    root.receive(Received(X, 1, ReleaseArc(ARC, 1)))
    root.receive(Received(X, 1, ReleaseArc(ARC, 5)))
    late = PublishOp(IssuedId(ARC, 2), b"item", b"edit")
    assert publish(root, late, number=2) == [Commit(ARC, 2, (), ((late.op, RejectReason.RELEASED_ARC),))]
    root.receive(Advanced(1))
    (told,) = sent(root.receive(Flush(X)))
    assert told == Update(CLOCK, 0, 1, (FollowsEpoch(ARC, 1),), (RejectOp(stranger.op, RejectReason.OUTSIDE_ARC),))
    (foreign,) = publish(root, late, arc=Arc(SystemId(b"r" * 16, (5,)), 1))
    assert isinstance(foreign, Refusal)


def test_a_rejection_is_told_to_one_that_was_away() -> None:
    root = served_root()
    op = PublishOp(IssuedId(ARC, 1), b"item", b"make")
    publish(root, op)
    root.receive(LinkClosed(X))
    root.receive(Committed(ARC, 1, 1, ((op.op, RejectReason.NO_ITEM),)))
    root.receive(Advanced(1))
    root.receive(ChildOpened(X, 2))
    told = sent(root.receive(Received(X, 2, Attach(5, ARC.system, False, 0))))
    assert Linked(CLOCK, 1, (FollowsEpoch(ARC, 1),), (RejectOp(op.op, RejectReason.NO_ITEM),)) in told
    root.receive(ChildOpened(X, 3))
    told = sent(root.receive(Received(X, 3, Attach(6, ARC.system, False, 1))))
    assert Linked(CLOCK, 1, (FollowsEpoch(ARC, 1),)) in told, "who has reached that tick knows of it"


def test_what_is_excluded_later_is_told_with_the_tick_that_leaves_it_out() -> None:
    """To one that is linked in its update; to one that is away in the message that links it; never before."""
    root = served_root()
    op = PublishOp(IssuedId(ARC, 1), b"item", b"make")
    publish(root, op)
    root.receive(Committed(ARC, 1, 1))
    root.receive(Advanced(1))
    root.receive(Flush(X))
    gone = RejectOp(op.op, Reason.BEYOND_CUT, b"item")
    assert root.receive(Excluded(ARC, 2, (gone,))) == []
    root.receive(Advanced(2))
    (told,) = sent(root.receive(Flush(X)))
    assert told == Update(CLOCK, 1, 2, (), (gone,))
    for generation, seen, rejected in ((2, 1, (gone,)), (3, 1, (gone,)), (4, 2, ())):
        root.receive(ChildOpened(X, generation))
        attached = sent(root.receive(Received(X, generation, Attach(6, ARC.system, False, seen))))
        assert Linked(CLOCK, 2, (FollowsEpoch(ARC, 1),), rejected) in attached


def test_an_edge_that_comes_back_knows_no_more_than_its_leaves() -> None:
    """What a leaf behind an edge has not reached is not forgotten because the edge has."""
    root = served_root()
    op = PublishOp(IssuedId(ARC, 1), b"item", b"make")
    publish(root, op)
    root.receive(Committed(ARC, 1, 1, ((op.op, RejectReason.NO_ITEM),)))
    root.receive(Advanced(1))
    root.receive(ChildOpened(Y, 9))
    edge = sent(root.receive(Received(Y, 9, Attach(7, None, False, 1, (Below(ARC.system, (1,)),)))))
    assert any(isinstance(each, Linked) and each.rejected == () for each in edge), "the edge has seen that tick"
    root.receive(ChildOpened(X, 2))
    told = sent(root.receive(Received(X, 2, Attach(5, ARC.system, False, 0))))
    assert Linked(CLOCK, 1, (FollowsEpoch(ARC, 1),), (RejectOp(op.op, RejectReason.NO_ITEM),)) in told


def test_an_edge_tells_a_leaf_of_rejections_with_its_link_whenever_they_came() -> None:
    """They come to the edge before its leaf is linked: with Attached, or in an update after it."""
    first = RejectOp(IssuedId(ARC, 1), RejectReason.NO_ITEM)
    second = RejectOp(IssuedId(ARC, 2), Reason.DENIED, b"item")
    edge = Edge(PLAIN)
    edge.receive(Opening(UP, 1, 5))
    edge.receive(Received(UP, 1, GrantSystemId(5, SystemId(b"r" * 16, (7,)))))
    edge.receive(Received(UP, 1, Linked(CLOCK, 1)))
    edge.receive(ChildOpened(X, 2))
    (up,) = sent(edge.receive(Received(X, 2, Attach(6, ARC.system, False, 0))))
    assert isinstance(up, Attach)
    assert sent(edge.receive(Received(UP, 1, Attached(up.turn, ARC.system, 2, (), (first,))))) == []
    linked = sent(edge.receive(Received(UP, 1, Update(CLOCK, 1, 3, (), (second, first)))))
    assert Linked(CLOCK, 3, (), (first, second)) in linked
    assert edge.rejected == ()


def test_an_edge_below_an_edge_is_moved_to_the_tick_that_its_leaf_waits_for() -> None:
    """Nothing else would move it: no index of its own has changed."""
    edge = Edge(PLAIN)
    edge.receive(Opening(UP, 1, 5))
    edge.receive(Received(UP, 1, GrantSystemId(5, SystemId(b"r" * 16, (7,)))))
    edge.receive(Received(UP, 1, Linked(CLOCK, 1)))
    edge.receive(ChildOpened(X, 2))
    lower = SystemId(b"r" * 16, (8,))
    (up,) = sent(edge.receive(Received(X, 2, Attach(6, lower, False, 0))))
    assert isinstance(up, Attach)
    assert sent(edge.receive(Received(UP, 1, Attached(up.turn, lower, 1, ()))))[0] == Linked(CLOCK, 1)
    (up,) = sent(edge.receive(Received(X, 2, Attach(9, ARC.system, False, 0, (), (3,)))))
    assert isinstance(up, Attach)
    early = sent(edge.receive(Received(UP, 1, Attached(up.turn, ARC.system, 3, ()))))
    assert early == [Attached((3,), ARC.system, 3, ())]
    assert NullUpdate(CLOCK, 1, 3) in [
        NullUpdate(each.clock, each.prev, each.tick)
        for each in sent(edge.receive(Received(UP, 1, NullUpdate(CLOCK, 1, 3))))
        if isinstance(each, Update)
    ]
    late = sent(edge.receive(Received(UP, 1, Attached(up.turn, ARC.system, 3, ()))))
    assert late == [Attached((3,), ARC.system, 3, ())]


def edge_with(*links: LinkId) -> Edge:
    """An edge at tick 1 that knows of batch 1 of ARC, with a linked system (2), (3) ... below each link."""
    edge = Edge(PLAIN)
    edge.receive(Opening(UP, 1, 5))
    edge.receive(Received(UP, 1, GrantSystemId(5, SystemId(b"r" * 16, (9,)))))
    edge.receive(Received(UP, 1, Linked(CLOCK, 1)))
    for number, link in enumerate(links, 2):
        edge.receive(ChildOpened(link, 1))
        (up,) = sent(edge.receive(Received(link, 1, Attach(number, SystemId(b"r" * 16, (number,)), False, 0))))
        assert isinstance(up, Attach)
        edge.receive(Received(UP, 1, Attached(up.turn, SystemId(b"r" * 16, (number,)), 1, (FollowsEpoch(ARC, 1),))))
    return edge


def test_l1_an_edge_tells_at_once_what_it_includes_of_another_leafs_clock() -> None:
    """The link is at the edge's tick already, and no later update would have a reason to say it."""
    edge = edge_with(X, Y)
    edge.receive(Received(UP, 1, Update(CLOCK, 1, 2, (FollowsEpoch(ARC, 1),))))
    for link in (X, Y):
        edge.receive(Flush(link))
        edge.serving.links[link].told.pop(ARC, None)
    told = sent(edge.receive(Received(X, 1, WaitForEpoch(ARC, 1))))
    assert Attached((), ARC.system, 2, (FollowsEpoch(ARC, 1),)) in told or any(
        isinstance(each, Update) and FollowsEpoch(ARC, 1) in each.follows for each in told
    )
    assert edge.serving.links[X].waits == {}
    leaf = linked_leaf()
    other = Arc(SystemId(b"r" * 16, (4,)), 1)
    leaf.receive(WaitFor(((Witness(other, 3),),)))
    leaf.receive(Received(HOME, 1, Attached((), other.system, 5, (FollowsEpoch(other, 3),))))
    assert leaf.waits == {other: 3}, "of a tick that is not reached it says nothing"
    leaf.receive(Received(HOME, 1, Attached((), other.system, 0, (FollowsEpoch(other, 3), FollowsEpoch(ARC, 9)))))
    assert leaf.waits == {}
    assert ARC not in leaf.caches[HOME].follows, "its own batches leave the view with a tick, and not otherwise"


def test_l4_a_message_after_a_batch_that_is_long_included_comes() -> None:
    """Its context is there, and the target's link was never told so."""
    root = served_root(X, Y)
    publish(root, PublishOp(IssuedId(ARC, 1), b"item", b"make"))
    root.receive(Committed(ARC, 1, 1))
    root.receive(Advanced(1))
    for link in (X, Y):
        root.receive(Flush(link))
    target = SystemId(b"r" * 16, (2,))
    message = UserMessage(MessageId(ARC.system, 0, 1), 0, target, ((Witness(ARC, 1),),), "note", b"after")
    effects = root.receive(Received(X, 1, message))
    assert Send(Y, 1, message) in effects
    order = [each.message for each in effects if isinstance(each, Send) and each.link == Y]
    assert order[-1] == message, "and not before the target knows"


def test_a_leaf_is_told_once_of_a_rejection_however_it_comes() -> None:
    leaf = linked_leaf()
    leaf.receive(Publish(((b"one", b"make"),)))
    (made,) = list(leaf.outbox.overlay())
    early = RejectOp(made.op, Reason.DENIED)
    told = leaf.receive(Received(HOME, 1, Update(CLOCK, 0, 1, (FollowsEpoch(ARC, 1),), (early,))))
    assert [each for each in told if isinstance(each, Told)] == [Told(made.op, Reason.DENIED, (), b"one")]
    assert leaf.settled
    again = leaf.receive(Received(HOME, 1, Update(CLOCK, 1, 2, (), (early,))))
    assert not [each for each in again if isinstance(each, Told)]
    late = RejectOp(IssuedId(ARC, 77), Reason.BEYOND_CUT, b"two")
    leaf.receive(Opening(HOME, 2, 8))
    told = leaf.receive(Received(HOME, 2, Linked(CLOCK, 3, (), (early, late))))
    assert [each for each in told if isinstance(each, Told)] == [Told(late.op, Reason.BEYOND_CUT, (), b"two")]
    assert not leaf.outbox.refused, "nothing of it is on top of the state"
    other = RejectOp(IssuedId(Arc(SystemId(b"r" * 16, (9,)), 1), 1), Reason.DENIED)
    assert not [
        each for each in leaf.receive(Received(HOME, 2, Update(CLOCK, 3, 4, (), (other,)))) if isinstance(each, Told)
    ], "what another system wrote is not this one's"


def test_a_rejected_making_takes_along_what_was_built_on_it() -> None:
    leaf = linked_leaf()
    leaf.receive(Publish(((b"one", b"make"), (b"two", b"make"))))
    leaf.receive(Publish(((b"one", b"edit"), (b"two", b"edit"))))
    made, other, edited, kept = list(leaf.outbox.overlay())
    told = leaf.receive(Received(HOME, 1, RejectOp(made.op, RejectReason.NOT_ALLOWED)))
    assert told == [Told(made.op, RejectReason.NOT_ALLOWED, (edited.op,), b"one")]
    assert list(leaf.outbox.overlay()) == [other, kept]
    assert leaf.receive(Received(HOME, 1, RejectOp(kept.op, RejectReason.NOT_ALLOWED))) == [
        Told(kept.op, RejectReason.NOT_ALLOWED, (), b"two")
    ]


def test_a_root_that_restarts_exposes_what_was_on_disk() -> None:
    root = served_root()
    publish(root, PublishOp(IssuedId(ARC, 1), b"item", b"make"))
    root.receive(Committed(ARC, 1, 1))
    again = Root(ROOT, PLAIN, tick=0, batches=root.batches)
    again.receive(Advanced(1))
    assert again.reached(ARC, 1)
    again.receive(ChildOpened(X, 2))
    assert Linked(CLOCK, 1, (FollowsEpoch(ARC, 1),)) in sent(
        again.receive(Received(X, 2, Attach(5, ARC.system, False, 0)))
    )


# Waiting, services, refusals


def test_l1_who_only_waits_is_moved_on() -> None:
    root = served_root()
    assert root.receive(Received(X, 1, WaitForEpoch(CLOCK, 2))) == []
    assert root.receive(Advanced(1)) == []
    assert sent(root.receive(Advanced(2))) == [Update(CLOCK, 0, 2)]
    leaf = linked_leaf()
    context = ((Witness(Arc(SystemId(b"s" * 16)), 4), Witness(CLOCK, 1)),)
    leaf.receive(WaitFor(context))
    assert not leaf.waited(context)
    leaf.receive(Received(HOME, 1, NullUpdate(CLOCK, 0, 1)))
    assert leaf.waited(context)


def test_waiting_for_what_was_never_published_is_an_error() -> None:
    leaf = linked_leaf()
    with pytest.raises(UsageError, match="not published"):
        leaf.receive(WaitFor(((Witness(ARC, 1),),)))
    with pytest.raises(UsageError, match="witness"):
        leaf.receive(WaitFor(((),)))


def test_services_are_an_index_that_follows_who_comes_and_goes() -> None:
    root = served_root(X, LinkId("y"))
    spec = Spec(SERVICES_SPEC + b"ch")
    (empty,) = sent(root.receive(Received(LinkId("y"), 1, Acquire(spec))))
    assert isinstance(empty, Grant)
    assert empty.value == b""
    leaf = linked_leaf()
    (announced,) = sent(leaf.receive(Offer("chess", b"white")))
    assert root.receive(Received(X, 1, announced)) == [Cut()]
    assert root.receive(Received(X, 1, announced)) == []
    root.receive(Advanced(1))
    assert b"chess".hex().encode() in (root.holdings.at(spec, 1) or Version(0, 0, IndexValue(b""), False)).value
    assert isinstance(root.receive(Received(LinkId("y"), 1, announced))[0], Refusal)
    assert root.receive(LinkClosed(X)) == [Cut()]
    root.receive(Advanced(2))
    gone = root.holdings.at(spec, 2)
    assert gone is not None
    assert gone.value == b""


def test_connectivity_without_all_services_leaves_them() -> None:
    leaf = linked_leaf()
    (announced,) = sent(leaf.receive(Offer("chess", b"")))
    leaf.receive(Received(HOME, 1, announced))
    leaf.receive(Received(HOME, 1, Connectivity(ARC.system, affects_all_services=False)))
    assert [service.name for service, _ in leaf.services.offered()] == ["chess"]
    leaf.receive(Received(HOME, 1, Connectivity(ARC.system, affects_all_services=True)))
    assert leaf.services.offered() == []


def test_operations_do_not_travel_downwards_nor_index_items_upwards() -> None:
    down = Update(CLOCK, 0, 1, (), (PublishOp(IssuedId(ARC, 1), b"item", b"make"),))
    leaf = linked_leaf()
    (dropped,) = leaf.receive(Received(HOME, 1, down))
    assert isinstance(dropped, Drop)
    root = served_root()
    (refused,) = root.receive(Received(X, 1, Update(ARC, 0, 1, (), (Invalidate(A),))))
    assert isinstance(refused, Refusal)


def test_frames_that_contradict_each_other_end_the_link() -> None:
    leaf = linked_leaf()
    leaf.receive(Received(HOME, 1, LaneItem(CLOCK, 1, 0, 0, Invalidate(A))))
    (dropped,) = leaf.receive(Received(HOME, 1, LaneItem(CLOCK, 1, 0, 0, Invalidate(B))))
    assert isinstance(dropped, Drop)
    leaf.receive(Received(HOME, 1, EndUpdate(CLOCK, 0, 1, (), ((0, 1),))))
    assert leaf.caches[HOME].cur == 1
    leaf.receive(Received(HOME, 1, EndUpdate(CLOCK, 1, 2, (), ((0, 1),))))
    (dropped,) = leaf.receive(Received(HOME, 1, EndUpdate(CLOCK, 1, 2, (), ((1, 1),))))
    assert isinstance(dropped, Drop)


def test_a_link_that_says_nothing_of_itself_is_not_served() -> None:
    root = served_root()
    root.receive(ChildOpened(LinkId("y"), 1))
    for message in (Acquire(A), WaitForEpoch(CLOCK, 1), Touched((A,))):
        (refused,) = root.receive(Received(LinkId("y"), 1, message))
        assert isinstance(refused, Refusal)
    stranger = Attach(5, SystemId(b"r" * 16, (77,)), False, 0)
    assert isinstance(root.receive(Received(LinkId("y"), 1, stranger))[0], Refusal)
    ahead = replace(stranger, system=SystemId(b"r" * 16, (1,)), seen=9)
    assert isinstance(root.receive(Received(LinkId("y"), 1, ahead))[0], Refusal)
    assert list(root.serving.links) == [X]
    again = [root.receive(Received(X, 1, Attach(nonce, None, False, 0))) for nonce in range(100, 200)]
    assert all(isinstance(effects[0], Refusal) for effects in again)
    assert root.batches.arcs.systems_count == 1


def test_an_evicted_entry_of_the_root_is_unwatched_and_its_links_told() -> None:
    root = served_root()
    root.receive(Received(X, 1, Acquire(A)))
    root.receive(Evaluated(A, 0, 0, ONE))
    root.receive(Advanced(1))
    root.receive(Flush(X))
    root.receive(EvictEntry(A))
    root.receive(Advanced(2))
    (told,) = sent(root.receive(Flush(X)))
    assert told == Update(CLOCK, 1, 2, (), (Invalidate(A),))
    root.receive(EvictRecord(X, A))
    assert root.serving.links[X].records == {}


def test_a_transaction_reads_one_tick_while_the_present_moves_on() -> None:
    leaf = linked_leaf()
    leaf.receive(Want(HOME, A))
    leaf.receive(Received(HOME, 1, Grant(A, None, 0, 0, ONE)))
    assert sent(leaf.receive(Begin(HOME))) == [Pin(0)]
    leaf.receive(Received(HOME, 1, Update(CLOCK, 0, 1, (), (Subscribed(A, 0),))))
    leaf.receive(Received(HOME, 1, Update(CLOCK, 1, 2, (), (Invalidate(A),))))
    leaf.receive(Want(HOME, A))
    leaf.receive(Received(HOME, 1, Grant(A, None, 2, 2, TWO)))
    now, then = leaf.read(HOME, A), leaf.read(HOME, A, 0)
    assert now is not None
    assert then is not None
    assert (now.value, then.value) == (TWO, ONE)
    assert leaf.receive(Want(HOME, A, 0)) == []


def test_an_outbox_of_two_arcs_sends_the_older_first() -> None:
    outbox = Outbox()
    first = outbox.add(ARC, ())
    second = outbox.add(Arc(ARC.system, 2), ())
    assert outbox.to_send() == [first]
    outbox.notified(ARC, 1)
    assert outbox.to_send() == [second]
    assert outbox.followed({ARC: 1})
    assert outbox.batches == (second,)


def test_a_patch_that_does_not_fit_is_a_miss() -> None:
    cache = holding(linked_cache())
    cache.apply(update(cache, Delta(A, cache.cur, Patch(b"1>2"))))
    assert cache.read(A) is None


def test_d5_a_note_about_another_value_is_not_joined() -> None:
    cache = linked_cache(5)
    cache.want(A)
    cache.apply(update(cache, Subscribed(A, 5)))
    cache.take_grant(Grant(A, None, 2, 3, ONE))
    assert cache.read(A) is None
    assert cache.read(A, 3) == Version(2, 3, ONE, False)


def test_u2_an_evicted_record_forgets_its_grant_too() -> None:
    holdings, directory = watching()
    version = holdings.at(A, 1)
    assert version is not None
    directory.grant(Acquire(A), version, PLAIN)
    directory.evict(A)
    holdings.cur = 2
    told = directory.update(CLOCK, holdings, PLAIN)
    assert told is not None
    assert told.items == (Invalidate(A),)
    assert directory.records == {}


def test_d1_upwards_too_another_generation_is_left_unread() -> None:
    root = served_root()
    assert root.receive(Received(X, 2, Acquire(A))) == []
    assert root.receive(Received(LinkId("nobody"), 1, Acquire(A))) == []
    assert root.receive(Received(X, 1, Acquire(A))) == [Evaluate(A, None)]


def test_versions_are_held_newest_first_whatever_comes_first() -> None:
    """D7: the version that is read at a tick is found from the newest on, so a fact about the past takes its place."""
    holdings = Holdings(9)
    holdings.floor = 0
    facts = [Version(minimum, minimum, IndexValue(b"%d" % minimum), live=False) for minimum in (5, 9, 1, 7, 3)]
    for fact in facts:
        holdings.learn(A, fact)
    assert [each.min for each in holdings.versions(A)] == [9, 7, 5, 3, 1]
    assert holdings.newest(A) == facts[1]
    holdings.floor = 5
    holdings.end(A)
    assert [each.min for each in holdings.versions(A)] == [9, 7, 5]
