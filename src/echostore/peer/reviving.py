"""Reviving an item that an epoch discarded: it is made anew, with what was written to it since and quarantined.

    epoch 3   has the item                        the newest snapshot with it, here or with a member that is connected
    epoch 4   left it out
    cat       writes to it, not having heard      quarantined: discarded
    revive    ─► a new item, forked_from = the old one: what epoch 3 has, with what cat wrote on top

The old item stays gone: who stands on the epoch has no place for it. So the new one has another id, and is written by
who revives it: posts of a log and edits of a text are that member's now. Who holds the whole history needs no snapshot,
and folds the item from its blocks. What hung below is revived one by one, the parent first.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from echostore.kernel.errors import Compacted, NotFound, Refused, UsageError
from echostore.kernel.ids import (
    ARC_BIT,
    ITEM_ID_BYTES,
    POSITION_BITS,
    Cid,
    ItemId,
    Stamp,
    item_creator,
    item_from_text,
    item_local,
    item_text,
)
from echostore.kernel.items.operations import GENESIS, PLACEMENT, Reject
from echostore.kernel.items.state import PartyState
from echostore.kernel.items.tree import MOVE
from echostore.kernel.order import DATA
from echostore.kernel.reasons import Reason
from echostore.kernel.values import parse_locator
from echostore.mesh.blob_exchange import Unavailable
from echostore.peer import arguments
from echostore.peer.asking_past import PATIENCE_S, why_alone
from echostore.peer.history import messages_of, without_parent
from echostore.peer.items import Item
from echostore.peer.made_anew import Anew, OldItem, Revived, made_of, short_id
from echostore.peer.older_epochs import first_known
from echostore.wire.base_epoch import BaseEpoch, holes_key
from echostore.wire.epochs import read_epoch_record

if TYPE_CHECKING:
    from echostore.peer.party import Party

EPOCHS_MAX: Final = 1024
"""Snapshots that are looked through for an item, the newest first."""
IN_VAIN_MAX: Final = 3
"""Snapshots that nobody had, after which only what is here is looked at: each costs the patience of who waits."""


def revive(party: "Party", item: Any, *, dry_run: bool = False) -> Revived:
    """Make a discarded item anew; with `dry_run` only tell what would come of it."""
    with party.writing() as runtime:
        runtime.flush()
        runtime.writer()
        wanted = _named(party, item)
        _check_gone(party, wanted)
    source = _newest_with(party, wanted)
    with party.writing():
        _check_gone(party, wanted)
        old = _fold(party, wanted, source)
        if old is None:
            raise NotFound(f"the blocks that made item {short_id(wanted)} are gone meanwhile", next_step="Try again.")
        return Anew(party, old).write(source.name.number if source is not None else None, dry_run=dry_run)


# which item


def _named(party: "Party", item: Any) -> ItemId:
    """By id, text, locator or a handle in the past; also by the first digits of what was quarantined for its sake."""
    if isinstance(item, Item):
        return item.id
    if not isinstance(item, str):
        return arguments.item_id(item)
    text = item.strip().lower()
    if text.startswith("echo://"):
        key, text = parse_locator(item.strip())
        if key != party.key:
            raise NotFound("the locator names another party")
    if len(text) == 2 * ITEM_ID_BYTES:
        try:
            return item_from_text(text)
        except ValueError:
            raise UsageError(f"{text!r} is not an item id") from None
    known = {reject.detail for reject in party.rejected() if reject.reason is Reason.DISCARDED}
    found = sorted(detail for detail in known if len(text) >= 4 and detail.startswith(text))
    if len(found) != 1:
        raise UsageError(
            f"{len(found) or 'no'} discarded items start with {text[:40]!r}",
            next_step="Give the whole id; `echostore party rejected --reason discarded` lists what was written to some.",
        )
    return item_from_text(found[0])


def _check_gone(party: "Party", item: ItemId) -> None:
    """Refused for an item that no epoch discarded, or that was revived before."""
    runtime = party.runtime
    record = runtime.state.record(item)
    if record is not None:
        raise Refused(
            f"item {short_id(item)} was not discarded: it is in the party" + (", deleted" if record.deleted else ""),
            next_step="`echostore item restore` brings a deleted item back." if record.deleted else "",
        )
    base, local = runtime.processor.base, item_local(item)
    inside = local & ARC_BIT or (base is not None and local >> POSITION_BITS < base.length(item_creator(item)))
    if base is None or not inside:
        raise Refused(f"item {short_id(item)} was not discarded: no epoch that this peer stands on could have had it")
    again = made_of(party, item)
    if again is not None:
        raise Refused(f"item {short_id(item)} was revived before, as {item_text(again.id)}")


# what it was


def _newest_with(party: "Party", item: ItemId) -> BaseEpoch | None:
    """The newest epoch whose snapshot has an item, here or with others; None where the whole history is here and has it."""
    with party.reading() as runtime:
        truncated = any(held.base for held in runtime.feeds.feeds() if held.kind == DATA)
        if not truncated and _fold(party, item, None) is not None:
            return None
    blobs, factory = _Blobs(party), party.runtime.processor.factory
    lacking: list[int] = []
    for number, snapshot in _snapshots(party, blobs):
        try:
            base = BaseEpoch.of_snapshot(number, snapshot, blobs.of(snapshot), factory)
            if base.record(item) is not None and base.moves is not None:  # which are here then, for who holds the lock
                return base
        except NotFound:
            lacking.append(number)
    if not lacking:
        raise NotFound(
            f"no epoch of the party has item {short_id(item)}", next_step="Ask a member that kept its history."
        )
    why = why_alone(party)
    asked = f"nobody was asked: {why}" if why else "nobody who is connected has the others"
    raise Compacted(
        f"no snapshot that is here has item {short_id(item)}, and {asked}",
        unchanged="No item was made. What came is kept.",
        next_step=f"Connect to a member that kept its history, or `echostore epoch fetch {lacking[0]} --from HOST:PORT`.",
    )


def _snapshots(party: "Party", blobs: "_Blobs") -> Iterator[tuple[int, Cid]]:
    """All epochs of the party, the newest first: those that control tells of, then those below by their records."""
    with party.reading() as runtime:
        epochs = party.peer.epochs(party.key)
        chain, first = epochs.chain(), first_known(runtime)
    yield from ((epoch.number, epoch.genesis.snapshot) for epoch in chain[: -EPOCHS_MAX - 1 : -1])
    cid = Cid(first.genesis.record) if first is not None else None
    for _ in range(EPOCHS_MAX - len(chain)):
        try:
            record = read_epoch_record(blobs.get(cid)) if cid is not None else None
        except NotFound:
            return
        if record is None:
            return
        if first is not None and record.number < first.number:
            yield record.number, record.snapshot
        cid = record.previous_record


class _Blobs:
    """Blobs that are here, or with members that are connected. The peer's lock must not be held."""

    def __init__(self, party: "Party") -> None:
        assert party.runtime.blobs is not None
        self._party, self._store = party, party.runtime.blobs
        self._alone = bool(why_alone(party))
        self._in_vain = 0

    def of(self, snapshot: Cid) -> Callable[[Cid], bytes]:
        """Gets blobs of a snapshot, of which only a part is going to be here."""

        def get(cid: Cid) -> bytes:
            if cid == snapshot and not self._alone and not self._store.has(snapshot):
                with self._party.reading() as runtime:
                    runtime.feeds.set_about({holes_key(snapshot): b"1"})
            return self.get(cid)

        return get

    def get(self, cid: Cid) -> bytes:
        if not self._alone and self._in_vain < IN_VAIN_MAX and not self._store.has(cid):
            try:
                self._party.peer.network.fetch(self._party.key, [cid], patience_s=PATIENCE_S)
                self._in_vain = 0
            except Unavailable:
                self._in_vain += 1
        return self._store.get(cid)


def _fold(party: "Party", item: ItemId, base: BaseEpoch | None) -> OldItem | None:
    """An item of a base, or of the party's beginning, with all that is here of what was written to it since."""
    runtime = party.runtime
    processor = runtime.processor
    state = PartyState(runtime.party, processor.factory, load=lambda _: None, identity_of=processor.identity_of)
    known = base.record(item) if base is not None else None
    places: list[tuple[Stamp, ItemId | None]] = []
    if known is not None and base is not None:
        state.restore([known], [])
        places += [(move.stamp, move.parent) for move in base.moves_of([item]) if move.kind == MOVE]
    parent = known.genesis.parent if known is not None else None
    for message in messages_of(runtime, item, base):
        for position, operation in enumerate(message.operations):
            stamp = Stamp(message.depth, message.feed, message.seq, position)
            if operation.item != item:
                continue
            if operation.field == PLACEMENT:
                places += [(stamp, operation.body[1])] if operation.body[0] == MOVE else []
                continue
            parent = operation.body.parent if operation.field == GENESIS else parent
            state.apply_operation(without_parent(operation), stamp, message.time_ms, message.writer)
    state.settle()
    record = state.records.get(item)
    if record is None:
        return None
    quarantined = [each for each in processor.rejects() if _concerns(each, item)]
    refused = {(each.feed, each.seq, each.position): each for each in state.rejects}
    lost = [refused[place] for each in quarantined if (place := (each.feed, each.seq, each.position)) in refused]
    old = OldItem(
        record, max(places, key=lambda place: place[0])[1] if places else parent, len(quarantined) - len(lost)
    )
    old.left += [
        f"operation {each.position} of block {each.seq} of feed {each.feed.hex()}: {each.reason}" for each in lost
    ]
    if base is not None and _has_gap(party, base):
        old.left.append(f"what was written between epoch {base.name.number} and where the blocks begin here")
    return old


def _concerns(reject: Reject, item: ItemId) -> bool:
    return reject.reason is Reason.DISCARDED and reject.detail == item_text(item)


def _has_gap(party: "Party", base: BaseEpoch) -> bool:
    """Whether blocks above an epoch are gone here: of what they wrote nobody can tell."""
    begins = {held.key: held.base for held in party.runtime.feeds.feeds() if held.kind == DATA}
    lengths = {cut.feed: cut.length for cut in base.cuts.values() if not cut.control}
    return any(base_at > lengths.get(key, 0) for key, base_at in begins.items())
