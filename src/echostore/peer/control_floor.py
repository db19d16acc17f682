"""Where control feeds begin: truncating them at an epoch's control state, and starting from one that others have.

    whoever frees its disk                                 whoever asks for blocks that are gone
    plan_floor   state of the epoch, evidence for it       is told the CID of the evidence (`sync_port.read`)
    rise_to      feeds begin at its cut, one transaction   fetch_floor  evidence, then the state: checked, nothing changed
                                                           stand_on     feeds begin at its cut; the tail is asked for

Truncating changes no answer: it is left when something came late that speaks of what would go. Evidence that no newcomer
would believe stops it as well, so a peer that truncated its control feeds can serve.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echostore.kernel.errors import Corrupt, NotFound, Refused
from echostore.kernel.ids import Cid, FeedKey, Link, feed_id
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.kernel.order import CONTROL
from echostore.kernel.party.control_state import LOWERING
from echostore.kernel.party.control_trust import left_out
from echostore.kernel.party.credentials import EpochAttest
from echostore.kernel.party.epoch_chain import Epoch
from echostore.peer.base_standing import put_back
from echostore.peer.control_naming import control_at
from echostore.peer.control_standing import (
    Credentials,
    control_cursor,
    fold_whole,
    membership_from,
)
from echostore.wire.control import Membership
from echostore.wire.control_blobs import Get, as_blobs, chunks_named, name_of, read_blobs
from echostore.wire.control_evidence import Placed, believed, encode_evidence, read_evidence
from echostore.wire.control_state import CONTROL_KEY, EVIDENCE_KEY, FLOOR_KEY, StoredControl
from echostore.wire.epochs import FeedCut, read_cut

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor
    from echostore.store.blob_store import BlobStore


@dataclass(frozen=True, slots=True)
class Floor:
    """A control state with the evidence for it, both checked."""

    stored: StoredControl
    data: bytes
    evidence: bytes

    @property
    def blobs(self) -> dict[Cid, bytes]:
        return {**as_blobs(self.data), **as_blobs(self.evidence)}

    @property
    def cuts(self) -> tuple[FeedCut, ...]:
        return tuple(self.stored.cuts.values())

    @property
    def about(self) -> dict[str, bytes]:
        """What the FeedStore says once feeds begin there."""
        return {FLOOR_KEY: self.data, EVIDENCE_KEY: name_of(self.evidence), CONTROL_KEY: b""}

    @property
    def beginnings(self) -> dict[FeedKey, tuple[int, Link]]:
        return {cut.feed: (cut.length, cut.link) for cut in self.cuts}


def kept_blobs(processor: "PartyProcessor", blobs: "BlobStore") -> list[Cid]:
    """The blobs that newcomers are given, where control feeds begin later."""
    feeds = processor.feeds
    data, evidence = feeds.about(FLOOR_KEY), feeds.about(EVIDENCE_KEY)
    if not data or not evidence:
        return []
    name = Cid(evidence)
    head = blobs.get_some([name], BLOB_BYTES_MAX).get(name)  # nothing where it is lost, or damaged
    return [*as_blobs(data), name, *(chunks_named(name, head) if head is not None else [])]


def mend_floor(processor: "PartyProcessor", blobs: "BlobStore") -> Cid | None:
    """Put back what newcomers are given, where it was lost: the FeedStore has the state, the tail has the evidence.

    Returns the CID of evidence that has to come from others.
    """
    feeds = processor.feeds
    data, evidence = feeds.about(FLOOR_KEY), feeds.about(EVIDENCE_KEY)
    if not data or not evidence:
        return None
    blobs.drop_damaged(kept_blobs(processor, blobs))
    state = as_blobs(data)
    blobs.put_many({cid: state[cid] for cid in blobs.missing(state)})
    if not blobs.missing(kept_blobs(processor, blobs)):
        return None
    fold_whole(processor)
    named = [
        each for each in processor.membership.machine.epoch_tally(None).chain if each.genesis.control == name_of(data)
    ]
    try:
        made = _evidence_for(processor, named[0]) if named else b""
        believed(read_evidence(made, processor.party), data, processor.party)
    except (Corrupt, NotFound):
        return Cid(evidence)
    blobs.put_many(as_blobs(made))
    feeds.set_about({EVIDENCE_KEY: name_of(made)})
    return None


# truncating


def plan_floor(processor: "PartyProcessor", epoch: Epoch, blobs: "BlobStore") -> Floor | str:
    """What it takes to let control feeds begin at an epoch's cut; or why they stay as they are. Nothing is changed."""
    name = epoch.genesis.control
    if processor.parent is not None:
        return "a child party has no control feeds"
    if not name:
        return f"epoch {epoch.number} names no control state"
    feeds = processor.feeds
    entries = {entry.feed: entry for entry in epoch.genesis.control_timeframe}
    if all(feeds.has_feed(key) and feeds.feed(key).base > entry.seq for key, entry in entries.items()):
        return "they begin there already"
    for key, entry in entries.items():
        if not feeds.has_feed(key) or feeds.link_at(key, entry.seq) != entry.link:
            return "they begin later already, or on another branch"
        if feeds.branches(key):
            return "one of them has branches"
    fold_whole(processor)
    try:
        data = _state_of(processor, epoch, blobs)
        evidence = _evidence_for(processor, epoch)
        stored, _ = believed(read_evidence(evidence, processor.party), data, processor.party)
    except NotFound:
        return f"the control state of epoch {epoch.number} is not here"
    except Corrupt as error:
        return f"no newcomer would believe it: {error.what}"
    if membership_from(processor, stored).machine.late:
        return "something came late that speaks of what would go"
    return Floor(stored, data, evidence)


def _state_of(processor: "PartyProcessor", epoch: Epoch, blobs: "BlobStore") -> bytes:
    name = Cid(epoch.genesis.control)
    if blobs.has(name) and not blobs.missing(chunks_named(name, blobs.get(name))):
        return read_blobs(name, blobs.get)
    made = control_at(processor, read_cut(Cid(epoch.genesis.cut), blobs.get))
    if made.cid != name:
        raise NotFound("a control state that this peer can't make")
    return made.data


def _evidence_for(processor: "PartyProcessor", epoch: Epoch) -> bytes:
    """The genesis of an epoch, and one attest of each identity that stands for it."""
    machine = processor.membership.machine
    credentials = Credentials(processor.feeds, processor.control_start, processor.control_named)
    found: list[Placed] = []
    waiting = set(epoch.attested_by) - {epoch.declarer}
    for event in sorted(machine.events, key=lambda each: (each.stamp, each.hash)):
        if event.claim is None:
            continue
        said = event.claim.assertion
        vote = isinstance(said, EpochAttest) and said.genesis == epoch.hash and event.claim.issuer in waiting
        if vote:
            waiting.discard(event.claim.issuer)
        if vote or (event.hash == epoch.hash and not found):  # its declarer may have repeated it
            signed = credentials.at(event.feed_key, event.seq, event.position)
            found.append(Placed(event.feed_key, event.seq, event.stamp.depth, signed))
    return encode_evidence(processor.party, Cid(epoch.genesis.control), found)


def rise_to(processor: "PartyProcessor", floor: Floor) -> None:
    """The feeds begin at a floor now: stand on it as whoever opens the party again does."""
    _take(processor, floor, membership_from(processor, floor.stored))
    _look_again(processor)


# starting from what others have


def fetch_floor(evidence: Cid, processor: "PartyProcessor", get: Get) -> Floor:
    """Evidence and state by their names, checked; Corrupt or Refused when it is not to be stood on. Changes nothing.

    `get` fetches a blob. What this device knows itself is held against it under the peer's lock, in `stand_on`.
    """
    told = read_blobs(evidence, get)
    found = read_evidence(told, processor.party)
    data = read_blobs(found.state, get)
    stored, _ = believed(found, data, processor.party)
    return Floor(stored, data, told)


def brings_on(processor: "PartyProcessor", floor: Floor) -> bool:
    """Whether a floor has what was not processed here."""
    cursors = processor.orderer.cursors
    lengths = {cursor.key: cursor.length for cursor in cursors.values() if cursor.kind == CONTROL}
    return any(lengths.get(cut.feed, 0) < cut.length for cut in floor.cuts)


def stand_on(processor: "PartyProcessor", floor: Floor, blobs: "BlobStore") -> None:
    """Let the control feeds begin at a floor in the place of what was folded here so far, and go on from there."""
    assert processor.parent is None, "a child party has no control feeds"
    feeds = processor.feeds
    for cut in floor.cuts:
        held = feeds.feed(cut.feed) if feeds.has_feed(cut.feed) else None
        if held is not None and held.length >= cut.length and feeds.link_at(cut.feed, cut.length - 1) != cut.link:
            raise Refused("a control state that leaves the history which this device holds")
    gone = left_out(floor.stored.state, processor.membership.machine)
    if gone is not None:
        removal = gone.claim is not None and isinstance(gone.claim.assertion, LOWERING)
        what = "a removal" if removal else "something"
        raise Refused(f"a control state that leaves out {what} which this device knows of")
    blobs.put_many({cid: data for cid, data in floor.blobs.items() if not blobs.has(cid)})
    feeds.begin_at(floor.beginnings, floor.about, kind="control")
    _take(processor, floor, Membership(processor.party, floor.stored.state))
    orderer = processor.orderer
    for feed, cursor in list(orderer.cursors.items()):
        if cursor.kind == CONTROL:
            orderer.branches.pop(feed, None)
            put_back(cursor, control_cursor(cursor.key, floor.stored))
            cursor.held = max(cursor.length, processor.held_length(CONTROL, cursor.key))
            processor.follow_branches(cursor)
    for cut in floor.cuts:
        processor.follow(control_cursor(cut.feed, floor.stored))
    processor.reader.forget()
    orderer.restart()
    processor.advanced.update(feed_id(cut.feed) for cut in floor.cuts)
    processor.advance(list(orderer.cursors))
    _look_again(processor)
    processor.advance(list(orderer.cursors))


def _take(processor: "PartyProcessor", floor: Floor, membership: Membership) -> None:
    processor.control_floor = {feed_id(cut.feed): cut for cut in floor.cuts}
    processor.control_start, processor.control_named = floor.stored, None
    processor.control_kept = sum(floor.stored.state.lengths.values())
    for each in (processor, *processor.children):
        each.membership = membership
        each.orderer.set_base(each.order_cuts())


def _look_again(processor: "PartyProcessor") -> None:
    """What counts may be another now."""
    processor.control_replaced()
    for child in list(processor.children):
        child.control_moved()
