"""The largest value of a property and the largest operation of an application's own model: refused by who writes it,
and by everybody who receives it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from echostore.kernel.errors import TooLarge
from echostore.kernel.limits import VALUE_BYTES_MAX
from echostore.peer.party import Party
from echostore.wire.generated import property_set_pb2, value_pb2
from echostore.wire.values import value_bytes
from peer_builder import Circle, Liar, reasons

FRAME = len(value_bytes("x" * VALUE_BYTES_MAX)) - VALUE_BYTES_MAX
LARGEST = "x" * (VALUE_BYTES_MAX - FRAME)


class Notebook:
    name: ClassVar[str] = "notebook"
    version: ClassVar[int] = 1

    def __init__(self) -> None:
        self.pages: list[Any] = []

    def apply(self, operation: Any, stamp: object) -> None:
        self.pages.append(operation)

    def value(self) -> Any:
        return len(self.pages)


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Circle]:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob") as made:
        yield made


WRITES: dict[str, Callable[[Party, Any], object]] = {
    "set": lambda party, item: item.__setitem__("n", LARGEST + "x"),
    "nested": lambda party, item: item.__setitem__(("m", "a"), [LARGEST]),
    "add": lambda party, item: item.add("tags", LARGEST + "x"),
    "update": lambda party, item: item.update(small=1, n=LARGEST + "x"),
    "create": lambda party, item: party.create(type="note", n=LARGEST + "x"),
    "name": lambda party, item: setattr(item, "name", LARGEST + "x"),
}


@pytest.mark.parametrize("what", list(WRITES))
@pytest.mark.parametrize("batched", [False, True])
def test_a_value_over_the_limit_is_refused_and_nothing_is_written(circle: Circle, what: str, batched: bool) -> None:
    party = circle.party("ann")
    item = party.create(type="note", n=1)
    before = circle.agree()

    def write() -> None:
        if not batched:
            WRITES[what](party, item)
            return
        with party.batch():
            item["small"] = 2
            WRITES[what](party, item)

    with pytest.raises(TooLarge, match="1048576"):
        write()
    assert item.to_dict() == {"n": 1}
    assert circle.agree_after_loss() == before
    circle.get("ann", item)["n"] = 3
    circle.agree()


def test_the_largest_value_that_fits_is_kept_and_comes_back_by_undo(circle: Circle) -> None:
    party = circle.party("ann")
    item = party.create(type="note")
    item["n"] = LARGEST
    item["n"] = 1
    assert party.undo()
    circle.agree_after_loss()
    assert circle.get("bob", item)["n"] == LARGEST


@pytest.mark.parametrize("kind", ["set", "add"])
def test_a_received_value_over_the_limit_is_listed_and_changes_nothing(circle: Circle, kind: str) -> None:
    item = circle.party("ann").create(type="note", n=1)
    circle.meet_all()
    liar = Liar.of(circle, "bob")
    value = value_pb2.Value.FromString(value_bytes(LARGEST + "x"))
    change = property_set_pb2.PropertyChange(path=["n"], **{kind: value})
    operation = liar.on(item.id, property_set=property_set_pb2.PropertySetOperation(changes=[change]))
    liar.send(liar.message(operation), to="ann")
    ann = circle.party("ann")
    assert reasons(ann) == ["oversize"]
    assert ann.get(item.id).to_dict() == {"n": 1}
    cid = ann.snapshot().cid
    assert circle.restart("ann", lose=("items.db",)).snapshot().cid == cid
    assert reasons(circle.party("ann")) == ["oversize"]


def test_an_operation_of_an_own_model_over_the_limit_is_refused(circle: Circle) -> None:
    circle.peers["ann"].models.register(Notebook)
    item = circle.party("ann").create("notebook")
    item.apply(LARGEST)
    with pytest.raises(TooLarge, match="1048576"):
        item.apply(LARGEST + "x")
    assert item.value() == 1
    circle.agree_after_loss()
