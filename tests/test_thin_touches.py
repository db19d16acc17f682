"""Word that an index is read: gathered, but at once where otherwise no further delta would come."""

from pathlib import Path

import pytest

import echostore
from echostore.kernel.coherence.directory import Directory
from echostore.kernel.coherence.holdings import Holdings, Version
from echostore.kernel.coherence.messages import (
    Arc,
    Delta,
    IndexValue,
    Invalidate,
    Message,
    NullUpdate,
    Patch,
    Spec,
    SystemId,
    Update,
)
from echostore.thin import driver
from echostore.thin.thin_party import connect
from echostore.thin.touches import TOUCHED_MAX, Touches
from network_peers import until

CLOCK = Arc(SystemId(b"r" * 16))
SPEC = Spec(b"tasks")


def holding(size: int) -> Holdings:
    holdings = Holdings(1)
    holdings.learn(SPEC, Version(1, 1, IndexValue(b"v" * size), live=True))
    return holdings


def delta(size: int) -> Update:
    return Update(CLOCK, 0, 1, (), (Delta(SPEC, 0, Patch(b"p" * size)),))


def test_a_read_is_told_at_once_when_the_next_delta_would_not_come() -> None:
    touches, holdings = Touches(), holding(100)
    assert not touches.note(SPEC)
    touches.received(delta(40), holdings)
    assert not touches.note(SPEC), "40 and another 40 are no more than 100"
    touches.received(delta(40), holdings)
    assert touches.note(SPEC)
    assert touches.take() == (SPEC,)
    assert touches.take() == ()
    assert not touches.note(SPEC), "counted anew from the last word"
    touches.received(delta(60), holdings)
    assert touches.note(SPEC)
    touches.told(SPEC)
    assert not touches.note(SPEC), "the value was given anew, which is counted from there as well"


def test_what_is_not_read_is_never_told() -> None:
    touches, holdings = Touches(), holding(10)
    touches.received(delta(10), holdings)
    touches.received(NullUpdate(CLOCK, 1, 2), holdings)
    touches.received(Update(CLOCK, 0, 1, (), (Delta(Spec(b"unknown"), 0, Patch(b"p")),)), holdings)
    assert touches.read == set()
    assert touches.note(SPEC)
    touches.received(Update(CLOCK, 0, 1, (), (Invalidate(SPEC),)), holdings)
    assert not touches.note(SPEC), "an index that has to be asked for again"
    touches.received(delta(10), holdings)
    touches.clear()
    assert not touches.note(SPEC)
    for number in range(2 * TOUCHED_MAX):
        touches.note(Spec(b"%d" % number))
    assert len(touches.take()) == TOUCHED_MAX


def test_a_small_index_that_is_watched_is_told_by_deltas_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that word, each second change of a small value would cost a question and an answer more."""
    told: list[type] = []
    received = Touches.received

    def noted(self: Touches, message: Message, holdings: Holdings) -> None:
        if isinstance(message, Update):
            told.extend(type(item) for item in message.items if isinstance(item, Delta | Invalidate))
        received(self, message, holdings)

    monkeypatch.setattr(Touches, "received", noted)
    with echostore.open(tmp_path / "home", name="Root") as peer:
        party = peer.create_party("Thin")
        task = party.create(type="task", n=100, text="a few words")
        capability = party.capability(write="*", messages=True).text
        with connect(peer.serve_thin("127.0.0.1:0"), capability) as leaf:
            query = leaf.query(type="task")
            query.all()
            with query.watch(timeout_s=60) as watch:
                for number in range(101, 111):
                    task["n"] = number
                    next(watch)
                    assert [each["n"] for each in query.all()] == [number]
                    leaf.fence("full", timeout_s=60)  # the root has heard what was read
    assert told == [Delta] * 10


def test_word_that_presses_goes_up_without_anything_else_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the next question, and not with the next look at the clock."""
    monkeypatch.setattr(driver, "BEAT_S", 3600.0)
    heard: list[Spec] = []
    touch = Directory.touch

    def noted(self: Directory, spec: Spec) -> None:
        heard.append(spec)
        touch(self, spec)

    monkeypatch.setattr(Directory, "touch", noted)
    with echostore.open(tmp_path / "home", name="Root") as peer:
        party = peer.create_party("Thin")
        task = party.create(type="task", n=100, text="a few words")
        capability = party.capability(write="*", messages=True).text
        with connect(peer.serve_thin("127.0.0.1:0"), capability) as leaf:
            query = leaf.query(type="task")
            with query.watch(timeout_s=60) as watch:
                task["n"] = 101
                next(watch)
                until(lambda: heard == [query.spec])
