"""Agreeing on epochs, with real peers: recompute, attest, dispute, abstain; who declares and when; what stays."""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.kernel import snapshot as shape
from echostore.kernel.errors import Corrupt, DamagedHere
from echostore.kernel.ids import Cid, ItemId, item_text
from echostore.kernel.party.credentials import EpochGenesis
from echostore.kernel.party.epoch_chain import Epoch
from echostore.kernel.snapshot import ModelVersion, Placement, placed
from echostore.peer.epoch_agreement import Judged, Verdict
from echostore.peer.epoch_fold import Folded, fold_to
from echostore.peer.epoch_keeper import eligible_devices
from echostore.peer.epoch_states import EpochStates
from echostore.peer.epochs import Epochs, EpochView
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.peer.placement_checking import first_misplaced, index_problem
from echostore.peer.runtime import PartyRuntime
from echostore.testing.inmemory import link
from echostore.wire.base_epoch import BaseEpoch, BaseName, snapshot_blobs
from echostore.wire.cids import cid_text
from echostore.wire.generated import snapshot_pb2
from echostore.wire.placements import PlacementReader, build_placements
from echostore.wire.snapshot import EncodedItem, encode_item, read_state_root, state_root_bytes
from echostore.wire.tree import TreeReader, build

NOW_MS = 1_000_000


class Circle:
    """Peers of one party, all connected; the first founded it. Time stands still unless it is moved."""

    def __init__(self, folder: Path, names: str = "abc", role: str = "admin") -> None:
        self.now_ms = NOW_MS
        self.peers: dict[str, Peer] = {}
        for name in names:
            self.peers[name] = echostore.open(folder / name, name=name, background=False, now_ms=lambda: self.now_ms)
        founder = self.peers[names[0]].create_party("Trip")
        self.key = founder.key
        for name in names[1:]:
            peer = self.peers[name]
            peer.enter(founder.members.admit(peer.request_join(founder.key), role=role))
        founder.flush()
        pairs = [(one, other) for at, one in enumerate(names) for other in names[at + 1 :]]
        self.links = {pair: link(self.peers[pair[0]], self.peers[pair[1]], self.key) for pair in pairs}
        self.meet()

    def party(self, name: str) -> Party:
        return self.peers[name].party(self.key)

    def epochs(self, name: str) -> Epochs:
        return Epochs(self.party(name))

    def meet(self) -> None:
        for peer in self.peers.values():
            peer.flush()
        for _ in range(3):
            for joined in self.links.values():
                joined.pump()

    def apart(self, name: str) -> None:
        for pair, joined in self.links.items():
            if name in pair:
                joined.cut()

    def together(self) -> None:
        for joined in self.links.values():
            joined.heal()
        self.meet()

    def review(self) -> dict[str, list[Judged]]:
        """Everybody judges once, and hears of what the others found."""
        found = {}
        for name in self.peers:
            found[name] = self.epochs(name).review()
            self.meet()
        return found

    def tick(self) -> list[tuple[str, int]]:
        """Everybody looks after its epochs once; who declared which number."""
        declared = []
        for name, peer in self.peers.items():
            declared += [(name, kept.declared.number) for kept in peer.epoch_keeper.tick() if kept.declared]
            self.meet()
        return declared

    def cids(self) -> set[str]:
        return {self.party(name).snapshot().cid for name in self.peers}

    def chains(self) -> list[list[str]]:
        return [[epoch.hash for epoch in self.epochs(name).all()] for name in self.peers]

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    made = Circle(tmp_path)
    yield made
    made.close()


def verdicts(found: dict[str, list[Judged]]) -> dict[str, list[Verdict]]:
    return {name: [judged.verdict for judged in each] for name, each in found.items()}


# attesting


def test_every_peer_recomputes_stores_and_attests_and_the_epoch_becomes_final(circle: Circle, tmp_path: Path) -> None:
    for number in range(30):
        circle.party("a").create("property-set", type="task", n=number)
    circle.meet()
    made = circle.epochs("a").create()
    circle.meet()
    assert verdicts(circle.review()) == {"a": [], "b": [Verdict.ATTESTED], "c": [Verdict.ATTESTED]}
    for name, peer in circle.peers.items():
        (view,) = circle.epochs(name).all()
        assert (view.final, view.attested_by, view.electorate) == (True, 3, 3)
        genesis = circle.epochs(name).get(1).genesis
        blobs = circle.party(name).runtime.blobs
        assert blobs is not None
        assert blobs.missing([genesis.snapshot, Cid(genesis.record), Cid(genesis.cut)]) == []
        assert (
            TreeReader(read_state_root(blobs.get(genesis.snapshot)).index_root, blobs.get).count
            == (view.items or 0) + 1
        ), "and the system item"
        kept = circle.epochs(name).accepted()
        assert kept is not None
        assert (kept.number, cid_text(kept.snapshot)) == (1, made.cid)
        assert peer.meta.setting("epoch", party=circle.key)["number"] == 1
    circle.peers["b"].close()
    with echostore.open(tmp_path / "b", background=False) as again:
        accepted = Epochs(again.party(circle.key)).accepted()
        assert accepted is not None
        assert cid_text(accepted.snapshot) == made.cid


def test_a_peer_that_is_ahead_folds_back_to_the_epoch_and_only_what_came_since_the_last_one(
    circle: Circle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape, "PAGE_ITEMS_MAX", 4)
    items = [circle.party("a").create("property-set", type="task", n=number) for number in range(200)]
    text = circle.party("a").create("text")
    text.insert(0, "hello")
    circle.meet()
    circle.epochs("a").create()
    circle.meet()
    circle.review()
    items[3]["n"] = -1
    text.insert(5, " world")
    circle.meet()
    circle.epochs("a").create()
    circle.meet()
    circle.party("b").get(items[4].id)["n"] = -2  # b is ahead of the epoch from now on
    circle.party("b").flush()
    party = circle.party("b")
    first, second = (circle.epochs("b").get(number) for number in (1, 2))
    blobs = party.runtime.blobs
    assert blobs is not None
    base = BaseEpoch(BaseName.of(first.genesis, first.hash), blobs.get, party.runtime.processor.factory)
    feeds, factory = party.runtime.feeds, party.runtime.processor.factory
    near = fold_to(second.genesis, party.key, feeds=feeds, factory=factory, base=base)
    far = fold_to(second.genesis, party.key, feeds=feeds, factory=factory, base=None)
    assert near is not None
    assert far is not None
    assert near.cid == far.cid == second.genesis.snapshot
    assert near.cut == far.cut == second.genesis.cut
    assert near.messages == 2, "what came since the last epoch, not the history"
    assert len(near.blobs) < len(far.blobs) / 4
    assert verdicts(circle.review())["b"] == [Verdict.ATTESTED]
    assert circle.epochs("c").all()[1].final


def test_who_lacks_blocks_waits_and_attests_when_they_came(circle: Circle) -> None:
    circle.apart("c")
    circle.party("a").create("property-set", type="task")
    circle.meet()
    circle.epochs("a").create()
    port, other = circle.party("c").sync_port, circle.party("a").sync_port
    for tip in list(other.feeds()):
        if tip.kind == "control":
            held = circle.party("c").runtime.feeds.length(tip.feed)
            read = other.read(tip.feed, held, 100, 1 << 20, tip.tip.link)
            if read is not None:
                port.ingest(tip.feed, tip.kind, held, *read)
    assert [(judged.verdict, judged.detail) for judged in circle.epochs("c").review()] == [
        (Verdict.WAITS, "blocks of it are not here")
    ]
    assert circle.epochs("c").all()[0].here == "waits: blocks of it are not here"
    circle.together()
    assert verdicts(circle.review())["c"] == [Verdict.ATTESTED]


def test_a_child_partys_epochs_are_attested_on_the_parents_control_feed(tmp_path: Path) -> None:
    made = Circle(tmp_path, "ab")
    child = made.peers["a"].create_child(made.party("a"), "Chess")
    made.meet()
    theirs = made.peers["b"].enter_child(made.party("b"), child.key)
    joined = link(made.peers["a"], made.peers["b"], child.key)
    board = child.create("property-set", type="board", turn="white")
    for _ in range(3):
        child.flush()
        theirs.flush()
        made.meet()
        joined.pump()
    Epochs(child).create()
    made.meet()
    theirs.get(board.id)["turn"] = "black"
    assert [judged.verdict for judged in Epochs(theirs).review()] == [Verdict.ATTESTED]
    made.meet()
    assert Epochs(child).all()[0].final
    assert made.epochs("a").all() == []
    made.close()


# disputing


def declare_a_lie(party: Party, change: Callable[[dict[bytes, snapshot_pb2.ItemState]], None]) -> EpochView:
    """A genesis whose tree is that of the real state with some items changed; everything else in it is right."""
    epochs = Epochs(party)
    snapshot = party.snapshot()
    states = {bytes(item): state for item, state in snapshot.reader().items()}
    change(states)
    blobs: dict[Cid, bytes] = {}
    items = [(item, encode_item(state, blobs.__setitem__)) for item, state in states.items()]
    top = build(items, blobs.__setitem__)  # type: ignore[arg-type]  # ids
    root = snapshot.root
    cid, data = state_root_bytes(
        party=root.party,
        timeframe=root.timeframe,
        admission_digest=root.admission_digest,
        base_epoch=root.base_epoch,
        models=[ModelVersion(state.model, state.version) for state in states.values()],
        item_count=top.count,
        membership_root=root.membership_root,
        index_root=top.cid,
        tree=root.tree,
        placements=root.placements,
    )
    blobs[cid] = data
    assert party.runtime.blobs is not None
    party.runtime.blobs.put_many(blobs)
    return epochs._declare(read_state_root(data), cid)


TUSK = snapshot_pb2.ItemState(type="tusk")


def give_blobs(giver: Party, taker: Party) -> None:
    assert giver.runtime.blobs is not None
    assert taker.runtime.blobs is not None
    taker.runtime.blobs.put_many({cid: giver.runtime.blobs.get(cid) for cid, _ in giver.runtime.blobs.list()})


@pytest.mark.parametrize("lie", ["edits", "drops", "adds"])
def test_a_lying_epoch_is_disputed_with_the_first_differing_item_and_history_stays(circle: Circle, lie: str) -> None:
    items = [circle.party("a").create("property-set", type="task", n=number) for number in range(40)]
    circle.meet()
    target = bytes(items[17].id)

    def change(states: dict[bytes, snapshot_pb2.ItemState]) -> None:
        if lie == "edits":
            states[target].type = "tusk"
        elif lie == "drops":
            del states[target]
        else:
            made_up = snapshot_pb2.ItemState()
            made_up.CopyFrom(states[target])
            made_up.item = target[:8] + (1 << 40).to_bytes(8, "big")
            states[made_up.item] = made_up

    declare_a_lie(circle.party("b"), change)
    circle.meet()
    give_blobs(circle.party("b"), circle.party("a"))
    found = circle.review()
    assert verdicts(found) == {"a": [Verdict.DISPUTED], "b": [], "c": [Verdict.DISPUTED]}
    word = {"edits": "changed", "drops": "removed", "adds": "added"}[lie]
    detail = found["a"][0].detail
    assert detail.startswith(f"{word} item ")
    assert lie == "adds" or detail.endswith(item_text(items[17].id))
    assert found["c"][0].detail == "another state; the declared one is not here to be compared"
    for name in "ac":
        (view,) = circle.epochs(name).all()
        assert (view.final, view.disputed_by, view.here) == (False, 2, "disputed")
        assert circle.epochs(name).accepted() is None
        assert circle.party(name).runtime.processor.base is None
    truth = circle.epochs("a").create()
    assert truth.number == 1, "who disputes an epoch declares another in its place"
    circle.meet()
    circle.review()
    assert {view.cid for name in circle.peers for view in circle.epochs(name).all()} == {truth.cid}
    assert circle.epochs("b").all()[0].final


def test_what_is_said_of_epochs_is_in_the_log_and_a_dispute_is_an_alarm(
    circle: Circle, caplog: pytest.LogCaptureFixture
) -> None:
    item = circle.party("a").create("property-set", type="task")
    circle.meet()
    with caplog.at_level(logging.INFO, logger="echostore.epochs"):
        circle.epochs("a").create()
        circle.meet()
        circle.tick()
        circle.party("a").create("property-set", type="task")
        circle.meet()
        declare_a_lie(circle.party("b"), lambda states: states[bytes(item.id)].MergeFrom(TUSK))
        circle.meet()
        circle.tick()
    told = [(record.levelname, record.getMessage(), record.__dict__["epoch"]) for record in caplog.records]
    assert told == [("INFO", "attested an epoch", 1)] * 2 + [("WARNING", "disputed an epoch", 2)] * 2
    assert {record.__dict__["party"] for record in caplog.records} == {circle.party("a").key.hex()}


def test_every_mutation_of_every_item_is_found_and_named(tmp_path: Path) -> None:
    """FAULTS B10: each item dropped, doubled under another id, each of its fields changed, a bit of each of its bytes."""
    with echostore.open(tmp_path / "home", background=False) as peer:
        party = peer.create_party("Trip")
        for number in range(46):
            party.create("property-set", type="task", n=number).name = f"item {number}"
        reader = party.snapshot().reader()
        states = dict(reader.items())
        blobs: dict[Cid, bytes] = {}
        true = {item: encode_item(state, blobs.__setitem__) for item, state in states.items()}
        assert build(true.items(), blobs.__setitem__).cid == reader.top
        tried = named = 0
        for item, state in states.items():
            for other in mutations(item, state, true[item]):
                lie = {each: kept for each, kept in true.items() if each != item} | other
                top = build(lie.items(), blobs.__setitem__)
                assert top.cid != reader.top
                tried += 1
                try:
                    diff = reader.diff(top.cid, blobs.__getitem__)
                except Corrupt:
                    continue  # no page may hold that: a dispute says so
                named += 1
                assert {*diff.changed, *diff.removed, *diff.added} == {item, *other}
        assert tried >= 5000
        assert named >= 2500


def test_every_mutation_of_every_placement_is_found_and_named(tmp_path: Path) -> None:
    """FAULTS B10 for the index: each placement dropped, put elsewhere, of another item; a bit of each of its bytes."""
    with echostore.open(tmp_path / "home", background=False) as peer:
        party = peer.create_party("Trip")
        board = party.create("property-set", type="board")
        for number in range(40):
            party.create("property-set", type="task", parent=board, n=number)
        snapshot = party.snapshot()
        assert snapshot.root.placements is not None
        true = set(PlacementReader(snapshot.root.placements, snapshot.blob).all())
        blobs: dict[Cid, bytes] = {}

        def get(cid: Cid) -> bytes:
            return blobs[cid] if cid in blobs else snapshot.blob(cid)

        tried = 0
        for each in sorted(true):
            flipped = [each[:at] + bytes([each[at] ^ 1 << at % 8]) + each[at + 1 :] for at in range(len(each))]
            for other in (set(), *({Placement(lie)} for lie in flipped)):
                top = build_placements((true - {each}) | other, blobs.__setitem__)
                assert top.cid != snapshot.root.placements
                lie = replace(snapshot.root, placements=top.cid)
                assert "index of what hangs where is false" in index_problem(lie, get)
                found = first_misplaced(snapshot.root.placements, top.cid, get)
                assert any(item_text(placed(named)[1]) in found for named in {each, *other})
                tried += 1
        assert tried >= 1000
        assert index_problem(snapshot.root, get) == ""


def mutations(item: ItemId, state: snapshot_pb2.ItemState, encoded: EncodedItem) -> Iterator[dict[ItemId, EncodedItem]]:
    """What a liar may put in the place of one item."""
    yield {}
    made_up = ItemId(item[:8] + (1 << 40).to_bytes(8, "big"))
    doubled = snapshot_pb2.ItemState()
    doubled.CopyFrom(state)
    doubled.item = made_up
    yield {made_up: EncodedItem(doubled.SerializeToString(deterministic=True))}
    for field, value in state.ListFields():
        if field.name != "item" and isinstance(value, (str, bytes, int)):
            other = snapshot_pb2.ItemState()
            other.CopyFrom(state)
            setattr(other, field.name, value[:-1] + bytes([value[-1] ^ 1]) if isinstance(value, bytes) else value * 2)
            yield {item: EncodedItem(other.SerializeToString(deterministic=True))}
    raw = bytes(encoded)
    for at in range(18, len(raw)):  # behind the id, which its place in the tree repeats
        yield {item: EncodedItem(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])}


@pytest.mark.parametrize("field", ["cut", "record", "models", "timeframe", "causes", "control"])
def test_a_genesis_that_lies_beside_a_true_snapshot_is_disputed(
    circle: Circle, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    circle.party("b").create("property-set", type="task")
    circle.party("a").create("property-set", type="task")
    circle.meet()
    issue = type(circle.party("b").members).issue_claim
    feeds = {}
    for name in "ab":
        own = circle.party(name).runtime.data
        assert own is not None
        feeds[name] = own.cursor.key

    def lie(members: object, said: object) -> None:
        from dataclasses import replace

        if isinstance(said, EpochGenesis):
            other: tuple[object, ...] | bytes = {
                "cut": said.record,
                "record": said.cut,
                "models": (*said.models, ("property-set", 1))[1:] if len(said.models) > 1 else (),
                "timeframe": tuple(each for each in said.timeframe if each.feed != feeds["b"]),
                "control": said.record,
                "causes": tuple(each for each in said.timeframe if each.feed != feeds["a"]),
            }[field]
            assert len(other) < len(said.timeframe) or field not in ("timeframe", "causes")
            said = replace(said, **{"timeframe" if field == "causes" else field: other})
        issue(members, said)  # type: ignore[arg-type]  # the very members

    monkeypatch.setattr(type(circle.party("b").members), "issue_claim", lie)
    circle.epochs("b").create()
    monkeypatch.undo()
    circle.meet()
    (judged,) = circle.epochs("a").review()
    assert judged.verdict is Verdict.DISPUTED, judged
    wanted = {"timeframe": "another state", "causes": "and not its cause", "control": "the control state is another"}
    expected = wanted.get(field, field)
    assert expected in judged.detail
    circle.meet()
    (declared,) = circle.party("b").runtime.processor.membership.machine.epoch_tally().declared
    assert (
        circle.party("b")
        .runtime.processor.membership.machine.epoch_tally()
        .disputed(declared.hash, circle.peers["a"].identity)
    ), "the others hear of it"
    assert not circle.epochs("a").all()[0].final


# abstaining, refusing


class Counter:
    name, version = "counter", 1

    def __init__(self) -> None:
        self.total = 0

    def apply(self, operation: int, stamp: object) -> None:
        self.total += operation

    def value(self) -> int:
        return self.total


def test_who_lacks_a_model_abstains_and_says_so_and_the_epoch_is_applied_with_opaque_items(circle: Circle) -> None:
    for name in "ab":
        circle.peers[name].models.register(Counter)
    counter = circle.party("a").create("counter")
    counter.apply(3)
    task = circle.party("a").create("property-set", type="task", n=1)
    circle.meet()
    circle.epochs("a").create()
    circle.meet()
    found = circle.review()
    assert verdicts(found) == {"a": [], "b": [Verdict.ATTESTED], "c": [Verdict.ABSTAINS]}
    assert found["c"][0].detail == "unknown here: counter@1"
    view = circle.epochs("c").all()[0]
    assert (view.final, view.attested_by, view.here) == (True, 2, "abstains: unknown here: counter@1")
    party = circle.party("c")
    give_blobs(circle.party("a"), party)
    epoch = circle.epochs("c").get(1)
    assert party.runtime.blobs is not None
    base = BaseEpoch(BaseName.of(epoch.genesis, epoch.hash), party.runtime.blobs.get, party.runtime.processor.factory)
    records = {record.item: record for record in base.records()}
    assert records[task.id].model.value() == {"n": 1}
    assert records[counter.id].model.opaque
    circle.party("a").get(task.id)["n"] = 2
    circle.meet()
    assert party.get(task.id)["n"] == 2
    assert circle.party("b").get(counter.id).value() == 3


def test_an_epoch_that_discards_the_future_is_refused_until_it_is_past(circle: Circle) -> None:
    circle.party("a").create("property-set", type="task")
    circle.meet()
    circle.now_ms = NOW_MS + 5_000_000
    circle.epochs("a").create(discard_before_ms=NOW_MS + 4_000_000)
    circle.meet()
    circle.now_ms = NOW_MS + 4_000_000 - 600_001
    (judged,) = circle.epochs("b").review()
    assert judged.verdict is Verdict.REFUSED
    circle.now_ms += 1
    (judged,) = circle.epochs("b").review()
    assert judged.verdict is Verdict.ATTESTED


def test_verify_says_what_this_peer_finds_and_writes_nothing(circle: Circle) -> None:
    circle.party("a").create("property-set", type="task")
    circle.meet()
    circle.epochs("a").create()
    circle.meet()
    before = circle.party("b").runtime.processor.control_timeframe
    assert circle.epochs("b").verify(1).verdict is Verdict.ATTESTED
    assert circle.party("b").runtime.processor.control_timeframe == before
    assert circle.epochs("a").verify(1).verdict is Verdict.ATTESTED, "the declarer finds its own again"


# what an attested epoch keeps


def test_a_removal_that_arrives_after_an_attested_epoch_leaves_its_blocks_in_every_state(circle: Circle) -> None:
    task = circle.party("a").create("property-set", type="task", n=0)
    circle.meet()
    circle.apart("a")
    circle.party("b").get(task.id)["n"] = "by b"
    circle.meet()
    circle.epochs("b").create()
    circle.meet()
    circle.review()
    assert circle.epochs("c").all()[0].final
    circle.party("b").get(task.id)["late"] = True  # after the epoch, and before b heard of anything
    circle.party("a").members.remove(circle.peers["b"].identity)
    circle.together()
    for name in "ac":
        assert circle.party(name).get(task.id)["n"] == "by b", "the epoch contained it before the removal was known"
        assert "late" not in circle.party(name).get(task.id)
    assert len({circle.party(name).snapshot().cid for name in "ac"}) == 1


# who declares, and when


def test_the_elected_device_declares_after_its_grace_time_and_the_next_one_if_it_is_silent(circle: Circle) -> None:
    circle.party("a").members.set_policy({"epoch.declarers": b"elect", "epoch.messages": b"3", "epoch.grace_s": b"10"})
    circle.meet()
    for number in range(3):
        circle.party("a").create("property-set", type="task", n=number)
    circle.meet()
    assert circle.tick() == [], "it is due, and the first has its grace time"
    circle.now_ms += 9_999
    assert circle.tick() == []
    circle.now_ms += 1
    ((first, number),) = circle.tick()
    assert number == 1
    circle.tick()
    assert circle.epochs(first).all()[0].final
    assert circle.tick() == [], "nothing is new"
    for number in range(3):
        circle.party("a").create("property-set", type="task", n=number)
    circle.meet()
    circle.tick()
    from echostore.kernel.party.epoch_policy import election

    devices = {peer.device: name for name, peer in circle.peers.items()}
    order = [devices[device] for device in election(circle.key, 2, list(devices))]
    circle.apart(order[0])
    silent = circle.peers.pop(order[0])
    circle.now_ms += 10_000
    assert circle.tick() == [], "the first is silent"
    circle.now_ms += 10_000
    assert circle.tick() == [(order[1], 2)]
    circle.peers[order[0]] = silent
    circle.together()
    circle.tick()
    assert len({tuple(chain) for chain in circle.chains()}) == 1


def test_a_declarer_that_vanishes_midway_is_replaced(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has stored its blobs and dies before the genesis is written."""
    circle.party("a").members.set_policy({"epoch.declarers": b"elect", "epoch.messages": b"1", "epoch.grace_s": b"10"})
    circle.party("a").create("property-set", type="task")
    circle.meet()
    circle.tick()

    def die(members: object, said: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("echostore.peer.members.Members.issue_claim", die)
    circle.now_ms += 10_000
    with pytest.raises(KeyboardInterrupt):
        circle.tick()
    monkeypatch.undo()
    assert circle.chains() == [[], [], []]
    circle.now_ms += 20_000
    assert len(circle.tick()) == 1
    circle.tick()
    assert [len(chain) for chain in circle.chains()] == [1, 1, 1]
    assert circle.epochs("a").all()[0].final


@pytest.mark.parametrize("trigger", ["messages", "bytes", "age"])
def test_each_trigger_makes_an_epoch_due(tmp_path: Path, trigger: str) -> None:
    made = Circle(tmp_path, "a")
    value = {"messages": b"5", "bytes": b"2000", "age": b"60"}[trigger]
    key = "epoch.age_s" if trigger == "age" else f"epoch.{trigger}"
    assert made.tick() == []
    made.party("a").members.set_policy({key: value})
    made.party("a").create("property-set", text="x" * 300)
    made.tick()
    made.now_ms += 59_000
    assert made.tick() == []
    assert made.epochs("a").all() == [], "not due yet"
    for _ in range(5):
        made.party("a").create("property-set", text="x" * 300)
    made.now_ms += 1_000
    made.tick()
    made.tick()
    assert [view.number for view in made.epochs("a").all()] == [1]
    made.close()


def test_news_grow_old_also_while_nothing_runs(tmp_path: Path) -> None:
    """Nine hours a day are enough."""
    now = [NOW_MS]
    hour = 3_600_000

    def day() -> list[int]:
        with echostore.open(tmp_path / "a", name="a", background=False, now_ms=lambda: now[0]) as peer:
            party = peer.party("@Trip") if peer.parties() else peer.create_party("Trip")
            party.members.set_policy({"epoch.age_s": b"86400"})
            party.create("property-set", type="task")
            party.flush()
            declared = []
            for _ in range(9):
                now[0] += hour
                declared += [kept.declared.number for kept in peer.epoch_keeper.tick() if kept.declared]
        now[0] += 15 * hour
        return declared

    assert [day() for _ in range(4)] == [[], [1], [], [2]]


def test_what_was_written_long_ago_and_comes_now_is_no_older_than_the_last_epoch(tmp_path: Path) -> None:
    made = Circle(tmp_path, "ab")
    made.party("a").members.set_policy({"epoch.age_s": b"3600"})
    made.meet()
    made.apart("b")
    made.party("b").create("property-set", type="old")
    made.now_ms += 3_600_000
    made.party("a").create("property-set", type="task")
    made.party("a").flush()
    made.now_ms += 3_600_000
    made.tick()
    made.now_ms += 60_000
    made.tick()
    assert len(made.epochs("a").all()) == 1
    made.together()
    made.now_ms += 600_000
    for _ in range(3):
        made.tick()
        made.now_ms += 60_000
    assert len(made.epochs("a").all()) == 1, "an hour has not passed since the last one"
    made.now_ms += 3_600_000
    for _ in range(3):
        made.tick()
        made.now_ms += 60_000
    assert len(made.epochs("a").all()) == 2
    made.close()


def test_devices_that_were_retired_for_silence_cost_no_grace_time(tmp_path: Path) -> None:
    made = Circle(tmp_path, "abcdef")
    party = made.party("a")
    party.members.set_policy({"epoch.declarers": b"elect", "epoch.messages": b"1", "epoch.grace_s": b"10"})
    made.meet()
    assert len(eligible_devices(party, made.epochs("a").policy)) == 6
    for name in "bcdef":
        data = made.party(name).runtime.data
        assert data is not None
        made.apart(name)
        party.members.retire_feed(data.cursor.key)
    assert eligible_devices(party, made.epochs("a").policy) == [made.peers["a"].device]
    party.create("property-set", type="task")
    party.flush()
    keeper = made.peers["a"].epoch_keeper
    assert [kept.declared for kept in keeper.tick()] == [None]
    made.now_ms += 10_000
    (kept,) = keeper.tick()
    assert kept.declared is not None
    made.together()
    made.peers["b"].epoch_keeper.tick()
    made.meet()
    assert len(eligible_devices(party, made.epochs("a").policy)) == 2, "it is back with a new feed"
    made.close()


def test_by_hand_alone_without_a_trigger(circle: Circle) -> None:
    circle.party("a").create("property-set", type="task")
    circle.meet()
    circle.now_ms += 10**9
    assert circle.tick() == []
    assert circle.chains() == [[], [], []]


def test_only_whom_the_policy_names_declares(tmp_path: Path) -> None:
    made = Circle(tmp_path, "abc", role="editor")
    made.party("a").members.set_policy(
        {"epoch.bots": bytes(made.peers["c"].device), "epoch.declarers": b"bot", "epoch.messages": b"1"}
    )
    made.party("a").create("property-set", type="task")
    made.meet()
    for name in "abc":
        named = eligible_devices(made.party(name), made.epochs(name).policy)
        assert named == [made.peers["c"].device], "nobody else has a turn, whatever the lot says"
    for _ in range(4):
        assert [kept.declared for name in "ab" for kept in made.peers[name].epoch_keeper.tick()] == [None, None]
        made.now_ms += 10**9
    assert made.tick() == [("c", 1)]
    assert made.epochs("a").all()[0].declarer == "c"
    made.close()


def test_nobody_declares_on_top_of_an_epoch_that_it_has_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Circle(tmp_path, "abc")
    made.party("a").members.set_policy({"epoch.messages": b"1", "epoch.grace_s": b"1"})
    made.party("a").create("property-set", type="task")
    made.meet()
    made.epochs("a").create()
    made.party("b").create("property-set", type="task")
    made.meet()
    keeper = made.peers["b"].epoch_keeper
    with monkeypatch.context() as busy:
        busy.setattr(Epochs, "review", lambda self: [])  # recomputing takes its time
        for _ in range(4):
            assert [kept.declared for kept in keeper.tick()] == [None]
            made.now_ms += 10**9
    assert not made.epochs("b").judged(made.epochs("b").get(1))
    (kept,) = keeper.tick()
    assert [judged.verdict for judged in kept.judged] == [Verdict.ATTESTED]
    assert kept.declared is not None
    assert kept.declared.number == 2
    made.close()


def test_a_partition_with_epochs_on_both_sides_ends_with_one_chain_and_nothing_lost(tmp_path: Path) -> None:
    made = Circle(tmp_path, "abcde")
    task = made.party("a").create("property-set", type="task")
    made.meet()
    for name in "de":
        made.apart(name)
    made.links["d", "e"].heal()
    for round_ in range(2):
        made.party("a").get(task.id)[f"left {round_}"] = round_
        made.party("e").get(task.id)[f"right {round_}"] = round_
        made.meet()
        made.epochs("a").create()
        made.epochs("e").create()
        made.meet()
        made.review()
    assert [view.final for view in made.epochs("a").all()] == [True, True], "three of five are a quorum"
    assert [view.final for view in made.epochs("e").all()] == [False, False]
    left = [view.hash for view in made.epochs("a").all()]
    made.together()
    made.review()
    assert made.chains() == [left] * 5
    assert len(made.cids()) == 1
    values = made.party("d").get(task.id).value()
    assert {key for key in values if "left" in key or "right" in key} == {"left 0", "left 1", "right 0", "right 1"}
    made.epochs("e").create()
    made.meet()
    made.review()
    assert [epoch.final for epoch in made.epochs("a").all()] == [True] * 3
    made.close()


def test_the_keeper_of_a_running_peer_attests_by_itself(tmp_path: Path) -> None:
    from network_peers import until

    with (
        echostore.open(tmp_path / "a", name="a") as ann,
        echostore.open(tmp_path / "b", name="b") as bob,
    ):
        party = ann.create_party("Trip")
        address = ann.listen("127.0.0.1:0")
        invitation = party.invite(role="admin")
        theirs = bob.join(invitation.ticket, invitation.passcode)
        party.create("property-set", type="task", n=1)
        party.flush()
        until(lambda: len(theirs.items()) == 1)
        Epochs(party).create()
        until(lambda: bool(Epochs(party).all()) and Epochs(party).all()[0].final)
        assert address
        assert Epochs(theirs).all()[0].here in ("attested", "not judged")


# damage here


def damage(party: Party, cid: Cid) -> None:
    """One blob of a peer is not what it was."""
    blobs = party.runtime.blobs
    assert blobs is not None
    with blobs._db.transaction():
        blobs._db.execute("UPDATE blobs SET data = ? WHERE cid = ?", (b"garbage", cid))


def test_damage_here_is_no_reason_to_call_an_epoch_wrong(tmp_path: Path) -> None:
    """Of epochs whose history is gone all that is looked at is their snapshot."""
    circle = Circle(tmp_path, "a")
    party = circle.party("a")
    for number in range(4):
        circle.now_ms += 1
        party.create("property-set", n=number)
        circle.epochs("a").create()
    circle.epochs("a").gc()
    epochs = circle.epochs("a")
    assert epochs.verify(4).verdict is Verdict.ATTESTED
    base = epochs.get(4)
    root = read_state_root(party.runtime.blobs.get(base.genesis.snapshot))
    missing = party.runtime.blobs.get(root.index_root)
    party.runtime.blobs.delete([root.index_root])
    assert epochs.agreement._without_history(base, _abstains(base)).verdict is Verdict.ABSTAINS, "not all of it is here"
    party.runtime.blobs.put_many({root.index_root: missing})
    damage(party, root.index_root)
    with pytest.raises(DamagedHere, match="damaged"):
        epochs.agreement._without_history(base, _abstains(base))
    circle.close()


def _abstains(epoch: Epoch) -> Judged:
    return Judged(epoch.number, epoch.hash, Verdict.ABSTAINS)


def test_no_dispute_is_written_because_of_damage_here(circle: Circle) -> None:
    a, b = circle.party("a"), circle.party("b")
    items = [a.create("property-set", n=number) for number in range(3)]
    circle.meet()
    circle.epochs("a").create()
    circle.meet()
    circle.review()
    first = circle.epochs("b").get(1)
    items[0]["n"] = 10
    circle.epochs("a").create()
    items[0]["n"] = 11
    circle.meet()
    root = read_state_root(b.runtime.blobs.get(first.genesis.snapshot))
    for cid in (root.index_root, root.membership_root, first.genesis.snapshot):
        damage(b, cid)
    with suppress(Corrupt):
        circle.epochs("b").review()
    circle.meet()
    assert not circle.epochs("a").get(2).disputed_by
    with suppress(Corrupt):
        assert circle.epochs("b").verify(2).verdict is not Verdict.DISPUTED


def test_stored_items_that_differ_are_held_against_the_blocks_first(
    circle: Circle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that stands exactly at an epoch compares what it stored, which may be wrong."""
    item = circle.party("a").create("property-set", n=1)
    circle.epochs("a").create()
    circle.meet()
    b = circle.party("b")
    sound = EpochStates._live

    def unsound(states: EpochStates, runtime: PartyRuntime, genesis: EpochGenesis) -> Folded | None:
        found = sound(states, runtime, genesis)
        return found and replace(found, cid=Cid(b"another"), root=replace(found.root, item_count=77))

    monkeypatch.setattr(EpochStates, "_live", unsound)
    assert [judged.verdict for judged in circle.epochs("b").review()] == [Verdict.ATTESTED]
    circle.meet()
    assert not circle.epochs("a").get(1).disputed_by
    assert b.get(item.id)["n"] == 1


# rivals


def test_rivals_are_shown_with_who_stands_for_them(tmp_path: Path) -> None:
    circle = Circle(tmp_path, "ab")
    circle.party("a").create("property-set", n=1)
    circle.apart("b")
    circle.party("b").create("property-set", n=2)
    for name in "ab":
        circle.now_ms += 1
        circle.epochs(name).create()
    circle.together()
    for name in "ab":
        (epoch,) = circle.epochs(name).chain()
        (rival,) = circle.epochs(name).rivals(epoch)
        one, other = ("a", "b") if epoch.declarer == circle.peers["a"].identity else ("b", "a")
        assert (rival["declarer"], rival["stands_for_it"], rival["disputed_by"]) == (other, [other], [])
        assert rival["own"] == (name == other)
        assert rival["cid"] != cid_text(epoch.genesis.snapshot)
        (view,) = circle.epochs(name).all()
        assert view.here == ("declared" if name == one else "declared a rival")
    circle.close()
    for name in "ab":
        cli = Cli(tmp_path / name, tmp_path / "state")
        shown = cli("epoch", "show", "1", "--json").ok().json()
        assert (shown["rivals"], len(shown["rival_epochs"])) == (1, 1)
        assert shown["rival_epochs"][0]["cid"] in cli("epoch", "show", "1").ok().out


def test_a_state_over_predecessors_that_are_in_memory_alone_comes_with_all_that_it_shares(circle: Circle) -> None:
    """Who keeps it has all of it: the epochs below may never be stored here, when others took their numbers."""
    founder = circle.party("a")
    items = [founder.create("property-set", type="task", n=number, text="word " * 40) for number in range(300)]
    circle.meet()
    for number in (1, 2, 3):
        items[0]["n"] = -number
        Epochs(founder).create()
    circle.meet()
    last = circle.epochs("b").get(3).genesis
    party = circle.party("b")
    blobs = party.runtime.blobs
    assert blobs is not None
    assert blobs.missing([circle.epochs("b").get(number).genesis.snapshot for number in (1, 2, 3)]), (
        "it judged nothing yet"
    )
    folded = EpochStates(party, circle.peers["b"].identity).at(last)
    assert isinstance(folded, Folded)
    assert folded.cid == last.snapshot
    names = list(snapshot_blobs(folded.root, lambda cid: folded.blobs[cid] if cid in folded.blobs else blobs.get(cid)))
    assert len(names) > 10
    blobs.put_many(folded.blobs)
    assert blobs.missing([folded.cid, *names]) == []
