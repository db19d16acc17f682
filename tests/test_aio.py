"""The asyncio form of a peer: what is not awaited says so, and what can't be awaited raises at once."""

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.errors import UsageError


def run(tmp_path: Path, work: Callable[[Any, Any], Awaitable[None]]) -> None:
    """`work` with a party and an item of it."""

    async def main() -> None:
        async with echostore.aio.open(tmp_path / "home", background=False) as peer:
            party = await peer.create_party("Trip")
            await work(party, await party.create(type="task", n=1))

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda party, task: task.update(n=2), "update"),
        (lambda party, task: task.set("n", 2), "set"),
        (lambda party, task: task.unset("n"), "unset"),
        (lambda party, task: task.delete(), "delete"),
        (lambda party, task: party.create(type="task"), "create"),
    ],
)
def test_a_write_that_is_not_awaited_warns_with_its_line(tmp_path: Path, write: Any, name: str) -> None:
    async def work(party: Any, task: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            write(party, task)
            gc.collect()
        assert [warning.category for warning in caught] == [RuntimeWarning]
        assert f"{name}(...) was never awaited" in str(caught[0].message)
        assert caught[0].filename == __file__
        assert await task["n"] == 1

    run(tmp_path, work)


def test_what_is_awaited_iterated_or_entered_does_not_warn(tmp_path: Path) -> None:
    async def work(party: Any, task: Any) -> None:
        query = party.query(type="task")
        assert [await item["n"] async for item in query.where(n=1)] == [1]
        assert await query.count() == 1
        await asyncio.gather(task.update(a=1), task.update(b=2))
        async with party.batch():
            await task.update(n=3)
        gc.collect()
        assert await task.to_dict() == {"a": 1, "b": 2, "n": 3}

    run(tmp_path, work)


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda party, task: list(party.query(type="task")), "async for"),
        (lambda party, task: "n" in task, "`in` can't be awaited"),
        (lambda party, task: len(party.query(type="task")), "`len` can't be awaited"),
        (lambda party, task: bool(task["n"]), "not carried out yet"),
    ],
)
def test_what_python_can_not_await_raises_at_once(tmp_path: Path, use: Any, match: str) -> None:
    async def work(party: Any, task: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the query itself is not awaited either
            with pytest.raises(TypeError, match=match):
                use(party, task)
            gc.collect()
        assert task, "an object that is there is true"

    run(tmp_path, work)


def test_an_assignment_raises_and_names_the_awaited_form(tmp_path: Path) -> None:
    async def work(party: Any, task: Any) -> None:
        with pytest.raises(UsageError, match=r"await item\.set\('n', \.\.\.\)"):
            task["n"] = 2
        with pytest.raises(UsageError, match=r"await item\.unset\('n'\)"):
            del task["n"]
        with pytest.raises(UsageError, match="the assignment of title"):
            party.title = "New"
        with pytest.raises(UsageError, match="unawaited operation"):
            await party.create(type="task", parent=party.get(b"x" * 16))
        assert await task["n"] == 1

    run(tmp_path, work)
