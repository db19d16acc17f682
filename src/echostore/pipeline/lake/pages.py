"""Pages of a Parquet file, by their own headers: what decoding a column takes, before Arrow decodes it.

The footer and the headers are claims of whoever made the file. A footer may call a row group small while the header of a
page claims 2 GiB that a kilobyte is decompressed to; a dictionary stores a value once that thousands of rows repeat; and
an encoding by prefixes repeats without a dictionary. Arrow allocates what the headers say, so they are read first.
"""

from dataclasses import dataclass
from typing import Any

HEADER_BYTES = 128
"""Read first; our headers have no more than that."""
HEADER_BYTES_MAX = 16 * 1024
"""With the statistics of a writer that adds long ones."""
PAGES_MAX = 65_536

_PLAIN, _PLAIN_DICTIONARY, _RLE, _DELTA_BINARY_PACKED, _RLE_DICTIONARY = 0, 2, 3, 5, 8
_DICTIONARIES = frozenset({_PLAIN_DICTIONARY, _RLE_DICTIONARY})
ENCODINGS = frozenset({_PLAIN, _RLE, _DELTA_BINARY_PACKED, *_DICTIONARIES})
"""Those of which a value takes no more than its bytes in the page, or is in a dictionary."""

# Of the Thrift structure PageHeader: type, uncompressed and compressed size, and the headers by type with the field of
# their encoding.
_TYPE, _UNCOMPRESSED, _COMPRESSED = 1, 2, 3
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_ENCODING_AT = {_DATA: (5, 2), _DICTIONARY: (7, 2), _DATA_V2: (8, 4)}


@dataclass(frozen=True, slots=True)
class Pages:
    """What the page headers of one column of a row group say."""

    bytes: int
    """Of all pages, decompressed."""
    dictionary: bool
    """Whether values may be repeated out of a dictionary."""


def read_pages(source: Any, column: Any, bytes_max: int) -> Pages:
    """Walk the headers of a column chunk (`pyarrow.parquet.ColumnChunkMetaData`). ValueError when they are not lawful,
    or claim more than `bytes_max`."""
    start: int = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset is not None:
        start = min(start, column.dictionary_page_offset)
    end = start + column.total_compressed_size
    if not 0 <= start <= end <= source.size():
        raise ValueError(f"column {column.path_in_schema} lies outside of the file")
    total, dictionary, at = 0, False, start
    for _ in range(PAGES_MAX):
        if at == end:
            return Pages(total, dictionary)
        header, length = _header(source, at, end)
        kind, uncompressed, compressed = (_number(header, field) for field in (_TYPE, _UNCOMPRESSED, _COMPRESSED))
        total += uncompressed
        if total > bytes_max:
            raise ValueError(f"the pages of column {column.path_in_schema} claim more than {bytes_max} bytes")
        if kind not in _ENCODING_AT:
            raise ValueError(f"column {column.path_in_schema} has pages of type {kind}")
        inner, field = _ENCODING_AT[kind]
        encoding = _number(header.get(inner), field)
        if encoding not in ENCODINGS:
            raise ValueError(f"column {column.path_in_schema} has encoding {encoding}, which is not of this format")
        dictionary |= kind == _DICTIONARY or encoding in _DICTIONARIES
        at += length + compressed
        if at > end:
            break
    raise ValueError(f"the pages of column {column.path_in_schema} do not end where the footer says")


def _header(source: Any, at: int, end: int) -> tuple[dict[int, Any], int]:
    for wanted in (HEADER_BYTES, HEADER_BYTES_MAX):
        compact = _Compact(source.read_at(min(wanted, end - at), at))
        try:
            return compact.structure(), compact.at
        except IndexError:
            continue
    raise ValueError("a page header does not end")


def _number(structure: Any, field: int) -> int:
    found = structure.get(field) if isinstance(structure, dict) else None
    if not isinstance(found, int) or found < 0:
        raise ValueError("a page header lacks what every one has")
    return found


class _Compact:
    """As much of Thrift's compact protocol as page headers need: numbers and structures by field; the rest is passed
    over. IndexError where the bytes end."""

    DEPTH_MAX = 8

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def structure(self, depth: int = 0) -> dict[int, Any]:
        if depth > self.DEPTH_MAX:
            raise ValueError("a page header is nested too deep")
        found: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._signed()
            found[field] = self._value(head & 15, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._signed()
            case 7:
                self._skip(8)
            case 8:
                self._skip(self._unsigned())
            case 12:
                return self.structure(depth + 1)
            case _:
                raise ValueError(f"a page header has a field of type {kind}")
        return None

    def _byte(self) -> int:
        found = self._data[self.at]
        self.at += 1
        return found

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise IndexError

    def _unsigned(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise ValueError("a number in a page header does not end")

    def _signed(self) -> int:
        found = self._unsigned()
        return (found >> 1) ^ -(found & 1)
