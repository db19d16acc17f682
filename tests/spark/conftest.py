"""One Spark session for all tests of a process, started when the first test asks for it."""

from collections.abc import Iterator
from typing import Any

import pytest

from echostore.pipeline.session import SparkOptions, spark_session


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    with spark_session("tests", SparkOptions(master="local[2]", memory="1g", short=True)) as session:
        yield session
