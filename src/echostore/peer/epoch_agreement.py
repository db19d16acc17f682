"""Agreeing on epochs: recompute what others declared, then attest, dispute, abstain or wait.

    a genesis in the chain, not yet judged
        │ are its blocks here?            no  ► waits      looked at again when blocks arrive
        │ are its models known here?      no  ► abstains   says so, writes nothing
        │ is `discard_before` past?       no  ► refuses    looked at again when time has passed
        ▼ fold to its timeframe (epoch_fold)
      equal CIDs ► EpochAttest            else ► EpochDispute with the first differing item; this history is kept

An epoch that this peer refuses, or that has waited or that it has abstained from for the party's patience, is *passed
over*: this peer declares beside it, and attests others in its place. It judges such an epoch again all the same, and goes
back to it when it can attest it and has not voted at its number, or when it is final. When that is depends on this peer's clock; which epochs are in the chain
depends on votes alone.

One genesis per number, and only what `Tally.objection` allows. The fold runs without the peer's lock; before and after
it a moment under the lock. Called by the EpochKeeper, by `epoch verify`, and by the simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from echostore.kernel.errors import Corrupt, DamagedHere, EchoError, NotFound
from echostore.kernel.ids import Cid, IdentityKey, PartyKey, feed_id, item_text
from echostore.kernel.party.credentials import EpochAttest, EpochDispute, EpochGenesis
from echostore.kernel.party.epoch_chain import Epoch, Tally, enough_to_join
from echostore.kernel.party.epoch_policy import DISCARD_AHEAD_MS
from echostore.kernel.snapshot import READ_VERSIONS, StateRoot
from echostore.mesh.blob_exchange import Unavailable
from echostore.peer.base_following import no_holes, open_epoch
from echostore.peer.control_naming import control_at
from echostore.peer.epoch_fold import Folded, OpenTimeframe
from echostore.peer.epoch_states import EpochStates
from echostore.peer.placement_checking import first_misplaced, index_problem
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.epochs import EpochRecord, encode_epoch_record, read_cut
from echostore.wire.snapshot import read_state_root
from echostore.wire.tree_reader import MissingBlob, TreeReader

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime

ACCEPTED_SETTING: Final = "epoch"
"""Of a party in the MetaStore: the latest genesis that this peer accepted."""
JUDGED_SETTING: Final = "epochs_judged"
"""What this peer found about geneses, by hash: the verdict, its detail, and since when it has attested or disputed nothing there."""
JUDGED_MAX: Final = 64
"""Findings kept; older ones are found again when somebody asks."""
FETCH_S: Final = 5.0
"""How long a blob that only explains a dispute is waited for."""
JOBS_MAX: Final = 64
"""Geneses judged in one go; what is left waits for the next."""


class Verdict(StrEnum):
    ATTESTED = "attested"
    DISPUTED = "disputed"
    ABSTAINS = "abstains"
    REFUSED = "refused"
    WAITS = "waits"


UNDECIDED: Final = frozenset({Verdict.ABSTAINS, Verdict.REFUSED, Verdict.WAITS})
"""Verdicts that write nothing to a feed."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What this peer says of one genesis."""

    number: int
    hash: bytes
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AcceptedEpoch:
    """The latest epoch that this peer accepted, as the MetaStore keeps it."""

    number: int
    hash: bytes
    snapshot: Cid
    record: Cid
    cut: Cid

    def to_json(self) -> dict[str, object]:
        texts = {name: getattr(self, name).hex() for name in ("hash", "snapshot", "record", "cut")}
        return {"number": self.number, **texts}

    @staticmethod
    def of_json(kept: dict[str, object]) -> "AcceptedEpoch":
        try:
            cids = [Cid(bytes.fromhex(str(kept[name]))) for name in ("snapshot", "record", "cut")]
            return AcceptedEpoch(int(str(kept["number"])), bytes.fromhex(str(kept["hash"])), *cids)
        except (KeyError, ValueError) as error:
            raise Corrupt("what is kept of the party's epoch can't be read") from error


@dataclass(frozen=True, slots=True)
class Undecided:
    """An epoch that this peer can't attest at the moment."""

    judged: Judged
    remaining_s: float
    """How long it still waits before it passes over the epoch; 0: it does so now."""


class Agreement:
    """What one device does about the epochs of one party."""

    def __init__(self, party: "Party") -> None:
        self._party = party

    def review(self) -> list[Judged]:
        """Judge what can be judged now, lowest number first; returns what was found."""
        found: list[Judged] = []
        for _ in range(JOBS_MAX):
            with self._party.lock:
                if not self._may_speak():
                    break
                job = self._next(found)
            if job is None:
                break
            judged = job if isinstance(job, Judged) else self._judge(job)
            found.append(judged)
            if judged.verdict is Verdict.DISPUTED:
                break  # what comes after rests on it
        if found:
            self._remember(found)
        self._follow_final()
        self.keep_latest()
        return found

    def _follow_final(self) -> None:
        """Have the newest final epoch's snapshot, also who stands for another of its number or may not vote: all fold from it."""
        with self._party.lock:
            runtime, epoch = self._party.runtime, self.tally.latest_final
            if epoch is None or runtime.closed or not runtime.may_write or runtime.in_batch or runtime.processor.paused:
                return
            base, known = (
                runtime.processor.base,
                self._party.peer.meta.setting(JUDGED_SETTING, {}, party=self._party.key),
            )
            if base is not None and base.name.number >= epoch.number:
                return
            if known.get(epoch.hash.hex(), [""])[0] == Verdict.DISPUTED or runtime.blobs is None:
                return  # this peer found otherwise, and keeps its history
            if open_epoch(runtime, epoch) is not None:
                return
            early = self._without_folding(runtime, epoch)
        mine, judged = (None, early) if early is not None else self._recomputed(epoch)
        if judged.verdict is Verdict.ABSTAINS and self._party.peer.on_network:
            self._party.peer.network.bootstraps.unmade(self._party, epoch)
        with self._party.lock:
            if judged.verdict is Verdict.ATTESTED and not runtime.closed:
                assert isinstance(mine, Folded), mine
                self._keep(epoch, mine)
                runtime.follower.review()
        if judged.verdict is Verdict.DISPUTED:
            self._remember([judged])

    def check(self, epoch: Epoch) -> Judged:
        """Recompute one epoch and say what is found, without writing anything."""
        with self._party.lock:
            early = self._without_folding(self._party.runtime, epoch)
        return early or self._without_history(epoch, self._recomputed(epoch)[1])

    def _without_history(self, epoch: Epoch, judged: Judged) -> Judged:
        """Of an epoch that can't be recomputed here, what its snapshot alone shows."""
        blobs = self._party.runtime.blobs
        if judged.verdict is not Verdict.ABSTAINS or blobs is None:
            return judged
        try:
            problem = index_problem(read_state_root(blobs.get(epoch.genesis.snapshot)), blobs.get)
        except (NotFound, MissingBlob):
            return judged  # not all of it is here
        except DamagedHere:
            raise  # it says nothing about the epoch
        except Corrupt as error:
            problem = error.what
        return self._said(epoch, Verdict.DISPUTED, problem) if problem else judged

    # what is to be judged

    def _may_speak(self) -> bool:
        runtime = self._party.runtime
        if runtime.closed or not runtime.may_write or runtime.in_batch or runtime.processor.paused:
            return False
        return self._owner().runtime.control is not None and self._identity in self.electorate

    @property
    def electorate(self) -> frozenset[IdentityKey]:
        processor = self._party.runtime.processor
        return processor.membership.machine.electorate_of(processor.child_key)

    @property
    def voters(self) -> frozenset[IdentityKey]:
        return self._party.runtime.processor.membership.machine.voters

    def _owner(self) -> "Party":
        """The party whose control feeds speak of this one's epochs."""
        parent = self._party.runtime.processor.parent
        return self._party if parent is None else self._party.peer.held(parent.party)

    @property
    def _states(self) -> EpochStates:
        return EpochStates(self._party, self._identity)

    @property
    def _identity(self) -> IdentityKey:
        return self._party.peer.opener.identity_in(self._owner())

    @property
    def tally(self) -> Tally:
        processor = self._party.runtime.processor
        return processor.membership.machine.epoch_tally(processor.child_key)

    def _next(self, found: list[Judged]) -> Judged | Epoch | None:
        """The next genesis to be judged, or what can be said of it at once."""
        tally, identity = self.tally, self._identity
        done = {judged.hash for judged in found}
        open_ones = {judged.hash for judged in found if judged.verdict in UNDECIDED}
        base = self._party.runtime.processor.base
        below = base.name.number if base is not None else 0
        # What lies below the last final epochs is settled; one more attest of it would help nobody.
        settled = tally.latest_final
        below = max(below, settled.number - 2 if settled is not None else 0)
        passed = self.passed
        for without in (passed, frozenset[bytes]()) if passed else (passed,):
            for epoch in tally.view(identity, without):
                if epoch.hash in open_ones and not epoch.final:
                    break  # what comes after rests on it, and a vote for that is one for this
                if epoch.hash in done or epoch.number <= below or tally.disputed(epoch.hash, identity):
                    continue
                if tally.objection(epoch.hash, identity, self.voters, without) is None:
                    return self._without_folding(self._party.runtime, epoch) or epoch
        for epoch in tally.owed(identity):
            if epoch.hash not in done and tally.objection(epoch.hash, identity, self.voters) is None:
                return self._without_folding(self._party.runtime, epoch) or epoch
        return None

    # what is passed over

    @property
    def view(self) -> list[Epoch]:
        """The chain as this peer goes on from it: without what it disputes and what it passes over."""
        return self.tally.view(self._identity, self.passed)

    @property
    def passed(self) -> frozenset[bytes]:
        """The geneses that this peer passes over at the moment."""
        tally, identity = self.tally, self._identity
        passed: frozenset[bytes] = frozenset()
        while True:
            open_one = self._first_open(tally.view(identity, passed))
            undecided = self.undecided(open_one) if open_one is not None else None
            if open_one is None or undecided is None or undecided.remaining_s > 0:
                return passed
            passed |= {open_one.hash}

    def _first_open(self, chain: list[Epoch]) -> Epoch | None:
        """The lowest epoch that is not final and that this identity has not voted for."""
        tally, identity = self.tally, self._identity
        return next(
            (each for each in chain if not each.final and tally.voted(each.number, identity) != each.hash), None
        )

    def undecided(self, epoch: Epoch) -> "Undecided | None":
        """Why this peer can't attest an epoch now, and for how long it still waits; None where it can try.

        What needs no fold is looked at afresh: blocks may have come, and time has passed.
        """
        with self._party.lock:
            runtime = self._party.runtime
            verdict, detail, since_ms = self._kept_judgement(epoch)
            judged = self._without_folding(runtime, epoch)
            if judged is None and verdict != Verdict.ABSTAINS:
                return None
            if judged is None:
                judged = self._said(epoch, Verdict.ABSTAINS, detail)
            if judged.verdict is Verdict.REFUSED:
                return Undecided(judged, 0.0)
            patience_s = runtime.processor.membership.machine.epoch_policy.patience_s
            waited_s = (runtime.now_ms() - since_ms) / 1000 if since_ms is not None else 0.0
            return Undecided(judged, max(0.0, patience_s - waited_s))

    def look_again_s(self) -> float | None:
        """In how many seconds this peer passes over an epoch that it waits for now; None when it waits for none."""
        with self._party.lock:
            if self._party.runtime.closed:
                return None
            waiting = self._first_open(self.view)
            undecided = self.undecided(waiting) if waiting is not None else None
            return undecided.remaining_s if undecided is not None else None

    def _kept_judgement(self, epoch: Epoch) -> tuple[str, str, int | None]:
        """What this peer found about an epoch without voting, and since when."""
        kept = self._party.peer.meta.setting(JUDGED_SETTING, {}, party=self._party.key)
        verdict, detail, *since = kept.get(epoch.hash.hex(), ["", ""])
        return verdict, detail, int(since[0]) if since else None

    def _without_folding(self, runtime: "PartyRuntime", epoch: Epoch) -> Judged | None:
        """What can be said of a genesis before its state is folded."""
        genesis = epoch.genesis
        if genesis.discard_before_ms > runtime.now_ms() + DISCARD_AHEAD_MS:
            return self._said(epoch, Verdict.REFUSED, "it discards what is not past by this clock")
        known = runtime.processor.factory.known
        unknown = [f"{name}@{version}" for name, version in genesis.models if not known(name, version)]
        if genesis.encoding_version not in READ_VERSIONS:
            return self._said(epoch, Verdict.ABSTAINS, f"its encoding has version {genesis.encoding_version}")
        if unknown:
            return self._said(epoch, Verdict.ABSTAINS, f"unknown here: {', '.join(unknown)}")
        if not _holds(runtime, genesis):
            return self._said(epoch, Verdict.WAITS, "blocks of it are not here")
        return None

    # judging

    def _judge(self, epoch: Epoch) -> Judged:
        folded, judged = self._recomputed(epoch)
        with self._party.lock:
            if not self._may_speak() or not self._may_attest(epoch):
                return self._said(epoch, Verdict.WAITS, "things changed meanwhile")
            if judged.verdict is Verdict.ATTESTED:
                assert isinstance(folded, Folded), folded
                self._keep(epoch, folded)
                said: EpochAttest | EpochDispute = EpochAttest(epoch.number, epoch.hash, epoch.genesis.snapshot)
            elif judged.verdict is Verdict.DISPUTED:
                mine = folded.cid if isinstance(folded, Folded) else b""
                said = EpochDispute(epoch.number, epoch.hash, mine, judged.detail)
            else:
                return judged
            self._owner().members.issue_claim(said)
        return judged

    def _may_attest(self, epoch: Epoch) -> bool:
        views = {self.passed, frozenset[bytes]()}
        return any(self.tally.objection(epoch.hash, self._identity, self.voters, each) is None for each in views)

    def _recomputed(self, epoch: Epoch) -> tuple[Folded | OpenTimeframe | None, Judged]:
        """This peer's own state at an epoch, and what follows. The items that are stored here say nothing against an
        epoch: where they differ, its blocks are folded again, for the store may be what is wrong."""
        mine = self._states.at(epoch.genesis)
        judged = self._compare(epoch, mine)
        if judged.verdict is Verdict.DISPUTED and isinstance(mine, Folded) and mine.stored:
            mine = self._states.at(epoch.genesis, stored=False)
            judged = self._compare(epoch, mine)
        return mine, judged

    def _compare(self, epoch: Epoch, mine: Folded | OpenTimeframe | None) -> Judged:
        genesis = epoch.genesis
        if isinstance(mine, OpenTimeframe):
            return self._said(epoch, Verdict.DISPUTED, str(mine))
        if mine is None:
            return self._said(epoch, Verdict.ABSTAINS, "the history that it sums up is not here")
        if mine.cid != genesis.snapshot:
            return self._said(epoch, Verdict.DISPUTED, self._first_difference(epoch, mine))
        if mine.cut != genesis.cut:
            return self._said(epoch, Verdict.DISPUTED, "the cut is another")
        if cid_of(self._record_bytes(epoch), PROTOBUF) != genesis.record:
            return self._said(epoch, Verdict.DISPUTED, "the record is another")
        problem = _claims_differ(genesis, mine.root)
        if problem:
            return self._said(epoch, Verdict.DISPUTED, problem)
        return self._compare_control(epoch, mine) or self._said(epoch, Verdict.ATTESTED)

    def _compare_control(self, epoch: Epoch, mine: Folded) -> Judged | None:
        """What speaks against the control state that a genesis names."""
        named = epoch.genesis.control
        if not named:
            return None  # of an older version, or none could be made: nothing of control is truncated there
        with self._party.lock:
            made = control_at(self._party.runtime.processor, read_cut(mine.cut, lambda cid: mine.blobs[cid]))
        if made.cid == named:
            return None
        if made.wrong or not made.why:
            return self._said(epoch, Verdict.DISPUTED, made.why or "the control state is another")
        return self._said(epoch, Verdict.ABSTAINS, f"its control state can't be checked here: {made.why}")

    def _record_bytes(self, epoch: Epoch) -> bytes:
        before = next((each for each in self.tally.chain if each.hash == epoch.genesis.previous), None)
        return encode_epoch_record(record_of(epoch.genesis, self._party.key, before.genesis if before else None))

    def _first_difference(self, epoch: Epoch, mine: Folded) -> str:
        """Where the declared snapshot and this peer's part, found through the trees."""
        blobs = self._party.runtime.blobs

        def get(cid: Cid) -> bytes:
            found = mine.blobs.get(cid)
            if found is None and blobs is None:
                raise NotFound("there is no blobs.db")
            if found is None:
                assert blobs is not None
                self._fetch(cid)
                found = blobs.get(cid)
            return found

        try:
            theirs = read_state_root(get(epoch.genesis.snapshot))
        except (NotFound, DamagedHere):
            return "another state; the declared one is not here to be compared"
        except Corrupt:
            return "the declared state root can't be read"
        problem = _roots_differ(theirs, mine.root)
        if problem:
            return problem
        try:
            if theirs.index_root == mine.root.index_root and theirs.placements and mine.root.placements:
                return first_misplaced(mine.root.placements, theirs.placements, get)
            diff = TreeReader(mine.root.index_root, get).diff(theirs.index_root)
        except (NotFound, MissingBlob, DamagedHere):
            return "another tree of items; not all of the declared one is here to be compared"
        except Corrupt as error:
            return f"another tree of items: {error.what}"
        for what, items in (("changed", diff.changed), ("removed", diff.removed), ("added", diff.added)):
            if items:
                return f"{what} item {item_text(items[0])}"
        return "another state root"

    def _fetch(self, cid: Cid) -> None:
        """Get a blob of the declared snapshot from others, where there are any; who has none says so."""
        peer, blobs = self._party.peer, self._party.runtime.blobs
        assert blobs is not None
        if peer.on_network and not blobs.has(cid):
            try:
                peer.network.fetch(self._party.key, [cid], patience_s=FETCH_S)
            except (EchoError, Unavailable) as error:
                raise NotFound(f"a blob of the declared snapshot is not to be had: {error}") from error

    def _keep(self, epoch: Epoch, mine: Folded) -> None:
        """Store the snapshot that was recomputed, with record and cut: others can be given it."""
        blobs = self._party.runtime.blobs
        assert blobs is not None
        record = self._record_bytes(epoch)
        wanted = {**mine.blobs, cid_of(record, PROTOBUF): record}
        blobs.put_many({cid: wanted[cid] for cid in blobs.missing(wanted)})
        no_holes(self._party.runtime, mine.cid)

    # what is remembered

    def _said(self, epoch: Epoch, verdict: Verdict, detail: str = "") -> Judged:
        return Judged(epoch.number, epoch.hash, verdict, detail)

    def _remember(self, found: list[Judged]) -> None:
        with self._party.lock:
            meta, key = self._party.peer.meta, self._party.key
            kept = dict(meta.setting(JUDGED_SETTING, {}, party=key))
            before = dict(kept)
            for judged in found:
                was, _, *since = kept.pop(judged.hash.hex(), ["", ""])
                if not since or was not in UNDECIDED or judged.verdict not in UNDECIDED:
                    since = [self._party.runtime.now_ms()]
                kept[judged.hash.hex()] = [str(judged.verdict), judged.detail, *since]
            kept = dict(list(kept.items())[-JUDGED_MAX:])
            if kept != before:
                meta.set_setting(JUDGED_SETTING, kept, party=key)

    def keep_latest(self) -> None:
        """Keep the newest epoch that this peer declared, attested or has reason to believe."""
        with self._party.lock:
            if self._party.runtime.closed or not self._party.runtime.writable:
                return
            found = self.latest_accepted()
            meta, key = self._party.peer.meta, self._party.key
            if found is not None and meta.setting(ACCEPTED_SETTING, party=key) != found.to_json():
                meta.set_setting(ACCEPTED_SETTING, found.to_json(), party=key)

    def latest_accepted(self) -> AcceptedEpoch | None:
        machine = self._party.runtime.processor.membership.machine
        tally, identity = self.tally, self._identity
        devices = machine.member_devices
        for epoch in reversed(self.view):
            own = tally.voted(epoch.number, identity) == epoch.hash
            if own or epoch.final or enough_to_join(epoch, machine.epoch_policy, devices):
                genesis = epoch.genesis
                return AcceptedEpoch(epoch.number, epoch.hash, genesis.snapshot, Cid(genesis.record), Cid(genesis.cut))
        return None


def kept_epoch(setting: Callable[..., object], party: PartyKey) -> AcceptedEpoch | None:
    """The latest accepted epoch that a MetaStore keeps (`meta.setting`)."""
    kept = setting(ACCEPTED_SETTING, party=party)
    return AcceptedEpoch.of_json(kept) if isinstance(kept, dict) else None


def record_of(genesis: EpochGenesis, party: PartyKey, before: EpochGenesis | None) -> EpochRecord:
    """The record that belongs to a genesis: it says nothing that genesis and predecessor do not."""
    return EpochRecord(
        number=genesis.number,
        party=party,
        snapshot=genesis.snapshot,
        previous_record=Cid(before.record) if before else None,
        previous_snapshot=before.snapshot if before else None,
        created_ms=genesis.created_ms,
        discard_before_ms=genesis.discard_before_ms,
    )


def _holds(runtime: "PartyRuntime", genesis: EpochGenesis) -> bool:
    """Whether every block of the genesis' timeframes was processed here, on the same branch."""
    orderer = runtime.processor.orderer
    for entry in (*genesis.timeframe, *genesis.control_timeframe):
        feed = feed_id(entry.feed)
        cursor = orderer.cursors.get(feed)
        if cursor is None or cursor.key != entry.feed or cursor.length <= entry.seq:
            return False
        inside = entry.seq < orderer.base[feed].length - 1 if feed in orderer.base else False
        if not inside and orderer.mark(feed, entry.seq).link != entry.link:
            return False
    return True


def _roots_differ(theirs: StateRoot, mine: StateRoot) -> str:
    """The first field in which two state roots differ, apart from the items."""
    for name in ("party", "timeframe", "admission_digest", "base_epoch", "encoding_version", "membership_root"):
        if getattr(theirs, name) != getattr(mine, name):
            return f"another {name.replace('_', ' ')}"
    if theirs.index_root == mine.index_root:
        for name in ("tree", "models", "item_count"):
            if getattr(theirs, name) != getattr(mine, name):
                return f"another {name.replace('_', ' ')}"
    return ""


def _claims_differ(genesis: EpochGenesis, root: StateRoot) -> str:
    """What a genesis says beside its snapshot, and wrongly; empty when it says the same."""
    if tuple((entry.feed, entry.seq, entry.link) for entry in genesis.timeframe) != tuple(root.timeframe):
        return "the genesis names another timeframe than its snapshot"
    if genesis.admission_digest != root.admission_digest:
        return "the genesis names another admission than its snapshot"
    if genesis.models != tuple((each.model, each.version) for each in root.models):
        return "the genesis names other models than its snapshot"
    return ""
