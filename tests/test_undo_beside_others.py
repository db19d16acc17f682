"""Two peers edit everything at once; one undoes all of its steps, and what is left is the other's work alone."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echostore.wire.generated import message_pb2 as pb
from peer_builder import Circle

KEYS = ("k0", "k1", "k2")
TAGS = ("x", "y", "z")


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Circle]:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with Circle(tmp_path, "ann", "bob") as made:
        yield made


class Table:
    """One item of each model, what both may do to them, and what bob's edits alone amount to."""

    def __init__(self, circle: Circle, seed: int) -> None:
        self.circle = circle
        self.random = random.Random(seed)
        party = circle.party("ann")
        with party.batch():
            made = party.create(type="note", k0=0, k1=1, count=1)
            text, elements, log = (party.create(model) for model in ("text", "growable-array", "threaded-log"))
        made.add("tags", "x")
        text.insert(0, "abcdef")
        elements.append(*"abcdef")
        log.post("base")
        party.flush()
        circle.meet_all()
        self.ids = {"set": made.id, "text": text.id, "list": elements.id, "log": log.id}
        self.number = 0
        self.properties: dict[str, Any] = {"k0": 0, "k1": 1, "type": "note"}
        self.tags = {"x"}
        self.count = 1
        self.posts = ["base"]
        self.characters, self.elements = set("abcdef"), set("abcdef")

    def item(self, name: str, what: str) -> Any:
        return self.circle.party(name).get(self.ids[what])

    def fresh(self) -> int:
        self.number += 1
        return self.number

    def step(self, name: str) -> None:
        chance = self.random
        what = chance.choice(["set", "set", "tags", "count", "text", "list", "log", "batch"])
        if what == "batch":
            with self.circle.party(name).batch():
                for _ in range(3):
                    self.edit(name, chance.choice(["set", "tags", "count", "text", "list", "log"]))
        else:
            self.edit(name, what)
        self.circle.party(name).flush()

    def edit(self, name: str, what: str) -> None:
        getattr(self, f"edit_{what}")(name, name == "bob")

    def edit_set(self, name: str, bob: bool) -> None:
        item, key = self.item(name, "set"), self.random.choice(KEYS)
        if self.random.random() < 0.3 and key in item.to_dict():
            del item[key]
            if bob:
                self.properties.pop(key, None)
            return
        value = {"in": self.fresh()} if self.random.random() < 0.3 else self.fresh()
        item[key] = value
        if bob:
            self.properties[key] = value
        elif isinstance(value, dict):
            item[(key, "in")] = self.fresh()

    def edit_tags(self, name: str, bob: bool) -> None:
        item, tag = self.item(name, "set"), self.random.choice(TAGS)
        adds = self.random.random() < 0.5
        (item.add if adds else item.remove)("tags", tag)
        if bob:
            (self.tags.add if adds else self.tags.discard)(tag)

    def edit_count(self, name: str, bob: bool) -> None:
        amount = self.fresh()
        self.item(name, "set").increment("count", amount)
        self.count += amount if bob else 0

    def edit_log(self, name: str, bob: bool) -> None:
        body = f"post {self.fresh()}"
        self.item(name, "log").post(body)
        if bob:
            self.posts.append(body)

    def edit_text(self, name: str, bob: bool) -> None:
        text = self.item(name, "text")
        size = len(str(text))
        if size and self.random.random() < 0.4:
            at = self.random.randrange(size)
            if bob:
                self.characters.discard(str(text)[at])
            text.delete(at, 1)
        else:
            made = chr(0x1000 + self.fresh())
            text.insert(self.random.randint(0, size), made)
            if bob:
                self.characters.add(made)

    def edit_list(self, name: str, bob: bool) -> None:
        elements = self.item(name, "list")
        size = len(elements)
        kind = self.random.random()
        if size and kind < 0.3:
            at = self.random.randrange(size)
            if bob:
                self.elements.discard(elements[at])
            del elements[at]
        elif size and kind < 0.6:
            elements.move_element(self.random.randrange(size), self.random.randrange(size))
        else:
            made = f"element {self.fresh()}"
            elements.insert(self.random.randint(0, size), made)
            if bob:
                self.elements.add(made)

    def seen(self) -> dict[str, Any]:
        posts = [post.body for post in self.item("ann", "log").posts()]
        text, elements = str(self.item("ann", "text")), self.item("ann", "list").to_list()
        return {"set": self.item("ann", "set").to_dict(), "text": text, "list": elements, "posts": posts}

    def check_only_bob_is_left(self) -> None:
        found = self.seen()
        properties = dict(found["set"])
        assert set(properties.pop("tags", ())) == self.tags
        assert properties.pop("count") == self.count
        assert properties == {key: value for key, value in self.properties.items() if key != "type"}
        assert sorted(found["posts"]) == sorted(self.posts)
        assert sorted(found["text"]) == sorted(self.characters)
        assert sorted(found["list"]) == sorted(self.elements)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_all_steps_undone_leave_the_work_of_the_other(circle: Circle, seed: int, restarts: bool) -> None:
    table = Table(circle, seed)
    start = _length(circle)
    for _ in range(14):
        table.step(table.random.choice(["ann", "ann", "bob"]))
        if table.random.random() < 0.5:
            circle.meet_all()
    circle.meet_all()
    before = table.seen()
    undone = 0
    while True:
        if restarts:
            circle.restart("ann", lose=("items.db",) if table.random.random() < 0.3 else ())
        assert circle.party("ann").undo(), "there is always the preparation"
        if _taken_back(circle) < start:
            assert circle.party("ann").redo()
            break
        undone += 1
    assert undone
    table.check_only_bob_is_left()
    circle.agree()
    for _ in range(undone):
        if restarts:
            circle.restart("ann")
        assert circle.party("ann").redo()
    assert table.seen() == before
    circle.agree_after_loss()


def _length(circle: Circle) -> int:
    own = circle.party("ann").runtime.data
    assert own is not None
    return own.cursor.length


def _taken_back(circle: Circle) -> int:
    """The seq of the message that the last one undoes."""
    runtime = circle.party("ann").runtime
    assert runtime.data is not None
    runtime.flush()
    message = runtime.feeds.block(runtime.data.cursor.key, _length(circle) - 1).payload
    return pb.Message.FromString(message).undoes - 1
