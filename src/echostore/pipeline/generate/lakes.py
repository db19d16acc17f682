"""All parties of a shape, as rows in the order of a lake, and into a lake."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from echostore.kernel.ids import PartyKey
from echostore.pipeline.generate.contents import Contents
from echostore.pipeline.generate.keys import seeded_key
from echostore.pipeline.generate.party import MadeParty, write_party
from echostore.pipeline.generate.shape import Shape
from echostore.pipeline.generate.spool import Spool
from echostore.pipeline.lake import Lake, LakeWriter

Tell = Callable[[int, int], None]
"""(messages done, all messages)."""


@dataclass(frozen=True, slots=True)
class MadeLake:
    """What was made. Versions are those of the lake that hold all of it, and all but the last share."""

    version: int
    first_version: int | None
    parties: tuple[MadeParty, ...]


def party_key(shape: Shape, number: int) -> PartyKey:
    """The key of a party before it is made."""
    return PartyKey(seeded_key(shape.root(), number, "party").public)


def generate(
    shape: Shape,
    lake: Lake,
    *,
    last: float = 0.0,
    processes: int = 1,
    tell: Tell = lambda done, total: None,
) -> MadeLake:
    """Make all parties of a shape and add them to a lake.

    With `last`, that share of every feed's blocks comes as a second version, as if it had been published later.
    """
    folder = lake.path / "writing"
    writer = LakeWriter(lake, publisher="generate")
    parties: list[MadeParty] = []
    with Spool(folder) as later:
        rows = generated_rows(shape, folder, parties, last=last, later=later, processes=processes, tell=tell)
        writer.write(rows, kind="generate")
        first = lake.version()
        writer.write(later.batches(), kind="generate")
    return MadeLake(lake.version(), first if last else None, tuple(parties))


def generated_rows(
    shape: Shape,
    folder: Path,
    parties: list[MadeParty],
    *,
    last: float = 0.0,
    later: Spool | None = None,
    processes: int = 1,
    tell: Tell = lambda done, total: None,
) -> Iterator[pa.RecordBatch]:
    """The rows of all parties, ascending by party, control feeds first; `parties` gets an entry for each.

    Parties are made one after another while their rows are taken, in memory of one party's schedule. `folder` holds
    the rows of the party at work; the last share of them goes to `later` instead.
    """
    pool = Contents(shape.seed)
    done = 0
    for number in sorted(range(shape.parties), key=lambda number: party_key(shape, number)):
        part = shape.part(number)
        with Spool(folder) as spool:
            give_later = later.give if later is not None else None
            parties.append(write_party(part, pool, spool.give, processes=processes, last=last, later=give_later))
            done += part.messages
            tell(done, shape.messages)
            yield from spool.batches()
