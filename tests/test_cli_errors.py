"""Bad input and bad homes: the exit status, what the message says, and that nothing was changed."""

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

import echostore
from cli_process import Cli
from echostore.cli.app import run
from echostore.cli.failures import EXPLANATIONS
from echostore.kernel import errors
from echostore.store.home import Home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parties of one title, the first with two items of one name."""
    folder = tmp_path_factory.mktemp("errors")
    before = os.environ.get("ECHOSTORE_STATE")
    os.environ["ECHOSTORE_STATE"] = str(folder / "state")
    with echostore.open(folder / "home", name="Laptop") as peer:
        first, _ = peer.create_party("Twin"), peer.create_party("Twin")
        peer.create_party("Alone")
        first.create("property-set", type="task", title="Same")
        first.create("property-set", type="task", title="Same")
    if before is None:
        del os.environ["ECHOSTORE_STATE"]
    else:
        os.environ["ECHOSTORE_STATE"] = before
    return folder / "home"


def cli_of(home: Path) -> Cli:
    return Cli(home, home.parent / "state")


BAD = [
    # what is typed, the exit status, what the message says
    (("party", "show", "@Nobody"), 3, "no party '@Nobody' is here"),
    (("party", "show", "@Twin"), 2, "2 parties match '@Twin'"),
    (("party", "show", "zzzz"), 3, "no party 'zzzz'"),
    (("item", "tree"), 2, "there are 3 parties"),
    (("item", "get", "@Nothing", "-p", "@Alone"), 3, "no item is named 'Nothing'"),
    (("item", "get", "ffff", "-p", "@Alone"), 3, "no item starts with ffff"),
    (("item", "get", "xyz", "-p", "@Alone"), 2, "is not an item id"),
    (("item", "get", "f" * 32, "-p", "@Alone"), 3, "is not in the party"),
    (("item", "get", "echo://12/34"), 2, "is not a locator"),
    (("item", "get", f"echo://{'ab' * 32}/{'cd' * 16}"), 3, "no party"),
    (("item", "get"), 2, "ITEM"),
    (("item", "get", "--jsn"), 2, "unknown option --jsn"),
    (("item", "tree", "-p", "@Alone", "--at", "soon"), 2, "is not a moment"),
    (("item", "tree", "-p", "@Alone", "--at", "anchor:AAAA"), 2, "is not an anchor"),
    (("item", "tree", "-p", "@Alone", "--at", "99999999999999w"), 2, "is not a moment"),
    (("item", "watch", "-p", "@Alone", "--timeout", "long"), 2, "is not a length of time"),
    (("item", "create", "no-such-model", "-p", "@Alone"), 2, "is not registered"),
    (("item", "create", "property-set", "novalue", "-p", "@Alone"), 2, "is not KEY=VALUE"),
    (("item", "create", "property-set", "a..b=1", "-p", "@Alone"), 2, "is not a path"),
    (("item", "create", "property-set", 'a={"$item":"xx"}', "-p", "@Alone"), 2, "is not a value"),
    (("item", "create", "property-set", "a=99999999999999999999", "-p", "@Alone"), 4, "does not fit 64 bits"),
    (("item", "create", "property-set", "a=" + "[" * 100_000, "-p", "@Alone"), 4, "nested too deeply"),
    (("item", "create", "text", "--frob", "-p", "@Alone"), 2, "unknown option '--frob'"),
    (("item", "create", "property-set", "--parent", "ffff", "-p", "@Alone"), 3, "no item starts with ffff"),
    (("query", "--where", "nonsense", "-p", "@Alone"), 2, "is not a condition"),
    (("query", "--where", "a in 3", "-p", "@Alone"), 2, "in wants a list"),
    (("query", "--where", "@nope=1", "-p", "@Alone"), 2, "is not an attribute"),
    (("query", "--limit", "many", "-p", "@Alone"), 2, "unable to convert"),
    (("query", "--limit", "-1", "-p", "@Alone"), 2, ""),
    (("query", "--all-parties", "-p", "@Alone"), 2, "can't be given together"),
    (("feed", "tail", "ffff", "-p", "@Alone"), 3, "no feed 'ffff'"),
    (("feed", "tail", "--lines", "-3", "-p", "@Alone"), 2, "counts from 0"),
    (("party", "why", "ffff", "-p", "@Alone"), 3, "no member, device or feed"),
    (("party", "create", " "), 2, "title or name"),
    (("party", "import", "/nonexistent.car"), 3, "there is no file"),
    (("party", "import", "/dev/null"), 3, "there is no file"),
    (("party", "list", "--json", "--csv"), 2, "can't be given together"),
    (("doctor", "E-NOPE"), 3, "there is no error code"),
    (("bench", "nope"), 2, "there is no benchmark"),
    (("simulate", "--peers", "0"), 2, "peers"),
    (("simulate", "--loss", "1"), 2, "nothing would ever arrive"),
    (("frobnicate",), 2, "Unknown command"),
    (("item", "frob"), 2, 'Unknown command "frob"'),
    (("epoch",), 2, "a command is missing behind `echostore epoch`. Available commands: create, list"),
    (("epoch", "fetch", "1", "-p", "@Alone", "--from", "127.0.0.1:1"), 5, "Make sure that a peer is running there"),
    (("party", "why", "@Nobody", "-p", "@Alone"), 3, "`echostore party members` lists them"),
]


@pytest.mark.parametrize(("typed", "status", "said"), BAD, ids=lambda value: str(value)[:60])
def test_bad_input(
    home: Path,
    typed: tuple[str, ...],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, for speed: `run` is all that the command is."""
    monkeypatch.setenv("ECHOSTORE_STATE", str(home.parent / "state"))
    arguments = [*typed, "--home", str(home)] if typed[0] not in ("frobnicate",) else list(typed)
    assert run(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    if "--json" not in typed:
        assert captured.err.startswith("error[E-")
    assert captured.err.count("\n") == 1, "an error is one line"


def test_a_wrong_command_is_named_also_behind_shared_options(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for typed, said in (
        (("epoch", "frob"), 'Unknown command "frob"'),
        (("frob",), 'Unknown command "frob"'),
        (("--json", "epoch", "frob"), 'Unknown command \\"frob\\"'),
        (("epoch",), "a command is missing behind `echostore epoch`"),
        ((), "a command is missing behind `echostore`"),
    ):
        assert run(["--home", str(home), *typed]) == 2
        assert said in capsys.readouterr().err
    assert run(["--home", str(home), "party", "list"]) == 0
    assert run(["--home", str(home), "epoch", "--help"]) == 0


def test_an_ambiguous_item_name_lists_the_candidates(home: Path) -> None:
    cli = cli_of(home)
    key = cli("query", "--all-parties", "--type", "task", "--nl").ok().lines()[0]["item"]
    parties = cli("party", "list", "--nl").ok().lines()
    twin = next(
        p["party"] for p in parties if p["title"] == "Twin" and "Same" in cli("item", "tree", "-p", p["party"]).out
    )
    done = cli("item", "get", "@Same", "--party", twin)
    assert done.status == 2
    assert "2 items are named 'Same'" in done.err
    assert key[:8] in done.err


def test_missing_home(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "nowhere", tmp_path / "state")
    for arguments in (("party", "list"), ("item", "set", "abcd", "a=1"), ("feed", "verify")):
        done = cli.process(*arguments)
        assert (done.status, done.out) == (3, "")
        assert done.err.startswith("error[E-NOT-FOUND]: There is no home at")
        assert "echostore init" in done.err
    assert not (tmp_path / "nowhere").exists()
    assert cli("doctor").status == 0


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    done = Cli(tmp_path / "photos", tmp_path / "state")("party", "create", "x")
    assert done.status == 4
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    assert Cli(tmp_path / "photos" / "cat.jpg", tmp_path / "state")("init").status == 2


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    """Root may write everywhere but here."""
    closed = Path("/sys/kernel/echostore-test") if os.geteuid() == 0 else tmp_path / "closed" / "home"
    if os.geteuid() != 0:
        closed.parent.mkdir(mode=0o500)
    done = Cli(closed, tmp_path / "state")("init")
    assert done.status in (1, 4)
    assert str(closed) in done.err


# what stayed as it was


def test_a_failed_read_does_not_speak_of_changes(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    failed = [cli("status"), cli("query", "--bogus"), cli("frobnicate")]
    cli("party", "create", "Trip").ok()
    failed += [cli("item", "show", "abcdef99"), cli("query", "--where", "=="), cli("blob", "get", "nothing")]
    for ran in failed:
        assert ran.status != 0
        assert "was changed" not in ran.err, ran.err


def test_a_command_that_made_a_home_and_failed_does_not_say_that_nothing_was_changed(tmp_path: Path) -> None:
    ran = Cli(tmp_path / "home", tmp_path / "state")("party", "create", "x" * 100_000)
    assert ran.status != 0
    assert (tmp_path / "home" / "keys").exists()
    assert "was changed" not in ran.err


def test_who_may_not_write_because_of_another_process_is_told_that_nothing_was_changed(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("party", "create", "Trip").ok()
    with Home.open(tmp_path / "home").lock():
        ran = cli("party", "create", "Other")
    assert ran.status == 7
    assert "Nothing was changed." in ran.err
    assert len(cli("party", "list", "--json").ok().json()["parties"]) == 1


def test_bad_json_on_standard_input_changes_nothing(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    cli("party", "create", "T").ok()
    item = cli("item", "create", "property-set", "a=1").ok().out.strip()
    for text, said in (
        ("{bad", "standard input is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"": 1}', "a key has"),
    ):
        done = cli("item", "set", item, "b=2", "-", stdin=text)
        assert done.status in (2, 4)
        assert said in done.err
    assert cli("item", "get", item, "--json").ok().json()["value"] == {"a": 1}
    assert cli("item", "set", "-", "-", stdin=item).status == 2


def damage(path: Path, old: bytes, new: bytes) -> None:
    """Change bytes of a closed SQLite file behind its back."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    raw = path.read_bytes()
    assert old in raw, "nothing to damage"
    path.write_bytes(raw.replace(old, new))


def test_a_damaged_block_is_found_and_named(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    key = cli("party", "create", "T", "--json").ok().json()["party"]
    cli("item", "create", "property-set", "word=precious").ok()
    damage(tmp_path / "home" / "parties" / key / "feeds.db", b"precious", b"worthles")
    done = cli.process("feed", "verify", "--json")
    assert done.status == 6
    (bad,) = [feed for feed in done.json()["feeds"] if not feed["sound"]]
    assert (bad["seq"], bad["party"]) == (1, key)
    assert bad["feed"][:8] in done.err
    full = cli("doctor", "--full", "--json")
    assert full.status == 6
    assert any(check["level"] == "broken" and "seq 1" in check["what"] for check in full.json()["checks"])


def test_a_file_of_garbage_breaks_one_party_and_not_the_others(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    broken = cli("party", "create", "Broken", "--json").ok().json()["party"]
    cli("party", "create", "Whole").ok()
    for name in ("feeds.db", "feeds.db-wal", "feeds.db-shm"):
        (tmp_path / "home" / "parties" / broken / name).unlink(missing_ok=True)
    (tmp_path / "home" / "parties" / broken / "feeds.db").write_bytes(b"garbage" * 1000)
    done = cli.process("item", "tree", "--party", "@Broken", "--json")
    assert done.status == 6
    assert json.loads(done.err)["error"]["code"] == "E-CORRUPT"
    assert cli("item", "tree", "--party", "@Whole").ok().out == "Whole\n"
    told = cli("status", "--json")
    assert told.status == 6
    status = told.json()
    assert [("error" in party) for party in sorted(status["parties"], key=lambda party: party["title"])] == [
        True,
        False,
    ]
    assert cli("doctor").status == 6
    assert cli("party", "forget", "@Broken", "--yes", "--json").ok().json()["unreadable"]
    assert cli("doctor").status == 0


def test_a_damaged_key_file_is_an_integrity_error(tmp_path: Path, home: Path) -> None:
    shutil.copytree(home, tmp_path / "home")
    keys = tmp_path / "home" / "keys"
    keys.write_bytes(keys.read_bytes()[:-1] + b"?")
    cli = Cli(tmp_path / "home", tmp_path / "state")
    assert cli("party", "list").status == 6
    assert cli("doctor").status == 6


def test_a_sealed_home_wants_its_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "state")
    monkeypatch.setenv("ECHOSTORE_PASSPHRASE", "correct horse")
    cli("init", "--protect").ok()
    assert cli("identity", "show", "--json").ok().json()["protected"] is True
    monkeypatch.setenv("ECHOSTORE_PASSPHRASE", "wrong")
    assert cli("identity", "show").status == 4
    monkeypatch.delenv("ECHOSTORE_PASSPHRASE")
    done = cli("identity", "show")
    assert done.status == 4
    assert done.err.startswith("error[E-PASSPHRASE]")


def test_an_unexpected_error_is_one_line_and_a_traceback_on_request(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(*_: object) -> None:
        raise KeyError("boom")

    monkeypatch.setattr("echostore.cli.party.reading", explode)
    assert run(["party", "list", "--home", str(home)]) == 1
    plain = capsys.readouterr().err
    assert plain.startswith("error[E-UNEXPECTED]: KeyError: 'boom'.")
    assert "--trace" in plain
    assert "Traceback" not in plain
    assert run(["party", "list", "--home", str(home), "--trace"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_every_code_is_explained() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EchoError)]
    for kind in kinds:
        assert f"xit status {kind.exit_status}" in EXPLANATIONS[kind.code].replace("\n", " "), kind.code
