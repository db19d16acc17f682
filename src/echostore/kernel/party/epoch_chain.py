"""The chain of epochs that all members end with: a function of the set of epoch credentials.

    number    0         1             2                 3
              party ◄── A ◄────────── B ◄────────────── D       D names B: whoever chose B's rival starts again from B
              genesis    ◄── B' (same number, fewer attests or a higher hash: kept as a checkpoint)

E1  An epoch counts whose number is one more than its predecessor's, whose timeframes include the predecessor's, whose
    `discard_before` does not go back, and whose predecessor is in the chain. Epoch 0 is the party's genesis: no blocks.
    Of several that one identity declares with one number, only the one that is its vote (E3) counts without a quorum.
    Of a predecessor without a quorum, blocks may have been cut since, and the data timeframe may lack those.
    Where a device repeats a genesis, its first place in canonical order counts, with the past that it has there.
E2  Of several with one number, the one that a quorum of identities attested, or whose successors have a quorum (E6),
    names the number for good. Of two such (false votes, or members who had not heard of each other) it is the one whose
    quorum has the lower number, then the one with more votes: a few can't grind their way past many. Before that, the
    one with more votes does, then the one with the lower hash, and any goes before one that more identities dispute
    than attest. So what its declarer alone votes for never blocks what others attest, however low its hash.
E3  An identity votes for one genesis per number: its first attest in canonical order. Declaring is attesting. An
    attest of another CID than the genesis names is none, nor is one by who disputed the same genesis before, nor one
    whose writer had not seen the genesis, nor one that follows, in the same feed, a vote for a later epoch which does
    not rest on it: who went on without a genesis does not come back to it, so nobody has to wait for that.
E4  A quorum is a majority of the electorate: the unretired identities that were members in the genesis' own past. Who
    has no feed left that was not retired, of control or of data, is not among them until it comes back with a new one.
E5  An attest counts by its own past: a removal that comes later, or at the same time, does not take it back. A genesis
    whose declarer was removed (or its device, its control feed, its role lowered) later or at the same time counts only
    with a quorum.
E6  A quorum for an epoch is one for all epochs below it.

An identity that found an epoch wrong goes on without it: in its own view (`Tally.view`) it is not there, until a quorum
stands for it. The same goes for epochs that its peer passes over (`epoch_agreement`): refused ones, and those that have
waited too long. That may depend on a clock, and decides only what this peer declares and votes for: the chain follows
from the votes. What an honest identity may attest (`Tally.objection`) makes E2 lasting: two with one number never both
get a quorum.

For who reads epochs (bootstrap, truncation, gc), all of it pure:

    tally = machine.epoch_tally(child)          the credentials of one party or child party, counted
    tally.chain                                 [Epoch 1, Epoch 2, ...]: the accepted chain
    tally.accepted(number) -> Epoch | None      the epoch that names this number
    tally.final(number) -> bool                 whether that is for good: a quorum stands for it or for a successor
    tally.latest -> Epoch | None                the newest of the chain; `.genesis.record`, `.genesis.cut`, `.hash`
    tally.latest_final -> Epoch | None
    enough_to_join(epoch, policy, devices)      whether a newcomer believes it
    truncatable(tally.chain, policy)            the newest epoch below which blocks may be deleted: attested by the
                                                policy's quorum, and with a final successor (one epoch old); or None
    machine.epoch_policy -> EpochPolicy         `epoch_policy.EpochPolicy`
    Tally(acts, members, base=epoch)            starts after `base`, where control below it is gone
    Tally(start=chain_start)                    starts with the epoch where a control state begins (`control_state`)
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from echostore.kernel.ids import DeviceKey, FeedId, FeedKey, IdentityKey, PartyKey, Stamp, feed_id
from echostore.kernel.party.control_state import ChainStart
from echostore.kernel.party.credentials import EpochDispute, EpochGenesis, TimeframeEntry
from echostore.kernel.party.epoch_policy import EpochPolicy, majority
from echostore.kernel.party.roster import EpochAct


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of the chain, with who stands for it."""

    genesis: EpochGenesis
    hash: bytes
    declarer: IdentityKey
    attested_by: frozenset[IdentityKey]
    final: bool
    """Whether a quorum attested it, or one of its successors."""
    quorate: bool
    """Whether a quorum attested it itself: then what it contains is pinned (`pins`)."""
    rivals: tuple[bytes, ...]
    """Hashes of others with the same number and predecessor."""
    device: DeviceKey
    electorate: frozenset[IdentityKey]
    disputed_by: frozenset[IdentityKey]

    @property
    def number(self) -> int:
        return self.genesis.number

    @property
    def independent(self) -> frozenset[IdentityKey]:
        """Who stands for it besides its declarer."""
        return self.attested_by - {self.declarer}


class _Said(NamedTuple):
    """What an identity said of a genesis. Sorts in canonical order."""

    stamp: Stamp
    hash: bytes
    number: int
    genesis: bytes
    disputes: bool


class _Quorum(NamedTuple):
    """Where a quorum stands, and with how many votes. The lesser goes before the greater."""

    number: int
    votes_negative: int


class Tally:
    """The epoch credentials of one party or child party, counted. Taking one more costs what it may change."""

    def __init__(
        self,
        acts: Iterable[EpochAct] = (),
        members: Collection[IdentityKey] = (),
        *,
        child: PartyKey | None = None,
        base: Epoch | None = None,
        start: ChainStart | None = None,
    ) -> None:
        """`members` is the electorate of geneses that do not bring their own. With `start`, older epochs are gone."""
        self._start = start
        self._first = start.number if start is not None else base.number + 1 if base is not None else 1
        self._members = frozenset(members)
        self._child = child
        self._base = base
        self._declared: dict[bytes, EpochAct] = {}
        self._by_number: dict[int, list[EpochAct]] = defaultdict(list)
        self._said: dict[IdentityKey, list[_Said]] = defaultdict(list)
        self._votes: dict[int, dict[IdentityKey, bytes]] = defaultdict(dict)
        self._voted: dict[IdentityKey, dict[int, _Said]] = defaultdict(dict)
        self._highest: dict[IdentityKey, int] = defaultdict(int)
        """The greatest number that an identity voted on."""
        self._support: dict[bytes, set[IdentityKey]] = defaultdict(set)
        self._stood: dict[bytes, list[tuple[IdentityKey, Stamp]]] = defaultdict(list)
        """Who stood for a genesis where, counted or not."""
        self._heard: dict[int, dict[tuple[bytes, bytes], bool]] = defaultdict(dict)
        """By number, what `_is_heard` found."""
        self._disputes: dict[bytes, set[IdentityKey]] = defaultdict(set)
        self._chain: list[Epoch] = []
        self._whole = False
        """Whether `_chain` is up to date; if not, it is a beginning that can't change any more."""
        self.take(acts)

    def add(self, act: EpochAct) -> None:
        """Count one more credential; a genesis before what is said about it."""
        self.take((act,))

    def take(self, acts: Iterable[EpochAct]) -> None:
        """Count more credentials. An attest needs its genesis, which is among them wherever chance has put it."""
        fresh = [act for act in acts if act.hash not in self._declared]
        fresh.sort(key=lambda each: (each.stamp, each.hash))
        again: set[IdentityKey] = set()
        for act in fresh:
            if isinstance(act.act, EpochGenesis):
                again |= self._declare(act, act.act)
        for act in fresh:
            said = self._what_is_said(act)
            if said is None:
                continue
            known = self._said[act.identity]
            known.append(said)
            if not said.disputes:
                self._stood[said.genesis].append((act.identity, said.stamp))
            self._stale(said.number)
            if len(known) > 1 and said < known[-2]:
                again.add(act.identity)
            elif act.identity not in again:
                self._count(act.identity, said)
        for identity in again:
            self._recount(identity)

    def _declare(self, act: EpochAct, said: EpochGenesis) -> set[IdentityKey]:
        """Take in a genesis; returns whose votes may count otherwise, as they were cast for what rests on it."""
        if said.child != self._child or act.hash in self._declared:
            return set()
        self._declared[act.hash] = act
        self._by_number[said.number].append(act)
        self._stale(said.number)
        above = self._by_number.get(said.number + 1, ())
        if not any(genesis_of(each).previous == act.hash for each in above):
            return set()
        return {
            identity
            for identity, votes in self._voted.items()
            if any(number > said.number and self._rests_on(vote.genesis, act.hash) for number, vote in votes.items())
        }

    def _what_is_said(self, act: EpochAct) -> _Said | None:
        """None when it concerns none of the geneses here, or another snapshot than they name."""
        said = act.act
        if isinstance(said, EpochGenesis):
            return _Said(act.stamp, act.hash, said.number, act.hash, False) if act.hash in self._declared else None
        about = self._declared.get(said.genesis)
        if about is None or genesis_of(about).number != said.number:
            return None
        if isinstance(said, EpochDispute):
            return _Said(act.stamp, act.hash, said.number, about.hash, True)
        if said.snapshot != genesis_of(about).snapshot:
            return None
        return _Said(act.stamp, act.hash, said.number, about.hash, False)

    def _count(self, identity: IdentityKey, said: _Said) -> None:
        """Count what an identity says after all that was counted of it (E3)."""
        if said.disputes:
            self._disputes[said.genesis].add(identity)
            return
        votes = self._voted[identity]
        if identity in self._disputes[said.genesis] or said.number in votes:
            return
        if said.hash != said.genesis and self._went_on(identity, said.genesis, said.stamp.feed):
            return
        votes[said.number] = said
        self._highest[identity] = max(said.number, self._highest[identity])
        self._votes[said.number][identity] = said.genesis
        self._support[said.genesis].add(identity)

    def _went_on(self, identity: IdentityKey, genesis: bytes, feed: FeedId | None = None) -> bool:
        """Whether an identity stands, in this feed or in any, for a later epoch that does not rest on a genesis."""
        number = genesis_of(self._declared[genesis]).number
        return self._highest.get(identity, 0) > number and any(
            above > number and feed in (None, vote.stamp.feed) and not self._rests_on(vote.genesis, genesis)
            for above, vote in self._voted[identity].items()
        )

    def _recount(self, identity: IdentityKey) -> None:
        """Something came late, and what an identity said is counted from its beginning."""
        before = self._voted.pop(identity, {})
        self._highest.pop(identity, None)
        for number, vote in before.items():
            del self._votes[number][identity]
            self._support[vote.genesis].discard(identity)
        known = self._said[identity]
        for said in known:
            self._disputes[said.genesis].discard(identity)
        known.sort()
        for said in known:
            self._count(identity, said)
        after = self._voted[identity]
        for number in before.keys() | after.keys():
            if before.get(number) != after.get(number):
                self._stale(number)

    def _stale(self, number: int) -> None:
        """Something about a number changed. What a quorum of a lower number settled stays as it is."""
        self._whole = False
        self._heard.pop(number, None)
        kept = max(0, min(len(self._chain), number - self._first))
        while kept and not self._chain[kept - 1].quorate:
            kept -= 1
        del self._chain[kept:]

    # the chain

    @property
    def chain(self) -> list[Epoch]:
        """The epochs that count, by number, from the one after the base on."""
        if not self._whole:
            self._chain = self._build(frozenset(), self._chain)
            self._whole = True
        return self._chain

    def view(self, identity: IdentityKey, passed: frozenset[bytes] = frozenset()) -> list[Epoch]:
        """The chain without what an identity itself disputes, and without the geneses that its peer passes over."""
        without = passed | {said.genesis for said in self._said.get(identity, ()) if said.disputes}
        return self._build(without, []) if without else self.chain

    def _build(self, without: frozenset[bytes], beginning: list[Epoch]) -> list[Epoch]:
        found = list(beginning)
        last = found[-1] if found else self._base
        number = last.number + 1 if last else self._first
        upheld = self._upheld(number - 1)
        if not found and self._start is not None:
            last = self._begin(self._start)
            found.append(last)
            number += 1
        while candidates := self._candidates(number, last, without, upheld):
            best = min(candidates, key=lambda act: self._preference(act, upheld))
            rivals = tuple(sorted(act.hash for act in candidates if act is not best))
            last = self._epoch(best, final=best.hash in upheld, rivals=rivals)
            found.append(last)
            number += 1
        return found

    def _begin(self, start: ChainStart) -> Epoch:
        """The epoch that the chain begins with: that was settled before anything that is here was said."""
        rivals = [self._declared[hash] for hash in start.rivals if hash in self._declared]
        counting = sorted(act.hash for act in rivals if not act.voided or self._quorate(act))
        return self._epoch(self._declared[start.epoch], final=True, rivals=tuple(counting))

    def contenders(self, number: int) -> tuple[bytes, ...]:
        """Hashes of those that might have named a number in the chain's place, ascending."""
        if self._start is not None and number == self._start.number:
            return self._start.rivals
        named, before = self.accepted(number), self.accepted(number - 1)
        assert named is not None, f"the chain has no epoch {number}"
        acts = self._by_number.get(number, ())
        return tuple(
            sorted(act.hash for act in acts if act.hash != named.hash and follows(genesis_of(act), before, act.ended))
        )

    def _candidates(
        self, number: int, before: Epoch | None, without: frozenset[bytes], upheld: Mapping[bytes, _Quorum]
    ) -> list[EpochAct]:
        return [
            act
            for act in self._by_number.get(number, ())
            if follows(genesis_of(act), before, act.ended)
            and (act.hash in upheld or (not act.voided and act.hash not in without and self._is_vote(act)))
        ]

    def _is_vote(self, act: EpochAct) -> bool:
        """Whether a genesis is its declarer's vote: whoever declares many of one number has one of them counted."""
        return self._votes[genesis_of(act).number].get(act.identity) == act.hash

    def _preference(self, act: EpochAct, upheld: Mapping[bytes, _Quorum]) -> tuple[bool, _Quorum, bool, int, bytes]:
        votes = len(self._voters(act))
        doubtful = len(self._disputes[act.hash] & self._electorate(act)) > votes
        return act.hash not in upheld, upheld.get(act.hash, _Quorum(0, 0)), doubtful, -votes, act.hash

    def _upheld(self, above: int) -> dict[bytes, _Quorum]:
        """Geneses of the numbers above a given one that a quorum stands for, or for what rests on them: the best such."""
        found: dict[bytes, _Quorum] = {}
        for number in sorted((each for each in self._by_number if each > above), reverse=True):
            for act in self._by_number[number]:
                if self._quorate(act):
                    found[act.hash] = _Quorum(number, -len(self._voters(act)))
                before = self._declared.get(genesis_of(act).previous)
                if act.hash not in found or before is None:
                    continue
                if follows(genesis_of(act), self._epoch(before, final=True, rivals=()), act.ended):
                    found[before.hash] = min(found[act.hash], found.get(before.hash, found[act.hash]))
        return found

    def _epoch(self, act: EpochAct, *, final: bool, rivals: tuple[bytes, ...]) -> Epoch:
        return Epoch(
            genesis=genesis_of(act),
            hash=act.hash,
            declarer=act.identity,
            attested_by=frozenset(self._voters(act)),
            final=final,
            quorate=self._quorate(act),
            rivals=rivals,
            device=act.device,
            electorate=self._electorate(act),
            disputed_by=frozenset(self._disputes.get(act.hash, ())),
        )

    def accepted(self, number: int) -> Epoch | None:
        """The epoch that names a number."""
        at = number - self._first
        return self.chain[at] if 0 <= at < len(self.chain) else None

    def named(self, genesis: bytes) -> Epoch | None:
        """An epoch by its genesis, also one that another has the number of."""
        act = self._declared.get(genesis)
        if act is None:
            return None
        inside = self.accepted(genesis_of(act).number)
        return inside if inside is not None and inside.hash == genesis else self._epoch(act, final=False, rivals=())

    def final(self, number: int) -> bool:
        epoch = self.accepted(number)
        return epoch is not None and epoch.final

    def pinned(self, kept: Collection[bytes] = ()) -> list[Epoch]:
        """The epochs whose contents stay: the newest with a quorum, and those below of whose quorum the next such heard.

        What only came to a quorum behind the back of a later one pins nothing: that one has settled what counts, and
        who began there has no votes on what lies below. Those in `kept` are among them as long as they have a quorum.
        """
        found: list[Epoch] = []
        for epoch in reversed(self.chain):
            if epoch.quorate and (not found or epoch.hash in kept or self._is_heard(epoch, found[-1])):
                found.append(epoch)
        return found[::-1]

    def _is_heard(self, epoch: Epoch, above: Epoch) -> bool:
        """Whether a quorum for an epoch stands in the control messages that a later one names."""
        known = self._heard[epoch.number]
        place = (epoch.hash, above.hash)
        if place not in known:
            ends = {feed_id(entry.feed): entry.seq for entry in above.genesis.control_timeframe}
            inside = {who for who, stamp in self._stood[epoch.hash] if stamp.seq <= ends.get(stamp.feed, -1)}
            known[place] = len(inside & epoch.attested_by) >= majority(len(epoch.electorate))
        return known[place]

    @property
    def latest(self) -> Epoch | None:
        return self.chain[-1] if self.chain else self._base

    @property
    def latest_final(self) -> Epoch | None:
        return next((epoch for epoch in reversed(self.chain) if epoch.final), self._base)

    @property
    def declared(self) -> list[EpochAct]:
        """Every genesis that may be declared, in canonical order, also those that are not in the chain."""
        return list(self._declared.values())

    def disputed(self, genesis: bytes, identity: IdentityKey) -> bool:
        return identity in self._disputes.get(genesis, ())

    def voted(self, number: int, identity: IdentityKey) -> bytes | None:
        """The genesis that an identity stands for at a number."""
        return self._votes.get(number, {}).get(identity)

    # what may be attested

    def objection(
        self,
        genesis: bytes,
        identity: IdentityKey,
        active: frozenset[IdentityKey] | None = None,
        passed: frozenset[bytes] = frozenset(),
    ) -> str | None:
        """Why an honest identity does not attest a genesis; None when it may, if its own recomputation agrees.

        It attests what names its number at the moment in its own view, once per number, and what rests on nothing that
        it has to be afraid of (`fear`). `active` are those from whom votes may still come (`PartyMachine.voters`),
        `passed` the geneses that its peer passes over.
        """
        act = self._declared.get(genesis)
        if act is None:
            return "no such epoch is declared"
        if identity not in self._electorate(act):
            return "this identity was no member when it was declared"
        if self.disputed(genesis, identity):
            return "this identity disputes it"
        number = genesis_of(act).number
        seen = self.view(identity, passed)
        named = next((epoch for epoch in seen if epoch.number == number), None)
        vote = self.voted(number, identity)
        if vote == genesis:
            return "this identity stands for it"
        if self._went_on(identity, genesis):
            return "this identity stands for a later epoch that rests on a rival of it"
        if vote is None and any(act.hash == genesis for act in self._owed(identity)):
            return None  # what it stands for above rests on it: there is nothing else that it could vote for here
        if named is None or named.hash != genesis:
            return "another epoch names its number, or its predecessor is not in the chain"
        before = seen[: seen.index(named)]
        return self.fear(genesis_of(act), before, identity, active)

    def owed(self, identity: IdentityKey) -> list[Epoch]:
        """Epochs that an identity's own votes above rest on and that it has not voted for, the lowest first.

        Others may wait for it: while a vote of its may still come there, they can't leave what they voted for themselves.
        """
        found = {act.hash: self.named(act.hash) for act in self._owed(identity)}
        epochs = [epoch for epoch in found.values() if epoch is not None and not self.disputed(epoch.hash, identity)]
        return sorted(epochs, key=lambda epoch: epoch.number)

    def _owed(self, identity: IdentityKey) -> Iterable[EpochAct]:
        settled = self.latest_final
        above = settled.number if settled is not None else 0
        for said in self._voted.get(identity, {}).values():
            act = self._declared.get(said.genesis)
            before = self._declared.get(genesis_of(act).previous) if act is not None else None
            while act is not None and before is not None:
                number = genesis_of(before).number
                if number <= above or number != genesis_of(act).number - 1 or number in self._voted[identity]:
                    break
                yield before
                act, before = before, self._declared.get(genesis_of(before).previous)

    def fear(
        self,
        genesis: EpochGenesis,
        before: Sequence[Epoch],
        identity: IdentityKey,
        active: frozenset[IdentityKey] | None = None,
    ) -> str | None:
        """Why an honest identity does not stand for a genesis on top of these epochs yet.

        It votes once per number, also by declaring. Where it voted for another below, it goes over only when that one is beaten: the number is final, or too many
        have voted otherwise. Where a genesis lacks blocks of its predecessor, which were cut since, the predecessor
        must be beaten too. So whoever made a quorum for one never helps what contradicts it.
        """
        if self.voted(genesis.number, identity) is not None:
            return f"this identity stands for another epoch {genesis.number}"
        lacks = bool(before) and not includes(genesis.timeframe, before[-1].genesis.timeframe)
        if lacks and self._can_win(before[-1].hash, active):
            return f"it lacks blocks of epoch {before[-1].number}, which may still get its quorum"
        for below in reversed(before):
            if below.final:
                break  # and all below it
            vote = self.voted(below.number, identity)
            if vote not in (None, below.hash) and self._can_win(vote, active):
                return f"this identity stands for a rival of epoch {below.number} that may still win"
        return None

    def _can_win(self, genesis: bytes | None, active: frozenset[IdentityKey] | None) -> bool:
        """Whether a genesis can still get a quorum, or has it."""
        act = self._declared.get(genesis or b"")
        if act is None:
            return False
        electorate = self._electorate(act)
        votes = self._votes[genesis_of(act).number]
        disputes = self._disputes[act.hash]
        possible = 0
        for identity in electorate:
            if identity in votes:
                possible += votes[identity] == genesis
            elif identity not in disputes and not self._went_on(identity, act.hash):
                possible += active is None or identity in active
        return possible >= majority(len(electorate))

    def _rests_on(self, later: bytes, earlier: bytes) -> bool:
        """Whether one leads down to the other, number by number: what skips one rests on nothing, whatever it names."""
        at, number = self._declared.get(later), genesis_of(self._declared[earlier]).number
        while at is not None and at.hash != earlier:
            before = self._declared.get(genesis_of(at).previous)
            follows_on = before is not None and genesis_of(before).number == genesis_of(at).number - 1 >= number
            at = before if follows_on else None
        return at is not None

    # votes

    def _electorate(self, act: EpochAct) -> frozenset[IdentityKey]:
        return self._members if act.electorate is None else act.electorate

    def _voters(self, act: EpochAct) -> set[IdentityKey]:
        return self._support[act.hash] & self._electorate(act)

    def _quorate(self, act: EpochAct) -> bool:
        return len(self._voters(act)) >= majority(len(self._electorate(act)))


def chain(
    acts: Iterable[EpochAct],
    members: Collection[IdentityKey],
    *,
    child: PartyKey | None = None,
    base: Epoch | None = None,
) -> list[Epoch]:
    """The epochs that count, by number from 1 on."""
    return Tally(acts, members, child=child, base=base).chain


def enough_to_join(epoch: Epoch, policy: EpochPolicy, devices: int) -> bool:
    """Whether a newcomer, who can't recompute it, believes an epoch of a party with so many devices."""
    return len(epoch.independent) >= policy.attests_to_join(devices)


def truncatable(epochs: Sequence[Epoch], policy: EpochPolicy) -> Epoch | None:
    """The newest epoch below which blocks may be deleted: the policy's quorum attested it and it is one epoch old."""
    for at in range(len(epochs) - 2, -1, -1):
        epoch, successor = epochs[at], epochs[at + 1]
        wanted = policy.quorum_for_truncation(len(epoch.electorate))
        if successor.final and len(epoch.attested_by) >= wanted:
            return epoch
    return None


def follows(genesis: EpochGenesis, before: Epoch | None, ended: frozenset[FeedKey] = frozenset()) -> bool:
    """Whether a genesis is a successor of an epoch (E1); None stands for epoch 0. `ended` are feeds that were cut."""
    if before is None:
        return genesis.number == 1 and not genesis.previous
    earlier = before.genesis
    return (
        genesis.number == earlier.number + 1
        and genesis.previous == before.hash
        and genesis.discard_before_ms >= earlier.discard_before_ms
        and includes(genesis.control_timeframe, earlier.control_timeframe)
        and includes(genesis.timeframe, earlier.timeframe, frozenset() if before.quorate else ended)
    )


def includes(
    later: Iterable[TimeframeEntry], earlier: Iterable[TimeframeEntry], but: frozenset[FeedKey] = frozenset()
) -> bool:
    """Whether a timeframe holds all that an earlier one does, as far as the two themselves tell; `but` these feeds."""
    reached = {entry.feed: entry for entry in later}
    for entry in earlier:
        at = reached.get(entry.feed)
        if entry.feed in but:
            continue
        if at is None or at.seq < entry.seq or (at.seq == entry.seq and at.link != entry.link):
            return False
    return True


def genesis_of(act: EpochAct) -> EpochGenesis:
    assert isinstance(act.act, EpochGenesis), act
    return act.act


__all__ = [
    "Epoch",
    "Tally",
    "chain",
    "enough_to_join",
    "follows",
    "genesis_of",
    "includes",
    "truncatable",
]
