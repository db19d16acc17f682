"""Verdicts: why a feed stops where it stops, and what of it counts. The last word of `order` on each feed.

The rule is the orderer's (kernel/order.py, `_check`): of the block at the cut, the first dependency in the order named
that is missing or false decides; the depth of the block itself comes last. Dependencies are named in ascending order of
feed, so that is the order of their rows.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from echostore.kernel.ids import FEED_ID_BYTES
from echostore.kernel.party.credentials import Role
from echostore.kernel.reasons import Reason
from echostore.pipeline.stages.twigs import BACKWARDS


class Stop(NamedTuple):
    """One dependency of the block at which a twig stops."""

    names: bytes
    named_seq: int
    named_twig: int
    fault: str | None


class Verdict(NamedTuple):
    """Why the block at the cut is not processed: for good, or for want of another block."""

    reason: str | None
    waits: tuple[bytes, int] | None


@dataclass(frozen=True, slots=True)
class Interval:
    start: int
    end: int | None
    role: str | None


def judge(
    stops: Iterable[Stop], faults: bytes, bad: tuple[int, str, bool] | None, cut: int, cuts: Mapping[int, int]
) -> Verdict:
    """The verdict on the block at `cut`. `cuts` holds the twigs that are not processed to their ends."""
    bad_here = bad is not None and bad[0] == cut
    if bad is not None and bad_here and not bad[2]:
        return Verdict(bad[1], None)
    wide = FEED_ID_BYTES + 1
    across = {faults[at : at + FEED_ID_BYTES]: faults[at + FEED_ID_BYTES] for at in range(0, len(faults), wide)}
    for stop in sorted(stops):
        what = across.get(stop.names)
        if what == BACKWARDS or stop.fault == Reason.TIMEFRAME_BACKWARDS:
            return Verdict(Reason.TIMEFRAME_BACKWARDS, None)
        if stop.named_twig == -1 or stop.named_seq >= cuts.get(stop.named_twig, stop.named_seq + 1):
            return Verdict(None, (stop.names, stop.named_seq))
        if stop.fault is not None:
            return Verdict(stop.fault, None)
        if what is not None:
            return Verdict(Reason.TIMEFRAME_BRANCH, None)
    assert bad_here, f"nothing is wrong with block {cut}"
    return Verdict(Reason.LYING_DEPTH, None)


def allowed_last(intervals: Iterable[Interval], length: int, floor: int = 0) -> int | None:
    """The last of `length` processed blocks that counts; the rule of a peer's timeframe. What lies below the floor, in
    the epoch that the party stands on, counts for good."""
    best = floor - 1
    for start, end, role in ((each.start, each.end, each.role) for each in intervals):
        if role is None or role == Role.READER.label or start >= length:
            continue
        last = length if end is None else min(end, length)
        if last > start:
            best = max(best, last - 1)
    return best if best >= 0 else None


def admitted_end(intervals: Iterable[Interval]) -> int | None:
    """Where the admission ends for good; None while it does not."""
    ends = [each.end for each in intervals]
    return None if any(end is None for end in ends) else max((end for end in ends if end is not None), default=0)


@dataclass(frozen=True, slots=True)
class FeedEnd:
    """How far one feed is processed."""

    length: int
    state: str
    verdict: Verdict
    held: int


def end_of(
    twigs: list[dict[str, Any]],
    intervals: list[Interval],
    judged: Callable[[dict[str, Any]], Verdict],
    cuts: Mapping[int, int],
) -> FeedEnd:
    """Where a feed ends: its main twigs in order, the first of them that stops, and forks that control can't know of."""
    main = sorted((twig for twig in twigs if twig["main"]), key=lambda twig: twig["start"])
    held = main[-1]["end"] if main else 0
    stopped = next((twig for twig in main if twig["twig"] in cuts), None)
    length = cuts[stopped["twig"]] if stopped is not None else held
    starts = sorted(twig["start"] for twig in twigs)
    fork = starts[1] if len(starts) > 1 else None
    end = admitted_end(intervals)
    if fork is not None and length >= fork and (end is None or end > fork):
        return FeedEnd(fork, "forked", Verdict(None, None), held)
    if stopped is None:
        return FeedEnd(length, "open", Verdict(None, None), held)
    verdict = judged(stopped)
    return FeedEnd(length, "ended" if verdict.reason is not None else "waiting", verdict, held)
