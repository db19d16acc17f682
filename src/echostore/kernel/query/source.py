"""What queries read: the rows and edges of one party.

The peer implements `Source` over its in-memory state and over the ItemStore. Its promises, on which live queries rely:

    S1  Edges agree from both ends: y in children(x) exactly when row(y).parent is x, and so for embedded and embedders,
        links and the ends of link rows, references and referrers.
    S2  Edges do not depend on `deleted`: a deleted item keeps its parent and children; the query's rule decides.
    S3  Values inside `Row.values` are never changed in place. The mapping itself may be a live one.
    S4  A query reads one state: the caller holds off writers while a query runs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from echostore.kernel.ids import FeedId, ItemId, PartyKey, Stamp
from echostore.kernel.values import Value

NOT_STAMPED = Stamp(0, FeedId(b""), 0, 0)

TimeOf = Callable[[ItemId], int | None]
"""The wall time at which an item was made, in milliseconds, as its writer's clock told; None when that is not known."""


def _no_time(item: ItemId) -> int | None:
    return None


class Deleted(StrEnum):
    """Which items a stage of a query lets through, by whether they are deleted."""

    HIDE = "hide"
    SHOW = "show"
    ONLY = "only"


@dataclass(frozen=True, slots=True)
class Row:
    """One item as queries see it. Models other than the property set have their value under the key "value"."""

    item: ItemId
    type: str
    model: str
    parent: ItemId | None
    deleted: bool
    values: Mapping[str, Value]
    source: ItemId | None = None
    target: ItemId | None = None
    target_party: PartyKey | None = None
    """Of a link whose target lives in another party; None for a target of this party."""
    created: Stamp = NOT_STAMPED
    view_class: str | None = None
    system: bool = False
    """Whether it is the party's system item."""
    time_of: TimeOf = _no_time
    """What tells when an item was made. Looked up when a query asks: the time is in the block and not in the state."""


class Source(Protocol):
    """The port behind every query."""

    def row(self, item: ItemId) -> Row | None:
        """The item's row; None when it is not here."""

    def scan(
        self, *, type: str | None, parent: ItemId | None, equals: Mapping[str, Value], deleted: Deleted
    ) -> Iterable[ItemId]:
        """A superset of the items that match all of these, as narrow as the indexes allow; None asks for nothing.

        `equals` holds top-level properties. Values are equal as in `order.order_key`: 3 equals 3.0 and differs from
        True. An index that can't tell must leave the condition out.
        """

    def children(self, item: ItemId) -> Iterable[ItemId]:
        """Items whose home parent it is."""

    def embedded(self, item: ItemId) -> Iterable[ItemId]:
        """Its children, and what is embedded in it besides."""

    def embedders(self, item: ItemId) -> Iterable[ItemId]:
        """Its home parent, and what it is embedded in besides."""

    def links(self, item: ItemId) -> Iterable[ItemId]:
        """Link items whose source or target (in this party) it is."""

    def references(self, item: ItemId) -> Iterable[ItemId]:
        """Items of this party that its values point to."""

    def referrers(self, item: ItemId) -> Iterable[ItemId]:
        """Items of this party whose values point to it."""
