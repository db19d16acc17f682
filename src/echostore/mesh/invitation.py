"""Invitations between a host and a guest on an authenticated channel. No sockets, no clock, no store.

    guest                                                    host
    knock    SPAKE2 share                        ---->       counts the try, durably, before anything else
                                                 <----       share, and an HMAC that only the passcode gives
    confirm  HMAC, and the sealed request        ---->       admits the guest
                                                 <----       sealed welcome

The passcode goes into SPAKE2 together with the invitation's id, both device keys and the hash of the channel's
handshake. Someone in the middle has two channels with two hashes, so that the two ends never agree on a key, and each
guess costs one of the invitation's tries. An invitation bound to a key skips the passcode: the channel has proven the
device, and the request proves its identity. An open one asks for a signature by the ticket's key.

What follows from the requests and what counts as a try is the host's affair: `Host` and `Guest` only do the steps.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final

import nacl.exceptions
import nacl.secret

from echostore.kernel.ids import DeviceKey
from echostore.mesh.pake import PakeFailed, Spake2
from echostore.mesh.ticket import Kind, Ticket
from echostore.wire.generated import mesh_pb2 as pb
from echostore.wire.mesh import Invitation as Frame
from echostore.wire.signing import SigningKey, verify

PASSCODE_DIGITS: Final = 6
TRIES_MAX: Final = 3
SEALED_BYTES_MAX: Final = 64 * 1024

Reason = pb.InvitationRefusal

_TAG: Final = b"echostore/invitation/1"


class InvitationFailed(Exception):
    """The other side is not who it says, or said something that makes no sense. `reason` goes to both sides."""

    def __init__(self, reason: "pb.InvitationRefusal.Reason.ValueType", detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Between:
    """Who talks to whom, and where: what every proof is bound to."""

    invitation: bytes
    guest: DeviceKey
    host: DeviceKey
    handshake_hash: bytes

    def bound(self, label: bytes) -> bytes:
        return _TAG + label + self.invitation + self.guest + self.host + self.handshake_hash


class _Keyed:
    """What both sides do once they share a key."""

    def __init__(self, between: Between) -> None:
        self.between = between
        self._key = b""

    def _agree(self, material: bytes) -> None:
        self._key = hmac.new(material, self.between.bound(b"key"), hashlib.sha256).digest()

    def _confirmation(self, side: bytes) -> bytes:
        return hmac.new(self._key, self.between.bound(b"confirm-" + side), hashlib.sha256).digest()

    def seal(self, data: bytes) -> bytes:
        return bytes(nacl.secret.SecretBox(self._key).encrypt(data))

    def unseal(self, sealed: bytes) -> bytes:
        if len(sealed) > SEALED_BYTES_MAX:
            raise InvitationFailed(Reason.MALFORMED, f"{len(sealed)} sealed bytes")
        try:
            return bytes(nacl.secret.SecretBox(self._key).decrypt(sealed))
        except (nacl.exceptions.CryptoError, ValueError):
            raise InvitationFailed(Reason.MALFORMED, "what was sealed does not open") from None


class Guest(_Keyed):
    """The guest's side of one attempt."""

    def __init__(self, ticket: Ticket, between: Between, passcode: str = "") -> None:
        super().__init__(between)
        self._ticket = ticket
        self._spake = _spake(between, passcode, guest=True) if ticket.kind is Kind.PASSCODE else None

    def knock(self) -> Frame:
        step = pb.MeshInvitation(knock=pb.InvitationKnock())
        if self._spake is not None:
            step.knock.share = self._spake.share
        elif self._ticket.kind is Kind.OPEN:
            step.knock.proof = SigningKey(self._ticket.secret).sign(self.between.bound(b"open"))
        return Frame(self.between.invitation, step)

    def answer(self, share: pb.InvitationShare, request: bytes) -> list[Frame]:
        """Confirm, and ask with `request`; InvitationFailed when the host does not know the passcode, or is no host."""
        if self._spake is not None:
            try:
                self._agree(self._spake.finish(share.share))
            except PakeFailed:
                raise InvitationFailed(Reason.MALFORMED, "a share that makes no sense") from None
        else:
            self._agree(self.between.handshake_hash)
        if not hmac.compare_digest(share.confirm, self._confirmation(b"host")):
            raise InvitationFailed(Reason.WRONG_PASSCODE, "the passcode is not the host's")
        confirm = pb.MeshInvitation(confirm=pb.InvitationConfirm(confirm=self._confirmation(b"guest")))
        asked = pb.MeshInvitation(request=pb.InvitationRequest(sealed=self.seal(request)))
        return [Frame(self.between.invitation, confirm), Frame(self.between.invitation, asked)]

    def welcomed(self, welcome: pb.InvitationWelcome) -> bytes:
        return self.unseal(welcome.sealed)


class Host(_Keyed):
    """The host's side of one attempt. The caller has checked that the invitation stands, and counted the try."""

    def __init__(self, kind: Kind, between: Between, *, passcode: str = "", key: bytes = b"") -> None:
        super().__init__(between)
        self._kind, self._passcode, self._public = kind, passcode, key
        self._confirmed = False

    def share(self, knock: pb.InvitationKnock) -> Frame:
        step = pb.MeshInvitation(share=pb.InvitationShare())
        if self._kind is Kind.PASSCODE:
            spake = _spake(self.between, self._passcode, guest=False)
            step.share.share = spake.share
            try:
                self._agree(spake.finish(knock.share))
            except PakeFailed:
                raise InvitationFailed(Reason.MALFORMED, "a share that makes no sense") from None
        else:
            if self._kind is Kind.OPEN and not verify(self._public, self.between.bound(b"open"), knock.proof):
                raise InvitationFailed(Reason.NOT_FOR_YOU, "the ticket's key did not sign")
            self._agree(self.between.handshake_hash)
        step.share.confirm = self._confirmation(b"host")
        return Frame(self.between.invitation, step)

    def confirm(self, confirm: pb.InvitationConfirm) -> None:
        if not hmac.compare_digest(confirm.confirm, self._confirmation(b"guest")):
            raise InvitationFailed(Reason.WRONG_PASSCODE, "the guest does not know the passcode")
        self._confirmed = True

    def requested(self, request: pb.InvitationRequest) -> bytes:
        if not self._confirmed:
            raise InvitationFailed(Reason.MALFORMED, "a request before the confirmation")
        return self.unseal(request.sealed)

    def welcome(self, welcome: bytes) -> Frame:
        step = pb.MeshInvitation(welcome=pb.InvitationWelcome(sealed=self.seal(welcome)))
        return Frame(self.between.invitation, step)


def refusal(invitation: bytes, reason: "pb.InvitationRefusal.Reason.ValueType", tries_left: int = 0) -> Frame:
    step = pb.MeshInvitation(refusal=pb.InvitationRefusal(reason=reason, tries_left=tries_left))
    return Frame(invitation, step)


def _spake(between: Between, passcode: str, *, guest: bool) -> Spake2:
    password = between.bound(b"passcode") + passcode.encode()
    return Spake2(password, first=guest, name_a=between.guest, name_b=between.host)
