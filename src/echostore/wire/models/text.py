"""ConcurrentText operations and states <-> protobuf."""

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import ItemId
from echostore.kernel.models.text import ConcurrentText, TextOperation
from echostore.wire.generated import text_pb2 as pb
from echostore.wire.models.change_graph import MalformedGraph, decode_graph, decode_update, encode_graph, graph_bytes
from echostore.wire.models.ground import decode_datings, decode_ground, encode_datings, encode_ground
from echostore.wire.models.stand_ins import decode_stand_ins, encode_stand_ins


def encode_operation(operation: TextOperation) -> pb.TextOperation:
    return pb.TextOperation(
        update=graph_bytes(operation.update),
        generation=operation.generation,
        stand_ins=encode_stand_ins(operation.stand_ins),
    )


def decode_operation(message: pb.TextOperation) -> TextOperation:
    """OperationRefused(MALFORMED) when the update is no change graph, or the stand-ins are not of its atoms."""
    update = decode_update(message.update, of_text=True)
    return TextOperation(update, message.generation, decode_stand_ins(message.stand_ins, update))


def encode_state(model: ConcurrentText) -> bytes:
    state = pb.TextState(
        graph=encode_graph(model.changes()),
        ground=encode_ground(model.ground),
        datings=encode_datings(model.dated),
    )
    return state.SerializeToString(deterministic=True)


def decode_state(item: ItemId, data: bytes) -> ConcurrentText:
    try:
        state = pb.TextState.FromString(data)
        graph = decode_graph(state.graph, of_text=True)
        ground = decode_ground(state.ground, of_text=True) if state.HasField("ground") else None
        dated = decode_datings(state.datings)
    except (DecodeError, MalformedGraph) as error:
        raise Corrupt(f"the state of a ConcurrentText can't be read: {error}") from None
    return ConcurrentText.from_changes(item, graph, ground, dated)
