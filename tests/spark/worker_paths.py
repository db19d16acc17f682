"""Modules of the tests for Spark's workers: models of stories travel by name, and a worker has to find them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


@contextmanager
def with_test_modules(spark: Any) -> Iterator[None]:
    """Workers that start from here on import from the folder of the tests, beside what they import anyway."""
    environment = spark.sparkContext.environment
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    try:
        yield
    finally:
        del environment["PYTHONPATH"]
        if before is not None:
            environment["PYTHONPATH"] = before
