"""One party's control feeds, folded: the kernel's Orderer and PartyMachine over held control blocks.

    held control feeds ──► Orderer (all branches) ──► Membership ──► admission, roster, refused credentials
                                                 └──► how far each feed is processed, and what data may depend on

A control feed that forks without a proof of it in control is read up to the fork: two peers would read on differently.
With the proof the membership says what counts, and one branch is read to its end as a peer does.
"""

from dataclasses import dataclass, field

from echostore.kernel.ids import FeedId, FeedKey, Link, PartyKey, feed_id
from echostore.kernel.order import CONTROL, DATA, Cut, Delivery, Envelope, FeedCursor, Held, Mark, Orderer
from echostore.kernel.party.credentials import FeedKind
from echostore.kernel.reasons import Reason
from echostore.pipeline.stages.holding import HeldFeed, HeldPiece
from echostore.wire.control import Membership
from echostore.wire.control_state import StoredControl
from echostore.wire.messages import decode_envelope


@dataclass(slots=True)
class ControlFeed:
    """A control feed and its blocks, by piece."""

    key: FeedKey
    held: HeldFeed
    links: dict[int, list[bytes]]
    payloads: dict[int, list[bytes]]


@dataclass(slots=True)
class FoldedParty:
    """What control says. `processed` is how far each piece is, on whichever branch."""

    membership: Membership
    cursors: dict[FeedId, FeedCursor]
    processed: dict[int, int]
    envelopes: dict[tuple[int, int], Envelope | Reason]
    unproven: dict[FeedKey, int] = field(default_factory=dict)
    """Feeds that fork without a proof, and where."""


def fold_party(party: PartyKey, feeds: dict[FeedKey, ControlFeed], start: StoredControl | None = None) -> FoldedParty:
    """Folds the control feeds of a party; again, with less, while forks turn out to be unproven.

    With `start` from that state on, where what lies below was freed everywhere.
    """
    forks = {key: fork for key, feed in feeds.items() if (fork := feed.held.fork) is not None}
    unproven: dict[FeedKey, int] = {}
    envelopes: dict[tuple[int, int], Envelope | Reason] = {}
    while True:
        folded = _Folding(party, feeds, start, unproven, envelopes).run()
        proven = folded.membership.machine.forks
        found = {key: seq for key, seq in forks.items() if proven.get(key, seq + 1) > seq}
        if found.keys() <= unproven.keys():
            return folded
        unproven |= found


class _Folding:
    def __init__(
        self,
        party: PartyKey,
        feeds: dict[FeedKey, ControlFeed],
        start: StoredControl | None,
        unproven: dict[FeedKey, int],
        envelopes: dict[tuple[int, int], Envelope | Reason],
    ) -> None:
        self._feeds = feeds
        self._begun = start.cuts if start is not None else {}
        self._unproven = dict(unproven)
        self._envelopes = envelopes
        self._paths: dict[tuple[FeedId, int], list[HeldPiece]] = {}
        below = {feed_id(key): Cut(cut.length, cut.link, cut.depth) for key, cut in self._begun.items()}
        self._orderer = Orderer(fetch=self._fetch, lookup=self._lookup, base=below)
        self._membership = Membership(party, start.state if start is not None else None)

    def run(self) -> FoldedParty:
        for key in sorted(self._feeds):
            # Of two keys with one id a peer follows whichever came first; here that is the lower one.
            if feed_id(key) not in self._orderer.cursors:
                self._follow(self._feeds[key])
        self._deliver(list(self._orderer.cursors))
        for record in self._membership.admission().followed:
            if record.kind is FeedKind.DATA and feed_id(record.feed) not in self._orderer.cursors:
                # Never read here. A control message that names one is of the wrong kind, and no longer waits.
                self._orderer.add(FeedCursor(record.feed, DATA))
        self._deliver(list(self._orderer.cursors))
        cursors = {feed: cursor for feed, cursor in self._orderer.cursors.items() if cursor.kind == CONTROL}
        return FoldedParty(self._membership, cursors, self._processed(), self._envelopes, self._unproven)

    def _follow(self, feed: ControlFeed) -> None:
        main = feed.held.main()
        paths = [main, *(path for path in _leaves(feed.held) if path != main)]
        for number, path in enumerate(paths):
            self._paths[feed_id(feed.key), number] = path
            end = path[-1].end if path else 0
            cursor = FeedCursor(feed.key, CONTROL, branch=number, held=end)
            cut = self._begun.get(feed.key)
            if cut is not None:
                cursor.length, cursor.link, cursor.depth = cut.length, cut.link, cut.depth
                cursor.asserted = {known.feed: known for known in cut.asserted}
            self._orderer.add(cursor)

    def _deliver(self, feeds: list[FeedId]) -> None:
        for event in self._orderer.run(feeds):
            fork = self._unproven.get(event.cursor.key)
            if isinstance(event, Delivery) and (fork is None or event.seq < fork):
                self._membership.receive(event)

    def _processed(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for feed, cursor in [
            *self._orderer.cursors.items(),
            *((feed, cursor) for feed, branches in self._orderer.branches.items() for cursor in branches),
        ]:
            for held in self._paths.get((feed, cursor.branch), ()):
                reached = min(cursor.length, held.end)
                piece = held.stretch.piece
                found[piece] = max(found.get(piece, 0), reached)
        return found

    def _fetch(self, cursor: FeedCursor, seq: int) -> Held:
        piece, index = self._find(cursor, seq)
        known = self._envelopes.get((piece, index))
        if known is None:
            known = self._envelopes[piece, index] = decode_envelope(
                self._feeds[cursor.key].payloads[piece][index], CONTROL
            )
        return Held(Link(self._feeds[cursor.key].links[piece][index]), known)

    def _lookup(self, cursor: FeedCursor, seq: int) -> Mark:
        link, envelope = self._fetch(cursor, seq)
        assert isinstance(envelope, Envelope), (cursor.key.hex(), seq, envelope)
        return Mark(link, envelope.depth)

    def _find(self, cursor: FeedCursor, seq: int) -> tuple[int, int]:
        path = self._paths[cursor.id, cursor.branch]
        low, high = 0, len(path) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if path[middle].stretch.start <= seq:
                low = middle
            else:
                high = middle - 1
        return path[low].stretch.piece, seq - path[low].stretch.start


def _leaves(held: HeldFeed) -> list[list[HeldPiece]]:
    """The way from the first block to each end of a feed."""
    paths = []
    for tip in held.pieces:
        if tip.children:
            continue
        path = [tip]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        paths.append(path[::-1])
    return paths
