"""Messages and services between the roots of one party.

    leaf           keeps a message until its receipt, and repeats it
    its root       has it on disk (`out`), and sends it whenever the target's root is met
    target's root  has it on disk (`inbox`), says so (UserQueued), and from then on it is not kept above
    target         is told one message at a time by each sender; the next one after the receipt
    back           UserReceipt or Undelivered

Of each pair of sender and target the target's root keeps the last place that it took. One that comes again is answered by
what became of it and has no other effect, whichever side was restarted in between. A message whose predecessor (`after`)
was not taken yet is not taken either: so those of a pair come in order.

Roots that are not connected wait for each other: nobody else passes on. What has waited too long is given up, and its sender
is told. What is kept is asked for by `Keep`, which stands before every message that says it is so.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from echostore.kernel.coherence.events import Effect, Keep, KeptRow, Sideways
from echostore.kernel.coherence.messages import (
    Backpressure,
    Context,
    MessageId,
    RejectReason,
    SystemId,
    Undelivered,
    UserMessage,
    UserQueued,
    UserReceipt,
)
from echostore.kernel.coherence.posting import ON_THE_WAY_MAX

OUT_MAX = 10_000
"""Messages that wait for other roots."""

OUT_PER_SENDER_MAX = ON_THE_WAY_MAX
"""And of one system: one that writes to nobody can't keep the others from writing."""

INBOX_MAX = 10_000
"""Messages of other roots' systems that wait for their targets."""

INBOX_PER_TARGET_MAX = 1024

PAIRS_MAX = 100_000
"""Pairs of sender and target whose last place is known."""

PAIRS_PER_SENDER_MAX = 1024

FLYING_MAX, FLYING_BYTES_MAX = 32, 4 * 1024 * 1024
"""Messages on their way to one root, and their bytes."""

GIVEN_UP_MAX = 10_000
"""Messages that were given up, and whose senders may not know; beyond it the oldest are forgotten."""

PASSED_MAX = 100_000

CONTEXT_FEEDS_MAX = 1000
"""Feeds that a context between roots may name."""

OUT, IN, LAST, GIVEN_UP = "out", "in", "last", "given-up"
"""Kinds of rows."""


class Pair(NamedTuple):
    """A sender's stream to one target."""

    sender: SystemId
    stream: int
    target: SystemId


def pair_of(message: UserMessage) -> Pair:
    return Pair(message.id.sender, message.id.stream, message.target)


class Courier:
    """What one root keeps for others, and of others. Rows come back after a restart by `restore`.

    A `Sideways` to the root itself is for the sender below it.
    """

    __slots__ = (
        "flying",
        "given_up",
        "held",
        "inbox",
        "last",
        "met",
        "out",
        "pairs",
        "passed",
        "ready",
        "root",
        "senders",
        "targets",
        "where",
    )

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.met: frozenset[bytes] = frozenset()
        self.out: dict[MessageId, UserMessage] = {}
        self.held: dict[MessageId, None] = {}
        """Of those: whose contexts are not here yet,"""
        self.ready: dict[bytes, dict[MessageId, None]] = {}
        """which can be sent, by root,"""
        self.flying: dict[bytes, dict[MessageId, None]] = {}
        """and which were sent."""
        self.passed: dict[MessageId, bytes] = {}
        """Those that another root has: a repeated one only asks it what became of it."""
        self.inbox: dict[Pair, tuple[UserMessage, ...]] = {}
        self.where: dict[MessageId, Pair] = {}
        self.last: dict[Pair, int] = {}
        self.given_up: dict[MessageId, RejectReason] = {}
        self.senders: dict[SystemId, int] = {}
        """How many in `out` are of each system,"""
        self.targets: dict[SystemId, int] = {}
        """how many in the inbox are for each,"""
        self.pairs: dict[SystemId, int] = {}
        """and how many pairs each system is the sender of."""

    def restore(self, rows: Iterable[KeptRow]) -> None:
        """What is on disk, those of one stream in order."""
        for row in rows:
            match row.kind, row.value:
                case "out", UserMessage() as message:
                    self._put_out(message)
                case "in", UserMessage() as message:
                    self._put_in(message)
                case "last", int() as place:
                    self._put_last(Pair(row.id.sender, row.id.stream, row.target), place)
                case "given-up", RejectReason() as reason:
                    self.given_up[row.id] = reason
                case _:
                    raise ValueError(f"a row that says nothing: {row}")

    # From a system below to another root

    def post(self, message: UserMessage) -> list[Effect] | None:
        """A message for a system of another root. None: too many wait."""
        id, effects = message.id, self._hear_floor(message)
        if id in self.given_up:
            return [*effects, Sideways(self.root, Undelivered(id, self.given_up[id]))]
        known = self.out.get(id)
        if known is not None:
            if message.after >= known.after:
                return effects
            # What stood before it was received, or given up.
            return [*effects, Keep((self._change_out(replace(known, after=message.after)),))]
        if id in self.passed:
            return [*effects, *self._side(message.target, message)]
        if len(self.out) >= OUT_MAX or self.senders.get(id.sender, 0) >= OUT_PER_SENDER_MAX:
            return None
        self._put_out(message)
        return [*effects, Keep((_row(OUT, message, message),))]

    def forward(self, reached: Callable[[Context], bool], vector: Callable[[], Context]) -> list[Effect]:
        """Send what may be sent to the roots that are met."""
        effects: list[Effect] = []
        for id in [id for id in self.held if reached(self.out[id].context)]:
            effects += self._understood(id, vector())
        for root in sorted(self.met):
            ready, flying = self.ready.get(root, {}), self.flying.setdefault(root, {})
            flying_bytes = sum(len(self.out[each].payload) for each in flying)
            while ready and len(flying) < FLYING_MAX and flying_bytes < FLYING_BYTES_MAX:
                id = next(iter(ready))
                flying_bytes += len(self.out[id].payload)
                del ready[id]
                flying[id] = None
                effects.append(Sideways(root, self.out[id]))
        return effects

    def _understood(self, id: MessageId, context: Context) -> list[Effect]:
        """The context is here. From now on it is what this root has seen of every feed: that is the same elsewhere."""
        del self.held[id]
        if len(context) > CONTEXT_FEEDS_MAX:
            return self._give_up_out(id, RejectReason.TOO_LARGE)
        message = self.out[id] = replace(self.out[id], context=context)
        self.ready.setdefault(message.target.root, {})[id] = None
        return [Keep((_row(OUT, message, message),))]

    def _put_out(self, message: UserMessage) -> None:
        self.out[message.id] = message
        _count(self.senders, message.id.sender, 1)
        clocks = [witness.clock for clause in message.context for witness in clause]
        if any(clock.gen or clock.system.path or clock.system.root == self.root for clock in clocks):
            self.held[message.id] = None  # only this root knows when it is there
        else:
            self.ready.setdefault(message.target.root, {})[message.id] = None

    def _change_out(self, message: UserMessage) -> KeptRow:
        """It goes again, as it is now."""
        root, id = message.target.root, message.id
        self.out[id] = message
        if self.flying.get(root, {}).pop(id, id) is None:
            self.ready.setdefault(root, {})[id] = None
        return _row(OUT, message, message)

    def _leave_out(self, id: MessageId) -> UserMessage:
        message = self.out.pop(id)
        _count(self.senders, id.sender, -1)
        self.held.pop(id, None)
        for some in (self.ready, self.flying):
            some.get(message.target.root, {}).pop(id, None)
        return message

    # Other roots

    def meet(self, root: bytes) -> None:
        self.part(root)
        self.met |= {root}

    def part(self, root: bytes) -> None:
        """What was on its way may not have come."""
        self.met -= {root}
        self.ready[root] = {**self.flying.pop(root, {}), **self.ready.get(root, {})}

    def ask_again(self) -> None:
        """Time has passed: what is on its way is sent again, after the rest: one target that takes no more keeps no other
        from what is for it."""
        for root in self.met:
            self.ready[root] = {**self.ready.get(root, {}), **self.flying.pop(root, {})}

    def take(self, root: bytes, message: UserMessage, known: Callable[[SystemId], bool]) -> list[Effect]:
        """A message of another root's system for one of this root's."""
        id, pair, effects = message.id, pair_of(message), self._hear_floor(message)
        last = self.last.get(pair, 0)
        if id.seq <= last:
            return [*effects, *self._fate(message)]
        if message.after > last or id in self.where:  # not its turn; or one id for two targets: nobody honest has that
            return effects
        if not known(message.target):
            return [*effects, Sideways(root, Undelivered(id, RejectReason.UNKNOWN_SYSTEM))]
        if self._is_full(pair):
            return [*effects, Sideways(root, Backpressure("messages", 1.0))]
        message = replace(message, floor=id.seq)  # in order: nothing before it will come
        self._put_last(pair, id.seq)
        self._put_in(message)
        kept = Keep((_row(IN, message, message), _row(LAST, message, id.seq)))
        return [*effects, kept, Sideways(root, UserQueued(id))]

    def _is_full(self, pair: Pair) -> bool:
        crowded = len(self.last) >= PAIRS_MAX or self.pairs.get(pair.sender, 0) >= PAIRS_PER_SENDER_MAX
        if crowded and pair not in self.last:
            return True
        return len(self.where) >= INBOX_MAX or self.targets.get(pair.target, 0) >= INBOX_PER_TARGET_MAX

    def _put_last(self, pair: Pair, place: int) -> None:
        if pair not in self.last:
            _count(self.pairs, pair.sender, 1)
        self.last[pair] = place

    def _put_in(self, message: UserMessage) -> None:
        pair = pair_of(message)
        self.inbox[pair] = (*self.inbox.get(pair, ()), message)
        self.where[message.id] = pair
        _count(self.targets, pair.target, 1)

    def _fate(self, message: UserMessage) -> list[Effect]:
        """What became of a message that was taken."""
        id = message.id
        if id in self.given_up:
            return self._side(id.sender, Undelivered(id, self.given_up[id]))
        return self._side(id.sender, UserQueued(id) if id in self.where else UserReceipt(id, message.target))

    def queued(self, root: bytes, id: MessageId) -> list[Effect]:
        """The target's root has it."""
        message = self.out.get(id)
        if message is None or message.target.root != root:
            return []
        self._leave_out(id)
        self.passed[id] = root
        if len(self.passed) > PASSED_MAX:
            del self.passed[next(iter(self.passed))]
        return [Keep((_row(OUT, message, None),))]

    def over(self, root: bytes, told: UserReceipt | Undelivered) -> list[Effect]:
        """It was received or given up there: nothing of it is left here, and its sender is told.

        Of a message that is not known to be there nothing is believed: its sender will send it again, and it is asked for.
        """
        id = told.id
        message = self.out.get(id)
        if message is None:
            if self.passed.get(id) != root:
                return []
            del self.passed[id]
            return [Sideways(self.root, told)]
        if message.target.root != root or (isinstance(told, UserReceipt) and told.target != message.target):
            return []
        self._leave_out(id)
        gap = self._close_gap(message) if isinstance(told, Undelivered) else []
        return [Keep((_row(OUT, message, None), *gap)), Sideways(self.root, told)]

    def _close_gap(self, message: UserMessage) -> list[KeptRow]:
        """A message will not come: the one behind it waits for the one before it."""
        behind = [
            each for each in self.out.values() if each.after == message.id.seq and pair_of(each) == pair_of(message)
        ]
        return [self._change_out(replace(each, after=message.after)) for each in behind]

    # Towards a system below

    def heads(self, target: SystemId | None = None) -> list[UserMessage]:
        """What the systems below are to be told next: of each pair the first."""
        return [queue[0] for pair, queue in self.inbox.items() if target in (None, pair.target)]

    def received(self, id: MessageId) -> list[Effect]:
        """The target has the first of a pair."""
        pair = self.where.get(id)
        if pair is None or self.inbox[pair][0].id != id:
            return []
        message = self._leave_inbox(id)
        return [Keep((_row(IN, message, None),)), *self._side(id.sender, UserReceipt(id, message.target))]

    def _leave_inbox(self, id: MessageId) -> UserMessage:
        pair = self.where.pop(id)
        queue = self.inbox.pop(pair)
        left = tuple(each for each in queue if each.id != id)
        if left:
            self.inbox[pair] = left
        _count(self.targets, pair.target, -1)
        return next(each for each in queue if each.id == id)

    # What has waited too long

    def give_up(self, id: MessageId) -> list[Effect]:
        """Neither its target nor its target's root was there in time. It may have come all the same, unheard of."""
        if id in self.out:
            return self._give_up_out(id, RejectReason.EXPIRED)
        if id not in self.where:
            return []
        message = self._leave_inbox(id)
        kept = Keep((_row(IN, message, None), *self._note_given_up(message, RejectReason.EXPIRED)))
        return [kept, *self._side(id.sender, Undelivered(id, RejectReason.EXPIRED))]

    def _give_up_out(self, id: MessageId, reason: RejectReason) -> list[Effect]:
        message = self._leave_out(id)
        rows = [_row(OUT, message, None), *self._close_gap(message), *self._note_given_up(message, reason)]
        return [Keep(tuple(rows)), Sideways(self.root, Undelivered(id, reason))]

    def _note_given_up(self, message: UserMessage, reason: RejectReason) -> list[KeptRow]:
        rows = [_row(GIVEN_UP, message, reason)]
        self.given_up[message.id] = reason
        if len(self.given_up) > GIVEN_UP_MAX:
            oldest = next(iter(self.given_up))
            del self.given_up[oldest]
            rows.append(KeptRow(GIVEN_UP, oldest, message.target, None))
        return rows

    def _hear_floor(self, message: UserMessage) -> list[Effect]:
        """What its sender has heard of need not be remembered."""
        id = message.id
        told = [each for each in self.given_up if each[:2] == id[:2] and each.seq < message.floor]
        for each in told:
            del self.given_up[each]
        return [Keep(tuple(KeptRow(GIVEN_UP, each, message.target, None) for each in told))] if told else []

    def _side(self, system: SystemId, message: UserMessage | UserQueued | UserReceipt | Undelivered) -> list[Effect]:
        return [Sideways(system.root, message)] if system.root in self.met else []


def _row(kind: str, message: UserMessage, value: UserMessage | RejectReason | int | None) -> KeptRow:
    return KeptRow(kind, message.id, message.target, value)


def _count(counts: dict[SystemId, int], system: SystemId, by: int) -> None:
    number = counts.get(system, 0) + by
    if number:
        counts[system] = number
    else:
        counts.pop(system, None)
