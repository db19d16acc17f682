"""An operation that an application's model refuses raises at its writer, and is listed where it came from elsewhere."""

from typing import Any, ClassVar

import pytest

from echostore.kernel.errors import ModelFailed, Refused
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.reasons import Reason
from echostore.peer.party import Party
from peer_builder import Circle


class Stock:
    """A number that never falls below zero; None breaks it."""

    name: ClassVar[str] = "stock"
    version: ClassVar[int] = 1

    def __init__(self) -> None:
        self.left = 0

    def apply(self, operation: int, stamp: object) -> None:
        if self.left + operation < 0:
            raise OperationRefused(Reason.DENIED, f"only {self.left} left")
        self.left += operation

    def value(self) -> int:
        return self.left


class CommutingStock(Stock):
    """The same with a snapshot of its own."""

    commutes: ClassVar[bool] = True

    def snapshot(self) -> int:
        return self.left

    def restore(self, state: int) -> None:
        self.left = state


def parties(circle: Circle, model: type) -> tuple[Party, Party]:
    for name in ("ann", "bob"):
        circle.party(name).peer.models.register(model)
    return circle.party("ann"), circle.party("bob")


@pytest.fixture
def circle(tmp_path: Any) -> Circle:
    return Circle(tmp_path, "ann", "bob")


@pytest.mark.parametrize("model", [Stock, CommutingStock])
def test_a_refused_operation_raises_at_its_writer_and_writes_nothing(circle: Circle, model: type) -> None:
    ann, _ = parties(circle, model)
    stock = ann.create("stock")
    stock.apply(3)
    before = ann.snapshot().cid
    with pytest.raises(Refused, match="only 3 left"):
        stock.apply(-4)
    assert stock.value() == 3
    assert ann.snapshot().cid == before
    assert ann.rejected() == []
    stock.apply(-3)
    assert stock.value() == 0
    circle.agree()


@pytest.mark.parametrize("model", [Stock, CommutingStock])
def test_a_refusal_that_is_caught_inside_a_batch_leaves_the_rest_of_the_batch(circle: Circle, model: type) -> None:
    ann, bob = parties(circle, model)
    stock = ann.create("stock")
    with ann.batch():
        stock.apply(2)
        with pytest.raises(Refused, match="only 2 left"):
            stock.apply(-5)
        stock.apply(1)
        assert stock.value() == 3
    circle.agree()
    assert bob.get(stock.id).value() == stock.value() == 3
    assert ann.rejected() == bob.rejected() == []


def test_an_operation_that_the_model_fails_on_raises_and_writes_nothing(circle: Circle) -> None:
    ann, _ = parties(circle, Stock)
    stock = ann.create("stock")
    before = ann.snapshot().cid
    with pytest.raises(ModelFailed, match="TypeError"):
        stock.apply(None)
    assert stock.failed is None
    assert (stock.value(), ann.snapshot().cid) == (0, before)


def test_an_operation_that_another_peer_made_invalid_is_listed_by_every_peer(circle: Circle) -> None:
    ann, bob = parties(circle, Stock)
    stock = ann.create("stock")
    stock.apply(3)
    circle.meet_all()
    stock.apply(-2)
    bob.get(stock.id).apply(-2)
    circle.agree()
    assert stock.value() == bob.get(stock.id).value() == 1
    (listed,) = ann.rejected()
    assert (listed.reason, listed.detail) == (Reason.DENIED, "only 1 left")
    assert bob.rejected() == [listed]
    assert (ann.status.rejected, bob.status.rejected) == (1, 1)
    again = circle.restart("ann", lose=("items.db",))
    again.peer.models.register(Stock)
    assert again.rejected() == [listed]
