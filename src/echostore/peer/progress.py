"""How far a party has come: the sums of its status, without a look at its items.

Told whatever the peer is busy with. Whoever asks gets sums made under the lock if it is free, and else the last sums with what
was counted since: blocks that became durable, messages that were folded. So a joiner sees progress after each range that
is stored and each message that is folded, also while a checkpoint or a slow disk keeps the lock.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echostore.kernel.ids import feed_id
from echostore.kernel.order import DATA

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime

LOCK_WAIT_S = 0.02
"""Who asks for progress waits so long for a busy peer before it takes what was counted."""


@dataclass(frozen=True, slots=True)
class PartyProgress:
    """Blocks over all feeds. A fraction is held / known, never more than is known to exist."""

    held: int
    processed: int
    known: int
    unshared: int
    admitted: bool
    """Whether the state here says that this device may write, and what others wrote has begun to arrive."""

    @property
    def caught_up(self) -> bool:
        return self.admitted and self.held >= self.known and self.processed >= self.held


@dataclass(frozen=True, slots=True)
class Summed:
    """Sums made under the lock, and what had been counted by then."""

    progress: PartyProgress
    stored: int
    folded: int


def party_progress(party: "Party") -> PartyProgress:
    """Costs what there are feeds; waits for the lock only when there are no sums yet."""
    runtime = party.runtime
    if party.lock.acquire(timeout=-1 if runtime.summed is None else LOCK_WAIT_S):
        try:
            progress = _sum_up(party)
            runtime.summed = Summed(progress, *_counted(runtime))
            return progress
        finally:
            party.lock.release()
    assert runtime.summed is not None, "the lock was waited for"
    return _since(runtime.summed, *_counted(runtime))


def _counted(runtime: "PartyRuntime") -> tuple[int, int]:
    """Blocks of others that became durable, and messages that were folded, since the party was opened."""
    counters = runtime.processor.counters
    return runtime.blocks_stored, counters.delivered + counters.control


def _since(summed: Summed, stored: int, folded: int) -> PartyProgress:
    """The sums as they are by now, as far as counting tells."""
    then = summed.progress
    held = then.held + stored - summed.stored
    processed = min(held, then.processed + folded - summed.folded)
    return replace(then, held=held, processed=processed, known=max(then.known, held))


def _sum_up(party: "Party") -> PartyProgress:
    held = processed = known = unshared = 0
    with party.reading() as runtime:
        cursors, admitted = runtime.processor.orderer.cursors, runtime.processor.admission.by_id
        begun = False
        seen = set()
        for feed in runtime.feeds.feeds():
            seen.add(bytes(feed.key))
            cursor = cursors.get(feed_id(feed.key))
            held += feed.length
            # A feed that has ended, or waits for nobody's admission, is as far as it will come.
            over = cursor is None or cursor.ended
            processed += feed.length if over else min(cursor.length, feed.length) if cursor else 0
            known += max(feed.length, party.known_length(feed.key))
            if feed.own:
                unshared += feed.length - party.shared_length(feed.key)
            begun = begun or (feed.kind == DATA and feed.length > 0)
        known += sum(party.known_length(feed) for feed in party.known_feeds() - seen)
        own = runtime.data
        return PartyProgress(held, processed, known, unshared, own is not None and own.feed in admitted and begun)
