"""Opening from a kept control state: equal to folding all control messages, and given up whenever it might not be."""

from pathlib import Path

import pytest

from control_floors import told
from echostore.bench.many_epochs import Voter, add_epochs
from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import PartyKey, feed_id
from echostore.kernel.party.compaction import compact
from echostore.kernel.party.credentials import EpochAttest, MemberRemove
from echostore.peer import control_standing
from echostore.peer.control_standing import Credentials, fold_whole, keep_control
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.peer import Peer, open_peer
from echostore.wire.control_state import CONTROL_KEY, StoredControl, encode_control_state, read_control_state
from echostore.wire.generated import control_state_pb2 as pb
from peer_builder import Circle

VOTERS = 4


@pytest.fixture(autouse=True)
def keep_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_standing, "KEEP_AFTER_MESSAGES", 4)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A party of five with six epochs that all attested."""
    with open_peer(tmp_path / "home", name="ann", background=False) as peer:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        add_epochs(party, [Voter(party, f"voter {number}") for number in range(VOTERS)], 6)
    return tmp_path / "home"


def opened(home: Path, **options: bool) -> tuple[Peer, Party]:
    peer = open_peer(home, background=False, **options)  # type: ignore[arg-type]  # flags
    return peer, peer.party(peer.parties()[0].key)


def test_a_party_opens_from_the_kept_state_to_what_all_messages_say(home: Path) -> None:
    peer, party = opened(home)
    with peer:
        processor = party.runtime.processor
        start = processor.membership.machine.start
        assert start is not None
        held = sum(held.length for held in party.runtime.feeds.feeds() if held.kind == "control")
        assert processor.counters.control == held - sum(start.lengths.values()) < held / 2
        before = told(party)
        fold_whole(processor)
        assert processor.membership.machine.start is None
        assert told(party) == before


def test_asking_for_old_epochs_or_reasons_folds_all_messages(home: Path) -> None:
    peer, party = opened(home)
    with peer:
        assert party.runtime.processor.membership.machine.start is not None
        assert [epoch.number for epoch in Epochs(party).all()] == [1, 2, 3, 4, 5, 6]
        assert party.runtime.processor.membership.machine.start is None
    peer, party = opened(home)
    with peer:
        voter = party.members.all()[1]
        assert party.members.why(voter.identity)
        (item,) = party.query(type="task").all()
        assert party.as_of("epoch:2").get(item.id)["done"] == 2


def test_epochs_go_on_above_a_kept_state(home: Path) -> None:
    for number in (7, 8):
        peer, party = opened(home)
        with peer:
            assert party.runtime.processor.membership.machine.start is not None
            (item,) = party.query(type="task").all()
            item["done"] += 1
            assert Epochs(party).create().number == number


def test_a_state_is_the_same_whether_made_from_all_messages_or_from_an_earlier_one(home: Path) -> None:
    peer, party = opened(home)
    with peer:
        processor = party.runtime.processor
        lengths = {
            cursor.key: cursor.length for cursor in processor.orderer.cursors.values() if cursor.kind == "control"
        }
        short = compact(processor.membership.machine, lengths)
        assert processor.membership.machine.start is not None
        fold_whole(processor)
        assert compact(processor.membership.machine, lengths) == short


def test_its_bytes_are_canonical_and_say_the_same_when_read(home: Path) -> None:
    peer, party = opened(home)
    with peer:
        data = party.runtime.feeds.about(CONTROL_KEY)
        assert data
        stored = read_control_state(data, party.key)
        assert stored.state == party.runtime.processor.membership.machine.start
        assert encode_control_state(stored, Credentials(party.runtime.feeds).at) == data
        with pytest.raises(Corrupt, match="another party"):
            read_control_state(data, PartyKey(bytes(32)))


@pytest.mark.parametrize("what", ["signature", "feed", "order", "columns", "beyond", "chain", "steps", "spelling"])
def test_bytes_that_no_peer_writes_are_refused(home: Path, what: str) -> None:
    peer, party = opened(home)
    with peer:
        data = party.runtime.feeds.about(CONTROL_KEY)
        assert data
        message = pb.ControlState.FromString(data)
        first = message.messages[0]
        match what:
            case "signature":
                first.credentials[0] = first.credentials[0][:-1] + bytes([first.credentials[0][-1] ^ 1])
            case "feed":
                first.feed = len(message.feeds)
            case "order":
                first.depth = 10_000
            case "columns":
                first.positions.append(9)
            case "beyond":
                first.seq = message.feeds[first.feed].cut.length
            case "chain":
                message.chains[0].epoch = bytes(32)
            case "steps":
                saw = next(feed for feed in message.feeds if feed.step_seqs)
                saw.step_seqs[-1] = saw.cut.length
            case "spelling":
                data += b"\x50\x01"
        wrong = data if what == "spelling" else message.SerializeToString(deterministic=True)
        with pytest.raises(Corrupt):
            read_control_state(wrong, party.key)


def test_a_damaged_or_foreign_state_is_not_used(home: Path) -> None:
    peer, party = opened(home)
    with peer:
        before = told(party)
        party.runtime.feeds.set_about({CONTROL_KEY: b"nothing of the kind"})
        party.runtime.processor.control_kept = 10**6  # nothing new is kept at closing
    peer, party = opened(home)
    with peer:
        assert party.runtime.processor.membership.machine.start is None
        assert told(party) == before


def test_a_state_that_goes_beyond_the_feeds_is_not_used(home: Path) -> None:
    peer, party = opened(home)
    with peer:
        feeds = party.runtime.feeds
        stored = read_control_state(feeds.about(CONTROL_KEY) or b"", party.key)
        ahead = pb.ControlState.FromString(feeds.about(CONTROL_KEY) or b"")
        ahead.feeds[0].cut.link = bytes(32)
        feeds.set_about({CONTROL_KEY: ahead.SerializeToString(deterministic=True)})
        assert stored.cuts
        party.runtime.processor.control_kept = 10**6
    peer, party = opened(home)
    with peer:
        assert party.runtime.processor.membership.machine.start is None


def test_a_reader_opens_from_the_kept_state_and_writes_none(home: Path) -> None:
    peer, party = opened(home, read_only=True)
    with peer:
        assert party.runtime.processor.membership.machine.start is not None
        assert party.query(type="task").count() == 1


def test_a_late_vote_makes_the_peer_fold_all_messages_and_agree_with_who_has_them(tmp_path: Path) -> None:
    with open_peer(tmp_path / "home", name="ann", background=False) as peer:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        voters = [Voter(party, f"voter {number}") for number in range(VOTERS)]
        add_epochs(party, voters[:-1], 6)
        first = Epochs(party).chain()[0]
        key = party.key
        assert keep_control(party.runtime.processor, closing=True)
    with open_peer(tmp_path / "home", background=False) as peer:
        party = peer.party(key)
        machine = party.runtime.processor.membership.machine
        assert machine.start is not None
        voters[-1].speak(party, EpochAttest(1, first.hash, first.genesis.snapshot))
        whole = party.runtime.processor.membership.machine
        assert whole.start is None, "the vote is about an epoch that the state left out"
        assert voters[-1].identity in whole.epoch_tally().chain[0].attested_by
        party.runtime.processor.control_kept = 0
        assert not keep_control(party.runtime.processor, closing=True), "the next opening would find it late again"
        party.runtime.processor.control_kept = 10**6
    with open_peer(tmp_path / "home", background=False) as peer:
        again = peer.party(key).runtime.processor.membership.machine
        assert again.start is None, "found late while opening"
        assert voters[-1].identity in again.epoch_tally().chain[0].attested_by


def test_a_late_removal_counts_the_same_for_who_went_on_from_a_state(tmp_path: Path) -> None:
    """An admin slept through the epochs and had removed somebody before."""
    circle = Circle(tmp_path, "ann", "bob", "cyd", "dan", roles={"bob": "admin"})
    with circle:
        item = circle.party("ann").create("property-set", type="task", done=0)
        circle.meet_all()
        bob = circle.party("bob")
        bob.members.remove(circle.peers["dan"].myself.identity)  # nobody hears of it yet
        awake = ("ann", "cyd", "dan")
        for number in range(6):
            item["done"] = number + 1
            Epochs(circle.party("ann")).create()
            for name in awake[1:]:
                circle.meet("ann", name)
                Epochs(circle.party(name)).review()
                circle.meet("ann", name)
        for name in awake:
            party = circle.restart(name)
            assert party.runtime.processor.membership.machine.start is not None, name
        circle.meet_all()
        assert all(circle.party(name).runtime.processor.membership.machine.start is None for name in awake)
        circle.agree_after_loss()
        gone = [member for member in circle.party("ann").members.all() if member.role is None]
        assert [member.identity for member in gone] == [circle.peers["dan"].myself.identity]
        removals = [m for m in circle.party("ann").runtime.processor.membership.machine.events if m.claim is not None]
        assert any(isinstance(event.claim.assertion, MemberRemove) for event in removals if event.claim is not None)


def test_a_state_keeps_the_cuts_that_the_orderer_goes_on_from(home: Path) -> None:
    peer, party = opened(home)
    with peer:
        stored = read_control_state(party.runtime.feeds.about(CONTROL_KEY) or b"", party.key)
        for key, cut in stored.cuts.items():
            assert party.runtime.feeds.link_at(key, cut.length - 1) == cut.link
            asserted = party.runtime.processor.orderer.cursors[feed_id(key)].asserted
            assert {known.feed for known in cut.asserted} <= asserted.keys()
        assert any(cut.asserted for cut in stored.cuts.values())
        assert isinstance(stored, StoredControl)
        assert {feed.key: feed.length for feed in stored.state.feeds} == {
            key: cut.length for key, cut in stored.cuts.items()
        }


def test_messages_above_a_state_have_seen_what_those_below_it_had(tmp_path: Path) -> None:
    """One member spoke once, long ago: nobody names its feed again, and all have seen it."""
    with open_peer(tmp_path / "home", name="ann", background=False) as peer:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        quiet, *voters = (Voter(party, f"voter {number}") for number in range(VOTERS))
        add_epochs(party, [quiet, *voters], 1)
        add_epochs(party, voters, 5)
    peer, party = opened(tmp_path / "home")
    with peer:
        machine = party.runtime.processor.membership.machine
        assert machine.start is not None
        lengths = machine.start.lengths
        tail = [(each.feed_key, each.seq) for each in machine.messages if each.seq >= lengths[each.feed_key]]
        assert tail
        assert all(machine.clock(*place)[feed_id(quiet.feed)] == 0 for place in tail)
        for voter in voters:
            assert feed_id(quiet.feed) in party.runtime.processor.orderer.cursors[feed_id(voter.feed)].asserted
