"""What the items of an epoch's state wait for, kept between epochs (D6 of `kernel.items.discarding`).

    feeds.db   about["waits/<number>/<snapshot>"]   rows of item, feed, seq, time

Derived and local: nothing that others see depends on it. Who has none (a newcomer, somebody who never made that state) looks
at all items at the next epoch, once. One list is as long as what waits, not as the party.
"""

from collections import defaultdict
from typing import Final

import msgspec

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid, FeedId, ItemId
from echostore.kernel.items.discarding import Waits
from echostore.kernel.models.base import Wait
from echostore.kernel.values import INT_MAX
from echostore.store.feed_store import FeedStore

KEPT_MAX: Final = 4
"""The newest epoch, and a few that the next one may be folded from as well: a rival, the one before."""

VERSION: Final = 1
"""To be raised when the rules of discarding change: older lists are then not believed."""

_PREFIX: Final = "waits/"

_decode = msgspec.msgpack.Decoder(tuple[int, list[tuple[bytes, bytes, int, int]]]).decode


def keep_waits(feeds: FeedStore, number: int, snapshot: Cid, waits: Waits) -> None:
    """Keep a list for the epochs to come; those of the oldest epochs go."""
    name = _name(number, snapshot)
    names = sorted({*feeds.about_names(_PREFIX), name}, reverse=True)
    if name in names[:KEPT_MAX]:
        feeds.set_about({name: _encoded(waits), **dict.fromkeys(names[KEPT_MAX:])})


def kept_waits(feeds: FeedStore, number: int, snapshot: Cid) -> Waits | None:
    """The list of a state; None where there is none that can be read."""
    try:
        data = feeds.about(_name(number, snapshot))
        if data is None:
            return None
        version, rows = _decode(data)
    except (Corrupt, msgspec.DecodeError):
        return None  # all items are looked at instead
    if version != VERSION:
        return None
    found: dict[ItemId, list[Wait]] = defaultdict(list)
    for item, feed, seq, time_ms in rows:
        found[ItemId(item)].append(Wait(FeedId(feed), seq, time_ms))
    return {item: tuple(waits) for item, waits in found.items()}


def _name(number: int, snapshot: Cid) -> str:
    return f"{_PREFIX}{number:010d}/{snapshot.hex()}"


def _encoded(waits: Waits) -> bytes:
    # A time that no clock shows is as good as the last one, and fits.
    rows = [(item, wait.feed, wait.seq, min(wait.time_ms, INT_MAX)) for item, kept in waits.items() for wait in kept]
    return msgspec.msgpack.encode((VERSION, rows))
