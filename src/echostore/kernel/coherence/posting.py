"""User messages: from one application to another along the tree, with an effect at most once, never too early.

    sender   numbers the messages of a stream, keeps each until the target has it, and says with each how far all are
    hop      passes on at least once; holds a message until what is below includes its context; each waits alone
    target   remembers, for each stream, all that came below a mark and the few above it

`floor` lets the target forget: below it nothing will come that it has not had. So its state is as large as what is on
its way, not as what ever was.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from echostore.kernel.coherence.messages import (
    Arc,
    Context,
    MessageId,
    SystemId,
    Undelivered,
    UserMessage,
    UserReceipt,
)

ON_THE_WAY_MAX = 1024
"""Messages of one stream that the target may not have. It bounds what the target remembers above its mark."""

STREAMS_MAX = 100_000
"""Streams that a target remembers. Messages of more are not taken."""

CROSS_ROOT_STREAMS = 1 << 32
"""Streams to other roots have numbers of their own from here on: a root that is away keeps no other stream waiting."""

HELD_MAX = 10_000
"""Messages that a hop holds for their contexts; beyond it the link they came from is told to wait."""


def satisfied(context: Context, reached: Callable[[Arc, int], bool]) -> bool:
    """Every clause by one of its witnesses."""
    return all(any(reached(witness.clock, witness.tick) for witness in clause) for clause in context)


class Sender:
    """What one system sent and was not told to have arrived."""

    __slots__ = ("seqs", "unreceived")

    def __init__(self) -> None:
        self.seqs: dict[int, int] = {}
        self.unreceived: dict[tuple[int, int], UserMessage] = {}

    def post(self, message: UserMessage) -> UserMessage | None:
        """The message with its place in its stream; None when too many are on the way."""
        stream = message.id.stream
        if sum(each == stream for each, _ in self.unreceived) >= ON_THE_WAY_MAX:
            return None
        seq = self.seqs[stream] = self.seqs.get(stream, 0) + 1
        message = replace(message, id=message.id._replace(seq=seq))
        self.unreceived[stream, seq] = message
        return self._with_places(message)

    def pending(self) -> list[UserMessage]:
        """All that has to be sent again, oldest first."""
        return [self._with_places(self.unreceived[key]) for key in sorted(self.unreceived)]

    def received(self, receipt: UserReceipt) -> bool:
        """Whether that is news. Only the target's own word counts."""
        sent = self.unreceived.get((receipt.id.stream, receipt.id.seq))
        if sent is None or sent.target != receipt.target:
            return False
        del self.unreceived[receipt.id.stream, receipt.id.seq]
        return True

    def undelivered(self, told: Undelivered) -> UserMessage | None:
        """The message that was given up; None when that is known."""
        return self.unreceived.pop((told.id.stream, told.id.seq), None)

    def _with_places(self, message: UserMessage) -> UserMessage:
        """With the first place of its stream that may not have come, and the one before it for the same target."""
        stream, seq = message.id.stream, message.id.seq
        open_places = [(each, other) for (of, each), other in self.unreceived.items() if of == stream]
        before = [each for each, other in open_places if other.target == message.target and each < seq]
        after = max(before, default=0) if message.cross_root else 0
        return replace(message, floor=min(each for each, _ in open_places), after=after)


class Window(NamedTuple):
    """Of one stream: all up to `mark` has come, and `above` too."""

    mark: int = 0
    above: frozenset[int] = frozenset()


class Receiver:
    """What one system has received."""

    __slots__ = ("windows",)

    def __init__(self) -> None:
        self.windows: dict[tuple[SystemId, int], Window] = {}

    def take(self, id: MessageId, floor: int) -> bool:
        """Whether this message is new. A place too far ahead is not taken at all: no honest sender is there yet."""
        key = (id.sender, id.stream)
        if key not in self.windows and len(self.windows) >= STREAMS_MAX:
            return False
        window = self.windows.get(key, Window())
        mark = max(window.mark, floor - 1)
        if id.seq <= window.mark or id.seq in window.above or id.seq > mark + 2 * ON_THE_WAY_MAX or id.seq < floor:
            return False
        above = {seq for seq in window.above if seq > mark} | {id.seq}
        while mark + 1 in above:
            mark += 1
            above.discard(mark)
        self.windows[key] = Window(mark, frozenset(seq for seq in above if seq > mark))
        return True
