"""The control state: what a PartyMachine needs to go on from a cut through the control feeds.

    control feeds   a a a a a a a a │ a a          kept     every credential about membership that counts or could,
                    b b b b b b b   │ b                     the newest epoch with a quorum and what is said of it
                    ─ left out ──── ┴ ─ tail ─     left out older epochs, their attests and disputes; what can never count

    machine(all)  ==  machine(state at the cut) + tail

A value that depends on the set of messages below the cut alone: equal on all peers, whatever came first, also on one
that itself went on from an earlier state. It has three parts:

    messages   kept credentials at their places, with clocks: they are judged again, so nobody's verdict is believed
    feeds      per control feed its length, and from which message on it knew which kept message of another feed.
               So what comes later and depends on a message that is gone still sees what that one saw
    chains     where the chain of epochs begins, and what epochs below it pinned (`pins`), as far as a kept removal,
               change of role, retirement or fork asks for it

It grows with people, devices and removals, and not with epochs. `compaction` makes it.

What comes late (`is_late`) says something about what was left out: a removal that does not see the whole cut, a vote on
an epoch below the chain's beginning, a fork inside the cut. Who still has all messages goes through them again; who has
not lets the state stand: what is contained in it counts for good, and the late one counts from the cut on.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from echostore.kernel.ids import FeedId, FeedKey, PartyKey, feed_id
from echostore.kernel.party.credentials import (
    ControlMessage,
    DeviceRevoke,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    FeedRetire,
    ForkEvidence,
    MemberRemove,
    RoleChange,
)
from echostore.kernel.party.pins import PinnedEpoch

LOWERING: Final = (MemberRemove, RoleChange, DeviceRevoke, FeedRetire)
"""What may void what others said without seeing it."""

EXACT: Final = (*LOWERING, EpochGenesis)
"""Credentials whose bounds are their clocks: these are kept as they are."""


class Step(NamedTuple):
    """From message `seq` of a feed on, its writer had seen `feed` up to the message `last`."""

    seq: int
    feed: FeedId
    last: int


@dataclass(frozen=True, slots=True)
class ControlFeed:
    """One control feed below the cut: how long it is there, and what its messages had seen of the others."""

    key: FeedKey
    length: int
    steps: tuple[Step, ...]

    def clock(self, seq: int) -> dict[FeedId, int]:
        """What message `seq` had seen of kept messages and of the cut's ends."""
        end = bisect_right(self.steps, seq, key=lambda step: step.seq)
        return {step.feed: step.last for step in self.steps[:end]}


@dataclass(frozen=True, slots=True)
class ChainStart:
    """Where the chain of epochs of a party, or of a child party, begins: with an epoch that a quorum attested."""

    child: PartyKey | None
    number: int
    epoch: bytes
    rivals: tuple[bytes, ...]
    """Hashes of others with its number and predecessor, ascending."""
    pins: tuple[PinnedEpoch, ...]
    """What kept credentials ask for of it and of epochs below it; the last one is its own."""


@dataclass(frozen=True, slots=True)
class ControlState:
    """A party's control feeds below a cut. Every sequence is in canonical order."""

    party: PartyKey
    feeds: tuple[ControlFeed, ...]
    messages: tuple[ControlMessage, ...]
    chains: tuple[ChainStart, ...]

    @property
    def lengths(self) -> dict[FeedKey, int]:
        return {feed.key: feed.length for feed in self.feeds}


def is_late(state: ControlState, message: ControlMessage, geneses: Collection[bytes]) -> bool:
    """Whether a message above the cut speaks of what was left out. `geneses` are the epochs known so far."""
    return any(
        _speaks_of_the_past(state, message, credential.claim.assertion, geneses)
        for credential in message.credentials
        if credential.claim is not None and credential.fault is None
    )


def _speaks_of_the_past(state: ControlState, message: ControlMessage, said: object, geneses: Collection[bytes]) -> bool:
    if isinstance(said, ForkEvidence):
        return any(feed.key == said.proof.feed and said.proof.seq < feed.length for feed in state.feeds)
    if isinstance(said, EpochAttest | EpochDispute):
        newest = max((chain.number for chain in state.chains), default=0)
        return said.genesis not in geneses and said.number <= newest
    if isinstance(said, EpochGenesis):
        begun = {chain.child: chain.number for chain in state.chains}
        if said.number <= begun.get(said.child, 0):
            return True
    return isinstance(said, EXACT) and not _sees_whole_cut(state, message.feed, message.clock)


def _sees_whole_cut(state: ControlState, own: FeedId, clock: Mapping[FeedId, int]) -> bool:
    return all(feed_id(feed.key) == own or clock.get(feed_id(feed.key), -1) >= feed.length - 1 for feed in state.feeds)
