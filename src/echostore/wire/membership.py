"""Membership as bytes: what the state root's `membership_root` addresses.

A function of the set of credentials: every list is ascending by its key, and nothing is in it that depends on the
order of arrival. With it, control feeds can be truncated below an epoch like data feeds. That of a few thousand members is
more than one blob, and stands in chunks as control states do (`control_blobs`).
"""

from collections.abc import Callable, Iterator
from typing import Final

from echostore.kernel.errors import TooLarge
from echostore.kernel.ids import KEY_BYTES, Cid
from echostore.kernel.party.admission import FeedAdmission, Interval
from echostore.kernel.party.machine import PartyMachine
from echostore.wire.claims import FEED_KINDS, PARTY_KINDS, encode_role
from echostore.wire.control_blobs import CONTROL_BYTES_MAX, Least, as_blobs, check_dense, chunks_named, read_blobs
from echostore.wire.generated import credential_pb2 as pb
from echostore.wire.snapshot import canonical_message

_LEAST: Final[Least] = {field: (2 + KEY_BYTES, {}) for field in (3, 4, 5, 8)}
"""Feeds, members, devices and child parties each have a key."""


def membership_state(machine: PartyMachine) -> bytes:
    """The canonical encoding of members, devices, groups, feeds with intervals, policy and child parties."""
    genesis = machine.genesis
    state = pb.MembershipState(
        party=machine.party,
        kind=PARTY_KINDS[genesis.kind] if genesis is not None else pb.PARTY_ORDINARY,
        feeds=[_feed(admitted) for admitted in machine.feeds],
        members=[
            pb.MemberState(
                identity=member.identity,
                role=encode_role(member.role),
                direct=encode_role(member.direct),
                name=member.name,
            )
            for member in machine.members
        ],
        devices=[
            pb.DeviceState(identity=device.identity, device=device.device, revoked=device.revoked)
            for device in machine.devices
        ],
        groups=[
            pb.GroupState(group=group.group, name=group.name, role=encode_role(group.role), members=group.members)
            for group in machine.groups
        ],
        policy=[pb.PolicyEntry(key=key, value=value) for key, value in sorted(machine.policy.items())],
        children=[pb.ChildState(child=child, title=title) for child, title in machine.children],
    )
    return state.SerializeToString(deterministic=True)


def membership_blobs(state: bytes) -> dict[Cid, bytes]:
    """The blobs of an encoded membership; the one that the state root names comes first."""
    if len(state) > CONTROL_BYTES_MAX:
        raise TooLarge(f"the membership of the party has {len(state)} bytes, more than a snapshot may hold")
    return as_blobs(state)


def membership_names(root: Cid, get: Callable[[Cid], bytes]) -> Iterator[Cid]:
    """The CIDs of all blobs of a membership, the one that the state root names first."""
    yield root
    yield from chunks_named(root, get(root))


def read_membership(root: Cid, get: Callable[[Cid], bytes]) -> pb.MembershipState:
    """The membership that a state root names."""
    data = read_blobs(root, get)
    check_dense(data, _LEAST, "a membership")
    return canonical_message(pb.MembershipState, data, "a membership")


def _feed(admitted: FeedAdmission) -> pb.AdmittedFeed:
    return pb.AdmittedFeed(
        feed=admitted.feed,
        kind=FEED_KINDS[admitted.kind],
        identity=admitted.identity,
        device=admitted.device,
        child=admitted.child or b"",
        intervals=[_interval(interval) for interval in admitted.intervals],
    )


def _interval(interval: Interval) -> pb.AdmittedInterval:
    start, end, role = interval
    return pb.AdmittedInterval(start=start, end=end or 0, open=end is None, role=encode_role(role))
