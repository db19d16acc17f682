"""Members who lie about causes (FAULTS B6, B7, B8), and what no peer-to-peer store can promise (I13)."""

from pathlib import Path

import pytest

from echostore.kernel.ids import LINK_PREFIX_BYTES
from echostore.kernel.timeframe import Dependency, link_prefix
from peer_builder import Circle, Liar, head_of, reasons


@pytest.mark.parametrize("lie", ["prefix of nothing", "prefix of the block itself", "own future"])
def test_a_circle_of_causes_is_never_applied_and_blocks_nobody(tmp_path: Path, lie: str) -> None:
    with Circle(tmp_path, "ann", "bob", "cat") as circle:
        item = circle.party("ann").create("property-set", n=0)
        circle.meet_all()
        bob, cat = Liar.of(circle, "bob"), Liar.of(circle, "cat")
        depth = max(bob.depth, cat.depth)
        # Each block names the other one, before it can be known. A link would have to contain its own hash.
        false = bytes(LINK_PREFIX_BYTES) if lie == "prefix of nothing" else link_prefix(bob.link)
        named = bob if lie == "own future" else cat
        first = bob.message(
            bob.set(item.id, n="bob"),
            after=[Dependency(named.feed, named.length + 1, false, depth + 2)],
            depth=depth + 3,
        )
        blocks = bob.signed(first)
        after = [Dependency(bob.feed, bob.length - 1, link_prefix(bob.link), depth + 3)]
        second = cat.signed(
            cat.message(cat.set(item.id, n="cat"), after=after), cat.message(cat.set(item.id, n="cat again"), number=1)
        )
        for peer in ("ann", "bob", "cat"):
            bob.deliver(blocks, to=peer)
            cat.deliver(second, to=peer)
        assert {circle.get(name, item)["n"] for name in circle.names} == {0}, "nothing of the circle is applied"
        item["n"] = "ann"
        circle.meet_all()
        assert {circle.get(name, item)["n"] for name in circle.names} == {"ann"}
        circle.agree_after_loss()


@pytest.mark.parametrize("ahead", [1, 1000, 2**40])
def test_an_inflated_depth_wins_nothing_and_ends_its_feed(tmp_path: Path, ahead: int) -> None:
    with Circle(tmp_path, "ann", "bob") as circle:
        item = circle.party("ann").create("property-set", n=0)
        circle.meet_all()
        liar = Liar.of(circle, "bob")
        created = [head_of(circle.party("ann"), circle.party("ann").runtime.data.cursor.id)]
        liar.send(liar.message(liar.set(item.id, n="mine"), after=created, depth=created[0].depth + 1 + ahead))
        assert item["n"] == 0
        item["n"] = "honest"
        assert item["n"] == "honest"
        assert "invalid" in reasons(circle.party("ann"))


def test_a_back_dated_block_is_concurrent_and_beyond_a_cut_it_is_void(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob", "cat") as circle:
        item = circle.party("ann").create("property-set", n=0, seen="nothing")
        circle.meet_all()
        liar = Liar.of(circle, "bob")
        created = [head_of(circle.party("ann"), circle.party("ann").runtime.data.cursor.id)]
        item["seen"] = "by everyone"
        circle.meet_all()
        # It hides that it has seen the later write: to everyone it is a concurrent one, and no more than that.
        hidden = liar.signed(liar.message(liar.set(item.id, n="hidden"), after=created))
        for peer in circle.names:
            liar.deliver(hidden, to=peer)
        assert {circle.get(name, item)["n"] for name in circle.names} == {"hidden"}
        (bob,) = (member for member in circle.party("ann").members.all() if member.name == "bob")
        circle.party("ann").members.remove(bob.identity)
        circle.meet("ann", "cat")
        # Now it pretends not to have heard of its removal.
        late = liar.signed(liar.message(liar.set(item.id, n="late")))
        for peer in ("ann", "cat"):
            liar.deliver(late, to=peer)
        circle.meet("ann", "cat")
        for name in ("ann", "cat"):
            assert circle.get(name, item)["n"] == "hidden"
            assert reasons(circle.party(name)) == ["beyond-cut"]
        assert circle.party("ann").snapshot().cid == circle.party("cat").snapshot().cid


def test_two_members_take_the_last_seat_and_both_are_shown(tmp_path: Path) -> None:
    """Uniqueness is not promised. What is: nobody's claim vanishes, and everybody sees the same two."""
    with Circle(tmp_path, "ann", "bob") as circle:
        seat = circle.party("ann").create("property-set", type="seat", number=12)
        circle.meet_all()
        for name in circle.names:
            assert circle.party(name).query(type="booking").where(seat=12).count() == 0
            circle.party(name).create("property-set", type="booking", seat=12, by=name)
            circle.get(name, seat)["taken_by"] = name
        circle.agree()
        for name in circle.names:
            bookings = circle.party(name).query(type="booking").where(seat=12).all()
            assert {booking["by"] for booking in bookings} == {"ann", "bob"}
            mine = circle.get(name, seat)
            assert {mine["taken_by"], *mine.conflicts("taken_by")} == {"ann", "bob"}


def test_what_the_last_message_of_a_feed_is_named_by(tmp_path: Path) -> None:
    """The liar's tools name real blocks as honest writers do; else the tests above would prove nothing."""
    with Circle(tmp_path, "ann", "bob") as circle:
        item = circle.party("ann").create("property-set", n=0)
        circle.meet_all()
        liar = Liar.of(circle, "bob")
        after = [head_of(circle.party("ann"), circle.party("ann").runtime.data.cursor.id)]
        liar.send(liar.message(liar.set(item.id, n="fair"), after=after))
        assert item["n"] == "fair"
        assert reasons(circle.party("ann")) == []
