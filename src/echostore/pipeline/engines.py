"""Which engine a run takes: this process, or Spark.

Both run the same stages and write the same commit. Spark takes ten seconds and more until its first job is done, and then
shares the work of a large lake out; a process begins at once, and keeps what it works on in memory.
"""

from enum import StrEnum

LOCAL_BLOCKS_MAX = 100_000
"""Blocks of the parties that are to be built, up to which `auto` takes this process. Chosen from figures of a busy machine
with two cores (`docs/benchmarks.md`): the process was measured up to this size, Spark only up to 10,000 messages."""


class Engine(StrEnum):
    """What `--engine` names."""

    AUTO = "auto"
    LOCAL = "local"
    SPARK = "spark"

    def decided(self, blocks: int) -> "Engine":
        """The engine for so many blocks: what was asked for, or what suits them."""
        if self is not Engine.AUTO:
            return self
        return Engine.LOCAL if blocks <= LOCAL_BLOCKS_MAX else Engine.SPARK
