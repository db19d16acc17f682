"""Whether the first block of a control feed can open it: a device of a present member admits the feed in it.

Asked before a block of a feed that nobody admitted is stored, so that only keys of members can make the store grow. What
counts in the end, `kernel.party.authority` decides.
"""

from typing import TYPE_CHECKING, Final

from echostore.kernel.ids import FeedKey, PartyKey
from echostore.kernel.order import CONTROL
from echostore.kernel.party.credentials import DeviceAdmit, FeedAdmit
from echostore.kernel.reasons import Reason
from echostore.wire.credentials import verify_credentials
from echostore.wire.messages import decode_envelope

if TYPE_CHECKING:
    from echostore.kernel.party.machine import PartyMachine

CREDENTIALS_MAX: Final = 16
"""A device opens its feeds with three at the most, and each costs a signature."""


def opens_itself(party: PartyKey, machine: "PartyMachine", feed: FeedKey, payload: bytes) -> bool:
    """Whether this block, as the first of a control feed, may admit the feed."""
    envelope = decode_envelope(payload, CONTROL)
    if isinstance(envelope, Reason) or not 0 < len(envelope.body.credentials) <= CREDENTIALS_MAX:
        return False
    checked = verify_credentials(envelope.body.credentials, party)
    claims = [each.claim for each in checked if each.claim is not None and each.fault is None]
    members = {member.identity for member in machine.members if member.role is not None}
    devices = {(each.identity, each.device) for each in machine.devices if not each.revoked}
    revoked = {(each.identity, each.device) for each in machine.devices if each.revoked}
    for claim in claims:
        said = claim.assertion
        by_root = bytes(claim.device) == bytes(claim.issuer)
        if isinstance(said, DeviceAdmit) and said.identity == claim.issuer:
            admitted = (said.identity, said.device)
            if admitted not in revoked and (by_root or (claim.issuer, claim.device) in devices):
                devices.add(admitted)
    return any(
        isinstance(claim.assertion, FeedAdmit)
        and claim.assertion.feed == feed
        and claim.issuer in members
        and (claim.issuer, claim.device) in devices
        for claim in claims
    )
