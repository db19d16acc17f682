"""Large edits in place: sealed before they outgrow a block, refused before anything is changed."""

from pathlib import Path

import pytest

import echostore
from echostore.kernel.errors import TooLarge
from echostore.kernel.limits import VALUE_BYTES_MAX
from echostore.peer import runtime as runtimes
from echostore.peer.party import Party
from echostore.peer.peer import Peer, open_peer
from echostore.peer.pen import INSERT_BYTES_MAX


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    return open_peer(tmp_path / "home", name="Ann", background=False)


def reopened(peer: Peer, party: Party) -> Party:
    folder = peer.home.path
    peer.close()
    return echostore.open(folder).party(party.key)


def test_many_large_elements_are_sealed_before_they_outgrow_a_block(peer: Peer) -> None:
    party = peer.create_party("Trip")
    photos = party.create("growable-array")
    for number in range(40):
        photos.append(f"{number}" * 150_000)
    photos.append(*[f"{number}" * 150_000 for number in range(40)])
    party.flush()
    assert len(photos) == 80
    again = reopened(peer, party)
    assert len(again.get(photos.id)) == 80
    again.peer.close()


@pytest.mark.parametrize("size", [INSERT_BYTES_MAX + 1, 20_000_000])
def test_a_giant_insertion_is_refused_and_leaves_all_as_it_was(peer: Peer, size: int) -> None:
    party = peer.create_party("Trip")
    notes, task = party.create("text"), party.create("property-set")
    notes.insert(0, "hello ")
    with pytest.raises(TooLarge, match="inserted at once"):
        notes.insert(0, "a" * size)
    task["a"] = 1
    notes.insert(6, "world")
    party.flush()
    assert str(notes) == "hello world"
    again = reopened(peer, party)
    assert str(again.get(notes.id)) == "hello world"
    assert again.get(task.id)["a"] == 1
    again.peer.close()


def test_the_largest_insertions_fit_beside_each_other(peer: Peer) -> None:
    party = peer.create_party("Trip")
    notes, more = party.create("text"), party.create("text")
    for text in (notes, more):
        text.insert(0, "x")
        text.insert(1, "é" * (INSERT_BYTES_MAX // 2))
        text.insert(0, "y" * (INSERT_BYTES_MAX - 1))
    for _ in range(4000):  # wide characters, as much as a pen holds
        notes.insert(0, "\N{WAVING HAND SIGN}" * 255)
        more.insert(0, "\N{WAVING HAND SIGN}" * 255)
    party.flush()
    lengths = len(notes), len(more)
    again = reopened(peer, party)
    assert (len(again.get(notes.id)), len(again.get(more.id))) == lengths
    again.peer.close()


def test_elements_posts_and_marks_have_the_limit_of_values(peer: Peer) -> None:
    party = peer.create_party("Trip")
    photos, chat, notes = party.create("growable-array"), party.create("threaded-log"), party.create("text")
    notes.insert(0, "word")
    large = "x" * (VALUE_BYTES_MAX + 1)
    for write in (
        lambda: photos.append("small", large),
        lambda: photos.insert(0, large),
        lambda: photos.append({"deep": [large]}),
        lambda: chat.post(large),
        lambda: notes.mark(0, 4, "comment", large),
    ):
        with pytest.raises(TooLarge, match="at most 1,048,576 fit"):
            write()
    assert (len(photos), len(chat), str(notes)) == (0, 0, "word")
    peer.close()


def test_what_the_background_could_not_seal_is_told_once_and_stops_nothing(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    party = peer.create_party("Trip")
    notes, task = party.create("text"), party.create("property-set")
    notes.insert(0, "first ")
    party.flush()
    notes.insert(0, "second ")
    write = runtimes.PartyRuntime._write

    def refused(*arguments: object, **named: object) -> None:
        raise TooLarge("as if it had grown too large")

    monkeypatch.setattr(runtimes.PartyRuntime, "_write", refused)
    party.runtime.flush_quietly()
    monkeypatch.setattr(runtimes.PartyRuntime, "_write", write)
    with pytest.raises(TooLarge, match="as if"):
        task["a"] = 1
    task["a"] = 2
    notes.insert(0, "third ")
    party.flush()
    assert str(notes) == "third first ", "what was refused is out"
    assert party.status.failure == ""
    peer.close()


@pytest.mark.parametrize("in_batch", [False, True])
def test_a_post_after_edits_in_place_is_given_its_own_name(peer: Peer, in_batch: bool) -> None:
    party = peer.create_party("Trip")
    text, log = party.create("text"), party.create("threaded-log")
    if in_batch:
        with party.batch():
            text.insert(0, "x")
            first = log.post("question")
            log.post("answer", reply_to=first)
    else:
        text.insert(0, "x")
        first = log.post("question")
        log.post("answer", reply_to=first)
    assert log.posts()[0].id == first
    (thread,) = log.threads()
    assert [reply.entry.body for reply in thread.replies] == ["answer"]
    peer.close()
