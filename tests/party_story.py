"""Stories of a party: control messages with their clocks, told in a few words, and all the orders they may arrive in.

    story = Story()                                      # ann creates the party
    story.say("ann", *story.join("bob", Role.ADMIN))     # bob, with his device and feeds
    left = story.say("ann", remove("bob"), sees=[...])   # sees only what it names, and what those saw

Names stand for keys. A person `bob` has the identity `bob`, the device `bob.d`, the control feed `bob` and the data
feed `bob.data`; more devices and feeds are registered by hand. No signatures: these are kernel values.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from echostore.kernel.ids import DeviceKey, FeedId, FeedKey, IdentityKey, PartyKey, feed_id
from echostore.kernel.party.credentials import (
    Assertion,
    Claim,
    ControlMessage,
    DeviceAdmit,
    FeedAdmit,
    FeedBound,
    FeedKind,
    MemberAdmit,
    MemberRemove,
    PartyGenesis,
    PartyKind,
    Role,
    RoleChange,
    VerifiedCredential,
)
from echostore.kernel.party.machine import PartyMachine
from echostore.kernel.reasons import Reason


def key(kind: str, name: str) -> bytes:
    return hashlib.sha256(f"{kind}/{name}".encode()).digest()


def person(name: str) -> IdentityKey:
    return IdentityKey(key("identity", name))


def device(name: str) -> DeviceKey:
    return DeviceKey(key("device", name))


def feed(name: str) -> FeedKey:
    return FeedKey(key("feed", name))


def fid(name: str) -> FeedId:
    return feed_id(feed(name))


PARTY = PartyKey(key("party", "party"))
CHILD = PartyKey(key("party", "child"))


def bounds(**lengths: int) -> tuple[FeedBound, ...]:
    """`bob_data=3` is the feed `bob.data` before block 3."""
    return tuple(FeedBound(fid(name.replace("_", ".")), length) for name, length in sorted(lengths.items()))


def remove(name: str, **cut: int) -> MemberRemove:
    return MemberRemove(person(name), bounds(**cut))


def change(name: str, role: Role, **from_: int) -> RoleChange:
    return RoleChange(person(name), role, bounds(**from_))


@dataclass(frozen=True, slots=True)
class Writer:
    """Whose claims stand in a control feed."""

    key: FeedKey
    identity: IdentityKey
    device: DeviceKey


class Story:
    """Messages of one party in the order of telling, which is causal."""

    def __init__(self, *, creator: str = "ann", kind: PartyKind = PartyKind.ORDINARY) -> None:
        self.messages: list[ControlMessage] = []
        self.direct: dict[tuple[FeedId, int], list[ControlMessage]] = {}
        """What each message names as seen, by its place."""
        self.writers: dict[str, Writer] = {}
        local = kind is PartyKind.LOCAL
        identity = IdentityKey(device(f"{creator}.d")) if local else person(creator)
        self.writers[creator] = Writer(feed(creator), identity, device(f"{creator}.d"))
        genesis = PartyGenesis(
            PARTY, identity, device(f"{creator}.d"), feed(creator), feed(f"{creator}.data"), "title", kind
        )
        self.start = self.say(creator, genesis, device=DeviceKey(PARTY))

    def writer(self, name: str, *, identity: str | None = None, device_name: str | None = None) -> None:
        """Registers the control feed `name`; by default of the person of that name."""
        owner = identity or name
        self.writers[name] = Writer(feed(name), person(owner), device(device_name or f"{owner}.d"))

    def join(self, name: str, role: Role) -> list[Assertion]:
        """What an admin says when `name` joins."""
        self.writer(name)
        who, what = person(name), device(f"{name}.d")
        return [
            MemberAdmit(who, role, name),
            DeviceAdmit(who, what),
            FeedAdmit(feed(name), FeedKind.CONTROL, who, what),
            FeedAdmit(feed(f"{name}.data"), FeedKind.DATA, who, what),
        ]

    def say(
        self,
        name: str,
        *assertions: Assertion,
        sees: Iterable[ControlMessage] | None = None,
        issuer: IdentityKey | None = None,
        device: DeviceKey | None = None,
        seq: int | None = None,
        fault: Reason | None = None,
        party: PartyKey = PARTY,
    ) -> ControlMessage:
        """A message in the feed `name`. It sees its predecessor, and what `sees` names; by default all told so far."""
        writer = self.writers[name]
        own = [message for message in self.messages if message.feed_key == writer.key]
        direct = list(self.messages if sees is None else sees)
        if own and seq is None:
            direct.append(own[-1])
        clock: dict[FeedId, int] = {}
        for message in direct:
            for known, last in [*message.clock.items(), (message.feed, message.seq)]:
                clock[known] = max(clock.get(known, -1), last)
        at = len(own) if seq is None else seq
        if seq is not None:
            clock[feed_id(writer.key)] = seq - 1
        credentials = []
        for position, said in enumerate(assertions):
            claim = Claim(party, issuer or writer.identity, device or writer.device, said)
            place = f"{name}/{at}/{position}/{said}/{sorted(clock.items())}"
            credentials.append(VerifiedCredential(claim, hashlib.sha256(place.encode()).digest(), fault))
        depth = 1 + max((message.depth for message in direct), default=0)
        told = ControlMessage(feed_id(writer.key), writer.key, at, depth, clock, tuple(credentials))
        self.direct[told.feed, told.seq] = direct
        self.messages.append(told)
        return told

    def machine(self, order: Sequence[ControlMessage] | None = None) -> PartyMachine:
        machine = PartyMachine(PARTY)
        for message in self.messages if order is None else order:
            machine.receive(message)
        return machine


def sees(later: ControlMessage, earlier: ControlMessage) -> bool:
    return earlier is not later and earlier.seq <= later.clock.get(earlier.feed, -1)


def linearisations(messages: Sequence[ControlMessage]) -> Iterator[list[ControlMessage]]:
    """Every order in which causes come before effects."""
    if not messages:
        yield []
    for index, message in enumerate(messages):
        rest = [*messages[:index], *messages[index + 1 :]]
        if not any(sees(message, other) for other in rest):
            for order in linearisations(rest):
                yield [message, *order]


def verdict(machine: PartyMachine, message: ControlMessage, position: int = 0) -> Reason | None:
    """Why the credential does not count, or None."""
    for rejection in machine.rejected:
        if (rejection.feed, rejection.seq, rejection.position) == (message.feed, message.seq, position):
            return rejection.reason
    return None


def role_of(machine: PartyMachine, name: str) -> Role | None:
    return next((member.role for member in machine.members if member.identity == person(name)), None)
