"""The demonstration: three peers share the planner board of the seeds, edit it at once with one cut off, and converge.

    view -> board (list of lists) -> lists -> tasks -> notes

It shows the trees, the timeframes, the moment of convergence and the equal CIDs, and leaves a folder to explore.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Protocol

from echostore.demo import on_spark
from echostore.kernel.errors import EchoError, Refused
from echostore.kernel.ids import PartyKey
from echostore.peer.epochs import Epochs
from echostore.peer.items import Item
from echostore.peer.party import Party
from echostore.peer.peer import Peer, open_peer
from echostore.testing.inmemory import MemoryLink, link

PEERS = ("laptop", "phone", "tablet")
PLANNER = "example.org/planner"
MARK = "echostore-demo"


class Say(Protocol):
    """Tells one line of the story; a style is a colour for terminals that have some."""

    def __call__(self, line: str, style: str = "") -> None: ...


BOLD, GREEN, YELLOW, DIM = "1", "32", "33", "2"


def run(home: Path, say: Say, waiting: on_spark.Waiting = on_spark.no_waiting) -> dict[str, str]:
    """Run the demonstration in a folder of its own; returns each peer's CID at the end. `waiting` shows the start of
    Spark."""
    _prepare(home)
    peers = {name: open_peer(home / name, name=name.title(), background=False) for name in PEERS}
    try:
        return _Story(home, peers, say, waiting).tell()
    finally:
        for peer in peers.values():
            peer.close()


def _prepare(home: Path) -> None:
    """Only a folder that an earlier demonstration made is emptied."""
    if home.exists() and any(home.iterdir()):
        if not (home / MARK).exists():
            raise Refused(f"{home} is not empty and not of an earlier demonstration", next_step="Name another folder.")
        shutil.rmtree(home)
    home.mkdir(parents=True, exist_ok=True)
    (home / MARK).write_text("made by `echostore demo`; it may delete this folder\n")


class _Story:
    def __init__(self, home: Path, peers: dict[str, Peer], say: Say, waiting: on_spark.Waiting) -> None:
        self.home, self.peers, self.say, self.waiting = home, peers, say, waiting
        self.links: dict[frozenset[str], MemoryLink] = {}
        self.key = PartyKey(b"")

    def party(self, name: str) -> Party:
        return self.peers[name].party(self.key)

    def tell(self) -> dict[str, str]:
        self.say("1. The laptop creates a party and its planner board.", BOLD)
        self._create()
        self.say("2. Phone and tablet are admitted and get everything.", BOLD)
        self._admit()
        self.show("laptop")
        self.say("3. The tablet is cut off. All three edit at once.", BOLD)
        self._edit_apart()
        for name in PEERS:
            self.show(name)
        self._compare()
        self.say("4. The tablet is back. Feeds replicate; every peer folds the same messages to the same items.", BOLD)
        self._connect()
        rounds = self._converge()
        self.say(f"   Converged after {rounds} round{'s' if rounds != 1 else ''} of exchange.")
        self.show("tablet")
        self._show_conflict()
        cids = self._compare()
        if len(set(cids.values())) != 1:
            raise EchoError("the peers did not converge", unchanged=f"Their data is in {self.home}.")
        self.say("5. The past is still there: the board as the laptop saw it before the cut.", BOLD)
        past = self.party("tablet").as_of(self.before)
        self.say(_tree(past))
        self._on_spark(cids["laptop"])
        self._commands()
        return cids

    def _on_spark(self, cid: str) -> None:
        self.say("6. The same party on Spark: publish to a lake, verify, order, reduce, snapshot, commit.", BOLD)
        if not on_spark.installed():
            self.say(
                "   Spark is not installed here: pip install 'echostore[pipeline]', and run the demonstration again."
            )
            return
        on_spark.run(self.home, self.party("laptop"), cid, self.say, self.waiting)
        self._converge()
        self.say(f"   The tablet knows of {len(Epochs(self.party('tablet')).all())} epoch.")

    def _create(self) -> None:
        laptop = self.peers["laptop"]
        for peer in self.peers.values():
            peer.view_classes.register(PLANNER, "Boards of lists of tasks")
        party = laptop.create_party("Road trip")
        self.key = party.key
        with party.batch():
            view = party.create_view(PLANNER, "Summer planner")
            board = party.create("growable-array", type="board", parent=view)
            board.name = "Board"
            view["board"] = board
            for title, tasks in (("To do", ("Book the ferry", "Pack the tent")), ("Done", ("Choose dates",))):
                self._add_list(party, board, title, tasks)
        party.flush()

    def _add_list(self, party: Party, board: Item, title: str, tasks: tuple[str, ...]) -> None:
        column = party.create("property-set", type="list", parent=board, title=title)
        rows = party.create("growable-array", type="tasks", parent=column)
        rows.name = "Tasks"
        column["tasks"] = rows
        board.append(column)  # type: ignore[attr-defined]  # a list
        for each in tasks:
            self._add_task(party, rows, each)

    def _add_task(self, party: Party, rows: Item, title: str) -> Item:
        task: Item = party.create("property-set", type="task", parent=rows, title=title, done=False)
        notes = party.create("text", type="notes", parent=task)
        notes.name = "Notes"
        notes.insert(0, "...")
        task["notes"] = notes  # type: ignore[index]  # a property set
        rows.append(task)  # type: ignore[attr-defined]  # a list
        return task

    def _admit(self) -> None:
        laptop = self.party("laptop")
        for name in PEERS[1:]:
            request = self.peers[name].request_join(self.key)
            self.peers[name].enter(laptop.members.admit(request, role="editor"))
        self._connect()
        self._converge()
        self.before = laptop.anchor()

    def _connect(self) -> None:
        for one in PEERS:
            for other in PEERS:
                pair = frozenset({one, other})
                if one < other and pair not in self.links:
                    self.links[pair] = link(self.peers[one], self.peers[other], self.key)

    def _cut_off(self, name: str) -> None:
        for pair in [pair for pair in self.links if name in pair]:
            self.links.pop(pair).cut()

    def _converge(self) -> int:
        for rounds in range(1, 10):
            for name in PEERS:
                self.party(name).flush()
            before = {name: self.party(name).timeframe for name in PEERS}
            for joined in self.links.values():
                joined.pump()
            if before == {name: self.party(name).timeframe for name in PEERS}:
                return rounds - 1
        raise EchoError("the peers still exchange after ten rounds")

    def _edit_apart(self) -> None:
        self._cut_off("tablet")
        laptop, phone, tablet = (self.party(name) for name in PEERS)
        ferry = laptop.query(type="task", title="Book the ferry").one()
        self.ferry, self.versions = ferry.id, {"laptop": "Book the ferry (two cars)", "tablet": "Book the night ferry"}
        ferry["title"] = self.versions["laptop"]
        ferry.increment("votes")
        on_phone = phone.query(type="task", title="Pack the tent").one()
        on_phone["done"] = True
        phone.get(on_phone["notes"]).insert(0, "Phone: with the pegs! ")
        self._converge()
        offline = tablet.query(type="task", title="Book the ferry").one()
        offline["title"] = self.versions["tablet"]
        offline.increment("votes")
        tablet.get(offline["notes"]).insert(0, "Tablet: ask for a cabin. ")
        rows = offline.parent
        assert rows is not None
        self._add_task(tablet, rows, "Charge the torches")
        tent = tablet.query(type="task", title="Pack the tent").one()
        tablet.get(tent["notes"]).insert(0, "Tablet: and the hammer. ")
        tablet.flush()

    def show(self, name: str) -> None:
        party = self.party(name)
        self.say(f"   {name}: timeframe {party.timeframe}")
        self.say(_tree(party))

    def _show_conflict(self) -> None:
        """The one property that two peers wrote at once: both versions, what stands, and what `conflicts` keeps."""
        task = self.party("phone").get(self.ferry)
        self.say("   Laptop and tablet had given one task another title at once. What every peer says now:")
        width = max(map(len, self.versions.values())) + 2
        self.say("     " + "".join(f"{who + ' wrote':<{width}}" for who in self.versions) + "stands", BOLD)
        self.say("     " + "".join(f"{text:<{width}}" for text in self.versions.values()) + str(task["title"]), GREEN)
        self.say(f'     task.conflicts("title") == {task.conflicts("title")}', YELLOW)
        self.say("     and nothing is lost that can be kept: both votes count, both notes are in the text.", DIM)

    def _compare(self) -> dict[str, str]:
        cids = {name: self.party(name).snapshot().cid for name in PEERS}
        for name, cid in cids.items():
            self.say(f"   {name:<7} snapshot {cid}")
        same = len(set(cids.values()))
        if same == 1:
            self.say("   All snapshot CIDs are equal.", GREEN)
        else:
            self.say(f"   {same} different states.", YELLOW)
        return cids

    def _commands(self) -> None:
        home = self.home / "tablet"
        self.say(f"7. Explore the data it left in {self.home}:", BOLD)
        for command in ("item tree", "query --type task", "feed list", "party members", "epoch list", "status"):
            self.say(f"   {_program()} --home {home} {command}")


def _program() -> str:
    """How to call this program from here: by its name when that finds it, else by its path."""
    found = shutil.which("echostore")
    called = Path(sys.argv[0])
    if called.name != "echostore" or (found and Path(found).resolve() == called.resolve()):
        return "echostore"
    return os.path.relpath(called)


def _tree(party: Party) -> str:
    lines: list[str] = []

    def walk(item: Item, depth: int) -> None:
        lines.append("     " + "  " * depth + _line(item))
        for child in item.children():
            walk(child, depth + 1)

    for view in party.views(PLANNER):
        walk(view, 0)
    return "\n".join(lines)


def _line(item: Item) -> str:
    if item.type == "task":
        votes = item.get("votes", 0)  # type: ignore[attr-defined]  # a property set
        done = "x" if item["done"] else " "  # type: ignore[index]  # as above
        return f"[{done}] {item['title']}" + (f"  ({votes} votes)" if votes else "")  # type: ignore[index]  # as above
    if item.model == "text":
        return f"notes: {str(item)!r}"
    if item.type == "list":
        return f"{item['title']}:"  # type: ignore[index]  # as above
    return item.name or item.type
