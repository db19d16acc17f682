"""What a user of echostore catches: `EchoError` and its kinds.

Every error has a stable code, says what happened and what to do next. `unchanged` says what stayed as it was, or what did
not. It has no default: only who raises in the midst of a change knows, and after reading there is nothing to say. Bad input
from other peers never raises these; it becomes a listed rejection with a `Reason`.

Each kind derives from the built-in error that Python programs expect as well. Some of these are `OSError`s (`Refused` is a
`PermissionError`, `TimedOut` a `TimeoutError`): a handler of `OSError` around code of this package lets `EchoError` pass
first.
"""

NOTHING_CHANGED = "Nothing was changed."
"""For who refuses a change as a whole, where a person could think that a part of it happened."""


def sentence(text: str) -> str:
    """A part of a message with its full stop."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else text + "."


class EchoError(Exception):
    """Something a person asked for can't be done. Subclasses fix the code and the exit status."""

    code = "E-FAILED"
    exit_status = 1

    def __init__(self, what: str, *, unchanged: str = "", next_step: str = "") -> None:
        super().__init__(" ".join(sentence(part) for part in (what, unchanged, next_step) if part))
        self.what = what
        self.unchanged = unchanged
        self.next_step = next_step


class UsageError(EchoError, ValueError):
    """The call makes no sense: wrong type, wrong argument."""

    code = "E-USAGE"
    exit_status = 2


class ReadOnlyValue(UsageError, TypeError):
    """A list or map that was read is changed: the change would reach no item."""


class NotFound(EchoError, LookupError):
    """No such party, item, feed or blob here."""

    code = "E-NOT-FOUND"
    exit_status = 3


class Refused(EchoError, PermissionError):
    """Permission, policy, schema or a limit says no."""

    code = "E-REFUSED"
    exit_status = 4


class SchemaViolation(Refused, ValueError):
    """A mutation that breaks the schema of its item's type."""

    code = "E-SCHEMA"


class TooLarge(Refused, ValueError):
    """A value, batch or block beyond a limit."""

    code = "E-TOO-LARGE"


class WrongPassphrase(Refused):
    """The key store is locked and this passphrase does not open it."""

    code = "E-PASSPHRASE"


class TimedOut(EchoError, TimeoutError):
    """What was waited for did not happen in time."""

    code = "E-TIMEOUT"
    exit_status = 5


class Corrupt(EchoError):
    """Stored or received bytes do not match their hash, signature or format."""

    code = "E-CORRUPT"
    exit_status = 6


class DamagedHere(Corrupt):
    """Bytes on this peer's own disk are not what it stored: no reason to think ill of who made them."""


class Locked(EchoError):
    """Another process has the store open; `pid` is that process, where it is known."""

    code = "E-LOCKED"
    exit_status = 7

    def __init__(self, what: str, *, unchanged: str = "", next_step: str = "", pid: int | None = None) -> None:
        super().__init__(what, unchanged=unchanged, next_step=next_step)
        self.pid = pid


class StorageFailed(EchoError):
    """The disk is full, read-only or failing; the store stays readable."""

    code = "E-STORAGE"


class DiskFull(StorageFailed):
    """There is no space left, or a quota is used up. The store takes writes again as soon as there is space."""


class Unreachable(EchoError):
    """Another peer could not be reached, or would not talk."""

    code = "E-UNREACHABLE"
    exit_status = 5


class EngineFailed(EchoError):
    """The engine of bulk work can't start here, or it gave up: no Java, too little memory, a master that is not there."""

    code = "E-ENGINE"


class Closed(EchoError):
    """The peer, party or store has been closed."""

    code = "E-CLOSED"


class ModelFailed(EchoError):
    """An item's model raised; the item is quarantined, its operations are kept."""

    code = "E-MODEL"


class Compacted(EchoError, LookupError):
    """The history asked for lies below an epoch and is no longer here."""

    code = "E-COMPACTED"
    exit_status = 3
