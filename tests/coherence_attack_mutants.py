"""One check off each: what the search with attackers has to notice."""

from typing import Any

from coherence_mutants import BROKEN, Mutant
from echostore.kernel.coherence.guard import Guard
from echostore.kernel.coherence.messages import ReleaseArc, UserMessage
from echostore.kernel.coherence.posting import Sender
from echostore.kernel.coherence.root import Root
from echostore.testing.coherence_attack_models import RIGHTS, STRAY, VICTIM, AttackModel

REFUSAL, ATTACHES, ATTACH = Guard.refusal, Guard.attaches, Root._attach


def release_by_anybody(self: Guard, link: Any, message: Any) -> Any:
    return None if isinstance(message, ReleaseArc) else REFUSAL(self, link, message)


def message_by_anybody(self: Guard, link: Any, message: Any) -> Any:
    return None if isinstance(message, UserMessage) else REFUSAL(self, link, message)


def unsigned(self: Guard, link: Any, system: Any, message: Any) -> bool:
    return self.right(link, system) is not None


def named_by_an_edge(self: Root, link: Any, below: Any) -> bool:
    return below.system in self.batches.arcs.gens


def shown_by_whomever(self: Root, link: Any, below: Any) -> bool:
    assert self.guard is not None
    return self.guard.proves(link, below) is not None


def credential_unread(self: Guard, link: Any, attach: Any) -> Any:
    shown = ATTACHES(self, link, attach)
    return RIGHTS[VICTIM] if attach.turn and link == STRAY else shown


def attach_as_anybody(self: Root, link: Any, attach: Any) -> Any:
    arcs, shown = self.batches.arcs, self.guard.attaches(link, attach) if self.guard is not None else None
    named = attach.system or arcs.nonces.get(attach.nonce)
    if named in arcs.gens and shown is not None:
        arcs.owners[named] = shown.key
    return ATTACH(self, link, attach)


def receipt_by_anybody(self: Sender, receipt: Any) -> bool:
    return self.unreceived.pop((receipt.id.stream, receipt.id.seq), None) is not None


def attack() -> AttackModel:
    return AttackModel("attack")


ATTACK_MUTANTS = [
    Mutant("attack: ReleaseArc by anybody", BROKEN, attack, ((Guard, "refusal", release_by_anybody),)),
    Mutant("attack: messages by anybody", BROKEN, attack, ((Guard, "refusal", message_by_anybody),)),
    Mutant("attack: an edge need not show signatures", BROKEN, attack, ((Guard, "wrote", unsigned),)),
    Mutant("attack: an edge names whom it likes", BROKEN, attack, ((Root, "_is_behind", named_by_an_edge),)),
    Mutant("attack: a credential of anybody will do", BROKEN, attack, ((Root, "_is_behind", shown_by_whomever),)),
    Mutant("attack: a credential is not read", BROKEN, attack, ((Guard, "attaches", credential_unread),)),
    Mutant("attack: a name belongs to nobody", BROKEN, attack, ((Root, "_attach", attach_as_anybody),)),
    Mutant("attack: a receipt by anybody", BROKEN, attack, ((Sender, "received", receipt_by_anybody),)),
]
