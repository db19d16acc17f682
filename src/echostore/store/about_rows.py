"""Rows of a table `about (name, value, seal)`: small facts by name, each with a short hash over the row."""

from collections.abc import Mapping

from echostore.kernel.errors import Corrupt
from echostore.store.feed_tables import seal_of
from echostore.store.sqlite import Database


class AboutRows:
    """The table of one database. Writing wants a transaction around it."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def get(self, name: str) -> bytes | None:
        row = self._db.row("SELECT value, seal FROM about WHERE name = ?", (name,))
        return None if row is None else self._checked(name, *row)

    def under(self, prefix: str) -> dict[str, bytes]:
        """All entries whose names begin so, in the order of names."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        rows = self._db.rows("SELECT name, value, seal FROM about WHERE name >= ? AND name < ?", (prefix, end))
        return {name: self._checked(name, value, seal) for name, value, seal in rows}

    def names(self, prefix: str) -> list[str]:
        """The names that begin so, in their order."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        return [name for (name,) in self._db.rows("SELECT name FROM about WHERE name >= ? AND name < ?", (prefix, end))]

    def put(self, entries: Mapping[str, bytes | None]) -> None:
        """Write entries; one without a value is removed."""
        for name, value in entries.items():
            if value is None:
                self._db.execute("DELETE FROM about WHERE name = ?", (name,))
                continue
            self._db.execute(
                "INSERT OR REPLACE INTO about VALUES (?, ?, ?)", (name, value, seal_of(name.encode(), value))
            )

    def _checked(self, name: str, value: object, seal: object) -> bytes:
        if isinstance(value, bytes) and seal_of(name.encode(), value) == seal:
            return value
        raise Corrupt(f"The entry {name!r} of {self._db.path} is damaged.")
