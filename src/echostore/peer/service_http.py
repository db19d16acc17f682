"""What a service tells monitors over HTTP, on the loopback: /metrics for Prometheus and /healthz.

Names of parties are keys, shortened; no title, no person. A scrape costs what there are feeds, not items or blocks.
"""

import ipaddress
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from echostore.kernel.errors import Refused, Unreachable, UsageError
from echostore.mesh.coherence_numbers import added
from echostore.peer.network import parse_address
from echostore.peer.progress import party_progress

if TYPE_CHECKING:
    from echostore.peer.service import Service

_log = logging.getLogger("echostore.service")

PARTY_DIGITS: Final = 16
REQUEST_S: Final = 10.0


class ServiceHttp:
    """The server, in a thread of its own."""

    def __init__(self, service: "Service", address: str) -> None:
        host, port = parse_address(address)
        if not _is_loopback(host):
            raise UsageError(
                f"metrics are served on the loopback only, and {host} is not it",
                next_step="Write 127.0.0.1:PORT, and let a proxy carry it further if it must.",
            )
        try:
            import prometheus_client
        except ImportError:
            raise Refused(
                "metrics need the package prometheus-client", next_step="pip install 'echostore[metrics]'"
            ) from None
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(_Collector(service))

        class Handler(_Handler):
            def metrics(self) -> bytes:
                return prometheus_client.generate_latest(registry)

            def health(self) -> tuple[bool, dict[str, Any]]:
                return service.health()

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise Unreachable(f"metrics can't be served at {address}: {error.strerror or error}") from None
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="echostore-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A monitor that goes away in the middle is no event."""
        _log.debug("a request was not answered", exc_info=True, extra={"client": str(client_address)})


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server_version, sys_version = "echostore", ""

    def metrics(self) -> bytes:
        raise NotImplementedError

    def health(self) -> tuple[bool, dict[str, Any]]:
        raise NotImplementedError

    def do_GET(self) -> None:  # the name that http.server asks for
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", self.metrics())
        elif path == "/healthz":
            well, fields = self.health()
            self._answer(200 if well else 503, "application/json", json.dumps(fields).encode() + b"\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", b"/metrics and /healthz are here\n")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Scrapes are not told: they would be most of the log."""


class _Collector:
    """Reads the numbers at the moment of a scrape."""

    def __init__(self, service: "Service") -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        from echostore import __version__

        service = self._service
        network = service.network
        counters = network.node.counters
        connections = network.connections()

        def gauge(name: str, about: str, value: float) -> Any:
            return GaugeMetricFamily(f"echostore_{name}", about, value=value)

        def counter(name: str, about: str, value: float) -> Any:
            return CounterMetricFamily(f"echostore_{name}", about, value=value)

        def counters_by(name: str, about: str, label: str, values: Mapping[Any, int]) -> Any:
            family = CounterMetricFamily(f"echostore_{name}", about, labels=[label])
            for each, value in sorted(values.items()):
                family.add_metric([str(each)], value)
            return family

        version = GaugeMetricFamily("echostore_version", "The version that runs.", labels=["version"])
        version.add_metric([__version__], 1)
        yield version
        yield gauge("connections", "Devices that are connected now.", len(connections))
        yield gauge("local_clients", "Connections of programs of this machine.", service.local.connections)
        yield counter("connections_accepted", "Connections taken since the start.", counters.accepted)
        yield counter("connections_dialled", "Connections made since the start.", counters.dialled)
        yield counters_by("connections_refused", "Connections that never stood.", "reason", counters.refused)
        yield counters_by("connections_ended", "Connections that ended.", "reason", counters.ended)
        yield counters_by("misbehaviour", "What other peers did wrong.", "kind", counters.scores)
        yield counters_by("failures", "Frames that made this peer fail.", "kind", counters.failures)
        yield counter(
            "received_bytes",
            "Bytes received from other peers.",
            counters.bytes_received + sum(each.bytes_received for each in connections),
        )
        yield counter(
            "sent_bytes",
            "Bytes sent to other peers.",
            counters.bytes_sent + sum(each.bytes_sent for each in connections),
        )
        yield counter("received_frames", "Frames received from other peers.", counters.frames_received)
        yield counter("offers_forgotten", "Parties named by a device beyond its bound.", counters.offers_forgotten)
        limiter, limited = network.node.limiter, network.node.limiter.counters
        yield gauge("strangers", "Connected devices that share no party.", limiter.strangers)
        yield gauge("strangers_held_bytes", "What these have sent so far.", limiter.strangers_bytes)
        yield gauge("handshakes", "Connections whose handshake is not over.", limiter.handshakes)
        yield counters_by("strangers_evicted", "Strangers that had to go.", "reason", limited.evicted)
        yield counter("strangers_refused", "Strangers for whom there was no room.", limited.strangers_refused)
        yield counter("strangers_bytes", "Bytes received from strangers.", limited.size_bytes)
        yield counter("strangers_frames", "Frames received from strangers.", limited.frames)
        yield counters_by("handshakes_displaced", "Handshakes that others displaced.", "reason", limited.displaced)
        yield counter("handshakes_starved", "Handshakes that waited too long for their turn.", limited.starved)
        yield counter("known_refused", "Known devices for which there was no room.", limited.known_refused)
        work = {"handshake": network.node.handshake_work, "frame": network.node.stranger_work}
        seconds = CounterMetricFamily("echostore_strangers_seconds", "CPU time spent for strangers.", labels=["work"])
        waiting = GaugeMetricFamily("echostore_strangers_waiting", "Work of strangers that waits.", labels=["work"])
        for kind, queue in work.items():
            seconds.add_metric([kind], queue.share.spent_s)
            waiting.add_metric([kind], queue.waiting)
        yield from (seconds, waiting)
        intake = network.intake
        over = {"feed": intake.over_feed_blocks, "device": intake.over_device_blocks}
        yield counters_by("over_quota_blocks", "Blocks that came beyond a quota, by whose.", "quota", over)
        yield counter("slowed_blocks", "Of these, blocks that others went before.", intake.slowed_blocks)
        yield gauge("intake_waiting", "Ranges of blocks that wait for their turn.", intake.waiting)
        if service.pinner is not None:
            pins = service.pinner.counters
            yield counter("pinned_chunks", "Chunks of files fetched to be kept.", pins.fetched)
            yield gauge("pins_missing", "Chunks of files that nobody could give so far.", pins.missing)
        yield from self._thin()
        yield from self._parties()

    def _thin(self) -> Iterator[Any]:
        """What the services for thin clients count, together."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        services = self._service.peer.thin_services
        if not services:
            return
        for each in added(service.numbers() for service in services).families():
            kind = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
            family = kind(f"echostore_{each.name}", each.about, labels=[each.label] if each.label else [])
            for label, value in sorted(each.values.items()):
                family.add_metric([label] if each.label else [], value)
            yield family

    def _parties(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        blocks = GaugeMetricFamily(
            "echostore_party_blocks", "Blocks of a party: held, processed, known.", labels=["party", "state"]
        )
        unshared = GaugeMetricFamily(
            "echostore_party_unshared_blocks", "Own blocks that no other peer is known to hold.", labels=["party"]
        )
        failed = GaugeMetricFamily(
            "echostore_party_failed", "1 when its store has failed or its disk is full.", labels=["party"]
        )
        unstored = GaugeMetricFamily(
            "echostore_party_unstored_changes", "Own changes that are in memory only.", labels=["party"]
        )
        limbo = GaugeMetricFamily(
            "echostore_party_limbo_feeds", "Control feeds that wait for their admission.", labels=["party"]
        )
        dropped = CounterMetricFamily(
            "echostore_party_limbo_dropped", "Of these, those that did not get it.", labels=["party", "reason"]
        )
        with self._service.peer.lock:
            for party in self._service.peer.open_parties():
                name = party.key.hex()[:PARTY_DIGITS]
                progress = party_progress(party)
                for state in ("held", "processed", "known"):
                    blocks.add_metric([name, state], getattr(progress, state))
                unshared.add_metric([name], progress.unshared)
                failed.add_metric([name], 1 if party.runtime.failure is not None else 0)
                unstored.add_metric([name], party.runtime.unstored)
                waiting = party.sync_port.limbo
                limbo.add_metric([name], len(waiting))
                dropped.add_metric([name, "expired"], waiting.expired)
                dropped.add_metric([name, "evicted"], waiting.evicted)
        yield from (blocks, unshared, failed, unstored, limbo, dropped)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
