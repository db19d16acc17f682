"""Control feeds from one peer to another without a network, from a control state where they begin at one; what they amount to."""

import hashlib
from collections.abc import Sequence

from echostore.kernel.feed import Head
from echostore.kernel.ids import Cid, FeedKey, IdentityKey, Link
from echostore.kernel.limits import CREDENTIALS_MAX
from echostore.kernel.party.credentials import MemberAdmit, Role
from echostore.kernel.sync.port import Gone
from echostore.peer.control_floor import brings_on, fetch_floor, stand_on
from echostore.peer.party import Party


def control_from(giver: Party, taker: Party) -> None:
    """What the taker lacks of the giver's control feeds."""
    for tip in giver.sync_port.feeds():
        if tip.kind == "control":
            found = _read(giver, taker, tip.feed, tip.tip.length, tip.tip.link)
            if isinstance(found, Gone):
                take_floor(giver, taker, Cid(found.evidence))
    for tip in giver.sync_port.feeds():
        found = _read(giver, taker, tip.feed, tip.tip.length, tip.tip.link) if tip.kind == "control" else None
        if found is not None:
            assert not isinstance(found, Gone), "the state that was given begins elsewhere"
            start, payloads, head = found
            taker.sync_port.ingest(tip.feed, tip.kind, start, payloads, head)


def take_floor(giver: Party, taker: Party, evidence: Cid) -> None:
    """The taker looks at what the giver says of its control state, and stands on it."""
    theirs, blobs, processor = giver.runtime.blobs, taker.runtime.blobs, taker.runtime.processor
    assert theirs is not None
    assert blobs is not None
    floor = fetch_floor(evidence, processor, theirs.get)
    if brings_on(processor, floor):
        stand_on(processor, floor, blobs)


def _read(
    giver: Party, taker: Party, feed: FeedKey, length: int, link: Link
) -> tuple[int, Sequence[bytes], Head] | Gone | None:
    feeds = taker.runtime.feeds
    start = feeds.length(feed) if feeds.has_feed(feed) else 0
    if length <= start:
        return None
    found = giver.sync_port.read(feed, start, 1000, 1 << 24, link)
    assert found is not None
    return found if isinstance(found, Gone) else (start, *found)


def told(party: Party) -> dict[str, object]:
    """What membership and epochs amount to, by a machine as it stands."""
    processor = party.runtime.processor
    machine = processor.membership.machine
    return {
        "members": machine.members,
        "devices": machine.devices,
        "admission": machine.admission().digest,
        "policy": machine.policy,
        "chain": machine.epoch_tally().chain[-2:],
        "electorate": machine.electorate,
        "snapshot": party.snapshot().cid,
        "timeframe": processor.control_timeframe,
    }


def admit_many(party: Party, count: int) -> None:
    """Members who are a key and a long name: three thousand are a control state and a membership of more than one blob."""
    keys = [IdentityKey(hashlib.sha256(f"member {number}".encode()).digest()) for number in range(count)]
    said = [MemberAdmit(key, Role.EDITOR, f"{key.hex()} " * 6) for key in keys]
    for start in range(0, count, CREDENTIALS_MAX):
        party.members._issue([party.members._sign(each) for each in said[start : start + CREDENTIALS_MAX]])
