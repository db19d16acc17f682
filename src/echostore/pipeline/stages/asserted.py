"""What a feed last said about other feeds: carried from one commit to the next in packed columns of CUTS.

A timeframe may not go backwards, nor change branch, across commits either. When a feed that was named has forked since,
the old words are looked up again, to learn which branch they were about.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from echostore.kernel.ids import FEED_ID_BYTES, LINK_PREFIX_BYTES
from echostore.pipeline import schemas
from echostore.pipeline.stages.planning import BUCKET_BITS

COLUMNS = ("asserted_feeds", "asserted_seqs", "asserted_links")


class Said(NamedTuple):
    names: bytes
    seq: int
    link: bytes
    """16 bytes of it."""


def pack_asserted(said: Iterable[Said]) -> dict[str, bytes]:
    ordered = sorted(said)
    return {
        "asserted_feeds": b"".join(each.names for each in ordered),
        "asserted_seqs": np.array([each.seq for each in ordered], np.int64).tobytes(),
        "asserted_links": b"".join(each.link for each in ordered),
    }


def unpack_asserted(row: dict[str, Any]) -> list[Said]:
    feeds, seqs, links = (row[name] or b"" for name in COLUMNS)
    return [
        Said(
            feeds[at * FEED_ID_BYTES : (at + 1) * FEED_ID_BYTES],
            seq,
            links[at * LINK_PREFIX_BYTES : (at + 1) * LINK_PREFIX_BYTES],
        )
        for at, seq in enumerate(np.frombuffer(seqs, np.int64).tolist())
    ]


@dataclass(frozen=True)
class AboutForked:
    """The task that makes dependencies of what was said about feeds that may have forked: (party, feed id) each."""

    forked: frozenset[tuple[bytes, bytes]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = []
            for row in batch.to_pylist():
                key = {name: row[name] for name in ("party", "feed", "piece")}
                for said in unpack_asserted(row):
                    if (row["party"], said.names) in self.forked:
                        rows.append({**key, **_dependency(said)})
            yield pa.RecordBatch.from_pylist(rows, schemas.VERIFIED)


def _dependency(said: Said) -> dict[str, Any]:
    """As a row of VERIFIED. Its depth is not known any more; that is of no matter for a block that was delivered."""
    return {
        "names": said.names,
        "bucket": said.seq >> BUCKET_BITS,
        "seqs": np.int64(0).tobytes(),
        "named_seqs": np.int64(said.seq).tobytes(),
        "named_links": said.link,
        "named_depths": np.int64(0).tobytes(),
        "backwards": False,
    }
