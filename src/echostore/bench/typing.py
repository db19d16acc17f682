"""Typing: a real editing history through the public API, against the bare text library. CPU time of both."""

import gzip
import os
import time
from collections.abc import Callable
from pathlib import Path

import loro
import msgspec

from echostore.bench import Measure
from echostore.kernel.errors import NotFound
from echostore.peer.peer import open_peer

TIME_GOAL = 2.0
BYTES_GOAL = 3.0
REPEATS = 3
"""The best of so many, of both: the shortest run is the one that the machine disturbed least."""


def traces_folder() -> Path:
    """Where the editing traces are: ECHOSTORE_TRACES, or the shared data beside the project."""
    named = os.environ.get("ECHOSTORE_TRACES")
    folder = Path(named) if named else Path(__file__).parents[4] / "shared" / "data" / "editing-traces"
    if not folder.is_dir():
        raise NotFound(
            f"the editing traces are not in {folder}", next_step="Set ECHOSTORE_TRACES to the folder that has them."
        )
    return folder


def load_edits(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """The edits of a sequential trace as (position, deleted, inserted), and the final text."""
    with gzip.open(traces_folder() / f"{name}.json.gz") as file:
        trace = msgspec.json.decode(file.read())
    edits = [tuple(patch) for transaction in trace["txns"] for patch in transaction["patches"]]
    return edits, trace["endContent"]


def measure(folder: Path, narrate: Callable[[str], None]) -> list[Measure]:
    edits, final = load_edits("automerge-paper")
    narrate(f"text: {len(edits):,} edits of a real paper")
    bare, library_bytes = min(_bare(edits) for _ in range(REPEATS))
    seconds, stored = min(_ours(folder / str(number), edits, final) for number in range(REPEATS))
    return [
        Measure("text-time", seconds / bare, TIME_GOAL, f"{seconds:.2f} s, bare library {bare:.2f} s"),
        Measure(
            "text-bytes", stored / library_bytes, BYTES_GOAL, f"{stored:,} bytes stored, library {library_bytes:,}"
        ),
    ]


def _bare(edits: list[tuple[int, int, str]]) -> tuple[float, int]:
    """CPU seconds of the library alone, and the size of its own export with history."""
    document = loro.LoroDoc()  # type: ignore[no-untyped-call]  # loro has no types for its constructor
    text = document.get_text("text")
    started = time.process_time()
    for position, deleted, inserted in edits:
        if deleted:
            text.delete(position, deleted)
        if inserted:
            text.insert(position, inserted)
    document.commit()
    return time.process_time() - started, len(document.export(loro.ExportMode.Snapshot()))


def _ours(home: Path, edits: list[tuple[int, int, str]], final: str) -> tuple[float, int]:
    """CPU seconds through the public API until durable, and the bytes of the blocks. The peer coalesces by itself, as
    it does for any application: by its own limit of edits and by the flush in the background."""
    with open_peer(home, name="bench") as peer:
        party = peer.create_party("bench")
        item = party.create("text")
        party.flush()
        before = _payload_bytes(party)
        started = time.process_time()
        for position, deleted, inserted in edits:
            if deleted:
                item.delete(position, deleted)
            if inserted:
                item.insert(position, inserted)
        party.flush()
        seconds = time.process_time() - started
        assert str(item) == final, "the text is the trace's own"
        return seconds, _payload_bytes(party) - before


def _payload_bytes(party: object) -> int:
    runtime = party.runtime  # type: ignore[attr-defined]  # a Party
    own = runtime.data
    return sum(len(block.payload) for block in runtime.feeds.read(own.cursor.key))
