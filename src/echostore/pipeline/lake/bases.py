"""Base epochs in a lake: the snapshots that parties stand on where an epoch has left something out.

Blocks tell the whole history; what an epoch discarded is no more in the state of any peer. So the snapshot of such an
epoch is published beside the blocks, as its blobs, once for each genesis:

    publish    the base that a party of the home stands on, if it discards and the lake does not have it
    open_base  the same as a `BaseEpoch`, every blob compared with its CID: which snapshot it must be, control says

An epoch that left nothing out is not here: the blocks alone give the same state.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from echostore.kernel.errors import Corrupt, NotFound
from echostore.kernel.ids import Cid, PartyKey
from echostore.kernel.models.factory import ModelFactory
from echostore.pipeline import schemas
from echostore.pipeline.lake.files import ROW_GROUP_LARGE, HashedFile
from echostore.pipeline.lake.layout import base_name
from echostore.pipeline.lake.reading import BlobsReader
from echostore.pipeline.models import model_factory
from echostore.store.blob_store import BlobStore
from echostore.store.feed_store import FeedStore
from echostore.store.home import Home
from echostore.wire.base_epoch import BASE_KEY, BaseEpoch, BaseName
from echostore.wire.cids import matches


def has_base(lake: str | Path, genesis: bytes) -> bool:
    """Whether a lake has the snapshot of an epoch."""
    return Path(lake, base_name(genesis)).is_file()


def open_base(lake: str | Path, name: BaseName, factory: ModelFactory) -> BaseEpoch:
    """An epoch out of a lake; Corrupt where a blob of it is missing or another one than its CID says."""
    path = Path(lake, base_name(name.genesis))
    reader = BlobsReader(path)

    def get(cid: Cid) -> bytes | None:
        data = reader.get(cid)
        if data is not None and not matches(cid, data):
            raise Corrupt(
                f"{path} is damaged: a blob is not what its CID names.",
                next_step="Delete the file, and publish again from a home that stands on this epoch.",
            )
        return data

    return BaseEpoch(name, get, factory)


def publish_base(home: Home, lake: Path, party: PartyKey, feeds: FeedStore) -> bool:
    """Add the base that a party of a home stands on, where the lake needs it and lacks it."""
    stored = feeds.about(BASE_KEY)
    name = BaseName.decode(stored) if stored else None
    if name is None or not name.discards or has_base(lake, name.genesis):
        return False
    try:
        with BlobStore(home.party(party).blobs, writable=False) as blobs:
            _write(lake, BaseEpoch(name, blobs.get, model_factory(None)))
    except NotFound as error:
        raise Corrupt(f"the snapshot of epoch {name.number} is not whole: {error.what}") from error
    return True


def _write(lake: Path, base: BaseEpoch) -> None:
    file = HashedFile(lake)
    try:
        with pq.ParquetWriter(
            pa.PythonFile(file, mode="w"), schemas.BLOBS, compression="zstd", compression_level=1,
            use_dictionary=False, write_statistics=False, write_page_checksum=True, store_schema=False,
        ) as writer:  # fmt: skip  # one option a line would hide what matters
            for batch in _batches(base):
                writer.write_batch(batch)
    except BaseException:
        file.drop()
        raise
    file.keep(base_name(base.name.genesis))


def _batches(base: BaseEpoch) -> Iterator[pa.RecordBatch]:
    """The blobs in the order of a walk, so that what belongs together lies together; a row group each."""
    seen: set[Cid] = set()
    held: dict[Cid, bytes] = {}
    size = 0
    for cid in base.names():
        if cid in seen:
            continue
        seen.add(cid)
        held[cid] = base.blob(cid)
        size += len(held[cid])
        if size >= ROW_GROUP_LARGE:
            yield pa.record_batch([list(held), list(held.values())], schema=schemas.BLOBS)
            held, size = {}, 0
    if held:
        yield pa.record_batch([list(held), list(held.values())], schema=schemas.BLOBS)
