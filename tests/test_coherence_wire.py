"""The bytes of the coherence protocol: every message comes back as it was, and hostile bytes do no harm."""

from random import Random

import pytest

from echostore.kernel.coherence.arcs import ARC_IDS_BITS
from echostore.kernel.coherence.edge import Edge
from echostore.kernel.coherence.events import UP, ChildOpened, LinkId, Opening, Received, Send
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import (
    Acquire,
    Announce,
    Arc,
    Attach,
    Attached,
    Backpressure,
    BeginUpdate,
    Below,
    Connectivity,
    Deannounce,
    Delta,
    Denied,
    EndUpdate,
    FollowsEpoch,
    Gone,
    Grant,
    GrantArc,
    GrantSystemId,
    IndexValue,
    Invalidate,
    IssuedId,
    LaneItem,
    Linked,
    Message,
    MessageId,
    NotifyReplicated,
    NullUpdate,
    Patch,
    Pin,
    PublishOp,
    RejectOp,
    RejectReason,
    ReleaseArc,
    Service,
    Spec,
    Subscribed,
    SystemId,
    Token,
    Touched,
    Undelivered,
    Update,
    UserMessage,
    UserQueued,
    UserReceipt,
    WaitForEpoch,
    Witness,
)
from echostore.kernel.coherence.root import Root
from echostore.kernel.coherence.updates import frames_of
from echostore.kernel.reasons import Reason
from echostore.testing.coherence_models import PLAIN
from echostore.wire.coherence import (
    CREDENTIAL_BYTES_MAX,
    FRAME_BYTES_MAX,
    UPDATE_BYTES_MAX,
    UPDATE_ITEMS_MAX,
    LinkFrame,
    decode_frame,
    encode_frame,
    generation_bytes,
    message_bytes,
)
from echostore.wire.coherence_names import SPEC_BYTES_MAX
from echostore.wire.coherence_parts import Parts, parts_of
from echostore.wire.generated import coherence_pb2 as pb
from echostore.wire.sync import MalformedFrame

HOSTILE_FRAMES = 10_000

ROOT = SystemId(b"r" * 16)
LEAF = SystemId(b"r" * 16, (2,))
CLOCK, ARC = Arc(ROOT), Arc(LEAF, 1)
SPEC, OP = Spec(b"all tasks"), IssuedId(Arc(LEAF, 1), 1)
FOLLOWS = (FollowsEpoch(ARC, 1), FollowsEpoch(Arc(SystemId(b"s" * 16)), 300))
ID = MessageId(LEAF, 1, 7)

MESSAGES: list[Message] = [
    Attach(7, LEAF, True, 3, (Below(SystemId(b"r" * 16, (3, 300)), (1, 2), b"what it showed"),), (4,)),
    Attach(7, None, False, 0),
    Attach(7, None, False, 0, (), (4,), b"what it showed", True),
    Attached((1, 2), LEAF, 5, FOLLOWS),
    Attached((), LEAF, 5, FOLLOWS, (RejectOp(OP, Reason.BEYOND_CUT, b"item"),)),
    GrantSystemId(7, LEAF, (1,)),
    GrantArc(ARC, 5 << ARC_IDS_BITS),
    ReleaseArc(ARC, 3),
    ReleaseArc(ARC, 3, b"s" * 64),
    Linked(CLOCK, 1, FOLLOWS),
    Linked(CLOCK, 1, FOLLOWS, (RejectOp(OP, Reason.DENIED), RejectOp(OP, RejectReason.NO_ITEM, b"item"))),
    BeginUpdate(CLOCK, 0, 1),
    LaneItem(CLOCK, 1, 0, 0, Subscribed(SPEC, 0)),
    LaneItem(CLOCK, 1, 1, 2, Invalidate(SPEC)),
    LaneItem(CLOCK, 1, 0, 1, Delta(SPEC, 0, Patch(b"+1"))),
    LaneItem(CLOCK, 1, 0, 0, RejectOp(OP, Reason.DENIED)),
    LaneItem(ARC, 1, 0, 0, PublishOp(OP, b"item", b"set done")),
    EndUpdate(CLOCK, 0, 1, FOLLOWS, ((0, 1), (3, 200))),
    EndUpdate(ARC, 0, 1, (), ((0, 1),), b"s" * 64),
    NullUpdate(CLOCK, 0, 1),
    Update(CLOCK, 0, 1, FOLLOWS, (Subscribed(SPEC, 0), Invalidate(SPEC), Delta(SPEC, 0, Patch(b"+1")))),
    Update(CLOCK, 3, 9, (), (RejectOp(OP, Reason.DENIED),)),
    Update(ARC, 0, 1, (), (PublishOp(OP, b"item", b"set done"), PublishOp(OP, b"item", b"set done again"))),
    Update(ARC, 0, 1, (), (PublishOp(OP, b"item", b"set done"),), b"s" * 64),
    RejectOp(OP, RejectReason.OUTSIDE_ARC),
    Acquire(SPEC),
    Acquire(SPEC, 0, Token(b"hash")),
    Grant(SPEC, None, 0, 3, IndexValue(b"")),
    Grant(SPEC, 2, 0, 3, None, Token(b"hash")),
    Gone(SPEC, 1, 2),
    Denied(SPEC, RejectReason.EXPIRED),
    Touched((SPEC, Spec(b"x"))),
    Pin(0),
    Pin(None),
    NotifyReplicated(ARC, 2, ROOT, 9),
    WaitForEpoch(CLOCK, 1),
    Announce(Service(LEAF, "chess"), 1, 2, b"white"),
    Announce(Service(LEAF, "chess"), 1, 2, b"white", b"s" * 64),
    Deannounce(Service(LEAF, "chess"), 1, 2, b"s" * 64),
    Deannounce(Service(LEAF, "chess"), 1, 3),
    Connectivity(LEAF, True, (1,)),
    UserMessage(ID, 3, LEAF, ((Witness(CLOCK, 1), Witness(ARC, 2)),), "note", b"hello", True),
    UserMessage(ID, 3, LEAF, (), "note", b"hello", True, 6),
    UserMessage(ID, 3, LEAF, (), "note", b"hello", signature=b"s" * 64),
    UserReceipt(ID, LEAF),
    UserReceipt(ID, LEAF, b"s" * 64),
    Undelivered(ID, RejectReason.EXPIRED),
    UserQueued(ID),
    Backpressure("acquire", 1.5),
]
TYPES = sorted({type(message) for message in MESSAGES}, key=lambda each: each.__name__)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    frame = LinkFrame((1 << 64) - 1, message)
    assert decode_frame(encode_frame(frame)) == frame


def test_every_kind_of_frame_is_covered() -> None:
    kinds = {each.name for each in pb.CoherenceFrame.DESCRIPTOR.fields} - {"generation"}
    seen = {pb.CoherenceFrame.FromString(encode_frame(LinkFrame(1, each))).WhichOneof("kind") for each in MESSAGES}
    assert seen == kinds


@pytest.mark.parametrize(
    "message",
    [
        Acquire(Spec(b"")),
        Acquire(Spec(b"x" * (SPEC_BYTES_MAX + 1))),
        Acquire(SPEC, 1 << 60),
        Acquire(SPEC, None, Token(b"x" * 65)),
        Grant(SPEC, None, 3, 2, IndexValue(b"")),
        Grant(SPEC, 9, 0, 3, IndexValue(b"")),
        Grant(SPEC, None, 0, 3, None),
        NullUpdate(CLOCK, 1, 1),
        BeginUpdate(CLOCK, 2, 1),
        EndUpdate(CLOCK, 0, 1, (), ((0, 100_001),)),
        LaneItem(CLOCK, 1, 64, 0, Invalidate(SPEC)),
        GrantArc(ARC, 5),
        GrantSystemId(7, SystemId(b"short")),
        GrantSystemId(7, SystemId(b"r" * 16, (1,) * 17)),
        RejectOp(IssuedId(ARC, 0), RejectReason.EXPIRED),
        RejectOp(OP, RejectReason.EXPIRED, b"o" * 300),
        Linked(CLOCK, 1, (), (RejectOp(IssuedId(ARC, 0), RejectReason.EXPIRED),)),
        Attached((1,), LEAF, 1, (), (RejectOp(OP, RejectReason.EXPIRED, b"o" * 300),)),
        Attach(7, None, False, 0, (), (4,), b"c" * (CREDENTIAL_BYTES_MAX + 1)),
        Attach(7, None, False, 0, (Below(LEAF, (4,), b"c" * (CREDENTIAL_BYTES_MAX + 1)),)),
        UserMessage(ID, 3, LEAF, (), "note", b"", signature=b"short"),
        UserReceipt(ID, LEAF, b"short"),
        ReleaseArc(ARC, 3, b"short"),
        UserMessage(ID, 3, LEAF, ((),), "note", b""),
        UserMessage(ID, 3, LEAF, (), "n" * 257, b""),
        Backpressure("x", float("nan")),
        Backpressure("x", -1.0),
        Update(CLOCK, 2, 2, (), (Invalidate(SPEC),)),
        Update(CLOCK, 0, 1, (), (Invalidate(Spec(b"")),)),
        Update(CLOCK, 0, 1, (), (Invalidate(SPEC), Subscribed(Spec(b"x" * (SPEC_BYTES_MAX + 1)), 0))),
        Update(ARC, 0, 1, (), (PublishOp(IssuedId(ARC, 0), b"item", b""),)),
    ],
    ids=repr,
)
def test_what_breaks_a_limit_is_refused(message: Message) -> None:
    with pytest.raises(MalformedFrame):
        decode_frame(encode_frame(LinkFrame(1, message)))


def test_one_frame_holds_so_many_items_of_an_update_and_no_more() -> None:
    most = Update(CLOCK, 0, 1, (), (Invalidate(SPEC),) * UPDATE_ITEMS_MAX)
    assert decode_frame(encode_frame(LinkFrame(1, most))).message == most
    more = Update(CLOCK, 0, 1, (), (Invalidate(SPEC),) * (UPDATE_ITEMS_MAX + 1))
    with pytest.raises(MalformedFrame, match="items in one frame"):
        decode_frame(encode_frame(LinkFrame(1, more)))


def test_an_update_inside_an_update_is_no_item() -> None:
    """Nor is anything else that is not known: an item has to be of a kind."""
    whole = Update(CLOCK, 0, 1, (), (Invalidate(SPEC),))
    frame = pb.CoherenceFrame.FromString(encode_frame(LinkFrame(1, whole)))
    nested = pb.CoherenceUpdate.FromString(frame.update.SerializeToString())
    nested.items[0].CopyFrom(
        pb.CoherenceUpdateItem.FromString(b"\xda\x01" + bytes([frame.ByteSize()]) + frame.SerializeToString())
    )
    frame.update.CopyFrom(nested)
    with pytest.raises(MalformedFrame, match="without a kind"):
        decode_frame(frame.SerializeToString())


def test_an_update_that_ends_too_early_is_refused_at_every_place() -> None:
    data = encode_frame(LinkFrame(1, next(each for each in MESSAGES if isinstance(each, Update) and each.follows)))
    whole = len(generation_bytes(1))
    for end in range(whole + 1, len(data)):
        with pytest.raises(MalformedFrame):
            decode_frame(data[:end])


def test_the_generation_and_the_message_are_bytes_of_their_own() -> None:
    for message in MESSAGES:
        data = message_bytes(message)
        for generation in (1, (1 << 64) - 1):
            assert decode_frame(generation_bytes(generation) + data) == LinkFrame(generation, message)


def test_an_update_is_one_frame_while_it_is_small() -> None:
    delta = Delta(SPEC, 0, Patch(b"p" * 1000))
    small, null = Update(CLOCK, 0, 1, FOLLOWS, (delta,)), Update(CLOCK, 0, 1)
    assert list(parts_of(small)) == [small]
    assert list(parts_of(Update(CLOCK, 0, 1, FOLLOWS))) == [Update(CLOCK, 0, 1, FOLLOWS)]
    assert list(parts_of(null)) == [NullUpdate(CLOCK, 0, 1)]
    assert list(parts_of(Acquire(SPEC))) == [Acquire(SPEC)]
    for items in ((delta,) * (UPDATE_ITEMS_MAX + 1), (Delta(SPEC, 0, Patch(bytes(UPDATE_BYTES_MAX))),)):
        large = Update(CLOCK, 0, 1, FOLLOWS, items)
        assert parts_of(large) == frames_of(large)
    ops = tuple(PublishOp(OP, b"item", bytes(1000)) for _ in range(1200))
    assert len(parts_of(Update(ARC, 0, 1, (), ops))) == len(ops) + 2


def test_equal_messages_for_many_links_are_encoded_once() -> None:
    parts, message = Parts(), Update(CLOCK, 0, 1, (), (Invalidate(SPEC),))
    assert parts.of(message) is parts.of(message)
    other = Acquire(SPEC)
    assert parts.of(other) == [(other, message_bytes(other))]
    assert parts.of(message) == [(message, message_bytes(message))]


def test_too_many_bytes_are_refused_before_they_are_read() -> None:
    with pytest.raises(MalformedFrame, match="at most"):
        decode_frame(bytes(FRAME_BYTES_MAX + 1))


def test_a_reason_of_a_later_version_is_a_refusal_all_the_same() -> None:
    frame = pb.CoherenceFrame.FromString(encode_frame(LinkFrame(1, RejectOp(OP, RejectReason.EXPIRED))))
    frame.reject_op.reason = "invented-later"
    assert decode_frame(frame.SerializeToString()).message == RejectOp(OP, RejectReason.EXCLUDED)


class Tree:
    """A root, an edge and a leaf with links that stand, and a hostile system at the end of each."""

    def __init__(self) -> None:
        self.root, self.edge, self.leaf = Root(ROOT, PLAIN), Edge(PLAIN), Leaf(PLAIN, LinkId("home"))
        self.root.receive(ChildOpened(LinkId("x"), 1))
        self.root.receive(Received(LinkId("x"), 1, Attach(7, None, True, 0)))
        for machine, link in ((self.edge, UP), (self.leaf, LinkId("home"))):
            machine.receive(Opening(link, 1, 7))
            machine.receive(Received(link, 1, GrantSystemId(7, LEAF)))
            machine.receive(Received(link, 1, Linked(CLOCK, 0)))
        self.leaf.receive(Received(LinkId("home"), 1, GrantArc(ARC, 0)))
        self.edge.receive(ChildOpened(LinkId("x"), 1))
        self.edge.receive(Received(LinkId("x"), 1, Attach(8, LEAF, False, 0)))
        self.edge.receive(Received(UP, 1, Attached((1,), LEAF, 0, ())))
        assert LinkId("x") in self.edge.serving.links
        assert self.leaf.caches[LinkId("home")].generation == 1

    def hear(self, message: Message) -> int:
        """What all of them answer."""
        effects = [
            *self.root.receive(Received(LinkId("x"), 1, message)),
            *self.edge.receive(Received(UP, 1, message)),
            *self.edge.receive(Received(LinkId("x"), 1, message)),
            *self.leaf.receive(Received(LinkId("home"), 1, message)),
        ]
        return sum(not isinstance(effect, Send) for effect in effects)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_ten_thousand_hostile_frames_of_each_type(kind: type) -> None:
    """Bent bytes are refused by type; what still decodes disturbs no machine, however wrong it is."""
    random = Random(kind.__name__)
    frames = [encode_frame(LinkFrame(1, message)) for message in MESSAGES if type(message) is kind]
    tree = Tree()
    refused = heard = 0
    for _ in range(HOSTILE_FRAMES):
        data = bytearray(random.choice(frames))
        for _ in range(random.randint(1, 4)):
            place = random.randrange(len(data)) if data else 0
            match random.randrange(5):
                case 0 if data:
                    data[place] ^= 1 << random.randrange(8)
                case 1:
                    data[place:place] = random.randbytes(random.randint(1, 4))
                case 2:
                    del data[place : place + random.randint(1, 8)]
                case 3:
                    data += random.choice(frames)[random.randrange(9) :]
                case _ if data:
                    data[place] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
        try:
            message = decode_frame(bytes(data)).message
        except MalformedFrame:
            refused += 1
            continue
        heard += 1
        tree.hear(message)
    assert refused + heard == HOSTILE_FRAMES
    assert refused > HOSTILE_FRAMES // 20
    assert heard > HOSTILE_FRAMES // 100
    assert tree.root.holdings.cur == 0
    assert tree.root.batches.applied == {}
    assert len(tree.root.serving.links) == 1
