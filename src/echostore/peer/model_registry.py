"""PeerModels: a peer's ModelFactory. Registering a model revives the items that were opaque without it.

    unknown model    an OrderedFold without an object: operations kept byte for byte, value() is None
    registered       the same operations, now applied; the item is told to live queries as changed

Items that are not in memory revive when they are read: the ItemStore holds their operations, and the factory knows
the class by then. The same goes for a party that is opened after the registration.
"""

from typing import TYPE_CHECKING, Any

from echostore.kernel.ids import ItemId
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.ordered_fold import CustomModel, OrderedFold
from echostore.wire.values import value_from_bytes

if TYPE_CHECKING:
    from echostore.peer.peer import Peer
    from echostore.peer.runtime import PartyRuntime


class PeerModels(ModelFactory):
    """Which models a peer knows."""

    def __init__(self, peer: "Peer") -> None:
        super().__init__(value_from_bytes)
        self._peer = peer

    def register(self, model: type[CustomModel]) -> type[CustomModel]:
        """Make a class known; usable as a decorator. Items of the model in open parties come alive."""
        with self._peer.lock:
            fresh = not self.known(getattr(model, "name", ""), getattr(model, "version", 0))
            super().register(model)
            if fresh:
                for party in self._peer.open_parties():
                    revive(party.runtime, self, model.name, model.version)
        return model


def revive(runtime: "PartyRuntime", factory: ModelFactory, name: str, version: int) -> None:
    """Give the opaque items of a model their object, now that the factory knows it."""
    state = runtime.state
    for item in _items_of(runtime, name, version):
        record = state.records.get(item)
        if record is not None and isinstance(record.model, OrderedFold) and record.model.opaque:
            record.model = _revived(factory, record.model)
            state.dirty.add(item)
        # Also those that only the ItemStore holds: what live queries see of them is another value now.
        state.changed.add(item)
    if not runtime.in_batch:
        runtime.processor.finish()


def _items_of(runtime: "PartyRuntime", name: str, version: int) -> set[ItemId]:
    state = runtime.state
    stored = runtime.items.scan("model = ? AND version = ?", (name, version)) if runtime.items is not None else []
    live = [
        item
        for item, record in state.records.items()
        if record.genesis.model == name and record.genesis.version == version
    ]
    return {item for item in stored if item not in state.gone} | set(live)


def _revived(factory: ModelFactory, opaque: OrderedFold) -> Any:
    blank = factory.create(opaque.name, opaque.version, opaque.item)
    if isinstance(blank, OrderedFold):
        return factory.restore_operations(opaque.name, opaque.version, opaque.item, opaque.operations)
    for kept in opaque.operations:
        blank.apply(kept.operation, kept.stamp, kept.time_ms)
    return blank
