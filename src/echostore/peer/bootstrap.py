"""Starting from an epoch instead of from the beginning: what a newcomer does, and who slept too long.

    1  control feeds arrive and are folded; data feeds are held off meanwhile (`runtime.data_held`)
    2  the newest epoch that the policy lets a newcomer believe is chosen; without one, history is replayed
    3  its blobs are fetched: root, cut, moves, then the item tree from the top, many nodes at a time, from all who have it
    4  its items are installed, the feeds begin at its cut, and only then blocks are asked for: those after the cut

While 3 runs, single items and views can be read: `early_reading` fetches what lies on their path first. Nobody waits for
step 3 for ever: when nothing comes, the history is asked for instead, and step 3 is tried again when that is gone too.

Where control feeds begin later on the other side, step 1 starts from the control state there (`control_floor`): whoever
refuses a range says why one may be believed. What is not to be believed is left, and the next one's is looked at.

One thread per peer, `echostore-bootstrap`, does the fetching; it takes the peer's lock to look and to install.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from echostore.kernel.errors import Closed, Corrupt, EchoError, NotFound, Refused, TimedOut
from echostore.kernel.ids import Cid, PartyKey, feed_id
from echostore.kernel.order import CONTROL
from echostore.kernel.party.epoch_chain import Epoch, enough_to_join
from echostore.mesh.blob_exchange import Follow, Unavailable
from echostore.peer.base_damage import BaseDamage, truncated
from echostore.peer.base_following import no_holes, stand_on
from echostore.peer.base_mending import anew, look, mend, mend_beside, mend_control
from echostore.peer.control_floor import brings_on, fetch_floor
from echostore.peer.control_floor import stand_on as stand_on_floor
from echostore.peer.control_standing import fold_whole, no_epoch
from echostore.peer.early_reading import EarlyReader
from echostore.peer.epoch_fetching import Fetch, Progress, fetch_heads, fetch_tree, holes, keep_placements
from echostore.peer.older_epochs import back_to, first_known, is_older, record_of_older
from echostore.peer.opening import WAITS_FOR_EPOCH
from echostore.peer.parting import leave_branch, pinned_elsewhere
from echostore.peer.status import REMOVED, REVOKED, standing_of
from echostore.wire.base_epoch import FETCHING_KEY, BaseEpoch, BaseName, holes_key
from echostore.wire.cids import is_cid
from echostore.wire.control_blobs import chunks_named

if TYPE_CHECKING:
    from echostore.peer.network import Network
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer
    from echostore.peer.runtime import PartyRuntime

_log = logging.getLogger("echostore.bootstrap")

PATIENCE_S: Final = 20.0
"""How long nothing may come before history is asked for instead."""

MEND_AGAIN_S: Final = 60.0
"""How long after a try in vain somebody may have what is lost of a base."""

LOOK_S: Final = 0.05
"""How often control is looked at by who waits for an epoch."""


# which epoch


def believable(runtime: "PartyRuntime") -> Epoch | None:
    """The epoch that this peer, without its history, may start from: the newest final one, which others stand on too.

    Before there is one, the newest that enough stand for; it may still lose to a rival, so it may not have left anything out.
    """
    machine = runtime.processor.membership.machine
    tally = machine.epoch_tally(runtime.processor.child_key)
    if tally.latest_final is not None:
        return tally.latest_final
    devices, policy = machine.member_devices, machine.epoch_policy
    for epoch in reversed(tally.chain):
        if enough_to_join(epoch, policy, devices) and not epoch.genesis.discard_before_ms:
            return epoch
    return None


def control_settled(party: "Party") -> bool:
    """Whether control says that this device belongs here, and nobody has announced more of it."""
    with party.reading() as runtime:
        if runtime.data is None or runtime.data.feed not in runtime.processor.admission.by_id:
            return False
        parent = runtime.processor.parent
        owner = party if parent is None else party.peer.held(parent.party)  # whose control feeds speak for it
        processor = owner.runtime.processor
        for admitted in processor.admission.feeds:
            if admitted.kind != CONTROL:
                continue
            cursor = processor.orderer.cursors.get(feed_id(admitted.feed))
            length = cursor.length if cursor is not None else 0
            if length < owner.known_length(admitted.feed) and (cursor is None or cursor.ended is None):
                return False
        return True


# one party


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a party got its start."""

    epoch: int | None
    why: str
    fetching_s: float = 0.0
    """How long its blobs took."""


def bootstrap(party: "Party", epoch: Epoch, fetch: Fetch, progress: Progress = lambda done, total: None) -> Outcome:
    """Fetch an epoch and stand on it. The lock is taken for short looks and for the installation only."""
    runtime = party.runtime
    blobs = runtime.blobs
    assert blobs is not None
    name = BaseName.of(epoch.genesis, epoch.hash)
    with party.reading():
        runtime.feeds.set_about({FETCHING_KEY: name.snapshot})
    started = time.monotonic()
    fetch_heads(blobs, name, fetch)
    fetch_tree(blobs, name, fetch, progress)
    fetching_s = time.monotonic() - started
    base = BaseEpoch(name, blobs.get, runtime.processor.factory)
    keep_placements(base, blobs)
    with party.reading():
        runtime.feeds.set_about({FETCHING_KEY: b""})
        if base.root.party != runtime.party:
            raise Corrupt(f"epoch {name.number} names the state of another party")
        ends = {(entry.feed, entry.seq + 1, entry.link) for entry in epoch.genesis.timeframe}
        if ends != {(cut.feed, cut.length, cut.link) for cut in base.cuts.values() if not cut.control}:
            raise Corrupt(f"the cut of epoch {name.number} is not where it ends")
        return Outcome(name.number, leave_branch(party, epoch, base, stand_on), fetching_s)


def release(party: "Party") -> None:
    """Ask for data from now on."""
    with party.reading() as runtime:
        runtime.data_held = False
        party.peer.meta.set_setting(WAITS_FOR_EPOCH, None, party=party.key)
        party.sync_port.data_released()


@dataclass(frozen=True, slots=True)
class Fetched:
    """An epoch's snapshot that is here now."""

    epoch: int
    items: int
    blobs: int
    """How many came just now."""


def fetch_epoch(party: "Party", number: int, fetch: Fetch, progress: Progress = lambda done, total: None) -> BaseEpoch:
    """Get one epoch's snapshot, whole: its moment can be read then (`party.as_of(number)`)."""
    with party.reading() as runtime:
        child = runtime.processor.child_key
        fold_whole(runtime.processor)
        epoch = runtime.processor.membership.machine.epoch_tally(child).accepted(number)
        older = epoch is None and is_older(runtime, number)
    if epoch is None and not older:
        raise no_epoch(runtime.processor, number)
    blobs = runtime.blobs
    assert blobs is not None
    try:
        name = BaseName.of(epoch.genesis, epoch.hash) if epoch is not None else _older_name(party, number, fetch)
        with has_holes(party, name):
            fetch_heads(blobs, name, fetch)
            fetch_tree(blobs, name, fetch, progress)
    except Unavailable as nothing:
        raise TimedOut(
            f"{len(nothing.cids):,} {'blob' if len(nothing.cids) == 1 else 'blobs'} of epoch {number} came from nobody",
            unchanged="What came is kept; the next try goes on from there.",
            next_step="Connect to a member that kept the epoch.",
        ) from None
    base = BaseEpoch(name, blobs.get, runtime.processor.factory)
    keep_placements(base, blobs)
    return base


@contextlib.contextmanager
def has_holes(party: "Party", name: BaseName) -> Iterator[None]:
    """While a snapshot is fetched, and after a fetch that was cut short, nobody takes it for whole."""
    with party.reading() as runtime:
        assert runtime.blobs is not None
        if not runtime.blobs.has(name.snapshot):
            runtime.feeds.set_about({holes_key(name.snapshot): b"1"})
    yield
    with party.reading() as runtime:
        no_holes(runtime, name.snapshot)


def _older_name(party: "Party", number: int, fetch: Fetch) -> BaseName:
    """The snapshot of an epoch below where control begins here, by the records of those above it."""
    with party.reading() as runtime:
        first, blobs = first_known(runtime), runtime.blobs
    assert first is not None
    assert blobs is not None
    record = Cid(first.genesis.record)
    if not is_cid(record):
        raise Corrupt(f"epoch {first.number} names no record, and none of the epochs below it")
    fetch([record], back_to(number))
    with party.reading():
        older = record_of_older(runtime, number, blobs.get)
    return BaseName(number, b"", older.snapshot, Cid(b""), discards=True)


# all parties of a peer on the network


class Bootstraps:
    """Decides and fetches for the parties of one peer, in a thread of its own while there is anything to do."""

    def __init__(self, peer: "Peer", network: "Network") -> None:
        self._peer, self._network = peer, network
        self._lock = threading.Lock()
        self._due: dict[PartyKey, None] = {}
        self._thread: threading.Thread | None = None
        self._future: concurrent.futures.Future[int] | None = None
        self._closing = threading.Event()
        self.outcomes: dict[PartyKey, Outcome] = {}
        self._floors: dict[PartyKey, dict[Cid, None]] = {}
        """Evidence for control states that is to be looked at."""
        self._risen: set[PartyKey] = set()
        """Parties that started from a control state, and have not looked for their epoch since."""
        self.refused: dict[tuple[PartyKey, Cid], str] = {}
        """Evidence that was not believed, and why: it is not looked at again."""
        self._unmade: dict[PartyKey, Epoch] = {}
        """Final epochs that their parties could not make here from what they hold."""
        self._mends: dict[PartyKey, None] = {}
        """Parties whose base may have lost blobs."""
        self._mending = threading.Lock()
        self._tried: dict[PartyKey, int] = {}
        """The newest epoch that could not be had in its place."""
        self._timer: asyncio.TimerHandle | None = None
        self.mending: dict[PartyKey, str] = {}
        """How far it is with those that have, in words."""

    def watch(self, party: "Party") -> None:
        """Follow a party that waits for its epoch."""
        processor = party.runtime.processor
        processor.on_processed.append(lambda moved: self.consider(party))
        processor.on_damage.append(lambda: self._start(party.key, mend=True))
        if processor.blobs is not None:
            processor.blobs.on_broken = lambda: self._start(party.key, mend=True)
        self.consider(party)
        if processor.damage is not None or truncated(processor):
            self._start(party.key, mend=True)

    def consider(self, party: "Party") -> None:
        """Called under the peer's lock, whenever control may have moved."""
        runtime = party.runtime
        if runtime.processor.closed:
            self._consider_newer(party)
            return
        if not runtime.closed and not runtime.data_held and pinned_elsewhere(runtime) is not None:
            self._start(party.key)
        if runtime.closed or not (runtime.data_held or party.key in self._risen) or not control_settled(party):
            return
        if not runtime.data_held:  # it slept: what it lacks of the data may be gone like the control messages were
            self._risen.discard(party.key)
            self.compacted(party)
        elif believable(runtime) is None:
            self._replay(party, "the party has no epoch that a newcomer may believe")
        else:
            self._start(party.key)

    def compacted(self, party: "Party", evidence: Cid | None = None) -> None:
        """Blocks that this peer lacks are gone elsewhere: only an epoch can bring it on.

        Of a control feed: the control state of one, for which there is evidence.
        """
        runtime = party.runtime
        if evidence is not None:
            if (party.key, evidence) not in self.refused and runtime.processor.parent is None:
                self._floors.setdefault(party.key, {})[evidence] = None
                self._start(party.key)
            return
        if standing_of(runtime) in (REMOVED, REVOKED):
            return  # nobody gives it any more; what it has it keeps
        if runtime.processor.closed:
            self._start(party.key, mend=True)
            return
        epoch = believable(runtime)
        if epoch is not None and (runtime.processor.base is None or runtime.processor.base.name.number < epoch.number):
            self._start(party.key)

    def unmade(self, party: "Party", epoch: Epoch) -> None:
        """A final epoch can't be made here, for want of a model: its snapshot is fetched, and stood on as it is."""
        self._unmade[party.key] = epoch
        self._start(party.key)

    def fetching(self, party: PartyKey, *, patience_s: float = PATIENCE_S, strangers: bool = False) -> Fetch:
        """Gets blobs of a party, until closed; with `strangers` also from those who are not known as members."""

        def fetch(cids: list[Cid], follow: Follow | None = None) -> None:
            self._fetch(party, cids, follow, patience_s, strangers)

        return fetch

    def _fetch(
        self, party: PartyKey, cids: list[Cid], follow: Follow | None, patience_s: float, strangers: bool
    ) -> None:
        if self._closing.is_set():
            raise Closed("the peer is being closed")
        work = self._network.blobs.fetch(party, cids, patience_s=patience_s, follow=follow, strangers=strangers)
        future = self._future = asyncio.run_coroutine_threadsafe(work, self._network.loop)
        if self._closing.is_set():
            future.cancel()
        try:
            future.result()
        except concurrent.futures.CancelledError:
            raise Closed("the peer is being closed") from None

    def early(self, party: "Party", *, timeout_s: float = PATIENCE_S) -> EarlyReader:
        """Items and views of the newest epoch, whatever else has come; TimedOut while control names none."""
        deadline = time.monotonic() + timeout_s
        while (epoch := self._believable(party)) is None:
            if time.monotonic() > deadline:
                raise TimedOut("no epoch of the party was heard of", next_step="Connect to another member.")
            time.sleep(LOOK_S)
        return EarlyReader(party, epoch, self.fetching(party.key, patience_s=timeout_s))

    def _believable(self, party: "Party") -> Epoch | None:
        with party.reading() as runtime:
            return believable(runtime) if control_settled(party) else None

    def close(self) -> None:
        self._closing.set()
        if self._future is not None:
            self._future.cancel()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _consider_newer(self, party: "Party") -> None:
        """Control moved, and the base is lost: is there a newer epoch than those that were tried?"""
        self._risen.discard(party.key)
        newest = believable(party.runtime) if control_settled(party) else None
        if newest is not None and newest.number > self._tried.get(party.key, newest.number):
            self._start(party.key, mend=True)

    def met(self, _: object = None) -> None:
        """A member is connected: it may have what is lost here."""
        with self._peer.lock:
            hurt = [each.key for each in self._peer.held_parties() if each.runtime.processor.damage is not None]
        for party in hurt:
            self._start(party, mend=True)

    def _start(self, party: PartyKey, *, mend: bool = False) -> None:
        with self._lock:
            (self._mends if mend else self._due)[party] = None
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="echostore-bootstrap", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with self._lock:  # also when it fails: the next one that is due starts a thread of its own
                if self._thread is threading.current_thread():
                    self._thread = None

    def _work(self) -> None:
        while True:
            with self._lock:
                if not (self._due or self._mends) or self._closing.is_set():
                    self._thread = None
                    return
                key = next(iter(self._due or self._mends))
                mending = key not in self._due
                self._mends.pop(key, None)
            risen: Party | None = None
            try:
                party = self._peer.held(key)
                if not mending and self._rise(party):
                    risen = party
                elif mending or party.runtime.processor.closed:
                    why = self.mend(party)
                    if why:
                        _log.warning(
                            "what is lost of an epoch could not be had", extra={"party": key.hex(), "why": why}
                        )
                else:
                    self._one(party)
            except EchoError as error:
                if isinstance(error, Closed) and self._closing.is_set():
                    continue  # who closes the peer has what it came for
                _log.warning("a party could not start from its epoch", extra={"party": key.hex(), "why": str(error)})
            finally:
                if not mending:
                    with self._lock:
                        self._due.pop(key, None)
            if risen is not None:  # the epoch is looked for once what follows the state is here, which may be so by now
                with self._peer.lock:
                    self.consider(risen)

    def _one(self, party: "Party") -> None:
        with party.reading() as runtime:
            pinned = pinned_elsewhere(runtime) or self._unmade.pop(party.key, None)
            epoch = pinned or believable(runtime)
        if epoch is None:
            self._replay(party, "the party has no epoch that a newcomer may believe")
            return
        try:
            outcome = bootstrap(party, epoch, self.fetching(party.key))
        except (Unavailable, TimedOut, NotFound, Corrupt) as error:
            if pinned is None:
                self._replay(party, f"epoch {epoch.number} could not be had: {error}")
                return
            # It stays where it is until something comes again, and history is of no use.
            _log.warning("an epoch that others stand on could not be had", extra={"party": party.key.hex()})
            return
        self.outcomes[party.key] = outcome
        _log.info("a party starts from an epoch", extra={"party": party.key.hex(), "epoch": epoch.number})
        release(party)

    def mend(self, party: "Party") -> str:
        """Get back what is lost of a party's base, or a newer epoch; says why not, where it can't be had now."""
        with self._mending:
            look(party)
            damage = party.runtime.processor.damage
            fetch = self.fetching(party.key, patience_s=PATIENCE_S)
            why = "" if damage is None else self._made_whole(party, damage, fetch)
            if why:
                self.mending[party.key] = why
                self._network.soon(self._again_later)
                return why
            self.mending.pop(party.key, None)
            self._tried.pop(party.key, None)
            if damage is not None:
                _log.info("a party stands on its epoch again", extra={"party": party.key.hex()})
                release(party)
                with party.reading():
                    self._peer.opener.settle(party)
                self._network.parties_changed()
            try:
                mend_control(party, fetch)
                if damage is not None:
                    mend_beside(party, fetch)
            except (Unavailable, TimedOut, NotFound, Corrupt) as error:
                _log.warning(
                    "what stood beside an epoch could not be had", extra={"party": party.key.hex(), "why": str(error)}
                )
            return ""

    def _again_later(self) -> None:
        """In the loop: one timer, however many tries were in vain."""

        def again() -> None:
            self._timer = None
            self.met()

        if self._timer is None:
            self._timer = self._network.loop.call_later(MEND_AGAIN_S, again)

    def _made_whole(self, party: "Party", damage: BaseDamage, fetch: Fetch) -> str:
        """Stand on the base again, or on a newer epoch, as who slept does; else why not."""
        number = damage.name.number
        runtime, blobs = party.runtime, party.runtime.blobs
        if blobs is None or not runtime.writable:
            return "the party is open read-only"
        if not self._network.node.links and holes(damage.name, blobs):
            return "no member is connected"

        def progress(done: int, total: int) -> None:
            self.mending[party.key] = f"it is being fetched: {done:,} of {total:,} items of epoch {number} are here"

        self.mending[party.key] = "it is being fetched"
        try:
            mend(party, damage.name, fetch, progress)
            self.outcomes[party.key] = Outcome(number, "what was lost of it was fetched again")
            return ""
        except (Unavailable, TimedOut, NotFound, Corrupt) as error:
            why = f"epoch {number} could not be had from those who are connected: {error}"
        with party.reading():
            newer = believable(runtime) if control_settled(party) else None
        self._tried[party.key] = newer.number if newer is not None else number
        if newer is None or newer.number <= number:
            return why
        try:
            self.outcomes[party.key] = bootstrap(party, newer, anew(fetch, blobs))
            return ""
        except (Unavailable, TimedOut, NotFound, Corrupt) as error:
            return f"{why}; nor could epoch {newer.number}: {error}"

    def _rise(self, party: "Party") -> bool:
        """Look at the evidence for control states; whether that was all there was to do."""
        looked = False
        while waiting := self._next_floor(party.key):
            looked = True
            try:
                self._start_control(party, waiting)
            except (Unavailable, TimedOut, NotFound) as error:
                _log.warning("a control state could not be had", extra={"party": party.key.hex(), "why": str(error)})
            except (Corrupt, Refused) as error:
                self.refused[party.key, waiting] = error.what
                _log.warning("a control state was refused", extra={"party": party.key.hex(), "why": error.what})
        return looked

    def _next_floor(self, party: PartyKey) -> Cid | None:
        with self._peer.lock:
            waiting = self._floors.get(party, {})
            found = next(iter(waiting), None)
            if found is None:
                self._floors.pop(party, None)
            else:
                del waiting[found]
            return found

    def _start_control(self, party: "Party", evidence: Cid) -> None:
        # Who has nothing of control knows no members yet.
        runtime, fetch = party.runtime, self.fetching(party.key, strangers=True)
        blobs = runtime.blobs
        assert blobs is not None

        def get(cid: Cid) -> bytes:
            fetch([cid], chunks_named)
            return blobs.get(cid)

        floor = fetch_floor(evidence, runtime.processor, get)
        with party.reading():
            if not brings_on(runtime.processor, floor):
                return
            runtime.flush()
            self._risen.add(party.key)
            stand_on_floor(runtime.processor, floor, blobs)
            party.sync_port.control_begun()
            _log.info("a party starts from a control state", extra={"party": party.key.hex()})

    def _replay(self, party: "Party", why: str) -> None:
        """Ask for the history."""
        self.outcomes[party.key] = Outcome(None, why)
        _log.info("a party is replayed from its beginning", extra={"party": party.key.hex(), "why": why})
        release(party)
