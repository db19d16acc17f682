"""Programs that were attached to a service when it ended: they go on with the next process that serves the home."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore import aio
from echostore.kernel.errors import Closed
from echostore.peer import attached
from echostore.peer.attached import ConnectionLost
from echostore.peer.local_server import LocalServer
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from served import serve


class Service:
    """A home that this process serves, with a socket; it can end and begin again."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.peer: Peer
        self._server: LocalServer | None = None
        self.open()
        self.serve()

    def open(self) -> None:
        self.peer = echostore.open(self.home, name="Own", background=False, attach=False)

    def serve(self) -> None:
        self._server = LocalServer(self.peer)

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.peer.close()

    @property
    def party(self) -> Party:
        return self.peer.party("@Trip")

    def restart(self, meanwhile: Callable[[Party], object] = lambda party: None) -> None:
        """End, and begin again; what happens in between nobody is told of."""
        self.stop()
        self.open()
        meanwhile(self.party)
        self.serve()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path / "home")
    made.peer.create_party("Trip")
    yield made
    made.stop()


@pytest.fixture
def peer(service: Service) -> Iterator[Peer]:
    with echostore.open(service.home) as opened:
        yield opened


def titles(items: Any) -> list[str]:
    return sorted(item["title"] for item in items)


def test_a_live_query_goes_on_and_reports_what_changed_meanwhile(service: Service, peer: Peer) -> None:
    party = peer.party("@Trip")
    kept, changed, gone = (party.create(type="task", title=title) for title in ("kept", "changed", "gone"))
    watch = party.query(type="task").watch()
    party.create(type="task", title="seen")
    assert titles(next(watch).added) == ["seen"]
    assert watch.poll(0.0) is None
    assert watch.poll(0.0) is None

    def meanwhile(own: Party) -> None:
        own.create(type="task", title="added")
        own.get(changed.id)["n"] = 2
        own.get(gone.id).delete()
        own.create(type="note", title="another type")

    service.restart(meanwhile)
    change = next(watch)
    assert titles(change.added) == ["added"]
    assert titles(change.changed) == ["changed"]
    assert titles(change.removed) == ["gone"]
    service.party.get(kept.id)["title"] = "live again"
    assert titles(next(watch).changed) == ["live again"]


def test_nothing_is_reported_where_nothing_changed(service: Service, peer: Peer) -> None:
    party = peer.party("@Trip")
    party.create(type="task", title="a")
    watch = party.query(type="task").watch()
    service.restart()
    while watch._lost_since is None:  # type: ignore[attr-defined]  # until the loss is noticed
        assert watch.poll(0.1) is None
    while watch._lost_since is not None:  # type: ignore[attr-defined]  # and until it goes on
        assert watch.poll(0.1) is None
    service.party.create(type="task", title="b")
    assert titles(next(watch).added) == ["b"]


def test_a_change_that_was_not_fetched_before_the_end_is_reported(service: Service, peer: Peer) -> None:
    party = peer.party("@Trip")
    task = party.create(type="task", title="a")
    watch = party.query(type="task").watch()
    assert watch.poll(0.0) is None
    task["n"] = 1  # it waits in the service when that ends
    service.restart()
    assert titles(next(watch).changed) == ["a"]


def test_an_ordered_answer_can_be_replayed_over_the_restart(service: Service, peer: Peer) -> None:
    party = peer.party("@Trip")
    items = [party.create(type="task", title=str(place), place=place) for place in range(4)]
    query = party.query(type="task").order_by("place")
    watch, answer = query.watch(), query.all()

    def meanwhile(own: Party) -> None:
        own.get(items[0].id)["place"] = 9
        own.get(items[1].id).delete()
        own.create(type="task", title="new", place=2.5)

    service.restart(meanwhile)
    assert [item["title"] for item in next(watch).replay(answer)] == ["2", "new", "3", "0"]


def test_a_reduction_goes_on(service: Service, peer: Peer) -> None:
    party = peer.party("@Trip")
    first = party.create(type="task", kind="a")
    party.create(type="task", kind="b")
    watch = party.query(type="task").reduce("count", by="kind").watch()

    def meanwhile(own: Party) -> None:
        own.get(first.id).delete()
        own.create(type="task", kind="c")

    service.restart(meanwhile)
    change = next(watch)
    assert [(group.by, group.value) for group in change.groups] == [("c", 1)]
    assert change.groups_removed == ("a",)


def test_a_query_over_all_parties_goes_on(service: Service, peer: Peer) -> None:
    other = peer.create_party("Other")
    peer.party("@Trip").create(type="task", title="one")
    two = other.create(type="task", title="two")
    watch = peer.query(type="task").watch()
    service.restart(lambda own: own.peer.party(other.key).get(two.id).update(title="new title"))
    assert titles(next(watch).changed) == ["new title"]


def test_a_subscription_goes_on(service: Service, peer: Peer) -> None:
    arrived = threading.Event()
    told: list[Any] = []

    def tell(change: Any) -> None:
        told.extend(titles(change.added))
        arrived.set()

    with peer.party("@Trip").query(type="task").subscribe(tell):
        service.restart(lambda own: own.create(type="task", title="meanwhile"))
        assert arrived.wait(20)
    assert told == ["meanwhile"]


def test_asyncio_watches_go_on(service: Service) -> None:
    async def story() -> list[str]:
        async with aio.open(service.home) as peer:
            party = await peer.party("@Trip")
            watch = await party.query(type="task").watch()
            await asyncio.to_thread(service.restart, lambda own: own.create(type="task", title="meanwhile"))
            async with asyncio.timeout(20):
                async for change in watch:
                    return [await item["title"] for item in change.added]
        return []

    assert asyncio.run(story()) == ["meanwhile"]


def test_parties_items_queries_and_attributes_are_found_again(service: Service, peer: Peer) -> None:
    party = peer.party("@Trip")
    task = party.create(type="task", title="a")
    query, schemas = party.query(type="task").where(title="a"), party.schemas
    service.restart()
    task["n"] = 1
    assert query.one() == task
    assert party.query(type="task").one()["n"] == 1
    assert schemas.all() == []
    assert peer.name == "Own"
    assert service.party.get(task.id)["n"] == 1


def test_what_can_not_be_found_again_says_so(service: Service, peer: Peer) -> None:
    party = peer.party("@Trip")
    party.create(type="task", title="a")
    receipt, pieces = party.flush(), iter(party.stream())
    service.restart()
    with pytest.raises(ConnectionLost, match="Receipt"):
        receipt.durable  # noqa: B018
    with pytest.raises(Closed):
        next(pieces)


def test_a_batch_that_was_open_is_undone_and_nothing_is_written_beside_it(service: Service, peer: Peer) -> None:
    party = peer.party("@Trip")
    task = party.create(type="task", n=1)
    party.flush()

    def write() -> None:
        with party.batch():
            task["n"] = 2
            service.restart()
            task["n"] = 3

    with pytest.raises(ConnectionLost, match="The open batch was undone"):
        write()
    assert task["n"] == 1
    task["n"] = 4
    assert service.party.get(task.id)["n"] == 4


def test_a_call_raises_when_nobody_serves_the_home(
    service: Service, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = peer.party("@Trip")
    service.stop()
    monkeypatch.setattr(attached.Link.request, "__kwdefaults__", {"patience_s": 0.1})
    monkeypatch.setattr(attached.remote_call, "__kwdefaults__", {"patience_s": 0.1})
    with pytest.raises(ConnectionLost, match="has ended"):
        party.create(type="task")
    service.open()
    service.serve()


WATCHER = """
import sys
import echostore
with echostore.open(sys.argv[1]) as peer:
    watch = peer.party("@Trip").query(type="task").watch()
    print("watching", flush=True)
    for change in watch:
        print(*sorted(item["title"] for item in change.added), flush=True)
        if any(item["title"] == "last" for item in change.added):
            break
"""


def test_a_program_that_watches_outlives_a_service_without_a_traceback(tmp_path: Path) -> None:
    with serve(tmp_path, "home") as first:
        home, environment = first.cli.home, first.cli.environment()
        with echostore.open(home) as running:
            running.create_party("Trip")
        program = subprocess.Popen(
            [sys.executable, "-c", WATCHER, str(home)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert program.stdout is not None
        assert program.stdout.readline() == "watching\n"
    first.cli("item", "create", "property-set", "--type", "task", "title=meanwhile").ok()
    with serve(tmp_path, "home"), echostore.open(home) as running:
        assert program.stdout.readline() == "meanwhile\n"
        running.party("@Trip").create(type="task", title="last")
        out, err = program.communicate(timeout=60)
    assert (out, program.returncode) == ("last\n", 0)
    assert "Traceback" not in err
    assert "a live query waits" in err
