"""The tables of a party's feeds.db, and the numbers that name rows in them.

    about    (name, value, seal)                          what the file says of itself: party, genesis feed, title ...
    feeds    (no, key, kind, own, base, base_link, seal)  the feeds, numbered as they were added
    blocks   (id, link, payload)                          id = no << 40 | seq
    heads    (feed_no, length, link, signature)           the signed ends of appends and received ranges
    fork_*                                                other branches, see fork_evidence.py

Blocks have one integer key instead of the pair (feed, seq): SQLite fills pages of such a table to the brim when rows
arrive in order (198 bytes on disk for a block of 150, against 228 with the pair as a key) and finds rows faster. The
40 bits for seq hold 10^12 blocks of one feed, more than any disk.

Blocks and heads prove themselves by hash and signature. Rows of `about` and `feeds` carry a seal, a short hash over
the row, so that a flipped bit in them is found too.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

from echostore.kernel.errors import Corrupt, TooLarge
from echostore.kernel.ids import KEY_BYTES, LINK_BYTES, FeedKey, Link
from echostore.store.fork_evidence import TABLES as FORK_TABLES
from echostore.store.sqlite import Row, Schema

FeedKind = Literal["control", "data"]
KINDS: tuple[FeedKind, ...] = ("control", "data")

SEQ_BITS = 40
FEED_NO_MAX = (1 << 63 - SEQ_BITS) - 1

SCHEMA = Schema(
    application_id=0x45434F66,
    steps=(
        (
            "CREATE TABLE about (name TEXT PRIMARY KEY, value BLOB NOT NULL, seal BLOB NOT NULL) WITHOUT ROWID",
            """CREATE TABLE feeds (
                no INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, kind TEXT NOT NULL, own INTEGER NOT NULL,
                base INTEGER NOT NULL, base_link BLOB NOT NULL, seal BLOB NOT NULL)""",
            "CREATE TABLE blocks (id INTEGER PRIMARY KEY, link BLOB NOT NULL, payload BLOB NOT NULL)",
            """CREATE TABLE heads (
                feed_no INTEGER NOT NULL, length INTEGER NOT NULL, link BLOB NOT NULL, signature BLOB NOT NULL,
                PRIMARY KEY (feed_no, length)) WITHOUT ROWID""",
            *FORK_TABLES,
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class FeedRow:
    """A feed as it was added. Blocks below `base` are not here; `base_link` is the link of the one before it."""

    no: int
    key: FeedKey
    kind: FeedKind
    own: bool
    base: int
    base_link: Link

    def sealed(self) -> Row:
        return (self.no, self.key, self.kind, int(self.own), self.base, self.base_link, _feed_seal(self))

    @staticmethod
    def read(row: Row) -> "FeedRow":
        """The feed of a row `SELECT no, key, kind, own, base, base_link, seal`; Corrupt when it was altered."""
        no, key, kind, own, base, base_link, seal = row
        sound = (
            isinstance(key, bytes)
            and len(key) == KEY_BYTES
            and isinstance(base_link, bytes)
            and len(base_link) == LINK_BYTES
            and kind in KINDS
            and own in (0, 1)
            and isinstance(base, int)
            and 0 <= base < 1 << SEQ_BITS
            and isinstance(no, int)
            and 0 < no <= FEED_NO_MAX
        )
        if sound:
            feed = FeedRow(no, FeedKey(key), kind, bool(own), base, Link(base_link))
            if _feed_seal(feed) == seal:
                return feed
        raise Corrupt(f"The entry of feed number {no} is damaged.", next_step="Fetch the party again from a peer.")


def first_id(feed_no: int) -> int:
    return feed_no << SEQ_BITS


def block_id(feed_no: int, seq: int) -> int:
    if seq >> SEQ_BITS:
        raise TooLarge(f"Block {seq} is beyond what a store can number.")
    return feed_no << SEQ_BITS | seq


def seal_of(*parts: bytes) -> bytes:
    """A short hash over parts whose lengths count, so that nothing can move from one to the next."""
    hashed = hashlib.sha256(b"echostore/row/1")
    for part in parts:
        hashed.update(len(part).to_bytes(4, "big") + part)
    return hashed.digest()[:8]


def _feed_seal(feed: FeedRow) -> bytes:
    numbers = b"".join(number.to_bytes(8, "big") for number in (feed.no, int(feed.own), feed.base))
    return seal_of(numbers, feed.key, feed.kind.encode(), feed.base_link)
