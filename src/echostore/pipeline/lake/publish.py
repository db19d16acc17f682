"""publish: the blocks of a home that a lake lacks become its next version.

For each feed of the home, the runs of the lake are laid over what is held. Where the links agree, the lake has the
blocks; what is left over is written. So a second publish writes nothing, a home that shares parties with another one
adds only what is new, and each branch of a fork is kept once.

Two publishers at once: who comes second to the log looks at what the first one added. If that touches the feeds it
wrote itself, it plans again; the files that it had written are garbage, which compaction collects.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from echostore.kernel.errors import Corrupt, Locked, NotFound
from echostore.kernel.ids import PartyKey
from echostore.pipeline.lake import log
from echostore.pipeline.lake.bases import publish_base
from echostore.pipeline.lake.control_floors import publish_control
from echostore.pipeline.lake.home_feeds import HomeFeed, feeds_of, open_feeds
from echostore.pipeline.lake.reading import read_rows, read_runs
from echostore.pipeline.lake.strands import Run
from echostore.pipeline.lake.versions import Lake, LakeVersion
from echostore.pipeline.lake.writer import LakeWriter
from echostore.store.home import Home

PLANS_MAX = 32
"""Each new plan means that another publisher was faster on the same feeds."""

Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LakeRun:
    """A run of the lake and where its rows are."""

    run: Run
    file: str
    row: int


@dataclass(slots=True)
class Published:
    """What a publish did."""

    version: int
    """The version that holds everything of the home; the lake's newest when nothing was new."""
    parties: int = 0
    feeds: int = 0
    """Feeds with new blocks."""
    blocks: int = 0
    files: int = 0
    bytes: int = 0
    bases: int = 0
    """Snapshots of epochs that parties stand on."""
    damaged: list[tuple[PartyKey, str]] = field(default_factory=list)
    """Parties of which not everything could be read, and why. The others are published all the same."""
    compacted: dict[PartyKey, int] = field(default_factory=dict)
    """Parties of which neither the home nor the lake has the beginning: blocks that were deleted below an epoch."""


def publish(
    home: str | os.PathLike[str],
    lake: str | os.PathLike[str],
    *,
    parties: Sequence[PartyKey] | None = None,
    publisher: str = "",
    tell: Tell | None = None,
) -> Published:
    """Add what is new in a home to a lake, which is made when it is missing. The home is only read."""
    source = Home.open(home)
    target = Lake.create(lake)
    chosen = source.party_keys()
    if parties is not None:
        missing = set(parties) - set(chosen)
        if missing:
            raise NotFound(f"party {min(missing).hex()} is not in {source.path}")
        chosen = sorted(parties)
    for _ in range(PLANS_MAX):
        done = _Publishing(source, target, chosen, publisher, tell).run()
        if done is not None:
            return done
    raise Locked(
        f"Others publish the same feeds to {target.path} all the time.", next_step="Try again when they are done."
    )


class _Publishing:
    """One plan on one version of the lake, carried out."""

    def __init__(self, home: Home, lake: Lake, parties: list[PartyKey], publisher: str, tell: Tell | None) -> None:
        self._home, self._lake, self._parties = home, lake, parties
        self._publisher, self._tell = publisher, tell
        self._on: LakeVersion = lake.at()
        self._written: set[tuple[bytes, bytes]] = set()
        self._done = Published(self._on.version, parties=len(parties))

    def run(self) -> Published | None:
        """None when another publisher added to the same feeds meanwhile."""
        writer = LakeWriter(self._lake, publisher=self._publisher)
        staged = writer.stage(self._rows())
        self._done.feeds = len(self._written)
        if not staged.adds:
            return self._done
        entry = writer.commit(staged, planned_on=self._on.version, still=self._undisturbed)
        if entry is None:
            return None
        self._done.version = entry.version
        self._done.blocks, self._done.files = staged.rows, len(entry.adds)
        self._done.bytes = sum(each.bytes for each in entry.adds)
        return self._done

    def _rows(self) -> Iterator[pa.RecordBatch]:
        known = self._known()
        for number, party in enumerate(self._parties):
            if self._tell:
                self._tell(number, len(self._parties))
            try:
                yield from self._party(party, known)
            except Corrupt as error:
                self._done.damaged.append((party, error.what))
        if self._tell:
            self._tell(len(self._parties), len(self._parties))

    def _known(self) -> dict[tuple[bytes, bytes], list[LakeRun]]:
        """The runs that the lake has of the parties of this home."""
        runs = self._on.runs(parties=self._parties) if self._parties else None
        known: dict[tuple[bytes, bytes], list[LakeRun]] = {}
        for each in [] if runs is None else runs.to_pylist():
            run = Run(each["start"], each["end"], each["previous"], each["last_link"])
            known.setdefault((each["party"], each["feed"]), []).append(LakeRun(run, each["file"], each["row"]))
        return known

    def _party(self, party: PartyKey, known: dict[tuple[bytes, bytes], list[LakeRun]]) -> Iterator[pa.RecordBatch]:
        store = open_feeds(self._home, party)
        if store is None:
            return
        with store:
            # Before the blocks: who finds an epoch in the control feeds of a version finds its snapshot too.
            self._done.bases += publish_base(self._home, self._lake.path, party, store)
            publish_control(self._lake.path, party, store)
            for feed in feeds_of(store):
                in_lake = known.get((party, feed.key), [])
                gone = _gone(feed.beginning, in_lake)
                if gone:
                    self._done.compacted[party] = self._done.compacted.get(party, 0) + gone
                lacking = self._lacking(feed, in_lake)
                for index, start, end in lacking:
                    self._written.add((party, feed.key))
                    yield from feed.batches(index, start, end)

    def _lacking(self, feed: HomeFeed, known: list[LakeRun]) -> list[tuple[int, int, int]]:
        """(run of the home, start, end) of all stretches that the lake does not have."""
        found = []
        for index, home_run in enumerate(feed.runs):
            run = home_run.run
            at = run.start
            for start, end in sorted(self._common(feed, index, lake_run) for lake_run in known):
                if start > at and start < run.end:
                    found.append((index, at, start))
                at = max(at, end)
            if at < run.end:
                found.append((index, at, run.end))
        return found

    def _common(self, feed: HomeFeed, index: int, known: LakeRun) -> tuple[int, int]:
        """The part of a run of the lake that lies on the way to the end of a run of the home; empty as (0, 0)."""
        mine, theirs = feed.runs[index].run, known.run
        low, high = theirs.start, min(mine.end, theirs.end)

        def agree(seq: int) -> bool:
            if seq == theirs.end - 1:
                return feed.link_at(index, seq) == theirs.last_link
            return feed.link_at(index, seq) == self._link(known, seq)

        if low >= high:
            return 0, 0
        if agree(high - 1):
            return low, high
        # Links are chained: they agree up to the fork and never again.
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if agree(middle) else (low, middle)
        return (theirs.start, low) if low > theirs.start else (0, 0)

    def _link(self, known: LakeRun, seq: int) -> bytes:
        row = known.row + seq - known.run.start
        link: bytes = next(read_rows(self._lake.path, known.file, row, row + 1, ("link",)))["link"][0].as_py()
        return link

    def _undisturbed(self, planned_on: int, newest: int) -> bool:
        """Whether nobody added to the same feeds since the plan. Compaction only moves blocks."""
        parties = sorted({party for party, _ in self._written})
        for version in range(planned_on + 1, newest + 1):
            entry, _ = log.read_entry(self._lake.path, version)
            if entry.kind == "compact":
                continue
            for record in entry.runs:
                runs = read_runs(self._lake.path, record, parties)
                added = zip(runs["party"].to_pylist(), runs["feed"].to_pylist(), strict=True)
                if not self._written.isdisjoint(added):
                    return False
        return True


def _gone(beginning: int, known: list[LakeRun]) -> int:
    """How many blocks before the beginning of a feed of the home the lake lacks too."""
    gone, at = 0, 0
    for run in sorted((each.run for each in known), key=lambda run: run.start):
        gone += max(0, min(run.start, beginning) - at)
        at = max(at, run.end)
    return gone + max(0, beginning - at)
