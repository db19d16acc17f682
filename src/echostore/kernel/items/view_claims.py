"""Who holds an inception key: of all geneses that prove it, one makes the view and the others are refused.

A proof names its item, so only who has the private key can make one. Whoever signs twice, by mistake or on purpose, on
one device or on several that can't reach each other, gets one view, the same on every peer:

    1  the item that the base epoch has under the key     stable: nothing that comes later takes its key away
    2  else the first claim in canonical order            never one that was made with knowledge of another

Claims are the geneses, with a valid proof, of blocks that count. Whether the item then comes to exist (its parent may be
missing) does not matter: existence would depend on who holds the key, and who holds the key on existence.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from echostore.kernel.ids import POSITION_BITS, FeedId, ItemId, item_creator, item_local
from echostore.kernel.items.record import Genesis


class Claim(NamedTuple):
    """A genesis that proves an inception key. Sorts in canonical order: an item's id holds its feed and place."""

    depth: int
    item: ItemId

    @property
    def feed(self) -> FeedId:
        return item_creator(self.item)

    @property
    def seq(self) -> int:
        """Of the block that has the genesis: a view's id is the place of its genesis."""
        return item_local(self.item) >> POSITION_BITS


def key_holder(claims: Iterable[Claim], *, in_base: ItemId | None) -> ItemId | None:
    """The item that an inception key names; None when nobody claims it."""
    if in_base is not None:
        return in_base
    first = min(claims, default=None)
    return None if first is None else first.item


class ViewClaims(Protocol):
    """What a party's state asks about inception keys."""

    def note(self, genesis: Genesis) -> set[ItemId]:
        """A message has this genesis of a view. Returns the items that claimed its key before and are to be folded again."""
        ...

    def holder(self, genesis: Genesis) -> ItemId | None:
        """Who holds the key of a genesis, that genesis being one of the claims; None for somebody else."""
        ...


class SoleClaims:
    """Every view holds its key: for who folds single items, of which others have found out that they exist."""

    def note(self, genesis: Genesis) -> set[ItemId]:
        return set()

    def holder(self, genesis: Genesis) -> ItemId:
        return genesis.item
