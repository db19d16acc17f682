"""Specs, values, patches and operations of thin clients as bytes: canonical, bounded, and exact when patched."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echostore.kernel.coherence.messages import IndexValue, Patch, Spec
from echostore.kernel.ids import ARC_BIT, FeedId, ItemId, PartyKey, item_local
from echostore.kernel.items.operations import CUSTOM, ItemOperation
from echostore.kernel.models.property_set import Set
from echostore.kernel.query.fields import parse_field
from echostore.kernel.query.filters import And, Compare, Not, Op, Or
from echostore.kernel.query.spec import Order, QuerySpec, Reduce, Reducer, Stage
from echostore.wire.generated import index_pb2 as pb
from echostore.wire.index_spec import (
    IndexCodec,
    IndexItem,
    IndexQuery,
    MalformedIndex,
    TickCodec,
    index_items,
    index_query,
    index_seal,
    index_spec,
    index_value,
    patched,
    revocations_value,
    revoked_names,
)
from echostore.wire.leaf_operations import (
    BEFORE_CHARACTERS_MAX,
    ListEdit,
    TextEdit,
    arc_item,
    edit_delta,
    operation_delta,
    read_delta,
)

PARTY = PartyKey(b"p" * 32)
FEED = FeedId(b"feedfeed")
DONE = Compare(parse_field("done"), Op.EQ, False)


def query(**more: Any) -> QuerySpec:
    return QuerySpec((Stage(filter=And((Compare(parse_field("@type"), Op.EQ, "task"), DONE))),), **more)


def item(number: int, **values: Any) -> IndexItem:
    return IndexItem(ItemId(b"creator-" + number.to_bytes(8, "big")), "task", "property-set", values)


def test_a_spec_has_one_form_and_comes_back() -> None:
    one = IndexQuery(PARTY, query(order=(Order(parse_field("due")),), limit=10))
    spec = index_spec(one)
    assert index_spec(index_query(spec)) == spec
    other = QuerySpec(
        (Stage(filter=And((DONE, Compare(parse_field("@type"), Op.EQ, "task"), DONE))),), one.query.order, 10
    )  # type: ignore[union-attr]
    assert index_spec(IndexQuery(PARTY, other)) == spec, "the same question in other words"
    whole = IndexQuery(PARTY, item=ItemId(b"i" * 16), sealed=True)
    assert index_query(index_spec(whole)) == whole


@pytest.mark.parametrize(
    "asked",
    [
        IndexQuery(PARTY),
        IndexQuery(PARTY, query(), ItemId(b"i" * 16)),
        IndexQuery(PartyKey(b"p"), query()),
        IndexQuery(PARTY, item=ItemId(b"i")),
        IndexQuery(PARTY, query(limit=10_001)),
        IndexQuery(PARTY, query(reduce=Reduce(Reducer.COUNT))),
        IndexQuery(PARTY, query(select=(parse_field("done"),)), sealed=True),
        IndexQuery(PARTY, QuerySpec((Stage(filter=Compare(parse_field("t"), Op.EQ, "x" * 17_000)),))),
    ],
)
def test_what_no_root_answers_is_no_spec(asked: IndexQuery) -> None:
    with pytest.raises(MalformedIndex):
        index_spec(asked)


def test_a_filter_nested_too_deep_is_no_spec() -> None:
    nested: Any = DONE
    for level in range(9):
        nested = And(
            (Or((nested, Compare(parse_field(f"a{level}"), Op.EQ, 1))), Compare(parse_field(f"b{level}"), Op.EQ, 1))
        )
    with pytest.raises(MalformedIndex, match="deep"):
        index_spec(IndexQuery(PARTY, QuerySpec((Stage(filter=Not(nested)),))))


def test_bytes_that_are_not_canonical_are_refused() -> None:
    spec = index_spec(IndexQuery(PARTY, query(limit=5)))
    message = pb.IndexSpec.FromString(spec)
    message.version = 2
    with pytest.raises(MalformedIndex, match="version"):
        index_query(Spec(message.SerializeToString()))
    for bent in (spec + b"\x18\x00", spec + b"\xfa\x01\x00", spec[:-1], b"", spec + spec):
        with pytest.raises(MalformedIndex):
            index_query(Spec(bent))


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_being_refused(data: bytes) -> None:
    spec = index_spec(IndexQuery(PARTY, query()))
    value = index_value([item(1, a=1), item(2)])
    for read in (
        lambda: index_query(Spec(data)),
        lambda: index_query(Spec(spec + data)),
        lambda: index_items(IndexValue(data)),
        lambda: patched(value, Patch(data)),
        lambda: read_delta(data),
        lambda: revoked_names(IndexValue(data)),
    ):
        try:
            read()  # type: ignore[no-untyped-call]
        except MalformedIndex:
            continue


ITEMS = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from(["", "a", "some longer text"]), st.booleans()),
    max_size=12,
    unique_by=lambda each: each[0],
)


def value_of(rows: list[tuple[int, str, bool]], seal: bytes = b"") -> IndexValue:
    return index_value([item(number, title=title, done=done) for number, title, done in rows], seal)


@given(ITEMS, ITEMS, st.booleans())
@example([(1, "a", False)], [(1, "a", True)], False)
@example([(1, "", False), (2, "", False)], [(2, "", False), (1, "", False)], False)
def test_a_patch_takes_one_value_to_the_other_byte_for_byte(
    old: list[tuple[int, str, bool]], new: list[tuple[int, str, bool]], sealed: bool
) -> None:
    before, after = value_of(old), value_of(new, b"s" * 64 if sealed else b"")
    patch = IndexCodec().diff(before, after)
    if patch is not None:
        assert len(patch) <= len(after)
        assert IndexCodec().patch(before, patch) == after


def test_one_change_in_a_long_answer_is_a_short_patch() -> None:
    rows = [(number, "some longer text", False) for number in range(12)]
    changed = [*rows[:6], (6, "x", True), *rows[7:]]
    patch = IndexCodec().diff(value_of(rows), value_of(changed))
    assert patch is not None
    assert len(patch) < 60
    moved = [rows[11], *rows[:11]]
    swapped = IndexCodec().diff(value_of(rows), value_of(moved))
    assert swapped is not None
    assert patched(value_of(rows), swapped) == value_of(moved)


def test_one_small_item_is_patched_in_no_more_bytes_than_its_value() -> None:
    before, after = value_of([(1, "", False)]), value_of([(1, "", True)])
    assert IndexCodec().diff(before, after) is not None
    assert IndexCodec().diff(IndexValue(b""), after) is not None


def test_a_patch_that_does_not_fit_is_refused() -> None:
    before = value_of([(1, "", False)])
    stranger = item(9).item
    twice = pb.IndexPatch(upserts=[pb.IndexItem(item=stranger, model="m"), pb.IndexItem(item=stranger, model="m")])
    for patch in (
        pb.IndexPatch(removed=stranger),
        pb.IndexPatch(removed=b"short"),
        pb.IndexPatch(order=stranger),
        pb.IndexPatch(places=[0]),
        pb.IndexPatch(upserts=[pb.IndexItem(item=stranger, model="m")], places=[7]),
        pb.IndexPatch(seal=b"x"),
        twice,
    ):
        assert IndexCodec().patch(before, Patch(patch.SerializeToString())) is None


def test_what_is_worked_out_once_serves_until_the_next_tick() -> None:
    codec, plain = TickCodec(), IndexCodec()
    before, after = value_of([(1, "", False)]), value_of([(1, "", True)])
    patch = codec.diff(before, after)
    assert codec.diff(before, after) is patch
    assert (patch, codec.token(after)) == (plain.diff(before, after), plain.token(after))
    assert codec.token(after) is codec.token(after)
    codec.forget()
    assert codec.diff(before, after) == patch
    assert codec.diff(before, after) is not patch


def test_values_of_another_kind_are_told_whole() -> None:
    items = value_of([(1, "", False)])
    services = IndexValue(b"00 1.2 6162 63\n01 2 61 62")
    revoked = revocations_value([b"b" * 16, b"a" * 48, b"b" * 16])
    assert revoked_names(revoked) == {b"a" * 48, b"b" * 16}
    codec = IndexCodec()
    for old, new in ((items, services), (services, items), (items, revoked), (revoked, items)):
        assert codec.diff(old, new) is None


def test_a_value_names_no_item_twice_and_says_what_its_hashes_say() -> None:
    one = item(1, a=1)
    with pytest.raises(MalformedIndex):
        index_items(index_value([one, one]))
    message = pb.IndexValue.FromString(index_value([IndexItem(one.item, "t", "m", {}, record=b"record")], b"s" * 64))
    assert index_seal(IndexValue(message.SerializeToString())) == b"s" * 64
    message.items[0].record = b"another"
    with pytest.raises(MalformedIndex, match="hash"):
        index_items(IndexValue(message.SerializeToString()))


def test_what_a_leaf_does_comes_back_and_the_rest_is_refused() -> None:
    for edit in (TextEdit(3, "ab", "c", "before"), ListEdit(2, (1, None), ("x", {"a": [1]}))):
        assert read_delta(edit_delta(edit)) == edit
    assert isinstance(read_delta(edit_delta(TextEdit(0, before="x" * 100))), TextEdit)
    made = arc_item(FEED, 5 << 24, 7)
    assert (made[:8], item_local(made)) == (FEED, ARC_BIT | (5 << 24) + 7)
    change = operation_delta(FEED, ItemOperation(made, "property-set", (Set(("a",), 1),)))
    assert read_delta(change).WhichOneof("kind") == "property_set"  # type: ignore[union-attr]
    for bad in (
        operation_delta(FEED, ItemOperation(made, CUSTOM, b"x")),
        pb.LeafOperation().SerializeToString(),
        pb.LeafOperation(text=pb.TextEdit(before="x" * (BEFORE_CHARACTERS_MAX + 1))).SerializeToString(),
        pb.LeafOperation(list=pb.ListEdit(inserted=[{}])).SerializeToString(),  # type: ignore[list-item]
        b"\xff" * 10,
        b"x" * (2 << 20),
    ):
        with pytest.raises(MalformedIndex):
            read_delta(bad)
