"""verify: are these blocks what their writers signed? Pieces of data runs in, `schemas.VERIFIED` out.

    PIECES ──► each task reads its rows itself (bytes never pass the JVM)
           ──► links recomputed and compared; heads' signatures           what a peer's FeedStore checks on arrival
           ──► envelopes by column; depth hints; the local depth rule     what the orderer checks in a block by itself
           ──► one row per piece; dependencies as columns, one row per piece and named feed

Nothing that the lake claims is believed: a wrong link, hint or head ends what counts of a piece, and is told as `fault`.
Which pieces hang together, and whether dependencies are met, is decided by `order`.

Hot path: two hashes, one parse and about a microsecond of column work per block; nothing else is done per row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from echostore.kernel.feed import Head
from echostore.kernel.ids import LINK_PREFIX_BYTES, FeedKey, Link, PartyKey, feed_id
from echostore.kernel.limits import APPEND_BLOCKS_MAX, APPEND_BYTES_MAX, BLOCK_BYTES_MAX, SEQ_MAX
from echostore.kernel.reasons import Reason
from echostore.pipeline import schemas
from echostore.pipeline.lake.reading import read_rows
from echostore.pipeline.stages.envelopes import Envelopes, Longs, read_envelopes
from echostore.pipeline.stages.frames import frame_of, mapped
from echostore.pipeline.stages.planning import BUCKET_BITS
from echostore.wire.links import Verify, chain, head_signed
from echostore.wire.signing import verify as verify_signature

COLUMNS = ("seq", "link", "depth", "payload", "signature")
ROWS_OUT = 256
"""Rows that a task collects before it hands them on."""


class Piece(NamedTuple):
    """One row of `schemas.PIECES`, as far as reading needs it."""

    piece: int
    party: bytes
    feed: bytes
    start: int
    end: int
    file: str
    row: int
    previous: bytes | None
    limit: int | None


def verify_runs(spark: Any, lake: str, pieces: pa.Table) -> Any:
    """`schemas.VERIFIED` of the pieces that are not old. Not computed yet: the caller persists it."""
    fresh = pieces.filter(pa.array(~pieces["old"].to_numpy(zero_copy_only=False)))
    tasks = int(fresh["task"].to_numpy().max(initial=-1)) + 1
    frame = frame_of(spark, fresh).repartitionById(max(1, tasks), "task")
    return mapped(frame, Verifying(lake), schemas.VERIFIED)


@dataclass(frozen=True)
class Verifying:
    """The task: travels by name and the path of the lake."""

    lake: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, Any]] = []
        for piece in pieces_of(batches):
            rows += verify_piece(piece, piece_rows(self.lake, piece))
            if len(rows) >= ROWS_OUT:
                yield pa.RecordBatch.from_pylist(rows, schemas.VERIFIED)
                rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schemas.VERIFIED)


def pieces_of(batches: Iterator[pa.RecordBatch]) -> list[Piece]:
    """The pieces of a task in the order in which they lie in files."""
    found = [Piece(**row) for batch in batches for row in batch.select(Piece._fields).to_pylist()]
    return sorted(found, key=lambda piece: (piece.file, piece.row))


def piece_rows(lake: str, piece: Piece) -> Iterator[pa.RecordBatch]:
    """The rows of a piece; before them, where the piece does not name it, the row that it follows."""
    before = 1 if piece.previous is None else 0
    length = piece.end - piece.start
    return read_rows(lake, piece.file, piece.row - before, piece.row + length, COLUMNS)


def verify_piece(
    piece: Piece, batches: Iterator[pa.RecordBatch], verify: Verify = verify_signature, *, envelopes: bool = True
) -> list[dict[str, Any]]:
    """The row of a piece and the rows of its dependencies; without envelopes, links and heads are all that is checked."""
    reading = _Reading(piece, verify, envelopes)
    for batch in batches:
        if reading.previous is None:
            reading.previous = reading.link = batch["link"][0].as_py()
            batch = batch.slice(1)
        if batch.num_rows:
            reading.take(batch)
    return reading.rows()


@dataclass
class _Reading:
    """What is known of a piece after the batches that were read."""

    piece: Piece
    verify: Verify
    envelopes: bool
    previous: bytes | None = None
    at: int = 0
    """The next seq."""
    link: bytes = b""
    depth: int = 0
    fault: str | None = None
    good_end: int | None = None
    heads: "_Heads" = field(init=False)
    first_depth: int | None = None
    first_deepest: int = 0
    bad: tuple[int, Reason, bool] | None = None
    named: list[tuple[int, Envelopes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.previous = self.piece.previous
        self.link = self.previous or b""
        self.at = self.piece.start
        self.heads = _Heads(self.piece, self.verify)

    def take(self, batch: pa.RecordBatch) -> None:
        if self.good_end is not None:
            return
        payloads = batch["payload"]
        rows = payloads.to_pylist()
        links = chain(FeedKey(self.piece.feed), self.at, Link(self.link), rows)
        good = self._agreeing(batch, rows, links)
        if self.envelopes and self.bad is None and good:
            good = self._envelopes(payloads.slice(0, good), rows[:good], batch["depth"].slice(0, good))
        sizes = np.fromiter(map(len, rows[:good]), np.int64, good)
        self.heads.take(self.at, sizes, links, batch["signature"])
        self.at += good
        if good:
            self.link = links[good - 1]
        if good < len(rows):
            self.good_end = self.at

    def _agreeing(self, batch: pa.RecordBatch, rows: list[bytes], links: list[Link]) -> int:
        """How many rows, from the first, have the right place, link and size."""
        good = len(rows)
        claimed = batch["link"].to_pylist()
        if claimed != links:
            good = next(
                index for index, (ours, theirs) in enumerate(zip(links, claimed, strict=True)) if ours != theirs
            )
            self.fault = f"{Reason.BAD_LINK}: its link does not follow from its content and the block before it"
        seqs = batch["seq"].to_numpy(zero_copy_only=False)
        misplaced = np.flatnonzero(seqs[:good] != np.arange(self.at, self.at + good))
        if len(misplaced):
            good = int(misplaced[0])
            self.fault = f"{Reason.BAD_LINK}: the lake has it at another place than it says"
        if self.at + good - 1 > SEQ_MAX or (good and max(map(len, rows[:good])) > BLOCK_BYTES_MAX):
            good = next(
                index
                for index, payload in enumerate(rows)
                if len(payload) > BLOCK_BYTES_MAX or self.at + index > SEQ_MAX
            )
            self.fault = f"{Reason.OVERSIZE}: a block beyond a limit"
        return good

    def _envelopes(self, payloads: pa.Array, rows: list[bytes], hints: pa.Array) -> int:
        """Read the envelopes; returns how many rows have hints that agree with them."""
        found = read_envelopes(payloads, rows)
        count, good = len(found.depths), len(rows)
        wrong = np.flatnonzero(hints.to_numpy(zero_copy_only=False)[:count] != found.depths)
        if len(wrong):
            good = int(wrong[0])
            self.fault = f"{Reason.BAD_LINK}: the lake says another depth than the block"
            found = _upto(found, good)
            count = good
        if count:
            self._check_depths(found)
            self.named.append((self.at, found))
            self.depth = int(found.depths[-1])
        if found.fault is not None and (self.bad is None or self.at + count < self.bad[0]):
            self.bad = self.at + count, found.fault, False
        return good

    def _check_depths(self, found: Envelopes) -> None:
        """The local rule: one more than the deepest of the block before and the blocks that are named."""
        deepest = np.zeros(len(found.depths), np.int64)
        if len(found.block):
            starts = np.flatnonzero(np.diff(found.block, prepend=-1))
            deepest[found.block[starts]] = np.maximum.reduceat(found.named_depths, starts)
        before = np.empty_like(deepest)
        before[1:] = found.depths[:-1]
        before[0] = self.depth
        right = found.depths == 1 + np.maximum(before, deepest)
        if self.first_depth is None:
            # What comes before the piece is not known here: `order` checks its first block.
            self.first_depth, self.first_deepest = int(found.depths[0]), int(deepest[0])
            right[0] = True
        wrong = np.flatnonzero(~right)
        if len(wrong):
            self.bad = self.at + int(wrong[0]), Reason.LYING_DEPTH, True

    def rows(self) -> list[dict[str, Any]]:
        piece = self.piece
        good_end = self.at
        named = self._dependencies()
        first_head, first_bytes, last_head, tail_bytes, total = self.heads.told()
        bad = self.bad or (None, None, None)
        key = {"party": piece.party, "feed": piece.feed, "piece": piece.piece}
        told = {
            **key,
            "start": piece.start,
            "end": piece.end,
            "file": piece.file,
            "row": piece.row,
            "limit": piece.limit,
            "previous": self.previous or b"",
            "last_link": self.link,
            "last_depth": self.depth,
            "good_end": good_end,
            "fault": self.fault,
            "bytes": total,
            "first_head": first_head,
            "first_head_bytes": first_bytes,
            "last_head": last_head,
            "tail_bytes": tail_bytes,
            "bad_head": self.heads.bad,
            "first_depth": self.first_depth,
            "first_deepest": self.first_deepest,
            "bad_seq": bad[0],
            "bad_reason": bad[1],
            "bad_late": bad[2],
        }
        return [told, *({**key, **row} for row in named)]

    def _dependencies(self) -> Iterator[dict[str, Any]]:
        """Dependencies by the feed that they name. What lies behind the first bad block is of no more interest."""
        if not any(len(found.block) for _, found in self.named):
            return iter(())
        seqs = np.concatenate([found.block + at for at, found in self.named])
        names = np.concatenate([found.names for _, found in self.named])
        named_seqs = np.concatenate([found.named_seqs for _, found in self.named])
        order = np.lexsort((seqs, names))
        names, seqs, named_seqs = names[order], seqs[order], named_seqs[order]
        back = names == int.from_bytes(feed_id(FeedKey(self.piece.feed)), "big")
        back[1:] |= (names[1:] == names[:-1]) & (named_seqs[1:] <= named_seqs[:-1])
        if back.any():
            first = int(seqs[back].min())
            if self.bad is None or first < self.bad[0] or (first == self.bad[0] and self.bad[2]):
                self.bad = first, Reason.TIMEFRAME_BACKWARDS, True
        if self.bad is not None:
            kept = seqs <= self.bad[0]
            names, seqs, named_seqs, back, order = names[kept], seqs[kept], named_seqs[kept], back[kept], order[kept]
        links = np.concatenate([found.named_links for _, found in self.named])[order]
        depths = np.concatenate([found.named_depths for _, found in self.named])[order]
        return _packed(names, seqs, named_seqs, links, depths, back)


def _packed(
    names: npt.NDArray[np.uint64],
    seqs: Longs,
    named_seqs: Longs,
    links: npt.NDArray[np.uint8],
    depths: Longs,
    back: npt.NDArray[np.bool_],
) -> Iterator[dict[str, Any]]:
    """One row per named feed and bucket of it; an entry that goes backwards is the last of a row of its own."""
    if not len(names):
        return
    buckets = named_seqs >> BUCKET_BITS
    new = np.ones(len(names), bool)
    new[1:] = (names[1:] != names[:-1]) | (buckets[1:] != buckets[:-1]) | back[1:]
    starts = np.flatnonzero(new)
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(names)], strict=True):
        yield {
            "names": int(names[start]).to_bytes(8, "big"),
            "bucket": int(buckets[start]),
            "seqs": seqs[start:end].tobytes(),
            "named_seqs": named_seqs[start:end].tobytes(),
            "named_links": links[start:end].tobytes(),
            "named_depths": depths[start:end].tobytes(),
            "backwards": bool(back[start]),
        }


def _upto(found: Envelopes, count: int) -> Envelopes:
    kept = found.block < count
    return Envelopes(
        found.depths[:count],
        found.block[kept],
        found.names[kept],
        found.named_seqs[kept],
        found.named_links[kept].reshape(-1, LINK_PREFIX_BYTES),
        found.named_depths[kept],
        None,
    )


class _Heads:
    """Which heads of a piece are signed: as few as show that a peer could take its blocks in, range by range."""

    def __init__(self, piece: Piece, verify: Verify) -> None:
        self.piece, self.verify = piece, verify
        self.bad: int | None = None
        """The first block with a signature that is not its writer's."""
        self._sizes: list[npt.NDArray[np.int64]] = []
        self._claims: list[tuple[int, Link, bytes]] = []

    def take(self, at: int, sizes: Longs, links: list[Link], signatures: pa.Array) -> None:
        """Blocks whose links are right, and what is said to be signed of them."""
        self._sizes.append(sizes)
        present = np.flatnonzero(signatures.slice(0, len(sizes)).is_valid().to_numpy(zero_copy_only=False))
        for index in present.tolist():
            self._claims.append((at + index + 1, links[index], signatures[index].as_py()))

    def told(self) -> tuple[int | None, int, int | None, int, int]:
        """(nearest head, bytes before it, farthest head, bytes after it, all bytes).

        The nearest is looked for because blocks before the piece may need it; from there on each step goes to the
        farthest signed head that one append may reach, as a receiver would ask for ranges.
        """
        start = self.piece.start
        ends = np.concatenate([np.zeros(1, np.int64), *self._sizes]).cumsum()  # bytes before each block
        nearest = None
        for index, (length, _, _) in enumerate(self._claims):
            if length - start > APPEND_BLOCKS_MAX or ends[length - start] > APPEND_BYTES_MAX:
                break
            if self._signed(index):
                nearest = index
                break
        total = int(ends[-1])
        if nearest is None:
            return None, 0, None, total, total
        at = nearest
        while True:
            length = self._claims[at][0]
            reach = [
                index
                for index in range(at + 1, min(len(self._claims), at + 1 + APPEND_BLOCKS_MAX))
                if self._claims[index][0] - length <= APPEND_BLOCKS_MAX
                and ends[self._claims[index][0] - start] - ends[length - start] <= APPEND_BYTES_MAX
            ]
            following = next((index for index in reversed(reach) if self._signed(index)), None)
            if following is None:
                break
            at = following
        first, last = self._claims[nearest][0], self._claims[at][0]
        return first, int(ends[first - start]), last, total - int(ends[last - start]), total

    def _signed(self, index: int) -> bool:
        length, link, signature = self._claims[index]
        piece = self.piece
        if head_signed(PartyKey(piece.party), FeedKey(piece.feed), Head(length, link, signature), self.verify):
            return True
        if self.bad is None or length - 1 < self.bad:
            self.bad = length - 1
        return False
