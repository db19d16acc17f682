"""Blocks as a data source of Spark: what Spark calls, on the driver and in workers, by way of `pyspark_echostore`.

Options: `lake` or `home` (a folder, one of them), `version` of a lake; `party`, `feed` (hex keys, several with commas),
`control` (true or false); for streams `maxBlocksPerTrigger`, and `afterVersion` of a lake: a stream without a checkpoint
begins behind what that version has. Rows have the columns of `schemas.BLOCKS`. The first row of
each stretch has `previous`, so that every partition can be verified by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
    Not,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import BinaryType, BooleanType, LongType, StructField, StructType

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import KEY_BYTES
from echostore.pipeline import schemas
from echostore.pipeline.source import planning
from echostore.pipeline.source.planning import SeqRange
from echostore.pipeline.source.timeframes import from_offset, to_offset
from echostore.pipeline.source.views import Chosen, HomeView, LakeView, Stretch, View

OPTIONS = ("lake", "home", "version", "party", "feed", "control", "maxblockspertrigger", "afterversion")
_TYPES = {pa.binary(): BinaryType(), pa.bool_(): BooleanType(), pa.int64(): LongType()}


@dataclass(frozen=True)
class Settings:
    """The options of a source, checked."""

    lake: str | None
    home: str | None
    version: int | None
    chosen: Chosen
    blocks_max: int | None
    after_version: int | None = None

    @staticmethod
    def of(options: Mapping[str, str]) -> "Settings":
        given = {name.lower(): value for name, value in options.items()}
        unknown = sorted(set(given) - set(OPTIONS))
        if unknown:
            raise UsageError(f"echostore has no option {unknown[0]!r}", next_step=f"Options are {', '.join(OPTIONS)}.")
        lake, home = given.get("lake"), given.get("home")
        if (lake is None) == (home is None):
            raise UsageError("one of the options `lake` and `home` has to be given")
        if home is not None and ("version" in given or "afterversion" in given):
            raise UsageError("a home has no versions; `version` and `afterVersion` go with `lake`")
        control = given.get("control")
        if control is not None and control.lower() not in ("true", "false"):
            raise UsageError(f"`control` is true or false, and not {control!r}")
        return Settings(
            lake,
            home,
            _number("version", given.get("version"), 0),
            Chosen(
                _keys("party", given.get("party")),
                _keys("feed", given.get("feed")),
                None if control is None else control.lower() == "true",
            ),
            _number("maxBlocksPerTrigger", given.get("maxblockspertrigger"), 1),
            _number("afterVersion", given.get("afterversion"), 0),
        )

    def view(self, chosen: Chosen) -> View:
        if self.lake is not None:
            return LakeView(self.lake, chosen, self.version)
        assert self.home is not None, "one of the two is given"
        return HomeView(self.home, chosen)


class BlocksPartition(InputPartition):
    """What one task reads."""

    def __init__(self, stretches: list[Stretch]) -> None:
        super().__init__(None)
        self.stretches = stretches


class BlocksSource(DataSource):
    """Blocks of a lake or a home. `filters`: whether reading takes them, which a session has to allow."""

    def __init__(self, options: dict[str, str], *, filters: bool) -> None:
        super().__init__(options)
        self._filters = filters

    def schema(self) -> StructType:
        return StructType([StructField(each.name, _TYPES[each.type], each.nullable) for each in schemas.BLOCKS])

    def reader(self, schema: StructType) -> "BlocksReader":
        _check_schema(schema, self.schema())
        settings = Settings.of(self.options)
        if settings.blocks_max is not None or settings.after_version is not None:
            raise UsageError("maxBlocksPerTrigger and afterVersion are for streams")
        return FilteredBlocksReader(settings) if self._filters else BlocksReader(settings)

    def streamReader(self, schema: StructType) -> "BlocksStream":  # noqa: N802  # Spark's name
        _check_schema(schema, self.schema())
        settings = Settings.of(self.options)
        if settings.version is not None:
            raise UsageError("a stream follows a lake; `version` is for batches")
        return BlocksStream(settings)


class BlocksReader(DataSourceReader):
    """All blocks at one moment."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._chosen = settings.chosen
        self._seqs = SeqRange()

    def partitions(self) -> Sequence[InputPartition]:
        view = self._settings.view(self._chosen)
        stretches = planning.between(view, {}, planning.newest(view), self._seqs)
        return [BlocksPartition(group) for group in planning.partitions(stretches)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)


class FilteredBlocksReader(BlocksReader):
    """The same, less what filters leave out."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802  # Spark's name
        """Take what can be answered by not reading; the rest is Spark's."""
        for each in filters:
            if not self._take(each):
                yield each

    def _take(self, asked: Filter) -> bool:
        """Whether a filter is answered exactly."""
        if isinstance(asked, Not):
            inner = asked.child
            if isinstance(inner, EqualTo) and inner.attribute == ("control",) and isinstance(inner.value, bool):
                return self._narrow("control", [not inner.value])
            return False
        column: tuple[str, ...] = getattr(asked, "attribute", ())
        if isinstance(asked, EqualTo | EqualNullSafe):
            return len(column) == 1 and self._narrow(column[0], [asked.value])
        if isinstance(asked, In):
            return len(column) == 1 and column[0] != "seq" and self._narrow(column[0], list(asked.value))
        if column != ("seq",):
            return False
        low, high = self._seqs.start, self._seqs.end
        match asked:
            case GreaterThan(value=int(value)):
                low = max(low, value + 1)
            case GreaterThanOrEqual(value=int(value)):
                low = max(low, value)
            case LessThan(value=int(value)):
                high = min(high, value)
            case LessThanOrEqual(value=int(value)):
                high = min(high, value + 1)
            case _:
                return False
        self._seqs = SeqRange(low, high)
        return True

    def _narrow(self, column: str, values: list[Any]) -> bool:
        chosen = self._chosen
        if column in ("party", "feed") and all(isinstance(value, bytes | bytearray) for value in values):
            wanted = frozenset(map(bytes, values))
            if column == "party":
                parties = wanted if chosen.parties is None else chosen.parties & wanted
                self._chosen = Chosen(parties, chosen.feeds, chosen.control)
            else:
                feeds = wanted if chosen.feeds is None else chosen.feeds & wanted
                self._chosen = Chosen(chosen.parties, feeds, chosen.control)
            return True
        if column == "control" and len(values) == 1 and isinstance(values[0], bool):
            if chosen.control is not None and chosen.control != values[0]:
                self._chosen = Chosen(frozenset(), chosen.feeds, chosen.control)
            else:
                self._chosen = Chosen(chosen.parties, chosen.feeds, values[0])
            return True
        if column == "seq" and len(values) == 1 and isinstance(values[0], int):
            low, high = max(self._seqs.start, values[0]), min(self._seqs.end, values[0] + 1)
            self._seqs = SeqRange(low, high)
            return True
        return False


class BlocksStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Blocks as they come. An offset is a timeframe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._view: View | None = None
        self._stopped_looking = False

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        settings = self._settings
        if settings.lake is None or not settings.after_version:
            return {}
        return to_offset(planning.newest(LakeView(settings.lake, settings.chosen, settings.after_version)))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        limit = self._settings.blocks_max
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        self._look()
        self._stopped_looking = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802  # Spark's name
        view = self._look()
        if isinstance(limit, ReadMaxRows):
            return to_offset(planning.advance(view, from_offset(start), limit.max_rows))
        return to_offset(planning.newest(view))

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name
        return None if self._view is None else to_offset(planning.newest(self._view))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        # After a restart this is asked first, with an end that was decided before.
        view = self._view or self._look()
        stretches = planning.between(view, from_offset(start), from_offset(end))
        return [BlocksPartition(group) for group in planning.partitions(stretches)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)

    def _look(self) -> View:
        if self._view is None:
            self._view = self._settings.view(self._settings.chosen)
        elif not self._stopped_looking:
            self._view.refresh()
        return self._view


def _read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, BlocksPartition), type(partition)
    for stretch in partition.stretches:
        yield from stretch.read()


def _check_schema(given: StructType, ours: StructType) -> None:
    if given.simpleString() != ours.simpleString():
        raise UsageError("the columns of echostore are given and can't be set", next_step="Leave the schema out.")


def _keys(name: str, text: str | None) -> frozenset[bytes] | None:
    if text is None:
        return None
    keys = []
    for part in text.split(","):
        try:
            key = bytes.fromhex(part.strip())
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise UsageError(f"`{name}` takes whole keys of {2 * KEY_BYTES} hex digits, and not {part[:80]!r}")
        keys.append(key)
    return frozenset(keys)


def _number(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"`{name}` is a number from {least} on, and not {text[:40]!r}")
    return int(text)
