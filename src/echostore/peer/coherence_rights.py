"""What each link of a root may do: by its own capability, or by those of the systems that it speaks for.

A link shows a capability and a key when it opens; a system behind an edge shows them to the edge, which passes them on. A batch
is judged by the rights of the system that wrote it, whichever way it comes. The rules are the kernel's (`coherence.guard`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from echostore.kernel.coherence.events import LinkId
from echostore.kernel.coherence.guard import Right
from echostore.kernel.coherence.messages import RejectReason, Spec, Statement, SystemId, Update
from echostore.kernel.coherence.services import SERVICES_SPEC
from echostore.kernel.coherence.serving import Serving
from echostore.wire.capabilities import Grants, ShownCredentials
from echostore.wire.index_spec import FENCE_SPEC, REVOCATIONS_SPEC, IndexQuery, MalformedIndex
from echostore.wire.leaf_signing import is_signed_by

if TYPE_CHECKING:
    from echostore.peer.party import Party


class LinkRights:
    """The links of one root, with what they showed when they opened. A kernel.coherence.guard.Proofs."""

    def __init__(self, party: "Party") -> None:
        self._party = party
        self.grants: dict[LinkId, Grants] = {}
        self._keys: dict[LinkId, bytes] = {}
        self._shown: Final = ShownCredentials()

    def open(self, link: LinkId, grants: Grants, key: bytes) -> None:
        self.grants[link] = grants
        self._keys[link] = key

    def close(self, link: LinkId) -> None:
        self.grants.pop(link, None)
        self._keys.pop(link, None)

    def of_link(self, link: LinkId) -> Right | None:
        grants = self.grants.get(link)
        return None if grants is None else Right(self._keys[link], grants.edge, grants.messages)

    def shown(self, credential: bytes) -> Right | None:
        found = self._worth(credential)
        return None if found is None else Right(found[1], found[0].edge, found[0].messages)

    def signed(self, message: Update | Statement, key: bytes) -> bool:
        return is_signed_by(message, key)

    def of_system(self, link: LinkId, system: SystemId, serving: Serving) -> Grants | None:
        """By what a batch of this system is judged: its own capability, wherever it comes by."""
        turn = serving.routes.get(system, {}).get(link)
        if not turn:
            return None if turn is None else self.grants.get(link)
        found = self._worth(serving.credentials.get((link, turn), b""))
        return None if found is None else found[0]

    def _worth(self, credential: bytes) -> tuple[Grants, bytes] | None:
        """What a credential grants now, and to which key."""
        found = self._shown.read(credential)
        return None if found is None or self._party.capabilities.why_not(found[0]) else found

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
