"""How far a party has come: the sums of its status, without a look at its items."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echostore.kernel.ids import feed_id
from echostore.kernel.order import DATA

if TYPE_CHECKING:
    from echostore.peer.party import Party


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


def party_progress(party: "Party") -> PartyProgress:
    """Costs what there are feeds."""
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
