"""Which indexes are read here, as the system above is told: it sends deltas of an index only while they cost less than
the value, counted from the last word that it is read.

Word of that is gathered, except for one case: an index that is read, and of which no further delta would come. For a
small one that changes often each second change would be an Invalidate, a question and an answer; so that word goes up
at once.
"""

from echostore.kernel.coherence.holdings import Holdings
from echostore.kernel.coherence.messages import Delta, Invalidate, Message, Spec, Update

TOUCHED_MAX = 1000
"""Indexes in one word. Those beyond are told when they are read the next time."""


class Touches:
    """Called under the leaf's lock."""

    __slots__ = ("_pressing", "_spent", "read")

    def __init__(self) -> None:
        self.read: set[Spec] = set()
        """Read since the last word."""
        self._spent: dict[Spec, int] = {}
        """Bytes of deltas since the last word."""
        self._pressing: set[Spec] = set()

    def note(self, spec: Spec) -> bool:
        """An index is read; whether that should be told at once."""
        if len(self.read) < TOUCHED_MAX:
            self.read.add(spec)
        return spec in self._pressing

    def received(self, message: Message, holdings: Holdings) -> None:
        """Count the deltas of an update that was applied."""
        if not isinstance(message, Update):
            return
        for item in message.items:
            if isinstance(item, Delta):
                spec, size = item.spec, len(item.patch)
                spent = self._spent[spec] = self._spent.get(spec, 0) + size
                version = holdings.newest(spec)
                if version is not None and spent + size > len(version.value):
                    self._pressing.add(spec)
            elif isinstance(item, Invalidate):
                self.told(item.spec)

    def told(self, spec: Spec) -> None:
        """The system above counts from here on: it was told of a read, or gave the value."""
        self._spent.pop(spec, None)
        self._pressing.discard(spec)

    def take(self) -> tuple[Spec, ...]:
        """What to tell; it is told then."""
        specs = tuple(sorted(self.read))
        self.read.clear()
        for spec in specs:
            self.told(spec)
        return specs

    def clear(self) -> None:
        """Another link: all is counted anew."""
        self._spent.clear()
        self._pressing.clear()
