"""The order stage against the slow orderer: cuts, reasons, waits, timeframes and rejects, over random parties."""

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dag_story import name
from echostore.kernel.ids import FeedId
from echostore.kernel.order import DATA
from echostore.pipeline.lake import Lake, LakeVersion, LakeWriter
from echostore.pipeline.stages.control import fold_control
from echostore.pipeline.stages.frames import frame_of
from echostore.pipeline.stages.order import order_blocks
from spark.signed_story import LIES, Held, SignedStory, batch, message

RANDOM_PARTIES = 240


class Ordered:
    """The tables of one run as Python rows."""

    def __init__(
        self, spark: Any, version: LakeVersion, *, previous: Any = None, here: bool = True, **options: Any
    ) -> None:
        self.control = fold_control(spark, version, **options)
        rows_max = {} if here else {"here_rows_max": -1}
        self.tables = order_blocks(spark, version, self.control, previous=previous, **options, **rows_max)
        cuts = [*self.control.cuts.toArrow().to_pylist(), *self.tables.cuts.toArrow().to_pylist()]
        self.cuts = {(row["party"], row["feed_id"]): row for row in cuts}
        self.timeframe = {(row["party"], row["feed_id"]): row for row in self.tables.timeframe.toArrow().to_pylist()}
        rejects = [*self.control.rejects.toArrow().to_pylist(), *self.tables.rejects.toArrow().to_pylist()]
        self.rejects = sorted(
            (row["party"], row["feed"], row["seq"], row["position"], row["reason"], row["detail"]) for row in rejects
        )
        self.unheld = self.tables.unheld.toArrow().to_pylist()

    def close(self) -> None:
        self.tables.close()
        self.control.close()


def lake_of(path: Path, *parts: Iterable[tuple[SignedStory, list[dict[str, Any]]]]) -> LakeVersion:
    """A lake with one version per part."""
    lake = Lake.create(path)
    for part in parts:
        rows = sorted(((story.party, rows) for story, rows in part if rows), key=lambda each: each[0])
        LakeWriter(lake).write([batch(found) for _, found in rows])
    return lake.at()


def check(story: SignedStory, held: Held, ordered: Ordered) -> Counter[str]:
    """Compare one party with the slow orderer; returns how often each kind of end was seen."""
    outcome = story.outcome(held)
    seen: Counter[str] = Counter()
    expected_rejects = []
    for mind in story.minds:
        place = (story.party, mind.id)
        if mind.branch or mind.id in story.unadmitted or not held[mind.id, 0]:
            continue
        cut = ordered.cuts[place]
        length, ended = outcome.lengths[mind.id, 0], outcome.ended.get((mind.id, 0))
        missing = outcome.missing.get((mind.id, 0))
        fork = fork_of(story, mind.id, held)
        if fork is not None and length >= fork:
            assert (cut["state"], cut["length"]) == ("forked", fork), (story.seed, mind.id, cut)
            length = fork
        else:
            state = "ended" if ended else "waiting" if missing else "open"
            assert (cut["length"], cut["state"], cut["reason"]) == (length, state, ended), (story.seed, mind.id, cut)
            assert (cut["waits_feed"], cut["waits_seq"]) == (missing or (None, None)), (story.seed, mind.id, cut)
            if fork is None:
                assert cut["held"] == held[mind.id, 0], (story.seed, cut)
                if ended:
                    expected_rejects.append((story.party, mind.id, length, -1, "invalid", str(ended)))
                    expected_rejects += [
                        (story.party, mind.id, seq, -1, "after-invalid", "") for seq in range(length + 1, cut["held"])
                    ]
        if length:
            block = mind.blocks[length - 1]
            assert (cut["link"], cut["depth"]) == (block.link, block.depth), (story.seed, cut)
        if mind.kind == DATA and length:
            assert ordered.timeframe[place]["seq"] == length - 1
            assert ordered.timeframe[place]["link"] == mind.blocks[length - 1].link
        else:
            assert place not in ordered.timeframe
        seen[cut["reason"] or cut["state"]] += 1
    forked = {mind.id for mind in story.minds if mind.branch and fork_of(story, mind.id, held) is not None}
    found = [
        row
        for row in ordered.rejects
        if row[0] == story.party and row[4] in ("invalid", "after-invalid") and row[1] not in forked
    ]
    assert found == sorted(expected_rejects), story.seed
    return seen


def fork_of(story: SignedStory, feed: FeedId, held: Held) -> int | None:
    """Where a feed forks in what is held, if it does there."""
    branch = next((mind for mind in story.minds if mind.id == feed and mind.branch), None)
    if branch is None:
        return None
    at = story._fork_at(branch)
    return at if held[feed, 0] > at and held[feed, 1] > at else None


def random_story(seed: int) -> tuple[SignedStory, Held]:
    chance = random.Random(seed)
    story = SignedStory(
        f"story {seed}", chance.randrange(2, 7), control=chance.randrange(1, 3), unadmitted=chance.random() < 0.15
    )
    for _ in range(chance.randrange(1, 4)):
        story.tell(chance, steps=chance.randrange(1, 14), forks=chance.random() < 0.25)
        for _ in range(chance.randrange(3)):
            story.lie(chance)
    held = story.lengths(chance if chance.random() < 0.7 else None)
    for mind in story.minds:
        if mind.branch:  # a branch hangs on blocks that both have; alone it would be the feed itself
            fork = story._fork_at(mind)
            held[mind.id, 0] = max(held[mind.id, 0], fork)
            held[mind.id, 1] = max(held[mind.id, 1], fork) if held[mind.id, 0] > fork else fork
    return story, held


@pytest.mark.parametrize("here", [True, False], ids=["gathered", "distributed"])
def test_random_parties_in_one_job(spark: Any, tmp_path: Path, here: bool) -> None:
    """Cuts, states, reasons, waits, links, timeframes and rejects equal the slow orderer's."""
    told = [random_story(seed + here * 10_000) for seed in range(RANDOM_PARTIES if here else 60)]
    chance = random.Random("heads")
    version = lake_of(tmp_path / "lake", [(story, story.rows(held, chance=chance)) for story, held in told])
    ordered = Ordered(spark, version, here=here)
    seen: Counter[str] = Counter()
    for story, held in told:
        seen += check(story, held, ordered)
    ordered.close()
    kinds = {"open", "waiting", "forked", "undecodable", "lying-depth", "timeframe-backwards", "wrong-kind"}
    assert not here or kinds <= set(seen), seen
    assert {"open", "waiting", "forked"} <= set(seen), seen
    assert ordered.tables.rounds, "no cut was lowered by another"


def expected_end(story: SignedStory, held: Held, mind: Any) -> tuple[int, str | None, tuple[FeedId, int] | None]:
    outcome = story.outcome(held)
    ended = outcome.ended.get((mind.id, 0))
    return outcome.lengths[mind.id, 0], ended and str(ended), outcome.missing.get((mind.id, 0))


REASONS = {
    "depth too great": "lying-depth",
    "depth too small": "lying-depth",
    "no depth": "lying-depth",
    "absurd depth": "lying-depth",
    "depth of another wrong": "lying-depth",
    "depth of another absurd": "lying-depth",
    "another content": "waiting",
    "the future": "waiting",
    "the future, and too deep": "waiting",
    "no such seq": "undecodable",
    "backwards": "timeframe-backwards",
    "own feed": "timeframe-backwards",
    "unknown feed": "waiting",
    "wrong kind": "wrong-kind",
    "control names data": "wrong-kind",
    "garbage": "undecodable",
    "garbage inside": "undecodable",
    "crooked columns": "undecodable",
    "depth twice": "open",
    "depth twice, false": "lying-depth",
    "unordered": "undecodable",
}


def test_each_lie_has_its_reason(spark: Any, tmp_path: Path) -> None:
    """One party per lie: the liar's feed ends (or waits) there, with the reason of that lie, and nobody else's does."""
    assert set(REASONS) == set(LIES)
    told = []
    for kind in sorted(LIES):
        story = SignedStory(f"lie {kind}", 5, control=2)
        chance = random.Random(kind)
        story.tell(chance, steps=25)
        liar = story.minds[1] if kind == "control names data" else story.minds[3]
        for mind in story.minds:
            if mind.id != liar.id and mind.kind in ("control", liar.kind):
                story.process(liar, mind, len(mind.blocks))
        if kind in ("backwards", "own feed") and not liar.blocks:
            story.write(liar)
        if kind == "backwards":
            story.write(liar)
        payload = LIES[kind](story, liar, chance)
        assert payload is not None, kind
        at = len(liar.blocks)
        story.register(liar, payload)
        story.write(liar)
        told.append((kind, story, liar, at))
    version = lake_of(tmp_path / "lake", [(story, story.rows(story.lengths())) for _, story, _, _ in told])
    ordered = Ordered(spark, version)
    for kind, story, liar, at in told:
        cut = ordered.cuts[story.party, liar.id]
        length = at + 2 if kind == "depth twice" else at
        assert (cut["length"], cut["reason"] or cut["state"]) == (length, REASONS[kind]), (kind, cut)
        check(story, story.lengths(), ordered)
        for mind in story.minds:
            if mind.id != liar.id:
                assert ordered.cuts[story.party, mind.id]["state"] == "open", kind
    ordered.close()


def branch_changer() -> tuple[SignedStory, Any]:
    """Bob forks; Cat names a block of one branch and then, later, one of the other."""
    story = SignedStory("branches", 4, control=1)
    bob, cat = story.minds[1], story.minds[2]
    for _ in range(3):
        story.write(bob)
    other = story.fork(bob)
    for _ in range(3):
        story.write(bob)
        story.write(other)
    for mind, seq in ((bob, 4), (other, 5)):
        named = name(mind, seq)
        story.register(cat, message([named], 1 + max(cat.depth, named.depth)).SerializeToString())
    return story, cat


def test_a_timeframe_that_changes_branch_ends_its_feed(spark: Any, tmp_path: Path) -> None:
    story, cat = branch_changer()
    held = story.lengths()
    ordered = Ordered(spark, lake_of(tmp_path / "lake", [(story, story.rows(held))]))
    cut = ordered.cuts[story.party, cat.id]
    assert (cut["length"], cut["state"], cut["reason"]) == (1, "ended", "timeframe-branch")
    assert expected_end(story, held, cat) == (1, "timeframe-branch", None)
    ordered.close()


def test_a_branch_changed_across_commits_is_found(spark: Any, tmp_path: Path) -> None:
    """Both what was said, and that the feed forks, is known from different commits."""
    story, cat = branch_changer()
    held = story.lengths()
    before = {place: (0 if place[1] else length) for place, length in held.items()}
    before[cat.id, 0] = 1
    first = lake_of(tmp_path / "lake", [(story, story.rows(before))])
    ordered = Ordered(spark, first)
    assert ordered.cuts[story.party, cat.id]["length"] == 1
    second = lake_of(tmp_path / "lake", [(story, story.rows(held, start=before))])
    again = Ordered(spark, second, previous=ordered.tables.cuts)
    assert again.cuts[story.party, cat.id]["reason"] == "timeframe-branch"
    again.close()
    ordered.close()


@pytest.mark.parametrize("here", [True, False], ids=["gathered", "distributed"])
def test_commit_by_commit_equals_all_at_once(spark: Any, tmp_path: Path, here: bool) -> None:
    """Random parties that grow in three versions of a lake: each run starts at the cuts of the one before."""
    told = [random_story(1000 + seed) for seed in range(60 if here else 20)]
    chance = random.Random("growth")
    lake = tmp_path / "lake"
    at: list[dict[Any, int]] = [dict.fromkeys(held, 0) for _, held in told]
    previous, opened = None, []
    for step in range(3):
        part = []
        for number, (story, held) in enumerate(told):
            upto = {place: chance.randrange(at[number][place], held[place] + 1) for place in held}
            if step == 2:
                upto = dict(held)
            upto[story.founder.id, 0] = held[story.founder.id, 0]
            for mind in story.minds:
                if mind.branch:  # what both branches have comes with the first
                    fork = story._fork_at(mind)
                    upto[mind.id, 0] = max(upto[mind.id, 0], min(fork, held[mind.id, 0]))
                    upto[mind.id, 1] = upto[mind.id, 1] if upto[mind.id, 0] > fork else min(fork, upto[mind.id, 1])
            part.append((story, story.rows(upto, start=at[number])))
            at[number] = upto
        ordered = Ordered(spark, lake_of(lake, part), previous=previous, here=here)
        opened.append(ordered)
        for (story, _), upto in zip(told, at, strict=True):
            check(story, upto, ordered)
        previous = frame_of(spark, ordered.tables.cuts.toArrow())
    assert opened[-1].tables.plan.bases, "nothing was taken from the commit before"
    for ordered in opened:
        ordered.close()


def test_what_follows_a_bad_block_is_reached_on_no_branch(spark: Any, tmp_path: Path) -> None:
    """Bob lies at 1 and forks at 3; who names a block of either branch waits for it."""
    story = SignedStory("below the fork", 5, control=1)
    bob, cat, dan = story.minds[1:4]
    story.write(bob)
    story.register(bob, LIES["depth too great"](story, bob, random.Random(0)))
    story.write(bob)
    other = story.fork(bob)
    for mind, reader in ((bob, cat), (other, dan)):
        for _ in range(2):
            story.write(mind)
        named = name(mind, 4)
        story.register(reader, message([named], 1 + named.depth).SerializeToString())
    held = story.lengths()
    ordered = Ordered(spark, lake_of(tmp_path / "lake", [(story, story.rows(held))]))
    for reader in (cat, dan):
        cut = ordered.cuts[story.party, reader.id]
        assert (cut["length"], cut["state"], cut["waits_feed"], cut["waits_seq"]) == (0, "waiting", bob.id, 4)
    check(story, held, ordered)
    ordered.close()
