"""Real peers in temporary homes that share one party, and a link between them that copies blocks until both agree."""

from pathlib import Path

import echostore
from echostore.kernel.limits import APPEND_BLOCKS_MAX, APPEND_BYTES_MAX
from echostore.kernel.order import CONTROL
from echostore.peer.party import Party
from echostore.peer.peer import Peer


def open_quiet(home: Path, name: str = "") -> Peer:
    """A peer without a background thread: it flushes when it is told to, or when it closes."""
    return echostore.open(home, name=name or home.name, background=False)


def admitted(party: Party, other: Peer, *, role: str = "editor") -> Party:
    """The party as another peer sees it, once it was admitted and has caught up."""
    welcome = party.members.admit(other.request_join(party.key), role=role)
    entered = other.enter(welcome)
    sync(party, entered)
    return entered


def sync(*parties: Party) -> None:
    """Copy blocks in all directions until nobody has anything new."""
    for party in parties:
        party.flush()
    while any(_copy(source, target) for source in parties for target in parties if source is not target):
        pass


def _copy(source: Party, target: Party) -> bool:
    """Copy what the source holds and the target lacks, control feeds first; whether there was anything."""
    moved = False
    for tip in sorted(source.sync_port.feeds(), key=lambda tip: tip.kind != CONTROL):
        feeds = target.runtime.feeds
        start = feeds.length(tip.feed) if feeds.has_feed(tip.feed) else 0
        if tip.tip.length <= start:
            continue
        found = source.sync_port.read(tip.feed, start, APPEND_BLOCKS_MAX, APPEND_BYTES_MAX, tip.tip.link)
        if found is not None:
            payloads, head = found
            moved |= isinstance(target.sync_port.ingest(tip.feed, tip.kind, start, payloads, head), int)
    return moved
