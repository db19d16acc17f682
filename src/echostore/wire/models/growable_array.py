"""GrowableArray operations and states <-> protobuf."""

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import ItemId
from echostore.kernel.models.growable_array import ArrayOperation, GrowableArray
from echostore.wire.generated import growable_array_pb2 as pb
from echostore.wire.models.change_graph import MalformedGraph, decode_graph, decode_update, encode_graph, graph_bytes
from echostore.wire.models.ground import decode_datings, decode_ground, encode_datings, encode_ground
from echostore.wire.models.stand_ins import decode_stand_ins, encode_stand_ins


def encode_operation(operation: ArrayOperation) -> pb.GrowableArrayOperation:
    return pb.GrowableArrayOperation(
        update=graph_bytes(operation.update),
        generation=operation.generation,
        stand_ins=encode_stand_ins(operation.stand_ins),
    )


def decode_operation(message: pb.GrowableArrayOperation) -> ArrayOperation:
    """OperationRefused(MALFORMED) when the update is no change graph, or the stand-ins are not of its atoms."""
    update = decode_update(message.update, of_text=False)
    return ArrayOperation(update, message.generation, decode_stand_ins(message.stand_ins, update))


def encode_state(model: GrowableArray) -> bytes:
    state = pb.GrowableArrayState(
        graph=encode_graph(model.changes()),
        ground=encode_ground(model.ground),
        datings=encode_datings(model.dated),
    )
    return state.SerializeToString(deterministic=True)


def decode_state(item: ItemId, data: bytes) -> GrowableArray:
    try:
        state = pb.GrowableArrayState.FromString(data)
        graph = decode_graph(state.graph, of_text=False)
        ground = decode_ground(state.ground, of_text=False) if state.HasField("ground") else None
        dated = decode_datings(state.datings)
    except (DecodeError, MalformedGraph) as error:
        raise Corrupt(f"the state of a GrowableArray can't be read: {error}") from None
    return GrowableArray.from_changes(item, graph, ground, dated)
