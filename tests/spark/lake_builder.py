"""Builders for lakes in tests: homes from writers that sign, and the set of blocks that a lake or a home holds.

A block is (party, feed, control, seq, link, payload): sets of these are what publishing must carry over, whatever the files.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from echostore.kernel.ids import NO_LINK, PartyKey
from echostore.pipeline import schemas
from echostore.pipeline.lake import Lake, LakeVersion
from echostore.pipeline.lake.reading import read_rows
from echostore.store.feed_store import FeedStore, Ingested
from echostore.store.home import Home
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.signing import verify
from feed_builder import PARTY, Writer, payloads

BlockId = tuple[bytes, bytes, bool, int, bytes, bytes]


def party_key(number: int) -> PartyKey:
    """Keys in the order of their numbers."""
    return PartyKey(number.to_bytes(4, "big") + bytes(28))


def message(depth: int, text: str = "") -> bytes:
    """A payload whose depth can be read, as big as its text."""
    return pb.Message(depth=depth, time_ms=len(text), dependency_feeds=text.encode()).SerializeToString()


class HomeOf:
    """A home that receives what writers sign, as replication would."""

    def __init__(self, path: Path) -> None:
        self.home = Home.open(path, create=True)
        self.path = path

    def receive(
        self, writer: Writer, *, control: bool = False, start: int | None = None, end: int | None = None
    ) -> Any:
        """Hand over blocks of a writer, from what is held on unless a start is given."""
        folder = self.home.make_party(writer.party)
        with FeedStore(folder.feeds, writer.party) as store:
            store.add_feed(writer.key, "control" if control else "data")
            at = store.length(writer.key) if start is None else start
            sent, head = writer.range(at, end)
            return store.ingest(writer.key, at, sent, head, verify)

    def hold(self, writer: Writer, *texts: bytes, control: bool = False) -> None:
        writer.write(*texts)
        assert isinstance(self.receive(writer, control=control), Ingested)

    def blocks(self) -> set[BlockId]:
        """Every block of every branch that is held."""
        found: set[BlockId] = set()
        for party in self.home.party_keys():
            with FeedStore(self.home.party(party).feeds, party, writable=False) as store:
                for feed in store.feeds():
                    control = feed.kind == "control"
                    branches = [block for branch in store.branches(feed.key) for block in branch.blocks]
                    for block in [*store.read(feed.key), *branches]:
                        found.add((party, feed.key, control, block.seq, block.link, block.payload))
        return found


def rows_of(version: LakeVersion, runs: pa.Table | None = None) -> Iterator[dict[str, Any]]:
    """The rows of runs, in the order of the runs."""
    for run in (version.runs() if runs is None else runs).to_pylist():
        end = run["row"] + run["end"] - run["start"]
        for batch in read_rows(version.lake.path, run["file"], run["row"], end):
            yield from batch.to_pylist()


def block_ids(rows: Iterable[dict[str, Any]]) -> list[BlockId]:
    return [(r["party"], r["feed"], r["control"], r["seq"], r["link"], r["payload"]) for r in rows]


def lake_blocks(lake: Lake) -> list[BlockId]:
    """All blocks of the newest version; a list, so that duplicates show."""
    return sorted(block_ids(rows_of(lake.at())))


def feed_rows(
    writer: Writer, start: int = 0, end: int | None = None, *, control: bool = False, heads: Iterable[int] | None = None
) -> pa.RecordBatch:
    """Blocks of a writer as rows for a LakeWriter: one run, signed at its end or at the given lengths."""
    end = len(writer.payloads) if end is None else end
    signed = set([end] if heads is None else heads)
    count = end - start
    previous: list[bytes | None] = [None] * count
    depths: list[int | None] = [None] * count
    previous[0], depths[0] = (writer.links[start - 1] if start else NO_LINK), start
    columns: list[Any] = [
        [writer.party] * count,
        [writer.key] * count,
        [control] * count,
        list(range(start, end)),
        writer.links[start:end],
        list(range(start + 1, end + 1)),
        writer.payloads[start:end],
        [writer.head(seq + 1).signature if seq + 1 in signed else None for seq in range(start, end)],
        previous,
        depths,
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schemas.BLOCKS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schemas.BLOCKS)


def written(name: str, count: int, party: PartyKey = PARTY, size: int = 40, noise: int = 0) -> Writer:
    """A writer of `count` blocks, whose last `noise` bytes do not compress."""
    writer = Writer(name, party)
    random = Random(name)
    writer.write(*(text[: len(text) - noise] + random.randbytes(noise) for text in payloads(count, name, size)))
    return writer


def many_parties(count: int, blocks: int, size: int = 150, noise: int = 0) -> Iterator[pa.RecordBatch]:
    """Small parties with a control and a data feed each. Links are real, signatures are not asked for."""
    for number in range(count):
        control = written(f"control {number}", 2, party_key(number), size, noise)
        yield feed_rows(control, control=True, heads=())
        data = written(f"data {number}", blocks, party_key(number), size, noise)
        yield feed_rows(data, heads=())
