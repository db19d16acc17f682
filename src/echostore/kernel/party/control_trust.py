"""Whether a control state may be believed by who has nothing else: an epoch names it, and enough members stand for that.

    state at the cut of epoch N   ◄── named by ──  genesis of N, signed by a declarer
                                                     ▲ attested by members, as of that very state

The machine judges the genesis and the attests as if they were the first messages after the cut. So a state that leaves
something out, or says more than was said, is believed only if as many lied as a newcomer's trust rests on anyway.
"""

from collections.abc import Sequence
from typing import Final

from echostore.kernel.ids import FeedId, IdentityKey, feed_id
from echostore.kernel.party.control_state import ControlState
from echostore.kernel.party.credentials import (
    Assertion,
    ControlMessage,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    VerifiedCredential,
)
from echostore.kernel.party.epoch_chain import Epoch, enough_to_join
from echostore.kernel.party.machine import PartyMachine

_EPOCHS: Final = (EpochGenesis, EpochAttest, EpochDispute)


def confirmed(state: ControlState, name: bytes, said: Sequence[ControlMessage]) -> Epoch | str:
    """The epoch that stands for a state of this name; or why none of those told does.

    `said` begins with the genesis; each message has one credential. What their clocks say is not looked at.
    """
    if not said:
        return "nobody stands for it"
    genesis = _assertion(said[0])
    if not isinstance(genesis, EpochGenesis) or genesis.control != name or genesis.child is not None:
        return "the epoch told names another control state"
    lengths = {entry.feed: entry.seq + 1 for entry in genesis.control_timeframe}
    if lengths != state.lengths:
        return "the epoch told ends elsewhere than the state"
    machine = PartyMachine(state.party, state)
    if machine.genesis is None:
        return "it does not begin with the party's genesis"
    clock = {feed_id(key): length - 1 for key, length in lengths.items()}
    told: set[object] = set()
    for message in said:
        if message is not said[0] and not isinstance(_assertion(message), EpochAttest):
            return "more is told than who attests the epoch"
        if message.seq < lengths.get(message.feed_key, 0):
            return "what is told of the epoch stands inside the state"
        once = {_issuer(message), (message.feed_key, message.seq)}
        if once & told:
            return "somebody is told twice, or a place"
        told |= once
        machine.receive(_above(message, clock))
        if (
            message is said[0]
        ):  # one clock for all who attest: a copy for each would grow with the square of the members
            clock = {**clock, message.feed: message.seq}
    hash = said[0].credentials[0].hash
    epoch = next((each for each in machine.epoch_tally().chain if each.hash == hash), None)
    if epoch is None:
        return "the epoch told is not one of the party"
    devices = machine.member_devices
    if not epoch.final and not enough_to_join(epoch, machine.epoch_policy, devices):
        return f"{len(epoch.attested_by)} stand for epoch {epoch.number}, too few to believe it"
    return epoch


def left_out(state: ControlState, machine: PartyMachine) -> VerifiedCredential | None:
    """What counts here, lies inside a state's cut and is not in it; None when there is nothing such.

    A true state keeps all that counts or could, but for epochs and what is said of them (`compaction`): who leaves out an
    admission wants fewer to be asked, and who leaves out a removal wants somebody back.
    """
    kept = {credential.hash for message in state.messages for credential in message.credentials}
    refused = {(each.feed, each.seq, each.position) for each in machine.rejected}
    lengths = state.lengths
    for event in machine.events:
        if event.claim is None or isinstance(event.claim.assertion, _EPOCHS) or event.hash in kept:
            continue
        if event.seq < lengths.get(event.feed_key, 0) and (event.feed, event.seq, event.position) not in refused:
            return event.credential
    return None


def _assertion(message: ControlMessage) -> Assertion | None:
    claim = message.credentials[0].claim
    return claim.assertion if claim is not None else None


def _issuer(message: ControlMessage) -> IdentityKey | None:
    claim = message.credentials[0].claim
    return claim.issuer if claim is not None else None


def _above(message: ControlMessage, clock: dict[FeedId, int]) -> ControlMessage:
    """A message told, as one that has seen the cut, and the genesis if it attests that."""
    return ControlMessage(message.feed, message.feed_key, message.seq, message.depth, clock, message.credentials)
