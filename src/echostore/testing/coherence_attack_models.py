"""A model with attackers: whoever has a link says whatever it likes, as often as it likes, in every order.

    target ──┐
    thief ───┤            a leaf that may read everything and send messages
    stray ───┼── root     an edge that the victim is not behind
    edge ────┘            the edge that the victim is behind; what comes over its link may be forged as well
      ├── victim          writes one batch, and one message to the target
      └── neighbour       a leaf behind the same edge

What attackers say lies in the network from the beginning, and stays there. Keys are names here, and a signature is what was
signed with the name of who did: nobody makes another's, and everybody may repeat one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from echostore.kernel.coherence.edge import Edge
from echostore.kernel.coherence.events import (
    UP,
    Advanced,
    ChildOpened,
    Commit,
    Committed,
    Delivered,
    Effect,
    Event,
    Flush,
    LinkId,
    Opening,
    Post,
    Publish,
    Received,
    Send,
    Unanswered,
)
from echostore.kernel.coherence.guard import Right
from echostore.kernel.coherence.leaf import Leaf
from echostore.kernel.coherence.messages import (
    Announce,
    Arc,
    Attach,
    Attached,
    Below,
    Connectivity,
    Deannounce,
    EndUpdate,
    GrantArc,
    GrantSystemId,
    IssuedId,
    LaneItem,
    Message,
    MessageId,
    NotifyReplicated,
    NullUpdate,
    PublishOp,
    ReleaseArc,
    Service,
    Statement,
    SystemId,
    Undelivered,
    Update,
    UserMessage,
    UserReceipt,
)
from echostore.kernel.coherence.root import Root
from echostore.testing.coherence_models import LEAF_UP, PLAIN, ROOT
from echostore.testing.coherence_search import Broken, Machine, Model, State, Step

ROOT_AT, EDGE_AT, VICTIM_AT, TARGET_AT = range(4)
EDGE, TARGET, THIEF, STRAY = (LinkId(name) for name in ("edge", "target", "thief", "stray"))
VICTIM, NEIGHBOUR = LinkId("victim"), LinkId("neighbour")

VICTIM_NONCE: Final = 100
GENUINE: Final = b"genuine"
SHOWN: Final = b"shown by "
RIGHTS: Final = {
    EDGE: Right(b"edge", edge=True),
    TARGET: Right(b"target", messages=True),
    THIEF: Right(b"thief", messages=True),
    STRAY: Right(b"stray", edge=True, messages=True),
    VICTIM: Right(b"victim", messages=True),
    NEIGHBOUR: Right(b"neighbour", messages=True),
}


def credential(name: bytes) -> bytes:
    return SHOWN + name


def signature_of(message: Update | Statement, name: bytes) -> bytes:
    return name + b" says " + repr(replace(message, signature=b"")).encode()


def signed_as(message: Message, name: bytes) -> Message:
    if isinstance(message, Update | Statement):
        return replace(message, signature=signature_of(message, name))
    return message


class SymbolicProofs:
    """What a host would find out by cryptography."""

    def of_link(self, link: LinkId) -> Right | None:
        return RIGHTS.get(link)

    def shown(self, credential: bytes) -> Right | None:
        found = [right for right in RIGHTS.values() if credential == SHOWN + right.key]
        return found[0] if found else None

    def signed(self, message: Update | Statement, key: bytes) -> bool:
        return message.signature == signature_of(message, key)


PROOFS: Final = SymbolicProofs()


def forgeries(arc: Arc, target: SystemId, own: SystemId, nonce: int, batch: int = 1) -> Iterator[Message]:
    """What an attacker may say in the name of an arc's owner, or to its harm; nothing of it is signed."""
    victim, id = arc.system, MessageId(arc.system, 1, 1)
    op = PublishOp(IssuedId(arc, 1), b"item", b"forged")
    yield from (
        ReleaseArc(arc, 0),
        Update(arc, batch - 1, batch, (), (op,)),
        UserMessage(id, 1, target, (), "note", b"forged"),
        UserMessage(MessageId(victim, 1, 9), 9, target, (), "note", b"forged"),
        UserReceipt(id, target),
        UserReceipt(id, own),
        Announce(Service(victim, "trap"), 1, 1, b"forged"),
        Deannounce(Service(victim, "trap"), 9, 9),
        LaneItem(arc, batch, 0, 0, op),
        EndUpdate(arc, batch - 1, batch, (), ((0, 1),)),
        NullUpdate(arc, batch - 1, batch),
        Attach(nonce, None, wants_arc=True, seen=0),
    )
    for system in (victim, target):
        yield Attach(11, system, wants_arc=True, seen=0)
        yield from attaches(system, own, b"")


def attaches(system: SystemId, own: SystemId, shown: bytes) -> tuple[Attach, Attach]:
    """The two ways to say that a system is behind oneself."""
    return Attach(12, system, True, 0, (), (7,), shown), Attach(13, own, False, 0, (Below(system, (7,), shown),))


class AttackModel(Model):
    """A victim writes and sends; attackers interfere."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def topology(self) -> dict[tuple[int, LinkId], tuple[int, LinkId]]:
        ends = {
            (ROOT_AT, EDGE): (EDGE_AT, UP),
            (ROOT_AT, TARGET): (TARGET_AT, LEAF_UP),
            (EDGE_AT, VICTIM): (VICTIM_AT, LEAF_UP),
        }
        return ends | {there: here for here, there in ends.items()}

    def start(self) -> tuple[list[Machine], tuple[Any, ...]]:
        machines = [
            Machine(Root(ROOT, PLAIN, proofs=PROOFS), ()),
            Machine(Edge(PLAIN, proofs=PROOFS)),
            Machine(Leaf(PLAIN, LEAF_UP)),
            Machine(Leaf(PLAIN, LEAF_UP), ()),
        ]
        opened = [(ROOT_AT, link) for link in (EDGE, TARGET, THIEF, STRAY)] + [(EDGE_AT, VICTIM), (EDGE_AT, NEIGHBOUR)]
        self._converse(machines, [(system, ChildOpened(link, 1)) for system, link in opened])
        self._converse(machines, [(EDGE_AT, Opening(UP, 1, 1))])
        self._converse(machines, [(VICTIM_AT, Opening(LEAF_UP, 1, VICTIM_NONCE))])
        self._converse(machines, [(TARGET_AT, Opening(LEAF_UP, 1, 101))])
        for number, (system, link) in enumerate([(ROOT_AT, THIEF), (ROOT_AT, STRAY), (EDGE_AT, NEIGHBOUR)]):
            own = Attach(50 + number, None, wants_arc=True, seen=0, credential=credential(RIGHTS[link].key))
            self._converse(machines, [(system, Received(link, 1, own))])
        return machines, ()

    def _converse(self, machines: list[Machine], events: list[tuple[int, Event]]) -> None:
        while events:
            system, event = events.pop(0)
            for effect in machines[system].core.receive(event):
                for each in self.cut(effect) if isinstance(effect, Send) else ():
                    events.append(self.messages[self.message(system, each)])

    def initial(self) -> State:
        numbers, counters, network = super().initial()
        leaf = [self.machines[numbers[at]].core.systems[LEAF_UP] for at in (VICTIM_AT, TARGET_AT)]
        root: Root = self.machines[numbers[ROOT_AT]].core
        for at, link in ((ROOT_AT, THIEF), (ROOT_AT, STRAY), (ROOT_AT, EDGE), (EDGE_AT, NEIGHBOUR)):
            own = next(system for system, key in root.batches.arcs.owners.items() if key == RIGHTS[link].key)
            lies = self._lies(leaf[0], leaf[1], own, RIGHTS[link].key)
            if link == EDGE:  # it may cut the victim off, and attach it: it is the way to it
                lies = [each for each in lies if isinstance(each, Update | Statement) and not _is_genuine(each)]
            elif link != NEIGHBOUR:
                lies.append(Connectivity(leaf[0], affects_all_services=True, turn=(9,)))
            for each in lies:
                network |= 1 << self._injected(at, Received(link, 1, self._as_the_edge_has_it(at, link, each)))
        return numbers, counters, network

    def _lies(self, victim: SystemId, target: SystemId, own: SystemId, name: bytes) -> list[Message]:
        lies = list(forgeries(Arc(victim, 1), target, own, VICTIM_NONCE))
        lies += [signed_as(each, name) for each in lies if isinstance(each, Update | Statement)]
        genuine = UserMessage(MessageId(victim, 1, 1), 1, target, (), "note", GENUINE)
        lies.append(signed_as(genuine, b"victim"))  # repeated where it was not said
        for shown in (credential(name), b"of nobody"):
            lies += [each for system in (victim, target) for each in attaches(system, own, shown)]
        return lies

    def _as_the_edge_has_it(self, at: int, link: LinkId, message: Message) -> Message:
        """The host of an edge says itself what a link below showed."""
        if at == EDGE_AT and isinstance(message, Attach) and not message.turn:
            return replace(message, credential=credential(RIGHTS[link].key))
        return message

    def _injected(self, at: int, event: Received) -> int:
        self.messages.append((at, event))
        self._message_numbers[at, event] = len(self.messages) - 1
        return len(self.messages) - 1

    def message(self, system: int, send: Send) -> int:
        if system in (VICTIM_AT, TARGET_AT):
            name = b"victim" if system == VICTIM_AT else b"target"
            said = signed_as(send.message, name)
            if isinstance(said, Attach) and system == VICTIM_AT:
                said = replace(said, credential=credential(name))
            send = replace(send, message=said)
        return super().message(system, send)

    def cut(self, send: Send) -> list[Send]:
        """What goes to an attacker is looked at, and is of no use to it otherwise."""
        if send.link not in (THIEF, STRAY, NEIGHBOUR):
            return [send]
        match send.message:
            case GrantSystemId(_, system) | Attached(_, system) if self._is_foreign(send.link, system):
                raise Broken(f"{send.link} is given the name of another: {send.message}")
            case GrantArc(arc) | NotifyReplicated(arc) if self._is_foreign(send.link, arc.system):
                raise Broken(f"{send.link} hears of another's batches: {send.message}")
            case UserMessage() | UserReceipt() | Undelivered():
                raise Broken(f"{send.link} hears of messages between others: {send.message}")
        return []

    def _is_foreign(self, link: LinkId, system: SystemId) -> bool:
        """Names are given in the order of `start`: edge, victim, target, then the attackers."""
        return system.path != ({THIEF: 4, STRAY: 5, NEIGHBOUR: 6}[link],)

    def answer(self, system: int, machine: Machine, effect: Effect) -> Iterable[Event]:
        if isinstance(effect, Commit):
            machine.host = (*machine.host, *(op.delta for op in effect.ops))
            yield Committed(effect.clock, effect.batch, machine.core.holdings.cur + 1, effect.rejected)
        elif isinstance(effect, Delivered):
            machine.host = (*machine.host, effect.message.payload)

    # What may happen

    def local(self, state: State) -> Iterator[Step]:
        root: Root = self.core(state, ROOT_AT)
        victim: Leaf = self.core(state, VICTIM_AT)
        target: Leaf = self.core(state, TARGET_AT)
        if root.unexposed:
            yield "tick", self.after(state, ROOT_AT, Advanced(root.holdings.cur + 1))
        for system, link in ((ROOT_AT, EDGE), (EDGE_AT, VICTIM)):
            yield f"system {system} flushes", self.after(state, system, Flush(link))
        if not victim.outbox.numbers:
            yield "the victim writes", self.after(state, VICTIM_AT, Publish(((b"item", GENUINE),)))
        if not victim.sender.seqs:
            post = Post(target.systems[LEAF_UP], 1, "note", GENUINE)
            yield "the victim sends", self.after(state, VICTIM_AT, post)
        if victim.sender.unreceived or not victim.released:
            yield "the victim asks again", self.after(state, VICTIM_AT, Unanswered(LEAF_UP))

    # What must hold

    def check(self, state: State) -> str | None:
        return self.once(state[0], self._judge, *(self.machines[number] for number in state[0]))

    def _judge(self, root: Machine, edge: Machine, victim: Machine, target: Machine) -> str | None:
        own = victim.core.systems[LEAF_UP]
        if any(each != GENUINE for each in root.host):
            return f"the root applied {root.host}"
        if root.core.batches.arcs.granted[Arc(own, 1)].release is not None:
            return "somebody released the victim's arc"
        if target.host not in ((), (GENUINE,)):
            return f"the target was told {target.host}"
        if victim.core.sender.seqs and not victim.core.sender.unreceived and not target.host:
            return "the victim believes that a message arrived, and it did not"
        if any(service.system == own for service in root.core.services.registers):
            return "somebody offers a service in the victim's name"
        return None

    def goal(self, state: State) -> bool | None:
        """The victim's batch is written and its message arrives, whatever attackers say."""
        victim: Leaf = self.core(state, VICTIM_AT)
        wrote = bool(victim.outbox.numbers) and victim.settled
        return wrote and bool(victim.sender.seqs) and not victim.sender.unreceived


def _is_genuine(message: Update | Statement) -> bool:
    return message.signature.startswith(b"victim")


__all__ = ["PROOFS", "RIGHTS", "AttackModel", "SymbolicProofs", "attaches", "credential", "forgeries", "signed_as"]
