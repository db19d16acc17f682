"""EpochKeeper: what a running peer does about epochs by itself, in a thread of its own.

    control moved, or a policy has a trigger ─► tick ─► every open party: judge what others declared (Agreement)
                                                                          go on with a new feed, where its own was retired
                                                                          declare, when it is due and this device's turn

Who declares is the policy's business: admins, named devices, bots, or an election. Of those who may, each device has
its place in an order that the number shuffles (`epoch_policy.election`); it steps in when those before it had their
grace time and stayed silent. So two seldom declare at once, and nothing breaks when they do.

A party costs nothing until somebody opens it. Which parties have triggers is kept in the MetaStore, so a service opens
those and no others (`serve`).

`tick` reads the peer's own clock and may be called by hand: the simulator does, and peers without a background.
"""

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from echostore.kernel.errors import Closed, EchoError, Refused
from echostore.kernel.ids import DeviceKey, FeedId, PartyKey
from echostore.kernel.order import CONTROL, DATA
from echostore.kernel.party.credentials import FeedKind, Role
from echostore.kernel.party.epoch_chain import Epoch
from echostore.kernel.party.epoch_policy import ADMINS, ELECT, EpochPolicy, election, turn
from echostore.kernel.reasons import Reason
from echostore.peer.epoch_agreement import Judged, Verdict
from echostore.peer.epoch_fold import timeframe_of
from echostore.peer.epochs import Epochs, EpochView
from echostore.store.meta_store import KnownParty, PartyState

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

_log = logging.getLogger("echostore.epochs")

LOOK_S: Final = 1.0
"""How often triggers are looked at while a party has one."""
LOOK_S_MAX: Final = 600.0
"""How long a peer sleeps at most while an epoch is waited for: its clock may be set meanwhile."""
TRIGGERS_SETTING: Final = "epoch_triggers"
"""Set of a party whose policy makes epochs by itself."""
CLOSE_S: Final = 5.0
"""How long closing waits for a fold under way to notice."""


@dataclass(slots=True)
class _Watch:
    """What came to a party since its last epoch, and since when the next one is due."""

    party: "Party"
    epoch: bytes | None = None
    inside: dict[FeedId, int] = field(default_factory=dict)
    """Lengths of the feeds inside the last epoch."""
    counted: dict[FeedId, int] = field(default_factory=dict)
    """Up to which length the bytes are counted."""
    size: int = 0
    news: dict[FeedId, int] = field(default_factory=dict)
    """When the first message of each feed since the last epoch was written, by its writer's clock."""
    due_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What one round did for one party."""

    party: PartyKey
    judged: list[Judged]
    declared: EpochView | None


class EpochKeeper:
    """Belongs to one peer. Its thread starts when there is something to look after."""

    def __init__(self, peer: "Peer", *, background: bool) -> None:
        self._peer = peer
        self._background = background
        self._watches: dict[PartyKey, _Watch] = {}
        self._wake = threading.Event()
        self._round = threading.Lock()
        self._closing = False
        self._look_s: float | None = None
        """After how long time alone may give something to do: a trigger, or an epoch that was waited for long enough."""
        self._thread: threading.Thread | None = None
        self._serving = False
        self._unopened = False
        """Whether parties with triggers may be there that nobody has opened."""

    def serve(self) -> None:
        """Look after every party whose policy has a trigger, also if nobody asks for it: a service does."""
        self._serving = self._unopened = True
        if any(self._due_by_itself(known) for known in self._peer.parties()):
            self.wake()

    def watch(self, party: "Party") -> None:
        """Look after a party that was just opened."""
        self._watches[party.key] = _Watch(party)
        processor = party.runtime.processor
        processor.on_processed.append(lambda feeds: self._moved(party, feeds))
        self.control_written(party)

    def control_written(self, party: "Party") -> None:
        """The control feeds of a party say something new. Of this device's own blocks `Members` tells."""
        if not party.runtime.writable:
            return
        self._note_triggers(party)
        if self._peer.on_network or self._policy(party).by_itself:
            self.wake()

    def _note_triggers(self, party: "Party") -> None:
        """Keep whether a party makes epochs by itself. A child party has the policy of the one above it."""
        if party.runtime.processor.parent is not None:
            return
        meta, by_itself = self._peer.meta, self._policy(party).by_itself
        if by_itself != meta.setting(TRIGGERS_SETTING, False, party=party.key):
            meta.set_setting(TRIGGERS_SETTING, by_itself or None, party=party.key)
            self._unopened = self._serving  # its child parties have the trigger too

    def _due_by_itself(self, known: KnownParty) -> bool:
        """Whether a party that nobody has opened has to be, for its policy."""
        owner = known
        while owner.child_of is not None:
            owner = self._peer.meta.party(owner.child_of)
        triggered = self._peer.meta.setting(TRIGGERS_SETTING, False, party=owner.key)
        return bool(triggered) and known.state is PartyState.ACTIVE and self._peer.opened(known.key) is None

    def _open_parties(self) -> None:
        """Open the parties with triggers; one that is damaged stops no other."""
        self._unopened = False
        for known in self._peer.parties():
            if not self._closing and self._due_by_itself(known):
                try:
                    self._peer.party(known.key)
                except EchoError as error:
                    _log.warning(
                        "a party could not be opened for its epochs",
                        extra={"party": known.key.hex(), "why": str(error)},
                    )

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()
        if self._background and self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name="echostore-epochs", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; never under the peer's lock, for which it may be waiting."""
        self._closing = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    @property
    def closing(self) -> bool:
        return self._closing

    def tick(self) -> list[Kept]:
        """One round over the open parties; a party that fails stops no other."""
        done = []
        looks: list[float] = []
        with self._round:
            for watch in list(self._watches.values()):
                party = watch.party
                if party.runtime.closed:
                    self._watches.pop(party.key, None)
                    continue
                if party.runtime.processor.damage is not None:
                    continue  # what it stands on is being fetched
                try:
                    judged = Epochs(party).review()
                    self._go_on(party)
                    kept = Kept(party.key, judged, self._declare_if_due(watch))
                except Closed:
                    if not self._closing and not party.runtime.closed:
                        raise
                    continue
                except EchoError as error:
                    _log.warning(
                        "epochs of a party were not looked after", extra={"party": party.key.hex(), "why": str(error)}
                    )
                    continue
                done.append(kept)
                _tell(kept)
                with party.lock:
                    if self._policy(party).by_itself:
                        looks.append(LOOK_S)
                waits_s = Epochs(party).agreement.look_again_s()
                if waits_s is not None:
                    looks.append(min(max(waits_s, LOOK_S), LOOK_S_MAX))
            self._look_s = min(looks, default=None)
        return done

    def _go_on(self, party: "Party") -> None:
        """Where this device's own feed was retired while it was silent, write on with a new one."""
        with party.lock:
            runtime = party.runtime
            if runtime.may_write and not runtime.in_batch and not runtime.processor.paused:
                self._peer.opener.rebase(party)

    # declaring

    def _declare_if_due(self, watch: _Watch) -> EpochView | None:
        party = watch.party
        with party.lock:
            runtime = party.runtime
            policy = self._policy(party)
            if runtime.closed or not runtime.may_write or runtime.in_batch or runtime.processor.paused:
                return None
            if not policy.by_itself or runtime.data is None:
                return None
            epochs = Epochs(party)
            last = epochs.own_chain()
            before = last[-1] if last else None
            now_ms = runtime.now_ms()
            messages = self._measure(watch, before, policy)
            age_s = (now_ms - self._news_since(watch, before)) / 1000 if policy.age_s and messages else 0.0
            if not policy.due(messages=messages, size=watch.size, age_s=age_s):
                watch.due_ms = None
                return None
            if watch.due_ms is None:
                watch.due_ms = now_ms
            if not self._is_turn(party, policy, before, (now_ms - watch.due_ms) / 1000):
                return None
            if before is not None and not epochs.judged(before):
                return None  # what it would rest on may be wrong
            try:
                return epochs.create()
            except Refused as refused:
                _log.info("no epoch was declared", extra={"party": party.key.hex(), "why": str(refused)})
                return None

    def _is_turn(self, party: "Party", policy: EpochPolicy, before: Epoch | None, waited_s: float) -> bool:
        number = before.number + 1 if before is not None else 1
        order = election(party.key, number, eligible_devices(party, policy))
        # The first of an election waits too: another may be about to show up. A named one has nobody to wait for.
        early = 0.0 if policy.declarers == ELECT else float(policy.grace_s)
        return turn(order, DeviceKey(self._peer.device), waited_s=waited_s + early, grace_s=policy.grace_s)

    def _measure(self, watch: _Watch, before: Epoch | None, policy: EpochPolicy) -> int:
        """Messages since the last epoch; their bytes too, where they matter, each block looked at once."""
        runtime = watch.party.runtime
        name = before.hash if before is not None else b""
        if watch.epoch != name:
            watch.epoch, watch.size, watch.news, watch.due_ms = name, 0, {}, None
            inside = timeframe_of(before.genesis.timeframe) if before is not None else None
            watch.inside = {feed: at.seq + 1 for feed, at in inside.entries.items()} if inside else {}
            watch.counted = dict(watch.inside)
        messages = 0
        for feed, at in runtime.processor.timeframe.entries.items():
            messages += max(0, at.seq + 1 - watch.inside.get(feed, 0))
            start = watch.counted.get(feed, 0)
            if policy.bytes_ and start <= at.seq:
                key = runtime.processor.feed_key(feed)
                durable = runtime.feeds.length(key)
                watch.size += sum(len(block.payload) for block in runtime.feeds.read(key, start, durable))
                watch.counted[feed] = max(start, durable)
        return messages

    def _news_since(self, watch: _Watch, before: Epoch | None) -> int:
        """When the oldest message since the last epoch was written, at the earliest when that epoch was made.

        Taken from the messages and not from when this process saw them: it may run for some hours a day only. What
        somebody wrote long ago, and brings now, is no older than the epoch that it is not in.
        """
        runtime = watch.party.runtime
        genesis = runtime.processor.membership.machine.genesis
        began = before.genesis.created_ms if before is not None else genesis.created_ms if genesis is not None else 0
        oldest = now_ms = runtime.now_ms()
        for feed, at in runtime.processor.timeframe.entries.items():
            first = watch.inside.get(feed, 0)
            if at.seq < first:
                continue
            if feed not in watch.news:
                key = runtime.processor.feed_key(feed)
                if runtime.feeds.length(key) <= first:
                    continue  # an own one of just now that is not durable yet
                written = runtime.block_time(feed, first)
                watch.news[feed] = began if written is None else written
            oldest = min(oldest, watch.news[feed])
        return min(now_ms, max(oldest, began))

    def _policy(self, party: "Party") -> EpochPolicy:
        return party.runtime.processor.membership.machine.epoch_policy

    # the thread

    def _moved(self, party: "Party", feeds: set[FeedId]) -> None:
        cursors = party.runtime.processor.orderer.cursors
        kinds = {cursors[feed].kind for feed in feeds if feed in cursors}
        if CONTROL in kinds:
            self.control_written(party)
        if DATA in kinds and self._thread is not None:
            self.wake()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._look_s)
            self._wake.clear()
            if self.closing:
                return
            try:
                if self._unopened:
                    self._open_parties()
                self.tick()
            except Closed:
                return


def _tell(kept: Kept) -> None:
    """Write down what was said of epochs. A dispute is an alarm: somebody claims a state that the messages do not give."""
    party = kept.party.hex()
    if kept.declared is not None:
        _log.info("declared an epoch", extra={"party": party, "epoch": kept.declared.number})
    for judged in kept.judged:
        if judged.verdict is Verdict.ATTESTED:
            _log.info("attested an epoch", extra={"party": party, "epoch": judged.number})
        elif judged.verdict is Verdict.DISPUTED:
            _log.warning("disputed an epoch", extra={"party": party, "epoch": judged.number, "why": judged.detail})


def eligible_devices(party: "Party", policy: EpochPolicy) -> list[DeviceKey]:
    """The unrevoked devices that may declare an epoch; of a child party, those that take part in it.

    Each of them has a grace time of its own, so devices whose feeds were retired for silence are left out.
    """
    processor = party.runtime.processor
    machine = processor.membership.machine
    entered = {admitted.device for admitted in processor.admission.feeds}
    data = [admitted for admitted in processor.admission.feeds if admitted.kind is FeedKind.DATA]
    writing = {admitted.device for admitted in data if admitted.end_reason is not Reason.RETIRED}
    silent = {admitted.device for admitted in data} - writing
    needed = {ADMINS: Role.ADMIN, ELECT: Role.EDITOR}.get(policy.declarers)
    found = []
    for member in machine.members:
        if member.role is None:
            continue
        for device in member.devices:
            named = policy.names(member.identity, device.device)
            absent = device.device in silent or (processor.parent is not None and device.device not in entered)
            if not device.revoked and not absent and (named if needed is None else member.role >= needed):
                found.append(device.device)
    return found
