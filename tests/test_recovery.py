"""The recovery phrase: an identity comes back on an empty machine, and nobody else gets anything by it."""

import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echostore
from echostore.kernel.errors import NotFound, Refused, Unreachable, UsageError
from echostore.peer.recovery import WORDS, key_of, phrase_of
from echostore.wire.mesh import Introduction, Parties, introduction_bytes
from echostore.wire.signing import SigningKey
from network_peers import address, converged, invited, peers, until
from test_own_devices import ended, joined, writes

KNOWN = (
    "abandon amount liar amount expire adjust cage candy arch gather drum bullet "
    "absurd math era live bid rhythm alien crouch range attend journey unaware"
)
"""The words of the key 00 01 02 ... 1f."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


# the words


def test_the_words_of_a_known_key() -> None:
    key = SigningKey(bytes(range(32)))
    assert phrase_of(key) == KNOWN
    assert key_of(KNOWN).seed == key.seed


@settings(max_examples=40)
@given(seed=st.binary(min_size=32, max_size=32))
def test_any_key_has_words_that_lead_back_to_it(seed: bytes) -> None:
    phrase = phrase_of(SigningKey(seed))
    assert len(phrase.split()) == WORDS
    assert key_of("\n " + phrase.upper().replace(" ", " \t")).seed == seed
    assert key_of(" ".join(word[:4] for word in phrase.split())).seed == seed, "four letters tell a word"


@pytest.mark.parametrize(
    ("phrase", "what"),
    [
        ("", "24 words, this has 0"),
        (" ".join(KNOWN.split()[:12]), "24 words, this has 12"),
        (KNOWN.replace("liar", "lier"), "number 3"),
        (KNOWN.replace("liar", "lier").replace("journey", "qqqq"), "number 3, 23"),
        (KNOWN.replace("liar", "lion"), "checksum"),
        (KNOWN.replace("liar amount", "amount liar"), "checksum"),
    ],
)
def test_a_wrong_phrase_is_told_without_repeating_it(phrase: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        key_of(phrase)
    assert not [word for word in phrase.split() if word in str(caught.value).split()]


@given(words=st.lists(st.sampled_from(KNOWN.split()), min_size=WORDS, max_size=WORDS))
def test_any_words_are_a_key_or_a_usage_error(words: list[str]) -> None:
    phrase = " ".join(words)
    try:
        key = key_of(phrase)
    except UsageError:
        return
    assert phrase_of(key) == phrase


# coming back


def test_an_identity_comes_back_from_any_member_and_writes_again(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "fresh") as (ann, bob, fresh):
        trip, garden = ann.create_party("Trip"), ann.create_party("Garden")
        trip.create(type="task", title="Tickets")
        bobs = [invited(ann, party, bob, role="reader") for party in (trip, garden)]
        phrase, identity = ann.recovery_phrase(), ann.identity
        ann.close()  # the machine is gone, and nobody but a reader is left
        entered = fresh.recover(phrase, address(bob))
        assert fresh.identity == identity
        assert {party.title for party in bobs} == {known.title for known in fresh.parties()}
        assert (fresh.name, fresh.myself.device_name) == ("ann", "fresh")
        theirs = {party.key: party for party in entered}
        until(lambda: all(writes(party) for party in entered))
        theirs[trip.key].create(type="task", title="Maps")
        for party in bobs:
            converged(party, theirs[party.key])
        assert {task["title"] for task in bobs[0].query(type="task").all()} == {"Tickets", "Maps"}
        assert bobs[0].members.rejected() == []
        why = bobs[0].members.why(fresh.device)
        assert (why[0].act, why[0].reason) == ("DeviceAdmit", None)
        theirs[trip.key].members.change_role(bob.identity, "editor")  # still the owner
        until(lambda: "editor" in {member.role.label for member in bobs[0].members.all()})


def test_a_recovered_device_can_shut_out_the_lost_one(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "fresh") as (ann, bob, fresh):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob)
        phrase, lost = ann.recovery_phrase(), ann.device
        ann.close()
        (party,) = fresh.recover(phrase, address(bob))
        until(lambda: writes(party))
        assert fresh.revoke_device(lost) == [party]
        until(lambda: [each.revoked for m in bobs.members.all() for each in m.devices if each.device == lost] == [True])
        with pytest.raises(NotFound):
            fresh.revoke_device(lost)
        with pytest.raises(Refused, match="own device"):
            fresh.revoke_device(fresh.device)


def test_a_ticket_of_any_member_leads_to_it_too(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "fresh") as (ann, bob, fresh):
        invited(ann, ann.create_party("Trip"), bob)
        phrase = ann.recovery_phrase()
        ann.close()
        ticket = bob.create_party("Bob's own").invite().ticket
        (party,) = fresh.recover(phrase, ticket)
        until(lambda: writes(party))
        assert [known.title for known in fresh.parties()] == ["Trip"], "and nothing of the party of the ticket"


def test_another_device_of_the_identity_is_a_member_like_any_other(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone", "fresh") as (ann, phone, fresh):
        trip = ann.create_party("Trip")
        joined(ann, phone)
        phrase = ann.recovery_phrase()
        with pytest.raises(Refused, match="not on this device"):
            phone.recovery_phrase()
        ann.close()
        (party,) = fresh.recover(phrase, address(phone))
        until(lambda: writes(party))
        converged(phone.party(trip.key), party)
        assert len(party.members.all()[0].devices) == 3
        fresh.create_party("Later")
        until(lambda: "Later" in {known.title for known in phone.parties()})


def test_the_parties_may_come_later_and_from_elsewhere(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "fresh") as (ann, bob, fresh):
        invited(ann, ann.create_party("Trip"), bob)
        phrase, identity, where = ann.recovery_phrase(), ann.identity, address(ann)
        ann.close()
        with pytest.raises(Unreachable, match="can't be reached") as caught:
            fresh.recover(phrase, where)
        assert "has the identity back" in caught.value.unchanged
        assert fresh.identity == identity
        assert fresh.recover(phrase) == []
        (party,) = fresh.recover(phrase, where, address(bob))
        until(lambda: writes(party))
        assert fresh.recover(phrase, address(bob)) == [], "nothing is missing any more"
        assert fresh.recovery_phrase() == phrase


def test_a_home_in_use_and_a_wrong_phrase_change_nothing(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "fresh") as (ann, bob, fresh):
        invited(ann, ann.create_party("Trip"), bob)
        phrase, before = ann.recovery_phrase(), bob.identity
        with pytest.raises(Refused, match="identity of its own"):
            bob.recover(phrase, address(ann))
        with pytest.raises(UsageError, match="checksum"):
            bob.recover(KNOWN.replace("liar", "lion"), address(ann))
        with pytest.raises(UsageError, match="not an address"):
            fresh.recover(phrase, "nowhere")
        assert bob.identity == before
        with pytest.raises(Refused, match="nobody who answered"):
            fresh.recover(phrase_of(SigningKey.generate()), address(ann))
        assert fresh.parties() == []
        (party,) = fresh.recover(phrase, address(ann))  # an identity that is in no party may still be exchanged
        until(lambda: writes(party))
        assert party.title == "Trip"


def test_a_removed_identity_gets_nothing_back(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "fresh") as (ann, bob, fresh):
        trip = ann.create_party("Trip")
        bobs = invited(ann, trip, bob)
        phrase = bob.recovery_phrase()
        trip.members.remove(bob.identity)
        bobs.flush()
        bob.close()
        with pytest.raises(Refused, match="nobody who answered"):
            fresh.recover(phrase, address(ann))
        assert fresh.device not in ann.network.node.links


def test_a_proof_of_another_connection_is_worth_nothing(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "eve") as (ann, bob, eve):
        invited(ann, ann.create_party("Trip"), bob)
        key = key_of(ann.recovery_phrase())
        chain = tuple(each.SerializeToString() for each in eve.myself.chain())
        eve.connect(address(bob), device=bob.device)
        old = key.sign(introduction_bytes(b"another handshake", ann.myself.identity, eve.myself.device))
        # The chain is eve's own, the proof ann's: neither goes with the other.
        assert "chain" in ended(eve, Introduction(ann.myself.identity, chain, old))
        eve.network.disconnect(address(bob))
        until(lambda: not eve.network.connections())
        eve.myself.become(ann.myself.identity, key=key)  # as a thief of the key could, on an earlier day
        eve.connect(address(bob), device=bob.device)
        chain = tuple(each.SerializeToString() for each in eve.myself.chain())
        assert "signed" in ended(eve, Introduction(ann.myself.identity, chain, old))


def test_a_chain_without_a_fresh_signature_shows_no_party(tmp_path: Path) -> None:
    """A device that was revoked elsewhere still has its chain; it does not have the key."""
    with peers(tmp_path, "ann", "bob", "old") as (ann, bob, old):
        joined(ann, old)
        trip = ann.create_party("Trip")
        until(lambda: old.parties())
        bobs = invited(ann, trip, bob)
        ann.revoke_device(old.device)
        later = ann.create_party("Later")
        laters = invited(ann, later, bob)
        converged(trip, bobs)
        old.connect(address(bob))
        link = old.network.node.links[bob.device]
        assert old.network.call(old.network.own_devices.ask(link, prove=False)) == Parties(())
        with pytest.raises(Refused, match="not on this device"):
            old.network.call(old.network.own_devices.ask(link, prove=True))
        assert "Later" not in {known.title for known in old.parties()}
        assert {each.device for m in laters.members.all() for each in m.devices} == {ann.device, bob.device}


# secrets


def test_the_phrase_is_neither_on_disk_nor_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with peers(tmp_path, "ann", "bob", "fresh") as (ann, bob, fresh):
        invited(ann, ann.create_party("Trip"), bob)
        phrase = ann.recovery_phrase()
        fresh.recover(phrase, address(bob))
        with pytest.raises(UsageError):
            fresh.recover(phrase + " word", address(bob))
    words = phrase.split()
    pieces = [" ".join(words[at : at + 2]).encode() for at in range(WORDS - 1)]
    for file in (each for each in tmp_path.rglob("*") if each.is_file()):
        content = file.read_bytes()
        assert not [piece for piece in pieces if piece in content], file
    assert not [piece for piece in pieces if piece.decode() in caplog.text]


def test_a_device_without_the_identity_key_goes_on_as_before(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "phone", "fresh") as (ann, phone, fresh):
        trip = ann.create_party("Trip")
        phrase, seed = ann.recovery_phrase(), ann.myself.identity_key.seed
        ann.forget_identity_key()
        assert seed not in (tmp_path / "ann" / "keys").read_bytes()
        for again in (ann.recovery_phrase, ann.forget_identity_key):
            with pytest.raises(Refused, match="not on this device"):
                again()
        where = address(ann)
        ann.close()
        with echostore.open(tmp_path / "ann") as later:
            later.listen(where)
            mine = later.party(trip.key)
            mine.create(type="task", title="Tickets")
            later.create_party("Garden")
            entered = joined(later, phone)
            assert {party.title for party in entered} >= {"Garden"}
            notes = later.create_party("Notes", local=True)
            with pytest.raises(Refused, match="not on this device"):
                notes.members.adopt()
            fresh.recover(phrase, where)
            until(lambda: len(fresh.parties()) == 2)


def test_a_sealed_key_file_stays_sealed_when_the_identity_changes(tmp_path: Path) -> None:
    with peers(tmp_path, "ann") as (ann,):
        ann.create_party("Trip")
        phrase = ann.recovery_phrase()
        with echostore.open(tmp_path / "fresh", passphrase="open sesame") as fresh:
            fresh.recover(phrase, address(ann))
            assert fresh.keys.protected
            identity, seed = fresh.identity, fresh.myself.identity_key.seed
        assert seed not in (tmp_path / "fresh" / "keys").read_bytes()
        with echostore.open(tmp_path / "fresh", passphrase="open sesame") as again:
            assert again.identity == identity == ann.identity


def test_recovering_twice_at_once_gives_one_set_of_feeds(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "fresh") as (ann, fresh):
        trip = ann.create_party("Trip")
        phrase = ann.recovery_phrase()
        entered = [*fresh.recover(phrase, address(ann)), *fresh.recover(phrase, address(ann))]
        assert len(entered) == 1
        until(lambda: writes(entered[0]))
        converged(trip, entered[0])
        mine = [feed for feed in trip.runtime.processor.admission.feeds if feed.device == fresh.device]
        assert len(mine) == 2
