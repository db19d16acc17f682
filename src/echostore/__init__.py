"""echostore: ECHO, the Eventually Consistent Hierarchical Object-store. A peer-to-peer database.

    import echostore
    with echostore.open("laptop-data", name="Laptop") as peer:
        party = peer.create_party("Road trip")
        task = party.create("property-set", type="task", text="tickets", done=False)
        task["done"] = True
        print(party.query(type="task").all(), party.snapshot().cid)

Names are loaded when they are first used, so that importing the package costs nothing.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echostore import errors
    from echostore.kernel.errors import EchoError
    from echostore.kernel.query.expressions import field
    from echostore.kernel.values import BlobRef, Reference
    from echostore.peer import aio
    from echostore.peer.anchors import Anchor
    from echostore.peer.doorstep import open_peer as open
    from echostore.peer.item_kinds import ArrayItem, CustomItem, LogItem, PropertySetItem, TextItem
    from echostore.peer.items import Item
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer
    from echostore.peer.query import Query
    from echostore.peer.receipts import Receipt
    from echostore.peer.snapshots import Snapshot
    from echostore.peer.streams import Stream
    from echostore.pipeline.output.tables import read_tables
    from echostore.thin.thin_party import connect

__version__ = "0.1.0"

_HOMES: dict[str, tuple[str, str | None]] = {
    "aio": ("echostore.peer.aio", None),
    "open": ("echostore.peer.doorstep", "open_peer"),
    "connect": ("echostore.thin.thin_party", "connect"),
    "read_tables": ("echostore.pipeline.output.tables", "read_tables"),
    "Peer": ("echostore.peer.peer", "Peer"),
    "Party": ("echostore.peer.party", "Party"),
    "Item": ("echostore.peer.items", "Item"),
    "ArrayItem": ("echostore.peer.item_kinds", "ArrayItem"),
    "CustomItem": ("echostore.peer.item_kinds", "CustomItem"),
    "LogItem": ("echostore.peer.item_kinds", "LogItem"),
    "PropertySetItem": ("echostore.peer.item_kinds", "PropertySetItem"),
    "TextItem": ("echostore.peer.item_kinds", "TextItem"),
    "Query": ("echostore.peer.query", "Query"),
    "Receipt": ("echostore.peer.receipts", "Receipt"),
    "Snapshot": ("echostore.peer.snapshots", "Snapshot"),
    "Stream": ("echostore.peer.streams", "Stream"),
    "Anchor": ("echostore.peer.anchors", "Anchor"),
    "errors": ("echostore.errors", None),
    "EchoError": ("echostore.kernel.errors", "EchoError"),
    "Reference": ("echostore.kernel.values", "Reference"),
    "BlobRef": ("echostore.kernel.values", "BlobRef"),
    "field": ("echostore.kernel.query.expressions", "field"),
}

__all__ = [
    "Anchor",
    "ArrayItem",
    "BlobRef",
    "CustomItem",
    "EchoError",
    "Item",
    "LogItem",
    "Party",
    "Peer",
    "PropertySetItem",
    "Query",
    "Receipt",
    "Reference",
    "Snapshot",
    "Stream",
    "TextItem",
    "aio",
    "connect",
    "errors",
    "field",
    "open",
    "read_tables",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'echostore' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES[name]
    home = import_module(module)
    return home if attribute is None else getattr(home, attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


class _Aio(ModuleType):
    """`echostore.aio` as a module of its own name, loaded when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        from echostore.peer import aio

        return getattr(aio, name)


sys.modules[f"{__name__}.aio"] = _Aio(f"{__name__}.aio", "The peer for asyncio: see `echostore.peer.aio`.")
