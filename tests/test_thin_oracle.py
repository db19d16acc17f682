"""The oracle of thin clients: a real peer, real edges and leaves; what they hold is what a fresh query says at that tick.

100 random specs, 10 batches of 10 updates of 5 mutations, by the peer and by leaves, while
the root goes and comes back, edges are killed and started one after the other, leaves are thrown away,
and attackers at the root and behind an edge speak in the names of others

Edges are killed without a word: two in this process, whose insides are checked, by resetting their sockets; one in a
process of its own by SIGKILL.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import echostore
from cli_process import Cli
from echostore.kernel.coherence.messages import (
    Arc,
    GrantArc,
    IndexValue,
    Message,
    Spec,
    Statement,
    SystemId,
    Undelivered,
    Update,
    UserMessage,
    UserReceipt,
)
from echostore.kernel.errors import EchoError
from echostore.kernel.query.spec import QuerySpec
from echostore.testing.coherence_attack_models import forgeries
from echostore.testing.coherence_checker import CoherenceChecker, fresh_answer
from echostore.thin.driver import HOME
from echostore.thin.queries import ThinQuery
from echostore.thin.thin_party import ThinParty, Transaction, connect
from echostore.wire.index_spec import IndexQuery, index_items, index_spec
from echostore.wire.leaf_signing import signed
from edge_process import RunningEdge
from network_peers import until
from tcp_relay import Relay
from thin_client import Closed, ThinClient

SPECS, BATCHES, UPDATES, MUTATIONS = 100, 10, 10, 5
LEAVES = 4
TYPES = ("a", "b", "c")
RULES = [f"C{number}" for number in range(1, 11)]

SERVE = """
import sys, echostore
with echostore.open(sys.argv[1], name="Root") as peer:
    print(peer.serve_thin(sys.argv[2]), flush=True)
    sys.stdin.read()
"""


def random_query(random: Random) -> Callable[[Any], Any]:
    """A question of one step: filters, an order, a limit."""
    type, n, low = random.choice(TYPES), random.randrange(6), random.randrange(4)
    conditions = random.choice(
        [{}, {"n": n}, {"n__ge": low}, {"n__lt": low, "m__exists": True}, {"m__in": [n, low]}, {"title__contains": "1"}]
    )
    order = random.choice([(), ("n",), ("-n", "title"), ("title",)])
    limit = random.choice([None, None, 3, 10])

    def build(query: Any) -> Any:
        query = query.where(type=type, **conditions)
        query = query.order_by(*order) if order else query
        return query if limit is None else query.limit(limit)

    return build


class Attacker:
    """Says in others' names all that a link can carry, unsigned and by its own key."""

    def __init__(self, url: str, capability: str) -> None:
        self.client = ThinClient(url, capability)
        self.lies = 0
        self.victims: set[SystemId] = set()

    def attack(self, arc: Arc, target: SystemId, batch: int) -> None:
        client = self.client
        self.victims |= {arc.system, target}
        with suppress(OSError, Closed, TimeoutError):  # it is there when the other side is
            if client.connection is None:
                client.open()
            for lie in forgeries(arc, target, client.leaf.systems[HOME], 1, batch):
                client.send(lie)
                if isinstance(lie, Update | Statement):
                    client.send(signed(lie, client.key))
                self.lies += 1
            seen = -1
            while seen != len(client.received):
                seen = len(client.received)
                client.read(0.001)

    def heard(self) -> list[Message]:
        """What was not for it."""
        told = [each for each in self.client.received if isinstance(each, UserMessage | UserReceipt | Undelivered)]
        arcs = [each for each in self.client.received if isinstance(each, GrantArc) and each.arc.system in self.victims]
        return [*told, *arcs]


class Story:
    """One run: who is there, and what they do."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.folder = folder
        self.relays = [Relay() for _ in range(4)]
        """Addresses that stay: of the root, of two edges here, and of one in its own process."""
        self.url, *self.addresses = [relay.url for relay in self.relays]
        self.peer = echostore.open(folder / "home", name="Root")
        self.party = self.peer.create_party("Oracle")
        self.key = self.party.key
        self.capability = self.party.capability(read="*", write="*", messages=True).text
        self.questions = [random_query(self.random) for _ in range(SPECS)]
        self.edge_capability = self.party.capability(messages=True, edge=True).text
        self.relays[0].point(self.peer.serve_thin("127.0.0.1:0"))
        self.edges = [RunningEdge([self.url], self.edge_capability) for _ in range(2)]
        for relay, edge in zip(self.relays[1:], self.edges, strict=False):
            relay.point(edge.url)
        self.process = EdgeProcess(self.folder, self.url, self.edge_capability)
        self.relays[3].point(self.process.url)
        self.leaves: list[tuple[str, ThinParty, list[ThinQuery]]] = []
        self.names = 0
        narrow = self.party.capability(read=["note"], messages=True)
        reads, stray = self.party.capability(messages=True), self.party.capability(messages=True, edge=True)
        self.attackers = [
            Attacker(self.url, narrow.text),
            Attacker(self.url, reads.text),
            Attacker(self.url, stray.text),
            Attacker(self.addresses[0], reads.text),
        ]
        self.posted: list[bytes] = []
        self.got: list[bytes] = []
        specs = [Spec(self._spec(build)) for build in self.questions]
        self.checker = CoherenceChecker(specs, lambda: self.party.runtime.source)

    def _spec(self, build: Callable[[Any], Any]) -> bytes:
        query: QuerySpec = build(self.party.query()).spec
        return index_spec(IndexQuery(self.key, query))

    def leaf(self, path: Path | None = None) -> None:
        """A new leaf, at the root or at one of the edges, with its share of the specs."""
        self.names += 1
        one, two, process = self.addresses
        urls = self.random.choice([[self.url], [one, two], [two, one], [one, self.url], [process, two], [process, one]])
        party = connect(urls, self.capability, path=path, timeout_s=30)
        mine = self.random.sample(self.questions, SPECS // LEAVES + 10)
        party.on_message(lambda message: self.got.append(message.payload))
        self.leaves.append((f"leaf {self.names}", party, [build(party.query()) for build in mine]))

    def update(self) -> None:
        """Five mutations, by the peer in one batch, or by a leaf in one."""
        if self.random.random() < 0.5:
            with self.party.batch():
                for _ in range(MUTATIONS):
                    self._mutate_at_peer()
        else:
            _name, leaf, queries = self.random.choice(self.leaves)
            with leaf.batch():
                for _ in range(MUTATIONS):
                    self._mutate_at_leaf(leaf, queries)

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {"n": self.random.randrange(6), "title": str(self.random.randrange(30))}
        return values if self.random.random() < 0.5 else {**values, "m": self.random.randrange(6)}

    def _mutate_at_peer(self) -> None:
        items = self.party.query().all()
        if len(items) < 8 or self.random.random() < 0.3:
            made = self.party.create("property-set", type=self.random.choice(TYPES), **self._values())
            self.checker.made(made.id)
            return
        item = self.random.choice(items)
        if self.random.random() < 0.15:
            item.delete()
        else:
            item.update(**self._values())

    def _mutate_at_leaf(self, leaf: ThinParty, queries: list[ThinQuery]) -> None:
        shown = self.random.choice(queries).held() or ()
        if not shown or self.random.random() < 0.4:
            self.checker.made(leaf.create(type=self.random.choice(TYPES), **self._values()).id)
        elif self.random.random() < 0.15:
            self.random.choice(shown).delete()
        else:
            self.random.choice(shown).update(**self._values())

    def read(self) -> None:
        """Some leaves read some of their indexes; who is offline reads what it has."""
        for _, leaf, queries in self.leaves:
            for query in self.random.sample(queries, 10):
                if leaf.connected:
                    try:
                        query.all()
                    except EchoError as error:
                        assert error.code in ("E-UNREACHABLE", "E-TIMEOUT"), error  # noqa: PT017
                else:
                    query.held()

    def transact(self) -> None:
        """One leaf reads some of its indexes in one transaction: they are the answers of one tick."""
        _, leaf, queries = self.random.choice([each for each in self.leaves if each[1].connected] or self.leaves)
        asked = self.random.sample(queries, 5)

        def work(transaction: Transaction) -> tuple[int, dict[Spec, IndexValue]]:
            found = {}
            for query in asked:
                transaction.all(query)
                with leaf.driver.lock:
                    version = leaf.driver.leaf.read(HOME, query.spec, transaction.tick)
                if version is not None:
                    found[query.spec] = version.value
            return transaction.tick, found

        try:
            self.checker.check_transaction(*leaf.transaction(work))
        except EchoError as error:
            assert error.code in ("E-UNREACHABLE", "E-TIMEOUT", "E-GONE"), error  # noqa: PT017

    def check(self) -> None:
        """All invariants of everybody, at this moment."""
        for name, leaf, _ in self.leaves:
            with leaf.driver.lock:
                self.checker.check_leaf(name, leaf.driver.leaf)
        for edge in self.edges:
            edge.ask(lambda node: self.checker.check_serving(node.edge.serving))
        (service,) = self.peer.thin_services

        async def look() -> None:
            for root in service._roots.values():
                self.checker.check_serving(root.root.serving)

        service.call(look())

    def say(self) -> None:
        """A message from one leaf to another."""
        (_, one, _), (_, two, _) = self.random.sample(self.leaves, 2)
        body = b"%d" % len(self.posted)
        self.posted.append(body)
        one.send(two.system, "note", body, context=one.context())

    def attack(self) -> None:
        """Somebody who may send messages speaks for one leaf, to another."""
        (_, one, _), (_, two, _) = self.random.sample(self.leaves, 2)
        with one.driver.lock, two.driver.lock:
            arc, numbers = one.driver.leaf.arcs.arc, one.driver.leaf.outbox.numbers
            target = two.driver.leaf.systems.get(HOME)
        if arc is not None and target is not None:
            self.random.choice(self.attackers).attack(arc, target, numbers.get(arc, 0) + 1)

    # What goes wrong

    def restart_root(self) -> None:
        """The whole peer closes and is opened again from its disk."""
        self.peer.close()
        self.peer = echostore.open(self.folder / "home", name="Root")
        self.party = self.peer.party(self.key)
        self.relays[0].point(self.peer.serve_thin("127.0.0.1:0"))

    def restart_service(self) -> None:
        """Only the service goes: every root machine in memory is lost."""
        self.peer.thin_services[0].close()
        self.peer._thin.clear()
        self.relays[0].point(self.peer.serve_thin("127.0.0.1:0"))

    def kill_edge(self, number: int) -> None:
        """An edge vanishes with all it knew; another one comes in its place."""
        self.edges[number].kill()
        self.edges[number] = RunningEdge([self.url], self.edge_capability, wait=False)
        self.relays[1 + number].point(self.edges[number].url)

    def kill_process(self) -> None:
        """The same, of an edge in its own process."""
        self.process.kill()
        self.process = EdgeProcess(self.folder, self.url, self.edge_capability)
        self.relays[3].point(self.process.url)

    def throw_away(self) -> None:
        """A leaf is gone in the middle of things, with its outbox; a new one comes."""
        _, leaf, _ = self.leaves.pop(0)
        leaf.fence("release", timeout_s=60)  # what it wrote is counted below
        until(lambda: len(self.got) == len(self.posted), seconds=60)  # and so is what it said, or was told
        leaf.close()
        self.leaf()

    def cut_links(self) -> None:
        for _, leaf, _ in self.leaves:
            leaf.driver.drop_link("cut by the test")

    def finish(self) -> None:
        """L1 to L4: everything comes to an end, and everybody agrees with the root."""
        for name, leaf, queries in self.leaves:
            until(lambda leaf=leaf: leaf.connected, seconds=60)
            leaf.fence("full", timeout_s=60)
            assert leaf.pending == 0, name
            assert not leaf.driver.leaf.waits, name
            for query in queries:
                leaf.answers.patience_s = 60
                answer = query.all()
                with self.party.reading() as runtime:
                    wanted = [each.item for each in index_items(fresh_answer(query.spec, runtime.source))]
                assert [each.id for each in answer] == wanted
                assert not answer.pending
            assert leaf.rejected() == [], name
        self.check()
        missing = [each.hex() for each in self.checker.ids if not self.party.has(each)]
        assert missing == [], "a created item is missing"
        assert self.checker.compared > 10_000
        unseen = [rule for rule in RULES if not self.checker.checked[rule]]
        assert unseen == [], "this run says nothing about them"

    def close(self) -> None:
        for _, leaf, _ in self.leaves:
            leaf.close()
        for attacker in self.attackers:
            attacker.client.close()
        for edge in self.edges:
            edge.close()
        self.process.kill()
        for relay in self.relays:
            relay.close()
        self.peer.close()


def test_what_leaves_and_edges_hold_is_the_fresh_answer_of_that_tick(tmp_path: Path) -> None:
    story = Story(tmp_path, seed=7)
    with ExitStack() as stack:
        stack.callback(story.close)
        stack.enter_context(story.checker.watching())
        for number in range(LEAVES):
            story.leaf(tmp_path / f"leaf-{number}" if number % 2 else None)
        wrongs: dict[int, Callable[[], None]] = {
            2: story.cut_links,
            1: story.kill_process,
            3: lambda: story.kill_edge(0),
            4: story.restart_service,
            5: story.throw_away,
            6: story.restart_root,
            7: lambda: story.kill_edge(1),
            8: lambda: (story.kill_process(), story.kill_edge(0), story.kill_edge(1)),  # type: ignore[func-returns-value]
        }
        for batch in range(BATCHES):
            for update in range(UPDATES):
                story.update()
                if update % 3 == 0:
                    story.read()
                if update % 5 == 1:
                    story.transact()
                story.attack()
                story.check()
                if update == UPDATES // 2 and batch in wrongs:
                    wrongs[batch]()
            story.say()
        story.finish()
        until(lambda: len(story.got) >= len(story.posted), seconds=60)
        assert sorted(story.got) == sorted(story.posted), "a message came twice"
        for attacker in story.attackers:
            assert attacker.lies > 0
            assert attacker.heard() == []


def test_a_root_that_is_killed_again_and_again_applies_each_batch_once(tmp_path: Path) -> None:
    """Brutal: the process of the root gets no chance to say or to write anything more."""
    with echostore.open(tmp_path / "home", name="Root") as peer:
        party = peer.create_party("Brutal")
        capability, key = party.capability(read="*", write="*").text, party.key
        log = party.create("threaded-log", type="log").id
    written = []
    with ExitStack() as stack:
        relay = stack.enter_context(Relay())
        root = Killable(tmp_path / "home", relay)
        stack.callback(lambda: root.kill())
        leaf = stack.enter_context(connect(relay.url, capability, path=tmp_path / "leaf", timeout_s=60))
        mine = leaf.get(log)
        for number in range(40):
            mine.post(number)
            written.append(number)
            if number % 10 == 5:
                if number == 15:
                    leaf.fence("release", timeout_s=60)
                root.kill()
                mine.post(-number)
                written.append(-number)
                root = Killable(tmp_path / "home", relay)
        leaf.fence("full", timeout_s=60)
        assert leaf.pending == 0
        assert [each["body"] for each in leaf.get(log).posts()] == written
        root.kill()
    with echostore.open(tmp_path / "home", name="Root") as peer:
        assert [each.body for each in peer.party(key).get(log).posts()] == written


class EdgeProcess:
    """`echostore edge` in a process of its own, until SIGKILL."""

    def __init__(self, folder: Path, up: str, capability: str) -> None:
        file = folder / "edge.capability"
        file.write_text(capability)
        cli = Cli(folder / "no-home", folder / "edge-state")
        self._process = subprocess.Popen(
            cli.command("edge", "--listen", "127.0.0.1:0", "--up", up, "--capability", str(file), "--json"),
            stdout=subprocess.PIPE,
            text=True,
            env=cli.environment(),
        )
        assert self._process.stdout is not None
        self.url: str = json.loads(self._process.stdout.readline())["url"]

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Killable:
    """A root in a process of its own."""

    def __init__(self, home: Path, relay: Relay) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(home), "127.0.0.1:0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        url = self._process.stdout.readline().strip()
        assert url, "the root did not start"
        relay.point(url)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()
