"""An independent judge of histories: reads what peers wrote down and says which promises were broken.

It shares no code with the product and knows nothing but the history (docs/internals/histories.md has the events).
Histories are read twice: first for what exists (appends, boots, forks, cuts, epochs, claims), then for what each peer
did with it. Only the order of events *of one peer* matters, except that an append comes before its acknowledgement and
that a `quiesce` comes after what it sums up.

    I1 durability      an acknowledged or durable append is there after every later boot of its writer
    I2 nothing lost    at quiescence a peer has delivered everything, less what the history itself shows as excluded
    I3 nothing invented  only appended entries are delivered; one hash per place; one writer per feed, who never forks
    I4 once, in order  per peer and feed: no gap, no repetition, across crashes too
    I5 causal          dependencies are delivered first, or excluded
    I6 convergence     equal timeframe, admission and base: equal state, at any time
    I7 in the end      at quiescence the last states are equal
    I8 snapshots       an epoch's state, and the state of who started from one, is what the entries give
    I9 session         reads never go back and include own writes; streams neither skip, repeat nor go back; live queries tell all
                       that a fresh one shows, once
    I10 epochs         numbers form one chain, timeframes grow, one final epoch per number, one vote per identity
    I11 authority      what is delivered was allowed by the control blocks in its own past
    I12 faults         at quiescence all hold the same fork proofs, each for a fork that there is
    I14 liveness       at quiescence every epoch, invitation and recovery that was asked for has come about
    H  the history itself makes no sense

    python -m echostore.testing.checker history.jsonl
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from echostore.testing.history_conduct import Conduct
from echostore.testing.history_facts import Event, Facts
from echostore.testing.verdict import Report, Violation

__all__ = ["Event", "Report", "Violation", "check", "check_events", "check_file", "main"]

_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError)
"""What reading a field raises that is missing or of another type; nothing else in here raises them."""


def check(events: Callable[[], Iterable[Event]]) -> Report:
    """Judge a history; `events` gives it from its beginning, twice."""
    return _judge(enumerate(events(), 1), lambda: enumerate(events(), 1))


def check_events(events: list[Event]) -> Report:
    return check(lambda: events)


def check_file(path: Path) -> Report:
    """Judge a file with one event per line."""
    return _judge(_lines(path, skip=_NO_FACTS), lambda: _lines(path))


_NO_FACTS = re.compile(r'"kind": ?"(deliver|recv|state|read|stream|live)"')
"""Lines that the first reading need not even parse. Quotes inside of JSON strings are escaped, so this finds no text."""


def _judge(facts_of: Iterable[tuple[int, Event]], events: Callable[[], Iterable[tuple[int, Event]]]) -> Report:
    report = Report()
    facts = Facts(report)
    malformed = set()
    for number, event in facts_of:
        try:
            facts.read(number, event)
        except _MALFORMED as error:
            malformed.add(number)
            report.add("H", number, f"a malformed event ({type(error).__name__}: {error})")
    facts.finish()
    conduct = Conduct(facts, report)
    for number, event in events():
        report.events = number
        if number in malformed:
            continue
        try:
            conduct.read(number, event)
        except _MALFORMED as error:
            report.add("H", number, f"a malformed event ({type(error).__name__}: {error})")
    conduct.finish()
    report.violations.sort(key=lambda violation: violation.event)
    return report


def _lines(path: Path, skip: re.Pattern[str] | None = None) -> Iterator[tuple[int, Event]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if skip is not None and skip.search(line):
                continue
            try:
                event = json.loads(line)
            except ValueError:
                event = {}
            yield number, event if isinstance(event, dict) else {}


def main() -> int:
    """Judge the files named on the command line; 6 when one is broken."""
    reports = [(name, check_file(Path(name))) for name in sys.argv[1:]]
    for name, report in reports:
        sys.stdout.write(f"{name}: {report}\n")
    return 0 if all(report.good for _, report in reports) else 6


if __name__ == "__main__":
    sys.exit(main())
