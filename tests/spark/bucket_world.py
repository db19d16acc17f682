"""Random parties for the reducer's tests: messages as bytes, the kernel's own fold as the oracle."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import ARC_BIT, FeedId, IdentityKey, ItemId, PartyKey, Stamp, created_item_id, item_id
from echostore.kernel.items.operations import CUSTOM, GENESIS, METADATA, PLACEMENT, ItemOperation, Reject, WriterRole
from echostore.kernel.items.record import Genesis
from echostore.kernel.items.state import PartyState
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.property_set import DELETED, SET, Add, Entry, EntryKey, Increment, Remove, Restore, Set
from echostore.kernel.models.text import ConcurrentText
from echostore.kernel.models.threaded_log import OwnPost, Post, Retention, Retract
from echostore.kernel.reasons import Reason
from echostore.kernel.values import Reference
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.items import encode_record
from echostore.wire.messages import decode_operations, encode_operation
from echostore.wire.values import value_bytes, value_from_bytes

PARTY = PartyKey(b"P" * 32)
ROLES = ("owner", "admin", "editor")


class Tally:
    """A custom model that keeps its operations."""

    name, version = "tally", 1

    def __init__(self) -> None:
        self.sum = 0

    def apply(self, operation: object, stamp: Stamp) -> None:
        if not isinstance(operation, int):
            raise OperationRefused(Reason.MALFORMED, "not a number")
        self.sum += operation

    def value(self) -> int:
        return self.sum


class Bag(Tally):
    """A custom model that commutes and writes its own snapshot."""

    name, version, commutes = "bag", 1, True

    def snapshot(self) -> int:
        return self.sum

    def restore(self, state: int) -> None:
        self.sum = state


def factory() -> ModelFactory:
    made = ModelFactory(value_from_bytes)
    made.register(Tally)
    made.register(Bag)
    return made


@dataclass(frozen=True)
class Block:
    feed: FeedId
    seq: int
    payload: bytes


@dataclass
class Writer:
    """One feed: what it has written, and its own replicas of texts and lists."""

    feed: FeedId
    role: WriterRole
    depth: int = 0
    seq: int = 0
    documents: dict[ItemId, object] = field(default_factory=dict)
    posts: dict[ItemId, list[tuple[int, int]]] = field(default_factory=dict)
    writes: list[tuple[ItemId, EntryKey, Entry, bool]] = field(default_factory=list)
    adds: list[tuple[ItemId, Stamp, bytes]] = field(default_factory=list)


class RandomParty:
    """Writes random messages. Writers hear of each other now and then, so that depths mix."""

    def __init__(self, seed: int, *, feeds: int = 3, odd: float = 0.1, models: Iterable[str] = ()) -> None:
        self.random = random.Random(seed)
        self.odd = odd
        self.models = tuple(models) or (
            *("property-set",) * 4, "text", "growable-array", "threaded-log", "tally", "bag", "mystery"
        )  # fmt: skip
        self.writers = [
            Writer(FeedId(self.random.randbytes(8)), WriterRole(IdentityKey(bytes([at]) * 32), ROLES[at % 3]))
            for at in range(feeds)
        ]
        self.items: list[tuple[ItemId, str]] = []
        self.blocks: list[Block] = []

    def role_at(self, feed: FeedId, seq: int) -> WriterRole:
        return next(writer.role for writer in self.writers if writer.feed == feed)

    def identity_of(self, feed: FeedId) -> IdentityKey | None:
        return next((writer.role.identity for writer in self.writers if writer.feed == feed), None)

    def write(self, count: int) -> None:
        for _ in range(count):
            self._message(self.random.choice(self.writers))

    def _message(self, writer: Writer) -> None:
        if self.random.random() < 0.4:
            writer.depth = max(other.depth for other in self.writers)
        writer.depth += 1
        operations = pb.Message(depth=writer.depth, time_ms=self.random.randrange(10**12))
        for position in range(self.random.choice((1, 1, 1, 2, 3))):
            stamp = Stamp(writer.depth, writer.feed, writer.seq, position)
            made = self._operation(writer, stamp)
            operations.operations.append(encode_operation(writer.feed, made))
        payload = operations.SerializeToString()
        if self.random.random() < self.odd:
            payload = self._odd(operations)
        self.blocks.append(Block(writer.feed, writer.seq, payload))
        writer.seq += 1

    def _odd(self, message: pb.Message) -> bytes:
        """The same message in a strange spelling, or one that is malformed."""
        choice = self.random.randrange(6)
        if choice == 0:  # a field from the future
            return message.SerializeToString() + b"\xfa\x07\x01x"
        if choice == 1:  # another order of fields
            head = pb.Message(depth=message.depth, time_ms=message.time_ms).SerializeToString()
            return message.SerializeToString()[len(head) :] + head
        if choice == 2:
            message.operations[0].feed = b"short"
        elif choice == 3:
            message.operations[-1].ClearField("kind")
        elif choice == 4:
            for operation in message.operations:
                if operation.WhichOneof("kind") == "property_set":
                    operation.property_set.changes.add(path=[""], delete=True)
        else:
            message.operations.add(local=1).placement.kind = 9  # type: ignore[assignment]
        return message.SerializeToString()

    def _operation(self, writer: Writer, stamp: Stamp) -> ItemOperation:
        random = self.random
        if len(self.items) < 3 or random.random() < 0.12:
            return self._genesis(writer, stamp)
        item, model = random.choice(self.items)
        if random.random() < 0.03:
            item = created_item_id(writer.feed, 10_000 + random.randrange(3), 0)  # nobody's
        if random.random() < 0.03:
            model = random.choice(self.models)  # probably the wrong one
        choice = random.random()
        if choice < 0.12:
            return ItemOperation(item, METADATA, self._metadata(writer, stamp))
        if choice < 0.17:
            parent = random.choice((None, random.choice(self.items)[0], item_id(writer.feed, 77)))
            return ItemOperation(item, PLACEMENT, (random.randrange(3), parent))
        if model == "property-set":
            changes = tuple(self._change(writer, item, stamp) for _ in range(random.choice((1, 1, 1, 2))))
            return ItemOperation(item, model, changes)
        if model in ("text", "growable-array"):
            return self._edit(writer, item, model)
        if model == "threaded-log":
            return ItemOperation(item, model, self._post(writer, item, stamp))
        return ItemOperation(item, CUSTOM, value_bytes(random.choice((1, 5, "no number"))))

    def _genesis(self, writer: Writer, stamp: Stamp) -> ItemOperation:
        random = self.random
        item = created_item_id(writer.feed, stamp.seq, stamp.position)
        if random.random() < 0.1:
            item = item_id(writer.feed, ARC_BIT | random.randrange(3))
        model = random.choice(self.models)
        parent = None
        if self.items and random.random() < 0.5:
            parent = random.choice(self.items)[0]
        if random.random() < 0.04:
            parent = created_item_id(writer.feed, stamp.seq + random.randrange(4), 0)  # perhaps one to come, or itself
        linked = random.random() < 0.1 and self.items
        self.items.append((item, model))
        genesis = Genesis(
            item, model, random.choice((1, 1, 1, 2)), random.choice(("", "task")), parent, stamp.depth,
            source=self.items[0][0] if linked else None, target=self.items[-1][0] if linked else None,
        )  # fmt: skip
        return ItemOperation(item, GENESIS, genesis)

    def _value(self) -> object:
        random = self.random
        return random.choice(
            (None, True, False, 0, -1, 2**40, 0.0, -0.0, 1.5, float("nan"), "", "text ü", b"", b"\x00\xff",
             [1, "a", None], {"b": 1, "a": [True]}, Reference(ItemId(b"i" * 16)), "long" * random.randrange(300))
        )  # fmt: skip

    def _path(self) -> tuple[str, ...]:
        return self.random.choice(
            (("a",), ("b",), ("title",), ("a", "x"), ("a", "x", "y"), ("a", "z"), ("b", "x"), ("a\x01",), ("n\0l",))
        )

    def _change(self, writer: Writer, item: ItemId, stamp: Stamp) -> object:
        random = self.random
        path, choice = self._path(), random.random()
        if choice < 0.6:
            value = self._value() if random.random() < 0.85 else DELETED
            if item:
                writer.writes.append((item, EntryKey(path, SET, b"", None), Entry(stamp, value), False))
            return Set(path, value)
        element = random.choice(("red", "blue", 3))
        if choice < 0.7:
            writer.adds.append((item, stamp, value_bytes(element)))
            return Add(path, element, value_bytes(element))
        if choice < 0.8:
            seen = [at for other in self.writers for _, at, _ in other.adds[-3:] if at.depth < stamp.depth]
            return Remove(path, element, value_bytes(element), tuple(sorted(seen[:2], key=lambda at: at.feed)))
        if choice < 0.9:
            return Increment(path, random.choice((1, -2, 0.5)), None)
        return self._restore(writer, item, stamp)

    def _restore(self, writer: Writer, item: ItemId, stamp: Stamp) -> Restore:
        mine = [(key, entry) for at, key, entry, _ in writer.writes if at == item and entry.stamp.seq < stamp.seq]
        if not mine or self.random.random() < 0.3:
            return Restore(EntryKey(self._path(), SET, b"", None), None)
        return Restore(*self.random.choice(mine))

    def _metadata(self, writer: Writer, stamp: Stamp) -> tuple[object, ...]:
        random = self.random
        choice = random.random()
        if choice < 0.4:
            return (Set(("deleted",), random.random() < 0.5),)
        if choice < 0.8:
            return (Set(("display_name",), self._value()),)
        if choice < 0.95:
            rule = random.choice(({"roles": ["admin"]}, {"members": [bytes([2]) * 32]}, None, "nonsense"))
            return (Set(("access",), rule if rule is not None else DELETED),)
        return (Set(("access", "roles"), []),)  # refused: written whole or not at all

    def _edit(self, writer: Writer, item: ItemId, model: str) -> ItemOperation:
        random = self.random
        document = writer.documents.get(item)
        if document is None:
            document = writer.documents[item] = ConcurrentText(item) if model == "text" else GrowableArray(item)
        if isinstance(document, ConcurrentText) != (model == "text"):
            model = document.name  # type: ignore[attr-defined]
        document.begin(writer.feed)  # type: ignore[attr-defined]
        if isinstance(document, ConcurrentText):
            document.insert(random.randrange(len(document.value()) + 1), random.choice(("a", "bc", "ü")))
        else:
            assert isinstance(document, GrowableArray)
            document.insert(random.randrange(len(document.value()) + 1), random.randrange(9))
        sealed = document.seal()  # type: ignore[attr-defined]
        self._share(writer, item, model, sealed)
        return ItemOperation(item, model, sealed)

    def _share(self, writer: Writer, item: ItemId, model: str, sealed: object) -> None:
        """Sometimes another writer has the edit at once, and will build on it without naming it as a cause."""
        document = writer.documents[item]
        document.stamped(Stamp(writer.depth, writer.feed, writer.seq, 0), 0)  # type: ignore[attr-defined]
        other = self.random.choice(self.writers)
        if other is writer or self.random.random() < 0.5:
            return
        theirs = other.documents.get(item)
        if theirs is None:
            theirs = other.documents[item] = type(document)(item)
        if type(theirs) is type(document):
            try:
                theirs.apply(sealed, Stamp(writer.depth, writer.feed, writer.seq, 0), 0)  # type: ignore[attr-defined]
            except (OperationRefused, Corrupt):
                return  # it lacks what the edit builds on, and goes on without

    def _post(self, writer: Writer, item: ItemId, stamp: Stamp) -> object:
        mine = writer.posts.setdefault(item, [])
        choice = self.random.random()
        if mine and choice < 0.2:
            return Retract(OwnPost(*self.random.choice(mine)))
        if choice < 0.3:
            return Retention(count_max=5)
        mine.append((stamp.seq, stamp.position))
        return Post({"body": self._value()}, OwnPost(*mine[0]) if choice > 0.7 else None)


# The oracle


@dataclass
class Answer:
    """What a party amounts to: encoded items, rejects, moves."""

    items: dict[ItemId, bytes]
    rejects: set[tuple[bytes, int, int, str, str]]
    moves: list[tuple[object, ...]]


def oracle(party: RandomParty, blocks: Iterable[Block]) -> Answer:
    """The kernel's PartyState over all blocks: creations first, again as long as they make progress."""
    state = PartyState(PARTY, factory(), load=lambda item: None, identity_of=party.identity_of)
    rejects: list[Reject] = []
    geneses: list[tuple[Stamp, int, ItemOperation]] = []
    others: list[tuple[Stamp, int, ItemOperation]] = []
    for block in blocks:
        message = pb.Message.FromString(block.payload)
        try:
            operations = decode_operations(message, party=PARTY, feed=block.feed, seq=block.seq)
        except OperationRefused as refusal:
            rejects.append(Reject(block.feed, block.seq, -1, refusal.reason, refusal.detail))
            continue
        for position, operation in enumerate(operations):
            stamp = Stamp(message.depth, block.feed, block.seq, position)
            (geneses if operation.field == GENESIS else others).append((stamp, message.time_ms, operation))
    existing = _existing(geneses)
    for stamp, time_ms, operation in sorted(geneses, key=lambda one: one[0]):
        parent = operation.body.parent
        if parent is not None and parent in existing and state.record(parent) is None:
            # Its parent sorts above it. Created all the same, below a stand-in of the system item.
            rootless = operation._replace(body=_with_parent(operation.body, None))
            state.apply_operation(rootless, stamp, time_ms, party.role_at(stamp.feed, stamp.seq))
            record = state.record(operation.item)
            if record is not None and record.genesis is rootless.body:
                record.genesis = operation.body
        else:
            state.apply_operation(operation, stamp, time_ms, party.role_at(stamp.feed, stamp.seq))
    for stamp, time_ms, operation in sorted(others, key=lambda one: one[0]):
        state.apply_operation(operation, stamp, time_ms, party.role_at(stamp.feed, stamp.seq))
    state.settle()
    assert not state.refold, state.refold
    rejects += state.rejects
    return Answer(
        {item: encode_record(record).SerializeToString(deterministic=True) for item, record in state.records.items()},
        {(reject.feed, reject.seq, reject.position, str(reject.reason), reject.detail) for reject in rejects},
        [(*move.stamp, move.item, move.kind, move.parent) for move in state.tree.moves],
    )


def _existing(geneses: list[tuple[Stamp, int, ItemOperation]]) -> set[ItemId]:
    existing: set[ItemId] = set()
    grown = True
    while grown:
        grown = False
        for _, _, operation in geneses:
            genesis = operation.body
            if genesis.item not in existing and (genesis.parent is None or genesis.parent in existing):
                existing.add(genesis.item)
                grown = True
    return existing


def _with_parent(genesis: Genesis, parent: ItemId | None) -> Genesis:
    from dataclasses import replace

    return replace(genesis, parent=parent)


def payload_columns(blocks: list[Block]) -> dict[FeedId, tuple[pa.Array, np.ndarray]]:  # type: ignore[type-arg]
    """The blocks of each feed in feed order."""
    grouped: dict[FeedId, list[Block]] = {}
    for block in blocks:
        grouped.setdefault(block.feed, []).append(block)
    return {
        feed: (pa.array([block.payload for block in mine], pa.binary()), np.array([block.seq for block in mine]))
        for feed, mine in grouped.items()
    }
