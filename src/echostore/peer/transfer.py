"""A party as one file (CAR v1): its feeds with their signatures, and a snapshot. Anyone can check all of it.

    roots    Manifest, state root
    blocks   the snapshot's blobs, chunks of feed blocks that end at signed heads, the two roots

A peer that deleted its history writes what it has: the epoch that the party stands on and what came after (`archived_start`).

Importing trusts nothing: every blob is checked against its CID, every chunk against its feed's links and signature,
and in the end the state that the feeds give must have the CID that the file claims.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt, EchoError, Refused, StorageFailed, UsageError
from echostore.kernel.feed import Head
from echostore.kernel.ids import KEY_BYTES, Cid, FeedKey, Link, PartyKey
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.peer.archived_start import Start, Starting
from echostore.peer.party import Party
from echostore.store.durable_file import file_error, open_private
from echostore.store.feed_store import FeedStore, Ingested
from echostore.store.meta_store import KnownParty, PartyState
from echostore.wire.base_epoch import snapshot_blobs
from echostore.wire.car import read_car, write_car
from echostore.wire.cids import PROTOBUF, RAW, cid_from_text, cid_of, cid_text
from echostore.wire.generated import archive_pb2 as pb
from echostore.wire.signing import verify

if TYPE_CHECKING:
    from echostore.peer.peer import Peer

FORMAT_VERSION, TRUNCATED_VERSION = 1, 2
"""Of files with the whole history, and of those that begin at an epoch: who knows only the first refuses these."""
CHUNK_BYTES = BLOB_BYTES_MAX // 2
"""Blocks of one chunk, unless a single append is larger."""

Progress = Callable[[int, int], None]
"""(done, total) blocks."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What went into a file."""

    path: Path
    bytes: int
    feeds: int
    blocks: int
    blobs: int
    cid: str
    epoch: int | None = None
    """The epoch that the file begins at; None where it has the whole history."""


def export_party(party: Party, path: Path, progress: Progress | None = None) -> Exported:
    """Write a party to a file that its owner alone may read. The file appears whole or not at all."""
    target = Path(path)
    if target.exists():
        raise Refused(f"{target} exists already", next_step="Choose another name or remove it.")
    partial = target.with_name(target.name + ".partial")
    with party.lock:
        truncated = any(held.base for held in party.runtime.feeds.feeds())
        start = Start(party) if truncated else None
        snapshot = party.snapshot()
        manifest, total = _manifest(party, cid_from_text(snapshot.cid), start)
        manifest_bytes = manifest.SerializeToString(deterministic=True)
        roots = [cid_of(manifest_bytes, PROTOBUF), cid_from_text(snapshot.cid)]
        begins = () if start is None else start.blobs()
        reachable = [
            cid for cid in dict.fromkeys([*snapshot_blobs(snapshot.root, snapshot.blob), *begins]) if cid not in roots
        ]

        def blocks() -> Iterator[tuple[Cid, bytes]]:
            yield roots[0], manifest_bytes
            yield roots[1], snapshot.root_bytes
            for cid in reachable:
                yield cid, snapshot.blob(cid)
            done = 0
            for feed in manifest.feeds:
                for data, count in _chunks(party.runtime.feeds, FeedKey(feed.key), feed.start, feed.length):
                    yield from _pieces(data)
                    done += count
                    if progress:
                        progress(done, total)

        try:
            with open_private(partial) as file:
                written = write_car(file, roots, blocks())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except EchoError:
            raise
        except OSError as error:
            raise file_error(error, f"write {target}") from error
        finally:
            partial.unlink(missing_ok=True)
    return Exported(
        target, written, len(manifest.feeds), total, len(reachable) + 2, snapshot.cid, start.number if start else None
    )


def import_party(peer: "Peer", path: Path, progress: Progress | None = None) -> Party:
    """Take a party from a file: a new one, or what is missing of one that is here. Returns it open."""
    try:
        with Path(path).open("rb") as file:
            roots, blocks = read_car(file)
            return _import(peer, path, roots, blocks, progress)
    except EchoError:
        raise
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except OSError as error:
        raise StorageFailed(f"{path} can't be read: {error.strerror}") from error


def _import(
    peer: "Peer",
    path: Path,
    roots: Sequence[Cid],
    blocks: Iterator[tuple[Cid, bytes]],
    progress: Progress | None,
) -> Party:
    manifest = _read_manifest(roots, next(blocks, None))
    key = PartyKey(manifest.party)
    known = {party.key: party for party in peer.meta.parties()}
    fresh = key not in known or known[key].state is PartyState.FORGOTTEN
    if fresh:
        _make(peer, manifest, key)
    try:
        party = peer.party(key)
        _Intake(party, manifest, progress).take(blocks)
        claimed = cid_text(Cid(manifest.state_root))
        found = _own_state(party, claimed) if fresh else claimed
        if found != claimed:
            raise Corrupt(
                f"the feeds in {path} give the state {found}, the file claims {claimed}",
                unchanged="The party was not imported.",
                next_step="Export it again on a peer that verifies its feeds.",
            )
    except BaseException:
        if fresh:
            peer.take_back_party(key)
        raise
    return party


def _own_state(party: Party, claimed: str) -> str:
    """The CID of the party's state; in the encoding of earlier programs where that is what a file claims."""
    snapshot = party.snapshot()
    unplaced = cid_text(snapshot.unplaced()[0])
    return unplaced if claimed == unplaced else snapshot.cid


def _manifest(party: Party, state_root: Cid, begins: Start | None) -> tuple[pb.Manifest, int]:
    feeds = party.runtime.feeds
    manifest = pb.Manifest(
        format_version=FORMAT_VERSION if begins is None else TRUNCATED_VERSION,
        start=None if begins is None else begins.record,
        party=party.key,
        title=party.title,
        genesis_feed=feeds.about("genesis_feed") or b"",
        state_root=state_root,
        child_of=feeds.about("child_of") or b"",
    )
    total = 0
    for held in sorted(feeds.feeds(), key=lambda held: (held.kind, held.key)):
        if held.length:
            start = 0 if begins is None else begins.of(held)
            chunks = [
                pb.ChunkPieces(cids=[cid for cid, _ in _pieces(data)])
                for data, _ in _chunks(feeds, held.key, start, held.length)
            ]
            control = held.kind == "control"
            manifest.feeds.add(key=held.key, control=control, length=held.length, chunks=chunks, start=start)
            total += max(0, held.length - start)
    return manifest, total


def _chunks(feeds: FeedStore, key: FeedKey, start: int, length: int) -> Iterator[tuple[bytes, int]]:
    """Chunks of a feed as bytes, each with its number of blocks."""
    while start < length:
        found = feeds.range_ending_at_head(key, start, max_bytes=CHUNK_BYTES)
        assert found is not None, (key.hex(), start)
        payloads, head = found
        chunk = pb.Chunk(start_seq=start, payloads=payloads, link=head.link, signature=head.signature)
        yield chunk.SerializeToString(deterministic=True), len(payloads)
        start += len(payloads)


def _pieces(chunk: bytes) -> list[tuple[Cid, bytes]]:
    """A chunk as blobs: one, unless a single append is larger than a blob."""
    cut = [chunk[start : start + BLOB_BYTES_MAX] for start in range(0, len(chunk), BLOB_BYTES_MAX)]
    return [(cid_of(piece, RAW), piece) for piece in cut]


def _read_manifest(roots: Sequence[Cid], first: tuple[Cid, bytes] | None) -> pb.Manifest:
    """The manifest, which is the first block: what follows is taken in as it comes, never held as a whole."""
    if first is None or not roots or first[0] != roots[0]:
        raise Corrupt("the file is not an exported party")
    try:
        manifest = pb.Manifest.FromString(first[1])
    except DecodeError as error:
        raise Corrupt("the file is not an exported party") from error
    if manifest.format_version not in (FORMAT_VERSION, TRUNCATED_VERSION):
        raise Refused(
            f"the file has format {manifest.format_version}, this echostore reads up to {TRUNCATED_VERSION}",
            next_step="Update echostore.",
        )
    if manifest.HasField("start") != (manifest.format_version == TRUNCATED_VERSION):
        raise Corrupt("the file is not an exported party: where it begins is not said")
    if len(manifest.party) != KEY_BYTES or any(len(feed.key) != KEY_BYTES for feed in manifest.feeds):
        raise Corrupt("the file is not an exported party: a key of wrong length")
    return manifest


def _make(peer: "Peer", manifest: pb.Manifest, key: PartyKey) -> None:
    """A party of which this peer holds the history without being a member of it."""
    if manifest.child_of:
        peer.party(PartyKey(manifest.child_of))  # NotFound when its parent is not here
    known = KnownParty(
        key,
        manifest.title,
        FeedKey(manifest.genesis_feed) if manifest.genesis_feed else None,
        peer.now_ms(),
        child_of=PartyKey(manifest.child_of) if manifest.child_of else None,
    )
    folder = peer.home.make_party(key)
    with FeedStore(folder.feeds, key) as feeds:
        feeds.set_about(known.about())
    peer.meta.put_party(known)


class _Intake:
    """Takes chunks in the order of the manifest; pieces that come early wait, which in our own files none does."""

    def __init__(self, party: Party, manifest: pb.Manifest, progress: Progress | None) -> None:
        self._runtime = party.runtime
        self._progress = progress
        self._starting = Starting(party, manifest.start) if manifest.HasField("start") else None
        self._control_taken = self._epoch_taken = self._starting is None
        self._total = sum(max(0, feed.length - feed.start) for feed in manifest.feeds)
        self._done = 0
        self._expected = [
            (FeedKey(feed.key), feed.control, [Cid(cid) for cid in chunk.cids])
            for feed in sorted(manifest.feeds, key=lambda feed: not feed.control)
            for chunk in feed.chunks
        ]
        self._wanted = {cid for _, _, cids in self._expected for cid in cids}
        self._waiting: dict[Cid, bytes] = {}

    def take(self, blocks: Iterator[tuple[Cid, bytes]]) -> None:
        at = 0
        for cid, data in blocks:
            if cid in self._wanted:
                self._waiting[cid] = data
            elif self._starting is not None:
                self._starting.keep(cid, data)
            while at < len(self._expected) and all(piece in self._waiting for piece in self._expected[at][2]):
                self._begin(control=self._expected[at][1])
                self._ingest(*self._expected[at])
                at += 1
        if at < len(self._expected):
            raise Corrupt(f"a chunk of feed {self._expected[at][0].hex()[:8]} is missing from the file")
        self._begin(control=False)
        self._runtime.checkpoint()

    def _begin(self, *, control: bool) -> None:
        """Before the first block of control, and before the first of data, where the file begins at an epoch."""
        if self._starting is None:
            return
        if not self._control_taken:
            self._control_taken = True
            self._starting.control()
        if not control and not self._epoch_taken:
            self._epoch_taken = True
            self._starting.epoch()

    def _ingest(self, key: FeedKey, control: bool, cids: list[Cid]) -> None:
        runtime = self._runtime
        try:
            chunk = pb.Chunk.FromString(b"".join(self._waiting.pop(cid) for cid in cids))
        except (KeyError, DecodeError) as error:
            raise Corrupt(f"a chunk of feed {key.hex()[:8]} is damaged") from error
        payloads = list(chunk.payloads)
        runtime.feeds.add_feed(key, "control" if control else "data", own=_is_own(runtime.feeds, key))
        head = Head(chunk.start_seq + len(payloads), Link(chunk.link), chunk.signature)
        result = runtime.feeds.ingest(key, chunk.start_seq, payloads, head, verify)
        if not isinstance(result, Ingested):
            raise Corrupt(f"feed {key.hex()[:8]} from block {chunk.start_seq}: {result.reason} {result.detail}")
        if result.links:
            runtime.processor.grown(key, result.start_seq, result.links, payloads[-len(result.links) :])
            runtime.checkpoint_if_due()
        self._done += len(payloads)
        if self._progress:
            self._progress(self._done, self._total)


def _is_own(feeds: FeedStore, key: FeedKey) -> bool:
    return feeds.has_feed(key) and feeds.feed(key).own
