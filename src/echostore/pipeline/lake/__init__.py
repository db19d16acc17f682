"""The block lake: signed blocks of many parties as Parquet files, with a log of versions. See docs/internals/lake.md."""

from echostore.pipeline.lake.versions import Lake, LakeVersion
from echostore.pipeline.lake.writer import LakeWriter

__all__ = ["Lake", "LakeVersion", "LakeWriter"]
