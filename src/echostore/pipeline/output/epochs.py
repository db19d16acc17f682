"""What a peer needs to declare an epoch that the pipeline computed: state root, blobs, and the timeframes.

ready = latest(out, party)                 # of the newest commit; None when it has no CID for the party
for cid, data in ready.blobs(): ...        # everything below the state root, each once; the root comes last
ready.claims(number, previous)             # the EpochGenesis, for a device of the party to sign

Blobs lie in packs: Parquet files with the columns `cid` and `data`. A pack is hashed before it is opened and every blob
is compared with its CID as it is read, so that nothing but the right bytes leaves here.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid, FeedKey, Link, PartyKey
from echostore.kernel.party import credentials as claims
from echostore.kernel.snapshot import StateRoot, TimeframeEntry
from echostore.pipeline.output import reading
from echostore.pipeline.output.files import checked_path
from echostore.pipeline.output.record import Commit, NamedFile
from echostore.pipeline.output.results import latest_result
from echostore.wire.cids import CID_BYTES, cid_from_text, matches
from echostore.wire.generated import credential_pb2 as credentials
from echostore.wire.items import move_chunks
from echostore.wire.membership import membership_names
from echostore.wire.placements import PlacementReader
from echostore.wire.snapshot import read_state_root
from echostore.wire.tree import TreeReader

BLOBS_KIND = "blobs"

GROUPS_KEPT = 8
"""Decoded row groups of packs that a reader keeps."""


@dataclass(frozen=True, slots=True)
class ReadyEpoch:
    """A snapshot of one party, whole, in an output."""

    party: PartyKey
    cid: Cid
    root_bytes: bytes
    root: StateRoot
    control_timeframe: tuple[TimeframeEntry, ...]
    """The control messages under which it was folded."""
    commit: int
    epoch: int
    packs: "Packs"

    def blob(self, cid: Cid) -> bytes:
        """One blob of the snapshot; Corrupt when no pack has it."""
        if cid == self.cid:
            return self.root_bytes
        found = self.packs.get(cid)
        if found is None:
            raise Corrupt(f"the output names the blob {cid.hex()} and has no pack with it")
        return found

    def reader(self) -> TreeReader:
        return TreeReader(self.root.index_root, self.blob)

    def blobs(self) -> Iterator[tuple[Cid, bytes]]:
        """Every blob below the state root, each once, and the root itself as the last one."""
        seen: set[Cid] = set()
        for cid in self._names():
            if cid not in seen:
                seen.add(cid)
                yield cid, self.blob(cid)
        yield self.cid, self.root_bytes

    def _names(self) -> Iterator[Cid]:
        yield from membership_names(self.root.membership_root, self.blob)
        yield from move_chunks(self.blob(self.root.tree))
        yield self.root.tree
        if self.root.placements is not None:
            yield from PlacementReader(self.root.placements, self.blob).reachable()
        yield from self.reader().reachable()

    def claims(
        self, number: int, previous: bytes, *, created_ms: int = 0, child: PartyKey | None = None
    ) -> claims.EpochGenesis:
        """The claim that declares this epoch. Number and previous genesis are the declarer's to say."""
        return claims.EpochGenesis(
            number=number,
            previous=previous,
            snapshot=self.cid,
            timeframe=_claimed(self.root.timeframe),
            control_timeframe=_claimed(self.control_timeframe),
            admission_digest=self.root.admission_digest,
            encoding_version=self.root.encoding_version,
            models=tuple((each.model, each.version) for each in self.root.models),
            created_ms=created_ms,
            child=child,
        )


def _claimed(entries: Iterable[TimeframeEntry]) -> tuple[claims.TimeframeEntry, ...]:
    return tuple(claims.TimeframeEntry(entry.feed_key, entry.seq, entry.link) for entry in entries)


def latest(out: str | Path, party: PartyKey) -> ReadyEpoch | None:
    """The newest snapshot of a party; None when it was never built, or no CID could be given."""
    folder = Path(out)
    commit, _ = reading.newest(folder)
    result = None if commit is None else latest_result(folder, commit, party)
    if commit is None or result is None or result.cid is None or result.root is None:
        return None
    cid = cid_from_text(result.cid)
    if not matches(cid, result.root):
        raise Corrupt(f"commit {commit.number} has a state root of party {party.hex()} that is not what its CID names")
    said = credentials.EpochGenesis.FromString(result.control or b"")
    control = tuple(TimeframeEntry(FeedKey(e.feed_key), e.seq, Link(e.link)) for e in said.control_timeframe)
    root = read_state_root(result.root)
    packs = Packs(folder, commit)
    return ReadyEpoch(party, cid, result.root, root, control, commit.number, result.epoch, packs)


class Packs:
    """The blobs of a commit, by CID. Opens packs as they are needed, newest first, and keeps 16 bytes for each blob."""

    def __init__(self, out: Path, commit: Commit) -> None:
        self._out = out
        self._waiting = list(_newest_first(commit.files.get(BLOBS_KIND, ())))
        self._open: list[_Pack] = []
        self._groups: dict[tuple[int, int], pa.ChunkedArray] = {}
        self._lock = threading.Lock()

    def get(self, cid: Cid) -> bytes | None:
        """The blob with this CID; None when no pack has one."""
        with self._lock:
            for number, pack in enumerate(self._all()):
                for group, row in pack.places(cid):
                    data: bytes = self._group(number, pack, group)[row].as_py()
                    if matches(cid, data):
                        return data
        return None

    def _all(self) -> Iterator["_Pack"]:
        yield from self._open
        while self._waiting:
            self._open.append(_Pack(self._out, self._waiting.pop(0)))
            yield self._open[-1]

    def _group(self, number: int, pack: "_Pack", group: int) -> pa.ChunkedArray:
        found = self._groups.pop((number, group), None)
        if found is None:
            found = pack.file.read_row_group(group, columns=["data"]).column("data")
            while len(self._groups) >= GROUPS_KEPT:
                self._groups.pop(next(iter(self._groups)))
        self._groups[number, group] = found
        return found


class _Pack:
    """One pack: where the blobs are whose digests begin with given 8 bytes."""

    def __init__(self, out: Path, named: NamedFile) -> None:
        path = checked_path(out, named)
        try:
            self.file: Any = pq.ParquetFile(path)
            column = self.file.read(columns=["cid"]).column("cid").combine_chunks()
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise Corrupt(f"{named.path} is no pack of blobs: {str(error)[:200]}") from error
        keys = _keys(column)
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        metadata = self.file.metadata
        sizes = [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]
        self._ends = np.cumsum(sizes)

    def places(self, cid: Cid) -> Iterator[tuple[int, int]]:
        """(row group, row in it) of blobs that may be the one."""
        key = np.uint64(int.from_bytes(cid[4:12], "big"))
        first, last = np.searchsorted(self._keys, key, "left"), np.searchsorted(self._keys, key, "right")
        for row in self._order[first:last].tolist():
            group = int(np.searchsorted(self._ends, row, "right"))
            yield group, row - (int(self._ends[group - 1]) if group else 0)


def _keys(column: Any) -> Any:
    """The first 8 bytes of the digests, as numbers."""
    array = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    if len(array) == 0 or not (np.diff(offsets) == CID_BYTES).all():
        raise ValueError("CIDs of another length")
    raw = np.frombuffer(array.buffers()[2], np.uint8)[offsets[0] : offsets[-1]].reshape(-1, CID_BYTES)
    return np.ascontiguousarray(raw[:, 4:12]).view(">u8").ravel().astype(np.uint64)


def _newest_first(files: Iterable[NamedFile]) -> list[NamedFile]:
    return sorted(files, key=lambda file: (-int(file.path.partition("/")[0].partition("=")[2]), file.path))
