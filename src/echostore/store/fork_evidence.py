"""The other branches of forked feeds, kept beside the branch that was held first, and the proof that they exist.

    held:     0 - 1 - 2 - 3 - 4 - 5 =head
                       \\
    evidence:           3'- 4'=head'          fork_blocks name their predecessor by link, so branches may branch again

Every block here was under a verified head when it came, like a held one. Which branch is "held" depends on arrival;
that is no matter, because blocks of every branch leave the state from the earliest fork on. They stay readable here,
since a message may depend on one. Used by `FeedStore` alone, inside its transactions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from echostore.kernel.errors import Corrupt
from echostore.kernel.feed import Block, ChainStep, ForkProof, Head
from echostore.kernel.ids import LINK_PREFIX_BYTES, FeedKey, Link, PartyKey
from echostore.store.sqlite import Database, Row
from echostore.wire.links import Verify, block_link, head_signed, payload_hash

EVIDENCE_BYTES_MAX = 256 * 1024 * 1024
"""Payloads kept of other branches per feed. Generous, because honest peers may depend on them (two clones of one device
can write for weeks before they meet); bounded, because a writer who forks on purpose would be filling our disk."""

TABLES = (
    """CREATE TABLE fork_blocks (
        no INTEGER PRIMARY KEY, feed_no INTEGER NOT NULL, seq INTEGER NOT NULL, link BLOB NOT NULL,
        previous BLOB NOT NULL, payload BLOB NOT NULL, UNIQUE (feed_no, seq, link))""",
    """CREATE TABLE fork_heads (
        feed_no INTEGER NOT NULL, length INTEGER NOT NULL, link BLOB NOT NULL, signature BLOB NOT NULL,
        PRIMARY KEY (feed_no, length, link)) WITHOUT ROWID""",
)


@dataclass(frozen=True, slots=True)
class Branch:
    """One path from where it leaves the held branch, at `start_seq`, to its tip. Paths may share their first blocks.

    Branches are numbered by arrival: a branch that grows keeps its place in the list, a new one comes last.
    """

    start_seq: int
    links: Sequence[Link]
    blocks: Sequence[Block]
    """Read and checked one by one when asked for; `links` costs nothing."""


class _BranchBlocks(Sequence[Block]):
    """The blocks of a branch: links in memory, payloads read and checked when asked for."""

    def __init__(
        self, evidence: "ForkEvidence", feed_no: int, feed: FeedKey, start_seq: int, links: list[Link]
    ) -> None:
        self._evidence, self._feed_no, self._feed = evidence, feed_no, feed
        self._start_seq, self._links = start_seq, links

    def __len__(self) -> int:
        return len(self._links)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self[offset] for offset in range(*index.indices(len(self)))]
        seq = self._start_seq + range(len(self._links))[index]
        block = self._evidence.block(self._feed_no, self._feed, seq, self._links[index])
        if block is None:
            raise Corrupt(f"Block {seq} of another branch of feed {self._feed.hex()} is missing.")
        return block


class ForkEvidence:
    """The fork tables of one party's feeds.db."""

    __slots__ = ("_branches", "_bytes", "_db")

    def __init__(self, db: Database) -> None:
        self._db = db
        self._bytes: dict[int, int] = {}
        self._branches: dict[int, list[Branch]] = {}

    def forget_memory(self) -> None:
        """After a transaction that failed: what is true then is on disk alone."""
        self._bytes.clear()
        self._branches.clear()

    def forked_feeds(self) -> list[int]:
        return [row[0] for row in self._db.rows("SELECT DISTINCT feed_no FROM fork_blocks ORDER BY feed_no")]

    def first_seq(self, feed_no: int) -> int | None:
        """The earliest seq at which a kept branch leaves the held one."""
        row = self._db.row("SELECT min(seq) FROM fork_blocks WHERE feed_no = ?", (feed_no,))
        return None if row is None or row[0] is None else int(row[0])

    def size(self, feed_no: int) -> int:
        """Bytes of payloads kept of other branches of this feed; 0 means that it never forked here."""
        if feed_no not in self._bytes:
            row = self._db.row("SELECT sum(length(payload)), count(*) FROM fork_blocks WHERE feed_no = ?", (feed_no,))
            # Empty payloads count as a byte, so that 0 keeps its meaning.
            self._bytes[feed_no] = (row[0] or 0) + row[1] if row else 0
        return self._bytes[feed_no]

    def links_at(self, feed_no: int, seq: int) -> list[Link]:
        """The links that kept branches have at `seq`: what a range of another branch may follow."""
        return [
            Link(row[0])
            for row in self._db.rows(
                "SELECT link FROM fork_blocks WHERE feed_no = ? AND seq = ? ORDER BY link", (feed_no, seq)
            )
        ]

    def keep(
        self, feed_no: int, start_seq: int, previous: Link, payloads: Sequence[bytes], links: Sequence[Link], head: Head
    ) -> None:
        """Keep a verified range of another branch; blocks that are there already stay."""
        predecessors = [previous, *links[:-1]]
        self._db.insert(
            "INSERT OR IGNORE INTO fork_blocks (feed_no, seq, link, previous, payload) VALUES (?, ?, ?, ?, ?)",
            [
                (feed_no, start_seq + offset, link, predecessors[offset], payloads[offset])
                for offset, link in enumerate(links)
            ],
        )
        self._db.execute(
            "INSERT OR IGNORE INTO fork_heads (feed_no, length, link, signature) VALUES (?, ?, ?, ?)",
            (feed_no, head.length, head.link, head.signature),
        )
        self._forget(feed_no)

    def drop_held(self, feed_no: int, start_seq: int, links: Sequence[Link]) -> None:
        """A branch became the held one, after the held one was quarantined: no longer keep it as another."""
        places = [(feed_no, seq, link) for seq, link in enumerate(links, start_seq)]
        self._db.insert("DELETE FROM fork_blocks WHERE feed_no = ? AND seq = ? AND link = ?", places)
        self._db.insert("DELETE FROM fork_heads WHERE feed_no = ? AND length = ? + 1 AND link = ?", places)
        self._forget(feed_no)

    def block(self, feed_no: int, feed: FeedKey, seq: int, link_prefix: bytes) -> Block | None:
        """The block of another branch whose link starts so; checked against its link."""
        # A prefix as short as a dependency's is unique for all practical purposes; a longer one is compared whole.
        rows = self._db.rows(
            "SELECT link, previous, payload FROM fork_blocks WHERE feed_no = ? AND seq = ? AND substr(link, 1, ?) = ?",
            (feed_no, seq, len(link_prefix), link_prefix),
        )
        if len(link_prefix) < LINK_PREFIX_BYTES or len(rows) != 1:
            return None
        return _checked(feed, seq, rows[0])

    def branches(self, feed_no: int, feed: FeedKey) -> list[Branch]:
        """The kept branches of a feed, in the order in which they came."""
        if feed_no in self._branches and self._db.writable:
            return self._branches[feed_no]
        paths: list[tuple[int, list[Link]]] = []
        at: dict[Link, tuple[int, int]] = {}  # link -> (path, place in it) of the first path through that block
        rows = self._db.rows("SELECT seq, link, previous FROM fork_blocks WHERE feed_no = ? ORDER BY no", (feed_no,))
        for seq, link, previous in rows:
            if previous not in at:
                paths.append((seq, [link]))
                at[link] = len(paths) - 1, 0
                continue
            path, place = at[previous]
            start_seq, links = paths[path]
            if place + 1 == len(links):
                links.append(link)
                at[link] = path, place + 1
            else:
                paths.append((start_seq, [*links[: place + 1], link]))
                at[link] = len(paths) - 1, place + 1
        found = [Branch(start, links, _BranchBlocks(self, feed_no, feed, start, links)) for start, links in paths]
        self._branches[feed_no] = found
        return found

    def heads(self, feed_no: int) -> list[Head]:
        """The heads that cover kept branches."""
        rows = self._db.rows(
            "SELECT length, link, signature FROM fork_heads WHERE feed_no = ? ORDER BY length, link", (feed_no,)
        )
        return [Head(length, Link(link), signature) for length, link, signature in rows]

    def proof(
        self, party: PartyKey, feed: FeedKey, feed_no: int, link_before: Link, held: Sequence[bytes], held_head: Head
    ) -> ForkProof:
        """The proof of the earliest fork. `held` are the payload hashes from there to `held_head` on the held branch."""
        seq = self.first_seq(feed_no)
        assert seq is not None, f"feed {feed.hex()} has no kept branch"
        for length, link, signature in self._db.rows(
            "SELECT length, link, signature FROM fork_heads WHERE feed_no = ? ORDER BY length, link", (feed_no,)
        ):
            steps = self._steps_down(feed_no, feed, seq, length, Link(link))
            if steps is not None:
                return ForkProof(
                    party=party,
                    feed=feed,
                    seq=seq,
                    link_before=link_before,
                    left=tuple(ChainStep(hashed) for hashed in held),
                    left_head=held_head,
                    right=steps,
                    right_head=Head(length, Link(link), signature),
                )
        raise Corrupt(f"Feed {feed.hex()} has a kept branch at block {seq} that no kept head covers.")

    def damage(
        self,
        party: PartyKey,
        feed: FeedKey,
        feed_no: int,
        held: int,
        held_link: Callable[[int], object],
        verify: Verify,
    ) -> tuple[int, str] | None:
        """Where the kept branches of a feed are damaged, if they are; `held_link` gives the links below `held`.

        Blocks prove themselves; that none is missing shows in that each has its predecessor, kept or held, that
        each tip has its head, and each head its block. A branch may stand above the held end: the blocks that it
        left may be in quarantine and come again.
        """
        for (problem,) in self._db.rows("PRAGMA integrity_check(fork_blocks)"):
            if problem != "ok":
                return 0, f"the kept branches: {problem}"
        heads: set[tuple[int, bytes]] = set()
        for length, link, signature in self._db.rows(
            "SELECT length, link, signature FROM fork_heads WHERE feed_no = ?", (feed_no,)
        ):
            if length < 1 or not (isinstance(link, bytes) and isinstance(signature, bytes)):
                return 0, "a head of another branch is not a head"
            if not head_signed(party, feed, Head(length, Link(link), signature), verify):
                return length - 1, "a head of another branch is not signed by the feed's key"
            heads.add((length - 1, link))
        kept: set[tuple[int, bytes]] = set()
        before: set[tuple[int, bytes]] = set()
        for no, seq in self._db.rows("SELECT no, seq FROM fork_blocks WHERE feed_no = ? ORDER BY seq", (feed_no,)):
            row = self._db.row("SELECT link, previous, payload FROM fork_blocks WHERE no = ?", (no,))
            if row is None or not _intact(feed, seq, row):
                return seq, "a block of another branch does not match its link"
            kept.add((seq, row[0]))
            before.add((seq - 1, row[1]))
        for seq, link in sorted(before - kept):
            if seq < held and held_link(seq) != link:
                return seq, "a block of another branch is missing"
        for seq, _ in sorted((kept - before) - heads):
            return seq, "a head of another branch is missing"
        for seq, _ in sorted(heads - kept):
            return seq, "a head of another branch has no block"
        return None

    def _forget(self, feed_no: int) -> None:
        self._bytes.pop(feed_no, None)
        self._branches.pop(feed_no, None)

    def _steps_down(
        self, feed_no: int, feed: FeedKey, seq: int, length: int, link: Link
    ) -> tuple[ChainStep, ...] | None:
        """The steps from `seq` up to the head at `length`, or None when that head's branch began later than `seq`."""
        steps: list[ChainStep] = []
        for at in range(length - 1, seq - 1, -1):
            row = self._db.row(
                "SELECT link, previous, payload FROM fork_blocks WHERE feed_no = ? AND seq = ? AND link = ?",
                (feed_no, at, link),
            )
            if row is None:
                return None
            _checked(feed, at, row)
            steps.append(ChainStep(payload_hash(row[2])))
            link = Link(row[1])
        return tuple(reversed(steps))


def _checked(feed: FeedKey, seq: int, row: Row) -> Block:
    if not _intact(feed, seq, row):
        raise Corrupt(f"Block {seq} of another branch of feed {feed.hex()} does not match its link.")
    return Block(seq, row[2], Link(row[0]))


def _intact(feed: FeedKey, seq: int, row: Row) -> bool:
    """Whether (link, previous, payload) agree. A flipped bit can also turn bytes into a number or seq negative."""
    link, previous, payload = row
    if seq < 0 or not (isinstance(previous, bytes) and isinstance(payload, bytes)):
        return False
    return bool(block_link(feed, seq, Link(previous), payload_hash(payload)) == link)
