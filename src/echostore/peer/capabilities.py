"""Capabilities of a party: what thin clients may read and write, for how long, and which are revoked.

    issued = party.capability(read=["task"], write=["task"], expires_s=3600)     issued.text goes to the client
    party.capabilities.issued()
    party.capabilities.revoke(issued.id)           takes effect here at once, and at every root and edge that hears of it

Issued ones are kept in the party's feeds.db. A revocation is a credential on the control feed (`CapabilityRevoke`): it
reaches every peer of the party as members and roles do, and counts for good. A capability is worth what its issuer may
do: when the issuer is removed, it is worth nothing.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from echostore.kernel.errors import Corrupt, NotFound, Refused, UsageError
from echostore.kernel.ids import CAPABILITY_ID_BYTES, DeviceKey
from echostore.kernel.party.credentials import CapabilityRevoke, Role
from echostore.kernel.party.roster import RevokedCapability
from echostore.peer import arguments
from echostore.wire.capabilities import (
    ANY_TYPE,
    Grants,
    ReadPattern,
    capability_text,
    read_capability,
    sign_capability,
)
from echostore.wire.index_spec import MalformedIndex

if TYPE_CHECKING:
    from echostore.peer.party import Party

DAY_S: Final = 86_400.0
EXPIRES_S: Final = 30 * DAY_S
"""How long a capability lasts where nothing is said: one that is lost ends by itself."""

_PREFIX: Final = "thin-capability/"


class _Row(msgspec.Struct):
    bytes: bytes
    name: str
    revoked_ms: int | None
    """Only in homes of versions before revocations were credentials: it was revoked on this peer."""


@dataclass(frozen=True, slots=True)
class IssuedCapability:
    """One capability. `text` is what the client is given; it is a secret, unless a holder's key is named."""

    id: str
    text: str
    name: str
    read: tuple[str, ...]
    """Types; `*`: everything."""
    write: tuple[str, ...]
    messages: bool
    edge: bool
    holder: str
    expires_ms: int
    issued_ms: int
    revoked_ms: int | None


class Capabilities:
    """The capabilities of one party, as this peer knows them."""

    def __init__(self, party: "Party") -> None:
        self._party = party

    def issue(
        self,
        *,
        read: str | Iterable[str] = ANY_TYPE,
        write: str | Iterable[str] = (),
        messages: bool = False,
        edge: bool = False,
        expires_s: float = EXPIRES_S,
        holder: bytes | None = None,
        name: str = "",
    ) -> IssuedCapability:
        """A capability for a thin client: types to read and to write (`*`: all), until when, for whom.

        With `holder`, only a client with that key can use it; without, whoever has its text. `edge`: it may speak for other
        clients, each of which shows its own capability.
        """
        party = self._party
        reads, writes = _types(read, "types to read"), _types(write, "types to write")
        for_s = arguments.seconds(expires_s, "expires_s")
        if for_s is None or for_s <= 0:
            raise UsageError("a capability has an end, and it is to come", next_step="Give expires_s in seconds.")
        if holder is not None:
            arguments.key(holder, "a holder")
        with party.writing() as runtime:
            device = DeviceKey(party.peer.device)
            role = self._role(device)
            needed = Role.EDITOR if writes else Role.READER
            if role is None or role < needed:
                raise Refused(
                    "this device can't grant what it may not do itself",
                    next_step="Ask an admin for the role of editor.",
                )
            now_ms = party.peer.now_ms()
            grants = Grants(
                party=party.key,
                issuer=device,
                id=secrets.token_bytes(CAPABILITY_ID_BYTES),
                read=(ReadPattern(all_items=True),) if ANY_TYPE in reads else (ReadPattern(reads),) if reads else (),
                write=writes,
                messages=arguments.flag(messages, "messages"),
                edge=arguments.flag(edge, "edge"),
                holder=holder or b"",
                expires_ms=now_ms + int(for_s * 1000),
                issued_ms=now_ms,
                sealers=(device,),
            )
            try:
                data = sign_capability(grants, party.peer.keys.key(device))
            except MalformedIndex as error:
                raise UsageError(f"no such capability: {error}") from error
            row = _Row(data, arguments.text(name, "a name"), None)
            runtime.feeds.set_about({_PREFIX + grants.id.hex(): msgspec.json.encode(row)})
            return self._shown(grants, row)

    def issued(self) -> list[IssuedCapability]:
        """Those that were issued here, oldest first."""
        found = [self._shown(read_capability(row.bytes), row) for row in self._rows().values() if row.bytes]
        return sorted(found, key=lambda each: (each.issued_ms, each.id))

    def revoke(self, id: str) -> str:
        """Take a capability back, for good: whoever is connected by it is cut off. A unique prefix will do.

        Of one that was issued elsewhere the whole id is needed, and the role of an admin. Returns the whole id.
        """
        wanted = arguments.text(id, "the id of a capability").lower()
        with self._party.writing() as runtime:
            rows = self._rows()
            found = [each for each in rows if each.startswith(wanted)] if wanted else []
            if len(found) > 1:
                raise UsageError(f"{len(found)} capabilities start with {wanted}", next_step="Give more of the id.")
            if not found:  # one of another device
                found = [wanted] if _is_id(wanted) else []
            if not found:
                raise NotFound(
                    f"no capability {wanted!r} was issued here",
                    next_step="`echostore party capability list` shows them; another device's needs its whole id.",
                )
            row = rows.get(found[0])
            grants = read_capability(row.bytes) if row is not None and row.bytes else None
            raw = bytes.fromhex(found[0])
            said = CapabilityRevoke(raw) if grants is None else CapabilityRevoke(raw, grants.issuer, grants.expires_ms)
            if said.id + (said.issuer or b"") not in runtime.processor.revoked:
                self._controlling().members.issue_claim(said)
            return found[0]

    def _controlling(self) -> "Party":
        """The party on whose control feeds this one's credentials stand."""
        above = self._party.runtime.processor.parent
        return self._party if above is None else self._party.peer.party(above.party)

    def revoked(self) -> list[bytes]:
        """The names of all that are revoked and have not ended by themselves: the id, and the issuer unless any is meant."""
        now_ms = self._party.peer.now_ms()
        with self._party.reading() as runtime:
            revoked = runtime.processor.revoked
            ended = {name for name, each in revoked.items() if 0 < each.expires_ms <= now_ms}
        return sorted(revoked.keys() - ended)

    def _revocation(self, grants: Grants) -> RevokedCapability | None:
        revoked = self._party.runtime.processor.revoked
        return revoked.get(grants.name) or revoked.get(grants.id)

    def why_not(self, grants: Grants) -> str | None:
        """Why a capability is worth nothing now; None when it is good. The signature was checked when it was read."""
        with self._party.reading() as runtime:
            if grants.party != self._party.key:
                return "other-party"
            if grants.expires_ms <= self._party.peer.now_ms():
                return "expired"
            kept = runtime.feeds.about(_PREFIX + grants.id.hex())
            if self._revocation(grants) is not None or (kept is not None and _row(kept).revoked_ms is not None):
                return "revoked"
            role = self._role(grants.issuer)
            if role is None:
                return "issuer-unknown"
            return "not-authorised" if grants.write and role < Role.EDITOR else None

    def _role(self, device: DeviceKey) -> Role | None:
        """What the identity of a device may do in the party now; None: it does not belong."""
        processor = self._party.runtime.processor
        machine = processor.membership.machine
        roles = {member.identity: member.role for member in machine.members}
        found = [roles.get(each.identity) for each in machine.devices if each.device == device and not each.revoked]
        known = [role for role in found if role]
        if known:
            return max(known)
        local = not machine.devices and device == self._party.peer.device
        return Role.OWNER if local and processor.parent is None else None

    def _shown(self, grants: Grants, row: _Row) -> IssuedCapability:
        revocation = self._revocation(grants)
        reads = (
            {ANY_TYPE}
            if any(each.all_items for each in grants.read)
            else {t for each in grants.read for t in each.types}
        )
        return IssuedCapability(
            id=grants.id.hex(),
            text=capability_text(row.bytes),
            name=row.name,
            read=tuple(sorted(reads)),
            write=grants.write,
            messages=grants.messages,
            edge=grants.edge,
            holder=grants.holder.hex(),
            expires_ms=grants.expires_ms,
            issued_ms=grants.issued_ms,
            revoked_ms=row.revoked_ms if revocation is None else revocation.revoked_ms,
        )

    def _rows(self) -> dict[str, _Row]:
        with self._party.reading() as runtime:
            return {name[len(_PREFIX) :]: _row(data) for name, data in runtime.feeds.about_under(_PREFIX).items()}


class CapabilityIssuing:
    """What a Party can do with capabilities."""

    _capabilities: Capabilities | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What thin clients may do: list and revoke."""
        if self._capabilities is None:
            self._capabilities = Capabilities(cast("Party", self))
        return self._capabilities

    def capability(self, **terms: Any) -> IssuedCapability:
        """A capability for a thin client; see `Capabilities.issue` for the terms."""
        return self.capabilities.issue(**terms)


def _row(data: bytes) -> _Row:
    try:
        return msgspec.json.decode(data, type=_Row)
    except msgspec.MsgspecError as error:
        raise Corrupt("A capability in feeds.db is damaged.") from error


def _types(given: str | Iterable[str], what: str) -> tuple[str, ...]:
    named = (given,) if isinstance(given, str) else tuple(given)
    types = arguments.texts(named, what)
    return tuple(sorted({each for each in types if each}))


def _is_id(text: str) -> bool:
    return len(text) == 2 * CAPABILITY_ID_BYTES and all(digit in "0123456789abcdef" for digit in text)
