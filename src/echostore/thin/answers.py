"""Answers: what an application sees of an index, made of the held value and the leaf's own batches.

An answer is made once and kept until something says that it may be another one; reading it again is one lookup.
"""

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, Final

from echostore.kernel.coherence.holdings import Version
from echostore.kernel.coherence.messages import IndexValue, Spec
from echostore.kernel.errors import Corrupt, EchoError, TimedOut, Unreachable
from echostore.kernel.ids import FeedId, ItemId
from echostore.thin.driver import HOME, Driver
from echostore.thin.hashes import check_seal, sealers
from echostore.thin.overlay import Overlay
from echostore.wire.index_spec import IndexItem, IndexQuery, MalformedIndex, index_items

if TYPE_CHECKING:
    from echostore.thin.items import ThinItem
    from echostore.thin.thin_party import ThinParty

ANSWERS_MAX: Final = 10_000
KNOWN_MAX: Final = 10_000
"""Items of which the last state is remembered, so that edits of them can be shown in other answers too."""

_NO_FEED: Final = FeedId(bytes(8))


class Answer(tuple["ThinItem", ...]):
    """The items of an answer, in the order of the query."""

    tick: int
    """The root's state that it is an answer of."""
    pending: bool
    """Whether own edits touch it that only the root can work in."""

    @staticmethod
    def of(items: "list[ThinItem]", tick: int, pending: bool) -> "Answer":
        answer = Answer(items)
        answer.tick, answer.pending = tick, pending
        return answer


class Answers:
    """The answers of one leaf."""

    def __init__(self, driver: Driver, party: "ThinParty", patience_s: float) -> None:
        self._driver = driver
        self._party = party
        self.patience_s = patience_s
        self.kept: dict[Spec, Answer] = {}
        self._fleeting: set[Spec] = set()
        """Those whose value is good for this tick only, as far as is known."""
        self._decoded: dict[Spec, tuple[IndexValue, list[IndexItem]]] = {}
        self._known: dict[ItemId, IndexItem] = {}
        self._overlay: Overlay | None = None
        driver.listeners.append(self._changed)

    def _changed(self, specs: frozenset[Spec] | None) -> None:
        """Under the driver's lock."""
        if specs is None:
            self.kept.clear()
            self._fleeting.clear()
            self._overlay = None
            return
        for spec in (*specs, *self._fleeting):
            self.kept.pop(spec, None)
        self._fleeting.clear()

    def overlay(self) -> Overlay:
        """Own operations that the current tick does not include."""
        with self._driver.lock:
            if self._overlay is None:
                driver = self._driver
                operations = [(ItemId(op.object), op.delta) for op in driver.leaf.outbox.overlay()]
                self._overlay = Overlay(driver.grants.party, driver.feed or _NO_FEED, operations)
            return self._overlay

    def held(self, asked: IndexQuery, spec: Spec) -> Answer | None:
        """The answer at the current tick, if its value is held."""
        driver = self._driver
        with driver.lock:
            found = self.kept.get(spec)
            if found is not None:
                return found
            version = driver.read(spec)
            if version is None:
                return None
            answer = self.made(asked, spec, version, self.overlay(), driver.tick)
            if len(self.kept) >= ANSWERS_MAX:
                self.kept.clear()
                self._fleeting.clear()
            self.kept[spec] = answer
            if not driver.leaf.caches[HOME].holdings.is_live(spec):
                self._fleeting.add(spec)
            return answer

    def get(self, asked: IndexQuery, spec: Spec, timeout_s: float | None = None) -> Answer:
        """The answer, waited for if it has to be asked for."""
        deadline = time.monotonic() + (self.patience_s if timeout_s is None else timeout_s)
        while True:
            with self._driver.lock:
                answer = self.held(asked, spec)
                if answer is not None:
                    return answer
                future = self._driver.ask(spec)
            self.wait(future, deadline)

    def at(self, asked: IndexQuery, spec: Spec, tick: int, overlay: Overlay, deadline: float) -> Answer:
        """The answer at a pinned tick; Gone when it is forgotten."""
        version = self._driver.read(spec, tick) or self.wait(self._driver.ask(spec, tick), deadline)
        return self.made(asked, spec, version, overlay, tick)

    def made(self, asked: IndexQuery, spec: Spec, version: Version, overlay: Overlay, tick: int) -> Answer:
        items, pending = overlay.view(asked, self._items(asked, spec, version.value), self._known.get)
        return Answer.of([self._party.handle(each) for each in items], tick, pending)

    def wait(self, future: "Future[Any]", deadline: float) -> Any:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeout:
            future.cancel()
            raise self.too_late() from None

    def too_late(self) -> EchoError:
        """Why an answer did not come."""
        driver = self._driver
        if driver.linked:
            return TimedOut("no answer came in time", next_step="Try again, or allow more time.")
        because = f" ({driver.last_error.what})" if driver.last_error is not None else ""
        return Unreachable(
            f"this is not held here, and there is no connection{because}",
            next_step="What was read before can be read offline; this needs a connection once.",
        )

    def _items(self, asked: IndexQuery, spec: Spec, value: IndexValue) -> list[IndexItem]:
        known = self._decoded.get(spec)
        if known is not None and known[0] is value:
            return known[1]
        try:
            items = index_items(value)
            if asked.sealed:
                check_seal(spec, value, items, sealers(self._driver.grants))
        except (MalformedIndex, Corrupt) as error:
            self._driver.forget(spec)
            self._driver.drop_link("a value that is not what it says")
            if isinstance(error, Corrupt):
                raise
            raise Corrupt(f"a value can't be read: {error}", unchanged="It was not shown.") from error
        if len(self._decoded) >= ANSWERS_MAX:
            self._decoded.clear()
        self._decoded[spec] = (value, items)
        if asked.query is None or asked.query.select is None:
            if len(self._known) + len(items) > KNOWN_MAX:
                self._known.clear()
            self._known.update((each.item, each) for each in items)
        return items
