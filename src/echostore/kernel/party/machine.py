"""PartyMachine: folds the control feeds of a party into who belongs to it and which blocks count.

Control messages go in, in any order in which causes come before effects; what comes out depends on their set alone.

    ControlMessage ─► verdicts ─► ledger ─┬─► admission   which blocks count, in which role (digest)
                      (which credentials  ├─► roster      members, devices, groups, epochs, policy
                       count, and why not)└─► rejected, why(key)

    machine.receive(message)                    O(what is said about its issuer and subject)
    machine.admission(child=None).digest        recomputed only when membership changed
    machine.members, .rejected, .why(key) ...   read-only values
    PartyMachine(party, start)                  goes on from a control state, with what lies above its cut

Called by the live PartyProcessor and by the Spark pipeline, with credentials that `echostore.wire.credentials` has
verified. It knows no clock: invitations do not expire here.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from echostore.kernel.ids import DeviceKey, FeedId, FeedKey, IdentityKey, PartyKey, feed_id
from echostore.kernel.party import explain, roster
from echostore.kernel.party.admission import Admission, FeedAdmission, build
from echostore.kernel.party.authority import Refusal
from echostore.kernel.party.control_state import ControlState, is_late
from echostore.kernel.party.credentials import ControlMessage, EpochGenesis, FeedKind, ModelPublish, PartyGenesis
from echostore.kernel.party.departure import departure
from echostore.kernel.party.epoch_chain import Tally
from echostore.kernel.party.epoch_policy import EpochPolicy
from echostore.kernel.party.ledger import EVERYTHING, Event, Ledger
from echostore.kernel.party.pins import NO_PINS, PinnedEpoch, Pins
from echostore.kernel.party.verdicts import Verdicts
from echostore.kernel.reasons import Reason

PIN_ROUNDS_MAX = 8
"""Rounds in which pins bring back credentials that make further epochs final."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A credential that does not count, and why."""

    feed: FeedId
    seq: int
    position: int
    reason: Reason
    detail: str
    act: str = ""
    """Its kind, as `why` names it."""


@dataclass(slots=True)
class _Counted:
    """A tally, and how much of the ledger is in it."""

    tally: Tally
    epochs: int = 0
    attests: int = 0
    disputes: int = 0


class PartyMachine:
    """The membership of one party as a function of the set of control messages received."""

    def __init__(self, party: PartyKey, start: ControlState | None = None) -> None:
        self.party = party
        self.start = start
        """What it went on from; None: from the party's genesis."""
        self.late = False
        """Whether something spoke of what lies below the start and is not kept (`control_state.is_late`)."""
        self._starts = {chain.child: chain for chain in start.chains} if start is not None else {}
        self._verdicts = Verdicts(party, self._given(None))
        self._geneses_heard: set[bytes] = set()
        self._admissions: dict[PartyKey | None, Admission] = {}
        self._admissions_revision = -1
        self._child_pins: dict[PartyKey | None, object] = {}
        self._tallies: dict[PartyKey | None, _Counted] = {}
        self._tallied: Ledger | None = None
        self._epochs_seen = (0, 0)
        """How many geneses were received and removals decided when `_voided` was found."""
        self._voided: list[Event] = []
        self._geneses: dict[bytes, roster.EpochAct] = {}
        self._pins: dict[PartyKey | None, Pins] = {}
        self._at_rest = False
        """Whether verdicts and epochs are those of all that was received: looking at them again costs nothing then."""
        for message in start.messages if start is not None else ():
            self._take(message)
        begun = {chain.epoch for chain in self._starts.values()}
        self._begun = {event.hash: event for event in reversed(self._verdicts.events) if event.hash in begun}
        """The epochs that chains begin with."""

    def receive(self, message: ControlMessage) -> None:
        """Takes in a control message whose causal past was received before; a repeated one changes nothing."""
        assert message.feed == feed_id(message.feed_key), f"{message.feed!r} is not the id of {message.feed_key!r}"
        if self.start is not None and not self.late:
            self.late = is_late(self.start, message, self._geneses_heard)
        self._take(message)

    def _take(self, message: ControlMessage) -> None:
        for credential in message.credentials if self.start is not None else ():
            if credential.claim is not None and isinstance(credential.claim.assertion, EpochGenesis):
                self._geneses_heard.add(credential.hash)
        self._verdicts.receive(message)
        self._at_rest = False

    # --- what was received ------------------------------------------------------------------------------------

    @property
    def messages(self) -> Iterable[ControlMessage]:
        """Every message received, and those that the start has kept."""
        return self._verdicts.messages

    @property
    def events(self) -> list[Event]:
        """The credentials of the messages, in no particular order."""
        return self._verdicts.events

    def clock(self, feed: FeedKey, seq: int) -> Mapping[FeedId, int]:
        """What a message above the start had seen."""
        return self._verdicts.message(feed, seq).clock

    # --- which blocks count -----------------------------------------------------------------------------------

    def admission(self, child: PartyKey | None = None) -> Admission:
        """The admission of the party, or of a child party: that one has data feeds of its own and no others."""
        ledger = self._ledger()
        pins = self._verdicts.pins if child is None else self._pins_of(child)
        if self._admissions_revision != self._verdicts.revision:
            self._admissions.clear()
            self._admissions_revision = self._verdicts.revision
        found = self._admissions.get(child)
        if found is None or self._child_pins.get(child) != pins.key:
            verdicts = self._verdicts
            found = build(ledger, verdicts.fork_evidence, child, pins, verdicts.hopeful_feeds())
            self._admissions[child] = found
            self._child_pins[child] = pins.key
        return found

    @property
    def revision(self) -> int:
        """Changes whenever an admission of the party itself may have; equal revisions mean equal admissions."""
        self._settle()
        return self._verdicts.revision

    @property
    def folds(self) -> int:
        """How often all credentials were judged anew: what an arrival may cost at most."""
        return self._verdicts.folds

    @property
    def feeds(self) -> tuple[FeedAdmission, ...]:
        """The feeds of the party and of all its child parties, ascending by key."""
        admitted = [*self.admission().feeds]
        for child, _ in self.children:
            admitted += self.admission(child).feeds
        return tuple(sorted(admitted, key=lambda each: each.feed))

    @property
    def forks(self) -> dict[FeedKey, int]:
        """Where feeds were proven to fork, also feeds that are not admitted."""
        return dict(self._verdicts.forks)

    # --- who belongs ------------------------------------------------------------------------------------------

    @property
    def genesis(self) -> PartyGenesis | None:
        return roster.genesis(self._ledger())

    @property
    def members(self) -> tuple[roster.Member, ...]:
        return roster.members(self._ledger())

    @property
    def devices(self) -> tuple[roster.Device, ...]:
        return roster.devices(self._ledger())

    @property
    def member_devices(self) -> int:
        """How many devices may act for a member: of who was removed, none. What a newcomer's demands go by."""
        ledger = self._ledger()
        return sum(
            not device.revoked and ledger.role(device.identity, EVERYTHING) is not None for device in self.devices
        )

    @property
    def groups(self) -> tuple[roster.Group, ...]:
        return roster.groups(self._ledger())

    @property
    def invitations(self) -> tuple[roster.OpenInvitation, ...]:
        return roster.invitations(self._ledger())

    @property
    def children(self) -> tuple[tuple[PartyKey, str], ...]:
        return roster.children(self._ledger())

    @property
    def policy(self) -> dict[str, bytes]:
        return roster.policy(self._ledger())

    @property
    def models(self) -> tuple[ModelPublish, ...]:
        return roster.models(self._ledger())

    @property
    def revoked_capabilities(self) -> tuple[roster.RevokedCapability, ...]:
        """Capabilities of thin clients that are worth nothing any more."""
        return roster.revoked_capabilities(self._ledger())

    @property
    def epochs(self) -> tuple[roster.EpochAct, ...]:
        return roster.epoch_acts(self._ledger().epochs)

    @property
    def attests(self) -> tuple[roster.EpochAct, ...]:
        return roster.epoch_acts(self._ledger().attests)

    @property
    def disputes(self) -> tuple[roster.EpochAct, ...]:
        return roster.epoch_acts(self._ledger().disputes)

    @property
    def epoch_policy(self) -> EpochPolicy:
        return EpochPolicy.of(self.policy)

    @property
    def electorate(self) -> frozenset[IdentityKey]:
        """The unretired identities: whose majority is a quorum of an epoch declared now."""
        return self.electorate_of(None)

    def electorate_of(self, child: PartyKey | None) -> frozenset[IdentityKey]:
        """The same for a child party: those who take part in it."""
        return roster.electorate(self._ledger(), EVERYTHING, child)

    @property
    def voters(self) -> frozenset[IdentityKey]:
        """From whom votes on epochs may still come: also from who was silent, and is in no electorate of now."""
        return roster.voters(self._ledger(), EVERYTHING)

    def admitted_ms(self, feed: FeedKey) -> int:
        """When a feed was admitted last, by the clock of who did; 0 when it was not."""
        return roster.admitted_ms(self._ledger(), feed)

    @property
    def ended_feeds(self) -> frozenset[FeedKey]:
        """Data feeds of which blocks may have been cut."""
        return roster.ended_feeds(self._ledger(), self._verdicts.fork_evidence, EVERYTHING)

    def epoch_tally(self, child: PartyKey | None = None) -> Tally:
        """The epochs of the party, or of a child party, counted."""
        self._settle()
        return self._tally(child)

    def _tally(self, child: PartyKey | None) -> Tally:
        """Counts on from where it was, unless verdicts were made anew: what is recorded stays recorded till then."""
        verdicts = self._verdicts
        ledger = verdicts.ledger
        if self._tallied is not ledger:
            self._geneses.clear()
            self._tallies.clear()
        seen = (len(verdicts.epoch_events), len(verdicts.decided))
        if self._tallied is not ledger or self._epochs_seen != seen:
            voided = verdicts.voided_epochs
            if voided != self._voided:
                self._geneses.clear()
                self._tallies.clear()
            self._tallied, self._epochs_seen, self._voided = ledger, seen, voided
        found = self._tallies.get(child)
        fresh = self._standing(ledger.epochs if found is None else ledger.epochs[found.epochs :])
        if any(self._comes_first(event) for event in fresh):
            self._geneses.clear()
            self._tallies.clear()
            found, fresh = None, self._standing(ledger.epochs)
        if found is None:
            start = self._starts.get(child)
            tally = Tally(child=child, start=start)
            counting = {event.hash for event in fresh}
            if start is not None and start.epoch not in counting:  # whatever is said of its declarer's feed by now
                tally.add(self._epoch_act(self._begun[start.epoch]))
            for event in roster.in_order(self._voided):
                if event.hash not in counting:
                    tally.add(self._epoch_act(event, voided=True))
            found = self._tallies[child] = _Counted(tally)
        declared: dict[bytes, Event] = {}
        for event in roster.in_order(fresh):
            declared.setdefault(event.hash, event)
        acts = [self._epoch_act(event) for event in declared.values()]
        for event in (*ledger.attests[found.attests :], *ledger.disputes[found.disputes :]):
            act = roster.epoch_act(event)
            assert not isinstance(act.act, EpochGenesis), event
            about = self._geneses.get(act.act.genesis)
            if about is not None and event.follows(about.stamp):  # nobody has judged what it had not seen
                acts.append(act)
        found.tally.take(acts)
        found.epochs, found.attests = len(ledger.epochs), len(ledger.attests)
        found.disputes = len(ledger.disputes)
        return found.tally

    def _standing(self, events: Iterable[Event]) -> list[Event]:
        """Those of the geneses that no removal voids."""
        voided = set(self._voided)
        return [event for event in events if event not in voided]

    def _comes_first(self, event: Event) -> bool:
        """Whether the same genesis was counted at a later place. A device may repeat one, also in another feed of its own:
        its first place in canonical order counts, and the past that it has there."""
        known = self._geneses.get(event.hash)
        return known is not None and (known.voided or event.stamp < known.stamp)

    def _epoch_act(self, event: Event, *, voided: bool = False) -> roster.EpochAct:
        """A genesis with what its past says of members and feeds, which does not change."""
        found = self._geneses.get(event.hash)
        if found is None:
            verdicts = self._verdicts
            said = event.claim.assertion if event.claim is not None else None
            assert isinstance(said, EpochGenesis), event
            electorate = roster.electorate(verdicts.ledger, event, said.child)
            ended = roster.ended_feeds(verdicts.ledger, verdicts.fork_evidence, event)
            found = self._geneses[event.hash] = roster.epoch_act(event, electorate, ended=ended, voided=voided)
        return found

    def _pins_of(self, child: PartyKey | None, kept: Collection[bytes] = ()) -> Pins:
        """What quorums attested. Not what only its successors make final: those may know better of single blocks."""
        start = self._starts.get(child)
        attested: list[tuple[bytes, EpochGenesis | PinnedEpoch]]
        attested = [(epoch.hash, epoch) for epoch in start.pins] if start is not None else []
        attested += [
            (epoch.hash, epoch.genesis)
            for epoch in self._tally(child).pinned(kept)
            if start is None or epoch.number > start.number
        ]
        known = self._pins.get(child, NO_PINS)
        if len(attested) != known.count or any(hash != key for (hash, _), key in zip(attested, known.key, strict=True)):
            known = self._pins[child] = Pins(attested, known)
        return known

    def pins(self, child: PartyKey | None = None) -> Pins:
        """What the final epochs of the party, or of a child party, contain."""
        self._settle()
        return self._pins_of(child) if child is not None else self._verdicts.pins

    def _given(self, child: PartyKey | None) -> Pins:
        start = self._starts.get(child)
        return Pins([(epoch.hash, epoch) for epoch in start.pins]) if start is not None else NO_PINS

    # --- why --------------------------------------------------------------------------------------------------

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        """Every credential that does not count, in canonical order."""
        self._settle()
        refused = sorted(self._verdicts.refusals, key=lambda event: (event.stamp, event.hash))
        found = []
        for event in refused:
            refusal = self._verdicts.refusal(event)
            assert refusal is not None, f"{event} is refused without a reason"
            act = type(event.claim.assertion).__name__ if event.claim is not None else "unreadable"
            found.append(Rejection(event.feed, event.seq, event.position, refusal.reason, refusal.detail, act))
        return tuple(found)

    @property
    def listed(self) -> tuple[Rejection, ...]:
        """`rejected` as people are told of it: equal wherever the same is known, whichever branch of a forked control feed
        was received. Of such a feed these are the credentials before the fork, and the fork."""
        admission = self.admission()
        control = (each for each in admission.followed if each.kind is FeedKind.CONTROL)
        forked = {feed_id(each.feed): at for each in control if (at := each.branches_from) is not None}
        shared = [each for each in self.rejected if each.seq < forked.get(each.feed, each.seq + 1)]
        forks = [Rejection(feed, at, -1, Reason.FORK, "the feed forks here") for feed, at in sorted(forked.items())]
        return (*shared, *forks)

    def foresee(self, message: ControlMessage) -> Refusal | None:
        """Why the first credential of a message that nobody has written yet would not count; None if it would.

        Those after it may rest on the first, which is not here yet.
        """
        self._settle()
        return self._verdicts.foresee(Event(message, 0, message.credentials[0]))

    def why(self, key: bytes) -> list[explain.Step]:
        """The credentials that concern a member, group, device or feed, and what the valid ones rest on."""
        self._settle()
        return explain.why(self._verdicts, key)

    def departure(self, device: DeviceKey) -> dict[FeedId, int]:
        """How much of each control feed proves that a device was removed; empty when nothing says so."""
        return departure(self._ledger(), device)

    def named(self) -> set[bytes]:
        """The keys that `why` has something to say of."""
        return explain.named(self._verdicts)

    def _ledger(self) -> Ledger:
        self._settle()
        return self._verdicts.ledger

    def _settle(self) -> None:
        """Verdicts and epochs at rest: what final epochs contain is pinned, and under that the same are final.

        Pins only grow from round to round (a pinned act stays valid, and what was pinned is kept), so this ends; the bound is
        for bad input.
        """
        if self._at_rest:
            return
        verdicts = self._verdicts
        verdicts.settle()
        if (verdicts.decided or verdicts.forks) and not self._pins_of(None).extends(verdicts.pins):
            verdicts.unpin()  # a later quorum had not heard of what was pinned
            verdicts.settle()
        for _ in range(PIN_ROUNDS_MAX):
            kept = verdicts.pins.key if verdicts.decided or verdicts.forks else ()
            if not verdicts.pin(self._pins_of(None, kept)):
                self._at_rest = True
                return
            verdicts.settle()
