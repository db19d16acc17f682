"""What text and list have in common: a loro document, operations that are checked before they enter it, canonical state.

    local edits  -> loro document -> seal()  -> operation (canonical changes)
    operation    -> check, then import -> loro document -> changes() -> canonical state

An operation names its changes in our own terms (`change_graph`), never in loro's binary form. Before any of it reaches
the document it is checked (numbered, so that tests can cite them):

    L1  every change is by the writer id of (feed, item, generation): FORGED_WRITER;
    L2  counters continue exactly where that writer left off; lower ones would re-issue atoms (FORGED_WRITER), higher
        ones build on an operation that never came in (BUILDS_ON_EXCLUDED);
    L3  every dependency was introduced below the operation in the canonical order (BUILDS_ON_EXCLUDED;
        `_introductions`), and together they are the smallest set that says the same (MALFORMED), so that there is one
        way to write a history;
    L4  runs are of this model's kinds, within range, and delete only what their writer had seen (MALFORMED);
    L5  positions are inside the sequence as the writer had it, and where it had seen a mark deletes hit the atoms they
        name (MALFORMED; `_positions`);
    L6  where an epoch discarded history, every change is made on all of that, and of what stood there (DISCARDED).

Each depends on the operation and on accepted ones below it, so every replica answers alike in every order: as if it had
folded one by one in canonical order. Loro then checks the ids of list elements and takes all of an import or nothing.
Should it panic instead, the document is lost and built again from a journal, and the operation is refused like any
other.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import msgspec

from echostore.kernel.errors import Corrupt, ModelFailed
from echostore.kernel.ids import FeedId, ItemId, Stamp
from echostore.kernel.models._datings import Dated, Datings
from echostore.kernel.models._ground_numbers import GroundNumbers
from echostore.kernel.models._introductions import AtomMissing, IntroductionRows, Introductions
from echostore.kernel.models._laying_ground import PROBE, critical_ends, lay_ground
from echostore.kernel.models._loro import Element, ElementId, LoroDocument, Version, placings
from echostore.kernel.models._positions import Positions
from echostore.kernel.models._room import gain
from echostore.kernel.models._run_checks import check_run
from echostore.kernel.models._writer_views import WriterViews
from echostore.kernel.models.base import NO_WAIT, Horizon, OperationRefused, Wait
from echostore.kernel.models.change_graph import (
    COUNTER_END_MAX,
    Atom,
    Change,
    ChangeGraph,
    Delete,
    InsertText,
    Run,
    atom_count,
)
from echostore.kernel.models.ground import Ground
from echostore.kernel.models.stand_ins import Originals, StandIn, stand_ins
from echostore.kernel.reasons import Reason

GENERATION_MAX = (1 << 32) - 1
JOURNAL_RUNS_MIN = 256
JOURNAL_SHARE = 64
"""A new base is taken when the journal has more runs than the first, and than a share of all atoms: so taking one, which
costs as much as the document is large, stays below 2 us for each operation."""

_WRITER_DOMAIN = b"echostore/writer/1"
_NO_WRITER = (1 << 64) - 1
"""Loro keeps the highest id for elements it does not know."""


def writer_id(feed: FeedId, item: ItemId, generation: int) -> int:
    """Who a feed is inside the document of an item."""
    digest = hashlib.sha256(_WRITER_DOMAIN + feed + item + generation.to_bytes(4, "big")).digest()
    return min(max(int.from_bytes(digest[:8], "big"), PROBE + 1), _NO_WRITER - 1)


class _Native(msgspec.Struct, array_like=True):
    """What the ItemStore keeps of a document: loro's own snapshot, and what that does not know."""

    document: bytes
    introductions: IntroductionRows
    first_marks: dict[int, int]
    dated: tuple[Dated, ...]
    ground: Ground | None


class _NeedsImport(Exception):
    """A question about the causal graph that loro can answer only after the batch so far has been imported."""


class SharedSequence:
    """A model whose state is a sequence in a loro document. Subclasses give the container, the kinds of runs and the editing calls."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    edits_in_place: ClassVar[bool] = True
    """Local edits are in the state before they are sealed, so own operations are not applied again."""
    _container: ClassVar[str]
    _run_kinds: ClassVar[frozenset[type]]
    _marked_root: ClassVar[str] = ""
    """The root of a text that may have marks; none in other models."""

    def __init__(self, item: ItemId, document: LoroDocument | None = None, base: bytes | None = None) -> None:
        self.item = item
        self._document = document or LoroDocument(self._container)
        self._base = base  # the document before the journal
        self._journal: list[Change] = []  # what has come in since
        self._journal_runs = 0
        self._journal_runs_max = JOURNAL_RUNS_MIN
        self._ends: dict[int, int] = (
            self._document.ends() if document else {}
        )  # writer -> counter after its last sealed or applied atom
        self._introductions = Introductions()
        self._datings = Datings()
        self._ground_refused = False  # by the last `discard`
        self._gained = 0  # room that what is sealed and has no stamp yet makes
        self._positions = Positions(self._marked_root)
        self._views = WriterViews()
        self._writer_ids: dict[tuple[FeedId, int], int] = {}
        self._writer: int | None = None
        self._generation = 0
        self._stand_ins: tuple[StandIn, ...] = ()  # among the open edits
        self._open()

    # Local edits

    def begin(self, feed: FeedId, generation: int = 0) -> None:
        """Edits from now on are made by this feed. Saying so again costs nothing."""
        writer = self._writer_id(feed, generation)
        if writer == self._writer:
            return
        assert not self.has_open_edits, f"seal the edits of writer {self._writer} first"
        self._writer = writer
        self._generation = generation
        self._document.write_as(self._writer)
        self._bind()

    @property
    def has_open_edits(self) -> bool:
        if self._writer is None:
            return False
        return self._document.has_uncommitted_edits() or self._document.made(self._writer) > self._sealed()

    def seal(self) -> Any:
        """The edits since the last seal as one operation, or None. It is part of the state already."""
        if self._writer is None:
            return None
        self._document.commit()
        start, end = self._sealed(), self._document.made(self._writer)
        if start == end:
            return None
        update = tuple(self._document.export_changes(self._writer, start, end))
        for change in update:
            self._note(change)
            self._gained += gain(change.runs)
        self._record(update)
        return self._operation(update, self._generation)

    def stamped(self, stamp: Stamp, time_ms: int) -> None:
        """What was sealed last has its place in the canonical order."""
        assert self._writer is not None
        gained, self._gained = self._gained, 0
        self._introductions.add(self._writer, self._sealed(), stamp, gained)
        self._datings.add(self._writer, self._sealed(), stamp, time_ms)

    # Operations

    @property
    def overtaken(self) -> bool:
        """Whether an operation came in that a refused one above it had lacked: the item is to be folded again."""
        return self._introductions.overtaken

    def apply(self, operation: Any, stamp: Stamp, time_ms: int) -> None:
        """Fold in one operation of another replica, or of this one's past."""
        changes = self._checked(operation, stamp, graph_is_current=True)
        try:
            self._enter(changes)
        except OperationRefused:
            self._positions.take_back(self._ends)
            raise
        self._note_all(changes, stamp)
        self._datings.add(changes[0].writer, changes[-1].counter_end, stamp, time_ms)

    def apply_many(self, operations: Sequence[tuple[Any, Stamp, int]]) -> list[OperationRefused | None]:
        """The same as `apply` on each, with the outcome of each; loro imports in one go, which is much faster."""
        outcomes: list[OperationRefused | None] = [None] * len(operations)
        judged: list[int] = []  # checked since the last import, whatever came of it
        changes: list[Change] = []  # of those that wait for the next one
        dated: list[tuple[int, int, Stamp, int]] = []  # of these
        ends = dict(self._ends)

        def flush() -> None:
            nonlocal ends
            try:
                self._enter(changes)
            except OperationRefused:
                # One of them is bad inside, and the others were judged as if it were not: once more, one by one.
                self._ends = ends
                self._views.clear()
                self._positions.take_back(ends)
                self._introductions.take_back(ends)
                for index in judged:
                    outcomes[index] = self._outcome(operations[index])
            else:
                for row in dated:
                    self._datings.add(*row)
            ends = dict(self._ends)
            judged.clear()
            changes.clear()
            dated.clear()

        for index, (operation, stamp, time_ms) in enumerate(operations):
            try:
                try:
                    checked = self._checked(operation, stamp, graph_is_current=not changes)
                except _NeedsImport:
                    flush()
                    checked = self._checked(operation, stamp, graph_is_current=True)
            except OperationRefused as refused:
                outcomes[index] = refused
            else:
                self._note_all(checked, stamp)
                changes.extend(checked)
                dated.append((checked[0].writer, checked[-1].counter_end, stamp, time_ms))
            judged.append(index)
        if changes:
            flush()
        return outcomes

    # State

    def changes(self) -> ChangeGraph:
        """What has been sealed or applied above the ground, without open edits: with `dated` the canonical state."""
        return tuple(
            change
            for writer in sorted(self._ends)
            for change in self._document.export_changes(writer, 0, self._ends[writer])
        )

    @property
    def ground(self) -> Ground | None:
        """What stands of the history that an epoch discarded."""
        return None if self._document.numbers is None else self._document.numbers.ground

    @property
    def dated(self) -> tuple[Dated, ...]:
        """Which messages brought what is above the ground."""
        return self._datings.dated()

    @classmethod
    def from_changes(
        cls, item: ItemId, changes: ChangeGraph, ground: Ground | None = None, dated: Iterable[Dated] = ()
    ) -> Self:
        """A model in that state. The writers in it are taken on trust: who may have written is long decided."""
        try:
            document = LoroDocument.on_ground(cls._container, cls._numbers(ground))
            document.import_changes(changes)
        except OperationRefused as refused:
            raise Corrupt(f"the state of a {cls.name} can't be restored: {refused.detail}") from None
        model = cls(item, document)
        model._record(changes)
        model._introductions = Introductions.of_base(changes, ground)
        model._datings = Datings(dated)
        if ground is not None and ground.marks:
            model._positions.first_marks[min(ground.ends)] = 0
        for change in changes:
            model._positions.note(change)
        return model

    def discard(self, horizon: Horizon) -> bool:
        """Lose the history that everybody has seen and that is old enough, as far as it can be cut off; whether there
        was any. What stands stays, and so do the numbers of its atoms."""
        assert not self.has_open_edits, "epochs are folded from messages"
        self._ground_refused = False
        settled = self._datings.settled(horizon)
        if not settled:
            return False
        changes = self.changes()
        ends = critical_ends(self._document, changes, settled)
        if ends == ({} if self.ground is None else self.ground.ends):
            return False
        ground = lay_ground(self._document, self._container, ends, of_text=InsertText in self._run_kinds)
        if ground is None:
            self._ground_refused = True
            return False
        above = tuple(
            change
            for writer in sorted(self._ends)
            for change in self._document.export_changes(writer, ends.get(writer, 0), self._ends[writer])
        )
        left = self.from_changes(self.item, above, ground, self._datings.beyond(ends).dated())
        vars(self).update(vars(left))
        return True

    def waits(self, horizon: Horizon) -> list[Wait]:
        """After `discard(horizon)`: what is to be over before any other takes more of the state as it is (`_laying_ground`)."""
        return [NO_WAIT] if self._ground_refused else self._datings.waits(horizon)

    @classmethod
    def _numbers(cls, ground: Ground | None) -> GroundNumbers | None:
        return None if ground is None else GroundNumbers(ground, of_text=InsertText in cls._run_kinds)

    def native(self) -> bytes:
        """Loro's own snapshot with what checks need, for a cache. It differs between replicas: never address it."""
        assert not self.has_open_edits, "seal before caching"
        return _encode_native(
            _Native(
                self._document.native(),
                self._introductions.rows(),
                self._positions.first_marks,
                self.dated,
                self.ground,
            )
        )

    @classmethod
    def from_native(cls, item: ItemId, data: bytes) -> Self:
        try:
            native = _decode_native(data)
        except msgspec.DecodeError as error:
            raise Corrupt(f"a cached document can't be opened: {error}") from None
        document = LoroDocument.from_native(cls._container, native.document, cls._numbers(native.ground))
        model = cls(item, document, native.document)
        model._introductions = Introductions.from_rows(native.introductions)
        model._datings = Datings(native.dated)
        model._positions.first_marks = native.first_marks
        return model

    # What stands in it, for issuing own content again

    def has_written(self, feed: FeedId, generation: int) -> bool:
        return self._ends.get(self._writer_id(feed, generation), 0) > 0

    def pieces(self, *atoms: Atom) -> list[Element]:
        """The characters or elements in order: now, or in the version that these atoms make."""
        return self._pieces(self._at(*atoms))

    def identified(self, atoms: Iterable[Atom]) -> dict[Atom, ElementId]:
        """The identities, as in `pieces`, of what these atoms inserted or moved."""
        return {atom: atom for atom in atoms}

    def put(self, index: int, contents: list[str]) -> None:
        """Insert the content of pieces."""
        raise NotImplementedError

    # For subclasses

    def _at(self, *atoms: Atom) -> LoroDocument:
        return self._document.at(self._document.version(atoms)) if atoms else self._document

    def _pieces(self, document: LoroDocument) -> list[Element]:
        raise NotImplementedError

    def _open(self) -> None:
        """Take hold of the container of `_document`: a new one, after `__init__` and after a loss."""
        raise NotImplementedError

    def _bind(self) -> None:
        """A writer is known, or the container is new: from now on edits go to it."""
        raise NotImplementedError

    def _operation(self, update: ChangeGraph, generation: int) -> Any:
        raise NotImplementedError

    def _version_without(self, change: Change) -> Version:
        """The greatest version that holds nothing of `change` and nothing made after it."""
        seen = self._document.past(change.frontier())
        later = [
            candidate
            for writer, end in self._ends.items()
            for candidate in self._document.export_changes(writer, seen.get(writer, 0), end)
        ]
        first = {change.writer: change.counter}  # writer -> its first atom that knows the change
        grown = True
        while grown:
            grown = False
            for candidate in later:
                known = first.get(candidate.writer, COUNTER_END_MAX)
                if candidate.counter < known and any(
                    counter >= first.get(writer, COUNTER_END_MAX) for writer, counter in candidate.dependencies
                ):
                    first[candidate.writer] = candidate.counter
                    grown = True
        return self._document.version_of_ends(
            {writer: min(end, first.get(writer, end)) for writer, end in self._ends.items()}
        )

    def _versions_around(self, update: ChangeGraph) -> tuple[Version, Version]:
        """What the writer had with an operation, and what of that there was without it; the latter first."""
        first, last = update[0], update[-1]
        end = (last.writer, last.counter_end - 1)
        past = self._document.past([end])
        return self._document.version_of_ends({**past, first.writer: first.counter}), self._document.version([end])

    def holds(self, update: ChangeGraph) -> bool:
        """Whether an operation with this update is part of the state: it may have been excluded since, or discarded."""
        if self.ground is not None and self.ground.holds((update[0].writer, update[0].counter)):
            return False
        return update[-1].counter_end <= self._ends.get(update[-1].writer, 0)

    # Undo: what it puts back

    def _put_back(self, originals: Originals, atoms: list[Atom]) -> None:
        """The last edits have put content back that these atoms first put there, in this order."""
        assert self._writer is not None
        self._document.commit()
        made = self._document.export_changes(self._writer, self._sealed(), self._document.made(self._writer))
        counters = [counter for counter, _ in placings(made)]
        runs = tuple(stand_ins(counters[len(counters) - len(atoms) :], atoms))
        self._stand_ins += runs
        originals.add(self._writer, runs)

    def _taken_stand_ins(self) -> tuple[StandIn, ...]:
        """Of the edits that are sealed now."""
        taken, self._stand_ins = self._stand_ins, ()
        return taken

    # Checks

    def _checked(self, operation: Any, stamp: Stamp, *, graph_is_current: bool) -> ChangeGraph:
        """The changes of an operation that may come in. Notes nothing but what it lacks."""
        changes: ChangeGraph = operation.update
        if not changes:
            raise OperationRefused(Reason.MALFORMED, "no changes")
        writer = self._writer_id(stamp.feed, operation.generation)
        assert writer != self._writer or not self.has_open_edits, "open edits would take the counters of this operation"
        counter = self._ends.get(writer, 0)
        if changes[0].counter > counter and changes[0].writer == writer:
            raise OperationRefused(Reason.BUILDS_ON_EXCLUDED, f"the writer's atom {counter} is missing")
        ground = self.ground
        view: dict[int, int] | None = None
        views = []
        for change in changes:
            if change.writer != writer:
                raise OperationRefused(Reason.FORGED_WRITER, f"a change by {change.writer:016x}, not {writer:016x}")
            if change.counter < counter:
                raise OperationRefused(Reason.FORGED_WRITER, f"atom {change.counter} was made before")
            if change.counter != counter:
                raise OperationRefused(Reason.MALFORMED, "changes with a gap")
            if ground is not None and ground.carries(change):
                view = {other: end for other, end in ground.ends.items() if other != writer}
            elif change.dependencies:
                if view is None:
                    view = self._view(writer, graph_is_current)
                view = self._checked_dependencies(change, view, stamp, graph_is_current)
            elif change.after_own != (counter > 0):
                raise OperationRefused(Reason.MALFORMED, "a change without its predecessor")
            if not change.runs:
                raise OperationRefused(Reason.MALFORMED, "an empty change")
            for run in change.runs:
                if isinstance(run, Delete) and run.writer != writer and view is None:
                    view = self._view(writer, graph_is_current)
                self._check_run(run, (writer, counter), view)
                counter += atom_count(run)
            views.append(view)
        if counter > COUNTER_END_MAX:
            raise OperationRefused(Reason.MALFORMED, "too many atoms")
        before = views[0] if views[0] is not None else self._view(writer, graph_is_current)
        pasts = [before if seen is None else seen for seen in views]
        if not self._positions.certain(self._introductions, changes, pasts):
            if not graph_is_current:
                raise _NeedsImport
            self._positions.try_out(self._document, self._introductions, changes, pasts)
        return changes

    def _checked_dependencies(
        self, change: Change, view: dict[int, int], stamp: Stamp, graph_is_current: bool
    ) -> dict[int, int]:
        """L3; what the writer has seen from this change on."""
        writer, counter = change.writer, change.counter
        pasts = []
        for atom in change.dependencies:
            if atom[0] == writer or atom[1] < 0:
                raise OperationRefused(Reason.MALFORMED, "a change that names itself as foreign")
            if atom[1] >= self._ends.get(atom[0], 0):
                self._introductions.lack(atom, stamp)
                raise AtomMissing(atom)
            if not self._introductions.below(atom, stamp):
                raise AtomMissing(atom)
            pasts.append(self._views.past(atom) or self._past_from_graph(atom, graph_is_current))
        own_is_past = any(past.get(writer, 0) >= counter for past in pasts)
        if change.after_own != (counter > 0 and not own_is_past):
            raise OperationRefused(Reason.MALFORMED, "the writer's own predecessor is said twice or not at all")
        for index, (other, last) in enumerate(change.dependencies):
            if view.get(other, 0) > last:
                raise OperationRefused(Reason.MALFORMED, "a dependency that the writer had already")
            for position, past in enumerate(pasts):
                if position != index and past.get(other, 0) > last:
                    raise OperationRefused(Reason.MALFORMED, "a dependency that another one includes")
        merged = dict(view)
        for past in pasts:
            for other, end in past.items():
                if end > merged.get(other, 0):
                    merged[other] = end
        return merged

    def _check_run(self, run: Run, made: Atom, view: dict[int, int] | None) -> None:
        """L4, and of L6 what is about runs."""
        if type(run) not in self._run_kinds:
            raise OperationRefused(Reason.MALFORMED, f"a {type(run).__name__} in a {self.name}")
        check_run(run, made, view)
        if self._document.numbers is not None:
            self._document.numbers.check_standing(run)

    # The causal past, from memory where the newest is asked for, from loro otherwise

    def _view(self, writer: int, graph_is_current: bool) -> dict[int, int]:
        """The ends of other writers as this one saw them when it made its last atom."""
        view = self._views.of(writer)
        if view is not None:
            return view
        end = self._ends.get(writer, 0)
        if end == 0:
            return {}
        view = self._past_from_graph((writer, end - 1), graph_is_current)
        del view[writer]
        self._views.remember(writer, view, end - 1)
        return view

    def _past_from_graph(self, atom: Atom, graph_is_current: bool) -> dict[int, int]:
        if not graph_is_current:
            raise _NeedsImport
        return self._document.past([atom])

    def _note_all(self, changes: ChangeGraph, stamp: Stamp) -> None:
        """An operation is in."""
        for change in changes:
            self._note(change)
        gained = sum(gain(change.runs) for change in changes)
        self._introductions.add(changes[0].writer, changes[-1].counter_end, stamp, gained)

    def _note(self, change: Change) -> None:
        """The change is in; its dependencies have been checked."""
        self._positions.note(change)
        self._views.note(change)
        self._ends[change.writer] = change.counter_end

    # The document and its journal

    def _enter(self, changes: Sequence[Change]) -> None:
        """Import all of it or nothing, even if it breaks loro."""
        open_edits = self._open_edits()
        try:
            self._document.import_changes(changes)
        except ModelFailed:
            self._rebuild(open_edits)
            # Not in the library's words, which depend on what else has arrived.
            raise OperationRefused(Reason.MODEL_FAILED, "the library failed on it") from None
        self._record(changes)

    def _open_edits(self) -> list[Change]:
        """What the current writer has not sealed. An import commits it, so it is committed here."""
        if self._writer is None or not self.has_open_edits:
            return []
        self._document.commit()
        return self._document.export_changes(self._writer, self._sealed(), self._document.made(self._writer))

    def _record(self, changes: Sequence[Change]) -> None:
        self._journal.extend(changes)
        self._journal_runs += sum(len(change.runs) for change in changes)
        if self._journal_runs > self._journal_runs_max:
            self._base = self._document.native()
            self._journal.clear()
            self._journal_runs = 0
            self._journal_runs_max = max(JOURNAL_RUNS_MIN, sum(self._ends.values()) // JOURNAL_SHARE)

    def _rebuild(self, open_edits: list[Change]) -> None:
        """The document as it was: every step of it has been through loro before."""
        numbers = self._document.numbers
        if self._base is not None:
            document = LoroDocument.from_native(self._container, self._base, numbers)
        else:
            document = LoroDocument.on_ground(self._container, numbers)
        document.import_changes([*self._journal, *open_edits])
        self._document = document
        self._open()
        if self._writer is not None:
            document.write_as(self._writer)
            self._bind()

    def _outcome(self, entry: tuple[Any, Stamp, int]) -> OperationRefused | None:
        try:
            self.apply(*entry)
        except OperationRefused as refused:
            return refused
        return None

    def _sealed(self) -> int:
        return self._ends.get(self._writer, 0) if self._writer is not None else 0

    def _writer_id(self, feed: FeedId, generation: int) -> int:
        key = (feed, generation)
        writer = self._writer_ids.get(key)
        if writer is None:
            if not 0 <= generation <= GENERATION_MAX:
                raise OperationRefused(Reason.MALFORMED, f"generation {generation}")
            writer = self._writer_ids[key] = writer_id(feed, self.item, generation)
        return writer


_encode_native = msgspec.msgpack.Encoder().encode
_decode_native = msgspec.msgpack.Decoder(_Native).decode
