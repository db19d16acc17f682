"""What is where: the numbers of `party.status`. "Synced" never stands alone: held, processed and known do."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echostore.kernel.errors import Refused
from echostore.kernel.ids import FeedId, FeedKey, feed_id
from echostore.kernel.party.credentials import Role
from echostore.kernel.reasons import Reason
from echostore.peer.elsewhere import HeldElsewhere

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.processor import PartyProcessor
    from echostore.peer.runtime import PartyRuntime


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
    others: tuple[HeldElsewhere, ...] = ()
    over_quota: bool = False
    """Whether more of it comes than its quota: then it is taken when nobody else waits."""
    slowed: int = 0
    """Blocks of it that stood behind those of others, since the start of this process."""
    start: int = 0
    """Blocks before this one are not on disk: the epoch that this peer stands on holds what they said."""


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
    """Whether a write would be taken now: the store is sound, and the party lets this device write."""
    failure: str
    standing: str
    """What this device is in the party: its member's role, or why it is in it no more. Empty: not admitted yet."""
    epoch: int | None = None
    """The epoch that this peer stands on; None: it has folded all messages."""
    discards: bool = False
    """Whether that epoch may have left things out, or one before it."""
    began: str = ""
    """How this device came by the party's past, if this process saw it: from an epoch, or by replaying history, and why."""
    lost: str = ""
    """What is lost here of the epoch that this peer stands on, and how far it is with fetching it again."""
    closed: bool = False
    """Whether so much of it is lost that nothing can be read or written."""
    next_step: str = ""
    """What to do about it."""
    disk_full: bool = False
    """Whether `failure` is a lack of space: it ends by itself once there is space."""
    unstored: int = 0
    """Changes of this device that are in memory only: shown here, not durable, and on no other peer."""
    arrived: bool = True
    """False when others were heard from, and none is known to hold what admits this device: what it writes counts nowhere else."""


WRITING_ROLES = frozenset(role.label for role in Role if role is not Role.READER)
REMOVED = "the member was removed"
REVOKED = "the device was revoked"


def standing_of(runtime: "PartyRuntime") -> str:
    """The role of this device's member, REMOVED or REVOKED; empty when the device is not admitted yet."""
    machine = runtime.processor.membership.machine
    entries = [each for each in machine.devices if each.device == runtime.device]
    if not entries:
        return ""
    roles = {member.identity: member.role for member in machine.members}
    held = [roles.get(each.identity) for each in entries if not each.revoked]
    role = max((role for role in held if role is not None), default=None)
    if role is not None:
        return role.label
    return REMOVED if held else REVOKED


def writing_refused(runtime: "PartyRuntime", reason: Reason) -> Refused:
    """Why this device may not write data, and what its person can do about it."""
    gone = standing_of(runtime)
    if gone in (REMOVED, REVOKED):
        return Refused(
            f"this device may not write to the party: {gone} ({reason})",
            next_step="What was written before stays readable here; `echostore party why` says who did it.",
        )
    next_step = "Ask an admin for the role of editor."
    if reason is Reason.RETIRED:
        next_step = "Its feed was retired for silence; what is written after this batch goes to a new one."
    return Refused(f"this device may not write to the party ({reason})", next_step=next_step)


def party_status(party: "Party") -> PartyStatus:
    with party.reading() as runtime:
        runtime.look_for_space()
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
            quota = party.peer.network.quota_of_feed(held.key) if party.peer.on_network else None
            rows.append(
                FeedStatus(
                    key=held.key,
                    kind=held.kind,
                    owner=names.get(admitted.identity, "") if admitted else "",
                    own=held.own,
                    held=held.length,
                    processed=min(processed, held.length),
                    known=known,
                    waits_for=f"{_feed_text(processor, waits[0])}:{waits[1]}" if waits else "",
                    ended=str(cursor.ended) if cursor and cursor.ended else "",
                    excluded=str(excluded) if excluded else "",
                    others=tuple(party.elsewhere(held.key)),
                    over_quota=quota is not None and quota.over,
                    slowed=quota.slowed if quota is not None else 0,
                    start=held.base,
                )
            )
            if held.own:
                unshared += held.length - party.shared_length(held.key)
        for key in sorted(party.known_feeds() - {bytes(row.key) for row in rows}):
            admitted = processor.admission.by_id.get(feed_id(FeedKey(key)))
            rows.append(
                FeedStatus(
                    key=key,
                    kind=admitted.kind if admitted else "",
                    owner=names.get(admitted.identity, "") if admitted else "",
                    own=False,
                    held=0,
                    processed=0,
                    known=party.known_length(key),
                    waits_for="",
                    ended="",
                    excluded="",
                    others=tuple(party.elsewhere(key)),
                )
            )
        return PartyStatus(
            party=party.key,
            title=party.title,
            feeds=rows,
            items=0 if processor.closed else sum(not runtime.source.is_system(item) for item in runtime.all_items()),
            rejected=len(party.rejected()),
            unshared=unshared,
            writable=runtime.takes_writes,
            failure=str(runtime.failure or ""),
            standing=standing_of(runtime),
            epoch=processor.base.name.number if processor.base is not None else None,
            discards=processor.base is not None and processor.base.name.discards,
            began=_began(party),
            lost=_lost(party),
            closed=processor.closed,
            next_step=processor.damage.next_step if processor.damage is not None else "",
            disk_full=runtime.disk_full,
            unstored=runtime.unstored,
            arrived=party.arrived or not party.heard_from_others,
        )


def _lost(party: "Party") -> str:
    """What is lost of the base, and what this process does about it."""
    damage = party.runtime.processor.damage
    if damage is None:
        return ""
    fetching = party.peer.network.bootstraps.mending.get(party.key, "") if party.peer.on_network else ""
    if damage.nobody_else():
        return f"{damage.text}; nobody else is in the party who could have it"
    return f"{damage.text}; {fetching or 'it is fetched again once a member is connected'}"


def _began(party: "Party") -> str:
    outcome = party.peer.network.bootstraps.outcomes.get(party.key) if party.peer.on_network else None
    if outcome is None:
        return ""
    if outcome.epoch is None:
        return f"from its whole history: {outcome.why}"
    return f"from epoch {outcome.epoch}: {outcome.why}"


def _feed_text(processor: "PartyProcessor", feed: FeedId) -> str:
    """The key of a feed; of one that nobody has admitted yet, the part of it that messages name."""
    cursor = processor.orderer.cursors.get(feed)
    return cursor.key.hex() if cursor else feed.hex()
