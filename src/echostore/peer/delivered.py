"""A data message that entered the state, as the processor tells of it and streams show it."""

from dataclasses import dataclass

from echostore.kernel.ids import FeedId, Link
from echostore.kernel.items.operations import ItemOperation, WriterRole


@dataclass(frozen=True, slots=True)
class Delivered:
    """A data message that entered the state, as streams show it."""

    feed: FeedId
    seq: int
    link: Link
    depth: int
    time_ms: int
    operations: tuple[ItemOperation, ...]
    writer: WriterRole
