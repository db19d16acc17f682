"""PartyOpener: how a party comes to be open here. Created, entered after an admission, or opened again.

    create    party key -> genesis credential on the control feed, system item on the data feed
    enter     the genesis feed's key is known from a welcome; history arrives by replication
    open      stores, processor, own feeds; after a copy or restore of the home this device gets new feeds

A new feed admits itself in the first message of its device's new control feed.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echostore.kernel.errors import Corrupt, DiskFull, NotFound, Refused, UsageError
from echostore.kernel.ids import SYSTEM_TYPE, DeviceKey, FeedKey, IdentityKey, PartyKey, created_item_id
from echostore.kernel.items.operations import GENESIS, ItemOperation
from echostore.kernel.items.record import Genesis
from echostore.kernel.models.property_set import PropertySet, Set
from echostore.kernel.order import CONTROL, DATA
from echostore.kernel.party.credentials import (
    Assertion,
    ChildParty,
    Claim,
    DeviceAdmit,
    FeedAdmit,
    FeedKind,
    PartyGenesis,
    PartyKind,
    Profile,
)
from echostore.peer.accepted_base import accepted_base, leave_parent, open_on_accepted, stand_on_accepted
from echostore.peer.anchors import Anchor
from echostore.peer.epoch_agreement import AcceptedEpoch, kept_epoch
from echostore.peer.identity import JoinRequest, Welcome
from echostore.peer.party import Party
from echostore.peer.processor import PartyProcessor
from echostore.peer.runtime import PartyRuntime
from echostore.store.blob_salvage import open_blobs
from echostore.store.blob_store import BlobStore
from echostore.store.damage_mark import discard, is_marked
from echostore.store.feed_store import FeedStore
from echostore.store.item_store import ItemStore
from echostore.store.meta_store import KnownFeed, KnownParty, PartyState
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.credentials import sign_credential, with_feed_proof
from echostore.wire.generated import credential_pb2
from echostore.wire.signing import SigningKey

if TYPE_CHECKING:
    from echostore.peer.peer import Peer

_log = logging.getLogger("echostore")

_OWN_FEEDS = "own_feeds"
_INSTANCE = "instance"
_PAUSED_AT = "paused_at"
WAITS_FOR_EPOCH = "waits_for_epoch"
"""Set while a party that was entered looks for an epoch to start from."""
OPENS_ITSELF = "opens_itself"
"""Set while this device's feeds in a party wait for the admission that the device writes itself."""


class PartyOpener:
    """Opens and makes the parties of one peer. Called under the peer's lock."""

    def __init__(self, peer: "Peer") -> None:
        self._peer = peer

    def must_renew(self, feeds: FeedStore) -> bool:
        """Whether this device must write new feeds: those in the store belong to another copy of the home.

        A copied or restored home has an instance id of its own (`store.instance`), and the party's file names the one
        that its own feeds were opened under. So no mark can be lost between noticing a copy and acting on it.
        """
        return feeds.about(_INSTANCE) != self._instance_id()

    def _instance_id(self) -> bytes:
        check = self._peer.instance
        assert check is not None, "a read-only peer writes no feeds"
        return check.instance_id.encode()

    # making

    def create(self, title: str, *, local: bool) -> Party:
        peer, myself = self._peer, self._peer.myself
        party_key = SigningKey.generate()
        party = PartyKey(party_key.public)
        identity = IdentityKey(myself.device) if local else myself.identity
        control, data = SigningKey.generate(), SigningKey.generate()
        peer.keep_feed_keys(party, [control, data])
        known = KnownParty(party, title, FeedKey(control.public), peer.now_ms(), local=local)
        with self._started(known, control, data) as runtime:
            genesis = PartyGenesis(
                party,
                identity,
                myself.device,
                FeedKey(control.public),
                FeedKey(data.public),
                title,
                PartyKind.LOCAL if local else PartyKind.ORDINARY,
                peer.now_ms(),
            )
            claim = Claim(party, genesis.identity, DeviceKey(party), genesis, issued_ms=peer.now_ms())
            credentials = [sign_credential(claim, party_key)]
            if myself.name:
                credentials.append(self.sign(party, Profile(myself.name), identity=genesis.identity))
            runtime.issue(credentials)
            self._make_system_item(runtime, title)
            runtime.flush()
            self._remember(known, control, data)
        return self._party(known, runtime)

    def create_child(self, parent: Party, title: str) -> Party:
        if parent.runtime.processor.parent is not None:
            raise Refused("a light-weight party has no light-weight parties of its own")
        child = PartyKey(SigningKey.generate().public)
        made = self.sign(parent.key, ChildParty(child, title), identity=self.identity_in(parent))
        party = self._join_child(parent, child, title, [made])
        self._make_system_item(party.runtime, title)
        party.runtime.flush_if_space()  # the members know of it by now: on a full disk its first item waits like any other
        return party

    def enter_child(self, parent: Party, child: PartyKey) -> Party:
        titles = dict(parent.child_parties())
        if child not in titles:
            raise NotFound(f"no light-weight party {child.hex()[:8]} below {parent.title!r}")
        party = self._join_child(parent, child, titles[child], [])
        self._hold_data(party.runtime)
        return party

    def _join_child(
        self, parent: Party, child: PartyKey, title: str, credentials: list[credential_pb2.Credential]
    ) -> Party:
        """A light-weight party with a data feed of this device, admitted by the device itself."""
        peer = self._peer
        data = SigningKey.generate()
        peer.keep_feed_keys(child, [data])
        known = KnownParty(child, title, None, peer.now_ms(), child_of=parent.key)
        identity = self.identity_in(parent)
        admit = self._admit_feed(parent.key, data, FeedKind.DATA, identity=identity, child=child)
        with self._started(known, None, data, parent=parent) as runtime:
            self._remember(known, None, data)
            parent.runtime.issue([*credentials, self.sign(parent.key, admit, identity=identity)])
        return self._party(known, runtime)

    def _make_system_item(self, runtime: PartyRuntime, title: str) -> None:
        assert runtime.data is not None
        item = created_item_id(runtime.data.feed, 0, 0)
        genesis = Genesis(item, PropertySet.name, PropertySet.version, SYSTEM_TYPE, None, runtime.data.next_depth)
        runtime.operate(
            [
                ItemOperation(item, GENESIS, genesis),
                ItemOperation(item, PropertySet.name, (Set(("title",), title),)),
            ]
        )

    # joining

    def request_join(self, party: PartyKey) -> JoinRequest:
        peer, myself = self._peer, self._peer.myself
        control, data = SigningKey.generate(), SigningKey.generate()
        peer.keep_feed_keys(party, [control, data])
        peer.meta.set_setting(_OWN_FEEDS, {"control": control.public.hex(), "data": data.public.hex()}, party=party)
        admits = [
            self._admit_feed(party, key, kind, identity=myself.identity)
            for key, kind in ((control, FeedKind.CONTROL), (data, FeedKind.DATA))
        ]
        return JoinRequest(
            party,
            myself.identity,
            myself.device,
            myself.name,
            FeedKey(control.public),
            admits[0].proof,
            FeedKey(data.public),
            admits[1].proof,
            tuple(link.SerializeToString() for link in myself.chain()),
        )

    def enter(self, welcome: Welcome) -> Party:
        peer = self._peer
        own = self._own_feeds(welcome.party)
        if own is None:
            raise UsageError("this device did not ask to join the party", next_step="Call request_join first.")
        known = KnownParty(welcome.party, welcome.title, welcome.genesis_feed, peer.now_ms())
        with self._started(known, own[0], own[1]) as runtime:
            self._hold_data(runtime)
            self._remember(known, own[0], own[1])
        return self._party(known, runtime)

    def enter_as_device(self, welcome: Welcome) -> Party:
        """Follow a party of this device's identity, with feeds that `admit_itself` will admit."""
        peer = self._peer
        control, data = SigningKey.generate(), SigningKey.generate()
        peer.keep_feed_keys(welcome.party, [control, data])
        known = KnownParty(welcome.party, welcome.title, welcome.genesis_feed, peer.now_ms())
        with self._started(known, control, data) as runtime:
            self._hold_data(runtime)
            peer.meta.set_setting(OPENS_ITSELF, True, party=known.key)
            self._remember(known, control, data)
        return self._party(known, runtime)

    def admit_itself(self, party: Party) -> bool:
        """Admit this device's feeds in the first block of its control feed; False while control does not allow it.

        It does once it says that the identity is a member and this device one of its devices. The device of a recovered
        identity is admitted by the identity key, in the same block.
        """
        peer, myself, runtime = self._peer, self._peer.myself, party.runtime
        if runtime.control is None or runtime.data is None:
            return False
        if runtime.control.cursor.length == 0:
            machine = runtime.processor.membership.machine
            known = [
                each for each in machine.devices if (each.identity, each.device) == (myself.identity, myself.device)
            ]
            present = any(member.identity == myself.identity and member.role for member in machine.members)
            if not present or any(each.revoked for each in known) or not (known or myself.holds_identity_key):
                return False
            credentials = [] if known else [self._admit_device_by_root(party.key)]
            for own, kind in ((runtime.control, FeedKind.CONTROL), (runtime.data, FeedKind.DATA)):
                admit = self._admit_feed(party.key, peer.keys.key(own.cursor.key), kind, identity=myself.identity)
                credentials.append(self.sign(party.key, admit, identity=myself.identity))
            runtime.issue(credentials)
        peer.meta.set_setting(OPENS_ITSELF, None, party=party.key)
        return True

    def _admit_device_by_root(self, party: PartyKey) -> credential_pb2.Credential:
        myself = self._peer.myself
        admit = DeviceAdmit(myself.identity, myself.device, myself.device_name)
        claim = Claim(party, myself.identity, DeviceKey(myself.identity), admit, issued_ms=self._peer.now_ms())
        return sign_credential(claim, myself.identity_key)

    # opening

    def open(self, known: KnownParty) -> Party:
        peer = self._peer
        path = peer.home.party(known.key).feeds
        if not path.exists():  # before a writer makes an empty one
            raise _feeds_gone(known, path)
        if known.child_of is not None:
            parent = peer.held(known.child_of)
            runtime = self._runtime(known, parent=parent)
        else:
            runtime = self._runtime(known)
        if not runtime.feeds.feeds() and runtime.feeds.about("created_ms") is None:  # an empty file in its place
            runtime.abandon()
            raise _feeds_gone(known, path)
        if not peer.read_only:
            own = self._own_feeds(known.key)
            if own is not None and not runtime.feeds.has_feed(FeedKey(own[1].public)):
                runtime.abandon()
                raise _feeds_gone(known, path)
            if own is not None and self.must_renew(runtime.feeds):
                self._renew(known, runtime)
            elif own is not None:
                if own[0] is not None:
                    runtime.adopt(CONTROL, own[0])
                runtime.adopt(DATA, own[1])
        party = self._party(known, runtime)
        if runtime.processor.damage is None:
            self.settle(party)
        return party

    def settle(self, party: Party) -> None:
        """What is done for a party once its state is here: at opening, or when a lost base has come back."""
        runtime = party.runtime
        if not self._peer.read_only and not runtime.processor.paused:
            party.report_forks()
            runtime.reissues.look()
            runtime.follower.review()
            self.rebase(party)

    def rebase(self, party: Party) -> None:
        """Where this device's feed was retired while it was away or silent, go on with a new one."""
        from echostore.peer.retiring import rebase_retired

        rebased = rebase_retired(party)
        if rebased is not None:
            _log.warning(
                "the feed of this device in party %s was retired: %d operations were written again, %d stay behind",
                party.key.hex()[:8],
                rebased.operations,
                rebased.left,
            )

    def open_data_feed(self, party: Party) -> None:
        """Go on with a new data feed of this device, which the device admits itself in its control feed."""
        runtime, peer = party.runtime, self._peer
        parent = runtime.processor.parent
        owner = party if parent is None else peer.held(parent.party)  # whose control feed speaks for it
        data = SigningKey.generate()
        peer.keep_feed_keys(party.key, [data])
        identity = self.identity_in(owner)
        child = None if parent is None else party.key
        admit = self._admit_feed(owner.key, data, FeedKind.DATA, identity=identity, child=child)
        runtime.feeds.add_feed(FeedKey(data.public), "data", own=True)
        runtime.adopt(DATA, data)
        owner.runtime.issue([self.sign(owner.key, admit, identity=identity)])
        if parent is not None:
            runtime.processor.control_moved()
        own = self._own_feeds(party.key)
        self._remember(peer.meta.party(party.key), own[0] if own is not None else None, data)

    def _renew(self, known: KnownParty, runtime: PartyRuntime) -> None:
        """Open new feeds, admitted by this device itself in its new control feed."""
        _log.warning(
            "this home is a copy or was restored: party %s gets new feeds on this device, the old ones stay as they are",
            known.key.hex()[:8],
        )
        peer, myself = self._peer, self._peer.myself
        control, data = SigningKey.generate(), SigningKey.generate()
        keys = [data] if known.child_of else [control, data]
        peer.keep_feed_keys(known.key, keys)
        runtime.feeds.add_feed(FeedKey(data.public), "data", own=True)
        runtime.adopt(DATA, data)
        if known.child_of is not None:
            parent = peer.held(known.child_of)
            admit = self._admit_feed(
                parent.key, data, FeedKind.DATA, identity=self.identity_in(parent), child=known.key
            )
            parent.runtime.issue([self.sign(parent.key, admit, identity=self.identity_in(parent))])
            runtime.processor.control_moved()
        else:
            runtime.feeds.add_feed(FeedKey(control.public), "control", own=True)
            runtime.adopt(CONTROL, control)
            identity = IdentityKey(myself.device) if known.local else myself.identity
            admits = []
            for key, kind in ((control, FeedKind.CONTROL), (data, FeedKind.DATA)):
                admit = self._admit_feed(known.key, key, kind, identity=identity)
                admits.append(self.sign(known.key, admit, identity=identity))
            runtime.issue(admits)
        self._remember(known, None if known.child_of else control, data)
        runtime.feeds.set_about({_INSTANCE: self._instance_id()})

    # parts

    def _hold_data(self, runtime: PartyRuntime) -> None:
        """On the network, look for an epoch before any data is asked for."""
        if self._peer.on_network:
            self._peer.meta.set_setting(WAITS_FOR_EPOCH, True, party=runtime.party)
            runtime.data_held = True

    @contextmanager
    def _started(
        self, known: KnownParty, control: SigningKey | None, data: SigningKey, *, parent: Party | None = None
    ) -> Iterator[PartyRuntime]:
        """The stores of a party that is new here, with this device's own feeds in them.

        When the block or the making of them fails, they are gone again with their folder, unless that was there before.
        """
        home, runtime = self._peer.home, None
        new = not home.party(known.key).path.exists()
        try:
            runtime = self._start(known, control, data, parent=parent)
            yield runtime
        except BaseException as error:
            if runtime is not None:
                runtime.abandon()
            if new:
                self._peer.meta.take_back(home, known.key)
            if isinstance(error, DiskFull):
                made = "The party was not made."
                raise DiskFull(error.what, unchanged=made, next_step="Free space and try again.") from error
            raise

    def _start(
        self, known: KnownParty, control: SigningKey | None, data: SigningKey, *, parent: Party | None
    ) -> PartyRuntime:
        self._peer.home.make_party(known.key)
        with FeedStore(self._peer.home.party(known.key).feeds, known.key) as feeds:
            feeds.set_about({**known.about(), _INSTANCE: self._instance_id()})
            if control is not None:
                feeds.add_feed(FeedKey(control.public), "control", own=True)
            feeds.add_feed(FeedKey(data.public), "data", own=True)
            if known.genesis_feed is not None and not feeds.has_feed(known.genesis_feed):
                feeds.add_feed(known.genesis_feed, "control")
        runtime = self._runtime(known, parent=parent)
        if control is not None:
            runtime.adopt(CONTROL, control)
        runtime.adopt(DATA, data)
        return runtime

    def folded_anew(self, known: KnownParty) -> Party:
        """A party as its feeds alone give it, in memory and read-only: to compare the stored items with."""
        parent = None if known.child_of is None else self._peer.held(known.child_of)
        return self._party(known, self._runtime(known, parent=parent, stored_items=False))

    def _runtime(self, known: KnownParty, *, parent: Party | None = None, stored_items: bool = True) -> PartyRuntime:
        peer = self._peer
        folder = peer.home.party(known.key)
        writable = not peer.read_only and stored_items
        feeds = FeedStore(folder.feeds, known.key, writable=writable)
        items: ItemStore | None = None
        blobs: BlobStore | None = None
        try:
            items = self._open_items(known) if stored_items else None
            blobs = open_blobs(folder.blobs) if writable else _readable_blobs(folder.blobs)
            try:
                processor = self._processor(known, feeds, items, blobs, parent, mendable=stored_items)
            except Corrupt as error:
                if items is None or not items.damaged:
                    raise
                items.close()
                items = self._items_anew(known, error)
                processor = self._processor(known, feeds, items, blobs, parent, mendable=stored_items)
            if processor.items is None and items is not None:
                items.close()
                items = None
        except BaseException:
            for store in (feeds, items, blobs):
                if store is not None:
                    store.close()
            raise
        runtime = PartyRuntime(processor, feeds=feeds, items=items, blobs=blobs, now_ms=peer.now_ms, writable=writable)
        runtime.device = DeviceKey(peer.device)
        runtime.declared.update(peer.meta.setting("declared", [], party=known.key))
        runtime.data_held = bool(peer.meta.setting(WAITS_FOR_EPOCH, False, party=known.key))
        runtime.source.declared = frozenset(runtime.declared)
        return runtime

    def _processor(
        self,
        known: KnownParty,
        feeds: FeedStore,
        items: ItemStore | None,
        blobs: BlobStore | None,
        parent: Party | None,
        *,
        mendable: bool,
    ) -> PartyProcessor:
        """A processor that is open, on the base that the feeds name or else on the epoch that the MetaStore keeps."""
        make = partial(
            PartyProcessor,
            known.key,
            feeds=feeds,
            items=items,
            factory=self._peer.models,
            blobs=blobs,
            parent=parent.runtime.processor if parent else None,
            limit=self._limit(known),
        )
        return open_on_accepted(
            feeds,
            lambda: (
                None  # the items are what is damaged, and are made anew first
                if items is not None and items.damaged
                else accepted_base(self._accepted(known), feeds, blobs, self._peer.models)
            ),
            lambda base: self._opened(make, base, mendable=mendable),
        )

    def _opened(
        self, make: Callable[[], PartyProcessor], base: BaseEpoch | None, *, mendable: bool
    ) -> PartyProcessor | None:
        """Where pages are lost that opening needs, the base is given up until it is back. None: `base` is not final."""
        given_up = ""
        while True:
            processor = make()
            items = processor.items
            processor.base = base
            try:
                processor.stand(given_up=given_up, mendable=mendable)
                if base is not None and not stand_on_accepted(
                    processor, base, writable=mendable and not self._peer.read_only
                ):
                    leave_parent(processor)
                    return None
                if not processor.closed:
                    processor.begin()
                return processor
            except BaseException as error:
                leave_parent(processor)
                if not isinstance(error, Corrupt) or processor.damage is None or processor.closed or given_up:
                    raise
                if items is not None and items.damaged:
                    raise
                given_up = error.what

    def _accepted(self, known: KnownParty) -> AcceptedEpoch | None:
        try:
            return kept_epoch(self._peer.meta.setting, known.key)
        except Corrupt:
            return None  # a second chance, and no more: the next look at the epochs writes it anew

    def pause(self, party: Party) -> None:
        """Remember, durably, how far a party was processed, and process no further."""
        limit = party.anchor()
        self._peer.meta.set_setting(_PAUSED_AT, str(limit), party=party.key)
        party.runtime.processor.limit = limit

    def _limit(self, known: KnownParty) -> Anchor | None:
        paused_at = self._peer.meta.setting(_PAUSED_AT, party=known.key) if known.state is PartyState.PAUSED else None
        return None if paused_at is None else Anchor.parse(paused_at)

    def _open_items(self, known: KnownParty) -> ItemStore | None:
        """The ItemStore; a damaged one is derived data and made anew. A reader does without it."""
        path = self._peer.home.party(known.key).items
        writable = not self._peer.read_only
        if not writable and (not path.exists() or is_marked(path)):
            return None
        if is_marked(path) or not path.exists():
            discard(path)  # also the log of a file that somebody removed: SQLite would fill the new one from it
        try:
            return ItemStore(path, writable=writable)
        except Corrupt as error:
            return self._items_anew(known, error)

    def _items_anew(self, known: KnownParty, error: Corrupt) -> ItemStore | None:
        """Instead of a damaged ItemStore: an empty one, to be filled from the feeds; none for a reader."""
        path = self._peer.home.party(known.key).items
        _log.warning("%s The items of party %s are folded from its feeds anew.", error.what, known.key.hex()[:8])
        if self._peer.read_only:
            return None
        discard(path)
        return ItemStore(path)

    def _party(self, known: KnownParty, runtime: PartyRuntime) -> Party:
        party = Party(self._peer, runtime, title=known.title, lock=self._peer.lock)
        runtime.on_retired = lambda: self.rebase(party)
        return party

    def _remember(self, known: KnownParty, control: SigningKey | None, data: SigningKey) -> None:
        own = {"control": control.public.hex() if control else "", "data": data.public.hex()}
        feeds = [KnownFeed(known.key, FeedKey(data.public), "data", True)]
        if control is not None:
            feeds.append(KnownFeed(known.key, FeedKey(control.public), "control", True))
        self._peer.meta.remember(known, feeds, {_OWN_FEEDS: own})

    def _own_feeds(self, party: PartyKey) -> tuple[SigningKey | None, SigningKey] | None:
        own = self._peer.meta.setting(_OWN_FEEDS, party=party)
        if own is None:
            return self._own_feeds_from_store(party)
        control = self._peer.keys.key(bytes.fromhex(own["control"])) if own["control"] else None
        return control, self._peer.keys.key(bytes.fromhex(own["data"]))

    def _own_feeds_from_store(self, party: PartyKey) -> tuple[SigningKey | None, SigningKey] | None:
        """After the MetaStore was lost: the last own feeds that the party's file knows."""
        folder = self._peer.home.party(party)
        if not folder.feeds.exists():
            return None
        with FeedStore(folder.feeds, party, writable=False) as feeds:
            own = {held.kind: held.key for held in feeds.feeds() if held.own}
        if "data" not in own or not self._peer.keys.has(own["data"]):
            return None
        control = self._peer.keys.key(own["control"]) if "control" in own else None
        return control, self._peer.keys.key(own["data"])

    def sign(self, party: PartyKey, assertion: Assertion, *, identity: IdentityKey) -> credential_pb2.Credential:
        """A credential by this device."""
        myself = self._peer.myself
        claim = Claim(party, identity, myself.device, assertion, issued_ms=self._peer.now_ms())
        chain = myself.chain() if identity == myself.identity else ()
        return sign_credential(claim, myself.device_key, chain)

    def identity_in(self, party: Party) -> IdentityKey:
        """As whom this device acts in a party: its identity, or the device itself in a local one."""
        genesis = party.runtime.processor.membership.machine.genesis
        myself = self._peer.myself
        local = genesis is not None and genesis.kind is PartyKind.LOCAL
        if local and genesis is not None and bytes(genesis.identity) == bytes(myself.device):
            return IdentityKey(myself.device)
        return myself.identity

    def _admit_feed(
        self,
        party: PartyKey,
        key: SigningKey,
        kind: FeedKind,
        *,
        identity: IdentityKey,
        child: PartyKey | None = None,
    ) -> FeedAdmit:
        """The admission of an own feed, with the feed's consent."""
        admit = FeedAdmit(FeedKey(key.public), kind, identity, self._peer.myself.device, child)
        return with_feed_proof(admit, party, key)


def _readable_blobs(path: Path) -> BlobStore | None:
    """The blobs for a reader; none where they can't be read, which is damage only if the party stands on them."""
    try:
        return BlobStore(path, writable=False) if path.exists() else None
    except Corrupt as error:
        _log.warning("%s", error.what)
        return None


def _feeds_gone(known: KnownParty, path: Path) -> Corrupt:
    return Corrupt(
        f"the feeds of party {known.key.hex()[:8]} are gone from {path}",
        next_step="Restore the file from a backup, or forget the party and join it again.",
    )
