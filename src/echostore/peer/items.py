"""Item: the handle of any item. One class per model (`item_kinds`); a handle names an item and keeps no state.

A handle stays valid for as long as its party is open, whatever happens to the item. Reading shows the state as it is
now; writing goes through the party, so that it lands in the open batch or in a message of its own.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from echostore.kernel.errors import EchoError, ModelFailed, NotFound, Refused, UsageError
from echostore.kernel.frozen import FrozenDict, frozen
from echostore.kernel.ids import IdentityKey, ItemId, Stamp, item_text
from echostore.kernel.items.operations import METADATA, PLACEMENT, ItemOperation
from echostore.kernel.items.record import (
    ACCESS_KEY,
    DELETED_AT_KEY,
    DELETED_KEY,
    FOREIGN_KEYS_KEY,
    NAME_KEY,
    ItemRecord,
)
from echostore.kernel.items.tree import EMBED, MOVE, UNEMBED
from echostore.kernel.limits import VALUE_DEPTH_MAX
from echostore.kernel.models.property_set import DELETED, Change, Set
from echostore.kernel.values import Reference, Value, check_path, check_value, kind_of, locator
from echostore.peer import arguments

if TYPE_CHECKING:
    from echostore.peer.history import Revision, ValueDiff
    from echostore.peer.model_fork import Convert
    from echostore.peer.party import Party
    from echostore.peer.streams import Stream

T = TypeVar("T")

ROLES = ("owner", "admin", "editor", "reader")


class Item:
    """Any item. Subclasses add what their model can do."""

    __slots__ = ("id", "party")

    def __init__(self, party: "Party", item: ItemId) -> None:
        self.party = party
        self.id = item

    # what it is

    @property
    def type(self) -> str:
        return self._record().genesis.type

    @property
    def model(self) -> str:
        return self._record().genesis.model

    @property
    def version(self) -> int:
        return self._record().genesis.version

    @property
    def locator(self) -> str:
        """`echo://<party>/<item>`; of a view, with its inception key."""
        genesis = self._record().genesis
        if genesis.inception_key:
            return f"echo://{self.party.key.hex()}/{genesis.inception_key.hex()}"
        return locator(self.id, self.party.key)

    @property
    def reference(self) -> Reference:
        return Reference(self.id, None, self.party.key)

    def value(self) -> Value:
        """The state as values; lists and maps in it are read-only."""
        with self.party.reading():
            return frozen(self._record().model.value())

    @property
    def failed(self) -> str | None:
        """Why the model gave up on this item, if it did."""
        try:
            self.value()
        except ModelFailed as error:
            return error.what
        return None

    # metadata

    @property
    def name(self) -> str:
        return self._record().name

    @name.setter
    def name(self, name: str) -> None:
        self._write_metadata(Set((NAME_KEY,), check_value(name, where="name")))

    @property
    def metadata(self) -> FrozenDict:
        """The metadata item: its properties, and `embedded_items`, which is derived from the tree. Read-only."""
        with self.party.reading():
            values = dict(self._record().metadata.value())
        values["embedded_items"] = [child.reference for child in self.embedded(deleted=True)]
        shown: FrozenDict = frozen(values)
        return shown

    def set_foreign_key(self, system: str, key: str) -> None:
        """Remember under which key another system knows this item."""
        path = check_path((FOREIGN_KEYS_KEY, system))
        self._write_metadata(Set(path, check_value(key, where="key")))

    @property
    def foreign_keys(self) -> FrozenDict:
        """Under which key other systems know this item; `set_foreign_key` sets one."""
        shown: FrozenDict = frozen(self._record().metadata.get((FOREIGN_KEYS_KEY,), {}))
        return shown

    @property
    def access(self) -> FrozenDict | None:
        """Who may write this item, when that is narrowed; `restrict` narrows it."""
        value = frozen(self._record().metadata.get((ACCESS_KEY,)))
        return value if isinstance(value, FrozenDict) else None

    def restrict(self, *, roles: list[str] | None = None, members: list[IdentityKey] | None = None) -> None:
        """Narrow who may write this item. Owners always may."""
        for role in arguments.texts(roles or [], "roles"):
            if role not in ROLES:
                raise UsageError(f"{role!r} is not a role", next_step=f"Roles are {', '.join(ROLES)}.")
        if not roles and not members:
            raise UsageError("name roles or members", next_step="Use unrestrict() to let everybody write again.")
        if members is not None and not isinstance(members, (list, tuple, set, frozenset)):
            raise UsageError(f"members are a list of identity keys, not {kind_of(members)}")
        named = sorted(arguments.key(member, "a member") for member in members or [])
        rule = {"roles": sorted(roles or []), "members": named}
        self._write_metadata(Set((ACCESS_KEY,), rule))

    def unrestrict(self) -> None:
        self._write_metadata(Set((ACCESS_KEY,), DELETED))

    # life

    @property
    def deleted(self) -> bool:
        """Whether it, or anything it hangs below, was deleted."""
        return self.party.is_deleted(self._record().item)

    def delete(self) -> None:
        """Hide the item and all that hangs below it. It can be restored until an epoch discards it."""
        self._write_metadata(Set((DELETED_KEY,), True), Set((DELETED_AT_KEY,), self.party.runtime.now_ms()))

    def restore(self) -> None:
        self._write_metadata(Set((DELETED_KEY,), DELETED), Set((DELETED_AT_KEY,), DELETED))

    def upgrade(self, version: int, convert: "Convert | None" = None) -> "Item":
        """Continue this item under another version of its model, as a new item; see docs/models.md."""
        from echostore.peer.model_fork import fork_item

        return fork_item(self, arguments.whole(version, "a model version", least=1), convert)

    # place

    @property
    def parent(self) -> "Item | None":
        """What it hangs below; None is the party's system item."""
        with self.party.reading():
            home = self.party.runtime.state.home(self._record().item)
        return None if home is None else self.party.handle(home)

    def children(self, *, deleted: bool = False) -> "list[Item]":
        """Items whose home this is; like queries, without deleted ones unless they are asked for."""
        with self.party.reading() as runtime:
            return self.party.handles(runtime.source.children(self._record().item), deleted=deleted)

    def embedded(self, *, deleted: bool = False) -> "list[Item]":
        """Its children and what is embedded in it besides; deleted ones as in `children`."""
        with self.party.reading() as runtime:
            return self.party.handles(runtime.source.embedded(self._record().item), deleted=deleted)

    def move(self, parent: "Item | None") -> None:
        """Give it another home; None is the party's system item."""
        self._place(MOVE, parent)

    def embed_in(self, parent: "Item") -> None:
        """Let it appear below a further parent, beside its home."""
        self._place(EMBED, parent)

    def unembed_from(self, parent: "Item") -> None:
        self._place(UNEMBED, parent)

    # links

    def link(
        self,
        target: "Item | Reference",
        properties: Mapping[str, Value] | None = None,
        /,
        *,
        type: str = "link",
        **more: Value,
    ) -> "Item":
        """A typed edge to another item, itself an item. The target may lie in another party."""
        return self.party.link(self, target, properties, type=type, **more)

    def links(self, type: str | None = None) -> "list[Item]":
        """Links that start or end here."""
        with self.party.reading():
            found = [self.party.handle(item) for item in self.party.runtime.source.links(self._record().item)]
        return [link for link in found if not link.deleted and type in (None, link.type)]

    @property
    def source(self) -> "Item | None":
        """Of a link: where it starts; None when that item is not here."""
        end = self._record().genesis.source
        return self.party.get(end) if end is not None and self.party.has(end) else None

    @property
    def target(self) -> "Item | None":
        """Of a link: where it leads; None when that item is not here, see `dangling`."""
        genesis = self._record().genesis
        if genesis.target is None:
            return None
        if genesis.target_party is not None:
            found: Item | None = self.party.peer.resolve(locator(genesis.target, genesis.target_party))
            return found
        return self.party.get(genesis.target) if self.party.has(genesis.target) else None

    @property
    def dangling(self) -> bool:
        """Of a link: whether an end is missing or deleted."""
        ends = (self.source, self.target)
        return any(end is None or end.deleted for end in ends)

    # the past

    def history(self) -> "list[Revision]":
        """Every message that wrote it: who, when, what."""
        from echostore.peer.history import item_history

        return item_history(self)

    def diff(self, before: Any, after: Any = None) -> "list[ValueDiff]":
        """What changed between two moments (anchors, timeframes, times); the second defaults to now."""
        from echostore.peer.history import item_diff

        return item_diff(self, before, after)

    def stream(self, after: Any = None) -> "Stream":
        """The messages that write this item, after an anchor."""
        from echostore.peer.streams import Stream

        return Stream(self.party, after, item=self.id)

    # inside

    def _record(self) -> ItemRecord:
        with self.party.reading():
            record = self.party.runtime.state.record(self.id)
        if record is None:
            raise not_here(self.id)
        found: ItemRecord = record
        return found

    def _write_metadata(self, *changes: Change) -> None:
        self._write(METADATA, tuple(changes))

    def _write(self, field: str, body: Any) -> None:
        with self.party.writing() as runtime:
            self._check_access(runtime)
            runtime.operate([ItemOperation(self.id, field, body)])

    def _check_access(self, runtime: Any) -> None:
        record = self._record()
        if not record.access:
            return
        writer = runtime.writer()
        rule = record.rule_at(HIGHEST)
        if rule is not None and writer.role != "owner" and not rule.allows(writer.role, writer.identity):
            raise Refused(f"item {item_text(self.id)[:8]} may be written by {_rule_text(rule)} only")

    def _place(self, kind: int, parent: "Item | None") -> None:
        where = None
        if parent is not None:
            self.party.check_own(parent)
            where = parent._record().item
        with self.party.writing() as runtime:
            self._check_access(runtime)
            if kind != UNEMBED and runtime.state.tree.forms_cycle(self.id, where):
                raise Refused("an item can't hang below itself, directly or through others")
            runtime.operate([ItemOperation(self.id, PLACEMENT, (kind, where))])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item) and other.id == self.id and other.party.key == self.party.key

    def __hash__(self) -> int:
        return hash((self.party.key, self.id))

    def __repr__(self) -> str:
        try:
            with self.party.reading():
                record = self.party.runtime.state.record(self.id)
        except EchoError as error:  # a repr is for logs and debuggers, also of what is closed or damaged
            return f"<item {item_text(self.id)[:8]}: {error.what}>"
        if record is None:
            return f"<item {item_text(self.id)[:8]}: not here>"
        label = record.genesis.type or record.genesis.model
        return f"<{label} {item_text(self.id)[:8]}{' deleted' if record.deleted else ''}>"


HIGHEST = Stamp(1 << 62, b"\xff" * 8, 1 << 62, 0)  # type: ignore[arg-type]  # above every real stamp


def not_here(item: ItemId) -> NotFound:
    """Why a handle or an id leads nowhere."""
    return NotFound(
        f"item {item_text(item)[:8]} is not in the party: it has not arrived, or the batch that made it was rolled back"
    )


def _rule_text(rule: Any) -> str:
    parts = sorted(rule.roles) + [member.hex()[:8] for member in sorted(rule.members)]
    return ", ".join(parts)


def plain_references(party: "Party", value: Value, depth: int = 0) -> Value:
    """Handles inside lists and maps become references. What is nested too deep is left for `check_value` to refuse."""
    if isinstance(value, Item):
        return party.reference_to(value)
    if isinstance(value, Reference):
        return value.seen_from(party.key)
    if depth > VALUE_DEPTH_MAX:
        return value
    if isinstance(value, dict):
        return {key: plain_references(party, inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_references(party, inner, depth + 1) for inner in value]
    return value
