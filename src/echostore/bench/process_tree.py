"""Memory of this process with all that it started, from /proc: what a job takes at its peak."""

import os
import threading
from typing import Self

EVERY_S = 0.25
_PAGE = os.sysconf("SC_PAGE_SIZE")


def tree_bytes(root: int) -> int:
    """Resident memory of a process and everything below it. Pages that several share are counted for each."""
    below: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                words = file.read().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        below.setdefault(int(words[1]), []).append(int(name))
        resident[int(name)] = int(words[21]) * _PAGE
    total, todo = 0, [root]
    while todo:
        process = todo.pop()
        total += resident.get(process, 0)
        todo += below.get(process, [])
    return total


class Watch:
    """Looks at the memory of this process tree now and then, while it is open."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="echostore-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, tree_bytes(os.getpid()))

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            self.peak_bytes = max(self.peak_bytes, tree_bytes(os.getpid()))
