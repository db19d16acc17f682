"""Timeframes: how far a reader has come in every feed of a party, with the content it has seen there.

    Timeframe   {feed id: (last seq, link)}      what a peer has processed; compares as a vector clock
    Dependency  (feed id, seq, link prefix, depth)  one entry of a message's timeframe change

A message carries only the entries that changed since the previous message of the same feed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from echostore.kernel.ids import LINK_PREFIX_BYTES, FeedId, Link


class Dependency(NamedTuple):
    """The writer had processed `feed` up to and including the block `seq`, whose link starts so, at this depth."""

    feed: FeedId
    seq: int
    link_prefix: bytes
    depth: int


class Position(NamedTuple):
    """The last block of a feed that was reached, by place and content."""

    seq: int
    link: Link


@dataclass(frozen=True, slots=True)
class Timeframe:
    """An immutable map feed id -> Position. Feeds of which nothing was reached are absent."""

    entries: Mapping[FeedId, Position]

    @staticmethod
    def of(entries: Iterable[tuple[FeedId, Position]]) -> "Timeframe":
        return Timeframe(dict(sorted(entries)))

    def __getitem__(self, feed: FeedId) -> Position:
        return self.entries[feed]

    def __contains__(self, feed: object) -> bool:
        return feed in self.entries

    def __iter__(self) -> Iterator[FeedId]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def length(self, feed: FeedId) -> int:
        """How many blocks of `feed` lie inside this timeframe."""
        position = self.entries.get(feed)
        return position.seq + 1 if position else 0

    def covers(self, feed: FeedId, seq: int) -> bool:
        position = self.entries.get(feed)
        return position is not None and seq <= position.seq

    def includes(self, other: "Timeframe") -> bool:
        """Whether everything inside `other` is inside this one, by seq; branches are compared where seqs are equal."""
        for feed, theirs in other.entries.items():
            ours = self.entries.get(feed)
            if ours is None or ours.seq < theirs.seq or (ours.seq == theirs.seq and ours.link != theirs.link):
                return False
        return True

    def includes_seqs(self, other: "Timeframe") -> bool:
        """The same by seq alone, where links may be prefixes."""
        return all(self.covers(feed, theirs.seq) for feed, theirs in other.entries.items())

    def join(self, other: "Timeframe") -> "Timeframe":
        """The least timeframe that includes both; of two branches at one seq the greater link, for determinism."""
        merged = dict(self.entries)
        for feed, theirs in other.entries.items():
            ours = merged.get(feed)
            if ours is None or theirs > ours:
                merged[feed] = theirs
        return Timeframe(dict(sorted(merged.items())))

    def __str__(self) -> str:
        return "{" + ", ".join(f"{feed.hex()[:8]}:{at.seq}" for feed, at in self.entries.items()) + "}"


EMPTY = Timeframe({})


def link_prefix(link: Link) -> bytes:
    return link[:LINK_PREFIX_BYTES]
