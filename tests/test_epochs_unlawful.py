"""Epochs by who may not declare them: a thousand of them, each ignored and recorded, whatever the order of arrival."""

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from echostore.kernel.party.credentials import ControlMessage, FeedRetire, Role
from echostore.kernel.party.machine import PartyMachine
from echostore.kernel.reasons import Reason
from party_story import PARTY, Story, change, feed, remove
from test_epoch_votes import attest, genesis, name_of, names

CASES = 125
"""For each of eight ways: a thousand in all."""
ADMINS = ("bob", "cyd", "dan")


class Case(NamedTuple):
    """A story in which `liar` is about to declare, after `sees`."""

    story: Story
    liar: str
    sees: list[ControlMessage]
    reasons: set[Reason]


def party(chance: random.Random, others: int) -> Story:
    """Three admins beside ann, and some others."""
    story = Story()
    for name in ADMINS:
        story.say("ann", *story.join(name, Role.ADMIN))
    for number in range(others):
        story.say("ann", *story.join(f"other{number}", chance.choice((Role.EDITOR, Role.READER))))
    return story


def of_role(role: Role) -> Callable[[Story, random.Random], Case]:
    def told(story: Story, chance: random.Random) -> Case:
        story.say(chance.choice(("ann", *ADMINS)), *story.join("liar", role))
        return Case(story, "liar", list(story.messages), {Reason.NOT_AUTHORISED})

    return told


def stranger(story: Story, chance: random.Random) -> Case:
    story.writer("liar")
    return Case(story, "liar", list(story.messages), {Reason.UNADMITTED})


def demoted_before(story: Story, chance: random.Random) -> Case:
    story.say("ann", change("bob", chance.choice((Role.EDITOR, Role.READER))))
    return Case(story, "bob", list(story.messages), {Reason.NOT_AUTHORISED})


def removed_before(story: Story, chance: random.Random) -> Case:
    story.say("ann", remove("bob"))
    return Case(story, "bob", list(story.messages), {Reason.ISSUER_REMOVED})


def retired_before(story: Story, chance: random.Random) -> Case:
    story.say("ann", FeedRetire(feed("bob"), 0))
    return Case(story, "bob", list(story.messages), {Reason.RETIRED})


def demoted_meanwhile(story: Story, chance: random.Random) -> Case:
    base = list(story.messages)
    story.say("ann", change("bob", chance.choice((Role.EDITOR, Role.READER))), sees=base)
    return Case(story, "bob", base, {Reason.NOT_AUTHORISED})


def removed_meanwhile(story: Story, chance: random.Random) -> Case:
    base = list(story.messages)
    story.say("ann", remove("bob"), sees=base)
    return Case(story, "bob", base, {Reason.ISSUER_REMOVED, Reason.BEYOND_CUT})


WAYS: dict[str, Callable[[Story, random.Random], Case]] = {
    "editor": of_role(Role.EDITOR),
    "reader": of_role(Role.READER),
    "stranger": stranger,
    "demoted before": demoted_before,
    "removed before": removed_before,
    "retired before": retired_before,
    "demoted meanwhile": demoted_meanwhile,
    "removed meanwhile": removed_meanwhile,
}


def received(story: Story, chance: random.Random) -> PartyMachine:
    """A machine that hears the story in some causal order."""
    waiting, clock = list(story.messages), dict[bytes, int]()
    machine = PartyMachine(PARTY)
    while waiting:
        ready = [each for each in waiting if all(clock.get(known, -1) >= last for known, last in each.clock.items())]
        chosen = chance.choice(ready)
        waiting.remove(chosen)
        machine.receive(chosen)
        clock[chosen.feed] = max(chosen.seq, clock.get(chosen.feed, -1))
    return machine


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_by_who_may_not_declare_one_is_ignored_and_recorded(way: str) -> None:
    for seed in range(CASES):
        chance = random.Random(f"{way}/{seed}")
        case = WAYS[way](party(chance, chance.randrange(3)), chance)
        story = case.story
        lie = story.say(
            case.liar, genesis(story, snapshot="lie", sees=case.sees, bob_data=chance.randrange(1, 9)), sees=case.sees
        )
        honest: ControlMessage | None = None
        if chance.random() < 0.5:  # an honest one of the same number, by who has not seen the lie
            honest = story.say("ann", genesis(story, snapshot="true", sees=case.sees), sees=case.sees)
        first, second = received(story, chance), received(story, chance)
        assert names(first) == names(second) == ([] if honest is None else [name_of(honest)]), seed
        assert first.admission().digest == second.admission().digest, seed
        recorded = {each.reason for each in first.rejected if (each.feed, each.seq) == (lie.feed, lie.seq)}
        assert recorded, seed
        assert recorded <= case.reasons, (seed, recorded)
        assert recorded == {each.reason for each in second.rejected if (each.feed, each.seq) == (lie.feed, lie.seq)}


@pytest.mark.parametrize("way", ["demoted meanwhile", "removed meanwhile"])
def test_a_right_that_is_lost_meanwhile_counts_with_a_quorum_and_not_with_less(way: str) -> None:
    """Declaring is a vote: of four members, two are no majority and three are."""
    for seed in range(40):
        for votes in (1, 2):
            chance = random.Random(f"{way}/{seed}")
            case = WAYS[way](party(chance, 0), chance)
            declared = case.story.say(case.liar, genesis(case.story, sees=case.sees), sees=case.sees)
            for name in chance.sample(ADMINS[1:], votes):
                case.story.say(name, attest(declared), sees=[*case.sees, declared])
            for _ in range(2):
                expected = [name_of(declared)] if votes == 2 else []
                assert names(received(case.story, chance)) == expected, (seed, votes)
