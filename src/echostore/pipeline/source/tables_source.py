"""Tables of an output as a source of Spark: a task reads some files, and keeps the rows of them that count."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from echostore.kernel.errors import UsageError
from echostore.pipeline.folders import FolderKind, folder_kind
from echostore.pipeline.output.stored_tables import SHOWN, StoredFile, StoredTables, batches_of, check_table

ITEMS, BLOCKS = "items", "blocks"


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be read: a table of what kind of folder, and the options that are of its blocks."""

    kind: FolderKind
    path: str
    table: str
    options: Mapping[str, str]

    @staticmethod
    def of(options: Mapping[str, str]) -> "Target":
        """Out of the options of a source. `path` may be of any kind; `lake` and `home` say which, and give blocks."""
        given = {name.lower(): value for name, value in options.items()}
        named = [name for name in ("path", "lake", "home") if name in given]
        if not named:
            raise UsageError(
                "echostore needs a folder",
                next_step='Load one: spark.read.format("echostore").load("out"), or give the option lake or home.',
            )
        if len(named) > 1:
            raise UsageError(f"{' and '.join(named)} can't be given together", next_step="Name one folder.")
        path = given.pop(named[0])
        kind = folder_kind(path) if named[0] == "path" else FolderKind(named[0])
        table = given.pop("table", ITEMS if named[0] == "path" else BLOCKS)
        check_table(table)
        if kind is not FolderKind.OUTPUT and table != BLOCKS:
            publish = "" if kind is FolderKind.LAKE else " Publish it to a lake first."
            raise UsageError(
                f"{path} is a {kind}, which has blocks and no {table}.",
                next_step='Give .option("table", "blocks"), or build tables with `echostore pipeline run` and load its '
                f"output.{publish}",
            )
        if kind is FolderKind.OUTPUT:
            unknown = sorted(set(given) - {"commit"})
            if unknown:
                raise UsageError(
                    f"a table of an output has no option {unknown[0]!r}", next_step="Options are table and commit."
                )
            return Target(kind, path, table, given)
        return Target(kind, path, table, {**given, str(kind): path})

    @property
    def schema(self) -> StructType:
        """The columns of a table of an output."""
        return from_arrow_schema(SHOWN[self.table])

    def reader(self) -> "TablesReader":
        number = self.options.get("commit")
        if number is not None and not number.isdecimal():
            raise UsageError(f"`commit` is the number of a commit, and not {number[:40]!r}")
        stored = StoredTables.open(self.path, None if number is None else int(number))
        stored.check(self.table)
        return TablesReader(stored, self.table)


class FilesPartition(InputPartition):
    """What one task reads."""

    def __init__(self, files: list[StoredFile]) -> None:
        super().__init__(None)
        self.files = files


class TablesReader(DataSourceReader):
    """A table of one commit."""

    def __init__(self, stored: StoredTables, table: str) -> None:
        self._stored, self._table = stored, table

    def partitions(self) -> Sequence[InputPartition]:
        # Spark takes no partitions for one without a value.
        return [FilesPartition(files) for files in self._stored.parts(self._table)] or [FilesPartition([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, FilesPartition), type(partition)
        yield from batches_of(self._stored.read_part(self._table, partition.files))
