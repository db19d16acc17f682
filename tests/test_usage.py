"""Command lines that say what can't be: numbers that are none, times below zero, options that nobody made."""

import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from cyclopts import App

from cli_process import Cli
from echostore.cli.app import make_app

OPPOSITES = {"--no-lan", "--no-partitions", "--no-crashes"}
"""Options that switch off what is on; docs/cli.md tells of them."""


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("party", "create", "Trip").ok()
    return cli


def commands(path: tuple[str, ...], app: App) -> Iterator[tuple[str, ...]]:
    for verb in app:
        if not verb.startswith("-"):
            yield from commands((*path, verb), app[verb])
    if path and app.default_command is not None:
        yield path


def test_no_command_has_an_option_that_nobody_made(cli: Cli) -> None:
    for path in commands((), make_app()):
        page = cli(*path, "--help").ok().out
        assert set(re.findall(r"--(?:no|empty)-[\w-]+", page)) <= OPPOSITES, path
    assert "Unknown option: --empty-bot" in cli("party", "policy", "--empty-bot").err


@pytest.mark.parametrize(
    "line",
    ["epoch show 1.4", "epoch verify 0.9", "epoch fetch 1.5", "query --limit 2.5", "party policy --messages 1.5"],
)
def test_a_fraction_is_no_whole_number(cli: Cli, line: str) -> None:
    ran = cli(*line.split())
    assert ran.status == 2
    assert "a whole number" in ran.err


@pytest.mark.parametrize(
    "line",
    [
        "party policy --age -1d",
        "party policy --grace -5s",
        "party policy --silence=-1h",
        "epoch create --discard-before -5d",
        "epoch create --discard-before=-5d",
        "item watch --timeout -1s",
        "item tree --at -5d",
    ],
)
def test_a_length_of_time_below_zero_is_called_so(cli: Cli, line: str) -> None:
    ran = cli(*line.split())
    assert ran.status == 2
    assert "negative" in ran.err
    assert "requires" not in ran.err


def test_a_policy_does_not_become_another_one_silently(cli: Cli) -> None:
    for option in ("--grace", "--age", "--silence"):
        assert "whole seconds" in cli("party", "policy", option, "1ms").err
        assert cli("party", "policy", option, "1.5s").status == 2
    assert "a number from 3" in cli("party", "policy", "--truncate-quorum", "0").err
    assert cli("party", "policy", "--age", "0", "--grace", "1.5m", "--json").ok().json()["grace_s"] == 90


def test_what_stands_behind_two_dashes_is_no_option(cli: Cli) -> None:
    ran = cli("epoch", "show", "--", "-1", "--json")
    assert ran.status == 2
    assert "stands behind --" in ran.err


def test_a_time_to_discard_before_may_be_that_of_an_epoch(cli: Cli) -> None:
    wrong = cli("epoch", "create", "--discard-before", "30x")
    assert wrong.status == 2
    assert "epoch:3" in wrong.err
    assert "anchor" not in wrong.err
    assert cli("epoch", "create", "--discard-before", "epoch:1").status == 3
    created = cli("epoch", "create", "--json").ok().json()["created"]
    cli("item", "create", "text", "x").ok()
    cli("epoch", "create", "--discard-before", "epoch:1").ok()
    assert cli("epoch", "show", "2", "--json").ok().json()["discard_before"] == created


def test_a_simulation_of_epochs_tells_how_many_are_final_and_who_came_on_top(cli: Cli) -> None:
    line = ("simulate", "--peers", "4", "--epochs", "2", "--seed", "3")
    (run,) = cli(*line, "--json").ok().json()["runs"]
    assert run["peers"] == 4 + run["joined_late"]
    assert run["final_epochs"] >= 2
    heading, row = (each.split(",") for each in cli(*line, "--csv").ok().out.splitlines())
    assert dict(zip(heading, row, strict=False))["final_epochs"] == str(run["final_epochs"])
    assert "FINAL EPOCHS" in cli(*line).ok().out


def test_where_a_history_can_not_be_written_is_told_before_the_run(cli: Cli, tmp_path: Path) -> None:
    with mock.patch("echostore.testing.world.World", side_effect=AssertionError("it ran")):
        ran = cli("simulate", "--history", str(tmp_path / "none" / "h.jsonl"))
    assert (ran.status, "can't be written" in ran.err) == (1, True)
    cli("simulate", "--seconds", "1", "--history", str(tmp_path / "h.jsonl")).ok()
    assert (tmp_path / "h.jsonl").stat().st_size
