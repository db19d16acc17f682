"""The control stage beside real peers: admission digests, membership bytes, members, timeframes, refusals and rejects."""

from pathlib import Path
from typing import Any

import pytest

from echostore.kernel.feed import ChainStep, ForkProof, Head
from echostore.kernel.ids import DeviceKey, FeedKey, IdentityKey, Link, PartyKey, feed_id
from echostore.kernel.party.credentials import ChildParty, FeedAdmit, FeedKind, ForkEvidence
from echostore.pipeline.lake import Lake, LakeVersion
from echostore.pipeline.lake.publish import publish
from echostore.pipeline.stages.control import Limit, fold_control
from echostore.pipeline.stages.order import order_blocks
from echostore.wire.credentials import with_feed_proof
from echostore.wire.links import payload_hash
from echostore.wire.membership import membership_state
from peer_builder import Circle, Liar
from spark.signed_story import SignedStory, head_signature, message
from spark.test_order_stage import Ordered, lake_of


def rows(frame: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = frame.toArrow().to_pylist()
    return found


def published(circle: Circle, name: str, lake: Path) -> LakeVersion:
    circle.party(name).flush()
    publish(circle.folder / name, lake)
    return Lake.open(lake).at()


def compare(ordered: Ordered, party: Any) -> None:
    """What Spark says of a party, and what its peer says."""
    processor = party.runtime.processor
    machine = processor.membership.machine
    told = {row["party"]: row for row in rows(ordered.control.parties)}
    assert told[party.key]["admission"] == processor.admission.digest
    assert told[party.key]["membership"] == membership_state(machine)
    members = {row["identity"]: row for row in rows(ordered.control.members) if row["party"] == party.key}
    assert {key: (row["name"], row["role"], row["status"]) for key, row in members.items()} == {
        member.identity: (member.name, member.role.label if member.role else None, str(member.status))
        for member in machine.members
    }
    timeframe = {key[1]: (row["seq"], row["link"]) for key, row in ordered.timeframe.items() if key[0] == party.key}
    assert timeframe == {feed: tuple(at) for feed, at in processor.timeframe.entries.items()}
    for feed, cursor in processor.orderer.cursors.items():
        if cursor.held and (processor.parent is None or cursor.kind == "data"):
            cut = ordered.cuts[party.key, feed]
            assert (cut["length"], cut["link"], cut["depth"]) == (cursor.length, cursor.link, cursor.depth)
            assert (cut["reason"], cut["held"]) == (cursor.ended and str(cursor.ended), cursor.held)
    ended = [
        (party.key, reject.feed, reject.seq, reject.position, str(reject.reason), str(reject.detail))
        for reject in party.rejected()
        if reject.reason in ("invalid", "after-invalid")
    ]
    assert [row for row in ordered.rejects if row[0] == party.key] == sorted(ended)
    refusals = [
        (row["feed"], row["seq"], row["position"], row["reason"], row["detail"])
        for row in rows(ordered.control.refusals)
        if row["party"] == party.key
    ]
    if processor.parent is None:
        assert sorted(refusals) == sorted(
            (each.feed, each.seq, each.position, str(each.reason), each.detail) for each in machine.rejected
        )


def test_a_party_with_a_life_reads_as_its_peers_read_it(spark: Any, tmp_path: Path) -> None:
    """Members, roles, a removal, a liar, a child party, and moments of the past."""
    with Circle(tmp_path, "ann", "bob", "cat", roles={"cat": "reader"}) as circle:
        ann, bob = circle.party("ann"), circle.party("bob")
        board = ann.create("property-set", type="board", title="Summer")
        circle.meet_all()
        anchor = ann.flush().anchor
        past = ann.as_of(anchor)
        bob.get(board.id)["n"] = 1
        circle.meet_all()
        liar = Liar.of(circle, "bob")
        liar.send(liar.message(depth=99), liar.message())
        cat = next(member for member in ann.members if member.name == "cat")
        ann.members.remove(cat.identity)
        child = circle.peers["ann"].create_child(ann, "Chess")
        child.create("property-set", type="game")
        child.flush()
        version = published(circle, "ann", tmp_path / "lake")
        ordered = Ordered(spark, version)
        compare(ordered, ann)
        assert any(row["role"] is None and not row["control"] for row in rows(ordered.control.admission))
        compare(ordered, child)
        ordered.close()
        data, control = (
            {feed: at.seq + 1 for feed, at in frame.entries.items()}
            for frame in (past.runtime.processor.timeframe, past.runtime.processor.control_timeframe)
        )
        then = Ordered(spark, version, parties=[ann.key], limits={ann.key: Limit(data, control)})
        told = {row["party"]: row for row in rows(then.control.parties)}
        assert told[ann.key]["admission"] == past.runtime.processor.admission.digest
        found = {key[1]: (row["seq"], row["link"]) for key, row in then.timeframe.items()}
        assert found == {feed: tuple(at) for feed, at in past.runtime.processor.timeframe.entries.items()}
        then.close()


def forked_control(proof_for: str) -> tuple[SignedStory, Any]:
    """A second control feed forks at 2; each branch admits another stranger's feed; the founder may prove the fork."""
    story = SignedStory(f"control fork {proof_for}", 4, control=3)
    forker = story.minds[1]
    story.process(forker, story.founder, 1)
    for _ in range(2):
        story.write(forker)
    other = story.fork(forker)
    for mind in (forker, other):
        stranger = story._key(f"stranger {mind.branch}")
        device = DeviceKey(story._device_key.public)
        admit = FeedAdmit(FeedKey(stranger.public), FeedKind.DATA, IdentityKey(device), device)
        credential = story.signed(with_feed_proof(admit, story.party, stranger))
        story.register(mind, message((), mind.depth + 1, credentials=[credential]).SerializeToString())
        story.write(mind)
    data = story.minds[3]
    story.process(data, other, 4)
    story.write(data)
    if proof_for:
        story.issue(ForkEvidence(fork_proof(story, forker, other, 2)))
    return story, forker


def fork_proof(story: SignedStory, left: Any, right: Any, seq: int) -> ForkProof:
    def side(mind: Any) -> tuple[tuple[ChainStep, ...], Head]:
        steps = tuple(ChainStep(payload_hash(payload)) for payload in mind.payloads[seq:])
        length = len(mind.blocks)
        return steps, Head(length, Link(mind.blocks[-1].link), head_signature(story.party, mind, length))

    (left_steps, left_head), (right_steps, right_head) = side(left), side(right)
    before = Link(left.blocks[seq - 1].link)
    return ForkProof(story.party, left.key, seq, before, left_steps, left_head, right_steps, right_head)


def test_forks_with_and_without_a_proof(spark: Any, tmp_path: Path) -> None:
    """Without a proof a feed is read up to the fork; with one, to its end, and the admission says what counts."""
    control, forker = forked_control("")
    proven, proven_forker = forked_control("yes")
    data = SignedStory("data fork", 4, control=1)
    bob, cat = data.minds[1], data.minds[2]
    for _ in range(3):
        data.write(bob)
    other = data.fork(bob)
    for _ in range(2):
        data.write(bob)
        data.write(other)
    data.write(other)
    data.process(cat, other, 5)
    data.write(cat)
    data.issue(ForkEvidence(fork_proof(data, bob, other, 3)))
    stories = [control, proven, data]
    ordered = Ordered(spark, lake_of(tmp_path / "lake", [(each, each.rows(each.lengths())) for each in stories]))
    cut = ordered.cuts[control.party, forker.id]
    assert (cut["state"], cut["length"], cut["link"]) == ("forked", 2, forker.blocks[1].link)
    cut = ordered.cuts[proven.party, proven_forker.id]
    assert (cut["state"], cut["length"]) == ("open", 4)
    strangers = {story._key(f"stranger {branch}").public for story in (control, proven) for branch in (0, 1)}
    standing = {row["feed"]: (row["role"], row["end_reason"]) for row in rows(ordered.control.admission)}
    assert {standing.get(feed, (None, "unadmitted")) for feed in strangers} == {(None, "unadmitted")}, "beyond a fork"
    for story in (control, proven):  # the data feed depends on the second branch, which is processed all the same
        cut = ordered.cuts[story.party, story.minds[3].id]
        assert (cut["state"], cut["length"]) == ("open", 1)
    cut = ordered.cuts[data.party, bob.id]
    assert (cut["state"], cut["length"], cut["held"]) == ("open", 6, 6), "the longer branch is processed"
    assert ordered.timeframe[data.party, bob.id]["seq"] == 2
    assert ordered.timeframe[data.party, bob.id]["link"] == bob.blocks[2].link
    assert ordered.cuts[data.party, cat.id]["length"] == 1
    ordered.close()


def test_unadmitted_feeds_and_damage_are_told_and_stop_nobody(spark: Any, tmp_path: Path) -> None:
    """Bad links, bad heads, gaps and strangers in one lake: each is a row, and the others are processed."""
    story = SignedStory("damage", 6, control=1, unadmitted=1)
    for mind in story.minds[1:]:
        for _ in range(6):
            story.write(mind)
    found = story.rows(story.lengths())
    linked, signed, gapped, whole = (mind.key for mind in story.minds[1:5])
    kept = []
    for row in found:
        if row["feed"] == linked and row["seq"] == 3:
            row["payload"] = b"altered"
        if row["feed"] == signed and row["signature"] is not None:
            row["signature"] = bytes(64)
        if row["feed"] == gapped and row["seq"] == 2:
            continue
        if row["feed"] == gapped and row["seq"] == 3:
            row["previous"], row["previous_depth"] = story.minds[3].blocks[2].link, 3
        if row["feed"] in (linked, gapped) and row["seq"] == 1:
            mind = next(mind for mind in story.minds if mind.key == row["feed"])
            row["signature"] = head_signature(story.party, mind, 2)
        kept.append(row)
    ordered = Ordered(spark, lake_of(tmp_path / "lake", [(story, kept)]))
    told = {(row["feed"], row["start"], row["end"]): row["reason"] for row in ordered.unheld}
    assert told == {
        (linked, 2, 6): "bad-link",
        (signed, 0, 6): "bad-signature",
        (gapped, 3, 6): "gap",
        (story.minds[6].key, 0, 6): "unadmitted",
    }
    lengths = {key: ordered.cuts[story.party, feed_id(key)]["length"] for key in (linked, signed, gapped, whole)}
    assert lengths == {linked: 2, signed: 0, gapped: 2, whole: 6}
    assert {(row[1], row[2], row[4]) for row in ordered.rejects} == {
        (feed_id(feed), start, reason) for (feed, start, _), reason in told.items()
    }
    ordered.close()


def test_one_party_of_many_and_an_empty_lake(spark: Any, tmp_path: Path) -> None:
    stories = [SignedStory(f"many {number}", 3, control=1) for number in range(3)]
    for story in stories:
        story.write(story.minds[1])
    version = lake_of(tmp_path / "lake", [(story, story.rows(story.lengths())) for story in stories])
    ordered = Ordered(spark, version, parties=[stories[1].party])
    assert {party for party, _ in ordered.cuts} == {stories[1].party}
    ordered.close()
    empty = Ordered(spark, Lake.create(tmp_path / "empty").at())
    assert (empty.cuts, empty.timeframe, empty.rejects, empty.unheld) == ({}, {}, [], [])
    empty.close()


def test_a_feed_of_a_child_party_belongs_to_its_parents_members(spark: Any, tmp_path: Path) -> None:
    """Rows of a child party lie under its own key; who may write them, its parent's control feeds say."""
    story = SignedStory("parent", 2, control=1)
    child = PartyKey(story._key("child").public)
    inner = SignedStory("inner", 2, control=1)
    inner.party = child
    writer = inner.minds[1]
    me = DeviceKey(story._device_key.public)
    admit = FeedAdmit(writer.key, FeedKind.DATA, IdentityKey(me), me, child)
    story.issue(ChildParty(child, "Chess"), with_feed_proof(admit, story.party, writer.secret))
    inner.minds[0] = story.founder  # the child's messages depend on the parent's control feed
    inner.places |= story.places
    inner.pasts |= story.pasts
    inner.process(writer, story.founder, 2)
    inner.write(writer)
    found = [row for row in inner.rows(inner.lengths()) if not row["control"]]
    ordered = Ordered(spark, lake_of(tmp_path / "lake", [(story, story.rows(story.lengths())), (inner, found)]))
    told = {row["party"]: row for row in rows(ordered.control.parties)}
    assert (told[child]["root"], told[child]["title"]) == (story.party, "Chess")
    cut = ordered.cuts[child, writer.id]
    assert (cut["state"], cut["length"]) == ("open", 1)
    assert ordered.timeframe[child, writer.id]["link"] == writer.blocks[0].link
    assert (story.party, writer.id) not in ordered.cuts
    ordered.close()
    asked = fold_control(spark, Lake.open(tmp_path / "lake").at(), parties=[child])
    tables = order_blocks(spark, Lake.open(tmp_path / "lake").at(), asked, parties=[child])
    assert [row["party"] for row in rows(tables.cuts)] == [child], "a child alone is found through its parent"
    tables.close()
    asked.close()


@pytest.mark.parametrize("broken", ["link", "signature"])
def test_a_control_feed_counts_up_to_its_damage(spark: Any, tmp_path: Path, broken: str) -> None:
    story = SignedStory("damaged control", 3, control=1)
    story.write(story.founder)
    found = story.rows(story.lengths())
    last = next(row for row in found if row["control"] and row["seq"] == 1)
    last["signature" if broken == "signature" else "payload"] = bytes(64)
    first = next(row for row in found if row["control"] and row["seq"] == 0)
    first["signature"] = head_signature(story.party, story.founder, 1)
    ordered = Ordered(spark, lake_of(tmp_path / "lake", [(story, found)]))
    assert ordered.cuts[story.party, story.founder.id]["length"] == 1
    told = [(row["start"], row["reason"]) for row in rows(ordered.control.unheld)]
    assert told == [(1, "bad-signature" if broken == "signature" else "bad-link")]
    ordered.close()
