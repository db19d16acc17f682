"""What the checker of histories has to say: violations, counts, and how entries fared."""

from collections import Counter
from dataclasses import dataclass, field

VIOLATIONS_KEPT_MAX = 1000
"""Listed violations per invariant; beyond, they are only counted."""


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: str
    event: int
    """The number of the event at which it showed, counted from 1."""
    what: str

    def __str__(self) -> str:
        return f"{self.invariant} at event {self.event}: {self.what}"


@dataclass(slots=True)
class Report:
    """The verdict. `fates` counts entries at the last quiescence: stable, lost, never-read or excluded."""

    events: int = 0
    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    latencies_s: dict[str, float] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not self.counts

    def add(self, invariant: str, event: int, what: str) -> None:
        self.counts[invariant] += 1
        if self.counts[invariant] <= VIOLATIONS_KEPT_MAX:
            self.violations.append(Violation(invariant, event, what))

    def __str__(self) -> str:
        verdict = "good" if self.good else "; ".join(f"{name}: {count}" for name, count in sorted(self.counts.items()))
        fates = ", ".join(f"{count} {fate}" for fate, count in sorted(self.fates.items())) or "no quiescence"
        latency = ", ".join(f"{name} {value:.3f} s" for name, value in self.latencies_s.items())
        lines = [
            f"{self.events} events, {verdict}",
            f"entries: {fates}" + (f"; stable after {latency}" if latency else ""),
        ]
        return "\n".join(lines + [str(violation) for violation in self.violations[:50]])
