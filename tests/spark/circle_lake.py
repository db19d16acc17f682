"""A circle of peers that publishes to a lake, and what the pipeline says of it: shared by the tests of epochs."""

from pathlib import Path
from typing import Any

from echostore.peer.anchors import Anchor
from echostore.pipeline.lake.publish import Published, publish
from echostore.pipeline.output.results import PartyResult
from echostore.pipeline.output.views import open_views
from echostore.pipeline.run import At, RunRequest
from peer_builder import Circle
from spark.engines import Engines

NAMES = ("ann", "bob", "cat")


class Told:
    """A circle, the lake that it publishes to, and what the pipeline says of it."""

    def __init__(self, engines: Engines, circle: Circle, folder: Path) -> None:
        self._engines, self._circle, self._folder = engines, circle, folder

    @property
    def lake(self) -> Path:
        return self._folder / "lake"

    def publish(self, name: str = "ann") -> Published:
        for each in NAMES:
            self._circle.party(each).flush()
        return publish(self._folder / "homes" / name, self.lake)

    def build(self, out: str = "out") -> PartyResult:
        done = self._engines.run(RunRequest(lake=self.lake, out=self._folder / out))
        (found,) = (each for each in done.results() if each.party == self._circle.key)
        return found

    def agreed(self, out: str = "out") -> PartyResult:
        """Published, built, and the same as the peer says."""
        self.publish()
        found = self.build(out)
        self.compare(found)
        return found

    def compare(self, found: PartyResult) -> None:
        mine = self._circle.party("ann").snapshot()
        assert (found.state, found.cid, found.items) == ("built", mine.cid, mine.item_count), found.detail

    def build_at(self, text: str) -> PartyResult:
        anchor = Anchor.parse(text)
        data, control = (
            {feed: at.seq + 1 for feed, at in each.entries.items()} for each in (anchor.data, anchor.control)
        )
        at = At(party=anchor.party, data=data, control=control, text=text)
        done = self._engines.run(RunRequest(lake=self.lake, out=self._folder / "at", at=at))
        (found,) = done.results()
        return found

    def rows(self, table: str, out: str = "out") -> list[Any]:
        return open_views(self._engines.session, self._folder / out)[table].collect()  # type: ignore[no-any-return]  # Spark has no types
