"""`echostore doctor --full`: whether the items that are stored are those that the feeds give.

1  every row of items.db against its check value, every index against its tally      store/item_audit.py
2  the party folded from its feeds alone: the same CID, the same number of items
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from echostore.cli.output import counted
from echostore.kernel.errors import Corrupt

if TYPE_CHECKING:
    from echostore.peer.peer import Peer
    from echostore.store.meta_store import KnownParty

TRIES_MAX = 3
"""How often a party that is being written meanwhile is compared again."""


class Unequal(Corrupt):
    """The items are not those that the feeds give."""


def items_as_folded(peer: "Peer", known: "KnownParty") -> Iterator[str]:
    """What was compared, in words; raises Corrupt at the first difference."""
    from echostore.store.blob_store import BlobStore
    from echostore.store.item_audit import audit_items

    folder = peer.home.party(known.key)
    path = folder.items
    if path.exists():
        with BlobStore(folder.blobs, writable=False) if folder.blobs.exists() else nullcontext() as blobs:
            rows = audit_items(path, None if blobs is None else blobs.get)
        yield f"{counted(rows, 'row')} as written"
    if known.state == "closed":
        return
    party = peer.party(known.key)
    for _ in range(TRIES_MAX):
        stored = party.snapshot()
        anew = peer.opener.folded_anew(known)
        try:
            folded, count = anew.snapshot(), anew.status.items
        finally:
            anew.runtime.abandon()
        if stored.timeframe == folded.timeframe or not party.refresh():
            break
    else:
        yield "being written, so that no moment of it could be compared with the feeds"
        return
    if (stored.cid, party.status.items) != (folded.cid, count):
        raise Unequal(
            f"{path} gives {counted(party.status.items, 'item')} and the CID {stored.cid}, the feeds give "
            f"{count} and {folded.cid}",
            next_step=f"Remove {path} while no peer is open: it is then made anew from the feeds.",
        )
    yield f"{counted(count, 'item')}, the same when folded from the feeds"
