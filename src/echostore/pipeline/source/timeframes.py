"""The offset of a stream is a timeframe: per feed, how many blocks were taken, with the link of the last one.

    {"<party>": {"<feed>": "120:9f86d081884c7d65"}}           hex keys; two branches: "120:9f86...,7:60303ae2..."

Spark keeps offsets as JSON in the checkpoint. A timeframe says nothing about files, so a stream goes on over a lake that
was compacted, and over a home where the lake was, as long as the blocks are there.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from echostore.kernel.errors import Corrupt, Refused
from echostore.pipeline.lake.strands import Tip

FEEDS_MAX = 100_000
"""Feeds in one offset, which has some 110 bytes for each and is written with every batch."""

FeedPlace = tuple[bytes, bytes]
Timeframe = Mapping[FeedPlace, tuple[Tip, ...]]

_TIP = re.compile(r"(\d{1,15}):([0-9a-f]{2,64})")


def to_offset(timeframe: Timeframe) -> dict[str, dict[str, str]]:
    if len(timeframe) > FEEDS_MAX:
        raise Refused(
            f"A stream over {len(timeframe)} feeds would write an offset of more than {FEEDS_MAX} feeds with each batch.",
            next_step="Stream fewer parties with the option `party`, several streams side by side, or run in batch.",
        )
    offset: dict[str, dict[str, str]] = {}
    for (party, feed), tips in sorted(timeframe.items()):
        if tips:
            offset.setdefault(party.hex(), {})[feed.hex()] = ",".join(f"{tip.length}:{tip.link.hex()}" for tip in tips)
    return offset


def from_offset(offset: Mapping[str, Any]) -> dict[FeedPlace, tuple[Tip, ...]]:
    """The timeframe of an offset; Corrupt when it is not one, which takes a damaged checkpoint."""
    found: dict[FeedPlace, tuple[Tip, ...]] = {}
    try:
        for party, feeds in offset.items():
            for feed, tips in feeds.items():
                found[bytes.fromhex(party), bytes.fromhex(feed)] = tuple(_tips(tips))
    except (ValueError, AttributeError, TypeError) as error:
        raise Corrupt(
            f"The checkpoint of the stream holds an offset that is no timeframe: {error}.",
            next_step="Restore the checkpoint, or begin with a new one.",
        ) from None
    return found


def _tips(text: str) -> Iterable[Tip]:
    for part in text.split(","):
        found = _TIP.fullmatch(part)
        if found is None:
            raise ValueError(f"{part[:80]!r} is no length with a link")
        yield Tip(int(found[1]), bytes.fromhex(found[2]))
