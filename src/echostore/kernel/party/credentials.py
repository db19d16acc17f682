"""Credentials as values: what is claimed, by whom, and with which device.

A credential is a signed *claim*; a claim makes one *assertion*. `echostore.wire.credentials` decodes and verifies
them, the party machine decides which of them count. Nothing here knows of bytes on the wire.

    PartyGenesis                              the first one, signed by the party key
    MemberAdmit, RoleChange, MemberRemove     who belongs, as what, until where
    GroupAdmit                                several identities at once
    DeviceAdmit, DeviceRevoke                 with which devices
    FeedAdmit, FeedRetire, ForkEvidence       through which feeds, until where
    Invitation, InvitationCancel, Profile     people's affairs
    ChildParty, AdoptLocal                    other forms of party
    EpochGenesis, EpochAttest, EpochDispute   recorded here, agreed on elsewhere
    ModelPublish, Policy                      settings of the party
    CapabilityRevoke                          which capabilities of thin clients are worth nothing any more

A *bound* is a place in a feed: `length_end` counts the blocks before it. A removal's `cut` and a role change's
`bounds` name one per feed; a feed that is not named has the bound 0, because its writer had seen nothing of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from echostore.kernel.feed import ForkProof
from echostore.kernel.ids import Cid, DeviceKey, FeedId, FeedKey, IdentityKey, Link, PartyKey
from echostore.kernel.reasons import Reason


class Role(IntEnum):
    """What a member may do; a greater role may do all that a lesser one may. The numbers are those of the wire."""

    READER = 1
    EDITOR = 2
    ADMIN = 3
    OWNER = 4

    @property
    def label(self) -> str:
        return self.name.lower()


class FeedKind(StrEnum):
    CONTROL = "control"
    DATA = "data"


class PartyKind(StrEnum):
    ORDINARY = "ordinary"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class FeedBound:
    """Blocks of `feed` before `length_end`; `link` is that of the last of them (empty when there is none)."""

    feed: FeedId
    length_end: int
    link: bytes = b""


@dataclass(frozen=True, slots=True)
class PartyGenesis:
    """Creates a party. A local party has no identity: its device key stands for one."""

    party: PartyKey
    identity: IdentityKey
    device: DeviceKey
    control_feed: FeedKey
    data_feed: FeedKey
    title: str = ""
    kind: PartyKind = PartyKind.ORDINARY
    created_ms: int = 0


@dataclass(frozen=True, slots=True)
class MemberAdmit:
    member: IdentityKey
    role: Role
    name: str = ""


@dataclass(frozen=True, slots=True)
class DeviceAdmit:
    """A device acts for an identity. Devices are known by the pair, so nobody gains by naming another's device."""

    identity: IdentityKey
    device: DeviceKey
    name: str = ""


@dataclass(frozen=True, slots=True)
class FeedAdmit:
    """A feed belongs to a device. `proof` is the feed key's own consent, so nobody can claim another's feed."""

    feed: FeedKey
    kind: FeedKind
    identity: IdentityKey
    device: DeviceKey
    child: PartyKey | None = None
    proof: bytes = b""


@dataclass(frozen=True, slots=True)
class Profile:
    display_name: str
    avatar: bytes = b""
    entries: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class RoleChange:
    """`member` is an identity or a group. The new role holds from each feed's bound on."""

    member: IdentityKey
    role: Role
    bounds: tuple[FeedBound, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberRemove:
    """`member` is an identity or a group. Blocks beyond the cut leave the state."""

    member: IdentityKey
    cut: tuple[FeedBound, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceRevoke:
    """For good: a revoked device key is never admitted again, or an old admission could be replayed."""

    identity: IdentityKey
    device: DeviceKey
    cut: tuple[FeedBound, ...] = ()


@dataclass(frozen=True, slots=True)
class FeedRetire:
    """Of a data feed the blocks before `length_end` stay; of a control feed those in this credential's past."""

    feed: FeedKey
    length_end: int


@dataclass(frozen=True, slots=True)
class Invitation:
    key: bytes
    role: Role
    expires_ms: int = 0
    uses: int = 1


@dataclass(frozen=True, slots=True)
class InvitationCancel:
    key: bytes


@dataclass(frozen=True, slots=True)
class GroupAdmit:
    """A group is admitted as one; its key is a subject like an identity (RoleChange, MemberRemove)."""

    group: IdentityKey
    name: str
    role: Role
    members: tuple[IdentityKey, ...]


@dataclass(frozen=True, slots=True)
class ChildParty:
    child: PartyKey
    title: str = ""


@dataclass(frozen=True, slots=True)
class AdoptLocal:
    """A local party gets an identity: it becomes an owner as protected as the creator, acting with `device`."""

    identity: IdentityKey
    device: DeviceKey
    name: str = ""
    proof: bytes = b""


@dataclass(frozen=True, slots=True)
class ForkEvidence:
    proof: ForkProof


@dataclass(frozen=True, slots=True)
class TimeframeEntry:
    feed: FeedKey
    seq: int
    link: Link


@dataclass(frozen=True, slots=True)
class EpochGenesis:
    number: int
    previous: bytes
    snapshot: Cid
    record: bytes = b""
    cut: bytes = b""
    timeframe: tuple[TimeframeEntry, ...] = ()
    control_timeframe: tuple[TimeframeEntry, ...] = ()
    admission_digest: bytes = b""
    encoding_version: int = 1
    models: tuple[tuple[str, int], ...] = ()
    discard_before_ms: int = 0
    created_ms: int = 0
    child: PartyKey | None = None
    control: bytes = b""
    """The CID of the control state at the control timeframe; empty where none could be made."""


@dataclass(frozen=True, slots=True)
class EpochAttest:
    number: int
    genesis: bytes
    snapshot: Cid


@dataclass(frozen=True, slots=True)
class EpochDispute:
    number: int
    genesis: bytes
    snapshot: bytes = b""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ModelPublish:
    name: str
    version: int
    descriptor: bytes
    hash: bytes


@dataclass(frozen=True, slots=True)
class Policy:
    entries: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class CapabilityRevoke:
    """A capability of a thin client is worth nothing any more, for good.

    It speaks of the capability `id` of one issuer, so naming another issuer revokes nothing of anybody's. Without an issuer
    it speaks of every capability with that id.
    """

    id: bytes
    issuer: DeviceKey | None = None
    expires_ms: int = 0
    """When the capability ends by itself: from then on nobody needs to be told. 0: not known."""


Assertion = (
    PartyGenesis
    | MemberAdmit
    | DeviceAdmit
    | FeedAdmit
    | Profile
    | RoleChange
    | MemberRemove
    | DeviceRevoke
    | FeedRetire
    | Invitation
    | InvitationCancel
    | GroupAdmit
    | ChildParty
    | AdoptLocal
    | ForkEvidence
    | EpochGenesis
    | EpochAttest
    | EpochDispute
    | ModelPublish
    | Policy
    | CapabilityRevoke
)


@dataclass(frozen=True, slots=True)
class Claim:
    """An assertion with who makes it. `device` is the key that signed; for the genesis it is the party key."""

    party: PartyKey
    issuer: IdentityKey
    device: DeviceKey
    assertion: Assertion
    parents: tuple[bytes, ...] = ()
    issued_ms: int = 0


@dataclass(frozen=True, slots=True)
class VerifiedCredential:
    """A credential whose signature has been checked. `fault` says why it never counts; then `claim` may be absent."""

    claim: Claim | None
    hash: bytes
    fault: Reason | None = None


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """A block of a control feed.

    `clock` has, for each control feed, the last seq that happened before this message, transitively closed and with
    the message's own predecessor.
    """

    feed: FeedId
    feed_key: FeedKey
    seq: int
    depth: int
    clock: Mapping[FeedId, int]
    credentials: tuple[VerifiedCredential, ...]
    positions: tuple[int, ...] = ()
    """Where the credentials stood, in a message of which not all are kept (`control_state`); empty: 0, 1, 2, ..."""
