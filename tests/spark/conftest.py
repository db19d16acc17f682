"""One Spark session for all tests of a process, started when the first test asks for it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from echostore.pipeline.session import SparkOptions, spark_session
from spark.engines import NAMES, Engines


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    with spark_session("tests", SparkOptions(master="local[2]", memory="1g", short=True)) as session:
        yield session


@pytest.fixture(params=NAMES)
def engines(request: pytest.FixtureRequest, spark: Any) -> Engines:
    """The engines that a test runs the pipeline on, in turn: each test that asks for it is run with all of them."""
    return Engines(request.param, spark)


@pytest.fixture
def shared_session(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Commands that a test runs in this process take the session of all tests, instead of starting an engine."""

    @contextlib.contextmanager
    def given(
        name: str, options: SparkOptions | None = None, *, tell: object = None, step: object = None
    ) -> Iterator[Any]:
        yield spark

    monkeypatch.setattr("echostore.pipeline.session.spark_session", given)
    return spark
