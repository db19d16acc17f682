"""The command line on real homes: what it prints for people and for programs, and its conventions."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

import echostore
from cli_process import Cli
from echostore.cli.app import NOUNS, make_app
from echostore.cli.following import follow
from echostore.cli.values import from_json, harmless, to_json
from echostore.kernel.errors import Locked
from echostore.store.lock import HomeLock

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("pyarrow", "pandas", "polars", "pyspark", "loro", "nacl", "google", "numpy", "sqlite3")


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A home with one party, made by the command itself."""
    folder = tmp_path_factory.mktemp("cli")
    made = Cli(folder / "home", folder / "state")
    made.process("init", "--name", "Laptop").ok()
    made.process("party", "create", "Road trip").ok()
    return made


@pytest.fixture(scope="module")
def board(cli: Cli) -> dict[str, str]:
    """A few items, by their full ids."""
    ids = {}
    for name, arguments in {
        "board": ("property-set", "--type", "board", "title=Summer", "address.city=Rome"),
        "tasks": ("growable-array", "--name", "tasks", "--parent", "@Summer", "1", "-5", '{"a":2}'),
        "task": ("property-set", "--type", "task", "--parent", "@tasks", "title=Tickets", "done=false", "priority=3"),
        "note": ("text", "book early", "--parent", "@Tickets"),
        "chat": ("threaded-log", "hello", "world"),
    }.items():
        ids[name] = cli.process("item", "create", *arguments, "--json").ok().json()["item"]
    return ids


# reading and writing


def test_init_makes_a_home_once(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    first = cli("init", "--name", "Phone", "--json").ok().json()
    again = cli("init", "--json").ok().json()
    assert (first["created"], again["created"]) == (True, False)
    assert (first["identity"], again["name"]) == (again["identity"], "Phone")
    assert first["version"] == 1
    assert cli("party", "list", "--json").ok().json() == {"version": 1, "parties": []}


def test_tree_shows_every_item_with_type_id_name_and_values(cli: Cli, board: dict[str, str]) -> None:
    text = cli.process("item", "tree").ok().out
    assert text.splitlines()[0] == "Road trip"
    assert f"├─ board {board['board'][:8]}" in text
    assert f"growable-array {board['tasks'][:8]} 'tasks'  3 elements" in text
    assert "title=Tickets" in text
    assert "'book early'" in text
    rows = cli("item", "tree", "@Summer", "--nl").ok().lines()
    assert [(row["item"], row["depth"]) for row in rows] == [
        (board[name], depth) for depth, name in enumerate(("board", "tasks", "task", "note"))
    ]


def test_get_shows_an_item_a_value_or_a_text(cli: Cli, board: dict[str, str]) -> None:
    document = cli("item", "get", board["board"][:8], "--json").ok().json()
    assert document["item"] == board["board"]
    assert document["value"] == {"title": "Summer", "address": {"city": "Rome"}}
    assert cli("item", "get", "@Summer", "address.city").ok().out == "Rome\n"
    assert cli("item", "get", document["locator"], "title", "--json").ok().json()["value"] == "Summer"
    assert cli.process("item", "get", board["note"]).ok().out == "book early"
    assert cli.process("item", "get", "-", "2.a", stdin=board["tasks"] + "\n").ok().out == "2\n"


def test_set_is_one_message_with_its_anchor(cli: Cli, board: dict[str, str]) -> None:
    before = cli("item", "set", board["task"], "priority=4", "--json").ok().json()
    after = cli("item", "set", board["task"], "done=true", "note=[1", "--unset", "priority", "--name", "T", "--json")
    assert "[1 is not JSON and is stored as text" in after.err
    assert after.ok().json()["durable"] is True
    history = cli("item", "history", board["task"], "--json").ok().json()["revisions"]
    assert len(history) == 3
    assert history[0]["changes"][0]["what"] == "created as property-set@1 of type task"
    assert [change["what"] for change in history[2]["changes"]] == [
        "done = true",
        "note = [1",
        "priority deleted",
        "named 'T'",
    ]
    assert {each["author"] for each in history} == {"Laptop"}
    differences = cli("item", "diff", board["task"], before["anchor"], "--json").ok().json()["differences"]
    assert [(each["path"], each["kind"], each["before"], each["after"]) for each in differences] == [
        (["done"], "changed", False, True),
        (["note"], "added", None, "[1"),
        (["priority"], "removed", 4, None),
    ]
    past = cli("item", "get", board["task"], "--at", before["anchor"], "--json").ok().json()
    assert past["value"]["done"] is False
    cli("item", "set", board["task"], "-", stdin='{"done": false, "priority": 3, "note": null}').ok()


def test_an_epoch_is_a_moment(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("party", "create", "Trip").ok()
    task = cli("item", "create", "property-set", "title=Tickets", "done=false", "--json").ok().json()["item"]
    cli("epoch", "create").ok()
    cli("item", "set", task, "done=true").ok()
    assert cli("item", "get", task, "--at", "epoch:1", "--json").ok().json()["value"]["done"] is False
    assert cli("item", "get", task, "--json").ok().json()["value"]["done"] is True
    assert cli("item", "get", task, "--at", "epoch:7").status == 3
    assert cli("item", "get", task, "--at", "epoch:one").status == 2
    assert cli("party", "rejected", "--json").ok().json()["rejected"] == []


def test_append_to_list_text_and_log(cli: Cli, board: dict[str, str]) -> None:
    reference = json.dumps({"$item": board["task"]})
    cli("item", "append", "@tasks", "seven", reference).ok()
    assert cli("item", "get", "@tasks", "--json").ok().json()["value"] == [
        1,
        -5,
        {"a": 2},
        "seven",
        json.loads(reference),
    ]
    cli("item", "append", board["note"], "--", " --really").ok()
    cli("item", "append", board["note"], "-", stdin=" twice\n").ok()
    assert cli("item", "get", board["note"]).ok().out == "book early --really twice\n"
    cli("item", "append", board["chat"], "again").ok()
    posts = cli("item", "get", board["chat"], "--json").ok().json()["value"]
    assert [post["body"] for post in posts] == ["hello", "world", "again"]


def test_move_delete_and_restore(cli: Cli, board: dict[str, str]) -> None:
    made = cli("item", "create", "property-set", "--parent", board["board"], "title=Gone").ok().out.strip()
    assert len(made) == 8
    assert cli("item", "move", made, board["chat"], "--json").ok().json()["parent"] == board["chat"]
    cli("item", "move", made, "/").ok()
    dry = cli("item", "delete", made, "--dry-run", "--json").ok().json()
    assert (dry["items"], dry["deleted"]) == (1, False)
    refused = cli("item", "delete", made)
    assert refused.status == 2
    assert "--yes" in refused.err
    cli("item", "delete", made, "--yes").ok()
    assert "Gone" not in cli("item", "tree").ok().out
    assert cli("item", "restore", made, "--json").ok().json()["deleted"] is False
    assert "Gone" in cli("item", "tree").ok().out


def test_query_filters_orders_selects_and_counts(cli: Cli, board: dict[str, str]) -> None:
    document = (
        cli.process("query", "--type", "task", "--where", "done=false", "--where", "priority>=3", "--json").ok().json()
    )
    assert [item["item"] for item in document["items"]] == [board["task"]]
    assert cli("query", "--where", "title contains umm", "--count").ok().out == "1\n"
    rows = list(
        csv.reader(
            io.StringIO(
                cli("query", "--order", "-title", "--where", "title exists", "--select", "title,done", "--csv").ok().out
            )
        )
    )
    assert rows[0] == ["item", "title", "done"]
    assert [board["task"], "Tickets", "false"] in rows
    assert [row[1] for row in rows[1:]] == sorted((row[1] for row in rows[1:]), reverse=True)
    assert "looked at" in cli("query", "--type", "task", "--explain").ok().out


# parties, feeds, blobs


def test_party_commands(cli: Cli, board: dict[str, str]) -> None:
    (party,) = cli("party", "list", "--json").ok().json()["parties"]
    assert re.fullmatch("[0-9a-f]{64}", party["party"])
    shown = cli.process("party", "show", "--snapshot", "--json").ok().json()
    assert shown["items"] >= 5
    assert "all processed" in shown["truth"]
    assert shown["snapshot"].startswith("baf")
    (member,) = cli("party", "members", "--nl").ok().lines()
    assert (member["name"], member["role"], member["creator"]) == ("Laptop", "owner", True)
    steps = cli("party", "why", "@Laptop", "--json").ok().json()["steps"]
    assert steps[0]["valid"] is True
    assert cli.process("status").ok().out.startswith(party["party"][:8])
    assert cli("identity", "show", "--json").ok().json()["identity"] == member["identity"]


def test_party_life_from_pause_to_forget(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    key = cli("party", "create", "Short", "--json").ok().json()["party"]
    assert cli("party", "pause", "@Short", "--json").ok().json() == {"version": 1, "party": key, "state": "paused"}
    cli("party", "close").ok()
    assert cli("item", "tree").status == 4
    cli("party", "resume", key[:10]).ok()
    item = cli("item", "create", "text", "kept", "--json").ok().json()["item"]
    cli("party", "export", "@Short", str(tmp_path / "short.car")).ok()
    elsewhere = Cli(tmp_path / "other", tmp_path / "state")
    imported = elsewhere("party", "import", str(tmp_path / "short.car"), "--json").ok().json()
    assert (imported["party"], imported["title"]) == (key, "Short")
    assert elsewhere("item", "get", item).ok().out == "kept"
    told = cli("party", "forget", "@Short", "--dry-run")
    assert "own blocks not known to be on any other peer" in told.err
    assert cli("party", "forget", "@Short", "--yes", "--json").ok().json()["forgotten"] is True
    assert cli("party", "list").ok().out == ""


def test_feeds_and_blobs_are_listed_and_verified(cli: Cli, board: dict[str, str]) -> None:
    feeds = cli("feed", "list", "--json").ok().json()["feeds"]
    assert {feed["kind"] for feed in feeds} == {"control", "data"}
    assert all(feed["held"] == feed["processed"] == feed["known"] for feed in feeds)
    verified = cli.process("feed", "verify", "--json").ok().json()
    assert verified["sound"] is True
    assert sum(feed["blocks"] for feed in verified["feeds"]) == sum(feed["held"] for feed in feeds)
    tail = cli("feed", "tail", "--lines", "3", "--nl").ok().lines()
    assert [block["state"] for block in tail] == ["processed"] * 3
    assert cli("blob", "verify", "--json").ok().json()["sound"] is True
    assert cli("blob", "list", "--json").ok().json()["version"] == 1


def test_views_are_listed_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with echostore.open(tmp_path / "home") as peer:
        peer.view_classes.register("example.org/planner")
        party = peer.create_party("Trip")
        view = party.create_view("example.org/planner", "Planner")
        party.create("text", parent=view).insert(0, "inside")
    cli = Cli(tmp_path / "home", tmp_path / "state")
    (listed,) = cli("view", "list", "--json").ok().json()["views"]
    assert (listed["view_class"], listed["display_name"]) == ("example.org/planner", "Planner")
    opened = cli("view", "open", listed["locator"]).ok().out
    assert "'inside'" in opened
    assert cli("view", "open", "@Planner", "--json").ok().json()["inception_key"] == listed["inception_key"]


def test_doctor_reports_without_secrets_and_explains_codes(cli: Cli, board: dict[str, str]) -> None:
    report = cli.process("doctor", "--full", "--json").ok().json()
    assert report["sound"] is True
    levels = {check["name"]: check["level"] for check in report["checks"]}
    assert levels["lock"] == levels["instance"] == levels["disk space"] == "ok"
    text = json.dumps(report)
    identity = cli("identity", "show", "--json").ok().json()
    assert not any(secret in text for secret in ("Road trip", "Laptop", identity["identity"], board["task"]))
    assert "one home has one writer" in cli("doctor", "E-LOCKED").ok().out


def test_simulate_replays_its_seed(cli: Cli) -> None:
    first = cli("simulate", "--seed", "5", "--seconds", "3", "--json").ok().json()
    second = cli.process("simulate", "--seed", "5", "--seconds", "3", "--json").ok().json()
    assert first == second
    assert first["good"] is True


# beside a writer


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cli, Any]]:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with echostore.open(tmp_path / "home", name="Writer", background=False) as peer:
        party = peer.create_party("Live")
        party.create("property-set", type="counter", title="count", n=0)
        party.flush()
        yield Cli(tmp_path / "home", tmp_path / "state"), party


def test_reading_works_beside_a_writer_and_writing_names_its_pid(writer: tuple[Cli, Any]) -> None:
    cli, party = writer
    assert "n=0" in cli.process("item", "tree").ok().out
    refused = cli.process("item", "set", "@count", "n=1", "--json")
    assert refused.status == 7
    assert refused.out == ""
    error = json.loads(refused.err)["error"]
    assert error["code"] == "E-LOCKED"
    assert f"pid {os.getpid()}" in error["what"]
    assert f"pid {os.getpid()}" in cli("doctor").ok().out
    assert party.query(type="counter").one()["n"] == 0


def test_the_holder_of_a_home_is_named_by_its_command_and_tells_no_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["--home", "there", "serve"], ["--json", "--home=there", "serve", "--passcode", "123456"]):
        monkeypatch.setattr(sys, "argv", ["/bin/echostore", *arguments])
        with HomeLock(tmp_path / "lock"), pytest.raises(Locked) as refused:
            HomeLock(tmp_path / "lock")
        assert f"(pid {os.getpid()}: echostore serve)" in str(refused.value)


def test_watch_and_tail_follow_a_writer_until_interrupted(writer: tuple[Cli, Any]) -> None:
    cli, party = writer
    counter = party.query(type="counter").one()
    watching = cli.start("item", "watch", "@count", "--nl")
    tailing = cli.start("feed", "tail", "--follow", "--lines", "1")
    assert watching.stderr is not None
    assert watching.stdout is not None
    assert tailing.stdout is not None
    assert "watching" in watching.stderr.readline()
    assert "created as property-set@1" in tailing.stdout.readline()
    change: dict[str, Any] = {}
    for number in range(1, 6):
        counter["n"] = number
        party.flush()
        change = json.loads(watching.stdout.readline())
        assert [each["what"] for each in change["changes"]] == [f"n = {number}"]
        assert f"n = {number}" in tailing.stdout.readline()
    for process in (watching, tailing):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "Traceback" not in err
    missed = cli("item", "watch", "@count", "--since", change["anchor"], "--timeout", "0.3s")
    assert missed.status == 5
    counter["n"] = 6
    party.flush()
    resumed = cli.process("item", "watch", "@count", "--since", change["anchor"], "--count", "1", "--json").ok().json()
    assert resumed["changes"][0]["what"] == "n = 6"


def test_following_begins_with_what_was_committed_while_it_was_set_up(writer: tuple[Cli, Any]) -> None:
    cli, party = writer
    with echostore.open(cli.home, read_only=True) as peer:
        peer.party(party.key)  # as the commands do, to find the item
        party.query(type="counter").one()["n"] = 1
        party.flush()
        following = follow(peer, party.key, timeout_s=1)
        assert next(following).query(type="counter").one()["n"] == 1
        following.close()


# conventions


def test_options_may_stand_before_the_command_and_home_in_the_environment(cli: Cli) -> None:
    for arguments, more in (
        (["--home", str(cli.home), "--json", "party", "list"], {}),
        (["party", "list", "--json"], {"ECHOSTORE_HOME": str(cli.home)}),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "echostore", *arguments],
            env=cli.environment(**more),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert len(json.loads(done.stdout)["parties"]) == 1


def test_quiet_says_nothing_and_text_of_others_cannot_steer_a_terminal(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    done = cli("party", "create", "\x1b[31mred\x07\u202e", "--quiet").ok()
    assert done.err == ""
    assert "\\x1b[31mred\\x07\\u202e" in cli("party", "list").ok().out


def test_a_closed_pipe_is_no_failure_and_a_full_disk_is(cli: Cli, board: dict[str, str]) -> None:
    command = " ".join(map(repr, cli.command("feed", "tail", "--lines", "1000", "--nl")))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -1"],
        env=cli.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        failed = subprocess.run(
            cli.command("item", "tree"),
            env=cli.environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert failed.returncode == 1
    assert failed.stderr.startswith("error[E-STORAGE]: the result can't be printed")
    assert failed.stderr.count("\n") == 1


def test_a_terminal_gets_colour_unless_it_does_not_want_it(cli: Cli) -> None:
    import pty

    shown = {}
    for name, more in (("plain", {"NO_COLOR": "1"}), ("coloured", {"TERM": "xterm"})):
        leader, follower = pty.openpty()
        with subprocess.Popen(
            cli.command("party", "list"), env=cli.environment(**more), stdin=follower, stdout=follower, stderr=follower
        ) as process:
            os.close(follower)
            process.wait(60)
            shown[name] = os.read(leader, 65536).decode()
        os.close(leader)
    assert "\x1b[" not in shown["plain"]
    assert "\x1b[" in shown["coloured"]
    assert "Road trip" in shown["plain"]


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    program = (
        "import sys, time\n"
        "from echostore.cli.app import run\n"
        "statuses = [run(['--help']), run(['item', 'set', '--help']), run(['party', '--help'])]\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(statuses, heavy, time.process_time(), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    found, seconds = done.stderr.strip().rsplit(maxsplit=1)
    assert found == "[0, 0, 0] []"
    assert float(seconds) < 0.5, "three pages in one process"


def commands(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command that can be run, with its path."""
    for name in app:
        if name.startswith("-"):
            continue
        child = app[name]
        if child.default_command is not None:
            yield (*path, name), child
        yield from commands(child, (*path, name))


def test_every_command_has_two_examples_of_itself_and_is_documented() -> None:
    documented = (ROOT / "docs" / "cli.md").read_text()
    found = dict(commands(make_app()))
    assert len(found) >= 37
    assert {path[0] for path in found} == {noun for nouns in NOUNS.values() for noun in nouns}
    for path, command in found.items():
        name = " ".join(("echostore", *path))
        prologue = command.help_prologue or ""
        lines = prologue.splitlines()
        assert lines[0] == "Examples:", name
        assert len(lines) >= 3, name
        # An option may stand before the noun in an example.
        assert sum(" ".join(path) in line and line.startswith("  echostore ") for line in lines[1:]) >= 2, name
        assert f"### `{name}`\n" in documented, f"{name} is not in docs/cli.md"
        assert "--json" in {
            option for argument in command.assemble_argument_collection() for option in argument.names
        }, name
    headings = set(re.findall(r"^### `echostore (.+)`$", documented, re.MULTILINE))
    assert headings == {" ".join(path) for path in found}, "docs/cli.md tells of a command that is not there"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -5,
        1.5,
        "text",
        b"\x00\xff",
        [1, [2]],
        {"a": {"$item": "x"}, "$time": 1},
        {"$item": "not one"},
        float("inf"),
        echostore.Reference(b"f" * 8 + b"i" * 8),  # type: ignore[arg-type]  # an ItemId
    ],
)
def test_values_survive_their_json_form(value: Any) -> None:
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


def test_harmless_text_keeps_what_is_printable() -> None:
    assert harmless("Zoë 日本\n\t") == "Zoë 日本\n\t"
    assert harmless("\x1b]0;x\x07\r") == "\\x1b]0;x\\x07\\r"


def test_moments() -> None:
    from datetime import UTC, datetime, timedelta

    from echostore.cli.moments import parse_duration_s, parse_moment

    ago = parse_moment("10m")
    assert isinstance(ago, datetime)
    assert abs((datetime.now(UTC) - ago) - timedelta(minutes=10)) < timedelta(seconds=5)
    assert parse_moment("2026-05-01T10:00:00+02:00") == datetime(2026, 5, 1, 8, tzinfo=UTC)
    assert parse_moment("anchor:abc") == "anchor:abc"
    assert parse_duration_s("1.5h") == 5400
