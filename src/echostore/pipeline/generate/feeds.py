"""SignedFeed: a feed as it is being generated. Payloads in, linked and signed rows out.

One call of `append` is one append of a peer: its blocks get one head. Rows leave in record batches of `schemas.BLOCKS`
as they become many, so that a feed of any length costs the memory of a few thousand blocks.
"""

from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa

from echostore.kernel.ids import NO_LINK, FeedId, FeedKey, Link, PartyKey, feed_id
from echostore.kernel.timeframe import Dependency, link_prefix
from echostore.pipeline.schemas import BLOCKS
from echostore.wire.links import chain, head_bytes
from echostore.wire.signing import SigningKey

ROWS_MAX: Final = 4096
"""Rows of a feed that wait for their batch."""

Give = Callable[[FeedKey, pa.RecordBatch], None]
"""Takes the next rows of a feed."""


class SignedFeed:
    """The end of a feed, its key, and the rows that have not left yet."""

    def __init__(self, party: PartyKey, key: SigningKey, give: Give, *, control: bool) -> None:
        self.party = party
        self.key = FeedKey(key.public)
        self.id: FeedId = feed_id(self.key)
        self.control = control
        self.length = 0
        self.link: Link = NO_LINK
        self.depth = 0
        self.named: dict[FeedId, int] = {}
        """Of each other feed the seq that was last named here."""
        self._signer = key
        self._give = give
        self._start, self._before, self._depth_before = 0, self.link, 0
        self._new_run = True
        self._payloads: list[bytes] = []
        self._links: list[Link] = []
        self._depths: list[int] = []
        self._signatures: list[bytes | None] = []

    def append(self, payloads: Sequence[bytes], depths: Sequence[int]) -> None:
        """Link and sign the next blocks. `depths` are those that the payloads claim, 0 for one without an envelope."""
        links = chain(self.key, self.length, self.link, payloads)
        self.length += len(payloads)
        self.link = links[-1]
        self.depth = depths[-1] or self.depth
        signature = self._signer.sign(head_bytes(self.party, self.key, self.length, self.link))
        self._payloads += payloads
        self._links += links
        self._depths += depths
        self._signatures += [None] * (len(payloads) - 1)
        self._signatures.append(signature)
        if len(self._payloads) >= ROWS_MAX:
            self.flush()

    def mark(self) -> Dependency:
        """The last block, as others name it."""
        return Dependency(self.id, self.length - 1, link_prefix(self.link), self.depth)

    def fresh(self, marks: Sequence[Dependency]) -> list[Dependency]:
        """Those of these blocks that this feed has not named yet, ascending by feed; they count as named."""
        found: dict[FeedId, Dependency] = {}
        for each in marks:
            if each.feed != self.id and each.seq > self.named.get(each.feed, -1):
                found[each.feed] = each
                self.named[each.feed] = each.seq
        return [found[feed] for feed in sorted(found)]

    def flush(self) -> None:
        """Hand over the rows that wait."""
        count = len(self._payloads)
        if not count:
            return
        previous: list[bytes | None] = [None] * count
        previous_depths: list[int | None] = [None] * count
        if self._new_run:
            previous[0], previous_depths[0] = self._before, self._depth_before
        batch = pa.RecordBatch.from_arrays(
            [
                _repeated(self.party, count),
                _repeated(self.key, count),
                pa.repeat(pa.scalar(self.control), count),
                pa.array(range(self._start, self._start + count), pa.int64()),
                pa.array(self._links, pa.binary()),
                pa.array(self._depths, pa.int64()),
                pa.array(self._payloads, pa.binary()),
                pa.array(self._signatures, pa.binary()),
                pa.array(previous, pa.binary()),
                pa.array(previous_depths, pa.int64()),
            ],
            schema=BLOCKS,
        )
        self._give(self.key, batch)
        self._start = self.length
        self._new_run = False
        self._payloads, self._links, self._depths, self._signatures = [], [], [], []

    def begin_run(self, give: Give | None = None) -> None:
        """The next rows say what they follow, and may go elsewhere."""
        self.flush()
        self._give = give or self._give
        self._start, self._before, self._depth_before = self.length, self.link, self.depth
        self._new_run = True

    # what a liar does with a feed

    def branch(self) -> "SignedFeed":
        """A second continuation of the feed from where it stands."""
        self.flush()
        other = SignedFeed(self.party, self._signer, self._give, control=self.control)
        other.length, other.link, other.depth = self.length, self.link, self.depth
        other.named = dict(self.named)
        other.begin_run()
        return other

    def leave_out(self, payloads: Sequence[bytes], depths: Sequence[int]) -> None:
        """Append blocks that nobody will ever see."""
        self.flush()
        self.append(payloads, depths)
        self._payloads, self._links, self._depths, self._signatures = [], [], [], []
        self.begin_run()

    def alter_payload(self, seq: int) -> None:
        """Change a payload that is linked and signed already."""
        at = seq - self._start
        payload = self._payloads[at]
        self._payloads[at] = payload[:-1] + bytes([payload[-1] ^ 1])

    def alter_signature(self) -> None:
        """Spoil the signature of the last head."""
        signature = self._signatures[-1]
        assert signature is not None, "the last block has a head"
        self._signatures[-1] = bytes([signature[0] ^ 1]) + signature[1:]


def _repeated(value: bytes, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(bytes(value), pa.binary()), count)
