"""Authority: whether the issuer of a credential may say what it says, given the valid credentials in its past.

`judge` looks only at events that the judged one sees, so its answer never depends on the order of arrival. What
depends on events elsewhere (concurrent removals, colliding feeds, the limit of feeds) is decided by `verdicts`.

Three questions, in this order:

    1. the carrier   does the control feed it stands in count here? It was admitted in the past, or this very
                     message opens it (a FeedAdmit by the feed's own admitted device, in block 0)
    2. the actor     is the device that signed the carrier's own, and unrevoked? A credential is valid only in a feed
                     of the device that signed it, so nobody can replay another's credential at a later time.
                     The identity key itself may sign as the root of its device chain, for devices alone
    3. the assertion may a member of this role say it of this subject?

Where the design is silent: a member may leave (remove itself); the creator's devices are revoked by the creator alone,
other owners' by owners; a removal needs a present member; a member admitted twice in one past is a duplicate.
"""

from typing import NamedTuple, assert_never

from echostore.kernel.ids import DeviceKey, IdentityKey, feed_id
from echostore.kernel.party.credentials import (
    AdoptLocal,
    CapabilityRevoke,
    ChildParty,
    Claim,
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
from echostore.kernel.party.epoch_policy import ADMINS, ELECT, EPOCH_BOTS, EPOCH_DECLARERS, declarers_of
from echostore.kernel.party.ledger import Event, Ledger, group_of
from echostore.kernel.reasons import Reason


class Refusal(NamedTuple):
    """Why a credential does not count."""

    reason: Reason
    detail: str


def judge(ledger: Ledger, event: Event) -> Refusal | None:
    """None when the credential's issuer had the authority for it. Genesis and fork evidence are not judged here."""
    claim = event.claim
    assert claim is not None, f"{event} has no claim to judge"
    carrier = _carrier(ledger, event)
    if isinstance(carrier, Refusal):
        if not _opens_feed(event, claim):
            return carrier
    elif claim.issuer == carrier.identity and (claim.device == carrier.device or _signed_by_root(claim)):
        return _judge_assertion(ledger, event, claim, carrier.role)
    elif claim.device != carrier.device:
        return Refusal(Reason.DEVICE_UNKNOWN, "signed by another device than the feed's own")
    # The first block of a feed, or a local party's feed whose device now acts for the identity that adopted it.
    role = ledger.role(claim.issuer, event)
    if role is None:
        return _why_no_member(ledger, event, claim.issuer)
    if not _signed_by_root(claim):
        state = ledger.device_state(claim.issuer, claim.device, event)
        if state is not None:
            return Refusal(state, "the signing device")
    return _judge_assertion(ledger, event, claim, role)


class _Carrier(NamedTuple):
    """Whose control feed an event stands in, and the role in which that feed speaks there."""

    identity: IdentityKey
    device: DeviceKey
    role: Role


def _carrier(ledger: Ledger, event: Event) -> _Carrier | Refusal:
    refusal = Refusal(Reason.UNADMITTED, "its control feed is not admitted in its past")
    best: _Carrier | None = None
    for entry in ledger.admissions_of(event.feed_key, event):
        admit = entry.admit
        if admit.kind is not FeedKind.CONTROL:
            refusal = Refusal(Reason.WRONG_KIND, "admitted as a data feed")
        elif any(event.sees(retire) for retire in ledger.retires.get(event.feed_key, ())):
            return Refusal(Reason.RETIRED, "its control feed was retired before")
        elif (state := ledger.device_state(admit.identity, admit.device, event)) is not None:
            refusal = Refusal(state, "the feed's device")
        elif (role := ledger.role(admit.identity, event, entry.event)) is None:
            refusal = Refusal(Reason.ISSUER_REMOVED, "the feed's member was removed before")
        elif best is None or role > best.role:
            # Concurrent admissions of a feed are equal but for their eras; the better one counts.
            best = _Carrier(admit.identity, admit.device, role)
    return best or refusal


def _opens_feed(event: Event, claim: Claim) -> bool:
    """Whether `event` may stand in the first block of a control feed that nobody has admitted yet."""
    if event.seq != 0:
        return False
    said = claim.assertion
    if isinstance(said, FeedAdmit):
        own = said.identity == claim.issuer and said.device == claim.device
        return own and said.kind is FeedKind.CONTROL and said.feed == event.feed_key
    # A recovered identity admits its new device by the identity key, just before the feed of that device.
    return isinstance(said, DeviceAdmit) and _signed_by_root(claim)


def _signed_by_root(claim: Claim) -> bool:
    """Whether the identity key itself signed, which it may for devices alone."""
    return bytes(claim.device) == bytes(claim.issuer) and isinstance(claim.assertion, DeviceAdmit | DeviceRevoke)


def _why_no_member(ledger: Ledger, event: Event, identity: IdentityKey) -> Refusal:
    admitted = [*ledger.admits.get(identity, ()), *ledger.listed.get(identity, ())]
    if any(event.sees(admission) for admission in admitted):
        return Refusal(Reason.ISSUER_REMOVED, "its issuer was removed before")
    return Refusal(Reason.ISSUER_UNKNOWN, "its issuer is no member in its past")


def _judge_assertion(ledger: Ledger, event: Event, claim: Claim, role: Role) -> Refusal | None:
    said = claim.assertion
    match said:
        case EpochAttest() | EpochDispute() | Profile():
            return None
        case MemberAdmit() | GroupAdmit():
            return _judge_admit(ledger, event, claim, said, role)
        case RoleChange() | MemberRemove():
            return _judge_change(ledger, event, claim, said, role)
        case DeviceAdmit():
            return _judge_device_admit(ledger, event, claim, said, role)
        case DeviceRevoke():
            return _judge_device_revoke(ledger, event, claim, said, role)
        case FeedAdmit():
            return _judge_feed_admit(ledger, event, claim, said, role)
        case FeedRetire():
            entry = next(ledger.admissions_of(said.feed, event), None)
            if entry is None:
                return Refusal(Reason.SUBJECT_UNKNOWN, "no such feed in its past")
            return None if entry.admit.identity == claim.issuer else _need(role, Role.ADMIN)
        case Invitation():
            return _need(role, max(Role.ADMIN, said.role))
        case InvitationCancel():
            return _judge_cancel(ledger, event, claim, said, role)
        case ChildParty():
            if any(event.sees(other) for other in ledger.children.get(said.child, ())):
                return Refusal(Reason.DUPLICATE, "a child party of this key exists")
            return _need(role, Role.EDITOR)
        case AdoptLocal():
            return _judge_adoption(ledger, event, claim, said)
        case EpochGenesis():
            return _judge_epoch(ledger, event, claim, said, role)
        case ModelPublish():
            if any(event.sees(other) for other in ledger.models.get((said.name, said.version), ())):
                return Refusal(Reason.DUPLICATE, "this version of the model is published")
            return _need(role, Role.ADMIN)
        case Policy():
            return _need(role, Role.ADMIN)
        case CapabilityRevoke():
            return None if _issued_by(ledger, event, claim.issuer, said.issuer) else _need(role, Role.ADMIN)
        case PartyGenesis() | ForkEvidence():
            raise AssertionError(f"{event} is judged by the verdicts")
        case _:
            assert_never(said)


def _need(role: Role, needed: Role) -> Refusal | None:
    if role >= needed:
        return None
    return Refusal(Reason.NOT_AUTHORISED, f"needs {needed.label}, its issuer is {role.label}")


def _judge_admit(
    ledger: Ledger, event: Event, claim: Claim, said: MemberAdmit | GroupAdmit, role: Role
) -> Refusal | None:
    subject = said.member if isinstance(said, MemberAdmit) else said.group
    named = {said.member} if isinstance(said, MemberAdmit) else set(said.members)
    if claim.issuer in named and not _protected(ledger, event, claim.issuer):
        # A second admission would outlive the loss of the first one.
        return Refusal(Reason.SELF_CHANGE, "nobody admits themselves")
    refusal = _need(role, max(Role.ADMIN, said.role))
    if refusal is None and ledger.subject_role(subject, event) is not None:
        return Refusal(Reason.DUPLICATE, "already admitted; a role change is needed")
    return refusal


def _judge_change(
    ledger: Ledger, event: Event, claim: Claim, said: RoleChange | MemberRemove, role: Role
) -> Refusal | None:
    if _protected(ledger, event, said.member):
        return Refusal(Reason.CREATOR_PROTECTED, "the creator stays an owner")
    leaving = isinstance(said, MemberRemove) and said.member == claim.issuer
    if isinstance(said, RoleChange) and _is_or_contains(ledger, event, said.member, claim.issuer):
        return Refusal(Reason.SELF_CHANGE, "nobody changes their own role")
    # An identity may be in through groups alone; removing it bars it from those too.
    present = ledger.subject_role(said.member, event)
    if isinstance(said, MemberRemove):
        present = max((found for found in (present, ledger.role(said.member, event)) if found), default=None)
    if present is None:
        return Refusal(Reason.SUBJECT_UNKNOWN, "no such member in its past")
    if leaving:
        return None
    granted = said.role if isinstance(said, RoleChange) else Role.READER
    touched = Role.OWNER if present is Role.OWNER or granted is Role.OWNER else Role.ADMIN
    return _need(role, touched)


def _protected(ledger: Ledger, event: Event, member: IdentityKey) -> bool:
    """The creator, and the identity that adopted a local party."""
    if member == ledger.creator:
        return True
    admits = (admit for admit in ledger.admits.get(member, ()) if event.sees(admit))
    return any(admit.claim is not None and isinstance(admit.claim.assertion, AdoptLocal) for admit in admits)


def _is_or_contains(ledger: Ledger, event: Event, subject: IdentityKey, identity: IdentityKey) -> bool:
    if subject == identity:
        return True
    return any(group_of(admit) == subject and event.sees(admit) for admit in ledger.listed.get(identity, ()))


def _judge_device_admit(ledger: Ledger, event: Event, claim: Claim, said: DeviceAdmit, role: Role) -> Refusal | None:
    state = ledger.device_state(said.identity, said.device, event)
    if state is None:
        return Refusal(Reason.DUPLICATE, "this device is admitted")
    if state is Reason.DEVICE_REVOKED:
        return Refusal(state, "a revoked device stays revoked")
    if said.identity == claim.issuer:
        return None
    if ledger.role(said.identity, event) is None:
        return Refusal(Reason.SUBJECT_UNKNOWN, "the device's identity is no member in its past")
    return _need(role, Role.ADMIN)


def _judge_device_revoke(ledger: Ledger, event: Event, claim: Claim, said: DeviceRevoke, role: Role) -> Refusal | None:
    state = ledger.device_state(said.identity, said.device, event)
    if state is not None:
        return Refusal(Reason.SUBJECT_UNKNOWN, "no such device in its past, or it is revoked")
    if said.identity == claim.issuer:
        return None
    if _protected(ledger, event, said.identity):
        return Refusal(Reason.CREATOR_PROTECTED, "the creator's devices are revoked by the creator alone")
    owner = ledger.role(said.identity, event) is Role.OWNER
    return _need(role, Role.OWNER if owner else Role.ADMIN)


def _judge_feed_admit(ledger: Ledger, event: Event, claim: Claim, said: FeedAdmit, role: Role) -> Refusal | None:
    state = ledger.device_state(said.identity, said.device, event)
    if state is not None:
        return Refusal(state, "the feed's device")
    if ledger.role(said.identity, event) is None:
        return Refusal(Reason.SUBJECT_UNKNOWN, "the feed's identity is no member in its past")
    if said.child is not None:
        if said.kind is FeedKind.CONTROL:
            return Refusal(Reason.WRONG_KIND, "a child party has data feeds only")
        if not any(event.sees(child) for child in ledger.children.get(said.child, ())):
            return Refusal(Reason.SUBJECT_UNKNOWN, "no such child party in its past")
    own = said.identity == claim.issuer and said.device == claim.device
    return None if own else _need(role, Role.ADMIN)


def _judge_cancel(ledger: Ledger, event: Event, claim: Claim, said: InvitationCancel, role: Role) -> Refusal | None:
    invitations = [other for other in ledger.invitations.get(said.key, ()) if event.sees(other)]
    if not invitations:
        return Refusal(Reason.SUBJECT_UNKNOWN, "no such invitation in its past")
    if any(other.claim is not None and other.claim.issuer == claim.issuer for other in invitations):
        return None
    return _need(role, Role.ADMIN)


def _issued_by(ledger: Ledger, event: Event, identity: IdentityKey, device: DeviceKey | None) -> bool:
    """Whether a device is one of an identity's, or was: what it issued stays the identity's to take back."""
    return device is not None and any(map(event.sees, ledger.device_admits.get((identity, device), ())))


def _judge_adoption(ledger: Ledger, event: Event, claim: Claim, said: AdoptLocal) -> Refusal | None:
    assert ledger.genesis is not None
    assert ledger.genesis.claim is not None
    genesis = ledger.genesis.claim.assertion
    assert isinstance(genesis, PartyGenesis)
    if genesis.kind is not PartyKind.LOCAL or claim.issuer != genesis.identity:
        return Refusal(Reason.NOT_AUTHORISED, "only a local party's own device gives it to an identity")
    if ledger.role(said.identity, event) is not None:
        return Refusal(Reason.DUPLICATE, "that identity is a member")
    return None


def _judge_epoch(ledger: Ledger, event: Event, claim: Claim, said: EpochGenesis, role: Role) -> Refusal | None:
    if said.child is not None and not any(event.sees(child) for child in ledger.children.get(said.child, ())):
        return Refusal(Reason.SUBJECT_UNKNOWN, "no such child party in its past")
    if said.number < 1:
        return Refusal(Reason.MALFORMED, "epoch 0 is the party's genesis")
    for entry in said.control_timeframe:
        # Its own block is not in its past: an epoch can't contain itself.
        seen = event.reach(feed_id(entry.feed)) - (entry.feed == event.feed_key)
        if entry.seq >= seen:
            return Refusal(Reason.MALFORMED, "names control messages that are not in its past")
    settings = {key: ledger.policy(key, event) for key in (EPOCH_DECLARERS, EPOCH_BOTS)}
    declarers, named = declarers_of({key: value for key, value in settings.items() if value is not None})
    if declarers == ADMINS:
        return _need(role, Role.ADMIN)
    if declarers == ELECT:
        return _need(role, Role.EDITOR)
    if bytes(claim.issuer) in named or bytes(claim.device) in named:
        return None
    return Refusal(Reason.NOT_AUTHORISED, "the policy names other declarers")
