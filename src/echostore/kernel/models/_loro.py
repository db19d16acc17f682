"""The one place that imports loro: a document of it, with its calls typed and its errors made ours.

Loro raises bare BaseExceptions, and its panics leave a document unusable. Here the first become a `UsageError` (a local
edit that makes no sense) or an `OperationRefused` (an import that it took nothing of), the second a `ModelFailed`:
the item is then rebuilt from its operations.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

import loro

from echostore.kernel.errors import Corrupt, ModelFailed, UsageError
from echostore.kernel.models._delta import Drop, Insert, Keep, Step
from echostore.kernel.models._ground_numbers import GroundNumbers
from echostore.kernel.models._loro_json import parse_changes, render_changes
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.change_graph import Atom, Change, Delete, InsertElements, InsertText, Move, atom_count
from echostore.kernel.reasons import Reason

Version = loro.Frontiers
"""A point in the history of a document."""

ElementId = tuple[int, int]
"""(writer, lamport) of the atom that inserted a list element."""

Returned = TypeVar("Returned")


class Element(NamedTuple):
    """A list element: an identity that moves and sets leave alone, its text form, the atom that put it where it is."""

    identity: ElementId
    text: str
    atom: Atom


def guarded(call: Callable[..., Returned], *arguments: Any) -> Returned:
    """Call loro on behalf of this program's user: what it refuses is a UsageError."""
    try:
        return call(*arguments)
    except BaseException as error:  # noqa: BLE001  # loro raises bare ones
        raise_typed(error)


def raise_typed(error: BaseException) -> NoReturn:
    """Loro's complaint as one of ours; anything else goes on as it is."""
    if _is_complaint(error) or isinstance(error, (OverflowError, TypeError, UnicodeEncodeError)):
        raise UsageError(str(error).partition(" Position:")[0]) from None
    if type(error).__name__ == "PanicException":
        raise ModelFailed(f"loro failed: {error}", unchanged="The item's operations are kept.") from None
    raise error


def no_writer(*_: Any) -> NoReturn:
    """What editing calls are bound to before `begin`."""
    raise UsageError("no writer yet", next_step="Call begin(feed, generation) before the first edit.")


class LoroDocument:
    """A document with one root container, named by its container id. One with `numbers` begins with a ground, of which
    only this class knows: whoever asks gets and gives the numbers of the whole history."""

    def __init__(self, container: str, doc: loro.LoroDoc | None = None, numbers: GroundNumbers | None = None) -> None:
        self._container = container
        self._doc = doc or loro.LoroDoc()  # type: ignore[no-untyped-call]  # gap in loro's stubs
        self._doc.config_default_text_style(loro.ExpandType.After)
        self.numbers = numbers

    @classmethod
    def on_ground(
        cls, container: str, numbers: GroundNumbers | None, as_made: Callable[[Change], Change] = lambda change: change
    ) -> Self:
        """A new document that holds the ground, if there is one, and nothing else; `as_made` may change how."""
        document = cls(container)
        if numbers is not None:
            document.import_changes([as_made(numbers.first_change())])
            document.numbers = numbers
        return document

    # History

    def import_changes(self, changes: Iterable[Change]) -> None:
        """All of it or nothing: OperationRefused when loro finds a position or an element that can't be."""
        if self.numbers is not None:
            changes = [self.numbers.change_in(change) for change in changes]
        try:
            status = self._doc.import_json_updates(render_changes(self._container, changes))
        except UnicodeEncodeError:
            raise OperationRefused(Reason.MALFORMED, "text that is not Unicode") from None
        except BaseException as error:  # noqa: BLE001  # loro raises bare ones
            if _is_complaint(error):
                # Not in its words, which depend on what else has arrived.
                raise OperationRefused(Reason.MALFORMED, "a position or an element that can't be") from None
            raise_typed(error)
        assert status.pending is None, f"{status.pending} waits for what the checks said was there"

    def export_changes(self, writer: int, start: int, end: int) -> list[Change]:
        """Atoms `start` to `end` of a writer, as canonical changes; of those that are in the ground there are none."""
        ground_end = self._ground_end(writer)
        start = max(start, ground_end)
        if start >= end:
            return []
        span = loro.IdSpan(writer, loro.CounterSpan(start - ground_end, end - ground_end))
        return parse_changes(writer, self._doc.export_json_in_id_span(span), self.numbers)

    def ends(self) -> dict[int, int]:
        """Every writer's counter after its last atom."""
        return self._ends_out(_ends(self._doc.oplog_vv))

    def past(self, atoms: Iterable[Atom]) -> dict[int, int]:
        """The ends of all writers as of these atoms, themselves included."""
        version = self._doc.frontiers_to_vv(self.version(atoms))
        assert version is not None, f"{atoms} are in the document"
        return self._ends_out(_ends(version))

    def version(self, atoms: Iterable[Atom]) -> Version:
        if self.numbers is not None:
            atoms = self.numbers.frontier_in(atoms)
        return loro.Frontiers.from_ids([loro.ID(writer, counter) for writer, counter in atoms])

    def version_of_ends(self, ends: dict[int, int]) -> Version:
        vector = loro.VersionVector()  # type: ignore[no-untyped-call]  # gap in loro's stubs
        if self.numbers is not None:
            vector.set_last(loro.ID(*self.numbers.head))
        for writer, end in ends.items():
            ground_end = self._ground_end(writer)
            if end > ground_end:
                vector.set_last(loro.ID(writer, end - ground_end - 1))
        return self._doc.vv_to_frontiers(vector)

    def latest(self) -> Version:
        self._doc.commit()
        return self._doc.oplog_frontiers

    def at(self, version: Version) -> "LoroDocument":
        """A copy that ends at `version`."""
        return LoroDocument(self._container, self._doc.fork_at(version), self.numbers)

    def native(self) -> bytes:
        return bytes(self._doc.export(loro.ExportMode.Snapshot()))

    @classmethod
    def from_native(cls, container: str, data: bytes, numbers: GroundNumbers | None = None) -> Self:
        document = cls(container, numbers=numbers)
        try:
            document._doc.import_(data)
        except BaseException as error:  # noqa: BLE001  # loro raises bare ones
            if _is_complaint(error):
                raise Corrupt(f"a cached document can't be opened: {error}") from None
            raise_typed(error)
        return document

    # The writer

    def write_as(self, writer: int) -> None:
        self._doc.peer_id = writer

    def commit(self) -> None:
        self._doc.commit()

    def made(self, writer: int) -> int:
        """The counter after the last committed atom of a writer."""
        last = self._doc.oplog_vv.get_last(writer)
        return self._ground_end(writer) + (0 if last is None else last + 1)

    def has_uncommitted_edits(self) -> bool:
        return self._doc.get_pending_txn_len() > 0

    # Containers. Models keep them and bind their methods: an edit costs one Python call more than in bare loro.

    def text(self, root: str) -> loro.LoroText:
        return self._doc.get_text(root)

    def movable_list(self, root: str) -> loro.LoroMovableList:
        return self._doc.get_movable_list(root)

    # Atoms

    def text_atoms(self, root: str) -> list[Atom]:
        """The atom that made each character of the text, in order."""
        text = self.text(root)
        return self._atoms_out(_atoms(text, text.len_unicode))

    def elements(self, root: str) -> list[Element]:
        """The elements of the list, in order."""
        elements = self.movable_list(root)
        atoms = self._atoms_out(_atoms(elements, len(elements)))
        identities = self.element_ids(atoms)
        return [Element(identities[atom], str(text), atom) for atom, text in zip(atoms, elements.to_vec(), strict=True)]

    def element_ids(self, atoms: Iterable[Atom]) -> dict[Atom, ElementId]:
        """Of the elements that were inserted or moved by these atoms; others are passed over."""
        counters: dict[int, set[int]] = {}
        found: dict[Atom, ElementId] = {}
        for writer, counter in atoms:
            if counter >= self._ground_end(writer):
                counters.setdefault(writer, set()).add(counter)
            elif self.numbers is not None and (inside := self.numbers.atom_in((writer, counter))) is not None:
                found[(writer, counter)] = self.numbers.element_out(inside)
        for writer, wanted in counters.items():
            for start, end in _stretches(wanted):
                for counter, run in placings(self.export_changes(writer, start, end)):
                    if isinstance(run, Move):
                        found[(writer, counter)] = (run.writer, run.lamport)
                    else:
                        found[(writer, counter)] = (writer, self.lamport((writer, counter)))
        return found

    def lamport(self, atom: Atom) -> int:
        """Of an atom that is not in the ground."""
        writer, counter = atom[0], atom[1] - self._ground_end(atom[0])
        made = self._doc.get_change(loro.ID(writer, counter))
        assert made is not None, atom
        lamport = made.lamport + counter - made.id.counter
        return lamport if self.numbers is None else self.numbers.lamport_out(lamport)

    def contents(self) -> str | list[str]:
        """The characters or the text forms of the elements, in order."""
        content = self._content()
        if isinstance(content, loro.LoroText):
            return content.to_string()
        return [str(element) for element in content.to_vec()]

    def take_out_all(self, writer: int) -> list[Delete]:
        """Delete everything, as a writer that has made nothing yet. Returns what stood there in its order, in the
        document's own numbers: the library has no other way to tell the atoms of many places at once."""
        container = self._content()
        length = self.visible_length()
        if not length:
            return []
        self.write_as(writer)
        guarded(container.delete, 0, length)
        self._doc.commit()
        span = loro.IdSpan(writer, loro.CounterSpan(0, length))
        made = parse_changes(writer, self._doc.export_json_in_id_span(span))
        return _in_order([run for change in made for run in change.runs if isinstance(run, Delete)])

    def hidden_places(self, writer: int) -> int:
        """How many places a list has that hold no element: where one was moved to that another move won. Inserts
        something at the end, as a writer that has made nothing yet."""
        elements = self._content()
        assert isinstance(elements, loro.LoroMovableList), elements
        visible = len(elements)
        self.write_as(writer)
        guarded(elements.insert, visible, "")
        self._doc.commit()
        (made,) = parse_changes(writer, self._doc.export_json_in_id_span(loro.IdSpan(writer, loro.CounterSpan(0, 1))))
        (run,) = made.runs
        assert isinstance(run, InsertElements), run
        return run.position - visible

    # Cursors

    def cursor(self, container: loro.LoroText | loro.LoroMovableList, position: int, *, at_end: bool) -> bytes:
        cursor = guarded(container.get_cursor, position, loro.Side.Right if at_end else loro.Side.Middle)
        assert cursor is not None, position
        data = cursor.encode()
        if self.numbers is None or cursor.id is None:
            return data
        inside = (cursor.id.peer, cursor.id.counter)
        atom = self.numbers.atom_out(inside)
        assert atom is not None, inside
        return _cursor_head(atom) + data[len(_cursor_head(inside)) :]

    def cursor_position(self, cursor: bytes) -> int:
        """UsageError when the bytes are no cursor, or its element is gone without a trace."""
        known = guarded(loro.Cursor.decode, cursor)
        if self.numbers is not None and known.id is not None:
            atom = (known.id.peer, known.id.counter)
            inside = self.numbers.atom_in(atom)
            if inside is None:
                raise UsageError("the place was deleted, and an epoch discarded it")
            known = guarded(loro.Cursor.decode, _cursor_head(inside) + cursor[len(_cursor_head(atom)) :])
        return guarded(self._doc.get_cursor_pos, known).current.pos

    def atom_position(self, root: str, atom: Atom) -> int:
        """Where the character that an atom made stands, or where it stood; UsageError when there is none."""
        text = self.text(root)
        known = text.get_cursor(0, loro.Side.Middle) if text.len_unicode else None
        if known is None or known.id is None:
            raise UsageError("no characters")
        data = known.encode()  # the atom comes first; the rest is the same for every atom of this text
        rest = data[len(_cursor_head((known.id.peer, known.id.counter))) :]
        return self.cursor_position(_cursor_head(atom) + rest)

    def visible_length(self) -> int:
        """Characters or elements, in whichever container this document has."""
        content = self._content()
        return content.len_unicode if isinstance(content, loro.LoroText) else len(content)

    def _content(self) -> loro.LoroText | loro.LoroMovableList:
        root, kind = self._container.removeprefix("cid:root-").split(":")
        return self.text(root) if kind == "Text" else self.movable_list(root)

    # Numbers

    def _ground_end(self, writer: int) -> int:
        return 0 if self.numbers is None else self.numbers.start(writer)

    def _ends_out(self, ends: dict[int, int]) -> dict[int, int]:
        return ends if self.numbers is None else self.numbers.ends_out(ends)

    def _atoms_out(self, atoms: list[Atom]) -> list[Atom]:
        if self.numbers is None:
            return atoms
        found = [self.numbers.atom_out(atom) for atom in atoms]
        return [atom for atom in found if atom is not None]

    def parts(self, run: Delete) -> list[Delete]:
        """A run of deletes as the document takes it: one for each stretch of consecutive atoms, in its own numbers."""
        return [run] if self.numbers is None else self.numbers.delete_in(run)

    def delete_text(self, root: str, position: int, length: int) -> None:
        guarded(self.text(root).delete, position, length)


def text_steps(text: loro.LoroText) -> list[Step]:
    """The whole text, as the delta that makes it."""
    return [_step(step) for step in text.to_delta()]


def apply_text_steps(text: loro.LoroText, steps: Iterable[Step]) -> None:
    guarded(text.apply_delta, [_loro_step(step) for step in steps])


def element_at(elements: loro.LoroMovableList, index: int) -> str:
    """The text form of an element; IndexError where there is none."""
    found = elements.get(index)
    if found is None:
        raise IndexError(index)
    value = found.value  # type: ignore[attr-defined]  # an element is never a container: imports are checked
    assert isinstance(value, str), value
    return value


def placings(changes: Iterable[Change]) -> Iterator[tuple[int, InsertText | InsertElements | Move]]:
    """The counters of the atoms that put a character or an element somewhere, ascending, each with its run."""
    for change in changes:
        counter = change.counter
        for run in change.runs:
            count = atom_count(run)
            if isinstance(run, (InsertText, InsertElements, Move)):
                for offset in range(count):
                    yield counter + offset, run
            counter += count


def _in_order(runs: list[Delete]) -> list[Delete]:
    """Deletes of everything, by where it stood: lists are emptied from their start, texts from their end."""
    if any(run.position for run in runs):
        runs = sorted((_forwards(run) for run in runs), key=lambda run: run.position)
        here = 0
        for run in runs:
            assert run.position == here, "nothing is left out, and nothing taken twice"
            here += run.length
    return runs


def _forwards(run: Delete) -> Delete:
    return run if run.length > 0 else Delete(run.position + run.length + 1, -run.length, run.writer, run.counter)


def _atoms(container: loro.LoroText | loro.LoroMovableList, length: int) -> list[Atom]:
    """One short call for each position: the library has no other way to tell."""
    cursor: Any = container.get_cursor  # there is one at every position
    middle = loro.Side.Middle
    identities = (cursor(index, middle).id for index in range(length))
    return [(identity.peer, identity.counter) for identity in identities]


def _stretches(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ascending [start, end) of numbers without a gap."""
    start = end = -1
    for number in sorted(numbers):
        if number != end:
            if end > start:
                yield start, end
            start = number
        end = number + 1
    if end > start:
        yield start, end


def _cursor_head(atom: Atom) -> bytes:
    """The atom at the front of loro's form of a cursor: that there is one, the writer, the counter."""
    writer, counter = atom
    return b"\x01" + _varint(writer) + _varint(counter << 1)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _is_complaint(error: BaseException) -> bool:
    return type(error) is BaseException


def _ends(vector: loro.VersionVector) -> dict[int, int]:
    return {writer: end for writer, (_, end) in vector.to_spans().inner().items() if end}


def _step(step: loro.TextDelta) -> Step:
    if isinstance(step, loro.TextDelta.Insert):
        return Insert(step.insert, step.attributes)  # type: ignore[arg-type]  # marks hold scalars only
    if isinstance(step, loro.TextDelta.Delete):
        return Drop(step.delete)
    assert isinstance(step, loro.TextDelta.Retain), step
    return Keep(step.retain, step.attributes)  # type: ignore[arg-type]  # the same


def _loro_step(step: Step) -> loro.TextDelta:
    if isinstance(step, Insert):
        return loro.TextDelta.Insert(step.text, step.marks)
    if isinstance(step, Drop):
        return loro.TextDelta.Delete(step.length)
    return loro.TextDelta.Retain(step.length, step.marks)
