"""Going on from a control state: the same party as with all messages, in any order of arrival and for any cut."""

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.kernel.feed import ForkProof, Head
from echostore.kernel.ids import NO_LINK, Cid, FeedId, FeedKey, Link, feed_id
from echostore.kernel.party.compaction import compact, compact_from, is_closed
from echostore.kernel.party.control_state import ControlState
from echostore.kernel.party.control_trust import left_out
from echostore.kernel.party.credentials import (
    CapabilityRevoke,
    ChildParty,
    ControlMessage,
    DeviceRevoke,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    FeedAdmit,
    FeedKind,
    FeedRetire,
    ForkEvidence,
    Invitation,
    Policy,
    Profile,
    Role,
    TimeframeEntry,
)
from echostore.kernel.party.epoch_chain import Epoch, truncatable
from echostore.kernel.party.machine import PartyMachine, Rejection
from party_story import CHILD, PARTY, Story, change, device, feed, fid, person, remove, role_of
from test_party_machine import causal_shuffle, quarrels, stories

PEOPLE = ("ann", "bob", "cyd", "dan")


# --- telling --------------------------------------------------------------------------------------------------------


def team(*names: str, role: Role = Role.ADMIN) -> Story:
    story = Story()
    for name in names:
        story.say("ann", *story.join(name, role))
    return story


def closure(messages: Sequence[ControlMessage], of: Iterable[ControlMessage]) -> list[ControlMessage]:
    """The messages that some of them see, with those themselves."""
    lengths: dict[FeedId, int] = {}
    for message in of:
        for known, last in [*message.clock.items(), (message.feed, message.seq)]:
            lengths[known] = max(lengths.get(known, 0), last + 1)
    return [message for message in messages if message.seq < lengths.get(message.feed, 0)]


def timeframe(messages: Iterable[ControlMessage]) -> tuple[TimeframeEntry, ...]:
    last: dict[FeedKey, int] = {}
    for message in messages:
        last[message.feed_key] = max(message.seq, last.get(message.feed_key, -1))
    return tuple(TimeframeEntry(key, seq, Link(NO_LINK)) for key, seq in sorted(last.items()))


def next_epoch(story: Story, seen: Sequence[ControlMessage], child: bool = False, **data: int) -> EpochGenesis:
    """The epoch after the newest that is seen, of all that is seen."""
    whose = CHILD if child else None
    latest = story.machine(seen).epoch_tally(whose).latest
    lengths = {entry.feed: entry.seq + 1 for entry in latest.genesis.timeframe} if latest else {}
    for name, length in data.items():
        key = feed(name.replace("_", "."))
        lengths[key] = max(length, lengths.get(key, 0))
    return EpochGenesis(
        latest.number + 1 if latest else 1,
        latest.hash if latest else b"",
        Cid(b"s"),
        timeframe=tuple(TimeframeEntry(key, length - 1, NO_LINK) for key, length in sorted(lengths.items()) if length),
        control_timeframe=timeframe(seen),
        child=whose,
    )


def vote(declared: ControlMessage) -> EpochAttest:
    (credential, *_) = declared.credentials
    assert credential.claim is not None
    said = credential.claim.assertion
    assert isinstance(said, EpochGenesis)
    return EpochAttest(said.number, credential.hash, said.snapshot)


def epochs(story: Story, count: int, voters: Sequence[str] = PEOPLE) -> list[ControlMessage]:
    """So many epochs, one after the other, that everybody attests."""
    declared = []
    for _ in range(count):
        told = story.say("ann", next_epoch(story, story.messages))
        declared.append(told)
        for name in voters:
            if name != "ann":
                story.say(name, vote(told))
    return declared


def lengths_of(messages: Iterable[ControlMessage]) -> dict[FeedKey, int]:
    return {entry.feed: entry.seq + 1 for entry in timeframe(messages)}


# --- going on -------------------------------------------------------------------------------------------------------


def as_heard(state: ControlState, story: Story, order: Iterable[ControlMessage]) -> list[ControlMessage]:
    """Messages above the cut with the clocks that a peer works out who knows of those below only what is kept."""
    feeds = {feed_id(each.key): each for each in state.feeds}
    clocks: dict[tuple[FeedId, int], dict[FeedId, int]] = {}
    found = []
    for message in order:
        clock: dict[FeedId, int] = {}
        for direct in story.direct[message.feed, message.seq]:
            place = (direct.feed, direct.seq)
            below = direct.feed in feeds and direct.seq < feeds[direct.feed].length
            theirs = feeds[direct.feed].clock(direct.seq) if below else clocks[place]
            for known, last in [*theirs.items(), place]:
                clock[known] = max(clock.get(known, -1), last)
        clocks[message.feed, message.seq] = clock
        found.append(
            ControlMessage(message.feed, message.feed_key, message.seq, message.depth, clock, message.credentials)
        )
    return found


def go_on(state: ControlState, story: Story, order: Iterable[ControlMessage]) -> PartyMachine:
    lengths = {feed_id(key): length for key, length in state.lengths.items()}
    machine = PartyMachine(PARTY, state)
    for message in as_heard(state, story, [each for each in order if each.seq >= lengths.get(each.feed, 0)]):
        machine.receive(message)
    return machine


def chain_from(machine: PartyMachine, state: ControlState, child: bool) -> list[Epoch]:
    whose = CHILD if child else None
    first = next((chain.number for chain in state.chains if chain.child == whose), 1)
    return [epoch for epoch in machine.epoch_tally(whose).chain if epoch.number >= first]


def still_listed(machine: PartyMachine, state: ControlState) -> set[Rejection]:
    """Refused credentials, without those below the cut that are not kept."""
    kept = {(each.feed, each.seq, at) for each in state.messages for at in each.positions}
    lengths = {feed_id(key): length for key, length in state.lengths.items()}
    return {
        each
        for each in machine.rejected
        if each.seq >= lengths.get(each.feed, 0) or (each.feed, each.seq, each.position) in kept
    }


def facts(machine: PartyMachine, state: ControlState) -> dict[str, object]:
    """All that two peers with the same messages must agree on."""
    kept = {credential.hash for message in state.messages for credential in message.credentials}
    lengths = {feed_id(key): length for key, length in state.lengths.items()}
    return {
        "admissions": tuple(machine.admission(child).digest for child in (None, CHILD)),
        "feeds": machine.feeds,
        "rejected": still_listed(machine, state),
        "members": machine.members,
        "devices": machine.devices,
        "groups": machine.groups,
        "policy": machine.policy,
        "revoked": machine.revoked_capabilities,
        "children": machine.children,
        "invitations": machine.invitations,
        "models": machine.models,
        "forks": machine.forks,
        "electorate": machine.electorate,
        "voters": machine.voters,
        "chain": chain_from(machine, state, child=False),
        "child chain": chain_from(machine, state, child=True),
        "truncatable": truncatable(chain_from(machine, state, child=False), machine.epoch_policy),
        "why": {
            name: [
                step for step in machine.why(person(name)) if step.hash in kept or step.seq >= lengths.get(step.feed, 0)
            ]
            for name in PEOPLE
        },
    }


def check_cut(story: Story, below: Sequence[ControlMessage], chance: random.Random) -> bool:
    """Whatever comes first: who goes on from the cut and who has all messages agree. False where something was late."""
    lengths = lengths_of(below)
    whole = story.machine()
    state = compact(whole, lengths)
    for _ in range(2):
        shuffled = PartyMachine(PARTY)
        for message in causal_shuffle(list(below), chance):
            shuffled.receive(message)
            if chance.random() < 0.3:
                shuffled.epoch_tally()
        assert compact(shuffled, lengths) == state
    heard = [go_on(state, story, causal_shuffle(story.messages, chance)) for _ in range(3)]
    told = [facts(machine, state) for machine in heard]
    assert told[1:] == told[:-1], "the order in which the tail arrives has no say"
    assert len({machine.late for machine in heard}) == 1
    for later in closed_cuts(story, below, chance):
        short = compact_from(whole, state, lengths_of(later))
        assert short is None or short == compact(whole, lengths_of(later)), "made from the state before"
    if heard[0].late:
        return False
    assert told[0] == facts(whole, state)
    for later in closed_cuts(story, below, chance):
        assert compact(heard[0], lengths_of(later)) == compact(whole, lengths_of(later))
    return True


def closed_cuts(story: Story, below: Sequence[ControlMessage], chance: random.Random) -> list[list[ControlMessage]]:
    """Cuts above a cut: after it, in the middle of the rest, and at the end."""
    inside = {id(message) for message in below}
    rest = [message for message in causal_shuffle(story.messages, chance) if id(message) not in inside]
    ordered = [*below, *(message for message in rest)]
    middle = len(below) + len(rest) // 2
    return [list(below), ordered[:middle], ordered]


# --- any party ------------------------------------------------------------------------------------------------------


@st.composite
def parties_with_epochs(draw: st.DrawFn) -> Story:
    """Four members who declare, attest and dispute epochs, and quarrel now and then, seeing much or little."""
    story = team(*PEOPLE[1:])
    base = list(story.messages)
    declared: list[ControlMessage] = []
    for _ in range(draw(st.integers(3, 14))):
        name = draw(st.sampled_from(PEOPLE))
        seen = list(story.messages)
        if draw(st.integers(0, 2)) == 0:  # one that is attested as it should be, mostly in time
            declared.append(story.say(name, next_epoch(story, seen, bob_data=draw(st.integers(0, 9)))))
            for voter in draw(st.permutations(PEOPLE))[: draw(st.integers(2, 4))]:
                story.say(voter, vote(declared[-1]), sees=[*seen, declared[-1]])
            continue
        if draw(st.integers(0, 3)) == 0:  # someone who has heard little
            some = draw(st.lists(st.sampled_from(story.messages), max_size=3))
            own = [message for message in story.messages if message.feed_key == feed(name)]
            seen = closure(story.messages, [*base, *some, *own])
        what = draw(st.integers(0, 11))
        known = [each for each in declared if each in seen]
        if what <= 3 or not known:
            child = what == 3 and any(c == CHILD for c, _ in story.machine(seen).children)
            genesis = next_epoch(story, seen, child, bob_data=draw(st.integers(0, 9)), ann_data=draw(st.integers(0, 9)))
            declared.append(story.say(name, genesis, sees=seen))
        elif what <= 8:
            ballot = vote(draw(st.sampled_from(known[-3:])))
            if draw(st.integers(0, 5)) == 0:
                story.say(name, EpochDispute(ballot.number, ballot.genesis), sees=seen)
            else:
                story.say(name, ballot, sees=seen)
        else:
            head = Head(4, NO_LINK, b"")
            said = draw(
                st.sampled_from(
                    [
                        remove("dan", dan_data=3),
                        remove("cyd"),
                        change("bob", Role.READER, bob_data=4),
                        change("cyd", Role.EDITOR),
                        DeviceRevoke(person("dan"), device("dan.d")),
                        FeedRetire(feed("bob.data"), 2),
                        FeedRetire(feed("dan.data"), 0),
                        FeedAdmit(feed("bob.more"), FeedKind.DATA, person("bob"), device("bob.d")),
                        FeedRetire(feed("cyd"), 1),
                        ForkEvidence(ForkProof(PARTY, feed("bob.data"), 3, NO_LINK, (), head, (), head)),
                        ForkEvidence(ForkProof(PARTY, feed("dan"), 1, NO_LINK, (), head, (), head)),
                        Policy((("epoch.declarers", b"elect"),)),
                        Invitation(b"key", Role.EDITOR),
                        CapabilityRevoke(b"capability", device(f"{name}.d")),
                        CapabilityRevoke(b"capability"),
                        ChildParty(CHILD),
                        Profile("p"),
                    ]
                )
            )
            story.say(name, said, sees=seen)
    return story


@given(parties_with_epochs(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_who_goes_on_from_a_control_state_agrees_with_who_has_all_messages(story: Story, chance: random.Random) -> None:
    order = causal_shuffle(story.messages, chance)
    check_cut(story, order[: chance.randint(len(PEOPLE), len(order))], chance)


@given(st.one_of(quarrels(), stories()), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_the_same_for_parties_that_quarrel(story: Story, chance: random.Random) -> None:
    order = causal_shuffle(story.messages, chance)
    check_cut(story, order[: chance.randint(1, len(order))], chance)


@given(st.one_of(parties_with_epochs(), quarrels(), stories()), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_a_true_state_leaves_out_nothing_that_counts_for_anybody(story: Story, chance: random.Random) -> None:
    """Whatever of the messages somebody has: so who finds something left out has been lied to."""
    order = causal_shuffle(story.messages, chance)
    below = order[: chance.randint(1, len(order))]
    state = compact(story.machine(), lengths_of(below))
    for _ in range(3):
        order = causal_shuffle(story.messages, chance)
        assert left_out(state, story.machine(order[: chance.randint(1, len(order))])) is None


# --- named cases ----------------------------------------------------------------------------------------------------


def cut_and_go_on(story: Story, below: Sequence[ControlMessage]) -> tuple[ControlState, PartyMachine]:
    """The state at a cut, and a machine that went on from it, after all orders were found to agree."""
    check_cut(story, below, random.Random(5))
    state = compact(story.machine(), lengths_of(below))
    return state, go_on(state, story, story.messages)


def test_who_was_retired_for_silence_is_in_no_electorate_above_the_cut_and_counts_again_when_back() -> None:
    story = team("bob", "cyd", "dan")
    story.say("ann", FeedRetire(feed("cyd.data"), 0), FeedRetire(feed("dan.data"), 0))
    first = story.say("ann", next_epoch(story, story.messages))
    story.say("bob", vote(first))
    below = list(story.messages)
    second = story.say("bob", next_epoch(story, story.messages))
    story.say("ann", vote(second))
    story.say("cyd", FeedAdmit(feed("cyd.more"), FeedKind.DATA, person("cyd"), device("cyd.d")))
    third = story.say("ann", next_epoch(story, story.messages))
    story.say("bob", vote(third))
    _, machine = cut_and_go_on(story, below)
    chain = [(len(epoch.electorate), epoch.final) for epoch in machine.epoch_tally().chain]
    assert chain == [(2, True), (2, True), (3, True)]


@pytest.mark.parametrize("inside", [True, False])
def test_an_epoch_that_a_removal_voids_is_void_on_both_sides_of_a_cut(inside: bool) -> None:
    story = team("bob", "cyd", "dan")
    first = story.say("ann", next_epoch(story, story.messages))
    for name in ("cyd", "dan"):
        story.say(name, vote(first))
    void = story.say("bob", next_epoch(story, story.messages))
    below = list(story.messages)
    story.say("ann", remove("bob"))
    if inside:
        below = list(story.messages)
    _, machine = cut_and_go_on(story, below)
    assert [epoch.hash for epoch in machine.epoch_tally().chain] == [first.credentials[0].hash]
    assert [act.voided for act in machine.epoch_tally().declared if act.hash == void.credentials[0].hash] == [True]


def test_a_control_state_does_not_grow_with_epochs() -> None:
    sizes = {}
    for count in (3, 12):
        story = team(*PEOPLE[1:])
        epochs(story, count)
        state = compact(story.machine(), lengths_of(story.messages))
        sizes[count] = (
            sum(len(message.credentials) for message in state.messages),
            sum(len(feed.steps) for feed in state.feeds),
            [len(chain.pins) for chain in state.chains],
        )
        assert [chain.number for chain in state.chains] == [count]
    assert sizes[3] == sizes[12]


def test_the_chain_goes_on_from_the_newest_epoch_with_a_quorum() -> None:
    story = team(*PEOPLE[1:])
    declared = epochs(story, 4)
    below = list(story.messages)
    epochs(story, 2)
    state, machine = cut_and_go_on(story, below)
    assert [epoch.number for epoch in machine.epoch_tally().chain] == [4, 5, 6]
    assert not machine.late
    old = {message.credentials[0].hash for message in declared[:3]}
    assert not old & {credential.hash for message in state.messages for credential in message.credentials}


def test_an_attest_of_the_epoch_that_the_chain_begins_with_still_counts() -> None:
    story = team(*PEOPLE[1:])
    (declared,) = epochs(story, 1, voters=("ann", "bob", "cyd"))
    below = list(story.messages)
    story.say("dan", vote(declared), sees=below)
    _, machine = cut_and_go_on(story, below)
    (epoch,) = machine.epoch_tally().chain
    assert person("dan") in epoch.attested_by
    assert not machine.late


def test_a_removal_above_the_cut_counts_as_it_does_with_all_messages() -> None:
    story = team(*PEOPLE[1:])
    epochs(story, 3)
    below = list(story.messages)
    epochs(story, 1)
    story.say("ann", remove("dan", dan_data=5))
    _, machine = cut_and_go_on(story, below)
    assert role_of(machine, "dan") is None
    assert not machine.late


def test_a_removal_below_the_cut_still_stands_and_still_cuts() -> None:
    story = team(*PEOPLE[1:])
    epochs(story, 1)
    story.say("ann", remove("dan", dan_data=5))
    epochs(story, 3, voters=("bob", "cyd"))
    below = list(story.messages)
    story.say("dan", Profile("still here"))
    state, machine = cut_and_go_on(story, below)
    assert role_of(machine, "dan") is None
    assert machine.departure(device("dan.d")) == story.machine().departure(device("dan.d"))
    assert len(state.chains[0].pins) == 2, "the epoch before the removal, and the newest"


def test_what_an_epoch_contained_before_a_removal_stays_contained_in_it() -> None:
    story = team(*PEOPLE[1:])
    base = list(story.messages)
    act = story.say("dan", Invitation(b"key", Role.EDITOR))
    epochs(story, 2, voters=("bob", "cyd"))
    story.say("ann", remove("dan"), sees=[*base, *(m for m in story.messages if m.feed == fid("ann"))])
    epochs(story, 2, voters=("bob", "cyd"))
    below = list(story.messages)
    _, machine = cut_and_go_on(story, below)
    assert [each.invitation.key for each in machine.invitations] == [b"key"]
    assert act.seq < dict(machine.pins().epoch(0).control)[fid("dan")]


def test_a_late_removal_is_noticed_and_is_the_same_whatever_comes_first() -> None:
    story = team(*PEOPLE[1:])
    base = list(story.messages)
    epochs(story, 3, voters=("bob", "cyd"))
    below = list(story.messages)
    story.say("dan", remove("cyd"), sees=base)  # a sleeping admin, who wrote it before the epochs
    epochs(story, 1, voters=("bob",))
    _, machine = cut_and_go_on(story, below)
    assert machine.late
    assert machine.epoch_tally().accepted(3) is not None, "what was agreed on stays"
    assert role_of(machine, "cyd") is None


def test_late_votes_forks_and_rivals_are_noticed() -> None:
    for said in ("vote", "fork", "rival", "rival that has seen all"):
        story = team(*PEOPLE[1:])
        base = list(story.messages)
        declared = epochs(story, 3, voters=("bob", "cyd"))
        below = list(story.messages)
        head = Head(4, NO_LINK, b"")
        if said == "vote":
            story.say("dan", vote(declared[0]))
        elif said == "fork":
            proof = ForkProof(PARTY, feed("bob"), 1, NO_LINK, (), head, (), head)
            story.say("dan", ForkEvidence(proof))
        elif said == "rival":
            story.say("dan", next_epoch(story, base), sees=base)
        else:
            story.say("dan", next_epoch(story, story.messages[: story.messages.index(declared[2])]))
        state, machine = cut_and_go_on(story, below)
        assert machine.late, said
        assert compact_from(story.machine(), state, lengths_of(story.messages)) is None, said
        assert machine.epoch_tally().accepted(3) is not None, said


def test_a_state_is_the_same_from_an_earlier_one_whose_pins_were_overtaken() -> None:
    """Epoch 2 is declared before anybody stands for epoch 1, and comes to its quorum after a state that pinned epoch 1."""
    story = team(*PEOPLE[1:])
    base = list(story.messages)
    first = story.say("ann", next_epoch(story, base), sees=base)
    known = [*base, first, story.say("ann", remove("dan"), sees=[*base, first])]
    second = story.say("ann", next_epoch(story, known), sees=known)
    for name in ("bob", "cyd"):
        story.say(name, vote(first), sees=[*base, first])
    earlier = compact(story.machine(), lengths_of(story.messages))
    assert [pin.hash for pin in earlier.chains[0].pins] == [first.credentials[0].hash]
    for name in ("bob", "cyd"):
        story.say(name, vote(second))
    whole = compact(story.machine(), lengths_of(story.messages))
    assert [pin.hash for pin in whole.chains[0].pins] == [second.credentials[0].hash]
    assert compact_from(story.machine(), earlier, lengths_of(story.messages)) in (None, whole)


def test_a_message_that_builds_on_one_that_is_gone_sees_what_that_one_saw() -> None:
    story = team(*PEOPLE[1:])
    first = story.say("ann", Policy((("epoch.declarers", b"elect"),)))
    told = epochs(story, 1, voters=())[0]
    old = story.say("bob", vote(told))
    epochs(story, 3, voters=("bob", "cyd"))
    below = list(story.messages)
    story.say("dan", Profile("late"), sees=[old])
    state = compact(story.machine(), lengths_of(below))
    assert all(old.seq != message.seq for message in state.messages if message.feed == old.feed)
    (heard,) = as_heard(state, story, story.messages[len(below) :])
    assert heard.clock[first.feed] >= first.seq
    assert heard.clock[first.feed] < told.clock.get(first.feed, -1) + 4, "and not what came later"


def test_a_cut_that_leaves_out_a_cause_is_told_apart() -> None:
    story = team("bob")
    story.say("bob", Profile("b"))
    machine = story.machine()
    assert is_closed(machine, lengths_of(story.messages))
    assert is_closed(machine, lengths_of(story.messages[:2]))
    assert not is_closed(machine, {feed("ann"): 1, feed("bob"): 1}), "bob had seen his admission"


def test_what_can_never_count_is_left_out() -> None:
    story = team("bob")
    story.writer("eve")
    story.say("eve", remove("bob"), Profile("nobody"))
    state = compact(story.machine(), lengths_of(story.messages))
    assert feed("eve") in state.lengths
    kept = [message for message in state.messages if message.feed == fid("eve")]
    assert [message.positions for message in kept] == [(1,)], "a profile may count once its writer is known"


# --- late votes -----------------------------------------------------------------------------------------------------


def sees_to(story: Story, messages: Sequence[ControlMessage], *names: str) -> list[ControlMessage]:
    """What somebody has heard who knows some messages, and has written all that is in some feeds."""
    own = [message for message in story.messages if message.feed_key in {feed(name) for name in names}]
    return closure(story.messages, [*messages, *own])


def settled(machine: PartyMachine, state: ControlState) -> dict[str, object]:
    """What two peers with the same messages must agree on, whoever has truncated: not who stands for what is gone."""
    told = facts(machine, state)
    return {name: told[name] for name in told if name not in ("rejected", "why")}


def test_a_vote_that_comes_after_a_later_quorum_pins_nothing() -> None:
    """Who slept votes on an epoch that had no quorum when its successor, which has one, was made."""
    story = team(*PEOPLE[1:])
    base = list(story.messages)
    act = story.say("dan", Invitation(b"key", Role.EDITOR), sees=base)
    story.say("bob", remove("dan"), sees=base)
    seen = sees_to(story, [*base, act], "ann")
    first = story.say("ann", next_epoch(story, seen), sees=seen)
    known = [*seen, first]
    story.say("bob", vote(first))
    epochs(story, 3, voters=("bob", "cyd"))
    below = list(story.messages)
    whole = story.machine()
    assert not whole.invitations, "the removal that epoch 2 contains voids it, and nothing stood before that"
    story.say("cyd", vote(first), sees=sees_to(story, known, "cyd"))
    later = story.machine()
    assert person("cyd") in later.epoch_tally().chain[0].attested_by
    assert later.epoch_tally().chain[0].quorate
    assert not later.invitations, "epoch 2 has a quorum and knows better"
    assert later.admission().digest == whole.admission().digest
    state = compact(story.machine(below), lengths_of(below))
    assert settled(go_on(state, story, story.messages), state) == settled(later, state)


@st.composite
def parties_with_sleepers(draw: st.DrawFn) -> tuple[Story, int]:
    """Epochs with and without quorums, removals and acts; members who vote late. And how many messages came in time."""
    story = team(*PEOPLE[1:])
    base = list(story.messages)
    declared: list[ControlMessage] = []
    slept: list[tuple[str, ControlMessage, list[ControlMessage]]] = []
    for _ in range(draw(st.integers(3, 9))):
        what = draw(st.integers(0, 9))
        if what <= 4:
            said = next_epoch(story, story.messages, bob_data=draw(st.integers(0, 9)))
            declared.append(story.say(draw(st.sampled_from(PEOPLE[:3])), said))
            known = list(story.messages)
            for voter in draw(st.permutations(PEOPLE)):
                if draw(st.booleans()):
                    story.say(voter, vote(declared[-1]), sees=sees_to(story, known, voter))
                elif draw(st.booleans()):
                    slept.append((voter, declared[-1], known))
        else:
            name = draw(st.sampled_from(PEOPLE))
            little = sees_to(story, base, name) if draw(st.booleans()) else list(story.messages)
            story.say(
                name,
                draw(
                    st.sampled_from(
                        [
                            remove("dan", dan_data=3),
                            remove("cyd"),
                            change("bob", Role.READER, bob_data=4),
                            FeedRetire(feed("bob.data"), 2),
                            FeedAdmit(feed("bob.more"), FeedKind.DATA, person("bob"), device("bob.d")),
                            Invitation(b"key", Role.EDITOR),
                            Profile("p"),
                        ]
                    )
                ),
                sees=little,
            )
    for _ in range(2):  # two that all attest, mostly: then feeds may be truncated
        told = story.say("ann", next_epoch(story, story.messages))
        for name in PEOPLE[1:]:
            story.say(name, vote(told))
    in_time = len(story.messages)
    for voter, genesis, known in slept:
        ballot = vote(genesis)
        late = ballot if draw(st.booleans()) else EpochDispute(ballot.number, ballot.genesis)
        story.say(voter, late, sees=sees_to(story, known, voter))
    return story, in_time


@given(parties_with_sleepers(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_late_votes_change_nothing_for_anybody(told: tuple[Story, int], chance: random.Random) -> None:
    """Truncated at any epoch that may be truncated at, or with all messages; in whatever order they come."""
    story, in_time = told
    machine = story.machine(story.messages[:in_time])
    whole = story.machine(causal_shuffle(story.messages, chance))
    for epoch in machine.epoch_tally().chain:
        if not epoch.quorate or not machine.epoch_tally().final(epoch.number + 1):
            continue
        lengths = {entry.feed: entry.seq + 1 for entry in epoch.genesis.control_timeframe}
        state = compact(machine, lengths)
        if not state.chains or go_on(state, story, story.messages[:in_time]).late:
            continue  # nobody truncates there (`plan_floor`)
        heard = [go_on(state, story, causal_shuffle(story.messages, chance)) for _ in range(2)]
        assert settled(heard[0], state) == settled(heard[1], state)
        assert settled(heard[0], state) == settled(whole, state)
