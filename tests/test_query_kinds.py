"""Comparisons go by the kind of the property; where none can hold, the query says why."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.errors import UsageError
from echostore.peer.party import Party

MAY, JUNE = datetime(2026, 5, 1, 10, tzinfo=UTC), datetime(2026, 6, 1, tzinfo=UTC)


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Party]:
    with echostore.open(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        party.create(type="task", title="May", due=MAY, rank=1)
        party.create(type="task", title="June", due=JUNE, rank=2)
        yield party


def titles(query: Any) -> list[str]:
    return sorted(item["title"] for item in query)


@pytest.mark.parametrize("indexed", [False, True])
def test_the_text_of_a_time_compares_with_times(party: Party, indexed: bool) -> None:
    if indexed:
        party.index("due")
        party.flush()
    tasks = party.query(type="task")
    assert titles(tasks.where(due__lt="2026-06-01")) == ["May"]
    assert titles(tasks.where(due__lt="2026-05-01T12:00:00+02:00")) == []
    assert titles(tasks.where(due__le="2026-05-01T12:00:00+02:00")) == ["May"]
    assert titles(tasks.where(due__ge="2026-06-01T00:00:00Z")) == ["June"]
    assert titles(tasks.where(due="2026-06-01")) == ["June"]
    assert titles(tasks.where(due__in=["2026-06-01", "x"])) == ["June"]
    assert titles(tasks.where(due__ne="2026-06-01")) == ["May"]


def test_texts_still_compare_as_texts(party: Party) -> None:
    party.create(type="note", title="t", due="2026-05-02")
    assert titles(party.query(type="note").where(due__lt="2026-06-01")) == ["t"]
    assert titles(party.query(type="note", due="2026-05-02")) == ["t"]


def test_an_order_between_two_kinds_is_refused_with_the_reason(party: Party) -> None:
    for ask in (
        lambda: party.query(type="task").where(rank__lt="3").all(),
        lambda: party.query(type="task").where(rank__lt="3").count(),
        lambda: party.query(type="task").where(rank__lt="3").rows(),
        lambda: party.query(type="task").where(due__lt=5).first(),
    ):
        with pytest.raises(UsageError, match=r"nothing can match: (rank is a number|due is a time)"):
            ask()


def test_nothing_found_is_no_error_where_the_kinds_agree(party: Party) -> None:
    assert party.query(type="task").where(rank__gt=9).all() == []
    assert party.query(type="nobody").where(rank__lt="3").all() == []
    party.create(type="task", title="odd", rank="high")
    assert party.query(type="task").where(rank__gt="x").all() == []


def test_doubts_name_a_misspelt_property_and_another_kind(party: Party) -> None:
    assert party.query(type="task", titel="May").doubts() == ["no item has 'titel'; did you mean 'title'?"]
    assert party.query(type="task", rank="1").doubts() == ["rank is a number, and it is compared with text"]
    assert party.query(type="task", rank=7).doubts() == []


def test_the_command_compares_times_and_gives_hints(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("party", "create", "Trip").ok()
    cli("item", "create", "property-set", "title=May", 'due={"$time":"2026-05-01T10:00:00Z"}', "code=7").ok()
    assert cli("query", "--where", "due<2026-06-01", "--count").ok().out.strip() == "1"
    assert "did you mean 'title'" in cli("query", "--where", "titel=May").ok().err
    assert "code is a number, and it is compared with text" in cli("query", "--where", 'code="7"').ok().err
    refused = cli("query", "--where", "code<x")
    assert (refused.status, "code is a number" in refused.err) == (2, True)
