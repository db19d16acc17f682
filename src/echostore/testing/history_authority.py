"""The checker's reading of control: who was allowed to write, from the claims alone. Standard library only.

    past(e)     what happened before a block: its predecessor, its dependencies, and theirs

A data block counts when its past says so: a claim there admits its feed, another the identity that the feed belongs to, and
that identity's last role there may write. A claim counts when its own past gives its issuer that right: owners and admins
admit, and change roles; everybody admits own devices and feeds; the creator's own stand in the genesis. This knows nothing of concurrent
removals: those leave cuts (`MemberRemove`, `DeviceRevoke`), whose effect is checked with the other exclusions.
"""

from dataclasses import dataclass, field
from typing import Any, Final

Event = dict[str, Any]
Place = tuple[str, int]
"""(feed, seq)"""

ADMITTING: Final = ("owner", "admin")
WRITING: Final = ("owner", "admin", "editor")


@dataclass(slots=True)
class ControlEntry:
    """A block of a control feed: what it claims, and what it directly follows."""

    feed: str
    seq: int
    deps: list[Place]
    claims: list[Event]


@dataclass(slots=True)
class Standing:
    """What a past says: roles of identities, and to whom feeds belong."""

    roles: dict[str, str] = field(default_factory=dict)
    feeds: dict[str, str] = field(default_factory=dict)


class Authority:
    """All control blocks of a history."""

    def __init__(self) -> None:
        self._entries: dict[Place, ControlEntry] = {}
        self._standings: dict[frozenset[Place], Standing] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def read(self, event: Event) -> None:
        place = (event["feed"], event["seq"])
        deps = [(feed, seq) for feed, seq, _ in event["deps"]]
        self._entries[place] = ControlEntry(*place, deps, event["claims"])

    def why_not(self, feed: str, heads: set[Place]) -> str | None:
        """Why a block of a data feed, whose past has these control blocks last, may not count; None when it may."""
        standing = self._standing(heads)
        owner = standing.feeds.get(feed)
        if owner is None:
            return "its feed is not admitted in its past"
        role = standing.roles.get(owner)
        return None if role in WRITING else f"its writer is {role or 'no member'} in its past"

    def _standing(self, heads: set[Place]) -> Standing:
        past = self._past(heads)
        known = self._standings.get(past)
        if known is None:
            known = self._standings[past] = self._replayed(past)
        return known

    def _past(self, heads: set[Place]) -> frozenset[Place]:
        found: set[Place] = set()
        todo = [head for head in heads if head in self._entries]
        while todo:
            place = todo.pop()
            if place in found:
                continue
            found.add(place)
            entry = self._entries[place]
            before = [(entry.feed, entry.seq - 1)] if entry.seq else []
            todo += [each for each in [*before, *entry.deps] if each in self._entries]
        return frozenset(found)

    def _replayed(self, past: frozenset[Place]) -> Standing:
        """Apply the claims, causes first; among concurrent ones the order makes no difference to what is asked here."""
        standing = Standing()
        done: set[Place] = set()
        todo = sorted(past)
        while todo:
            ready = [each for each in todo if self._direct(each, past) <= done]
            assert ready, "control blocks that follow each other in a circle"
            for place in ready:
                for claim in self._entries[place].claims:
                    _apply(standing, claim)
            done |= set(ready)
            todo = [each for each in todo if each not in done]
        return standing

    def _direct(self, place: Place, past: frozenset[Place]) -> set[Place]:
        entry = self._entries[place]
        return {each for each in [(entry.feed, entry.seq - 1), *entry.deps] if each in past}


def _apply(standing: Standing, claim: Event) -> None:
    said, issuer = claim["assertion"], claim["issuer"]
    kind = said["is"]
    if kind == "PartyGenesis":
        standing.roles[said["identity"]] = "owner"
        standing.feeds[said["data_feed"][:16]] = said["identity"]
        return
    role = standing.roles.get(issuer)
    if kind in ("MemberAdmit", "RoleChange") and role in ADMITTING and said["member"] != issuer:
        standing.roles[said["member"]] = said["role"]
    elif kind == "MemberRemove" and role in ADMITTING:
        standing.roles.pop(said["member"], None)
    elif kind == "FeedAdmit" and said["kind"] == "data" and (role in ADMITTING or said["identity"] == issuer):
        standing.feeds[said["feed"][:16]] = said["identity"]
