"""The state that a genesis speaks of, made again here: its predecessor's, with the messages since.

    genesis 3 ── previous ──► 2 ── previous ──► 1 ── previous ──► the beginning
                              │ attested here, or final: its blobs are folded from
                              └ else it is made the same way first, and compared

The base is the predecessor, whoever folds and whatever that peer itself stands on: which epochs are final is known earlier to
some and later to others, and what an epoch leaves out, or lets stand against a late rule, depends on what it is folded from.
Only where blocks inside the predecessor count otherwise under the genesis' own admission (a removal that no quorum came
before) it is the one before that, and so on. So the state follows from the genesis alone, and two honest peers never differ.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from echostore.kernel.errors import Compacted, EchoError, NotFound
from echostore.kernel.ids import Cid, IdentityKey, PartyKey
from echostore.kernel.items.discarding import LeftOut
from echostore.kernel.party.credentials import EpochGenesis
from echostore.kernel.party.epoch_chain import Tally, genesis_of
from echostore.kernel.snapshot import UNPLACED_VERSION
from echostore.peer.discard_waits import keep_waits, kept_waits
from echostore.peer.epoch_fold import Folded, OpenTimeframe, UnlikeBase, cuts_at, fold_to, timeframe_of
from echostore.peer.snapshots import take_snapshot
from echostore.peer.whole_epochs import is_whole
from echostore.store.feed_store import FeedStore
from echostore.wire.base_epoch import BaseEpoch, BaseName
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.epochs import encode_cut
from echostore.wire.snapshot import read_state_root
from echostore.wire.tree_reader import MissingBlob

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.runtime import PartyRuntime

PREDECESSORS_MAX: Final = 64
"""Predecessors that are made one from the other: who lacks more than these has slept, and starts from a newer epoch."""


class EpochStates:
    """This peer's own states at the places that geneses of one party name. Folds run without the peer's lock."""

    def __init__(self, party: "Party", identity: IdentityKey) -> None:
        self._party, self._identity = party, identity

    def at(self, genesis: EpochGenesis, *, stored: bool = True) -> Folded | OpenTimeframe | None:
        """The state, with its blobs; the proof that there is none at such a place; or None when it can't be made here.

        Without `stored` it is folded from blocks, also where the stored items stand at that place.
        """
        made = self._at(genesis, PREDECESSORS_MAX, stored=stored)
        return made.folded if isinstance(made, _Made) else made

    def left_out(self, genesis: EpochGenesis) -> LeftOut | None:
        """What a genesis takes out of the state, found by making it again; None when it can't be made here."""
        if not genesis.discard_before_ms:
            return LeftOut()
        made = self.at(genesis)
        return made.left_out if isinstance(made, Folded) and made.cid == genesis.snapshot else None

    def _at(self, genesis: EpochGenesis, predecessors: int, *, stored: bool = True) -> "_Made | OpenTimeframe | None":
        with self._party.lock:
            runtime = self._party.runtime
            live = self._live(runtime, genesis) if stored else None
            if live is not None:
                return _Made(live, self._stored)
            runtime.flush()
        with ExitStack() as stack:
            fold = _Fold(self._party, self._beside(stack), self._parent_key(), genesis)
            for name in self._predecessors(genesis):
                try:
                    made = self._over(fold, name, predecessors)
                except UnlikeBase:
                    continue
                except (NotFound, Compacted):
                    return None  # it would need blocks that were truncated
                except OpenTimeframe as proof:
                    return proof
                if made is not None:
                    self._keep_waits(genesis.number, made.folded)
                return made
        return None

    def _over(self, fold: "_Fold", name: bytes, predecessors: int) -> "_Made | None":
        """The state over a predecessor, or over the beginning; None when that can't be had here."""
        if not name:
            folded = fold(None)
            return None if folded is None else _Made(folded, self._stored)
        for anew in (False, True):
            found = self._base(name, predecessors, anew=anew)
            if found is None:
                return None
            base, made = found
            try:
                folded = fold(base)
            except MissingBlob:
                continue  # pages of it are lost: it is made again
            if folded is None:
                return None
            if made is None:
                return _Made(folded, base.blob)
            # What it shares with a predecessor that is in memory alone comes with it: who keeps the one keeps all of it.
            return _Made(replace(folded, blobs={**made.folded.blobs, **folded.blobs}), made.shared)
        return None

    def _keep_waits(self, number: int, folded: Folded) -> None:
        with self._party.lock:
            runtime = self._party.runtime
            if folded.settled is not None and runtime.may_write:
                keep_waits(runtime.feeds, number, folded.cid, folded.settled.waits)

    def _live(self, runtime: "PartyRuntime", genesis: EpochGenesis) -> Folded | None:
        """The live state, where it stands exactly at the genesis, and on its predecessor or beyond.

        It costs what changed since the last snapshot.
        """
        processor = runtime.processor
        settled = processor.base is not None and processor.base.name.number >= genesis.number
        if processor.timeframe != timeframe_of(genesis.timeframe) or genesis.discard_before_ms:
            return None
        if processor.admission.digest != genesis.admission_digest:
            return None
        if not settled and not stands_on(runtime, genesis.previous):
            return None
        snapshot = take_snapshot(runtime)
        blobs = dict(snapshot.unsaved)
        root, data = snapshot.root, snapshot.root_bytes
        if genesis.encoding_version == UNPLACED_VERSION:
            cid, data = snapshot.unplaced()
            root, blobs[cid] = read_state_root(data), data
        control = timeframe_of(genesis.control_timeframe)
        cut = encode_cut(cuts_at(processor, root, control), blobs.__setitem__)
        return Folded(cid_of(data, PROTOBUF), root, cut, blobs, 0, stored=True)

    def _predecessors(self, genesis: EpochGenesis) -> Iterator[bytes]:
        """Names of the predecessors, nearest first, and then of the beginning; it ends where control begins here."""
        previous = genesis.previous
        while previous:
            yield previous
            before = self._declared(previous)
            if before is None:
                return
            previous = before.previous
        yield b""

    def _base(self, name: bytes, predecessors: int, *, anew: bool) -> "tuple[BaseEpoch, _Made | None] | None":
        """An epoch to fold from: the one that the party stands on, one that is believed, or one that is made first.

        That one comes with how it was made. `anew`: of the one that is here not all is left.
        """
        with self._party.lock:
            runtime = self._party.runtime
            standing = runtime.processor.base
            if standing is not None and standing.name.genesis == name and not anew:
                # Opened beside it: what a fold misses is made again, and says nothing about the live party.
                return BaseEpoch(standing.name, self._stored, runtime.processor.factory), None
            genesis = self._declared(name)
            here = genesis is not None and runtime.blobs is not None and not anew
            opened = _opened(runtime, genesis, name) if here and genesis is not None else None
            if genesis is None or (opened is not None and self._believed(genesis.number, name)):
                return None if opened is None else (opened, None)
        made = self._at(genesis, predecessors - 1) if predecessors else None
        if not isinstance(made, _Made) or (made.folded.cid, made.folded.cut) != (genesis.snapshot, genesis.cut):
            return None
        return BaseEpoch(BaseName.of(genesis, name), made.blob, runtime.processor.factory), made

    def _stored(self, cid: Cid) -> bytes:
        blobs = self._party.runtime.blobs
        if blobs is None:
            raise NotFound("there is no blobs.db")
        return blobs.get(cid)

    def _believed(self, number: int, name: bytes) -> bool:
        """Whether this identity stands for an epoch, or a quorum does."""
        tally = self._tally
        epoch = tally.accepted(number)
        return tally.voted(number, self._identity) == name or (epoch is not None and epoch.final and epoch.hash == name)

    def _declared(self, name: bytes) -> EpochGenesis | None:
        with self._party.lock:
            return next((genesis_of(act) for act in self._tally.declared if act.hash == name), None)

    @property
    def _tally(self) -> Tally:
        processor = self._party.runtime.processor
        return processor.membership.machine.epoch_tally(processor.child_key)

    def _beside(self, stack: ExitStack) -> list[FeedStore]:
        """The feeds of the party (and of its parent) through connections of their own."""
        home = self._party.peer.home
        keys = [self._party.key, *([parent] if (parent := self._parent_key()) is not None else [])]
        return [stack.enter_context(FeedStore(home.party(key).feeds, key, writable=False)) for key in keys]

    def _parent_key(self) -> PartyKey | None:
        parent = self._party.runtime.processor.parent
        return parent.party if parent is not None else None


@dataclass(frozen=True, slots=True)
class _Fold:
    """Folds to a genesis, from any base."""

    party: "Party"
    feeds: list[FeedStore]
    parent: PartyKey | None
    genesis: EpochGenesis

    def __call__(self, base: BaseEpoch | None) -> Folded | None:
        return fold_to(
            self.genesis,
            self.party.key,
            feeds=self.feeds[0],
            factory=self.party.runtime.processor.factory,
            base=base,
            parent_feeds=self.feeds[1] if len(self.feeds) > 1 else None,
            parent=self.parent,
            cancelled=lambda: self.party.peer.epoch_keeper.closing,
            waits=None if base is None else kept_waits(self.feeds[0], base.name.number, base.name.snapshot),
        )


@dataclass(frozen=True, slots=True)
class _Made:
    """A state that was made here, and where the blobs are that it shares with what it was made from."""

    folded: Folded
    shared: Callable[[Cid], bytes]

    def blob(self, cid: Cid) -> bytes:
        return self.folded.blobs[cid] if cid in self.folded.blobs else self.shared(cid)


def stands_on(runtime: "PartyRuntime", genesis: bytes) -> bool:
    """Whether a party stands on the epoch with this genesis; on none, where it is empty."""
    base = runtime.processor.base
    return genesis == (base.name.genesis if base is not None else b"")


def _opened(runtime: "PartyRuntime", genesis: EpochGenesis, name: bytes) -> BaseEpoch | None:
    """An epoch whose blobs are here; None when some are not."""
    assert runtime.blobs is not None
    try:
        found = BaseEpoch(BaseName.of(genesis, name), runtime.blobs.get, runtime.processor.factory)
    except EchoError:
        return None  # its blobs are not all here: it is made again
    return found if is_whole(runtime, found) else None
