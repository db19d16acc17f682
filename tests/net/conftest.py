"""These tests make network namespaces. They run when their folder is named: `make test-net`, never with all others."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [(config.invocation_params.dir / each.split("::")[0]).resolve() for each in config.args]
    return None if any(each.is_relative_to(HERE) for each in named) else True
