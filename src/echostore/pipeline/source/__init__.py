"""The data source "echostore": blocks of a lake or of a home as a table, in batch and as a stream.

spark.read.format("echostore").load("out")                                   # tables of an output, in any session
register(spark)                                                              # with filters on blocks
spark.read.format("echostore").option("lake", "lake").load().where(col("party") == key)
spark.readStream.format("echostore").option("home", "data").option("maxBlocksPerTrigger", 10000).load()
"""

from typing import Any


def register(spark: Any) -> None:
    """Let the format "echostore" of a session take filters: then blocks that they leave out are not read. Without this
    it is known too, by `pyspark_echostore`, and Spark filters what it gives."""
    from echostore.pipeline.source.filtered_source import FilteredSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(FilteredSource)
