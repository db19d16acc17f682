"""The state of a party: who may write what by canonical order, whatever the arrival order; and what is refused alone."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.ids import (
    FeedId,
    IdentityKey,
    ItemId,
    PartyKey,
    Stamp,
    created_item_id,
    item_creator,
    item_from_text,
    item_text,
)
from echostore.kernel.items.operations import CUSTOM, GENESIS, METADATA, PLACEMENT, REFUSED, ItemOperation, WriterRole
from echostore.kernel.items.record import AccessRule, Genesis, ItemRecord
from echostore.kernel.items.state import PartyState
from echostore.kernel.items.tree import EMBED, MOVE
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.property_set import DELETED, SET, Add, Entry, EntryKey, PropertySet, Restore, Set
from echostore.kernel.reasons import Reason
from echostore.wire.items import decode_record, encode_record
from echostore.wire.values import value_bytes, value_from_bytes

PARTY = PartyKey(b"p" * 32)
OWNER, ADMIN, EDITOR, GUEST = (IdentityKey(name * 32) for name in (b"o", b"m", b"e", b"g"))
FEEDS = [FeedId(bytes([65 + number]) * 8) for number in range(4)]
WRITERS = {
    FEEDS[0]: WriterRole(OWNER, "owner"),
    FEEDS[1]: WriterRole(ADMIN, "admin"),
    FEEDS[2]: WriterRole(EDITOR, "editor"),
    FEEDS[3]: WriterRole(GUEST, "editor"),
}
IDENTITIES = {feed: writer.identity for feed, writer in WRITERS.items()}
A, B, C, D = FEEDS
OPEN = AccessRule()
ACCESS = EntryKey(("access",), SET, b"", None)


@dataclass(frozen=True, order=True)
class Message:
    """A message of one feed; sorts in canonical order."""

    depth: int
    feed: FeedId
    seq: int
    operations: tuple[ItemOperation, ...] = field(compare=False)


def blank(**ports: Any) -> PartyState:
    return PartyState(
        PARTY,
        ModelFactory(value_from_bytes),
        load=ports.get("load", lambda item: None),
        identity_of=IDENTITIES.get,
    )


class Receiver:
    """Folds messages as they come, and folds items again when the state asks for it: what the processor does."""

    def __init__(self) -> None:
        self.state = blank()
        self.messages: list[Message] = []
        self.rejects: dict[Stamp, Reason] = {}
        self.missing: dict[Stamp, ItemId] = {}
        """For each reject, which item it lacked, if that was why."""

    def take(self, *messages: Message) -> "Receiver":
        for message in messages:
            self.messages.append(message)
            self._apply(message)
        self.finish()
        return self

    def finish(self) -> None:
        self.state.settle()
        rounds = 0
        while self.state.refold or self.state.found:
            rounds += 1
            assert rounds <= 50, "folding again never ends"
            again = self.state.refold | self._lacking(self.state.found)
            self.state.refold, self.state.found = set(), set()
            self._refold(again)

    def _refold(self, again: set[ItemId]) -> None:
        self.state.forget(frozenset(again))
        for message in self.messages:
            for position, operation in enumerate(message.operations):
                if operation.item in again:
                    stamp = Stamp(message.depth, message.feed, message.seq, position)
                    self.rejects.pop(stamp, None)
                    self.missing.pop(stamp, None)
        for creating in (True, False):
            for message in sorted(self.messages):
                self._apply(message, only=frozenset(again), creating=creating)
        self.state.settle()
        self.state.refold -= again

    def _lacking(self, found: set[ItemId]) -> set[ItemId]:
        """Items that an operation was refused on, for the lack of one of these."""
        return {
            operation.item
            for message in self.messages
            for position, operation in enumerate(message.operations)
            if self.missing.get(Stamp(message.depth, message.feed, message.seq, position)) in found
        }

    def _apply(self, message: Message, **how: Any) -> None:
        self.state.apply(
            depth=message.depth,
            feed=message.feed,
            seq=message.seq,
            time_ms=0,
            operations=message.operations,
            writer=WRITERS[message.feed],
            **how,
        )
        for reject in self.state.rejects:
            assert (reject.feed, reject.seq) == (message.feed, message.seq)
            stamp = Stamp(message.depth, message.feed, message.seq, reject.position)
            self.rejects[stamp] = Reason(reject.reason)
            if reject.reason in (Reason.NO_ITEM, Reason.NO_PARENT):
                self.missing[stamp] = item_from_text(reject.detail)
        self.state.rejects.clear()

    def digest(self) -> tuple[Any, ...]:
        records = self.state.records
        return (
            [encode_record(records[item]).SerializeToString(deterministic=True) for item in sorted(records)],
            list(self.state.tree.moves),
            {item: self.state.home(item) for item in records},
            self.rejects,
        )


def genesis(
    feed: FeedId, seq: int, position: int = 0, *, parent: ItemId | None = None, depth: int = 1
) -> ItemOperation:
    item = created_item_id(feed, seq, position)
    return ItemOperation(item, GENESIS, Genesis(item, "property-set", 1, "note", parent, depth))


def write(item: ItemId, value: Any = 1) -> ItemOperation:
    return ItemOperation(item, "property-set", (Set(("t",), value),))


def restrict(item: ItemId, *roles: str, members: tuple[bytes, ...] = ()) -> ItemOperation:
    value = {"roles": list(roles), "members": list(members)} if roles or members else DELETED
    return ItemOperation(item, METADATA, (Set(("access",), value),))


def message(depth: int, feed: FeedId, *operations: ItemOperation, seq: int | None = None) -> Message:
    return Message(depth, feed, depth if seq is None else seq, operations)


ITEM = created_item_id(C, 0, 0)
BORN = message(1, C, genesis(C, 0), seq=0)


# any arrival order


def random_messages(chance: random.Random, count: int) -> list[Message]:
    """Four feeds, each with rising depths, that write a few items without naming one another as causes."""
    items = [created_item_id(feed, 0, position) for feed in (A, C) for position in range(2)]
    items.append(created_item_id(D, 9, 9))  # never created
    seqs = dict.fromkeys(FEEDS, 0)
    depths = dict.fromkeys(FEEDS, 0)
    messages = []
    for feed in (A, C):
        parent = chance.choice([None, *items])
        depths[feed] = chance.randrange(1, 5)
        created = (
            genesis(feed, 0, 0, parent=parent, depth=depths[feed]),
            genesis(feed, 0, 1, parent=created_item_id(feed, 0, 0), depth=depths[feed]),
        )
        messages.append(Message(depths[feed], feed, 0, created))
        seqs[feed] = 1
    for _ in range(count):
        feed = chance.choice(FEEDS)
        depths[feed] += chance.randrange(1, 4)
        operations = tuple(
            _random_operation(chance, chance.choice(items), items) for _ in range(chance.randrange(1, 3))
        )
        messages.append(Message(depths[feed], feed, seqs[feed], operations))
        seqs[feed] += 1
    return messages


def _random_operation(chance: random.Random, item: ItemId, items: list[ItemId]) -> ItemOperation:
    kind = chance.randrange(10)
    if kind < 4:
        return write(item, chance.randrange(100))
    if kind < 7:
        rules: list[ItemOperation] = [
            restrict(item, "owner"),
            restrict(item, "admin"),
            restrict(item, "admin", "editor"),
            restrict(item, members=(EDITOR,)),
            restrict(item),
        ]
        return chance.choice(rules)
    if kind < 8:
        return ItemOperation(item, PLACEMENT, (chance.choice([MOVE, EMBED]), chance.choice([None, *items])))
    if kind < 9:
        return ItemOperation(item, METADATA, (Set(("display_name",), chance.choice(["x", "y"])),))
    return ItemOperation(item, CUSTOM, b"bytes")


def expected_rejects(messages: list[Message]) -> dict[Stamp, Reason]:
    """Who may write, worked out in canonical order from the rules themselves."""
    stamped = [
        (Stamp(one.depth, one.feed, one.seq, position), operation)
        for one in sorted(messages)
        for position, operation in enumerate(one.operations)
    ]
    rejects: dict[Stamp, Reason] = {}
    alive: dict[ItemId, list[AccessRule]] = {}
    created = [(stamp, operation.body) for stamp, operation in stamped if operation.field == GENESIS]
    while any(body.item not in alive and (body.parent is None or body.parent in alive) for _, body in created):
        for _, body in created:
            if body.parent is None or body.parent in alive:
                alive.setdefault(body.item, [])
    for stamp, operation in stamped:
        item, kind, body = operation
        writer = WRITERS[stamp.feed]
        if kind == GENESIS:
            if item not in alive:
                rejects[stamp] = Reason.NO_PARENT
        elif item not in alive:
            rejects[stamp] = Reason.NO_ITEM
        elif not _may_write(alive[item], writer):
            rejects[stamp] = Reason.DENIED
        elif kind == CUSTOM:
            rejects[stamp] = Reason.WRONG_MODEL
        elif kind == PLACEMENT and body[1] is not None and body[1] not in alive:
            rejects[stamp] = Reason.NO_PARENT
        elif kind == METADATA and body[0].path == ("access",):
            if writer.role not in ("owner", "admin") and writer.identity != IDENTITIES[item_creator(item)]:
                rejects[stamp] = Reason.DENIED
            else:
                value = {} if body[0].value is DELETED else body[0].value
                rule = AccessRule(frozenset(value.get("roles", ())), frozenset(value.get("members", ())))
                alive[item].append(rule)
    return rejects


def _may_write(rules: list[AccessRule], writer: WriterRole) -> bool:
    if not rules or writer.role == "owner" or rules[-1] == OPEN:
        return True
    return writer.role in rules[-1].roles or writer.identity in rules[-1].members


@given(st.integers(0, 2**32), st.integers(0, 25))
def test_rules_rule_by_canonical_order_whatever_the_arrival_order(seed: int, count: int) -> None:
    chance = random.Random(seed)
    messages = random_messages(chance, count)
    expected = expected_rejects(messages)
    reference = Receiver().take(*sorted(messages))
    assert reference.rejects == expected
    for _ in range(2):
        queues = {feed: [one for one in messages if one.feed == feed] for feed in FEEDS}
        receiver = Receiver()
        while any(queues.values()):
            feed = chance.choice([feed for feed in FEEDS if queues[feed]])
            burst = chance.randrange(1, 4)
            receiver.take(*queues[feed][:burst])
            del queues[feed][:burst]
        assert receiver.digest() == reference.digest()


# rules that come late


def test_a_rule_that_comes_late_takes_out_what_it_forbids() -> None:
    receiver = Receiver().take(BORN, message(5, D, write(ITEM, "kept out")))
    assert receiver.state.records[ITEM].model.value() == {"t": "kept out"}
    receiver.take(message(3, B, restrict(ITEM, "admin")))
    assert receiver.state.records[ITEM].model.value() == {}
    assert receiver.rejects == {Stamp(5, D, 5, 0): Reason.DENIED}


def test_a_rule_that_comes_late_lets_in_what_an_earlier_one_had_forbidden() -> None:
    receiver = Receiver().take(BORN, message(3, B, restrict(ITEM, "admin")), message(9, D, write(ITEM, "late")))
    assert receiver.rejects == {Stamp(9, D, 9, 0): Reason.DENIED}
    receiver.take(message(6, B, restrict(ITEM)))
    assert not receiver.rejects
    assert receiver.state.records[ITEM].model.value() == {"t": "late"}


def test_a_rule_forbids_nothing_that_sorts_below_it() -> None:
    receiver = Receiver().take(BORN, message(5, B, restrict(ITEM, "admin")), message(4, D, write(ITEM, "before")))
    assert not receiver.rejects
    assert not receiver.state.refold
    assert receiver.state.records[ITEM].model.value() == {"t": "before"}


def test_the_state_asks_for_a_refold_only_when_a_rule_is_late() -> None:
    state = blank()
    for one in (BORN, message(3, D, write(ITEM)), message(4, B, restrict(ITEM, "admin"))):
        state.apply(
            depth=one.depth, feed=one.feed, seq=one.seq, time_ms=0, operations=one.operations, writer=WRITERS[one.feed]
        )
    assert state.refold == set()
    late = message(2, B, restrict(ITEM, "owner"), seq=1)
    state.apply(depth=2, feed=B, seq=1, time_ms=0, operations=late.operations, writer=WRITERS[B])
    assert state.refold == {ITEM}
    assert [write.stamp.depth for write in state.records[ITEM].access] == [2, 4]


# who may change rules


@pytest.mark.parametrize(("feed", "allowed"), [(A, True), (B, True), (C, True), (D, False)])
def test_only_admins_and_the_creator_change_who_may_write(feed: FeedId, allowed: bool) -> None:
    receiver = Receiver().take(BORN, message(3, feed, restrict(ITEM, "editor")))
    assert (receiver.rejects == {}) is allowed
    assert bool(receiver.state.records[ITEM].access) is allowed


def test_a_rule_holds_for_who_made_it_and_never_for_the_owner() -> None:
    receiver = Receiver().take(
        BORN,
        message(3, B, restrict(ITEM, members=(EDITOR,))),
        message(4, B, write(ITEM, "admin")),
        message(5, C, write(ITEM, "c")),
    )
    assert receiver.rejects == {Stamp(4, B, 4, 0): Reason.DENIED}
    receiver.take(message(6, B, restrict(ITEM)))  # the admin has locked itself out
    assert receiver.rejects[Stamp(6, B, 6, 0)] is Reason.DENIED
    receiver.take(message(7, A, restrict(ITEM)), message(8, D, write(ITEM, "anybody")))
    assert receiver.state.records[ITEM].model.value() == {"t": "anybody"}


@pytest.mark.parametrize(
    "value",
    ["admin", 5, {}, {"roles": "admin"}, {"roles": [1]}, {"members": ["text"]}, [], {"roles": [], "members": []}],
)
def test_a_rule_that_makes_no_sense_leaves_the_owner_alone(value: Any) -> None:
    receiver = Receiver().take(BORN, message(3, B, ItemOperation(ITEM, METADATA, (Set(("access",), value),))))
    assert receiver.state.records[ITEM].access[0].rule == AccessRule(roles=frozenset({"owner"}))
    receiver.take(message(4, B, write(ITEM)), message(5, A, write(ITEM)))
    assert receiver.rejects == {Stamp(4, B, 4, 0): Reason.DENIED}


@pytest.mark.parametrize(
    "change",
    [
        Set(("access", "roles"), ["admin"]),
        Add(("access",), "x", value_bytes("x")),
        Restore(EntryKey(("access", "roles"), SET, b"", None), None),
        Restore(EntryKey(("access",), 1, value_bytes("x"), None), None),
    ],
)
def test_access_metadata_is_written_whole(change: Any) -> None:
    receiver = Receiver().take(BORN, message(3, B, ItemOperation(ITEM, METADATA, (change,))))
    assert receiver.rejects == {Stamp(3, B, 3, 0): Reason.MALFORMED}
    assert not receiver.state.records[ITEM].metadata.layers


def test_of_two_rules_in_one_operation_the_last_one_rules() -> None:
    both = (Set(("access",), {"roles": ["editor"]}), Set(("access",), {"roles": ["admin"]}))
    receiver = Receiver().take(BORN, message(3, B, ItemOperation(ITEM, METADATA, both)), message(4, D, write(ITEM)))
    assert receiver.rejects == {Stamp(4, D, 4, 0): Reason.DENIED}


# undoing a rule


def undone(depth: int, feed: FeedId, entry: Entry | None) -> Message:
    return message(depth, feed, ItemOperation(ITEM, METADATA, (Restore(ACCESS, entry),)))


def test_undoing_a_rule_brings_the_best_remaining_one_back() -> None:
    """The creator narrows, an admin narrows further and takes that back: the creator's rule still holds."""
    messages = [
        BORN,
        message(3, C, restrict(ITEM, "admin", members=(EDITOR,))),
        message(4, B, restrict(ITEM, "admin")),
        undone(5, B, None),
        message(6, D, write(ITEM, "stranger")),
        message(7, C, write(ITEM, "creator")),
    ]
    for seed in range(10):
        arrival = messages[1:]
        random.Random(seed).shuffle(arrival)
        own = iter(sorted(one for one in arrival if one.feed == B))  # a feed's own messages keep their order
        arrival = [next(own) if one.feed == B else one for one in arrival]
        receiver = Receiver().take(BORN)
        for one in arrival:
            receiver.take(one)
        assert receiver.rejects == {Stamp(6, D, 6, 0): Reason.DENIED}
        assert receiver.state.records[ITEM].model.value() == {"t": "creator"}
        assert receiver.state.records[ITEM].metadata.value() == {
            "access": {"roles": ["admin"], "members": [EDITOR]},
        }


def test_undoing_a_second_rule_brings_the_own_first_one_back() -> None:
    first = Entry(Stamp(3, B, 3, 0), {"roles": ["admin"]})
    receiver = Receiver().take(
        BORN,
        message(3, B, restrict(ITEM, "admin")),
        message(4, B, restrict(ITEM, "admin", "editor")),
        undone(5, B, first),
        message(6, D, write(ITEM)),
    )
    assert receiver.rejects == {Stamp(6, D, 6, 0): Reason.DENIED}


def test_undoing_the_only_rule_opens_the_item() -> None:
    receiver = Receiver().take(
        BORN, message(3, B, restrict(ITEM, "admin")), undone(4, B, None), message(5, D, write(ITEM))
    )
    assert not receiver.rejects


# what is refused alone


def test_an_item_is_created_once_and_only_under_its_own_feed() -> None:
    twice = message(2, C, genesis(C, 0), seq=1)
    foreign = message(3, D, genesis(C, 7), seq=0)
    receiver = Receiver().take(BORN, twice, foreign)
    assert receiver.rejects == {Stamp(2, C, 1, 0): Reason.DUPLICATE, Stamp(3, D, 0, 0): Reason.MALFORMED}
    assert list(receiver.state.records) == [ITEM]


def test_a_child_that_comes_before_its_parent_waits_for_it() -> None:
    parent, child = created_item_id(A, 0, 0), created_item_id(D, 0, 0)
    receiver = Receiver().take(message(1, D, genesis(D, 0, parent=parent), write(child, "child"), seq=0))
    assert receiver.rejects == {Stamp(1, D, 0, 0): Reason.NO_PARENT, Stamp(1, D, 0, 1): Reason.NO_ITEM}
    assert receiver.state.wanted == {parent, child}
    receiver.take(message(5, A, genesis(A, 0, depth=5), seq=0))
    assert not receiver.rejects
    assert receiver.state.home(child) == parent
    assert receiver.state.records[child].model.value() == {"t": "child"}


def test_a_reject_names_the_item_that_is_missing() -> None:
    state = blank()
    state.apply(depth=1, feed=D, seq=0, time_ms=0, operations=[write(ITEM)], writer=WRITERS[D])
    (reject,) = state.rejects
    assert (reject.reason, reject.detail) == (Reason.NO_ITEM, item_text(ITEM))


@pytest.mark.parametrize(
    ("model", "version", "field_name", "refused"),
    [
        ("property-set", 1, "property-set", False),
        ("property-set", 1, CUSTOM, True),
        ("property-set", 1, "threaded-log", True),
        ("property-set", 2, "property-set", True),
        ("property-set", 2, CUSTOM, False),
        ("text", 1, "property-set", True),
        ("text", 1, CUSTOM, True),
        ("unheard-of", 1, CUSTOM, False),
        ("unheard-of", 1, "property-set", True),
    ],
)
def test_operations_reach_only_the_model_they_are_of(model: str, version: int, field_name: str, refused: bool) -> None:
    body = b"bytes" if field_name == CUSTOM else (Set(("t",), 1),)
    born = ItemOperation(ITEM, GENESIS, Genesis(ITEM, model, version, "", None, 1))
    receiver = Receiver().take(message(1, C, born, ItemOperation(ITEM, field_name, body), seq=0))
    assert receiver.rejects == ({Stamp(1, C, 0, 1): Reason.WRONG_MODEL} if refused else {})
    encode_record(receiver.state.records[ITEM])


def test_one_refused_operation_leaves_the_rest_of_its_message_alone() -> None:
    nowhere = created_item_id(D, 9, 9)
    refused = ItemOperation(nowhere, REFUSED, (Reason.BAD_PROOF, "why"))
    receiver = Receiver().take(BORN, message(3, D, write(nowhere), write(ITEM, "kept"), refused, write(ITEM, "last")))
    assert receiver.rejects == {Stamp(3, D, 3, 0): Reason.NO_ITEM, Stamp(3, D, 3, 2): Reason.BAD_PROOF}
    assert receiver.state.records[ITEM].model.value() == {"t": "last"}


def test_an_own_operation_that_is_refused_says_so_at_once() -> None:
    state = blank()
    with pytest.raises(OperationRefused) as caught:
        state.apply_own(write(ITEM), Stamp(1, D, 0, 0), 0, WRITERS[D])
    assert caught.value.reason is Reason.NO_ITEM
    assert not state.rejects


# records and changes


def test_records_are_loaded_on_first_touch_and_not_after_they_were_forgotten() -> None:
    record = ItemRecord(Genesis(ITEM, "property-set", 1, "note", None, 1), PropertySet(ITEM), PropertySet(ITEM))
    stored = {ITEM: encode_record(record).SerializeToString(deterministic=True)}
    factory = ModelFactory(value_from_bytes)

    def load(item: ItemId) -> ItemRecord | None:
        return decode_record(stored[item], factory) if item in stored else None

    state = blank(load=load)
    assert state.loads == 0
    state.apply(depth=2, feed=D, seq=0, time_ms=0, operations=[write(ITEM)], writer=WRITERS[D])
    state.apply(depth=3, feed=D, seq=1, time_ms=0, operations=[write(ITEM)], writer=WRITERS[D])
    assert (state.loads, state.dirty, state.changed) == (1, {ITEM}, {ITEM})
    state.forget(frozenset({ITEM}))
    assert state.record(ITEM) is None
    assert state.gone == {ITEM}
    state.apply(depth=1, feed=C, seq=0, time_ms=0, operations=BORN.operations, writer=WRITERS[C])
    assert state.record(ITEM) is not None
    assert state.gone == set()
    assert state.loads == 1


def test_both_ends_of_a_changed_edge_are_changed() -> None:
    receiver = Receiver().take(message(1, C, genesis(C, 0), genesis(C, 0, 1), genesis(C, 0, 2), seq=0))
    first, second, third = (created_item_id(C, 0, position) for position in range(3))
    receiver.state.changed.clear()
    receiver.take(message(2, C, ItemOperation(first, PLACEMENT, (MOVE, second))))
    assert receiver.state.changed == {first, second}
    receiver.state.changed.clear()
    receiver.take(message(3, C, ItemOperation(first, PLACEMENT, (MOVE, third))))
    assert receiver.state.changed == {first, second, third}
    receiver.state.changed.clear()
    receiver.take(message(4, C, genesis(C, 4, parent=third)))
    assert receiver.state.changed == {created_item_id(C, 4, 0), third}


def test_a_record_with_rules_and_metadata_survives_the_store() -> None:
    receiver = Receiver().take(
        BORN, message(3, B, restrict(ITEM, "admin", members=(EDITOR, GUEST))), message(4, B, restrict(ITEM))
    )
    record = receiver.state.records[ITEM]
    data = encode_record(record).SerializeToString(deterministic=True)
    loaded = decode_record(data, ModelFactory(value_from_bytes))
    assert (loaded.genesis, loaded.access) == (record.genesis, record.access)
    assert loaded.metadata.value() == record.metadata.value()
    assert encode_record(loaded).SerializeToString(deterministic=True) == data
