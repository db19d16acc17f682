"""How a message travels over a link that keeps the order: as one frame, or an update that is too large as several.

A root tells a thousand links the same: `Parts` keeps the bytes of the message that was asked for last.
"""

from collections.abc import Sequence

from echostore.kernel.coherence.messages import Delta, Invalidate, Message, PublishOp, Subscribed, Update, UpdateItem
from echostore.kernel.coherence.updates import frames_of
from echostore.wire.coherence import UPDATE_BYTES_MAX, UPDATE_ITEMS_MAX, message_bytes
from echostore.wire.coherence_names import TEXT_CHARACTERS_MAX


def parts_of(message: Message) -> Sequence[Message]:
    """The messages that are frames of their own."""
    if not isinstance(message, Update):
        return (message,)
    few = len(message.items) <= UPDATE_ITEMS_MAX and (message.items or message.follows)
    if few and sum(map(_size, message.items)) <= UPDATE_BYTES_MAX:
        return (message,)
    return frames_of(message)


class Parts:
    """A message's parts with their bytes, without the generation of a link; of the last message, kept."""

    __slots__ = ("_message", "_parts")

    def __init__(self) -> None:
        self._message: Message | None = None
        self._parts: list[tuple[Message, bytes]] = []

    def of(self, message: Message) -> list[tuple[Message, bytes]]:
        if message is not self._message:
            self._parts = [(part, message_bytes(part)) for part in parts_of(message)]
            self._message = message
        return self._parts


def _size(item: UpdateItem) -> int:
    """The bytes of an item, about."""
    match item:
        case Delta(spec, _, patch):
            return len(spec) + len(patch)
        case Subscribed(spec) | Invalidate(spec):
            return len(spec)
        case PublishOp(_, object, delta):
            return len(object) + len(delta)
        case _:
            return TEXT_CHARACTERS_MAX
