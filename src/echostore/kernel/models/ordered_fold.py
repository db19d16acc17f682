"""OrderedFold: models that keep their operations and replay them in canonical order.

This is how an application's own model gets the laws for free: its operations are kept as a list sorted by stamp, the
list is the snapshot, and the model itself is a plain object to which they are applied in that order. A late operation
that sorts before others makes the next read replay. An operation that can't be decoded, or that the model refuses at
its place, stays in the list and changes nothing; `refused` says why. A model that is not registered here (`Unknown`) is the same list
without the object: kept byte for byte, replicated, snapshotted, and revived once the model is registered.

A model that promises to commute and writes its own snapshot is held by `CommutingFold` instead.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from echostore.kernel.errors import ModelFailed
from echostore.kernel.ids import ItemId, Stamp, item_text
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.reasons import Reason
from echostore.kernel.values import Value

Decode = Callable[[bytes], Value]
"""ValueError when the bytes are none of a value."""

_REFUSED = object()


@runtime_checkable
class CustomModel(Protocol):
    """What an application writes: plain values in, a plain value out. No clock, randomness or I/O."""

    name: ClassVar[str]
    version: ClassVar[int]

    def apply(self, operation: Value, stamp: Stamp) -> None: ...

    def value(self) -> Value: ...


@runtime_checkable
class SnapshottingModel(CustomModel, Protocol):
    """A custom model whose state does not depend on the order of operations, and that can write it down."""

    commutes: ClassVar[bool]

    def snapshot(self) -> Value: ...

    def restore(self, state: Value) -> None: ...


class KeptOperation(NamedTuple):
    """One operation as it came, at its place in the canonical order."""

    stamp: Stamp
    time_ms: int
    operation: bytes


class OrderedFold:
    """The state of an item as its list of operations. `make` is None for an unknown model."""

    __slots__ = ("_decode", "_folded", "_instance", "_make", "item", "name", "operations", "refused", "version")

    def __init__(
        self,
        item: ItemId,
        name: str,
        version: int,
        *,
        make: Callable[[], CustomModel] | None,
        decode: Decode,
        operations: list[KeptOperation] | None = None,
    ) -> None:
        self.item, self.name, self.version = item, name, version
        self.operations = operations or []
        self._make, self._decode = make, decode
        self._instance: CustomModel | None = None
        self._folded = 0
        self.refused: dict[Stamp, str] = {}

    @property
    def opaque(self) -> bool:
        """Whether nothing here knows what the operations mean."""
        return self._make is None

    def apply(self, operation: bytes, stamp: Stamp, time_ms: int) -> None:
        kept = KeptOperation(stamp, time_ms, operation)
        if not self.operations or self.operations[-1].stamp < stamp:
            self.operations.append(kept)
            return
        at = bisect_left(self.operations, kept)
        self.operations.insert(at, kept)
        if at < self._folded:
            self._instance, self._folded = None, 0

    def value(self) -> Value:
        """The model's value; None for an unknown model; ModelFailed when the model raised."""
        if self._make is None:
            return None
        instance = self.instance()
        try:
            return instance.value()
        except Exception as error:
            raise model_failed(self, error) from error

    def instance(self) -> CustomModel:
        """The application's own object with all operations applied."""
        assert self._make is not None, self.name
        if self._instance is None:
            self._instance, self._folded = self._make(), 0
            self.refused.clear()
        while self._folded < len(self.operations):
            kept = self.operations[self._folded]
            operation = self._decoded(kept)
            if operation is not _REFUSED:
                try:
                    self._instance.apply(operation, kept.stamp)
                except OperationRefused as refusal:
                    self.refused[kept.stamp] = str(refusal)
                except Exception as error:
                    self._instance, self._folded = None, 0
                    raise model_failed(self, error) from error
            self._folded += 1
        return self._instance

    def _decoded(self, kept: KeptOperation) -> Value:
        try:
            return self._decode(kept.operation)
        except ValueError as error:
            self.refused[kept.stamp] = str(error)
            return _REFUSED


class CommutingFold:
    """A custom model with a snapshot of its own."""

    __slots__ = ("_decode", "instance", "item", "name", "version")

    def __init__(self, item: ItemId, instance: SnapshottingModel, *, decode: Decode) -> None:
        self.item, self.name, self.version = item, instance.name, instance.version
        self.instance = instance
        self._decode = decode

    def apply(self, operation: bytes, stamp: Stamp, time_ms: int) -> None:
        try:
            self.instance.apply(self._decode(operation), stamp)
        except OperationRefused:
            raise
        except Exception as error:
            raise OperationRefused(Reason.MODEL_FAILED, f"{type(error).__name__}: {error}") from error

    def value(self) -> Value:
        try:
            return self.instance.value()
        except Exception as error:
            raise model_failed(self, error) from error

    def state(self) -> Any:
        return self.instance.snapshot()


def model_failed(fold: OrderedFold | CommutingFold, error: Exception) -> ModelFailed:
    """What a reader of an item is told whose model raised."""
    return ModelFailed(
        f"the model {fold.name}@{fold.version} of item {item_text(fold.item)[:8]} raised {type(error).__name__}: {error}",
        unchanged="Its operations are kept and all other items work.",
        next_step="Register a version of the model that can apply them.",
    )
