"""One rule of messages between roots off each: what the search has to notice."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from coherence_mutants import BROKEN, STUCK, Mutant
from echostore.kernel.coherence.courier import Courier, pair_of
from echostore.kernel.coherence.events import KeptRow, Sideways
from echostore.kernel.coherence.messages import UserMessage, UserQueued, UserReceipt
from echostore.kernel.coherence.posting import Receiver, Sender
from echostore.testing.coherence_root_models import RootsModel

TAKE, RESTORE, PLACES = Courier.take, Courier.restore, Sender._with_places


def two() -> RootsModel:
    return RootsModel("two messages")


def gives_up() -> RootsModel:
    return RootsModel("given up", gives_up=1)


def sender_falls() -> RootsModel:
    return RootsModel("the sender's root", crashes=(1, 0), repeats=False, ordered=True)


def target_falls() -> RootsModel:
    return RootsModel("the target's root", crashes=(0, 1))


def take_again(self: Courier, root: bytes, message: UserMessage, known: Any) -> Any:
    if self.last.get(pair_of(message), 0) >= message.id.seq and message.id not in self.where:
        self.last[pair_of(message)] = message.id.seq - 1
    return TAKE(self, root, message, known)


def receive_anything(self: Receiver, id: Any, floor: int) -> bool:
    return True


def without_after(self: Sender, message: UserMessage) -> UserMessage:
    return replace(PLACES(self, message), after=0)


def without(kind: str) -> Any:
    def restore(self: Courier, rows: Iterable[KeptRow]) -> None:
        RESTORE(self, [row for row in rows if row.kind != kind])

    return restore


def all_at_once(self: Courier, target: Any = None) -> Any:
    return [message for pair, queue in self.inbox.items() if target in (None, pair.target) for message in queue]


def never_again(self: Courier) -> None:
    pass


def gap_stays(self: Courier, message: UserMessage) -> list[KeptRow]:
    return []


def queued_is_received(self: Courier, root: bytes, message: UserMessage, known: Any) -> Any:
    return [
        Sideways(root, UserReceipt(message.id, message.target))
        if each == Sideways(root, UserQueued(message.id))
        else each
        for each in TAKE(self, root, message, known)
    ]


def given_up_and_forgotten(self: Courier, message: UserMessage, reason: Any) -> list[KeptRow]:
    return []


def refused_is_queued(self: Courier, root: bytes, message: UserMessage, known: Any) -> Any:
    return [Sideways(root, UserQueued(message.id))]


def forget_what_flies(self: Courier, root: bytes) -> None:
    self.met -= {root}


ROOT_MUTANTS = [
    Mutant(
        "between roots: taken again",
        BROKEN,
        two,
        ((Courier, "take", take_again), (Receiver, "take", receive_anything)),
    ),
    Mutant("between roots: no order", BROKEN, two, ((Sender, "_with_places", without_after),)),
    Mutant("between roots: all of a pair at once", BROKEN, two, ((Courier, "heads", all_at_once),)),
    Mutant("between roots: queued taken for received", BROKEN, two, ((Courier, "take", queued_is_received),)),
    Mutant("between roots: said to be queued, and is not", STUCK, two, ((Courier, "take", refused_is_queued),)),
    Mutant("between roots: the inbox is not on disk", BROKEN, target_falls, ((Courier, "restore", without("in")),)),
    Mutant(
        "between roots: the last place is not on disk",
        BROKEN,
        target_falls,
        ((Courier, "restore", without("last")), (Receiver, "take", receive_anything)),
    ),
    Mutant("between roots: what goes out is not on disk", STUCK, sender_falls, ((Courier, "restore", without("out")),)),
    Mutant(
        "between roots: sent once",
        STUCK,
        lambda: RootsModel("once", crashes=(0, 1), repeats=False, ordered=True),
        ((Courier, "ask_again", never_again), (Courier, "part", forget_what_flies)),
    ),
    Mutant(
        "between roots: a gap is waited for",
        STUCK,
        lambda: RootsModel("gap", gives_up=1, partings=1, repeats=False, ordered=True),
        ((Courier, "_close_gap", gap_stays),),
    ),
    Mutant(
        "between roots: given up and forgotten",
        BROKEN,
        gives_up,
        ((Courier, "_note_given_up", given_up_and_forgotten),),
    ),
]
