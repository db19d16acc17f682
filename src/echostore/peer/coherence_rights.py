"""What each link of a root may do: by its own capability, or by those of the systems that it speaks for.

A link attaches its own system; an edge those that show what they showed to it. A batch is judged by the rights of the system
that wrote it, whichever way it comes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from echostore.kernel.coherence.events import LinkId
from echostore.kernel.coherence.messages import (
    Announce,
    Attach,
    Deannounce,
    RejectReason,
    Spec,
    SystemId,
    Update,
    UserMessage,
    UserReceipt,
)
from echostore.kernel.coherence.services import SERVICES_SPEC
from echostore.peer.coherence_ledger import CoherenceLedger
from echostore.wire.batch_signing import is_signed_by
from echostore.wire.capabilities import Credential, Grants, read_credential
from echostore.wire.index_spec import FENCE_SPEC, REVOCATIONS_SPEC, IndexQuery, MalformedIndex
from echostore.wire.system_owners import Owner, speaks_for_others

if TYPE_CHECKING:
    from echostore.peer.party import Party


class LinkRights:
    """The links of one root, with what they showed when they opened."""

    def __init__(self, party: "Party", ledger: CoherenceLedger) -> None:
        self._party, self._ledger = party, ledger
        self.grants: dict[LinkId, Grants] = {}
        self._keys: dict[LinkId, bytes] = {}

    def open(self, link: LinkId, grants: Grants, key: bytes) -> None:
        self.grants[link] = grants
        self._keys[link] = key

    def close(self, link: LinkId) -> None:
        self.grants.pop(link, None)
        self._keys.pop(link, None)

    def may_attach(self, link: LinkId, attach: Attach, grants: Grants) -> bool:
        """A link attaches its own system; one that speaks for others those that show what they are allowed."""
        owners = self._ledger.owners
        if not attach.turn:
            return owners.allows(attach, grants, self._keys[link])
        if not speaks_for_others(grants):
            return False
        shown = self._credential(attach)
        return shown is not None and owners.allows(replace(attach, turn=()), shown[0], shown[1].key)

    def _credential(self, attach: Attach) -> tuple[Grants, Credential] | None:
        """What a system behind an edge showed there; None when it is worth nothing here."""
        try:
            grants, shown = read_credential(attach.credential)
        except MalformedIndex:
            return None
        return None if self._party.capabilities.why_not(grants) else (grants, shown)

    def is_own(self, link: LinkId, system: SystemId) -> bool:
        """Whether a link is the system's own, and no edge between."""
        owner = self._ledger.owners.owners.get(system)
        return owner is None or owner.key == self._keys[link] or not speaks_for_others(self.grants[link])

    def of_system(self, link: LinkId, system: SystemId) -> Grants | None:
        """By what a batch or a message of this system is judged: its own capability, wherever it comes by."""
        if self.is_own(link, system):
            return self.grants[link]
        own = self._ledger.rights(self._ledger.owners.owners[system].capability)
        return None if own is None or self._party.capabilities.why_not(own) else own

    def trusts(self, link: LinkId, batch: Update) -> bool:
        """Whether a batch is as its system wrote it. A link of its own has shown its key; what an edge brings is signed."""
        if self.is_own(link, batch.clock.system):
            return True
        return is_signed_by(batch, self._ledger.owners.owners[batch.clock.system].key)

    def may_speak(self, link: LinkId, message: UserMessage | UserReceipt | Announce | Deannounce) -> bool:
        """Whether the system that wrote a message, or offers a service, may; a receipt is judged by its link."""
        rights: Grants | None = self.grants[link]
        if isinstance(message, UserMessage):
            rights = self.of_system(link, message.id.sender)
        elif isinstance(message, Announce | Deannounce):
            rights = self.of_system(link, message.service.system)
        return rights is not None and rights.messages

    def attached(self, link: LinkId, attach: Attach, system: SystemId) -> bool:
        """A system was attached: remember whose it is. Whether that is news."""
        owner, rights = Owner(self._keys[link], self.grants[link].id), b""
        if attach.turn:
            grants, shown = read_credential(attach.credential)
            owner, rights = Owner(shown.key, grants.id), shown.capability
        owned = self._owns(owner, system) and self._ledger.owners.note(system, owner)
        if rights:
            self._ledger.keep_rights(owner.capability, rights)
        return owned

    def _owns(self, owner: Owner, system: SystemId) -> bool:
        """Whether somebody speaks for a system of its own, and not for one that belongs to another."""
        known = self._ledger.owners.owners.get(system)
        return known is None or known.key == owner.key or known.capability == owner.capability

    def why_not_read(self, spec: Spec, grants: Grants, asked: Callable[[Spec], IndexQuery]) -> RejectReason | None:
        """Why an index is not for a link; None when it is."""
        if spec.startswith(SERVICES_SPEC):
            return None if grants.messages or spec.startswith(FENCE_SPEC) else RejectReason.NOT_ALLOWED
        if spec == REVOCATIONS_SPEC:
            return None
        try:
            query = asked(spec)
        except MalformedIndex:
            return RejectReason.MALFORMED
        item_type = None
        if query.item is not None:
            with self._party.reading() as runtime:
                row = runtime.source.row(query.item)
                item_type = None if row is None else row.type
        return None if grants.may_read(query, item_type) else RejectReason.NOT_ALLOWED
