"""The data source "echostore": blocks of a lake or of a home as a table, in batch and as a stream.

register(spark)
spark.read.format("echostore").option("lake", "lake").load().where(col("party") == key)
spark.readStream.format("echostore").option("home", "data").option("maxBlocksPerTrigger", 10000).load()
"""

from typing import Any


def register(spark: Any) -> None:
    """Make the format "echostore" known to a session, and let it take filters."""
    from echostore.pipeline.source.blocks_source import BlocksSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(BlocksSource)
