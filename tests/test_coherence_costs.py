"""What each tick costs a root: it grows with what changed, not with what is held or was held once."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.coherence.directory import Directory
from echostore.kernel.coherence.holdings import Holdings, Version
from echostore.kernel.coherence.messages import Acquire, Arc, IndexValue, Spec, Subscribed, SystemId
from echostore.wire.index_spec import IndexCodec

SPECS = [Spec(b"tasks"), Spec(b"notes")]

ticks = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(SPECS), st.sampled_from([b"a", b"b", b"c"])),
        st.one_of(st.none(), st.integers(0, 6)),
        st.booleans(),
    ),
    max_size=30,
)


@given(ticks, st.booleans())
def test_a_tick_leaves_what_ending_and_learning_would(
    ticks: list[tuple[dict[Spec, bytes], int | None, bool]], windowed: bool
) -> None:
    quick, plain = Holdings(3), Holdings(3)
    for changes, pinned, evaluated in ticks:
        for holdings in (quick, plain):
            tick = holdings.cur + 1
            if windowed:
                holdings.floor = max(0, tick - 4 if pinned is None else min(tick - 4, tick - pinned))
            if evaluated and SPECS[0] not in holdings:  # a question is answered between two ticks
                fact = Version(max(0, holdings.cur - 1), holdings.cur, IndexValue(b"a"), live=True)
                holdings.learn(SPECS[0], fact)
        for spec in changes:
            plain.end(spec)
        plain.cur += 1
        for spec, value in changes.items():
            plain.learn(spec, Version(plain.cur, plain.cur, IndexValue(value), live=True))
        for spec, value in changes.items():
            quick.succeed(spec, quick.cur + 1, IndexValue(value))
        quick.cur += 1
        for spec in SPECS:
            assert quick.versions(spec) == plain.versions(spec)
            assert quick.is_live(spec) == plain.is_live(spec)


def test_old_versions_are_forgotten_as_the_window_moves() -> None:
    holdings = Holdings(0)
    for tick in range(1, 50):
        holdings.floor = max(0, tick - 5)
        holdings.succeed(SPECS[0], tick, IndexValue(b"%d" % tick))
        holdings.cur = tick
    assert [version.min for version in holdings.versions(SPECS[0])] == [49, 48, 47, 46, 45, 44]
    assert holdings.at(SPECS[0], 44) is not None
    assert holdings.at(SPECS[0], 43) is None


def test_a_link_that_was_told_of_many_indexes_at_once_is_quick_again() -> None:
    """A set that held them all would be gone through in full with each tick that comes after."""
    clock, codec, holdings = Arc(SystemId(b"r" * 16)), IndexCodec(), Holdings(1)
    link = Directory(7, 1)
    specs = [Spec(b"index %d" % number) for number in range(5_000)]
    for spec in specs:
        version = Version(1, 1, IndexValue(b"v"), live=True)
        holdings.learn(spec, version)
        link.grant(Acquire(spec), version, codec)
    empty = sys.getsizeof(Directory(7, 1).marks)
    assert sys.getsizeof(link.marks) > 100 * empty
    holdings.cur = 2
    update = link.update(clock, holdings, codec)
    assert update is not None
    assert len(update.items) == len(specs)
    assert all(isinstance(item, Subscribed) for item in update.items)
    assert not link.marks
    assert sys.getsizeof(link.marks) <= empty
