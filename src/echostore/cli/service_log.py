"""The log of a service on stderr: one line per event, as text or as JSON.

Whatever would write to stderr by itself comes here too, so that a reader of JSON lines reads nothing else: libraries (asyncio
tells of tasks that failed), warnings, threads that end by an exception, errors in finalizers.
"""

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from typing import Any, Literal

from echostore.cli.values import harmless

_log = logging.getLogger("echostore")

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
    root = logging.getLogger()
    root.handlers[:] = [each for each in root.handlers if not isinstance(each.formatter, _Json | _Text)] + [handler]
    logging.captureWarnings(True)
    threading.excepthook = _thread_failed
    sys.unraisablehook = _finalizer_failed


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    thread = failed.thread.name if failed.thread is not None else ""
    if failed.exc_value is not None:
        _log.error("a thread failed", exc_info=failed.exc_value, extra={"thread_name": thread})


def _finalizer_failed(failed: "sys.UnraisableHookArgs") -> None:
    _log.error("a finalizer failed", exc_info=failed.exc_value, extra={"object": repr(failed.object)})


def _event(record: logging.LogRecord) -> dict[str, Any]:
    """What happened. The words of a library are no event of ours: they come beside one."""
    text = record.getMessage()
    if record.name.partition(".")[0] == "echostore":
        return {"event": text}
    if record.name == "asyncio" and record.exc_info:
        return {"event": "a task failed", "what": text}
    return {"event": "a library said", "what": text}


def _error(record: logging.LogRecord) -> dict[str, str]:
    error = record.exc_info[1] if record.exc_info else None
    return {} if error is None else {"error": f"{type(error).__name__}: {error}"}


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
            **_event(record),
            **_extra(record),
            **_error(record),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, separators=(",", ":"))


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = _event(record)
        more = "".join(f" {key}={value}" for key, value in {**event, **_extra(record)}.items() if key != "event")
        line = harmless(f"{_time(record)} {record.levelname.lower():<7} {event['event']}{more}")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
