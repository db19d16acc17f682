"""Following a home: what a running peer appends is published to the lake that a stream reads, a moment later.

The home is only read, beside its peer. Parties whose files did not change are not looked at. Small files are merged now
and then, as `echostore lake compact` does.
"""

import time
from pathlib import Path

from echostore.kernel.ids import PartyKey
from echostore.pipeline.lake import Lake
from echostore.pipeline.lake.compact import compact
from echostore.pipeline.lake.publish import publish
from echostore.pipeline.source.views import file_mark
from echostore.store.home import Home

COMPACT_EVERY = 64
"""Publishes after which small files are merged: every one adds a file, and a publish reads what the others said."""
KEEP_S = 3600.0
"""How long files that were merged stay, for those who read an older version of the lake."""


class HomeFollower:
    """Publishes a home, again and again."""

    def __init__(self, home: Path, lake: Path) -> None:
        self._home, self._lake = Home.open(home), lake
        self._marks: dict[PartyKey, tuple[object, ...]] = {}
        self._published = 0
        self.looked_ms = time.time_ns() // 1_000_000
        """When the home was last looked at: what is new the next time came after that."""

    def publish(self) -> int | None:
        """Publish what is new; the version of the lake that has it, or None when nothing was."""
        looked_ms = time.time_ns() // 1_000_000
        marks = {party: file_mark(self._home.party(party).feeds) for party in self._home.party_keys()}
        changed = [party for party, mark in marks.items() if self._marks.get(party) != mark]
        version = None
        if changed:
            done = publish(self._home.path, self._lake, parties=changed, publisher="stream")
            if done.blocks:
                version = done.version
                self._published += 1
                if self._published % COMPACT_EVERY == 0:
                    compact(Lake.open(self._lake), keep_s=KEEP_S, publisher="stream")
        self._marks = marks
        self.looked_ms = looked_ms
        return version
