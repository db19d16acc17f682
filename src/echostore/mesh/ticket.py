"""Tickets: one line of text that brings a guest to a party.

    echo1 | base32 of ( msgpack of the fields | first 4 bytes of their SHA-256 )

A ticket names the party, the invitation, the host's device and where it listens, and until when it counts. With a
passcode it is of no use alone. An open invitation's ticket holds its secret: whoever has the ticket may enter.
"""

import base64
import binascii
import hashlib
from dataclasses import astuple, dataclass
from enum import StrEnum

import msgspec

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import KEY_BYTES, DeviceKey, PartyKey
from echostore.wire.mesh import INVITATION_ID_BYTES
from echostore.wire.signing import SEED_BYTES

PREFIX = "echo1"
ADDRESSES_MAX = 16
_CHECK_BYTES = 4
_TICKET_CHARACTERS_MAX = 4096


class Kind(StrEnum):
    """What a guest needs besides the ticket."""

    PASSCODE = "passcode"
    KEY = "key"
    """The guest's own key, which the host knows."""
    OPEN = "open"
    """Nothing: the ticket's secret. Any admin may honour it."""


class Purpose(StrEnum):
    PARTY = "party"
    DEVICE = "device"
    """One more device of the host's own identity."""


@dataclass(frozen=True, slots=True)
class Ticket:
    invitation: bytes
    kind: Kind
    purpose: Purpose
    party: PartyKey
    """All zeros for a device invitation."""
    host: DeviceKey
    addresses: tuple[str, ...]
    expires_ms: int
    secret: bytes = b""

    def text(self) -> str:
        data = msgspec.msgpack.encode(astuple(self))
        check = hashlib.sha256(data).digest()[:_CHECK_BYTES]
        return PREFIX + base64.b32encode(data + check).decode().rstrip("=").lower()


def read_ticket(text: str) -> Ticket:
    """The ticket in a line of text; spaces and line breaks of a message or a terminal do no harm."""
    compact = "".join(text.split()).lower()
    if len(compact) > _TICKET_CHARACTERS_MAX or not compact.startswith(PREFIX):
        raise UsageError(f"this is not a ticket: tickets start with {PREFIX}", next_step="Paste the whole line.")
    body = compact.removeprefix(PREFIX).upper()
    try:
        data = _letters(body)
        fields, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if hashlib.sha256(fields).digest()[:_CHECK_BYTES] != check:
            raise ValueError("a character is missing or wrong")
        ticket = msgspec.convert(_rows(fields), Ticket)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise UsageError(f"the ticket is damaged: {error}", next_step="Copy it again, as one line.") from None
    wrong = (
        len(ticket.invitation) != INVITATION_ID_BYTES
        or len(ticket.party) != KEY_BYTES
        or len(ticket.host) != KEY_BYTES
        or len(ticket.secret) != (SEED_BYTES if ticket.kind is Kind.OPEN else 0)
        or len(ticket.addresses) > ADDRESSES_MAX
    )
    if wrong:
        raise UsageError("the ticket is of a kind that this version does not know", next_step="Update echostore.")
    return ticket


def _letters(body: str) -> bytes:
    try:
        return base64.b32decode(body + "=" * (-len(body) % 8))
    except binascii.Error:
        raise ValueError("a character is missing or wrong") from None


def _rows(fields: bytes) -> dict[str, object]:
    values = msgspec.msgpack.decode(fields)
    if not isinstance(values, list) or len(values) != len(Ticket.__slots__):
        raise ValueError("it has other fields")
    return dict(zip(Ticket.__slots__, values, strict=True))
