"""Loro's JSON form of changes <-> our change graph.

Echostore never takes loro's binary updates from others: they are opaque, their checksum can be repaired, and their
bytes depend on the replica. Changes go into a document through this JSON, which is built here from checked values.
"""

from collections.abc import Iterable

import msgspec

from echostore.kernel.models._ground_numbers import GroundNumbers
from echostore.kernel.models.change_graph import (
    Atom,
    Change,
    ChangeBuilder,
    Delete,
    InsertElements,
    InsertText,
    Mark,
    MarkValue,
    Move,
    Run,
    SetElement,
    atom_count,
)

_EXPAND_AFTER = 132
"""Loro's flags of a mark that grows with text typed at its end: the only kind there is here."""


class _Insert(msgspec.Struct, tag_field="type", tag="insert", omit_defaults=True):
    pos: int
    text: str | None = None
    value: list[str] | None = None


class _Delete(msgspec.Struct, tag_field="type", tag="delete"):
    pos: int
    len: int
    start_id: str


class _Mark(msgspec.Struct, tag_field="type", tag="mark"):
    start: int
    end: int
    style_key: str
    style_value: MarkValue
    info: int


class _MarkEnd(msgspec.Struct, tag_field="type", tag="mark_end"):
    pass


class _Set(msgspec.Struct, tag_field="type", tag="set"):
    elem_id: str
    value: str


class _Move(msgspec.Struct, tag_field="type", tag="move", rename={"source": "from"}):
    source: int
    to: int
    elem_id: str


_Content = _Insert | _Delete | _Mark | _MarkEnd | _Set | _Move


class _Operation(msgspec.Struct):
    container: str
    content: _Content
    counter: int


class _Change(msgspec.Struct):
    """Loro computes lamports from the dependencies itself and ignores the ones it is given."""

    id: str
    deps: list[str]
    ops: list[_Operation]
    timestamp: int = 0
    lamport: int = 0
    msg: None = None


class _Document(msgspec.Struct):
    changes: list[_Change]
    schema_version: int = 1
    start_version: dict[str, int] = {}
    peers: None = None


_decode = msgspec.json.Decoder(list[_Change]).decode
_encode = msgspec.json.Encoder().encode
_MARK_END = _MarkEnd()


def parse_changes(writer: int, exported: str, numbers: GroundNumbers | None = None) -> list[Change]:
    """The canonical changes in what loro exported of one writer, from a document with these numbers."""
    builder = ChangeBuilder(writer)
    add = builder.add
    for change in _decode(exported):
        counter = int(change.id.partition("@")[0])
        dependencies = [_atom(text) for text in change.deps]
        if numbers is not None:
            counter += numbers.start(writer)
            dependencies = numbers.frontier_out(dependencies)
        own = (writer, counter - 1)
        builder.change(
            counter,
            after_own=own in dependencies,
            dependencies=tuple(atom for atom in dependencies if atom != own),
        )
        for operation in change.ops:
            run = _run(operation.content)
            if run is not None:
                for part in (run,) if numbers is None else numbers.run_out(run):
                    add(part)
    return builder.changes()


def render_changes(container: str, changes: Iterable[Change]) -> str:
    """What loro imports. UnicodeEncodeError when a text holds a lone surrogate."""
    return _encode(_Document([_render(container, change) for change in changes])).decode()


def _run(content: _Content) -> Run | None:
    if isinstance(content, _Insert):
        if content.text is not None:
            return InsertText(content.pos, content.text)
        return InsertElements(content.pos, tuple(content.value or ()))
    if isinstance(content, _Delete):
        writer, counter = _atom(content.start_id)
        return Delete(content.pos, content.len, writer, counter)
    if isinstance(content, _Set):
        writer, lamport = _atom(content.elem_id[1:])
        return SetElement(writer, lamport, content.value)
    if isinstance(content, _Move):
        writer, lamport = _atom(content.elem_id[1:])
        return Move(content.source, content.to, writer, lamport)
    if isinstance(content, _Mark):
        return Mark(content.start, content.end, content.style_key, content.style_value)
    return None  # the second atom of a mark


def _render(container: str, change: Change) -> _Change:
    writer = change.writer
    counter = change.counter
    operations = []
    for run in change.runs:
        operations.append(_Operation(container, _content(run), counter))
        if isinstance(run, Mark):
            operations.append(_Operation(container, _MARK_END, counter + 1))
        counter += atom_count(run)
    dependencies = [f"{atom[1]}@{atom[0]}" for atom in change.frontier()]
    return _Change(f"{change.counter}@{writer}", dependencies, operations)


def _content(run: Run) -> _Content:
    if isinstance(run, InsertText):
        return _Insert(run.position, text=run.text)
    if isinstance(run, Delete):
        return _Delete(run.position, run.length, f"{run.counter}@{run.writer}")
    if isinstance(run, InsertElements):
        return _Insert(run.position, value=list(run.elements))
    if isinstance(run, SetElement):
        return _Set(f"L{run.lamport}@{run.writer}", run.element)
    if isinstance(run, Move):
        return _Move(run.source, run.target, f"L{run.lamport}@{run.writer}")
    return _Mark(run.start, run.end, run.key, run.value, _EXPAND_AFTER)


def _atom(text: str) -> Atom:
    counter, _, writer = text.partition("@")
    return int(writer), int(counter)
