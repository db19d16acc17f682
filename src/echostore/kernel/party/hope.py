"""Hope: whether a credential could count under any verdict on those before it.

The verdicts fold anew when an arrival may change what was decided, which costs as much as all credentials together. A
credential that is refused whatever is found valid changes nothing, and must not cost that: else a reader who sends
removals that nobody accepts would make every member fold the party for each of them.

    hope of an identity    the greatest role that any credential received so far could have given it

A grant counts towards the hope of its subject only when its issuer could have been an admin. A credential sees only
what was received before it, so what is hopeless when it arrives stays so for ever. Being generous here is safe: it
costs time. Being mean would be wrong.
"""

from collections import defaultdict

from echostore.kernel.ids import DeviceKey, FeedId, FeedKey, IdentityKey, feed_id
from echostore.kernel.party.credentials import (
    AdoptLocal,
    DeviceAdmit,
    DeviceRevoke,
    FeedAdmit,
    FeedRetire,
    GroupAdmit,
    MemberAdmit,
    MemberRemove,
    PartyGenesis,
    Role,
    RoleChange,
)
from echostore.kernel.party.ledger import DevicePair, Event


class Hope:
    """What the credentials of a party could amount to, valid or not."""

    def __init__(self) -> None:
        self._roles: dict[IdentityKey, Role] = {}
        self._groups_of: defaultdict[IdentityKey, set[IdentityKey]] = defaultdict(set)
        self._devices: set[DevicePair] = set()
        self._owners: defaultdict[FeedId, set[tuple[FeedKey, IdentityKey]]] = defaultdict(set)
        self._creators: set[IdentityKey] = set()
        self._grants: defaultdict[IdentityKey, list[tuple[Event, Role]]] = defaultdict(list)
        """What could have given a role, for whom, in whose own past its issuer could have been an admin."""
        self._listings: defaultdict[IdentityKey, list[tuple[Event, IdentityKey]]] = defaultdict(list)

    def role(self, identity: IdentityKey) -> Role | None:
        """The greatest role that an identity or a group could have; None when nobody could have admitted it."""
        named = (identity, *self._groups_of.get(identity, ()))
        return max((self._roles[each] for each in named if each in self._roles), default=None)

    def role_before(self, event: Event) -> Role | None:
        """The greatest role that the issuer of `event` could have had by what it sees: whatever came here first."""
        assert event.claim is not None
        issuer = event.claim.issuer
        named = (issuer, *(group for listed, group in self._listings.get(issuer, ()) if event.sees(listed)))
        seen = (role for each in named for grant, role in self._grants.get(each, ()) if event.sees(grant))
        return max(seen, default=None)

    def note(self, event: Event) -> None:
        """Takes in a credential that is neither malformed nor of another party."""
        assert event.claim is not None
        said = event.claim.assertion
        match said:
            case PartyGenesis():
                self._creators.add(said.identity)
                self._grant(said.identity, Role.OWNER)
                self._grants[said.identity].append((event, Role.OWNER))
                self._devices.add((said.identity, said.device))
                for feed in (said.control_feed, said.data_feed):
                    self._owners[feed_id(feed)].add((feed, said.identity))
            case DeviceAdmit():
                self._devices.add((said.identity, said.device))
            case FeedAdmit():
                self._owners[feed_id(said.feed)].add((said.feed, said.identity))
            case AdoptLocal():
                self._devices.add((said.identity, said.device))
        if isinstance(said, MemberAdmit | GroupAdmit | RoleChange | AdoptLocal) and self._is_admin(event.claim.issuer):
            self._note_grant(said)
            if (self.role_before(event) or 0) >= Role.ADMIN:
                self._note_grant_at(event, said)

    def none_for(self, event: Event) -> bool:
        """Whether `event` is refused whatever is found valid, also of what comes later."""
        assert event.claim is not None
        said, issuer = event.claim.assertion, event.claim.issuer
        match said:
            case MemberAdmit() | GroupAdmit():
                return not self._is_admin(issuer)
            case AdoptLocal():
                return issuer not in self._creators
            case FeedAdmit():
                return self.role(issuer) is None
            case RoleChange():
                return not self._is_admin(issuer) or self._is_creator(said.member) or self.role(said.member) is None
            case MemberRemove():
                if self._is_creator(said.member) or self.role(said.member) is None:
                    return True
                return said.member != issuer and not self._is_admin(issuer)
            case DeviceRevoke():
                if (said.identity, said.device) not in self._devices:
                    return True
                return said.identity != issuer and (not self._is_admin(issuer) or self._is_creator(said.identity))
            case FeedRetire():
                owners = {owner for feed, owner in self._owners.get(feed_id(said.feed), ()) if feed == said.feed}
                return issuer not in owners if owners and not self._is_admin(issuer) else not owners
        return False

    def _is_admin(self, identity: IdentityKey) -> bool:
        return (self.role(identity) or 0) >= Role.ADMIN

    def _is_creator(self, identity: IdentityKey) -> bool:
        """Whether it is the creator for certain: where two geneses compete, either may be."""
        return len(self._creators) == 1 and identity in self._creators

    def _note_grant(self, said: MemberAdmit | GroupAdmit | RoleChange | AdoptLocal) -> None:
        match said:
            case MemberAdmit() | RoleChange():
                self._grant(said.member, said.role)
            case AdoptLocal():
                self._grant(said.identity, Role.OWNER)
            case GroupAdmit():
                self._grant(said.group, said.role)
                for member in said.members:
                    self._groups_of[member].add(said.group)

    def _note_grant_at(self, event: Event, said: MemberAdmit | GroupAdmit | RoleChange | AdoptLocal) -> None:
        match said:
            case MemberAdmit() | RoleChange():
                self._grants[said.member].append((event, said.role))
            case AdoptLocal():
                self._grants[said.identity].append((event, Role.OWNER))
            case GroupAdmit():
                self._grants[said.group].append((event, said.role))
                for member in said.members:
                    self._listings[member].append((event, said.group))

    def _grant(self, subject: IdentityKey, role: Role) -> None:
        self._roles[subject] = max(role, self._roles.get(subject, role))


RepeatKey = tuple[type, IdentityKey, IdentityKey | FeedKey, DeviceKey | None]


def repeat_key(event: Event) -> RepeatKey | None:
    """What two credentials share of which the second adds nothing once the first counts; None when there is no such.

    A revoked device and a retired feed stay so. Who saw the first revocation is judged by it; who did not is void by
    it; a second one finds nothing more to void. (A member may be admitted again, and removed again: that is no repeat.)
    """
    assert event.claim is not None
    said, issuer = event.claim.assertion, event.claim.issuer
    if isinstance(said, DeviceRevoke):
        return DeviceRevoke, issuer, said.identity, said.device
    if isinstance(said, FeedRetire):
        return FeedRetire, issuer, said.feed, None
    return None
