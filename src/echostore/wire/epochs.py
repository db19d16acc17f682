"""Epoch records and cuts <-> their canonical bytes: the blobs that an epoch's genesis names beside its state root."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import FEED_ID_BYTES, LINK_PREFIX_BYTES, Cid, FeedId, FeedKey, Link, PartyKey
from echostore.kernel.timeframe import Dependency
from echostore.wire.cids import PROTOBUF, cid_of, is_cid
from echostore.wire.generated import epoch_pb2 as pb
from echostore.wire.snapshot import Put, canonical_message

CUT_ENTRIES_PER_PAGE: Final = 1024
"""Part of the format: with another number, equal cuts have other CIDs."""


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """An epoch beside its state: number, time, and the way back."""

    number: int
    party: PartyKey
    snapshot: Cid
    previous_record: Cid | None
    previous_snapshot: Cid | None
    created_ms: int
    discard_before_ms: int


@dataclass(frozen=True, slots=True)
class FeedCut:
    """Where an epoch ends in one feed. `asserted` is what its last message inside had processed, in full."""

    feed: FeedKey
    control: bool
    length: int
    link: Link
    depth: int
    asserted: tuple[Dependency, ...]


def encode_epoch_record(record: EpochRecord) -> bytes:
    return pb.EpochRecord(
        number=record.number,
        party=record.party,
        snapshot=record.snapshot,
        previous_record=record.previous_record or b"",
        previous_snapshot=record.previous_snapshot or b"",
        created_ms=record.created_ms,
        discard_before_ms=record.discard_before_ms,
    ).SerializeToString(deterministic=True)


def read_epoch_record(data: bytes) -> EpochRecord:
    """The record that these bytes are; Corrupt when `encode_epoch_record` would not have written them."""
    message = canonical_message(pb.EpochRecord, data, "an epoch record")
    for cid in (message.snapshot, message.previous_record or None, message.previous_snapshot or None):
        if cid is not None and not is_cid(cid):
            raise Corrupt("an epoch record with something that is no CID")
    return EpochRecord(
        number=message.number,
        party=PartyKey(message.party),
        snapshot=Cid(message.snapshot),
        previous_record=Cid(message.previous_record) if message.previous_record else None,
        previous_snapshot=Cid(message.previous_snapshot) if message.previous_snapshot else None,
        created_ms=message.created_ms,
        discard_before_ms=message.discard_before_ms,
    )


def encode_cut(cuts: Iterable[FeedCut], put: Put) -> Cid:
    """The CID of a cut, whose pages and root go to `put`."""
    ordered = sorted(cuts, key=lambda cut: cut.feed)
    pages = []
    for start in range(0, len(ordered), CUT_ENTRIES_PER_PAGE):
        entries = [cut_entry(cut) for cut in ordered[start : start + CUT_ENTRIES_PER_PAGE]]
        data = pb.EpochCutPage(entries=entries).SerializeToString(deterministic=True)
        cid = cid_of(data, PROTOBUF)
        put(cid, data)
        pages.append(cid)
    root = pb.EpochCut(pages=pages).SerializeToString(deterministic=True)
    cid = cid_of(root, PROTOBUF)
    put(cid, root)
    return cid


def read_cut(cid: Cid, get: Callable[[Cid], bytes]) -> Iterator[FeedCut]:
    """The entries of a cut, ascending by feed; Corrupt when they are not."""
    root = canonical_message(pb.EpochCut, get(cid), "an epoch's cut")
    before = b""
    for page in root.pages:
        if not is_cid(page):
            raise Corrupt("an epoch's cut with something that is no CID")
        for entry in canonical_message(pb.EpochCutPage, get(Cid(page)), "a page of an epoch's cut").entries:
            if entry.feed <= before:
                raise Corrupt("an epoch's cut whose feeds do not ascend")
            before = entry.feed
            yield read_cut_entry(entry)


def cut_pages(data: bytes) -> list[Cid]:
    """The blobs that the root of a cut names."""
    pages = canonical_message(pb.EpochCut, data, "an epoch's cut").pages
    if not all(map(is_cid, pages)):
        raise Corrupt("an epoch's cut with a page that has no CID")
    return [Cid(page) for page in pages]


def cut_entry(cut: FeedCut) -> pb.CutEntry:
    asserted = sorted(cut.asserted, key=lambda known: known.feed)
    return pb.CutEntry(
        feed=cut.feed,
        control=cut.control,
        length=cut.length,
        link=cut.link,
        depth=cut.depth,
        asserted_feeds=b"".join(known.feed for known in asserted),
        asserted_seqs=[known.seq for known in asserted],
        asserted_links=b"".join(known.link_prefix for known in asserted),
        asserted_depths=[known.depth for known in asserted],
    )


def read_cut_entry(entry: pb.CutEntry) -> FeedCut:
    count = len(entry.asserted_seqs)
    feeds, links = entry.asserted_feeds, entry.asserted_links
    columns = (len(feeds) == count * FEED_ID_BYTES, len(links) == count * LINK_PREFIX_BYTES)
    if not all(columns) or len(entry.asserted_depths) != count:
        raise Corrupt("an epoch's cut with unequal columns")
    asserted = tuple(
        Dependency(
            FeedId(feeds[at * FEED_ID_BYTES : (at + 1) * FEED_ID_BYTES]),
            entry.asserted_seqs[at],
            links[at * LINK_PREFIX_BYTES : (at + 1) * LINK_PREFIX_BYTES],
            entry.asserted_depths[at],
        )
        for at in range(count)
    )
    return FeedCut(FeedKey(entry.feed), entry.control, entry.length, Link(entry.link), entry.depth, asserted)
