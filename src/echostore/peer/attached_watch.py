"""Live queries of a running peer, used from another program. They outlive the process that serves the home.

The watch of the other process ends with it. When another process serves the home, `RemoteWatch` opens a watch there and
reports the difference between what its reader knew and what the query finds now, as one change:

    added, removed     by the ids that the reader knew and those that the query finds
    changed            the items of both that were written after an anchor: one that was taken while no change waited

An anchor that the new process can't read from (a kill lost messages) makes every item of both count as changed.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from echostore.kernel.errors import EchoError, NotFound
from echostore.kernel.query.live import Change
from echostore.peer.attached import BACK_OFF_S, SLICE_S, ConnectionLost, Remote, remote_call
from echostore.peer.query_live import Watch

_log = logging.getLogger("echostore")

_LONGEST_PAUSE_S: Final = 5.0
"""Between two tries to reach a process that serves the home; a watch may wait for days."""


class RemoteWatch:
    """A watch of a query of the running peer."""

    __class__ = property(lambda self: Watch)  # isinstance asks for it

    def __init__(self, query: Remote, *, timeout_s: float | None, initial: bool) -> None:
        self._query = query
        self._watch: Any = remote_call(query, "watch", timeout_s=timeout_s, initial=initial)
        self._answer = _Answer(query, known=not initial)
        self._timeout_s: float | None = self._watch.timeout_s
        self._anchors = self._answer.anchors()
        self._idle = False
        self._closed = False
        self._lost_since: float | None = None
        self._pause_s = BACK_OFF_S[0]

    @property
    def timeout_s(self) -> float | None:
        return self._timeout_s

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def detached(self) -> bool:
        """Whether this program has closed the peer."""
        closed: bool = self._query._link.closed
        return closed

    def __iter__(self) -> "Iterator[Change[Any]]":
        return self

    def __next__(self) -> Change[Any]:
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while not self._closed:
            left = SLICE_S if deadline is None else min(SLICE_S, deadline - time.monotonic())
            change = self.poll(max(0.0, left))
            if change is not None:
                return change
            if deadline is not None and time.monotonic() >= deadline:
                self.close()
        raise StopIteration

    def poll(self, wait_s: float) -> Change[Any] | None:
        """The next change; None when none has come in that time."""
        if self._closed:
            return None
        try:
            if self._lost_since is not None:
                return self._resume(wait_s)
            anchors = self._answer.anchors() if self._idle else None
            change: Change[Any] | None = remote_call(self._watch, "poll", wait_s, patience_s=0.0)
        except ConnectionLost:
            if self.detached or self._closed:
                raise
            if self._lost_since is None:
                self._lost_since = time.monotonic()
                _log.warning("the process that served %s has ended; a live query waits", self._query._link.home.path)
            return None
        self._idle = change is None
        if change is None:
            self._anchors = anchors or self._anchors  # no change was waiting: all up to there has been reported
        else:
            self._answer.take(change)
        return change

    def close(self) -> None:
        """End the iteration, also for a thread that waits in it."""
        if self._closed:
            return
        self._closed = True
        if self._lost_since is None and not self.detached:
            with suppress(ConnectionLost):  # it ended with its process
                remote_call(self._watch, "close", patience_s=0.0)

    def __enter__(self) -> "RemoteWatch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _resume(self, wait_s: float) -> Change[Any] | None:
        """Try once to go on in another process; None when there is none, or nothing differs."""
        began = time.monotonic()
        try:
            watch = remote_call(self._query, "watch", timeout_s=self._timeout_s, patience_s=0.0)
        except ConnectionLost:
            time.sleep(max(0.0, min(self._pause_s, began + wait_s - time.monotonic())))
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return None
        change = self._answer.renew(self._anchors)
        self._watch, self._idle = watch, False
        self._lost_since, self._pause_s = None, BACK_OFF_S[0]
        _log.info("a live query goes on in another process")
        return change


Key = tuple[bytes, bytes]
"""An item by its party and its id."""


class _Answer:
    """What the reader of a watch knows: items in their order, or groups."""

    def __init__(self, query: Remote, *, known: bool) -> None:
        self._query = query
        self._parties: list[bytes] = [bytes(key) for key in query.parties]
        self._ordered, self._reduces = bool(query.spec.order), query.spec.reduce is not None
        self._items: list[Key] = []
        self._groups: dict[str, Any] = {}
        if known and not self._reduces and len(self._parties) == 1:
            self._items = [(self._parties[0], bytes(item)) for item in query.ids()]
        elif known:
            self.take(self._now())

    def take(self, change: Change[Any]) -> None:
        """Follow a change that the reader gets."""
        for by in change.groups_removed:
            self._groups.pop(repr(by), None)
        self._groups.update((repr(group.by), group) for group in change.groups)
        keys = change.map(_key)
        if self._ordered:
            self._items = keys.replay(self._items)
        elif keys.added or keys.removed:
            gone = {*keys.added, *keys.removed}
            self._items = [key for key in self._items if key not in gone] + list(keys.added)

    def anchors(self) -> dict[bytes, Any]:
        """The moment of each party that the query ranges over."""
        return {key: remote_call(self._party(key), "anchor", patience_s=0.0) for key in self._parties}

    def renew(self, anchors: dict[bytes, Any]) -> Change[Any] | None:
        """What differs from what the reader knows; it knows that then. None when nothing does."""
        before, groups_before = self._items, self._groups
        now = self._now()
        self._items, self._groups = [], {}
        self.take(now)
        if self._reduces:
            groups = tuple(group for key, group in self._groups.items() if groups_before.get(key) != group)
            gone = tuple(group.by for key, group in groups_before.items() if key not in self._groups)
            return Change(groups=groups, groups_removed=gone) if groups or gone else None
        handles = {_key(item): item for item in now.added}
        old, after = set(before), self._items
        written = self._written(anchors)
        kept = [key for key in after if key in old]
        added = [key for key in after if key not in old]
        removed = tuple(self._handle(key) for key in before if key not in handles)
        changed = [key for key in kept if written is None or key in written]
        moved = kept if self._ordered and [key for key in before if key in handles] != kept else []
        if not (added or removed or changed or moved):
            return None
        placed = {*added, *moved} if self._ordered else ()
        return Change(
            added=tuple(handles[key] for key in added),
            changed=tuple(handles[key] for key in changed),
            removed=removed,
            moved=tuple(handles[key] for key in moved),
            positions=tuple((index, handles[key]) for index, key in enumerate(after) if key in placed),
        )

    def _now(self) -> Change[Any]:
        """Everything that the query finds, as a change from nothing."""
        watch = remote_call(self._query, "watch", initial=True, patience_s=0.0)
        found: Change[Any] | None = remote_call(watch, "poll", 0.0, patience_s=0.0)
        remote_call(watch, "close", patience_s=0.0)
        return found or Change()

    def _written(self, anchors: dict[bytes, Any]) -> set[Key] | None:
        """The items that were written after the anchors; None when that can't be known."""
        found: set[Key] = set()
        try:
            for key in self._parties:
                for message in remote_call(self._party(key), "stream", anchors[key], patience_s=0.0):
                    found.update((key, bytes(operation.item)) for operation in message.operations)
        except EchoError as unreadable:
            if isinstance(unreadable, ConnectionLost):
                raise
            _log.info("a live query reports all its items as changed: %s", unreadable)
            return None
        return found

    def _party(self, key: bytes) -> Any:
        return remote_call(self._query._link.peer, "party", key, patience_s=0.0)

    def _handle(self, key: Key) -> Any:
        try:
            return remote_call(self._party(key[0]), "get", key[1], patience_s=0.0)
        except NotFound:
            return self._query._link.missing_item(*key)


def _key(item: Any) -> Key:
    return bytes(item._facts["of"]), bytes(item._facts["id"])


class RemoteSubscription:
    """A subscription to a query of the running peer: `fn` is called in a thread of this program."""

    def __init__(self, watch: RemoteWatch, fn: Callable[[Any], object]) -> None:
        self._watch, self._fn = watch, fn
        self._thread = threading.Thread(target=self._run, name="echostore-subscription", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell nothing any more."""
        self._watch.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * SLICE_S)

    __call__ = close

    def __enter__(self) -> "RemoteSubscription":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            for change in self._watch:
                if self._watch.closed:
                    return
                try:
                    self._fn(change)
                except Exception:  # noqa: BLE001  # as in the peer itself: the next change must be told
                    _log.exception("a subscriber of a live query raised")
        except EchoError as ended:
            if not self._watch.closed and not self._watch.detached:
                _log.warning("a live query has ended: %s", ended)
