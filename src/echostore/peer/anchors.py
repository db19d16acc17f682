"""Anchors: positions in a party's stream as strings that can be stored for months and opened on any peer.

anchor:<base64url of msgpack [1, party, epoch, data entries, control entries]>    entry = [feed id, seq, link prefix]
"""

import base64
import binascii
from dataclasses import dataclass

import msgspec

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import FEED_ID_BYTES, KEY_BYTES, LINK_PREFIX_BYTES, FeedId, Link, PartyKey
from echostore.kernel.timeframe import Position, Timeframe

_PREFIX = "anchor:"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Anchor:
    """A position: how far the data and the control feeds of a party had come. Links are prefixes."""

    party: PartyKey
    epoch: int
    data: Timeframe
    control: Timeframe

    def __str__(self) -> str:
        content = [_VERSION, self.party, self.epoch, _pack(self.data), _pack(self.control)]
        return _PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(content)).decode().rstrip("=")

    @staticmethod
    def parse(text: "str | Anchor") -> "Anchor":
        """The anchor that a string holds; UsageError when it is none."""
        if isinstance(text, Anchor):
            return text
        try:
            if not text.startswith(_PREFIX):
                raise ValueError("no prefix")
            raw = text[len(_PREFIX) :]
            content = msgspec.msgpack.decode(base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)))
            version, party, epoch, data, control = content
            if version != _VERSION or len(party) != KEY_BYTES or not isinstance(epoch, int):
                raise ValueError("another format")
            return Anchor(PartyKey(party), epoch, _unpack(data), _unpack(control))
        except (ValueError, TypeError, AttributeError, binascii.Error, msgspec.DecodeError) as error:
            raise UsageError(
                f"{str(text)[:40]!r} is not an anchor", next_step="Use what stream.anchor() or receipt.anchor gave."
            ) from error


def _pack(timeframe: Timeframe) -> list[list[object]]:
    return [[feed, at.seq, at.link[:LINK_PREFIX_BYTES]] for feed, at in timeframe.entries.items()]


def _unpack(rows: list[list[object]]) -> Timeframe:
    entries = []
    for feed, seq, prefix in rows:
        if not isinstance(feed, bytes) or not isinstance(seq, int) or not isinstance(prefix, bytes):
            raise TypeError("a malformed entry")
        if len(feed) != FEED_ID_BYTES or seq < 0 or len(prefix) != LINK_PREFIX_BYTES:
            raise ValueError("a malformed entry")
        entries.append((FeedId(feed), Position(seq, Link(prefix))))
    return Timeframe.of(entries)
