"""What the module for browsers has to agree with, written by the Python codecs and machines."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any

from echostore.kernel.coherence.events import (
    Advanced,
    ChildOpened,
    Commit,
    Committed,
    Cut,
    Evaluate,
    Evaluated,
    Event,
    Flush,
    LinkClosed,
    LinkId,
    Opening,
    Publish,
    Received,
    Send,
    Want,
)
from echostore.kernel.coherence.holdings import Holdings, Version
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import Delta, IndexValue, Invalidate, Patch, PublishOp, Spec, SystemId, Update
from echostore.kernel.coherence.root import Root
from echostore.kernel.coherence.updates import frames_of
from echostore.kernel.ids import FeedId, ItemId, PartyKey, item_id
from echostore.kernel.items.operations import GENESIS, PLACEMENT, ItemOperation
from echostore.kernel.items.record import Genesis
from echostore.kernel.models.property_set import DELETED
from echostore.kernel.query.expressions import comparisons
from echostore.kernel.query.filters import And, Or
from echostore.kernel.query.source import Deleted
from echostore.kernel.query.spec import Order, QuerySpec, Stage
from echostore.kernel.values import BlobRef, Reference
from echostore.thin import operations
from echostore.thin.overlay import Overlay, nearest
from echostore.thin.queries import _order
from echostore.thin.touches import Touches
from echostore.wire.coherence import UPDATE_ITEMS_MAX, LinkFrame, encode_frame
from echostore.wire.coherence_parts import parts_of
from echostore.wire.index_spec import IndexCodec, IndexItem, IndexQuery, index_spec, index_value
from echostore.wire.leaf_operations import TextEdit, arc_item, operation_delta
from echostore.wire.values import value_bytes
from test_coherence_wire import CLOCK, MESSAGES, OP

PARTY = PartyKey(b"\x07" * 32)
FEED = FeedId(b"\x09" * 8)
HOME, CHILD = LinkId("home"), LinkId("child")

VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**53,
    -(2**63),
    2**63 - 1,
    0.5,
    -0.0,
    float("nan"),
    float("inf"),
    1e300,
    "",
    "Zürich \N{GRINNING FACE}",
    b"",
    b"\x00\xff",
    datetime(2026, 5, 1, 10, tzinfo=UTC),
    [],
    [1, "a", [None]],
    {},
    {"b": 1, "a": {"\U0001f600": 2, "\uffff": 3}},
    Reference(ItemId(b"\x01" * 16)),
    Reference(ItemId(b"\x01" * 16), PARTY),
    BlobRef((b"\x01\x02",), 5, "text/plain", "a.txt"),  # type: ignore[arg-type]
]

ASKED: list[dict[str, Any]] = [
    {},
    {"where": [{"type": "task"}]},
    {"where": [{"type": "task", "done": False}, {"rank__ge": 3, "rank__lt": 9.5}]},
    {"where": [{"title__startswith": "t", "title__contains": "e", "tag__in": ["b", "a", "b", 3]}]},
    {"where": [{"tag__in": ["x"]}, {"note__exists": True, "gone__exists": False, "title__ne": "q"}]},
    {"where": [{"type": "task"}], "order": ["-rank", "title", "rank"], "limit": 3},
    {"where": [{"type": "task"}], "order": ["title", "@item", "rank"], "deleted": "show"},
    {"where": [{"parent": Reference(ItemId(b"\x02" * 16)), "a.b": 1}], "deleted": "only"},
    {"any": [{"rank": 1}, {"rank": 2, "done": True}, {"rank": 1}], "where": [{"type": "task"}]},
    {"any": [{"title": "b"}, {"title": "\uffff"}, {"title": "\U0001f600"}, {"title": None}]},
    {"where": [{"type": "task", "rank__gt": 0, "rank__le": True, "when__ge": datetime(2026, 1, 1, tzinfo=UTC)}]},
]


def vectors() -> dict[str, Any]:
    return {
        "frames": [_frame(message) for message in MESSAGES],
        "bent": _bent(2000),
        "malformed": ["", "ff", "0900000000000000", "090000000000000001", "09" + "00" * 8 + "6a05", "7a"],
        "unbelievable": [encode_frame(LinkFrame(7, each)).hex() for each in UNBELIEVABLE],
        "values": [{"bytes": value_bytes(each).hex()} for each in VALUES],
        "specs": _specs(),
        "patches": _patches(),
        "operations": _operations(),
        "places": _places(),
        "views": _views(),
        "story": _story(),
        "touches": _touches(400),
        "unheld": b"index 0".hex(),
    }


def _touches(count: int) -> list[dict[str, Any]]:
    """What happens to four indexes, and what the Python leaf makes of it: whether a read is told at once, what is told."""
    random, touches, holdings, steps = Random(8), Touches(), Holdings(1), []
    specs = [Spec(b"index %d" % number) for number in range(4)]
    for spec in specs[1:]:
        holdings.learn(spec, Version(1, 1, IndexValue(b"v" * 100), live=True))
    for _ in range(count):
        spec = random.choice(specs)
        step: dict[str, Any] = {"spec": spec.hex(), "kind": random.choice(["note", "note", "delta", "delta", "told"])}
        if random.random() < 0.2:
            step["kind"] = random.choice(["invalidate", "take", "clear"])
        match step["kind"]:
            case "note":
                step["found"] = touches.note(spec)
            case "delta":
                step["size"] = random.choice([20, 40, 60, 120])
                delta = Delta(spec, 0, Patch(b"p" * step["size"]))
                touches.received(Update(CLOCK, 0, 1, (), (delta,)), holdings)
            case "invalidate":
                touches.received(Update(CLOCK, 0, 1, (), (Invalidate(spec),)), holdings)
            case "told":
                touches.told(spec)
            case "take":
                step["found"] = [each.hex() for each in touches.take()]
            case _:
                touches.clear()
        steps.append(step)
    assert {True, False} <= {step.get("found") for step in steps if step["kind"] == "note"}, "both come up"
    return steps


UNBELIEVABLE = [
    Update(CLOCK, 1, 1, (), (Invalidate(Spec(b"x")),)),
    Update(CLOCK, 1, 2, (), (Invalidate(Spec(b"x")),) * (UPDATE_ITEMS_MAX + 1)),
    Update(CLOCK, 1, 2, (), (PublishOp(OP, b"item", b"delta"),)),
]
"""Updates in one frame that no honest system sends downwards, to a leaf at tick 1."""


def _frame(message: Any) -> dict[str, str]:
    name = type(message).__name__
    kind = {"WaitForEpoch": "waitForEpoch"}.get(name, name[0].lower() + name[1:])
    return {"kind": kind, "bytes": encode_frame(LinkFrame((1 << 64) - 1, message)).hex()}


def _bent(count: int) -> list[str]:
    random, bent = Random(6), []
    for _ in range(count):
        data = bytearray(encode_frame(LinkFrame(random.getrandbits(64), random.choice(MESSAGES))))
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        bent.append(bytes(data[: random.randint(0, len(data))]).hex())
    return bent


def query_of(asked: dict[str, Any]) -> QuerySpec:
    """The query that conditions of a vector mean."""
    filters = [each for conditions in asked.get("where", []) for each in comparisons(conditions)]
    if "any" in asked:
        filters.append(Or(tuple(And(tuple(comparisons(each))) for each in asked["any"])))
    stage = Stage(filter=And(tuple(filters)), deleted=Deleted(asked.get("deleted", "hide")))
    order: tuple[Order, ...] = tuple(_order(each) for each in asked.get("order", ()))
    return QuerySpec((stage,), order, asked.get("limit")).check()


def _coded(asked: dict[str, Any]) -> dict[str, Any]:
    """The same as JSON: constants as the hex of their bytes, but for exists, which is plain."""

    def conditions(each: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value
            if key.endswith("__exists")
            else [value_bytes(one).hex() for one in value]
            if key.endswith("__in")
            else value_bytes(value).hex()
            for key, value in each.items()
        }

    coded = dict(asked)
    for part in ("where", "any"):
        if part in asked:
            coded[part] = [conditions(each) for each in asked[part]]
    return coded


def _specs() -> list[dict[str, Any]]:
    found = [
        {
            "party": PARTY.hex(),
            "asked": _coded(asked),
            "spec": index_spec(IndexQuery(PARTY, query_of(asked))).hex(),
        }
        for asked in ASKED
    ]
    item = ItemId(b"\x03" * 16)
    spec = index_spec(IndexQuery(PARTY, item=item)).hex()
    return [*found, {"party": PARTY.hex(), "asked": {"item": item.hex()}, "spec": spec}]


def _items(count: int) -> list[IndexItem]:
    return [
        IndexItem(
            item_id(FEED, number + 1),
            "task" if number % 3 else "note",
            "property-set",
            {"title": f"t{number}", "rank": number % 4, "done": bool(number % 2)},
            parent=item_id(FEED, 1) if number == 5 else None,
        )
        for number in range(count)
    ]


def _patches() -> list[dict[str, Any]]:
    random, codec, found = Random(3), IndexCodec(), []
    items = _items(12)
    for _ in range(40):
        before = random.sample(items, random.randint(0, 10))
        after = [
            replace(each, values={**each.values, "rank": random.randrange(9)}) if random.random() < 0.3 else each
            for each in random.sample(items, random.randint(1, 10))
        ]
        if random.random() < 0.5:
            after = sorted(before + [each for each in after if each not in before][:2], key=lambda each: each.item)
            after = list({each.item: each for each in after}.values())
        old, new = index_value(before), index_value(after)
        patch = codec.diff(old, new)
        if patch is not None:
            found.append({"old": old.hex(), "patch": patch.hex(), "result": new.hex()})
    assert len(found) > 10
    misfit = codec.diff(index_value(items[:4]), index_value(items[1:4]))
    assert misfit is not None
    return [*found, {"old": index_value(items[5:]).hex(), "patch": misfit.hex(), "result": None}]


def _operations() -> list[dict[str, Any]]:
    own, other = arc_item(FEED, 1 << 24, 5), item_id(FeedId(b"\x08" * 8), 77)
    made = Genesis(own, "property-set", 1, "task", other, 0)
    link = replace(made, parent=None, source=own, target=other)
    changes: list[tuple[list[str], Any]] = [(["title"], "x"), (["a", "b"], [1, None]), (["old"], DELETED)]
    coded = [[path, None if value is DELETED else value_bytes(value).hex()] for path, value in changes]
    moved = ItemOperation(other, PLACEMENT, (0, own))
    genesis = {"model": "property-set", "version": 1, "type": "task"}
    return [
        _operation(own, "genesis", {**genesis, "parent": _hex(other)}, _delta(own, GENESIS, made)),
        _operation(
            own,
            "genesis",
            {**genesis, "link": {"source": _hex(own), "target": _hex(other)}},
            _delta(own, GENESIS, link),
        ),
        _operation(other, "propertySet", coded, operations.change(FEED, other, {tuple(p): v for p, v in changes})[1]),
        _operation(own, "propertySet", coded, operations.change(FEED, own, {tuple(p): v for p, v in changes})[1]),
        _operation(other, "placement", {"kind": 0, "parent": _hex(own)}, operation_delta(FEED, moved)),
        _operation(
            other,
            "metadata",
            [[["deleted"], value_bytes(True).hex()], [["deleted_at_ms"], value_bytes(9).hex()]],
            operations.delete(FEED, other, 9)[1],
        ),
    ]


def _hex(data: bytes) -> dict[str, str]:
    return {"hex": data.hex()}


def _delta(item: ItemId, field: str, body: Any) -> bytes:
    return operation_delta(FEED, ItemOperation(item, field, body))


def _operation(item: ItemId, kind: str, body: Any, delta: bytes) -> dict[str, Any]:
    return {"feed": FEED.hex(), "item": item.hex(), "kind": kind, "body": body, "delta": delta.hex()}


def _places() -> list[dict[str, Any]]:
    random, found = Random(5), []
    for _ in range(200):
        text = "".join(random.choice("ab\U0001f600") for _ in range(random.randint(0, 8)))
        seen = "".join(random.choice("ab\U0001f600") for _ in range(random.randint(0, 6)))
        position = random.randint(0, len(seen))
        removed = seen[position : position + random.randint(0, 2)]
        edit = TextEdit(position, removed, "x", seen[max(0, position - 2) : position])
        coded = {"position": position, "removed": removed, "inserted": "x", "before": edit.before}
        found.append({"text": text, "edit": coded, "place": nearest(text, edit)})
    return found


def _views() -> list[dict[str, Any]]:
    """Answers with own operations on top, as the overlay in Python shows them."""
    random, found, items = Random(8), [], _items(9)
    text = IndexItem(item_id(FEED, 50), "doc", "text", {"value": "hello"})
    numbers = IndexItem(item_id(FEED, 51), "doc", "growable-array", {"value": [1, 2]})
    log = IndexItem(item_id(FEED, 52), "doc", "threaded-log", {"value": []})
    everything = [*items, text, numbers, log]
    fresh = arc_item(FEED, 0, 3)
    choices = [
        operations.create(FEED, fresh, "property-set", "task"),
        operations.change(FEED, fresh, {("title",): "t99", ("rank",): 2}),
        *(operations.change(FEED, each.item, {("rank",): 3, ("a", "b"): 1}) for each in items[:4]),
        operations.change(FEED, items[4].item, {("title",): DELETED}),
        operations.change(FEED, items[4].item, {("title", "deep"): 1}),
        operations.delete(FEED, items[0].item, 5),
        operations.restore(FEED, items[0].item),
        operations.move(FEED, items[6].item, items[0].item),
        operations.edit_text(text.item, "hello", 5, 0, "!"),
        operations.edit_list(numbers.item, [1, 2], 0, 1, ["x"]),
        operations.edit_list(numbers.item, [7], 0, 1, []),
        operations.post(FEED, log.item, "hi"),
    ]
    asked_of = [*(each for each in ASKED if "parent" not in str(each)), {"where": [{"type": "doc"}]}]
    for _ in range(150):
        asked, ops = random.choice(asked_of), random.sample(choices, random.randint(0, 5))
        query = query_of(asked)
        held = Overlay(PARTY, FEED, [operations.restore(FEED, item_id(FEED, 99))]).view(
            IndexQuery(PARTY, query), everything, lambda item: None
        )[0]
        shown, pending = Overlay(PARTY, FEED, ops).view(IndexQuery(PARTY, query), held, lambda item: None)
        found.append(_view(_coded(asked), held, ops, shown, pending))
    for item in (items[0], text, numbers, log):
        ops = random.sample(choices, 8)
        shown, pending = Overlay(PARTY, FEED, ops).view(IndexQuery(PARTY, item=item.item), [item], lambda each: None)
        found.append(_view({"item": item.item.hex()}, [item], ops, shown, pending))
    return found


def _view(
    asked: dict[str, Any], held: Iterable[IndexItem], ops: Any, shown: Iterable[IndexItem], pending: bool
) -> dict[str, Any]:
    return {
        "party": PARTY.hex(),
        "feed": FEED.hex(),
        "asked": asked,
        "value": index_value(held).hex(),
        "operations": [[item.hex(), delta.hex()] for item, delta in ops],
        "shown": [[each.item.hex(), value_bytes(each.values).hex(), each.deleted] for each in shown],
        "pending": pending,
    }


def _story() -> list[dict[str, Any]]:
    """A random run of a root and a leaf over two lives of their link, as the leaf sees it."""
    return _Story(Random(11)).run(400)


class _Story:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.root = Root(SystemId(b"\x0a" * 16), IndexCodec(), tick=1)
        self.leaf = Leaf(IndexCodec(), HOME)
        self.specs = [
            index_spec(IndexQuery(PARTY, query_of({"where": [{"type": kind}]}))) for kind in ("a", "b", "c", "d")
        ]
        self.items = _items(4)
        self.tick = 1
        self.watched: set[Spec] = set()
        self.down: list[bytes] = []
        self.up: list[bytes] = []
        self.steps: list[dict[str, Any]] = []
        self.old: list[bytes] = []

    def run(self, count: int) -> list[dict[str, Any]]:
        self._open()
        for number in range(count):
            if number == count // 2:
                self._at_leaf({"closed": True}, LinkClosed(HOME))
                self._at_root(LinkClosed(CHILD))
                self.down.clear()
                self._open()
            self._anything()
        return self.steps

    def _open(self) -> None:
        generation, nonce = self.random.getrandbits(60), self.random.getrandbits(60)
        self._at_root(ChildOpened(CHILD, generation))
        self._at_leaf({"opening": [str(generation), str(nonce)]}, Opening(HOME, generation, nonce))

    def _anything(self) -> None:
        random = self.random
        if self.down and random.random() < 0.6:
            data = self.down.pop(0)
            self.old.append(data)
            if random.random() < 0.3:  # what came before comes once more, also from an earlier life of the link
                self.down.insert(0, random.choice(self.old))
            from echostore.wire.coherence import decode_frame

            frame = decode_frame(data)
            self._at_leaf({"frame": data.hex()}, Received(HOME, frame.generation, frame.message))
            return
        choice = random.random()
        if choice < 0.3:
            spec = random.choice(self.specs)
            self._at_leaf({"want": [spec.hex(), None]}, Want(HOME, spec))
        elif choice < 0.5 and self.leaf.arcs.arc is not None:
            ops = ((item_id(FEED, 9), operations.restore(FEED, item_id(FEED, 9))[1]),)
            self._at_leaf({"publish": [[a.hex(), b.hex()] for a, b in ops]}, Publish(ops))
        else:
            self._advance(random.sample(self.specs, random.randint(0, 2)))

    def _advance(self, changed: list[Spec]) -> None:
        self.tick += 1
        values = [(spec, self._value()) for spec in changed if spec in self.watched]
        self._at_root(Advanced(self.tick, tuple(values)))
        for link in self.root.serving.due():
            self._at_root(Flush(link))

    def _value(self) -> IndexValue:
        self.items = [replace(each, values={**each.values, "rank": self.random.randrange(99)}) for each in self.items]
        return index_value(self.random.sample(self.items, 3))

    def _at_leaf(self, step: dict[str, Any], event: Event) -> None:
        sent = []
        for effect in self.leaf.receive(event):
            if isinstance(effect, Send):
                sent += _frames(effect)
        held = []
        for spec in self.specs:
            version = self.leaf.read(HOME, spec)
            held.append([spec.hex(), None if version is None else version.value.hex()])
        self.steps.append(
            {
                **step,
                "sent": [each.hex() for each in sent],
                "tick": self.leaf.caches[HOME].cur,
                "batches": len(self.leaf.outbox.batches),
                "held": held,
            }
        )
        from echostore.wire.coherence import decode_frame

        for data in sent:
            frame = decode_frame(data)
            self._at_root(Received(CHILD, frame.generation, frame.message))

    def _at_root(self, event: Event) -> None:
        for effect in self.root.receive(event):
            if isinstance(effect, Send):
                self.down += _frames(effect)
            elif isinstance(effect, Evaluate):
                self.watched.add(effect.spec)
                self._at_root(Evaluated(effect.spec, self.tick, self.tick, self._value()))
            elif isinstance(effect, Commit):
                self._at_root(Committed(effect.clock, effect.batch, self.tick + 1))
                self._advance([])
            elif isinstance(effect, Cut):
                self._advance([])


def _frames(send: Send) -> list[bytes]:
    """Every other update from above in parts: a leaf reads both."""
    message = send.message
    cut = isinstance(message, Update) and not message.clock.gen and message.tick % 2
    messages = frames_of(message) if isinstance(message, Update) and cut else parts_of(message)
    return [encode_frame(LinkFrame(send.generation, each)) for each in messages]
