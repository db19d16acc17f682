"""PeerModels: a peer's ModelFactory. Registering a model revives the items that were opaque without it.

    unknown model    an OrderedFold without an object: operations kept byte for byte, value() is None
    registered       the same operations, now applied; the item is told to live queries as changed

Items that are not in memory revive when they are read: the ItemStore holds their operations, and the factory knows
the class by then. The same goes for a party that is opened after the registration.

A model that commutes is the exception: its state is a snapshot of its own making, which only that class can read. So
each checkpoint notes which models commuted (`commuting_mark`), and a party whose items were stored under another set is
folded from its feeds anew when it is opened.
"""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echostore.kernel.errors import Corrupt, UsageError
from echostore.kernel.ids import ItemId
from echostore.kernel.items.operations import Reject
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.ordered_fold import CustomModel, OrderedFold
from echostore.store.item_store import ItemStore
from echostore.wire.values import value_from_bytes

if TYPE_CHECKING:
    from echostore.peer.peer import Peer
    from echostore.peer.runtime import PartyRuntime


COMMUTING_MARK = "commuting"
"""Under which name the ItemStore keeps the mark."""


class PeerModels(ModelFactory):
    """Which models a peer knows."""

    def __init__(self, peer: "Peer") -> None:
        super().__init__(value_from_bytes)
        self._peer = peer

    def register(self, model: type[CustomModel]) -> type[CustomModel]:
        """Make a class known; usable as a decorator. Items of the model in open parties come alive."""
        with self._peer.lock:
            name, version = getattr(model, "name", ""), getattr(model, "version", 0)
            fresh = not self.known(name, version)
            runtimes = [party.runtime for party in self._peer.open_parties()] if fresh else []
            if getattr(model, "commutes", False):
                _check_snapshotting(model)
                for runtime in runtimes:  # while they can still be read as operations
                    for item in _items_of(runtime, name, version):
                        runtime.state.record(item)
            super().register(model)
            for runtime in runtimes:
                revive(runtime, self, name, version)
        return model

    @property
    def commuting(self) -> list[str]:
        """The registered models that commute, as `name@version`."""
        return sorted(
            f"{name}@{version}" for (name, version), model in self._custom.items() if getattr(model, "commutes", False)
        )


def commuting_mark(factory: ModelFactory) -> bytes:
    """What a checkpoint notes about the form of the states it holds."""
    return "\n".join(factory.commuting).encode() if isinstance(factory, PeerModels) else b""


def forget_unreadable_items(path: Path, factory: PeerModels) -> None:
    """Empty an ItemStore that holds states in a form that this process can't read. They are folded from the feeds."""
    if not path.exists():
        return
    try:
        with closing(ItemStore(path)) as store:
            stored = set((store.about(COMMUTING_MARK) or b"").decode().split("\n")) - {""}
            differing = stored ^ set(factory.commuting)
            if differing & {f"{name}@{version}" for name, version in store.models_in_use()}:
                store.clear()
    except Corrupt:
        return  # whoever opens the party deals with a damaged store


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


def model_rejects(runtime: "PartyRuntime", factory: PeerModels) -> list[Reject]:
    """Operations that the registered models refuse or fail on, at the places where they stand now. Models that commute
    refuse when an operation is applied, and are listed with the other rejects."""
    commuting = set(factory.commuting)
    found: list[Reject] = []
    for name, version in factory.custom:
        for item in _items_of(runtime, name, version) if f"{name}@{version}" not in commuting else ():
            record = runtime.state.record(item)
            if record is not None and isinstance(record.model, OrderedFold):
                for stamp, refusal in record.model.refusals().items():
                    found.append(Reject(stamp.feed, stamp.seq, stamp.position, refusal.reason, refusal.detail))
    return found


def _check_snapshotting(model: type[CustomModel]) -> None:
    for method in ("snapshot", "restore"):
        if not callable(getattr(model, method, None)):
            raise UsageError(f"{model.__name__} says that it commutes and needs a method `{method}`")


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
