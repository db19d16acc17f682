"""`echostore lake generate`: valid signed lakes of any size, with known answers."""

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter, validators

from echostore.cli.lake import arrow_extra
from echostore.cli.options import OPTIONS, Options, examples
from echostore.cli.output import Output, counted, if_interrupted
from echostore.kernel.errors import StorageFailed, UsageError

if TYPE_CHECKING:
    from echostore.pipeline.generate.lakes import MadeLake
    from echostore.pipeline.generate.party import MadeParty
    from echostore.pipeline.lake import Lake
    from echostore.testing.lake_answers import PartyAnswer

app = App(
    name="generate",
    help_prologue=examples(
        "echostore lake generate --lake lake --feeds 50 --messages 1000000 --items 20000",
        "echostore lake generate --lake lake --parties 20 --messages 5000 --models property-set=40,text=30 "
        "--faults 19 --expect answers.json",
    ),
)

EXPECT_VERSION = 1
IN_MEMORY = Path("/dev/shm")  # not a place for secrets: these parties have none
IN_MEMORY_MESSAGES_MAX = 200_000
"""The observer's home of a small lake lies in memory, where there is such a folder: it is thrown away, and a durable
commit for every range would take most of the time."""

_Share = Annotated[float, Parameter(validator=validators.Number(gte=0, lte=1))]
_Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]
_Natural = Annotated[int, Parameter(validator=validators.Number(gte=0))]


@app.default
def generate(
    *,
    lake: Path,
    parties: _Positive = 1,
    feeds: _Positive = 5,
    messages: _Positive = 1000,
    items: _Natural | None = None,
    models: str = "property-set",
    skew: _Share = 0.0,
    faults: _Natural = 0,
    seed: _Natural = 1,
    writers_per_item: _Positive = 3,
    last: _Share = 0.0,
    expect: Path | None = None,
    processes: _Positive | None = None,
    options: Options = OPTIONS,
) -> None:
    """Make parties with real keys, credentials, links and signatures, and add their blocks to a lake.

    The same arguments give the same blocks, whatever the machine. Keys are made from them and kept nowhere: anybody
    can make them again, so these parties are for trying out and measuring.

    Parameters
    ----------
    lake
        Folder of the lake; made when it is missing.
    parties
        How many parties.
    feeds
        Data feeds of each party, one for each member.
    messages
        Data messages of all parties together.
    items
        Items of all parties together, beside one system item for each; without it, a tenth of the messages.
    models
        Which models items have: MODEL=WEIGHT, separated by commas.
    skew
        Share of a party's messages that go to one item.
    faults
        How many faulty feeds to add; kinds of faults take turns.
    seed
        Where chance begins.
    writers_per_item
        How many feeds write an item.
    last
        Share of the blocks that comes as a second version of the lake, as if published later.
    expect
        Write what a real peer says of the lake to a file: CIDs, counts and rejects.
    processes
        Processes that make texts and lists; without it, one for each processor.
    """
    with arrow_extra():
        from echostore.pipeline.generate.lakes import generate as make
        from echostore.pipeline.generate.shape import Shape, parse_mix
        from echostore.pipeline.lake import Lake

    output = Output.of(options)
    shape = Shape(
        parties=parties,
        feeds=feeds,
        messages=messages,
        items=messages // 10 if items is None else items,
        mix=parse_mix(models),
        skew=skew,
        faults=faults,
        seed=seed,
        writers_per_item=writers_per_item,
    )
    if expect is not None and not expect.absolute().parent.is_dir():
        raise UsageError(f"there is no folder for {expect}", unchanged="Nothing was written.")
    target = Lake.create(lake)
    begun = time.monotonic()
    with (
        if_interrupted("The lake is as it was; files that were begun are collected by `lake compact`."),
        output.progress("generate") as tell,
    ):
        made = make(shape, target, last=last, processes=processes or os.cpu_count() or 1, tell=tell)
    seconds = time.monotonic() - begun
    total = sum(_messages(party) for party in made.parties)
    fields = {
        "lake": str(target.path),
        "lake_version": made.version,
        "first_version": made.first_version,
        "messages": total,
        "items": sum(party.items for party in made.parties),
        "seconds": round(seconds, 3),
        "parties": [_party(party) for party in made.parties],
    }
    what = f"{counted(total, 'message')} of {counted(len(made.parties), 'party')}"
    text = f"{what} in {seconds:.1f} s; the lake is at version {made.version}"
    if expect is not None:
        with if_interrupted("The lake is complete; the file with the answers was not written."):
            _write_answers(expect, target, made, output)
    output.document(fields, text)


def _write_answers(path: Path, lake: "Lake", made: "MadeLake", output: Output) -> None:
    import json

    document: dict[str, Any] = {"version": EXPECT_VERSION, "lake_version": made.version}
    document["parties"] = _answers(lake, made, made.version, output)
    if made.first_version is not None:
        first = _answers(lake, made, made.first_version, output)
        document["first"] = {"lake_version": made.first_version, "parties": first}
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageFailed(
            f"the answers can't be written to {path}: {error.strerror}", unchanged="The lake is complete."
        ) from error
    output.note(f"what a peer says of it is in {path}")


def _answers(lake: "Lake", made: "MadeLake", version: int, output: Output) -> list[dict[str, Any]]:
    """What a peer says of the parties that were made; the lake may have others."""
    from echostore.testing.lake_answers import lake_answers

    known = {bytes(party.party): party for party in made.parties}
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="echostore-observer-", dir=_scratch(made.parties)) as folder,
        output.progress("ask a peer") as tell,
    ):
        for answer in lake_answers(lake, Path(folder), version=version, parties=known):
            found.append(_answer(answer, known[bytes(answer.party)]))
            tell(len(found), len(known))
    return found


def _scratch(parties: Sequence["MadeParty"]) -> Path | None:
    small = sum(party.messages for party in parties) <= IN_MEMORY_MESSAGES_MAX
    return IN_MEMORY if small and os.access(IN_MEMORY, os.W_OK) else None


def _answer(answer: "PartyAnswer", made: "MadeParty") -> dict[str, Any]:
    return {
        "party": answer.party.hex(),
        "title": made.title,
        "cid": answer.cid,
        "items": answer.items,
        "messages": answer.messages,
        "applied": answer.applied,
        "waiting": answer.waiting,
        "branches": answer.branches,
        "rejected_blocks": answer.rejected_blocks,
        "rejected": [
            {
                "feed": row.feed.hex(),
                "seq": row.seq,
                "position": row.position,
                "reason": row.reason,
                "detail": row.detail,
            }
            for row in answer.rejected
        ],
        "unheld": [
            {"feed": each.feed.hex(), "start": each.start, "end": each.end, "reason": each.reason}
            for each in answer.unheld
        ],
        "faults": _faults(made),
    }


def _party(made: "MadeParty") -> dict[str, Any]:
    return {
        "party": made.party.hex(),
        "title": made.title,
        "feeds": made.feeds,
        "messages": _messages(made),
        "items": made.items,
        "faults": _faults(made),
    }


def _messages(made: "MadeParty") -> int:
    """All data blocks, those of faulty feeds included."""
    return made.messages + sum(fault.blocks for fault in made.faults)


def _faults(made: "MadeParty") -> list[dict[str, Any]]:
    return [{"kind": fault.kind, "feed": fault.feed.hex(), "seq": fault.seq} for fault in made.faults]
