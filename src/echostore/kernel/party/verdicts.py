"""Verdicts: which credentials count, as a function of the set that was received.

The definition, which `settle` carries out and the reference in the tests repeats naively:

    V1  Fork evidence proves itself and always counts. Of a forked control feed nothing from the fork on counts. Two
        different messages at one place are a fork too.
    V2  One genesis counts: the first in canonical order among those the party key signed in block 0 of their feed.
    V3  A *fold* goes through the credentials in canonical order. One is valid when `authority.judge` finds the
        authority in the valid ones that it sees, and no *decided* removal voids it.
    V4  A removal is a credential that lowers someone: MemberRemove, DeviceRevoke, a RoleChange or a group's removal
        by which an effective role falls, and FeedRetire of a control feed. Once decided, it voids the target's
        credentials that are concurrent with it. (Those after it see it, and are judged by what they see.)
    V5  After a fold, the removal to be decided next is the valid one whose issuer is most senior (earliest valid
        admission; then canonical order). It is then valid for good: a junior's removal can't undo it. Then fold anew.
    V6  Two admissions of one feed id that differ: the causally later is void; of concurrent ones both. Found in a
        fold, that is decided before any removal, and for good.
    V7  A device has at most FEEDS_PER_DEVICE_MAX feeds: the first ones in canonical order.
    V8  What final epochs contain (`pins`) is safe from removals and forks that they contain later, or not at all. An
        attest or dispute says what its writer found; no removal voids it.

Every decision adds to a finite set, so it ends. Most credentials arrive when nothing before them can change: then they
are judged alone (`_unsettles` says when that is not so). Otherwise the next question folds anew. What can't count
under any verdict, or only repeats what counts, never asks for that (`hope`).
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

from echostore.kernel.ids import DeviceKey, FeedId, FeedKey, IdentityKey, PartyKey, Stamp, feed_id
from echostore.kernel.party.authority import Refusal, judge
from echostore.kernel.party.credentials import (
    AdoptLocal,
    ControlMessage,
    DeviceRevoke,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    FeedAdmit,
    FeedKind,
    FeedRetire,
    ForkEvidence,
    GroupAdmit,
    MemberAdmit,
    MemberRemove,
    PartyGenesis,
    PartyKind,
    Role,
    RoleChange,
)
from echostore.kernel.party.hope import Hope, RepeatKey, repeat_key
from echostore.kernel.party.ledger import AdmittedAs, DevicePair, Event, Including, Ledger
from echostore.kernel.party.pins import NO_PINS, Pins
from echostore.kernel.reasons import Reason

FEEDS_PER_DEVICE_MAX: Final = 64
"""A device opens feeds without asking; this bounds what a hostile one makes every peer keep."""


CLAIMS_PER_ISSUER_MAX: Final = 256
"""Feeds that an identity may have followed though their admissions do not count: an admin admits some for each newcomer."""


class Targets(NamedTuple):
    """Whose concurrent credentials a removal voids."""

    identities: frozenset[IdentityKey] = frozenset()
    devices: frozenset[DevicePair] = frozenset()
    feeds: frozenset[FeedKey] = frozenset()


_NOBODY: Final = Targets()


class Acts:
    """Events by who acted: by identity, by device, by the feed they stand in."""

    def __init__(self) -> None:
        self.by_identity: defaultdict[IdentityKey, list[Event]] = defaultdict(list)
        self.by_device: defaultdict[DevicePair, list[Event]] = defaultdict(list)
        self.by_feed: defaultdict[FeedKey, list[Event]] = defaultdict(list)

    def add(self, event: Event) -> None:
        assert event.claim is not None
        issuer, device = event.claim.issuer, event.claim.device
        self.by_identity[issuer].append(event)
        self.by_device[issuer, device].append(event)
        self.by_feed[event.feed_key].append(event)

    def of(self, targets: Targets) -> list[Event]:
        found: list[Event] = []
        for identity in targets.identities:
            found += self.by_identity.get(identity, ())
        for pair in targets.devices:
            found += self.by_device.get(pair, ())
        for feed in targets.feeds:
            found += self.by_feed.get(feed, ())
        return found


class Verdicts:
    """All received credentials with their verdicts. `settle` before reading `ledger`, `refusals` or `forks`."""

    def __init__(self, party: PartyKey, given: Pins = NO_PINS) -> None:
        """`given` is pinned by epochs whose control messages are not here any more."""
        self.party = party
        self.events: list[Event] = []
        self.forks: dict[FeedKey, int] = {}
        self.fork_evidence: defaultdict[FeedKey, list[tuple[int, Event | None]]] = defaultdict(list)
        self.epoch_events: list[Event] = []
        """Every EpochGenesis received, valid or not."""
        self.pins = self._given = given
        self._keep_pins = False
        self.ledger = Ledger(party)
        self.refusals: dict[Event, Refusal] = {}
        self.revision = 0
        """Changes whenever an admission may have."""
        self._messages: dict[tuple[FeedKey, int], list[ControlMessage]] = {}
        self._settled = True
        self._clear()
        # What was received, valid or not: it says whether an arrival may change what was decided.
        self._claimed: defaultdict[FeedId, set[FeedAdmit]] = defaultdict(set)
        self._claimed_by: defaultdict[DevicePair, int] = defaultdict(int)
        self._claimed_last: dict[DevicePair, Stamp] = {}
        self._hopeful: defaultdict[IdentityKey, dict[FeedAdmit, tuple[Stamp, bytes]]] = defaultdict(dict)
        """Admissions that could have counted, whether they do or not, by issuer: the first place of each."""
        self._grouped: defaultdict[IdentityKey, set[IdentityKey]] = defaultdict(set)
        self._geneses: list[Event] = []
        self._hope = Hope()
        self._said: defaultdict[RepeatKey, list[Event]] = defaultdict(list)
        self.folds = 0
        """How often all credentials were judged anew."""

    def _clear(self) -> None:
        self.decided: dict[Event, Targets] = {}
        self._collided: set[Event] = set()
        self._acts = Acts()
        self._voiders = Acts()  # decided removals, by their targets
        self._fold_clear()

    def _fold_clear(self) -> None:
        self.ledger = Ledger(self.party)
        self.refusals = {}
        self._claims: defaultdict[FeedId, list[AdmittedAs]] = defaultdict(list)

    # --- arrival ----------------------------------------------------------------------------------------------

    def receive(self, message: ControlMessage) -> None:
        """Takes in a message whose causal past has been received. Repetition is harmless."""
        place = (message.feed_key, message.seq)
        known = self._messages.setdefault(place, [])
        if message in known:
            return
        known.append(message)
        if len(known) > 1:
            self._fork(message.feed_key, message.seq, None)
            self._settled = False
        positions = message.positions or range(len(message.credentials))
        for position, credential in zip(positions, message.credentials, strict=True):
            event = Event(message, position, credential)
            self.events.append(event)
            self._take(event)

    @property
    def messages(self) -> Iterable[ControlMessage]:
        """Every message received."""
        return (message for same in self._messages.values() for message in same)

    def message(self, feed: FeedKey, seq: int) -> ControlMessage:
        return self._messages[feed, seq][0]

    def _take(self, event: Event) -> None:
        refusal = self._refused_as_it_stands(event)
        if refusal is not None:
            self.refusals[event] = refusal
            if refusal.reason is Reason.FORK:  # who had not heard of the fork has let it count
                self._note_hopeful(event)
                self._hope.note(event)
            return
        assert event.claim is not None
        said = event.claim.assertion
        if isinstance(said, ForkEvidence):
            self._fork(said.proof.feed, said.proof.seq, event)
            return
        if isinstance(said, EpochGenesis):
            self.epoch_events.append(event)
        idle = self._hope.none_for(event) or (self._settled and self._repeats(event))
        unsettles = self._settled and not idle and self._unsettles(event)
        self._note_hopeful(event)
        self._note(event)
        if unsettles:
            self._settled = False
        if self._settled:
            self._judge_alone(event, idle=idle)

    def _fork(self, feed: FeedKey, seq: int, evidence: Event | None) -> None:
        known = self.fork_evidence[feed]
        if (seq, evidence) not in known:
            known.append((seq, evidence))
            if self.pins:
                self.revision += 1  # an earlier proof of the same fork may be contained in fewer epochs
                self._settled = False
        if seq < self.forks.get(feed, seq + 1):
            self.forks[feed] = seq
            self.revision += 1
            if any(event.seq >= seq for event in self._acts.by_feed.get(feed, ())):
                self._settled = False

    def _unsettles(self, event: Event) -> bool:
        """Whether `event` may change the verdict on another, or stand otherwise than judged alone.

        It happened after all it sees, and nothing received sees it. So it changes others only as a removal of someone
        who acted without seeing it, as a collision, by a limit, or as an admission that makes its subject more senior.
        """
        assert event.claim is not None
        said = event.claim.assertion
        if isinstance(said, PartyGenesis):
            return bool(self._geneses)
        if isinstance(said, FeedAdmit):
            others = self._claimed[feed_id(said.feed)] - {_without_proof(said)}
            # One that comes last in canonical order displaces none of its device's other feeds.
            pair = (said.identity, said.device)
            full = self._claimed_by[pair] >= FEEDS_PER_DEVICE_MAX
            return bool(others) or (full and event.stamp < self._claimed_last[pair])
        if isinstance(said, MemberAdmit | GroupAdmit | AdoptLocal):
            return any(self._may_rank(identity, event.stamp) for identity in _admitted(said))
        acts = self._acts.of(self._possible_targets(event))
        return any(not event.sees(act) for act in acts)

    def _repeats(self, event: Event) -> bool:
        """Whether the same was said before, is seen by `event`, and counts."""
        key = repeat_key(event)
        return key is not None and any(
            event.sees(other) and other not in self.refusals for other in self._said.get(key, ())
        )

    def _may_rank(self, identity: IdentityKey, stamp: Stamp) -> bool:
        if identity not in self._acts.by_identity:
            return False
        rank = self.ledger.seniority.get(identity)
        return bool(self.decided) or rank is None or stamp < rank

    def _possible_targets(self, event: Event) -> Targets:
        """Whom `event` may turn out to remove, whatever is found valid."""
        assert event.claim is not None
        said = event.claim.assertion
        if isinstance(said, MemberRemove | RoleChange):
            return Targets(identities=frozenset({said.member} | self._grouped.get(said.member, set())))
        if isinstance(said, DeviceRevoke):
            return Targets(devices=frozenset({(said.identity, said.device)}))
        if isinstance(said, FeedRetire):
            return Targets(feeds=frozenset({said.feed}))
        return _NOBODY

    def _note(self, event: Event) -> None:
        assert event.claim is not None
        said = event.claim.assertion
        if isinstance(said, PartyGenesis):
            self._geneses.append(event)
            for feed in (said.control_feed, said.data_feed):
                kind = FeedKind.CONTROL if feed == said.control_feed else FeedKind.DATA
                self._note_feed(event, FeedAdmit(feed, kind, said.identity, said.device))
        elif isinstance(said, FeedAdmit):
            self._note_feed(event, _without_proof(said))
        elif isinstance(said, GroupAdmit):
            self._grouped[said.group].update(said.members)
        self._hope.note(event)
        self._acts.add(event)
        key = repeat_key(event)
        if key is not None and not self._repeats(event):
            self._said[key].append(event)

    def _note_hopeful(self, event: Event) -> None:
        """Keep the name of a feed that others may have admitted, whatever becomes of it here."""
        assert event.claim is not None
        said, issuer = event.claim.assertion, event.claim.issuer
        if not isinstance(said, FeedAdmit):
            return
        own = said.identity == issuer and said.device == event.claim.device
        role = self._hope.role_before(event)
        if role is None or not (own or role >= Role.ADMIN):
            return
        known, place = self._hopeful[issuer], (event.stamp, event.hash)
        admit = _without_proof(said)
        if admit not in known or place < known[admit]:
            known[admit] = place
            self.revision += 1

    def hopeful_feeds(self) -> Iterable[FeedAdmit]:
        """Admissions that could have counted and do not: of each issuer the first ones in canonical order."""
        for known in self._hopeful.values():
            vain = [(place, admit) for admit, place in known.items() if feed_id(admit.feed) not in self.ledger.feeds]
            for _, admit in sorted(vain, key=lambda entry: entry[0])[:CLAIMS_PER_ISSUER_MAX]:
                yield admit

    def _note_feed(self, event: Event, admit: FeedAdmit) -> None:
        pair = (admit.identity, admit.device)
        self._claimed[feed_id(admit.feed)].add(admit)
        self._claimed_by[pair] += 1
        self._claimed_last[pair] = max(event.stamp, self._claimed_last.get(pair, event.stamp))

    def _judge_alone(self, event: Event, *, idle: bool) -> None:
        """Judges an event that changes no other verdict; `idle` says that its own is certain too."""
        refusal = self._judge(event)
        if refusal is None:
            self._accept(event)
            targets = self._targets(event)
            if targets != _NOBODY:
                self._decide(event, targets)
            return
        self.refusals[event] = refusal
        # Where removals compete, this one might have been decided before the one that now stands against it.
        if self.decided and not idle and self._possible_targets(event) != _NOBODY:
            self._settled = False

    # --- the definition ---------------------------------------------------------------------------------------

    def pin(self, pins: Pins) -> bool:
        """Take in what final epochs contain. True when that may change a verdict: then settle, and look again."""
        if pins.key == self.pins.key:
            return False
        self.pins = pins
        self.revision += 1
        if not self.decided and not self.forks:
            return False
        self._settled, self._keep_pins = False, True
        return True

    def unpin(self) -> None:
        """Let go what was pinned, but for what is given: the next settling is as if it were the first."""
        self.pins = self._given
        self._settled = self._keep_pins = False

    @property
    def voided_epochs(self) -> list[Event]:
        """Geneses whose declarers were removed at the same time or later, and might have declared them otherwise.

        One that a later removal voids counts as a credential: it is the epoch that needs a quorum from then on.
        """
        return [
            event
            for event in self.epoch_events
            if (event in self.refusals or self._removed_since(event))
            and self._refused_as_it_stands(event) is None
            and judge(self.ledger, event) is None
        ]

    def _removed_since(self, event: Event) -> bool:
        """Whether a decided removal of the issuer, its device or its feed sees `event`, which no epoch had pinned."""
        assert event.claim is not None
        issuer = event.claim.issuer
        removals = (
            *self._voiders.by_identity.get(issuer, ()),
            *self._voiders.by_device.get((issuer, event.claim.device), ()),
            *self._voiders.by_feed.get(event.feed_key, ()),
        )
        return any(removal.sees(event) and not self.pins.safe(event, removal) for removal in removals)

    def settle(self) -> None:
        """Folds anew if an arrival made that necessary. Afterwards the verdicts are those of the definition.

        After an arrival that is without pins; who knows the epochs pins them again.
        """
        if self._settled:
            return
        if not self._keep_pins:
            self.pins = self._given
        self._keep_pins = False
        self._clear()
        self.events.sort(key=lambda event: (event.stamp, event.feed_key, event.hash))
        self._geneses = [event for event in self._geneses if self._refused_as_it_stands(event) is None]
        self._geneses.sort(key=lambda event: event.stamp)
        live: list[Event] = []
        refused: dict[Event, Refusal] = {}
        for event in self.events:
            refusal = self._refused_as_it_stands(event)
            if refusal is not None:
                refused[event] = refusal
            elif event.claim is not None and not isinstance(event.claim.assertion, ForkEvidence):
                live.append(event)
                self._acts.add(event)
        while not (self._fold(live, refused) and self._decide_removals(live)):
            pass
        self._settled = True
        self.revision += 1

    def _fold(self, live: list[Event], refused: dict[Event, Refusal]) -> bool:
        """V3 over all. False when a collision was found, which is noted and asks for another fold."""
        self.folds += 1
        self._fold_clear()
        self.refusals.update(refused)
        for event in live:
            before = len(self._collided)
            refusal = None if event in self.decided else self._judge(event)
            if len(self._collided) != before:
                return False
            if refusal is None:
                self._accept(event)
            else:
                self.refusals[event] = refusal
        return True

    def _decide_removals(self, live: list[Event]) -> bool:
        """V5. False when a decided removal voids something that was valid, which asks for another fold."""
        pending: list[tuple[Stamp, Stamp, bytes, Event, Targets]] = []
        for event in live:
            if event not in self.refusals and event not in self.decided:
                targets = self._targets(event)
                if targets != _NOBODY:
                    pending.append((self.ledger.rank_of_issuer(event), event.stamp, event.hash, event, targets))
        for _, _, _, event, targets in sorted(pending, key=lambda entry: entry[:3]):
            self._decide(event, targets)
            for act in self._acts.of(targets):
                if act not in self.refusals and act not in self.decided and self._voids(event, act):
                    return False
        return True

    def _decide(self, event: Event, targets: Targets) -> None:
        self.decided[event] = targets
        for identity in targets.identities:
            self._voiders.by_identity[identity].append(event)
        for pair in targets.devices:
            self._voiders.by_device[pair].append(event)
        for feed in targets.feeds:
            self._voiders.by_feed[feed].append(event)

    def refusal(self, event: Event) -> Refusal | None:
        """Why `event` does not count, in words that depend on the settled state alone, not on the way to it."""
        found = self.refusals.get(event)
        if found is None:
            return None
        # It may have been refused for lack of authority before a removal that voids it too was decided.
        stands = self._refused_as_it_stands(event)
        if stands is not None or event.claim is None or isinstance(event.claim.assertion, PartyGenesis):
            return stands or found
        return self._voided(event) or judge(self.ledger, event) or found

    def foresee(self, event: Event) -> Refusal | None:
        """Why an event that nobody has written yet, and that sees all there is, would not count. Takes nothing in.

        Of an admitted feed it is not asked whether another one has the same id.
        """
        if event.seq >= self.forks.get(event.feed_key, event.seq + 1):
            return Refusal(Reason.FORK, "its control feed forks at or before this block")
        return self._refused_as_it_stands(event) or self._voided(event) or judge(self.ledger, event)

    # --- one credential ---------------------------------------------------------------------------------------

    def _refused_as_it_stands(self, event: Event) -> Refusal | None:
        """What no other credential but fork evidence can change."""
        claim = event.claim
        if event.fault is not None or claim is None:
            return Refusal(event.fault or Reason.MALFORMED, "refused before it reached the party machine")
        if claim.party != self.party:
            return Refusal(Reason.OTHER_PARTY, "made for another party")
        said = claim.assertion
        if isinstance(said, ForkEvidence):
            return None if said.proof.party == self.party else Refusal(Reason.OTHER_PARTY, "a fork in another party")
        if event.seq >= self.forks.get(event.feed_key, event.seq + 1) and not self._safe_from_forks(event):
            return Refusal(Reason.FORK, "its control feed forks at or before this block")
        if isinstance(said, PartyGenesis) and not is_genesis(event, said, self.party):
            return Refusal(Reason.NOT_GENESIS, "not signed by the party key in block 0 of its control feed")
        return None

    def _safe_from_forks(self, event: Event) -> bool:
        """Whether final epochs contain the event, and none contains the proof of its feed's fork as early."""
        if not self.pins or len(self._messages[event.feed_key, event.seq]) > 1:
            return False
        first = self.pins.first(event)
        proofs = [proof for seq, proof in self.fork_evidence[event.feed_key] if seq <= event.seq]
        return all(first < (self.pins.count if proof is None else self.pins.first(proof)) for proof in proofs)

    def _judge(self, event: Event) -> Refusal | None:
        assert event.claim is not None
        said = event.claim.assertion
        if isinstance(said, PartyGenesis):
            return None if event is self._geneses[0] else Refusal(Reason.NOT_GENESIS, "the party has a genesis")
        refusal = self._voided(event) or judge(self.ledger, event)
        if refusal is None and isinstance(said, FeedAdmit):
            refusal = self._judge_feed(event, said)
        return refusal

    def _voided(self, event: Event) -> Refusal | None:
        """V4: whether a decided removal of the issuer, its device or its feed is concurrent with `event`."""
        assert event.claim is not None
        if isinstance(event.claim.assertion, EpochAttest | EpochDispute):
            return None
        issuer = event.claim.issuer
        removals = self._voiding(self._voiders.by_identity.get(issuer, ()), event)
        if removals:
            kinds = [type(removal.claim.assertion) for removal in removals if removal.claim is not None]
            if MemberRemove in kinds:
                return Refusal(Reason.ISSUER_REMOVED, "its issuer was concurrently removed")
            return Refusal(Reason.NOT_AUTHORISED, "its issuer was concurrently demoted")
        if self._voiding(self._voiders.by_device.get((issuer, event.claim.device), ()), event):
            return Refusal(Reason.DEVICE_REVOKED, "its device was concurrently revoked")
        if self._voiding(self._voiders.by_feed.get(event.feed_key, ()), event):
            return Refusal(Reason.RETIRED, "its control feed was concurrently retired")
        return None

    def _voids(self, removal: Event, act: Event) -> bool:
        assert act.claim is not None
        said = isinstance(act.claim.assertion, EpochAttest | EpochDispute)
        return not said and _concurrent(removal, act) and not self.pins.safe(act, removal)

    def _voiding(self, removals: Iterable[Event], event: Event) -> list[Event]:
        return [removal for removal in removals if _concurrent(removal, event) and not self.pins.safe(event, removal)]

    def _judge_feed(self, event: Event, said: FeedAdmit) -> Refusal | None:
        """V6 and V7."""
        if self.ledger.feeds_of[said.identity, said.device] >= FEEDS_PER_DEVICE_MAX:
            return Refusal(Reason.TOO_MANY, f"its device has {FEEDS_PER_DEVICE_MAX} feeds")
        earlier = self._claims[feed_id(said.feed)]
        self._claims[feed_id(said.feed)] = [*earlier, AdmittedAs(event, said)]
        for other in earlier:
            if _without_proof(other.admit) != _without_proof(said):
                if not event.sees(other.event):
                    self._collided |= {event, other.event}
                return Refusal(Reason.FEED_COLLISION, "another admission has this feed id")
        if event in self._collided:
            return Refusal(Reason.FEED_COLLISION, "another admission has this feed id")
        if any(event.sees(other.event) for other in earlier):
            return Refusal(Reason.DUPLICATE, "this feed is admitted; a cut feed is not admitted again")
        return None

    def _accept(self, event: Event) -> None:
        version = self.ledger.version
        self.ledger.record(event)
        if self.ledger.version != version:
            self.revision += 1
        assert event.claim is not None
        said = event.claim.assertion
        if isinstance(said, PartyGenesis):
            for feed in (said.control_feed, said.data_feed):
                self._claims[feed_id(feed)].append(next(self.ledger.admissions_of(feed, Including(event))))

    def _targets(self, event: Event) -> Targets:
        """Whom the valid `event` removes (V4)."""
        possible = self._possible_targets(event)
        if possible.identities:
            after = Including(event)
            lowered = {
                identity
                for identity in possible.identities & self.ledger.seniority.keys()  # a group itself never acts
                if (self.ledger.role(identity, after) or 0) < (self.ledger.role(identity, event) or 0)
            }
            return Targets(identities=frozenset(lowered))
        if possible.feeds:
            (feed,) = possible.feeds
            entry = next(self.ledger.admissions_of(feed, event))
            return possible if entry.admit.kind is FeedKind.CONTROL else _NOBODY
        return possible


def _concurrent(left: Event, right: Event) -> bool:
    return left is not right and not left.sees(right) and not right.sees(left)


def _without_proof(admit: FeedAdmit) -> FeedAdmit:
    if not admit.proof:
        return admit
    return FeedAdmit(admit.feed, admit.kind, admit.identity, admit.device, admit.child)


def _admitted(said: MemberAdmit | GroupAdmit | AdoptLocal) -> tuple[IdentityKey, ...]:
    if isinstance(said, GroupAdmit):
        return said.members
    return (said.member,) if isinstance(said, MemberAdmit) else (said.identity,)


def is_genesis(event: Event, said: PartyGenesis, party: PartyKey) -> bool:
    """Whether it has the form of a genesis: signed by the party key, in block 0 of the control feed that it names."""
    assert event.claim is not None
    signed = said.party == party and event.claim.device == DeviceKey(party)
    local = said.kind is not PartyKind.LOCAL or bytes(said.identity) == bytes(said.device)
    two = feed_id(said.control_feed) != feed_id(said.data_feed)
    return signed and local and two and event.seq == 0 and event.feed_key == said.control_feed
