"""What a member may send: blocks under a valid signature that no honest program writes (FAULTS B4-B8, B21).

Each is refused with a typed, listed reason, everybody lists the same, and the state is what it was, also after a
restart and after the items were folded again from the feeds.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echostore.kernel.feed import Head
from echostore.kernel.ids import FeedId, FeedKey, ItemId, created_item_id, feed_id
from echostore.kernel.limits import BLOCK_BYTES_MAX, DEPENDENCIES_MAX, OPERATIONS_MAX
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.port import Rejection
from echostore.kernel.timeframe import Dependency
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.generated import property_set_pb2, text_pb2, threaded_log_pb2, value_pb2
from echostore.wire.messages import encode_operation
from echostore.wire.signing import SigningKey
from echostore.wire.views import sign_view
from peer_builder import Circle, Liar, head_of, reasons

NOBODY = FeedId(b"nobody!!")


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Scene:
    """Ann and Bob are honest. Cat is a member, and here only her keys act."""

    def __init__(self, folder: Path) -> None:
        self.circle = Circle(folder, "ann", "bob", "cat")
        party = self.circle.party("ann")
        self.item = party.create("property-set", type="note", n=1)
        self.text = party.create("text")
        self.text.insert(0, "hello")
        self.log = party.create("threaded-log")
        self.list = party.create("growable-array")
        self.circle.meet_all()
        self.liar = Liar.of(self.circle, "cat")
        self.circle.names = ("ann", "bob")
        self.before = self._content()

    def _content(self) -> dict[ItemId, object]:
        party = self.circle.party("ann")
        return {item.id: item.value() for item in party.items()}

    def send(self, *operations: pb.Operation) -> None:
        """One message of Cat's with these operations, after all that Ann knows."""
        party = self.circle.party("ann")
        after = [] if self.liar.length else [head_of(party, FeedId(self.item.id[:8]))]
        self.liar.send(self.liar.message(*operations, after=after))

    def goes_on(self) -> None:
        """Cat's feed is not ended: the next good message counts."""
        self.send(self.liar.set(self.item.id, after="still here"))
        assert self.circle.get("ann", self.item)["after"] == "still here"

    def same(self) -> bool:
        return self._content() == self.before


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.circle.close()


# blocks that end their feed, on every peer at the same place


@pytest.mark.parametrize(
    ("detail", "payload"),
    [
        (Reason.UNDECODABLE, lambda liar: b"\xff\xff\xff"),
        (Reason.LYING_DEPTH, lambda liar: b""),
        (Reason.LYING_DEPTH, lambda liar: liar.message(depth=1000)),
        (Reason.LYING_DEPTH, lambda liar: liar.message(depth=(1 << 53) + 1)),
        (Reason.WRONG_KIND, lambda liar: liar.message(credentials=[{}])),
        (Reason.UNDECODABLE, lambda liar: liar.message(dependency_feeds=b"1234567")),
        (Reason.OVERSIZE, lambda liar: liar.message(*[pb.Operation()] * (OPERATIONS_MAX + 1))),
        (
            Reason.UNDECODABLE,
            lambda liar: pb.Message(
                depth=9,
                dependency_feeds=b"b" * 8 + b"a" * 8,
                dependency_seqs=[0, 0],
                dependency_links=bytes(32),
                dependency_depths=[1, 1],
            ).SerializeToString(),
        ),
        (
            Reason.OVERSIZE,
            lambda liar: pb.Message(depth=9, dependency_seqs=[0] * (DEPENDENCIES_MAX + 1)).SerializeToString(),
        ),
        (
            Reason.TIMEFRAME_BACKWARDS,
            lambda liar: liar.message(after=[Dependency(liar.feed, 0, bytes(16), 1)]),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Reason) else None,
)
def test_an_invalid_envelope_ends_its_feed_for_all(
    scene: Scene, detail: Reason, payload: Callable[[Liar], bytes]
) -> None:
    liar = scene.liar
    liar.send(payload(liar))
    liar.send(liar.message(liar.set(scene.item.id, n=666)))
    scene.circle.agree_after_loss()
    rejected = scene.circle.party("bob").rejected()
    assert [(reject.seq, reject.reason) for reject in rejected] == [(0, "invalid"), (1, "after-invalid")]
    assert rejected[0].detail == detail
    assert scene.same()


def test_what_arrives_after_the_end_of_a_feed_is_listed_wherever_it_arrives(scene: Scene) -> None:
    liar = scene.liar
    liar.send(b"\xff")
    for _ in range(3):
        liar.send(liar.message())
    scene.circle.restart("ann")
    liar.send(liar.message())
    scene.circle.agree_after_loss()
    assert reasons(scene.circle.party("bob")) == ["invalid"] + ["after-invalid"] * 4


# blocks that wait


@pytest.mark.parametrize("who", ["unknown feed", "the future of a known feed"])
def test_a_block_that_names_the_future_waits_and_holds_nobody_up(scene: Scene, who: str) -> None:
    liar, circle = scene.liar, scene.circle
    feed = NOBODY if who == "unknown feed" else FeedId(scene.item.id[:8])
    liar.send(liar.message(liar.set(scene.item.id, n=666), after=[Dependency(feed, 99, b"x" * 16, 500)]))
    for _ in range(50):
        liar.send(liar.message(liar.set(scene.item.id, n=667)))
    circle.get("bob", scene.item)["n"] = 2
    circle.agree_after_loss()
    assert circle.get("ann", scene.item)["n"] == 2
    waiting = [feed for feed in circle.party("ann").status.feeds if feed.waits_for]
    assert [(feed.held, feed.processed) for feed in waiting] == [(51, 0)]
    known = {feed_id(FeedKey(each.key)): each.key.hex() for each in circle.party("ann").status.feeds}
    assert waiting[0].waits_for == f"{known.get(feed, feed.hex())}:99", "named in full"
    assert circle.party("ann").rejected() == []


def test_what_waits_is_kept_on_disk_not_in_memory(scene: Scene) -> None:
    liar, party = scene.liar, scene.circle.party("ann")
    liar.send(liar.message(after=[Dependency(NOBODY, 0, bytes(16), 1)]))
    for _ in range(6):
        liar.send(*[liar.message(number=number) for number in range(1000)])
    kept = party.runtime.processor.reader._ahead[liar.feed, 0]
    assert len(kept) <= 4096
    assert len(list(party.runtime.processor.orderer.waiting())) == 1


# ranges that never enter the store


def test_a_block_over_the_limit_is_refused_before_it_is_kept(scene: Scene) -> None:
    result = scene.liar.send(bytes(BLOCK_BYTES_MAX + 1))
    assert isinstance(result, Rejection)
    assert result.reason is Reason.OVERSIZE
    assert scene.circle.party("ann").runtime.feeds.length(scene.liar.key) == 0
    assert scene.same()


def test_a_wrong_signature_is_refused_and_scored(scene: Scene) -> None:
    start, payloads, head = scene.liar.signed(scene.liar.message())
    forged = Head(head.length, head.link, bytes(64))
    result = scene.liar.deliver((start, payloads, forged))
    assert isinstance(result, Rejection)
    assert result.reason is Reason.BAD_SIGNATURE
    assert result.fatal
    assert scene.circle.party("ann").runtime.feeds.length(scene.liar.key) == 0


def test_a_changed_payload_is_refused(scene: Scene) -> None:
    start, payloads, head = scene.liar.signed(scene.liar.message(scene.liar.set(scene.item.id, n=5)))
    result = scene.liar.deliver((start, [payloads[0][:-1] + b"\x07"], head))
    assert isinstance(result, Rejection)
    assert result.reason in (Reason.BAD_LINK, Reason.BAD_SIGNATURE)
    assert scene.same()


def test_a_gap_is_refused(scene: Scene) -> None:
    scene.liar.signed(scene.liar.message())
    result = scene.liar.send(scene.liar.message())
    assert isinstance(result, Rejection)
    assert result.reason is Reason.GAP
    assert scene.same()


def test_a_feed_that_nobody_admitted_is_refused(scene: Scene) -> None:
    liar = scene.liar
    liar._key = SigningKey.generate()
    liar.key = liar._key.public  # type: ignore[assignment]  # a FeedKey
    result = liar.send(liar.message(liar.set(scene.item.id, n=666)))
    assert isinstance(result, Rejection)
    assert result.reason is Reason.UNADMITTED
    assert scene.same()


def test_blocks_of_another_party_do_not_verify_here(scene: Scene) -> None:
    scene.liar.party = scene.circle.peers["cat"].create_party("Other").key
    blocks = scene.liar.signed(scene.liar.message(scene.liar.set(scene.item.id, n=666)))
    scene.liar.party = scene.circle.key
    result = scene.liar.deliver(blocks)
    assert isinstance(result, Rejection)
    assert result.reason is Reason.BAD_SIGNATURE


def test_two_blocks_at_one_place_are_a_fork_that_all_agree_on(scene: Scene) -> None:
    liar, circle = scene.liar, scene.circle
    liar.send(liar.message(liar.set(scene.item.id, kept=1)))
    length, link, depth = liar.length, liar.link, liar.depth
    liar.send(liar.message(liar.set(scene.item.id, n="left")), to="ann")
    liar.length, liar.link, liar.depth = length, link, depth
    circle.meet_all()
    liar.deliver(liar.signed(liar.message(liar.set(scene.item.id, n="right"))), to="bob")
    circle.meet_all()
    circle.agree_after_loss()
    assert circle.get("bob", scene.item).to_dict() == {"n": 1, "kept": 1}
    assert set(reasons(circle.party("ann"))) == {"fork"}


# messages that are rejected whole; their feed goes on


def _value(**kind: object) -> pb.Operation:
    change = property_set_pb2.PropertyChange(path=["n"], set=value_pb2.Value(**kind))  # type: ignore[arg-type]  # one kind
    return pb.Operation(property_set=property_set_pb2.PropertySetOperation(changes=[change]))


def _nested(levels: int) -> value_pb2.Value:
    value = value_pb2.Value(null=True)
    for _ in range(levels):
        value = value_pb2.Value(list=value_pb2.ListValue(values=[value]))
    return value


MALFORMED: dict[str, pb.Operation] = {
    "no kind": pb.Operation(local=1),
    "no change": pb.Operation(property_set=property_set_pb2.PropertySetOperation()),
    "a feed id of wrong length": pb.Operation(feed=b"123", custom=b""),
    "a value without a kind": _value(),
    "nested too deep": pb.Operation(
        property_set=property_set_pb2.PropertySetOperation(
            changes=[property_set_pb2.PropertyChange(path=["n"], set=_nested(40))]
        )
    ),
    "a reference of wrong length": _value(reference=value_pb2.Reference(item=b"short")),
    "a timestamp beyond the calendar": _value(timestamp_us=1 << 62),
    "an empty path": pb.Operation(
        property_set=property_set_pb2.PropertySetOperation(
            changes=[property_set_pb2.PropertyChange(set=value_pb2.Value(null=True))]
        )
    ),
    "a map with unequal columns": _value(map=value_pb2.MapValue(keys=["a"])),
    "a map with a repeated key": _value(
        map=value_pb2.MapValue(keys=["a", "a"], values=[value_pb2.Value(null=True)] * 2)
    ),
    "genesis without a model": pb.Operation(genesis=pb.Genesis(version=1)),
    "genesis without a version": pb.Operation(genesis=pb.Genesis(model="text")),
    "genesis with a foreign id": pb.Operation(feed=b"8 bytes!", local=5, genesis=pb.Genesis(model="text", version=1)),
    "genesis that chooses its id": pb.Operation(local=5, genesis=pb.Genesis(model="text", version=1)),
    "genesis with half a link": pb.Operation(
        genesis=pb.Genesis(model="property-set", version=1, link=pb.LinkEnds(source=bytes(16)))
    ),
    "genesis with a long type": pb.Operation(genesis=pb.Genesis(model="text", version=1, type="x" * 257)),
    "a placement below half an id": pb.Operation(placement=pb.Placement(parent=b"12")),
    "text that is no change graph": pb.Operation(text=text_pb2.TextOperation(update=b"\xff\xff")),
    "a post without a body": pb.Operation(
        threaded_log=threaded_log_pb2.ThreadedLogOperation(post=threaded_log_pb2.Post())
    ),
}


@pytest.mark.parametrize("what", list(MALFORMED))
def test_a_malformed_operation_rejects_its_message_and_the_feed_goes_on(scene: Scene, what: str) -> None:
    liar = scene.liar
    scene.send(liar.set(scene.item.id, n=666), MALFORMED[what])
    assert scene.same(), "the good operation beside it does not count either"
    assert [(reject.position, reject.reason) for reject in scene.circle.party("ann").rejected()] == [(-1, "malformed")]
    scene.goes_on()
    scene.circle.agree_after_loss()


def test_a_value_nested_ten_thousand_levels_ends_its_feed_and_crashes_nobody(scene: Scene) -> None:
    # Deeper than protobuf itself takes; built from bytes, because no encoder would.
    data = b"\x10\x01"
    for _ in range(10_000):
        inner = b"\x0a" + _varint(len(data)) + data
        data = b"\x42" + _varint(len(inner)) + inner
    change = b"\x0a\x01n" + b"\x12" + _varint(len(data)) + data
    body = b"\x0a" + _varint(len(change)) + change
    operation = b"\x22" + _varint(len(body)) + body
    scene.liar.send(b"\x28\x01" + b"\x3a" + _varint(len(operation)) + operation)
    scene.circle.agree_after_loss()
    assert scene.circle.party("bob").rejected()[0].reason == "invalid"
    assert scene.same()


def test_text_that_is_not_unicode_ends_its_feed(scene: Scene) -> None:
    good = scene.liar.message(scene.liar.set(scene.item.id, n="SURROGATE"))
    scene.liar.send(good.replace(b"SURROGATE", b"\xed\xa0\x80aaaaaa"))
    scene.circle.agree_after_loss()
    assert [reject.detail for reject in scene.circle.party("bob").rejected()] == ["undecodable"]
    assert scene.same()


# operations that are rejected alone; the rest of their message counts


def _operation(scene: Scene, what: str) -> tuple[pb.Operation, str]:
    liar = scene.liar
    missing = created_item_id(FeedId(scene.item.id[:8]), 999, 0)
    own = liar.created(1)
    custom_on = liar.on(scene.item.id, custom=b"\x01\x02")
    change = liar.set(scene.item.id, a=1).property_set
    log = threaded_log_pb2.ThreadedLogOperation(post=threaded_log_pb2.Post(body=value_pb2.Value(null=True)))
    return {
        "an item that does not exist": (liar.set(missing, a=1), "no-item"),
        "a move of what does not exist": (liar.move(missing, None), "no-item"),
        "a move below what does not exist": (liar.move(scene.item.id, missing), "no-parent"),
        "a genesis below what does not exist": (liar.genesis(parent=missing), "no-parent"),
        "properties of a text": (liar.on(scene.text.id, property_set=change), "wrong-model"),
        "properties of a list": (liar.on(scene.list.id, property_set=change), "wrong-model"),
        "a post to a property set": (liar.on(scene.item.id, threaded_log=log), "wrong-model"),
        "custom bytes on a property set": (custom_on, "wrong-model"),
        "custom bytes on a text": (liar.on(scene.text.id, custom=b"\x01"), "wrong-model"),
        "custom bytes on a log": (liar.on(scene.log.id, custom=b"\x01"), "wrong-model"),
        "an item of its own that is never made": (liar.set(own, a=1), "no-item"),
        "metadata of what does not exist": (liar.on(missing, metadata=change), "no-item"),
        "a view with a bad proof": (
            liar.genesis(view=pb.ViewProof(inception_key=bytes(range(32)), id_proof=bytes(64))),
            "bad-proof",
        ),
    }[what]


@pytest.mark.parametrize(
    "what",
    [
        "an item that does not exist",
        "a move of what does not exist",
        "a move below what does not exist",
        "a genesis below what does not exist",
        "properties of a text",
        "properties of a list",
        "a post to a property set",
        "custom bytes on a property set",
        "custom bytes on a text",
        "custom bytes on a log",
        "an item of its own that is never made",
        "metadata of what does not exist",
        "a view with a bad proof",
    ],
)
def test_an_operation_that_its_item_refuses_is_rejected_alone(scene: Scene, what: str) -> None:
    operation, reason = _operation(scene, what)
    scene.send(scene.liar.set(scene.item.id, beside=True), operation)
    rejected = scene.circle.party("ann").rejected()
    assert [(reject.position, reject.reason) for reject in rejected] == [(1, reason)]
    assert scene.circle.get("ann", scene.item)["beside"] is True
    scene.circle.agree_after_loss()


def test_operations_of_a_base_model_do_not_fit_a_version_of_it_that_is_not_known(scene: Scene) -> None:
    item = scene.liar.created()
    scene.send(scene.liar.genesis("property-set", version=99), scene.liar.set(item, a=1))
    scene.send(scene.liar.on(item, custom=b"opaque"))
    assert reasons(scene.circle.party("ann")) == ["wrong-model"]
    assert scene.circle.party("ann").get(item).opaque
    scene.circle.agree_after_loss()


def test_a_second_genesis_of_one_id_is_a_duplicate(scene: Scene) -> None:
    arc = (1 << 63) | 7
    scene.send(pb.Operation(local=arc, genesis=pb.Genesis(model="property-set", version=1, type="first")))
    scene.send(pb.Operation(local=arc, genesis=pb.Genesis(model="property-set", version=1, type="second")))
    assert reasons(scene.circle.party("ann")) == ["duplicate"]
    assert [item.type for item in scene.circle.party("ann").items()].count("first") == 1
    scene.circle.agree_after_loss()


def test_a_proof_for_another_party_is_a_bad_proof(scene: Scene) -> None:
    key = SigningKey.generate()
    genesis = pb.Genesis(model="property-set", version=1, view=pb.ViewProof(inception_key=key.public))
    other = scene.circle.peers["cat"].create_party("Other").key
    genesis.view.id_proof = sign_view(other, scene.liar.created(), genesis, key)
    scene.send(pb.Operation(genesis=genesis))
    assert reasons(scene.circle.party("ann")) == ["bad-proof"]
    scene.circle.agree_after_loss()


def test_of_two_views_with_one_inception_key_all_see_the_same_one(scene: Scene) -> None:
    circle, key = scene.circle, SigningKey.generate()
    first, second = scene.liar.created(), scene.liar.created(ahead=1)
    for item in (first, second):
        genesis = pb.Genesis(model="property-set", version=1, view=pb.ViewProof(inception_key=key.public))
        genesis.view.id_proof = sign_view(circle.key, item, genesis, key)
        scene.send(pb.Operation(genesis=genesis))
    assert reasons(circle.party("ann")) == ["duplicate-view"]
    circle.agree_after_loss()
    for name in circle.names:
        assert [view.id for view in circle.party(name).views()] == [first]
        assert circle.party(name).find_view(key.public).id == first
        assert circle.peers[name].resolve(f"echo://{circle.key.hex()}/{key.public.hex()}").id == first
        assert not circle.party(name).has(second)


@pytest.mark.parametrize(
    ("depth", "seq"), [(1 << 50, 0), (1, 5), (1, 1 << 40)], ids=["from the depths", "from the future", "from far away"]
)
def test_a_restore_with_a_forged_stamp_rejects_its_message(scene: Scene, depth: int, seq: int) -> None:
    entry = property_set_pb2.PropertyEntry(
        path=["n"],
        stamp=property_set_pb2.PropertyStamp(depth=depth, seq=seq),
        set=value_pb2.Value(text="mine for ever"),
    )
    restores = property_set_pb2.PropertySetOperation(restores=[property_set_pb2.PropertyRestore(entry=entry)])
    scene.send(scene.liar.set(scene.item.id, a=1))
    scene.send(scene.liar.on(scene.item.id, property_set=restores))
    assert reasons(scene.circle.party("ann")) == ["malformed"]
    assert scene.circle.get("ann", scene.item)["n"] == 1
    scene.goes_on()
    scene.circle.agree_after_loss()


def test_text_in_the_name_of_another_writer_is_forged(scene: Scene) -> None:
    ann = scene.circle.party("ann")
    scene.circle.get("ann", scene.text).insert(0, "more ")
    ann.flush()
    stolen = ann.runtime.processor.operations_at(ann.runtime.data.feed, ann.runtime.data.cursor.length - 1)[0]
    scene.send(encode_operation(scene.liar.feed, stolen))
    assert reasons(ann) == ["forged-writer"]
    assert str(scene.circle.get("ann", scene.text)) == "more hello"
    scene.circle.agree_after_loss()


# writers that do not name their causes: the order of arrival must show nowhere


def _both_orders(scene: Scene, made: Callable[[], ItemId], lie: Callable[[ItemId], bytes]) -> ItemId:
    """Bob makes something; Cat's lie about it reaches Ann before it and Bob after it."""
    item = made()
    scene.circle.party("bob").flush()
    blocks = scene.liar.signed(lie(item))
    scene.liar.deliver(blocks, to="ann")
    scene.liar.deliver(blocks, to="bob")
    scene.circle.agree_after_loss()
    return item


@pytest.mark.parametrize("deep", [False, True], ids=["sorts below", "sorts above"])
def test_an_operation_that_comes_before_its_item_counts_as_if_it_had_come_after(scene: Scene, deep: bool) -> None:
    bob, liar = scene.circle.party("bob"), scene.liar
    if deep:
        liar.send(*[liar.message(number=number) for number in range(20)])
    item = _both_orders(
        scene, lambda: bob.create("property-set", n=1).id, lambda item: liar.message(liar.set(item, lie=1))
    )
    assert scene.circle.party("ann").get(item).to_dict() == {"n": 1, "lie": 1}
    assert scene.circle.party("ann").rejected() == []


def test_a_child_that_comes_before_its_parent_waits_for_it(scene: Scene) -> None:
    bob, liar = scene.circle.party("bob"), scene.liar
    child = liar.created()
    parent = _both_orders(
        scene,
        lambda: bob.create("property-set").id,
        lambda item: liar.message(liar.genesis(parent=item), liar.set(child, n=1)),
    )
    assert scene.circle.party("ann").get(child).parent.id == parent
    assert scene.circle.party("ann").get(child)["n"] == 1


def test_a_child_waits_for_its_parent_also_over_a_restart(scene: Scene) -> None:
    circle, liar = scene.circle, scene.liar
    child = liar.created()
    item = circle.party("bob").create("property-set")
    circle.party("bob").flush()
    liar.send(liar.message(liar.genesis(parent=item.id)), to="ann")
    assert reasons(circle.party("ann")) == ["no-parent"]
    circle.restart("ann")
    assert reasons(circle.party("ann")) == ["no-parent"]
    circle.agree_after_loss()
    assert circle.party("ann").get(child).parent.id == item.id
    assert circle.party("ann").rejected() == []


def test_a_move_that_comes_before_its_new_parent_waits_for_it(scene: Scene) -> None:
    bob, liar = scene.circle.party("bob"), scene.liar
    ann_feed = head_of(scene.circle.party("ann"), FeedId(scene.item.id[:8]))
    parent = _both_orders(
        scene,
        lambda: bob.create("property-set").id,
        lambda item: liar.message(liar.move(scene.item.id, item), after=[ann_feed]),
    )
    assert scene.circle.get("ann", scene.item).parent.id == parent


def test_items_that_name_each_other_as_parents_never_exist(scene: Scene) -> None:
    liar = scene.liar
    one, other = liar.created(0), liar.created(1)
    scene.send(liar.genesis(parent=other), liar.genesis(parent=one))
    assert reasons(scene.circle.party("ann")) == ["no-parent", "no-parent"]
    assert not scene.circle.party("ann").has(one)
    scene.circle.agree_after_loss()


def test_a_text_update_that_hides_its_cause_is_judged_alike_in_every_order(scene: Scene) -> None:
    circle, liar = scene.circle, scene.liar
    circle.get("bob", scene.text).insert(5, " world")
    circle.meet("cat", "bob")
    circle.get("cat", scene.text).insert(11, "!")
    operation = circle.party("cat").runtime._take_edits()[0]
    ann_feed = head_of(circle.party("ann"), FeedId(scene.item.id[:8]))
    blocks = liar.signed(liar.message(encode_operation(liar.feed, operation), after=[ann_feed]))
    liar.deliver(blocks, to="ann")
    liar.deliver(blocks, to="bob")
    circle.agree()


@pytest.mark.parametrize("first", ["cause", "effect"])
@pytest.mark.parametrize("deep", [False, True], ids=["below its cause", "above its cause"])
def test_a_hidden_cause_counts_by_its_place_and_not_by_its_arrival(scene: Scene, first: str, deep: bool) -> None:
    """Also when the peer restarts in between, and when all is folded anew."""
    circle, liar = scene.circle, scene.liar
    circle.get("bob", scene.text).insert(5, " world")
    circle.meet("cat", "bob")
    circle.get("cat", scene.text).insert(11, "!")
    operation = circle.party("cat").runtime._take_edits()[0]
    ann_feed = head_of(circle.party("ann"), FeedId(scene.item.id[:8]))
    sent = []
    if deep:
        sent.append(liar.signed(liar.message(liar.set(scene.item.id, n=2), after=[ann_feed])))
    hiding = liar.message(encode_operation(liar.feed, operation), after=[] if deep else [ann_feed])
    sent.append(liar.signed(hiding))
    if first == "cause":
        circle.meet("ann", "bob")
    for blocks in sent:
        liar.deliver(blocks, to="ann")
    circle.restart("ann")
    bob_feed = circle.party("bob").runtime.data
    assert bob_feed is not None
    stands = deep or liar.feed > bob_feed.feed  # at the same depth the feed decides
    circle.agree()
    text = str(circle.get("ann", scene.text))
    assert text == ("hello world!" if stands else "hello world")
    assert ("builds-on-excluded" in reasons(circle.party("ann"))) is not stands
    circle.agree_after_loss()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
