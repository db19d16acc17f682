"""Epochs of a party: declaring one, and the chain that the control feeds give.

An epoch is a claim: "at this timeframe, under this admission, the state is this snapshot". Declaring one writes three
things: the blobs of the snapshot, the blobs of record and cut (`wire.epochs`), and a credential that names them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from echostore.kernel.errors import Corrupt, NotFound, Refused, UsageError
from echostore.kernel.ids import Cid, IdentityKey, created_item_id, feed_id
from echostore.kernel.items.discarding import LeftOut
from echostore.kernel.party.credentials import ChildParty, EpochDispute, EpochGenesis, TimeframeEntry
from echostore.kernel.party.epoch_chain import Epoch, Tally, follows
from echostore.kernel.party.epoch_policy import EpochPolicy
from echostore.kernel.snapshot import ENCODING_VERSION, StateRoot
from echostore.peer.base_following import no_holes
from echostore.peer.control_naming import control_at
from echostore.peer.control_standing import fold_whole, no_epoch
from echostore.peer.epoch_agreement import JUDGED_SETTING, AcceptedEpoch, Agreement, Judged, kept_epoch, record_of
from echostore.peer.epoch_fold import Folded, OpenTimeframe, cuts_at
from echostore.peer.epoch_saying import said_of
from echostore.peer.epoch_states import EpochStates
from echostore.peer.retiring import retire_silent, silent_feeds
from echostore.peer.whole_epochs import check_base, check_live
from echostore.wire.cids import PROTOBUF, cid_of, cid_text, matches
from echostore.wire.epochs import EpochRecord, encode_cut, encode_epoch_record, read_epoch_record
from echostore.wire.membership import membership_names
from echostore.wire.placements import PlacementReader
from echostore.wire.snapshot import OldEncoding, read_state_root
from echostore.wire.tree_nodes import IndexNode, large_item_cids
from echostore.wire.tree_reader import TreeReader

if TYPE_CHECKING:
    from echostore.peer.bootstrap import Fetched
    from echostore.peer.epoch_gc import Freed
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime

_PUT_BLOBS = 256


@dataclass(frozen=True, slots=True)
class EpochView:
    """One epoch as people see it."""

    number: int
    cid: str
    hash: str
    declarer: str
    created_ms: int
    attested_by: int
    final: bool
    items: int | None
    """All but the party's system item, as its status counts them; None where the state root is not here."""
    blocks: int
    """Blocks of data feeds that it holds."""
    rivals: int
    electorate: int
    """Identities that might stand for it; a majority makes it final."""
    disputed_by: int
    here: str
    """What this peer says of it."""


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What an epoch that is declared now would be."""

    number: int
    items: int
    left_out: LeftOut
    """What it would leave out of the state, for all members and for good."""
    silent: int
    """Silent feeds that are retired before: what they hold up is left out too, and is not counted here."""


class Epochs:
    """The epochs of one party."""

    def __init__(self, party: "Party") -> None:
        self._party = party

    def all(self) -> list[EpochView]:
        """The chain, by number from 1 on."""
        with self._party.reading() as runtime:
            fold_whole(runtime.processor)
            return self._views(self.tally.chain)

    @property
    def tally(self) -> Tally:
        return self.agreement.tally

    @property
    def agreement(self) -> Agreement:
        return Agreement(self._party)

    @property
    def policy(self) -> EpochPolicy:
        """How the party makes its epochs; `members.set_policy` changes it."""
        with self._party.reading() as runtime:
            return runtime.processor.membership.machine.epoch_policy

    def chain(self) -> list[Epoch]:
        with self._party.reading() as runtime:
            fold_whole(runtime.processor)
            return self.tally.chain

    def own_chain(self) -> list[Epoch]:
        """The chain without what this identity disputes and this peer passes over: what it goes on from."""
        with self._party.reading():
            return self.agreement.view

    def judged(self, epoch: Epoch) -> bool:
        """Whether this identity has cast its vote at an epoch's number, or a quorum stands for the epoch."""
        with self._party.reading():
            return epoch.final or self.tally.voted(epoch.number, self._identity) is not None

    def gc(self, *, dry_run: bool = False) -> "Freed":
        """Delete the blocks and blobs that an agreed epoch stands for, or tell what would go."""
        from echostore.peer.epoch_gc import plan_gc, run_gc

        self._check_whole()
        return plan_gc(self._party) if dry_run else run_gc(self._party)

    def fetch(self, number: int, *, address: str | None = None, timeout_s: float = 30.0) -> "Fetched":
        """Get an epoch's snapshot, whole, from members that are connected; `address` names one to connect to.

        `timeout_s` is how long nothing may come.
        """
        from echostore.peer.epoch_by_number import fetch

        return fetch(self._party, _checked_number(number), address=address, timeout_s=timeout_s)

    def reach(self, number: int, *, address: str | None = None) -> bytes | None:
        """Connect to a member for `hear_of`; Unreachable when there is nobody who could tell of an epoch."""
        from echostore.peer.epoch_by_number import reach

        return reach(self._party, _checked_number(number), address)

    def hear_of(self, number: int, *, device: bytes | None = None, timeout_s: float) -> bool:
        """Wait until an epoch is known here; False when the time is up first. `device` is who must have been heard."""
        from echostore.peer.epoch_by_number import hear_of

        return hear_of(self._party, number, device, timeout_s)

    def _check_whole(self) -> None:
        """Nothing is declared or deleted while what the party stands on is lost here."""
        damage = self._party.runtime.processor.damage
        if damage is not None:
            raise damage.error()

    def _check_here(self, runtime: "PartyRuntime") -> None:
        """What an epoch shares with the base and with the state before is here, so that members can be given all of it."""
        self._check_whole()
        if runtime.processor.base is not None and not runtime.processor.base.whole:
            check_base(runtime)
        check_live(runtime)

    @property
    def _identity(self) -> IdentityKey:
        return self._party.peer.opener.identity_in(self._owner())

    def zero(self) -> dict[str, Any]:
        """Epoch 0: the party's genesis, which every chain begins with and which holds no blocks.

        Of a child party: the credential that made it.
        """
        with self._party.reading() as runtime:
            machine = runtime.processor.membership.machine
            genesis = machine.genesis
            if genesis is None:
                raise NotFound("the party's genesis is not here yet", next_step="Connect to another member.")
            claims = [event.claim for event in sorted(machine.events, key=lambda event: event.stamp)]
            made = [
                claim
                for claim in claims
                if claim is not None
                and isinstance(claim.assertion, ChildParty)
                and claim.assertion.child == runtime.processor.child_key
            ]
            return {
                "number": 0,
                "party": runtime.party.hex(),
                "declarer": self.names([made[0].issuer if made else genesis.identity])[0],
                "created_ms": made[0].issued_ms if made else genesis.created_ms,
                "items": 0,
                "blocks": 0,
                "final": True,
            }

    def names(self, identities: Iterable[IdentityKey]) -> list[str]:
        """What people call these identities, in the order of their names."""
        known = {member.identity: member.name for member in self._party.members.all()}
        return sorted(known.get(identity, "") or identity.hex()[:8] for identity in identities)

    def previous_snapshot(self, epoch: Epoch) -> str | None:
        """The CID of the snapshot before an epoch's, the way back; None of the first, or where its record is not here."""
        try:
            before = self.record(epoch).previous_snapshot
        except (NotFound, Corrupt):
            return None  # what is not here tells nothing here
        return cid_text(before) if before is not None else None

    def left_out(self, epoch: Epoch) -> LeftOut | None:
        """What an epoch left out beyond those before it; None where the messages that it sums up are not all here."""
        return EpochStates(self._party, self._identity).left_out(epoch.genesis)

    def disputes(self, epoch: Epoch) -> list[dict[str, str]]:
        """Who disputes an epoch, and why."""
        with self._party.reading() as runtime:
            fold_whole(runtime.processor)
            said = [(act.identity, act.act) for act in runtime.processor.membership.machine.disputes]
            return [
                {"by": self.names([identity])[0], "detail": act.detail}
                for identity, act in said
                if isinstance(act, EpochDispute) and act.genesis == epoch.hash
            ]

    def rivals(self, epoch: Epoch) -> list[dict[str, Any]]:
        """Others that were declared with an epoch's number: by whom, which snapshot, and who stands for and against them."""
        with self._party.reading() as runtime:
            fold_whole(runtime.processor)
            tally, identity = self.tally, self._identity
            found = [rival for rival in map(tally.named, epoch.rivals) if rival is not None]
            return [
                {
                    "hash": rival.hash.hex(),
                    "declarer": self.names([rival.declarer])[0],
                    "cid": cid_text(rival.genesis.snapshot),
                    "created_ms": rival.genesis.created_ms,
                    "stands_for_it": self.names(rival.attested_by),
                    "disputed_by": self.names(rival.disputed_by),
                    "own": tally.voted(rival.number, identity) == rival.hash,
                }
                for rival in found
            ]

    def sizes(self) -> dict[int, int]:
        """Bytes that each epoch added to those before it, of the epochs whose blobs are here."""
        with self._party.reading() as runtime:
            fold_whole(runtime.processor)
            found: dict[int, int] = {}
            seen: set[Cid] = set()
            for epoch in self.tally.chain if runtime.blobs is not None else ():
                try:
                    found[epoch.number] = self._new_bytes(epoch, seen)
                except (NotFound, Corrupt):
                    continue  # what is not here has no size here
            return found

    def _new_bytes(self, epoch: Epoch, seen: set[Cid]) -> int:
        root = read_state_root(self._blob(epoch.genesis.snapshot))
        total = 0

        def count(cid: Cid) -> bool:
            nonlocal total
            if cid in seen:
                return False
            seen.add(cid)
            total += len(self._blob(cid))
            return True

        for cid in (epoch.genesis.snapshot, *membership_names(root.membership_root, self._blob), root.tree):
            count(cid)
        if root.placements is not None:
            self._count_placements(PlacementReader(root.placements, self._blob), count)
        reader = TreeReader(root.index_root, self._blob)
        waiting = [("", root.index_root)]
        while waiting:
            path, cid = waiting.pop()
            if not count(cid):
                continue  # an earlier epoch has it, and all below it
            node = reader.open_node(cid, path)
            if isinstance(node, IndexNode):
                waiting += [(path + label, top.cid) for label, top in node.branches]
                continue
            for entry, state in reader.page_items(node, path):
                for chunk in (*(large_item_cids(entry.data) if entry.large else ()), *map(Cid, state.state_cids)):
                    count(chunk)
        return total

    def _count_placements(self, reader: PlacementReader, count: Callable[[Cid], bool]) -> None:
        waiting = [("", reader.top)]
        while waiting:
            path, cid = waiting.pop()
            node = reader.open_node(cid, path) if count(cid) else None
            if isinstance(node, IndexNode):
                waiting += [(path + label, top.cid) for label, top in node.branches]

    def review(self) -> list[Judged]:
        """Recompute what others declared, and attest or dispute it. Running peers do so by themselves."""
        return self.agreement.review()

    def verify(self, number: int) -> Judged:
        """Recompute one epoch here and say what was found; nothing is written."""
        return self.agreement.check(self.get(number))

    def accepted(self) -> AcceptedEpoch | None:
        """The latest epoch that this peer accepted, as it was kept."""
        return kept_epoch(self._party.peer.meta.setting, self._party.key)

    def get(self, number: int) -> Epoch:
        number = _checked_number(number)
        found = [epoch for epoch in self.chain() if epoch.genesis.number == number]
        if not found:
            raise no_epoch(self._party.runtime.processor, number)
        return found[0]

    def record(self, epoch: Epoch) -> EpochRecord:
        return read_epoch_record(self._blob(Cid(epoch.genesis.record)))

    def create(self, *, discard_before_ms: int | None = None) -> EpochView:
        """Declare an epoch of the state as it is now.

        With `discard_before_ms` it leaves out what was deleted before then, what logs let go by then, and the history of
        texts and lists up to then; once an epoch did, later ones do too, by no earlier time. Without it, the policy says how
        old such things become.
        """
        discard_before_ms = _checked_time(discard_before_ms)
        self._judge_last()
        with self._party.writing() as runtime:
            self._check_here(runtime)
            if discard_before_ms is None:
                discard_before_ms = self.policy.discard_before_ms(runtime.now_ms())
            self._check_may_declare(runtime)
            self._check_judged()
            retire_silent(self._party)
            discard = self._discard(runtime, discard_before_ms)
            runtime.flush()
            folded = self._state_now(runtime, discard)
            self._check_changed(folded.root)
            self._keep(runtime, folded)
            runtime.follower.made = folded.cid  # all of it is here, over a base that is
            return self._declare(folded.root, folded.cid, discard_before_ms=discard)

    def _check_may_declare(self, runtime: "PartyRuntime") -> None:
        """Refused before anything is folded or written, if an epoch by this device would not count."""
        said = EpochGenesis(number=1, previous=b"", snapshot=Cid(b""), child=runtime.processor.child_key)
        self._owner().members.check_may_say(said)

    def _judge_last(self) -> None:
        """Judge what the next epoch would rest on, where this peer has not yet: it may be wrong, or wait for something."""
        chain = self.own_chain()
        if chain and not self.judged(chain[-1]):
            self.review()

    def _check_judged(self) -> None:
        """Refused while the next epoch would rest on one that this peer can't judge and does not pass over yet."""
        chain = self.agreement.view
        if not chain or self.judged(chain[-1]):
            return
        undecided = self.agreement.undecided(chain[-1])
        if undecided is not None:
            minutes = max(1, ceil(undecided.remaining_s / 60))
            raise Refused(
                f"epoch {chain[-1].number}, declared by {self.names([chain[-1].declarer])[0]}, can't be judged here yet: "
                f"{undecided.judged.detail}",
                next_step=f"Connect to other members, or try again in {minutes} min: it is passed over then.",
            )

    def _check_changed(self, root: StateRoot) -> None:
        """Refused where the epoch before has this state; that its root names another base is no news of the party."""
        known = self.agreement.view
        try:
            same = bool(known) and root.same_state(read_state_root(self._blob(known[-1].genesis.snapshot)))
        except (NotFound, Corrupt, OldEncoding):
            return  # what is not here is not compared
        if same:
            raise Refused(
                f"nothing has changed since epoch {known[-1].number}",
                next_step="There is nothing to do: that epoch is the state as it is now.",
            )

    def plan(self, *, discard_before_ms: int | None = None) -> EpochPlan:
        """What `create` would declare and leave out now; Refused where nothing has changed, as there.

        Nothing is written, also where the peer is open read-only.
        """
        discard_before_ms = _checked_time(discard_before_ms)
        with self._party.reading() as runtime:
            self._check_whole()
            if discard_before_ms is None:
                discard_before_ms = self.policy.discard_before_ms(runtime.now_ms())
            folded = self._state_now(runtime, self._discard(runtime, discard_before_ms))
            known, silent = self.agreement.view, len(silent_feeds(self._party))
            if not silent:
                self._check_changed(folded.root)
            number = known[-1].number + 1 if known else 1
            return EpochPlan(number, items_counted(runtime, folded.root), folded.left_out, silent)

    def _discard(self, runtime: "PartyRuntime", asked_ms: int | None) -> int:
        """Up to when the next epoch discards: as asked, and no less than the one before."""
        known = self.agreement.view
        if (asked_ms or 0) > runtime.now_ms():
            raise UsageError("an epoch discards what lies in the past", next_step="Name an earlier time.")
        # The one before may be a little ahead of this clock: it was accepted, and the next can't go back behind it.
        return max(asked_ms or 0, known[-1].genesis.discard_before_ms if known else 0)

    def _own_state(
        self,
        runtime: "PartyRuntime",
        timeframe: tuple[TimeframeEntry, ...],
        discard_before_ms: int,
        version: int = ENCODING_VERSION,
    ) -> Folded | None:
        """What the next epoch has to name at a timeframe, made as others will to check it.

        None when not all of it is here.
        """
        known = self.agreement.view
        genesis = EpochGenesis(
            number=known[-1].number + 1 if known else 1,
            previous=known[-1].hash if known else b"",
            snapshot=Cid(b""),
            timeframe=timeframe,
            control_timeframe=self._control_timeframe(),
            admission_digest=runtime.processor.admission.digest,
            encoding_version=version,
            discard_before_ms=discard_before_ms,
        )
        folded = EpochStates(self._party, self._identity).at(genesis)
        if isinstance(folded, OpenTimeframe):
            raise folded
        return folded

    def _state_now(self, runtime: "PartyRuntime", discard_before_ms: int) -> Folded:
        folded = self._own_state(runtime, _place(runtime), discard_before_ms)
        if folded is None:
            raise Refused(
                "this peer can't make its own state from the epoch before",
                next_step="Connect to another member, let it judge that epoch, and try again.",
            )
        return folded

    def _keep(self, runtime: "PartyRuntime", folded: Folded) -> None:
        assert runtime.blobs is not None
        runtime.blobs.put_many({each: folded.blobs[each] for each in runtime.blobs.missing(folded.blobs)})
        no_holes(runtime, folded.cid)

    def create_from(self, cid: Cid, blobs: "Iterator[tuple[Cid, bytes]]") -> EpochView:
        """Declare an epoch from a snapshot that a pipeline built, after this peer has recomputed it.

        Refused when this peer's own state at that timeframe is another, or it does not hold that history. The party may
        have gone on since: what came later is above the epoch.
        """
        party = self._party
        self._judge_last()
        with party.writing() as runtime:
            self._check_here(runtime)
            self._check_may_declare(runtime)
            self._check_judged()
            runtime.flush()
            self._store(runtime, blobs)
            root = read_state_root(self._blob(cid))
            mine = self._recompute(runtime, root)
            if mine != cid:
                raise Refused(
                    f"the pipeline's snapshot is {cid_text(cid)}, and this peer's own at that place is {cid_text(mine)}",
                    next_step="Publish this home to the lake, run the pipeline again, and try again.",
                )
            self._check_changed(root)
            return self._declare(root, cid)

    def _store(self, runtime: "PartyRuntime", blobs: "Iterator[tuple[Cid, bytes]]") -> None:
        assert runtime.blobs is not None
        staged: dict[Cid, bytes] = {}
        for each, data in blobs:
            if not matches(each, data):
                raise Corrupt(f"the pipeline's blob {cid_text(each)} is not what its CID names")
            staged[each] = data
            if len(staged) >= _PUT_BLOBS:
                runtime.blobs.put_many(staged)
                staged = {}
        runtime.blobs.put_many(staged)

    def _recompute(self, runtime: "PartyRuntime", root: StateRoot) -> Cid:
        """This peer's own snapshot at the place of a state root."""
        known = self.agreement.view
        place = tuple(TimeframeEntry(entry.feed_key, entry.seq, entry.link) for entry in root.timeframe)
        try:
            discarded = known[-1].genesis.discard_before_ms if known else 0
            folded = self._own_state(runtime, place, discarded, root.encoding_version)
        except OpenTimeframe as error:
            raise Refused(f"there is no state where the pipeline's snapshot ends: {error}") from error
        if folded is None:
            raise Refused(
                "this peer does not hold the history up to where the pipeline's snapshot ends",
                next_step="Let it replicate first, or publish this home to the lake and run the pipeline again.",
            )
        self._keep(runtime, folded)
        return folded.cid

    def _declare(self, root: StateRoot, cid: Cid, *, discard_before_ms: int | None = None) -> EpochView:
        party = self._party
        runtime = party.runtime
        processor = runtime.processor
        owner = self._owner()
        known = self.agreement.view  # not on top of what this device disputes or passes over
        before = known[-1] if known else None
        blobs: dict[Cid, bytes] = {}
        cuts = cuts_at(processor, root, processor.control_timeframe)
        control = control_at(processor, cuts)
        genesis = EpochGenesis(
            number=before.genesis.number + 1 if before else 1,
            previous=before.hash if before else b"",
            snapshot=cid,
            cut=encode_cut(cuts, blobs.__setitem__),
            timeframe=tuple(TimeframeEntry(entry.feed_key, entry.seq, entry.link) for entry in root.timeframe),
            control_timeframe=self._control_timeframe(),
            admission_digest=root.admission_digest,
            encoding_version=root.encoding_version,
            models=tuple((each.model, each.version) for each in root.models),
            discard_before_ms=discard_before_ms or (before.genesis.discard_before_ms if before else 0),
            created_ms=runtime.now_ms(),
            child=processor.child_key,
            control=control.to_name,
        )
        if not follows(genesis, before, processor.membership.machine.ended_feeds):
            assert before is not None, "the first epoch follows the party's genesis"
            raise Refused(
                f"this peer has not all that epoch {before.genesis.number} holds",
                next_step="Connect to another member, and try again.",
            )
        fear = self.tally.fear(genesis, known, self._identity, self.agreement.voters)
        if fear is not None:
            raise Refused(f"no epoch now: {fear}", next_step="Connect to other members, and try again.")
        data = encode_epoch_record(record_of(genesis, runtime.party, before.genesis if before else None))
        genesis = replace(genesis, record=cid_of(data, PROTOBUF))
        blobs[Cid(genesis.record)] = data
        assert runtime.blobs is not None
        runtime.blobs.put_many({each: blobs[each] for each in runtime.blobs.missing(blobs)})
        owner.members.issue_claim(genesis)
        self.agreement.keep_latest()
        declared = self.tally.voted(genesis.number, self._identity)
        epoch = self.tally.named(declared) if declared is not None else None
        assert epoch is not None, f"epoch {genesis.number}, just declared, is not this identity's vote"
        return self._views([epoch])[0]

    def _owner(self) -> "Party":
        """The party whose control feeds speak of this one's epochs."""
        parent = self._party.runtime.processor.parent
        return self._party if parent is None else self._party.peer.held(parent.party)

    def _control_timeframe(self) -> tuple[TimeframeEntry, ...]:
        processor = self._party.runtime.processor
        positions = processor.control_timeframe.entries.items()
        entries = (TimeframeEntry(processor.feed_key(feed), at.seq, at.link) for feed, at in positions)
        return tuple(sorted(entries, key=lambda entry: entry.feed))

    def _views(self, epochs: Iterable[Epoch]) -> list[EpochView]:
        names = {member.identity: member.name for member in self._party.members.all()}
        judged = self._party.peer.meta.setting(JUDGED_SETTING, {}, party=self._party.key)
        tally, identity, passed = self.tally, self._identity, self.agreement.passed
        return [
            self._view(
                epoch,
                names.get(epoch.declarer, ""),
                said_of(tally, epoch, identity, judged, passed=epoch.hash in passed),
            )
            for epoch in epochs
        ]

    def _view(self, epoch: Epoch, name: str, standing: str) -> EpochView:
        genesis = epoch.genesis
        try:
            items: int | None = items_counted(self._party.runtime, read_state_root(self._blob(genesis.snapshot)))
        except (NotFound, Corrupt, OldEncoding):
            items = None
        return EpochView(
            number=genesis.number,
            cid=cid_text(genesis.snapshot),
            hash=epoch.hash.hex(),
            declarer=name or epoch.declarer.hex()[:8],
            created_ms=genesis.created_ms,
            attested_by=len(epoch.attested_by),
            final=epoch.final,
            items=items,
            blocks=sum(entry.seq + 1 for entry in genesis.timeframe),
            rivals=len(epoch.rivals),
            electorate=len(epoch.electorate),
            disputed_by=len(epoch.disputed_by),
            here=standing,
        )

    def _blob(self, cid: Cid) -> bytes:
        blobs = self._party.runtime.blobs
        if blobs is None:
            raise NotFound("this party keeps no blobs here")
        return blobs.get(cid)


def items_counted(runtime: "PartyRuntime", root: StateRoot) -> int:
    """The items of a state as people count them: all but the party's own system item."""
    system = runtime.processor.system_item
    inside = any(created_item_id(feed_id(entry.feed_key), 0, 0) == system for entry in root.timeframe)
    return root.item_count - inside


def _checked_number(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise UsageError(
            f"{number!r:.60} is no number of an epoch", next_step="Epochs count from 1, without fractions."
        )
    return number


def _checked_time(time_ms: object) -> int | None:
    if time_ms is None:
        return None
    if isinstance(time_ms, bool) or not isinstance(time_ms, int):
        raise UsageError(f"{time_ms!r:.60} is no time in milliseconds", next_step="Give a whole number, or nothing.")
    return time_ms


def _place(runtime: "PartyRuntime") -> tuple[TimeframeEntry, ...]:
    """The data timeframe as it is now."""
    processor = runtime.processor
    entries = processor.timeframe.entries.items()
    return tuple(TimeframeEntry(processor.feed_key(feed), at.seq, at.link) for feed, at in entries)
