"""The data source "echostore" for every session of Spark: Spark looks for modules named `pyspark_*`, and finds this one.

    spark.read.format("echostore").load("out")                              items of the newest commit
    spark.read.format("echostore").option("table", "members").load("out")   another table
    spark.read.format("echostore").option("table", "blocks").load("lake")   blocks of a lake, or of the home of a peer

Nothing of echostore is imported until the format is used, so that Spark finds other sources whatever is amiss with this
one.
"""

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from echostore.pipeline.source.tables_source import Target


class DefaultSource(DataSource):
    """Format "echostore". Options: `table`, `commit` of an output; those of blocks with a lake or a home."""

    filters = False
    """Whether blocks that a filter leaves out are not read. A session has to allow that, or it refuses such a source."""

    @classmethod
    def name(cls) -> str:
        return "echostore"

    def schema(self) -> "StructType":
        target = self._target()
        return target.schema if target.kind == "output" else self._blocks(target).schema()

    def reader(self, schema: "StructType") -> Any:
        target = self._target()
        return target.reader() if target.kind == "output" else self._blocks(target).reader(schema)

    def streamReader(self, schema: "StructType") -> Any:  # noqa: N802  # Spark's name
        from echostore.kernel.errors import UsageError

        target = self._target()
        if target.kind == "output":
            raise UsageError("an output can't be streamed; a lake or a home can", next_step="Load one of these.")
        return self._blocks(target).streamReader(schema)

    def _target(self) -> "Target":
        from echostore.pipeline.source.tables_source import Target

        return Target.of(self.options)

    def _blocks(self, target: "Target") -> Any:
        from echostore.pipeline.source.blocks_source import BlocksSource

        return BlocksSource(dict(target.options), filters=self.filters)
