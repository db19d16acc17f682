"""What is where: the numbers of `party.status`. "Synced" never stands alone: held, processed and known do."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echostore.kernel.ids import feed_id

if TYPE_CHECKING:
    from echostore.peer.party import Party


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """One feed: blocks on disk, applied, and announced by someone; why it stands still, if it does."""

    key: bytes
    kind: str
    owner: str
    own: bool
    held: int
    processed: int
    known: int
    waits_for: str
    ended: str
    excluded: str


@dataclass(frozen=True, slots=True)
class PartyStatus:
    """One party. `unshared` counts own blocks that no other peer is known to hold."""

    party: bytes
    title: str
    feeds: list[FeedStatus]
    items: int
    rejected: int
    unshared: int
    writable: bool
    failure: str


def party_status(party: "Party") -> PartyStatus:
    with party.reading() as runtime:
        processor = runtime.processor
        names = {member.identity: member.name for member in processor.membership.machine.members}
        rows, unshared = [], 0
        for held in runtime.feeds.feeds():
            cursor = processor.orderer.cursors.get(feed_id(held.key))
            admitted = processor.admission.by_id.get(feed_id(held.key))
            waits = cursor.waits_for if cursor else None
            processed = cursor.length if cursor else 0
            excluded = processor.admission.why_excluded(feed_id(held.key), max(0, processed - 1))
            known = max(held.length, party.known_length(held.key))
            rows.append(
                FeedStatus(
                    key=held.key,
                    kind=held.kind,
                    owner=names.get(admitted.identity, "") if admitted else "",
                    own=held.own,
                    held=held.length,
                    processed=min(processed, held.length),
                    known=known,
                    waits_for=f"{waits[0].hex()[:8]}:{waits[1]}" if waits else "",
                    ended=str(cursor.ended) if cursor and cursor.ended else "",
                    excluded=str(excluded) if excluded else "",
                )
            )
            if held.own:
                unshared += held.length - party.shared_length(held.key)
        return PartyStatus(
            party=party.key,
            title=party.title,
            feeds=rows,
            items=len(runtime.all_items()),
            rejected=len(processor.rejects()),
            unshared=unshared,
            writable=runtime.writable,
            failure=str(runtime.failure or ""),
        )
