"""Messages and services between the roots of one party: two peers, a leaf at each, and what may happen in between."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.coherence.events import FromRoot
from echostore.kernel.coherence.messages import MessageId, SystemId, UserMessage
from echostore.peer import coherence_mail
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.thin.thin_party import Message, ThinParty, parse_system
from edge_process import RunningEdge
from network_peers import address, invited, peers, until
from tcp_relay import Relay


class Inbox:
    """What a leaf was told."""

    def __init__(self, leaf: ThinParty) -> None:
        self.came: list[Message] = []
        self.given_up: list[Any] = []
        leaf.on_message(self.came.append)
        leaf.on_undelivered(self.given_up.append)

    @property
    def payloads(self) -> list[bytes]:
        return [each.payload for each in self.came]


@contextmanager
def leaf(peer: Peer, party: Party, path: Path | None = None) -> Iterator[ThinParty]:
    capability = party.capability(read="*", write="*", messages=True).text
    url = peer.thin_services[0].url if peer.thin_services else peer.serve_thin("127.0.0.1:0")
    with echostore.connect(url, capability, path=path) as connected:
        yield connected


@contextmanager
def two_roots(folder: Path) -> Iterator[tuple[Peer, Party, Peer, Party]]:
    with peers(folder, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        yield ann, trip, bob, invited(ann, trip, bob)


def root_of(peer: Peer, party: Party) -> Any:
    return peer.thin_services[0]._roots[party.key]


def waiting(peer: Peer, party: Party) -> tuple[int, int]:
    """Messages that wait for other roots, and for systems here."""
    (shown,) = [each for each in peer.thin_services[0].indexes() if each.party == party.key.hex()]
    return shown.mail_out, shown.mail_in


def test_messages_cross_roots_once_and_in_order(tmp_path: Path) -> None:
    with two_roots(tmp_path) as (ann, trip, bob, theirs), leaf(ann, trip) as here, leaf(bob, theirs) as there:
        inbox, answers = Inbox(there), Inbox(here)
        for number in range(40):
            here.send(there.system, "note", b"%d" % number)
        until(lambda: len(inbox.came) >= 40)
        assert inbox.payloads == [b"%d" % number for number in range(40)]
        assert {each.sender for each in inbox.came} == {here.system}
        there.send(here.system, "thanks", b"all of it")
        until(lambda: answers.payloads == [b"all of it"])
        until(lambda: not here.driver.leaf.sender.unreceived and not there.driver.leaf.sender.unreceived)
        until(lambda: waiting(ann, trip) == (0, 0) == waiting(bob, theirs))
        assert inbox.payloads == [b"%d" % number for number in range(40)], "once"


def test_a_root_that_is_older_than_its_network_is_met_too(tmp_path: Path) -> None:
    with echostore.open(tmp_path / "ann", name="ann") as ann, echostore.open(tmp_path / "bob", name="bob") as bob:
        trip = ann.create_party("Trip")
        with leaf(ann, trip) as here:
            assert not ann.on_network
            ann.listen("127.0.0.1:0")
            bob.listen("127.0.0.1:0")
            theirs = invited(ann, trip, bob)
            with leaf(bob, theirs) as there:
                inbox = Inbox(here)
                there.send(here.system, "note", b"there you are")
                until(lambda: inbox.payloads == [b"there you are"])
            bob.thin_services[0].close()  # its root ends, its network does not
            until(lambda: not root_of(ann, trip).root.courier.met)


def test_a_message_waits_for_a_root_that_is_away_and_for_a_leaf_that_is(tmp_path: Path) -> None:
    with two_roots(tmp_path) as (ann, trip, bob, theirs):
        with leaf(bob, theirs, tmp_path / "there.db") as there:
            name = there.system
        ann.network.disconnect(address(bob))
        bob.network.disconnect(address(ann))
        until(lambda: not ann.network.connections() and not bob.network.connections())
        with leaf(ann, trip) as here:
            for number in range(3):
                here.send(name, "note", b"%d" % number)
            until(lambda: waiting(ann, trip) == (3, 0))
        # The sender is gone for good. Its root has the messages.
        bob.connect(address(ann))
        until(lambda: waiting(bob, theirs) == (0, 3) and waiting(ann, trip) == (0, 0))
        with leaf(bob, theirs, tmp_path / "there.db") as there:
            inbox = Inbox(there)
            until(lambda: inbox.payloads == [b"0", b"1", b"2"])
            until(lambda: waiting(bob, theirs) == (0, 0))


def test_a_message_after_a_batch_comes_after_it(tmp_path: Path) -> None:
    """L4 and C4 over roots: who reads the message sees what it speaks of."""
    with two_roots(tmp_path) as (ann, trip, bob, theirs), leaf(ann, trip) as here, leaf(bob, theirs) as there:
        seen: list[tuple[bytes, list[Any]]] = []
        there.on_message(lambda each: seen.append((each.payload, [row["n"] for row in there.query(type="task").all()])))
        there.query(type="task").all()
        for number in range(5):
            here.create(type="task", n=number)
            here.send(there.system, "made", b"%d" % number, context=here.context())
        until(lambda: len(seen) == 5)
        for number, (payload, rows) in enumerate(seen):
            assert payload == b"%d" % number
            assert set(range(number + 1)) <= set(rows), "what it was sent after is there"


def test_nobody_of_that_name_is_told_to_the_sender(tmp_path: Path) -> None:
    with two_roots(tmp_path) as (ann, trip, bob, theirs), leaf(ann, trip) as here, leaf(bob, theirs) as there:
        inbox, told = Inbox(there), Inbox(here)
        root = parse_system(there.system).root.hex()
        here.send(f"{root}/4711", "note", b"to nobody")
        here.send(there.system, "note", b"to somebody")
        until(lambda: told.given_up and inbox.came)
        assert [(each.target, each.reason) for each in told.given_up] == [(f"{root}/4711", "unknown-system")]
        assert inbox.payloads == [b"to somebody"]
        here.send(f"{parse_system(here.system).root.hex()}/4711", "note", b"to nobody here")
        until(lambda: len(told.given_up) == 2)
        assert told.given_up[1].reason == "unknown-system"
        until(lambda: not here.driver.leaf.sender.unreceived)


def test_a_message_that_waited_too_long_is_given_up_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_roots(tmp_path) as (ann, trip, bob, theirs), leaf(ann, trip) as here:
        with leaf(bob, theirs) as there:
            name = there.system
        told = Inbox(here)
        here.send(name, "note", b"to one that is gone")
        until(lambda: waiting(bob, theirs) == (0, 1))
        here.send(f"{'ab' * 16}/1", "note", b"to a root that is none")
        until(lambda: waiting(ann, trip) == (1, 0))
        monkeypatch.setattr(coherence_mail, "MAIL_S", -1.0)
        for peer in (ann, bob):
            peer.thin_services[0].call_soon(peer.thin_services[0]._sweep)
        until(lambda: len(told.given_up) == 2)
        assert {each.reason for each in told.given_up} == {"expired"}
        assert waiting(ann, trip) == (0, 0) == waiting(bob, theirs)
        until(lambda: not here.driver.leaf.sender.unreceived)


def test_without_the_right_to_messages_none_goes_out(tmp_path: Path) -> None:
    with two_roots(tmp_path) as (ann, trip, bob, theirs), leaf(bob, theirs) as there:
        url = ann.serve_thin("127.0.0.1:0")
        without = trip.capability(read="*", messages=False).text
        with RunningEdge([url], trip.capability(read="*", messages=True, edge=True).text) as edge:
            for way in (url, edge.url):  # the edge's own right counts for nobody else
                with echostore.connect(way, without) as mute:
                    told = Inbox(mute)
                    mute.send(there.system, "note", b"psst")
                    until(lambda: told.given_up)  # noqa: B023
                    assert told.given_up[0].reason == "not-allowed"
                    assert waiting(ann, trip) == (0, 0)


def test_services_are_seen_from_other_roots_while_these_are_there(tmp_path: Path) -> None:
    with two_roots(tmp_path) as (ann, trip, bob, theirs), leaf(ann, trip) as here, leaf(bob, theirs) as there:
        there.announce("chess", b"white")
        until(lambda: [each.name for each in here.services("ch")] == ["chess"])
        (found,) = here.services("ch")
        assert (found.system, found.detail) == (there.system, b"white")
        here.announce("chess", b"black")
        until(lambda: len(there.services("chess")) == 2)
        there.deannounce("chess")
        until(lambda: [each.system for each in here.services("chess")] == [here.system])
        there.announce("chess", b"again")
        until(lambda: len(here.services("chess")) == 2)
        ann.network.disconnect(address(bob))
        bob.network.disconnect(address(ann))
        until(lambda: [each.system for each in here.services("chess")] == [here.system])
        until(lambda: [each.system for each in there.services("chess")] == [there.system])
        bob.connect(address(ann))
        until(lambda: len(here.services("chess")) == 2 == len(there.services("chess")))


def test_a_full_inbox_keeps_the_rest_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from echostore.kernel.coherence import courier

    monkeypatch.setattr(courier, "INBOX_PER_TARGET_MAX", 3)
    monkeypatch.setattr(courier, "OUT_PER_SENDER_MAX", 4)
    with two_roots(tmp_path) as (ann, trip, bob, theirs), leaf(ann, trip) as here:
        with leaf(bob, theirs, tmp_path / "there.db") as there:
            name = there.system
        slow: list[Any] = []
        told = here.driver._carry_out
        monkeypatch.setattr(
            here.driver, "_carry_out", lambda effect, shown: (slow.append(effect), told(effect, shown))[1]
        )
        for number in range(12):
            here.send(name, "note", b"%d" % number)
        until(lambda: waiting(bob, theirs) == (0, 3) and waiting(ann, trip) == (4, 0))
        until(lambda: [each for each in slow if type(each).__name__ == "Slow" and each.what == "messages"])
        with leaf(bob, theirs, tmp_path / "there.db") as there:
            inbox = Inbox(there)
            until(lambda: len(inbox.came) == 12)
            assert inbox.payloads == [b"%d" % number for number in range(12)]


def test_a_root_speaks_for_its_own_systems_only(tmp_path: Path) -> None:
    with two_roots(tmp_path) as (ann, trip, bob, theirs), leaf(ann, trip) as here, leaf(bob, theirs) as there:
        inbox = Inbox(here)
        until(lambda: root_of(ann, trip).root.courier.met)
        mine, bobs = root_of(ann, trip), root_of(bob, theirs).system.root
        strange = SystemId(b"x" * 16, (1,))
        forged = UserMessage(MessageId(strange, 0, 1), 1, parse_system(here.system), (), "note", b"forged", True)
        before = mine.refusals.get("not-allowed", 0)
        ann.thin_services[0].from_root(trip.key, bobs, forged)
        until(lambda: mine.refusals.get("not-allowed", 0) > before)
        assert FromRoot(bobs, forged).root == bobs
        # One that names another root than its device writes as is not even heard.
        lines = ann.network.root_lines
        (link,) = ann.network.node.links.values()
        refused = lines.refused
        from echostore.wire.mesh import Roots

        channel = link.channel_for(trip.key)
        assert channel is not None
        ann.network.soon(lambda: lines.receive(link, Roots(channel, b"x" * 16)))
        until(lambda: lines.refused == refused + 1)
        there.send(here.system, "note", b"honest")
        until(lambda: inbox.payloads == [b"honest"])


SERVE = """
import os, signal, sys
import echostore
from echostore.peer.coherence_mail import MailRows

home, connect, left, when = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
keep = MailRows.keep

def keep_and_fall(self, rows, now_ms):
    global left
    rows = tuple(rows)
    left -= bool(rows)
    if rows and left == 0 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    keep(self, rows, now_ms)
    if rows and left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

MailRows.keep = keep_and_fall
with echostore.open(home) as peer:
    url = peer.serve_thin("127.0.0.1:0")
    peer.connect(connect)
    print(url, flush=True)
    sys.stdin.read()
"""


class RootProcess:
    """A root that falls over just before or after its n-th commit of messages."""

    def __init__(self, home: Path, connect: str, relay: Relay, kill_at: int, when: str) -> None:
        command = [sys.executable, "-c", SERVE, str(home), connect, str(kill_at), when]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url = self.process.stdout.readline().strip()
        if url:  # else it fell over at once: what waited was on its way before it could say where it is
            relay.point(url)

    def fallen(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("killed", ["sending", "receiving"])
def test_a_root_that_is_killed_between_any_two_steps_loses_no_message_and_repeats_none(
    tmp_path: Path, killed: str
) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        theirs = invited(ann, trip, bob)
        capability = trip.capability(read="*", write="*", messages=True).text
        url = ann.serve_thin("127.0.0.1:0")
        where = address(ann)
        bob.close()  # from here on a process has its home
        assert theirs is not None
        with Relay() as relay, ExitStack() as stack:
            process = RootProcess(tmp_path / "bob", where, relay, 0, "never")
            stack.callback(lambda: process.end())
            urls = [relay.url, url] if killed == "sending" else [url, relay.url]
            sender, target = (
                stack.enter_context(echostore.connect(each, capability, path=tmp_path / f"{place}.db", timeout_s=60))
                for place, each in enumerate(urls)
            )
            inbox, sent = Inbox(target), []
            for number, (kill_at, when) in enumerate([(1, "after"), (2, "before"), (2, "after"), (0, "")]):
                process.end()
                sent += [b"%d" % (2 * number), b"%d" % (2 * number + 1)]
                sender.send(target.system, "note", sent[-2])
                sender.send(target.system, "note", sent[-1])
                process = RootProcess(tmp_path / "bob", where, relay, kill_at, when)
                if kill_at:
                    until(process.fallen)
            until(lambda: len(inbox.came) >= len(sent))
            until(lambda: not sender.driver.leaf.sender.unreceived)
            assert inbox.payloads == sent
            process.end()
