"""Keywords of earlier versions that are accepted for one more version, with a warning, where they can't be data.

A property set has properties of any name, so `name=` and `version=` are properties there. Nothing else that
`party.create` makes takes properties: the old meaning of these keywords is the only one they can have.
"""

import warnings
from typing import Any

from echostore.kernel.errors import UsageError
from echostore.kernel.ids import KEY_BYTES
from echostore.kernel.values import Value

_CALLER = 4
"""From `_warn` up to the code that called the API."""


def deprecated_name(given: dict[str, Value]) -> Value:
    """Take the display name out of keywords for an item without properties."""
    if "name" not in given:
        return ""
    _warn("create(..., name=...)", "set `item.name` after creating it, in the same batch")
    return given.pop("name")


def deprecated_version(model: str, version: int | None, given: dict[str, Value]) -> Any:
    """Take the model's version out of keywords for an item without properties."""
    if "version" not in given:
        return version
    old = given.pop("version")
    if version is not None:
        raise UsageError(f"the version of the model is given twice: @{version} and version={old!r}")
    _warn("create(..., version=...)", f'create("{model}@{old}")')
    return old


def deprecated_key(key: bytes | None, given: dict[str, Value]) -> bytes | None:
    """Take the inception key out of a view's keywords: `key` is a property unless its value is a public key."""
    old = given.get("key")
    if not isinstance(old, bytes) or len(old) != KEY_BYTES:
        return key
    if key is not None:
        return key
    _warn("create_view(..., key=...)", "inception_key=..., or give the property in a mapping")
    del given["key"]
    return old


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated; instead: {new}", DeprecationWarning, stacklevel=_CALLER)
