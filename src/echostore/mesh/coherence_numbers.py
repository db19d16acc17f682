"""What a service for thin clients and an edge count, for monitors.

    links, systems, indexes      how many there are now
    hits, misses                 questions that were answered from what is held, and those that were not
    updates, backpressure        messages of these kinds that were sent
    excluded                     operations of leaves that the party left out after they were taken; at a root
    refused                      by reason

No name of a party, a person or a device is in it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from echostore.kernel.coherence.messages import Backpressure, EndUpdate, Message, NullUpdate, Update


class Family(NamedTuple):
    """One metric: its kind, its name without prefix, what it is about, and its values by label."""

    kind: Literal["gauge", "counter"]
    name: str
    about: str
    values: Mapping[str, int]
    label: str | None = None


@dataclass(slots=True)
class Sent:
    """Messages that went down, of the kinds that are counted."""

    updates: int = 0
    backpressure: int = 0

    def count(self, message: Message) -> None:
        kind = type(message)
        if kind is Update or kind is EndUpdate or kind is NullUpdate:
            self.updates += 1
        elif kind is Backpressure:
            self.backpressure += 1


@dataclass(frozen=True, slots=True)
class ThinNumbers:
    """How things stand at one moment, counted since the start."""

    links: int = 0
    systems: int = 0
    indexes: int = 0
    hits: int = 0
    misses: int = 0
    updates: int = 0
    backpressure: int = 0
    excluded: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)

    def families(self) -> Iterator[Family]:
        def one(kind: Literal["gauge", "counter"], name: str, about: str, value: int) -> Family:
            return Family(kind, f"thin_{name}", about, {"": value})

        yield one("gauge", "links", "Thin clients and edges that are connected now.", self.links)
        yield one("gauge", "systems", "Systems that are reached through these links.", self.systems)
        yield one("gauge", "indexes", "Indexes that are held.", self.indexes)
        yield one("counter", "hits", "Questions that were answered from what is held.", self.hits)
        yield one("counter", "misses", "Questions that had to be evaluated, or passed on.", self.misses)
        yield one("counter", "updates", "Updates sent to those below.", self.updates)
        yield one("counter", "backpressure", "Times that somebody below was asked to wait.", self.backpressure)
        yield one("counter", "excluded", "Operations that were taken, and left out since.", self.excluded)
        yield Family("counter", "thin_refused", "What was refused, by reason.", self.refused, "reason")


def added(several: Iterable[ThinNumbers]) -> ThinNumbers:
    """The sums."""
    total = ThinNumbers()
    for each in several:
        refused = dict(total.refused)
        for reason, count in each.refused.items():
            refused[reason] = refused.get(reason, 0) + count
        total = ThinNumbers(
            links=total.links + each.links,
            systems=total.systems + each.systems,
            indexes=total.indexes + each.indexes,
            hits=total.hits + each.hits,
            misses=total.misses + each.misses,
            updates=total.updates + each.updates,
            backpressure=total.backpressure + each.backpressure,
            excluded=total.excluded + each.excluded,
            refused=refused,
        )
    return total


def metrics_text(numbers: ThinNumbers) -> str:
    """As Prometheus reads it; an edge has no need of its library."""
    lines = []
    for family in numbers.families():
        name = f"echostore_{family.name}" + ("_total" if family.kind == "counter" else "")
        lines += [f"# HELP {name} {family.about}", f"# TYPE {name} {family.kind}"]
        for label, value in sorted(family.values.items()):
            lines.append(f'{name}{{{family.label}="{label}"}} {value}' if family.label else f"{name} {value}")
    return "\n".join(lines) + "\n"
