"""Builders for tests with real peers: a circle of peers that share a party, and a member who lies.

circle = Circle(tmp_path, "ann", "bob", "cat")      # ann founds, the others join as editors
circle.party("bob").get(item)["n"] = 1
cid = circle.agree()                                # all meet; CIDs and lists of rejects are equal

liar = Liar.of(circle, "cat")                       # signs with cat's real keys, past cat's own code
liar.send(liar.message(...), to="ann")
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import echostore
from echostore.kernel.feed import Head
from echostore.kernel.ids import FeedId, FeedKey, ItemId, item_creator, item_local
from echostore.kernel.models.property_set import Set
from echostore.kernel.sync.port import Rejection
from echostore.kernel.timeframe import Dependency, link_prefix
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.testing.inmemory import link
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.links import block_link, head_bytes, payload_hash
from echostore.wire.models import property_set


class Circle:
    """Peers of one party, each with a home of its own below `folder`."""

    def __init__(self, folder: Path, *names: str, roles: dict[str, str] | None = None, **opening: Any) -> None:
        self.folder = folder
        self.names = names
        self._opening = {"background": False, **opening}
        self.peers: dict[str, Peer] = {name: self._open(name) for name in names}
        founder = self.peers[names[0]].create_party("Trip")
        self.key = founder.key
        for name in names[1:]:
            request = self.peers[name].request_join(self.key)
            self.peers[name].enter(founder.members.admit(request, role=(roles or {}).get(name, "editor")))
        self.meet_all()

    def _open(self, name: str) -> Peer:
        return echostore.open(self.folder / name, name=name, **self._opening)

    def party(self, name: str) -> Party:
        return self.peers[name].party(self.key)

    def get(self, name: str, item: Any) -> Any:
        """One peer's own handle of an item that another one made."""
        return self.party(name).get(item.id)

    def meet(self, one: str, other: str) -> None:
        for name in (one, other):
            self.party(name).flush()
        joined = link(self.peers[one], self.peers[other], self.key)
        joined.pump()
        joined.cut()

    def meet_all(self) -> None:
        """Everybody hears of everything, through the first peer."""
        for _ in range(2):
            for name in self.names[1:]:
                self.meet(self.names[0], name)

    def restart(self, name: str, *, lose: Iterable[str] = (), crash: bool = False) -> Party:
        """Close and open a peer; `lose` deletes files of its party (or `meta.db`) in between."""
        if crash:
            self.peers[name]._file_lock.release()  # type: ignore[union-attr]  # the process is gone, its files stay
        else:
            self.peers[name].close()
        for file in lose:
            folder = self.folder / name
            for found in [*folder.glob(file + "*"), *(folder / "parties" / self.key.hex()).glob(file + "*")]:
                found.unlink()
        self.peers[name] = self._open(name)
        return self.party(name)

    def agree(self) -> str:
        """All have met, and have the same state and the same list of rejects; returns the CID."""
        self.meet_all()
        cids = {name: self.party(name).snapshot().cid for name in self.names}
        assert len(set(cids.values())) == 1, cids
        rejects = {name: self.party(name).rejected() for name in self.names}
        for name in self.names:
            assert rejects[name] == rejects[self.names[0]], (name, rejects)
        return cids[self.names[0]]

    def agree_after_loss(self) -> str:
        """Agree; then each peer restarts, once as it is and once without its items, and nothing changes."""
        cid = self.agree()
        rejected = self.party(self.names[0]).rejected()
        for name in self.names:
            for lose in ((), ("items.db",)):
                party = self.restart(name, lose=lose)
                assert party.snapshot().cid == cid, (name, lose)
                assert party.rejected() == rejected, (name, lose)
        return cid

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Liar:
    """Blocks of a member's feed as no honest program would write them, under the member's real signature."""

    def __init__(self, peer: Peer, party: Party, kind: str = "data") -> None:
        own = party.runtime.data if kind == "data" else party.runtime.control
        assert own is not None
        self._key = peer.keys.key(own.cursor.key)
        self.party = party.key
        self.kind = kind
        self.key = FeedKey(own.cursor.key)
        self.feed: FeedId = own.cursor.id
        self.length = own.cursor.length
        self.link = own.cursor.link
        self.depth = own.cursor.depth
        self._circle: Circle | None = None

    @classmethod
    def of(cls, circle: Circle, name: str, kind: str = "data") -> "Liar":
        liar = cls(circle.peers[name], circle.party(name), kind)
        liar._circle = circle
        return liar

    def message(
        self,
        *operations: pb.Operation,
        after: Sequence[Dependency] = (),
        depth: int | None = None,
        number: int = 0,
        **fields: Any,
    ) -> bytes:
        """A well-formed envelope around operations; `number` is the place among messages that are sent together."""
        real = 1 + max([self.depth + number, *[dependency.depth for dependency in after]])
        message = pb.Message(depth=real if depth is None else depth, operations=operations, time_ms=1, **fields)
        for dependency in sorted(after):
            message.dependency_feeds += dependency.feed
            message.dependency_seqs.append(dependency.seq)
            message.dependency_links += dependency.link_prefix
            message.dependency_depths.append(dependency.depth)
        return message.SerializeToString()

    def signed(self, *payloads: bytes) -> tuple[int, list[bytes], Head]:
        """The next blocks, linked and signed; they count as written."""
        start, at = self.length, self.link
        for offset, payload in enumerate(payloads):
            at = block_link(self.key, start + offset, at, payload_hash(payload))
        self.length, self.link = start + len(payloads), at
        self.depth = _depth_of(payloads[-1], self.depth)
        head = Head(self.length, at, self._key.sign(head_bytes(self.party, self.key, self.length, at)))
        return start, list(payloads), head

    def send(self, *payloads: bytes, to: str = "ann") -> int | Rejection:
        """Sign blocks and hand them to a peer as replication does."""
        return self.deliver(self.signed(*payloads), to=to)

    def deliver(self, blocks: tuple[int, list[bytes], Head], *, to: str = "ann") -> int | Rejection:
        assert self._circle is not None
        start, payloads, head = blocks
        return self._circle.peers[to].sync_port(self.party).ingest(self.key, self.kind, start, payloads, head)

    # operations

    def created(self, position: int = 0, *, ahead: int = 0) -> ItemId:
        """The id of an item whose genesis is the operation `position` of the message `ahead` of the next."""
        from echostore.kernel.ids import created_item_id

        return created_item_id(self.feed, self.length + ahead, position)

    def genesis(self, model: str = "property-set", *, version: int = 1, **fields: Any) -> pb.Operation:
        return pb.Operation(genesis=pb.Genesis(model=model, version=version, **fields))

    def on(self, item: ItemId, **kind: Any) -> pb.Operation:
        """An operation of any kind on an item."""
        return pb.Operation(feed=item_creator(item), local=item_local(item), **kind)

    def set(self, item: ItemId, **values: Any) -> pb.Operation:
        changes = tuple(Set((name,), value) for name, value in values.items())
        return self.on(item, property_set=property_set.encode_operation(changes))

    def move(self, item: ItemId, parent: ItemId | None) -> pb.Operation:
        return self.on(item, placement=pb.Placement(kind=pb.Placement.MOVE, parent=parent or b""))


def head_of(party: Party, feed: FeedId) -> Dependency:
    """The last processed block of a feed, as a message names it."""
    cursor = party.runtime.processor.orderer.cursors[feed]
    return Dependency(feed, cursor.length - 1, link_prefix(cursor.link), cursor.depth)


def reasons(party: Party) -> list[str]:
    return [str(reject.reason) for reject in party.rejected()]


def _depth_of(payload: bytes, otherwise: int) -> int:
    try:
        return pb.Message.FromString(payload).depth or otherwise
    except Exception:  # noqa: BLE001  # not a message: that is the point of some tests
        return otherwise
