"""Members on the local network: what a peer announces, and whom it dials for what it hears. No sockets, no clock.

    announced   a random name, a port, a salt, and for each party HMAC(party key, salt and hour), 12 bytes

Who knows a party's key recognises its tag. Nobody else learns a party, a device, an identity or a name. Name and salt are
new every hour, so that announcements of different hours can't be told to be of one peer, and tags of random bytes fill up
the last row, so that the number of parties is hidden a little. An announcement proves nothing: the connection does. Who
copies one gets dialled, and then no further than any stranger.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from echostore.kernel.ids import PartyKey

HOUR_S: Final = 3600
TAG_BYTES: Final = 12
"""Short, so that many fit: a false match costs one dial."""
SALT_BYTES: Final = 16
ROW_TAGS: Final = 16
"""Tags in one text record, which holds at most 255 bytes."""
PARTIES_MAX: Final = 64
"""Parties that are announced: more would not fit a packet. Two members mostly share one of the first."""
ANNOUNCED_MAX: Final = 256
"""Announcements of others that are remembered; a flood of them finds no room."""
ADDRESSES_MAX: Final = 2
"""Addresses of one announcement that are dialled."""

_VERSION: Final = b"1"
_TAG: Final = b"echostore/lan/1"


def lan_tag(party: PartyKey, salt: bytes, hour: int) -> bytes:
    """What stands for a party in one announcement, in one hour."""
    return hmac.new(party, _TAG + salt + hour.to_bytes(8, "big"), hashlib.sha256).digest()[:TAG_BYTES]


def text_records(parties: Iterable[PartyKey], salt: bytes, hour: int) -> dict[bytes, bytes]:
    """The text records of an announcement."""
    tags = [lan_tag(party, salt, hour) for party in list(parties)[:PARTIES_MAX]]
    tags += [secrets.token_bytes(TAG_BYTES) for _ in range(-len(tags) % ROW_TAGS)]
    tags.sort()  # or the order would tell the parties' ages
    rows = [b"".join(tags[at : at + ROW_TAGS]) for at in range(0, len(tags), ROW_TAGS)]
    return {b"v": _VERSION, b"s": salt, **{b"t%d" % number: row for number, row in enumerate(rows)}}


def shares_party(records: Mapping[bytes, bytes | None], parties: Iterable[PartyKey], hour: int) -> bool:
    """Whether an announcement has the tag of one of these parties. Clocks may differ by an hour."""
    salt = records.get(b"s")
    if records.get(b"v") != _VERSION or salt is None or len(salt) != SALT_BYTES:
        return False
    heard: set[bytes] = set()
    for number in range(PARTIES_MAX // ROW_TAGS):
        row = records.get(b"t%d" % number) or b""
        heard |= {row[at : at + TAG_BYTES] for at in range(0, min(len(row), ROW_TAGS * TAG_BYTES), TAG_BYTES)}
    hours = (hour, hour - 1, hour + 1)
    return any(lan_tag(party, salt, each) in heard for party in parties for each in hours)


@dataclass(frozen=True, slots=True)
class Heard:
    """An announcement of another peer."""

    addresses: tuple[tuple[str, int], ...]
    records: Mapping[bytes, bytes | None]


@dataclass(slots=True)
class Neighbours:
    """The announcements that are heard now, and the addresses to dial for them."""

    heard: dict[str, Heard] = field(default_factory=dict)
    turned_away: int = 0
    """Announcements for which there was no room."""

    def appeared(self, name: str, announcement: Heard) -> None:
        if name not in self.heard and len(self.heard) >= ANNOUNCED_MAX:
            self.turned_away += 1
            return
        self.heard[name] = announcement

    def vanished(self, name: str) -> None:
        self.heard.pop(name, None)

    def addresses(self) -> list[tuple[str, int]]:
        """Of all that announce themselves, whoever they are."""
        return [address for each in self.heard.values() for address in each.addresses[:ADDRESSES_MAX]]

    def to_dial(self, parties: Iterable[PartyKey], hour: int) -> set[tuple[str, int]]:
        """Addresses of those that share a party. What was dialled before and is not among them is to be let go."""
        known = list(parties)
        return {
            address
            for each in self.heard.values()
            if shares_party(each.records, known, hour)
            for address in each.addresses[:ADDRESSES_MAX]
        }
