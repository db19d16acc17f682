"""A peer as a service: listens, finds its members again, serves local programs, tells how it is.

    Service(peer, listen=[...])        everything below runs until `close`
      network        listens; dials remembered addresses again and again
      LocalServer    commands and programs of this machine, over the home's socket
      Pinner         with `bot`: the content of files, for members that hold little
      ServiceHttp    with `metrics`: /metrics and /healthz on the loopback (service_http.py)
      ThinService    with `thin`: browsers and other thin clients, over WebSocket (coherence_service.py)

`echostore serve` is this with signals and a log.
"""

import logging
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from echostore.kernel.errors import EchoError, Unreachable
from echostore.peer.contacts import SEEN_SETTING
from echostore.peer.inviting import ADDRESSES_SETTING
from echostore.peer.local_server import LocalServer
from echostore.peer.network import Seen, parse_address
from echostore.peer.pinning import Pinner
from echostore.store.durable_file import PROBE_BYTES

if TYPE_CHECKING:
    from echostore.peer.peer import Peer
    from echostore.peer.service_http import ServiceHttp

_log = logging.getLogger("echostore.service")

DEFAULT_ADDRESS: Final = "0.0.0.0:4711"
LISTEN_SETTING: Final = "listen_address"
SEEN_MAX: Final = 10_000
SIGNAL_S: Final = 0.5
"""How often the main thread wakes: a signal that the system hands to another thread is handled when it does."""
SAVE_S: Final = 30.0
"""How much of "last seen" a crash may forget."""
LOCK_S: Final = 2.0
"""A lock that is not free for so long means that the peer hangs, or is as good as hanging."""


class Service:
    """Runs until it is closed. The peer belongs to whoever opened it, and is closed by them afterwards."""

    def __init__(
        self,
        peer: "Peer",
        *,
        listen: Sequence[str] = (),
        connect: Sequence[str] = (),
        bot: bool = False,
        metrics: str | None = None,
        lan: bool = False,
        thin: str | None = None,
        thin_origins: Sequence[str] = (),
    ) -> None:
        self.peer = peer
        self.pinner: Pinner | None = None
        self.http: ServiceHttp | None = None
        for address in connect:
            parse_address(address)
        with ExitStack() as stack:
            self.network = peer.network
            self.addresses = [peer.listen(each) for each in listen] if listen else [listen_as_before(peer)]
            if lan:
                self.network.discover()
            self._recall_seen()
            self.local = LocalServer(peer)
            stack.callback(self.local.close)
            if metrics is not None:
                from echostore.peer import service_http

                self.http = service_http.ServiceHttp(self, metrics)
                stack.callback(self.http.close)
            if bot:
                self.pinner = Pinner(peer)
                stack.callback(self.pinner.close)
            self.thin_url = None if thin is None else peer.serve_thin(thin, origins=thin_origins)
            for address in connect:
                peer.network.keep_connecting(address)
            for device, addresses in remembered_addresses(peer).items():
                for each in addresses:
                    peer.network.keep_connecting(each, device=device)
            peer.epoch_keeper.serve()
            self._ends = stack.pop_all()
        _log.info("serving", extra={"home": str(peer.home.path), "addresses": self.addresses})

    def run(self, stop: threading.Event) -> None:
        """Wait for the end, and keep on disk what only this process knows."""
        saved = time.monotonic()
        while not stop.wait(SIGNAL_S):
            if time.monotonic() - saved < SAVE_S:
                continue
            saved = time.monotonic()
            self._save_seen()

    def close(self) -> None:
        """End everything that was started here; the peer stays open."""
        _log.info("stopping")
        try:
            self._ends.close()
        finally:
            self._save_seen()

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether all is well, and what is not."""
        problems: list[str] = []
        if not self.peer.lock.acquire(timeout=LOCK_S):
            problems.append(f"the peer is busy for more than {LOCK_S:g} s")
        else:
            try:
                for party in self.peer.held_parties():
                    party.runtime.look_for_space()
                problems += [
                    f"party {party.key.hex()[:8]}: {party.runtime.failure}"
                    for party in self.peer.held_parties()
                    if party.runtime.failure is not None
                ]
                damaged = ((party, party.runtime.processor.damage) for party in self.peer.held_parties())
                problems += [f"party {party.key.hex()[:8]}: {found.text}" for party, found in damaged if found]
            finally:
                self.peer.lock.release()
        if not self.network.alive:
            problems.append("the network thread has ended")
        else:
            problems += [f"members may be locked out: {why}" for why in self.network.lockouts]
        left = shutil.disk_usage(self.peer.home.path).free
        if left < PROBE_BYTES:
            problems.append(f"the disk of the home is full: {left:,} bytes are left")
        return not problems, {"ok": not problems, "problems": problems, "addresses": self.addresses}

    def _recall_seen(self) -> None:
        kept = self.peer.meta.setting(SEEN_SETTING, {})
        for device, (address, at_ms, ended) in kept.items():
            key = bytes.fromhex(device)
            self.peer.network.recall(Seen(key, address, at_ms, ended or "restart"))

    def _save_seen(self) -> None:
        newest = sorted(self.peer.network.seen.copy().values(), key=lambda seen: seen.at_ms)[-SEEN_MAX:]
        kept = {seen.device.hex(): [seen.address, seen.at_ms, seen.ended] for seen in newest}
        if kept != self.peer.meta.setting(SEEN_SETTING, {}):
            try:
                self.peer.meta.set_setting(SEEN_SETTING, kept)
            except EchoError as error:
                _log.error("what was seen could not be kept", extra={"why": str(error)})


def remembered_addresses(peer: "Peer") -> dict[bytes | None, list[str]]:
    """Where devices were reachable before; None for those of whom only the address is known."""
    kept = peer.meta.setting(ADDRESSES_SETTING, {})
    return {bytes.fromhex(device) or None: list(each) for device, each in kept.items()}


def listen_as_before(peer: "Peer") -> str:
    """Where nothing is asked for: at the address of the last time, so that tickets and friends still lead here."""
    wanted = str(peer.meta.setting(LISTEN_SETTING, DEFAULT_ADDRESS))
    try:
        address = peer.listen(wanted)
    except Unreachable:
        _log.warning("the address is taken, another port is used", extra={"address": wanted})
        address = peer.listen(f"{wanted.rpartition(':')[0]}:0")
    if address != peer.meta.setting(LISTEN_SETTING):
        peer.meta.set_setting(LISTEN_SETTING, address)
    return address
