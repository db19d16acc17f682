"""Pinning: a peer that holds the content of every file that living items point to, for members that hold little.

    live query over all items -> items to look at -> their BlobRefs -> chunks that are not here -> fetched, in groups

Costs what changed: an item is looked at when it appears or changes. What nobody could give is asked for again, ever
more slowly. `echostore serve --bot` runs this.
"""

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from echostore.kernel.errors import Closed, EchoError
from echostore.kernel.ids import Cid, ItemId, PartyKey
from echostore.kernel.values import BlobRef
from echostore.mesh.blob_exchange import Unavailable

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer
    from echostore.peer.query_live import Subscription

_log = logging.getLogger("echostore.pinning")

LOOK_S: Final = 0.5
"""How often new parties are noticed."""
PATIENCE_S: Final = 5.0
"""How long nothing may come before the rest of a group is put off; also how long `close` may take."""
RETRY_FIRST_S: Final = 5.0
RETRY_LAST_S: Final = 300.0
GROUP_CHUNKS: Final = 1024


@dataclass(slots=True)
class _Pinned:
    """One party."""

    party: "Party"
    due: set[ItemId] = field(default_factory=set)
    wanted: dict[Cid, None] = field(default_factory=dict)
    retry_at: float = 0.0
    pause_s: float = RETRY_FIRST_S
    subscription: "Subscription | None" = None


@dataclass(slots=True)
class PinCounters:
    """What pinning has done; shown as metrics."""

    fetched: int = 0
    missing: int = 0
    unreadable: int = 0


class Pinner:
    """Fetches files in a thread of its own until it is closed."""

    def __init__(self, peer: "Peer") -> None:
        self._peer = peer
        self._parties: dict[PartyKey, _Pinned] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self.counters = PinCounters()
        self._thread = threading.Thread(target=self._run, name="echostore-pinning", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=PATIENCE_S + 1.0)
        for pinned in self._parties.values():
            if pinned.subscription is not None:
                pinned.subscription.close()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            try:
                self._follow_parties()
                for pinned in list(self._parties.values()):
                    self._look(pinned)
                    self._fetch(pinned)
            except Closed:
                if not self._closing:
                    _log.warning("pinning stops: the peer was closed")
                return
            except EchoError as error:
                _log.warning("pinning failed and goes on", extra={"why": str(error)})
            self.counters.missing = sum(len(pinned.wanted) for pinned in self._parties.values())

    def _follow_parties(self) -> None:
        with self._peer.lock:
            opened = {party.key: party for party in self._peer.open_parties()}
        for key in [key for key, pinned in self._parties.items() if opened.get(key) is not pinned.party]:
            gone = self._parties.pop(key)
            if gone.subscription is not None:
                gone.subscription.close()
        for key, party in opened.items():
            if key not in self._parties:
                pinned = self._parties[key] = _Pinned(party)
                pinned.subscription = party.query().subscribe(partial(self._changed, pinned), initial=True)

    def _changed(self, pinned: _Pinned, change: Any) -> None:
        with self._lock:
            pinned.due.update(item.id for item in (*change.added, *change.changed))
        self._wake.set()

    def _look(self, pinned: _Pinned) -> None:
        with self._lock:
            due, pinned.due = pinned.due, set()
        fresh: dict[Cid, None] = {}
        for item in due:
            try:
                value = pinned.party.get(item).value()
            except EchoError as error:
                self.counters.unreadable += 1
                _log.debug("an item can't be looked at for files", extra={"item": item.hex(), "why": str(error)})
                continue
            for file in _files(value):
                fresh |= dict.fromkeys(pinned.party.files.missing(file))
        if fresh:
            pinned.wanted |= fresh
            pinned.retry_at, pinned.pause_s = 0.0, RETRY_FIRST_S

    def _fetch(self, pinned: _Pinned) -> None:
        """One group of what is missing; what nobody has is left for later."""
        if not pinned.wanted or time.monotonic() < pinned.retry_at or self._closing:
            return
        group = list(pinned.wanted)[:GROUP_CHUNKS]
        missing: set[Cid] = set()
        try:
            self._peer.network.fetch(pinned.party.key, group, patience_s=PATIENCE_S)
        except Unavailable as nothing:
            missing = set(nothing.cids)
        for cid in group:
            del pinned.wanted[cid]
        self.counters.fetched += len(group) - len(missing)
        if missing:
            pinned.wanted |= dict.fromkeys(missing)  # at the end: others get their turn
            pinned.retry_at = time.monotonic() + pinned.pause_s
            pinned.pause_s = min(2 * pinned.pause_s, RETRY_LAST_S)
        elif pinned.wanted:
            self._wake.set()


def _files(value: Any) -> Iterator[BlobRef]:
    if isinstance(value, BlobRef):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _files(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _files(each)
