"""Control states in a lake: what stands for control blocks that were freed below an epoch.

    bases/<party>/<messages below>-<sha256>.control     canonical bytes of the state (`wire.control_state`)

    publish    the state at which the control feeds of a home begin, if the lake does not have it
    floors_of  where control feeds begin, of parties whose first control blocks the lake lacks: the newest state that the
               moment asked about contains. Who has all blocks folds them, and finds the same
    damaged    what is wrong with the states of a lake, by party

The bytes are compared with their name, and every credential in them is checked and judged again, like those in blocks. A
damaged state holds up its party alone, and only where neither the blocks nor an older state can stand for it.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

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


class Damage(NamedTuple):
    """A control state that can't be read."""

    party: bytes
    messages: int
    """How many control messages it stands for."""
    what: str


class _Run(NamedTuple):
    feed: bytes
    start: int
    end: int


def floors_of(
    lake: str | Path, runs: pa.Table, limits: ControlLimits, hurt: dict[bytes, Corrupt] | None = None
) -> dict[PartyKey, StoredControl]:
    """The states to begin from, of parties whose first control blocks are not among sorted runs.

    Corrupt where the one that is needed is damaged or missing. With `hurt` that is noted there, by party, and the others go on.
    """
    found = {}
    rows = zip(*(runs[name].to_pylist() for name in ("party", "feed", "start", "end")), strict=True)
    for party, of_party in groupby(rows, key=lambda row: row[0]):
        if not os.path.isdir(os.path.join(lake, bases_of(party))):
            continue
        held = [_Run(feed, start, end) for _, feed, start, end in of_party]
        try:
            state = _needed(lake, PartyKey(party), held, limits.get(party))
        except Corrupt as error:
            if hurt is None:
                raise
            hurt[party] = error
            continue
        if state is not None:
            found[PartyKey(party)] = state
    return found


def damaged(lake: str | Path, parties: Iterable[bytes]) -> Iterator[Damage]:
    """Every control state of some parties that can't be read, needed or not."""
    for party in parties:
        for path in _files(lake, party):
            try:
                _read(path, PartyKey(party))
            except Corrupt as error:
                yield Damage(party, _messages_below(path), error.what)


def floor_at(lake: str | Path, party: PartyKey, lengths: Mapping[FeedKey, int]) -> StoredControl:
    """The state at a cut that `floors_of` has named."""
    damage: Corrupt | None = None
    for path in _files(lake, party):
        try:
            stored = _read(path, party)
        except Corrupt as error:
            damage = damage or error
            continue
        if stored.state.lengths == lengths:
            return stored
    raise damage or Corrupt(
        f"a control state of party {party.hex()} is gone from the lake",
        next_step="Publish again from a home whose control feeds begin there.",
    )


def _reached(runs: Sequence[_Run], begun: Mapping[FeedKey, int]) -> dict[bytes, int]:
    """How far each feed goes without a gap, from where it begins."""
    reached: dict[bytes, int] = {}
    reached.update(begun.items())
    for feed, start, end in runs:
        if start <= reached.get(feed, 0):
            reached[feed] = max(end, reached.get(feed, 0))
    return reached


def _goes_on(runs: Sequence[_Run], begun: Mapping[FeedKey, int]) -> bool:
    """Whether nothing is missing between where feeds begin and their ends."""
    reached = _reached(runs, begun)
    return all(reached.get(run.feed, 0) >= run.end for run in runs)


def _needed(
    lake: str | Path, party: PartyKey, runs: Sequence[_Run], limit: Mapping[FeedId, int] | None
) -> StoredControl | None:
    """The newest state inside a moment; None where the blocks below all states are there."""
    if limit is not None:
        known = [run for run in runs if run.start < limit.get(feed_id(FeedKey(run.feed)), 0)]
        inside_moment = [run._replace(end=min(run.end, limit[feed_id(FeedKey(run.feed))])) for run in known]
    else:
        inside_moment = list(runs)
    needed, held = False, _reached(runs, {})
    damage: Corrupt | None = None
    lacking = False
    for path in _files(lake, party):
        try:
            stored = _read(path, party)
        except Corrupt as error:
            if not _goes_on(inside_moment, {}) or sum(held.values()) < _messages_below(path):
                damage = damage or error
            continue
        lengths = stored.state.lengths
        if all(held.get(key, 0) >= length for key, length in lengths.items()):
            continue
        needed = True
        inside = limit is None or all(limit.get(feed_id(key), 0) >= length for key, length in lengths.items())
        # Below one that is damaged or missing an older one will do, where the blocks in between are there.
        if inside and _goes_on(inside_moment, lengths):
            return stored
        lacking |= inside
    if damage is not None:
        raise damage
    if needed and not lacking:
        raise Compacted(
            f"that moment lies below what the lake has of the control feeds of party {party.hex()}",
            next_step="Name a later moment, or publish from a home that kept its history.",
        )
    if lacking or not _goes_on(inside_moment, {}):
        raise Corrupt(
            f"control blocks of party {party.hex()} are not in the lake, and the control state that stood for them is missing",
            next_step="Publish again from a home of the party.",
        )
    return None


def _messages_below(path: Path) -> int:
    """How many control messages a state stands for, by its name."""
    told = path.stem.rpartition("-")[0]
    return int(told) if told.isascii() and told.isdigit() else 0


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
