"""The party machine's definition (V1-V7 of `echostore.kernel.party.verdicts`) carried out naively, as an oracle.

Pasts are explicit sets, every question scans every credential, every decision folds all anew, and roles along a feed
are found block by block. It shares the credential values with the product and nothing else.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from echostore.kernel.ids import FeedKey, PartyKey
from echostore.kernel.party.credentials import (
    AdoptLocal,
    CapabilityRevoke,
    ChildParty,
    Claim,
    ControlMessage,
    DeviceAdmit,
    DeviceRevoke,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    FeedAdmit,
    FeedKind,
    FeedRetire,
    ForkEvidence,
    GroupAdmit,
    Invitation,
    InvitationCancel,
    MemberAdmit,
    MemberRemove,
    ModelPublish,
    PartyGenesis,
    PartyKind,
    Policy,
    RoleChange,
)

READER, EDITOR, ADMIN, OWNER = 1, 2, 3, 4
Place = tuple[bytes, int, int]


@dataclass(eq=False)
class Fact:
    place: Place
    order: tuple[Any, ...]
    claim: Claim | None
    fault: object
    hash: bytes
    clock: dict[bytes, int]
    past: frozenset["Fact"] = frozenset()

    @property
    def said(self) -> Any:
        assert self.claim is not None
        return self.claim.assertion


class Reference:
    """`valid` and the answers below, from a set of messages."""

    def __init__(self, party: PartyKey, messages: Iterable[ControlMessage]) -> None:
        self.party = party
        unique: list[ControlMessage] = []
        for message in messages:
            if message not in unique:
                unique.append(message)
        self.facts = [fact for message in unique for fact in self._facts(message)]
        self.facts.sort(key=lambda fact: fact.order)
        self.forks: dict[FeedKey, int] = {}
        self._find_forks(unique)
        self.valid: set[Fact] = set()
        self.pinned: dict[Fact, set[tuple[str, Any]]] = {}
        self.collided: set[Fact] = set()
        for fact in self.facts:
            fact.past = frozenset(other for other in self.facts if self._before(other, fact))
        while self._fold() or self._decide():
            pass

    def _facts(self, message: ControlMessage) -> list[Fact]:
        return [
            Fact(
                (message.feed_key, message.seq, position),
                (message.depth, message.feed, message.seq, position, message.feed_key, credential.hash),
                credential.claim,
                credential.fault,
                credential.hash,
                dict(message.clock),
            )
            for position, credential in enumerate(message.credentials)
        ]

    def _before(self, a: Fact, b: Fact) -> bool:
        if a.place[0] == b.place[0]:
            return a.place < b.place
        return a.place[1] <= b.clock.get(a.place[0][:8], -1)

    def _find_forks(self, messages: list[ControlMessage]) -> None:
        found: list[tuple[FeedKey, int]] = []
        for one in messages:
            for other in messages:
                if one is not other and (one.feed_key, one.seq) == (other.feed_key, other.seq):
                    found.append((one.feed_key, one.seq))
        for fact in self.facts:
            if self._sound(fact) and isinstance(fact.said, ForkEvidence) and fact.said.proof.party == self.party:
                found.append((fact.said.proof.feed, fact.said.proof.seq))
        for feed, seq in found:
            self.forks[feed] = min(seq, self.forks.get(feed, seq))

    def _sound(self, fact: Fact) -> bool:
        return fact.fault is None and fact.claim is not None and fact.claim.party == self.party

    # --- folding ----------------------------------------------------------------------------------------------

    def _genesis(self) -> Fact | None:
        for fact in self.facts:
            if not self._sound(fact) or not isinstance(fact.said, PartyGenesis) or self._forked(fact):
                continue
            said = fact.said
            if fact.claim.device != self.party or said.party != self.party or fact.place[1] != 0:
                continue
            if said.kind is PartyKind.LOCAL and said.identity != said.device:
                continue
            if said.control_feed == fact.place[0] and said.control_feed[:8] != said.data_feed[:8]:
                return fact
        return None

    def _forked(self, fact: Fact) -> bool:
        feed, seq, _ = fact.place
        return feed in self.forks and seq >= self.forks[feed]

    def _fold(self) -> bool:
        """True when a collision was pinned."""
        self.valid = set()
        self.genesis = self._genesis()
        claimed: list[Fact] = []
        for fact in self.facts:
            if not self._sound(fact):
                continue
            if isinstance(fact.said, ForkEvidence):
                if fact.said.proof.party == self.party:
                    self.valid.add(fact)
                continue
            if self._forked(fact):
                continue
            if isinstance(fact.said, PartyGenesis):
                if fact is self.genesis:
                    self.valid.add(fact)
                continue
            if fact in self.pinned:
                self.valid.add(fact)
                continue
            if not self._authorised(fact) or self._voided(fact):
                continue
            if isinstance(fact.said, FeedAdmit):
                mine = self._content(fact.said)
                same_device = [
                    other
                    for other in self._all_feed_claims(self.valid)
                    if other[1].identity == fact.said.identity and other[1].device == fact.said.device
                ]
                if len(same_device) >= 64:
                    continue
                rivals = [
                    (other, content)
                    for other, content in self._all_feed_claims({*claimed, *self.valid})
                    if content.feed[:8] == fact.said.feed[:8]
                ]
                claimed.append(fact)
                differing = [other for other, content in rivals if self._content(content) != mine]
                fresh = [other for other in differing if other not in fact.past]
                if fresh and differing[0] not in fact.past:
                    pins = {fact, differing[0]}
                    if not pins <= self.collided:
                        self.collided |= pins
                        return True
                if differing or fact in self.collided:
                    continue
                if any(other in fact.past for other, _ in rivals):
                    continue
            self.valid.add(fact)
        return False

    def _content(self, admit: FeedAdmit) -> tuple[Any, ...]:
        return (admit.feed, admit.kind, admit.identity, admit.device, admit.child)

    def _all_feed_claims(self, facts: set[Fact]) -> list[tuple[Fact, FeedAdmit]]:
        found = []
        for fact in sorted(facts, key=lambda fact: fact.order):
            said = fact.said
            if isinstance(said, FeedAdmit):
                found.append((fact, said))
            elif isinstance(said, PartyGenesis):
                found.append((fact, FeedAdmit(said.control_feed, FeedKind.CONTROL, said.identity, said.device)))
                found.append((fact, FeedAdmit(said.data_feed, FeedKind.DATA, said.identity, said.device)))
        return found

    def _decide(self) -> bool:
        """Pins one removal, the most senior; True when there was one."""
        best = None
        for fact in self.facts:
            if fact in self.valid and fact not in self.pinned:
                targets = self._targets(fact)
                if targets:
                    order = (self._rank(fact), fact.order)
                    if best is None or order < best[0]:
                        best = (order, fact, targets)
        if best is None:
            return False
        self.pinned[best[1]] = best[2]
        return True

    def _targets(self, fact: Fact) -> set[tuple[str, Any]]:
        said = fact.said
        before = self.valid & fact.past
        if isinstance(said, DeviceRevoke):
            return {("device", (said.identity, said.device))}
        if isinstance(said, FeedRetire):
            kinds = [admit.kind for _, admit in self._all_feed_claims(before) if admit.feed == said.feed]
            return {("feed", said.feed)} if kinds and kinds[0] is FeedKind.CONTROL else set()
        if isinstance(said, MemberRemove | RoleChange):
            everybody = {identity for other in self.valid for identity in self._admitted(other)}
            return {
                ("identity", identity)
                for identity in everybody
                if (self.role(identity, before | {fact}) or 0) < (self.role(identity, before) or 0)
            }
        return set()

    def _voided(self, fact: Fact) -> bool:
        if isinstance(fact.said, EpochAttest | EpochDispute):
            return False
        for removal, targets in self.pinned.items():
            if removal is fact or removal in fact.past or fact in removal.past:
                continue
            for kind, target in targets:
                mine = {
                    "identity": fact.claim.issuer,
                    "device": (fact.claim.issuer, fact.claim.device),
                    "feed": fact.place[0],
                }
                if mine[kind] == target:
                    return True
        return False

    # --- roles ------------------------------------------------------------------------------------------------

    def _admitted(self, fact: Fact) -> list[bytes]:
        """Identities, not groups."""
        said = fact.said
        if isinstance(said, MemberAdmit):
            return [said.member]
        if isinstance(said, PartyGenesis | AdoptLocal):
            return [said.identity]
        return list(said.members) if isinstance(said, GroupAdmit) else []

    def _subject(self, fact: Fact) -> bytes | None:
        said = fact.said
        return said.group if isinstance(said, GroupAdmit) else (self._admitted(fact) or [None])[0]

    def _rank(self, fact: Fact) -> tuple[Any, ...]:
        admissions = [other.order for other in self.valid if fact.claim.issuer in self._admitted(other)]
        return min(admissions)[:4] if admissions else fact.order[:4]

    def _winner(self, contenders: list[Fact]) -> Fact:
        last = [fact for fact in contenders if not any(fact in other.past for other in contenders)]
        return min(last, key=lambda fact: (self._rank(fact), fact.hash))

    def _given(self, fact: Fact) -> int:
        return OWNER if isinstance(fact.said, PartyGenesis | AdoptLocal) else int(fact.said.role)

    def _removals(self, subject: bytes, among: Iterable[Fact]) -> set[Fact]:
        return {fact for fact in among if isinstance(fact.said, MemberRemove) and fact.said.member == subject}

    def direct(self, subject: bytes, among: set[Fact], feed_fact: Fact | None = None) -> int | None:
        removals = self._removals(subject, among)
        if feed_fact is not None and not removals <= feed_fact.past:
            return None
        admits = [fact for fact in among if self._subject(fact) == subject and removals <= fact.past]
        changes = [
            fact
            for fact in among
            if isinstance(fact.said, RoleChange) and fact.said.member == subject and removals <= fact.past
        ]
        return self._given(self._winner(admits + changes)) if admits else None

    def role(self, identity: bytes, among: set[Fact], feed_fact: Fact | None = None) -> int | None:
        roles = [self.direct(identity, among, feed_fact)]
        own = self._removals(identity, among)
        for fact in among:
            said = fact.said
            if isinstance(said, GroupAdmit) and identity in said.members and own <= fact.past:
                if feed_fact is not None and not own <= feed_fact.past:
                    continue
                if self._removals(said.group, among) <= fact.past:
                    roles.append(self.direct(said.group, among, feed_fact))
        return max((role for role in roles if role), default=None)

    # --- authority --------------------------------------------------------------------------------------------

    def _device_ok(self, identity: bytes, device: bytes, among: set[Fact]) -> bool:
        return self._device_known(identity, device, among) and not self._device_revoked(identity, device, among)

    def _device_known(self, identity: bytes, device: bytes, among: set[Fact]) -> bool:
        kinds = PartyGenesis | DeviceAdmit | AdoptLocal
        return any(
            isinstance(fact.said, kinds) and (fact.said.identity, fact.said.device) == (identity, device)
            for fact in among
        )

    def _device_revoked(self, identity: bytes, device: bytes, among: set[Fact]) -> bool:
        return any(
            isinstance(fact.said, DeviceRevoke) and (fact.said.identity, fact.said.device) == (identity, device)
            for fact in among
        )

    def _protected(self, identity: bytes, among: set[Fact]) -> bool:
        return any(
            isinstance(fact.said, PartyGenesis | AdoptLocal) and fact.said.identity == identity for fact in among
        )

    def _authorised(self, fact: Fact) -> bool:
        among = self.valid & fact.past
        if self.genesis is None or self.genesis not in among:
            return False
        claim, said = fact.claim, fact.said
        root = claim.issuer == claim.device and isinstance(said, DeviceAdmit | DeviceRevoke)
        own_feed = False
        roles: list[int | None] = []
        for admitting, admit in self._all_feed_claims(among):
            if admit.feed != fact.place[0] or admit.kind is not FeedKind.CONTROL:
                continue
            if any(isinstance(other.said, FeedRetire) and other.said.feed == admit.feed for other in among):
                continue
            if not self._device_ok(admit.identity, admit.device, among):
                continue
            if self.role(admit.identity, among, admitting) is None:
                continue
            own_feed = True
            if claim.device != admit.device and not (root and claim.issuer == admit.identity):
                return False
            # Concurrent admissions of one feed are equal but for their eras; the better one counts.
            if claim.issuer == admit.identity:
                roles.append(self.role(admit.identity, among, admitting))
        if not own_feed and not self._opens(fact, root):
            return False
        role = max(role for role in roles if role) if roles else self.role(claim.issuer, among)
        if role is None or not (root or self._device_ok(claim.issuer, claim.device, among)):
            return False
        return self._may_say(fact, role, among)

    def _opens(self, fact: Fact, root: bool) -> bool:
        if fact.place[1] != 0:
            return False
        said, claim = fact.said, fact.claim
        if isinstance(said, FeedAdmit):
            mine = (said.feed, said.kind, said.identity, said.device)
            return mine == (fact.place[0], FeedKind.CONTROL, claim.issuer, claim.device)
        return isinstance(said, DeviceAdmit) and root

    def _may_say(self, fact: Fact, role: int, among: set[Fact]) -> bool:
        claim, said = fact.claim, fact.said
        me = claim.issuer
        if isinstance(said, MemberAdmit | GroupAdmit):
            names = [said.member] if isinstance(said, MemberAdmit) else said.members
            subject = said.member if isinstance(said, MemberAdmit) else said.group
            if me in names and not self._protected(me, among):
                return False
            return role >= ADMIN and role >= said.role and self.direct(subject, among) is None
        if isinstance(said, RoleChange | MemberRemove):
            return self._may_change(said, me, role, among)
        if isinstance(said, DeviceAdmit):
            if self._device_known(said.identity, said.device, among):
                return False
            return said.identity == me or (role >= ADMIN and self.role(said.identity, among) is not None)
        if isinstance(said, DeviceRevoke):
            if not self._device_ok(said.identity, said.device, among):
                return False
            if said.identity == me:
                return True
            if self._protected(said.identity, among):
                return False
            return role >= (OWNER if self.role(said.identity, among) == OWNER else ADMIN)
        if isinstance(said, FeedAdmit):
            if not self._device_ok(said.identity, said.device, among) or self.role(said.identity, among) is None:
                return False
            if said.child is not None and (said.kind is FeedKind.CONTROL or not self._has_child(said.child, among)):
                return False
            return (said.identity, said.device) == (me, claim.device) or role >= ADMIN
        if isinstance(said, FeedRetire):
            admits = [admit for _, admit in self._all_feed_claims(among) if admit.feed == said.feed]
            return bool(admits) and (admits[0].identity == me or role >= ADMIN)
        if isinstance(said, Invitation):
            return role >= ADMIN and role >= said.role
        if isinstance(said, InvitationCancel):
            issuers = [f.claim.issuer for f in among if isinstance(f.said, Invitation) and f.said.key == said.key]
            return bool(issuers) and (me in issuers or role >= ADMIN)
        if isinstance(said, ChildParty):
            return role >= EDITOR and not self._has_child(said.child, among)
        if isinstance(said, AdoptLocal):
            start = self.genesis.said
            local = start.kind is PartyKind.LOCAL and me == start.identity
            return local and self.role(said.identity, among) is None
        if isinstance(said, EpochGenesis):
            return self._may_declare(said, me, role, among)
        if isinstance(said, ModelPublish):
            again = any(
                isinstance(f.said, ModelPublish) and (f.said.name, f.said.version) == (said.name, said.version)
                for f in among
            )
            return role >= ADMIN and not again
        if isinstance(said, Policy):
            return role >= ADMIN
        if isinstance(said, CapabilityRevoke):
            own = said.issuer is not None and self._device_known(me, said.issuer, among)
            return own or role >= ADMIN
        return True

    def _may_change(self, said: RoleChange | MemberRemove, me: bytes, role: int, among: set[Fact]) -> bool:
        if self._protected(said.member, among):
            return False
        inside = any(
            isinstance(f.said, GroupAdmit) and f.said.group == said.member and me in f.said.members for f in among
        )
        if isinstance(said, RoleChange):
            has = self.direct(said.member, among)
            if me == said.member or inside or has is None:
                return False
            return role >= (OWNER if OWNER in (has, said.role) else ADMIN)
        roles = [found for found in (self.direct(said.member, among), self.role(said.member, among)) if found]
        if not roles:
            return False
        return me == said.member or role >= (OWNER if max(roles) == OWNER else ADMIN)

    def _has_child(self, child: bytes, among: set[Fact]) -> bool:
        return any(isinstance(fact.said, ChildParty) and fact.said.child == child for fact in among)

    def _may_declare(self, said: EpochGenesis, me: bytes, role: int, among: set[Fact]) -> bool:
        if said.child is not None and not self._has_child(said.child, among):
            return False
        value = self.policy("epoch.declarers", among)
        if value in (None, b"admins"):
            return role >= ADMIN
        if value == b"elect":
            return role >= EDITOR
        return any(value[start : start + 32] == me for start in range(0, len(value), 32))

    def policy(self, key: str, among: set[Fact]) -> bytes | None:
        setting = [f for f in among if isinstance(f.said, Policy) and key in dict(f.said.entries)]
        return dict(self._winner(setting).said.entries)[key] if setting else None

    # --- answers ----------------------------------------------------------------------------------------------

    def rejected(self) -> set[Place]:
        return {fact.place for fact in self.facts if fact not in self.valid}

    def members(self) -> dict[bytes, int | None]:
        identities = {identity for fact in self.valid for identity in self._admitted(fact)}
        return {identity: self.role(identity, self.valid) for identity in identities}

    def feeds(self, blocks: int) -> dict[bytes, tuple[bytes | None, list[int | None]]]:
        """Of each admitted feed its child party and the role at each of the first blocks (None: does not count)."""
        found: dict[bytes, tuple[bytes | None, list[int | None]]] = {}
        claims = self._all_feed_claims(self.valid)
        for key in {admit.feed for _, admit in claims}:
            mine = [(fact, admit) for fact, admit in claims if admit.feed == key]
            lasting = [entry for entry in mine if self.role(entry[1].identity, self.valid, entry[0]) is not None]
            fact, admit = (lasting or mine)[0]
            found[key] = (admit.child, [self._block_role(fact, admit, seq) for seq in range(blocks)])
        return found

    def _bound(self, fact: Fact, admit: FeedAdmit) -> int:
        if admit.kind is FeedKind.CONTROL:
            if fact.place[0] == admit.feed:
                return fact.place[1] + 1
            return fact.clock.get(admit.feed[:8], -1) + 1
        if isinstance(fact.said, FeedRetire):
            return fact.said.length_end
        entries = fact.said.bounds if isinstance(fact.said, RoleChange) else fact.said.cut
        return min([entry.length_end for entry in entries if entry.feed == admit.feed[:8]] or [0])

    def _block_role(self, fact: Fact, admit: FeedAdmit, seq: int) -> int | None:
        if admit.feed in self.forks and seq >= self.forks[admit.feed]:
            return None
        for other in self.valid:
            said = other.said
            ends = (
                (isinstance(said, MemberRemove) and said.member == admit.identity and other not in fact.past)
                or (isinstance(said, DeviceRevoke) and (said.identity, said.device) == (admit.identity, admit.device))
                or (isinstance(said, FeedRetire) and said.feed == admit.feed)
            )
            if ends and seq >= self._bound(other, admit):
                return None
        subjects = {admit.identity}
        own = self._removals(admit.identity, self.valid)
        for other in self.valid:
            said = other.said
            if isinstance(said, GroupAdmit) and admit.identity in said.members and own & other.past == own & fact.past:
                group = self._removals(said.group, self.valid)
                if group & other.past == group & fact.past:
                    subjects.add(said.group)
        roles = [self._subject_role_at(subject, fact, admit, seq) for subject in subjects]
        return max((role for role in roles if role), default=None)

    def _subject_role_at(self, subject: bytes, fact: Fact, admit: FeedAdmit, seq: int) -> int | None:
        removals = self._removals(subject, self.valid)
        if any(seq >= self._bound(removal, admit) for removal in removals - fact.past):
            return None
        era = [other for other in self.valid if removals & other.past == removals & fact.past]
        admits = [other for other in era if self._subject(other) == subject]
        changes = [other for other in era if isinstance(other.said, RoleChange) and other.said.member == subject]
        reaching = []
        for one in changes:
            side = [other for other in changes if other not in one.past and one not in other.past]
            if seq >= min(self._bound(other, admit) for other in side):
                reaching.append(one)
        return self._given(self._winner(admits + reaching)) if admits else None
