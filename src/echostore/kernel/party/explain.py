"""Why a key is what it is: the credentials about it, each with its verdict, and what the valid ones rest on.

For `party why KEY`. The first steps speak of the key itself, in canonical order; after them come the admissions of
who issued those, up to the genesis. It reads verdicts and decides nothing.
"""

from collections import deque
from dataclasses import dataclass

from echostore.kernel.ids import FeedId, Stamp
from echostore.kernel.party.credentials import (
    AdoptLocal,
    CapabilityRevoke,
    Claim,
    DeviceAdmit,
    DeviceRevoke,
    FeedAdmit,
    FeedRetire,
    ForkEvidence,
    GroupAdmit,
    MemberAdmit,
    MemberRemove,
    PartyGenesis,
    RoleChange,
)
from echostore.kernel.party.ledger import Event, Ledger
from echostore.kernel.party.verdicts import Verdicts
from echostore.kernel.reasons import Reason


@dataclass(frozen=True, slots=True)
class Step:
    """One credential on the way from a key to the genesis. `reason` is None when it is valid."""

    key: bytes
    act: str
    issuer: bytes
    device: bytes
    feed: FeedId
    seq: int
    position: int
    reason: Reason | None
    detail: str
    hash: bytes


def why(verdicts: Verdicts, key: bytes) -> list[Step]:
    """Steps from `key` up to the genesis; empty when no credential names it."""
    steps: list[Step] = []
    told: set[Event] = set()
    asked = {key}
    waiting: deque[bytes] = deque([key])
    about = _by_key(verdicts.events)
    while waiting:
        current = waiting.popleft()
        for event in about.get(current, ()):
            valid = event not in verdicts.refusals
            # Of the key itself everything is told; of those above it only what the chain rests on.
            if event in told or (current != key and not (valid and _admits(event))):
                continue
            told.add(event)
            steps.append(_step(verdicts, current, event))
            if valid and event.claim is not None:
                for above in (bytes(event.claim.issuer), bytes(event.claim.device)):
                    if above not in asked:
                        asked.add(above)
                        waiting.append(above)
    return steps


def named(verdicts: Verdicts) -> set[bytes]:
    """Every key that a credential is about, whether it counts or not."""
    return {key for event in verdicts.events if event.claim is not None for key in _subjects(event.claim)}


def _by_key(events: list[Event]) -> dict[bytes, list[Event]]:
    """Events by every key that they are about, in canonical order."""
    about: dict[bytes, list[Event]] = {}
    for event in sorted(events, key=_place):
        for key in _subjects(event.claim) if event.claim else ():
            about.setdefault(key, []).append(event)
    return about


def _place(event: Event) -> tuple[Stamp, bytes]:
    return event.stamp, event.hash


def _subjects(claim: Claim) -> set[bytes]:
    said = claim.assertion
    match said:
        case PartyGenesis():
            return {said.party, said.identity, said.device, said.control_feed, said.data_feed}
        case MemberAdmit() | RoleChange() | MemberRemove():
            return {said.member}
        case GroupAdmit():
            return {said.group, *said.members}
        case DeviceAdmit() | DeviceRevoke() | AdoptLocal():
            return {said.device} if isinstance(said, DeviceRevoke) else {said.device, said.identity}
        case FeedAdmit() | FeedRetire():
            return {said.feed}
        case ForkEvidence():
            return {said.proof.feed}
        case CapabilityRevoke():
            return {said.id}
        case _:
            return set()


def _admits(event: Event) -> bool:
    assert event.claim is not None
    return isinstance(
        event.claim.assertion, PartyGenesis | MemberAdmit | GroupAdmit | DeviceAdmit | AdoptLocal | RoleChange
    )


def _step(verdicts: Verdicts, key: bytes, event: Event) -> Step:
    claim, refusal = event.claim, verdicts.refusal(event)
    assert claim is not None
    act = type(claim.assertion).__name__
    detail = refusal.detail if refusal else _grounds(verdicts.ledger, event, claim)
    reason = refusal.reason if refusal else None
    return Step(key, act, claim.issuer, claim.device, event.feed, event.seq, event.position, reason, detail, event.hash)


def _grounds(ledger: Ledger, event: Event, claim: Claim) -> str:
    said = claim.assertion
    if isinstance(said, PartyGenesis):
        return "valid because the party key signed it"
    if isinstance(said, ForkEvidence):
        return "valid because both heads are signed by the feed's key"
    role = ledger.role(claim.issuer, event)
    if role is None:
        return "valid because it was decided before the removal of its issuer, who was senior"
    if isinstance(said, DeviceAdmit | FeedAdmit | DeviceRevoke) and said.identity == claim.issuer:
        return f"valid because a member ({role.label}) may say it of its own devices and feeds"
    if isinstance(said, CapabilityRevoke) and said.issuer and (claim.issuer, said.issuer) in ledger.device_admits:
        return f"valid because a member ({role.label}) may revoke what its own devices issued"
    return f"valid because its issuer was {role.label} in its past"
