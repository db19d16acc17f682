"""FeedStore: the blocks and heads of every feed of one party, durable and checked.

Invariants, which the tests cite:
    F1  what `append` or `ingest` returned from survives any crash; what they did not is there whole or not at all. With
        `durable=False`, `ingest` is done once `sync` returned, or whatever is made durable later: commits keep their order
    F2  a held block lies under a head whose signature was checked (or made) before it was stored
    F3  held blocks of a feed are contiguous from its base; a range with a gap is refused
    F4  a held block never changes: another content at its place is kept as evidence of a fork, beside it
    F5  a block that leaves the store matches its link; damage is an error that names the feed and the seq

Called by the peer's writer (`append`), by replication (`ingest`, `range_ending_at_head`) and by processors (`read`).
It makes no links or signatures of its own, starts no threads and decides nothing about membership.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from echostore.kernel.errors import Corrupt, DamagedHere, NotFound, Refused, TooLarge
from echostore.kernel.feed import Block, ForkProof, Head
from echostore.kernel.ids import KEY_BYTES, NO_LINK, FeedKey, Link, PartyKey
from echostore.kernel.limits import APPEND_BLOCKS_MAX, APPEND_BYTES_MAX, SEQ_MAX
from echostore.kernel.reasons import Reason
from echostore.store import feed_truncation as truncation
from echostore.store.about_rows import AboutRows
from echostore.store.feed_audit import FeedVerdict, Progress, audit
from echostore.store.feed_ranges import Append, Beginnings, HeldFeed, Ingested, Range, Rejection, check_append
from echostore.store.feed_tables import FEED_NO_MAX, KINDS, SCHEMA, FeedKind, FeedRow, block_id, first_id
from echostore.store.feed_truncation import Garbage
from echostore.store.fork_evidence import EVIDENCE_BYTES_MAX, Branch, ForkEvidence
from echostore.store.sqlite import Connect, Database, connect_file
from echostore.wire import links as feed_links
from echostore.wire import signing
from echostore.wire.links import Verify

__all__ = ["Append", "FeedStore", "FeedVerdict", "HeldFeed", "Ingested", "Range", "Rejection"]

CHUNK_BLOCKS = 512
CHUNK_BYTES = 4 * 1024 * 1024
"""What a reader holds at a time. One block may be larger than this; then it is a chunk alone."""

_FEED_COUNT = "feed_count"
_SYNC_TURN = "sync_turn"
"""Changes whenever there is nothing else to write and the log has to be synced."""
_INSERT_BLOCK = "INSERT INTO blocks (id, link, payload) VALUES (?, ?, ?)"
_INSERT_HEAD = "INSERT INTO heads (feed_no, length, link, signature) VALUES (?, ?, ?, ?)"


@dataclass(slots=True)
class _Held:
    """What is in memory of a feed: its row and how far it reaches."""

    row: FeedRow
    length: int
    last_link: Link


class FeedStore:
    """All feeds of one party in one SQLite file."""

    def __init__(self, path: Path, party: PartyKey, *, writable: bool = True, connect: Connect = connect_file) -> None:
        self.party = party
        self._db = Database(path, SCHEMA, writable=writable, connect=connect)
        self._evidence = ForkEvidence(self._db)
        self._about = AboutRows(self._db)
        self._rows: dict[FeedKey, FeedRow] = {}
        self._held: dict[FeedKey, _Held] = {}
        self._sync_turn = 0
        try:
            self._load_rows()
            found = self.about("party")
            if found is None and writable and not self._rows:
                self.set_about({"party": party})
            elif found != party:
                raise Corrupt(f"{path} belongs to another party.", next_step="Put it back into that party's folder.")
        except BaseException:
            self._db.close()
            raise

    # -- feeds ---------------------------------------------------------------------------------------------------

    def add_feed(
        self, key: FeedKey, kind: FeedKind, *, own: bool = False, base: int = 0, base_link: Link = NO_LINK
    ) -> None:
        """Make room for a feed. Again with the same arguments is nothing; with others it is refused."""
        assert len(key) == KEY_BYTES, f"a feed key has {KEY_BYTES} bytes, got {len(key)}"
        assert kind in KINDS, f"a feed is control or data, not {kind!r}"
        with self._changing():
            known = self._rows.get(key)
            if known is not None:
                if (known.kind, known.own) != (kind, own):
                    raise Refused(f"Feed {key.hex()} is already here as another kind of feed.")
                return
            if len(self._rows) >= FEED_NO_MAX:
                raise TooLarge(f"A store holds at most {FEED_NO_MAX} feeds.")
            feed = FeedRow(len(self._rows) + 1, key, kind, own, base, base_link)
            self._db.execute("INSERT INTO feeds VALUES (?, ?, ?, ?, ?, ?, ?)", feed.sealed())
            self._rows[key] = feed
            self.set_about({_FEED_COUNT: len(self._rows).to_bytes(4, "big")})

    def feeds(self) -> list[HeldFeed]:
        """Every feed, in the order they were added."""
        if not self._rows or not self._db.writable:
            self._load_rows()
        return [self.feed(key) for key in self._rows]

    def feed(self, key: FeedKey) -> HeldFeed:
        held = self._need(key)
        row = held.row
        return HeldFeed(row.key, row.kind, row.own, row.base, held.length, held.last_link)

    def has_feed(self, key: FeedKey) -> bool:
        return self._find(key) is not None

    def length(self, feed_key: FeedKey) -> int:
        """One more than the last held seq."""
        return self._need(feed_key).length

    def last_link(self, feed_key: FeedKey) -> Link:
        return self._need(feed_key).last_link

    # -- writing -------------------------------------------------------------------------------------------------

    def append(
        self, feed_key: FeedKey, start_seq: int, payloads: Sequence[bytes], links: Sequence[Link], head: Head
    ) -> None:
        """Store own blocks; durable on return."""
        self.append_many([Append(feed_key, start_seq, payloads, links, head)])

    def append_many(self, appends: Sequence[Append], about: Mapping[str, bytes] | None = None) -> None:
        """Store own blocks of several feeds, and entries of `about`, in one durable commit, all or none."""
        with self._changing():
            for append in appends:
                held = self._need(append.feed)
                check_append(append, held.length)
                self._extend(held, append.payloads, append.links, append.head)
            self.set_about(about or {})

    def ingest(
        self,
        feed_key: FeedKey,
        start_seq: int,
        payloads: Sequence[bytes],
        head: Head,
        verify: Verify,
        *,
        durable: bool = True,
    ) -> Ingested | Rejection:
        """Check a received range and hold what is new of it; durable on return, or after `sync`."""
        with self._changing(durable=durable):
            return self._ingest(Range(feed_key, start_seq, payloads, head), verify)

    def ingest_many(self, ranges: Sequence[Range], verify: Verify) -> list[Ingested | Rejection]:
        """Several ranges in one commit. Each is judged by itself; one that is rejected stops no other."""
        with self._changing():
            return [self._ingest(received, verify) for received in ranges]

    def sync(self) -> None:
        """Make durable what `ingest` has left in the log; nothing when something later was made durable since."""
        if self._db.unsynced:
            self.prove_space()

    def prove_space(self) -> None:
        """A durable commit of one row: SQLite writes and syncs the log at a change only. DiskFull without space for it."""
        self._sync_turn ^= 1
        self.set_about({_SYNC_TURN: bytes([self._sync_turn])})

    def quarantine_from(self, feed_key: FeedKey, seq: int) -> int:
        """Drop the damaged end of a feed, from the last head at or below `seq` on (F2); returns the new length."""
        with self._changing():
            # The entry alone is read: the rest may be what is damaged.
            row = self._row(feed_key)
            if row is None:
                raise NotFound(f"Feed {feed_key.hex()} is not in this store.")
            length = truncation.drop_end(self._db, row, seq)
            self._held.pop(feed_key, None)
        return length

    def begin_at(
        self, cuts: Beginnings, about: Mapping[str, bytes] | None = None, kind: FeedKind = "data", *, back: bool = False
    ) -> None:
        """Let feeds begin at a length, after the block with a link; durable on return, with entries of `about`.

        Blocks beyond it stay, if they follow that link; all others are as good as gone (`drop_garbage` deletes them).
        A feed that begins later already is left alone; with `back` one of another device goes back there, and has no
        blocks. One that is not here yet is added as `kind`.
        """
        with self._changing():
            for key, (base, base_link) in cuts.items():
                if not self.has_feed(key):
                    self.add_feed(key, kind)
                held = self._need(key)
                earlier = back and base < held.row.base and not held.row.own
                if base <= held.row.base and not earlier:
                    continue
                follows = not earlier and base <= held.length and self._link_before(held, base) == base_link
                row = replace(held.row, base=base, base_link=base_link)
                self._rows[key] = truncation.begin(self._db, row, empty=not follows)
                self._held.pop(key, None)
            self.set_about(about or {})

    def garbage(self, cuts: Mapping[FeedKey, int] | None = None) -> Garbage:
        """What lies below the feeds' beginnings, or would with later ones."""
        return truncation.garbage(self._db, self._rows.values(), cuts or {})

    def drop_garbage(self, step: Callable[[], None] = lambda: None) -> None:
        """Delete what lies below the feeds' beginnings, in small transactions; then give the space back."""
        truncation.drop_garbage(self._db, list(self._rows.values()), step)

    def verify(
        self, feed_key: FeedKey, progress: Progress | None = None, *, verify: Verify = signing.verify
    ) -> FeedVerdict:
        """Hash every held block again and check every head; says where the first damage is."""
        row = self._row(feed_key)
        if row is None:
            raise NotFound(f"Feed {feed_key.hex()} is not in this store.")
        return audit(self._db, self.party, row, verify, progress)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(
        self, feed_key: FeedKey, start: int = 0, end: int | None = None, limit_bytes: int | None = None
    ) -> Iterator[Block]:
        """The blocks `start` to `end - 1`, checked against their links (F5), in chunks of bounded memory.

        Stops once `limit_bytes` of payloads were given, with at least one block. Blocks that arrive meanwhile are not
        included. No transaction stays open between chunks, so a slow reader holds nobody up.
        """
        held = self._need(feed_key)
        end = held.length if end is None else min(end, held.length)
        left = limit_bytes
        at = max(start, held.row.base)
        previous = self._link_before(held, at) if at < end else NO_LINK
        while at < end and (left is None or left > 0):
            for block in self._chunk(held, at, end, previous, CHUNK_BYTES if left is None else min(left, CHUNK_BYTES)):
                yield block
                at, previous = block.seq + 1, block.link
                if left is not None:
                    left -= len(block.payload)

    def block(self, feed_key: FeedKey, seq: int) -> Block:
        """One held block, checked against its link."""
        held = self._need(feed_key)
        if not held.row.base <= seq < held.length:
            raise NotFound(
                f"Block {seq} of feed {feed_key.hex()} is not held; {held.row.base} to {held.length - 1} are."
            )
        return self._chunk(held, seq, seq + 1, self._link_before(held, seq), 1)[0]

    def link_at(self, feed_key: FeedKey, seq: int) -> Link | None:
        """The link of a held block, or of the one just below the base; None when it is not held."""
        held = self._need(feed_key)
        if not held.row.base - 1 <= seq < held.length or seq < 0:
            return None
        return self._link_before(held, seq + 1)

    def heads(self, feed_key: FeedKey, start: int = 0, end: int = SEQ_MAX) -> list[Head]:
        """The heads that end in the blocks from `start` to `end - 1`, in order."""
        rows = self._db.rows(
            "SELECT length, link, signature FROM heads WHERE feed_no = ? AND length > ? AND length <= ? ORDER BY length",
            (self._need(feed_key).row.no, start, end),
        )
        return [Head(length, Link(link), signature) for length, link, signature in rows]

    def head_covering(self, feed_key: FeedKey, seq: int) -> Head | None:
        """The first head whose signature covers the block `seq`."""
        row = self._db.row(
            "SELECT length, link, signature FROM heads WHERE feed_no = ? AND length > ? ORDER BY length LIMIT 1",
            (self._need(feed_key).row.no, seq),
        )
        return None if row is None else Head(row[0], Link(row[1]), row[2])

    def range_ending_at_head(
        self,
        feed_key: FeedKey,
        start: int,
        max_blocks: int = APPEND_BLOCKS_MAX,
        max_bytes: int = APPEND_BYTES_MAX,
    ) -> tuple[list[bytes], Head] | None:
        """What to send to a peer that holds `start` blocks: payloads up to the farthest head within the limits.

        At least up to the next head, even when that is more than asked for: a receiver can't check less. Heads are
        never farther apart than one append may be, because every range that came in was bounded the same way. None
        when nothing from `start` on is held.
        """
        held = self._need(feed_key)
        if not held.row.base <= start < held.length:
            return None
        first = self.head_covering(feed_key, start)
        if first is None:
            raise self._corrupt(feed_key, start, "no head covers it")
        end = min(held.length, start + max(1, min(max_blocks, APPEND_BLOCKS_MAX)))
        blocks: list[Block] = []
        size, limit, end = 0, min(max_bytes, APPEND_BYTES_MAX), max(end, first.length)
        for block in self.read(feed_key, start, end):
            if block.seq >= first.length and size + len(block.payload) > limit:
                break
            size += len(block.payload)
            blocks.append(block)
        row = self._db.row(
            "SELECT length, link, signature FROM heads WHERE feed_no = ? AND length <= ? ORDER BY length DESC LIMIT 1",
            (held.row.no, blocks[-1].seq + 1),
        )
        assert row is not None, "the first head is within reach"
        head = Head(row[0], Link(row[1]), row[2])
        if blocks[head.length - start - 1].link != head.link:
            raise self._corrupt(feed_key, head.length - 1, "it does not match the head that covers it")
        return [block.payload for block in blocks[: head.length - start]], head

    # -- forks ---------------------------------------------------------------------------------------------------

    def forks(self) -> list[ForkProof]:
        """One proof for each feed of which another branch is kept, at its earliest fork."""
        forked = set(self._evidence.forked_feeds())
        proofs = [self.fork_of(feed.key) for feed in self._rows.values() if feed.no in forked]
        return [proof for proof in proofs if proof is not None]

    def fork_of(self, feed_key: FeedKey) -> ForkProof | None:
        """The proof of the earliest fork; None without one, while a quarantined feed does not reach up to it, or where the
        feed begins later: an epoch has chosen a branch there."""
        held = self._need(feed_key)
        seq = self._evidence.first_seq(held.row.no)
        return None if seq is None or not held.row.base <= seq < held.length else self._proof(held)

    def branches(self, feed_key: FeedKey) -> list[Branch]:
        """The branches kept beside the held one, in the order in which they came; payloads are read when asked for."""
        held = self._need(feed_key)
        return self._evidence.branches(held.row.no, feed_key) if self._evidence.size(held.row.no) else []

    def branch_range(self, feed_key: FeedKey, start: int, toward: Link) -> tuple[list[bytes], Head] | None:
        """What to send of the kept branch that leads to the link `toward`: from `start` to the farthest head in bounds."""
        heads = {head.link: head for head in self._evidence.heads(self._need(feed_key).row.no)}
        for branch in self.branches(feed_key):
            offset = start - branch.start_seq
            if offset < 0 or toward not in branch.links[offset:]:
                continue
            payloads: list[bytes] = []
            size, found = 0, None
            for link, block in zip(
                branch.links[offset:], branch.blocks[offset : offset + APPEND_BLOCKS_MAX], strict=False
            ):
                size += len(block.payload)
                if size > APPEND_BYTES_MAX:
                    break
                payloads.append(block.payload)
                if link in heads:
                    found = payloads[:], heads[link]
            if found is not None:
                return found
        return None

    def branch_heads(self, feed_key: FeedKey) -> list[Head]:
        """The last head of each kept branch."""
        held = self._need(feed_key)
        tips = {branch.links[-1] for branch in self.branches(feed_key)}
        return [head for head in self._evidence.heads(held.row.no) if head.link in tips]

    def fork_block(self, feed_key: FeedKey, seq: int, link_prefix: bytes) -> Block | None:
        """The block at `seq` whose link starts so, of whichever branch: a dependency names one like that."""
        held = self._need(feed_key)
        link = self.link_at(feed_key, seq) if seq >= held.row.base else None
        if link is not None and link.startswith(link_prefix):
            return self.block(feed_key, seq)
        return self._evidence.block(held.row.no, feed_key, seq, link_prefix)

    # -- the file ------------------------------------------------------------------------------------------------

    def about(self, name: str) -> bytes | None:
        """What the file says of its party; see MetaStore.rebuild for the names in use."""
        return self._about.get(name)

    def about_under(self, prefix: str) -> dict[str, bytes]:
        """All entries whose names begin so."""
        return self._about.under(prefix)

    def about_names(self, prefix: str) -> list[str]:
        """The names of those, which may have long values."""
        return self._about.names(prefix)

    def set_about(self, entries: Mapping[str, bytes | None]) -> None:
        """Write entries in one durable commit; one without a value is removed."""
        with self._changing():
            self._about.put(entries)

    @property
    def failure(self) -> str | None:
        """Why the store takes no more writes, once that is so."""
        return self._db.failure

    def disk_bytes(self) -> int:
        return self._db.disk_bytes()

    def checkpoint(self) -> None:
        self._db.checkpoint()

    def close(self) -> None:
        self._rows, self._held = {}, {}
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self, *, durable: bool = True) -> Iterator[None]:
        """A transaction after whose failure memory is forgotten: what is true then is on disk alone."""
        try:
            with self._db.transaction(durable=durable):
                yield
        except BaseException:
            self._held.clear()
            self._evidence.forget_memory()
            self._rows.clear()
            raise

    def _ingest(self, received: Range, verify: Verify) -> Ingested | Rejection:
        held, payloads, start = self._need(received.feed), received.payloads, received.start_seq
        too_large = feed_links.within_bounds(start, payloads)
        if too_large is not None:
            return Rejection(Reason.OVERSIZE, too_large)
        if start > held.length:
            # Beyond the held branch, and perhaps next on a longer one that is kept as evidence.
            return self._other_branch(held, received, verify) or Rejection(
                Reason.GAP, f"blocks from {start} on, while {held.length} are held"
            )
        if start < held.row.base:
            return Rejection(Reason.GAP, f"blocks from {start} on, while nothing below {held.row.base} is kept")
        previous = self._link_before(held, start)
        links = feed_links.check_range(self.party, received.feed, start, previous, payloads, received.head, verify)
        if links is Reason.BAD_LINK:
            return self._unlinked(held, received, verify)
        if isinstance(links, Reason):
            return Rejection(
                links, f"the head at {received.head.length} is not signed by the feed's key for this party"
            )
        fork = self._first_difference(held, start, links)
        if fork is not None:
            skip = fork - start
            before = links[skip - 1] if skip else previous
            return self._keep_branch(held, fork, before, payloads[skip:], links[skip:], received.head)
        new = max(0, held.length - start)
        if new >= len(links):
            return Ingested(held.length, [])
        first_new = start + new
        self._extend(held, payloads[new:], links[new:], received.head)
        return Ingested(first_new, links[new:])

    def _unlinked(self, held: _Held, received: Range, verify: Verify) -> Rejection:
        """What to say of a range that does not follow the held branch: it may follow a kept one, or none."""
        kept = self._other_branch(held, received, verify)
        if kept is not None:
            return kept
        head = received.head
        genuine = 0 <= head.length < 1 << 64 and feed_links.head_signed(self.party, received.feed, head, verify)
        detail = f"blocks from {received.start_seq} on do not lead to the head at {head.length}"
        return Rejection(Reason.BAD_LINK, detail, head_signed=genuine)

    def _other_branch(self, held: _Held, received: Range, verify: Verify) -> Rejection | None:
        """Keep a range that follows a branch which is kept as evidence; None when it follows none."""
        start, payloads, head = received.start_seq, received.payloads, received.head
        for previous in self._evidence.links_at(held.row.no, start - 1):
            links = feed_links.check_range(self.party, received.feed, start, previous, payloads, head, verify)
            if not isinstance(links, Reason) and links:
                return self._keep_branch(held, start, previous, payloads, links, head)
        return None

    def _keep_branch(
        self, held: _Held, seq: int, previous: Link, payloads: Sequence[bytes], links: Sequence[Link], head: Head
    ) -> Rejection:
        detail = f"another branch of the feed at block {seq}"
        if self._evidence.size(held.row.no) + sum(map(len, payloads)) > EVIDENCE_BYTES_MAX:
            return Rejection(Reason.FORK, f"{detail}; enough of it is kept already", self.fork_of(held.row.key))
        self._evidence.keep(held.row.no, seq, previous, payloads, links, head)
        return Rejection(Reason.FORK, detail, self.fork_of(held.row.key))

    def _first_difference(self, held: _Held, start: int, links: Sequence[Link]) -> int | None:
        """The first seq at which a range differs from what is held, where both reach."""
        end = min(start + len(links), held.length)
        # Links are chained, so equal last links mean equal ranges: the usual duplicate costs one row.
        if end <= start or self._link_before(held, end) == links[end - start - 1]:
            return None
        rows = self._db.rows(
            "SELECT link FROM blocks WHERE id >= ? AND id < ? ORDER BY id",
            (block_id(held.row.no, start), block_id(held.row.no, end)),
        )
        for seq, ((ours,), theirs) in enumerate(zip(rows, links, strict=False), start):
            if ours != theirs:
                return seq
        raise self._corrupt(held.row.key, end - 1, "its links are incomplete")

    def _extend(self, held: _Held, payloads: Sequence[bytes], links: Sequence[Link], head: Head) -> None:
        first = block_id(held.row.no, held.length)
        block_id(held.row.no, head.length)  # raises before anything is written when the numbers run out
        if self._evidence.size(held.row.no):
            self._evidence.drop_held(held.row.no, held.length, links)
        self._db.insert(_INSERT_BLOCK, list(zip(range(first, first + len(links)), links, payloads, strict=True)))
        self._db.execute(_INSERT_HEAD, (held.row.no, head.length, head.link, head.signature))
        held.length, held.last_link = head.length, head.link

    def _chunk(self, held: _Held, start: int, end: int, previous: Link, bytes_max: int) -> list[Block]:
        """At least one block from `start` on, each checked against its link."""
        first = block_id(held.row.no, start)
        rows = self._db.rows_until(
            "SELECT id, link, payload FROM blocks WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
            (first, block_id(held.row.no, end), CHUNK_BLOCKS),
            size_of=lambda row: len(row[2]) if isinstance(row[2], bytes) else 0,
            bytes_max=bytes_max,
        )
        if not rows:
            raise self._corrupt(held.row.key, start, "it is missing")
        for offset, (number, _, payload) in enumerate(rows):
            if number != first + offset or not isinstance(payload, bytes):
                raise self._corrupt(held.row.key, start + offset, "it is missing")
        links = feed_links.chain(held.row.key, start, previous, [row[2] for row in rows])
        for offset, row in enumerate(rows):
            if row[1] != links[offset]:
                raise self._corrupt(held.row.key, start + offset, "it does not match its link")
        return [Block(start + offset, row[2], links[offset]) for offset, row in enumerate(rows)]

    def _proof(self, held: _Held) -> ForkProof:
        seq = self._evidence.first_seq(held.row.no)
        assert seq is not None, f"feed {held.row.key.hex()} has no kept branch"
        head = self.head_covering(held.row.key, seq)
        if head is None:
            raise self._corrupt(held.row.key, seq, "no head covers it")
        hashes = [feed_links.payload_hash(block.payload) for block in self.read(held.row.key, seq, head.length)]
        return self._evidence.proof(self.party, held.row.key, held.row.no, self._link_before(held, seq), hashes, head)

    def _link_before(self, held: _Held, seq: int) -> Link:
        """The link that block `seq` follows."""
        if seq == held.row.base:
            return held.row.base_link
        if seq == held.length:
            return held.last_link
        row = self._db.row("SELECT link FROM blocks WHERE id = ?", (block_id(held.row.no, seq - 1),))
        if row is None or not isinstance(row[0], bytes) or len(row[0]) != len(NO_LINK):
            raise self._corrupt(held.row.key, seq - 1, "it is missing")
        return Link(row[0])

    def _need(self, key: FeedKey) -> _Held:
        held = self._find(key)
        if held is None:
            raise NotFound(f"Feed {key.hex()} is not in this store.")
        return held

    def _find(self, key: FeedKey) -> _Held | None:
        """The feed from memory, or from disk the first time; a reader beside a writer looks every time."""
        held = self._held.get(key)
        if held is not None and self._db.writable:
            return held
        row = self._row(key)
        if row is None:
            return None
        held = self._held[key] = self._load(row)
        return held

    def _row(self, key: FeedKey) -> FeedRow | None:
        if key not in self._rows and (not self._rows or not self._db.writable):
            self._load_rows()
        return self._rows.get(key)

    def _load_rows(self) -> None:
        """All entries at once: they are few, and the count finds one that got lost, which a look-up by key would not."""
        rows = [FeedRow.read(row) for row in self._db.rows("SELECT * FROM feeds ORDER BY no")]
        count = self.about(_FEED_COUNT) or b""
        if len(rows) != int.from_bytes(count, "big") or any(row.no != no for no, row in enumerate(rows, 1)):
            raise Corrupt(f"{self._db.path} has lost entries of feeds.", next_step="Fetch the party again from a peer.")
        self._rows = {row.key: row for row in rows}

    def _load(self, row: FeedRow) -> _Held:
        """How far a feed reaches: blocks and heads must agree, or rows were lost."""
        # One statement, so that a reader beside a writer sees both at one moment.
        found = self._db.row(
            """SELECT (SELECT max(id) FROM blocks WHERE id >= ? AND id < ?),
                      (SELECT max(length) FROM heads WHERE feed_no = ?)""",
            (first_id(row.no), first_id(row.no + 1), row.no),
        )
        assert found is not None, "a query without FROM has a row"
        last_id, length = found
        if (last_id is None or last_id < block_id(row.no, row.base)) and (length is None or 0 < length <= row.base):
            return _Held(row, row.base, row.base_link)  # nothing beyond the beginning; below it may be leftovers
        held_length = row.base if last_id is None else last_id - first_id(row.no) + 1
        if length != held_length:
            raise self._corrupt(row.key, held_length - 1, f"blocks end there, heads at {length!r}")
        last = self._db.row(
            """SELECT b.link, h.link FROM blocks b, heads h WHERE b.id = ? AND h.feed_no = ? AND h.length = ?""",
            (last_id, row.no, length),
        )
        if last is None or last[0] != last[1] or not isinstance(last[0], bytes) or len(last[0]) != len(NO_LINK):
            raise self._corrupt(row.key, length - 1, "it does not match the head that covers it")
        return _Held(row, length, Link(last[0]))

    def _corrupt(self, key: FeedKey, seq: int, what: str) -> Corrupt:
        return DamagedHere(
            f"Block {seq} of feed {key.hex()} in {self._db.path} is damaged: {what}.",
            next_step="Run `echostore feed verify`; a feed of someone else is fetched again.",
        )
