"""One step of a stream: fold what is new up to a timeframe, and publish it. Called by the query with every micro-batch,
and once more when a commit has taken in what the overlay held.

    what is pending ──► orders, one for each root party ──► one job ──► overlay N + 1
                        (children go with their roots)      a party with much that is new: jobs of its own

What is pending is known from the lake and from the commit below, never from the checkpoint alone: after a start, every
party that was published to since that commit is looked at, and those that the overlay has whole cost little.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from echostore.pipeline.output import reading
from echostore.pipeline.output.files import Step, no_step
from echostore.pipeline.output.overlay import Overlay, Segment
from echostore.pipeline.output.record import Commit, NamedFile
from echostore.pipeline.output.results import party_results
from echostore.pipeline.stages.reduce import TURNS
from echostore.pipeline.staleness import touched_parties
from echostore.pipeline.streaming.folding import TOLD, Folding, Order, orders_table
from echostore.pipeline.streaming.following import Follower, Timeframe
from echostore.pipeline.streaming.jobs import Jobs, dealt
from echostore.pipeline.streaming.merging import Merging, mergeable, merged_files
from echostore.pipeline.streaming.publishing import KEEP_S, Publisher
from echostore.pipeline.streaming.root_party import DEFERRED, Ground
from echostore.pipeline.streaming.spreading import Spreading, worth_spreading

TURNS_A_BATCH = 1024
"""More than a micro-batch has rounds."""
PASSES_MAX = 4
"""A child party may be found while its root is folded, and is folded with it once more."""

Spread = Callable[[int, int, int], bool]
"""Whether a party is folded on all cores: by its new blocks, those of the step, and the number of cores."""


@dataclass(slots=True)
class Folded:
    """What a step came to."""

    overlay: Overlay | None
    blocks: int = 0
    """Blocks that are in the tables now and were not before."""
    waiting: int = 0
    """Blocks of the parties of this step that wait for others."""
    deferred: dict[bytes, str] = field(default_factory=dict)
    """Parties that wait for the next commit, children with their roots, and why."""


class Overlaying:
    """The overlay of one output, as it grows."""

    def __init__(
        self,
        jobs: Jobs,
        follower: Follower,
        out: Path,
        *,
        roots: frozenset[bytes] | None = None,
        models: str | None = None,
        keep_s: float = KEEP_S,
        step: Step = no_step,
        spread: Spread = worth_spreading,
    ) -> None:
        self._spread = spread
        self._jobs, self._follower, self._out, self._models = jobs, follower, out, models
        self._chosen = roots
        self._publisher = Publisher(out, keep_s=keep_s, step=step)
        self._base: Commit | None = None
        self._looked = False
        self._root_of: dict[bytes, bytes] = {}
        self._pending: set[bytes] = set()
        self.deferred: dict[bytes, str] = {}
        self._waiting: dict[bytes, int] = {}
        self._floor: Timeframe = {}
        """What is folded already. A micro-batch that ends below it, after a run that took in more, takes nothing back."""
        self.rebase()
        if self.overlay is not None:
            self._floor = follower.joined(self._floor, follower.at_version(self.overlay.covers))

    @property
    def overlay(self) -> Overlay | None:
        """The overlay, when it lies on the commit that this works on."""
        newest = self._publisher.newest
        return newest if newest is not None and newest.base == self._number else None

    @property
    def base(self) -> Commit | None:
        return self._base

    @property
    def _number(self) -> int:
        return 0 if self._base is None else self._base.number

    @property
    def waiting(self) -> int:
        return sum(self._waiting.values())

    def rebase(self) -> bool:
        """Work on the newest commit from now on; whether that is another one than before."""
        base, _ = reading.newest(self._out)
        if self._looked and (0 if base is None else base.number) == self._number:
            return False
        self._looked = True
        self._base = base
        self._follower.look()
        after = 0 if base is None else base.lake.version
        self._floor = self._follower.joined(self._floor, self._follower.at_version(after))
        version = self._follower.lake.at(self._follower.version)
        self._pending |= touched_parties(version, after)
        self.deferred = {}
        self._waiting = {}
        if base is not None:
            for result in party_results(self._out, base):
                self._waiting[result.party] = result.waiting
                if result.root_party != result.party:
                    self._root_of[result.party] = result.root_party
        return True

    def advance(self, end: Timeframe, changed: set[bytes]) -> Folded:
        """Fold everything up to `end`, and what was folded before, and publish it. `changed` are parties that are known to
        have something new."""
        self._follower.look()
        self.rebase()
        self._pending |= changed
        before, self._floor = self._floor, self._follower.joined(end, self._floor)
        end = self._floor
        fresh = self._follower.blocks_between(before, end)
        folded = Folded(self.overlay)
        segments: list[Segment] = []
        with self._publisher.attempt() as (attempt, place):
            for number in range(PASSES_MAX):
                orders = self._orders(end)
                if not orders:
                    break
                overlay = self._with(segments)
                turn = (self._number + 1) * TURNS + self._batches() * PASSES_MAX * TURNS_A_BATCH
                ground = Ground(
                    lake=str(self._follower.lake.path),
                    place=place,
                    number=attempt.number,
                    turn=turn + number * TURNS_A_BATCH,
                    base=self._number,
                    overlay=overlay,
                    models=self._models,
                )
                files = self._take(self._run(ground, orders, fresh), folded)
                if files:
                    segments.append(Segment(0, files))
            folded.deferred = self._all_deferred()
            folded.waiting = self.waiting
            covers, known = self._covers(end), self.overlay
            if known is not None and known.covers == covers and not segments:
                return folded
            folded.overlay = self._publisher.publish(
                attempt,
                base=self._number,
                covers=covers,
                batches=self._batches() + 1,
                messages=(0 if known is None else known.messages) + folded.blocks,
                segments=(*(() if known is None else known.segments), *segments),
            )
        return folded

    def tidy(self) -> None:
        """Merge segments where there are many, and remove old overlays."""
        overlay = self.overlay
        while overlay is not None and (start := mergeable(overlay.segments)) is not None:
            last = overlay.segments[start:]
            kinds = {kind for segment in last for kind in segment.files}
            files = {kind: tuple(f for segment in last for f in segment.files.get(kind, ())) for kind in kinds}
            with self._publisher.attempt() as (attempt, place):
                made = merged_files(self._jobs, Merging(place, files))
                segments = (*overlay.segments[:start], Segment(last[0].level + 1, made))
                overlay = self._publisher.publish(
                    attempt,
                    base=overlay.base,
                    covers=overlay.covers,
                    batches=overlay.batches,
                    messages=overlay.messages,
                    segments=segments,
                )
        self._publisher.prune()

    # inside

    def _all_deferred(self) -> dict[bytes, str]:
        children = {child: self.deferred[root] for child, root in self._root_of.items() if root in self.deferred}
        return {**self.deferred, **children}

    def _batches(self) -> int:
        overlay = self.overlay
        return 0 if overlay is None else overlay.batches

    def _with(self, segments: list[Segment]) -> Overlay | None:
        """The overlay with segments that are not published yet."""
        overlay = self.overlay
        if not segments:
            return overlay
        before = () if overlay is None else overlay.segments
        return Overlay(0, self._number, 0, 0, 0, (*before, *segments))

    def _covers(self, end: Timeframe) -> int:
        """Up to which version of the lake nothing is missing."""
        overlay = self.overlay
        known = overlay.covers if overlay is not None else 0 if self._base is None else self._base.lake.version
        if self._chosen is not None or self.deferred:
            return known
        return max(known, self._follower.version) if end == self._follower.newest() else known

    def _orders(self, end: Timeframe) -> list[Order]:
        """The root parties that are pending, with their children and runs; what is taken is pending no more."""
        own = self._follower.roots()
        roots: set[bytes] = set()
        strays: set[bytes] = set()
        for party in self._pending:
            root = party if party in own else self._root_of.get(party)
            if root is None:
                strays.add(party)  # until a root party claims it as its child
            elif (self._chosen is None or root in self._chosen) and root not in self.deferred:
                roots.add(root)
        self._pending = strays
        if not roots:
            return []
        children: dict[bytes, list[bytes]] = defaultdict(list)
        for child, root in self._root_of.items():
            children[root].append(child)
        parties = {root: [root, *sorted(children[root])] for root in roots}
        runs = self._follower.runs({party for each in parties.values() for party in each}, end)
        return [
            (root, each, runs.filter(pc.is_in(runs["party"], pa.array(each, pa.binary()))))
            for root, each in sorted(parties.items())
        ]

    def _run(self, ground: Ground, orders: list[Order], fresh: dict[bytes, int]) -> list[Any]:
        """One job, with at most as many tasks as there are cores; large parties before it, each on all cores."""
        rows: list[Any] = []
        few: list[Order] = []
        total = sum(fresh.values())
        for root, parties, runs in orders:
            blocks = sum(fresh.get(party, 0) for party in parties)
            if self._spread(blocks, total, self._jobs.width):
                rows += Spreading(self._jobs, ground).fold(root, runs)
            else:
                few.append((root, parties, runs))
        if few:
            order = dealt([len(runs) for _, _, runs in few], self._jobs.width)
            rows += self._jobs.run(orders_table([few[at] for at in order]), Folding(ground), TOLD)
        return rows

    def _take(self, rows: list[Any], folded: Folded) -> dict[str, tuple[NamedFile, ...]]:
        files: dict[str, list[NamedFile]] = defaultdict(list)
        for row in rows:
            if row["kind"] is not None:
                files[row["kind"]].append(NamedFile(row["path"], row["sha256"], row["bytes"], row["rows"]))
                continue
            root, children = bytes(row["root"]), [bytes(child) for child in row["children"] or ()]
            self._pending.update(child for child in children if self._root_of.get(child) != root)
            self._root_of.update(dict.fromkeys(children, root))
            if row["state"] == DEFERRED:
                self.deferred[root] = row["detail"]
                continue
            folded.blocks += row["blocks"]
            self._waiting.update(dict.fromkeys(children, 0))  # they are counted with their root
            self._waiting[root] = row["waiting"]
        return {kind: tuple(named) for kind, named in files.items()}
