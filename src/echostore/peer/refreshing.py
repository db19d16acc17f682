"""`party.refresh()`: what a read-only peer does to see what the process that writes its home has written since.

The reader keeps the checkpoint of the items that it was opened with, and folds the blocks that came since on top, in
memory: it costs what is new. Streams go on where they were, and live queries are told, as when a peer sends blocks.
"""

from typing import TYPE_CHECKING

from echostore.kernel.errors import Refused
from echostore.kernel.order import CONTROL, FeedCursor
from echostore.wire.base_epoch import BASE_KEY

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.processor import PartyProcessor


def refresh(party: "Party") -> bool:
    """Take in what another process has written since; whether there was anything.

    Only a read-only peer has to ask. In one that writes, everything is taken in as it comes.
    """
    with party.reading() as runtime:
        processor = runtime.processor
        if runtime.writable or processor.paused:
            return False
        before = processor.counters.control + processor.counters.delivered
        if processor.parent is not None:
            refresh(party.peer.party(processor.parent.party))
        _check_base(processor)
        if processor.parent is None:
            for held in processor.feeds.feeds():
                if held.kind == CONTROL:
                    processor.follow(FeedCursor(held.key, CONTROL))
        processor.resume()
        return processor.counters.control + processor.counters.delivered != before


def _check_base(processor: "PartyProcessor") -> None:
    """What is folded on top of one epoch can't go on from another."""
    found = processor.feeds.about(BASE_KEY)
    if found != (processor.base.name.encode() if processor.base is not None else None):
        raise Refused(
            "the party has moved on to a newer epoch", next_step="Close this peer and open it again: that starts there."
        )
