"""Which models a job knows: the base ones, and those that a module registers.

A module for `--models` has a function `register(models)` that calls `models.register(SomeModel)` for each of its
classes. Code is never taken from a party: the module must be installed wherever tasks run, and every task imports it by
name. Models that no module registers stay opaque.
"""

import importlib
from functools import cache

from echostore.kernel.errors import EchoError, UsageError
from echostore.kernel.models.factory import ModelFactory
from echostore.wire.values import value_from_bytes


@cache
def model_factory(module: str | None = None) -> ModelFactory:
    """The factory with what `module` registers; made once in each process."""
    factory = ModelFactory(value_from_bytes)
    if module is None:
        return factory
    try:
        register = importlib.import_module(module).register
        register(factory)
    except EchoError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(
            f"there is no module {error.name!r} for --models {module}",
            next_step="Install it where the job runs, or run from the folder that holds it.",
        ) from error
    except AttributeError as error:
        raise UsageError(
            f"the module {module} has no function register(models): {error}",
            next_step="Define it, and call models.register(...) for each model in it.",
        ) from error
    except Exception as error:
        raise UsageError(f"the module {module} can't register its models: {type(error).__name__}: {error}") from error
    return factory


def known_models(module: str | None = None) -> list[str]:
    """What a job with this module knows, as `name@version`."""
    return [f"{name}@{version}" for name, version in model_factory(module).names()]
