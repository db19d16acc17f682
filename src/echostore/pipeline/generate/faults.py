"""Faulty feeds: what liars, broken disks and lost blocks leave in a lake, each in a feed of its own.

A fault touches nobody else: its feed is that of an extra member, and honest feeds never name it. Each begins with a few
good blocks, so that a reader who drops whole feeds is found out too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from echostore.kernel.feed import ChainStep, ForkProof, Head
from echostore.kernel.ids import FeedId, FeedKey, ItemId, created_item_id, feed_id
from echostore.kernel.items.operations import GENESIS, METADATA, ItemOperation
from echostore.kernel.items.record import ACCESS_KEY, Genesis
from echostore.kernel.limits import SEQ_MAX
from echostore.kernel.models.property_set import PropertySet, Set
from echostore.kernel.models.text import ConcurrentText
from echostore.kernel.party.credentials import FeedBound, FeedRetire, ForkEvidence, MemberRemove, Role
from echostore.kernel.timeframe import Dependency
from echostore.pipeline.generate.encoding import message
from echostore.pipeline.generate.feeds import Give, SignedFeed
from echostore.pipeline.generate.founding import START_MS, Founding
from echostore.pipeline.generate.keys import Member
from echostore.pipeline.generate.shape import Part
from echostore.wire.generated import message_pb2
from echostore.wire.links import head_bytes, payload_hash
from echostore.wire.messages import encode_operation

HEAD_BLOCKS: Final = 4
"""Blocks under one head of a faulty feed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done, to which feed, and the first block that it concerns."""

    kind: str
    feed: FeedKey
    seq: int
    blocks: int
    """Data blocks that came into the lake with it, good ones and both branches of a fork included."""


@dataclass(slots=True)
class _Scene:
    """Where a fault is made."""

    founding: Founding
    control: Dependency
    founder: Dependency
    """A block of the founder's data feed, which the first message names."""
    give: Give
    member: Member
    witnesses: list[Member]
    feed: SignedFeed
    item: ItemId = field(init=False)
    blocks: int = 0

    def __post_init__(self) -> None:
        self.item = created_item_id(self.feed.id, 0, 0)

    # good blocks

    def begin(self) -> None:
        """An item, and some writes to it, under one head."""
        first = Genesis(self.item, PropertySet.name, 1, "task", None, 1)
        self.append(self.message(ItemOperation(self.item, GENESIS, first), _set(self.item, 0)))
        self.go_on(HEAD_BLOCKS - 1)

    def go_on(self, count: int = HEAD_BLOCKS, feed: SignedFeed | None = None) -> None:
        feed = feed or self.feed
        payloads = [
            self.message(_set(self.item, feed.length + ahead), feed=feed, ahead=ahead) for ahead in range(count)
        ]
        self.append(*payloads, feed=feed)

    def message(
        self,
        *operations: ItemOperation,
        feed: SignedFeed | None = None,
        ahead: int = 0,
        after: tuple[Dependency, ...] = (),
        lie: int = 0,
        raw: tuple[bytes, ...] = (),
    ) -> bytes:
        """A message `ahead` of the next block of a feed; the first one names what its writer begins with."""
        feed = feed or self.feed
        named = sorted(after)
        if feed.length + ahead == 0:
            named = feed.fresh([self.control, self.founder, *after])
        depth = 1 + ahead + max([feed.depth, *[each.depth for each in named]]) + lie
        encoded = [encode_operation(feed.id, each).SerializeToString() for each in operations]
        return message(named, depth, START_MS + depth, [*encoded, *raw])

    def append(self, *payloads: bytes, feed: SignedFeed | None = None) -> None:
        (feed or self.feed).append(payloads, [_depth(payload) for payload in payloads])
        self.blocks += len(payloads)

    def witness(self, number: int, seen: Dependency) -> None:
        """An honest member who has seen a block of this feed, and wrote after it."""
        feed = SignedFeed(self.feed.party, self.witnesses[number].data_key, self.give, control=False)
        item = created_item_id(feed.id, 0, 0)
        genesis = Genesis(item, PropertySet.name, 1, "task", None, 1)
        operations = (ItemOperation(item, GENESIS, genesis), _set(item, number))
        self.append(self.message(*operations, feed=feed, after=(seen,)), feed=feed)
        feed.flush()


# --- what may be wrong ------------------------------------------------------------------------------------------------


def _bad_link(scene: _Scene) -> int:
    scene.go_on(2 * HEAD_BLOCKS)
    scene.feed.alter_payload(HEAD_BLOCKS)
    return HEAD_BLOCKS


def _bad_signature(scene: _Scene) -> int:
    scene.go_on()
    scene.feed.alter_signature()
    return HEAD_BLOCKS


def _gap(scene: _Scene) -> int:
    feed = scene.feed
    lost = [scene.message(_set(scene.item, 1), ahead=ahead) for ahead in range(HEAD_BLOCKS)]
    feed.leave_out(lost, [_depth(payload) for payload in lost])
    scene.go_on()
    return 2 * HEAD_BLOCKS


def _fork(scene: _Scene) -> int:
    """Two branches of equal length: which of them came first shall make no difference."""
    other = scene.feed.branch()
    scene.go_on(3)
    scene.append(
        *[scene.message(_set(scene.item, -ahead), feed=other, ahead=ahead) for ahead in range(1, 4)], feed=other
    )
    scene.feed.flush()
    other.flush()
    return HEAD_BLOCKS


def _proven_fork(scene: _Scene) -> int:
    """A fork with its proof among the control messages; two members built on a branch each."""
    feed = scene.feed
    before = feed.link
    other = feed.branch()
    sides: list[tuple[tuple[ChainStep, ...], Head]] = []
    for number, side in enumerate((feed, other)):
        payloads = [scene.message(_set(scene.item, 10 * number + at), feed=side, ahead=at) for at in range(3)]
        scene.append(*payloads, feed=side)
        steps = tuple(ChainStep(payload_hash(payload)) for payload in payloads)
        signed = scene.member.data_key.sign(head_bytes(side.party, side.key, side.length, side.link))
        sides.append((steps, Head(side.length, side.link, signed)))
        side.flush()
        scene.witness(number, side.mark())
    (left, left_head), (right, right_head) = sides
    proof = ForkProof(feed.party, feed.key, HEAD_BLOCKS, before, left, left_head, right, right_head)
    scene.founding.issue([ForkEvidence(proof)])
    return HEAD_BLOCKS


def _lying_depth(scene: _Scene) -> int:
    scene.append(scene.message(_set(scene.item, 1), lie=7))
    scene.go_on(3)
    return HEAD_BLOCKS


def _timeframe_backwards(scene: _Scene) -> int:
    scene.append(scene.message(_set(scene.item, 1), after=(scene.control,)))
    scene.go_on(3)
    return HEAD_BLOCKS


def _undecodable(scene: _Scene) -> int:
    scene.append(b"\xff\xff\xff this is no message")
    scene.go_on(3)
    return HEAD_BLOCKS


def _unadmitted(scene: _Scene) -> int:
    scene.go_on()
    return 0


def _beyond_cut(scene: _Scene) -> int:
    cut = scene.feed.mark()
    link = scene.feed.link
    scene.go_on()
    scene.founding.issue([MemberRemove(scene.member.identity, (FeedBound(cut.feed, cut.seq + 1, link),))])
    return HEAD_BLOCKS


def _reader(scene: _Scene) -> int:
    scene.go_on()
    return 0


def _retired(scene: _Scene) -> int:
    scene.founding.issue([FeedRetire(scene.feed.key, scene.feed.length)])
    scene.go_on()
    return HEAD_BLOCKS


def _malformed(scene: _Scene) -> int:
    nothing = message_pb2.Operation(local=1).SerializeToString()
    scene.append(scene.message(_set(scene.item, 1), raw=(nothing,)))
    scene.go_on()
    return HEAD_BLOCKS


def _no_item(scene: _Scene) -> int:
    scene.append(scene.message(_set(created_item_id(FeedId(b"no feed!"), 0, 0), 1), _set(scene.item, 2)))
    scene.go_on()
    return HEAD_BLOCKS


def _no_parent(scene: _Scene) -> int:
    item = created_item_id(scene.feed.id, scene.feed.length, 0)
    parent = created_item_id(scene.feed.id, 1 << 40, 0)
    genesis = ItemOperation(item, GENESIS, Genesis(item, PropertySet.name, 1, "task", parent, 1))
    scene.append(scene.message(genesis, _set(item, 1)))
    scene.go_on()
    return HEAD_BLOCKS


def _wrong_model(scene: _Scene) -> int:
    item = created_item_id(scene.feed.id, scene.feed.length, 0)
    genesis = ItemOperation(item, GENESIS, Genesis(item, ConcurrentText.name, 1, "note", None, 1))
    scene.append(scene.message(genesis, _set(item, 1)))
    scene.go_on()
    return HEAD_BLOCKS


def _forged_writer(scene: _Scene) -> int:
    item = created_item_id(scene.feed.id, scene.feed.length, 0)
    genesis = ItemOperation(item, GENESIS, Genesis(item, ConcurrentText.name, 1, "note", None, 1))
    text = ConcurrentText(item)
    text.begin(FeedId(b"somebody"))
    text.insert(0, "not mine")
    scene.append(scene.message(genesis, ItemOperation(item, ConcurrentText.name, text.seal())))
    scene.go_on()
    return HEAD_BLOCKS


def _denied(scene: _Scene) -> int:
    """A member narrows who may write an item to others, and writes on."""
    rule = ItemOperation(scene.item, METADATA, (Set((ACCESS_KEY,), {"members": [bytes(32)]}),))
    scene.append(scene.message(rule))
    scene.go_on()
    return HEAD_BLOCKS + 1


def _waiting(scene: _Scene) -> int:
    """A message that names a block which nobody has."""
    future = Dependency(scene.founder.feed, SEQ_MAX, bytes(16), scene.founder.depth + 1000)
    scene.append(scene.message(_set(scene.item, 1), after=(future,)))
    scene.go_on(3)
    return HEAD_BLOCKS


KINDS: Final[dict[str, Callable[[_Scene], int]]] = {
    "bad-link": _bad_link,
    "bad-signature": _bad_signature,
    "gap": _gap,
    "proven-fork": _proven_fork,
    "lying-depth": _lying_depth,
    "timeframe-backwards": _timeframe_backwards,
    "unadmitted": _unadmitted,
    "beyond-cut": _beyond_cut,
    "reader": _reader,
    "undecodable": _undecodable,
    "malformed": _malformed,
    "no-item": _no_item,
    "waiting": _waiting,
    "fork": _fork,
    "no-parent": _no_parent,
    "wrong-model": _wrong_model,
    "forged-writer": _forged_writer,
    "denied": _denied,
    "retired": _retired,
}
"""Each makes its fault after a few good blocks, and returns the first seq that it concerns. They take turns."""


class Faults:
    """The faults of one party, and the members in whose feeds they are made."""

    def __init__(self, part: Part) -> None:
        names = list(KINDS)
        first, root = part.first_fault(), part.shape.root()
        self._kinds = [names[(first + number) % len(names)] for number in range(part.faults)]
        self._actors = [
            Member.of(root, part.number, f"fault {number}", Role.READER if kind == "reader" else Role.EDITOR)
            for number, kind in enumerate(self._kinds)
        ]
        self._witnesses = [
            [
                Member.of(root, part.number, f"witness {number} {side}", Role.EDITOR)
                for side in range(2 if kind == "proven-fork" else 0)
            ]
            for number, kind in enumerate(self._kinds)
        ]

    @property
    def members(self) -> list[Member]:
        """Whom the founder must admit."""
        actors = [actor for actor, kind in zip(self._actors, self._kinds, strict=True) if kind != "unadmitted"]
        return [*actors, *[witness for some in self._witnesses for witness in some]]

    def write(self, founding: Founding, founder: Dependency, give: Give) -> list[Fault]:
        """Make the faulty feeds, after a block of the founder's data feed."""
        control = founding.feed.mark()
        faults = []
        for kind, actor, witnesses in zip(self._kinds, self._actors, self._witnesses, strict=True):
            feed = SignedFeed(founding.party, actor.data_key, give, control=False)
            scene = _Scene(founding, control, founder, give, actor, witnesses, feed)
            scene.begin()
            seq = KINDS[kind](scene)
            feed.flush()
            assert feed_id(feed.key) == feed.id
            faults.append(Fault(kind, feed.key, seq, scene.blocks))
        return faults


def _set(item: ItemId, value: int) -> ItemOperation:
    return ItemOperation(item, PropertySet.name, (Set(("priority",), value),))


def _depth(payload: bytes) -> int:
    """The depth that a payload claims; 0 when it is no message."""
    try:
        return message_pb2.Message.FromString(payload).depth
    except (DecodeError, ValueError):
        return 0
