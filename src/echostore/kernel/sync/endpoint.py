"""One side of a connection: a session, the port it works on, and a way to send. Used by every transport.

    bytes or frames in --> Endpoint --> Session --> effects --> port (answered at once), `send`, `tell`

Effects may cause events, and the port may call back in the middle of an effect; both are queued, so that the session
always finishes one event before it sees the next. What arrived may wait for its turn (`intake`) before the store gets it.
"""

from collections import deque
from collections.abc import Callable

from echostore.kernel.ids import FeedKey
from echostore.kernel.reasons import Reason
from echostore.kernel.sync.events import (
    Close,
    Compare,
    Effect,
    Event,
    FeedRefused,
    Ingest,
    LocalHead,
    Malformed,
    Processed,
    Read,
    Received,
    Send,
    Started,
    Tick,
)
from echostore.kernel.sync.frames import Blocks, FeedTip, Frame
from echostore.kernel.sync.port import SyncPort, answer
from echostore.kernel.sync.session import TRACKS_HEARD_MAX, Session


class Endpoint:
    """Runs a session against a port. `tell` hears every effect that is neither the store's nor a frame."""

    def __init__(
        self,
        port: SyncPort,
        *,
        send: Callable[[Frame], None],
        clock: Callable[[], float],
        tell: Callable[[Effect], None] = lambda effect: None,
        defer: Callable[[Callable[[], None]], None] = lambda action: action(),
        intake: Callable[[Ingest, Callable[[], None]], None] = lambda arrived, act: act(),
        last: Callable[[FeedKey], bool] = lambda feed: False,
        straight: Callable[[Blocks], bool] = lambda written: False,
        heard_max: int = TRACKS_HEARD_MAX,
    ) -> None:
        """`defer` runs an action in the one thread that this endpoint lives in: the port may call from others. `intake`
        does so too, once it is a range's turn; feeds of which `last` says so are asked for after all others. `straight`
        sends news from whatever thread wrote it; False when it has to go the usual way."""
        self.session = Session(last, heard_max=heard_max)
        self._intake = intake
        self._port, self._send, self._clock, self._tell, self._defer = port, send, clock, tell, defer
        self._events: deque[Event] = deque()
        self._running = False
        self._straight = straight
        self._handed = self._taken = 0
        """News that was handed to `defer`, counted by who writes, and what came of it, counted by who does it."""
        self._stop_listening: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        return self.session.closed

    @property
    def busy(self) -> bool:
        """Whether it is in the middle of an event: what comes now is done before that is over."""
        return self._running

    def start(self) -> None:
        """Say hello. Growth of the port is heard from here on."""
        self._stop_listening = [self._port.on_written(self._written), self._port.on_grow(self._grown)]
        feeds = tuple(self._port.feeds())
        processed = tuple((tip.feed, self._port.processed_length(tip.feed)) for tip in feeds if not tip.branch)
        self.post(Started(feeds, tuple(self._port.fork_proofs()), processed))

    def receive(self, frame: Frame) -> None:
        self.post(Received(frame))

    def malformed(self, detail: str) -> None:
        self.post(Malformed(detail))

    def refuse(self, feed: FeedKey, reason: Reason) -> None:
        self.post(FeedRefused(feed, reason))

    def tick(self) -> None:
        self.post(Tick())

    def stop(self) -> None:
        """The connection is gone: nothing is sent or asked for any more."""
        self.session.closed = True
        while self._stop_listening:
            self._stop_listening.pop()()

    def post(self, event: Event) -> None:
        """Hand the session an event, and its effects to whom they concern, until nothing follows."""
        self._events.append(event)
        self._drain()

    def _take_in(self, arrived: Ingest) -> None:
        """The turn of a range has come."""
        if not self.closed:
            self._events.extend(answer(self._port, arrived))
            self._drain()

    def _drain(self) -> None:
        if self._running:
            return
        self._running = True
        try:
            while self._events:
                for effect in self.session.receive(self._events.popleft(), self._clock()):
                    self._perform(effect)
        finally:
            self._running = False

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._send(effect.frame)
        elif isinstance(effect, Ingest):
            self._intake(effect, lambda: self._take_in(effect))
        elif isinstance(effect, Read | Compare):
            self._events.extend(answer(self._port, effect))
        else:
            self._tell(effect)
            if isinstance(effect, Close):
                self.stop()

    def _written(self, tip: FeedTip, written: Blocks) -> None:
        """Somebody waits for what was just written: it goes out without a look at the store, and at once when nothing
        that was written before is still on its way here."""
        sent = self._handed == self._taken and self.session.may_push(written) and self._straight(written)
        self._handed += 1
        self._defer(lambda: self._push(LocalHead(tip, own=True, written=written, sent=sent)))

    def _push(self, news: LocalHead) -> None:
        try:
            if not self.closed:
                self.post(news)
        finally:
            self._taken += 1

    def _grown(self, feed: FeedKey, length: int) -> None:
        self._defer(lambda: self._tell_growth(feed))

    def _tell_growth(self, feed: FeedKey) -> None:
        if not self.closed:
            own = self._port.own(feed)
            for tip in self._port.tips(feed):
                self.post(LocalHead(tip, own))
            self.post(Processed(feed, self._port.processed_length(feed)))
