"""Party: the data set that members share, as an application sees it."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from echostore.kernel.errors import (
    Closed,
    Corrupt,
    NotFound,
    Refused,
    StorageFailed,
    TimedOut,
    Unreachable,
    UsageError,
)
from echostore.kernel.ids import ITEM_ID_BYTES, KEY_BYTES, SYSTEM_TYPE, ItemId, PartyKey, item_from_text, item_text
from echostore.kernel.items.operations import GENESIS, METADATA, ItemOperation, Reject
from echostore.kernel.items.record import NAME_KEY, Genesis, ItemRecord
from echostore.kernel.models.property_set import Change, PropertySet, Set
from echostore.kernel.party.credentials import ForkEvidence, Role
from echostore.kernel.timeframe import Timeframe
from echostore.kernel.values import Reference, Value, check_value, kind_of, merge_properties, parse_locator
from echostore.peer import arguments
from echostore.peer.anchors import Anchor
from echostore.peer.capabilities import CapabilityIssuing
from echostore.peer.deprecated import deprecated_key, deprecated_name, deprecated_version
from echostore.peer.elsewhere import Elsewhere, HeldElsewhere
from echostore.peer.identity import check_title
from echostore.peer.item_kinds import HANDLES, CustomItem, PropertySetItem
from echostore.peer.items import Item, plain_references
from echostore.peer.live import LiveHub
from echostore.peer.model_registry import model_rejects
from echostore.peer.published_models import PublishedModel, publish_model, published_models
from echostore.peer.query import Query, query_over
from echostore.peer.receipts import Receipt
from echostore.peer.refreshing import refresh
from echostore.peer.runtime import PartyRuntime
from echostore.peer.schema import Schemas, create_from_object, schema_type
from echostore.peer.snapshots import Snapshot, open_snapshot, take_snapshot
from echostore.peer.status import REMOVED, REVOKED, PartyStatus, party_status, standing_of
from echostore.peer.streams import Stream
from echostore.peer.sync_port import PartySyncPort
from echostore.wire.messages import NAME_CHARACTERS_MAX, encode_genesis
from echostore.wire.signing import SigningKey
from echostore.wire.views import sign_view

if TYPE_CHECKING:
    from echostore.peer.delivered import Delivered
    from echostore.peer.files import Files
    from echostore.peer.inviting import Invitation
    from echostore.peer.made_anew import Revived
    from echostore.peer.members import Members
    from echostore.peer.peer import Peer


_log = logging.getLogger("echostore")


class Party(CapabilityIssuing):
    """One party of an open peer. Calls are safe from any thread; a batch holds other threads off until it ends."""

    def __init__(self, peer: "Peer", runtime: PartyRuntime, *, title: str, lock: threading.RLock) -> None:
        self.peer = peer
        self.runtime = runtime
        self.lock = lock
        self.key: PartyKey = runtime.party
        self._title = title
        self._changed = threading.Condition(lock)
        self._elsewhere = Elsewhere()
        self.schemas = Schemas(self)
        self.live = LiveHub(self)
        self._sync_port: PartySyncPort | None = None
        self._system_id: ItemId | None = None
        runtime.processor.on_processed.append(lambda moved: self.notify())
        runtime.processor.listeners.append(self._retitle)

    # state of the handle

    @contextmanager
    def reading(self) -> Iterator[PartyRuntime]:
        """Hold the lock while reading."""
        with self.lock:
            if self.runtime.closed:
                raise Closed("the party has been closed", next_step="Open the peer again.")
            yield self.runtime

    @contextmanager
    def writing(self) -> Iterator[PartyRuntime]:
        with self.lock:
            self.runtime.check_writable()
            yield self.runtime

    def check_open(self) -> None:
        self.runtime.check_writable()

    @property
    def title(self) -> str:
        """The title as the members set it last; setting it is a write like any other."""
        with suppress(Corrupt):  # of a page that is lost, which the status says
            system = self.system_item
            value = system.get("title") if system is not None else None
            if isinstance(value, str):
                return value
        return self._title

    @title.setter
    def title(self, title: str) -> None:
        check_title(title)
        system = self.system_item
        if system is None:
            raise Refused("the party's system item is not here yet", next_step="Wait until a member has sent it.")
        system["title"] = title

    def remember_title(self) -> None:
        """Keep the title where parties are listed and found by title without being opened; the peer calls it at open."""
        if self.peer.read_only or self.peer.opened(self.key) is not self:
            return
        title = None
        with suppress(Corrupt), self.reading() as runtime:  # by its row: opening a party decodes no item
            system = runtime.processor.system_item
            row = runtime.source.row(system) if system is not None else None
            title = row.values.get("title") if row is not None else None
        if not isinstance(title, str) or title == self._title:
            return
        self._title = title
        try:
            self.peer.meta.put_party(replace(self.peer.meta.party(self.key), title=title))
            self.runtime.feeds.set_about({"title": title.encode()})  # what is left where meta.db is lost
        except StorageFailed as error:  # the title itself is in the feeds, and the next open comes here again
            _log.warning("the title of party %s could not be kept for listings: %s", self.key.hex()[:8], error.what)

    def _retitle(self, changed: set[ItemId], delivered: "list[Delivered]") -> None:
        """After each applied batch."""
        if self._system_id is None:
            self._system_id = self.runtime.processor.system_item
        if self._system_id in changed:
            self.remember_title()

    @property
    def system_item(self) -> PropertySetItem | None:
        """The root of the item DAG; the party's title and shared settings are its properties."""
        with self.reading() as runtime:
            item = runtime.processor.system_item
            if item is None or runtime.state.record(item) is None:
                return None
            return PropertySetItem(self, item)

    # making items

    def create(
        self,
        model: Any = None,
        properties: Mapping[str, Value] | None = None,
        /,
        *,
        type: str = "",
        parent: Item | None = None,
        **more: Value,
    ) -> Any:
        """Make an item. The model is a name ("property-set" if none is given), `name@version`, a registered class, or an
        instance of a dataclass with a schema.

        `type` and `parent` are the item's own; every other keyword is a property. A mapping gives properties of any
        name, also of these two: `create("property-set", {"type": "saloon"}, type="car")`.
        """
        given = merge_properties(properties, more)
        if model is not None and not isinstance(model, str):
            name = deprecated_name(given)
            return create_from_object(self, model, type=type, parent=parent, name=name, properties=given)
        if model is None and "model" in more and more["model"] in [known for known, _ in self.peer.models.names()]:
            raise UsageError(
                "`model` is a keyword here, and keywords are properties",
                next_step=f'Write create("{more["model"]}", ...) for the model, create(None, {{"model": ...}}) for a property.',
            )
        kind, version = self._model_named(PropertySet.name if model is None else model)
        name = ""
        if kind != PropertySet.name:
            name, version = deprecated_name(given), deprecated_version(kind, version, given)
        version = self._registered_version(kind) if version is None else version
        if given and (kind, version) != (PropertySet.name, PropertySet.version):
            shown = kind if kind != PropertySet.name else f"{kind}@{version}"
            raise UsageError(f"a {shown} takes no properties", next_step="Put them into a property-set.")
        return self._create(kind, version, type=type, parent=parent, name=name, properties=given)

    def _model_named(self, text: str) -> tuple[str, int | None]:
        """The model and, of `name@version`, the version."""
        kind, at, version = text.rpartition("@")
        if not at or self.peer.models.latest(text) is not None:
            return text, None
        if not (version.isascii() and version.isdigit()):
            raise UsageError(f"a model version is a number from 1, not {version!r:.40}")
        return kind, int(version)

    def _registered_version(self, model: str) -> int:
        known = self.peer.models.latest(model)
        if known is None:
            names = ", ".join(sorted({known for known, _ in self.peer.models.names()}))
            raise UsageError(f"the model {model!r} is not registered", next_step=f"Known models: {names}.")
        return known

    def _create(
        self,
        model: str,
        version: int,
        *,
        type: str,
        parent: Item | None,
        name: str,
        properties: Mapping[str, Value],
        **more: Any,
    ) -> Any:
        if parent is not None:
            self.check_own(parent)
        with self.writing() as runtime:
            runtime.before_naming()
            _check_names(model, version, type)
            item = runtime.next_item()
            depth = 0 if runtime.data is None else runtime.data.next_depth
            where = None if parent is None else parent._record().item
            genesis = Genesis(item, model, version, type, where, depth, **more)
            inception = more.get("inception_key")
            if inception:
                self._check_unused(runtime, inception)
                key = self.peer.keys.key(inception)
                genesis = self._with_proof(genesis, key)
            operations = [ItemOperation(item, GENESIS, genesis)]
            changes = tuple(
                Set((key,), check_value(self._plain(value), where=key)) for key, value in properties.items()
            )
            if changes:
                if self.has_schemas:
                    self.schemas.check_new(type, {change.path[0]: change.value for change in changes})
                operations.append(ItemOperation(item, PropertySet.name, changes))
            elif self.has_schemas and model == PropertySet.name:
                self.schemas.check_new(type, {})
            if name:
                operations.append(ItemOperation(item, METADATA, (Set((NAME_KEY,), check_value(name)),)))
            runtime.operate(operations)
            return self.handle(item)

    def _with_proof(self, genesis: Genesis, key: SigningKey) -> Genesis:
        return replace(genesis, id_proof=sign_view(self.key, genesis.item, encode_genesis(genesis), key))

    def link(
        self,
        source: Item,
        target: Item | Reference,
        properties: Mapping[str, Value] | None = None,
        /,
        *,
        type: str = "link",
        **more: Value,
    ) -> Item:
        """A typed edge from an item to another, of this or another party. The link is itself an item. Its properties are
        given as to `create`."""
        self.check_own(source)
        end = self.reference_to(target) if isinstance(target, Item) else target
        if not isinstance(end, Reference):
            raise UsageError(f"a link leads to an item or a reference, not to {kind_of(end)}")
        end = end.seen_from(self.key)
        made: Item = self._create(
            PropertySet.name,
            PropertySet.version,
            type=type,
            parent=None,
            name="",
            properties=merge_properties(properties, more),
            source=source._record().item,
            target=end.item,
            target_party=end.party,
        )
        return made

    def create_view(
        self,
        view_class: str,
        display_name: str,
        properties: Mapping[str, Value] | None = None,
        /,
        *,
        parent: Item | None = None,
        inception_key: bytes | None = None,
        **more: Value,
    ) -> PropertySetItem:
        """A view: an item that an inception key names and proves, found by its class. Its further properties are given as
        to `create`; a new inception key is made unless one of `peer.new_view_key()` is given. A key names one view for good,
        also a deleted one, until an epoch discards that."""
        key = deprecated_key(inception_key, more)
        own = {"view_class": view_class, "display_name": display_name}
        given = merge_properties(own, merge_properties(properties, more))
        arguments.text(display_name, "a display name")
        if not self.peer.view_classes.known(arguments.text(view_class, "a view class")):
            raise UsageError(
                f"the view class {view_class!r} is not registered",
                next_step="Register it with peer.view_classes.register(...).",
            )
        inception = self.peer.new_view_key() if key is None else arguments.key(key, "an inception key")
        made: PropertySetItem = self._create(
            PropertySet.name,
            PropertySet.version,
            type="view",
            parent=parent,
            name=display_name,
            properties=given,
            inception_key=inception,
        )
        return made

    def _check_unused(self, runtime: PartyRuntime, inception_key: bytes) -> None:
        """Refuse an inception key that an item of the party has: all peers would reject the genesis of a second one."""
        records = map(runtime.state.record, runtime.views())
        named = (each.item for each in records if each is not None and each.genesis.inception_key == inception_key)
        item = next(named, None)
        if item is None:
            return
        short = inception_key.hex()[:8]
        if self.handle(item).deleted:
            raise Refused(
                f"the inception key {short} names a view that was deleted",
                next_step=f'Restore it with party.get("{item_text(item)}").restore(), or create a view with another key.',
            )
        raise Refused(
            f"there is a view with the inception key {short} already",
            next_step="Open that view, or create one with another key.",
        )

    def views(self, view_class: str | None = None) -> list[PropertySetItem]:
        """The party's views, of one class if given."""
        with self.reading() as runtime:
            found: dict[bytes, tuple[int, ItemId]] = {}
            for item in runtime.views():
                record = runtime.state.record(item)
                assert record is not None
                if not isinstance(record.model, PropertySet):
                    continue  # somebody put an inception key on something else
                key = record.genesis.inception_key
                best = found.get(key)
                if best is None or (record.genesis.depth, item) < best:
                    found[key] = (record.genesis.depth, item)
            handles = [PropertySetItem(self, item) for _, item in sorted(found.values())]
        return [view for view in handles if not view.deleted and view_class in (None, view.get("view_class"))]

    def find_view(self, inception_key: bytes) -> PropertySetItem | None:
        return next((view for view in self.views() if view._record().genesis.inception_key == inception_key), None)

    # finding items

    def handle(self, item: ItemId) -> Item:
        """A handle of the right kind; the item must be here."""
        record = self.runtime.state.record(item if type(item) is bytes else arguments.item_id(item))
        if record is None:
            arguments.item_id(item)
            raise NotFound(f"item {item_text(item)[:8]} is not in the party")
        model = record.model
        if getattr(model, "opaque", False):
            return CustomItem(self, item)
        return HANDLES.get(record.genesis.model, CustomItem)(self, item)

    def has(self, item: ItemId) -> bool:
        with self.reading() as runtime:
            return runtime.state.record(arguments.item_id(item)) is not None

    def get(self, item: ItemId | str | Reference) -> Any:
        """An item by id, id text (any unique prefix of at least four digits), reference or locator."""
        with self.reading() as runtime:
            if isinstance(item, Reference):
                if item.seen_from(self.key).party is not None:
                    raise NotFound(
                        "the reference leads to another party", next_step="peer.resolve(str(reference)) follows it."
                    )
                item = item.item
            if not isinstance(item, (str, bytes)):
                raise UsageError(f"an item is named by its id, not by {kind_of(item)}")
            if isinstance(item, bytes):
                return self.handle(arguments.item_id(item))
            text = item.strip()
            if text.startswith("echo://"):
                party, text = parse_locator(text)
                if party != self.key:
                    raise NotFound("the locator names another party")
            if len(text) == 2 * KEY_BYTES and is_hex(text):
                view = self.find_view(bytes.fromhex(text))
                if view is None:
                    raise NotFound(f"no view with the inception key {text[:8]} is in the party")
                return view
            return self.handle(self._by_text(runtime, text.lower()))

    def _by_text(self, runtime: PartyRuntime, text: str) -> ItemId:
        if len(text) == 2 * ITEM_ID_BYTES:
            try:
                return item_from_text(text)
            except ValueError:
                raise UsageError(f"{text!r} is not an item id") from None
        if len(text) < 4 or not is_hex(text):
            raise UsageError(f"{text!r} is not an item id", next_step="Give at least four hex digits.")
        found = [item for item in runtime.all_items() if item_text(item).startswith(text)]
        if not found:
            raise NotFound(f"no item starts with {text}")
        if len(found) > 1:
            raise UsageError(f"{len(found)} items start with {text}", next_step="Give more digits.")
        return found[0]

    def handles(self, items: Iterable[ItemId], *, deleted: bool) -> list[Item]:
        """Handles of items that are here; those that were deleted, or hang below one that was, only if wanted."""
        with self.reading() as runtime:
            return [self.handle(item) for item in items if deleted or not runtime.source.hidden(item)]

    def items(self, *, deleted: bool = False) -> list[Item]:
        """All items but the system item, in the order of their ids; deleted ones only if asked for."""
        with self.reading() as runtime:
            return self.handles(
                (item for item in runtime.all_items() if not runtime.source.is_system(item)), deleted=deleted
            )

    def roots(self, *, deleted: bool = False) -> list[Item]:
        """Items that hang below the system item; deleted ones only if asked for."""
        with self.reading() as runtime:
            return self.handles(
                (item for item in runtime.source.roots() if not runtime.source.is_system(item)), deleted=deleted
            )

    def is_deleted(self, item: ItemId) -> bool:
        """Whether an item or anything it hangs below was deleted."""
        with self.reading() as runtime:
            at: ItemId | None = arguments.item_id(item)
            while at is not None:
                record = runtime.state.record(at)
                if record is None:
                    return False
                if record.deleted:
                    return True
                at = runtime.state.home(at)
            return False

    def query(self, /, type: str | type[Any] | None = None, **equals: Value) -> Query[Any]:
        """A query over the items, of one type if given (a name or a dataclass); see docs/queries.md."""
        if self.has_schemas:
            self.schemas.declare_indexes()
        return query_over(self.live, type=None if type is None else schema_type(type), **equals)

    def index(self, *names: str) -> None:
        """Declare properties that queries filter on often: they get an index."""
        arguments.texts(names, "names of properties")
        with self.writing() as runtime:
            runtime.declare(names)
            self.peer.meta.set_setting("declared", sorted(runtime.declared), party=self.key)

    # writing

    def batch(self) -> AbstractContextManager[None]:
        """Everything written inside is one message: delivered together, shown together, undone together."""
        return self._batch()

    @contextmanager
    def _batch(self) -> Iterator[None]:
        with self.writing() as runtime, runtime.batch():
            yield

    def seal(self) -> None:
        """Turn edits in place into a message, unless a batch is open."""
        if not self.runtime.in_batch:
            self.runtime.seal_edits()

    def flush(self) -> Receipt:
        """Make everything written so far durable."""
        with self.reading() as runtime:
            runtime.check_sound()
            runtime.flush()
            own = runtime.data
            feed = own.cursor.key if own else b""
            return Receipt(self, runtime.anchor(), feed, own.cursor.length if own else 0)

    def undo(self) -> bool:
        """Take back the last batch that this device wrote and has not taken back; False when there is none."""
        from echostore.peer.undo import undo

        with self.writing() as runtime:
            return undo(runtime)

    def redo(self) -> bool:
        """Put back what the last undo took; False when there is none."""
        from echostore.peer.undo import redo

        with self.writing() as runtime:
            return redo(runtime)

    # positions and the past

    @property
    def timeframe(self) -> Timeframe:
        """What of the data feeds is in the state."""
        with self.reading() as runtime:
            return runtime.processor.timeframe

    def anchor(self) -> Anchor:
        """The position after everything processed so far; flushes first, so that it lasts."""
        with self.reading() as runtime:
            if runtime.writable:
                runtime.flush()
            return runtime.anchor()

    def stream(self, after: Anchor | str | None = None) -> Stream:
        """The delivered messages after an anchor, in causal order."""
        return Stream(self, after)

    def refresh(self) -> bool:
        """In a read-only peer: take in what the process that writes the home has written since; False if nothing."""
        return refresh(self)

    def as_of(self, moment: Any) -> "Party":
        """The party at a timeframe, anchor or time, read-only."""
        from echostore.peer.history import party_as_of

        return party_as_of(self, moment)

    def snapshot(self) -> Snapshot:
        """The content-addressed state. Its CID is equal on every peer with an equal timeframe and admission."""
        with self.reading() as runtime:
            return take_snapshot(runtime)

    def open_snapshot(self, cid: str) -> Snapshot:
        """A snapshot that was taken here before: load one item, one view or all of it."""
        with self.reading() as runtime:
            return open_snapshot(runtime, arguments.text(cid, "a CID"))

    # members

    @property
    def members(self) -> "Members":
        from echostore.peer.members import Members

        return Members(self)

    @property
    def files(self) -> "Files":
        """Content that properties point to."""
        from echostore.peer.files import Files

        return Files(self)

    def invite(
        self,
        role: str = "editor",
        *,
        key: bytes | None = None,
        uses: int = 1,
        expires_s: float = 600.0,
        open: bool = False,
    ) -> "Invitation":
        """A ticket for a guest, and a passcode to be told by another way; none where the guest's key is named or the
        invitation is `open`, which any admin honours. The peer must listen."""
        inviting = self.peer.network.inviting
        return inviting.invite(self, role=role, key=key, uses=uses, expires_s=expires_s, open=open)

    def child_parties(self) -> list[tuple[PartyKey, str]]:
        """The light-weight parties that members made below this one, with their titles at that time."""
        with self.reading() as runtime:
            return list(runtime.processor.membership.machine.children)

    # schemas and models

    @property
    def has_schemas(self) -> bool:
        return self.runtime.schema_count > 0

    def check_schema(self, record: ItemRecord, changes: tuple[Change, ...]) -> None:
        self.schemas.check_change(record, changes)

    def publish_model(self, model: type[Any]) -> PublishedModel:
        """Tell the members which model the party's items use: its descriptor, never its code."""
        return publish_model(self, model)

    def published_models(self) -> list[PublishedModel]:
        return published_models(self)

    # forks and replication

    @property
    def sync_port(self) -> PartySyncPort:
        """This party as replication sees it."""
        if self._sync_port is None:
            self._sync_port = PartySyncPort(self)
        return self._sync_port

    def report_forks(self) -> int:
        """Tell the party of forks found here that it does not know yet; returns how many were told."""
        with self.reading() as runtime:
            if not runtime.writable or runtime.control is None:
                return 0
            known = runtime.processor.membership.machine.forks
            fresh = [proof for proof in runtime.feeds.forks() if known.get(proof.feed, proof.seq + 1) > proof.seq]
            opener = self.peer.opener
            for proof in fresh:
                runtime.issue([opener.sign(self.key, ForkEvidence(proof), identity=opener.identity_in(self))])
            return len(fresh)

    # telling

    @property
    def status(self) -> PartyStatus:
        """What is where: per feed held, processed and known; own blocks no one else holds; rejects."""
        return party_status(self)

    def rejected(self) -> list[Reject]:
        """Everything that did not enter the state, with its reason; also operations that an application's model refuses."""
        with self.reading() as runtime:
            refused = model_rejects(runtime, self.peer.models) if not runtime.processor.closed else []
            return sorted((*runtime.processor.rejects(), *refused))

    def revive(self, item: Any, *, dry_run: bool = False) -> "Revived":
        """Make an item anew that an epoch discarded, with what was written to it since; Compacted where nobody has it."""
        from echostore.peer.reviving import revive

        return revive(self, item, dry_run=dry_run)

    def acknowledge(
        self, device: bytes, lengths: Mapping[bytes, int], processed: Mapping[bytes, int] | None = None
    ) -> None:
        """Another peer says how much it holds durably, and how much of that it has applied."""
        with self._changed:
            self._elsewhere.acknowledge(device, lengths, processed or {})
            self._changed.notify_all()

    def elsewhere(self, feed: bytes) -> list[HeldElsewhere]:
        """What other devices said of a feed."""
        with self.lock:
            return self._elsewhere.of(feed)

    def acknowledged(self, feed: bytes, length: int) -> int:
        """How many other peers said that they hold a feed up to a length."""
        with self.lock:
            return self._elsewhere.holders(feed, length)

    def shared_length(self, feed: bytes) -> int:
        """Up to which length some other peer said it holds a feed."""
        with self.lock:
            return self._elsewhere.shared_length(feed)

    def known_length(self, feed: bytes) -> int:
        """The greatest length of a feed that anyone announced."""
        with self.lock:
            return self._elsewhere.known_length(feed)

    def known_feeds(self) -> set[bytes]:
        with self.lock:
            return self._elsewhere.feeds()

    def announced(self, feed: bytes, length: int) -> None:
        with self.lock:
            self._elsewhere.announce(feed, length)

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition over this party holds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    @property
    def admitted(self) -> bool:
        """Whether the state here lets this device write; where its member is a reader, whether there is a state to read."""
        with self.reading() as runtime:
            if runtime.takes_writes:
                return True
            reader = standing_of(runtime) == Role.READER.label and not runtime.processor.closed
            return reader and self.system_item is not None

    def wait_admitted(self, timeout: float | None = None) -> None:
        """Wait until this device is `admitted`: `join` has done so unless it was called with `wait=False`.

        Refused when this device was removed meanwhile, TimedOut or Unreachable when its admission does not come.
        """
        gone = (REMOVED, REVOKED)
        self.wait_for(lambda: self.admitted or standing_of(self.runtime) in gone, timeout)
        with self.reading() as runtime:
            if self.admitted:
                return
            standing = standing_of(runtime)
        if standing in gone:
            raise Refused(f"this device can't use the party: {standing}", unchanged="")
        lacks = "nothing of the party's data" if standing else "no admission of this device"
        left = {
            "unchanged": "The party is in this home; it need not be joined again.",
            "next_step": "Keep this peer running (`echostore serve`): the rest comes once a member can be reached.",
        }
        if not self.peer.on_network or not self.peer.network.connected_members(self.key):
            raise Unreachable(f"no member of the party is connected, and {lacks} has arrived here", **left)
        raise TimedOut(f"{lacks} has arrived here in {timeout:g} s", **left)

    @property
    def arrived(self) -> bool:
        """Whether another peer is known to hold what this device admits itself with; true for a device that others admit.

        Until then nothing that it writes counts anywhere else.
        """
        with self.reading() as runtime:
            own = runtime.control
            return own is None or not own.cursor.length or self.shared_length(own.cursor.key) > 0

    def wait_arrived(self, timeout: float | None = None) -> None:
        """Wait until this device's admission has `arrived` at another peer; TimedOut or Unreachable when it does not."""
        if self.wait_for(lambda: self.arrived, timeout):
            return
        left = {
            "unchanged": "The party is in this home, and what is written here stays here until then.",
            "next_step": "Keep this peer running (`echostore serve`), or connect to another member.",
        }
        if not self.peer.on_network or not self.peer.network.connected_members(self.key):
            raise Unreachable("no member is connected that could take the admission of this device", **left)
        raise TimedOut(f"no member has taken the admission of this device in {timeout:g} s", **left)

    @property
    def heard_from_others(self) -> bool:
        """Whether any other device has said what it holds."""
        with self.lock:
            return bool(self._elsewhere.devices())

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # life

    def close(self) -> None:
        """Make all durable and release the party; other parties of the peer stay open."""
        self.peer.close_party(self.key)

    def pause(self) -> None:
        """Hold new blocks without processing them, also after a restart, until `resume`."""
        self.peer.pause_party(self.key)

    # for handles

    def check_own(self, item: Item) -> None:
        if not isinstance(item, Item):
            raise UsageError(
                f"an item is wanted here, not {kind_of(item)}", next_step="party.get(...) gives one for an id."
            )
        if item.party.key != self.key:
            raise UsageError(
                "the item belongs to another party", next_step="Refer to it by a property or a link instead."
            )

    def reference_to(self, item: Item) -> Reference:
        """A reference to an item, naming its party when that is another one."""
        arguments.instance(item, Item, "what is referred to")
        return Reference(item.id, None if item.party.key == self.key else item.party.key)

    def _plain(self, value: Value) -> Value:
        return plain_references(self, value)

    def __repr__(self) -> str:
        return f"<party {self.key.hex()[:8]} {self._title!r}>"


def is_hex(text: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in text)


def _check_names(model: object, version: object, type: object) -> None:
    """What every peer checks when it reads a genesis, before it is written."""
    for name, what in ((model, "model"), (type, "type")):
        check_value(name, where=what)
        if not isinstance(name, str) or len(name) > NAME_CHARACTERS_MAX:
            raise UsageError(f"a {what} is text of at most {NAME_CHARACTERS_MAX} characters")
    if type == SYSTEM_TYPE:
        raise UsageError(f"the type {SYSTEM_TYPE!r} is the party's own", next_step="Choose another type.")
    if isinstance(version, bool) or not isinstance(version, int) or not 0 < version < 1 << 32:
        raise UsageError(f"a model version is a number from 1, not {version!r}")
