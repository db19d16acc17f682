"""Epochs as a user meets them: after `epoch gc`, on a newcomer, with files lost, and on what can't be written."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_process import Cli
from echostore.kernel.errors import Compacted
from echostore.kernel.ids import item_text
from echostore.peer.base_damage import missing
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from network_peers import address, invited, peers
from served import serve
from two_peers import open_quiet


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def written(home: Path, *, epochs: int = 3, gc: bool = False) -> list[Any]:
    """A party with so many epochs and a tail; the anchors at the epochs' moments."""
    with open_quiet(home) as peer:
        party = peer.create_party("Trip")
        item = party.create("property-set", type="task", title="tickets", n=0)
        anchors = []
        for number in range(epochs):
            item["n"] = number
            anchors.append(party.flush().anchor)
            Epochs(party).create()
        item["n"] = 100
        party.flush()
        if gc:
            run_gc(party)
    return anchors


def lose_blobs(home: Path) -> None:
    found = [*home.glob("parties/*/blobs.db*")]
    assert found
    for file in found:
        file.unlink()


# after gc


def test_epochs_whose_blobs_are_gone_are_listed_without_a_size(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home, gc=True)
    cli = Cli(home, tmp_path / "state")
    lines = cli("epoch", "list").ok().out.splitlines()
    assert len(lines) >= 3
    sizes = {each["number"]: each["new_bytes"] for each in cli("epoch", "list", "--json").ok().json()["epochs"]}
    assert sizes[3] > 0
    assert sizes[2] is None


def test_an_epoch_is_shown_with_all_that_its_genesis_names(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home, epochs=1)
    cli = Cli(home, tmp_path / "state")
    cli("epoch", "create", "--discard-before", "2020-01-01").ok()
    first, second = (cli("epoch", "show", number, "--json").ok().json() for number in ("1", "2"))
    assert first["previous_snapshot"] is None
    assert second["previous_snapshot"] == first["cid"]
    assert second["previous"] == first["hash"]
    assert (first["discard_before"], second["discard_before"][:4]) == (None, "2020")
    assert second["models"] == ["property-set@1"]
    assert second["encoding"] >= 1
    assert first["party"] == second["party"] == cli("epoch", "show", "0", "--json").ok().json()["party"]
    assert "property-set@1" in cli("epoch", "show", "2").ok().out


def test_what_was_freed_is_not_judged(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home, gc=True)
    cli = Cli(home, tmp_path / "state")
    found = cli("epoch", "verify", "2", "--json")
    assert (found.status, found.json()["verdict"]) == (4, "abstains")
    assert "not here" in found.json()["detail"]
    cli("epoch", "create").ok()
    cli("epoch", "verify", "4").ok()


def test_epoch_zero_holds_no_state(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home, epochs=1)
    cli = Cli(home, tmp_path / "state")
    cli("epoch", "show", "0").ok()
    for verb in ("verify", "fetch"):
        ran = cli("epoch", verb, "0")
        assert ran.status == 3
        assert "the party's genesis" in ran.err


def test_the_moment_where_feeds_begin_is_read_from_its_snapshot(tmp_path: Path) -> None:
    """The party stands on a later epoch, and the last block of the earlier one is gone: its link is enough."""
    home = tmp_path / "home"
    anchors = written(home)
    with open_quiet(home) as peer:
        party = peer.party("@Trip")
        blobs = party.runtime.blobs
        assert blobs is not None
        kept = {cid: blobs.get(cid) for cid, _ in blobs.list()}
        run_gc(party)
    with open_quiet(home) as peer:
        party = peer.party("@Trip")
        with pytest.raises(Compacted):
            party.as_of(2)
        assert party.runtime.blobs is not None
        party.runtime.blobs.put_many(kept)
    with open_quiet(home) as peer:
        party = peer.party("@Trip")
        assert party.as_of(2).query(type="task").all()[0]["n"] == 1
        assert len(list(party.stream(after=anchors[1]))) == 2, "what came after it, and no complaint"
        with pytest.raises(Compacted):
            party.stream(after=anchors[0])


def test_history_says_that_some_of_it_is_gone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home)
    cli = Cli(home, tmp_path / "state")
    whole = cli("item", "history", "@tickets", "--json").ok()
    assert (whole.json()["compacted"], whole.err) == (0, "")
    cli("epoch", "gc", "--yes").ok()
    rest = cli("item", "history", "@tickets", "--json").ok()
    assert rest.json()["compacted"] > 0
    assert "not here any more" in rest.err


def test_feeds_say_where_they_begin_and_parties_on_what_they_stand(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home)
    cli = Cli(home, tmp_path / "state")
    assert {feed["start"] for feed in cli("feed", "list", "--json").ok().json()["feeds"]} == {0}
    assert "only as" not in cli("status").ok().out
    cli("epoch", "gc", "--yes").ok()
    data = next(feed for feed in cli("feed", "list", "--json").ok().json()["feeds"] if feed["kind"] == "data")
    assert 0 < data["start"] < data["held"]
    shown = cli("party", "show", "--json").ok().json()
    assert shown["epoch"] == 3
    gone = sum(feed["start"] for feed in shown["feeds"])
    assert f"{gone} of them only as epoch 3" in shown["truth"]
    assert f"on disk from {data['start']} on" in cli("party", "show").ok().out


# nothing new


@pytest.mark.parametrize("discards", [False, True])
def test_an_epoch_of_what_did_not_change_is_refused_also_on_top_of_one_that_discarded(
    tmp_path: Path, discards: bool
) -> None:
    home = tmp_path / "home"
    written(home, epochs=1)
    cli = Cli(home, tmp_path / "state")
    cli("item", "create", "property-set", "title=Gone").ok()
    cli("item", "delete", "@Gone", "--yes").ok()
    more = ("--discard-before", "now", "--yes") if discards else ()
    cli("epoch", "create", *more).ok()
    for command in ((), ("--dry-run",), more, (*more, "--dry-run")):
        ran = cli("epoch", "create", *command)
        assert ran.status == 4, (command, ran)
        assert "nothing has changed since epoch 2" in ran.err
    cli("item", "create", "property-set", "title=New").ok()
    cli("item", "delete", "@New", "--yes").ok()
    assert cli("epoch", "create", "--json").ok().json()["number"] == 3
    assert cli("epoch", "create", "--discard-before", "now", "--dry-run", "--json").ok().json()["left_out"]["items"] > 0
    assert cli("epoch", "create", "--discard-before", "now", "--yes", "--json").ok().json()["number"] == 4, (
        "less is left"
    )
    assert cli("epoch", "create").status == 4


def test_the_keeper_declares_nothing_while_nobody_writes(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        party.members.set_policy({"epoch.messages": b"1", "epoch.discard_age_s": b"1"})
        party.create("text")
        party.flush()
        declared = [kept.declared for _ in range(4) for kept in peer.epoch_keeper.tick()]
        assert [made.number for made in declared if made is not None] == [1]


def test_who_looks_for_a_discarded_item_is_told_where_it_may_be(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home, epochs=1)
    cli = Cli(home, tmp_path / "state")
    gone = cli("item", "create", "property-set", "title=Gone", "--json").ok().json()["item"]
    cli("epoch", "create").ok()
    assert "revive" not in cli("item", "get", "@Other").err, "nothing was left out yet"
    cli("item", "delete", "@Gone", "--yes").ok()
    cli("epoch", "create", "--discard-before", "now", "--yes").ok()
    for verb in ("get", "restore"):
        ran = cli("item", verb, "@Gone")
        assert ran.status == 3
        assert "no item is named 'Gone'" in ran.err
        assert "--at epoch:2" in ran.err
        assert "echostore party revive ID" in ran.err
    with serve(tmp_path, home.name) as running:
        assert "--at epoch:2" in running.cli("item", "restore", "@Gone").err, "of a running peer too"
    assert cli("item", "get", "@Gone", "--at", "epoch:2", "--json").ok().json()["item"] == gone
    assert cli("item", "get", "@Never", "--at", "epoch:2").status == 3
    cli("party", "revive", gone).ok()


# newcomers


def test_a_newcomer_without_an_epoch_says_why_it_takes_the_whole_history(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        party.create("property-set", type="task", n=0)
        found = invited(ann, party, bob).status
        assert found.began == "from its whole history: the party has no epoch that a newcomer may believe"
        assert (found.epoch, {feed.start for feed in found.feeds}) == (None, {0})
        assert party.status.began == "", "who made it began with nothing"


def test_a_guest_that_began_from_an_epoch_judges_nothing_that_it_never_had(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "bob") as (ann, bob):
        party = ann.create_party("Trip")
        party.create("property-set", type="task", n=0)
        Epochs(party).create()
        guest = invited(ann, party, bob)
        assert guest.status.began.startswith("from epoch 1: ")
        assert guest.status.epoch == 1
        starts = {feed.key: (feed.start, feed.held) for feed in guest.status.feeds if feed.kind == "data"}
        assert starts[party.runtime.data.cursor.key] == (2, 2)
        found = Epochs(guest).verify(1)
        assert (str(found.verdict), found.detail) == ("abstains", "the history that it sums up is not here")


# views


def test_a_view_that_no_epoch_has_is_opened_from_the_history_that_comes(tmp_path: Path) -> None:
    """On a device that holds nothing but the locator: of a party without an epoch, and of one whose epoch is older."""
    with peers(tmp_path, "ann") as (ann,):
        ann.view_classes.register("example.org/planner")
        for title, epochs in (("Without", 0), ("Older", 1)):
            party = ann.create_party(title)
            party.create("property-set", type="task")
            for _ in range(epochs):
                Epochs(party).create()
            view = party.create_view("example.org/planner", "Planner")
            text = party.create("text", parent=view)
            party.flush()
            home = tmp_path / f"guest of {title}"
            with open_quiet(home) as guest:
                guest.enter(party.members.admit(guest.request_join(party.key)))
                party.flush()
            cli = Cli(home, tmp_path / "state")
            shown = cli("view", "open", view.locator, "--from", address(ann), "--json").ok().json()
            assert shown["display_name"] == "Planner"
            assert shown["items"] == [item_text(view.id), item_text(text.id)]
            with serve(tmp_path, home.name) as running:
                again = running.cli("view", "open", view.locator, "--from", address(ann), "--json").ok().json()
            assert again["items"] == shown["items"], "a running peer has it too"


# lost and damaged files


def test_a_party_whose_history_is_whole_does_without_lost_blobs(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home)
    cli = Cli(home, tmp_path / "state")
    before = cli("party", "show", "--snapshot", "--json").ok().json()["snapshot"]
    lose_blobs(home)
    assert cli("epoch", "verify", "2").ok(), "a reader"
    assert cli("party", "show", "--snapshot", "--json").ok().json()["snapshot"] == before
    cli("item", "set", "@tickets", "n=7").ok()
    assert cli("epoch", "verify", "3").ok()
    cli("epoch", "create").ok()
    shown = cli("party", "show", "--json").ok().json()
    assert shown["epoch"] == 4, "it stands on an epoch again"
    assert cli("doctor", "--full").ok()


def test_lost_blobs_of_a_truncated_party_are_damage_and_named(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home, gc=True)
    cli = Cli(home, tmp_path / "state")
    cli("party", "create", "Other").ok()
    lose_blobs(home)
    for command in (("item", "tree"), ("item", "create", "text", "x"), ("epoch", "gc", "--yes"), ("item", "tree")):
        ran = cli(*command, "--party", "@Trip")
        assert ran.status == 6, (command, ran)
        assert "the epoch that the party stands on is lost" in ran.err
        assert "estore blobs.db of the party from a backup: nobody else is in it" in ran.err
        assert "HOST:PORT" not in ran.err
        assert "join it again" not in ran.err
    ran = cli("doctor", "--json")
    assert (ran.status, ran.json()["sound"]) == (6, False)
    told = cli("status")
    assert told.status == 6
    assert "Other: all" in told.out
    assert "nobody else is in the party who could have it" in told.out
    assert "once a member is connected" not in told.out
    fetched = cli("epoch", "fetch", "3", "--party", "@Trip", "--json")
    assert (fetched.status, len(fetched.err.splitlines())) == (5, 1), "one document"
    failed = json.loads(fetched.err)["error"]
    assert failed["unchanged"] == "Nothing came, and nothing was changed."
    assert "from a backup" in failed["next_step"]


def test_where_others_are_members_lost_blobs_are_fetched_from_them(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home, gc=True)
    with open_quiet(home) as peer, open_quiet(tmp_path / "guest") as guest:
        party = peer.party("@Trip")
        party.members.admit(guest.request_join(party.key))
    lose_blobs(home)
    ran = Cli(home, tmp_path / "state")("item", "tree")
    assert "epoch fetch 3 --from HOST:PORT" in ran.err
    assert "join it again" in ran.err


def test_missing_blobs_are_counted_as_people_do() -> None:
    assert [missing(1), missing(2)] == ["at least 1 blob of it is missing", "at least 2 blobs of it are missing"]


def test_doctor_does_not_send_the_blobs_of_a_truncated_party_away(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home)
    cli = Cli(home, tmp_path / "state")

    def advice() -> str:
        (file,) = home.glob("parties/*/blobs.db")
        sound = file.read_bytes()
        file.write_bytes(b"garbage" * 1000)
        ran = cli("doctor", "--json")
        file.write_bytes(sound)
        assert ran.status == 6
        return str(next(each["next_step"] for each in ran.json()["checks"] if "blobs.db" in each["name"]))

    assert "made anew" in advice()
    cli("epoch", "gc", "--yes").ok()
    assert "made anew" not in advice()


KILLED = """
import os, signal, sqlite3, sys
file = sqlite3.connect(sys.argv[1], isolation_level=None)
file.execute("PRAGMA journal_mode = DELETE")
file.execute("PRAGMA cache_size = 5")
file.execute("BEGIN IMMEDIATE")
file.execute("CREATE TABLE half (data)")
file.execute("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500) "
             "INSERT INTO half SELECT zeroblob(4000) FROM n")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_reader_after_a_kill_while_a_file_was_written_anew_sees_what_was(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home)
    cli = Cli(home, tmp_path / "state")
    before = cli("item", "tree").ok().out
    (file,) = home.glob("parties/*/items.db")
    done = subprocess.run([sys.executable, "-c", KILLED, str(file)], check=False)
    assert done.returncode == -signal.SIGKILL
    journal = file.with_name(file.name + "-journal")
    assert journal.exists(), "SQLite has to take something back"
    assert cli("item", "tree").ok().out == before
    with sqlite3.connect(file) as looked:
        assert looked.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert not (journal.exists() and os.path.getsize(journal))


# policy


def test_a_policy_is_told_as_it_counts(tmp_path: Path) -> None:
    home = tmp_path / "home"
    written(home, epochs=1)
    cli = Cli(home, tmp_path / "state")
    lines = cli("party", "policy", "--truncate-quorum", "3", "--join-attests", "2").ok().out
    assert "a majority must have attested, and at least 3 where so many are members" in lines
    assert "wants 2 attests besides the declarer's word" in lines
    for quorum in ("²", "0", "1", "2"):
        ran = cli("party", "policy", "--truncate-quorum", quorum)
        assert (ran.status, "from 3 on" in ran.err) == (2, True), quorum
    lines = (
        cli("party", "policy", "--age", "3s", "--grace", "90s", "--silence", "30d", "--discard-after", "2w").ok().out
    )
    for said in ("an epoch after 3s", "grace          90s", "retired after 30d", "left out after 14d"):
        assert said in lines
    for declarers, status in (("nobody", 3), ("", 2), ("@nobody,elect", 3)):
        ran = cli("party", "policy", "--declarers", declarers)
        assert (ran.status, "Give admins, elect, bot" in ran.err) == (status, True), ran
    alone = cli("party", "policy", "--declarers", "bot").ok()
    assert "nobody can declare" in alone.err
    assert cli("epoch", "create").status == 4
    with open_quiet(home) as peer:
        name = peer.identity.hex()
    assert cli("party", "policy", "--bot", name).ok().err == ""
    cli("item", "create", "text", "x").ok()
    cli("epoch", "create").ok()
