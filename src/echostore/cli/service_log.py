"""The log of a service on stderr: one line per event, as text or as JSON."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from echostore.cli.values import harmless

_OWN_FIELDS = frozenset({*logging.LogRecord("", 0, "", 0, "", (), None).__dict__, "message", "asctime", "taskName"})
"""What every record has; the rest was given by who logged."""


def log_to_stderr(form: Literal["text", "json"], *, quiet: bool) -> None:
    """Send what the package logs to stderr; `quiet` leaves warnings and worse."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logger = logging.getLogger("echostore")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in _OWN_FIELDS}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "part": record.name,
            "event": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, separators=(",", ":"))


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        more = "".join(f" {key}={value}" for key, value in _extra(record).items())
        line = harmless(f"{_time(record)} {record.levelname.lower():<7} {record.getMessage()}{more}")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
