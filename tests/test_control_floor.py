"""Control feeds that begin at an epoch's control state: what is named, what goes, who can still start, whom nobody believes."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_floors import control_from, told
from echostore.bench.many_epochs import Voter, add_epochs
from echostore.kernel.errors import Compacted, Corrupt, Refused
from echostore.kernel.ids import Cid, PartyKey
from echostore.kernel.order import CONTROL, Envelope
from echostore.kernel.party.credentials import EpochAttest, MemberRemove
from echostore.kernel.party.machine import PartyMachine
from echostore.kernel.sync.port import Rejection
from echostore.peer import epochs as epochs_module
from echostore.peer.bootstrap import believable, bootstrap
from echostore.peer.control_floor import Floor, fetch_floor, kept_blobs, stand_on
from echostore.peer.control_naming import MadeControl, control_at
from echostore.peer.control_standing import fold_whole
from echostore.peer.epoch_gc import plan_gc, run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.peer import Peer, open_peer
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.control_state import CONTROL_KEY, EVIDENCE_KEY, FLOOR_KEY, read_control_state
from echostore.wire.credentials import verify_bytes
from echostore.wire.epochs import read_cut
from echostore.wire.generated import control_state_pb2 as pb
from echostore.wire.messages import decode_envelope
from network_peers import address, cid, converged, invited, peers, until
from peer_builder import Circle
from test_stale_messages import agreed_epoch, blobs_of, started
from two_peers import open_quiet, sync

VOTERS = 4


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def made(home: Path, epochs: int = 6) -> None:
    """A party of five with epochs that all attested."""
    with open_peer(home, name="ann", background=False) as peer:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        add_epochs(party, [Voter(party, f"voter {number}") for number in range(VOTERS)], epochs)


def opened(home: Path) -> tuple[Peer, Party]:
    peer = open_peer(home, background=False)
    return peer, peer.party(peer.parties()[0].key)


def control_base(party: Party) -> int:
    return sum(held.base for held in party.runtime.feeds.feeds() if held.kind == "control")


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    with Circle(tmp_path, "ann", "bob", "cat") as found:
        yield found


# --- naming -----------------------------------------------------------------------------------------------------------


def test_an_epoch_names_the_control_state_that_every_member_makes(circle: Circle) -> None:
    item = circle.party("ann").create("property-set", n=0)
    for number in range(1, 4):
        item["n"] = number
        agreed_epoch(circle, "ann", "bob", "cat")
    for name in ("ann", "bob", "cat"):
        party = circle.restart(name)
        for epoch in Epochs(party).chain():
            processor, blobs = party.runtime.processor, party.runtime.blobs
            fold_whole(processor)
            made = control_at(processor, read_cut(Cid(epoch.genesis.cut), blobs.get))
            assert made.cid == epoch.genesis.control, (name, made.why)
            assert not blobs.has(Cid(made.cid)), "what can be made again is not kept"
            stored = read_control_state(made.data, party.key)
            entries = {entry.feed: (entry.seq + 1, entry.link) for entry in epoch.genesis.control_timeframe}
            assert {key: (cut.length, cut.link) for key, cut in stored.cuts.items()} == entries
            assert epoch.final, name


def test_a_child_partys_epoch_names_none(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.create_party("Trip")
        child = ann.create_child(party, "Tasks")
        item = child.create("property-set", n=0)
        for number in range(3):
            item["n"] = number
            Epochs(child).create()
            party.create("property-set", n=number)
            Epochs(party).create()
        assert all(not epoch.genesis.control for epoch in Epochs(child).chain())
        assert run_gc(party).control_blocks
        item["n"] = 7
        Epochs(child).create()
        before = cid(child)
        key = child.key
    with open_quiet(tmp_path / "ann") as ann:
        child = ann.party(key)
        assert cid(child) == before
        assert Epochs(child).verify(4).verdict == "attested"
        child.get(item.id)["n"] = 8
        assert Epochs(child).create().number == 5
    with open_quiet(tmp_path / "ann") as ann:
        child = ann.party(key)
        assert run_gc(child).epoch == 4
        assert child.get(item.id)["n"] == 8


def test_a_child_party_stands_on_an_epoch_below_its_parents_floor(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "ann") as ann:
        party = ann.create_party("Trip")
        child = ann.create_child(party, "Tasks")
        item = child.create("property-set", n=0)
        for number in range(2):
            item["n"] = number
            Epochs(child).create()
        for number in range(3):
            party.create("property-set", n=number)
            Epochs(party).create()
        assert run_gc(party).control_blocks
        before, key = cid(child), child.key
    with open_quiet(tmp_path / "ann") as ann:
        child = ann.party(key)
        assert standing(child) == 2
        assert cid(child) == before


# --- truncating -------------------------------------------------------------------------------------------------------


def test_control_blocks_go_and_the_party_stays_what_it_is(tmp_path: Path) -> None:
    made(tmp_path / "home")
    peer, party = opened(tmp_path / "home")
    with peer:
        before = told(party)
        plan = plan_gc(party)
        assert plan.control_blocks > 20
        assert (plan.control_why, control_base(party)) == ("", 0)
        done = run_gc(party)
        assert (done.control_blocks, done.blocks) == (plan.control_blocks, plan.blocks)
        assert control_base(party) == plan.control_blocks
        assert told(party) == before
        again = plan_gc(party)
        assert (again.blocks, again.control_blocks, again.blobs) == (0, 0, 0)
        run_gc(party)
        kept = kept_blobs(party.runtime.processor, party.runtime.blobs)
        assert len(kept) == 2
        assert not party.runtime.blobs.missing(kept), "what newcomers are given stays"
        for held in party.runtime.feeds.feeds():
            assert party.runtime.feeds.verify(held.key).sound, "the chain is verifiable from the cut on"
    peer, party = opened(tmp_path / "home")
    with peer:
        assert told(party) == before
        fold_whole(party.runtime.processor)
        assert told(party) == before
        assert party.members.why(party.members.all()[1].identity), "what counts still has its reasons"
        numbers = [epoch.number for epoch in Epochs(party).all()]
        assert numbers[-1] == 6
        assert 1 not in numbers
        with pytest.raises(Compacted, match="epoch 1 lies below"):
            Epochs(party).get(1)
        with pytest.raises(Compacted):
            party.as_of("epoch:1")
        (item,) = party.query(type="task").all()
        item["done"] += 1
        assert Epochs(party).create().number == 7


def test_truncated_again_and_again_it_names_what_who_has_all_names(circle: Circle) -> None:
    ann, bob, cat = (circle.party(name) for name in ("ann", "bob", "cat"))
    item = ann.create("property-set", n=0)
    floors = []
    for number in range(1, 8):
        item["n"] = number
        agreed_epoch(circle, "ann", "bob", "cat")
        if number > 2:
            run_gc(ann)
            floors.append(control_base(ann))
        if number == 5:
            ann = circle.restart("ann")
            item = ann.get(item.id)
    assert floors == sorted(set(floors)), "each epoch frees more"
    assert control_base(bob) == control_base(cat) == 0
    assert len({cid(party) for party in (ann, bob, cat)}) == 1
    assert all(epoch.final and epoch.genesis.control for epoch in Epochs(cat).chain())
    machine = ann.runtime.processor.membership.machine
    assert machine.start is not None
    assert machine.members == cat.runtime.processor.membership.machine.members
    assert machine.admission().digest == cat.runtime.processor.membership.machine.admission().digest


def test_a_late_vote_on_what_is_gone_is_let_stand(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with open_peer(home, name="ann", background=False) as peer:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        voters = [Voter(party, f"voter {number}") for number in range(VOTERS)]
        add_epochs(party, voters[:-1], 6)
        first = Epochs(party).chain()[0]
        assert run_gc(party).control_blocks
        before = told(party) | {"timeframe": None}
        voters[-1].speak(party, EpochAttest(1, first.hash, first.genesis.snapshot))
        assert party.runtime.processor.membership.machine.late
        assert told(party) | {"timeframe": None} == before
    peer, party = opened(home)
    with peer:
        assert told(party) | {"timeframe": None} == before
        (item,) = party.query(type="task").all()
        item["done"] = 100
        Epochs(party).create()
        newest = Epochs(party).chain()[-1]
        assert not newest.genesis.control, "others may find another one"


def test_something_late_keeps_control_feeds_from_being_truncated(tmp_path: Path) -> None:
    with open_peer(tmp_path / "home", name="ann", background=False) as peer:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        voters = [Voter(party, f"voter {number}") for number in range(VOTERS)]
        add_epochs(party, voters[:-1], 6)
        first = Epochs(party).chain()[0]
        voters[-1].speak(party, EpochAttest(1, first.hash, first.genesis.snapshot))
        plan = plan_gc(party)
        assert (plan.epoch, plan.control_blocks) == (5, 0)
        assert "came late" in plan.control_why
        done = run_gc(party)
        assert (done.control_blocks, control_base(party)) == (0, 0)
        assert voters[-1].identity in Epochs(party).chain()[0].attested_by


def test_a_control_feed_that_forks_above_the_floor_is_followed_from_there(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    with open_peer(home, name="ann", background=False) as peer:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        voters = [Voter(party, f"voter {number}") for number in range(VOTERS)]
        add_epochs(party, voters, 4)
        assert run_gc(party).control_blocks
        last = Epochs(party).chain()[-1]
    shutil.copytree(home, copy)
    peer, other = opened(copy)
    with peer:
        voters[0].speak(other, EpochAttest(9, last.hash, last.genesis.snapshot))
        start = other.runtime.feeds.length(voters[0].feed) - 1
        payloads, head = other.runtime.feeds.range_ending_at_head(voters[0].feed, start)
    peer, party = opened(home)
    with peer:
        voters[0].speak(party, EpochAttest(8, last.hash, last.genesis.snapshot))
        assert isinstance(party.sync_port.ingest(voters[0].feed, "control", start, payloads, head), Rejection)
        (branch,) = party.runtime.feeds.branches(voters[0].feed)
        before = told(party)
        (item,) = party.query(type="task").all()
        item["done"] = 100
        Epochs(party).create()
        assert not Epochs(party).chain()[-1].genesis.control, "others may not know of the branch"
        assert plan_gc(party).control_blocks == 0
    peer, party = opened(home)
    with peer:
        assert told(party)["members"] == before["members"]
        assert [found.start_seq for found in party.runtime.feeds.branches(voters[0].feed)] == [branch.start_seq]
        assert party.runtime.processor.membership.machine.forks == {voters[0].feed: start}


def test_a_damaged_floor_is_said_and_nothing_else_is_made_of_it(tmp_path: Path) -> None:
    made(tmp_path / "home")
    peer, party = opened(tmp_path / "home")
    with peer:
        run_gc(party)
        key = party.key
        data = party.runtime.feeds.about(FLOOR_KEY)
        party.runtime.feeds.set_about({FLOOR_KEY: data[:-1], CONTROL_KEY: b""})
        party.runtime.processor.control_kept = 10**6
    with open_peer(tmp_path / "home", background=False) as peer, pytest.raises(Corrupt, match="state that is damaged"):
        peer.party(key)


def test_an_epoch_without_a_control_state_truncates_no_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs_module, "control_at", lambda processor, cuts: MadeControl(b"", "as of an older version"))
    made(tmp_path / "home", epochs=3)
    monkeypatch.undo()
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    peer, party = opened(tmp_path / "home")
    with peer:
        plan = plan_gc(party)
        assert (plan.epoch, plan.control_blocks) == (2, 0)
        assert "names no control state" in plan.control_why
        assert run_gc(party).blocks == plan.blocks > 0


# --- starting from it -------------------------------------------------------------------------------------------------


def test_a_sleeper_goes_on_from_the_state_with_its_own_control_messages(circle: Circle) -> None:
    ann, bob, cat = (circle.party(name) for name in ("ann", "bob", "cat"))
    item = ann.create("property-set", n=0)
    circle.meet_all()
    cat.members.set_profile("Cat, who slept")
    cat.get(item.id)["mine"] = True
    cat.flush()
    ann.members.change_role(circle.peers["bob"].myself.identity, "admin")
    for number in range(1, 5):
        item["n"] = number
        agreed_epoch(circle, "ann", "bob")
    for party in (ann, bob):
        assert run_gc(party).control_blocks
    started(ann, cat)
    assert control_base(cat) == control_base(ann)
    sync(ann, bob, cat)
    assert len({cid(party) for party in (ann, bob, cat)}) == 1
    assert item["mine"] is True
    cat = circle.restart("cat")
    assert cid(cat) == cid(ann)
    assert cat.runtime.processor.membership.machine.members == ann.runtime.processor.membership.machine.members
    item["n"] = 50
    agreed_epoch(circle, "ann", "bob")
    sync(ann, cat)
    (judged,) = Epochs(cat).review()
    assert judged.verdict == "attested", judged


def test_a_newcomer_starts_from_a_member_who_started_so_itself(tmp_path: Path) -> None:
    made(tmp_path / "ann")
    peer, ann = opened(tmp_path / "ann")
    with peer, open_quiet(tmp_path / "bob") as bob, open_quiet(tmp_path / "cyd") as cyd:
        run_gc(ann)
        first = bob.enter(ann.members.admit(bob.request_join(ann.key), role="admin"))
        started(ann, first)
        sync(ann, first)
        assert control_base(first) == control_base(ann)
        second = cyd.enter(first.members.admit(cyd.request_join(ann.key)))
        started(first, second)
        sync(first, second)
        assert control_base(second) == control_base(ann)
        assert cid(second) == cid(first)
        sync(ann, first, second)
        assert len({cid(party) for party in (ann, first, second)}) == 1
        key = ann.key
    with open_quiet(tmp_path / "cyd") as cyd:
        assert cyd.party(key).query(type="task").count() == 1


def test_a_guest_starts_over_the_network_and_so_does_who_it_invites(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob", "cyd") as (ann, bob, cyd):
        party = ann.create_party("Trip")
        item = party.create("property-set", type="task", done=0)
        for number in range(4):
            item["done"] = number
            Epochs(party).create()
        assert run_gc(party).control_blocks
        guest = invited(ann, party, bob, role="admin")
        assert control_base(guest) == control_base(party) > 0
        assert not bob.network.bootstraps.refused
        guest.get(item.id)["done"] = 70
        converged(party, guest)
        ann.close()
        third = invited(bob, guest, cyd)
        assert control_base(third) == control_base(guest)
        third.get(item.id)["done"] = 80
        converged(guest, third)


# --- lies -------------------------------------------------------------------------------------------------------------


class Served:
    """What a server that truncated its control feeds gives; tests change it."""

    def __init__(self, party: Party) -> None:
        assert party.runtime.blobs is not None
        self.party = party.key
        self._blobs = party.runtime.blobs
        self.evidence = pb.ControlEvidence.FromString(party.runtime.blobs.get(evidence_of(party)))
        self.state = pb.ControlState.FromString(party.runtime.blobs.get(Cid(self.evidence.state)))

    def taken_by(self, party: Party, *, renamed: bool = True) -> Floor:
        data = self.state.SerializeToString(deterministic=True)
        if renamed:
            self.evidence.state = cid_of(data, PROTOBUF)
        told = self.evidence.SerializeToString(deterministic=True)
        blobs = {cid_of(told, PROTOBUF): told, Cid(self.evidence.state): data}
        return fetch_floor(cid_of(told, PROTOBUF), party.runtime.processor, blobs.__getitem__)


def evidence_of(party: Party) -> Cid:
    found = party.runtime.feeds.about(EVIDENCE_KEY)
    assert found
    return Cid(found)


@pytest.fixture
def lying(tmp_path: Path) -> Iterator[tuple[Served, Party, Party]]:
    """A server with truncated control, one of whose members was removed, and a newcomer."""
    with open_peer(tmp_path / "home", name="ann", background=False) as peer, open_quiet(tmp_path / "new") as new:
        party = peer.create_party("many")
        party.create("property-set", type="task", done=0)
        voters = [Voter(party, f"voter {number}") for number in range(VOTERS)]
        add_epochs(party, voters, 2)
        party.members.remove(voters[-1].identity)
        add_epochs(party, voters[:-1], 3)
        assert run_gc(party).control_blocks
        yield Served(party), new.enter(party.members.admit(new.request_join(party.key))), party


def removal_in(state: pb.ControlState) -> pb.KeptMessage:
    for kept in state.messages:
        for raw in kept.credentials:
            found = verify_bytes(raw, PartyKey(state.party))
            if found.claim is not None and isinstance(found.claim.assertion, MemberRemove):
                return kept
    raise AssertionError("no removal is kept")


def test_what_is_true_is_taken(lying: tuple[Served, Party, Party]) -> None:
    served, newcomer, party = lying
    floor = served.taken_by(newcomer)
    stand_on(newcomer.runtime.processor, floor, newcomer.runtime.blobs)
    control_from(party, newcomer)
    epoch = believable(newcomer.runtime)
    assert epoch is not None
    bootstrap(newcomer, epoch, blobs_of(party, newcomer))
    assert cid(newcomer) == cid(party)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("removal dropped", "names another control state"),
        ("removal dropped, name kept", "not what its CID says"),
        ("giant bytes", "not what its CID says"),
        ("credential forged", "does not hold"),
        ("cut elsewhere", "names another control state"),
        ("link elsewhere, epoch of the liar", "does not hold"),
        ("another party", "another party"),
        ("evidence of another party", "another party"),
        ("no evidence", "nobody stands for it"),
        ("one attest alone", "too few"),
        ("more than attests", "more is told"),
        ("attests inside the state", "inside the state"),
        ("no genesis", "names another control state"),
    ],
)
def test_no_lie_is_believed(lying: tuple[Served, Party, Party], lie: str, why: str) -> None:
    served, newcomer, _ = lying
    state, evidence = served.state, served.evidence
    match lie:
        case "removal dropped" | "removal dropped, name kept":
            state.messages.remove(removal_in(state))
        case "credential forged":
            first = state.messages[0]
            first.credentials[0] = first.credentials[0][:-1] + bytes([first.credentials[0][-1] ^ 1])
        case "cut elsewhere":
            state.feeds[0].cut.link = bytes(32)
        case "link elsewhere, epoch of the liar":
            said = evidence.said[0]
            said.credential = said.credential.replace(state.feeds[0].cut.link, bytes(32))
        case "giant bytes":
            state.messages[0].credentials.extend([b"x" * 1000] * 1100)
        case "another party":
            state.party = bytes(32)
        case "evidence of another party":
            evidence.party = bytes(32)
        case "no evidence":
            del evidence.said[:]
        case "one attest alone":
            del evidence.said[1:]
        case "more than attests":
            kept = state.messages[0]
            evidence.said.add(
                feed=state.feeds[kept.feed].cut.feed, seq=1000, depth=1000, credential=kept.credentials[0]
            )
        case "attests inside the state":
            evidence.said[1].seq = 0
        case "no genesis":
            del state.messages[0]
    with pytest.raises((Corrupt, Refused)) as refused:
        served.taken_by(newcomer, renamed=lie != "removal dropped, name kept")
    assert why in refused.value.what
    assert control_base(newcomer) == 0


@pytest.mark.parametrize("lie", ["no genesis", "of a child party", "another number", "two chains of one"])
def test_a_chain_that_begins_with_something_else_is_refused(lying: tuple[Served, Party, Party], lie: str) -> None:
    """Before a machine is made of it, whoever signed an epoch that names it."""
    state = lying[0].state
    (chain,) = state.chains
    match lie:
        case "no genesis":
            first = verify_bytes(state.messages[0].credentials[0], PartyKey(state.party))
            chain.epoch = chain.pins[-1].hash = first.hash
        case "of a child party":
            chain.child = bytes(32)
        case "another number":
            chain.number += 1
        case "two chains of one":
            state.chains.append(chain)
            state.chains[1].child = bytes(32)
    with pytest.raises(Corrupt, match="without the epoch that its chain begins with"):
        read_control_state(state.SerializeToString(deterministic=True), PartyKey(state.party))


@pytest.mark.parametrize("lie", ["identity", "place"])
def test_evidence_names_everybody_once(lying: tuple[Served, Party, Party], lie: str) -> None:
    served, newcomer, _ = lying
    said = served.evidence.said
    if lie == "identity":
        said.append(said[1])
        said[-1].seq += 1
    else:
        said[2].feed, said[2].seq = said[1].feed, said[1].seq
    with pytest.raises(Corrupt, match="told twice"):
        served.taken_by(newcomer, renamed=False)


def test_who_looks_at_evidence_keeps_one_clock_for_all_who_attest(
    lying: tuple[Served, Party, Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock has an entry for each control feed: one for each of twenty thousand members would fill the memory."""
    served, newcomer, _ = lying
    clocks: list[object] = []
    receive = PartyMachine.receive
    monkeypatch.setattr(
        PartyMachine, "receive", lambda self, message: clocks.append(message.clock) or receive(self, message)
    )
    served.taken_by(newcomer)
    assert len(clocks) == len(served.evidence.said) > 2
    assert all(clock is clocks[1] for clock in clocks[1:])


def test_a_genesis_that_its_declarer_repeats_hinders_nobody(tmp_path: Path) -> None:
    made(tmp_path / "home")
    peer, party = opened(tmp_path / "home")
    with peer:
        fold_whole(party.runtime.processor)
        machine = party.runtime.processor.membership.machine
        hash = machine.epoch_tally().chain[-2].hash
        (event,) = (event for event in machine.events if event.hash == hash)
        block = party.runtime.feeds.block(event.feed_key, event.seq)
        envelope = decode_envelope(block.payload, CONTROL)
        assert isinstance(envelope, Envelope)
        party.members._issue([envelope.body.credentials[event.position]])
        before = told(party)
        assert run_gc(party).control_blocks
        assert told(party) == before


def test_a_sleeper_does_not_unlearn_a_removal(circle: Circle) -> None:
    """Also when as many members lie as a newcomer would believe."""
    ann, cat = circle.party("ann"), circle.party("cat")
    item = ann.create("property-set", n=0)
    circle.meet_all()
    ann.members.remove(circle.peers["bob"].myself.identity)
    for number in range(1, 5):
        item["n"] = number
        agreed_epoch(circle, "ann", "cat")
    assert run_gc(ann).control_blocks
    served = Served(ann)
    true = served.taken_by(cat)
    served.state.messages.remove(removal_in(served.state))
    data = served.state.SerializeToString(deterministic=True)
    lie = Floor(read_control_state(data, ann.key), data, true.evidence)
    with pytest.raises(Refused, match="leaves out a removal"):
        stand_on(cat.runtime.processor, lie, cat.runtime.blobs)
    elsewhere = Served(ann).state
    elsewhere.feeds[0].cut.link = bytes(32)
    data = elsewhere.SerializeToString(deterministic=True)
    lie = Floor(read_control_state(data, ann.key), data, true.evidence)
    with pytest.raises(Refused, match="leaves the history"):
        stand_on(cat.runtime.processor, lie, cat.runtime.blobs)
    assert control_base(cat) == 0
    stand_on(cat.runtime.processor, true, cat.runtime.blobs)
    assert cid(cat) == cid(ann)


def test_a_sleeper_does_not_unlearn_an_admission(circle: Circle) -> None:
    """A state with fewer devices asks for fewer who stand for it: who was removed meanwhile could be its only witness."""
    ann, cat = circle.party("ann"), circle.party("cat")
    item = ann.create("property-set", n=0)
    circle.meet_all()
    for number in range(1, 5):
        item["n"] = number
        agreed_epoch(circle, "ann", "bob")
    assert run_gc(ann).control_blocks
    served = Served(ann)
    true = served.taken_by(cat)
    bob = circle.peers["bob"].identity
    for kept in served.state.messages:
        said = [verify_bytes(raw, ann.key).claim for raw in kept.credentials]
        keep = [at for at, claim in enumerate(said) if claim is None or bob not in _named(claim.assertion)]
        positions, credentials = ([of[at] for at in keep] for of in (kept.positions, kept.credentials))
        kept.positions[:], kept.credentials[:] = positions, credentials
    for kept in [kept for kept in served.state.messages if not kept.positions]:
        served.state.messages.remove(kept)
    data = served.state.SerializeToString(deterministic=True)
    lie = Floor(read_control_state(data, ann.key), data, true.evidence)
    with pytest.raises(Refused, match="leaves out something which this device knows of"):
        stand_on(cat.runtime.processor, lie, cat.runtime.blobs)
    assert control_base(cat) == 0
    stand_on(cat.runtime.processor, true, cat.runtime.blobs)


def _named(said: object) -> tuple[object, object]:
    return getattr(said, "member", None), getattr(said, "identity", None)


def agreed_over_the_network(party: Party, theirs: Party, item: Any, epochs: int) -> None:
    """Epochs by one, attested by the other, until both stand on the last one."""
    for number in range(epochs):
        item["done"] = number
        until(lambda: cid(theirs) == cid(party))
        made = Epochs(party).create().number
        until(lambda made=made: Epochs(theirs).review() is not None and standing(party) == standing(theirs) == made)


def standing(party: Party) -> int:
    base = party.runtime.processor.base
    return base.name.number if base is not None else 0


def test_the_next_source_is_asked_when_one_lies(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "eve", "bob") as (ann, eve, bob):
        party = ann.create_party("Trip")
        item = party.create("property-set", type="task", done=-1)
        theirs = invited(ann, party, eve, role="admin")
        agreed_over_the_network(party, theirs, item, 4)
        for each in (party, theirs):
            assert run_gc(each).control_blocks
        served = Served(theirs)
        served.evidence.said[0].feed = bytes(32)
        lie = served.evidence.SerializeToString(deterministic=True)
        theirs.runtime.blobs.put_many({cid_of(lie, PROTOBUF): lie})
        theirs.runtime.feeds.set_about({EVIDENCE_KEY: cid_of(lie, PROTOBUF)})
        invitation = theirs.invite("editor")
        guest = bob.join(invitation.ticket, invitation.passcode, wait=False)
        until(lambda: "not one of" in bob.network.bootstraps.refused.get((party.key, cid_of(lie, PROTOBUF)), ""))
        bob.connect(address(ann))
        until(lambda: cid(guest) == cid(party))
        assert control_base(guest) == control_base(party) > 0


def test_who_slept_goes_on_over_the_network(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "cyd") as (ann, cyd):
        party = ann.create_party("Trip")
        item = party.create("property-set", type="task", done=-1)
        theirs = invited(ann, party, cyd, role="admin")
        with peers(tmp_path, "bob") as (bob,):
            guest = invited(ann, party, bob)
            guest.get(item.id)["note"] = "before I slept"
            converged(party, theirs, guest)
        agreed_over_the_network(party, theirs, item, 4)
        for each in (party, theirs):
            assert run_gc(each).control_blocks
        with peers(tmp_path, "bob") as (bob,):
            guest = bob.party(party.key)
            guest.get(item.id)["late"] = True
            bob.connect(address(ann))
            until(lambda: control_base(guest) == control_base(party))
            converged(party, theirs, guest)
            assert item["late"] is True
            assert guest.get(item.id)["note"] == "before I slept"
