"""Invitations between a host and a guest on an authenticated channel. No sockets, no clock, no store.

    guest                                                    host
    knock    SPAKE2 share                        ---->       counts the try of this dialler, durably, before anything else
                                                 <----       share, and an HMAC that only the passcode gives
    confirm  HMAC, and the sealed request        ---->       admits the guest
                                                 <----       sealed welcome

What both know is the verifier, which argon2id makes of the passcode and the invitation's id: a host keeps that and not the
passcode. It goes into SPAKE2 together with the invitation's id, both device keys and the hash of the channel's
handshake. Someone in the middle has two channels with two hashes, so that the two ends never agree on a key, and each
guess costs a try. An invitation bound to a key skips the passcode: the channel has proven the
device, and the request proves its identity. An open one asks for a signature by the ticket's key.

What follows from the requests and what counts as a try is the host's affair: `Host` and `Guest` only do the steps.

Tries are counted by dialler and in total (`Dialler`, `tries_left`, `with_tries`). Of 1,000,000 passcodes

    TRIES_PER_DEVICE    3     for one device: a guest may mistype twice. Devices are free to make, so this protects nothing
                              but the other guests, whose tries stay their own
    TRIES_PER_ADDRESS   6     for one address (of IPv6, one network of 64 bits): one machine that knows the invitation guesses
                              right with a probability of 6 in a million, and can't end the invitation for others elsewhere
    TRIES_MAX          30     for everybody together, then the invitation ends: 30 in a million is what an attacker with any
                              number of devices and addresses has, and five machines at least are what it takes to end it
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import nacl.exceptions
import nacl.pwhash
import nacl.secret

from echostore.kernel.ids import DeviceKey
from echostore.mesh.pake import PakeFailed, Spake2
from echostore.mesh.ticket import Kind, Ticket
from echostore.wire.generated import mesh_pb2 as pb
from echostore.wire.mesh import Invitation as Frame
from echostore.wire.signing import SigningKey, verify

PASSCODE_DIGITS: Final = 6
TRIES_PER_DEVICE: Final = 3
TRIES_PER_ADDRESS: Final = 6
TRIES_MAX: Final = 30
VERIFIER_BYTES: Final = 32
SEALED_BYTES_MAX: Final = 64 * 1024

Reason = pb.InvitationRefusal

_TAG: Final = b"echostore/invitation/1"


class InvitationFailed(Exception):
    """The other side is not who it says, or said something that makes no sense. `reason` goes to both sides."""

    def __init__(self, reason: "pb.InvitationRefusal.Reason.ValueType", detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def passcode_verifier(invitation: bytes, passcode: str) -> bytes:
    """What a host keeps instead of the passcode. Who steals it can enter by this invitation while it is open, as it could
    with the keys that lie beside it, and has to try all passcodes at some 70 ms each to know the one."""
    limits = nacl.pwhash.argon2id
    return bytes(
        limits.kdf(
            VERIFIER_BYTES,
            passcode.encode(),
            salt=invitation,
            opslimit=limits.OPSLIMIT_INTERACTIVE,
            memlimit=limits.MEMLIMIT_INTERACTIVE,
        )
    )


_EVERYBODY: Final = "total"


@dataclass(frozen=True, slots=True)
class Dialler:
    """Who makes a try, as far as a host can tell: the device, and the address that it dials from."""

    device: DeviceKey
    address: str

    @classmethod
    def at(cls, device: DeviceKey, address: str) -> "Dialler":
        """From `host:port`. Somebody on an IPv6 network has all its addresses."""
        host = address.rpartition(":")[0].strip("[]").partition("%")[0]
        try:
            found = ipaddress.ip_address(host)
        except ValueError:
            return cls(device, host)
        mapped = getattr(found, "ipv4_mapped", None) or found
        if mapped.version == 6:
            return cls(device, str(ipaddress.ip_network((mapped, 64), strict=False)))
        return cls(device, str(mapped))

    def limits(self) -> dict[str, int]:
        """What its tries are counted as, and how many there may be."""
        return {
            _EVERYBODY: TRIES_MAX,
            f"device {self.device.hex()}": TRIES_PER_DEVICE,
            f"address {self.address}": TRIES_PER_ADDRESS,
        }


def tries_left(taken: Mapping[str, int], dialler: Dialler | None = None) -> int:
    """How many guesses a dialler has; without one, how many everybody has together."""
    limits = {_EVERYBODY: TRIES_MAX} if dialler is None else dialler.limits()
    return min(most - taken.get(name, 0) for name, most in limits.items())


def with_tries(taken: Mapping[str, int], dialler: Dialler, change: int) -> dict[str, int]:
    """The count after a try (1), or after one that was given back (-1). It has at most three names for each try."""
    counted = dict(taken)
    for name in dialler.limits():
        counted[name] = max(0, counted.get(name, 0) + change)
    return {name: number for name, number in counted.items() if number}


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

    def __init__(self, ticket: Ticket, between: Between, verifier: bytes = b"") -> None:
        super().__init__(between)
        self._ticket = ticket
        self._spake = _spake(between, verifier, guest=True) if ticket.kind is Kind.PASSCODE else None

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

    def __init__(self, kind: Kind, between: Between, *, verifier: bytes = b"", key: bytes = b"") -> None:
        super().__init__(between)
        self.kind, self._verifier, self._public = kind, verifier, key
        self._confirmed = False

    def share(self, knock: pb.InvitationKnock) -> Frame:
        step = pb.MeshInvitation(share=pb.InvitationShare())
        if self.kind is Kind.PASSCODE:
            spake = _spake(self.between, self._verifier, guest=False)
            step.share.share = spake.share
            try:
                self._agree(spake.finish(knock.share))
            except PakeFailed:
                raise InvitationFailed(Reason.MALFORMED, "a share that makes no sense") from None
        else:
            if self.kind is Kind.OPEN and not verify(self._public, self.between.bound(b"open"), knock.proof):
                raise InvitationFailed(Reason.NOT_FOR_YOU, "the ticket's key did not sign")
            self._agree(self.between.handshake_hash)
        step.share.confirm = self._confirmation(b"host")
        return Frame(self.between.invitation, step)

    def confirm(self, confirm: pb.InvitationConfirm) -> None:
        if self._confirmed:
            raise InvitationFailed(Reason.MALFORMED, "a second confirmation")
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


def _spake(between: Between, verifier: bytes, *, guest: bool) -> Spake2:
    assert len(verifier) == VERIFIER_BYTES, "a passcode is asked for, and none was given"
    password = between.bound(b"passcode") + verifier
    return Spake2(password, first=guest, name_a=between.guest, name_b=between.host)
