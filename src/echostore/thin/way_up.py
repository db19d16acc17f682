"""The way up of a leaf: one connection at a time, address after address, and the frames that wait for it.

It opens, reads, sends and closes. What frames say is its owner's affair (driver): whether a connection became a link,
and what that means. All of it runs in the owner's loop, but for `send` and `drop`, which any thread may call.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from echostore.kernel.errors import EchoError, Unreachable
from echostore.thin.link import CapabilityRefused, Link, Welcome, open_link
from echostore.wire.signing import SigningKey

LINK_S: Final = 10.0
"""A connection that is no link after so long is given up, for the next address."""

RETRY_S: Final = 0.1
RETRY_S_MAX: Final = 10.0


class Traveller(Protocol):
    """Who goes this way."""

    @property
    def linked(self) -> bool:
        """Whether the connection is a link."""

    def opened(self, url: str, welcome: Welcome) -> None:
        """A connection stands; Unreachable when it is not one to use."""

    def take(self, frame: bytes) -> None:
        """A frame came; what this raises ends the connection."""

    def lost(self) -> None:
        """It stands no more; also after `opened` raised."""


class WayUp:
    """One leaf's."""

    def __init__(self, urls: Sequence[str], capability: bytes, key: SigningKey, owner: Traveller) -> None:
        self.urls = tuple(urls)
        self.url: str | None = None
        """Where the connection leads that stands now."""
        self.last_error: EchoError | None = None
        self._capability, self._key = capability, key
        self._owner = owner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._out: deque[bytes] = deque()
        self._link: Link | None = None
        self._closing: asyncio.Future[None] | None = None

    def send(self, frames: Iterable[bytes]) -> None:
        """Under the owner's lock, so that frames keep their order. They are for the connection that stands."""
        self._out.extend(frames)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    def drop(self, why: str) -> None:
        """End the connection; another one is made at once."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._close, why)

    async def follow(self) -> EchoError:
        """Address after address, for as long as one may take us; then why none does."""
        self._loop = asyncio.get_running_loop()
        wait_s, place = RETRY_S, 0
        refused: set[str] = set()
        while len(refused) < len(set(self.urls)):
            url = self.urls[place % len(self.urls)]
            place += 1
            try:
                link = await open_link(url, self._capability, self._key)
                refused.clear()
                if await self._serve(url, link):
                    wait_s, place = RETRY_S, place - 1  # it was good: try the same one first
            except CapabilityRefused as error:
                refused.add(url)
                self.last_error = error
            except EchoError as error:
                self.last_error = error
            if place % len(self.urls) == 0 or wait_s > RETRY_S:
                await asyncio.sleep(wait_s * (0.5 + secrets.randbelow(1000) / 1000))
                wait_s = min(2 * wait_s, RETRY_S_MAX)
        assert self.last_error is not None, "it was refused"
        return self.last_error

    async def _serve(self, url: str, link: Link) -> bool:
        """One connection until it ends; whether it ever was a link."""
        assert self._loop is not None, "it runs"
        was_linked = False

        def take(frame: bytes) -> None:
            nonlocal was_linked
            self._owner.take(frame)
            was_linked = was_linked or self._owner.linked

        try:
            self._out.clear()
            self.url, self._link = url, link
            self._owner.opened(url, link.welcome)
            sending = asyncio.ensure_future(self._sending(link))
            giving_up = self._loop.call_later(LINK_S, self._give_up, link)
            try:
                await link.read(take)
                return was_linked
            finally:
                giving_up.cancel()
                sending.cancel()
        finally:
            self.url = self._link = None
            self._owner.lost()
            await link.close()

    def _give_up(self, link: Link) -> None:
        """The other side has not reached the tick that this leaf has seen, or lost its own way up."""
        if self._link is link and not self._owner.linked:
            self.last_error = Unreachable(f"{self.url} took the connection and made no link of it")
            self._close("no link")

    def _close(self, why: str) -> None:
        if self._link is not None:
            link, self._link = self._link, None
            self._closing = asyncio.ensure_future(link.close(why))

    async def _sending(self, link: Link) -> None:
        with suppress(Unreachable):  # the reading side ends too, and tells why
            while True:
                while self._out:
                    await link.send(self._out.popleft())
                self._wake.clear()
                if not self._out:
                    await self._wake.wait()
