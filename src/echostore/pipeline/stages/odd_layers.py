"""Layers of property sets that hold more than plain changes make: increments, elements of sets, what an undo put back.

What is written under one top key of a layer does not depend on its other keys. So only the *odd* keys go through the
kernel, and only when this run wrote to them; odd entries that nobody touched pass as they are, and the plain keys of the
same layer were folded by column. Here the three are put together again, in the order of a snapshot. Layers of which nobody
touched an odd key do not come here at all: columns carry their odd entries.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from echostore.kernel.ids import ItemId
from echostore.kernel.items.operations import ItemOperation
from echostore.kernel.models.property_set import PropertySet, Restore
from echostore.pipeline.stages.item_fold import Given
from echostore.pipeline.stages.property_columns import LAYER, layer_state, state_layer
from echostore.wire.generated import property_set_pb2 as pb
from echostore.wire.models import property_set

LayerKey = tuple[Any, ...]
"""The columns of LAYER."""


def tops_of(operation: ItemOperation) -> set[str]:
    """The top keys that an operation on a property set writes below."""
    return {(change.key.path if isinstance(change, Restore) else change.path)[0] for change in operation.body}


def join_odd_layers(
    odd: pl.DataFrame,
    given: Mapping[LayerKey, list[Given]],
    before: Mapping[LayerKey, bytes],
    plain: Mapping[LayerKey, bytes],
    schema: pl.Schema,
) -> pl.DataFrame:
    """The layers with odd keys (`odd`: LAYER and `top`), as their bytes. `given` are this run's operations on odd keys,
    `before` the layers as they were, `plain` what columns made of their other keys."""
    tops: dict[LayerKey, set[str]] = defaultdict(set)
    for row in odd.select(*LAYER, "top").iter_rows():
        tops[row[:5]].add(row[5])
    made = []
    for key, odd_tops in tops.items():
        layer = _joined(key, odd_tops, given.get(key, []), before.get(key), plain.get(key))
        if layer is not None:
            made.append((*key, layer))
    return pl.DataFrame(made, schema=schema, orient="row")


def _joined(
    key: LayerKey, odd: set[str], given: Iterable[Given], before: bytes | None, plain: bytes | None
) -> bytes | None:
    operations = sorted(given, key=lambda one: (one.stamp, one.order))
    written: set[str] = set().union(*(tops_of(one.operation) for one in operations))
    layer = pb.PropertyLayer(feed=key[4].to_bytes(8, "big"))
    folded = pb.PropertyLayer(feed=layer.feed)
    entries = []
    for entry in pb.PropertyLayer.FromString(before).entries if before is not None else ():
        if entry.path[0] in written:
            folded.entries.append(entry)
        elif entry.path[0] in odd:
            entries.append(entry)
    if operations:
        entries += _folded(key, folded, operations)
    if plain is not None:
        entries += pb.PropertyLayer.FromString(plain).entries
    if not entries:
        return None
    # Of one top key all entries come from one of the three, in order: the paths decide over the rest.
    layer.entries.extend(sorted(entries, key=lambda entry: [step.encode() for step in entry.path]))
    return layer.SerializeToString(deterministic=True)


def _folded(key: LayerKey, before: pb.PropertyLayer, operations: list[Given]) -> Iterable[pb.PropertyEntry]:
    """The entries of the keys that operations write to, by the kernel's property set."""
    item = ItemId(key[1].to_bytes(8, "big") + key[2].to_bytes(8, "big"))
    model = PropertySet(item)
    if before.entries:
        model = property_set.decode_state(item, layer_state(before.SerializeToString(deterministic=True)))
    for stamp, _, time_ms, operation in operations:
        model.apply(operation.body, stamp, time_ms)
    if not model.layers:
        return ()
    return pb.PropertyLayer.FromString(state_layer(property_set.encode_state(model))).entries
