"""The control side of a party: control messages into the PartyMachine, and what it says about feeds.

Called with control messages in causal order, by the peer's PartyProcessor and by the pipeline's control stage. A
light-weight child party has no control feeds of its own: it asks its parent's membership for the child's admission.
"""

from collections.abc import Mapping

from echostore.kernel.ids import FeedId, FeedKey, PartyKey, feed_id
from echostore.kernel.order import Delivery
from echostore.kernel.party.admission import Admission
from echostore.kernel.party.control_state import ControlState
from echostore.kernel.party.credentials import ControlMessage
from echostore.kernel.party.machine import PartyMachine
from echostore.wire.credentials import verify_credentials


class Membership:
    """One party's machine and the full clocks of its control messages. With `start`, it goes on from a control state."""

    def __init__(self, party: PartyKey, start: ControlState | None = None) -> None:
        self.party = party
        self.machine = PartyMachine(party, start)
        self._begun = {feed_id(feed.key): feed for feed in start.feeds} if start is not None else {}
        self._clocks: dict[FeedId, list[Mapping[FeedId, int]]] = {}

    def length(self, feed: FeedId) -> int:
        """How many messages of a control feed were folded in."""
        return self.first(feed) + len(self._clocks.get(feed, ()))

    def length_of(self, key: FeedKey) -> int:
        return self.length(feed_id(key))

    def first(self, feed: FeedId) -> int:
        """How many messages of a control feed lie in the state that it went on from."""
        begun = self._begun.get(feed)
        return begun.length if begun is not None else 0

    def clock(self, feed: FeedId, seq: int) -> Mapping[FeedId, int]:
        """What a message had seen; nothing for one that was not folded in."""
        first = self.first(feed)
        if seq < first:
            return self._begun[feed].clock(seq)
        known = self._clocks.get(feed, ())
        return known[seq - first] if seq - first < len(known) else {}

    def receive(self, delivery: Delivery) -> None:
        """Fold in one control message. Its clock is the join of its dependencies' clocks, never its writer's word."""
        cursor, feed = delivery.cursor, delivery.cursor.id
        clock: dict[FeedId, int] = {}
        if delivery.seq:
            clock.update(self.clock(feed, self.length(feed) - 1))
            clock[feed] = delivery.seq - 1
        for dependency in delivery.envelope.dependencies:
            # A dependency on an excluded branch of a forked feed has no clock here; its seq still counts.
            for other, seq in self.clock(dependency.feed, dependency.seq).items():
                if clock.get(other, -1) < seq:
                    clock[other] = seq
            if clock.get(dependency.feed, -1) < dependency.seq:
                clock[dependency.feed] = dependency.seq
        self._clocks.setdefault(feed, []).append(clock)
        credentials = verify_credentials(delivery.envelope.body.credentials, self.party)
        self.machine.receive(
            ControlMessage(feed, cursor.key, delivery.seq, delivery.envelope.depth, clock, credentials)
        )

    def admission(self, child: PartyKey | None = None) -> Admission:
        return self.machine.admission(child)
