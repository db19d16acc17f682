"""The identifiers of echostore as distinct types, and their text forms.

Everything that names something is bytes on the wire and in memory: bytes hash and compare at C speed, and the hot
paths compare millions of them. `NewType` keeps them apart for mypy at no cost at run time.

    PartyKey, FeedKey, DeviceKey, IdentityKey   32-byte Ed25519 public keys
    FeedId      first 8 bytes of a feed key, used inside one party (a colliding admission is void)
    Link        32-byte hash of a block, chained over its feed
    ItemId      16 bytes: creator's feed id ++ 64-bit local number, big-endian
    Cid         binary CIDv1 (36 bytes: version, codec, sha2-256, 32, digest)

An item's local number is `seq << 16 | position` of the operation that created it. Numbers with the top bit set are
the range from which arcs are granted to thin clients.
"""

from typing import NamedTuple, NewType

PartyKey = NewType("PartyKey", bytes)
FeedKey = NewType("FeedKey", bytes)
DeviceKey = NewType("DeviceKey", bytes)
IdentityKey = NewType("IdentityKey", bytes)
FeedId = NewType("FeedId", bytes)
Link = NewType("Link", bytes)
ItemId = NewType("ItemId", bytes)
Cid = NewType("Cid", bytes)

KEY_BYTES = 32
FEED_ID_BYTES = 8
LINK_BYTES = 32
LINK_PREFIX_BYTES = 16
"""A dependency names 128 bits of the link: enough that nobody finds a second block with the same prefix."""
ITEM_ID_BYTES = 16
CAPABILITY_ID_BYTES = 16
POSITION_BITS = 16
ARC_BIT = 1 << 63

NO_LINK = Link(bytes(LINK_BYTES))
"""What the first block of a feed links to."""


SYSTEM_TYPE = "system"
"""The type of a party's system item."""


class Stamp(NamedTuple):
    """The place of one operation in the canonical order; compares as that order.

    Feed ids stand for feed keys here: they are their first bytes and differ within a party, so both sort alike.
    """

    depth: int
    feed: FeedId
    seq: int
    position: int


class BlockRef(NamedTuple):
    """A block named by its place and its content: a fork has two of them at one seq."""

    feed: FeedId
    seq: int
    link_prefix: bytes


def feed_id(key: FeedKey) -> FeedId:
    return FeedId(key[:FEED_ID_BYTES])


def item_id(creator: FeedId, local: int) -> ItemId:
    return ItemId(creator + local.to_bytes(8, "big"))


def created_item_id(creator: FeedId, seq: int, position: int) -> ItemId:
    """The id of the item that the operation at (seq, position) of `creator` creates."""
    return ItemId(creator + (seq << POSITION_BITS | position).to_bytes(8, "big"))


def item_creator(item: ItemId) -> FeedId:
    return FeedId(item[:FEED_ID_BYTES])


def item_local(item: ItemId) -> int:
    return int.from_bytes(item[FEED_ID_BYTES:], "big")


def is_system_item(item: ItemId, type: str) -> bool:
    """Whether this is the root of a party's item DAG: made as such by the first operation of a data feed."""
    return type == SYSTEM_TYPE and not any(item[FEED_ID_BYTES:])


# The text form of an item id puts a mixed local number first, so that short prefixes tell items of one feed apart.
# The mixing is the 64-bit finaliser of splitmix64, which is a bijection.

_MASK = (1 << 64) - 1
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNMIX_1, _UNMIX_2 = pow(_MIX_1, -1, 1 << 64), pow(_MIX_2, -1, 1 << 64)


def item_text(item: ItemId) -> str:
    """32 hex digits; any unique prefix of at least 4 names the item to a person."""
    creator = int.from_bytes(item[:8], "big")
    mixed = _mix(int.from_bytes(item[8:], "big") ^ creator)
    return f"{mixed:016x}{creator:016x}"


def item_from_text(text: str) -> ItemId:
    """The id that `item_text` rendered; ValueError when the text is not 32 hex digits."""
    raw = bytes.fromhex(text)
    if len(raw) != ITEM_ID_BYTES or len(text) != 2 * ITEM_ID_BYTES:  # fromhex passes over spaces
        raise ValueError(f"an item id has 32 hex digits, got {len(text)}")
    creator = int.from_bytes(raw[8:], "big")
    local = _unmix(int.from_bytes(raw[:8], "big")) ^ creator
    return ItemId(raw[8:] + local.to_bytes(8, "big"))


def _mix(number: int) -> int:
    number = (number ^ number >> 30) * _MIX_1 & _MASK
    number = (number ^ number >> 27) * _MIX_2 & _MASK
    return number ^ number >> 31


def _unmix(number: int) -> int:
    number = number ^ number >> 31 ^ number >> 62
    number = number * _UNMIX_2 & _MASK
    number = number ^ number >> 27 ^ number >> 54
    number = number * _UNMIX_1 & _MASK
    return number ^ number >> 30 ^ number >> 60
