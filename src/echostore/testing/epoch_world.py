"""A party that makes epochs, in virtual time: declarers, attesters, liars, a disputing minority, joiners, partitions.

    world = EpochWorld(seed=7, peers=7, epochs=20)
    world.run()                  chaos until so many epochs are final, then everything is healed and must agree

Who belongs, which blocks count, which epochs are in the chain and what may be attested is decided by the product's own
kernel (`PartyMachine`, `Tally`, `EpochPolicy`); feeds, gossip and state are simple stand-ins: a state is the set of
the entries that count. What happens is written down for `echostore.testing.checker`, which knows nothing of the kernel.

    honest      declares when it is due and its turn, attests what it recomputed, truncates (every other one its control
                feeds as well), starts from epochs
    liar        declares snapshots that leave out or make up an entry, and ground to low hashes; attests its own only
    disputer    disputes whatever others declare
    hostile     an admin that declares what nobody can accept or prove wrong: blocks that nobody wrote, a time that has
                not come, models that nobody has; several of one number, and some on top of its own

In the end, with the faulty still there or just removed, an epoch is asked for, somebody is let in, and somebody whose
machine is lost comes back as a new device of the same identity: all three must come about (I14).
"""

import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

from echostore.kernel.ids import DeviceKey, FeedKey, IdentityKey, feed_id
from echostore.kernel.party.credentials import (
    DeviceAdmit,
    EpochGenesis,
    FeedAdmit,
    FeedBound,
    FeedKind,
    MemberAdmit,
    MemberRemove,
    PartyGenesis,
    Policy,
    Role,
)
from echostore.kernel.party.epoch_chain import Epoch
from echostore.kernel.party.epoch_policy import EPOCH_DECLARERS, EPOCH_GRACE, EPOCH_MESSAGES
from echostore.kernel.party.machine import PartyMachine
from echostore.testing.epoch_node import DISPUTER, HONEST, HOSTILE, LIAR, PARTY, EpochNode, Log, snapshot_cid
from echostore.testing.world import NotSettled

STEPS_MAX = 60_000
"""Steps after which a run that has not made its epochs never will."""
SETTLE_ROUNDS_MAX = 400
ASK_ROUNDS_MAX = 200
"""Seconds in which what is asked for must come about: some times the patience with an epoch that nobody can judge."""
STALL_S = 60.0
"""After so long without a final epoch the founder removes a member who does not take part."""
MESSAGES = 6
GRACE_S = 3


class EpochWorld:
    """See the module. One seed is one run."""

    def __init__(
        self,
        seed: int,
        *,
        peers: int = 7,
        epochs: int = 20,
        liars: int = 1,
        disputers: int = 1,
        hostile: int | None = None,
        joiners: int = 2,
        partitions: bool = True,
        crashes: bool = True,
        removals: bool = True,
    ) -> None:
        """`hostile` admins are there in every third run, unless their number is given."""
        self.seed, self.epochs = seed, epochs
        self.chance = random.Random(seed)
        self.now = 0.0
        self.trace: list[str] = []
        self.history: list[dict[str, Any]] = []
        self.hashes: dict[tuple[FeedKey, int], bytes] = {}
        self._partitions, self._crashes, self._removals = partitions, crashes, removals
        self._sides: dict[str, int] = {}
        self._digests: dict[tuple[Any, ...], bytes] = {}
        self._finals: set[bytes] = set()
        self._joiners = joiners
        names = [chr(ord("a") + number) for number in range(peers)]
        # A minority may be faulty; the founder, who admits and removes, never is.
        hostile = int(seed % 3 == 0) if hostile is None else hostile
        faulty = min(hostile + liars + disputers, max(0, (peers - 1) // 2))
        self._progress = (0, 0.0)
        self._lost: set[str] = set()
        conducts = ([HOSTILE] * hostile + [LIAR] * liars + [DISPUTER] * disputers)[:faulty]
        self.nodes: dict[str, EpochNode] = {}
        founder = self._add(names[0], HONEST)
        founder.say(
            PartyGenesis(PARTY, founder.identity, founder.device, founder.control_feed, founder.data_feed),
            device=DeviceKey(PARTY),
        )
        settings = {
            EPOCH_DECLARERS: b"elect",
            EPOCH_MESSAGES: str(MESSAGES).encode(),
            EPOCH_GRACE: str(GRACE_S).encode(),
        }
        founder.say(Policy(tuple(sorted(settings.items()))))
        for name in names[1:]:
            self._admit(name, conducts.pop() if conducts and name != names[0] else HONEST)

    def _add(self, name: str, conduct: str, identity: IdentityKey | None = None) -> EpochNode:
        node = self.nodes[name] = EpochNode(self, name, conduct, identity)
        if conduct != HONEST:
            self.record({"kind": "byzantine", "peer": name})
        self.say(f"{name} is {conduct}")
        return node

    def _admit(self, name: str, conduct: str) -> EpochNode:
        founder, node = self.nodes["a"], self._add(name, conduct)
        founder.say(
            MemberAdmit(node.identity, Role.ADMIN if conduct == HOSTILE else Role.EDITOR, name),
            DeviceAdmit(node.identity, node.device, name),
            FeedAdmit(node.control_feed, FeedKind.CONTROL, node.identity, node.device),
            FeedAdmit(node.data_feed, FeedKind.DATA, node.identity, node.device),
        )
        return node

    def members(self) -> list[EpochNode]:
        return list(self.nodes.values())

    # running

    def run(self) -> "EpochWorld":
        """Chaos until enough epochs are final at some honest peer, then heal and settle."""
        for step in range(STEPS_MAX):
            if self.finals() >= self.epochs:
                break
            self._step(step)
        else:
            raise NotSettled(
                f"seed {self.seed}: {self.finals()} of {self.epochs} epochs\n" + "\n".join(self.trace[-30:])
            )
        return self.settle()

    def finals(self) -> int:
        node = self.nodes["a"]
        latest = node.machine.epoch_tally().latest_final
        return latest.number if latest is not None else 0

    def _step(self, step: int) -> None:
        self.now += self.chance.expovariate(10)
        chance, roll = self.chance, self.chance.random()
        names = sorted(self.nodes)
        node = self.nodes[chance.choice(names)]
        if roll < 0.25:
            if node.up and node.identity in node.machine.electorate:
                node.write()
                if chance.random() < 0.8:
                    node.flush()
        elif roll < 0.70:
            self._gossip(node, self.nodes[chance.choice(names)])
        elif roll < 0.90:
            node.tick()
        elif roll < 0.92 and self._partitions:
            self._sides = {name: chance.randrange(2) for name in names}
            self.say(f"partition {self._sides}")
        elif roll < 0.96:
            self._sides = {}
        elif roll < 0.975 and self._crashes and node.name != "a":
            if node.up:
                self.say(f"crash {node.name}")
                node.crash()
        elif roll < 0.995:
            for each in self.nodes.values():
                if not each.up:
                    each.restart()
        elif self._joiners and step > 200:
            self._joiners -= 1
            self._join()
        elif self._removals and step > 200 and len(self.nodes) > 4:
            self._removals = False
            self._remove()
        if self.finals() > self._progress[0]:
            self._progress = (self.finals(), self.now)
        elif self.now - self._progress[1] > STALL_S:
            # Votes are split, and who is silent on purpose might still decide it: somebody has to act.
            self._progress = (self.finals(), self.now)
            self._remove()

    def _gossip(self, one: EpochNode, other: EpochNode) -> None:
        """One takes over what it lacks of what the other holds, all or some of it."""
        if one is other or not one.up or not other.up or self._lost & {one.name, other.name}:
            return
        if self._sides.get(one.name, 0) != self._sides.get(other.name, 0):
            return
        for feed, messages in list(other.control.items()):
            mine = one.control.setdefault(feed, [])
            mine.extend(messages[len(mine) : len(mine) + self.chance.randint(1, 20)])
        one.process()
        lacking = False
        for feed, log in list(other.logs.items()):
            held = one.logs.setdefault(feed, Log())
            if log.start > held.length:
                lacking = True
            elif log.length > held.length:
                fresh = log.entries[held.length - log.start :]
                held.entries.extend(fresh[: self.chance.randint(1, 30)])
        if lacking or one.joining:
            self._start_from_epoch(one, other)
        one.process()

    def _start_from_epoch(self, one: EpochNode, other: EpochNode) -> None:
        """What it lacks is truncated over there, or it has just come: it takes an epoch, or goes on and says so."""
        taken = one.bootstrap([other])
        if one.joining:
            if not taken and not one.machine.epoch_tally().chain:
                self.say(f"{one.name} replays: there is no epoch yet")
            elif not taken:
                self.say(f"{one.name} waits for an epoch that enough stand for")
                return
            one.joining = False

    def _join(self) -> None:
        name = chr(ord("a") + len(self.nodes))
        self.say(f"{name} joins late")
        self._admit(name, HONEST).joining = True

    def _remove(self) -> None:
        """The founder removes a member, with what it has seen of it as the cut."""
        founder = self.nodes["a"]
        members = founder.machine.electorate
        others = [node for node in self.nodes.values() if node.conduct != HONEST and node.identity in members]
        if not others:
            return
        gone = self.chance.choice(others)
        length = founder.done.get(gone.data_feed, 0)
        self.say(f"a removes {gone.name} at {length}")
        founder.say(MemberRemove(gone.identity, (FeedBound(feed_id(gone.data_feed), length),)))
        self.record({"kind": "cut", "feed": gone.data_feed.hex(), "seq": length - 1})

    def settle(self) -> "EpochWorld":
        """Heal everything; all honest members must come to one state and one chain, and get what they ask for."""
        self._sides, self._joiners = {}, 0
        for node in self.nodes.values():
            if not node.up:
                node.restart()
            node.flush()
        self._until_agreed()
        if self.chance.random() < 0.5:
            self._remove()
        self._ask_for_an_epoch()
        self._ask_for_an_invitation()
        self._ask_for_a_recovery()
        self._until_agreed()
        for node in self._honest():
            node.report()
            self._tell_state(node)
        self.record({"kind": "quiesce", "peers": [node.name for node in self._honest()]})
        self.say("settled")
        return self

    def _until_agreed(self) -> None:
        for _ in range(SETTLE_ROUNDS_MAX):
            self._meet_all()
            for name in self._present():
                self.nodes[name].review()
            if self.agreed():
                return
        raise NotSettled(f"seed {self.seed}: no agreement\n{self._differences()}\n" + "\n".join(self.trace[-30:]))

    def _meet_all(self) -> None:
        names = self._present()
        self.chance.shuffle(names)
        for one in names:
            for other in names:
                self._gossip(self.nodes[one], self.nodes[other])

    def _present(self) -> list[str]:
        return sorted(name for name in self.nodes if name not in self._lost)

    def _honest(self) -> list[EpochNode]:
        return [self.nodes[name] for name in self._present() if self.nodes[name].conduct == HONEST]

    # what must come about, whatever the faulty do

    def _ask_for_an_epoch(self) -> None:
        """Everybody writes enough to make an epoch due, and goes on writing; somebody declares one, and it becomes final."""
        self._all_write(MESSAGES)
        self._until_agreed()
        wanted = self._places(self.nodes["a"])
        self.record({"kind": "ask", "peer": "a", "what": "epoch", "timeframe": wanted})
        self.say("an epoch is asked for")
        self._go_on_until(lambda: all(self._has_final(node, wanted) for node in self._honest()), writes=True)

    def _all_write(self, entries: int) -> None:
        for node in self._honest():
            for _ in range(entries):
                node.write()
            node.flush()

    def _has_final(self, node: EpochNode, wanted: dict[str, list[Any]]) -> bool:
        latest = node.machine.epoch_tally().latest_final
        inside = {entry.feed.hex(): entry.seq for entry in latest.genesis.timeframe} if latest is not None else {}
        return all(inside.get(feed, -1) >= seq for feed, (seq, _) in wanted.items())

    def _ask_for_an_invitation(self) -> None:
        name = f"invited{self.seed}"
        self.say(f"{name} is invited")
        self.record({"kind": "ask", "peer": name, "what": "invitation", "timeframe": self._places(self.nodes["a"])})
        guest = self._admit(name, HONEST)
        guest.joining = True
        self._go_on_until(lambda: not guest.joining and self._caught_up(guest))
        guest.write()
        guest.flush()

    def _ask_for_a_recovery(self) -> None:
        """A member's machine is lost; the identity comes back on a new one, which its identity key admits."""
        others = [node for node in self._honest() if node.name not in ("a", f"invited{self.seed}")]
        if not others:
            return
        lost = self.chance.choice(others)
        self._lost.add(lost.name)
        name = f"{lost.name}-recovered"
        self.say(f"{lost.name} is lost, and comes back as {name}")
        self.record({"kind": "ask", "peer": name, "what": "recovery", "timeframe": self._places(self.nodes["a"])})
        node = self._add(name, HONEST, lost.identity)
        node.joining = True
        while not any(member.identity == node.identity and member.role for member in node.machine.members):
            self._gossip(node, self.nodes["a"])
        node.say(
            DeviceAdmit(node.identity, node.device, name),
            FeedAdmit(node.control_feed, FeedKind.CONTROL, node.identity, node.device),
            FeedAdmit(node.data_feed, FeedKind.DATA, node.identity, node.device),
            device=DeviceKey(node.identity),
        )
        self._go_on_until(lambda: not node.joining and self._caught_up(node))
        node.write()
        node.flush()

    def _caught_up(self, node: EpochNode) -> bool:
        return self._summary(node)[:2] == self._summary(self.nodes["a"])[:2]

    def _go_on_until(self, done: Callable[[], bool], *, writes: bool = False) -> None:
        """All meet and look after epochs, for a bounded time. Whether it was enough is for the checker to say.

        A number whose votes are split becomes final with the next one, so somebody has to write meanwhile.
        """
        for round_ in range(ASK_ROUNDS_MAX):
            if done():
                return
            self.now += 1.0
            if writes and round_ % 10 == 9:
                self._all_write(MESSAGES)
            self._meet_all()
            for name in self._present():
                self.nodes[name].tick()

    def _places(self, node: EpochNode) -> dict[str, list[Any]]:
        return {feed.hex(): [length - 1, node.hash_at(feed, length - 1)] for feed, length in node.timeframe().items()}

    def agreed(self) -> bool:
        return len({self._summary(node) for node in self._honest()}) == 1

    def _summary(self, node: EpochNode) -> tuple[Any, ...]:
        timeframe = node.timeframe()
        state = node.state_at(timeframe)
        chain = tuple((epoch.hash, epoch.final) for epoch in node.chain)
        clock = tuple(sorted((feed, last) for feed, last in node.clock.items()))
        return tuple(sorted(timeframe.items())), state and snapshot_cid(state), chain, clock

    def _tell_state(self, node: EpochNode) -> None:
        timeframe = node.timeframe()
        state = node.state_at(timeframe)
        assert state is not None, f"{node.name} lacks its own state"
        node.tell(
            "state",
            timeframe=self._places(node),
            admission=node.machine.admission().digest.hex(),
            base="",
            state_hash=snapshot_cid(state).hex(),
            fold="sha256-lines",
        )

    def _differences(self) -> str:
        lines = []
        for node in self.nodes.values():
            timeframe, state, chain, clock = self._summary(node)
            lines.append(
                f"{node.name} {node.conduct} entries {sum(length for _, length in timeframe)} "
                f"state {state.hex()[:8] if state else None} chain {[(h.hex()[:4], f) for h, f in chain][-3:]} control {sum(n for _, n in clock)}"
            )
        return "\n".join(lines)

    # what all have in common

    def admission_digest(self, node: EpochNode, genesis: EpochGenesis) -> bytes:
        """The admission that the control messages of a genesis give; the same for who holds them, so found once."""
        key = tuple((entry.feed, entry.seq) for entry in genesis.control_timeframe)
        if key not in self._digests:
            machine = PartyMachine(PARTY)
            messages = [
                message for entry in genesis.control_timeframe for message in node.control[entry.feed][: entry.seq + 1]
            ]
            for message in sorted(messages, key=lambda each: (each.depth, each.feed, each.seq)):
                machine.receive(message)
            self._digests[key] = machine.admission().digest
        return self._digests[key]

    def told_dispute(self, node: EpochNode, epoch: Epoch) -> None:
        node.tell("dispute", number=epoch.number, genesis=epoch.hash.hex())

    def told_final(self, epoch: Epoch) -> None:
        """Write down once that an epoch has its quorum, as who starts from it must be able to show."""
        if epoch.hash not in self._finals:
            self._finals.add(epoch.hash)
            timeframe = {entry.feed.hex(): [entry.seq, entry.link.hex()] for entry in epoch.genesis.timeframe}
            self.record(
                {
                    "kind": "epoch",
                    "number": epoch.number,
                    "timeframe": timeframe,
                    "attests": [epoch.hash.hex()],
                    "quorum": 1,
                }
            )

    def record(self, event: dict[str, Any]) -> None:
        if event["kind"] == "append":
            self.hashes[FeedKey(bytes.fromhex(event["feed"])), event["seq"]] = bytes.fromhex(event["hash"])
        self.history.append({"time": round(self.now, 6), **event})

    def digest(self) -> str:
        """The hash of the whole run: equal for equal seeds."""
        lines = [*self.trace, *map(json.dumps, self.history)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def say(self, line: str) -> None:
        self.trace.append(f"{self.now:.6f} {line}")
