"""The party machine: named conflicts in every order of arrival, and random ones against the naive reference."""

import random
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.feed import ForkProof, Head
from echostore.kernel.ids import NO_LINK, Cid, DeviceKey, FeedKey, IdentityKey
from echostore.kernel.party.admission import Interval
from echostore.kernel.party.credentials import (
    AdoptLocal,
    Assertion,
    CapabilityRevoke,
    ChildParty,
    ControlMessage,
    DeviceAdmit,
    DeviceRevoke,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    FeedAdmit,
    FeedKind,
    FeedRetire,
    ForkEvidence,
    GroupAdmit,
    Invitation,
    InvitationCancel,
    MemberAdmit,
    MemberRemove,
    ModelPublish,
    PartyGenesis,
    PartyKind,
    Policy,
    Profile,
    Role,
    RoleChange,
)
from echostore.kernel.party.machine import PartyMachine
from echostore.kernel.party.roster import Status
from echostore.kernel.reasons import Reason
from party_story import (
    CHILD,
    PARTY,
    Story,
    bounds,
    change,
    device,
    feed,
    fid,
    key,
    linearisations,
    person,
    remove,
    role_of,
    verdict,
)
from reference.party_machine import Reference

BLOCKS = 12
"""How many blocks of each feed are compared with the reference; bounds are drawn below it."""

GROUP = IdentityKey(key("group", "family"))
EPOCH = EpochGenesis(1, b"", Cid(b"cid"))


def facts(machine: PartyMachine) -> tuple[object, ...]:
    """All that two peers with the same messages must agree on."""
    admissions = [machine.admission(child) for child in (None, CHILD)]
    digests = tuple((admission.digest, frozenset(admission.void)) for admission in admissions)
    people = (machine.members, machine.devices, machine.groups, machine.revoked_capabilities)
    return (digests, machine.rejected, people, machine.policy, machine.feeds)


def check(story: Story) -> PartyMachine:
    """The machine after the story, once every order of arrival has given the same, and the reference too."""
    machine = story.machine()
    expected = facts(machine)
    for count, order in enumerate(linearisations(story.messages)):
        if count == 500:
            break
        eager = PartyMachine(PARTY)
        for message in order:
            eager.receive(message)
            eager.admission()  # settles after each message: no arrival may hide behind a later refold
        assert facts(eager) == expected
        assert facts(story.machine(order)) == expected
    against_reference(machine, story.messages)
    return machine


def against_reference(machine: PartyMachine, messages: list[ControlMessage]) -> None:
    reference = Reference(PARTY, messages)
    keys = {message.feed: message.feed_key for message in messages}
    assert {(keys[r.feed], r.seq, r.position) for r in machine.rejected} == reference.rejected()
    assert {member.identity: member.role for member in machine.members} == reference.members()
    found = {
        admitted.feed: (admitted.child, [admitted.role_at(seq) for seq in range(BLOCKS)]) for admitted in machine.feeds
    }
    assert found == reference.feeds(BLOCKS)


def roles(machine: PartyMachine, name: str) -> tuple[Interval, ...]:
    return machine.admission().by_id[fid(name)].intervals


def own_feed(name: str, owner: str, kind: FeedKind = FeedKind.CONTROL, device_name: str = "") -> FeedAdmit:
    return FeedAdmit(feed(name), kind, person(owner), device(device_name or f"{owner}.d"))


def team(*names: str, role: Role = Role.ADMIN) -> Story:
    """Ann's party with admins (or others) admitted one after the other, most senior first."""
    story = Story()
    for name in names:
        story.say("ann", *story.join(name, role))
    return story


def fork(name: str, seq: int) -> ForkEvidence:
    """Evidence as the kernel sees it: its signatures were checked before."""
    head = Head(seq + 1, NO_LINK, b"")
    return ForkEvidence(ForkProof(PARTY, feed(name), seq, NO_LINK, (), head, (), head))


# --- genesis ------------------------------------------------------------------------------------------------------


def test_genesis_makes_an_owner_with_two_feeds() -> None:
    machine = check(Story())
    (ann,) = machine.members
    assert (ann.identity, ann.role, ann.creator) == (person("ann"), Role.OWNER, True)
    assert {admitted.kind for admitted in machine.feeds} == {FeedKind.CONTROL, FeedKind.DATA}
    assert roles(machine, "ann.data") == (Interval(0, None, Role.OWNER),)
    assert machine.genesis is not None
    assert machine.genesis.title == "title"


def test_a_second_genesis_is_refused() -> None:
    story = Story()
    other = PartyGenesis(PARTY, person("ann"), device("ann.d"), feed("x"), feed("y"))
    again = story.say("ann", other, device=DeviceKey(PARTY))
    assert verdict(check(story), again) is Reason.NOT_GENESIS


def test_two_geneses_by_the_party_key_leave_the_first_in_canonical_order() -> None:
    story = Story()
    story.writer("eve")
    said = PartyGenesis(PARTY, person("eve"), device("eve.d"), feed("eve"), feed("eve.data"))
    rival = story.say("eve", said, sees=[], device=DeviceKey(PARTY))
    machine = check(story)
    last = max([story.start, rival], key=lambda message: message.feed)
    assert verdict(machine, last) is Reason.NOT_GENESIS
    assert len(machine.members) == 1


def test_a_genesis_not_signed_by_the_party_key_is_refused() -> None:
    story = Story()
    story.writer("eve")
    said = PartyGenesis(PARTY, person("eve"), device("eve.d"), feed("eve"), feed("eve.data"))
    assert verdict(check(story), story.messages[0]) is None
    assert verdict(story.machine(), story.say("eve", said, sees=[])) is None  # not received by that machine
    assert verdict(check(story), story.messages[-1]) is Reason.NOT_GENESIS


# --- authority ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("issuer_role", "said", "reason"),
    [
        (Role.EDITOR, MemberAdmit(person("cyd"), Role.READER), Reason.NOT_AUTHORISED),
        (Role.ADMIN, MemberAdmit(person("cyd"), Role.ADMIN), None),
        (Role.ADMIN, MemberAdmit(person("cyd"), Role.OWNER), Reason.NOT_AUTHORISED),
        (Role.OWNER, MemberAdmit(person("cyd"), Role.OWNER), None),
        (Role.OWNER, MemberAdmit(person("ann"), Role.READER), Reason.DUPLICATE),
        (Role.ADMIN, remove("ann"), Reason.CREATOR_PROTECTED),
        (Role.OWNER, remove("ann"), Reason.CREATOR_PROTECTED),
        (Role.OWNER, change("ann", Role.READER), Reason.CREATOR_PROTECTED),
        (Role.OWNER, DeviceRevoke(person("ann"), device("ann.d")), Reason.CREATOR_PROTECTED),
        (Role.OWNER, change("bob", Role.ADMIN), Reason.SELF_CHANGE),
        (Role.READER, remove("bob"), None),
        (Role.ADMIN, remove("zoe"), Reason.SUBJECT_UNKNOWN),
        (Role.ADMIN, remove("olga"), Reason.NOT_AUTHORISED),
        (Role.ADMIN, change("olga", Role.READER), Reason.NOT_AUTHORISED),
        (Role.ADMIN, change("eddy", Role.OWNER), Reason.NOT_AUTHORISED),
        (Role.ADMIN, change("eddy", Role.ADMIN), None),
        (Role.ADMIN, DeviceRevoke(person("olga"), device("olga.d")), Reason.NOT_AUTHORISED),
        (Role.ADMIN, DeviceRevoke(person("eddy"), device("eddy.d")), None),
        (Role.EDITOR, DeviceRevoke(person("eddy"), device("eddy.d")), Reason.NOT_AUTHORISED),
        (Role.READER, DeviceAdmit(person("bob"), device("bob.2")), None),
        (Role.EDITOR, DeviceAdmit(person("eddy"), device("eddy.2")), Reason.NOT_AUTHORISED),
        (Role.ADMIN, DeviceAdmit(person("zoe"), device("zoe.d")), Reason.SUBJECT_UNKNOWN),
        (Role.EDITOR, own_feed("bob.2", "bob", FeedKind.DATA), None),
        (Role.EDITOR, own_feed("eddy.2", "eddy", FeedKind.DATA), Reason.NOT_AUTHORISED),
        (Role.ADMIN, own_feed("eddy.2", "eddy", FeedKind.DATA), None),
        (Role.ADMIN, own_feed("eddy.data", "eddy", FeedKind.DATA), Reason.DUPLICATE),
        (Role.EDITOR, FeedRetire(feed("bob.data"), 3), None),
        (Role.EDITOR, FeedRetire(feed("eddy.data"), 3), Reason.NOT_AUTHORISED),
        (Role.ADMIN, FeedRetire(feed("nobody"), 3), Reason.SUBJECT_UNKNOWN),
        (Role.READER, Profile("Bob"), None),
        (Role.READER, ChildParty(CHILD, "chess"), Reason.NOT_AUTHORISED),
        (Role.EDITOR, ChildParty(CHILD, "chess"), None),
        (Role.EDITOR, Invitation(b"k", Role.READER), Reason.NOT_AUTHORISED),
        (Role.ADMIN, Invitation(b"k", Role.OWNER), Reason.NOT_AUTHORISED),
        (Role.ADMIN, InvitationCancel(b"nothing"), Reason.SUBJECT_UNKNOWN),
        (Role.EDITOR, Policy((("a", b"b"),)), Reason.NOT_AUTHORISED),
        (Role.READER, CapabilityRevoke(b"c", device("bob.d")), None),
        (Role.EDITOR, CapabilityRevoke(b"c", device("eddy.d")), Reason.NOT_AUTHORISED),
        (Role.EDITOR, CapabilityRevoke(b"c"), Reason.NOT_AUTHORISED),
        (Role.EDITOR, CapabilityRevoke(b"c", device("nobody.d")), Reason.NOT_AUTHORISED),
        (Role.ADMIN, CapabilityRevoke(b"c", device("eddy.d")), None),
        (Role.ADMIN, CapabilityRevoke(b"c"), None),
        (Role.EDITOR, ModelPublish("m", 1, b"d", b"h"), Reason.NOT_AUTHORISED),
        (Role.ADMIN, ModelPublish("m", 1, b"d", b"h"), None),
        (Role.EDITOR, EPOCH, Reason.NOT_AUTHORISED),
        (Role.ADMIN, EPOCH, None),
        (Role.READER, EpochAttest(1, b"g", Cid(b"c")), None),
        (Role.READER, EpochDispute(1, b"g"), None),
        (Role.OWNER, AdoptLocal(person("bob"), device("bob.d")), Reason.NOT_AUTHORISED),
    ],
)
def test_what_each_role_may_say(issuer_role: Role, said: Assertion, reason: Reason | None) -> None:
    story = Story()
    story.say("ann", *story.join("olga", Role.OWNER), *story.join("eddy", Role.EDITOR), *story.join("bob", issuer_role))
    assert verdict(check(story), story.messages[-1]) is None
    spoken = story.say("bob", said)
    assert verdict(check(story), spoken) is reason


def test_a_credential_counts_only_in_a_feed_of_the_device_that_signed_it() -> None:
    story = team("bob", "cyd")
    story.say("ann", remove("bob", bob_data=1))
    replayed = story.say("cyd", MemberAdmit(person("bob"), Role.ADMIN), issuer=person("ann"), device=device("ann.d"))
    machine = check(story)
    assert verdict(machine, replayed) is Reason.DEVICE_UNKNOWN
    assert role_of(machine, "bob") is None


def test_an_unadmitted_feed_counts_for_nothing() -> None:
    story = Story()
    story.writer("eve")
    said = story.say("eve", Profile("eve"), MemberAdmit(person("eve"), Role.OWNER))
    machine = check(story)
    assert verdict(machine, said, 0) is verdict(machine, said, 1) is Reason.UNADMITTED
    assert machine.admission().why_excluded(fid("eve"), 0) is Reason.UNADMITTED


def test_a_message_that_does_not_see_its_feeds_admission_does_not_count() -> None:
    story = Story()
    story.say("ann", *story.join("bob", Role.EDITOR))
    early = story.say("bob", Profile("bob"), sees=[story.start])
    assert verdict(check(story), early) is Reason.UNADMITTED


def test_faults_found_by_the_wire_are_listed() -> None:
    story = team("bob")
    forged = story.say("bob", Profile("x"), fault=Reason.BAD_SIGNATURE)
    foreign = story.say("bob", Profile("x"), party=CHILD)
    machine = check(story)
    assert verdict(machine, forged) is Reason.BAD_SIGNATURE
    assert verdict(machine, foreign) is Reason.OTHER_PARTY


def test_policy_names_who_declares_epochs() -> None:
    story = team("bob", "cyd", role=Role.EDITOR)
    story.say("ann", Policy((("epoch.declarers", person("bob")),)))
    by_bob, by_cyd, by_ann = (story.say(name, EPOCH) for name in ("bob", "cyd", "ann"))
    machine = check(story)
    assert [verdict(machine, said) for said in (by_bob, by_cyd)] == [None, Reason.NOT_AUTHORISED]
    assert verdict(machine, by_ann) is Reason.NOT_AUTHORISED
    assert [epoch.identity for epoch in machine.epochs] == [person("bob")]


def test_concurrent_policies_are_decided_by_seniority() -> None:
    story = team("bob", "cyd")
    base = story.messages[-1]
    story.say("cyd", Policy((("a", b"cyd"), ("b", b"cyd"))), sees=[base])
    story.say("bob", Policy((("a", b"bob"),)), sees=[base])
    assert check(story).policy == {"a": b"bob", "b": b"cyd"}


def test_invitations_are_cancelled_by_their_issuer_or_an_admin() -> None:
    story = team("bob", "cyd")
    story.say(
        "ann", *story.join("eddy", Role.EDITOR), Invitation(b"one", Role.EDITOR, 5, 2), Invitation(b"two", Role.READER)
    )
    refused = story.say("eddy", InvitationCancel(b"one"))
    story.say("bob", InvitationCancel(b"one"))
    machine = check(story)
    assert verdict(machine, refused) is Reason.NOT_AUTHORISED
    assert [(invited.invitation.key, invited.cancelled) for invited in machine.invitations] == [
        (b"one", True),
        (b"two", False),
    ]


def test_a_device_that_was_revoked_does_not_keep_its_capabilities() -> None:
    story = team("bob", role=Role.EDITOR)
    story.say("bob", DeviceAdmit(person("bob"), device("bob.2")))
    story.say("bob", DeviceRevoke(person("bob"), device("bob.2")))
    said = story.say("bob", CapabilityRevoke(b"c", device("bob.2"), 7), CapabilityRevoke(b"c", device("bob.2"), 9))
    machine = check(story)
    assert verdict(machine, said) is None
    assert [(each.id, each.issuer, each.expires_ms) for each in machine.revoked_capabilities] == [
        (b"c", device("bob.2"), 7)
    ]
    step = next(each for each in machine.why(b"c"))
    assert (step.act, step.reason) == ("CapabilityRevoke", None)
    assert "own devices issued" in step.detail


# --- conflicts ----------------------------------------------------------------------------------------------------


def test_two_admins_act_at_once() -> None:
    story = team("bob", "cyd")
    base = story.messages[-1]
    story.say("bob", MemberAdmit(person("dan"), Role.EDITOR), sees=[base])
    story.say("cyd", MemberAdmit(person("dan"), Role.READER), MemberAdmit(person("eve"), Role.EDITOR), sees=[base])
    machine = check(story)
    assert machine.rejected == ()
    assert role_of(machine, "dan") is Role.EDITOR  # bob is senior
    assert role_of(machine, "eve") is Role.EDITOR


def test_concurrent_role_changes_are_decided_by_seniority_and_the_least_bound() -> None:
    story = team("bob", "cyd")
    joined = story.say("ann", *story.join("dan", Role.EDITOR))
    story.say("cyd", change("dan", Role.ADMIN, dan_data=3), sees=[joined])
    story.say("bob", change("dan", Role.READER, dan_data=7), sees=[joined])
    machine = check(story)
    assert role_of(machine, "dan") is Role.READER
    assert roles(machine, "dan.data") == (Interval(0, 3, Role.EDITOR), Interval(3, None, Role.READER))
    assert machine.admission().why_excluded(fid("dan.data"), 2) is None
    assert machine.admission().why_excluded(fid("dan.data"), 3) is Reason.READER


def test_a_causal_successor_beats_seniority() -> None:
    story = team("bob", "cyd")
    joined = story.say("ann", *story.join("dan", Role.EDITOR))
    first = story.say("bob", change("dan", Role.READER, dan_data=4), sees=[joined])
    story.say("cyd", change("dan", Role.ADMIN, dan_data=6), sees=[first])
    machine = check(story)
    assert role_of(machine, "dan") is Role.ADMIN
    assert roles(machine, "dan.data") == (
        Interval(0, 4, Role.EDITOR),
        Interval(4, 6, Role.READER),
        Interval(6, None, Role.ADMIN),
    )


def test_a_demoted_admin_acts_concurrently() -> None:
    story = team("bob")
    base = story.messages[-1]
    story.say("ann", change("bob", Role.EDITOR), sees=[base])
    said = story.say("bob", MemberAdmit(person("dan"), Role.EDITOR), sees=[base])
    machine = check(story)
    assert verdict(machine, said) is Reason.NOT_AUTHORISED
    assert role_of(machine, "dan") is None
    assert role_of(machine, "bob") is Role.EDITOR


def test_what_a_demoted_admin_did_before_stands_and_what_comes_after_is_judged_by_the_new_role() -> None:
    story = team("bob")
    story.say("bob", MemberAdmit(person("dan"), Role.EDITOR))
    story.say("ann", change("bob", Role.EDITOR))
    after = story.say("bob", MemberAdmit(person("eve"), Role.EDITOR), Profile("Bob"))
    machine = check(story)
    assert role_of(machine, "dan") is Role.EDITOR
    assert verdict(machine, after, 0) is Reason.NOT_AUTHORISED
    assert verdict(machine, after, 1) is None


def test_a_promotion_voids_nothing() -> None:
    story = team("bob", role=Role.EDITOR)
    base = story.messages[-1]
    story.say("ann", change("bob", Role.ADMIN), sees=[base])
    said = story.say("bob", Profile("Bob"), MemberAdmit(person("dan"), Role.READER), sees=[base])
    machine = check(story)
    assert verdict(machine, said, 0) is None
    assert verdict(machine, said, 1) is Reason.NOT_AUTHORISED


def test_owner_and_admin_disagree() -> None:
    story = team("bob")
    joined = story.say("ann", *story.join("dan", Role.EDITOR))
    story.say("bob", remove("dan", dan_data=2), sees=[joined])
    story.say("ann", change("dan", Role.ADMIN, dan_data=5), sees=[joined])
    machine = check(story)
    assert role_of(machine, "dan") is None  # a removal is not undone by what is concurrent with it
    assert roles(machine, "dan.data") == (Interval(0, 2, Role.EDITOR),)
    assert machine.admission().why_excluded(fid("dan.data"), 2) is Reason.BEYOND_CUT


def test_concurrent_removals_take_the_least_cut() -> None:
    story = team("bob", "cyd")
    joined = story.say("ann", *story.join("dan", Role.EDITOR))
    story.say("bob", remove("dan", dan_data=8), sees=[joined])
    story.say("cyd", remove("dan", dan_data=5), sees=[joined])
    assert roles(check(story), "dan.data") == (Interval(0, 5, Role.EDITOR),)


def test_a_feed_not_named_in_a_cut_is_cut_at_its_start() -> None:
    story = team("bob")
    story.say("ann", remove("bob"))
    assert roles(check(story), "bob.data") == ()


@pytest.mark.parametrize(("senior", "junior"), [("bob", "cyd"), ("cyd", "bob")])
def test_mutual_removal_has_one_answer(senior: str, junior: str) -> None:
    story = team(senior, junior)
    base = story.messages[-1]
    story.say("cyd", remove("bob", bob_data=1), sees=[base])
    story.say("bob", remove("cyd", cyd_data=1), sees=[base])
    machine = check(story)
    assert role_of(machine, senior) is Role.ADMIN  # admitted first
    assert role_of(machine, junior) is None


def test_a_three_way_cycle_of_removals() -> None:
    story = team("bob", "cyd", "dan")
    base = story.messages[-1]
    story.say("bob", remove("cyd"), sees=[base])
    story.say("cyd", remove("dan"), sees=[base])
    story.say("dan", remove("bob"), sees=[base])
    machine = check(story)
    # bob's is decided first and voids cyd's; then dan's is decided and removes bob.
    assert [role_of(machine, name) for name in ("bob", "cyd", "dan")] == [None, None, Role.ADMIN]


def test_a_senior_removal_stands_though_a_junior_removes_its_issuer() -> None:
    story = team("bob", "cyd", "dan")
    base = story.messages[-1]
    by_bob = story.say("bob", remove("cyd"), Profile("Bob"), sees=[base])
    story.say("dan", remove("bob"), sees=[base])
    machine = check(story)
    assert verdict(machine, by_bob, 0) is None
    assert verdict(machine, by_bob, 1) is Reason.ISSUER_REMOVED
    assert [role_of(machine, name) for name in ("bob", "cyd", "dan")] == [None, None, Role.ADMIN]


def test_a_removed_senior_cannot_remove_who_removed_it_before() -> None:
    story = team("bob", "cyd")
    story.say("cyd", remove("bob"))
    late = story.say("bob", remove("cyd"))
    machine = check(story)
    assert verdict(machine, late) is Reason.ISSUER_REMOVED
    assert role_of(machine, "cyd") is Role.ADMIN


def test_removal_of_the_inviter_concurrent_with_the_admission() -> None:
    story = team("bob")
    base = story.messages[-1]
    admitted = story.say("bob", *story.join("dan", Role.EDITOR), sees=[base])
    spoken = story.say("dan", Profile("Dan"), sees=[admitted])
    story.say("ann", remove("bob"), sees=[base])
    machine = check(story)
    assert [verdict(machine, admitted, position) for position in range(4)] == [Reason.ISSUER_REMOVED] * 4
    assert verdict(machine, spoken) is Reason.UNADMITTED
    assert role_of(machine, "dan") is None


def test_who_was_admitted_before_the_inviter_was_removed_stays() -> None:
    story = team("bob")
    story.say("bob", *story.join("dan", Role.EDITOR))
    story.say("ann", remove("bob"))
    assert role_of(check(story), "dan") is Role.EDITOR


def test_rejoin_after_removal() -> None:
    story = team("bob", role=Role.EDITOR)
    story.say("ann", remove("bob", bob_data=4))
    story.say("ann", MemberAdmit(person("bob"), Role.READER))
    old = story.say("bob", Profile("from the old feed"))
    story.writer("bob2", identity="bob")
    new = story.say("bob2", own_feed("bob2", "bob"), own_feed("bob2.data", "bob", FeedKind.DATA), Profile("Bob"))
    again = story.say("ann", own_feed("bob.data", "bob", FeedKind.DATA))
    machine = check(story)
    assert verdict(machine, old) is Reason.ISSUER_REMOVED
    assert [verdict(machine, new, position) for position in range(3)] == [None] * 3
    assert verdict(machine, again) is Reason.DUPLICATE
    assert roles(machine, "bob.data") == (Interval(0, 4, Role.EDITOR),)  # as it was written, not as he is now
    assert roles(machine, "bob2.data") == (Interval(0, None, Role.READER),)
    (bob,) = [member for member in machine.members if member.identity == person("bob")]
    assert (bob.status, bob.role, bob.name) == (Status.ACTIVE, Role.READER, "Bob")


def test_an_admission_concurrent_with_the_removal_does_not_bring_the_member_back() -> None:
    story = team("bob")
    joined = story.say("ann", *story.join("dan", Role.EDITOR), sees=[story.start])
    base = story.messages[-2]
    story.say("bob", MemberAdmit(person("dan"), Role.ADMIN), sees=[base])
    story.say("ann", remove("dan"), sees=[joined])
    assert role_of(check(story), "dan") is None


def test_a_late_admission_that_comes_first_in_order_makes_its_member_senior() -> None:
    story = team("bob", "cyd")
    base = story.messages[-1]
    by_cyd = story.say("cyd", Profile("c"), sees=[base])
    late = story.say("cyd", *story.join("dan", Role.ADMIN), sees=[by_cyd])
    for _ in range(3):
        late = story.say("cyd", Profile("c"), sees=[late])
    joined = story.say("cyd", *story.join("eve", Role.ADMIN), sees=[late])
    story.say("eve", remove("dan"), sees=[joined])
    story.say("dan", remove("eve"), sees=[joined])
    story.say("bob", MemberAdmit(person("eve"), Role.ADMIN), sees=[base])  # before dan's, in canonical order
    machine = check(story)
    assert role_of(machine, "eve") is Role.ADMIN
    assert role_of(machine, "dan") is None


def test_a_rejoin_that_saw_one_of_two_removals_does_not_count() -> None:
    story = team("bob", "cyd")
    joined = story.say("ann", *story.join("dan", Role.EDITOR))
    one = story.say("bob", remove("dan"), sees=[joined])
    story.say("bob", MemberAdmit(person("dan"), Role.EDITOR), sees=[one])
    story.say("cyd", remove("dan"), sees=[joined])
    machine = check(story)
    assert machine.rejected == ()
    assert role_of(machine, "dan") is None


# --- devices and feeds --------------------------------------------------------------------------------------------


def test_a_chain_of_devices() -> None:
    story = team("bob", role=Role.EDITOR)
    story.say("bob", DeviceAdmit(person("bob"), device("bob.2"), "phone"))
    story.writer("bob.2", identity="bob", device_name="bob.2")
    story.say("bob.2", own_feed("bob.2", "bob", device_name="bob.2"), DeviceAdmit(person("bob"), device("bob.3")))
    story.writer("bob.3", identity="bob", device_name="bob.3")
    last = story.say("bob.3", own_feed("bob.3", "bob", device_name="bob.3"), Profile("third"))
    machine = check(story)
    assert machine.rejected == ()
    assert verdict(machine, last) is None
    (bob,) = [member for member in machine.members if member.identity == person("bob")]
    assert len(bob.devices) == 3


def test_a_broken_device_chain_breaks_what_hangs_on_it() -> None:
    story = team("bob", role=Role.EDITOR)
    base = story.messages[-1]
    link = story.say("bob", DeviceAdmit(person("bob"), device("bob.2")), sees=[base])
    story.writer("bob.2", identity="bob", device_name="bob.2")
    child = story.say("bob.2", own_feed("bob.2", "bob", device_name="bob.2"), sees=[link])
    story.say("ann", DeviceRevoke(person("bob"), device("bob.d")), sees=[base])
    machine = check(story)
    assert verdict(machine, link) is Reason.DEVICE_REVOKED
    assert verdict(machine, child) is Reason.DEVICE_UNKNOWN


def test_devices_cannot_admit_each_other_in_a_circle() -> None:
    story = team("bob", role=Role.EDITOR)
    for name, other in (("x", "y"), ("y", "x")):
        story.writer(name, identity="bob", device_name=name)
        said = DeviceAdmit(person("bob"), device(other))
        story.say(name, own_feed(name, "bob", device_name=name), said, sees=[story.messages[1]])
    machine = check(story)
    assert {rejection.reason for rejection in machine.rejected} == {Reason.DEVICE_UNKNOWN, Reason.UNADMITTED}


def test_a_revoked_device_is_cut_and_never_admitted_again() -> None:
    story = team("bob", role=Role.EDITOR)
    base = story.messages[-1]
    stolen = story.say("bob", Profile("thief"), sees=[base])
    story.say("ann", DeviceRevoke(person("bob"), device("bob.d"), bounds(bob_data=6)), sees=[base])
    again = story.say("ann", DeviceAdmit(person("bob"), device("bob.d")))
    fresh = story.say("ann", DeviceAdmit(person("bob"), device("bob.2")))
    machine = check(story)
    assert verdict(machine, stolen) is Reason.DEVICE_REVOKED
    assert verdict(machine, again) is Reason.DEVICE_REVOKED
    assert verdict(machine, fresh) is None
    assert roles(machine, "bob.data") == (Interval(0, 6, Role.EDITOR),)
    assert role_of(machine, "bob") is Role.EDITOR


def test_concurrent_revocations_take_the_least_cut() -> None:
    story = team("bob", "cyd")
    joined = story.say("ann", *story.join("dan", Role.EDITOR))
    for name, length in (("bob", 8), ("cyd", 5)):
        story.say(name, DeviceRevoke(person("dan"), device("dan.d"), bounds(dan_data=length)), sees=[joined])
    assert roles(check(story), "dan.data") == (Interval(0, 5, Role.EDITOR),)


def test_a_restored_device_opens_feeds_by_itself() -> None:
    story = team("bob", role=Role.EDITOR)
    story.writer("restored", identity="bob")
    data = own_feed("restored.data", "bob", FeedKind.DATA)
    opened = story.say("restored", own_feed("restored", "bob"), data, sees=[story.messages[-1]])
    later = story.say("restored", own_feed("more.data", "bob", FeedKind.DATA), sees=[])
    machine = check(story)
    assert [verdict(machine, opened, position) for position in (0, 1)] == [None, None]
    assert verdict(machine, later) is None
    assert roles(machine, "restored.data") == (Interval(0, None, Role.EDITOR),)


def test_a_feed_opens_itself_only_in_its_first_block() -> None:
    story = team("bob", role=Role.EDITOR)
    story.writer("late", identity="bob")
    first = story.say("late", Profile("too early"))
    second = story.say("late", own_feed("late", "bob"))
    machine = check(story)
    assert verdict(machine, first) is verdict(machine, second) is Reason.UNADMITTED


def test_a_recovered_identity_admits_its_new_device_with_the_identity_key() -> None:
    story = team("bob", role=Role.EDITOR)
    story.writer("phoenix", identity="bob", device_name="phoenix")
    root = story.say("phoenix", DeviceAdmit(person("bob"), device("phoenix")), device=DeviceKey(person("bob")))
    message = story.messages.pop()
    opened = story.say("phoenix", own_feed("phoenix", "bob", device_name="phoenix"), Profile("Bob"))
    story.messages.pop()
    both = replace(message, credentials=message.credentials + opened.credentials)
    story.messages.append(both)
    machine = check(story)
    assert root.seq == 0
    assert machine.rejected == ()
    other = story.say("ann", Profile("x"), issuer=person("bob"), device=DeviceKey(person("bob")))
    assert verdict(check(story), other) is Reason.DEVICE_UNKNOWN


def test_a_device_has_at_most_64_feeds() -> None:
    story = team("bob", role=Role.EDITOR)
    for number in range(63):
        story.say("bob", own_feed(f"data{number}", "bob", FeedKind.DATA))
    machine = story.machine()
    against_reference(machine, story.messages)
    assert [rejection.reason for rejection in machine.rejected] == [Reason.TOO_MANY]
    story.writer("side", identity="bob")
    story.say("side", own_feed("side", "bob"), sees=[story.messages[1]])  # low in the canonical order
    machine = story.machine()
    against_reference(machine, story.messages)
    assert len(machine.rejected) == 2
    assert fid("side") in machine.admission().by_id


def colliding(name: str) -> FeedKey:
    return FeedKey(feed(name)[:8] + bytes(24))


def test_a_causally_later_collision_is_void() -> None:
    story = team("bob", role=Role.EDITOR)
    later = story.say("bob", replace(own_feed("x", "bob", FeedKind.DATA), feed=colliding("bob.data")))
    machine = check(story)
    assert verdict(machine, later) is Reason.FEED_COLLISION
    assert machine.admission().by_id[fid("bob.data")].feed == feed("bob.data")


def test_of_concurrent_collisions_both_are_void() -> None:
    story = team("bob", "cyd", role=Role.EDITOR)
    base = story.messages[-1]
    one = story.say("bob", own_feed("x", "bob", FeedKind.DATA), sees=[base])
    two = story.say("cyd", replace(own_feed("x", "cyd", FeedKind.DATA), feed=colliding("x")), sees=[base])
    three = story.say("bob", replace(own_feed("x", "bob", FeedKind.DATA), feed=FeedKey(feed("x")[:8] + b"\1" * 24)))
    machine = check(story)
    assert [verdict(machine, said) for said in (one, two, three)] == [Reason.FEED_COLLISION] * 3
    assert fid("x") not in machine.admission().by_id


def test_a_collision_of_control_feeds_voids_what_they_said() -> None:
    story = team("bob", "cyd")
    base = story.messages[-1]
    story.writer("x", identity="bob")
    story.say("x", own_feed("x", "bob"), sees=[base])
    said = story.say("x", MemberAdmit(person("dan"), Role.EDITOR), sees=[])
    story.say("cyd", replace(own_feed("x", "cyd", FeedKind.DATA), feed=colliding("x")), sees=[base])
    machine = check(story)
    assert verdict(machine, said) is Reason.UNADMITTED
    assert role_of(machine, "dan") is None


def test_equal_concurrent_admissions_of_a_feed_are_one() -> None:
    story = team("bob", role=Role.EDITOR)
    base = story.messages[-1]
    story.say("bob", own_feed("x", "bob", FeedKind.DATA), sees=[base])
    story.say("ann", own_feed("x", "bob", FeedKind.DATA), sees=[base])
    machine = check(story)
    assert machine.rejected == ()
    assert roles(machine, "x") == (Interval(0, None, Role.EDITOR),)


def test_a_readers_blocks_never_count() -> None:
    story = team("bob", role=Role.READER)
    admission = check(story).admission()
    assert admission.role_at(fid("bob.data"), 0) is Role.READER
    assert admission.why_excluded(fid("bob.data"), 0) is Reason.READER
    assert admission.why_excluded(fid("bob"), 0) is None


def test_a_retired_feed_ends() -> None:
    story = team("bob", role=Role.EDITOR)
    story.say("bob", FeedRetire(feed("bob.data"), 5))
    story.say("ann", FeedRetire(feed("bob.data"), 3))
    machine = check(story)
    assert roles(machine, "bob.data") == (Interval(0, 3, Role.EDITOR),)
    assert machine.admission().why_excluded(fid("bob.data"), 3) is Reason.RETIRED


def test_a_retired_control_feed_is_silent() -> None:
    story = team("bob", role=Role.EDITOR)
    base = story.messages[-1]
    story.say("ann", FeedRetire(feed("bob"), 0), sees=[base])
    concurrent = story.say("bob", Profile("x"), sees=[base])
    later = story.say("bob", Profile("y"))
    machine = check(story)
    assert verdict(machine, concurrent) is verdict(machine, later) is Reason.RETIRED
    assert machine.admission().why_excluded(fid("bob"), 0) is Reason.RETIRED


# --- forks --------------------------------------------------------------------------------------------------------


def test_a_fork_of_a_data_feed_cuts_it() -> None:
    story = team("bob", role=Role.EDITOR)
    story.say("ann", fork("bob.data", 7))
    story.say("bob", fork("bob.data", 5))
    machine = check(story)
    assert roles(machine, "bob.data") == (Interval(0, 5, Role.EDITOR),)
    assert machine.admission().why_excluded(fid("bob.data"), 5) is Reason.FORK


def test_a_fork_of_a_control_feed_voids_what_follows() -> None:
    story = team("bob")
    kept = story.say("bob", Profile("Bob"))
    lost = story.say("bob", *story.join("dan", Role.EDITOR))
    story.say("dan", Profile("Dan"))
    story.say("ann", fork("bob", 1), sees=[kept])
    machine = check(story)
    assert verdict(machine, kept) is None
    assert verdict(machine, lost) is Reason.FORK
    assert role_of(machine, "dan") is None


def test_fork_evidence_counts_wherever_it_stands() -> None:
    story = team("bob", "cyd")
    base = story.messages[-1]
    story.say("bob", fork("cyd", 0), sees=[base])
    story.say("cyd", fork("bob", 0), sees=[base])
    machine = check(story)
    assert machine.forks == {feed("bob"): 0, feed("cyd"): 0}
    assert roles(machine, "bob") == ()


def test_two_messages_at_one_place_are_a_fork() -> None:
    story = team("bob")
    base = story.messages[-1]
    one = story.say("bob", Profile("one"), sees=[base])
    two = story.say("bob", Profile("two"), sees=[base], seq=0)
    machine = check(story)
    assert verdict(machine, one) is verdict(machine, two) is Reason.FORK


def test_a_repeated_message_changes_nothing() -> None:
    story = team("bob")
    machine = check(story)
    before = facts(machine)
    machine.receive(story.messages[1])
    assert facts(machine) == before


# --- groups, children, local parties ------------------------------------------------------------------------------


def test_a_group_brings_its_members_in_and_takes_them_out() -> None:
    story = team("bob", role=Role.READER)
    cyd = [said for said in story.join("cyd", Role.READER) if not isinstance(said, MemberAdmit)]
    family = GroupAdmit(GROUP, "family", Role.EDITOR, (person("bob"), person("cyd")))
    base = story.say("ann", family, *cyd)
    machine = check(story)
    assert role_of(machine, "bob") is role_of(machine, "cyd") is Role.EDITOR
    assert [group.name for group in machine.groups] == ["family"]
    late = story.say("cyd", Profile("Cyd"), sees=[base])
    direct = story.say("bob", ChildParty(CHILD), sees=[base])
    story.say("ann", MemberRemove(GROUP, bounds(bob_data=3, cyd_data=2)), sees=[base])
    machine = check(story)
    assert role_of(machine, "cyd") is None
    assert role_of(machine, "bob") is Role.READER
    assert verdict(machine, late) is verdict(machine, direct) is Reason.ISSUER_REMOVED
    assert roles(machine, "cyd.data") == (Interval(0, 2, Role.EDITOR),)
    assert roles(machine, "bob.data") == (Interval(0, 3, Role.EDITOR), Interval(3, None, Role.READER))


def test_removing_a_member_bars_it_from_its_groups_too() -> None:
    story = team("bob", role=Role.EDITOR)
    story.say("ann", GroupAdmit(GROUP, "family", Role.ADMIN, (person("bob"),)))
    story.say("ann", remove("bob", bob_data=1))
    machine = check(story)
    assert role_of(machine, "bob") is None
    assert machine.groups[0].members == ()


def test_nobody_admits_a_group_with_themselves() -> None:
    story = team("bob")
    said = story.say("bob", GroupAdmit(GROUP, "family", Role.ADMIN, (person("bob"),)))
    own = story.say("ann", GroupAdmit(GROUP, "family", Role.ADMIN, (person("ann"), person("bob"))))
    machine = check(story)
    assert verdict(machine, said) is Reason.SELF_CHANGE
    assert verdict(machine, own) is None
    changed = story.say("bob", RoleChange(GROUP, Role.READER))
    assert verdict(check(story), changed) is Reason.SELF_CHANGE


def test_a_child_party_has_its_own_feeds_and_shared_members() -> None:
    story = team("bob", role=Role.EDITOR)
    early = story.say("bob", replace(own_feed("g", "bob", FeedKind.DATA), child=CHILD))
    story.say("bob", ChildParty(CHILD, "chess"), replace(own_feed("game", "bob", FeedKind.DATA), child=CHILD))
    control = story.say("bob", replace(own_feed("c", "bob"), child=CHILD))
    machine = check(story)
    assert verdict(machine, early) is Reason.SUBJECT_UNKNOWN
    assert verdict(machine, control) is Reason.WRONG_KIND
    assert [admitted.feed for admitted in machine.admission(CHILD).feeds] == [feed("game")]
    assert fid("game") not in machine.admission().by_id
    assert machine.children == ((CHILD, "chess"),)
    before = machine.admission().digest
    story.say("ann", remove("bob", game=2))
    machine = check(story)
    assert machine.admission(CHILD).feeds[0].intervals == (Interval(0, 2, Role.EDITOR),)
    assert machine.admission().digest != before


def test_a_local_party_is_adopted_by_an_identity() -> None:
    story = Story(kind=PartyKind.LOCAL)
    machine = check(story)
    assert machine.members[0].identity == device("ann.d")
    story.say("ann", AdoptLocal(person("ann"), device("ann.d"), "Ann"))
    as_ann = story.say("ann", *story.join("bob", Role.OWNER), issuer=person("ann"))
    machine = check(story)
    assert machine.rejected == ()
    assert role_of(machine, "ann") is Role.OWNER
    assert verdict(machine, as_ann) is None
    attack = story.say("bob", remove("ann"))
    again = story.say("ann", AdoptLocal(person("bob"), device("bob.d")))
    machine = check(story)
    assert verdict(machine, attack) is Reason.CREATOR_PROTECTED
    assert verdict(machine, again) is Reason.DUPLICATE


def test_a_local_genesis_names_its_device_as_identity() -> None:
    story = Story()
    said = PartyGenesis(PARTY, person("x"), device("x.d"), feed("x"), feed("y"), kind=PartyKind.LOCAL)
    story.writer("x")
    wrong = story.say("x", said, sees=[], device=DeviceKey(PARTY))
    assert verdict(check(story), wrong) is Reason.NOT_GENESIS


# --- questions ----------------------------------------------------------------------------------------------------


def test_why_leads_to_the_genesis() -> None:
    story = team("bob")
    story.say("bob", *story.join("dan", Role.EDITOR))
    story.say("dan", MemberAdmit(person("eve"), Role.READER))
    machine = check(story)
    steps = machine.why(person("dan"))
    assert steps[0].act == "MemberAdmit"
    assert steps[-1].act == "PartyGenesis"
    assert all(step.reason is None and step.detail.startswith("valid because") for step in steps)
    (refused,) = machine.why(person("eve"))
    assert refused.reason is Reason.NOT_AUTHORISED
    assert {step.act for step in machine.why(feed("dan.data"))} >= {"FeedAdmit", "DeviceAdmit", "PartyGenesis"}
    assert machine.why(b"nobody") == []


def test_the_digest_is_kept_while_membership_stays() -> None:
    story = team("bob")
    machine = story.machine()
    before = machine.admission()
    machine.receive(story.say("bob", Profile("Bob"), EpochAttest(1, b"g", Cid(b"c"))))
    assert machine.admission() is before
    machine.receive(story.say("bob", own_feed("x", "bob", FeedKind.DATA)))
    assert machine.admission().digest != before.digest


def test_the_digest_of_a_small_party_is_pinned() -> None:
    story = team("bob", role=Role.EDITOR)
    story.say("ann", remove("bob", bob_data=4))
    assert check(story).admission().digest.hex() == GOLDEN_DIGEST


GOLDEN_DIGEST = "ab6fcdbed42621e650ae999a80b0d672c0d29a8c55b84d7485d6b7092b9631a9"


def test_an_attest_costs_the_same_however_many_came_before() -> None:
    few, many = (_calls_for_attests(count) for count in (1_000, 4_000))
    assert many < 4.4 * few


def _calls_for_attests(count: int) -> int:
    """How many calls, of Python and of C, a machine makes to take so many attests."""
    story = team("bob", "cyd", "dan")
    names = ["ann", "bob", "cyd", "dan"]
    base = story.messages[-1]
    machine = story.machine()
    template = {name: story.say(name, EpochAttest(1, b"g", Cid(b"c")), sees=[base]) for name in names}
    clocks = dict(base.clock) | {base.feed: base.seq}
    messages = []
    for number in range(count):
        first = template[names[number % 4]]
        seq = first.seq + number // 4
        clock = clocks | {first.feed: seq - 1}
        messages.append(replace(first, seq=seq, depth=first.depth + number // 4, clock=clock))
    calls = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        for message in messages:
            machine.receive(message)
        machine.admission()
    finally:
        sys.setprofile(before)
    assert len(machine.attests) == count
    return calls


# --- what a member can make others compute -------------------------------------------------------------------------


def folds_for(story: Story, writer: str, said: list[Assertion]) -> int:
    """How often the machine folds anew while a member says these things one by one, seeing nobody else's last acts."""
    base = story.messages[-1]
    machine = story.machine()
    machine.admission()
    before = machine.folds
    for each in said:
        machine.receive(story.say(writer, each, sees=[base]))
        machine.admission()
    assert facts(machine) == facts(story.machine())
    against_reference(machine, story.messages)
    return machine.folds - before


@pytest.mark.parametrize("role", [Role.READER, Role.EDITOR])
def test_refused_removals_of_a_member_without_authority_fold_nothing_anew(role: Role) -> None:
    story = team("bob", "cyd")
    story.say("ann", *story.join("eve", role))
    base = story.messages[-1]
    story.say("bob", MemberRemove(person("cyd")), sees=[base])  # a removal is decided: others may compete with it
    story.say("cyd", Profile("late"), sees=[base])
    story.say("ann", Profile("here"), sees=story.messages[-2:])
    kinds: list[Assertion] = [
        MemberRemove(person("bob")),
        MemberRemove(person("ann")),
        MemberRemove(person("nobody")),
        MemberRemove(GROUP),
        RoleChange(person("bob"), Role.READER),
        RoleChange(person("eve"), Role.OWNER),
        DeviceRevoke(person("bob"), device("bob.d")),
        DeviceRevoke(person("eve"), device("eve.99")),
        FeedRetire(feed("bob"), 0),
        FeedRetire(feed("nobody"), 0),
        MemberAdmit(person("bob"), Role.OWNER),
        GroupAdmit(GROUP, "g", Role.OWNER, (person("bob"), person("eve"))),
    ]
    assert folds_for(story, "eve", kinds * 3) == 0


def test_a_member_that_makes_itself_admin_gains_no_hope() -> None:
    """Its grants are void whoever they name, so what the named do with them asks for nothing either."""
    story = team("bob", "cyd")
    for name in ("eve", "fay"):
        story.say("ann", *story.join(name, Role.EDITOR))
    story.say("bob", MemberRemove(person("cyd")), sees=[story.messages[-1]])
    grants: list[Assertion] = [RoleChange(person("fay"), Role.OWNER), MemberAdmit(person("guy"), Role.OWNER)]
    assert folds_for(story, "eve", grants) == 0
    removals: list[Assertion] = [MemberRemove(person("bob")), RoleChange(person("eve"), Role.OWNER)]
    assert folds_for(story, "fay", removals * 5) == 0


def test_saying_again_what_is_revoked_or_retired_folds_nothing_anew() -> None:
    story = team("bob", "cyd")
    story.say("bob", MemberRemove(person("cyd")), sees=[story.messages[-1]])
    admit = [DeviceAdmit(person("bob"), device("bob.2")), own_feed("x", "bob", device_name="bob.2")]
    story.say("bob", *admit, sees=[story.messages[-1]])
    story.writer("x", identity="bob", device_name="bob.2")
    base = story.messages[-1]
    story.say("bob", FeedRetire(feed("x"), 0), DeviceRevoke(person("bob"), device("bob.2")), sees=[base])
    story.say("x", Profile("concurrent"), sees=[base])
    again: list[Assertion] = [FeedRetire(feed("x"), 0), DeviceRevoke(person("bob"), device("bob.2"))]
    assert folds_for(story, "bob", again * 10) == 0


def test_feeds_beyond_the_limit_fold_nothing_anew() -> None:
    story = team("bob", role=Role.EDITOR)
    many: list[Assertion] = [own_feed(f"bob.{number}", "bob", FeedKind.DATA) for number in range(90)]
    assert folds_for(story, "bob", many) == 0
    assert sum(admitted.identity == person("bob") for admitted in story.machine().feeds) == 64


# --- anything at all ----------------------------------------------------------------------------------------------

PEOPLE = ("ann", "bob", "cyd", "dan")
LENGTHS = st.integers(0, BLOCKS - 1)
ROLES = st.sampled_from(list(Role))
NAMES = st.sampled_from([*PEOPLE, "eve"])
SUBJECTS = st.one_of(NAMES.map(person), st.just(GROUP))
CUTS = st.dictionaries(st.sampled_from([f"{name}_data" for name in PEOPLE]), LENGTHS, max_size=4).map(
    lambda lengths: bounds(**lengths)
)
DEVICES = st.tuples(NAMES, st.sampled_from(["d", "2"]))


@st.composite
def feed_admits(draw: st.DrawFn) -> FeedAdmit:
    owner, suffix = draw(DEVICES)
    name = draw(st.sampled_from(["x", "y", *PEOPLE]))
    admit = own_feed(name, owner, draw(st.sampled_from(list(FeedKind))), f"{owner}.{suffix}")
    if draw(st.booleans()):
        admit = replace(admit, feed=colliding(name))
    return replace(admit, child=draw(st.sampled_from([None, None, CHILD])))


ASSERTIONS: st.SearchStrategy[Assertion] = st.one_of(
    st.builds(MemberAdmit, NAMES.map(person), ROLES),
    st.builds(RoleChange, SUBJECTS, ROLES, CUTS),
    st.builds(RoleChange, SUBJECTS, ROLES, CUTS),
    st.builds(MemberRemove, SUBJECTS, CUTS),
    st.builds(MemberRemove, SUBJECTS, CUTS),
    st.builds(lambda pair: DeviceAdmit(person(pair[0]), device(".".join(pair))), DEVICES),
    st.builds(lambda pair, cut: DeviceRevoke(person(pair[0]), device(".".join(pair)), cut), DEVICES, CUTS),
    feed_admits(),
    st.builds(lambda name, end: FeedRetire(feed(name), end), st.sampled_from([*PEOPLE, "bob.data", "x"]), LENGTHS),
    st.builds(
        lambda names, role: GroupAdmit(GROUP, "g", role, tuple(map(person, sorted(names)))), st.sets(NAMES), ROLES
    ),
    st.builds(lambda name, seq: fork(name, seq), st.sampled_from(["bob", "bob.data", "cyd"]), st.integers(0, 3)),
    st.just(ChildParty(CHILD)),
    st.builds(lambda name: CapabilityRevoke(b"c", device(f"{name}.d")), NAMES),
    st.just(CapabilityRevoke(b"c")),
    st.just(Profile("p")),
    st.just(EPOCH),
    st.sampled_from([Policy((("epoch.declarers", value),)) for value in (b"elect", b"admins", person("cyd"))]),
)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """A party of four whose members then do anything, seeing as much or as little of each other as it happens."""
    story = Story()
    for name in PEOPLE[1:]:
        story.say("ann", *story.join(name, draw(st.sampled_from([Role.ADMIN, Role.ADMIN, Role.OWNER, Role.EDITOR]))))
    if draw(st.booleans()):
        listed = draw(st.sets(NAMES, min_size=1))
        story.say("ann", GroupAdmit(GROUP, "g", draw(ROLES), tuple(sorted(map(person, listed)))))
    story.writer("x", identity="bob")
    story.writer("y", identity="cyd", device_name="cyd.2")
    start = len(story.messages)
    for _ in range(draw(st.integers(1, 9))):
        writer = draw(st.sampled_from([*PEOPLE, *PEOPLE, "x", "y"]))
        seen = draw(st.one_of(st.just([]), st.lists(st.sampled_from(story.messages), max_size=3)))
        said = draw(st.lists(ASSERTIONS, min_size=1, max_size=2))
        if writer in ("x", "y") and draw(st.booleans()):
            owner = story.writers[writer]
            said.insert(0, FeedAdmit(owner.key, FeedKind.CONTROL, owner.identity, owner.device))
        story.say(writer, *said, sees=[story.messages[start - 1], *seen])
    return story


ADMINS = ("bob", "cyd", "dan", "eve", "fay")
QUARRELS: st.SearchStrategy[Assertion] = st.one_of(
    st.builds(MemberRemove, st.sampled_from(ADMINS).map(person), CUTS),
    st.builds(MemberRemove, st.sampled_from(ADMINS).map(person), CUTS),
    st.builds(RoleChange, st.sampled_from(ADMINS).map(person), ROLES, CUTS),
    st.builds(MemberAdmit, st.sampled_from([*ADMINS, "guy"]).map(person), ROLES),
    st.builds(lambda name: DeviceRevoke(person(name), device(f"{name}.d")), st.sampled_from(ADMINS)),
    st.builds(lambda name: FeedRetire(feed(name), 0), st.sampled_from(ADMINS)),
    st.builds(MemberRemove, st.just(GROUP), CUTS),
    st.just(Profile("p")),
)


@st.composite
def quarrels(draw: st.DrawFn) -> Story:
    """Five admins of any seniority who remove, demote and admit each other, mostly without seeing each other."""
    story = Story()
    order = draw(st.permutations(ADMINS))
    direct = draw(st.integers(3, len(order)))
    for name in order[:direct]:
        story.say("ann", *story.join(name, Role.ADMIN))
    others = [said for name in order[direct:] for said in story.join(name, Role.ADMIN)[1:]]
    members = tuple(sorted(map(person, order[2:])))
    base = story.say("ann", GroupAdmit(GROUP, "g", Role.ADMIN, members), *others)
    for _ in range(draw(st.integers(2, 9))):
        told = [message for message in story.messages if message.feed != base.feed]
        seen = draw(st.lists(st.sampled_from(told), max_size=2)) if told and draw(st.booleans()) else []
        said = draw(st.lists(QUARRELS, min_size=1, max_size=2))
        story.say(draw(st.sampled_from(order)), *said, sees=[base, *seen])
    return story


@given(st.one_of(quarrels(), stories()), st.randoms(use_true_random=False))
def test_any_party_is_a_function_of_the_set_of_its_messages(story: Story, chance: random.Random) -> None:
    machine = story.machine(sorted(story.messages, key=lambda message: (message.depth, message.feed, message.seq)))
    expected = facts(machine)
    against_reference(machine, story.messages)
    for eager in (0.0, 0.5, 1.0):
        shuffled = PartyMachine(PARTY)
        for message in causal_shuffle(story.messages, chance):
            shuffled.receive(message)
            if chance.random() < eager:
                shuffled.admission()
        assert facts(shuffled) == expected


def causal_shuffle(messages: list[ControlMessage], chance: random.Random) -> list[ControlMessage]:
    waiting = list(messages)
    chance.shuffle(waiting)
    order: list[ControlMessage] = []
    reached: dict[bytes, int] = {}
    while waiting:
        for message in waiting:
            if all(reached.get(known, -1) >= last for known, last in message.clock.items()):
                waiting.remove(message)
                order.append(message)
                reached[message.feed] = max(message.seq, reached.get(message.feed, -1))
                break
        else:
            raise AssertionError("a story is causally closed")
    return order
