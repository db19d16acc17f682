"""OrderedFold: models that keep their operations and replay them in canonical order.

This is how an application's own model gets the laws for free: its operations are kept as a list sorted by stamp, the
list is the snapshot, and the model itself is a plain object to which they are applied in that order. A late operation
that sorts before others makes the next read replay. An operation that can't be decoded, or that the model refuses at
its place, stays in the list and changes nothing; `refusals` says why. A model that is not registered here (`Unknown`) is the same list
without the object: kept byte for byte, replicated, snapshotted, and revived once the model is registered.

A model that promises to commute and writes its own snapshot is held by `CommutingFold` instead. Whatever a model does,
it has a budget of steps for it (`step_budget`).
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from echostore.kernel.errors import ModelFailed
from echostore.kernel.ids import ItemId, Stamp, item_text
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.step_budget import OutOfSteps, StepBudget
from echostore.kernel.reasons import Reason
from echostore.kernel.values import Value, check_value

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

    __slots__ = (
        "_decode",
        "_failed",
        "_failure",
        "_folded",
        "_instance",
        "_make",
        "_refused",
        "item",
        "name",
        "operations",
        "version",
    )

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
        self._failed = -1
        self._failure: BaseException | None = None  # of the operation numbered `_failed`
        self._refused: dict[Stamp, OperationRefused] = {}

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
        if at <= self._failed:
            self._failure = None  # the operation that failed may not be the same any more

    def confirm(self, stamp: Stamp) -> None:
        """Run the model on an operation that this device is writing. One that it refuses (OperationRefused) or fails on
        (ModelFailed) raises, and is taken out of the list again."""
        if self._make is None:
            return
        try:
            self.instance()
            if stamp in self._refused:
                raise self._refused[stamp]
        except (OperationRefused, ModelFailed):
            self._withdraw(stamp)
            raise

    def _withdraw(self, stamp: Stamp) -> None:
        self.operations = [kept for kept in self.operations if kept.stamp != stamp]
        self._instance, self._folded, self._failed, self._failure = None, 0, -1, None

    def refusals(self) -> Mapping[Stamp, OperationRefused]:
        """The operations that change nothing, with the reasons. When the model fails on one, that one is the last."""
        if self._make is None:
            return {}
        try:
            self.instance()
        except ModelFailed as failure:
            failed = OperationRefused(Reason.MODEL_FAILED, str(failure.__cause__ or self._failure))
            return {**self._refused, self.operations[self._failed].stamp: failed} if self.operations else {}
        return self._refused

    def value(self) -> Value:
        """The model's value; None for an unknown model; ModelFailed when the model raised."""
        if self._make is None:
            return None
        instance = self.instance()
        try:
            with StepBudget():
                return instance.value()
        except (Exception, OutOfSteps) as error:
            raise model_failed(self, error) from error

    def instance(self) -> CustomModel:
        """The application's own object with all operations applied; ModelFailed when it could not apply one."""
        assert self._make is not None, self.name
        if self._failure is not None:
            raise model_failed(self, self._failure)
        try:
            if self._instance is None:
                self._folded = 0
                self._refused.clear()
                with StepBudget():
                    self._instance = self._make()
            self._fold(self._instance)
        except (Exception, OutOfSteps) as error:
            self._failed, self._failure = self._folded, error.with_traceback(None)
            self._instance, self._folded = None, 0
            raise model_failed(self, error) from error
        return self._instance

    def _fold(self, instance: CustomModel) -> None:
        """Apply what is not applied yet. `_folded` stays at an operation that fails."""
        while self._folded < len(self.operations):
            kept = self.operations[self._folded]
            operation = self._decoded(kept)
            if operation is not _REFUSED:
                try:
                    with StepBudget():
                        instance.apply(operation, kept.stamp)
                except OperationRefused as refusal:
                    self._refused[kept.stamp] = OperationRefused(refusal.reason, refusal.detail)
            self._folded += 1

    def _decoded(self, kept: KeptOperation) -> Value:
        try:
            return self._decode(kept.operation)
        except ValueError as error:
            self._refused[kept.stamp] = OperationRefused(Reason.MALFORMED, str(error))
            return _REFUSED


class CommutingFold:
    """A custom model with a snapshot of its own. One that can't write or read its snapshot takes its item out: the state
    then is empty, and stays so until the items are folded from the feeds anew."""

    __slots__ = ("_decode", "_failure", "instance", "item", "name", "version")

    def __init__(self, item: ItemId, instance: SnapshottingModel, *, decode: Decode) -> None:
        self.item, self.name, self.version = item, instance.name, instance.version
        self.instance = instance
        self._decode = decode
        self._failure: BaseException | None = None

    def apply(self, operation: bytes, stamp: Stamp, time_ms: int) -> None:
        if self._failure is not None:
            raise OperationRefused(Reason.MODEL_FAILED, str(self._failure))
        try:
            value = self._decode(operation)
            with StepBudget():
                self.instance.apply(value, stamp)
        except OperationRefused:
            raise
        except (Exception, OutOfSteps) as error:
            raise OperationRefused(Reason.MODEL_FAILED, f"{type(error).__name__}: {error}") from error

    def value(self) -> Value:
        if self._failure is not None:
            raise model_failed(self, self._failure)
        try:
            with StepBudget():
                return self.instance.value()
        except (Exception, OutOfSteps) as error:
            raise model_failed(self, error) from error

    def state(self) -> Value:
        """What the model says its state is: a value that can be written down, or ModelFailed."""
        if self._failure is not None:
            raise model_failed(self, self._failure)
        try:
            with StepBudget():
                state = self.instance.snapshot()
            return check_value(state, where="snapshot")
        except (Exception, OutOfSteps) as error:
            raise model_failed(self, error) from error

    def restore(self, state: Value) -> None:
        """Go on from a state; a model that can't take it is out."""
        try:
            with StepBudget():
                self.instance.restore(state)
        except (Exception, OutOfSteps) as error:  # noqa: BLE001  # told to whoever asks for the value
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """There is no state to go on from."""
        self._failure = error.with_traceback(None)


def model_failed(fold: OrderedFold | CommutingFold, error: BaseException) -> ModelFailed:
    """What a reader of an item is told whose model raised."""
    return ModelFailed(
        f"the model {fold.name}@{fold.version} of item {item_text(fold.item)[:8]} raised {type(error).__name__}: {error}",
        unchanged="Its operations are kept and all other items work.",
        next_step="Register a version of the model that can apply them.",
    )
