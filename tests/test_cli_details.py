"""Small promises of the command line: whole ids for programs, plain words for people, nothing left behind."""

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import echostore
from cli_process import Cli
from echostore.kernel.errors import EchoError, NotFound, StorageFailed
from echostore.kernel.ids import item_text
from echostore.store.sqlite import never_changes

PYTHON_WORDS = re.compile(
    r"\bNone\b|\bdict\b|\bstr\b|\bint\b|object has no|not subscriptable|__\w+=|argument must|tuple|Traceback|datetime"
)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    made = Cli(tmp_path / "home", tmp_path / "state")
    made("init", "--name", "Laptop").ok()
    made("party", "create", "Trip").ok()
    return made


def ids_in(document: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a JSON document that looks like an id, with where it stands. Lines for people are not ids."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key not in ("what", "because", "truth", "summary"):
                yield from ids_in(value, f"{place}.{key}")
    elif isinstance(document, list):
        for value in document:
            yield from ids_in(value, place)
    elif isinstance(document, str):
        for word in re.split(r"[:/]", document):
            if re.fullmatch(r"(?=.*[0-9])[0-9a-f]{6,}", word) and not word.isdigit():
                yield place, word


# what was deleted


def test_deleted_items_are_left_out_of_trees_unless_asked_for(cli: Cli) -> None:
    board = cli("item", "create", "property-set", "--type", "board", "title=Board", "--json").ok().json()["item"]
    task = cli("item", "create", "property-set", "title=Task", "--parent", board, "--json").ok().json()["item"]
    note = cli("item", "create", "text", "x", "--parent", task, "--json").ok().json()["item"]
    cli("item", "delete", task, "--yes").ok()
    shown = cli("item", "tree", "--json").ok().json()["items"]
    assert [row["item"] for row in shown] == [board]
    everything = cli("item", "tree", "--deleted", "--json").ok().json()["items"]
    assert [(row["item"], row["deleted"]) for row in everything] == [(board, False), (task, True), (note, True)]
    drawn = cli("item", "tree", "--deleted").ok().out.splitlines()
    assert [line.count("(deleted)") for line in drawn] == [0, 0, 1, 1]
    assert "(deleted)" in cli("item", "tree", task).ok().out
    with echostore.open(cli.home, read_only=True) as peer:
        party = peer.party("@Trip")
        above, below = party.get(board), party.get(task)
        assert [item.id for item in party.roots()] == [above.id]
        assert above.children() == above.embedded() == below.children() == []
        assert above.children(deleted=True) == above.embedded(deleted=True) == [below]
        assert [item_text(item.id) for item in below.children(deleted=True)] == [note]
        assert [item.id for item in party.items()] == [above.id]
        assert len(party.items(deleted=True)) == 3
        assert above.metadata["embedded_items"] == [below.reference], "the tree itself, as it is"


def test_deleting_a_root_hides_it_from_the_roots(cli: Cli) -> None:
    made = cli("item", "create", "property-set", "title=Gone", "--json").ok().json()["item"]
    cli("item", "delete", made, "--yes").ok()
    assert cli("item", "tree", "--json").ok().json()["items"] == []
    assert [row["item"] for row in cli("item", "tree", "--deleted", "--json").ok().json()["items"]] == [made]
    with echostore.open(cli.home, read_only=True) as peer:
        party = peer.party("@Trip")
        assert party.roots() == []
        assert [item.deleted for item in party.roots(deleted=True)] == [True]


# ids


def test_json_has_no_shortened_ids(cli: Cli) -> None:
    item = cli("item", "create", "property-set", "--type", "task", "title=A", "--json").ok().json()["item"]
    cli("item", "set", item, "title=B").ok()
    other = cli("item", "create", "property-set", "--parent", item, f'to={{"$item":"{item}"}}', "--json").ok().json()
    identity = cli("identity", "show", "--json").ok().json()["identity"]
    for arguments in (
        ("item", "history", item),
        ("item", "tree"),
        ("item", "get", other["item"]),
        ("party", "why", identity),
        ("party", "show"),
        ("party", "list"),
        ("party", "members"),
        ("feed", "list"),
        ("feed", "tail"),
        ("feed", "verify"),
        ("blob", "list"),
        ("query",),
        ("status",),
    ):
        document = cli(*arguments, "--json").ok().json()
        for place, found in ids_in(document):
            assert len(found) in (32, 64), (arguments, place, found)


def test_places_are_whole_for_programs_and_short_for_people(cli: Cli) -> None:
    item = cli("item", "create", "property-set", "title=A", "--json").ok().json()["item"]
    feeds = {row["kind"]: row["feed"] for row in cli("feed", "list", "--json").ok().json()["feeds"]}
    revision = cli("item", "history", item, "--json").ok().json()["revisions"][0]
    assert (revision["feed"], revision["place"]) == (feeds["data"], f"{feeds['data']}:{revision['seq']}")
    assert f"{feeds['data'][:8]}:{revision['seq']}" in cli("item", "history", item).ok().out.split()
    steps = cli("party", "why", feeds["data"], "--json").ok().json()["steps"]
    assert {step["place"] for step in steps} == {f"{feeds['control']}:0"}
    assert f"{feeds['control'][:8]}:0" in cli("party", "why", feeds["data"]).ok().out.split()


# homes


def exported(cli: Cli, file: Path) -> bytes:
    cli("item", "create", "property-set", "title=A").ok()
    cli("party", "export", "@Trip", str(file)).ok()
    return file.read_bytes()


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
@pytest.mark.parametrize("damage", ["not a party at all", "a flipped byte at the end"])
def test_a_failed_import_leaves_no_new_home(cli: Cli, tmp_path: Path, there: str, damage: str) -> None:
    whole = exported(cli, tmp_path / "trip.car")
    bad = tmp_path / "bad.car"
    bad.write_bytes(b"hello" if damage == "not a party at all" else whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    other = Cli(tmp_path / "a" / "b" / "other", tmp_path / "other-state")
    if there == "an empty folder":
        other.home.mkdir(parents=True)
    before = sorted(path.relative_to(tmp_path) for path in (tmp_path / "a").rglob("*"))
    assert other("party", "import", str(bad)).status == 6
    assert (tmp_path / "a").exists() == (there == "an empty folder")
    assert sorted(path.relative_to(tmp_path) for path in (tmp_path / "a").rglob("*")) == before
    assert [path for path in (tmp_path / "other-state").rglob("*") if path.is_file()] == []
    other("party", "import", str(tmp_path / "trip.car")).ok()
    assert [party["title"] for party in other("party", "list", "--json").ok().json()["parties"]] == ["Trip"]


def test_a_failed_import_keeps_a_home_that_was_there(cli: Cli, tmp_path: Path) -> None:
    bad = tmp_path / "bad.car"
    bad.write_bytes(b"hello")
    assert cli("party", "import", str(bad)).status == 6
    assert len(cli("party", "list", "--json").ok().json()["parties"]) == 1
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    assert Cli(folder, tmp_path / "state")("party", "import", str(bad)).status == 4
    assert (folder / "mine.txt").read_text() == "mine"


def test_status_tells_of_a_broken_party_by_its_exit_status_and_shows_the_others(cli: Cli) -> None:
    cli("party", "create", "Whole").ok()
    broken = cli("party", "list", "--json").ok().json()["parties"][0]["party"]
    assert cli("status").status == 0
    feeds = cli.home / "parties" / broken / "feeds.db"
    feeds.write_bytes(b"garbage" * 1000)
    done = cli("status")
    assert done.status == 6
    assert "unreadable" in done.out
    assert "Whole: all 2 blocks held" in done.out
    feeds.unlink()
    assert cli("status", "--json").status == 6


def test_party_show_tells_the_state(cli: Cli) -> None:
    assert cli("party", "show", "--json").ok().json()["state"] == "active"
    cli("party", "pause").ok()
    assert cli("party", "show", "--json").ok().json()["state"] == "paused"
    assert "state      paused" in cli("party", "show").ok().out


def damage_header(path: Path) -> None:
    path.write_bytes(b"garbage!" + path.read_bytes()[8:])


def damage_rows(path: Path) -> None:
    raw = path.read_bytes()
    assert b"active" in raw
    path.write_bytes(raw.replace(b"active", b"asleep"))


def damage_settings(path: Path) -> None:
    raw = path.read_bytes()
    assert b'{"control"' in raw
    path.write_bytes(raw.replace(b'{"control"', b'}"control"'))


@pytest.mark.parametrize("damage", [damage_header, damage_rows, damage_settings])
def test_the_advice_for_a_damaged_meta_db_works(cli: Cli, damage: Callable[[Path], None]) -> None:
    item = cli("item", "create", "property-set", "title=A", "--json").ok().json()["item"]
    damage(cli.home / "meta.db")
    found = cli("doctor", "--json")
    assert found.status == 6
    (broken,) = [check for check in found.json()["checks"] if check["level"] == "broken"]
    assert "meta.db" in broken["what"]
    advised = re.findall(r"`echostore ([^`]*)`", broken["next_step"])
    *advised, last = advised
    assert advised == ["init", "init --name NAME"], "and not `doctor`, which would only say the same again"
    assert last == "serve --connect HOST:PORT", "addresses went with the file"
    for command in advised:
        cli(*command.replace("NAME", "Laptop").split()).ok()
    after = cli("doctor", "--json").ok().json()
    assert after["sound"], after
    assert cli("identity", "show", "--json").ok().json()["name"] == "Laptop"
    assert [row["item"] for row in cli("item", "tree", "--json").ok().json()["items"]] == [item]
    cli("item", "set", item, "title=B").ok()


def test_doctor_never_sends_people_back_to_itself(cli: Cli) -> None:
    party = cli("party", "list", "--json").ok().json()["parties"][0]["party"]
    folder = cli.home / "parties" / party
    cli("item", "create", "property-set", "title=A").ok()
    for name in ("feeds.db", "items.db"):
        whole = (folder / name).read_bytes()
        for at in (0, 18, 100, 4096 + 3, len(whole) - 20):
            (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
            for check in cli("doctor", "--full", "--json").json()["checks"]:
                assert "echostore doctor" not in check["next_step"], (name, at, check)
        (folder / name).write_bytes(whole)


# homes that can't be written


def as_nobody(action: Callable[[], Any]) -> Any:
    """Run something in a child process that folder modes bind; its result, or the error's words, come back as JSON."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            try:
                told = action()
            except EchoError as error:
                told = {"error": error.code, "what": str(error)}
            os.write(write_end, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home whose folders and files can only be read, also by their owner."""
    # Not below tmp_path, whose own folders others can't pass through.
    folder = Path(tempfile.mkdtemp(prefix="echostore-sealed-"))
    monkeypatch.setenv("ECHOSTORE_STATE", str(folder / "state"))
    with echostore.open(folder / "home", name="Laptop") as peer:
        party = peer.create_party("Trip")
        party.create("property-set", type="task", title="A")
        party.snapshot()
    with echostore.open(folder / "home", read_only=True) as peer:  # loads every module that the child will need
        read(peer)
    yield folder / "home"
    seal(folder / "home", 0o700)
    shutil.rmtree(folder)


def seal(home: Path, mode: int) -> None:
    home.parent.chmod(0o755)
    for path in [home, *home.rglob("*")]:
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
        path.chmod(mode if path.is_dir() else mode & 0o600)


def read(peer: echostore.Peer) -> dict[str, Any]:
    party = peer.party("@Trip")
    return {"titles": [item["title"] for item in party.query(type="task").all()], "cid": party.snapshot().cid}


def test_a_home_on_read_only_media_can_be_read(sealed: Path) -> None:
    with echostore.open(sealed, read_only=True) as peer:
        expected = read(peer)
    party = next((sealed / "parties").iterdir())
    for left in [*sealed.glob("*-shm"), *party.glob("*-shm"), *sealed.glob("*-wal"), *party.glob("*-wal")]:
        left.unlink()
    seal(sealed, 0o500)

    def look() -> Any:
        with echostore.open(sealed, read_only=True) as peer:
            return read(peer)

    assert as_nobody(look) == expected
    assert expected["titles"] == ["A"]
    assert as_nobody(lambda: never_changes(sealed / "meta.db")) is True


def test_a_log_that_nobody_can_take_in_is_told_and_not_passed_over(sealed: Path) -> None:
    """With `immutable` SQLite would leave the log unread: acknowledged writes would be missing without a word."""
    child = os.fork()
    if child == 0:
        peer = echostore.open(sealed, background=False)
        peer.party("@Trip").create("property-set", type="task", title="B")
        peer.flush()
        os.kill(os.getpid(), signal.SIGKILL)  # the log stays
    os.waitpid(child, 0)
    party = next((sealed / "parties").iterdir())
    assert (party / "feeds.db-wal").stat().st_size > 0
    for left in party.glob("*-shm"):
        left.unlink()
    seal(sealed, 0o500)

    def look() -> Any:
        assert not never_changes(party / "feeds.db")
        with echostore.open(sealed, read_only=True) as peer:
            return read(peer)["titles"]

    told = as_nobody(look)
    assert told["error"] == StorageFailed.code, told
    assert "Copy the home" in told["what"]
    seal(sealed, 0o700)
    assert sorted(as_nobody(look)) == ["A", "B"]


def test_a_folder_that_can_be_written_is_never_taken_for_fixed(cli: Cli) -> None:
    assert not never_changes(cli.home / "meta.db")


# what people read


def test_nested_special_values_are_tagged_once_in_tables(cli: Cli) -> None:
    time = '{"$time":"2026-01-01T00:00:00Z"}'
    item = cli("item", "create", "property-set", f'deep={{"x":{time}}}', f"when={time}", "--json").ok().json()["item"]
    cli("item", "set", item, f'to={{"$item":"{item}"}}').ok()
    text = cli("query").ok().out
    assert '{"x":{"$time":"2026-01-01T00:00:00Z"}}' in text
    assert "$map" not in text
    assert f"→{item[:8]}" in text
    assert "  2026-01-01T00:00:00Z\n" in text
    rows = cli("query", "--csv").ok().out
    assert item in rows
    assert "$map" not in rows
    anchor = cli("item", "set", item, f'deep={{"x":{{"y":{time}}}}}', "--json").ok().json()["anchor"]
    cli("item", "set", item, "deep=1").ok()
    changed = cli("item", "diff", item, anchor).ok().out
    assert '{"x":{"y":{"$time":"2026-01-01T00:00:00Z"}}}' in changed


NONSENSE = [
    (("query", "--where", "done=="), "== wants a value"),
    (("query", "--where", "done="), "= wants a value"),
    (("query", "--where", "done= "), "= wants a value"),
    (("query", "--where", "done==="), "=== is not a comparison"),
    (("query", "--where", "n=>3"), "=> is not a comparison"),
    (("query", "--where", "n<>3"), "<> is not a comparison"),
    (("query", "--where", "n<null"), "nothing is less or greater than null"),
    (("query", "--where", "n in 3"), "in wants a list of values, not a number"),
    (("query", "--where", "n startswith 3"), "startswith wants text or bytes, not a number"),
    (("query", "--where", "n startswith"), "startswith wants a value"),
    (("query", "--where", "n missing 3"), "missing takes no value"),
    (("query", "--where", "@type=3"), "a type is text, not a number"),
    (("query", "--where", "@parent=xx"), "does not name an item"),
    (("query", "--where", "@nope=1"), "is not an attribute"),
    (("query", "--where", "@created>soon"), "is not a moment"),
    (("query", "--where", '@created>"soon"'), "is not a time"),
    (("query", "--where", "a..b=1"), "a step of it is empty"),
    (("query", "--order", ""), "a step of it is empty"),
    (("query", "--select", "a,,b"), "a step of it is empty"),
    (("query", "--limit", "0"), "counts from 1"),
    (("query", "--limit", "many"), "into a whole number"),
    (("item", "tree", "--depth", "-1"), "counts from 1"),
    (("item", "watch", "--count", "0"), "counts from 1"),
    (("item", "create", "property-set", 'a={"$time":3}'), "a time is written as text"),
    (("item", "create", "property-set", 'a={"$time":"noon"}'), "a time is written as text"),
    (("item", "create", "property-set", 'a={"$bytes":3}'), "bytes in base64 is written as text"),
    (("item", "create", "property-set", 'a={"$bytes":"?"}'), "written in base64"),
    (("item", "create", "property-set", 'a={"$map":3}'), "a map is written as a JSON object"),
    (("item", "create", "property-set", 'a={"$blob":3}'), "a blob has cids"),
    (("item", "create", "property-set", 'a={"$blob":{"cids":[3],"size":1}}'), "a CID is written as text"),
    (("item", "create", "property-set", 'a={"$item":3}'), "an item is written as text"),
    (("item", "create", "property-set", 'a={"$item":"zz"}'), "32 hex digits"),
    (("item", "create", "property-set", 'a={"$float":{}}'), "a special number"),
    (("item", "create", "growable-array", '{"$map":3}'), "a map is written as a JSON object"),
    (("item", "create", "property-set", "--type", "system"), "is the party's own"),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    folder = tmp_path_factory.mktemp("details")
    made = Cli(folder / "home", folder / "state")
    made("init").ok()
    made("party", "create", "Trip").ok()
    return made


@pytest.mark.parametrize(("typed", "said"), NONSENSE, ids=lambda value: str(value)[:60])
def test_mistakes_are_told_in_plain_words(shared: Cli, typed: tuple[str, ...], said: str) -> None:
    done = shared(*typed)
    assert (done.status, done.out) == (2, ""), done
    assert said in done.err
    assert not PYTHON_WORDS.search(done.err), done.err
    assert done.err.count("\n") == 1


def test_what_is_right_instead_of_an_empty_value_works(cli: Cli) -> None:
    cli("item", "create", "property-set", 'title=""', "n=1").ok()
    cli("item", "create", "property-set", "title==x", "n=2").ok()
    advice = cli("query", "--where", "title==").err
    assert """Write 'title==""' for the empty text""" in advice
    for condition, found in (
        ('title==""', 1),
        ('title=""', 1),
        ('title="=x"', 1),
        ("n missing", 0),
        ("title!=x", 2),
        ("n>=2", 1),
    ):
        assert cli("query", "--where", condition, "--count").ok().out == f"{found}\n", condition


def test_an_error_is_made_of_sentences() -> None:
    error = NotFound("no party is here", next_step="Make one")
    assert str(error) == "no party is here. Make one."
    assert str(EchoError("Why?", unchanged="")) == "Why?"
    assert str(EchoError("It broke.", unchanged="All is kept")) == "It broke. All is kept."


def test_an_empty_party_says_so(cli: Cli) -> None:
    assert "party show --snapshot" in cli("blob", "list").ok().err
    assert cli("query", "--json").ok().json()["items"] == []
    assert cli("party", "show", "--json").ok().json()["items"] == 0
    assert cli("query", "--count").ok().out == "0\n"
    cli("item", "create", "property-set", "title=A").ok()
    assert cli("party", "show", "--json").ok().json()["items"] == 1
    assert cli("query", "--count").ok().out == "1\n"
    assert cli("query", "--type", "system", "--select", "title", "--json").ok().json()["items"][0]["values"] == {
        "title": "Trip"
    }
    assert cli("item", "get", "@Trip").status == 3, "the party's name is not the name of an item"


def test_the_time_of_creation_is_a_time(cli: Cli) -> None:
    before = datetime.now(UTC)
    cli("item", "create", "property-set", "title=A").ok()
    (row,) = cli("query", "--select", "title,@created", "--json").ok().json()["items"]
    shown = datetime.fromisoformat(row["values"]["@created"]["$time"])
    assert before - timedelta(seconds=1) <= shown <= datetime.now(UTC)
    assert shown.isoformat().replace("+00:00", "Z") in cli("query", "--select", "@created").ok().out
    for condition, found in (
        ("@created>1h", 1),
        ("@created<1h", 0),
        (f"@created>{before.date().replace(year=2000)}", 1),
        (f"@created={shown.isoformat()}", 1),
        ('@created>"2000-01-01T00:00:00Z"', 1),
        ('@created<{"$time":"2000-01-01T00:00:00Z"}', 0),
        ("@created exists", 1),
        ("@created=null", 0),
    ):
        assert cli("query", "--where", condition, "--count").ok().out == f"{found}\n", condition
