"""Kills real writers at random moments and looks at what they leave. Run by test_kill.py in a process of its own.

Each round forks a writer that has everything imported already, lets it write and report what was acknowledged, kills
it with SIGKILL, and forks an inspector that opens the store: what was acknowledged must be there, whole batches only,
and a store rebuilt from the feeds alone must have the same snapshot CID.
"""

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

from echostore.peer.peer import open_peer

WRITES_MAX = 100_000


def write(home: Path, report: int) -> None:
    """Write until killed; report each number once its flush has returned."""
    with open_peer(home, name="victim") as peer:
        known = peer.parties()
        party = peer.party(known[0].key) if known else peer.create_party("kill")
        counters = party.query(type="counter").all()
        counter = counters[0] if counters else party.create("property-set", type="counter", n=0, twin=0)
        text = (party.query(type="story").all() or [party.create("text", type="story")])[0]
        start = counter["n"]
        if start and start % 3 == 0 and not party.query(type="row").where(number=start).count():
            party.create("property-set", type="row", number=start)  # the last one died between the two messages
        party.flush()
        for number in range(start + 1, start + WRITES_MAX):
            with party.batch():
                counter["n"] = number
                counter["twin"] = number
            text.insert(0, "x")
            if number % 3 == 0:
                party.create("property-set", type="row", number=number)
            party.flush()
            os.write(report, f"{number}\n".encode())
            if number % 7 == 0:
                party.snapshot()


def inspect(home: Path, acknowledged: int) -> dict[str, object]:
    with open_peer(home, background=False) as peer:
        known = peer.parties()
        if not known:
            return {"ok": acknowledged == 0, "n": 0}
        party = peer.party(known[0].key)
        counters = party.query(type="counter").all()
        if not counters:
            return {"ok": acknowledged == 0, "n": 0}
        counter = counters[0]
        number, twin = counter["n"], counter["twin"]
        rows = party.query(type="row").count()
        verdicts = [party.runtime.feeds.verify(held.key).sound for held in party.runtime.feeds.feeds()]
        cid = party.snapshot().cid
        folder = home / "parties" / party.key.hex()
    for file in folder.glob("items.db*"):
        file.unlink()
    with open_peer(home, background=False) as peer:
        rebuilt = peer.party(peer.parties()[0].key).snapshot().cid
    return {
        "ok": number >= acknowledged
        and twin == number
        and counter_is_whole(number, rows)
        and all(verdicts)
        and rebuilt == cid,
        "n": number,
        "acknowledged": acknowledged,
        "rows": rows,
        "twin": twin,
        "sound": all(verdicts),
        "rebuilt": rebuilt == cid,
    }


def counter_is_whole(number: int, rows: int) -> bool:
    """A row is written with every third number, in a message after the counter's."""
    return rows in (number // 3, max(0, (number - 1) // 3))


def tell(outcome: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(outcome) + "\n")
    sys.stdout.flush()


def in_child(work: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()  # type: ignore[operator]  # a function
            os._exit(0)
        except BaseException as error:  # noqa: BLE001  # whatever it was, the parent must hear of it
            tell({"ok": False, "error": f"{type(error).__name__}: {error}"})
            os._exit(1)
    return pid


def main(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    home = folder / "home"
    for number in range(kills):
        reading, writing = os.pipe()
        pid = in_child(lambda: write(home, writing))  # noqa: B023  # the child runs before the loop goes on
        os.close(writing)
        if chance.random() < 0.9:  # most die while they write, some while they open
            select.select([reading], [], [], 20)
        time.sleep(chance.uniform(0.001, 0.12))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        told = b""
        while chunk := os.read(reading, 65536):
            told += chunk
        os.close(reading)
        lines = told.decode().splitlines()
        acknowledged = int(lines[-1]) if lines else 0
        checker = in_child(lambda: tell(inspect(home, acknowledged)))  # noqa: B023  # as above
        _, status = os.waitpid(checker, 0)
        if status:
            tell({"ok": False, "error": f"the inspector of round {number} ended with {status}"})
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
