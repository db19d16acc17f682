"""The stories themselves: honest peers agree on each, and a peer that knows them from the lake alone says the same."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from echostore.pipeline.lake import Lake
from echostore.testing.lake_answers import PartyAnswer, lake_answers
from spark.party_stories import IN_MEMORY, Stories, Told, many_feeds
from spark.story_models import SHARED, Gadget

SEED, COUNT = 11, 26


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lake, list[Told]]]:
    folder = tmp_path_factory.mktemp("stories")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHOSTORE_STATE", str(folder / "state"))
        with Stories(folder, seed=SEED) as stories:
            all_told = [each for number in range(COUNT) for each in stories.tell(number)]
            yield stories.publish(), all_told


@pytest.fixture(scope="module")
def answers(told: tuple[Lake, list[Told]]) -> dict[bytes, PartyAnswer]:
    scratch = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="observer-", dir=scratch) as home:
        found = lake_answers(told[0], Path(home), models=(*SHARED, Gadget))
        return {bytes(answer.party): answer for answer in found}


def test_a_peer_that_reads_the_lake_says_what_the_members_say(
    told: tuple[Lake, list[Told]], answers: dict[bytes, PartyAnswer]
) -> None:
    parties = [each for each in told[1] if each.parent is None]
    assert set(answers) == {bytes(each.party) for each in parties}
    for each in parties:
        if "base epoch" in each.deeds:
            continue  # who reads the blocks alone does not have what the members stand on
        answer = answers[bytes(each.party)]
        assert (answer.cid, answer.items) == (each.cid, each.items), (each.number, each.deeds)
        theirs = sorted((reject.feed, *reject[1:]) for reject in each.rejected)
        ours = sorted((row.feed[:8], row.seq, row.position, row.reason, row.detail) for row in answer.rejected)
        assert ours == theirs, (each.number, each.deeds)


def test_the_stories_have_something_of_everything(told: tuple[Lake, list[Told]]) -> None:
    deeds = {deed for each in told[1] for deed in each.deeds}
    assert deeds >= {"empty", "local", "child", "parent", "batch", "reader", "lie", "view", "link", "move", "delete"}
    assert deeds >= {f"edit {model}" for model in ("property-set", "text", "growable-array", "threaded-log", "tally")}
    assert any(each.moments for each in told[1])
    assert any(each.rejected for each in told[1])
    assert len({each.cid for each in told[1]}) == len(told[1])


def test_light_weight_parties_are_in_the_lake_with_their_data_alone(told: tuple[Lake, list[Told]]) -> None:
    lake, all_told = told
    children = [each for each in all_told if each.parent is not None]
    assert children
    for each in children:
        runs = lake.at().runs([each.party])
        assert len(runs)
        assert not any(runs["control"].to_pylist())


def test_a_party_of_many_feeds_is_taken_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    lake, answer = many_feeds(tmp_path, feeds=150)
    assert (answer.applied, answer.rejected, answer.unheld) == (1200, (), ())
    assert len(set(lake.at().runs()["feed"].to_pylist())) == 300, "a control feed and a data feed of each"
