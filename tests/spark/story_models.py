"""Models that the stories use: an ordered one, a commuting one, and one that only its writer knows."""

from typing import Any, ClassVar


class Tally:
    """Keeps what was said, in canonical order."""

    name: ClassVar[str] = "tally"
    version: ClassVar[int] = 1

    def __init__(self) -> None:
        self.said: list[Any] = []

    def apply(self, operation: Any, stamp: object) -> None:
        if operation == "no":
            raise ValueError("a tally takes no no")
        self.said.append(operation)

    def value(self) -> Any:
        return list(self.said)


class Sum:
    """Adds; the order makes no difference, and the state is a number."""

    name: ClassVar[str] = "sum"
    version: ClassVar[int] = 1
    commutes: ClassVar[bool] = True

    def __init__(self) -> None:
        self.total = 0

    def apply(self, operation: Any, stamp: object) -> None:
        self.total += operation

    def value(self) -> Any:
        return self.total

    def snapshot(self) -> Any:
        return self.total

    def restore(self, state: Any) -> None:
        self.total = state


class Gadget(Tally):
    """Registered on one peer of a story; the others keep its items opaque."""

    name: ClassVar[str] = "gadget"


SHARED = (Tally, Sum)


def register(factory: Any) -> None:
    """Make the models that all know known to a ModelFactory or to a peer's `models`."""
    for model in SHARED:
        factory.register(model)
