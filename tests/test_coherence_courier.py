"""Messages between roots, one rule at a time. The searches have all orders of events; here are the bounds and the words."""

from dataclasses import replace
from typing import Any

import pytest

from echostore.kernel.coherence import courier as courier_module
from echostore.kernel.coherence.courier import Courier, Pair
from echostore.kernel.coherence.events import Effect, Keep, KeptRow, Sideways
from echostore.kernel.coherence.messages import (
    Arc,
    Backpressure,
    Context,
    MessageId,
    RejectReason,
    SystemId,
    Undelivered,
    UserMessage,
    UserQueued,
    UserReceipt,
    Witness,
)

HERE, THERE, THIRD = b"h" * 16, b"t" * 16, b"3" * 16
SENDER, TARGET = SystemId(HERE, (1,)), SystemId(THERE, (2,))
FEED = Arc(SystemId(b"f" * 16))
VECTOR: Context = ((Witness(FEED, 9),),)


def message(seq: int, *, after: int = 0, floor: int = 1, **more: Any) -> UserMessage:
    plain = UserMessage(MessageId(SENDER, 1, seq), floor, TARGET, (), "note", b"x", True, after)
    return replace(plain, **more)


def forwarded(courier: Courier, *, reached: bool = True) -> list[Effect]:
    return courier.forward(lambda context: reached, lambda: VECTOR)


def said(effects: list[Effect] | None) -> list[Any]:
    return [each.message for each in effects or [] if isinstance(each, Sideways)]


def met() -> Courier:
    courier = Courier(HERE)
    courier.meet(THERE)
    return courier


def disk(*groups: list[Effect] | None) -> list[KeptRow]:
    """What was kept, by name; the last word counts."""
    rows: dict[Any, KeptRow] = {}
    for effect in (each for group in groups for each in group or []):
        for row in effect.rows if isinstance(effect, Keep) else ():
            rows[row[:3]] = row
    return [row for row in rows.values() if row.value is not None]


def test_what_is_said_is_on_disk_before() -> None:
    courier, target = met(), Courier(THERE)
    posted = courier.post(message(1))
    assert posted == [Keep((KeptRow("out", message(1).id, TARGET, message(1)),))]
    assert said(forwarded(courier)) == [message(1)]
    taken = target.take(HERE, message(1), lambda system: True)
    assert [type(each) for each in taken] == [Keep, Sideways]
    assert said(taken) == [UserQueued(message(1).id)]
    assert {row.kind for row in disk(taken)} == {"in", "last"}


def test_a_root_is_believed_only_of_messages_that_are_for_it() -> None:
    courier = met()
    courier.meet(THIRD)
    courier.post(message(1))
    forwarded(courier)
    id = message(1).id
    for told in (UserReceipt(id, TARGET), Undelivered(id, RejectReason.EXPIRED)):
        assert courier.over(THIRD, told) == []
    assert courier.queued(THIRD, id) == []
    assert id in courier.out
    assert courier.queued(THERE, id) == [Keep((KeptRow("out", id, TARGET, None),))]
    assert courier.over(THIRD, UserReceipt(id, TARGET)) == [], "nor when it has left"
    assert said(courier.over(THERE, UserReceipt(id, TARGET))) == [UserReceipt(id, TARGET)]
    assert courier.over(THERE, UserReceipt(id, TARGET)) == [], "and once"


def test_a_repeated_message_asks_what_became_of_it() -> None:
    courier = met()
    courier.post(message(1))
    forwarded(courier)
    courier.queued(THERE, message(1).id)
    assert said(courier.post(message(1))) == [message(1)]
    assert not courier.out, "and is not kept again"
    target = Courier(THERE)
    target.meet(HERE)
    target.take(HERE, message(1), lambda system: True)
    assert said(target.take(HERE, message(1), lambda system: True)) == [UserQueued(message(1).id)]
    target.received(message(1).id)
    assert said(target.take(HERE, message(1), lambda system: True)) == [UserReceipt(message(1).id, TARGET)]
    target.take(HERE, message(2), lambda system: True)
    target.give_up(message(2).id)
    told = Undelivered(message(2).id, RejectReason.EXPIRED)
    assert said(target.take(HERE, message(2), lambda system: True)) == [told]
    target.take(HERE, message(3, floor=3), lambda system: True)
    assert not target.given_up, "its sender has heard of it"


def test_one_that_is_before_its_turn_is_not_taken() -> None:
    target = Courier(THERE)
    assert target.take(HERE, message(2, after=1), lambda system: True) == []
    assert said(target.take(HERE, message(1), lambda system: True)) == [UserQueued(message(1).id)]
    assert said(target.take(HERE, message(2, after=1), lambda system: True)) == [UserQueued(message(2).id)]
    assert [each.id.seq for each in target.heads()] == [1], "and told after the one before it"
    assert target.received(message(2).id) == []
    target.received(message(1).id)
    assert [(each.id.seq, each.floor) for each in target.heads(TARGET)] == [(2, 2)]
    assert target.heads(SystemId(THERE, (3,))) == []


def test_what_stood_behind_one_that_is_given_up_goes_on() -> None:
    courier = met()
    kept = [courier.post(message(seq, after=seq - 1)) for seq in (1, 2, 3)]
    forwarded(courier)
    given_up = courier.give_up(message(2).id)
    assert said(given_up) == [Undelivered(message(2).id, RejectReason.EXPIRED)]
    assert courier.out[message(3).id].after == 1
    assert said(forwarded(courier)) == [message(3, after=1)], "as it is now"
    restarted = Courier(HERE)
    restarted.restore(disk(*kept, given_up))
    assert (restarted.out, restarted.given_up) == (courier.out, courier.given_up)
    assert said(courier.post(message(2, after=1))) == [Undelivered(message(2).id, RejectReason.EXPIRED)]
    later = courier.post(message(3, after=0))
    assert courier.out[message(3).id].after == 0, "what was before it was received meanwhile"
    assert disk(later)


def test_contexts_are_turned_into_what_is_understood_elsewhere() -> None:
    courier = met()
    local: Context = ((Witness(Arc(SENDER, 1), 3),),)
    courier.post(message(1, context=local))
    courier.post(message(2, context=VECTOR))
    assert said(forwarded(courier, reached=False)) == [message(2, context=VECTOR)], "each waits alone"
    kept = forwarded(courier)
    assert said(kept) == [message(1, context=VECTOR)]
    assert [row.value for row in disk(kept)] == [message(1, context=VECTOR)]
    restarted = Courier(HERE)
    restarted.restore([KeptRow("out", message(3).id, TARGET, message(3, context=local))])
    assert restarted.held


def test_a_context_of_too_many_feeds_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "CONTEXT_FEEDS_MAX", 0)
    courier = met()
    courier.post(message(1, context=((Witness(Arc(SENDER, 1), 3),),)))
    assert said(forwarded(courier)) == [Undelivered(message(1).id, RejectReason.TOO_LARGE)]
    assert not courier.out


def test_everything_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in {"OUT_MAX": 6, "OUT_PER_SENDER_MAX": 4, "FLYING_MAX": 2, "INBOX_MAX": 5}.items():
        monkeypatch.setattr(courier_module, name, bound)
    for name, bound in {"INBOX_PER_TARGET_MAX": 4, "PAIRS_MAX": 4, "PAIRS_PER_SENDER_MAX": 3, "PASSED_MAX": 1}.items():
        monkeypatch.setattr(courier_module, name, bound)
    monkeypatch.setattr(courier_module, "GIVEN_UP_MAX", 2)
    courier = met()
    assert [courier.post(message(seq)) is None for seq in range(1, 6)] == [False] * 4 + [True]
    others = [replace(message(1), id=MessageId(SystemId(HERE, (9,)), 1, seq)) for seq in range(1, 4)]
    assert [courier.post(each) is None for each in others] == [False, False, True]
    assert len(said(forwarded(courier))) == 2
    assert said(forwarded(courier)) == [], "no more on the way"
    courier.ask_again()
    assert [each.id.sender for each in said(forwarded(courier))] == [SENDER, SENDER], "others first"
    courier.ask_again()
    assert [each.id.sender for each in said(forwarded(courier))] == [SystemId(HERE, (9,))] * 2, "then those behind them"
    courier.ask_again()
    forwarded(courier)
    courier.queued(THERE, message(1).id)
    assert len(said(forwarded(courier))) == 1
    courier.queued(THERE, message(2).id)
    assert len(courier.passed) == 1
    for id in list(courier.out):
        courier.give_up(id)
    assert len(courier.given_up) == 2
    assert not courier.senders
    assert not any((*courier.ready.values(), *courier.flying.values()))

    target = Courier(THERE)
    full = [Backpressure("messages", 1.0)]
    answers = [said(target.take(HERE, message(seq), lambda system: True)) for seq in range(1, 6)]
    assert answers[-1] == full
    assert answers[:-1] == [[UserQueued(message(seq).id)] for seq in range(1, 5)]
    elsewhere = [replace(message(10 + place), target=SystemId(THERE, (place,))) for place in range(3, 7)]
    assert said(target.take(HERE, replace(message(1), target=elsewhere[0].target), lambda system: True)) == []
    answers = [said(target.take(HERE, each, lambda system: True)) for each in elsewhere]
    assert answers == [[UserQueued(elsewhere[0].id)], full, full, full], "five in the inbox"
    while target.where:
        target.received(target.heads()[0].id)
    assert target.pairs == {SENDER: 2}
    assert not target.targets
    answers = [said(target.take(HERE, each, lambda system: True)) for each in elsewhere[1:]]
    assert answers == [[UserQueued(elsewhere[1].id)], full, full], "three pairs of one sender"
    assert Pair(SENDER, 1, elsewhere[3].target) not in target.last


def test_who_parts_is_sent_everything_again() -> None:
    courier = met()
    courier.post(message(1))
    courier.post(message(2))
    assert [each.id.seq for each in said(forwarded(courier))] == [1, 2]
    courier.part(THERE)
    courier.ask_again()
    assert said(forwarded(courier)) == []
    courier.post(message(3))
    courier.meet(THERE)
    assert [each.id.seq for each in said(forwarded(courier))] == [1, 2, 3]
