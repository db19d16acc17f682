"""The errors that programs catch. All are `EchoError`s, with a stable `code`, and what to do next in `next_step`.

import echostore
try:
    party.get(name)
except echostore.errors.NotFound as error:   # a LookupError too
    print(error.what, error.next_step)
"""

from echostore.kernel.errors import (
    Closed,
    Compacted,
    Corrupt,
    DiskFull,
    EchoError,
    EngineFailed,
    Locked,
    ModelFailed,
    NotFound,
    ReadOnlyValue,
    Refused,
    SchemaViolation,
    StorageFailed,
    TimedOut,
    TooLarge,
    Unreachable,
    UsageError,
    WrongPassphrase,
)
from echostore.kernel.models.base import OperationRefused

__all__ = [
    "Closed",
    "Compacted",
    "Corrupt",
    "DiskFull",
    "EchoError",
    "EngineFailed",
    "Locked",
    "ModelFailed",
    "NotFound",
    "OperationRefused",
    "ReadOnlyValue",
    "Refused",
    "SchemaViolation",
    "StorageFailed",
    "TimedOut",
    "TooLarge",
    "Unreachable",
    "UsageError",
    "WrongPassphrase",
]
