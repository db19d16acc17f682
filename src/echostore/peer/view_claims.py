"""The claims to inception keys in a live party: which blocks hold the genesis of a view with each key.

    in memory      what this process has seen or loaded
    ItemStore      `touches` at the key's place (`view_place`): blocks that earlier processes folded
    base epoch     the item under the key's place

Which of them count is asked of the admission each time, so that nothing is to be renewed when it changes.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from echostore.kernel.ids import ItemId
from echostore.kernel.items.operations import GENESIS, ItemOperation
from echostore.kernel.items.record import Genesis
from echostore.kernel.items.view_claims import Claim, key_holder
from echostore.kernel.snapshot import view_place
from echostore.wire.base_epoch import BaseEpoch

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor


def names_a_view_of(base: BaseEpoch, operations: Iterable[ItemOperation]) -> bool:
    """Whether some of these operations claim an inception key that an epoch has a view under."""
    return any(base.view(key) is not None for key in _keys(operations))


def _keys(operations: Iterable[ItemOperation]) -> set[bytes]:
    return {each.body.inception_key for each in operations if each.field == GENESIS and each.body.inception_key}


class PartyViewClaims:
    """The claims of one processor."""

    def __init__(self, processor: "PartyProcessor") -> None:
        self._processor = processor
        self._known: dict[bytes, dict[ItemId, Claim]] = {}

    def note(self, genesis: Genesis) -> set[ItemId]:
        known = self._of(genesis.inception_key)
        if genesis.item in known:
            return set()
        others = set(known)
        claim = known[genesis.item] = Claim(genesis.depth, genesis.item)
        self._processor.touches.append((view_place(genesis.inception_key), claim.feed, claim.seq))
        return others

    def holder(self, genesis: Genesis) -> ItemId:
        counting = (claim for claim in self._of(genesis.inception_key).values() if self._counts(claim))
        base = self._processor.base
        in_base = None if base is None else base.view(genesis.inception_key)
        found = key_holder([Claim(genesis.depth, genesis.item), *counting], in_base=in_base)
        assert found is not None, genesis
        return found

    def concerned(self, operations: Iterable[ItemOperation]) -> set[ItemId]:
        """The items that claim the same inception keys as these operations."""
        return {item for key in _keys(operations) for item in self._of(key)}

    def forget(self) -> None:
        """The blocks above the base are about to be processed from the start."""
        self._known.clear()

    def _of(self, key: bytes) -> dict[ItemId, Claim]:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = {claim.item: claim for claim in self._stored(key)}
        return known

    def _stored(self, key: bytes) -> Iterator[Claim]:
        processor = self._processor
        if processor.items is None:
            return
        for feed, seq in processor.items.touches(view_place(key)):
            if seq < processor.base_length(feed):
                continue  # the base has decided about it
            for item, field, body in processor.operations_at(feed, seq):
                if field == GENESIS and body.inception_key == key:
                    yield Claim(body.depth, item)

    def _counts(self, claim: Claim) -> bool:
        processor = self._processor
        above = claim.seq >= processor.base_length(claim.feed)
        return above and processor.writer(claim.feed, claim.seq) is not None
