"""Issuing own text again: what this device wrote on top of edits that are excluded by now.

When blocks are excluded, updates that build on them are refused with them (`builds-on-excluded`), and the item is folded
again without. What this device inserted in such updates, and nobody whose blocks count has deleted, is written once
more, where it stood, as far as its surroundings are still there. The same goes for updates beside what an epoch discarded:

    bob   "shopping list: "                        excluded
    ann   "shopping list: milk"   inserts "milk"   refused, generation 0
    ann   "milk"                                   issued again, generation 1

Inside a text or list a writer is (feed, item, *generation*). Atoms of the refused updates keep their numbers for good, so
what comes after them is written under the next generation, also where nothing was left to issue again.

Exactly once: only this device writes to its feed, only updates of the highest generation in it are issued again, and the
message that does so has a higher one. So the feed itself says what was done, after a crash too. What can't be written now
(this device may not, or it does not fit one block) stays listed and is looked at again when the party is opened or who
belongs to it changes. So do deletes, sets, moves and marks, as far as others have not overtaken them
(`kernel.models.repeating`).
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from echostore.kernel.errors import DiskFull, Refused, TooLarge
from echostore.kernel.ids import FeedId, ItemId, Stamp
from echostore.kernel.items.operations import Reject
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.models._shared_sequence import SharedSequence
from echostore.kernel.models.change_graph import Atom, Delete
from echostore.kernel.models.repeating import repeat_edits
from echostore.kernel.order import DATA, Envelope
from echostore.kernel.reasons import Reason
from echostore.wire.base_epoch import BaseEpoch
from echostore.wire.messages import decode_envelope

if TYPE_CHECKING:
    from echostore.peer.runtime import PartyRuntime


class _Written(NamedTuple):
    """An own update of an item, and why it is not in the state, if it isn't."""

    update: Any
    reason: str | None


class Reissues:
    """Which generation this device writes each text and list under, and what it has to write again."""

    def __init__(self, runtime: "PartyRuntime") -> None:
        self._runtime = runtime
        self._generations: dict[ItemId, int] = {}
        self._look_at_all = True
        self._busy = False
        runtime.processor.on_admission.append(self._admission_moved)
        runtime.processor.after_finish = self.look
        runtime.on_space.append(self.look)

    def generation(self, record: ItemRecord) -> int:
        """Under which generation this device edits an item."""
        generation = self._generations.get(record.item)
        if generation is None:
            assert self._runtime.data is not None
            generation = 0
            while record.model.has_written(self._runtime.data.feed, generation + 1):
                generation += 1
            self._generations[record.item] = generation
        return generation

    def feed_changed(self) -> None:
        """This device writes to another feed from now on: there its generations begin anew."""
        self._generations.clear()

    def again(self, record: ItemRecord, lost: list[Any], content: Callable[[str], str]) -> bool:
        """Write again what own updates of a feed that was retired inserted; whether anything was to be written.

        `content` makes each piece what it is on the new feed.
        """
        written = False
        for generation in sorted({operation.generation for operation in lost}):
            ours = [operation for operation in lost if operation.generation == generation]
            written |= self._issue_again(record, ours, content)
        return written

    def look(self) -> None:
        """Issue again what was refused since the last look. Does nothing while a batch is open or writing is over."""
        runtime, processor = self._runtime, self._runtime.processor
        if self._busy or runtime.in_batch or runtime.data is None or not runtime.may_write:
            return
        if (processor.refolded or self._look_at_all) and not runtime.flush_if_space():
            return
        items, processor.refolded = processor.refolded, set()
        if not items and not self._look_at_all:
            return
        self._busy = True
        try:
            refused = self._refused_own()
            for item in [*refused] if self._look_at_all else [item for item in refused if item in items]:
                self._look_at(item, refused[item])
            for item in items - refused.keys():
                self._generations.pop(item, None)
            self._look_at_all = runtime.disk_full  # then once there is space
        finally:
            self._busy = False

    def _admission_moved(self) -> None:
        self._look_at_all = True

    def _refused_own(self) -> dict[ItemId, dict[tuple[int, int], Reject]]:
        """Own updates that are not in the state, by item and place."""
        runtime = self._runtime
        assert runtime.data is not None
        found: dict[ItemId, dict[tuple[int, int], Reject]] = {}
        for reject in runtime.processor.rejects():
            if reject.feed != runtime.data.feed or not self._held(runtime.data.feed, reject.seq):
                continue
            for position, operation in enumerate(runtime.processor.operations_at(runtime.data.feed, reject.seq)):
                if reject.position in (-1, position):
                    found.setdefault(operation.item, {})[reject.seq, position] = reject
        return found

    def _look_at(self, item: ItemId, refused: dict[tuple[int, int], Reject]) -> None:
        record = self._runtime.state.record(item)
        if record is None or not isinstance(record.model, SharedSequence):
            return
        written = self._written(record, refused)
        highest = max((own.update.generation for own in written), default=0)
        newest = [own for own in written if own.update.generation == highest]
        lost = [own.update for own in newest if own.reason in (Reason.BUILDS_ON_EXCLUDED, Reason.DISCARDED)]
        self._generations[item] = highest + any(own.reason is not None for own in newest)
        if lost:
            self._issue_again(record, lost)

    def _written(self, record: ItemRecord, refused: dict[tuple[int, int], Reject]) -> list[_Written]:
        """All own updates of an item, in their order."""
        runtime = self._runtime
        assert runtime.data is not None
        found = []
        for seq in sorted(runtime.processor.touched.seqs(record.item, runtime.data.feed, 0)):
            if not self._held(runtime.data.feed, seq):
                continue
            for position, operation in enumerate(runtime.processor.operations_at(runtime.data.feed, seq)):
                if operation.item == record.item and operation.field == record.model.name:
                    reject = refused.get((seq, position))
                    found.append(_Written(operation.body, reject.reason if reject else None))
        return found

    def _issue_again(
        self, record: ItemRecord, lost: list[Any], content: Callable[[str], str] = lambda piece: piece
    ) -> bool:
        writer = lost[-1].update[-1].writer
        if not self._runtime.flush_if_space():  # what this device wrote just now is read again too
            return False
        base = self._runtime.processor.base
        seen, deleted = self._with_excluded(record, writer, base)
        if base is not None and not seen.holds(lost[-1].update):
            # Made beside what the base discarded; what that was may still be here.
            seen, deleted = self._with_excluded(record, writer, None)
        if not seen.holds(lost[-1].update):
            return False  # it was refused for more than what is excluded: there is no text in which it stood
        try:
            with self._runtime.batch():
                self._runtime.edit(record)
                done = repeat_edits(record.model, seen, lost, deleted, content)
            self._runtime.flush_if_space()
        except (Refused, TooLarge, DiskFull):
            return False  # it stays listed as refused, and the next look tries again
        return done

    def _with_excluded(self, record: ItemRecord, writer: int, base: BaseEpoch | None) -> tuple[Any, set[Atom]]:
        """The item with all that is held of it above a base, excluded or not; and which atoms of a writer were deleted by
        others whose blocks count."""
        processor = self._runtime.processor
        assert self._runtime.data is not None
        entries: list[tuple[Any, Stamp, int]] = []
        deleted: set[Atom] = set()
        stored = base.record(record.item) if base is not None else None
        for feed, seq in processor.touched.places(frozenset({record.item})):
            if (base is not None and seq < base.length(feed)) or not self._held(feed, seq):
                continue  # the base has it, and what the base has is not excluded; or it is not here any more
            for body, stamp in self._updates(record, feed, seq):
                entries.append((body, stamp, 0))
                if feed != self._runtime.data.feed and processor.writer(feed, seq) is not None:
                    deleted.update(_deleted_atoms(body.update, writer))
        entries.sort(key=lambda entry: entry[1])
        seen = stored.model if stored is not None else type(record.model)(record.item)
        seen.apply_many(entries)
        return seen, deleted

    def _held(self, feed: FeedId, seq: int) -> bool:
        """Whether a block is here: it may lie below where its feed begins now."""
        processor = self._runtime.processor
        held = processor.feeds.feed(processor.feed_key(feed))
        return held.base <= seq < held.length

    def _updates(self, record: ItemRecord, feed: FeedId, seq: int) -> Iterable[tuple[Any, Stamp]]:
        processor = self._runtime.processor
        envelope = decode_envelope(processor.feeds.block(processor.feed_key(feed), seq).payload, DATA)
        assert isinstance(envelope, Envelope), (feed.hex(), seq)
        for position, operation in enumerate(processor.operations(feed, seq, envelope.body)):
            if operation.item == record.item and operation.field == record.model.name:
                yield operation.body, Stamp(envelope.depth, feed, seq, position)


def _deleted_atoms(update: Any, writer: int) -> Iterable[Atom]:
    for change in update:
        for run in change.runs:
            if isinstance(run, Delete) and run.writer == writer:
                for counter in range(run.counter, run.counter + abs(run.length)):
                    yield writer, counter
