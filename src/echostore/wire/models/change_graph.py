"""Change graphs <-> protobuf: the columns of `change_graph.proto`.

Encoding is canonical: equal graphs give equal bytes. Decoding checks only that the columns fit together; whether the
graph makes sense is for the model (operations) and for loro (states) to say.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from google.protobuf.message import DecodeError

from echostore.kernel.models._elements import element_text, element_value
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.change_graph import (
    Change,
    ChangeGraph,
    Delete,
    InsertElements,
    InsertText,
    Mark,
    MarkValue,
    Move,
    Run,
    SetElement,
)
from echostore.kernel.reasons import Reason
from echostore.wire.generated import change_graph_pb2 as pb
from echostore.wire.generated import value_pb2
from echostore.wire.values import MalformedValue, decode_value, encode_value

_INSERT, _DELETE, _MARK, _SET, _MOVE = pb.INSERT, pb.DELETE, pb.MARK, pb.SET, pb.MOVE
_MARK_KINDS = frozenset({"null", "boolean", "integer", "text"})


class MalformedGraph(ValueError):
    """Columns that do not fit together."""


def encode_graph(changes: Iterable[Change]) -> pb.ChangeGraph:
    changes = sorted(changes, key=lambda change: (change.writer, change.counter))
    writers = sorted(_writers(changes))
    index = {writer: position for position, writer in enumerate(writers)}
    columns = _Columns(index)
    change_counts = [0] * len(writers)
    first_counters = [0] * len(writers)
    run_counts, dependency_counts = [], []
    dependency_writers, dependency_counters = [], []
    for change in changes:
        place = index[change.writer]
        if change_counts[place] == 0:
            first_counters[place] = change.counter
        change_counts[place] += 1
        run_counts.append(len(change.runs))
        dependency_counts.append(2 * len(change.dependencies) + change.after_own)
        for writer, counter in change.dependencies:
            dependency_writers.append(index[writer])
            dependency_counters.append(counter)
        columns.add(change.runs)
    return pb.ChangeGraph(
        writers=writers,
        change_counts=change_counts,
        first_counters=first_counters if any(first_counters) else (),
        run_counts=run_counts,
        dependency_counts=dependency_counts,
        dependency_writers=dependency_writers,
        dependency_counters=dependency_counters,
        kinds=bytes(columns.kinds),
        positions=columns.positions,
        lengths=columns.lengths,
        target_writers=columns.target_writers,
        targets=columns.targets,
        text="".join(columns.texts),
        elements=columns.elements,
        mark_keys=columns.mark_keys,
        mark_values=columns.mark_values,
    )


def graph_bytes(changes: Iterable[Change]) -> bytes:
    return encode_graph(changes).SerializeToString(deterministic=True)


def decode_graph(message: pb.ChangeGraph, *, of_text: bool) -> ChangeGraph:
    writers = list(message.writers)
    counts = list(message.change_counts)
    firsts = list(message.first_counters) or [0] * len(writers)
    if not len(writers) == len(counts) == len(firsts):
        raise MalformedGraph("writers and their changes differ in number")
    if any(left >= right for left, right in pairwise(writers)):
        raise MalformedGraph("writers out of order")
    if sum(counts) != len(message.run_counts) or len(message.run_counts) != len(message.dependency_counts):
        raise MalformedGraph("changes of unequal columns")
    try:
        changes = tuple(_changes(message, writers, counts, firsts, _runs(message, writers, of_text)))
    except (StopIteration, RuntimeError, IndexError):
        # A generator that runs dry inside another one surfaces as a RuntimeError.
        raise MalformedGraph("a column ends early") from None
    except MalformedValue as error:
        raise MalformedGraph(str(error)) from None
    return changes


def decode_update(data: bytes, *, of_text: bool) -> ChangeGraph:
    """The changes in an operation of another peer."""
    try:
        return decode_graph(pb.ChangeGraph.FromString(data), of_text=of_text)
    except DecodeError:
        raise OperationRefused(Reason.MALFORMED, "undecodable") from None
    except MalformedGraph as error:
        raise OperationRefused(Reason.MALFORMED, str(error)) from None


def _writers(changes: list[Change]) -> set[int]:
    writers = {change.writer for change in changes}
    for change in changes:
        for atom in change.dependencies:
            writers.add(atom[0])
        for run in change.runs:
            if isinstance(run, Delete | SetElement | Move):
                writers.add(run.writer)
    return writers


class _Columns:
    """The columns of runs, while they are written. `_here` is where the last run left off."""

    def __init__(self, writers: dict[int, int]) -> None:
        self._writers = writers
        self._here = 0
        self._target = 0
        self.kinds = bytearray()
        self.positions: list[int] = []
        self.lengths: list[int] = []
        self.target_writers: list[int] = []
        self.targets: list[int] = []
        self.texts: list[str] = []
        self.elements: list[value_pb2.Value] = []
        self.mark_keys: list[str] = []
        self.mark_values: list[value_pb2.Value] = []

    def add(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if isinstance(run, InsertText):
                size = len(run.text)
                self._place(_INSERT, run.position, size, run.position + size)
                self.texts.append(run.text)
            elif isinstance(run, Delete):
                self._place(_DELETE, run.position, run.length, _after_delete(run.position, run.length))
                self._aim(run.writer, run.counter)
            elif isinstance(run, InsertElements):
                size = len(run.elements)
                self._place(_INSERT, run.position, size, run.position + size)
                self.elements.extend(encode_value(element_value(text)) for text in run.elements)
            elif isinstance(run, SetElement):
                self.kinds.append(_SET)
                self._aim(run.writer, run.lamport)
                self.elements.append(encode_value(element_value(run.element)))
            elif isinstance(run, Move):
                self._place(_MOVE, run.source, run.target - run.source, run.target)
                self._aim(run.writer, run.lamport)
            else:
                self._place(_MARK, run.start, run.end - run.start, run.end)
                self.mark_keys.append(run.key)
                self.mark_values.append(encode_value(run.value))

    def _place(self, kind: int, position: int, length: int, after: int) -> None:
        self.kinds.append(kind)
        self.positions.append(position - self._here)
        self.lengths.append(length)
        self._here = after

    def _aim(self, writer: int, target: int) -> None:
        self.target_writers.append(self._writers[writer])
        self.targets.append(target - self._target)
        self._target = target


def _changes(
    message: pb.ChangeGraph, writers: list[int], counts: list[int], firsts: list[int], runs: Iterator[Run]
) -> Iterator[Change]:
    dependency_counts = iter(message.dependency_counts)
    dependency_writers = iter(message.dependency_writers)
    dependency_counters = iter(message.dependency_counters)
    run_counts = iter(message.run_counts)
    for writer, count, counter in zip(writers, counts, firsts, strict=True):
        for _ in range(count):
            foreign, after_own = divmod(next(dependency_counts), 2)
            dependencies = tuple(
                [(writers[next(dependency_writers)], next(dependency_counters)) for _ in range(foreign)]
            )
            change = Change(
                writer, counter, bool(after_own), dependencies, tuple([next(runs) for _ in range(next(run_counts))])
            )
            yield change
            counter = change.counter_end
    for column in (dependency_writers, dependency_counters, runs):
        if next(column, None) is not None:
            raise MalformedGraph("a column that is too long")


def _runs(message: pb.ChangeGraph, writers: list[int], of_text: bool) -> Iterator[Run]:
    positions, lengths = iter(message.positions), iter(message.lengths)
    target_writers, targets = iter(message.target_writers), iter(message.targets)
    elements = iter(message.elements)
    mark_keys, mark_values = iter(message.mark_keys), iter(message.mark_values)
    text, used = message.text, 0
    here = target = 0
    for kind in message.kinds:
        if kind == _INSERT:
            position, length = here + next(positions), next(lengths)
            if length <= 0:
                raise MalformedGraph("an insert of nothing")
            if of_text:
                yield InsertText(position, text[used : used + length])
                used += length
            else:
                if length > len(message.elements):
                    raise MalformedGraph("a column ends early")
                yield InsertElements(
                    position, tuple([element_text(decode_value(next(elements))) for _ in range(length)])
                )
            here = position + length
        elif kind == _DELETE:
            position, length = here + next(positions), next(lengths)
            target += next(targets)
            yield Delete(position, length, writers[next(target_writers)], target)
            here = _after_delete(position, length)
        elif kind == _MARK:
            start = here + next(positions)
            here = start + next(lengths)
            yield Mark(start, here, next(mark_keys), mark_value(next(mark_values)))
        elif kind == _SET:
            target += next(targets)
            yield SetElement(writers[next(target_writers)], target, element_text(decode_value(next(elements))))
        elif kind == _MOVE:
            source = here + next(positions)
            here = source + next(lengths)
            target += next(targets)
            yield Move(source, here, writers[next(target_writers)], target)
        else:
            raise MalformedGraph(f"a run of kind {kind}")
    if used != len(text):
        raise MalformedGraph("text and inserts differ in length")
    for column in (positions, lengths, target_writers, targets, elements, mark_keys, mark_values):
        if next(column, None) is not None:
            raise MalformedGraph("a column that is too long")


def _after_delete(position: int, length: int) -> int:
    return position if length > 0 else position + length + 1


def mark_value(message: value_pb2.Value) -> MarkValue:
    if message.WhichOneof("kind") not in _MARK_KINDS:
        raise MalformedGraph("a mark with a value that marks can't hold")
    value: MarkValue = decode_value(message)
    return value
