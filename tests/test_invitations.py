"""Invitations: tickets, passcodes, tries, and nobody in the middle."""

import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echostore
from cli_process import Cli
from echostore.kernel.errors import EchoError, Refused, Unreachable, UsageError
from echostore.kernel.ids import DeviceKey, PartyKey
from echostore.mesh.invitation import Between, Guest, Host, InvitationFailed, Reason
from echostore.mesh.ticket import Kind, Purpose, Ticket, read_ticket
from echostore.peer.identity import Welcome
from echostore.peer.inviting import MESSAGES
from echostore.peer.network import parse_address
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.wire.generated import mesh_pb2 as pb
from echostore.wire.signing import SigningKey
from network_peers import address, converged, peers, until

HERE = bytes(16)


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
    guest = Guest(ticket, between(), "123456")
    host = Host(kind, between(), passcode="123456", key=public)
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
            attempt(Guest(ticket, between(), "123456"), Host(kind, other, passcode="123456", key=public))
    if kind is Kind.PASSCODE:
        with pytest.raises(InvitationFailed) as caught:
            attempt(Guest(ticket, between(), "123456"), Host(kind, between(), passcode="654321"))
        assert caught.value.reason == Reason.WRONG_PASSCODE
    if kind is Kind.OPEN:
        with pytest.raises(InvitationFailed):
            attempt(Guest(replace(ticket, secret=b"z" * 32), between()), Host(kind, between(), key=public))


def test_a_host_answers_no_request_before_the_guest_has_confirmed() -> None:
    guest, host = Guest(a_ticket(), between(), "123456"), Host(Kind.PASSCODE, between(), passcode="123456")
    share = host.share(guest.knock().step.knock)
    confirm, asked = guest.answer(share.step.share, b"please")
    with pytest.raises(InvitationFailed):
        host.requested(asked.step.request)
    with pytest.raises(InvitationFailed):
        host.confirm(pb.InvitationConfirm(confirm=b"guess"))
    host.confirm(confirm.step.confirm)
    assert host.requested(asked.step.request) == b"please"


@given(share=st.binary(max_size=80))
def test_any_share_is_refused_or_leads_nowhere(share: bytes) -> None:
    host = Host(Kind.PASSCODE, between(), passcode="123456")
    try:
        answer = host.share(pb.InvitationKnock(share=share))
    except InvitationFailed as failure:
        assert failure.reason in MESSAGES  # noqa: PT017  # most shares are no points at all, a few are
    else:
        assert answer.step.share.confirm
        with pytest.raises(InvitationFailed):
            host.confirm(pb.InvitationConfirm(confirm=answer.step.share.confirm))


# between peers


def test_three_wrong_tries_end_an_invitation_across_reconnects_and_restarts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with peers(tmp_path, "ann", "eve") as (ann, eve):
        invitation = ann.create_party("Trip").invite()
        wrong = "000000" if invitation.passcode != "000000" else "111111"
        with pytest.raises(Refused, match="2 tries left") as counted:
            eve.join(invitation.ticket, wrong)
        assert counted.value.unchanged == "", "a try was counted"
        with (
            echostore.open(tmp_path / "mallory", name="mallory") as mallory,
            pytest.raises(Refused, match="1 try left"),
        ):
            mallory.join(invitation.ticket, wrong)
        where, number = address(ann), invitation.id
        ann.close()
        with echostore.open(tmp_path / "ann") as again:
            again.listen(where)
            with pytest.raises(Refused, match="0 tries left"):
                eve.join(invitation.ticket, wrong)
            for code in (wrong, invitation.passcode):
                with pytest.raises(Refused, match="too many wrong passcodes"):
                    eve.join(invitation.ticket, code)
            state = again.network.inviting.issued(number)
            assert state.ended == "no tries left"
            assert sum("passcode is wrong" in event for event in state.events) == 3
            told = [each.__dict__ for each in caplog.records if each.getMessage() == "invitation refused somebody"]
            assert [each["why"].startswith("the passcode is wrong") for each in told] == [True] * 3 + [False] * 2
            assert {each["invitation"] for each in told} == {number}
            assert len(again.party("@Trip").members.all()) == 1


def test_a_try_counts_before_the_host_says_a_word(tmp_path: Path) -> None:
    """A guest who hangs up after the host's answer has learnt whether its guess was right: that was a try."""
    with peers(tmp_path, "ann", "eve") as (ann, eve):
        invitation = ann.create_party("Trip").invite()
        ticket = read_ticket(invitation.ticket)
        for left in (2, 1, 0):
            host, port = parse_address(ticket.addresses[0])
            link = eve.network.call(eve.network.node.dial(host, port, expected=ticket.host))
            between_us = Between(ticket.invitation, DeviceKey(eve.device), link.device, link.connection.handshake_hash)
            knock = Guest(ticket, between_us, "999999").knock()
            eve.network.soon(lambda link=link, knock=knock: link.connection.send(knock))
            until(lambda left=left: invitation.state.tries_left == left)
            eve.network.disconnect(ticket.addresses[0])
            until(lambda: not eve.network.connections())
        with pytest.raises(Refused, match="too many wrong passcodes"):
            eve.join(invitation.ticket, invitation.passcode)


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
        converged(trip, bobs)
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
        assert invitation.state.tries_left == 2
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
