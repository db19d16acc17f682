"""Two hundred random parties of real peers, all in one job: what Spark says of each is what its peers say of it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from echostore.pipeline.output.results import PartyResult
from echostore.pipeline.output.views import open_views
from echostore.pipeline.run import RunRequest, RunResult, run_pipeline
from spark.party_stories import Stories, Told
from spark.worker_paths import with_test_modules

pytestmark = pytest.mark.timeout(900)
"""The first test waits for all parties to be lived through and built: 60 to 90 seconds of a processor."""

SEED, COUNT = 2026, 200
FIRST = 40
"""Stories of the first publish; the others come on top of its commit."""


@dataclass(frozen=True, slots=True)
class Parties:
    told: list[Told]
    runs: list[RunResult]
    out: Path

    def results(self) -> dict[bytes, PartyResult]:
        return {result.party: result for result in self.runs[-1].results()}


@pytest.fixture(scope="module")
def parties(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    folder = tmp_path_factory.mktemp("random")
    made = Parties([], [], folder / "out")
    with pytest.MonkeyPatch.context() as patch, with_test_modules(spark):
        patch.setenv("ECHOSTORE_STATE", str(folder / "state"))
        with Stories(folder, seed=SEED) as stories:
            for numbers in (range(FIRST), range(FIRST, COUNT)):
                made.told.extend(each for number in numbers for each in stories.tell(number))
                stories.publish()
                request = RunRequest(lake=folder / "lake", out=made.out, models="spark.story_models")
                made.runs.append(run_pipeline(spark, request))
            yield made


def test_every_party_has_the_cid_of_its_peers(parties: Parties) -> None:
    results = parties.results()
    assert len(parties.told) >= COUNT
    assert set(results) == {bytes(told.party) for told in parties.told}
    for told in parties.told:
        result = results[bytes(told.party)]
        if told.unknown_model:
            assert (result.cid, result.state) == (None, "abstained"), (told.number, told.deeds)
        else:
            expected = (told.cid, "built", told.items)
            assert (result.cid, result.state, result.items) == expected, (told.number, told.deeds)
        assert result.messages == result.applied + result.rejected + result.waiting, told.number


def test_every_party_has_the_rejects_of_its_peers_each_once(spark: Any, parties: Parties) -> None:
    found: Counter[tuple[Any, ...]] = Counter(
        tuple(row)
        for row in open_views(spark, parties.out)["rejects"]
        .select("party", "feed", "seq", "position", "reason", "detail")
        .collect()
    )
    expected = Counter(
        (told.party.hex(), reject.feed.hex(), reject.seq, reject.position, str(reject.reason), reject.detail)
        for told in parties.told
        for reject in told.rejected
    )
    assert found == expected
    assert len(expected) > COUNT // 4


def test_the_parties_have_lived_through_everything(parties: Parties) -> None:
    deeds = Counter(deed for told in parties.told for deed in told.deeds)
    for model in ("property-set", "text", "growable-array", "threaded-log", "tally"):
        assert deeds[f"edit {model}"] >= 10, model
    for deed in (
        "empty",
        "child",
        "parent",
        "batch",
        "reader",
        "view",
        "link",
        "move",
        "delete",
        "remove",
        "gadget",
        "base epoch",
    ):
        assert deeds[deed], (deed, deeds)
    for lie in ("fork", "undecodable", "lying_depth", "malformed", "no_item", "waiting"):
        assert deeds[lie], (lie, deeds)
    assert any(result.waiting for result in parties.results().values())
