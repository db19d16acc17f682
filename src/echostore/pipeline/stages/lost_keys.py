"""LostKeys: inception keys as the fold of one item sees them. `view_claims` finds out who lost a key."""

from echostore.kernel.ids import ItemId
from echostore.kernel.items.record import Genesis


class LostKeys:
    """What folding one item asks about inception keys: `lost` are the items that another one took the key from."""

    def __init__(self, lost: frozenset[ItemId]) -> None:
        self._lost = lost

    def note(self, genesis: Genesis) -> set[ItemId]:
        return set()

    def holder(self, genesis: Genesis) -> ItemId | None:
        return None if genesis.item in self._lost else genesis.item
