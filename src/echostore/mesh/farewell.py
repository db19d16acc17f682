"""The last word to a device that was removed: the control blocks that prove it, and nothing else.

ann removes bob       Leave, Offer  ---->   bob begins again, as with any member
                      control feeds up to the removal  ---->
                      <----  Ack: held
                      Leave "removed", and the connection ends when nothing else is shared

Where the control feeds begin after the removal, the control state that stands for them is the proof, with the evidence for
it: these blobs are given, and no others.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from echostore.kernel.feed import Head
from echostore.kernel.ids import Cid, FeedKey, Link
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.events import Progress
from echostore.kernel.sync.frames import Blocks, FeedTip
from echostore.kernel.sync.port import Gone, Rejection, SyncPort

FAREWELL_S: Final = 20.0
"""So long may a removed device take to hear of it; then the party is left without its word."""


class FarewellPort:
    """A party as a removed device sees it: control feeds up to where they prove the removal. Nothing is taken."""

    def __init__(self, port: SyncPort, proof: Iterable[FeedTip], blobs: Iterable[Cid] = ()) -> None:
        """`proof`: where each control feed ends that is part of it, at a head or where it begins by now; `blobs`: those of
        the control state that stands for what is gone, which the device may have."""
        self._port = port
        self.blobs = frozenset(blobs)
        self._tips = {tip.feed: tip for tip in proof}
        self._heard: set[FeedKey] = set()

    def heard(self, progress: Progress) -> bool:
        """The device holds so much; whether that is all there is to say."""
        tip = self._tips.get(progress.feed)
        if tip is not None and progress.held >= tip.tip.length:
            self._heard.add(progress.feed)
        return self._heard == set(self._tips)

    def feeds(self) -> Iterable[FeedTip]:
        return list(self._tips.values())

    def tips(self, key: FeedKey) -> list[FeedTip]:
        tip = self._tips.get(key)
        return [] if tip is None else [tip]

    def own(self, key: FeedKey) -> bool:
        return False

    def holds(self, key: FeedKey, length: int, link: Link) -> bool:
        return self._port.holds(key, length, link)

    def read(
        self, key: FeedKey, start: int, blocks_max: int, bytes_max: int, toward: Link
    ) -> tuple[Sequence[bytes], Head] | Gone | None:
        tip = self._tips.get(key)
        if tip is None or start >= tip.tip.length:
            return None
        found = self._port.read(key, start, min(blocks_max, tip.tip.length - start), bytes_max, tip.tip.link)
        if isinstance(found, Gone):
            return found if found.evidence in self.blobs else None
        # At least one range up to a head is read, and the cut is at one: nothing beyond it can be in it.
        return None if found is None or found[1].length > tip.tip.length else found

    def ingest(self, key: FeedKey, kind: str, start: int, payloads: Sequence[bytes], head: Head) -> int | Rejection:
        return Rejection(Reason.UNADMITTED)

    def processed_length(self, key: FeedKey) -> int:
        tip = self._tips.get(key)
        return tip.tip.length if tip is not None else 0

    def fork_proofs(self) -> Iterable[bytes]:
        return ()

    def on_grow(self, callback: Callable[[FeedKey, int], None]) -> Callable[[], None]:
        return lambda: None  # what comes later is not for it

    def on_written(self, callback: Callable[[FeedTip, Blocks], None]) -> Callable[[], None]:
        return lambda: None
