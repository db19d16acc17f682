"""QuerySpec <-> canonical bytes: specs that ask the same have the same bytes, and the same key.

    bytes   the protobuf of `spec.normal()`
    key     SHA-256("echostore/query/1" | bytes)       names an index in the coherence protocol

Decoding takes specs from other machines: whatever is wrong with one raises `MalformedQuery`, never more. Bytes that are
not canonical are refused, so that one query has one key; so is a field of a later version, which could ask for more.
"""

import hashlib

from google.protobuf.message import DecodeError

from echostore.kernel.errors import EchoError
from echostore.kernel.query.fields import Attribute, Field
from echostore.kernel.query.filters import EVERYTHING, And, Compare, Filter, Not, Op, Or
from echostore.kernel.query.source import Deleted
from echostore.kernel.query.spec import FILTER_DEPTH_MAX, Order, QuerySpec, Reduce, Reducer, Stage, Step
from echostore.kernel.values import check_path
from echostore.wire.generated import query_pb2 as pb
from echostore.wire.values import MalformedValue, decode_value, encode_value

KEY_TAG = b"echostore/query/1"
QUERY_BYTES_MAX = 1024 * 1024
"""One spec. A longer list of constants belongs in the data."""

_DELETED = (Deleted.HIDE, Deleted.SHOW, Deleted.ONLY)


class MalformedQuery(ValueError):
    """A received spec that can't be read, is not canonical or breaks a limit."""


def query_bytes(spec: QuerySpec) -> bytes:
    """The canonical bytes of a spec that `check` has passed."""
    return _encode_spec(spec.normal()).SerializeToString(deterministic=True)


def query_key(spec: QuerySpec) -> bytes:
    """32 bytes that name the query."""
    return hashlib.sha256(KEY_TAG + query_bytes(spec)).digest()


def query_from_bytes(data: bytes) -> QuerySpec:
    """The normalised spec of canonical bytes."""
    if len(data) > QUERY_BYTES_MAX:
        raise MalformedQuery(f"a query of {len(data)} bytes, at most {QUERY_BYTES_MAX}")
    try:
        spec = _decode_spec(pb.QuerySpec.FromString(data)).check()
    except DecodeError as error:
        raise MalformedQuery("undecodable") from error
    except (MalformedValue, EchoError) as error:
        raise MalformedQuery(str(error)) from error
    if query_bytes(spec) != data:
        raise MalformedQuery("not in canonical form")
    return spec


# encoding


def _encode_spec(spec: QuerySpec) -> pb.QuerySpec:
    return pb.QuerySpec(
        stages=[
            pb.QueryStage(
                step=stage.step,
                filter=None if stage.filter == EVERYTHING else _encode_filter(stage.filter),
                deleted=_DELETED.index(stage.deleted),
            )
            for stage in spec.stages
        ],
        order=[pb.QueryOrder(field=_encode_field(each.field), descending=each.descending) for each in spec.order],
        limit=spec.limit or 0,
        select=[_encode_field(each) for each in spec.select or ()],
        reduce=None if spec.reduce is None else _encode_reduce(spec.reduce),
    )


def _encode_field(field: Field) -> pb.QueryField:
    return pb.QueryField(steps=field.steps, attribute=field.attribute)


def _encode_reduce(reduce: Reduce) -> pb.QueryReduce:
    return pb.QueryReduce(
        reducer=reduce.reducer,
        field=None if reduce.field is None else _encode_field(reduce.field),
        by=None if reduce.by is None else _encode_field(reduce.by),
    )


def _encode_filter(condition: Filter) -> pb.QueryFilter:
    if isinstance(condition, And):
        return pb.QueryFilter(all=pb.QueryFilters(parts=[_encode_filter(part) for part in condition.parts]))
    if isinstance(condition, Or):
        return pb.QueryFilter(any=pb.QueryFilters(parts=[_encode_filter(part) for part in condition.parts]))
    if isinstance(condition, Not):
        return pb.QueryFilter(negated=_encode_filter(condition.part))
    constants = {Op.IN: condition.value, Op.EXISTS: ()}.get(condition.op, (condition.value,))
    return pb.QueryFilter(
        compare=pb.QueryCompare(
            field=_encode_field(condition.field),
            op=condition.op,
            values=[encode_value(constant) for constant in constants],
        )
    )


# decoding


def _decode_spec(message: pb.QuerySpec) -> QuerySpec:
    return QuerySpec(
        stages=tuple(_decode_stage(stage) for stage in message.stages),
        order=tuple(Order(_decode_field(each.field), each.descending) for each in message.order),
        limit=message.limit or None,
        select=tuple(_decode_field(each) for each in message.select) or None,
        reduce=_decode_reduce(message.reduce) if message.HasField("reduce") else None,
    )


def _decode_stage(message: pb.QueryStage) -> Stage:
    if message.step not in list(Step) or message.deleted >= len(_DELETED):
        raise MalformedQuery(f"an unknown step {message.step} or rule for deleted items {message.deleted}")
    condition = _decode_filter(message.filter, 0) if message.HasField("filter") else EVERYTHING
    return Stage(Step(message.step), condition, _DELETED[message.deleted])


def _decode_field(message: pb.QueryField) -> Field:
    steps = check_path(tuple(message.steps))
    if message.attribute and (len(steps) != 1 or steps[0] not in list(Attribute)):
        raise MalformedQuery(f"an unknown attribute {steps!r}")
    return Field(steps, message.attribute)


def _decode_reduce(message: pb.QueryReduce) -> Reduce:
    if message.reducer not in list(Reducer):
        raise MalformedQuery(f"an unknown reducer {message.reducer}")
    return Reduce(
        Reducer(message.reducer),
        _decode_field(message.field) if message.HasField("field") else None,
        _decode_field(message.by) if message.HasField("by") else None,
    )


def _decode_filter(message: pb.QueryFilter, depth: int) -> Filter:
    if depth > FILTER_DEPTH_MAX:
        raise MalformedQuery("a filter nested too deep")
    kind = message.WhichOneof("kind")
    if kind == "compare":
        return _decode_compare(message.compare)
    if kind == "negated":
        return Not(_decode_filter(message.negated, depth + 1))
    if kind == "all":
        return And(tuple(_decode_filter(part, depth + 1) for part in message.all.parts))
    if kind == "any":
        return Or(tuple(_decode_filter(part, depth + 1) for part in message.any.parts))
    raise MalformedQuery("a filter without a kind")


def _decode_compare(message: pb.QueryCompare) -> Compare:
    if message.op not in list(Op):
        raise MalformedQuery(f"an unknown comparison {message.op}")
    op, field = Op(message.op), _decode_field(message.field)
    constants = tuple(decode_value(constant) for constant in message.values)
    if op is Op.IN:
        return Compare(field, op, constants)
    if op is Op.EXISTS and not constants:
        return Compare(field, op)
    if len(constants) != 1 or (op is Op.STARTSWITH and not isinstance(constants[0], (str, bytes))):
        raise MalformedQuery(f"{op.name} with wrong constants")
    return Compare(field, op, constants[0])
