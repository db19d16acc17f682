"""Agreement on epochs against a second account of it, over histories with liars, removals, partitions and rivals."""

import hashlib
import random
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.ids import Cid, DeviceKey, FeedId, FeedKey, IdentityKey, Link, PartyKey, feed_id
from echostore.kernel.party.credentials import (
    Assertion,
    Claim,
    ControlMessage,
    DeviceAdmit,
    DeviceRevoke,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    FeedAdmit,
    FeedBound,
    FeedKind,
    FeedRetire,
    MemberAdmit,
    MemberRemove,
    PartyGenesis,
    Policy,
    Role,
    RoleChange,
    TimeframeEntry,
    VerifiedCredential,
)
from echostore.kernel.party.epoch_chain import enough_to_join, truncatable
from echostore.kernel.party.machine import PartyMachine
from party_story import device, feed, person, remove
from reference.epoch_oracle import EpochOracle
from test_epoch_votes import attest, dispute, genesis, in_every_order, name_of, names, team


def key(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


PARTY = PartyKey(key("party"))


@dataclass
class Actor:
    """A member with one device, one control and one data feed, and what it has heard."""

    name: str
    seen: dict[FeedId, int] = field(default_factory=dict)
    data: int = 0

    def __post_init__(self) -> None:
        self.identity = IdentityKey(key(self.name, "identity"))
        self.device = DeviceKey(key(self.name, "device"))
        self.control_feed = FeedKey(key(self.name, "control"))
        self.data_feed = FeedKey(key(self.name, "data"))


class Story:
    """A history in the making: everybody writes on what it has heard, in honour or not."""

    def __init__(self, members: int, admins: int, chance: random.Random) -> None:
        self.chance = chance
        self.actors = [Actor(name) for name in "abcdefgh"[:members]]
        self.messages: dict[FeedId, list[ControlMessage]] = {}
        founder = self.founder = self.actors[0]
        self.say(
            founder,
            PartyGenesis(PARTY, founder.identity, founder.device, founder.control_feed, founder.data_feed),
            device=DeviceKey(PARTY),
        )
        for number, actor in enumerate(self.actors[1:], start=1):
            self.admit(actor, Role.ADMIN if number <= admins else Role.EDITOR)
        for actor in self.actors[1:]:
            self.hear(actor, founder)

    def admit(self, actor: Actor, role: Role) -> None:
        self.say(
            self.founder,
            MemberAdmit(actor.identity, role, actor.name),
            DeviceAdmit(actor.identity, actor.device, actor.name),
            FeedAdmit(actor.control_feed, FeedKind.CONTROL, actor.identity, actor.device),
            FeedAdmit(actor.data_feed, FeedKind.DATA, actor.identity, actor.device),
        )

    def say(self, actor: Actor, *assertions: Assertion, device: DeviceKey | None = None) -> bytes:
        feed = feed_id(actor.control_feed)
        own = self.messages.setdefault(feed, [])
        depth = 1 + max((self.messages[other][last].depth for other, last in actor.seen.items()), default=0)
        credentials = tuple(
            VerifiedCredential(
                Claim(PARTY, actor.identity, device or actor.device, said), key(actor.name, len(own), position, depth)
            )
            for position, said in enumerate(assertions)
        )
        own.append(ControlMessage(feed, actor.control_feed, len(own), depth, dict(actor.seen), credentials))
        actor.seen[feed] = len(own) - 1
        return credentials[-1].hash

    def hear(self, actor: Actor, other: Actor) -> None:
        for known, last in other.seen.items():
            actor.seen[known] = max(actor.seen.get(known, -1), last)

    def view(self, actor: Actor) -> list[ControlMessage]:
        return [message for feed, last in actor.seen.items() for message in self.messages[feed][: last + 1]]

    def everything(self) -> list[ControlMessage]:
        return [message for messages in self.messages.values() for message in messages]

    # acts

    def step(self) -> None:
        chance = self.chance
        actor = chance.choice(self.actors)
        roll = chance.random()
        if roll < 0.30:
            self.hear(actor, chance.choice(self.actors))
        elif roll < 0.36:
            actor.data += chance.randint(1, 3)
        elif roll < 0.58:
            self.declare(actor)
        elif roll < 0.88:
            self.vote(actor)
        elif roll < 0.92:
            self.dispute(actor)
        elif roll < 0.98:
            self.order()
        else:
            for each in self.actors:
                self.hear(each, actor)

    def declare(self, actor: Actor) -> None:
        chance = self.chance
        oracle = EpochOracle(self.view(actor))
        chain = oracle.chain()
        if chain and chance.random() < 0.2:
            chain = chain[: chance.randrange(len(chain))]
        before = oracle.geneses[chain[-1]].what if chain else None
        assert before is None or isinstance(before, EpochGenesis)
        number, discard = len(chain) + 1, before.discard_before_ms if before else 0
        reached = {entry.feed: entry.seq for entry in before.timeframe} if before else {}
        for other in self.actors:
            if other.data and chance.random() < 0.7:
                reached[other.data_feed] = max(reached.get(other.data_feed, 0), other.data - 1)
        control = dict(actor.seen)
        lie = chance.random()
        if lie < 0.03:
            number += chance.choice([-1, 1])
        elif lie < 0.07 and reached:
            feed = chance.choice(sorted(reached))
            reached[feed] -= 1
        elif lie < 0.09:
            control = {feed: last for feed, last in control.items() if chance.random() < 0.5}
        elif lie < 0.11:
            other = feed_id(chance.choice(self.actors).control_feed)
            control[other] = len(self.messages.get(other, [])) + 1
        elif lie < 0.14:
            discard += chance.choice([-1, 1, 10**15])
        keys = {feed_id(each.control_feed): each.control_feed for each in self.actors}
        self.say(
            actor,
            EpochGenesis(
                number=number,
                previous=chain[-1] if chain else b"",
                snapshot=Cid(key("snapshot", chance.random())),
                timeframe=_entries({feed: last for feed, last in reached.items() if last >= 0}),
                control_timeframe=_entries({keys[feed]: last for feed, last in control.items() if last >= 0}),
                discard_before_ms=discard,
                models=(("unheard-of", 9),) if chance.random() < 0.1 else (),
            ),
        )

    def vote(self, actor: Actor) -> None:
        """Mostly for what names a number here, now and then for anything."""
        roll = self.chance.random()
        oracle = EpochOracle(self.everything() if roll < 0.05 else self.view(actor))  # now and then without its past
        known = sorted(oracle.geneses) if roll < 0.2 else oracle.chain()[-3:]
        if known:
            genesis = self.chance.choice(known)
            what = oracle.geneses[genesis].what
            assert isinstance(what, EpochGenesis)
            found = what.snapshot if self.chance.random() < 0.95 else Cid(key("other"))
            self.say(actor, EpochAttest(what.number, genesis, found))

    def dispute(self, actor: Actor) -> None:
        known = EpochOracle(self.view(actor)).geneses
        if known:
            genesis = self.chance.choice(sorted(known))
            what = known[genesis].what
            assert isinstance(what, EpochGenesis)
            self.say(actor, EpochDispute(what.number, genesis))

    def order(self) -> None:
        """The founder changes something; now and then somebody else tries to."""
        chance, other = self.chance, self.chance.choice(self.actors[1:])
        issuer = self.founder if chance.random() < 0.9 else other
        at = self.chance.randint(0, other.data)
        what: Assertion = chance.choice(
            [
                MemberRemove(other.identity, (FeedBound(feed_id(other.data_feed), at),)),
                FeedRetire(other.control_feed, 0),
                FeedRetire(other.data_feed, at),
                FeedRetire(self.founder.data_feed, self.founder.data),
                self.another_feed(chance.choice([other, self.founder])),
                RoleChange(other.identity, chance.choice([Role.EDITOR, Role.ADMIN])),
                Policy((("epoch.declarers", chance.choice([b"elect", b"admins", bytes(other.identity), b"bot"])),)),
                Policy((("epoch.bots", bytes(other.device)),)),
                Policy((("epoch.truncate_quorum", chance.choice([b"majority", b"3", b"9"])),)),
                Policy((("epoch.join_attests", chance.choice([b"0", b"1", b"2"])),)),
            ]
        )
        if issuer is self.founder:
            self.say(issuer, what)
            if len(self.actors) < 7 and chance.random() < 0.3:
                self.actors.append(Actor("abcdefgh"[len(self.actors)]))
                self.admit(self.actors[-1], Role.EDITOR)
                self.hear(self.actors[-1], self.founder)

    def another_feed(self, actor: Actor) -> FeedAdmit:
        """Its device is back, with a new feed."""
        feed = FeedKey(key(actor.name, "data", len(self.messages[feed_id(self.founder.control_feed)])))
        return FeedAdmit(feed, FeedKind.DATA, actor.identity, actor.device)


def _entries(lasts: dict[FeedKey, int]) -> tuple[TimeframeEntry, ...]:
    return tuple(TimeframeEntry(feed, last, Link(key(feed, last))) for feed, last in sorted(lasts.items()))


def arrived(messages: list[ControlMessage], chance: random.Random) -> PartyMachine:
    """A machine that got them in some causal order, and was asked in between."""
    machine, waiting, seen = PartyMachine(PARTY), list(messages), dict[FeedId, int]()
    asked = chance.random() < 0.5
    while waiting:
        ready = [
            message
            for message in waiting
            if all(seen.get(feed, -1) >= last for feed, last in message.clock.items())
            and seen.get(message.feed, -1) == message.seq - 1
        ]
        message = chance.choice(ready)
        waiting.remove(message)
        machine.receive(message)
        seen[message.feed] = message.seq
        if asked and chance.random() < 0.2:
            _ = machine.epoch_tally().chain, machine.admission()
    return machine


def compare(messages: list[ControlMessage], actors: list[Actor], chance: random.Random) -> None:
    oracle, machine = EpochOracle(messages), arrived(messages, chance)
    tally = machine.epoch_tally()
    chain = oracle.chain()
    assert [epoch.hash for epoch in tally.chain] == chain
    assert machine.electorate == oracle.electorate(None)
    assert machine.voters == oracle.voters(None)
    for epoch in tally.chain:
        assert epoch.attested_by == oracle.attested_by(epoch.hash)
        assert epoch.disputed_by == oracle.disputers(epoch.hash)
        assert epoch.electorate == oracle.electorate(oracle.geneses[epoch.hash])
        assert epoch.quorate == oracle.quorate(epoch.hash)
        assert epoch.final == oracle.final(epoch.hash)
    policy, devices = machine.epoch_policy, machine.member_devices
    assert devices == oracle.devices()
    joinable = next((each.hash for each in reversed(tally.chain) if enough_to_join(each, policy, devices)), None)
    assert joinable == oracle.joinable()
    cut = truncatable(tally.chain, policy)
    assert (cut.hash if cut else None) == oracle.truncatable()
    for actor in actors:
        if actor.identity in machine.electorate:
            for genesis in chain:
                objection = tally.objection(genesis, actor.identity, machine.voters)
                assert (objection is None) == oracle.may_attest(genesis, actor.identity), objection


@given(st.integers(2, 6), st.integers(0, 5), st.integers(5, 60), st.booleans(), st.integers(0, 2**32))
def test_the_chain_is_what_the_design_says(members: int, admins: int, steps: int, elect: bool, seed: int) -> None:
    chance = random.Random(seed)
    story = Story(members, admins, chance)
    if elect:
        story.say(story.founder, Policy((("epoch.declarers", b"elect"),)))
    for _ in range(steps):
        story.step()
    compare(story.everything(), story.actors, chance)
    compare(story.view(chance.choice(story.actors)), story.actors, chance)


# what the comparison found, each by its name


def test_an_attest_of_what_its_writer_had_not_seen_is_none() -> None:
    """Else it would count where it came after its genesis, and not where it came before."""
    story = team("bob", "cyd")
    base = list(story.messages)
    declared = story.say("ann", genesis(story), sees=base)
    story.say("bob", attest(declared), sees=base)
    story.say("cyd", dispute(declared), sees=base)
    for machine in in_every_order(story):
        (epoch,) = machine.epoch_tally().chain
        assert (epoch.attested_by, epoch.disputed_by, epoch.final) == ({person("ann")}, set(), False)


def test_a_dispute_on_another_device_that_comes_late_frees_the_vote_for_the_next_attest() -> None:
    story = team("bob", "cyd")
    story.writer("phone", identity="bob", device_name="phone.d")
    story.say("bob", DeviceAdmit(person("bob"), device("phone.d")))
    story.say("bob", FeedAdmit(feed("phone"), FeedKind.CONTROL, person("bob"), device("phone.d")))
    base = list(story.messages)
    wrong = story.say("ann", genesis(story, sees=base, snapshot="wrong"), sees=base)
    right = story.say("cyd", genesis(story, sees=base, snapshot="right"), sees=base)
    story.say("phone", dispute(wrong), sees=[*base, wrong])
    story.say("bob", Policy(()), sees=[*base, wrong, right])
    story.say("bob", attest(wrong))
    story.say("bob", attest(right))
    assert {machine.epoch_tally().voted(1, person("bob")) for machine in in_every_order(story, 40)} == {name_of(right)}


def test_a_quorum_is_also_one_for_an_epoch_below_whose_declarer_was_removed() -> None:
    story = team("bob", "cyd")
    base = list(story.messages)
    first = story.say("cyd", genesis(story, sees=base), sees=base)
    second = story.say("cyd", genesis(story, 2, name_of(first), sees=[*base, first]), sees=[*base, first])
    story.say("bob", attest(second), sees=[*base, first, second])
    story.say("ann", remove("cyd"), sees=base)
    for machine in in_every_order(story):
        assert [(epoch.hash, epoch.final) for epoch in machine.epoch_tally().chain] == [
            (name_of(first), True),
            (name_of(second), True),
        ]


def test_a_quorum_is_not_taken_back_by_one_that_rests_on_a_rival() -> None:
    """False votes brought both about: the lower number was settled first, and is for who hears of the other first too."""
    story = team("bob", "cyd", "dan", "eve")
    base = list(story.messages)
    pair = [story.say(name, genesis(story, sees=base, snapshot=name), sees=base) for name in ("ann", "bob")]
    low, high = sorted(pair, key=name_of)
    for name in ("cyd", "dan"):
        story.say(name, attest(high), sees=[*base, high])
    above = story.say("eve", genesis(story, 2, name_of(low), sees=[*base, low]), sees=[*base, low])
    for name in ("cyd", "dan"):
        story.say(name, attest(above), sees=[*base, low, above])
    for machine in in_every_order(story, 40):
        assert names(machine) == [name_of(high)]


def test_who_went_on_without_a_genesis_is_not_waited_for() -> None:
    """Dan voted for what its declarer's removal voided. Bob, who might have made it final, has gone on without it."""
    story = team("bob", "cyd", "dan")
    base = list(story.messages)
    lost = story.say("cyd", genesis(story, sees=base, snapshot="lost"), sees=base)
    story.say("dan", attest(lost), sees=[*base, lost])
    removed = story.say("ann", remove("cyd"), sees=base)
    first = story.say("ann", genesis(story, sees=[*base, removed]), sees=[*base, removed])
    second = story.say(
        "ann", genesis(story, 2, name_of(first), sees=[*base, removed, first]), sees=[*base, removed, first]
    )
    machine = story.machine()
    assert machine.epoch_tally().objection(name_of(second), person("dan"), machine.voters) is not None
    story.say("bob", attest(second))
    machine = story.machine()
    assert machine.epoch_tally().objection(name_of(second), person("dan"), machine.voters) is None
    story.say("bob", attest(lost))  # and if Bob did come back to it, that would not count
    assert {machine.epoch_tally().voted(1, person("bob")) for machine in in_every_order(story)} == {None}


def test_members_who_had_not_heard_of_each_other_may_both_have_a_quorum_and_all_end_with_one() -> None:
    """Two of three agree behind a partition, the third with two newcomers in front of it: the greater quorum stays."""
    lower = set()
    for ground in range(6):
        story = team("bob", "cyd")
        base = list(story.messages)
        few = story.say("bob", genesis(story, sees=base, snapshot=f"few {ground}"), sees=base)
        story.say("cyd", attest(few), sees=[*base, few])
        joined = [story.say("ann", *story.join(name, Role.ADMIN), sees=base) for name in ("dan", "eve")]
        heard = [*base, *joined]
        many = story.say("ann", genesis(story, sees=heard, snapshot="many"), sees=heard)
        for name in ("dan", "eve"):
            story.say(name, attest(many), sees=[*heard, many])
        for machine in in_every_order(story, 3):
            (epoch,) = machine.epoch_tally().chain
            assert (epoch.hash, epoch.final, epoch.rivals) == (name_of(many), True, (name_of(few),))
        lower.add(name_of(few) < name_of(many))
    assert lower == {True, False}, "the hash decides nothing here"


def test_devices_of_who_was_removed_do_not_make_a_newcomer_ask_for_more() -> None:
    story = team("bob", "cyd")
    assert story.machine().member_devices == 3
    story.say("ann", remove("cyd"))
    story.say("bob", DeviceAdmit(person("bob"), device("phone.d")))
    story.say("bob", DeviceRevoke(person("bob"), device("phone.d")))
    declared = story.say("ann", genesis(story))
    machine = story.machine()
    (epoch,) = machine.epoch_tally().chain
    assert (machine.member_devices, epoch.hash, epoch.final) == (2, name_of(declared), False)
    assert enough_to_join(epoch, machine.epoch_policy, machine.member_devices)


def test_a_greater_quorum_on_a_rival_counts_for_who_hears_of_it_last() -> None:
    """What is final below the smaller quorum is not kept only because it was final here already."""
    story = team("bob", "cyd")
    base = list(story.messages)
    few = story.say("bob", genesis(story, sees=base, snapshot="few"), sees=base)
    few_above = story.say("bob", genesis(story, 2, name_of(few), sees=[*base, few]), sees=[*base, few])
    story.say("cyd", attest(few_above), sees=[*base, few, few_above])
    joined = [story.say("ann", *story.join(name, Role.ADMIN), sees=base) for name in ("dan", "eve")]
    heard = [*base, *joined]
    many = story.say("ann", genesis(story, sees=heard, snapshot="many"), sees=heard)
    above = story.say("ann", genesis(story, 2, name_of(many), sees=[*heard, many]), sees=[*heard, many])
    for name in ("dan", "eve"):
        story.say(name, attest(above), sees=[*heard, many, above])
    for machine in in_every_order(story, 40):
        assert names(machine) == [name_of(many), name_of(above)]


def test_a_predecessor_that_comes_after_what_rests_on_it_changes_no_count() -> None:
    """Cyd names an epoch 2 that her message does not depend on; only with it does her vote rest on what she attests."""
    story = team("bob", "cyd")
    base = list(story.messages)
    first = story.say("ann", genesis(story, sees=base), sees=base)
    second = story.say("bob", genesis(story, 2, name_of(first), sees=[*base, first]), sees=[*base, first])
    story.say("cyd", genesis(story, 3, name_of(second), sees=[*base, first]), sees=[*base, first])
    story.say("cyd", attest(first), sees=[*base, first])
    for machine in in_every_order(story, 30):
        assert machine.epoch_tally().voted(1, person("cyd")) == name_of(first)


def test_what_skips_a_number_rests_on_nothing_whenever_its_predecessor_comes() -> None:
    """Bob names an epoch 2 as the predecessor of an epoch 4, and had not heard of it: his vote is one for all, or for none."""
    story = team("bob", "cyd", "dan", "eve")
    base = list(story.messages)
    first = story.say("ann", genesis(story, sees=base), sees=base)
    second = story.say("cyd", genesis(story, 2, name_of(first), sees=[*base, first]), sees=[*base, first])
    story.say("bob", genesis(story, 4, name_of(second), sees=base), sees=base)
    story.say("bob", attest(first), sees=[*base, first])
    for machine in in_every_order(story, 40):
        assert machine.epoch_tally().voted(1, person("bob")) is None


def test_a_genesis_that_its_device_repeats_counts_at_its_first_place() -> None:
    """Bob puts the same signed bytes into another feed of his, which has heard of more members: a greater electorate."""
    story = team("bob", "cyd")
    story.writer("other", identity="bob")
    story.say("bob", FeedAdmit(feed("other"), FeedKind.CONTROL, person("bob"), device("bob.d")))
    base = list(story.messages)
    joined = [story.say("ann", *story.join(name, Role.ADMIN), sees=base) for name in ("dan", "eve")]
    declared = story.say("bob", genesis(story, sees=base), sees=base)
    repeated = replace(story.say("other", genesis(story, sees=base), sees=joined), credentials=declared.credentials)
    story.messages[-1] = repeated
    story.say("cyd", attest(declared), sees=[*base, declared])
    for machine in in_every_order(story, 40):
        (epoch,) = machine.epoch_tally().chain
        assert epoch.electorate == {person("ann"), person("bob"), person("cyd")}
        assert epoch.final


def test_a_device_that_had_not_heard_of_the_other_ones_later_vote_may_vote_below_it() -> None:
    story = team("bob", "cyd", "dan", "eve")
    story.writer("phone", identity="bob", device_name="phone.d")
    story.say("bob", DeviceAdmit(person("bob"), device("phone.d")))
    story.say("bob", FeedAdmit(feed("phone"), FeedKind.CONTROL, person("bob"), device("phone.d")))
    base = list(story.messages)
    mine = story.say("ann", genesis(story, sees=base, snapshot="mine"), sees=base)
    other = story.say("cyd", genesis(story, sees=base, snapshot="other"), sees=base)
    above = story.say("dan", genesis(story, 2, name_of(other), sees=[*base, other]), sees=[*base, other])
    story.say("phone", attest(above), sees=[*base, other, above])
    waited = story.say("eve", Policy(()), sees=[*base, mine])
    later = story.say("eve", Policy(()), sees=[waited])
    story.say("bob", attest(mine), sees=[*base, mine, later])
    for machine in in_every_order(story, 20):
        assert machine.epoch_tally().voted(1, person("bob")) == name_of(mine)
        assert machine.epoch_tally().voted(2, person("bob")) == name_of(above)


def test_only_what_no_quorum_stands_for_may_lack_blocks_that_were_cut_since() -> None:
    for attested in (False, True):
        story = team("bob", "cyd")
        first = story.say("ann", genesis(story, bob_data=5))
        if attested:
            story.say("cyd", attest(first))
        story.say("ann", remove("bob", bob_data=3))
        second = story.say("ann", genesis(story, 2, name_of(first), bob_data=3))
        found = in_every_order(story, 5)[0]
        assert names(found) == [name_of(first), name_of(second)][: 1 if attested else 2]
