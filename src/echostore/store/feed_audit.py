"""The audit of a feed on disk: every block hashed again, every head checked, the first damage named by its place.

It reads the tables by itself and trusts nothing that is in memory: `FeedStore.verify` runs it, `doctor` and
`feed verify` show it. It repairs nothing; `FeedStore.quarantine_from` does, at the seq that is named here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from echostore.kernel.errors import Corrupt
from echostore.kernel.feed import Head
from echostore.kernel.ids import FeedKey, Link, PartyKey
from echostore.store.feed_tables import FeedRow, block_id, first_id
from echostore.store.fork_evidence import ForkEvidence
from echostore.store.sqlite import Database, Row
from echostore.wire.links import Verify, chain, head_signed

CHUNK_BLOCKS = 1024
CHUNK_BYTES = 4 * 1024 * 1024

Progress = Callable[[int, int], None]
"""(blocks checked, blocks in all), now and then."""


@dataclass(frozen=True, slots=True)
class FeedVerdict:
    """What an audit found. `damage` is (seq, what is wrong there) of the first damage."""

    feed: FeedKey
    blocks: int
    heads: int
    payload_bytes: int
    damage: tuple[int, str] | None

    @property
    def sound(self) -> bool:
        return self.damage is None


def audit(db: Database, party: PartyKey, row: FeedRow, verify: Verify, progress: Progress | None) -> FeedVerdict:
    walk = _Walk(db, party, row, verify)
    try:
        damage = walk.blocks(progress)
        if damage is None:
            damage = ForkEvidence(db).damage(party, row.key, row.no, walk.seq, walk.held_link, verify)
    except Corrupt as error:
        damage = walk.seq, error.what
    return FeedVerdict(row.key, walk.seq - row.base, walk.heads, walk.payload_bytes, damage)


class _Walk:
    """One pass over a feed: `seq` is the next block to check."""

    def __init__(self, db: Database, party: PartyKey, row: FeedRow, verify: Verify) -> None:
        self._db, self._party, self._row, self._verify = db, party, row, verify
        self.seq, self.heads, self.payload_bytes = row.base, 0, 0
        self._previous = row.base_link
        self._covered = row.base

    def blocks(self, progress: Progress | None) -> tuple[int, str] | None:
        """The first damage among blocks and heads, in one pass over both."""
        (low, high) = first_id(self._row.no), first_id(self._row.no + 1)
        found = self._db.row("SELECT max(id) FROM blocks WHERE id >= ? AND id < ?", (low, high))
        total = 0 if found is None or found[0] is None else found[0] - low + 1 - self._row.base
        while rows := self._chunk():
            damage = self._check(rows)
            if damage is not None:
                return damage
            if progress is not None:
                progress(self.seq - self._row.base, total)
        beyond = self._db.row(
            "SELECT length FROM heads WHERE feed_no = ? AND length > ? ORDER BY length", (self._row.no, self.seq)
        )
        if beyond is not None:
            return self.seq, f"missing, while a head covers {beyond[0]} blocks"
        if self._covered != self.seq:
            return self._covered, "no head covers it"
        row = self._db.row(
            "SELECT count(*) FROM heads WHERE feed_no = ? AND NOT (length > 0 AND length <= ?)",
            (self._row.no, self._row.base),
        )
        if row is not None and row[0] != self.heads:
            return self._row.base, "a head where no append ended"
        return None

    def held_link(self, seq: int) -> object:
        """The link of a held block as it is on disk, after the walk found it sound."""
        if seq == self._row.base - 1:
            return self._row.base_link
        row = self._db.row("SELECT link FROM blocks WHERE id = ?", (first_id(self._row.no) + seq,))
        return None if row is None else row[0]

    def _chunk(self) -> list[Row]:
        return self._db.rows_until(
            "SELECT id, link, payload FROM blocks WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
            (block_id(self._row.no, self.seq), first_id(self._row.no + 1), CHUNK_BLOCKS),
            size_of=lambda row: len(row[2]) if isinstance(row[2], bytes) else 0,
            bytes_max=CHUNK_BYTES,
        )

    def _check(self, rows: list[Row]) -> tuple[int, str] | None:
        first, start = block_id(self._row.no, self.seq), self.seq
        for offset, (number, _, payload) in enumerate(rows):
            if number != first + offset:
                return start + offset, "missing"
            if not isinstance(payload, bytes):
                return start + offset, "its payload is not bytes"
        links = chain(self._row.key, start, self._previous, [row[2] for row in rows])
        heads = {length: (link, signature) for length, link, signature in self._heads(start, start + len(rows))}
        for offset, row in enumerate(rows):
            if row[1] != links[offset]:
                return start + offset, "does not match its link"
            self.seq += 1
            self.payload_bytes += len(row[2])
            if self.seq in heads:
                link, signature = heads[self.seq]
                if link != links[offset] or not isinstance(signature, bytes):
                    return start + offset, "does not match the head that covers it"
                if not head_signed(self._party, self._row.key, Head(self.seq, links[offset], signature), self._verify):
                    return start + offset, "the head that covers it is not signed by the feed's key"
                self._covered, self.heads = self.seq, self.heads + 1
        self._previous = links[-1]
        return None

    def _heads(self, after: int, last: int) -> list[tuple[int, Link, bytes]]:
        rows = self._db.rows(
            "SELECT length, link, signature FROM heads WHERE feed_no = ? AND length > ? AND length <= ?",
            (self._row.no, after, last),
        )
        return [(length, link, signature) for length, link, signature in rows]
