"""One rule off each: what the search of the coherence protocol has to notice.

A mutant replaces methods of the machines for the time of one search. `fault` is how it must be found: a broken
invariant, or states from which the least active client never gets what it waits for.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from echostore.kernel.coherence.arcs import ArcHolder, ArcLedger
from echostore.kernel.coherence.batches import Batches
from echostore.kernel.coherence.cache import Cache
from echostore.kernel.coherence.directory import Directory, Record
from echostore.kernel.coherence.edge import Edge
from echostore.kernel.coherence.events import Send
from echostore.kernel.coherence.holdings import Holdings, Version
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import (
    Arc,
    Delta,
    GrantArc,
    NotifyReplicated,
    ReleaseArc,
    Subscribed,
    Update,
)
from echostore.kernel.coherence.outbox import Outbox
from echostore.kernel.coherence.posting import Receiver, Window
from echostore.kernel.coherence.root import Root
from echostore.kernel.coherence.serving import Serving
from echostore.kernel.coherence.updates import UpdateReader
from echostore.testing.coherence_models import ROOT, IndexModel
from echostore.testing.coherence_search import Model
from echostore.testing.coherence_write_models import (
    PinModel,
    PostModel,
    TwoRootsModel,
    WaitModel,
    WriteModel,
)


@dataclass(frozen=True)
class Mutant:
    name: str
    fault: str
    model: Callable[[], Model]
    patches: tuple[tuple[type, str, Any], ...]

    def applied(self) -> ExitStack:
        stack = ExitStack()
        for target, name, replacement in self.patches:
            stack.enter_context(patch.object(target, name, replacement))
        return stack


def link() -> Model:
    return IndexModel("link", ticks=3, forgets=True)


def link_2() -> Model:
    return IndexModel("link", ticks=2, forgets=True, evicts=True)


def link_crash() -> Model:
    return IndexModel("link, crash", ticks=2, crashes=(1, 0))


def tree() -> Model:
    return IndexModel("tree", edge=True, ticks=2, evicts=True)


def tree_crash() -> Model:
    return IndexModel("tree, edge crash", edge=True, ticks=1, crashes=(0, 1))


def deltas() -> Model:
    return IndexModel("deltas", ticks=3, deltas=True, evicts=True)


def lanes() -> Model:
    return IndexModel("lanes", ticks=2, specs=2, lanes=2, always_changes=True)


def writes() -> Model:
    return WriteModel("writes", batches=2, edges=2, ticks=1, moves=1)


# Reading


def read_newest(self: Cache, spec: Any, at: int | None = None) -> Any:
    return self.holdings.newest(spec)


def subscribe_newest(self: Cache, spec: Any, gm: int) -> None:
    newest = self.holdings.newest(spec)
    if newest is not None:
        self.holdings.subscribe(spec, newest.max)


def extend_everything(self: Cache, update: Update) -> None:
    for spec in list(self.holdings.specs()):
        newest = self.holdings.newest(spec)
        if newest is not None and newest.max == self.cur:
            self.holdings.subscribe(spec, newest.max)
    self.holdings.cur = update.tick
    self.follow(update.follows)


def unchained(self: Cache, update: Update) -> bool:
    return update.clock == self.clock and update.tick > self.cur


def subscribe_without_else(self: Holdings, spec: Any, gm: int) -> bool:
    versions = self.versions(spec)
    if not any(each.min <= gm <= each.max for each in versions):
        return False
    self._keep(spec, [each._replace(live=each.min <= gm <= each.max) for each in versions])
    return True


def invalidate_nothing(self: Cache, spec: Any) -> None:
    self._end_note(spec)


def note_goes_on(self: Cache, spec: Any) -> None:
    return None


def note_joins_anything(self: Cache, spec: Any, fact: Version) -> Version:
    note = self.notes.pop(spec, None)
    return fact if note is None else fact._replace(max=max(fact.max, self.cur), live=note.live)


def stay_live(self: Cache) -> None:
    self.notes.clear()


def keep_notes(self: Cache) -> None:
    self.holdings.end_all()


def ask_nothing_again(self: Cache) -> list[Any]:
    return []


def open_backwards(self: Cache, generation: int, linked: Any) -> Any:
    if generation != self.opening:
        return None
    self._start_afresh()
    self.clock, self.generation, self.opening = linked.clock, generation, None
    self.holdings.cur = linked.tick
    self.follow(linked.follows)
    return self.ask_again()


def patch_anything(self: Cache, delta: Any, tick: int) -> None:
    before = self.holdings.newest(delta.spec)
    self._invalidated(delta.spec)
    if before is not None:
        value = self.codec.patch(before.value, delta.patch)
        if value is not None:
            self.holdings.learn(delta.spec, Version(tick, tick, value, live=True))


# Serving


def grant_clears_live(self: Directory, spec: Any, gm: int) -> None:
    self.records[spec] = Record(gm=gm)
    self.marks.add(spec)


def forget_all(self: Directory, spec: Any) -> None:
    if spec in self.records:
        self._drop(spec)


def subscribe_unchecked(self: Directory, spec: Any, first: int, last: int, holdings: Holdings) -> bool:
    return holdings.at(spec, last) is not None


def drop_in_silence(self: Directory, spec: Any, tick: int, holdings: Holdings, codec: Any) -> Any:
    record = self.records[spec]
    if record.gm is not None and self._unchanged(spec, record.gm, tick, holdings):
        self.records[spec] = Record(live=True)
        self._settle(spec, holdings)
        return Subscribed(spec, record.gm)
    self._drop(spec)
    return None


def never_advance(self: Directory, grant: Any) -> bool:
    return False


def settle_always(self: Directory, spec: Any, holdings: Holdings) -> None:
    self.marks.discard(spec)


def mark_nothing(self: Serving, *specs: Any) -> None:
    return None


def answer_first_only(self: Serving, link: Any, asked: Any) -> bool:
    key = (asked.spec, asked.at)
    if key not in self.asked:
        return PUT_OFF(self, link, asked)
    return True


PUT_OFF = Serving.put_off


def never_woken(self: Serving, link: Any) -> bool:
    return False


def delta_from_now(self: Directory, spec: Any, tick: int, holdings: Holdings, codec: Any) -> Any:
    """The way from the value before the newest, wherever the link stands."""
    versions = holdings.versions(spec)
    if len(versions) < 2:
        return None
    return Delta(spec, self.sent, codec.diff(versions[1].value, versions[0].value))


# Updates


def whole_without_counts(self: UpdateReader, clock: Arc, tick: int, manifest: Any) -> Any:
    gathered = self.items.get((clock, tick), {})
    return tuple(gathered[place] for place in sorted(gathered))


# Writing


def dedupe_by_link(self: Batches, update: Update) -> bool:
    """Every batch is taken that is new to this process."""
    return update.tick > self.writing.get(update.clock, 0)


def commit_again(self: Batches, arc: Arc, batch: int, tick: int, rejected: Any) -> None:
    self.applied[arc] = batch
    self.writing.pop(arc, None)


def accept_gaps(self: Batches, update: Update) -> bool:
    return update.tick > max(self.applied.get(update.clock, 0), self.writing.get(update.clock, 0))


def commit_gaps(self: Batches, arc: Arc, batch: int, tick: int, rejected: Any) -> None:
    self.applied[arc] = max(batch, self.applied.get(arc, 0))
    self.writing.pop(arc, None)


def follow_later(self: Leaf, link: Any) -> None:
    """What the state includes leaves the outbox only when the next update comes."""
    if link == self.home:
        cache = self.caches[link]
        self.outbox.followed({clock: tick for clock, tick in cache.follows.items() if tick < cache.cur})


def follow_notified(self: Leaf, clock: Arc, batch: int) -> list[Any]:
    self.outbox.notified(clock, batch)
    self.outbox.followed({clock: batch})
    return []


EDGE_PASS_UP = Edge._pass_up


def acknowledge_at_the_edge(self: Edge, link: Any, system: Any, message: Any) -> list[Any]:
    if isinstance(message, Update) and self.serving.leads_to(system, link):
        notify = NotifyReplicated(message.clock, message.tick, ROOT, 0)
        return [*EDGE_PASS_UP(self, link, system, message), self.serving.send(link, notify)]
    return EDGE_PASS_UP(self, link, system, message)


def link_without_follows(self: Edge, attached: Any) -> Any:
    return ()


def link_before_its_tick(self: Edge, attached: Any) -> list[Any]:
    return ATTACHED(self, replace(attached, tick=0))


ATTACHED = Edge._attached


def unroute_any(self: Serving, system: Any, link: Any, turn: Any) -> bool:
    if link not in self.routes.get(system, ()):
        return False
    self._unroute(system, link)
    return True


def take_any_arc(self: ArcHolder, grant: GrantArc) -> bool:
    if self.arc == grant.arc:
        return False
    self.arc, self.base, self.used = grant.arc, grant.base, 0
    return True


def take_arc_again(self: ArcHolder, grant: GrantArc) -> bool:
    if self.arc is not None and grant.arc.gen < self.arc.gen:
        return False
    self.arc, self.base, self.used = grant.arc, grant.base, 0
    return True


def grant_the_same(self: ArcLedger, system: Any, nonce: int) -> GrantArc:
    if self.gens[system] == 0:
        return LEDGER_GRANT(self, system, nonce)
    arc = Arc(system, self.gens[system])
    return GrantArc(arc, self.granted[arc].base)


LEDGER_GRANT = ArcLedger.grant


def send_all_arcs(self: Outbox) -> list[Any]:
    return [batch for batch in self.batches if batch.number > self.durable.get(batch.arc, 0)]


def allow_released(self: ArcLedger, arc: Arc, batch: int) -> bool:
    return arc in self.granted


def release_too_early(self: Outbox, arc: Arc) -> Any:
    return ReleaseArc(arc, self.released.setdefault(arc, self.durable.get(arc, 0)))


def send_once(self: Leaf, link: Any) -> list[Any]:
    cache = self.caches[link]
    return [Send(link, cache.opening, self._attach(link))] if cache.opening is not None else []


# Messages, two roots, the past


def deliver_twice(self: Receiver, id: Any, floor: int) -> bool:
    return True


def forget_above(self: Receiver, id: Any, floor: int) -> bool:
    key = (id.sender, id.stream)
    if id.seq <= self.windows.get(key, Window()).mark:
        return False
    self.windows[key] = Window(id.seq)
    return True


def deliver_early(self: Leaf, context: Any) -> bool:
    return True


def pass_early(self: Serving, message: Any, link: Any) -> bool:
    return link in self.links


def causal_always(self: Leaf) -> bool:
    return True


def forget_the_other_root(self: Root, event: Any) -> None:
    EXPOSE(self, replace(event, follows=()))


EXPOSE = Root._expose


def gone_unsaid(self: Root, event: Any) -> list[Any]:
    return []


def ignore_gone(self: Cache, gone: Any) -> bool:
    return False


def learn_at_as_current(self: Cache, grant: Any) -> Any:
    taken = TAKE_GRANT(self, grant)
    if taken is True:
        self.holdings.subscribe(grant.spec, grant.max)
    return taken


TAKE_GRANT = Cache.take_grant


class SameGeneration(IndexModel):
    def generation(self, counters: Any) -> int:
        return 1


BROKEN, STUCK = "broken", "stuck"

MUTANTS = [
    # Those of the design's own list
    Mutant("no ticks on values", BROKEN, link, ((Cache, "read", read_newest),)),
    Mutant("Subscribed without gm", BROKEN, link, ((Cache, "_subscribed", subscribe_newest),)),
    Mutant("an empty update extends everything", BROKEN, link, ((Cache, "_advance", extend_everything),)),
    Mutant("D1: updates not chained by prev", BROKEN, link, ((Cache, "_is_next", unchained),)),
    Mutant(
        "D1: no generation on crash",
        BROKEN,
        lambda: SameGeneration("crash", ticks=2, crashes=(1, 0), reconnects=1),
        (),
    ),
    Mutant("D3: no else", BROKEN, link, ((Holdings, "subscribe", subscribe_without_else),)),
    Mutant("U1: a grant clears live", BROKEN, link, ((Directory, "_remember", grant_clears_live),)),
    Mutant(
        "U4: no inclusion",
        BROKEN,
        tree,
        ((Directory, "_settle", settle_always), (Serving, "mark", mark_nothing)),
    ),
    Mutant(
        "dedupe by link",
        BROKEN,
        writes,
        ((Batches, "is_next", dedupe_by_link), (Batches, "committed", commit_again)),
    ),
    Mutant(
        "a root that accepts gaps",
        BROKEN,
        writes,
        ((Batches, "is_next", accept_gaps), (Batches, "committed", commit_gaps)),
    ),
    Mutant("follows not in one step with the update", BROKEN, writes, ((Leaf, "_followed", follow_later),)),
    Mutant(
        "outbox dropped on an edge's word",
        STUCK,
        lambda: WriteModel("writes", batches=1, edges=1, ticks=1, edge_crashes=1, ordered=True),
        ((Edge, "_pass_up", acknowledge_at_the_edge),),
    ),
    Mutant(
        "no empty update for WaitForEpoch",
        STUCK,
        lambda: WaitModel("wait", ticks=2, edge=True),
        ((Serving, "_has_waited", never_woken),),
    ),
    Mutant("ends without counts", BROKEN, lanes, ((UpdateReader, "_whole", whole_without_counts),)),
    # And more
    Mutant("D2: Invalidate does nothing", BROKEN, link, ((Cache, "_invalidated", invalidate_nothing),)),
    Mutant("D5: a note outlives Invalidate", BROKEN, link, ((Cache, "_end_note", note_goes_on),)),
    Mutant("D5: a note joins any Grant", BROKEN, link, ((Cache, "_join_note", note_joins_anything),)),
    Mutant("D8: live over a new generation", BROKEN, link_crash, ((Cache, "_start_afresh", stay_live),)),
    Mutant("D8: notes over a new generation", BROKEN, link_crash, ((Cache, "_start_afresh", keep_notes),)),
    Mutant("D8: nothing is asked again", STUCK, link_crash, ((Cache, "ask_again", ask_nothing_again),)),
    Mutant(
        "C3: a link back in time",
        BROKEN,
        lambda: WriteModel("moves", batches=0, edges=2, ticks=1, moves=1),
        ((Cache, "open", open_backwards), (Edge, "_attached", link_before_its_tick)),
    ),
    Mutant("U2: forgetting drops live", BROKEN, link, ((Directory, "forget", forget_all),)),
    Mutant("U3: Subscribed unchecked", BROKEN, link, ((Directory, "_unchanged", subscribe_unchecked),)),
    Mutant("U3: dropped in silence", BROKEN, link_2, ((Directory, "_examine", drop_in_silence),)),
    Mutant("U4: a mark settled too early", BROKEN, tree, ((Directory, "_settle", settle_always),)),
    Mutant(
        "U4: a new link above goes unnoticed below",
        BROKEN,
        lambda: IndexModel("tree", edge=True, ticks=2, reconnects=1, ordered=True, always_changes=True),
        ((Serving, "mark_all", mark_nothing),),
    ),
    Mutant(
        "U5: a grant ahead of its link",
        STUCK,
        lambda: IndexModel("no flushes", ticks=1, flushes=False),
        ((Directory, "must_advance", never_advance),),
    ),
    Mutant("a delta on any value", BROKEN, deltas, ((Cache, "_changed", patch_anything),)),
    Mutant("a delta from another tick", BROKEN, deltas, ((Directory, "_delta", delta_from_now),)),
    Mutant(
        "the second asker forgotten",
        STUCK,
        lambda: IndexModel("two leaves", edge=True, ticks=0, leaves=2, ordered=True, asks_again=False),
        ((Serving, "put_off", answer_first_only),),
    ),
    Mutant("C5: linked without follows", BROKEN, writes, ((Edge, "_follows_of", link_without_follows),)),
    Mutant("C5: linked before its tick", BROKEN, writes, ((Edge, "_attached", link_before_its_tick),)),
    Mutant("C5: an old farewell ends a new way", BROKEN, writes, ((Serving, "unroute", unroute_any),)),
    Mutant("C5: replicated taken for seen", BROKEN, writes, ((Leaf, "_notified", follow_notified),)),
    Mutant(
        "C7: any arc is taken",
        BROKEN,
        lambda: WriteModel("arcs", batches=3, edges=0, ticks=1, regrants=1),
        ((ArcHolder, "take", take_any_arc), (Outbox, "to_send", send_all_arcs)),
    ),
    Mutant(
        "C7: an arc begun again",
        BROKEN,
        lambda: WriteModel("arcs", batches=2, edges=0, ticks=1, regrants=1),
        ((ArcHolder, "take", take_arc_again),),
    ),
    Mutant(
        "C7: the old arc after a loss",
        BROKEN,
        lambda: WriteModel("arcs", batches=1, edges=0, ticks=1, leaf_crashes=1),
        ((ArcLedger, "grant", grant_the_same),),
    ),
    Mutant(
        "C6: two arcs at once",
        BROKEN,
        lambda: WriteModel("arcs", batches=2, edges=0, ticks=1, regrants=1),
        ((Outbox, "to_send", send_all_arcs),),
    ),
    Mutant(
        "C5: released with batches under way",
        BROKEN,
        lambda: WriteModel("arcs", batches=2, edges=0, ticks=1, regrants=1),
        ((Outbox, "release", release_too_early),),
    ),
    Mutant(
        "L3: sent once",
        STUCK,
        lambda: WriteModel("writes", batches=1, edges=1, ticks=1, edge_crashes=1, ordered=True),
        ((Leaf, "_ask_again", send_once),),
    ),
    Mutant("a message twice", BROKEN, lambda: PostModel("post", ticks=1), ((Receiver, "take", deliver_twice),)),
    Mutant("only a mark", STUCK, lambda: PostModel("post", ticks=1), ((Receiver, "take", forget_above),)),
    Mutant(
        "C4: a message before its context",
        BROKEN,
        lambda: PostModel("post", ticks=1),
        ((Leaf, "waited", deliver_early), (Serving, "_may_pass", pass_early)),
    ),
    Mutant("C4: two roots, any view", BROKEN, lambda: TwoRootsModel("roots"), ((Leaf, "is_causal", causal_always),)),
    Mutant(
        "C4: other roots unsaid", BROKEN, lambda: TwoRootsModel("roots"), ((Root, "_expose", forget_the_other_root),)
    ),
    Mutant(
        "L2: Gone unsaid",
        STUCK,
        lambda: PinModel("pins", ticks=2, window=1, always_changes=True),
        ((Root, "_unavailable", gone_unsaid),),
    ),
    Mutant(
        "L2: Gone unheard",
        STUCK,
        lambda: PinModel("pins", ticks=2, window=1, always_changes=True),
        ((Cache, "take_gone", ignore_gone),),
    ),
    Mutant(
        "C2: the past taken for the present",
        BROKEN,
        lambda: PinModel("pins", ticks=2, window=2, always_changes=True),
        ((Cache, "take_grant", learn_at_as_current),),
    ),
]
