"""Base epochs in a lake: the snapshots that parties stand on.

Peers fold from the snapshot of the newest final epoch, and blocks below it may be gone everywhere. So the snapshot is
published beside the blocks, as its blobs, once for each genesis:

    bases/<party>/<genesis>.parquet     blobs that no file of an earlier epoch has; `below` in its metadata names those

    publish    the base that a party of the home stands on, if the lake does not have it: costs what changed since the
               last one that the lake has
    open_base  the same as a `BaseEpoch`, every blob compared with its CID: which snapshot it must be, control says
"""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from echostore.kernel.errors import Corrupt, NotFound
from echostore.kernel.ids import Cid, PartyKey
from echostore.kernel.models.factory import ModelFactory
from echostore.pipeline import schemas
from echostore.pipeline.lake.files import ROW_GROUP_LARGE, HashedFile
from echostore.pipeline.lake.layout import base_name, bases_of, genesis_in
from echostore.pipeline.lake.reading import BlobsReader
from echostore.pipeline.models import model_factory
from echostore.store.blob_store import BlobStore
from echostore.store.feed_store import FeedStore
from echostore.store.home import Home
from echostore.wire.base_epoch import BASE_KEY, BaseEpoch, BaseName
from echostore.wire.cids import cid_text, matches
from echostore.wire.epochs import cut_pages
from echostore.wire.items import move_chunks
from echostore.wire.membership import membership_names
from echostore.wire.placements import PlacementReader
from echostore.wire.tree_nodes import IndexNode

BELOW_MAX = 8
"""Files of earlier epochs that one may rely on; the next one is written whole."""

BASE_ABOUT = "echostore.base"
"""The entry of a file's metadata that says which epoch it is of and which others it relies on (JSON)."""


def has_base(lake: str | Path, party: bytes, genesis: bytes) -> bool:
    """Whether a lake has the snapshot of an epoch."""
    return Path(lake, base_name(party, genesis)).is_file()


def open_base(lake: str | Path, party: bytes, name: BaseName, factory: ModelFactory) -> BaseEpoch:
    """An epoch out of a lake; Corrupt where a blob of it is missing or another one than its CID says."""
    return BaseEpoch(name, _Files(lake, party, name.genesis).get, factory)


class _Files:
    """The files that hold one snapshot: its own, and those of earlier epochs that it relies on."""

    def __init__(self, lake: str | Path, party: bytes, genesis: bytes) -> None:
        self._lake, self._party = lake, party
        self._readers = [self._open(genesis)]

    def _open(self, genesis: bytes) -> BlobsReader:
        path = Path(self._lake, base_name(self._party, genesis))
        if not path.is_file():
            raise Corrupt(
                f"{path} is missing: a later snapshot relies on it.",
                next_step="Delete the later files beside it, and publish again from a home that stands on the epoch.",
            )
        return BlobsReader(path)

    @cached_property
    def _about(self) -> tuple[int, list[bytes]]:
        told = self._readers[0].about(BASE_ABOUT)
        try:
            about = json.loads(told or "")
            below = [bytes.fromhex(each) for each in about["below"]]
            if len(below) > BELOW_MAX:
                raise ValueError(len(below))
            return int(about["number"]), below
        except (ValueError, TypeError, KeyError):
            raise Corrupt(
                f"{self._readers[0].path} does not say which epoch it is of.",
                next_step="Delete the file, and publish again from a home that stands on this epoch.",
            ) from None

    @property
    def number(self) -> int:
        return self._about[0]

    @property
    def below(self) -> list[bytes]:
        return self._about[1]

    def get(self, cid: Cid) -> bytes:
        """A blob of the snapshot. One that is not here is damage: a snapshot is published whole."""
        for at in range(1 + len(self.below)):
            if at == len(self._readers):
                self._readers.append(self._open(self.below[at - 1]))
            reader = self._readers[at]
            data = reader.get(cid)
            if data is None:
                continue
            if not matches(cid, data):
                raise Corrupt(
                    f"{reader.path} is damaged: a blob is not what its CID names.",
                    next_step="Delete the file, and publish again from a home that stands on this epoch.",
                )
            return data
        raise Corrupt(
            f"{self._readers[0].path} lacks the blob {cid_text(cid)}.",
            next_step="Delete the file, and publish again from a home that stands on this epoch.",
        )

    def has(self, cid: Cid) -> bool:
        """Whether it is named; nothing is compared."""
        for at in range(1 + len(self.below)):
            if at == len(self._readers):
                self._readers.append(self._open(self.below[at - 1]))
            if cid in self._readers[at]:
                return True
        return False


def publish_base(home: Home, lake: Path, party: PartyKey, feeds: FeedStore) -> bool:
    """Add the base that a party of a home stands on, where the lake lacks it."""
    stored = feeds.about(BASE_KEY)
    name = BaseName.decode(stored) if stored else None
    if name is None or has_base(lake, party, name.genesis):
        return False
    try:
        with BlobStore(home.party(party).blobs, writable=False) as blobs:
            _write(lake, party, BaseEpoch(name, blobs.get, model_factory(None)))
    except NotFound as error:
        raise Corrupt(f"the snapshot of epoch {name.number} is not whole: {error.what}") from error
    return True


def _write(lake: Path, party: bytes, base: BaseEpoch) -> None:
    known = _newest(lake, party)
    below = [] if known is None else [known[0], *known[1].below]
    Path(lake, bases_of(party)).mkdir(parents=True, exist_ok=True)
    file = HashedFile(lake)
    try:
        with pq.ParquetWriter(
            pa.PythonFile(file, mode="w"), schemas.BLOBS, compression="zstd", compression_level=1,
            use_dictionary=False, write_statistics=False, write_page_checksum=True, store_schema=False,
        ) as writer:  # fmt: skip  # one option a line would hide what matters
            for batch in _batches(base, None if known is None else known[1]):
                writer.write_batch(batch)
            about = {"number": base.name.number, "below": [each.hex() for each in below]}
            writer.add_key_value_metadata({BASE_ABOUT: json.dumps(about)})
    except BaseException:
        file.drop()
        raise
    file.keep(base_name(party, base.name.genesis))


def _newest(lake: Path, party: bytes) -> tuple[bytes, _Files] | None:
    """The newest snapshot of the party in the lake, unless it relies on too many others already."""
    found: dict[int, tuple[bytes, _Files]] = {}
    for path in sorted(Path(lake, bases_of(party)).glob("*.parquet")):
        genesis = genesis_in(path)
        if genesis is not None:
            files = _Files(lake, party, genesis)
            found[files.number] = genesis, files
    newest = found[max(found)] if found else None
    return None if newest is None or len(newest[1].below) >= BELOW_MAX else newest


def _batches(base: BaseEpoch, known: _Files | None) -> Iterator[pa.RecordBatch]:
    """The blobs in the order of a walk, so that what belongs together lies together; a row group each."""
    held: dict[Cid, bytes] = {}
    size = 0
    for cid in _names(base, known):
        if cid in held:
            continue
        held[cid] = base.blob(cid)
        size += len(held[cid])
        if size >= ROW_GROUP_LARGE:
            yield pa.record_batch([list(held), list(held.values())], schema=schemas.BLOBS)
            held, size = {}, 0
    if held:
        yield pa.record_batch([list(held), list(held.values())], schema=schemas.BLOBS)


def _names(base: BaseEpoch, known: _Files | None) -> Iterator[Cid]:
    """The blobs that the lake lacks. Below a node that it has, it has everything: that is not walked."""
    if known is None:
        yield from dict.fromkeys(base.names())
        return
    name, root = base.name, base.root
    above = [name.snapshot, name.cut, *cut_pages(base.blob(name.cut)), root.tree]
    above += membership_names(root.membership_root, base.blob)
    above += move_chunks(base.blob(root.tree))
    yield from (cid for cid in dict.fromkeys(above) if not known.has(cid))
    if root.placements is not None:
        yield from _placement_names(PlacementReader(root.placements, base.blob), known)
    waiting = [("", root.index_root)]
    while waiting:
        path, cid = waiting.pop()
        if known.has(cid):
            continue
        yield cid
        node = base.reader.open_node(cid, path)
        if isinstance(node, IndexNode):
            waiting += [(path + nibble, below.cid) for nibble, below in reversed(node.branches)]
            continue
        yield from (chunk for chunk in base.reader.chunk_cids(node, path) if not known.has(chunk))


def _placement_names(reader: PlacementReader, known: _Files) -> Iterator[Cid]:
    waiting = [("", reader.top)]
    while waiting:
        path, cid = waiting.pop()
        if known.has(cid):
            continue
        yield cid
        node = reader.open_node(cid, path)
        if isinstance(node, IndexNode):
            waiting += [(path + label, below.cid) for label, below in reversed(node.branches)]
