"""Values: what a user may store, what other peers may send, and one encoding for each."""

import enum
import math
import struct
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.errors import TooLarge, UsageError
from echostore.kernel.ids import Cid, ItemId, PartyKey, Stamp
from echostore.kernel.limits import KEY_CHARACTERS_MAX, PATH_STEPS_MAX, VALUE_BYTES_MAX, VALUE_DEPTH_MAX
from echostore.kernel.models.property_set import ADDED, REMOVED, Add, Change, Entry, EntryKey, Remove, Restore, Set
from echostore.kernel.values import BlobRef, Reference, Value, check_path, check_value, from_timestamp_us, timestamp_us
from echostore.wire.generated import message_pb2, value_pb2
from echostore.wire.models import property_set
from echostore.wire.values import MalformedValue, decode_value, encode_value, value_bytes, value_from_bytes

ITEM, PARTY = ItemId(b"i" * 16), PartyKey(b"p" * 32)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
MOMENTS = st.datetimes(timezones=st.just(UTC))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=True),
    TEXTS,
    st.binary(max_size=8),
    MOMENTS,
    st.builds(Reference, st.just(ITEM), st.sampled_from([None, PARTY])),
    st.builds(
        BlobRef,
        st.lists(st.binary(min_size=1, max_size=64).map(Cid), max_size=2).map(tuple),
        st.integers(0, (1 << 64) - 1),
        TEXTS,
        TEXTS,
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS.filter(bool), inner, max_size=4),
    max_leaves=12,
)


def same(one: Value, two: Value) -> bool:
    """Equal to the last bit: 1 is not 1.0 or True, -0.0 is not 0.0, and one NaN is like another."""
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(two)) or struct.pack("d", one) == struct.pack("d", two)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return bool(one == two)


@given(VALUES)
def test_a_value_comes_back_as_it_was_and_its_bytes_are_canonical(value: Value) -> None:
    plain = check_value(value)
    assert same(plain, value)
    data = value_bytes(plain)
    decoded = value_from_bytes(data)
    assert same(decoded, value)
    assert value_bytes(decoded) == data


@given(st.dictionaries(TEXTS.filter(bool), st.integers(0, 9), max_size=6))
def test_the_bytes_of_a_map_do_not_depend_on_the_order_of_its_keys(value: dict[str, int]) -> None:
    assert value_bytes(dict(reversed(value.items()))) == value_bytes(value)
    keys = list(encode_value(value).map.keys)
    assert [key.encode() for key in keys] == sorted(key.encode() for key in keys)


@given(VALUES, VALUES)
def test_bytes_are_equal_exactly_when_values_are(one: Value, two: Value) -> None:
    assert (value_bytes(one) == value_bytes(two)) == same(one, two)


def test_there_is_one_nan() -> None:
    other = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000123))[0]
    assert value_bytes(other) == value_bytes(math.nan)
    sent = value_pb2.Value(number=other).SerializeToString()
    assert value_bytes(value_from_bytes(sent)) == value_bytes(math.nan)


# what a user may store


class Color(enum.StrEnum):
    RED = "red"


class Old(str, enum.Enum):  # noqa: UP042  # the older way to write one, whose str() is another text
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Ratio(float):
    pass


class Moment(datetime):
    pass


@pytest.mark.parametrize(
    ("given_value", "stored"),
    [
        (Color.RED, "red"),
        (Old.RED, "red"),
        (Level.HIGH, 3),
        (Ratio(0.5), 0.5),
        ((1, (2,)), [1, [2]]),
        (bytearray(b"x"), b"x"),
        (memoryview(b"x"), b"x"),
        ({"a": (1,)}, {"a": [1]}),
        ([True], [True]),
        (datetime(2024, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), datetime(2024, 1, 1, tzinfo=UTC)),
        (Moment(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=UTC)),
    ],
)
def test_near_values_become_plain_ones(given_value: Any, stored: Value) -> None:
    plain = check_value(given_value)
    assert same(plain, stored)
    assert same(value_from_bytes(value_bytes(plain)), stored)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (1 << 63, TooLarge),
        (-(1 << 63) - 1, TooLarge),
        (datetime(2024, 1, 1), UsageError),  # noqa: DTZ001  # that is the point
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), TooLarge),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))), TooLarge),
        ("\ud800", UsageError),
        ({"\ud800": 1}, UsageError),
        ({1: 2}, UsageError),
        ({"": 2}, TooLarge),
        ({"x" * (KEY_CHARACTERS_MAX + 1): 2}, TooLarge),
        (object(), UsageError),
        ({1, 2}, UsageError),
        (1j, UsageError),
        (Reference(ItemId(b"short")), UsageError),
        (Reference(ITEM, PartyKey(b"short")), UsageError),
        (BlobRef((Cid(b""),), 1), UsageError),
        (BlobRef((Cid(b"x" * 65),), 1), UsageError),
        (BlobRef((), -1), UsageError),
        (BlobRef((), 1 << 64), UsageError),
        (BlobRef((), 1, name="\ud800"), UsageError),
    ],
)
def test_what_can_not_be_stored_is_refused_at_its_place(value: Any, error: type[Exception]) -> None:
    for nested in (value, [1, value], {"k": [value]}):
        with pytest.raises(error, match="shelf"):
            check_value(nested, where="shelf")


def nested(depth: int) -> Value:
    value: Value = 1
    for number in range(depth):
        value = [value] if number % 2 else {"k": value}
    return value


def test_the_deepest_value_passes_through_every_message_and_one_deeper_is_refused() -> None:
    """The decoder of protobuf has a limit of its own, which a value must never reach: its block would end the feed."""
    value = check_value(nested(VALUE_DEPTH_MAX))
    with pytest.raises(TooLarge):
        check_value(nested(VALUE_DEPTH_MAX + 1))
    stamp, past = Stamp(9, ITEM[:8], 5, 0), Stamp(2, ITEM[:8], 1, 0)  # type: ignore[arg-type]  # bytes are feed ids
    key = value_bytes(value)
    seen = Stamp(1, b"o" * 8, 1, 0)  # type: ignore[arg-type]  # as above
    changes: list[Change | Restore] = [
        Set(("a",), value),
        Add(("a",), value, key),
        Remove(("a",), value, key, (seen,)),
        Restore(EntryKey(("a",), ADDED, key, None), None),
        Restore(EntryKey(("a",), REMOVED, key, seen.feed), Entry(past, value, seen)),
    ]
    for change in changes:
        operation = message_pb2.Operation(local=1, metadata=property_set.encode_operation((change,)))
        data = message_pb2.Message(depth=9, operations=[operation]).SerializeToString()
        message = message_pb2.Message.FromString(data)
        assert property_set.decode_operation(message.operations[0].metadata, stamp) == (change,)


def test_paths_are_checked() -> None:
    assert check_path("a") == ("a",)
    assert check_path(["a", "b"]) == ("a", "b")
    for path, error in [
        ((), UsageError),
        (("a",) * (PATH_STEPS_MAX + 1), TooLarge),
        (("a", ""), TooLarge),
        ((1,), UsageError),
        (("\ud800",), UsageError),
    ]:
        with pytest.raises(error):
            check_path(path)  # type: ignore[arg-type]  # that is the point


@given(MOMENTS)
def test_moments_are_kept_to_the_microsecond(moment: datetime) -> None:
    assert from_timestamp_us(timestamp_us(moment)) == moment


# what other peers may send


@pytest.mark.parametrize(
    "message",
    [
        value_pb2.Value(),
        value_pb2.Value(timestamp_us=(1 << 63) - 1),
        value_pb2.Value(timestamp_us=-(1 << 63)),
        value_pb2.Value(reference=value_pb2.Reference(item=b"short")),
        value_pb2.Value(reference=value_pb2.Reference(item=ITEM, party=b"short")),
        value_pb2.Value(blob=value_pb2.BlobReference(cids=[b""])),
        value_pb2.Value(blob=value_pb2.BlobReference(cids=[b"x" * 65])),
        value_pb2.Value(list=value_pb2.ListValue(values=[value_pb2.Value()])),
        value_pb2.Value(map=value_pb2.MapValue(keys=["a"])),
        value_pb2.Value(map=value_pb2.MapValue(keys=["a", "a"], values=[value_pb2.Value(null=True)] * 2)),
        value_pb2.Value(map=value_pb2.MapValue(keys=[""], values=[value_pb2.Value(null=True)])),
        value_pb2.Value(
            map=value_pb2.MapValue(keys=["x" * (KEY_CHARACTERS_MAX + 1)], values=[value_pb2.Value(null=True)])
        ),
        encode_value(nested(VALUE_DEPTH_MAX + 1)),
    ],
)
def test_a_malformed_value_is_refused(message: value_pb2.Value) -> None:
    with pytest.raises(MalformedValue):
        decode_value(message)
    with pytest.raises(MalformedValue):
        value_from_bytes(message.SerializeToString())


@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_malformed(data: bytes) -> None:
    try:
        value = value_from_bytes(data)
    except MalformedValue:
        return
    assert same(value_from_bytes(value_bytes(value)), value)


def test_a_value_over_the_limit_and_a_bomb_of_nesting_are_malformed() -> None:
    with pytest.raises(MalformedValue, match="over the limit"):
        value_from_bytes(value_bytes("x" * VALUE_BYTES_MAX))
    bomb = b""
    for _ in range(20_000):
        inner = b"\x0a" + _varint(len(bomb)) + bomb
        bomb = b"\x42" + _varint(len(inner)) + inner
    with pytest.raises(MalformedValue):
        value_from_bytes(bomb)


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])
