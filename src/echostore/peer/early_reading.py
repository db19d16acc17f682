"""Items and views of an epoch before the rest of it is here: what lies on their path is fetched first, and nothing else."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from echostore.kernel.errors import NotFound
from echostore.kernel.ids import Cid, ItemId, item_text
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.party.epoch_chain import Epoch
from echostore.kernel.snapshot import TreeTop
from echostore.peer.epoch_fetching import Fetch, fetch_heads, item_chunks
from echostore.peer.view_reading import Places, view_states
from echostore.wire.base_epoch import BaseEpoch, BaseName
from echostore.wire.items import is_deleted
from echostore.wire.placements import PlacementReader
from echostore.wire.tree_nodes import IndexNode, Page
from echostore.wire.tree_reader import TreeReader, branches_toward

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.store.blob_store import BlobStore


class EarlyReader:
    """Items and views of an epoch before the rest of it is here. Read-only, as the epoch has them."""

    def __init__(self, party: "Party", epoch: Epoch, fetch: Fetch) -> None:
        self._party, self._fetch = party, fetch
        blobs = party.runtime.blobs
        assert blobs is not None
        self._blobs: BlobStore = blobs
        name = BaseName.of(epoch.genesis, epoch.hash)
        fetch_heads(blobs, name, fetch)
        self.base = BaseEpoch(name, self._get, party.runtime.processor.factory)

    def item(self, item: ItemId) -> ItemRecord:
        """One item; the few blobs on its path are fetched."""
        record = self.base.record(item)
        if record is None:
            raise NotFound(f"item {item_text(item)[:8]} is not in epoch {self.base.name.number}")
        return record

    def view(self, name: "ItemId | bytes", places: Places | None = None) -> dict[ItemId, ItemRecord]:
        """A view by its inception key or its item, with all that hangs below it or is embedded in it; no deleted items.

        Only what leads there is fetched, several blobs at a time; of an epoch without placements, all pages are.
        """
        states = view_states(self.base.root, self._get, name, self._ahead, is_deleted, places)
        if states is None:
            raise NotFound(f"no view {bytes(name).hex()[:8]} is in epoch {self.base.name.number}")
        self._fetch([Cid(cid) for state in states.values() for cid in state.state_cids])
        return {item: self.base.record_of(state) for item, state in states.items()}

    def _ahead(self, reader: TreeReader | PlacementReader, prefixes: Iterable[str]) -> None:
        walk = Toward(reader, prefixes)
        self._fetch([reader.top], walk.below)
        self._fetch(walk.chunks)

    def _get(self, cid: Cid) -> bytes:
        if not self._blobs.has(cid):
            self._fetch([cid])
        return self._blobs.get(cid)


class Toward:
    """What the nodes of a tree lead to on the way to some keys, and the chunks of large items among those."""

    def __init__(self, reader: TreeReader | PlacementReader, prefixes: Iterable[str]) -> None:
        self._reader = reader
        self._expected: dict[Cid, tuple[str, TreeTop | None, list[str]]] = {reader.top: ("", None, list(prefixes))}
        self.chunks: list[Cid] = []

    def below(self, cid: Cid, data: bytes) -> list[Cid]:
        place = self._expected.pop(cid, None)
        if place is None:
            return []  # named twice, which a reader is going to refuse
        path, top, wanted = place
        node = self._reader.open_bytes(cid, data, path, top)
        if isinstance(node, IndexNode):
            onward = list(branches_toward(node, path, wanted))
            self._expected.update((branch.cid, (path + label, branch, mine)) for label, branch, mine in onward)
            return [branch.cid for _, branch, _ in onward]
        if isinstance(node, Page):
            keys = frozenset(wanted)
            large = (entry.data for entry in node.entries if entry.large and entry.key in keys)
            self.chunks += [chunk for item in large for chunk in item_chunks(item)]
        return []
