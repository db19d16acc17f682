"""Whether a sealed value is what the root says: an edge can withhold, and must not be able to forge.

A sealed answer carries each item's record as a snapshot holds it, its hash, and the root's signature over the spec and
all hashes in order. The leaf checks the hashes (when it decodes), the signature, and that what is shown of an item is
what its record says.
"""

from collections.abc import Sequence

from echostore.kernel.coherence.messages import IndexValue, Spec
from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import DeviceKey
from echostore.kernel.models.factory import ModelFactory
from echostore.wire.capabilities import Grants
from echostore.wire.index_spec import IndexItem, index_seal, seal_statement
from echostore.wire.items import decode_record
from echostore.wire.signing import verify
from echostore.wire.values import value_bytes, value_from_bytes


def sealers(grants: Grants) -> tuple[DeviceKey, ...]:
    """The devices whose seals count for a capability: those it names, else the one that issued it."""
    return grants.sealers or (grants.issuer,)


def check_seal(spec: Spec, value: IndexValue, items: Sequence[IndexItem], keys: Sequence[DeviceKey]) -> None:
    """Corrupt unless one of the keys sealed exactly these items as the answer to the spec."""
    seal, statement = index_seal(value), seal_statement(spec, items)
    if not any(verify(key, statement, seal) for key in keys):
        raise _forged("its seal is not that of the root")
    factory = ModelFactory(value_from_bytes)
    for each in items:
        record = decode_record(each.record, factory)
        genesis = record.genesis
        said = (genesis.item, genesis.type, genesis.model, genesis.source, genesis.target)
        if said != (each.item, each.type, each.model, each.source, each.target):
            raise _forged("an item is not what its record says")
        if value_bytes(record.values()) != value_bytes(each.values):
            raise _forged("the state of an item is not the one of its record")
        if record.deleted and not each.deleted:
            raise _forged("a deleted item is shown as one that is there")


def _forged(why: str) -> Corrupt:
    return Corrupt(
        f"a value was forged on its way: {why}",
        unchanged="It was not shown, and the connection was dropped.",
        next_step="Connect to another address.",
    )
