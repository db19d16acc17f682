"""The feeds of a party as clocks: how much of each a tick includes. They mean the same at every root of the party.

A tick of one root says nothing at another. What both know are the feeds, by their ids, and how many of their blocks count in
the state: so a timeframe is a context that any root can wait for.
"""

import hashlib
from typing import TYPE_CHECKING

from echostore.kernel.coherence.messages import Arc, FollowsEpoch, SystemId
from echostore.kernel.ids import FeedId, PartyKey
from echostore.kernel.order import DATA
from echostore.peer.positions import allowed_last

if TYPE_CHECKING:
    from echostore.peer.runtime import PartyRuntime

FEED_TAG = b"echostore:thin-feed\0"


def feed_clock(party: PartyKey, feed: FeedId) -> Arc:
    """How a feed is called in contexts."""
    return Arc(SystemId(hashlib.sha256(FEED_TAG + party + feed).digest()[:16]))


class FeedClocks:
    """What has moved since the last tick. Made and asked under the peer's lock."""

    def __init__(self, runtime: "PartyRuntime", party: PartyKey, own: FeedId) -> None:
        """`own` is the feed that is written here: of that nobody tells."""
        self._runtime, self._party, self._own = runtime, party, own
        self._moved: set[FeedId] = set(runtime.processor.orderer.cursors)
        runtime.processor.on_processed.append(self._processed)

    def _processed(self, feeds: set[FeedId]) -> None:
        self._moved |= feeds

    def news(self) -> tuple[FollowsEpoch, ...]:
        """How much the state includes of the data feeds that moved."""
        moved, self._moved = self._moved | {self._own}, set()
        processor = self._runtime.processor
        found = []
        for feed in sorted(moved):
            cursor = processor.orderer.cursors.get(feed)
            if cursor is None or cursor.kind != DATA:
                continue
            last = allowed_last(processor.orderer, processor.admission, cursor)
            if last is not None:
                found.append(FollowsEpoch(feed_clock(self._party, feed), last.seq + 1))
        return tuple(found)

    def close(self) -> None:
        heard = self._runtime.processor.on_processed
        if self._processed in heard:
            heard.remove(self._processed)
