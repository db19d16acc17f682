"""Stand-ins of undo operations <-> protobuf."""

from echostore.kernel.models.base import OperationRefused
from echostore.kernel.models.change_graph import COUNTER_END_MAX, ChangeGraph
from echostore.kernel.models.stand_ins import StandIn
from echostore.kernel.reasons import Reason
from echostore.wire.generated import stand_ins_pb2 as pb


def encode_stand_ins(runs: tuple[StandIn, ...]) -> pb.StandIns | None:
    """None, which leaves the field out, when there are none."""
    if not runs:
        return None
    counters, writers, originals, lengths = zip(*runs, strict=True)
    return pb.StandIns(counters=counters, writers=writers, originals=originals, lengths=lengths)


def decode_stand_ins(message: pb.StandIns, update: ChangeGraph) -> tuple[StandIn, ...]:
    """OperationRefused(MALFORMED) unless the runs ascend inside the update."""
    columns = (message.counters, message.writers, message.originals, message.lengths)
    if len({len(column) for column in columns}) != 1:
        raise OperationRefused(Reason.MALFORMED, "stand-ins of unequal columns")
    runs = tuple(map(StandIn, *columns))
    if not runs:
        return ()
    if not update:
        raise OperationRefused(Reason.MALFORMED, "stand-ins without an update")
    counter = update[0].counter
    for run in runs:
        if run.counter < counter or not 0 < run.length <= COUNTER_END_MAX or run.original > COUNTER_END_MAX:
            raise OperationRefused(Reason.MALFORMED, "stand-ins out of range")
        counter = run.counter + run.length
    if counter > update[-1].counter_end:
        raise OperationRefused(Reason.MALFORMED, "stand-ins beyond the update")
    return runs
