"""ModelFactory: which models this process knows, by `name@version`, and how an item gets its model.

An item names its model and version in its genesis. What is not registered here becomes an `OrderedFold` without an
object: the item stays opaque but whole. Code never arrives over the network; applications register classes, or load
installed entry points that they allow by hash (`echostore.peer.plugins`).
"""

from collections.abc import Callable
from typing import Any

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import ItemId
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.ordered_fold import (
    CommutingFold,
    CustomModel,
    Decode,
    KeptOperation,
    OrderedFold,
    SnapshottingModel,
)
from echostore.kernel.models.property_set import PropertySet
from echostore.kernel.models.text import ConcurrentText
from echostore.kernel.models.threaded_log import ThreadedLog

BASE_MODELS: dict[tuple[str, int], Callable[[ItemId], Any]] = {
    (PropertySet.name, PropertySet.version): PropertySet,
    (GrowableArray.name, GrowableArray.version): GrowableArray,
    (ConcurrentText.name, ConcurrentText.version): ConcurrentText,
    (ThreadedLog.name, ThreadedLog.version): ThreadedLog,
}


class ModelFactory:
    """The registry of models. `decode` turns a custom operation's bytes into the value its class takes."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._custom: dict[tuple[str, int], type[CustomModel]] = {}

    def register(self, model: type[CustomModel]) -> type[CustomModel]:
        """Make a class known; usable as a decorator. Registering the same class twice is fine."""
        name, version = getattr(model, "name", None), getattr(model, "version", None)
        if not isinstance(name, str) or not name or not isinstance(version, int) or version < 1:
            raise UsageError(f"{model.__name__} needs a class attribute `name` (text) and `version` (from 1)")
        for method in ("apply", "value"):
            if not callable(getattr(model, method, None)):
                raise UsageError(f"{model.__name__} needs a method `{method}`")
        key = (name, version)
        if key in BASE_MODELS or self._custom.get(key, model) is not model:
            raise UsageError(f"the model {name}@{version} is registered already")
        self._custom[key] = model
        return model

    @property
    def custom(self) -> list[tuple[str, int]]:
        """The registered models of applications."""
        return sorted(self._custom)

    def known(self, name: str, version: int) -> bool:
        return (name, version) in BASE_MODELS or (name, version) in self._custom

    def latest(self, name: str) -> int | None:
        """The highest version known of a model."""
        versions = [version for known, version in (*BASE_MODELS, *self._custom) if known == name]
        return max(versions, default=None)

    def names(self) -> list[tuple[str, int]]:
        return sorted((*BASE_MODELS, *self._custom))

    def create(self, name: str, version: int, item: ItemId) -> Any:
        """A blank model for an item; opaque when the model is not known."""
        base = BASE_MODELS.get((name, version))
        if base is not None:
            return base(item)
        custom = self._custom.get((name, version))
        if custom is not None and getattr(custom, "commutes", False):
            instance = custom()
            assert isinstance(instance, SnapshottingModel), f"{name} commutes but has no snapshot and restore"
            return CommutingFold(item, instance, decode=self._decode)
        return OrderedFold(item, name, version, make=custom, decode=self._decode)

    def restore_operations(self, name: str, version: int, item: ItemId, operations: list[KeptOperation]) -> OrderedFold:
        make = self._custom.get((name, version))
        return OrderedFold(item, name, version, make=make, decode=self._decode, operations=operations)
