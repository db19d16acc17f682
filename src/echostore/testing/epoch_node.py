"""One peer of a simulated party that makes epochs (`echostore.testing.epoch_world`): its feeds, its state, its conduct."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from echostore.kernel.ids import Cid, DeviceKey, FeedKey, IdentityKey, Link, PartyKey, feed_id
from echostore.kernel.party.compaction import compact
from echostore.kernel.party.control_state import ControlState
from echostore.kernel.party.credentials import (
    Assertion,
    Claim,
    ControlMessage,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    TimeframeEntry,
    VerifiedCredential,
)
from echostore.kernel.party.epoch_chain import Epoch, enough_to_join, follows, truncatable
from echostore.kernel.party.epoch_policy import DISCARD_AHEAD_MS, election, turn
from echostore.kernel.party.machine import PartyMachine

if TYPE_CHECKING:
    from echostore.testing.epoch_world import EpochWorld

HONEST, LIAR, DISPUTER, HOSTILE = "honest", "liar", "disputer", "hostile"

UNACCEPTABLE = ("ahead", "discards", "models")
"""Epochs of a hostile admin that nobody can attest, and that nobody can prove wrong."""
KNOWN_MODELS = frozenset({("set", 1)})
FUTURE_MS = 10**15


def seeded_key(*parts: object) -> bytes:
    return hashlib.sha256("/".join(map(str, parts)).encode()).digest()


PARTY = PartyKey(seeded_key("party"))


@dataclass(frozen=True, slots=True)
class Entry:
    """One data block."""

    feed: FeedKey
    seq: int
    hash: bytes
    deps: tuple[tuple[FeedKey, int], ...]


@dataclass(slots=True)
class Log:
    """A data feed as one peer holds it: from `start` on; below it an epoch stands for the rest."""

    start: int = 0
    link: bytes = bytes(32)
    entries: list[Entry] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.start + len(self.entries)

    def link_at(self, seq: int) -> bytes | None:
        if seq == self.start - 1:
            return self.link
        return self.entries[seq - self.start].hash if self.start <= seq < self.length else None


class EpochNode:
    """One peer. What survives a crash is in `control`, `logs`, `base`, `blobs` and `floor`."""

    def __init__(
        self, world: "EpochWorld", name: str, conduct: str = HONEST, identity: IdentityKey | None = None
    ) -> None:
        self.world, self.name, self.conduct = world, name, conduct
        self.identity = IdentityKey(seeded_key("identity", name)) if identity is None else identity
        self.device = DeviceKey(seeded_key("device", name))
        self.control_feed, self.data_feed = FeedKey(seeded_key("control", name)), FeedKey(seeded_key("data", name))
        self.control: dict[FeedKey, list[ControlMessage]] = {}
        self.logs: dict[FeedKey, Log] = {self.data_feed: Log()}
        self.base: tuple[int, frozenset[bytes]] = (0, frozenset())
        self.blobs: dict[Cid, frozenset[bytes]] = {}
        self.floor: ControlState | None = None
        """What its membership goes on from; without one, it is folded from all control messages."""
        self.gone: list[Epoch] = []
        """Epochs that the membership knows of no more: for who compares."""
        self.up = True
        self.unflushed = 0
        self.joining = False
        self.undecided_s: dict[bytes, float] = {}
        """Since when it has been able neither to attest nor to dispute a genesis."""
        self._start()

    def _start(self) -> None:
        """Memory as it is after a start: everything is processed again from what is held."""
        self.machine = PartyMachine(PARTY, self.floor)
        begun = self.floor.lengths if self.floor is not None else {}
        self.clock: dict[FeedKey, int] = {feed: length - 1 for feed, length in begun.items()}
        self.done: dict[FeedKey, int] = {feed: log.start for feed, log in self.logs.items()}
        self.counted = dict(self.done)
        self.position = 0
        self.due_s: float | None = None
        self.due_for: bytes | None = None
        self.told: tuple[Any, ...] = ()

    # control

    def say(self, *assertions: Assertion, device: DeviceKey | None = None) -> None:
        """Write a control message; it is durable, and everything processed is in its past. `device` signs the first."""
        own = self.control.setdefault(self.control_feed, [])
        clock = {feed_id(feed): last for feed, last in self.clock.items()}
        depth = 1 + max((self.control[feed][last].depth for feed, last in self.clock.items()), default=0)
        credentials = []
        for position, said in enumerate(assertions):
            signer = device if device is not None and position == 0 else self.device
            claim = Claim(PARTY, self.identity, signer, said)
            credentials.append(VerifiedCredential(claim, seeded_key(self.name, len(own), position, self.world.seed)))
        self._append(
            ControlMessage(feed_id(self.control_feed), self.control_feed, len(own), depth, clock, tuple(credentials))
        )

    def _append(self, message: ControlMessage) -> None:
        self.control.setdefault(message.feed_key, []).append(message)
        self.process()

    def process(self) -> None:
        """Deliver what can be delivered: control first, then data of admitted feeds."""
        moved = True
        while moved:
            moved = False
            for feed, messages in self.control.items():
                at = self.clock.get(feed, -1) + 1
                while at < len(messages) and self._seen(messages[at].clock):
                    self.machine.receive(messages[at])
                    self.clock[feed], at, moved = at, at + 1, True
        self._deliver()

    def _seen(self, clock: Any) -> bool:
        known = {feed_id(feed): last for feed, last in self.clock.items()}
        return all(known.get(feed, -1) >= last for feed, last in clock.items())

    def _deliver(self) -> None:
        admitted = self.machine.admission().by_id
        moved = True
        while moved:
            moved = False
            for feed, log in self.logs.items():
                if feed_id(feed) not in admitted:
                    continue
                at = self.done.setdefault(feed, log.start)
                while at < log.length and self._met(log.entries[at - log.start]):
                    at, moved = at + 1, True
                    self.done[feed] = at
                    self._tell_counted(feed)
        for feed in self.done:
            self._tell_counted(feed)

    def _met(self, entry: Entry) -> bool:
        return all(self.done.get(feed, 0) > seq for feed, seq in entry.deps)

    def _tell_counted(self, feed: FeedKey) -> None:
        """Write down what entered the state of a feed, or left it, since the last time."""
        log, told, counted = self.logs[feed], self.counted.get(feed, 0), self._counted(feed)
        told = max(told, log.start)
        for entry in log.entries[told - log.start : max(0, counted - log.start)]:
            self.tell("deliver", feed=feed.hex(), seq=entry.seq, hash=entry.hash.hex(), position=self.position)
            self.position += 1
        if counted < told:
            self.tell("exclude", hash=self.hash_at(feed, counted), reason="cut")
        self.counted[feed] = counted

    def _counted(self, feed: FeedKey) -> int:
        """How much of a feed is processed and counts."""
        record = self.machine.admission().by_id.get(feed_id(feed))
        if record is None or not record.intervals:
            return 0
        end = record.intervals[-1].end
        return self.done[feed] if end is None else min(self.done[feed], end)

    # data

    def write(self) -> None:
        self.unflushed += 1

    def flush(self) -> None:
        log = self.logs[self.data_feed]
        for _ in range(self.unflushed):
            seq = log.length
            deps = tuple(
                sorted((feed, length - 1) for feed, length in self.done.items() if length and feed != self.data_feed)
            )
            entry = Entry(self.data_feed, seq, seeded_key("entry", self.name, seq, log.link_at(seq - 1), deps), deps)
            log.entries.append(entry)
            named = [[feed.hex(), last, self.hash_at(feed, last)] for feed, last in deps]
            self.tell("append", feed=self.data_feed.hex(), seq=seq, hash=entry.hash.hex(), deps=named, durable=True)
        self.unflushed = 0
        self.process()

    def hash_at(self, feed: FeedKey, seq: int) -> str:
        link = self.logs[feed].link_at(seq)
        return link.hex() if link is not None else self.world.hashes[feed, seq].hex()

    def timeframe(self) -> dict[FeedKey, int]:
        """Of each feed how much is processed and counts."""
        return {feed: counted for feed in self.done if (counted := self._counted(feed))}

    def state_at(self, timeframe: dict[FeedKey, int]) -> frozenset[bytes] | None:
        """The entries of a state; None when they are not here."""
        found = set(self.base[1])
        for feed, length in timeframe.items():
            log = self.logs.get(feed)
            if log is None or log.length < length:
                return None
            if log.start > length:
                return None
            found.update(entry.hash for entry in log.entries[: length - log.start])
        return frozenset(found)

    # epochs

    def tick(self) -> None:
        if not self.up:
            return
        self.review()
        self.declare_if_due()
        self.compact()
        self.report()

    def review(self) -> None:
        for _ in range(64):
            if self.identity not in self.machine.electorate:
                return
            todo = self._next()
            if todo is None or not self._judge(todo):
                return

    def _next(self) -> Epoch | None:
        """The next epoch to be judged: what it can't judge is noted, and what comes after that waits with it."""
        tally, passed = self.machine.epoch_tally(), self.passed()
        for without in (passed, frozenset[bytes]()):
            for epoch in (*tally.view(self.identity, without), *tally.owed(self.identity)):
                if (
                    epoch.number > self.base[0]
                    and not tally.disputed(epoch.hash, self.identity)
                    and tally.voted(epoch.number, self.identity) is None
                    and tally.objection(epoch.hash, self.identity, self.machine.voters, without) is None
                ):
                    if self._undecided(epoch.genesis) is None:
                        return epoch
                    self.undecided_s.setdefault(epoch.hash, self.world.now)
                    break
        return None

    def _undecided(self, genesis: EpochGenesis) -> str | None:
        """Why it can neither attest nor dispute an epoch at the moment."""
        if not KNOWN_MODELS.issuperset(genesis.models):
            return "abstains"
        if genesis.discard_before_ms > self.world.now * 1000 + DISCARD_AHEAD_MS:
            return "refused"
        wanted = {entry.feed: entry.seq + 1 for entry in genesis.timeframe}
        if any(self.done.get(feed, 0) < length for feed, length in wanted.items()):
            return "waits"
        return "abstains" if self.state_at(wanted) is None else None

    def passed(self) -> frozenset[bytes]:
        """The geneses that it goes on without: refused ones, and those that it could not judge for long enough."""
        tally, passed = self.machine.epoch_tally(), frozenset[bytes]()
        patience_s = self.machine.epoch_policy.patience_s
        while True:
            chain = tally.view(self.identity, passed)
            voted = {epoch.hash for epoch in chain if tally.voted(epoch.number, self.identity) == epoch.hash}
            epoch = next((each for each in chain if not each.final and each.hash not in voted), None)
            why = self._undecided(epoch.genesis) if epoch is not None else None
            if epoch is None or why is None:
                return passed
            since = self.undecided_s.get(epoch.hash, self.world.now)
            if why != "refused" and self.world.now - since < patience_s:
                return passed
            passed |= {epoch.hash}

    def _judge(self, epoch: Epoch) -> bool:
        genesis = epoch.genesis
        if self.conduct in (LIAR, HOSTILE):
            return False
        if self.conduct == DISPUTER:
            self.world.told_dispute(self, epoch)
            self.say(EpochDispute(epoch.number, epoch.hash, b"", "because"))
            return True
        mine = self.state_at({entry.feed: entry.seq + 1 for entry in genesis.timeframe})
        assert mine is not None, f"{self.name} judges what it can't"
        true_admission = self.world.admission_digest(self, genesis)
        cid = snapshot_cid(mine)
        if cid == genesis.snapshot and genesis.admission_digest == true_admission and self._links_fit(genesis):
            self.blobs[cid] = mine
            self.tell(
                "attest",
                number=epoch.number,
                genesis=epoch.hash.hex(),
                snapshot=cid.hex(),
                identity=self.identity.hex(),
            )
            self.say(EpochAttest(epoch.number, epoch.hash, cid))
        else:
            self.world.told_dispute(self, epoch)
            self.say(EpochDispute(epoch.number, epoch.hash, cid, "another state"))
        return True

    def _links_fit(self, genesis: EpochGenesis) -> bool:
        links = ((self.logs[entry.feed].link_at(entry.seq), entry) for entry in genesis.timeframe)
        return all(link in (None, entry.link) for link, entry in links)

    def declare_if_due(self) -> None:
        if self.identity not in self.machine.electorate:
            return
        policy = self.machine.epoch_policy
        tally = self.machine.epoch_tally()
        chain = tally.view(self.identity, self.passed())
        before = chain[-1] if chain else None
        now = self.timeframe()
        inside = {entry.feed: entry.seq + 1 for entry in before.genesis.timeframe} if before else {}
        messages = sum(max(0, length - inside.get(feed, 0)) for feed, length in now.items())
        name = before.hash if before else b""
        if self.due_for != name:
            self.due_s, self.due_for = None, name
        if self.conduct == HOSTILE:
            if self.world.chance.random() < 0.2:
                self.declare(tally.chain if self.world.chance.random() < 0.5 else chain, now)
            return
        lies = self.conduct == LIAR and messages > 0 and self.world.chance.random() < 0.05
        if not lies and not policy.due(messages=messages, size=0, age_s=0):
            return
        if self.due_s is None:
            self.due_s = self.world.now
        number = before.number + 1 if before else 1
        order = election(PARTY, number, [node.device for node in self.world.members()])
        waited = self.world.now - self.due_s
        if not lies and not turn(order, self.device, waited_s=waited, grace_s=policy.grace_s):
            return
        if before and not before.final and tally.voted(before.number, self.identity) is None:
            return
        self.declare(chain, now)

    def declare(self, chain: list[Epoch], timeframe: dict[FeedKey, int]) -> None:
        before = chain[-1] if chain else None
        state = self.state_at(timeframe)
        if state is None:
            return
        if self.conduct == LIAR:
            made_up = {seeded_key("made up", self.world.chance.random())}
            state = state | made_up if self.world.chance.random() < 0.5 or not state else state - {min(state)}
        control = dict(self.clock)
        genesis = EpochGenesis(
            number=before.number + 1 if before else 1,
            previous=before.hash if before else b"",
            snapshot=snapshot_cid(state),
            timeframe=tuple(
                TimeframeEntry(feed, length - 1, Link(self._link(feed, length - 1)))
                for feed, length in sorted(timeframe.items())
            ),
            control_timeframe=tuple(
                TimeframeEntry(feed, last, Link(bytes(32))) for feed, last in sorted(control.items())
            ),
            admission_digest=self.machine.admission().digest,
            created_ms=int(self.world.now * 1000),
            discard_before_ms=before.genesis.discard_before_ms if before else 0,
        )
        if self.conduct == HOSTILE:
            genesis = self._unacceptable(genesis)
        fear = self.machine.epoch_tally().fear(genesis, chain, self.identity, self.machine.voters)
        if self.conduct not in (LIAR, HOSTILE) and (
            fear is not None or not follows(genesis, before, self.machine.ended_feeds)
        ):
            return
        self.blobs[genesis.snapshot] = state
        electorate = sorted(identity.hex() for identity in self.machine.electorate)
        own = len(self.control.get(self.control_feed, ()))
        self.tell(
            "declare",
            number=genesis.number,
            genesis=seeded_key(self.name, own, 0, self.world.seed).hex(),
            previous=genesis.previous.hex(),
            timeframe={entry.feed.hex(): [entry.seq, entry.link.hex()] for entry in genesis.timeframe},
            snapshot=genesis.snapshot.hex(),
            electorate=electorate,
            identity=self.identity.hex(),
        )
        self.say(genesis)
        self.due_s = None

    def _unacceptable(self, genesis: EpochGenesis) -> EpochGenesis:
        """What nobody can judge: blocks that nobody wrote, a time that has not come, a model that nobody has."""
        kind = self.world.chance.choice(UNACCEPTABLE)
        self.world.say(f"{self.name} declares {genesis.number}, which nobody can accept: {kind}")
        if kind == "ahead":
            ahead = [replace(entry, seq=entry.seq + 100, link=Link(bytes(32))) for entry in genesis.timeframe]
            return replace(genesis, timeframe=tuple(ahead))
        if kind == "discards":
            return replace(genesis, discard_before_ms=FUTURE_MS)
        return replace(genesis, models=(("unheard-of", 1),))

    def _link(self, feed: FeedKey, seq: int) -> bytes:
        return bytes.fromhex(self.hash_at(feed, seq))

    def compact(self) -> None:
        """Delete what lies below an epoch that the policy's quorum attested, now and then."""
        if self.conduct != HONEST or self.world.chance.random() > 0.1:
            return
        tally = self.machine.epoch_tally()
        epoch = truncatable(tally.chain, self.machine.epoch_policy)
        if epoch is not None and epoch.number > self.base[0] and epoch.genesis.snapshot in self.blobs:
            self.stand_on(epoch)
            if seeded_key(self.world.seed, self.name)[0] % 2:
                self._truncate_control(epoch)

    def _truncate_control(self, epoch: Epoch) -> None:
        """From now on go on from the control state at an epoch's cut, unless something came late that speaks of more."""
        lengths = {entry.feed: entry.seq + 1 for entry in epoch.genesis.control_timeframe}
        begun = self.floor.lengths if self.floor is not None else {}
        if self.machine.late or any(lengths.get(feed, 0) < length for feed, length in begun.items()):
            return
        state = compact(self.machine, lengths)
        machine = PartyMachine(PARTY, state)
        above = [
            message
            for feed, last in self.clock.items()
            for message in self.control[feed][lengths.get(feed, 0) : last + 1]
        ]
        for message in sorted(above, key=lambda each: (each.depth, each.feed, each.seq)):
            machine.receive(message)
        if machine.late:
            return
        first = min((known.number for known in machine.epoch_tally().chain), default=0)
        self.gone += [known for known in self.machine.epoch_tally().chain if known.number < first]
        self.floor, self.machine = state, machine

    @property
    def chain(self) -> list[Epoch]:
        """The chain from its first epoch on, also of those that are known no more."""
        return self.gone + self.machine.epoch_tally().chain

    def stand_on(self, epoch: Epoch) -> None:
        """From now on an epoch stands for what lies below it."""
        self.base = (epoch.number, self.blobs[epoch.genesis.snapshot])
        for entry in epoch.genesis.timeframe:
            log = self.logs.setdefault(entry.feed, Log())
            if log.start <= entry.seq:
                log.entries = log.entries[entry.seq + 1 - log.start :]
                log.start, log.link = entry.seq + 1, entry.link
                self.done[entry.feed] = max(self.done.get(entry.feed, 0), log.start)
                self.counted[entry.feed] = max(self.counted.get(entry.feed, 0), log.start)

    def bootstrap(self, others: Iterable["EpochNode"]) -> bool:
        """Start from the newest epoch that the policy lets a newcomer believe; False when there is none."""
        tally = self.machine.epoch_tally()
        devices = self.machine.member_devices
        for epoch in reversed(tally.chain):
            if not epoch.final or not enough_to_join(epoch, self.machine.epoch_policy, devices):
                continue
            if epoch.number <= self.base[0]:
                return False
            holder = next((other for other in others if epoch.genesis.snapshot in other.blobs), None)
            if holder is None:
                continue
            self.blobs[epoch.genesis.snapshot] = holder.blobs[epoch.genesis.snapshot]
            self.stand_on(epoch)
            self.world.told_final(epoch)
            counted = {feed: length for feed, length in self.counted.items() if length}
            timeframe = {feed.hex(): [length - 1, self.hash_at(feed, length - 1)] for feed, length in counted.items()}
            self.tell("crash")
            self.tell("boot", held=self._held(), timeframe=timeframe, position=self.position, base=epoch.number)
            self.process()
            return True
        return False

    def report(self) -> None:
        """Write down the chain, when it is another than before."""
        chain = self.chain
        told = tuple((epoch.hash, epoch.final) for epoch in chain)
        if told != self.told:
            self.told = told
            self.tell("chain", epochs=[[epoch.hash.hex(), epoch.final] for epoch in chain])
            for epoch in chain:
                if epoch.final:
                    self.world.told_final(epoch)

    # faults

    def crash(self) -> None:
        self.up, self.unflushed = False, 0
        self.tell("crash")

    def restart(self) -> None:
        self.up = True
        self._start()
        below = {feed.hex(): [log.start - 1, log.link.hex()] for feed, log in self.logs.items() if log.start}
        self.tell("boot", held=self._held(), timeframe=below, position=0, base=self.base[0] or "")
        self.process()

    def _held(self) -> dict[str, list[Any]]:
        log = self.logs[self.data_feed]
        return {self.data_feed.hex(): [log.length, self.hash_at(self.data_feed, log.length - 1)]} if log.length else {}

    def tell(self, kind: str, **fields: Any) -> None:
        self.world.record({"kind": kind, "peer": self.name, **fields})


def snapshot_cid(state: frozenset[bytes]) -> Cid:
    return Cid(hashlib.sha256("\n".join(sorted(each.hex() for each in state)).encode()).digest())
