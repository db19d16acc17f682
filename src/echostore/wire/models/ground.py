"""Grounds and datings of texts and lists <-> protobuf: the columns of `ground.proto`.

Encoding is canonical: equal values give equal bytes. Decoding checks that the columns fit together, and that what stands
was written by those who are named.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from echostore.kernel.ids import FeedId
from echostore.kernel.models._datings import Dated, Row
from echostore.kernel.models._elements import element_text, element_value
from echostore.kernel.models.change_graph import COUNTER_END_MAX
from echostore.kernel.models.ground import Ground, Piece, StandingMark
from echostore.wire.generated import ground_pb2 as pb
from echostore.wire.models.change_graph import MalformedGraph, mark_value
from echostore.wire.values import MalformedValue, decode_value, encode_value

_FEED_BYTES = 8


def encode_ground(ground: Ground | None) -> pb.Ground | None:
    if ground is None:
        return None
    writers = sorted(ground.ends)
    index = {writer: number for number, writer in enumerate(writers)}
    pieces = ground.pieces
    of_list = bool(ground.elements)
    return pb.Ground(
        writers=writers,
        ends=[ground.ends[writer] for writer in writers],
        heads=_bits(index[writer] for writer in ground.heads),
        lamport=ground.lamport,
        piece_writers=[index[piece.writer] for piece in pieces],
        piece_counters=_steps((piece.counter, piece.length) for piece in pieces),
        piece_lengths=[piece.length for piece in pieces],
        piece_makers=[index[piece.maker] for piece in pieces] if of_list else (),
        piece_lamports=_steps((piece.lamport, piece.length) for piece in pieces) if of_list else (),
        text=ground.text,
        elements=[encode_value(element_value(text)) for text in ground.elements],
        mark_starts=[mark.start for mark in ground.marks],
        mark_lengths=[mark.end - mark.start for mark in ground.marks],
        mark_keys=[mark.key for mark in ground.marks],
        mark_values=[encode_value(mark.value) for mark in ground.marks],
    )


def decode_ground(message: pb.Ground, *, of_text: bool) -> Ground:
    """MalformedGraph when the columns do not fit together."""
    writers = list(message.writers)
    if len(writers) != len(message.ends) or any(left >= right for left, right in pairwise(writers)):
        raise MalformedGraph("a ground without an end for each writer")
    ends = dict(zip(writers, message.ends, strict=True))
    heads = tuple(writers[number] for number in _set_bits(message.heads, len(writers)))
    if not heads or not all(0 < end <= COUNTER_END_MAX for end in ends.values()):
        raise MalformedGraph("a ground on which nobody wrote")
    pieces = tuple(_pieces(message, writers, of_text))
    if any(piece.counter < 0 or piece.counter + piece.length > ends[piece.writer] for piece in pieces):
        raise MalformedGraph("a ground with atoms that were not written")
    in_order = sorted(piece[:3] for piece in pieces)
    if any(left[0] == right[0] and left[1] + left[2] > right[1] for left, right in pairwise(in_order)):
        raise MalformedGraph("a ground in which an atom stands twice")
    try:
        elements = tuple(element_text(decode_value(element)) for element in message.elements)
    except MalformedValue as error:
        raise MalformedGraph(str(error)) from None
    standing = sum(piece.length for piece in pieces)
    if (len(message.text), len(elements)) != ((standing, 0) if of_text else (0, standing)):
        raise MalformedGraph("pieces and content of a ground differ in length")
    return Ground(ends, heads, message.lamport, pieces, message.text, elements, tuple(_marks(message, standing)))


def encode_datings(dated: Iterable[Dated]) -> pb.Datings | None:
    every = list(dated)
    if not every:
        return None
    return pb.Datings(
        writers=[each.writer for each in every],
        feeds=b"".join([each.feed for each in every]),
        row_counts=[len(each.rows) for each in every],
        ends=[step for each in every for step in _differences(row.counter_end for row in each.rows)],
        seqs=[step for each in every for step in _differences(row.seq for row in each.rows)],
        times_ms=[row.time_ms for each in every for row in each.rows],
    )


def decode_datings(message: pb.Datings) -> tuple[Dated, ...]:
    """MalformedGraph when the columns do not fit together."""
    rows = sum(message.row_counts)
    if not len(message.writers) * _FEED_BYTES == len(message.row_counts) * _FEED_BYTES == len(message.feeds):
        raise MalformedGraph("datings without a feed for each writer")
    if not rows == len(message.ends) == len(message.seqs) == len(message.times_ms):
        raise MalformedGraph("datings of unequal columns")
    columns = zip(message.ends, message.seqs, message.times_ms, strict=True)
    found = []
    for number, (writer, count) in enumerate(zip(message.writers, message.row_counts, strict=True)):
        feed = FeedId(message.feeds[number * _FEED_BYTES : (number + 1) * _FEED_BYTES])
        end = seq = 0
        made = []
        for _ in range(count):
            end_step, seq_step, time_ms = next(columns)
            end, seq = end + end_step, seq + seq_step
            made.append(Row(end, seq, time_ms))
        found.append(Dated(writer, feed, tuple(made)))
    return tuple(found)


def _pieces(message: pb.Ground, writers: list[int], of_text: bool) -> Iterator[Piece]:
    count = len(message.piece_lengths)
    makers = [0] * count if of_text else list(message.piece_makers)
    lamports = [0] * count if of_text else list(message.piece_lamports)
    columns = (message.piece_writers, message.piece_counters, makers, lamports)
    if any(len(column) != count for column in columns) or (
        of_text and (message.piece_makers or message.piece_lamports)
    ):
        raise MalformedGraph("pieces of unequal columns")
    counter = lamport = 0
    for writer, step, maker, lamport_step, length in zip(*columns, message.piece_lengths, strict=True):
        if not 0 < length <= COUNTER_END_MAX or max(writer, maker) >= len(writers):
            raise MalformedGraph("a piece of nothing, or by nobody")
        counter += step
        lamport += lamport_step
        if of_text:
            yield Piece(writers[writer], counter, length)
        else:
            yield Piece(writers[writer], counter, length, writers[maker], lamport)
        counter += length
        lamport += length


def _marks(message: pb.Ground, standing: int) -> Iterator[StandingMark]:
    columns = (message.mark_starts, message.mark_lengths, message.mark_keys, message.mark_values)
    if len({len(column) for column in columns}) != 1:
        raise MalformedGraph("marks of unequal columns")
    places = set()
    for start, length, key, value in zip(*columns, strict=True):
        yield StandingMark(start, start + length, key, mark_value(value))
        places |= {start, start + length}
    count = len(message.mark_keys)
    if len(places) != 2 * count or (places and max(places) >= standing + 2 * count):
        raise MalformedGraph("marks that do not end where there is a place")


def _steps(spans: Iterable[tuple[int, int]]) -> list[int]:
    """Starts of spans, each against where the one before ends."""
    found, here = [], 0
    for start, length in spans:
        found.append(start - here)
        here = start + length
    return found


def _differences(numbers: Iterable[int]) -> list[int]:
    found, last = [], 0
    for number in numbers:
        found.append(number - last)
        last = number
    return found


def _bits(numbers: Iterable[int]) -> bytes:
    """Without zeros at the end, so that there is one way to write them."""
    mask = sum(1 << number for number in numbers)
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def _set_bits(data: bytes, count: int) -> list[int]:
    mask = int.from_bytes(data, "little")
    if mask >> count or len(data) != (mask.bit_length() + 7) // 8:
        raise MalformedGraph("heads of a ground that are nobody's")
    return [number for number in range(count) if mask >> number & 1]
