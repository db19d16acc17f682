"""Moments as people write them: `10m` ago, an ISO time, `now`, an epoch, or an anchor."""

import re
from datetime import UTC, datetime, timedelta

from echostore.kernel.errors import UsageError

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d|w)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_NEGATIVE = re.compile(r"-\s*\d.*")
_NEXT_STEP = "Write 10m or 2h (ago), 2026-05-01T10:00, now, epoch:3, or an anchor."


def parse_span(text: str) -> float:
    """`30m`, `2h`, `1d` in seconds."""
    _not_negative(text)
    found = _AGO.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text[:60]!r} is not a span of time", next_step="Write 30m, 2h or 1d.")
    return float(found[1]) * _SECONDS[found[2]]


def span(seconds: int) -> str:
    """A length of time as `parse_span` takes it, in the largest unit that tells all of it."""
    unit = next(unit for unit in ("d", "h", "m", "s") if seconds % _SECONDS[unit] == 0)
    return f"{seconds // int(_SECONDS[unit])}{unit}"


def parse_moment(text: str) -> datetime | str:
    """A time, or the text of an anchor or epoch. A time without a zone is the local time of this machine."""
    text = text.strip()
    if text.startswith(("anchor:", "epoch:")):
        return text
    _not_negative(text)
    now = datetime.now(UTC)
    if text == "now":
        return now
    try:
        found = _AGO.fullmatch(text)
        if found:
            return now - timedelta(seconds=float(found[1]) * _SECONDS[found[2]])
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(f"{text[:60]!r} is not a moment", next_step=_NEXT_STEP) from None


def parse_duration_s(text: str) -> float:
    """A length of time in seconds: `30s`, `10m`, or a bare number of seconds."""
    _not_negative(text)
    found = _AGO.fullmatch(text.strip())
    if found:
        return float(found[1]) * _SECONDS[found[2]]
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{text[:60]!r} is not a length of time", next_step="Write 30s, 10m or 2h.")
    return seconds


def _not_negative(text: str) -> None:
    if _NEGATIVE.fullmatch(text.strip()):
        raise UsageError(f"{text[:60]!r} is negative, and a length of time must not be")
