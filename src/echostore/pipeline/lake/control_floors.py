"""Control states in a lake: what stands for control blocks that were freed below an epoch.

    bases/<party>/<messages below>-<sha256>.control     canonical bytes of the state (`wire.control_state`)

    publish    the state at which the control feeds of a home begin, if the lake does not have it
    floors_of  where control feeds begin, of parties whose first control blocks the lake lacks: the newest state that the
               moment asked about contains. Who has all blocks folds them, and finds the same

The bytes are compared with their name, and every credential in them is checked and judged again, like those in blocks.
"""

import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from echostore.kernel.errors import Compacted, Corrupt
from echostore.kernel.ids import FeedId, FeedKey, PartyKey, feed_id
from echostore.pipeline.lake.files import HashedFile
from echostore.pipeline.lake.layout import bases_of
from echostore.store.feed_store import FeedStore
from echostore.wire.control_state import FLOOR_KEY, StoredControl, read_control_state

SUFFIX = ".control"

ControlLimits = Mapping[bytes, Mapping[FeedId, int]]
"""By party, of how many blocks of each control feed a moment knew."""


def publish_control(lake: Path, party: PartyKey, feeds: FeedStore) -> bool:
    """Add the state at which the control feeds of a home begin, where the lake lacks it."""
    data = feeds.about(FLOOR_KEY)
    if not data:
        return False
    below = sum(read_control_state(data, party).state.lengths.values())
    name = f"{bases_of(party)}/{below:020d}-{sha256(data).hexdigest()}{SUFFIX}"
    if (lake / name).is_file():
        return False
    (lake / bases_of(party)).mkdir(parents=True, exist_ok=True)
    file = HashedFile(lake)
    try:
        file.write(data)
    except BaseException:
        file.drop()
        raise
    file.keep(name)
    return True


def floors_of(lake: str | Path, runs: pa.Table, limits: ControlLimits) -> dict[PartyKey, StoredControl]:
    """The states to begin from, of parties whose first control blocks are not among sorted runs."""
    found = {}
    rows = zip(*(runs[name].to_pylist() for name in ("party", "feed", "start", "end")), strict=True)
    for party, of_party in groupby(rows, key=lambda row: row[0]):
        held = _held_from_start((feed, start, end) for _, feed, start, end in of_party)
        if os.path.isdir(os.path.join(lake, bases_of(party))):
            state = _needed(lake, PartyKey(party), held, limits.get(party))
            if state is not None:
                found[PartyKey(party)] = state
    return found


def floor_at(lake: str | Path, party: PartyKey, lengths: Mapping[FeedKey, int]) -> StoredControl:
    """The state at a cut that `floors_of` has named."""
    for path in _files(lake, party):
        stored = _read(path, party)
        if stored.state.lengths == lengths:
            return stored
    raise Corrupt(
        f"a control state of party {party.hex()} is gone from the lake",
        next_step="Publish again from a home whose control feeds begin there.",
    )


def _held_from_start(rows: Iterator[tuple[bytes, int, int]]) -> dict[bytes, int]:
    """How far each feed goes without a gap."""
    reached: dict[bytes, int] = {}
    for feed, start, end in rows:
        if start <= reached.get(feed, 0):
            reached[feed] = max(end, reached.get(feed, 0))
    return reached


def _needed(
    lake: str | Path, party: PartyKey, held: Mapping[bytes, int], limit: Mapping[FeedId, int] | None
) -> StoredControl | None:
    """The newest state inside a moment; None where the blocks below all states are there."""
    needed = False
    for path in _files(lake, party):
        stored = _read(path, party)
        lengths = stored.state.lengths
        if all(held.get(key, 0) >= length for key, length in lengths.items()):
            continue
        needed = True
        if limit is None or all(limit.get(feed_id(key), 0) >= length for key, length in lengths.items()):
            return stored
    if needed:
        raise Compacted(
            f"that moment lies below what the lake has of the control feeds of party {party.hex()}",
            next_step="Name a later moment, or publish from a home that kept its history.",
        )
    return None


def _files(lake: str | Path, party: bytes) -> list[Path]:
    """Newest first."""
    return sorted(Path(lake, bases_of(party)).glob("*" + SUFFIX), reverse=True)


def _read(path: Path, party: PartyKey) -> StoredControl:
    try:
        data = path.read_bytes()
        if sha256(data).hexdigest() != path.stem.rpartition("-")[2]:
            raise Corrupt("it is not what its name says")
        return read_control_state(data, party)
    except (OSError, Corrupt) as error:
        raise Corrupt(
            f"{path} is damaged: {error}",
            next_step="Delete the file, and publish again from a home whose control feeds begin there.",
        ) from error
