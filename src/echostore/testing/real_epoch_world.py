"""A party of real peers that makes epochs, in virtual time and from one seed: stores, signatures, sessions, folds, gc.

    with RealEpochWorld(folder, seed=7, peers=4, epochs=5) as world:
        world.run()              chaos until so many epochs are final, then everything is healed and must agree
        check_events(world.history)

`echostore.testing.epoch_world` has the same story with stand-ins for everything but the rules: it is quick, and runs for hundreds of
seeds. This one runs the product itself, on disk: peers write all models, meet in part or in whole, are killed, lose their item
stores, delete what lies below epochs, join late, start from epochs and from control states, leave out what is old; liars and
disputers say what they like. In every eighth run one of them is a hostile admin, who declares epochs that nobody can judge. In every seventh run all are honest, and several admins let people in, remove and demote them, each by
what it knows; then two sides may both have a quorum of those they know, so of chains only the last one is written down, and epochs
need not become final. In the end

    all honest members have one chain and one snapshot CID,
    and so has each of them after it was opened again, as it is and with its items made anew,
    and so has a newcomer, who starts from the newest epoch, and a member that comes back by its recovery phrase,
    and an epoch that is asked for has become final, whatever the faulty do meanwhile (I14),
    and every epoch that anybody declared is folded again from the first message on, by the one who kept everything:
    the checker holds declarations, attests and disputes against what that gives.
"""

import hashlib
import json
import random
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import echostore
from echostore.kernel.errors import NotFound, Refused
from echostore.kernel.party.credentials import EpochGenesis, Role
from echostore.kernel.party.epoch_chain import Epoch, genesis_of
from echostore.kernel.party.epoch_policy import EPOCH_DECLARERS, EPOCH_GRACE, EPOCH_MESSAGES, EPOCH_SILENCE
from echostore.peer.epoch_fold import Folded, OpenTimeframe, fold_to
from echostore.peer.epoch_states import EpochStates
from echostore.peer.identity import Welcome
from echostore.peer.items import Item
from echostore.peer.peer import Peer
from echostore.testing.epoch_node import DISPUTER, HONEST, HOSTILE, LIAR
from echostore.testing.history_epochs import UNTOLD
from echostore.testing.inmemory import link
from echostore.testing.peer_node import seeded_keys
from echostore.testing.real_epoch_node import RealEpochNode
from echostore.testing.world import NotSettled

STEPS_MAX: Final = 4_000
"""Steps after which a run that has not made its epochs never will."""
SETTLE_ROUNDS_MAX: Final = 40
ASK_ROUNDS_MAX: Final = 60
"""Rounds of a grace time each in which an epoch that is asked for must come about."""
STALL_S: Final = 60.0
"""After so long without a final epoch the founder removes a member who does not take part."""
MESSAGES: Final = 8
CHURN: Final = 0.04
"""How often somebody changes who belongs to the party, where that is done at all."""
CHURN_STEPS_MAX: Final = 600
GUESTS_MAX: Final = 4
MEMBERS_MIN: Final = 3
GRACE_S: Final = 3
SILENCE_S: Final = 40
START_MS: Final = 1_700_000_000_000
WORDS: Final = ("ash", "birch", "cedar", "elm", "fir", "oak")


class RealEpochWorld:
    """See the module. One seed is one run."""

    founder: Final = "a"

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        peers: int = 4,
        epochs: int = 4,
        hostile: int | None = None,
        joiners: int = 1,
        partitions: bool = True,
        crashes: bool = True,
    ) -> None:
        """A `hostile` admin is there in every eighth run, unless that is given."""
        self.seed, self.epochs = seed, epochs
        self._hostile = seed % 8 == 5 if hostile is None else bool(hostile)
        self.chance = random.Random(f"real epochs {seed}")
        self.now = 0.0
        self.trace: list[str] = []
        self.history: list[dict[str, Any]] = []
        self.nodes: dict[str, RealEpochNode] = {}
        self._folder = folder
        self._partitions, self._crashes, self._joiners = partitions, crashes, joiners
        self._discards, self._silence, self._churn = seed % 3 == 1, seed % 4 == 3, seed % 7 == 6
        self._guests, self._settled = 0, False
        self._sides: dict[str, int] = {}
        self._declared: dict[bytes, EpochGenesis] = {}
        self._progress = (0, 0.0)
        self._keys = seeded_keys(self.chance)
        self._names = [chr(ord("a") + number) for number in range(peers)]

    def __enter__(self) -> Self:
        self._keys.__enter__()
        first = self._add(self.founder, HONEST)
        party = first.peer.create_party("Simulated")
        self.key = party.key
        settings = {EPOCH_DECLARERS: "elect", EPOCH_MESSAGES: MESSAGES, EPOCH_GRACE: GRACE_S}
        if self._silence:
            settings[EPOCH_SILENCE] = SILENCE_S
        party.members.set_policy({name: str(value).encode() for name, value in settings.items()})
        # A minority may be faulty; the founder, who admits and removes, never is.
        kinds = [HOSTILE, LIAR, DISPUTER] if self._hostile else [LIAR, DISPUTER]
        faulty = kinds[: (len(self._names) - 1) // 2] if not self._churn else []
        for name in self._names[1:]:
            conduct = faulty.pop() if faulty else HONEST
            self._admit(first, name, conduct, "admin" if self._churn or conduct == HOSTILE else "editor")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            node.close()
        self._keys.__exit__(kind, error, trace)

    def _add(self, name: str, conduct: str) -> RealEpochNode:
        node = self.nodes[name] = RealEpochNode(self, name, conduct, lambda: self._open(name))
        if conduct != HONEST:
            self.record({"kind": "byzantine", "peer": name})
        self.say(f"{name} is {conduct}")
        return node

    def _admit(self, admin: RealEpochNode, name: str, conduct: str, role: str = "editor") -> RealEpochNode:
        node = self._add(name, conduct)
        try:
            node.peer.enter(admin.party.members.admit(node.peer.request_join(self.key), role=role))
            admin.party.flush()
        except Refused:
            self.nodes.pop(name).close()
            raise
        return node

    def _open(self, name: str) -> Peer:
        return echostore.open(self._folder / name, name=name, background=False, now_ms=self.now_ms)

    def now_ms(self) -> int:
        return START_MS + int(self.now * 1000)

    # running

    def run(self) -> Self:
        """Chaos until enough epochs are final for the founder, then heal and settle."""
        for step in range(STEPS_MAX):
            if self.finals() >= self.epochs or (self._churn and step >= CHURN_STEPS_MAX):
                break
            self._step(step)
        else:
            raise self._unsettled(f"{self.finals()} of {self.epochs} epochs")
        return self.settle()

    def finals(self) -> int:
        """How many epochs were final for the founder after the last step."""
        return self._progress[0]

    def _step(self, step: int) -> None:
        self.now += self.chance.expovariate(2)
        chance, roll = self.chance, self.chance.random()
        names = sorted(self.nodes)
        node = self.nodes[chance.choice(names)]
        if self._churn and chance.random() < CHURN:
            self._change_members(node)
        if roll < 0.40:
            self._write(node)
        elif roll < 0.65:
            self._meet(
                node, self.nodes[chance.choice(names)], frames=chance.choice((None, None, chance.randint(1, 40)))
            )
        elif roll < 0.85:
            if node.up:
                node.tick()
        elif roll < 0.88:
            if node.up:
                node.gc()
        elif roll < 0.90 and self._partitions:
            self._sides = {name: chance.randrange(2) for name in names}
            self.say(f"partition {self._sides}")
        elif roll < 0.93:
            self._sides = {}
        elif roll < 0.95 and self._crashes and node.up and node.name != self.founder:
            self.say(f"crash {node.name}")
            node.crash()
        elif roll < 0.97:
            self._restart(chance)
        elif roll < 0.98 and self._discards and node.up and node.conduct == HONEST and node.member:
            node.discard()
        elif roll < 0.99 and self._joiners and step > 60:
            self._joiners -= 1
            self._join(f"late{self._joiners}")
        elif node.up and node.conduct == HONEST:
            node.tell_state()
        latest = self.nodes[self.founder].epochs.tally.latest_final
        if latest is not None and latest.number > self._progress[0]:
            self._progress = (latest.number, self.now)
        elif self.now - self._progress[1] > STALL_S:
            # Votes are split, and who is silent on purpose might still decide it: somebody has to act.
            self._progress = (self._progress[0], self.now)
            self._remove()

    def _write(self, node: RealEpochNode) -> None:
        if not node.up:
            return
        try:
            self._act(node)
            if self.chance.random() < 0.7:
                node.party.flush()
        except Refused as refused:  # removed, retired, or not admitted yet as far as it knows
            self.say(f"{node.name} may not write: {refused.what}")

    def _act(self, node: RealEpochNode) -> None:
        chance, party = self.chance, node.party
        known = sorted((item for item in party.items() if item.type), key=lambda item: item.id)
        chosen: Any = chance.choice(known) if known else None
        kind, word = chance.randrange(10), chance.choice(WORDS)
        if chosen is None or kind == 0:
            party.create("property-set", type="task", parent=chosen, n=chance.randrange(100), word=word)
        elif kind == 1:
            party.create("text", type="note", parent=chosen).insert(0, word)
        elif kind == 2:
            party.create("growable-array", type="list", parent=chosen).append(word)
        elif kind == 3:
            log = party.create("threaded-log", type="log", parent=chosen)
            log.set_retention(count_max=2)
            log.post(word)
        elif kind == 4 and chance.random() < 0.5:
            Item.delete(chosen)
        elif kind == 5:
            Item.move(chosen, chance.choice(known))
        elif chosen.model == "text":
            chosen.insert(chance.randrange(len(str(chosen)) + 1), word)
            if chance.random() < 0.3:
                chosen.delete(0, 1)
        elif chosen.model == "growable-array":
            chosen.insert(chance.randrange(len(chosen) + 1), word)
            if len(chosen) > 2:
                chosen.move_element(0, len(chosen) - 1)
                if chance.random() < 0.5:
                    del chosen[0]
        elif chosen.model == "threaded-log":
            chosen.post(word)
        else:
            with party.batch():
                chosen["n"], chosen[word] = chance.randrange(100), chance.randrange(100)

    def _meet(self, one: RealEpochNode, other: RealEpochNode, frames: int | None = None) -> None:
        """Both replicate, all or until so many frames have passed; then each looks what it can start from."""
        apart = self._sides.get(one.name, 0) != self._sides.get(other.name, 0)
        if one is other or not one.up or not other.up or apart:
            return
        pair = (one, other)
        joined = link(one.peer, other.peer, self.key, lost=lambda number, effect: pair[number].unobtainable(effect))
        for node in pair:
            node.party.flush()
        joined.pump(frames)
        joined.cut()
        one.catch_up(other)
        other.catch_up(one)

    def _restart(self, chance: random.Random) -> None:
        for node in self.nodes.values():
            if not node.up:
                lose = ["items.db"] if chance.random() < 0.3 else []
                self.say(f"restart {node.name} {lose}")
                node.restart(*lose)

    def _join(self, name: str) -> RealEpochNode:
        self.say(f"{name} joins late")
        node = self._admit(self.nodes[self.founder], name, HONEST)
        node.party.runtime.data_held = True  # as on a network: it looks for an epoch before it asks for data
        return node

    def _change_members(self, node: RealEpochNode) -> None:
        """One who believes to be an admin lets somebody in, or removes or demotes one of the others."""
        chance = self.chance
        others = sorted(name for name in self.nodes if name not in (node.name, self.founder))
        deed, whom = chance.choice(("admit", "admit", "remove", "demote", "promote")), chance.choice(others)
        if not node.up or (deed == "remove" and len(self._members()) <= MEMBERS_MIN):
            return
        try:
            if deed == "admit" and self._guests < GUESTS_MAX:
                self._guests += 1
                self.say(f"{node.name} lets guest{self._guests} in")
                guest = self._admit(node, f"guest{self._guests}", HONEST, chance.choice(("editor", "admin")))
                guest.party.runtime.data_held = True
            elif deed == "remove":
                node.party.members.remove(self.nodes[whom].identity)
                self.say(f"{node.name} has removed {whom}")
            elif deed in ("demote", "promote"):
                role = "admin" if deed == "promote" else chance.choice(("editor", "reader"))
                node.party.members.change_role(self.nodes[whom].identity, role)
                self.say(f"{node.name} has made {whom} {role}")
        except (Refused, NotFound) as refused:
            self.say(f"{node.name} may not {deed} {whom}: {refused.what}")

    def _members(self) -> list[RealEpochNode]:
        """Who belongs to the party, as the founder sees it."""
        with self.nodes[self.founder].party.reading() as runtime:
            voters = {member.identity for member in runtime.processor.membership.machine.members if member.role}
        return [node for node in self.nodes.values() if node.identity in voters]

    def _remove(self) -> None:
        """The founder removes a member who does not take part, with what it has seen of it as the cut."""
        founder = self.nodes[self.founder]
        with founder.party.reading() as runtime:
            members = runtime.processor.membership.machine.voters
        others = [node for node in self.nodes.values() if node.conduct != HONEST and node.identity in members]
        if others:
            gone = self.chance.choice(others)
            self.say(f"{founder.name} removes {gone.name}")
            founder.party.members.remove(gone.identity)

    # the end

    def settle(self) -> Self:
        """Heal everything; all honest members must come to one state and one chain, whichever way they take."""
        self._sides = {}
        for node in self.nodes.values():
            if not node.up:
                node.restart()
        self._until_agreed()
        if not self._churn:
            if self.chance.random() < 0.5:
                self._remove()
            self._ask_for_an_epoch()
        self._ask_for_an_invitation()
        if not self._churn:
            self._ask_for_a_recovery()
        self.say("settled")
        self._settled = True
        for node in self._honest():
            cid = node.tell_state()
            for lose in ((), ("items.db",)):
                node.restart(*lose)
                again = node.tell_state()
                if again != cid:
                    raise self._unsettled(f"{node.name} has {again} after a restart without {lose}, {cid} before")
            node.tell_votes()
            if self._churn:
                self.chain_of(node, node.epochs.tally.chain)
        self._tell_truths()
        self.record({"kind": "quiesce", "peers": [node.name for node in self._honest()]})
        return self

    # what must come about, whatever the faulty do

    def _ask_for_an_epoch(self) -> None:
        """Everybody writes enough to make an epoch due; somebody declares one, and it becomes final."""
        founder = self.nodes[self.founder]
        self._all_write()
        self._until_agreed()
        with founder.party.reading() as runtime:
            processor = runtime.processor
            entries = processor.timeframe.entries.items()
            wanted = {processor.feed_key(feed).hex(): [at.seq, at.link.hex()] for feed, at in entries}
        self.say("an epoch is asked for")
        founder.tell("ask", what="epoch", timeframe=wanted)
        for round_ in range(ASK_ROUNDS_MAX):
            if round_ % 5 == 4:  # a number whose votes are split becomes final with the next one
                self._all_write()
            if all(self._has_final(node, wanted) for node in self._honest()):
                break
            self.now += GRACE_S
            self._meet_all()
            for name in sorted(self.nodes):
                self.nodes[name].tick()
        self._until_agreed()

    def _all_write(self) -> None:
        for node in self._honest():
            for number in range(MESSAGES):
                node.party.create("property-set", type="task", n=number)
            node.party.flush()

    def _has_final(self, node: RealEpochNode, wanted: dict[str, list[Any]]) -> bool:
        latest = node.epochs.tally.latest_final
        inside = {entry.feed.hex(): entry.seq for entry in latest.genesis.timeframe} if latest is not None else {}
        return all(inside.get(feed, -1) >= seq for feed, (seq, _) in wanted.items())

    def _ask_for_an_invitation(self) -> None:
        self._tell_asked("newcomer", "invitation")
        guest = self._join("newcomer")
        self._until_agreed()
        guest.party.create("property-set", type="task", n=0)
        self._until_agreed()

    def _ask_for_a_recovery(self) -> None:
        """A member's machine is lost; the identity comes back on a new one, from its recovery phrase."""
        founder = self.nodes[self.founder]
        others = [node for node in self._honest() if node.name not in (self.founder, "newcomer")]
        if not others:
            return
        lost = self.chance.choice(others)
        phrase = lost.peer.recovery_phrase()
        self.nodes.pop(lost.name).close()
        name = f"{lost.name}-recovered"
        self.say(f"{lost.name} is lost, and comes back as {name}")
        self._tell_asked(name, "recovery")
        genesis = founder.party.runtime.processor.membership.machine.genesis
        assert genesis is not None
        node = self._add(name, HONEST)
        node.recover(phrase, Welcome(self.key, genesis.control_feed, ""))
        self._until_agreed()
        node.party.create("property-set", type="task", n=0)
        self._until_agreed()

    def _tell_asked(self, name: str, what: str) -> None:
        """Write down who is to have what everybody has now."""
        with self.nodes[self.founder].party.reading() as runtime:
            entries = runtime.processor.timeframe.entries.items()
            wanted = {feed.hex(): [at.seq] for feed, at in entries}
        self.record({"kind": "ask", "peer": name, "what": what, "timeframe": wanted})

    def _meet_all(self) -> None:
        names = sorted(self.nodes)
        self.chance.shuffle(names)
        for one in names:
            for other in names:
                if one < other:
                    self._meet(self.nodes[one], self.nodes[other])

    def _until_agreed(self) -> None:
        for number in range(SETTLE_ROUNDS_MAX):
            self.now += 1.0
            if self._churn and number % 4 == 3:
                self._go_on()
            self._meet_all()
            for name in sorted(self.nodes):
                self.nodes[name].review()
                self.nodes[name].tell_votes()
            if self.agreed():
                return
        raise self._unsettled("no agreement\n" + self._differences())

    def _go_on(self) -> None:
        """Who gave way after two quorums waits for a final epoch above the one that it stands on: so there have to be some."""
        node = self.chance.choice([node for node in self._members() if node.up])
        try:
            self._act(node)
            node.party.flush()
            self.declared(node, bytes.fromhex(node.epochs.create().hash))
        except Refused as refused:
            self.say(f"{node.name} declares nothing: {refused.what}")

    def _honest(self) -> list[RealEpochNode]:
        """Those who have to agree in the end: whom another admin removed need not."""
        found = [node for node in self.nodes.values() if node.conduct == HONEST]
        members = {node.name for node in self._members()} if self._churn else set(self.nodes)
        return [node for node in found if node.name in members]

    def agreed(self) -> bool:
        found = [self._summary(node) for node in self._honest()]
        first = max(min((number for number, _, _ in chain), default=0) for _, _, _, chain in found)
        known = {
            (cid, data, control, tuple(each for each in chain if each[0] >= first))
            for cid, data, control, chain in found
        }
        return len(known) == 1 and not any(node.party.runtime.data_held for node in self._honest())

    def _summary(self, node: RealEpochNode) -> tuple[str, Any, Any, tuple[tuple[int, bytes, bool], ...]]:
        party = node.party
        cid = party.snapshot().cid
        processor = party.runtime.processor
        data = tuple(sorted((feed, at.seq) for feed, at in processor.timeframe.entries.items()))
        control = tuple(sorted((feed, at.seq) for feed, at in processor.control_timeframe.entries.items()))
        chain = tuple((epoch.number, epoch.hash, epoch.final) for epoch in node.epochs.tally.chain)
        return cid, data, control, chain

    def _differences(self) -> str:
        lines = []
        for node in self.nodes.values():
            cid, data, control, chain = self._summary(node)
            shown = [(number, name.hex()[:4], final) for number, name, final in chain][-3:]
            base = node.party.runtime.processor.base
            lines.append(
                f"{node.name} {node.conduct} data {sum(seq + 1 for _, seq in data)} control {sum(seq + 1 for _, seq in control)} "
                f"state {cid[-8:]} chain {shown} base {base.name.number if base else 0} held off {node.party.runtime.data_held}"
            )
        return "\n".join(lines)

    def _unsettled(self, what: str) -> NotSettled:
        return NotSettled(f"seed {self.seed}: {what}\n" + "\n".join(self.trace[-40:]))

    # what is written down

    def declared(self, node: RealEpochNode, name: bytes) -> None:
        """Write down what somebody declared."""
        with node.party.reading() as runtime:
            tally = node.epochs.tally
            act = next(act for act in tally.declared if act.hash == name)
            genesis = self._declared[name] = genesis_of(act)
            members = act.electorate or runtime.processor.membership.machine.electorate
            electorate = sorted(identity.hex() for identity in members)
        node.tell(
            "declare",
            number=genesis.number,
            genesis=name.hex(),
            previous=genesis.previous.hex(),
            timeframe={entry.feed.hex(): [entry.seq, entry.link.hex()] for entry in genesis.timeframe},
            snapshot=genesis.snapshot.hex(),
            electorate=electorate,
            identity=node.identity.hex(),
        )

    def chain_of(self, node: RealEpochNode, chain: list[Epoch]) -> None:
        """A peer's chain from the first epoch on, also where it knows of those no more: by what the others name."""
        if self._churn and not self._settled:
            return
        told = [[epoch.hash.hex(), epoch.final] for epoch in chain]
        before = chain[0].genesis.previous if chain else b""
        while before:
            told.insert(0, [before.hex(), True])
            before = self._declared[before].previous
        node.tell("chain", epochs=told)

    def _tell_truths(self) -> None:
        """What every declared epoch should have said: folded from the first message on, by who kept all of them.

        What rests on an epoch that left something out is folded from that one; there is no other way to say what it is.
        """
        founder = self.nodes[self.founder]
        runtime = founder.party.runtime
        for name, genesis in self._declared.items():
            before = self._declared.get(genesis.previous)
            folded: Folded | OpenTimeframe | None
            try:
                if before is not None and before.discard_before_ms:
                    folded = EpochStates(founder.party, founder.identity).at(genesis)
                else:
                    folded = fold_to(
                        genesis, runtime.party, feeds=runtime.feeds, factory=runtime.processor.factory, base=None
                    )
            except (NotFound, OpenTimeframe):
                folded = None
            found = folded.cid.hex() if isinstance(folded, Folded) else ""
            if (
                folded is None and self._churn
            ):  # only where admins part from each other has a founder to start from an epoch
                found = UNTOLD
            self.record({"kind": "truth", "genesis": name.hex(), "snapshot": found})
        for followed in runtime.processor.admission.followed:
            end = followed.intervals[-1].end if followed.intervals else 0
            if len(followed.intervals) > 1 or any(interval.role is Role.READER for interval in followed.intervals):
                end = 0  # blocks in between do not count, as roles are now
            if end is not None:
                self.record({"kind": "cut", "feed": followed.feed.hex(), "seq": end - 1})

    def record(self, event: dict[str, Any]) -> None:
        self.history.append({"time": round(self.now, 6), **event})

    def digest(self) -> str:
        """The hash of the whole run: equal for equal seeds."""
        lines = [*self.trace, *map(json.dumps, self.history)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def say(self, line: str) -> None:
        self.trace.append(f"{self.now:.6f} {line}")
