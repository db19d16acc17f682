"""Codecs: how each model's operations and state become bytes, looked up by the model's name.

A codec is four functions. Operations of the base models are fields of the schema's `Operation`, so that Spark can
decode them by column; every other model's operations are bytes of its own under `custom`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from echostore.kernel.ids import ItemId, Stamp
from echostore.wire.models import growable_array, property_set, text, threaded_log


class Codec(NamedTuple):
    """The bytes of one base model. `field` is the name of its field in `Operation`."""

    field: str
    encode_operation: Callable[[Any], Any]
    decode_operation: Callable[[Any, Stamp], Any]
    encode_state: Callable[[Any], bytes]
    decode_state: Callable[[ItemId, bytes], Any]


CODECS: dict[str, Codec] = {
    "property-set": Codec(
        "property_set",
        property_set.encode_operation,
        property_set.decode_operation,
        property_set.encode_state,
        property_set.decode_state,
    ),
    "growable-array": Codec(
        "growable_array",
        growable_array.encode_operation,
        lambda message, stamp: growable_array.decode_operation(message),
        growable_array.encode_state,
        growable_array.decode_state,
    ),
    "text": Codec(
        "text",
        text.encode_operation,
        lambda message, stamp: text.decode_operation(message),
        text.encode_state,
        text.decode_state,
    ),
    "threaded-log": Codec(
        "threaded_log",
        threaded_log.encode_operation,
        lambda message, stamp: threaded_log.decode_operation(message),
        threaded_log.encode_state,
        threaded_log.decode_state,
    ),
}

MODEL_OF_FIELD: dict[str, str] = {codec.field: name for name, codec in CODECS.items()}
