"""The control side of a party: control messages into the PartyMachine, and what it says about feeds.

Called with control messages in causal order, by the peer's PartyProcessor and by the pipeline's control stage. A
light-weight child party has no control feeds of its own: it asks its parent's membership for the child's admission.
"""

from collections.abc import Mapping

from echostore.kernel.ids import FeedId, PartyKey
from echostore.kernel.order import Delivery
from echostore.kernel.party.admission import Admission
from echostore.kernel.party.credentials import ControlMessage
from echostore.kernel.party.machine import PartyMachine
from echostore.wire.credentials import verify_credentials


class Membership:
    """One party's machine and the full clocks of its control messages."""

    def __init__(self, party: PartyKey) -> None:
        self.party = party
        self.machine = PartyMachine(party)
        self._clocks: dict[FeedId, list[Mapping[FeedId, int]]] = {}

    def clocks(self, feed: FeedId) -> list[Mapping[FeedId, int]]:
        """The clocks of a control feed's messages that were folded in."""
        return self._clocks.get(feed, [])

    def receive(self, delivery: Delivery) -> None:
        """Fold in one control message. Its clock is the join of its dependencies' clocks, never its writer's word."""
        cursor, feed = delivery.cursor, delivery.cursor.id
        own = self._clocks.setdefault(feed, [])
        clock: dict[FeedId, int] = dict(own[-1]) if own else {}
        if delivery.seq:
            clock[feed] = delivery.seq - 1
        for dependency in delivery.envelope.dependencies:
            theirs = self._clocks.get(dependency.feed, [])
            # A dependency on an excluded branch of a forked feed has no clock here; its seq still counts.
            if dependency.seq < len(theirs):
                for other, seq in theirs[dependency.seq].items():
                    if clock.get(other, -1) < seq:
                        clock[other] = seq
            if clock.get(dependency.feed, -1) < dependency.seq:
                clock[dependency.feed] = dependency.seq
        own.append(clock)
        credentials = verify_credentials(delivery.envelope.body.credentials, self.party)
        self.machine.receive(
            ControlMessage(feed, cursor.key, delivery.seq, delivery.envelope.depth, clock, credentials)
        )

    def admission(self, child: PartyKey | None = None) -> Admission:
        return self.machine.admission(child)
