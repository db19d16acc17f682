"""ConcurrentText operations and states <-> protobuf."""

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import ItemId
from echostore.kernel.models.text import ConcurrentText, TextOperation
from echostore.wire.generated import text_pb2 as pb
from echostore.wire.models.change_graph import MalformedGraph, decode_graph, decode_update, encode_graph, graph_bytes


def encode_operation(operation: TextOperation) -> pb.TextOperation:
    return pb.TextOperation(update=graph_bytes(operation.update), generation=operation.generation)


def decode_operation(message: pb.TextOperation) -> TextOperation:
    """OperationRefused(MALFORMED) when the update is no change graph."""
    return TextOperation(decode_update(message.update, of_text=True), message.generation)


def encode_state(model: ConcurrentText) -> bytes:
    return pb.TextState(graph=encode_graph(model.changes())).SerializeToString(deterministic=True)


def decode_state(item: ItemId, data: bytes) -> ConcurrentText:
    try:
        graph = decode_graph(pb.TextState.FromString(data).graph, of_text=True)
    except (DecodeError, MalformedGraph) as error:
        raise Corrupt(f"the state of a ConcurrentText can't be read: {error}") from None
    return ConcurrentText.from_changes(item, graph)
