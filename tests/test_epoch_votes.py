"""Epochs as credentials: who may declare, what counts as a vote, what becomes final, and what that pins."""

import random
from collections.abc import Iterable

import pytest

from echostore.kernel.feed import ForkProof, Head
from echostore.kernel.ids import Cid, DeviceKey, FeedKey, Link, PartyKey
from echostore.kernel.party.credentials import (
    ControlMessage,
    DeviceRevoke,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    FeedAdmit,
    FeedKind,
    FeedRetire,
    ForkEvidence,
    Policy,
    Role,
    TimeframeEntry,
)
from echostore.kernel.party.epoch_chain import enough_to_join, truncatable
from echostore.kernel.party.epoch_policy import EpochPolicy, election, majority, turn
from echostore.kernel.party.machine import PartyMachine
from echostore.kernel.reasons import Reason
from party_story import PARTY, Story, change, device, feed, fid, person, remove

NO_LINK = Link(bytes(32))


def team(*names: str, role: Role = Role.ADMIN) -> Story:
    story = Story()
    for name in names:
        story.say("ann", *story.join(name, role))
    return story


def control(messages: Iterable[ControlMessage]) -> tuple[TimeframeEntry, ...]:
    last: dict[FeedKey, int] = {}
    for message in messages:
        last[message.feed_key] = max(message.seq, last.get(message.feed_key, -1))
    return tuple(TimeframeEntry(key, seq, NO_LINK) for key, seq in sorted(last.items()))


def genesis(
    story: Story,
    number: int = 1,
    previous: bytes = b"",
    *,
    snapshot: str = "s",
    sees: list[ControlMessage] | None = None,
    **data: int,
) -> EpochGenesis:
    """Of what was told so far, or of `sees`; `bob_data=4` has four blocks of the feed `bob.data`."""
    entries = (TimeframeEntry(feed(name.replace("_", ".")), length - 1, NO_LINK) for name, length in data.items())
    return EpochGenesis(
        number,
        previous,
        Cid(snapshot.encode()),
        timeframe=tuple(sorted(entries, key=lambda entry: entry.feed)),
        control_timeframe=control(story.messages if sees is None else sees),
    )


def attest(declared: ControlMessage) -> EpochAttest:
    said = declared.credentials[0]
    assert said.claim is not None
    assert isinstance(said.claim.assertion, EpochGenesis)
    return EpochAttest(said.claim.assertion.number, said.hash, said.claim.assertion.snapshot)


def dispute(declared: ControlMessage) -> EpochDispute:
    said = attest(declared)
    return EpochDispute(said.number, said.genesis, b"", "another state")


def fork(name: str, seq: int) -> ForkEvidence:
    head = Head(seq + 1, NO_LINK, b"")
    return ForkEvidence(ForkProof(PARTY, feed(name), seq, NO_LINK, (), head, (), head))


def name_of(message: ControlMessage) -> bytes:
    return message.credentials[0].hash


def names(machine: PartyMachine) -> list[bytes]:
    return [epoch.hash for epoch in machine.epoch_tally().chain]


def in_every_order(story: Story, tries: int = 12) -> list[PartyMachine]:
    """Machines that received the story in random causal orders; all must tell the same."""
    machines = []
    for seed in range(tries):
        chance = random.Random(seed)
        waiting, order = list(story.messages), list[ControlMessage]()
        clock: dict[bytes, int] = {}
        while waiting:
            ready = [
                message
                for message in waiting
                if all(clock.get(known, -1) >= last for known, last in message.clock.items())
            ]
            chosen = chance.choice(ready)
            waiting.remove(chosen)
            order.append(chosen)
            clock[chosen.feed] = max(chosen.seq, clock.get(chosen.feed, -1))
        machine = PartyMachine(PARTY)
        for message in order:
            machine.receive(message)
            if chance.random() < 0.3:
                machine.epoch_tally()
        machines.append(machine)
    first = machines[0]
    for machine in machines[1:]:
        assert machine.admission().digest == first.admission().digest
        assert machine.epoch_tally().chain == first.epoch_tally().chain
    return machines


# who may declare


def test_an_epoch_without_the_capability_is_ignored_and_recorded() -> None:
    story = team("bob", role=Role.EDITOR)
    lie = story.say("bob", genesis(story))
    machine = in_every_order(story)[0]
    assert names(machine) == []
    assert [(each.feed, each.seq, each.reason) for each in machine.rejected] == [(lie.feed, 0, Reason.NOT_AUTHORISED)]


def test_a_capability_that_is_lost_at_the_same_time_does_not_count_without_a_quorum() -> None:
    story = team("bob", "cyd", "dan")
    base = list(story.messages)
    declared = story.say("bob", genesis(story, sees=base), sees=base)
    story.say("ann", change("bob", Role.EDITOR), sees=base)
    assert names(in_every_order(story)[0]) == []
    for name in ("cyd", "dan"):
        story.say(name, attest(declared), sees=[*base, declared])
    (machine, *_) = in_every_order(story)
    assert names(machine) == [name_of(declared)], "a quorum stood for it, so it counts for good"


def test_an_epoch_names_control_messages_of_its_own_past_only() -> None:
    story = team("bob")
    base = list(story.messages)
    later = story.say("ann", *story.join("cyd", Role.EDITOR))
    unseen = story.say("bob", genesis(story, sees=[*base, later]), sees=base)
    machine = in_every_order(story)[0]
    assert Reason.MALFORMED in [each.reason for each in machine.rejected if each.feed == unseen.feed]
    assert names(machine) == []


def test_epoch_zero_is_the_partys_genesis_and_declared_by_nobody() -> None:
    story = team()
    story.say("ann", genesis(story, number=0))
    machine = in_every_order(story)[0]
    assert names(machine) == []
    assert [each.reason for each in machine.rejected] == [Reason.MALFORMED]


def test_bots_and_named_devices_declare_where_the_policy_says_so() -> None:
    story = team("bob", "bot", role=Role.EDITOR)
    story.say("ann", Policy((("epoch.bots", bytes(story.writers["bot"].device)), ("epoch.declarers", b"bot"))))
    by_ann, by_bot = story.say("ann", genesis(story)), story.say("bot", genesis(story))
    machine = in_every_order(story)[0]
    assert names(machine) == [name_of(by_bot)]
    assert [each.feed for each in machine.rejected] == [by_ann.feed]


def test_a_policy_that_can_not_be_read_stands_as_if_it_were_not_there() -> None:
    bad = {"epoch.messages": b"many", "epoch.age_s": b"-1", "epoch.grace_s": b"9" * 99, "epoch.join_attests": b"x"}
    assert EpochPolicy.of(bad) == EpochPolicy(join_attests=-1)
    assert EpochPolicy.of(bad).attests_to_join(3) == 1
    policy = EpochPolicy.of({"epoch.messages": b"10", "epoch.bytes": b"1000", "epoch.age_s": b"60"})
    assert policy.by_itself
    assert not policy.due(messages=9, size=999, age_s=59)
    assert all((policy.due(messages=10, size=0, age_s=0), policy.due(messages=1, size=1000, age_s=0)))
    assert policy.due(messages=1, size=0, age_s=60)
    assert not policy.due(messages=0, size=9999, age_s=9999), "nothing is new"


def test_the_election_gives_every_device_its_turn_after_those_before_it_stayed_silent() -> None:
    devices = [DeviceKey(bytes([number]) * 32) for number in range(5)]
    order = election(PARTY, 7, devices)
    assert sorted(order) == devices
    assert order == election(PARTY, 7, reversed(devices))
    assert order != election(PARTY, 8, devices)
    assert order != election(PartyKey(b"o" * 32), 7, devices)
    assert not turn(order, order[0], waited_s=9.9, grace_s=10)
    assert turn(order, order[0], waited_s=10, grace_s=10)
    assert not turn(order, order[1], waited_s=19.9, grace_s=10)
    assert turn(order, order[1], waited_s=20, grace_s=10)
    assert not turn(order, DeviceKey(b"x" * 32), waited_s=999, grace_s=10)


# votes and quorums


def test_a_quorum_is_a_majority_of_the_members_in_the_genesis_own_past() -> None:
    story = team("bob", "cyd")
    declared = story.say("ann", genesis(story))
    before = list(story.messages)
    story.say("bob", attest(declared), sees=before)
    for name in ("dan", "eve", "fay", "gus"):
        story.say("ann", *story.join(name, Role.EDITOR))
    epoch = in_every_order(story)[0].epoch_tally().chain[0]
    assert epoch.final, "who joined later has no say in what was declared before"
    assert epoch.electorate == {person("ann"), person("bob"), person("cyd")}


def test_a_retired_identity_does_not_count_into_the_quorum() -> None:
    story = team("bob", "cyd", "dan")
    assert len(story.machine().electorate) == 4
    for name in ("cyd", "dan"):
        story.say("ann", FeedRetire(feed(name), 0))
    declared = story.say("ann", genesis(story))
    story.say("bob", attest(declared))
    epoch = in_every_order(story)[0].epoch_tally().chain[0]
    assert len(epoch.electorate) == 2
    assert epoch.final


def admit_data(name: str, which: str) -> FeedAdmit:
    return FeedAdmit(feed(f"{name}.{which}"), FeedKind.DATA, person(name), device(f"{name}.d"))


def test_who_has_no_data_feed_left_does_not_count_into_the_quorum_before_it_is_back() -> None:
    story = team("bob", "cyd", "dan", "eve")
    before = story.say("ann", genesis(story))
    story.say("bob", attest(before))
    for name in ("cyd", "dan", "eve"):
        story.say("ann", FeedRetire(feed(f"{name}.data"), 3))
    first = story.say("ann", genesis(story, 2, name_of(before)))
    story.say("bob", attest(first))
    story.say("cyd", admit_data("cyd", "again"))
    second = story.say("ann", genesis(story, 3, name_of(first)))
    for machine in in_every_order(story):
        assert machine.electorate == {person("ann"), person("bob"), person("cyd")}
        assert machine.voters == machine.electorate | {person("dan"), person("eve")}
        found = [(len(epoch.electorate), epoch.final) for epoch in machine.epoch_tally().chain]
        assert found == [(5, True), (2, True), (3, False)], "a quorum above is one for what lies below"
    story.say("cyd", attest(second))
    assert story.machine().epoch_tally().final(3)


def test_who_has_another_data_feed_counts_and_so_does_who_never_had_one() -> None:
    story = team("bob", "cyd")
    story.writer("dan")
    admits = [said for said in story.join("dan", Role.EDITOR) if not is_data(said)]
    story.say("ann", *admits)
    story.say("bob", admit_data("bob", "more"))
    story.say("ann", FeedRetire(feed("bob.data"), 0), FeedRetire(feed("cyd.data"), 0))
    assert story.machine().electorate == {person("ann"), person("bob"), person("dan")}
    story.say("ann", FeedRetire(feed("bob.more"), 0))
    assert story.machine().electorate == {person("ann"), person("dan")}


def is_data(said: object) -> bool:
    return isinstance(said, FeedAdmit) and said.kind is FeedKind.DATA


def test_the_vote_of_who_was_retired_for_silence_may_still_come() -> None:
    """One voted for a rival that the silent may make final when they wake: it does not help what contradicts that."""
    story = team("bob", "cyd", "dan", "eve")
    base = list(story.messages)
    pair = {name: story.say(name, genesis(story, sees=base, snapshot=name), sees=base) for name in ("ann", "bob")}
    winner, loser = sorted(pair, key=lambda name: name_of(pair[name]))
    for name in ("cyd", "dan", "eve"):
        story.say("ann", FeedRetire(feed(f"{name}.data"), 0))
    above = story.say(winner, genesis(story, 2, name_of(pair[winner])))

    def objection() -> str | None:
        machine = story.machine()
        return machine.epoch_tally().objection(name_of(above), person(loser), machine.voters)

    assert objection() is not None
    for name in ("dan", "eve"):
        story.say("ann", remove(name))
    assert objection() is None, "two are gone for good: the rival is beaten"


def test_a_ground_low_hash_for_an_old_number_changes_nothing_once_a_quorum_stands() -> None:
    story = team("bob", "cyd")
    base = list(story.messages)
    declared = story.say("ann", genesis(story))
    story.say("bob", attest(declared))
    rivals = [
        story.say("cyd", genesis(story, sees=base, snapshot=f"ground {number}"), sees=base) for number in range(8)
    ]
    assert min(map(name_of, rivals)) < name_of(declared), "one of them has a lower hash"
    machine = in_every_order(story)[0]
    assert names(machine) == [name_of(declared)]
    assert len(machine.epoch_tally().declared) == 9
    assert len(machine.epoch_tally().chain[0].rivals) == 1, "an identity has one vote per number, and so one rival"


def test_a_ground_low_hash_that_only_its_declarer_votes_for_blocks_nothing() -> None:
    for attempt in range(50):
        story = team("bob", "cyd", "dan", "eve")
        base = list(story.messages)
        declared = story.say("ann", genesis(story, sees=base), sees=base)
        story.say("bob", attest(declared), sees=[*base, declared])
        false = story.say("cyd", genesis(story, sees=base, snapshot=f"ground {attempt}"), sees=base)
        if name_of(false) < name_of(declared):
            break
    assert name_of(false) < name_of(declared), "by chance one of fifty has the lower hash"
    machine = in_every_order(story)[0]
    assert names(machine) == [name_of(declared)], "two votes go before one, whatever the hashes"
    assert machine.epoch_tally().objection(name_of(declared), person("dan"), machine.voters) is None


def test_who_passes_over_an_epoch_attests_another_in_its_place() -> None:
    story = team("bob", "cyd", "dan", "eve")
    base = list(story.messages)
    pair = [story.say(name, genesis(story, sees=base, snapshot=name), sees=base) for name in ("ann", "bob")]
    low, high = sorted(map(name_of, pair))
    tally = story.machine().epoch_tally()
    passed = frozenset({low})
    assert tally.objection(high, person("cyd")) is not None, "the lower hash names the number"
    assert tally.objection(high, person("cyd"), None, passed) is None
    assert [epoch.hash for epoch in tally.view(person("cyd"), passed)] == [high]
    assert names(story.machine()) == [low], "what one peer passes over changes nobody's chain"


def test_a_final_epoch_is_not_passed_over() -> None:
    story = team("bob", "cyd")
    declared = story.say("ann", genesis(story))
    story.say("bob", attest(declared))
    tally = story.machine().epoch_tally()
    assert [epoch.hash for epoch in tally.view(person("cyd"), frozenset({name_of(declared)}))] == [name_of(declared)]


@pytest.mark.parametrize("how", ["removed", "demoted", "device revoked", "feed retired"])
def test_an_epoch_without_a_quorum_is_void_once_its_declarer_is_gone(how: str) -> None:
    story = team("bob", "cyd", "dan")
    declared = story.say("bob", genesis(story))
    story.say("cyd", attest(declared))
    assert names(in_every_order(story)[0]) == [name_of(declared)]
    deed = {
        "removed": remove("bob"),
        "demoted": change("bob", Role.EDITOR),
        "device revoked": DeviceRevoke(person("bob"), device("bob.d")),
        "feed retired": FeedRetire(feed("bob"), 1),
    }[how]
    story.say("ann", deed)
    machine = in_every_order(story)[0]
    assert names(machine) == [], "it counted when it was declared, and has no quorum"
    assert not machine.rejected, "the credential itself stays what it was"
    other = story.say("ann", genesis(story))
    story.say("dan", attest(other))
    assert names(in_every_order(story)[0]) == [name_of(other)]
    story.say("dan", attest(declared))
    assert names(in_every_order(story)[0]) == [name_of(other)], "dan has voted"


def test_an_epoch_with_a_quorum_stays_when_its_declarer_is_removed() -> None:
    story = team("bob", "cyd", "dan")
    declared = story.say("bob", genesis(story))
    story.say("cyd", attest(declared))
    story.say("ann", remove("bob"))
    assert names(in_every_order(story)[0]) == []
    story.say("dan", attest(declared))
    machine = in_every_order(story)[0]
    assert names(machine) == [name_of(declared)], "bob, cyd and dan are three of four"
    assert machine.epoch_tally().final(1)


def test_an_epoch_that_a_removed_member_declared_holds_up_no_epoch_above_it() -> None:
    story = team("bob", "cyd", "dan")
    first = story.say("ann", genesis(story))
    for name in ("cyd", "dan"):
        story.say(name, attest(first))
    story.say("bob", genesis(story, 2, name_of(first)))
    story.say("ann", remove("bob"))
    second = story.say("cyd", genesis(story, 2, name_of(first), snapshot="other"))
    for name in ("ann", "dan"):
        story.say(name, attest(second))
    machine = in_every_order(story)[0]
    assert names(machine) == [name_of(first), name_of(second)]
    assert machine.epoch_tally().chain[1].rivals == ()


def test_a_second_attest_by_one_device_does_not_count() -> None:
    story = team("bob", "cyd", "dan", "eve")
    base = list(story.messages)
    one = story.say("ann", genesis(story, sees=base, snapshot="one"), sees=base)
    two = story.say("bob", genesis(story, sees=base, snapshot="two"), sees=base)
    story.say("cyd", attest(one))
    story.say("cyd", attest(two))
    story.say("dan", attest(two))
    tally = in_every_order(story)[0].epoch_tally()
    stands = {act.hash: act.identity for act in tally.declared}
    assert set(stands) == {name_of(one), name_of(two)}
    assert tally.voted(1, person("cyd")) == name_of(one)
    assert not tally.chain[0].final, "three of five would be a quorum, and two are not"


def test_an_attest_of_another_state_is_none_and_one_after_a_dispute_neither() -> None:
    story = team("bob", "cyd")
    declared = story.say("ann", genesis(story))
    other = attest(declared)
    story.say("bob", EpochAttest(other.number, other.genesis, Cid(b"another")))
    story.say("cyd", dispute(declared))
    story.say("cyd", attest(declared))
    epoch = in_every_order(story)[0].epoch_tally().chain[0]
    assert epoch.attested_by == {person("ann")}
    assert epoch.disputed_by == {person("cyd")}
    assert not epoch.final


def test_who_disputes_an_epoch_goes_on_without_it() -> None:
    story = team("bob", "cyd", "dan")
    base = list(story.messages)
    lie = story.say("dan", genesis(story, sees=base, snapshot="lie"), sees=base)
    story.say("bob", dispute(lie))
    truth = story.say("bob", genesis(story, snapshot="truth"))
    tally = story.machine().epoch_tally()
    assert [epoch.hash for epoch in tally.view(person("bob"))] == [name_of(truth)]
    assert name_of(lie) < name_of(truth), "whoever has not looked yet sees the lower hash"
    assert tally.objection(name_of(truth), person("ann")) is not None
    story.say("ann", dispute(lie))
    assert story.machine().epoch_tally().objection(name_of(truth), person("ann")) is None
    story.say("ann", attest(truth))
    story.say("cyd", attest(truth))
    assert names(in_every_order(story)[0]) == [name_of(truth)]


def test_a_quorum_for_an_epoch_is_one_for_those_below_it() -> None:
    story = team("bob", "cyd")
    first = story.say("ann", genesis(story))
    second = story.say("ann", genesis(story, 2, name_of(first)))
    story.say("bob", attest(second))
    assert [epoch.final for epoch in in_every_order(story)[0].epoch_tally().chain] == [True, True]


def test_whoever_voted_for_a_rival_that_may_still_win_waits() -> None:
    story = team("bob", "cyd", "dan", "eve")
    base = list(story.messages)
    pair = [story.say(name, genesis(story, sees=base, snapshot=name), sees=base) for name in ("ann", "bob")]
    low, high = sorted(pair, key=name_of)
    voter = "cyd"
    story.say(voter, attest(high), sees=[*base, high])
    story.say("dan", attest(low), sees=[*base, low])
    above = story.say("dan", genesis(story, 2, name_of(low)))
    tally = story.machine().epoch_tally()
    assert names(story.machine()) == [name_of(low), name_of(above)]
    objection = tally.objection(name_of(above), person(voter))
    assert objection is not None
    assert "may still win" in objection
    story.say("eve", attest(low), sees=[*base, low])
    tally = story.machine().epoch_tally()
    assert tally.objection(name_of(above), person(voter)) is None, "three of five are against it"


def test_whoever_went_on_votes_for_what_its_own_epoch_rests_on() -> None:
    """Two of five stand for one rival, the third for its successor, two for a rival with a lower hash: who went on can't
    come over, and the two wait as long as its vote may come."""
    for attempt in range(50):
        story = Story()
        for name in ("bob", "cyd", "dan", "eve"):
            story.say("ann", *story.join(name, Role.ADMIN))
        base = list(story.messages)
        first = story.say("ann", genesis(story, sees=base), sees=base)
        story.say("bob", attest(first), sees=[*base, first])
        above = story.say("cyd", genesis(story, 2, name_of(first), sees=[*base, first]), sees=[*base, first])
        rival = story.say("dan", genesis(story, sees=base, snapshot=f"rival {attempt}"), sees=base)
        story.say("eve", attest(rival), sees=[*base, rival])
        tally = story.machine().epoch_tally()
        if tally.chain[0].hash == name_of(rival):
            break
    assert tally.chain[0].hash == name_of(rival), "by chance one of fifty has the lower hash"
    assert [epoch.hash for epoch in tally.owed(person("cyd"))] == [name_of(first)]
    assert tally.objection(name_of(first), person("cyd")) is None
    assert tally.objection(name_of(rival), person("cyd")) is not None
    story.say("cyd", attest(first), sees=[*base, first, above])
    tally = story.machine().epoch_tally()
    assert tally.final(1)
    assert tally.chain[0].hash == name_of(first)
    assert tally.owed(person("cyd")) == []


def test_who_is_removed_can_not_keep_others_waiting() -> None:
    story = team("bob", "cyd")
    base = list(story.messages)
    pair = [story.say(name, genesis(story, sees=base, snapshot=name), sees=base) for name in ("ann", "bob")]
    low, high = sorted(pair, key=name_of)
    loser = "ann" if high is pair[0] else "bob"
    winner = "bob" if loser == "ann" else "ann"
    above = story.say(winner, genesis(story, 2, name_of(low)))
    machine = story.machine()
    assert machine.epoch_tally().objection(name_of(above), person(loser), machine.voters) is not None
    story.say("ann", remove("cyd"))
    machine = story.machine()
    assert machine.epoch_tally().objection(name_of(above), person(loser), machine.voters) is None


def test_an_identity_declares_once_per_number() -> None:
    story = team("bob", "cyd")
    declared = story.say("ann", genesis(story))
    tally = story.machine().epoch_tally()
    again = genesis(story, snapshot="again")
    assert tally.fear(again, [], person("ann")) == "this identity stands for another epoch 1"
    assert tally.fear(again, [], person("bob")) is None
    assert declared.credentials


# pins


def final_epoch(story: Story, but: str = "", **data: int) -> ControlMessage:
    declared = story.say("ann", genesis(story, **data))
    for name in story.writers:
        if name not in ("ann", but):
            story.say(name, attest(declared))
    return declared


def end_of(machine: PartyMachine, name: str) -> int | None:
    record = machine.admission().by_id[fid(name)]
    return record.intervals[-1].end if record.intervals else 0


@pytest.mark.parametrize(("contained", "expected"), [(9, 9), (3, 7)])
def test_a_removal_that_arrives_after_an_attested_epoch_leaves_the_blocks_it_contained(
    contained: int, expected: int
) -> None:
    story = team("bob", "cyd")
    base = list(story.messages)
    final_epoch(story, bob_data=contained)
    story.say("ann", remove("bob", bob_data=7), sees=base)
    assert end_of(in_every_order(story)[0], "bob.data") == expected


def test_a_removal_that_an_epoch_contains_holds_in_it() -> None:
    story = team("bob", "cyd")
    first = final_epoch(story, bob_data=3)
    story.say("ann", remove("bob", bob_data=5))
    declared = story.say("ann", genesis(story, 2, name_of(first), bob_data=5))
    story.say("cyd", attest(declared))
    assert end_of(in_every_order(story)[0], "bob.data") == 5


def test_a_fork_that_arrives_after_an_attested_epoch_leaves_the_branch_it_contained() -> None:
    story = team("bob", "cyd")
    base = list(story.messages)
    final_epoch(story, bob_data=9)
    story.say("cyd", fork("bob.data", 4), sees=base)
    (machine, *_) = in_every_order(story)
    assert end_of(machine, "bob.data") == 9
    assert machine.admission().why_excluded(fid("bob.data"), 9) is Reason.FORK


def test_a_fork_without_an_epoch_cuts_where_it_is() -> None:
    story = team("bob", "cyd")
    base = list(story.messages)
    story.say("ann", genesis(story, bob_data=9))
    story.say("cyd", fork("bob.data", 4), sees=base)
    assert end_of(in_every_order(story)[0], "bob.data") == 4


def test_what_a_removed_member_had_said_stays_where_an_epoch_contained_it() -> None:
    story = team("bob", "cyd", "eve")
    base = list(story.messages)
    story.say("bob", *story.join("dan", Role.EDITOR), sees=base)
    final_epoch(story, but="eve", dan_data=4)
    removal = story.say("eve", remove("bob"), sees=base)
    assert all(message.feed not in removal.clock for message in story.messages if message.feed_key == feed("bob"))
    machine = in_every_order(story)[0]
    members = {member.name: member.role for member in machine.members}
    assert members["dan"] is Role.EDITOR, "the epoch contained his admission"
    assert members["bob"] is None
    assert machine.admission().why_excluded(fid("dan.data"), 3) is None


def test_without_an_epoch_a_concurrent_removal_takes_back_what_was_said() -> None:
    story = team("bob", "cyd", "eve")
    base = list(story.messages)
    story.say("bob", *story.join("dan", Role.EDITOR), sees=base)
    story.say("eve", remove("bob"), sees=base)
    assert "dan" not in {member.name for member in in_every_order(story)[0].members}


def test_who_asks_again_has_nothing_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine is asked for members, feeds and epochs all the time; that must not cost what all its epochs are."""
    story = team("bob", "cyd")
    final_epoch(story)
    machine = in_every_order(story)[0]
    counted: list[object] = []
    pins_of = PartyMachine._pins_of
    monkeypatch.setattr(PartyMachine, "_pins_of", lambda self, *given: counted.append(given) or pins_of(self, *given))
    before = machine.epoch_tally().chain, machine.admission().digest, machine.members
    assert (machine.epoch_tally().chain, machine.admission().digest, machine.members) == before
    assert counted == []
    machine.receive(story.say("ann", genesis(story, number=2)))
    assert len(machine.epoch_tally().chain) == len(names(machine)) >= 1
    assert counted, "something came"


def test_a_majority_is_more_than_half() -> None:
    assert [majority(count) for count in (1, 2, 3, 4, 5, 6)] == [1, 2, 2, 3, 3, 4]
    story = team("bob", "cyd", "dan")
    declared = story.say("ann", genesis(story))
    story.say("bob", attest(declared))
    assert not in_every_order(story)[0].epoch_tally().chain[0].final, "two of four"
    story.say("cyd", attest(declared))
    assert in_every_order(story)[0].epoch_tally().chain[0].final


def test_the_attest_of_a_member_who_is_removed_at_the_same_time_counts() -> None:
    story = team("bob", "cyd")
    declared = story.say("ann", genesis(story))
    base = list(story.messages)
    story.say("bob", attest(declared), sees=base)
    story.say("ann", remove("bob"), sees=base)
    assert in_every_order(story)[0].epoch_tally().chain[0].final


# who believes, who deletes


def test_a_newcomer_wants_an_independent_attest_from_three_devices_on() -> None:
    story = team("bob", "cyd")
    declared = story.say("ann", genesis(story))
    policy = EpochPolicy()
    epoch = story.machine().epoch_tally().chain[0]
    assert enough_to_join(epoch, policy, devices=2)
    assert not enough_to_join(epoch, policy, devices=3)
    story.say("bob", attest(declared))
    epoch = story.machine().epoch_tally().chain[0]
    assert enough_to_join(epoch, policy, devices=3)
    assert not enough_to_join(epoch, EpochPolicy(join_attests=2), devices=3)


def test_history_goes_below_an_epoch_that_a_quorum_attested_and_that_is_one_epoch_old() -> None:
    story = team("bob", "cyd")
    first = final_epoch(story)
    policy = EpochPolicy()
    assert truncatable(story.machine().epoch_tally().chain, policy) is None, "it is the newest"
    second = story.say("ann", genesis(story, 2, name_of(first)))
    assert truncatable(story.machine().epoch_tally().chain, policy) is None, "its successor is not final"
    story.say("bob", attest(second))
    found = truncatable(story.machine().epoch_tally().chain, policy)
    assert found is not None
    assert found.hash == name_of(first)
    assert [policy.quorum_for_truncation(count) for count in (1, 2, 3, 4)] == [majority(n) for n in (1, 2, 3, 4)]
    careful = EpochPolicy(truncate_quorum=3)
    assert [careful.quorum_for_truncation(count) for count in (2, 3, 9)] == [2, 3, 5]


def test_no_order_of_votes_makes_two_rivals_final() -> None:
    """Every way in which five honest members, each seeing some of it, vote for two rivals and what rests on them."""
    names_ = ("ann", "bob", "cyd", "dan", "eve")
    for seed in range(60):
        chance = random.Random(seed)
        story = team(*names_[1:])
        base = list(story.messages)
        held = {name: list(base) for name in names_}
        for _ in range(40):
            name = chance.choice(names_)
            held[name] = _closed(story, [*held[name], *chance.sample(story.messages, min(3, len(story.messages)))])
            machine = story.machine(sorted(held[name], key=lambda each: (each.depth, each.feed, each.seq)))
            tally, me = machine.epoch_tally(), person(name)
            chain = tally.view(me)
            may = [each for each in chain if tally.objection(each.hash, me, machine.voters) is None]
            said: EpochAttest | EpochGenesis
            if may:
                said = EpochAttest(may[0].number, may[0].hash, may[0].genesis.snapshot)
            elif len(chain) < 4:
                before = chain[-1].hash if chain else b""
                said = genesis(story, len(chain) + 1, before, snapshot=f"{name}{len(chain)}", sees=held[name])
                if tally.fear(said, chain, me, machine.voters) is not None:
                    continue
            else:
                continue
            held[name] = [*held[name], story.say(name, said, sees=held[name])]
        finals: dict[int, set[bytes]] = {}
        for subset in (*held.values(), story.messages):
            machine = story.machine(sorted(subset, key=lambda each: (each.depth, each.feed, each.seq)))
            for epoch in machine.epoch_tally().chain:
                if epoch.final:
                    finals.setdefault(epoch.number, set()).add(epoch.hash)
        assert all(len(found) == 1 for found in finals.values()), seed


def _closed(story: Story, messages: list[ControlMessage]) -> list[ControlMessage]:
    """Messages with all that happened before them."""
    wanted = {(message.feed, message.seq) for message in messages}
    for message in messages:
        for known, last in message.clock.items():
            wanted |= {(known, seq) for seq in range(last + 1)}
    return [message for message in story.messages if (message.feed, message.seq) in wanted]
