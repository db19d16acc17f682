"""The record of an item: what its genesis said, its model's state, its metadata item, and who may write it."""

from dataclasses import dataclass, field
from typing import Any

from echostore.kernel.errors import ModelFailed
from echostore.kernel.ids import IdentityKey, ItemId, PartyKey, Stamp
from echostore.kernel.models.property_set import PropertySet
from echostore.kernel.values import Value

# Properties of a metadata item that the system itself reads.
DELETED_KEY = "deleted"
DELETED_AT_KEY = "deleted_at_ms"
"""When an item was deleted, by its deleter's clock: what an epoch's `discard_before` is compared with."""
NAME_KEY = "display_name"
ACCESS_KEY = "access"
FOREIGN_KEYS_KEY = "foreign_keys"


@dataclass(frozen=True, slots=True)
class Genesis:
    """What the operation that created an item said; never changes."""

    item: ItemId
    model: str
    version: int
    type: str
    parent: ItemId | None
    depth: int
    source: ItemId | None = None
    target: ItemId | None = None
    target_party: PartyKey | None = None
    inception_key: bytes = b""
    id_proof: bytes = b""
    forked_from: ItemId | None = None


@dataclass(frozen=True, slots=True)
class AccessRule:
    """Who may write an item: any of these roles, any of these members. None of either means everybody who may write."""

    roles: frozenset[str] = frozenset()
    members: frozenset[IdentityKey] = frozenset()

    def allows(self, role: str, member: IdentityKey) -> bool:
        return (not self.roles and not self.members) or role in self.roles or member in self.members


@dataclass(frozen=True, slots=True)
class AccessWrite:
    """A write of access metadata at its place in the canonical order: it rules over the operations above it."""

    stamp: Stamp
    rule: AccessRule


@dataclass(slots=True)
class ItemRecord:
    """One item in memory."""

    genesis: Genesis
    model: Any
    metadata: PropertySet
    access: list[AccessWrite] = field(default_factory=list)
    last: Stamp | None = None
    """The highest stamp folded in so far, as far as this process knows; not part of the state."""
    created_ms: int | None = field(default=None, compare=False)
    """When it was made, by its writer's clock, if this process saw that; for display and not part of the state."""

    @property
    def item(self) -> ItemId:
        return self.genesis.item

    @property
    def deleted(self) -> bool:
        return bool(self.metadata.layers) and self.metadata.get((DELETED_KEY,)) is True

    @property
    def name(self) -> str:
        value = self.metadata.get((NAME_KEY,)) if self.metadata.layers else None
        return value if isinstance(value, str) else ""

    def rule_at(self, stamp: Stamp) -> AccessRule | None:
        """The access rule in force at a place: the last one written below it in canonical order."""
        ruling = None
        for write in self.access:
            if write.stamp > stamp:
                break
            ruling = write.rule
        return ruling

    def values(self) -> dict[str, Value]:
        """What queries see: the properties, or the model's value under `value`; nothing when the model failed."""
        try:
            value = self.model.value()
        except ModelFailed:  # the item's own handle tells; a query over many items goes on
            return {}
        return value if isinstance(value, dict) else {"value": value}
