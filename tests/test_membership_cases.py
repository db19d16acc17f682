"""Membership under conflict, with real peers, signatures and stores: who belongs in the end, and what `party why` says.

Each case parts the peers, lets them act without knowing of each other, and brings them together. Then
 - all peers agree, whoever met whom first;
 - a machine that gets the same signed messages in every causal order says the same, and so does the naive reference;
 - `party why KEY` prints the chain with a verdict for each link.
"""

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from cli_process import Cli
from echostore.kernel.errors import Refused
from echostore.kernel.ids import DeviceKey, IdentityKey, PartyKey
from echostore.kernel.party.credentials import Claim, ControlMessage, DeviceAdmit, MemberAdmit, Profile, Role
from echostore.kernel.party.machine import PartyMachine
from echostore.peer.identity import Welcome
from echostore.peer.party import Party
from echostore.testing.inmemory import link
from echostore.wire.credentials import sign_credential
from echostore.wire.signing import SigningKey
from party_story import linearisations
from peer_builder import Circle
from reference.party_machine import Reference

Link = tuple[str, str, str | None]
"""A step of the chain: act, who said it, and why it does not count."""

BLOCKS = 12
ORDERS_MAX = 3_000
"""More causal orders than any case here has; one that had more would not be small."""


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Circle]:
    """Ann the owner, Bob and Cyd her admins in this order of seniority, Dan an editor. They know all of each other."""
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    roles = {"bob": "admin", "cyd": "admin", "dan": "editor"}
    with Circle(tmp_path, "ann", "bob", "cyd", "dan", roles=roles) as made:
        yield made


def messages(party: Party) -> list[ControlMessage]:
    """The control messages that a peer holds, as its machine got them."""
    verdicts = party.runtime.processor.membership.machine._verdicts
    return [message for kept in verdicts._messages.values() for message in kept]


def facts(machine: PartyMachine) -> tuple[object, ...]:
    return machine.admission().digest, machine.rejected, machine.members, machine.devices, machine.feeds


def settled(circle: Circle) -> PartyMachine:
    """All have met and agree, in whatever order the messages come, and with the reference."""
    circle.agree()
    party = circle.party("ann")
    told = messages(party)
    machine = party.runtime.processor.membership.machine
    expected = facts(machine)
    keys = {key for member in machine.members for key in (bytes(member.identity), *map(_device, member.devices))}
    chains = {key: machine.why(key) for key in keys}
    count = 0
    for order in linearisations(told):
        count += 1
        assert count <= ORDERS_MAX, "too many orders for a small case"
        other = PartyMachine(PartyKey(circle.key))
        for message in order:
            other.receive(message)
            other.admission()  # settles after each, so that no arrival hides behind a later one
        assert facts(other) == expected
        assert {key: other.why(key) for key in keys} == chains
    assert count > 1, "nothing was concurrent"
    reference = Reference(PartyKey(circle.key), told)
    feeds = {message.feed: message.feed_key for message in told}
    assert {(feeds[each.feed], each.seq, each.position) for each in machine.rejected} == reference.rejected()
    assert {member.identity: member.role for member in machine.members} == reference.members()
    roles = {each.feed: (each.child, [each.role_at(seq) for seq in range(BLOCKS)]) for each in machine.feeds}
    assert roles == reference.feeds(BLOCKS)
    return machine


def _device(device: object) -> bytes:
    return bytes(device.device)  # type: ignore[attr-defined]  # of the roster


def role(machine: PartyMachine, circle: Circle, name: str) -> str | None:
    found = [each.role for each in machine.members if each.identity == circle.peers[name].identity]
    return found[0].label if found and found[0] is not None else None


def chain(circle: Circle, key: bytes, home: str = "ann") -> list[Link]:
    """What `party why KEY` prints on a peer's home."""
    names = {circle.peers[name].identity.hex(): name for name in circle.names}
    cli = Cli(circle.folder / home, circle.folder / "state")
    steps = cli("party", "why", key.hex(), "--json").ok().json()["steps"]
    shown = cli("party", "why", key.hex()).ok().out
    for step in steps:
        assert step["valid"] == (step["reason"] is None)
        assert (step["because"].startswith("valid because")) == step["valid"]
        assert step["because"] in shown, "the verdict of each link is printed"
    return [(step["act"], names.get(step["issuer"], "?"), step["reason"]) for step in steps]


def admit(circle: Circle, by: str, who: bytes, role: Role) -> None:
    circle.party(by).members.issue_claim(MemberAdmit(IdentityKey(who), role, "new"))


def identity(circle: Circle, name: str) -> bytes:
    return bytes(circle.peers[name].identity)


STRANGER = bytes(SigningKey(bytes(range(32))).public)
ROOT: list[Link] = [("PartyGenesis", "ann", None)]


# two at once


def test_two_admins_act_at_once(circle: Circle) -> None:
    admit(circle, "bob", STRANGER, Role.EDITOR)
    admit(circle, "cyd", STRANGER, Role.READER)
    machine = settled(circle)
    (found,) = [member.role for member in machine.members if member.identity == STRANGER]
    assert found is Role.EDITOR, "bob is senior"
    assert machine.rejected == ()
    steps = chain(circle, STRANGER)
    assert sorted(steps[:2]) == [("MemberAdmit", "bob", None), ("MemberAdmit", "cyd", None)]
    assert steps[-1:] == ROOT


def test_two_admins_change_one_role_at_once(circle: Circle) -> None:
    circle.party("cyd").members.change_role(identity(circle, "dan"), "admin")
    circle.party("bob").members.change_role(identity(circle, "dan"), "reader")
    machine = settled(circle)
    assert role(machine, circle, "dan") == "reader"
    steps = chain(circle, identity(circle, "dan"))
    assert [step for step in steps if step[0] == "RoleChange" and step[2] is None], "both are valid; bob's rules"


def test_a_demoted_admin_acts_concurrently(circle: Circle) -> None:
    circle.party("ann").members.change_role(identity(circle, "bob"), "editor")
    admit(circle, "bob", STRANGER, Role.EDITOR)
    machine = settled(circle)
    assert role(machine, circle, "bob") == "editor"
    assert STRANGER not in {bytes(member.identity) for member in machine.members}
    assert chain(circle, STRANGER) == [("MemberAdmit", "bob", "not-authorised")]
    assert chain(circle, identity(circle, "bob"))[:1] == [("MemberAdmit", "ann", None)]
    with pytest.raises(Refused):
        admit(circle, "bob", STRANGER, Role.EDITOR)


def test_what_an_admin_did_before_it_heard_of_its_demotion_stands_if_it_was_heard_first(circle: Circle) -> None:
    admit(circle, "bob", STRANGER, Role.EDITOR)
    circle.meet("ann", "bob")
    circle.party("ann").members.change_role(identity(circle, "bob"), "editor")
    circle.party("cyd").members.set_profile("Cyd")
    settled(circle)
    assert chain(circle, STRANGER)[0] == ("MemberAdmit", "bob", None)


def test_an_owner_and_an_admin_disagree(circle: Circle) -> None:
    dan = circle.party("dan")
    dan.create(type="task", title="seen by bob")
    circle.meet("dan", "bob")
    circle.party("bob").members.remove(identity(circle, "dan"))
    circle.party("ann").members.change_role(identity(circle, "dan"), "admin")
    dan.create(type="task", title="seen by nobody")
    machine = settled(circle)
    assert role(machine, circle, "dan") is None, "a removal is not undone by what is concurrent with it"
    steps = chain(circle, identity(circle, "dan"))
    assert ("MemberRemove", "bob", None) in steps
    assert ("RoleChange", "ann", None) in steps, "valid, and without effect"
    titles = {item["title"] for item in circle.party("ann").query(type="task").all()}
    assert titles <= {"seen by bob"}, "bob's cut holds"


def test_two_remove_the_same_member_and_the_lesser_cut_holds(circle: Circle) -> None:
    dan = circle.party("dan")
    dan.create(type="task", title="first")
    circle.meet("dan", "bob")
    dan.create(type="task", title="second")
    circle.meet("dan", "cyd")
    for by in ("bob", "cyd"):
        circle.party(by).members.remove(identity(circle, "dan"))
    machine = settled(circle)
    assert role(machine, circle, "dan") is None
    assert [item["title"] for item in circle.party("ann").query(type="task").all()] == ["first"]
    assert [item.reason for item in circle.party("ann").rejected()] == ["beyond-cut"]
    assert {("MemberRemove", "bob", None), ("MemberRemove", "cyd", None)} <= set(chain(circle, identity(circle, "dan")))


# mutual


def test_mutual_removal_has_one_answer(circle: Circle) -> None:
    circle.party("cyd").members.remove(identity(circle, "bob"))
    circle.party("bob").members.remove(identity(circle, "cyd"))
    machine = settled(circle)
    assert (role(machine, circle, "bob"), role(machine, circle, "cyd")) == ("admin", None), "bob is senior"
    assert ("MemberRemove", "cyd", "issuer-removed") in chain(circle, identity(circle, "bob"))
    assert ("MemberRemove", "bob", None) in chain(circle, identity(circle, "cyd"))


def test_mutual_removal_of_three_in_a_circle(circle: Circle) -> None:
    circle.party("ann").members.change_role(identity(circle, "dan"), "admin")
    circle.meet_all()
    for by, whom in (("bob", "cyd"), ("cyd", "dan"), ("dan", "bob")):
        circle.party(by).members.remove(identity(circle, whom))
    machine = settled(circle)
    # Bob's is decided first and voids Cyd's; then Dan's is decided and removes Bob.
    assert [role(machine, circle, name) for name in ("bob", "cyd", "dan")] == [None, None, "admin"]
    assert ("MemberRemove", "cyd", "issuer-removed") in chain(circle, identity(circle, "dan"))
    assert ("MemberRemove", "dan", None) in chain(circle, identity(circle, "bob"))


def test_mutual_demotion_has_one_answer(circle: Circle) -> None:
    circle.party("cyd").members.change_role(identity(circle, "bob"), "reader")
    circle.party("bob").members.change_role(identity(circle, "cyd"), "reader")
    machine = settled(circle)
    assert (role(machine, circle, "bob"), role(machine, circle, "cyd")) == ("admin", "reader")
    assert ("RoleChange", "cyd", "not-authorised") in chain(circle, identity(circle, "bob"))


def test_a_removed_admins_guest_falls_with_it_only_if_admitted_concurrently(circle: Circle) -> None:
    admit(circle, "cyd", STRANGER, Role.EDITOR)
    circle.party("ann").members.remove(identity(circle, "cyd"))
    machine = settled(circle)
    assert STRANGER not in {bytes(member.identity) for member in machine.members}
    assert chain(circle, STRANGER) == [("MemberAdmit", "cyd", "issuer-removed")]


# coming back


def test_rejoin_after_removal(circle: Circle) -> None:
    dan = circle.peers["dan"]
    circle.party("dan").create(type="task", title="before")
    circle.meet_all()
    circle.party("ann").members.remove(identity(circle, "dan"))
    circle.party("dan").create(type="task", title="beyond the cut")
    circle.party("dan").flush()
    dan.forget_party(circle.key)
    dan.enter(circle.party("ann").members.admit(dan.request_join(circle.key), role="editor"))
    circle.party("cyd").members.set_profile("Cyd")  # something that is concurrent with all of this
    circle.meet_all()
    circle.party("dan").create(type="task", title="after")
    machine = settled(circle)
    assert role(machine, circle, "dan") == "editor"
    titles = {item["title"] for item in circle.party("ann").query(type="task").all()}
    assert titles == {"before", "after"}
    acts = [step[:1] + step[2:] for step in chain(circle, identity(circle, "dan"))]
    wanted = [("MemberAdmit", None), ("MemberRemove", None), ("MemberAdmit", None)]
    assert [act for act in acts if act in wanted][:3] == wanted


def test_an_admission_concurrent_with_the_removal_does_not_bring_a_member_back(circle: Circle) -> None:
    circle.party("bob").members.remove(identity(circle, "dan"))
    circle.meet("ann", "bob")
    admit(circle, "ann", identity(circle, "dan"), Role.EDITOR)  # ann has seen one removal
    circle.party("cyd").members.remove(identity(circle, "dan"))  # and not this one
    machine = settled(circle)
    assert role(machine, circle, "dan") is None
    steps = chain(circle, identity(circle, "dan"))
    assert [step[2] for step in steps if step[0] in ("MemberAdmit", "MemberRemove")] == [None] * len(
        [step for step in steps if step[0] in ("MemberAdmit", "MemberRemove")]
    ), "all are valid: the later admission belongs to an era that has ended"


# devices


def phone_of(circle: Circle, owner: str) -> DeviceKey:
    """A second device of a member, with its own peer `phone`, which knows the party and has opened no feeds yet."""
    circle.peers["phone"] = phone = circle._open("phone")
    host = circle.peers[owner]
    chain = host.myself.vouch_for(phone.myself.device, "phone")
    phone.myself.become(host.myself.identity, chain=chain)
    genesis = circle.party("ann").runtime.processor.membership.machine.genesis
    assert genesis is not None
    phone.enter_as_device(Welcome(PartyKey(circle.key), genesis.control_feed, "Trip"))
    return phone.myself.device


def say_device(circle: Circle, owner: str, device: DeviceKey) -> None:
    claim = DeviceAdmit(IdentityKey(identity(circle, owner)), device, "phone")
    circle.party(owner).members.issue_claim(claim)


def meet(circle: Circle, one: str, other: str) -> None:
    joined = link(circle.peers[one], circle.peers[other], circle.key)
    joined.pump()
    joined.cut()


def test_a_device_chain_that_holds(circle: Circle) -> None:
    device = phone_of(circle, "dan")
    say_device(circle, "dan", device)
    meet(circle, "dan", "phone")
    phone = circle.peers["phone"]
    assert phone.opener.admit_itself(circle.party("phone"))
    circle.party("phone").create(type="task", title="from the phone")
    circle.party("phone").flush()
    circle.party("bob").members.set_profile("Bob")
    meet(circle, "ann", "phone")
    settled(circle)
    assert [item["title"] for item in circle.party("bob").query(type="task").all()] == ["from the phone"]
    steps = chain(circle, bytes(device))
    assert steps[0] == ("DeviceAdmit", "dan", None)
    assert steps[-1:] == ROOT


def test_a_device_chain_that_is_broken_by_a_revocation(circle: Circle) -> None:
    """Ann revokes Dan's device while it lets in another one: that one is not in, nor is what it says."""
    device = phone_of(circle, "dan")
    circle.party("ann").members.revoke_device(identity(circle, "dan"), circle.peers["dan"].device)
    say_device(circle, "dan", device)
    meet(circle, "dan", "phone")
    phone = circle.peers["phone"]
    assert phone.opener.admit_itself(circle.party("phone")), "it does not know yet"
    meet(circle, "dan", "phone")
    circle.party("phone").create(type="task", title="from the phone")
    circle.party("phone").flush()
    circle.meet_all()
    meet(circle, "ann", "phone")
    machine = settled(circle)
    assert circle.party("bob").query(type="task").all() == []
    assert chain(circle, bytes(device)) == [("DeviceAdmit", "dan", "device-revoked")]
    assert bytes(device) not in {bytes(each.device) for each in machine.devices}
    own = circle.party("phone").runtime.control
    assert own is not None
    held = {feed.key for feed in circle.party("bob").status.feeds}
    assert own.cursor.key not in held, "a control feed that no present device admits is not stored"
    assert role(machine, circle, "dan") == "editor", "the member stays; it needs another device"


def test_device_chains_that_are_broken_or_cyclic_are_refused_by_everyone(circle: Circle) -> None:
    """Credentials with a chain that does not lead from the identity to the device that signed."""
    dan = circle.peers["dan"]
    myself, party = dan.myself, circle.party("dan")
    other = SigningKey(bytes([7]) * 32)

    def admits(signer: SigningKey, device: bytes) -> object:
        admit = DeviceAdmit(myself.identity, DeviceKey(device))
        return sign_credential(Claim(PartyKey(b""), myself.identity, DeviceKey(signer.public), admit), signer)

    good = myself.chain()
    chains = {
        "a link is missing": [admits(other, myself.device)],
        "it does not begin at the identity": [admits(myself.device_key, other.public), admits(other, myself.device)],
        "it leads elsewhere": [*good, admits(myself.device_key, other.public)],
        "it goes in a circle": [*good, admits(myself.device_key, other.public), admits(other, myself.device)],
        "it leads to itself": [*good, admits(myself.device_key, myself.device)],
        "another identity's": circle.peers["bob"].myself.chain(),
    }
    claim = Claim(PartyKey(circle.key), myself.identity, myself.device, Profile("Dan"))
    for links in chains.values():
        party.runtime.issue([sign_credential(claim, myself.device_key, links)])
    circle.party("bob").members.set_profile("Bob")
    machine = settled(circle)
    broken = [each for each in machine.rejected if each.reason == "chain-broken"]
    assert len(broken) == len(chains) == len(machine.rejected)
    assert {member.name for member in machine.members if member.identity == myself.identity} == {"dan"}


def test_devices_that_admit_each_other_in_a_circle_stay_out(circle: Circle) -> None:
    """Two devices of Dan's identity, each admitted by nothing but the other."""
    dan = circle.peers["dan"]
    party, myself = circle.party("dan"), dan.myself
    ghosts = [SigningKey(bytes([each]) * 32) for each in (5, 6)]
    for one, two in permutations(ghosts):
        admit = DeviceAdmit(myself.identity, DeviceKey(two.public))
        claim = Claim(PartyKey(circle.key), myself.identity, DeviceKey(one.public), admit)
        party.runtime.issue([sign_credential(claim, one)])
    circle.party("bob").members.set_profile("Bob")
    machine = settled(circle)
    assert [each.reason for each in machine.rejected] == ["device-unknown"] * 2
    for ghost in ghosts:
        assert chain(circle, ghost.public) == [("DeviceAdmit", "dan", "device-unknown")]
