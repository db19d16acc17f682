"""What this device's entries of property sets were before each of its last messages: what an undo puts back.

Images are noted as messages are written, so that an undo costs what it takes back. They live in memory. For a message
of an earlier run `echostore.peer.undo` reads this feed's operations on the item once, and puts the images of all of them
that undo can reach.
"""

from collections import OrderedDict

from echostore.kernel.ids import FeedId, ItemId
from echostore.kernel.items.operations import METADATA
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.models.property_set import Entry, EntryKey, Layer, Operation, PropertySet, touched_keys

IMAGE_ENTRIES_MAX = 10_000
"""Entries of images in memory, some 2 MB; what was noted first is forgotten first, and read again if it is undone."""

PROPERTY_FIELDS = frozenset({PropertySet.name, METADATA})

Place = tuple[ItemId, str]
"""An item, and which of its two property sets: its own or its metadata."""

Image = dict[EntryKey, Entry | None]
"""The entries that a message touches, as they were before it; None where there was none."""


class UndoImages:
    """The images of one feed's messages."""

    def __init__(self) -> None:
        self._open: dict[Place, Image] = {}
        self._kept: OrderedDict[tuple[int, Place], Image] = OrderedDict()
        self._entries = 0
        self._refolded = 0

    def note(self, place: Place, layer: Layer, operation: Operation) -> None:
        """An operation of the message that is being written is about to change this layer."""
        note(self._open.setdefault(place, {}), layer, operation)

    def keep(self, seq: int) -> None:
        """The message is written."""
        for place, image in self._open.items():
            self.put(seq, place, image)
        self._open.clear()

    def drop(self) -> None:
        """The message is not written after all."""
        self._open.clear()

    def put(self, seq: int, place: Place, image: Image) -> None:
        self._entries += len(image) - len(self._kept.get((seq, place), ()))
        self._kept[(seq, place)] = image
        while self._entries > IMAGE_ENTRIES_MAX:
            self._entries -= len(self._kept.popitem(last=False)[1])

    def get(self, seq: int, place: Place, *, refolded: int) -> Image | None:
        """The image, if it is kept. `refolded` counts the items that were folded again: perhaps without some of the
        messages, so that no image can be trusted any more."""
        if refolded != self._refolded:
            self._refolded = refolded
            self._kept.clear()
            self._entries = 0
        return self._kept.get((seq, place))


def note(image: Image, layer: Layer, operation: Operation) -> None:
    """Add what an operation is about to change, unless an earlier one of the same message has changed it already."""
    for key in touched_keys(layer, operation):
        image.setdefault(key, layer.get(key))


def layers_of(record: ItemRecord, field: str) -> dict[FeedId, Layer] | None:
    """The layers that operations in this field change; None when the item is no property set."""
    model = record.metadata if field == METADATA else record.model
    return model.layers if isinstance(model, PropertySet) else None
