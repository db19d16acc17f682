"""What a service for thin clients and an edge tell monitors: links, indexes, hits, misses, updates, refusals, waits."""

import asyncio
import urllib.request
from pathlib import Path

import pytest

import echostore
from echostore.kernel.coherence.events import Want
from echostore.kernel.coherence.messages import Acquire
from echostore.kernel.query.spec import QuerySpec
from echostore.mesh.coherence_numbers import ThinNumbers, added, metrics_text
from echostore.mesh.coherence_status import StatusServer
from echostore.peer import coherence_root, service
from edge_process import RunningEdge
from network_peers import until
from thin_client import HOME, ThinClient

TASKS, NOTES = QuerySpec.start("task"), QuerySpec.start("note")


def scraped(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("echostore_thin_"): float(value) for name, value in values.items() if "_thin_" in name}


def test_a_service_and_an_edge_tell_what_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with echostore.open(tmp_path / "home", name="Root") as peer:
        running = service.Service(peer, listen=["127.0.0.1:0"], metrics="127.0.0.1:0")
        try:
            assert running.http is not None
            at = running.http.address
            assert scraped(at) == {}, "nobody is served"
            party = peer.create_party("Counted")
            task = party.create(type="task", n=0)
            narrow, edges = party.capability(read=["task"]).text, party.capability(messages=True, edge=True).text
            up = peer.serve_thin("127.0.0.1:0")
            with ThinClient(up, narrow) as one, ThinClient(up, narrow) as two:
                spec = one.spec(TASKS)
                one.want(spec)
                two.want(spec)
                before = scraped(at)
                assert (before["links"], before["systems"], before["indexes"]) == (2, 2, 1)
                assert (before["hits_total"], before["misses_total"]) == (1, 1)
                task["n"] = 1
                for client in (one, two):
                    client.sees(spec, lambda items: items[0].values["n"] == 1)
                one.give(Want(HOME, one.spec(NOTES)))
                one.until(lambda: one.lost)
                monkeypatch.setattr(coherence_root, "ACQUIRES_BURST", 1.0)
                monkeypatch.setattr(coherence_root, "ACQUIRES_PER_S", 0.01)
                fresh = ThinClient(up, narrow).open()
                for _ in range(3):
                    fresh.send(Acquire(spec))
                fresh.until(lambda: fresh.slow)
                fresh.close()
                after = scraped(at)
                assert after["updates_total"] >= before["updates_total"] + 2
                assert after['refused_total{reason="not-allowed"}'] == 1
                assert (before["backpressure_total"], after["excluded_total"]) == (0, 0)
                assert after["backpressure_total"] > 0
            until(lambda: scraped(at)["links"] == 0)
            monkeypatch.undo()
            with RunningEdge([up], edges) as edge:
                _edge_counts(edge, narrow)
        finally:
            running.close()


def _edge_counts(edge: RunningEdge, capability: str) -> None:
    telling = StatusServer(edge.node.mesh, edge.node.numbers)
    told = edge._await(telling.start("127.0.0.1", 0))
    try:
        with ThinClient(edge.url, capability) as one, ThinClient(edge.url, capability) as two:
            spec = one.spec(TASKS)
            one.want(spec)
            two.want(spec)
            one.give(Want(HOME, one.spec(NOTES)))
            one.until(lambda: one.lost)
            values = scraped(told)
            assert (values["links"], values["hits_total"], values["misses_total"]) == (2, 1, 1)
            assert values["indexes"] == 2, "and the revocations"
            assert values['refused_total{reason="not-allowed"}'] == 1
    finally:
        edge._await(asyncio.wait_for(telling.close(), 30))


def test_sums_and_text() -> None:
    one = ThinNumbers(links=1, hits=2, refused={"expired": 1, "revoked": 2})
    both = added([one, ThinNumbers(links=3, excluded=4, refused={"revoked": 1})])
    assert both == ThinNumbers(links=4, hits=2, excluded=4, refused={"expired": 1, "revoked": 3})
    text = metrics_text(both)
    assert '# TYPE echostore_thin_refused_total counter\nechostore_thin_refused_total{reason="expired"} 1\n' in text
    assert "# TYPE echostore_thin_links gauge\nechostore_thin_links 4\n" in text
