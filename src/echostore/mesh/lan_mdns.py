"""Announcing and listening on the local network by mDNS, with the library zeroconf (the extra `lan`).

Lives in the node's asyncio loop. What is announced and who is dialled is decided in `echostore.mesh.lan`.
"""

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from echostore.kernel.errors import Refused, Unreachable
from echostore.kernel.ids import PartyKey
from echostore.mesh.lan import HOUR_S, SALT_BYTES, Heard, Neighbours, text_records

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

    from echostore.mesh.node import Node

log = logging.getLogger("echostore.lan")

SERVICE: Final = "_echostore._tcp.local."
LOOK_MS: Final = 3_000
"""How long to ask for an announcement's records."""
LOOKS_MAX: Final = 32
"""Announcements that are looked at at once."""
REVIEW_S: Final = 60.0
"""How often the hour is looked at."""


def check_available() -> None:
    """Refused when the library is not installed."""
    try:
        import zeroconf  # noqa: F401  # to see whether it is there
    except ImportError:
        raise Refused(
            "finding members on the local network needs the package zeroconf", next_step="pip install 'echostore[lan]'"
        ) from None


class LanDiscovery:
    """Announces the node's addresses under blinded tags, and dials who announces a party that is shared."""

    def __init__(
        self,
        node: "Node",
        *,
        addresses: Callable[[], Iterable[tuple[str, int]]],
        parties: Callable[[], Iterable[PartyKey]],
        interfaces: Sequence[str] = (),
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._node = node
        self._addresses, self._parties, self._interfaces, self._now_s = addresses, parties, interfaces, now_s
        self.neighbours = Neighbours()
        self.dialled: set[tuple[str, int]] = set()
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._announced: AsyncServiceInfo | None = None
        self._hour = -1
        self._said: tuple[Any, ...] = ()
        self._looking = asyncio.Semaphore(LOOKS_MAX)
        self._due = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """The name under which this peer is announced now; empty when it is not."""
        return str(self._announced.name) if self._announced is not None else ""

    async def start(self) -> None:
        from zeroconf import IPVersion
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        try:
            if self._interfaces:
                self._zeroconf = AsyncZeroconf(interfaces=list(self._interfaces))
            else:
                self._zeroconf = AsyncZeroconf(ip_version=IPVersion.All)
        except OSError as error:
            raise Unreachable(f"the local network can't be listened to: {error.strerror or error}") from None
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[self._changed])
        await self._announce()
        self._run(self._keep())

    def review(self) -> None:
        """Parties or addresses have changed."""
        self._due.set()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for host, port in self.dialled:
            self._node.stop_dialling(host, port)
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            await self._zeroconf.async_unregister_all_services()
            await self._zeroconf.async_close()

    # announcing

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REVIEW_S):
                    await self._due.wait()
            self._due.clear()
            try:
                await self._announce()
            except OSError as error:
                log.warning("the announcement failed", extra={"why": str(error)})
            self._dial()

    async def _announce(self) -> None:
        """Announce what is so now. In a new hour under a new name, with a new salt."""
        from zeroconf.asyncio import AsyncServiceInfo

        assert self._zeroconf is not None
        hour = int(self._now_s()) // HOUR_S
        parties, addresses = sorted(self._parties()), sorted(self._addresses())
        said = (hour, parties, addresses)
        if said == self._said or not addresses:
            return
        self._said = said
        # All under one port: a peer that listens at several announces the addresses of the first.
        port = addresses[0][1]
        packed = [ipaddress.ip_address(host).packed for host, each in addresses if each == port]
        name = secrets.token_hex(8)
        info = AsyncServiceInfo(
            SERVICE,
            f"{name}.{SERVICE}",
            port=port,
            addresses=packed,
            server=f"{name}.local.",
            properties=text_records(parties, secrets.token_bytes(SALT_BYTES), hour),
        )
        before, self._announced = self._announced, info
        await (await self._zeroconf.async_register_service(info))
        if before is not None:
            await (await self._zeroconf.async_unregister_service(before))

    # listening

    def _changed(self, *, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        """Called by the library, in this loop."""
        if name == self.name:
            return
        if state_change.name == "Removed":
            self.neighbours.vanished(name)
            self._dial()
        elif not self._looking.locked():
            self._run(self._look(zeroconf, service_type, name))
        else:
            self.neighbours.turned_away += 1

    async def _look(self, zeroconf: Any, service_type: str, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        async with self._looking:
            info = AsyncServiceInfo(service_type, name)
            if not await info.async_request(zeroconf, LOOK_MS) or not info.port:
                return
            found = tuple((host, int(info.port)) for host in info.parsed_scoped_addresses())
            self.neighbours.appeared(name, Heard(found, dict(info.properties)))
            self._dial()

    def _dial(self) -> None:
        wanted = self.neighbours.to_dial(self._parties(), int(self._now_s()) // HOUR_S)
        for host, port in self.dialled - wanted:
            self._node.stop_dialling(host, port)
        for host, port in wanted - self.dialled:
            log.info("a member was found", extra={"address": f"{host}:{port}"})
            self._node.keep_dialling(host, port)
        self.dialled = wanted

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
