"""Invitations: tickets, passcodes, tries, and nobody in the middle."""

import asyncio
import json
import random
import socket
import sqlite3
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echostore
from cli_process import Cli
from echostore.kernel.errors import EchoError, Refused, Unreachable, UsageError
from echostore.kernel.ids import DeviceKey, PartyKey
from echostore.mesh import connection as mesh_connection
from echostore.mesh import invitation as mesh_invitation
from echostore.mesh.invitation import (
    TRIES_MAX,
    TRIES_PER_ADDRESS,
    TRIES_PER_DEVICE,
    VERIFIER_BYTES,
    Between,
    Dialler,
    Guest,
    Host,
    InvitationFailed,
    Reason,
    passcode_verifier,
    tries_left,
    with_tries,
)
from echostore.mesh.node import Link
from echostore.mesh.secure_channel import SecureChannel
from echostore.mesh.ticket import Kind, Purpose, Ticket, read_ticket
from echostore.peer import inviting
from echostore.peer.identity import Welcome
from echostore.peer.inviting import MESSAGES, Invitation
from echostore.peer.network import parse_address
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.wire.generated import mesh_pb2 as pb
from echostore.wire.mesh import Invitation as InvitationFrame
from echostore.wire.mesh import decode_mesh_frame
from echostore.wire.signing import SigningKey
from network_peers import PATIENCE_S, address, converged, peers, until

HERE = bytes(16)
RIGHT, WRONG = b"r" * VERIFIER_BYTES, b"w" * VERIFIER_BYTES


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


# tickets


def a_ticket(kind: Kind = Kind.PASSCODE) -> Ticket:
    secret = bytes(range(32)) if kind is Kind.OPEN else b""
    keys = PartyKey(bytes([1]) * 32), DeviceKey(bytes([2]) * 32)
    return Ticket(HERE, kind, Purpose.PARTY, *keys, ("127.0.0.1:4711", "[::1]:4712"), 1_700_000_000_000, secret)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_ticket_survives_spaces_breaks_and_capitals(kind: Kind) -> None:
    ticket = a_ticket(kind)
    text = ticket.text()
    assert read_ticket(text) == ticket
    assert read_ticket(f"  {text[:40].upper()}\n {text[40:]}\n") == ticket


@given(at=st.integers(0, 400), character=st.characters(codec="utf-8"))
def test_a_damaged_ticket_is_refused(at: int, character: str) -> None:
    text = a_ticket().text()
    damaged = text[: at % len(text)] + character + text[at % len(text) + 1 :]
    if "".join(damaged.split()).lower() == text:
        return
    with pytest.raises(UsageError):
        read_ticket(damaged)


@pytest.mark.parametrize("lost", range(1, 9))
def test_a_ticket_that_lost_its_end_says_so_in_our_words(lost: int) -> None:
    with pytest.raises(UsageError, match="damaged: a character is missing or wrong"):
        read_ticket(a_ticket().text()[:-lost])


@given(text=st.text(max_size=300))
def test_any_text_is_a_ticket_or_a_usage_error(text: str) -> None:
    for line in (text, "echo1" + text):
        with pytest.raises(UsageError):
            read_ticket(line)


# the steps


def between(channel: bytes = b"channel") -> Between:
    return Between(HERE, DeviceKey(b"g" * 32), DeviceKey(b"h" * 32), channel)


def attempt(guest: Guest, host: Host, request: bytes = b"please") -> bytes:
    share = host.share(guest.knock().step.knock)
    confirm, asked = guest.answer(share.step.share, request)
    host.confirm(confirm.step.confirm)
    return host.requested(asked.step.request)


@pytest.mark.parametrize("kind", list(Kind))
def test_the_right_guest_gets_through(kind: Kind) -> None:
    ticket = a_ticket(kind)
    public = SigningKey(ticket.secret).public if ticket.secret else b""
    guest = Guest(ticket, between(), RIGHT)
    host = Host(kind, between(), verifier=RIGHT, key=public)
    assert attempt(guest, host) == b"please"
    assert guest.welcomed(host.welcome(b"come in").step.welcome) == b"come in"


@pytest.mark.parametrize("kind", list(Kind))
def test_another_channel_another_host_or_another_code_gives_no_key(kind: Kind) -> None:
    ticket = a_ticket(kind)
    public = SigningKey(ticket.secret).public if ticket.secret else b""
    elsewhere = [
        between(b"other"),
        replace(between(), host=DeviceKey(b"x" * 32)),
        replace(between(), guest=DeviceKey(b"y" * 32)),
    ]
    for other in elsewhere:
        with pytest.raises(InvitationFailed):
            attempt(Guest(ticket, between(), RIGHT), Host(kind, other, verifier=RIGHT, key=public))
    if kind is Kind.PASSCODE:
        with pytest.raises(InvitationFailed) as caught:
            attempt(Guest(ticket, between(), RIGHT), Host(kind, between(), verifier=WRONG))
        assert caught.value.reason == Reason.WRONG_PASSCODE
    if kind is Kind.OPEN:
        with pytest.raises(InvitationFailed):
            attempt(Guest(replace(ticket, secret=b"z" * 32), between()), Host(kind, between(), key=public))


def test_a_host_answers_no_request_before_the_guest_has_confirmed() -> None:
    guest, host = Guest(a_ticket(), between(), RIGHT), Host(Kind.PASSCODE, between(), verifier=RIGHT)
    share = host.share(guest.knock().step.knock)
    confirm, asked = guest.answer(share.step.share, b"please")
    with pytest.raises(InvitationFailed):
        host.requested(asked.step.request)
    with pytest.raises(InvitationFailed):
        host.confirm(pb.InvitationConfirm(confirm=b"guess"))
    host.confirm(confirm.step.confirm)
    assert host.requested(asked.step.request) == b"please"
    with pytest.raises(InvitationFailed):
        host.confirm(confirm.step.confirm)  # each gives a try back


def test_a_verifier_belongs_to_one_invitation_and_tells_nothing_by_itself() -> None:
    made = passcode_verifier(HERE, "123456")
    assert made == passcode_verifier(HERE, "123456")
    assert len({made, passcode_verifier(HERE, "123457"), passcode_verifier(b"x" * 16, "123456")}) == 3
    assert b"123456" not in made


# tries


def dialler(device: int = 1, address: str = "10.0.0.1:4711") -> Dialler:
    return Dialler.at(DeviceKey(bytes([device]) * 32), address)


def test_a_device_has_three_tries_an_address_six_and_all_together_thirty() -> None:
    taken: dict[str, int] = {}
    for device in range(60):
        who = dialler(device % 20, f"10.0.0.{device % 10}:1")
        while tries_left(taken, who):
            taken = with_tries(taken, who, 1)
    assert tries_left(taken) == 0
    assert tries_left(with_tries({}, dialler(), 1), dialler()) == TRIES_PER_DEVICE - 1 == 2
    one_address = with_tries(with_tries({}, dialler(1), 3), dialler(2), 2)
    assert tries_left(one_address, dialler(3)) == TRIES_PER_ADDRESS - 5 == 1
    assert tries_left(one_address, dialler(3, "10.0.0.2:1")) == 3
    assert tries_left(one_address) == TRIES_MAX - 5 == 25


@pytest.mark.parametrize("seed", range(3))
def test_of_ten_thousand_tries_by_anyone_thirty_are_taken(seed: int) -> None:
    chance, taken, answered = random.Random(seed), dict[str, int](), Counter[str]()
    for _ in range(10_000):
        who = dialler(chance.randrange(256), f"10.0.{chance.randrange(4)}.{chance.randrange(256)}:1")
        if tries_left(taken, who) > 0:
            taken = json.loads(json.dumps(with_tries(taken, who, 1)))  # as a restart reads it
            answered.update(list(who.limits()))
    assert answered.pop("total") == TRIES_MAX
    assert all(number <= (3 if name.startswith("device") else 6) for name, number in answered.items())


def test_a_try_that_was_given_back_leaves_no_trace() -> None:
    taken = with_tries({}, dialler(1), 1)
    assert with_tries(with_tries(taken, dialler(2), 1), dialler(2), -1) == taken
    assert with_tries({}, dialler(), -1) == {}


@pytest.mark.parametrize(
    ("address", "counted_as"),
    [
        ("127.0.0.1:4711", "127.0.0.1"),
        ("2001:db8::1:4711", "2001:db8::/64"),
        ("2001:db8:0:0:ffff::9:4711", "2001:db8::/64"),
        ("fe80::1%eth0:4711", "fe80::/64"),
        ("::ffff:10.1.2.3:4711", "10.1.2.3"),
        ("", ""),
    ],
)
def test_an_address_counts_without_its_port_and_an_ipv6_network_as_one(address: str, counted_as: str) -> None:
    assert dialler(1, address).address == counted_as


@given(share=st.binary(max_size=80))
def test_any_share_is_refused_or_leads_nowhere(share: bytes) -> None:
    host = Host(Kind.PASSCODE, between(), verifier=RIGHT)
    try:
        answer = host.share(pb.InvitationKnock(share=share))
    except InvitationFailed as failure:
        assert failure.reason in MESSAGES  # noqa: PT017  # most shares are no points at all, a few are
    else:
        assert answer.step.share.confirm
        with pytest.raises(InvitationFailed):
            host.confirm(pb.InvitationConfirm(confirm=answer.step.share.confirm))


# between peers


def wrong_for(invitation: Invitation) -> str:
    return "000000" if invitation.passcode != "000000" else "111111"


def test_three_wrong_tries_are_all_that_a_device_has_across_reconnects_and_restarts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with peers(tmp_path, "ann", "eve", "bob") as (ann, eve, bob):
        invitation = ann.create_party("Trip").invite()
        wrong, where, number = wrong_for(invitation), address(ann), invitation.id
        for left in ("2 tries left", "1 try left"):
            with pytest.raises(Refused, match=left) as counted:
                eve.join(invitation.ticket, wrong)
            assert counted.value.unchanged == "", "a try was counted"
        ann.close()
        with echostore.open(tmp_path / "ann") as again:
            again.listen(where)
            with pytest.raises(Refused, match="0 tries left"):
                eve.join(invitation.ticket, wrong)
            for code in (wrong, invitation.passcode):
                with pytest.raises(Refused, match="too many wrong passcodes from this device"):
                    eve.join(invitation.ticket, code)
            state = again.network.inviting.issued(number)
            assert (state.ended, state.tries_left) == ("", TRIES_MAX - 3)
            assert sum("passcode is wrong" in event for event in state.events) == len(state.events) == 3
            told = [each.__dict__ for each in caplog.records if each.getMessage() == "invitation refused somebody"]
            assert [each["why"].startswith("the passcode is wrong") for each in told] == [True] * 3 + [False] * 2
            assert {each["invitation"] for each in told} == {number}
            trip = again.party("@Trip")
            converged(trip, bob.join(invitation.ticket, invitation.passcode))  # the true guest, from the same address
            assert {member.name for member in trip.members.all()} == {"ann", "bob"}


class Guesser:
    """Somebody who has the ticket and guesses, with as many devices and addresses as it likes. Hangs up after each answer,
    or `confirms` falsely and waits for the refusal."""

    def __init__(self, ticket: str, *, confirms: bool = False) -> None:
        self.ticket, self.confirms = read_ticket(ticket), confirms
        self.answered: list[tuple[str, str]] = []
        """Of each guess that the host answered: from which device and address."""
        self.refused: Counter[int] = Counter()

    def guess(self, device: SigningKey, source: str) -> None:
        asyncio.run(self._guess(device, source))

    async def _guess(self, device: SigningKey, source: str) -> None:
        ticket = self.ticket
        streams = await asyncio.open_connection(*parse_address(ticket.addresses[0]), local_addr=(source, 0))
        channel = SecureChannel(device, initiator=True, expected=ticket.host)
        connection = (await mesh_connection._shake(*streams, channel, PATIENCE_S)).connection
        between_us = Between(ticket.invitation, DeviceKey(device.public), ticket.host, connection.handshake_hash)
        connection.send(Guest(ticket, between_us, WRONG).knock())
        step: str | None = None
        async with asyncio.timeout(PATIENCE_S):
            while step is None:
                data = await streams[0].read(1 << 16)
                assert data, "the host hung up"
                for told in channel.receive(data):
                    frame = decode_mesh_frame(told)
                    if isinstance(frame, InvitationFrame):
                        step = frame.step.WhichOneof("step")
                        if step == "share":
                            self.answered.append((device.public.hex(), source))
                            if self.confirms:
                                false = pb.MeshInvitation(confirm=pb.InvitationConfirm(confirm=bytes(32)))
                                connection.send(InvitationFrame(ticket.invitation, false))
                                step = None
                        else:
                            self.refused[frame.step.refusal.reason] += 1
        streams[1].transport.abort()


def test_guesses_are_bounded_by_device_by_address_and_in_total_over_reconnects_and_restarts(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        invitation = ann.create_party("Trip").invite()
        where, number, eve = address(ann), invitation.id, Guesser(invitation.ticket)
        one_device = SigningKey.generate()
        for place in (2, 3, 2, 3, 2, 3):
            eve.guess(one_device, f"127.0.0.{place}")
        assert len(eve.answered) == TRIES_PER_DEVICE
        for _ in range(10):
            eve.guess(SigningKey.generate(), "127.0.0.4")
        assert len(eve.answered) == TRIES_PER_DEVICE + TRIES_PER_ADDRESS
        assert set(eve.refused) == {Reason.TOO_MANY_TRIES}
        ann.close()
        with echostore.open(tmp_path / "ann") as again:
            again.listen(where)
            for place in (2, 4, 5, 6, 7, 8, 9, 10, 11):
                for _ in range(8):
                    eve.guess(SigningKey.generate(), f"127.0.0.{place}")
            assert len(eve.answered) == TRIES_MAX
            assert max(Counter(device for device, _ in eve.answered).values()) <= TRIES_PER_DEVICE
            assert max(Counter(source for _, source in eve.answered).values()) <= TRIES_PER_ADDRESS
            assert set(eve.refused) == {Reason.TOO_MANY_TRIES, Reason.NO_TRIES_LEFT}
            assert again.network.inviting.issued(number).ended == "no tries left"
        with echostore.open(tmp_path / "ann") as again:
            again.listen(where)
            eve.guess(SigningKey.generate(), "127.0.0.20")
            assert len(eve.answered) == TRIES_MAX
            with pytest.raises(Refused, match="has ended: too many wrong passcodes"):
                bob.join(invitation.ticket, invitation.passcode)


def test_a_false_confirmation_gives_no_try_back(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):
        invitation = ann.create_party("Trip").invite()
        eve, device = Guesser(invitation.ticket, confirms=True), SigningKey.generate()
        for _ in range(TRIES_PER_DEVICE + 2):
            eve.guess(device, "127.0.0.2")
        assert len(eve.answered) == TRIES_PER_DEVICE
        assert eve.refused == {Reason.WRONG_PASSCODE: TRIES_PER_DEVICE, Reason.TOO_MANY_TRIES: 2}
        assert invitation.state.tries_left == TRIES_MAX - TRIES_PER_DEVICE


def test_a_try_counts_before_the_host_says_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest who hangs up after the host's answer has learnt whether its guess was right: that was a try."""
    with peers(tmp_path, "ann") as (ann,):
        invitation = ann.create_party("Trip").invite()
        kept_at_answer: list[int] = []
        answer = Host.share

        def share(host: Host, knock: pb.InvitationKnock) -> object:
            with sqlite3.connect(f"file:{ann.home.meta}?mode=ro", uri=True) as other:  # what a crash would leave
                (row,) = other.execute("SELECT value FROM settings WHERE name = 'invitations'").fetchone()
            kept_at_answer.append(json.loads(row)[invitation.id]["tries"].get("total", 0))
            return answer(host, knock)

        monkeypatch.setattr(Host, "share", share)
        eve = Guesser(invitation.ticket)
        for place in (2, 3, 4):
            eve.guess(SigningKey.generate(), f"127.0.0.{place}")
        assert kept_at_answer == [1, 2, 3]
        assert invitation.state.tries_left == TRIES_MAX - 3


def test_who_knows_the_passcode_uses_up_no_try(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        invitation = ann.create_party("Trip").invite(uses=2)
        for guest in (bob, cat):
            guest.join(invitation.ticket, invitation.passcode)
        assert invitation.state.tries == {}


@pytest.mark.parametrize("kind", [Kind.KEY, Kind.OPEN])
def test_an_invitation_without_a_passcode_is_ended_by_no_number_of_knocks(tmp_path: Path, kind: Kind) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        invitation = trip.invite(key=bob.identity) if kind is Kind.KEY else trip.invite(open=True)
        eve = Guesser(invitation.ticket)
        for place in range(2 * TRIES_PER_ADDRESS):
            eve.guess(SigningKey.generate(), f"127.0.0.{2 + place % 2}")
        assert (invitation.state.ended, invitation.state.tries) == ("", {})
        converged(trip, bob.join(invitation.ticket))


# passcodes on disk


def on_disk(peer_folder: Path) -> bytes:
    """All that meta.db and its log hold, free pages too."""
    return b"".join(file.read_bytes() for file in sorted(peer_folder.glob("meta.db*")))


def verifier_of(folder: Path, number: str) -> str:
    with sqlite3.connect(folder / "meta.db") as meta:
        (row,) = meta.execute("SELECT value FROM settings WHERE name = 'invitations'").fetchone()
    return str(json.loads(row)[number]["verifier"])


def test_a_passcode_is_never_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inviting, "_new_passcode", lambda: "the-secret-passcode")
    with peers(tmp_path, "ann") as (ann,):
        for made in (ann.create_party("Trip").invite(), ann.invite_device()):
            assert made.passcode == "the-secret-passcode"
            assert "secret-passcode" not in repr(ann.network.inviting.issued(made.id))
        assert len(bytes.fromhex(verifier_of(tmp_path / "ann", made.id))) == VERIFIER_BYTES
        assert b"secret-passcode" not in on_disk(tmp_path / "ann")
    assert b"secret-passcode" not in on_disk(tmp_path / "ann")


@pytest.mark.parametrize("how", ["used", "cancelled", "no tries left", "expired", "expired while closed"])
def test_what_an_ended_invitation_held_is_wiped_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        invitation = trip.invite()
        verifier = verifier_of(tmp_path / "ann", invitation.id)
        assert verifier.encode() in on_disk(tmp_path / "ann")
        if how == "used":
            converged(trip, bob.join(invitation.ticket, invitation.passcode))
        elif how == "cancelled":
            invitation.cancel()
        elif how == "no tries left":
            monkeypatch.setattr(mesh_invitation, "TRIES_MAX", 1)
            with pytest.raises(Refused):
                bob.join(invitation.ticket, wrong_for(invitation))
        elif how == "expired":
            monkeypatch.setattr(ann, "now_ms", lambda: invitation.state.expires_ms + 1)
            with pytest.raises(Refused, match="expired"):
                bob.join(invitation.ticket, invitation.passcode)
        else:
            ann.close()
            later = read_ticket(invitation.ticket).expires_ms + 1
            echostore.open(tmp_path / "ann", now_ms=lambda: later).close()
        found = on_disk(tmp_path / "ann")
        assert verifier.encode() not in found
        assert invitation.ticket.encode() not in found


def test_passcodes_that_an_earlier_version_kept_are_wiped_at_open_and_open_invitations_go_on(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        kept = [trip.invite(), trip.invite()]
        kept[1].cancel()
        where, key = address(ann), trip.key
        tickets = {each.id: each.ticket for each in kept}
        ann.close()
        with sqlite3.connect(tmp_path / "ann" / "meta.db") as meta:
            meta.execute("PRAGMA secure_delete = OFF")
            (row,) = meta.execute("SELECT value FROM settings WHERE name = 'invitations'").fetchone()
            rows = json.loads(row)
            for number, each in rows.items():
                del each["verifier"], each["tries"]
                each |= {"passcode": "passcode-of-old", "tries_left": 2, "ticket": tickets[number]}
            for _ in range(3):  # as it was written again and again, and the old rows left where they were
                for text in (json.dumps(rows | {"filler": {"x": "passcode-of-old" * 1000}}), json.dumps(rows)):
                    meta.execute("UPDATE settings SET value = ? WHERE name = 'invitations'", (text.encode(),))
                    meta.commit()
        meta.close()
        assert b"passcode-of-old" in on_disk(tmp_path / "ann")
        with echostore.open(tmp_path / "ann", read_only=True) as looking:
            assert [each.ended for each in inviting.kept_invitations(looking.meta)] == ["", "cancelled"]
        with echostore.open(tmp_path / "ann") as again:
            assert b"passcode-of-old" not in on_disk(tmp_path / "ann")
            again.listen(where)
            issued = again.network.inviting.issued(kept[0].id)
            assert (issued.tries_left, issued.ended) == (TRIES_MAX - 1, "")
            converged(again.party(key), bob.join(kept[0].ticket, "passcode-of-old"))
        assert b"passcode-of-old" not in on_disk(tmp_path / "ann")


def test_the_list_of_invitations_shows_no_passcode(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):
        ann.create_party("Trip").invite()
    cli = Cli(tmp_path / "ann", tmp_path / "state")
    (row,) = cli("party", "invitations", "--json").ok().json()["invitations"]
    assert "passcode" not in row
    assert "verifier" not in row
    assert (row["state"], row["tries_left"]) == ("open", TRIES_MAX)


def test_a_used_cancelled_or_expired_invitation_says_so_on_both_sides(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        trip = ann.create_party("Trip")
        invitation = trip.invite()
        converged(trip, bob.join(invitation.ticket, invitation.passcode))
        assert invitation.wait(timeout=5).events == ("admitted bob", "used")
        with pytest.raises(Refused, match="has been used"):
            cat.join(invitation.ticket, invitation.passcode)
        cancelled = trip.invite()
        cancelled.cancel()
        with pytest.raises(Refused, match="cancelled"):
            cat.join(cancelled.ticket, cancelled.passcode)
        assert any("cancelled" in event for event in cancelled.state.events)
        brief = trip.invite(expires_s=0.2)
        time.sleep(0.3)
        with pytest.raises(Refused, match="expired"):
            cat.join(brief.ticket, brief.passcode)
        lying = replace(read_ticket(brief.ticket), expires_ms=2**50)  # the guest's own word does not count
        with pytest.raises(Refused, match="expired"):
            cat.join(lying.text(), brief.passcode)
        assert {member.name for member in trip.members.all()} == {"ann", "bob"}


def test_an_invitation_for_a_key_lets_that_key_in_and_no_other(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "eve") as (ann, bob, eve):
        trip = ann.create_party("Trip")
        invitation = trip.invite("reader", key=bob.identity)
        assert invitation.passcode is None
        with pytest.raises(Refused, match="for someone else"):
            eve.join(invitation.ticket)
        theirs = bob.join(invitation.ticket)
        converged(trip, theirs)
        assert {member.name: member.role.label for member in trip.members.all()} == {"ann": "owner", "bob": "reader"}


def test_an_open_invitation_is_honoured_by_any_admin_until_it_is_used_up(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat", "dan") as (ann, bob, cat, dan):
        trip = ann.create_party("Trip")
        first = trip.invite("admin")
        bobs = bob.join(first.ticket, first.passcode)
        converged(trip, bobs)
        invitation = trip.invite(uses=1, open=True)
        until(lambda: bobs.runtime.processor.membership.machine.invitations)  # no part of the state that converges
        ann_away = replace(read_ticket(invitation.ticket), addresses=(address(bob),)).text()
        cats = cat.join(ann_away)
        converged(trip, bobs, cats)
        with pytest.raises(Refused, match=r"used|cancelled"):
            dan.join(ann_away)
        until(lambda: trip.runtime.processor.membership.machine.invitations[0].cancelled)


def test_only_who_may_admit_may_invite_and_only_where_it_listens(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        invitation = trip.invite("editor")
        theirs = bob.join(invitation.ticket, invitation.passcode)
        converged(trip, theirs)
        with pytest.raises(Refused, match="editor"):
            theirs.invite()
        for wrong in (
            {"role": "king"},
            {"uses": 0},
            {"expires_s": 0},
            {"key": b"short"},
            {"key": bytes(32), "open": True},
        ):
            with pytest.raises(UsageError):
                trip.invite(**wrong)  # type: ignore[arg-type]
    with echostore.open(tmp_path / "deaf") as deaf, pytest.raises(Refused, match="listens nowhere"):
        deaf.create_party("Trip").invite()


def test_a_guest_hears_why_it_could_not_join(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        invitation = trip.invite()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            nobody = replace(read_ticket(invitation.ticket), addresses=(f"127.0.0.1:{free.getsockname()[1]}",))
        with pytest.raises(Unreachable, match="can't be reached"):
            bob.join(nobody.text(), invitation.passcode)
        with pytest.raises(UsageError, match="passcode"):
            bob.join(invitation.ticket)
        with pytest.raises(Refused, match="already"):
            ann.join(invitation.ticket, invitation.passcode)
        unknown = replace(read_ticket(invitation.ticket), invitation=b"0" * 16)
        with pytest.raises(Refused, match="does not know"):
            bob.join(unknown.text(), "123456")
        assert bob.parties() == []


class Relay:
    """Someone between two peers who talks to each as if it were the other, and hands on what it decrypts."""

    def __init__(self, eve: Peer, towards: Peer) -> None:
        self.handed_on = 0
        node = eve.network.node
        node.on_link.append(self._linked)
        self._links: list = []
        eve.network.connect(address(towards), device=towards.device, keep=False)

    def _linked(self, link) -> None:
        self._links.append(link)
        link.receive = lambda frame, me=link: self._hand_on(me, frame)

    def _hand_on(self, came_from, frame) -> None:
        for link in self._links:
            if link is not came_from:
                self.handed_on += 1
                link.connection.send(frame)


def test_someone_in_the_middle_who_hands_everything_on_admits_nobody(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "eve") as (ann, bob, eve):
        trip = ann.create_party("Trip")
        invitation = trip.invite()
        relay = Relay(eve, ann)
        bent = replace(read_ticket(invitation.ticket), addresses=(address(eve),), host=DeviceKey(eve.device))
        with pytest.raises(EchoError):
            bob.join(bent.text(), invitation.passcode)
        assert relay.handed_on >= 2, "it did reach the host"
        assert [member.name for member in trip.members.all()] == ["ann"]
        assert invitation.state.tries_left == TRIES_MAX - 1
        straight = replace(read_ticket(invitation.ticket), addresses=(address(eve),))
        with pytest.raises(Unreachable, match="wrong-device"):
            bob.join(straight.text(), invitation.passcode)


def test_two_guests_at_once_share_one_use(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat") as (ann, bob, cat):
        trip = ann.create_party("Trip")
        invitation = trip.invite()
        outcomes: list[object] = []

        def enter(guest: Peer) -> None:
            try:
                outcomes.append(guest.join(invitation.ticket, invitation.passcode))
            except Refused as refused:
                outcomes.append(refused)

        guests = [threading.Thread(target=enter, args=(guest,)) for guest in (bob, cat)]
        for guest in guests:
            guest.start()
        for guest in guests:
            guest.join()
        assert sum(isinstance(outcome, Refused) for outcome in outcomes) == 1
        assert len(trip.members.all()) == 2


def test_a_link_that_ends_before_the_host_answers_is_made_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        invitation = party.invite("editor")
        reached: list[Link] = []
        reach = bob.network.inviting._reach

        async def ending(ticket: Ticket) -> Link:
            link = await reach(ticket)
            reached.append(link)
            if len(reached) == 1:
                asyncio.get_running_loop().call_soon(link.connection.end, mesh_connection.Ended("closed"))
            return link

        monkeypatch.setattr(bob.network.inviting, "_reach", ending)
        joined = bob.join(invitation.ticket, invitation.passcode)
        assert joined.create(type="task").party.key == party.key
        assert len(reached) == 2


def test_a_guest_may_write_as_soon_as_join_returns(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cat", "dan") as (ann, *guests):
        trip = ann.create_party("Trip")
        for number in range(50):
            trip.create(type="task", title=f"task {number}")
        for guest in guests:
            invitation = trip.invite("editor")
            theirs = guest.join(invitation.ticket, invitation.passcode)
            theirs.create(type="note", title=guest.name)
            assert theirs.status.writable
            converged(trip, theirs)
        assert {note["title"] for note in trip.query(type="note").all()} == {"bob", "cat", "dan"}
        assert trip.rejected() == []


def test_a_reader_may_read_as_soon_as_join_returns_and_is_not_called_a_writer(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        trip.title = "Road trip"
        invitation = trip.invite("reader")
        theirs = bob.join(invitation.ticket, invitation.passcode)
        assert theirs.system_item is not None
        assert theirs.status.standing == "reader"
        assert not theirs.status.writable
        with pytest.raises(Refused, match="role of editor"):
            theirs.create(type="note")
        trip.members.change_role(bob.identity, "editor")
        until(lambda: theirs.status.writable)
        theirs.create(type="note")


def host_goes_away_after_the_welcome(host: Peer, guest: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    enter = guest.enter

    def left_alone(welcome: Welcome) -> Party:
        host.close()
        return enter(welcome)

    monkeypatch.setattr(guest, "enter", left_alone)


def test_a_guest_whose_host_went_away_is_told_so_and_is_in_the_party_when_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        where = address(ann)
        trip = ann.create_party("Trip")
        invitation = trip.invite("editor")
        host_goes_away_after_the_welcome(ann, bob, monkeypatch)
        with pytest.raises(Unreachable, match="no member of the party is connected") as failure:
            bob.join(invitation.ticket, invitation.passcode, timeout=0.1)
        assert "Nothing was changed" not in str(failure.value)
        theirs = bob.party(trip.key)
        assert (theirs.status.writable, theirs.admitted) == (False, False)
        with pytest.raises(Refused):
            theirs.create(type="note")
        with echostore.open(tmp_path / "ann") as again:
            again.listen(where)
            theirs.wait_admitted(60)
            theirs.create(type="note")
            converged(again.party(trip.key), theirs)


def test_without_waiting_a_join_returns_before_the_admission_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        trip = ann.create_party("Trip")
        invitation = trip.invite("editor")
        host_goes_away_after_the_welcome(ann, bob, monkeypatch)
        assert not bob.join(invitation.ticket, invitation.passcode, wait=False).status.writable
        with pytest.raises(UsageError):
            bob.join(invitation.ticket, invitation.passcode, wait="no")  # type: ignore[arg-type]


def test_the_command_says_that_the_host_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(tmp_path, "ann") as (ann,):
        trip = ann.create_party("Trip")
        invitation = trip.invite("editor")
        monkeypatch.setattr(ann.network, "shared_parties", lambda: ())  # it admits the guest, and is gone for it then
        bob = Cli(tmp_path / "bob", tmp_path / "state")
        joined = bob("party", "join", invitation.ticket, "--passcode", str(invitation.passcode), "--timeout", "1s")
        assert joined.status == 5
        assert "no member of the party is connected any more: the host went away" in joined.err
        assert "This peer is a member" in joined.err
        assert "Nothing was changed" not in joined.err
