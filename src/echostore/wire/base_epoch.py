"""The base epoch of an open party: the epoch that its state is folded from.

    blobs.db   state root ─ item tree, moves       feeds.db   about["base"]: which epoch, by snapshot and cut
               cut ─ per feed: length, link, depth, what its last message had processed

    state = items of the base + operations of the blocks above its cut

Everybody folds from the base, also who still holds what lies below it. So a peer that replayed the whole history, one
that truncated its feeds and one that never had more than the epoch and the tail have equal states. What the base holds
counts for good, whatever control says later of the blocks inside it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid, FeedId, ItemId, feed_id
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.items.tree import TreeMove
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.order import Cut
from echostore.kernel.party.credentials import EpochGenesis
from echostore.kernel.snapshot import Path, StateRoot, view_place
from echostore.wire.cids import is_cid
from echostore.wire.epochs import FeedCut, cut_pages, read_cut
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.items import decode_moves, decode_record, move_chunks
from echostore.wire.membership import membership_names
from echostore.wire.placements import PlacementReader
from echostore.wire.snapshot import read_state_root
from echostore.wire.tree_nodes import IndexNode
from echostore.wire.tree_reader import Get, TreeReader

BASE_KEY = "base"
"""Under which the FeedStore names the base."""

FETCHING_KEY = "fetching"
"""Under which the FeedStore names a snapshot whose blobs are still being fetched: its tree has holes."""

MENDING_KEY = "mending"
"""Under which the FeedStore names the base's snapshot once blobs of it were found lost, until it is whole again."""


def holes_key(snapshot: Cid) -> str:
    """Under which the FeedStore says that a snapshot of the past is not whole here, since fetching it was cut short."""
    return f"{FETCHING_KEY}:{snapshot.hex()}"


@dataclass(frozen=True, slots=True)
class BaseName:
    """Which epoch: number and hash of its genesis, its snapshot and its cut."""

    number: int
    genesis: bytes
    snapshot: Cid
    cut: Cid
    discards: bool
    """Whether it or an epoch below it left something out: then the state differs from what the history alone gives."""

    @staticmethod
    def of(genesis: EpochGenesis, hash: bytes) -> "BaseName":
        # `discard_before` never goes back along the chain, so this epoch speaks for those below it as well.
        return BaseName(genesis.number, hash, genesis.snapshot, Cid(genesis.cut), genesis.discard_before_ms > 0)

    def check(self) -> None:
        """Corrupt for a genesis that names no cut: nobody can go on from that."""
        if self.genesis and not is_cid(self.cut):
            raise Corrupt(f"epoch {self.number} does not name where it ends")

    def encode(self) -> bytes:
        return msgspec.msgpack.encode([self.number, self.genesis, self.snapshot, self.cut, self.discards])

    @staticmethod
    def decode(data: bytes) -> "BaseName":
        try:
            number, genesis, snapshot, cut, discards = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise Corrupt("the name of the party's base epoch can't be read") from error
        return BaseName(number, genesis, Cid(snapshot), Cid(cut), discards)


class BaseEpoch:
    """A base whose blobs are here: cuts in memory, items when they are asked for."""

    def __init__(self, name: BaseName, get: Get, factory: ModelFactory) -> None:
        self.name = name
        self.whole = False
        """Whether all of it was looked for and found here, since this process opened it."""
        self._factory = factory
        self._get = get
        self.root: StateRoot = read_state_root(self._need(name.snapshot))
        self.cuts: dict[FeedId, FeedCut] = {feed_id(cut.feed): cut for cut in self._read_cuts()}
        self.read_with(get)

    def read_with(self, get: Get) -> None:
        """Take the blobs from elsewhere from now on."""
        self._get = get
        self.reader = TreeReader(self.root.index_root, get)
        top = self.root.placements
        self.placements = None if top is None else PlacementReader(top, get)

    @staticmethod
    def of_snapshot(number: int, snapshot: Cid, get: Get, factory: ModelFactory) -> "BaseEpoch":
        """An epoch of which nothing but number and snapshot is known: to be read, and not to be gone on from."""
        return BaseEpoch(BaseName(number, b"", snapshot, Cid(b""), discards=True), get, factory)

    def _read_cuts(self) -> Iterable[FeedCut]:
        if self.name.genesis:
            self.name.check()
            return read_cut(self.name.cut, self._need)
        return [FeedCut(each.feed_key, False, each.seq + 1, each.link, 0, ()) for each in self.root.timeframe]

    @property
    def order_cuts(self) -> dict[FeedId, Cut]:
        """What the orderer needs of the cuts."""
        return {feed: Cut(cut.length, cut.link, cut.depth) for feed, cut in self.cuts.items()}

    def length(self, feed: FeedId) -> int:
        """How many blocks of a feed lie inside."""
        cut = self.cuts.get(feed)
        return cut.length if cut is not None else 0

    @cached_property
    def moves(self) -> list[TreeMove]:
        return decode_moves(self._need(self.root.tree), self._need)

    def moves_of(self, items: Iterable[ItemId]) -> list[TreeMove]:
        wanted = frozenset(items)
        return [move for move in self.moves if move.item in wanted]

    def record(self, item: ItemId) -> ItemRecord | None:
        """One item as the base has it."""
        state = self.reader.item(item)
        return None if state is None else self.record_of(state)

    def records(self) -> Iterator[ItemRecord]:
        for _, state in self.reader.items():
            yield self.record_of(state)

    def view(self, inception_key: bytes) -> ItemId | None:
        """The item that an inception key names in the base; the first in canonical order, should there be more."""
        try:
            found = self._views_placed(inception_key)
        except Corrupt:
            found = None  # blobs of the index are lost, and the items say the same
        if found is None:
            found = [state for _, state in self.reader.items() if state.inception_key == inception_key]
        first = min(found, key=lambda state: (state.genesis_depth, state.item), default=None)
        return None if first is None else ItemId(first.item)

    def _views_placed(self, inception_key: bytes) -> list[pb.ItemState] | None:
        """The same by the placement tree; None for a snapshot without one."""
        if self.placements is None:
            return None
        states = self.reader.some(self.placements.at(view_place(inception_key)))
        return [state for state in states.values() if state.inception_key == inception_key]

    def states_below(self, prefix: Path) -> Iterator[pb.ItemState]:
        """The items whose keys begin with some nibbles, in the order of their keys."""
        covering = self.reader.node_for_prefix(prefix)
        waiting = [] if covering is None else [(covering.path, covering.top)]
        while waiting:
            path, top = waiting.pop()
            node = self.reader.open_node(top.cid, path, top)
            if isinstance(node, IndexNode):
                waiting += [(path + label, below) for label, below in reversed(node.branches)]
                continue
            for entry, state in self.reader.page_items(node, path):
                if entry.key.startswith(prefix):
                    yield state

    def names(self) -> Iterator[Cid]:
        """All blobs of the epoch, names before what they lead to; one may come more than once."""
        yield self.name.snapshot
        yield self.name.cut
        yield from cut_pages(self._need(self.name.cut))
        yield from snapshot_blobs(self.root, self._need)

    def whole_state(self, state: pb.ItemState) -> bytes:
        """An item's bytes with its model state inside, also where that is in chunks of its own."""
        if not state.state_cids:
            return state.SerializeToString(deterministic=True)
        whole = pb.ItemState()
        whole.CopyFrom(state)
        whole.state = self.reader.state_bytes(state)
        whole.ClearField("state_cids")
        return whole.SerializeToString(deterministic=True)

    def record_of(self, state: pb.ItemState) -> ItemRecord:
        """The record of an item whose state was read out of the tree."""
        return decode_record(self.whole_state(state), self._factory)

    def blob(self, cid: Cid) -> bytes:
        """A blob of the epoch; Corrupt when it is not here."""
        return self._need(cid)

    def _need(self, cid: Cid) -> bytes:
        data = self._get(cid)
        if data is None:
            raise Corrupt("a blob of the party's base epoch is missing")
        return data


def snapshot_blobs(root: StateRoot, get: Callable[[Cid], bytes]) -> Iterator[Cid]:
    """All blobs below a state root, names before what they lead to; one may come more than once."""
    yield from membership_names(root.membership_root, get)
    yield root.tree
    yield from move_chunks(get(root.tree))
    yield from TreeReader(root.index_root, get).reachable()
    if root.placements is not None:
        yield from PlacementReader(root.placements, get).reachable()


def load_base(about: Callable[[str], bytes | None], get: Get, factory: ModelFactory) -> BaseEpoch | None:
    """The base that a FeedStore names; None where the party is folded from its beginning."""
    stored = about(BASE_KEY)
    return None if not stored else BaseEpoch(BaseName.decode(stored), get, factory)


def base_mark(base: BaseEpoch | None) -> bytes | None:
    """What a state root says of its base: its genesis where the base left something out, nothing where it did not.

    An epoch that leaves nothing out changes no byte of the state, so that peers who have heard of it, peers who have
    not and a pipeline that folds the whole history agree. One that does is a different past, and named.
    """
    return base.name.genesis if base is not None and base.name.discards else None
