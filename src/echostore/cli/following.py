"""Following a party that another process writes: notice its commits, and look again.

A read-only peer sees a party as it was when it was opened. SQLite tells cheaply whether anyone committed since
(`PRAGMA data_version`); only then is the party opened again, which costs what is new.

    asked for the version -> opened the party -> ... -> version changed -> opened again

The version is read before the party, so that a commit in between is seen at the next look and never missed.
"""

import sqlite3
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from echostore.kernel.errors import TimedOut
from echostore.store.sqlite import connect_file, sqlite_error

if TYPE_CHECKING:
    from echostore.kernel.ids import PartyKey
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

POLL_S = 0.2
"""How long a change may stay unseen: short for a person, and two hundred bytes read per look."""


class Commits:
    """Tells whether another process committed to a party's feeds since it was last asked."""

    def __init__(self, peer: "Peer", party: "PartyKey") -> None:
        self._path = peer.home.party(party).feeds
        self._connection = connect_file(self._path, False)
        self._seen = self._version()

    def any(self) -> bool:
        version = self._version()
        changed, self._seen = version != self._seen, version
        return changed

    def close(self) -> None:
        self._connection.close()

    def _version(self) -> int:
        try:
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.Error as error:
            raise sqlite_error(error, self._path) from error


def follow(peer: "Peer", party: "PartyKey", *, timeout_s: float | None = None) -> "Iterator[Party]":
    """The party, now and again after each change, for ever; TimedOut when nothing changed for so long."""
    commits = Commits(peer, party)
    try:
        yield look_again(peer, party)  # the caller opened it before the version was read
        waited_since = time.monotonic()
        while timeout_s is None or time.monotonic() - waited_since < timeout_s:
            if commits.any():
                yield look_again(peer, party)
                waited_since = time.monotonic()
            else:
                time.sleep(POLL_S if timeout_s is None else min(POLL_S, timeout_s))
        raise TimedOut(f"nothing changed for {timeout_s:g} s")
    finally:
        commits.close()


def look_again(peer: "Peer", party: "PartyKey") -> "Party":
    """A party of a read-only peer as it is on disk now, and its parent with it."""
    for opened in peer.open_parties():
        opened.runtime.close()
    return peer.party(party)
