"""What a root keeps of messages between roots, in the party's feeds.db, and for how long.

    thin/<root>/mail/out/<id>      from a system of this root, until the target's root has it
    thin/<root>/mail/in/<id>       for a system of this root, until the target has it
    thin/<root>/mail/last/<pair>   the last place that was taken of a sender for a target
    thin/<root>/mail/given-up/<id> what was given up, until the sender knows

A row that holds a message begins with the time it was written. What is older than `MAIL_S` is given up.
"""

from collections.abc import Iterable
from typing import Final

from echostore.kernel.coherence.events import KeptRow
from echostore.kernel.coherence.messages import MessageId, RejectReason, SystemId, UserMessage
from echostore.kernel.errors import Corrupt
from echostore.store.feed_store import FeedStore
from echostore.wire.coherence import decode_frame, message_bytes
from echostore.wire.sync import MalformedFrame

MAIL_S: Final = 7 * 24 * 3600.0
"""How long a message waits for another root, and there for its target."""

_TIME_BYTES: Final = 8


class MailRows:
    """The rows of one root."""

    def __init__(self, feeds: FeedStore, system: SystemId) -> None:
        self._feeds = feeds
        self._prefix = f"thin/{system.root.hex()}/mail/"
        self.kept_ms: dict[MessageId, int] = {}
        """Since when each message waits here."""

    def load(self) -> list[KeptRow]:
        """All rows, those of one stream in order."""
        try:
            rows = [self._read(name, data) for name, data in self._feeds.about_under(self._prefix).items()]
        except (ValueError, MalformedFrame) as error:
            raise Corrupt("The messages of thin clients in feeds.db are damaged.") from error
        return sorted(rows, key=lambda row: (row.kind, row.id, row.target))

    def keep(self, rows: Iterable[KeptRow], now_ms: int) -> None:
        """On disk when this returns, all or none."""
        entries: dict[str, bytes | None] = {}
        for row in rows:
            entries[self._name(row)] = self._bytes(row, now_ms)
            if isinstance(row.value, UserMessage):
                self.kept_ms.setdefault(row.id, now_ms)
            elif row.kind in ("out", "in"):
                self.kept_ms.pop(row.id, None)
        if entries:
            self._feeds.set_about(entries)

    def overdue(self, now_ms: int) -> list[MessageId]:
        """Those that have waited too long."""
        return [id for id, kept_ms in self.kept_ms.items() if now_ms - kept_ms > MAIL_S * 1000]

    def _name(self, row: KeptRow) -> str:
        seq = 0 if row.kind == "last" else row.id.seq
        return f"{self._prefix}{row.kind}/{_text(row.id.sender)}/{row.id.stream:x}/{seq:x}/{_text(row.target)}"

    def _bytes(self, row: KeptRow, now_ms: int) -> bytes | None:
        match row.value:
            case UserMessage() as message:
                since_ms = self.kept_ms.get(row.id, now_ms)
                return since_ms.to_bytes(_TIME_BYTES, "big") + message_bytes(message)
            case RejectReason() as reason:
                return reason.value.encode()
            case int() as place:
                return place.to_bytes(_TIME_BYTES, "big")
            case None:
                return None

    def _read(self, name: str, data: bytes) -> KeptRow:
        kind, sender, stream, seq, target = name.removeprefix(self._prefix).split("/")
        id = MessageId(_system(sender), int(stream, 16), int(seq, 16))
        if kind == "last":
            return KeptRow(kind, id, _system(target), int.from_bytes(data, "big"))
        if kind == "given-up":
            return KeptRow(kind, id, _system(target), RejectReason(data.decode()))
        message = decode_frame(data[_TIME_BYTES:]).message
        if not isinstance(message, UserMessage) or message.id != id:
            raise ValueError(f"{name} holds another message")
        self.kept_ms[id] = int.from_bytes(data[:_TIME_BYTES], "big")
        return KeptRow(kind, id, message.target, message)


def _text(system: SystemId) -> str:
    return ".".join([system.root.hex(), *map(str, system.path)])


def _system(text: str) -> SystemId:
    root, *path = text.split(".")
    return SystemId(bytes.fromhex(root), tuple(map(int, path)))
