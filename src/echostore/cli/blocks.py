"""Blocks as `feed tail` shows them: what is in each, whether it entered the state, and if not, why."""

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from echostore.cli.changes import operation_record
from echostore.cli.output import Column, size
from echostore.cli.values import iso_ms, one_line, short
from echostore.kernel.ids import FeedKey, feed_id

if TYPE_CHECKING:
    from echostore.kernel.feed import Block
    from echostore.kernel.order import Envelope
    from echostore.peer.party import Party
    from echostore.store.feed_store import HeldFeed

BLOCKS = (
    Column("time", "TIME"),
    Column("feed", "FEED", short, style="cyan"),
    Column("seq", "SEQ", right=True),
    Column("kind", "KIND"),
    Column("author", "AUTHOR"),
    Column("bytes", "SIZE", size, right=True),
    Column("state", "STATE"),
    Column("what", "WHAT", lambda what: one_line(what, 100)),
)


class Tail:
    """A reader of blocks across feeds, causes before effects. It remembers how far it came, not what it saw."""

    def __init__(self, only: FeedKey | None = None) -> None:
        self._only = only
        self._next: dict[FeedKey, int] = {}

    def last(self, party: "Party", count: int) -> list[dict[str, Any]]:
        """The last blocks, and put the reader behind them."""
        feeds = self._feeds(party)
        self._next = {feed.key: max(feed.base, feed.length - count) for feed in feeds}
        found = list(self._take(party, feeds))
        return found[-count:] if count else []

    def new(self, party: "Party") -> Iterator[dict[str, Any]]:
        """The blocks that came since."""
        return self._take(party, self._feeds(party))

    def _take(self, party: "Party", feeds: "list[HeldFeed]") -> Iterator[dict[str, Any]]:
        # Up to the lengths as they were at one look: what a writer adds meanwhile is left for the next.
        sources = [self._read(party, feed) for feed in feeds]
        for _, _, _, record in heapq.merge(*sources, key=lambda entry: entry[:3]):
            yield record
        self._next |= {feed.key: feed.length for feed in feeds}

    def _feeds(self, party: "Party") -> "list[HeldFeed]":
        return [feed for feed in party.runtime.feeds.feeds() if self._only in (None, feed.key)]

    def _read(self, party: "Party", feed: "HeldFeed") -> Iterator[tuple[int, bytes, int, dict[str, Any]]]:
        start = self._next.get(feed.key, feed.base)
        for block in party.runtime.feeds.read(feed.key, start, feed.length):
            depth, record = block_record(party, feed, block)
            yield depth, feed.key, block.seq, record


def block_record(party: "Party", feed: "HeldFeed", block: "Block") -> tuple[int, dict[str, Any]]:
    """A block's depth, and the block for programs."""
    from echostore.kernel.reasons import Reason
    from echostore.wire.messages import decode_envelope

    processor = party.runtime.processor
    envelope = decode_envelope(block.payload, feed.kind)
    admitted = processor.admission.by_id.get(feed_id(feed.key))
    names = {member.identity: member.name for member in processor.membership.machine.members}
    record: dict[str, Any] = {
        "feed": feed.key.hex(),
        "seq": block.seq,
        "kind": str(feed.kind),
        "author": names.get(admitted.identity, "") if admitted else "",
        "bytes": len(block.payload),
        "link": block.link.hex(),
    }
    if isinstance(envelope, Reason):
        return 0, {**record, "time": None, "depth": None, "state": f"invalid: {envelope}", "what": ""}
    cursor = processor.orderer.cursors.get(feed_id(feed.key))
    processed = cursor is not None and block.seq < cursor.length
    excluded = processor.admission.why_excluded(feed_id(feed.key), block.seq) if feed.kind == "data" else None
    done = _credentials(party, envelope) if feed.kind == "control" else _operations(party, feed, block, envelope)
    state = f"excluded: {excluded}" if excluded else "processed" if processed else "waiting"
    return envelope.depth, {
        **record,
        "time": iso_ms(envelope.body.time_ms),
        "depth": envelope.depth,
        "state": state,
        **done,
    }


def block_line(record: dict[str, Any]) -> str:
    place = f"{short(record['feed'])}:{record['seq']}"
    state = "" if record["state"] == "processed" else f" [{record['state']}]"
    author = one_line(record["author"]) or "?"
    return f"{record['time'] or '?'}  {place:<12} {record['kind']:<7}  {author}{state}  {one_line(record['what'])}"


def _operations(party: "Party", feed: "HeldFeed", block: "Block", envelope: "Envelope") -> dict[str, Any]:
    from echostore.kernel.models.base import OperationRefused
    from echostore.wire.messages import decode_operations

    try:
        operations = decode_operations(envelope.body, party=party.key, feed=feed_id(feed.key), seq=block.seq)
    except OperationRefused as refusal:
        return {"what": f"malformed: {refusal}", "operations": []}
    records = [operation_record(operation) for operation in operations]
    what = "; ".join(f"{short(record['item'])} {record['what']}" for record in records)
    return {"what": what, "operations": records}


def _credentials(party: "Party", envelope: "Envelope") -> dict[str, Any]:
    from echostore.wire.credentials import verify_credentials

    acts = [
        type(verified.claim.assertion).__name__ if verified.claim else "unreadable"
        for verified in verify_credentials(envelope.body.credentials, party.key)
    ]
    return {"what": ", ".join(acts), "credentials": acts}
