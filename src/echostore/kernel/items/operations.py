"""What a delivered data message holds, as kernel values: operations on items, each with its field of the schema."""

from typing import Any, NamedTuple

from echostore.kernel.ids import IdentityKey, ItemId

# The fields of the schema's Operation. Models have their own names.
GENESIS = "genesis"
METADATA = "metadata"
PLACEMENT = "placement"
CUSTOM = "custom"
REFUSED = "refused"
"""Not in the schema: an operation whose decoding already found it unacceptable on its own; the body says why."""


class ItemOperation(NamedTuple):
    """One operation on one item. The body is a Genesis, a model's operation, a (kind, parent) or bytes."""

    item: ItemId
    field: str
    body: Any


class WriterRole(NamedTuple):
    """Who wrote a message, as the admission says for its place."""

    identity: IdentityKey
    role: str


class Reject(NamedTuple):
    """Something that did not enter the state, listed with its reason. Position -1 is the whole block."""

    feed: bytes
    seq: int
    position: int
    reason: str
    detail: str
