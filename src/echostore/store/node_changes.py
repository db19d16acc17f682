"""A tree update in memory: the nodes as an ItemStore has them, and the changes until they are saved."""

from typing import Protocol

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import ItemId
from echostore.kernel.snapshot import TreeTop, is_page, is_run
from echostore.store.nodes_ahead import NodesAhead
from echostore.wire.snapshot import EncodedItem
from echostore.wire.tree_nodes import small_items


class NodeRows(Protocol):
    """What an ItemStore keeps of its snapshot tree."""

    def node(self, path: str) -> TreeTop | None: ...
    def branches(self, path: str) -> list[tuple[str, TreeTop]]: ...
    def damage(self, what: str) -> Corrupt: ...


class NodeChanges:
    """A NodeCache over the store whose changes are kept in memory until `save_tree`.

    The branches of a node are in its blob, all in one place: with `ahead` they are read there, in a third of the time that
    their rows take.
    """

    def __init__(self, store: NodeRows, ahead: NodesAhead | None = None) -> None:
        self._store = store
        self._ahead = ahead
        self._seen: dict[str, TreeTop | None] = {}
        """As they are in the store."""
        self._below: dict[str, dict[str, TreeTop]] = {}
        """All branches of nodes, by label: a node is mostly asked for right after those of the one above it."""
        self.kept: dict[str, TreeTop] = {}
        self.forgotten: list[str] = []

    def node(self, path: str) -> TreeTop | None:
        if path and path[:-1] in self._below:
            return self._below[path[:-1]].get(path[-1])
        if path not in self._seen:
            self._seen[path] = self._store.node(path)
        return self._seen[path]

    def branches(self, path: str) -> list[tuple[str, TreeTop]]:
        above = self.node(path)
        # Nothing where the blob is lost or damaged: the rows say the same.
        found = self._ahead.branches(path, above.cid) if self._ahead is not None and above is not None else []
        if not found:
            found = self._store.branches(path)
        self._below[path] = dict(found)
        if above is not None and found and above.count != sum([top.count for _, top in found]):
            raise self._store.damage("a node of the snapshot tree is missing")
        return found

    def page(self, path: str) -> dict[ItemId, EncodedItem] | None:
        """The items of the page at a path, ascending by their keys; None where not all of them stand in one whole."""
        top = self.node(path)
        if top is None or self._ahead is None or not (is_run(path) or is_page(len(path), top.count, top.size)):
            return None
        data = self._ahead.page(path, top.cid)
        found = small_items(data) if data is not None else {}
        return found if len(found) == top.count else None  # else the rows of the items say the same

    def keep(self, path: str, top: TreeTop) -> None:
        self.kept[path] = top

    def forget(self, path: str) -> None:
        # An update forgets a path before it keeps anything below it, so nothing in `kept` is affected.
        self.forgotten.append(path)
