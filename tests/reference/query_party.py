"""A party in dictionaries for the fluent queries: a `SourceProvider` over `reference.query.Graph`."""

import threading
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from echostore.kernel.ids import ItemId, PartyKey
from echostore.kernel.values import Value
from echostore.peer.query import Query, query_over
from reference.query import Graph


@dataclass(frozen=True)
class Handle:
    """What stands for an item here."""

    id: ItemId
    party: PartyKey

    def __repr__(self) -> str:
        return f"<{int.from_bytes(self.id[8:], 'big')}>"


class Party:
    """Writes go through `batch`, which tells the listeners once."""

    def __init__(self, name: bytes = b"p") -> None:
        self.party = PartyKey(name * 32)
        self.graph = Graph()
        self.lock = threading.RLock()
        self.listeners: list[Callable[[Set[ItemId]], None]] = []
        self.depth = 0

    def query(self, type: str | None = None, **keywords: Value) -> Query[Handle]:
        return query_over(self, type=type, **keywords)

    @contextmanager
    def batch(self) -> Iterator[Graph]:
        with self.lock:
            self.depth += 1
            yield self.graph
            self.depth -= 1
            if self.depth == 0 and (changed := self.graph.take_changed()):
                for listener in tuple(self.listeners):
                    listener(changed)

    def create(self, number: int, type: str = "task", parent: Handle | None = None, **rest: Any) -> Handle:
        with self.batch() as graph:
            return self.handle(graph.create(number, type, parent.id if parent else None, **rest))

    def write(self, target: Handle, **values: Value) -> None:
        with self.batch() as graph:
            for name, value in values.items():
                graph.write(target.id, name, value)

    def delete(self, target: Handle, deleted: bool = True) -> None:
        with self.batch() as graph:
            graph.delete(target.id, deleted)

    # the SourceProvider

    def source(self) -> Graph:
        return self.graph

    def handle(self, item: ItemId) -> Handle:
        return Handle(item, self.party)

    def reading(self) -> AbstractContextManager[object]:
        return self.lock

    def listen(self, fn: Callable[[Set[ItemId]], None]) -> Callable[[], None]:
        self.listeners.append(fn)
        return lambda: self.listeners.remove(fn)
