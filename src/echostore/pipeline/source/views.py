"""What there is to read, in a lake or in a home, as strands of blocks per feed; and how a stretch of them is read.

A view is made on the driver and brought up to date before each batch of a stream: a lake's from the entries since, a
home's from the parties whose files changed. Stretches are small values that travel to the workers, which read blocks by
themselves.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import FeedKey, PartyKey
from echostore.pipeline import schemas
from echostore.pipeline.lake import Lake, log
from echostore.pipeline.lake.home_feeds import feeds_of, open_feeds
from echostore.pipeline.lake.reading import read_rows
from echostore.pipeline.lake.strands import Piece, Run, Strands
from echostore.pipeline.lake.versions import LakeVersion
from echostore.store.feed_store import FeedStore
from echostore.store.home import Home

FeedPlace = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which feeds are wanted; None is all."""

    parties: frozenset[bytes] | None = None
    feeds: frozenset[bytes] | None = None
    control: bool | None = None

    def holds(self, party: bytes, feed: bytes, control: bool) -> bool:
        return (
            (self.parties is None or party in self.parties)
            and (self.feeds is None or feed in self.feeds)
            and (self.control is None or control == self.control)
        )


@dataclass(slots=True)
class ViewedFeed:
    """A feed of a view."""

    control: bool
    strands: Strands


@dataclass(frozen=True, slots=True)
class LakeStretch:
    """Rows of one file. `inside` says that the rows begin inside a run, so that what they follow has to be looked up."""

    lake: str
    file: str
    row_start: int
    row_end: int
    inside: bool

    @property
    def blocks(self) -> int:
        return self.row_end - self.row_start

    def read(self) -> Iterator[pa.RecordBatch]:
        batches = read_rows(self.lake, self.file, self.row_start, self.row_end)
        if not self.inside:
            yield from batches
            return
        before = next(read_rows(self.lake, self.file, self.row_start - 1, self.row_start, ("link", "depth")))
        first = next(batches)
        yield _following(first, before["link"][0].as_py(), before["depth"][0].as_py())
        yield from batches


@dataclass(frozen=True, slots=True)
class HomeStretch:
    """Blocks of one branch of a feed in a home; `last_link` tells which branch."""

    home: str
    party: bytes
    feed: bytes
    start: int
    end: int
    last_link: bytes

    @property
    def blocks(self) -> int:
        return self.end - self.start

    def read(self) -> Iterator[pa.RecordBatch]:
        home = Home.open(self.home)
        store = open_feeds(home, PartyKey(self.party))
        if store is not None:
            with store:
                for feed in feeds_of(store, self.feed):
                    for index, found in enumerate(feed.runs):
                        within = found.run.start <= self.start and self.end <= found.run.end
                        if within and feed.link_at(index, self.end - 1) == self.last_link:
                            yield from feed.batches(index, self.start, self.end)
                            return
        raise Corrupt(
            f"Blocks {self.start} to {self.end - 1} of feed {self.feed.hex()} are no longer in {self.home}.",
            next_step="The party was forgotten or its end was quarantined meanwhile; start the job again.",
        )


Stretch = LakeStretch | HomeStretch


class View(Protocol):
    """What a reader of either kind asks for."""

    feeds: dict[FeedPlace, ViewedFeed]

    def refresh(self) -> None: ...

    def cut(self, place: FeedPlace, piece: Piece, start: int, end: int, blocks: int) -> list[Stretch]:
        """The blocks `start` to `end - 1` of a piece, in stretches of at most so many."""

    def heads(self, place: FeedPlace, piece: Piece, start: int, end: int) -> list[int]:
        """The lengths above `start` and up to `end` at which a head ends."""


class LakeView:
    """A lake at its newest version, or at a given one."""

    def __init__(self, path: str, chosen: Chosen, version: int | None = None) -> None:
        self._lake = Lake.open(path)
        self._chosen = chosen
        self._fixed = version
        self.version = -1
        self.feeds: dict[FeedPlace, ViewedFeed] = {}
        self.refresh()

    def refresh(self) -> None:
        newest = self._lake.version() if self._fixed is None else self._fixed
        if newest == self.version:
            return
        since = self._entries_since(newest)
        if since is None:
            self.feeds = {}
            self._add(self._lake.at(newest))
        else:
            for entry in since:
                self._add(LakeVersion(self._lake, entry.version, log.State(entry.adds, entry.runs)))
        self.version = newest

    def _entries_since(self, newest: int) -> list[log.Entry] | None:
        """The entries since the last look, when they only add; None to look at everything again."""
        if self.version < 0 or newest - self.version > log.STATE_EVERY:
            return None
        entries = [log.read_entry(self._lake.path, version)[0] for version in range(self.version + 1, newest + 1)]
        return None if any(entry.removes for entry in entries) else entries

    def _add(self, version: LakeVersion) -> None:
        chosen = self._chosen
        runs = version.runs(parties=chosen.parties, control=chosen.control, feeds=chosen.feeds)
        columns = ("party", "feed", "control", "start", "end", "previous", "last_link", "file", "row")
        for party, feed, control, *run, file, row in zip(*(runs[name].to_pylist() for name in columns), strict=True):
            known = self.feeds.get((party, feed))
            if known is None:
                known = self.feeds[party, feed] = ViewedFeed(control, Strands(self._link))
            known.strands.add(Run(*run), (file, row))

    def _rows(self, piece: Piece) -> tuple[str, int]:
        """The file of a piece, and the row in which its feed's block 0 would be."""
        file, row = piece.where
        return file, row - (piece.run.start - piece.cut)

    def _link(self, piece: Piece, seq: int) -> bytes | None:
        file, first = self._rows(piece)
        found: bytes = next(read_rows(self._lake.path, file, first + seq, first + seq + 1, ("link",)))["link"][
            0
        ].as_py()
        return found

    def cut(self, place: FeedPlace, piece: Piece, start: int, end: int, blocks: int) -> list[Stretch]:
        file, first = self._rows(piece)
        return [
            LakeStretch(
                str(self._lake.path), file, first + at, first + min(end, at + blocks), at > piece.run.start - piece.cut
            )
            for at in range(start, end, blocks)
        ]

    def heads(self, place: FeedPlace, piece: Piece, start: int, end: int) -> list[int]:
        found: list[int] = []
        file, first = self._rows(piece)
        at = start
        for batch in read_rows(self._lake.path, file, first + start, first + end, ("signature",)):
            valid = batch["signature"].is_valid().to_numpy(zero_copy_only=False)
            found += [at + int(place) + 1 for place in valid.nonzero()[0]]
            at += batch.num_rows
        return found


class HomeView:
    """The parties of a home, as they are on disk."""

    def __init__(self, path: str, chosen: Chosen) -> None:
        self._home = Home.open(path)
        self._chosen = chosen
        self._seen: dict[bytes, tuple[Any, ...]] = {}
        self.feeds: dict[FeedPlace, ViewedFeed] = {}
        self.refresh()

    def refresh(self) -> None:
        for party in self._home.party_keys():
            if self._chosen.parties is not None and party not in self._chosen.parties:
                continue
            mark = file_mark(self._home.party(party).feeds)
            if self._seen.get(party) != mark:
                self._look(party)
                self._seen[party] = mark

    def _look(self, party: PartyKey) -> None:
        store = open_feeds(self._home, party)
        if store is None:
            return
        with store:
            for feed in feeds_of(store):
                if self._chosen.holds(party, feed.key, feed.control) and feed.runs:
                    strands = Strands(_HomeLinks(self._home, party, feed.key).link)
                    for found in feed.runs:
                        # Links are read while the store is open; later ones open it again.
                        strands.add(found.run, found.branch)
                    self.feeds[party, feed.key] = ViewedFeed(feed.control, strands)

    def cut(self, place: FeedPlace, piece: Piece, start: int, end: int, blocks: int) -> list[Stretch]:
        links = _HomeLinks(self._home, PartyKey(place[0]), place[1])
        ends = [*range(start + blocks, end, blocks), end]
        last = links.links(piece, [each - 1 for each in ends])
        starts = [start, *ends[:-1]]
        home = str(self._home.path)
        return [
            HomeStretch(home, place[0], place[1], begin, until, link)
            for begin, until, link in zip(starts, ends, last, strict=True)
        ]

    def heads(self, place: FeedPlace, piece: Piece, start: int, end: int) -> list[int]:
        if piece.where is not None:
            return [piece.run.end] if end >= piece.run.end else []  # of a kept branch only the end is signed for sure
        store = open_feeds(self._home, PartyKey(place[0]))
        if store is None:
            return []
        with store:
            return [head.length for head in store.heads(FeedKey(place[1]), start, end)]


class _HomeLinks:
    """Links of one feed of a home, from a store that is opened for the question: few are asked."""

    def __init__(self, home: Home, party: PartyKey, feed: bytes) -> None:
        self._home, self._party, self._feed = home, party, feed

    def link(self, piece: Piece, seq: int) -> bytes | None:
        return self.links(piece, [seq])[0] or None

    def links(self, piece: Piece, seqs: list[int]) -> list[bytes]:
        """The links of some blocks of a piece; empty for those that are gone."""
        store: FeedStore | None = open_feeds(self._home, self._party)
        if store is not None:
            with store:
                for feed in feeds_of(store, self._feed):
                    for index, found in enumerate(feed.runs):
                        if found.branch == piece.where:
                            return [(feed.link_at(index, seq) if seq < found.run.end else None) or b"" for seq in seqs]
        return [b""] * len(seqs)


def _following(batch: pa.RecordBatch, link: bytes, depth: int) -> pa.RecordBatch:
    """Rows whose first one says what it follows."""
    columns = list(batch.columns)
    for name, value in (("previous", link), ("previous_depth", depth)):
        at = schemas.BLOCKS.get_field_index(name)
        kind = schemas.BLOCKS.field(name).type
        columns[at] = pa.concat_arrays([pa.array([value], kind), columns[at].slice(1)])
    return pa.RecordBatch.from_arrays(columns, schema=schemas.BLOCKS)


def file_mark(path: Path) -> tuple[Any, ...]:
    """What changes when a database is written."""
    mark: list[int] = []
    for name in (path, path.with_name(path.name + "-wal")):
        try:
            found = os.stat(name)
        except FileNotFoundError:
            continue
        mark += [found.st_mtime_ns, found.st_size, found.st_ino]
    return tuple(mark)
