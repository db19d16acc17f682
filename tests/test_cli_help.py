"""Help pages, the default party, and items by the names that people gave them."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from cli_process import Cli
from echostore.cli.app import NOUNS, make_app

ABOUT_PARTIES = ("party", "item", "view", "query", "feed", "blob", "epoch")
"""Nouns whose commands look into one party."""
WITHOUT_PARTY = {
    *("party list", "party create", "party join", "party import"),
    *("party invitations", "party uninvite"),  # an invitation names its party
}
"""Commands that take no --party."""


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("init", "--name", "Laptop").ok()
    for title in ("One", "Two"):
        cli("party", "create", title).ok()
    return cli


def pages(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command."""
    for name in app:
        if not name.startswith("-"):
            if app[name].default_command is not None:
                yield (*path, name)
            yield from pages(app[name], (*path, name))


PAGES = [" ".join(path) for path in pages(make_app())]


def help_of(command: str, tmp_path: Path) -> str:
    return Cli(tmp_path / "none", tmp_path / "state")(*command.split(), "--help").ok().out


def test_the_first_page_groups_commands_by_task(tmp_path: Path) -> None:
    page = help_of("", tmp_path)
    places = [page.index(f"─ {task} ─") for task in NOUNS]
    assert places == sorted(places)
    for task, nouns in NOUNS.items():
        panel = page[page.index(f"─ {task} ─") :].partition("╰")[0]
        assert set(re.findall(r"^│ (\w+)", panel, re.M)) >= set(nouns)


@pytest.mark.parametrize("command", PAGES)
def test_a_page_shows_examples_of_its_command_and_no_option_twice(command: str, tmp_path: Path) -> None:
    app = make_app()
    for word in command.split():
        app = app[word]
    shown = str(app.help_prologue).splitlines()[1:]
    assert shown
    for line in shown:
        words = re.sub(r"^  echostore( --home \S+| --party \S+)*", "echostore", line)
        assert words.startswith(f"echostore {command}"), line
    options = Counter(re.findall(r"^│ (?:\*\s+)?(--[\w-]+)", help_of(command, tmp_path), re.M))
    assert not [option for option, count in options.items() if count > 1]


@pytest.mark.parametrize("command", [each for each in PAGES if each.split()[0] in ABOUT_PARTIES])
def test_every_command_about_a_party_takes_party(command: str, tmp_path: Path) -> None:
    assert ("--party -p" in help_of(command, tmp_path)) != (command in WITHOUT_PARTY)


def test_without_a_party_the_error_names_options_that_exist(cli: Cli) -> None:
    for command in ("party show", "party members", "party invite", "party pause", "item tree", "epoch list", "query"):
        failed = cli(*command.split())
        assert failed.status == 2, command
        assert "--party" in failed.err
        assert "--party" in cli(*command.split(), "--help").ok().out


def test_party_use_chooses_for_all_commands_and_others_go_before_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("party", "use").ok().out == "no default\n"
    two = cli("party", "use", "@Two", "--json").ok().json()
    assert two["title"] == "Two"
    assert cli("party", "show", "--json").ok().json()["title"] == "Two"
    assert cli("party", "show", "@One", "--json").ok().json()["title"] == "One"
    assert cli("party", "show", "--party", "@One", "--json").ok().json()["title"] == "One"
    listed = {each["title"]: each["default"] for each in cli("party", "list", "--json").ok().json()["parties"]}
    assert listed == {"One": False, "Two": True}
    monkeypatch.setenv("ECHOSTORE_PARTY", "@One")
    assert cli("party", "show", "--json").ok().json()["title"] == "One"
    monkeypatch.setenv("ECHOSTORE_PARTY", "@Nobody")
    assert cli("party", "show").status == 3
    monkeypatch.delenv("ECHOSTORE_PARTY")
    cli("party", "use", "--clear").ok()
    assert cli("party", "show").status == 2


def test_bad_input_to_party_use_and_names_given_twice(cli: Cli) -> None:
    assert cli("party", "use", "@Nobody").status == 3
    assert cli("party", "use", "@One", "--clear").status == 2
    twice = cli("party", "members", "@One", "--party", "@One")
    assert twice.status == 2
    assert "named twice" in twice.err
    assert "is not named" in cli("party", "forget", "--yes").err


def test_a_forgotten_default_is_no_default(cli: Cli) -> None:
    cli("party", "use", "@Two").ok()
    cli("party", "forget", "@Two", "--yes").ok()
    assert cli("party", "show", "--json").ok().json()["title"] == "One"


def test_the_party_may_be_left_out_where_other_arguments_follow(cli: Cli, tmp_path: Path) -> None:
    cli("party", "use", "@Two").ok()
    told = cli("party", "export", str(tmp_path / "two.car"), "--json").ok().json()
    assert told["party"] == cli("party", "show", "@Two", "--json").ok().json()["party"]
    by_name = cli("party", "export", "@One", str(tmp_path / "one.car"), "--json").ok().json()
    assert by_name["party"] == cli("party", "show", "@One", "--json").ok().json()["party"]
    refused = cli("party", "role", "@Laptop", "reader")
    assert (refused.status, "creator" in refused.err) == (4, True)
    assert cli("party", "remove", "@Nobody", "--yes").status == 3


def test_a_deleted_item_goes_by_its_name(cli: Cli) -> None:
    cli("party", "use", "@One").ok()
    cli("item", "create", "property-set", "--type", "task", "title=tickets").ok()
    cli("item", "delete", "@tickets", "--yes").ok()
    assert cli("item", "get", "@tickets", "--json").ok().json()["deleted"] is True
    cli("item", "restore", "@tickets").ok()
    assert cli("item", "get", "@tickets", "--json").ok().json()["deleted"] is False
    cli("item", "delete", "@tickets", "--yes").ok()
    other = cli("item", "create", "property-set", "--type", "task", "title=tickets", "--json").ok().json()
    assert cli("item", "get", "@tickets", "--json").ok().json()["item"] == other["item"], "the living one goes first"
