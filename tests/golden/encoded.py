"""Fixed kernel values and what our encoders make of them: the input of the golden vectors `encoded`."""

from dataclasses import replace
from datetime import UTC, datetime

from echostore.kernel.coherence.messages import (
    Announce,
    Arc,
    Deannounce,
    IssuedId,
    MessageId,
    PublishOp,
    ReleaseArc,
    Service,
    Statement,
    SystemId,
    Update,
    UserMessage,
    UserReceipt,
    Witness,
)
from echostore.kernel.ids import (
    NO_LINK,
    Cid,
    DeviceKey,
    FeedId,
    FeedKey,
    IdentityKey,
    ItemId,
    Link,
    PartyKey,
    Stamp,
    item_id,
)
from echostore.kernel.items.operations import CUSTOM, GENESIS, METADATA, PLACEMENT, ItemOperation
from echostore.kernel.items.record import AccessRule, AccessWrite, Genesis, ItemRecord
from echostore.kernel.items.tree import EMBED, MOVE, UNEMBED, TreeMove
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.property_set import (
    ADDED,
    DELETED,
    INCREMENT,
    REMOVED,
    SET,
    Add,
    Entry,
    EntryKey,
    Increment,
    PropertySet,
    Remove,
    Restore,
    Set,
)
from echostore.kernel.query.spec import QuerySpec
from echostore.kernel.values import BlobRef, Reference, Value
from echostore.peer.coherence_ledger import root_system
from echostore.wire.capabilities import Grants, ReadPattern, proof_statement, sign_capability
from echostore.wire.index_spec import (
    IndexCodec,
    IndexItem,
    IndexQuery,
    index_spec,
    index_value,
    seal_statement,
)
from echostore.wire.items import encode_model, encode_moves, encode_record
from echostore.wire.leaf_operations import ListEdit, TextEdit, arc_item, edit_delta
from echostore.wire.leaf_signing import statement_bytes
from echostore.wire.links import block_link, head_bytes, payload_hash
from echostore.wire.messages import encode_genesis, encode_operation
from echostore.wire.models import property_set
from echostore.wire.signing import SigningKey
from echostore.wire.values import value_bytes, value_from_bytes
from echostore.wire.views import itemless_statement, sign_view, view_statement

KEY = FeedKey(bytes(range(32)))
FEED, OTHER = FeedId(KEY[:8]), FeedId(b"otherfed")
PARTY = PartyKey(b"p" * 32)
ITEM, PARENT = item_id(FEED, 5 << 16 | 3), item_id(OTHER, 1)
STAMP, SEEN = Stamp(300, FEED, 200, 2), Stamp(7, OTHER, 150, 1)

VALUES: dict[str, Value] = {
    "null": None,
    "true": True,
    "false": False,
    "zero": 0,
    "negative": -300,
    "largest": (1 << 63) - 1,
    "float": 2.5,
    "minus-zero": -0.0,
    "nan": float("nan"),
    "infinity": float("inf"),
    "text": "Füße",
    "empty-text": "",
    "bytes": b"\x00\xff",
    "moment": datetime(2021, 9, 1, 12, 30, 0, 123456, tzinfo=UTC),
    "before-1970": datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    "list": [1, [2.5, None], "x"],
    "empty-list": [],
    "map": {"z": 1, "a": {"é": 2, "e": 3}, "ä": 4},
    "empty-map": {},
    "reference": Reference(ITEM),
    "foreign-reference": Reference(ITEM, PARTY),
    "blob": BlobRef((Cid(b"\x01" * 36), Cid(b"\x02" * 36)), 70_000, "image/png", "hut.png"),
}


def encoded() -> dict[str, bytes]:
    found = {f"value {name}": value_bytes(value) for name, value in VALUES.items()}
    for name, operation in operations().items():
        found[f"operation {name}"] = encode_operation(FEED, operation).SerializeToString(deterministic=True)
    model = folded()
    found["state property-set"] = property_set.encode_state(model)
    unknown = ModelFactory(value_from_bytes).create("unheard-of", 1, ITEM)
    unknown.apply(b"second", STAMP, -5)
    unknown.apply(b"first", SEEN, 1_600_000_000_000)
    found["state operations"] = encode_model(unknown)
    found["item"] = encode_record(record(model)).SerializeToString(deterministic=True)
    found["moves"] = encode_moves(
        [
            TreeMove(SEEN, ITEM, MOVE, PARENT),
            TreeMove(STAMP, ITEM, EMBED, None),
            TreeMove(STAMP, PARENT, UNEMBED, ITEM),
        ],
        {}.__setitem__,
    )
    found["link"] = block_link(KEY, 0, NO_LINK, payload_hash(b"payload"))
    found["next link"] = block_link(KEY, 1, Link(found["link"]), payload_hash(b""))
    found["head"] = head_bytes(PARTY, KEY, 300, Link(found["link"]))
    found["view statement"] = itemless_statement(PARTY, encode_genesis(view()))
    found["view statement with item"] = view_statement(PARTY, ITEM, encode_genesis(view()))
    found["view proof"] = sign_view(PARTY, ITEM, encode_genesis(view()), SigningKey.from_seed(b"s" * 32))
    found |= {f"thin {name}": data for name, data in thin().items()}
    return found


def thin() -> dict[str, bytes]:
    """What thin clients and roots of different versions say to each other."""
    tasks = QuerySpec.start("task")
    one = IndexItem(ITEM, "task", "property-set", {"title": "Füße", "done": False}, parent=PARENT)
    two = IndexItem(PARENT, "task", "text", {"value": "x"}, deleted=True, source=ITEM, target=PARENT)
    old, new = index_value([one, two]), index_value([two, replace(one, values={"done": True})])
    patch, longer = IndexCodec().diff(old, new), IndexCodec().diff(index_value([one]), old)
    assert patch is not None
    assert longer is not None
    key = SigningKey.from_seed(bytes(range(32)))
    read = (ReadPattern(("note", "task")), ReadPattern(all_items=True))
    grants = Grants(
        PARTY, DeviceKey(key.public), b"i" * 16, read, ("task",), True, b"h" * 32, 2000, 1000, (DeviceKey(key.public),)
    )
    return {
        "spec": index_spec(IndexQuery(PARTY, replace(tasks, limit=300), sealed=True)),
        "item spec": index_spec(IndexQuery(PARTY, item=ITEM)),
        "value": old,
        "patch": patch,
        "patch that appends": longer,
        "seal statement": seal_statement(index_spec(IndexQuery(PARTY, tasks)), [replace(one, record=b"record")]),
        "capability": sign_capability(grants, key),
        "proof statement": proof_statement(b"n" * 16, b"capability"),
        "text edit": edit_delta(TextEdit(300, "é", "ü", "before")),
        "list edit": edit_delta(ListEdit(2, (1, None), ("x",))),
        "arc item": arc_item(FEED, 5 << 24, 7),
        "root": root_system(PARTY, KEY).root,
        "edge capability": sign_capability(replace(grants, edge=True), key),
        **{f"signed {name}": statement_bytes(said) for name, said in statements().items()},
    }


def statements() -> dict[str, Update | Statement]:
    """What a leaf signs behind an edge. Browsers make the same bytes (tests/browser/signed.mjs)."""
    leaf, other = SystemId(b"r" * 16, (1,)), SystemId(b"r" * 16, (2, 300))
    arc, id = Arc(leaf, 1), MessageId(leaf, 1 << 32, 7)
    context = ((Witness(Arc(SystemId(b"r" * 16)), 300), Witness(arc, 2)),)
    return {
        "batch": Update(arc, 2, 3, (), (PublishOp(IssuedId(arc, 5), b"item", b"delta"),)),
        "release": ReleaseArc(arc, 300),
        "announce": Announce(Service(leaf, "sch\xe4ch"), 1, 2, b"white"),
        "deannounce": Deannounce(Service(leaf, "sch\xe4ch"), 1, 3),
        "message": UserMessage(id, 5, other, context, "note", b"hello", True, 6),
        "receipt": UserReceipt(id, other),
    }


def operations() -> dict[str, ItemOperation]:
    red = value_bytes("red")
    title = EntryKey(("title",), SET, b"", None)
    past = Stamp(20, FEED, 10, 0)
    changes = {
        "set": Set(("title",), "Trip"),
        "set nested": Set(("a", "é"), [1]),
        "delete": Set(("title",), DELETED),
        "add": Add(("tags",), "red", red),
        "remove": Remove(("tags",), "red", red, (SEEN,)),
        "increment": Increment(("n",), -3, SEEN),
        "increment float": Increment(("n",), 0.25, None),
        "restore": Restore(title, Entry(past, "old")),
        "restore deleted": Restore(title, Entry(past, DELETED)),
        "restore added": Restore(EntryKey(("tags",), ADDED, red, None), Entry(past, "red")),
        "restore removed": Restore(EntryKey(("tags",), REMOVED, red, OTHER), Entry(past, "red", SEEN)),
        "restore increment": Restore(EntryKey(("n",), INCREMENT, b"", SEEN), Entry(past, 7)),
        "restore absent": Restore(title, None),
        "restore absent removal": Restore(EntryKey(("tags",), REMOVED, red, OTHER), None),
    }
    found = {name: ItemOperation(ITEM, "property-set", (change,)) for name, change in changes.items()}
    found["foreign item"] = ItemOperation(PARENT, METADATA, (Set(("display_name",), "x"), Set(("deleted",), True)))
    found["custom"] = ItemOperation(ITEM, CUSTOM, b"own bytes")
    found["move"] = ItemOperation(ITEM, PLACEMENT, (MOVE, PARENT))
    found["embed"] = ItemOperation(ITEM, PLACEMENT, (EMBED, None))
    found["genesis"] = ItemOperation(ITEM, GENESIS, Genesis(ITEM, "property-set", 1, "task", PARENT, 300))
    found["genesis link"] = ItemOperation(
        ITEM, GENESIS, Genesis(ITEM, "property-set", 1, "", None, 300, source=ITEM, target=PARENT, target_party=PARTY)
    )
    found["genesis view"] = ItemOperation(ITEM, GENESIS, view())
    arc = item_id(FEED, 1 << 63 | 9)
    found["genesis arc"] = ItemOperation(arc, GENESIS, Genesis(arc, "text", 2, "", None, 300, forked_from=PARENT))
    return found


def view() -> Genesis:
    return Genesis(ITEM, "property-set", 1, "", None, 300, inception_key=b"k" * 32, id_proof=b"s" * 64)


def folded() -> PropertySet:
    model = PropertySet(ITEM)
    model.apply((Set(("title",), "Trip"), Add(("tags",), "red", value_bytes("red"))), Stamp(3, FEED, 1, 0), 0)
    model.apply((Increment(("n",), 5, None), Set(("gone",), DELETED)), Stamp(4, FEED, 2, 1), 0)
    model.apply((Remove(("tags",), "red", value_bytes("red"), (Stamp(3, FEED, 1, 0),)),), Stamp(5, OTHER, 0, 0), 0)
    model.apply((Increment(("n",), 0.5, Stamp(3, FEED, 1, 0)),), Stamp(6, OTHER, 1, 0), 0)
    return model


def record(model: PropertySet) -> ItemRecord:
    metadata = PropertySet(ITEM)
    metadata.apply((Set(("display_name",), "Trip"),), STAMP, 0)
    genesis = Genesis(
        ITEM,
        "property-set",
        1,
        "task",
        PARENT,
        300,
        source=ITEM,
        target=ItemId(b"t" * 16),
        target_party=PARTY,
        inception_key=b"k" * 32,
        id_proof=b"s" * 64,
        forked_from=PARENT,
    )
    rule = AccessRule(frozenset({"editor", "admin"}), frozenset({IdentityKey(b"b" * 32), IdentityKey(b"a" * 32)}))
    return ItemRecord(genesis, model, metadata, [AccessWrite(SEEN, rule), AccessWrite(STAMP, AccessRule())])
