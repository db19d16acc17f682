"""What a generated lake shall look like, and how its messages and items are shared out over its parties.

`messages` and `items` are of the whole lake, `feeds` of each party. Every party has a system item, made by one message
of its founder; it is among the messages and not among the items.
"""

import hashlib
from dataclasses import astuple, dataclass
from typing import Final

from echostore.kernel.errors import UsageError

MODELS: Final = ("property-set", "text", "growable-array", "threaded-log")
FEEDS_MAX: Final = 10_000
"""Data feeds of a party: each costs a few signatures of control messages."""
PARTIES_MAX: Final = 1_000_000
MESSAGES_MAX: Final = 1_000_000_000
"""More is no mistake of the format, but would take a day to make."""
WEIGHT_MAX: Final = 1_000_000
SEED_END: Final = 1 << 64
_TAG: Final = b"echostore/generated/1"

Mix = tuple[tuple[str, int], ...]
"""Models with their weights."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The arguments of a generated lake: equal shapes give equal blocks."""

    parties: int = 1
    feeds: int = 5
    messages: int = 1000
    items: int = 100
    mix: Mix = (("property-set", 1),)
    skew: float = 0.0
    """Share of the messages of a party that go to one item."""
    faults: int = 0
    seed: int = 1
    writers_per_item: int = 3

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("parties", self.parties, 1, PARTIES_MAX),
            ("feeds", self.feeds, 1, FEEDS_MAX),
            ("messages", self.messages, 1, MESSAGES_MAX),
            ("items", self.items, 0, MESSAGES_MAX),
            ("skew", self.skew, 0, 1),
            ("faults", self.faults, 0, PARTIES_MAX),
            ("seed", self.seed, 0, SEED_END - 1),
            ("writers per item", self.writers_per_item, 1, FEEDS_MAX),
        ):
            if not low <= value <= high:
                raise _wrong(f"{name} must be {low} to {high:,}, not {value}")
        if self.messages < self.parties:
            raise _wrong(f"{self.parties:,} parties need as many messages: one makes the system item of each")
        if self.items > self.messages - self.parties:
            raise _wrong(
                f"{self.items:,} items need as many messages, beside one for each of {self.parties:,} system items"
            )
        if not self.mix or {model for model, _ in self.mix} - set(MODELS):
            raise _wrong(f"the models are {', '.join(MODELS)}")

    def root(self) -> bytes:
        """What all keys are made from: lakes of other shapes have other parties, and may lie in one folder."""
        return hashlib.sha256(_TAG + repr(astuple(self)).encode()).digest()

    def part(self, number: int) -> "Part":
        """What falls to one party."""
        assert 0 <= number < self.parties, number
        messages, items, faults = (
            _share(total, self.parties, number) for total in (self.messages, self.items, self.faults)
        )
        return Part(self, number, messages, items, faults)


@dataclass(frozen=True, slots=True)
class Part:
    """One party of a shape."""

    shape: Shape
    number: int
    messages: int
    items: int
    faults: int

    def first_fault(self) -> int:
        """The number of its first fault among those of the lake: kinds of faults take turns over all parties."""
        each, more = divmod(self.shape.faults, self.shape.parties)
        return self.number * each + min(self.number, more)


def parse_mix(text: str) -> Mix:
    """`property-set=40,text=30` as weights; a model alone is `model=1`."""
    found: dict[str, int] = {}
    for entry in text.split(","):
        name, _, number = entry.strip().partition("=")
        weight = int(number) if number.strip().isdecimal() else (1 if "=" not in entry else 0)
        if name not in MODELS or name in found or not 0 < weight <= WEIGHT_MAX:
            raise UsageError(
                f"{entry.strip()!r} is not a share of a model",
                unchanged="Nothing was written.",
                next_step=f"Write MODEL=WEIGHT, separated by commas; models are {', '.join(MODELS)}.",
            )
        found[name] = weight
    return tuple(found.items())


def _share(total: int, parts: int, number: int) -> int:
    """The first parts get one more where the total is not a multiple of them."""
    return total // parts + (number < total % parts)


def _wrong(what: str) -> UsageError:
    return UsageError(f"such a lake can't be made: {what}", unchanged="Nothing was written.")
