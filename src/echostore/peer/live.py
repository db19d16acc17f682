"""What queries get of a party: its rows, its handles, and word of each applied batch."""

import logging
from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from echostore.kernel.ids import ItemId, PartyKey
from echostore.kernel.query.source import Source
from echostore.peer.items import Item

if TYPE_CHECKING:
    from echostore.peer.delivered import Delivered
    from echostore.peer.party import Party

_log = logging.getLogger("echostore")


class LiveHub:
    """The `SourceProvider` of one party. While nobody listens, a batch costs it nothing."""

    def __init__(self, party: "Party") -> None:
        self._party = party
        self._listeners: list[Callable[[Set[ItemId]], None]] = []
        party.runtime.processor.listeners.append(self._changed)

    @property
    def party(self) -> PartyKey:
        return self._party.key

    def source(self) -> Source:
        return self._party.runtime.source

    def handle(self, item: ItemId) -> Item:
        """A handle, also of an item that has just left the state."""
        if self._party.runtime.state.record(item) is None:
            return Item(self._party, item)
        return self._party.handle(item)

    def reading(self) -> AbstractContextManager[object]:
        return self._party.reading()

    def listen(self, fn: Callable[[Set[ItemId]], None]) -> Callable[[], None]:
        self._listeners.append(fn)

        def stop() -> None:
            if fn in self._listeners:
                self._listeners.remove(fn)

        return stop

    def _changed(self, changed: set[ItemId], delivered: "list[Delivered]") -> None:
        if self._listeners:
            spread = self._party.runtime.source.spread(changed)
            for listener in list(self._listeners):
                try:
                    listener(spread)
                except Exception:  # noqa: BLE001  # the batch is applied whatever a subscriber does; the others must hear of it
                    _log.exception("a subscriber of a live query raised")
        self._party.notify()
