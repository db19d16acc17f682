"""One real peer of a party that makes epochs (`echostore.testing.real_epoch_world`): its home, its conduct, what it fetches.

Everything is the product's own: stores on disk, signatures, replication sessions, the keeper of epochs, folds, gc, starting from
an epoch and from a control state. Only what runs in threads on a network is called here by hand, so that one seed is one run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from echostore.kernel.errors import Corrupt, NotFound, Refused
from echostore.kernel.ids import Cid, IdentityKey, ItemId
from echostore.kernel.party.credentials import EpochDispute, EpochGenesis, TimeframeEntry
from echostore.kernel.party.epoch_chain import Epoch
from echostore.kernel.snapshot import ModelVersion
from echostore.kernel.sync.events import Unobtainable
from echostore.kernel.sync.frames import RefusalReason
from echostore.kernel.timeframe import link_prefix
from echostore.mesh.blob_exchange import Follow
from echostore.peer.base_following import outvoted
from echostore.peer.bootstrap import believable, bootstrap, control_settled, release
from echostore.peer.control_floor import brings_on, fetch_floor, stand_on
from echostore.peer.epoch_agreement import Verdict
from echostore.peer.epoch_fetching import Fetch
from echostore.peer.epochs import Epochs
from echostore.peer.identity import Welcome
from echostore.peer.parting import pinned_elsewhere
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.testing.epoch_node import DISPUTER, FUTURE_MS, HONEST, HOSTILE, LIAR, UNACCEPTABLE
from echostore.wire.base_epoch import base_mark
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.snapshot import encode_item, read_state_root, state_root_bytes
from echostore.wire.tree import build

if TYPE_CHECKING:
    from echostore.testing.real_epoch_world import RealEpochWorld

LIES: Final = ("edits", "drops", "adds")


def blobs_between(giver: Party, taker: Party) -> Fetch:
    """What a network fetches, from one store to another; NotFound when the giver lacks something."""

    def fetch(cids: list[Cid], follow: Follow | None = None) -> None:
        theirs, mine = giver.runtime.blobs, taker.runtime.blobs
        assert theirs is not None
        assert mine is not None
        while cids:
            mine.put_many({each: theirs.get(each) for each in mine.missing(cids)})
            cids = [below for each in cids for below in follow(each, mine.get(each))] if follow is not None else []

    return fetch


class RealEpochNode:
    """One peer. What survives a crash is what is on its disk."""

    def __init__(self, world: "RealEpochWorld", name: str, conduct: str, open_peer: Callable[[], Peer]) -> None:
        self.world, self.name, self.conduct = world, name, conduct
        self._open = open_peer
        self.peer = open_peer()
        self.up = True
        self.identity = IdentityKey(self.peer.identity)
        self._gone: set[Cid | None] = set()
        """What others refused since the last look: evidence for a control state, or None for blocks of data."""
        self._judged: set[bytes] = set()
        self._told: tuple[Any, ...] = ()
        self._recovered = False
        """Whether it came back by a phrase, and has not admitted itself yet."""

    @property
    def party(self) -> Party:
        return self.peer.party(self.world.key)

    @property
    def epochs(self) -> Epochs:
        return Epochs(self.party)

    @property
    def member(self) -> bool:
        """Whether it still belongs to the party, as far as it knows."""
        party = self.party
        with party.reading() as runtime:
            return self.identity in runtime.processor.membership.machine.voters

    def recover(self, phrase: str, welcome: Welcome) -> None:
        """Become a new device of an identity that was lost elsewhere, and enter the party with it."""
        self.peer.recover(phrase)
        self.identity = IdentityKey(self.peer.identity)
        self.peer.enter_as_device(welcome)
        self.party.runtime.data_held = True  # as on a network: it looks for an epoch before it asks for data
        self._recovered = True

    # meeting others

    def unobtainable(self, effect: Unobtainable) -> None:
        """A session says that the other side lacks what this one wants."""
        if effect.reason is RefusalReason.COMPACTED:
            self._gone.add(Cid(effect.evidence) if effect.evidence else None)

    def catch_up(self, other: "RealEpochNode") -> None:
        """After a meeting: start from what the other stands on where blocks are gone, or this peer is new."""
        if self._recovered and self.peer.opener.admit_itself(self.party):
            self._recovered = False
        gone, self._gone = self._gone, set()
        for evidence in sorted(each for each in gone if each is not None):
            self._take_floor(other, evidence)
        runtime = self.party.runtime
        if runtime.data_held and control_settled(self.party):
            if believable(runtime) is None:
                self.world.say(f"{self.name} replays: no epoch may be believed")
                release(self.party)
            elif self._start_from(other, believable(runtime)):
                release(self.party)
        elif not runtime.data_held and (pinned := pinned_elsewhere(runtime)) is not None:
            self._start_from(other, pinned)
        elif not runtime.data_held and None in gone:
            self._start_from(other, believable(runtime))

    def _take_floor(self, other: "RealEpochNode", evidence: Cid) -> None:
        party, theirs = self.party, other.party.runtime.blobs
        processor, blobs = party.runtime.processor, party.runtime.blobs
        assert theirs is not None
        assert blobs is not None
        try:
            floor = fetch_floor(evidence, processor, theirs.get)
        except (NotFound, Corrupt, Refused) as error:
            self.world.say(f"{self.name} does not believe the control state of {other.name}: {error.what}")
            return
        if brings_on(processor, floor):
            party.runtime.flush()
            stand_on(processor, floor, blobs)
            party.sync_port.control_begun()
            self.world.say(f"{self.name} starts from the control state of {other.name}")
            self._gone.add(None)

    def _start_from(self, other: "RealEpochNode", epoch: Epoch | None) -> bool:
        base = self.party.runtime.processor.base
        settled = base is not None and epoch is not None and base.name.number >= epoch.number
        if epoch is None or (settled and not outvoted(self.party.runtime)):
            return False
        try:
            outcome = bootstrap(self.party, epoch, blobs_between(other.party, self.party))
        except NotFound:
            return False  # the other does not have all of it: somebody else may
        self.world.say(f"{self.name} starts from epoch {outcome.epoch} of {other.name}: {outcome.why}")
        return True

    # epochs

    def tick(self) -> None:
        """Look after epochs, each in its own way."""
        if not self.member:
            return
        if self.conduct == LIAR:
            self._lie()
        elif self.conduct == HOSTILE:
            self._declare_unacceptable()
        elif self.conduct == DISPUTER:
            self._dispute_all()
        else:
            self.review()
            for kept in self.peer.epoch_keeper.tick():
                if kept.declared is not None:
                    self.world.declared(self, bytes.fromhex(kept.declared.hash))
        self.tell_votes()

    def review(self) -> None:
        if self.conduct == HONEST and self.member:
            for judged in self.epochs.review():
                if judged.verdict is Verdict.DISPUTED:
                    self.tell("dispute", number=judged.number, genesis=judged.hash.hex(), why=judged.detail)
                    self.world.say(f"{self.name} disputes {judged.number}: {judged.detail}")
            self.peer.opener.rebase(self.party)

    def discard(self) -> None:
        """Declare, by hand, an epoch that leaves out what is old."""
        try:
            view = self.epochs.create(discard_before_ms=self.world.now_ms() - 1000)
        except Refused as refused:
            self.world.say(f"{self.name} declares nothing: {refused.what}")
            return
        self.world.say(f"{self.name} declares {view.number}, which leaves out what is old")
        self.world.declared(self, bytes.fromhex(view.hash))

    def _lie(self) -> None:
        """Declare a tree of items that the messages do not give; everything else in the genesis is right."""
        chance, party = self.world.chance, self.party
        snapshot = party.snapshot()
        states = {bytes(item): state for item, state in snapshot.reader().items()}
        if chance.random() > 0.3 or not states:
            return
        target, lie = sorted(states)[chance.randrange(len(states))], chance.choice(LIES)
        if lie == "edits":
            states[target].type += "!"
        elif lie == "drops":
            del states[target]
        else:
            made_up = type(states[target])()
            made_up.CopyFrom(states[target])
            made_up.item = target[:8] + (1 << 40).to_bytes(8, "big")
            states[made_up.item] = made_up
        blobs: dict[Cid, bytes] = {}
        top = build(
            [(ItemId(item), encode_item(state, blobs.__setitem__)) for item, state in states.items()],
            blobs.__setitem__,
        )
        root = snapshot.root
        cid, data = state_root_bytes(
            party=root.party,
            timeframe=root.timeframe,
            admission_digest=root.admission_digest,
            base_epoch=root.base_epoch,
            models=[ModelVersion(state.model, state.version) for state in states.values()],
            item_count=top.count,
            membership_root=root.membership_root,
            index_root=top.cid,
            tree=root.tree,
            placements=root.placements,
        )
        assert party.runtime.blobs is not None
        party.runtime.blobs.put_many({**blobs, cid: data})
        try:
            view = self.epochs._declare(read_state_root(data), cid)
        except Refused as refused:
            self.world.say(f"{self.name} does not get to lie: {refused.what}")
            return
        self.world.say(f"{self.name} declares {view.number}, and {lie} an item")
        self.world.declared(self, bytes.fromhex(view.hash))

    def _declare_unacceptable(self) -> None:
        """Declare what nobody can judge, now and then: blocks that nobody wrote, a time to come, a model that nobody has."""
        chance, party = self.world.chance, self.party
        kind, chain = chance.choice(UNACCEPTABLE), self.epochs.tally.chain
        if chance.random() > 0.4:
            return
        known = chain if chance.random() < 0.5 else [epoch for epoch in chain if epoch.final]
        before, root = known[-1] if known else None, party.snapshot().root
        ahead = 100 if kind == "ahead" else 0
        timeframe = [TimeframeEntry(each.feed_key, each.seq + ahead, each.link) for each in root.timeframe]
        false = Cid(cid_of(chance.randbytes(32), PROTOBUF))
        genesis = EpochGenesis(
            number=before.number + 1 if before else 1,
            previous=before.hash if before else b"",
            snapshot=false,
            record=false,
            cut=false,
            timeframe=tuple(timeframe),
            control_timeframe=self.epochs._control_timeframe(),
            admission_digest=root.admission_digest,
            encoding_version=root.encoding_version,
            models=(("unheard-of", 1),)
            if kind == "models"
            else tuple((each.model, each.version) for each in root.models),
            discard_before_ms=FUTURE_MS if kind == "discards" else before.genesis.discard_before_ms if before else 0,
            created_ms=self.world.now_ms(),
        )
        try:
            party.members.issue_claim(genesis)
        except Refused as refused:
            self.world.say(f"{self.name} does not get to declare: {refused.what}")
            return
        self.world.say(f"{self.name} declares {genesis.number}, which nobody can accept: {kind}")
        (name,) = (act.hash for act in self.epochs.tally.declared if act.act == genesis)
        self.world.declared(self, name)

    def _dispute_all(self) -> None:
        epochs, tally = self.epochs, self.epochs.tally
        for epoch in tally.chain:
            if tally.voted(epoch.number, self.identity) is None and not tally.disputed(epoch.hash, self.identity):
                self.world.say(f"{self.name} disputes {epoch.number} without ground")
                epochs._party.members.issue_claim(EpochDispute(epoch.number, epoch.hash, b"", "because"))

    def gc(self) -> None:
        """Free what may go. Who founded the party keeps everything, so that all can be folded again in the end."""
        if self.conduct == HONEST and self.name != self.world.founder and self.member:
            freed = self.epochs.gc()
            if freed.blocks:
                self.world.say(f"{self.name} deletes {freed.blocks} blocks below epoch {freed.epoch}")

    # what is written down

    def tell_votes(self) -> None:
        """The chain and own votes, where they are news."""
        if self.conduct != HONEST:
            return
        tally = self.epochs.tally
        for epoch in tally.chain:
            if epoch.hash not in self._judged and tally.voted(epoch.number, self.identity) == epoch.hash:
                self._judged.add(epoch.hash)
                if epoch.declarer != self.identity:
                    fields = {"number": epoch.number, "genesis": epoch.hash.hex(), "identity": self.identity.hex()}
                    self.tell("attest", snapshot=epoch.genesis.snapshot.hex(), **fields)
        chain = tuple((epoch.number, epoch.hash, epoch.final) for epoch in tally.chain)
        if chain != self._told:
            self._told = chain
            self.world.chain_of(self, tally.chain)

    def tell_state(self) -> str:
        """The state as it is now; the CID."""
        party = self.party
        snapshot = party.snapshot()
        processor = party.runtime.processor
        entries = sorted(snapshot.timeframe.entries.items())
        self.tell(
            "state",
            timeframe={feed.hex(): [at.seq, link_prefix(at.link).hex()] for feed, at in entries},
            admission=processor.admission.digest.hex(),
            base=(base_mark(processor.base) or b"").hex(),
            state_hash=snapshot.cid,
            deliveries="untold",
        )
        return snapshot.cid

    def tell(self, kind: str, **fields: Any) -> None:
        self.world.record({"kind": kind, "peer": self.name, **fields})

    # faults

    def crash(self) -> None:
        """End as a process does: the system frees its lock, and nothing else is tidied up."""
        self.up = False
        self.tell("crash")
        lock = self.peer._file_lock
        assert lock is not None, "a node is open for writing"
        lock.release()

    def restart(self, *lose: str) -> None:
        """Open again; `lose` names files of the party that are gone by then."""
        if self.up:
            self.peer.close()
        folder = self.peer.home.party(self.world.key).feeds.parent
        for file in lose:
            for found in folder.glob(file + "*"):
                found.unlink()
        self.peer = self._open()
        self.up = True
        self.tell("boot", held={})

    def close(self) -> None:
        if self.up:
            self.peer.close()
