"""Payloads of data blocks -> operations, by column.

    payloads ──ptars──► messages ──ptars──► operations ──ptars──► values
                         one row each        one row each          of property changes

A whole batch costs a microsecond a message (`message_columns`), and what needs the kernel is handed on as it came.

What this module says of a row must be what `wire.messages` says. Columns know nothing of a field given twice, of two
members of a oneof, or of fields from the future. Therefore a row is trusted only if encoding its columns gives its own
bytes again, and if exactly one member of each oneof is there. Every other row is *odd*, and goes through the wire
module, message by message.

Operations come out in two kinds. A *plain* change sets or deletes one property (or one of the metadata, except for
access rules); that is what columns can fold. Everything else is *rest*: the bytes of the operation, for the kernel.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import ARC_BIT, FEED_ID_BYTES, ITEM_ID_BYTES, FeedId, ItemId, PartyKey, item_local
from echostore.kernel.items.operations import GENESIS, PLACEMENT, ItemOperation
from echostore.kernel.items.record import ACCESS_KEY
from echostore.kernel.limits import KEY_CHARACTERS_MAX, PATH_STEPS_MAX
from echostore.kernel.models.base import OperationRefused
from echostore.kernel.order import DATA, Envelope
from echostore.pipeline.schemas import ASKED_ITEMS, PLAIN_CHANGES, REST_OPERATIONS
from echostore.pipeline.stages.message_columns import MESSAGES, one_of, read_columns, same, sizes, write_columns
from echostore.pipeline.stages.value_columns import canonical_values
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.messages import NAME_CHARACTERS_MAX, decode_envelope, decode_operations

CREATED, PLACED, LACKED, RIVAL, TOUCHED, WANTED, GONE = range(7)
"""Why an item is asked for: a parent at birth, a parent by a placement, what an earlier reject lacked; and about itself: an
item whose number was granted, which may have been created twice; one that a block wrote whose standing changed; one that
is folded again in this round; one that ceased to exist in it."""

PATH_SEPARATOR = "\0"
"""Joins the steps of a path. It sorts below every other character, so joined paths sort as paths do; a step that
holds it makes its operation odd."""

KIND_GENESIS, KIND_PROPERTIES, KIND_PLACEMENT = 3, 4, 10
_KINDS = {name: number for name, number, _, _, member in MESSAGES["Operation"] if member}


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of a batch of blocks of one feed: PLAIN_CHANGES, REST_OPERATIONS, ASKED_ITEMS, and (seq, detail)
    of messages that are refused as a whole."""

    plain: pa.Table
    rest: pa.Table
    asked: pa.Table
    malformed: list[tuple[int, str]]

    def of(self, items: pl.DataFrame) -> "Operations":
        """Only what is done by operations on these items (creator, local)."""
        rest, asked = pl.from_arrow(self.rest), pl.from_arrow(self.asked)
        assert isinstance(rest, pl.DataFrame)
        assert isinstance(asked, pl.DataFrame)
        rest = rest.join(items, on=["creator", "local"], how="semi")
        asked = asked.join(items, left_on=["child_creator", "child_local"], right_on=["creator", "local"], how="semi")
        assert not self.plain.num_rows, "single operations are asked for"
        return Operations(
            self.plain, rest.to_arrow().cast(REST_OPERATIONS), asked.to_arrow().cast(ASKED_ITEMS), self.malformed
        )


def read_operations(
    payloads: pa.Array, seqs: np.ndarray[Any, Any], *, party: PartyKey, feed: FeedId, split: bool = True
) -> Operations:
    """The operations of these blocks of a feed, in feed order. Without `split` all of them are rest.

    A message of one operation may turn out malformed later, when the operation is decoded."""
    try:
        messages = read_columns("Message", payloads)
    except ValueError:
        return _read_in_halves(payloads, seqs, party=party, feed=feed, split=split)
    exact = same(write_columns("Message", messages), payloads)
    lists = messages.column("operations")
    starts = lists.offsets.to_numpy()
    counts = np.diff(starts)
    rows = np.repeat(np.arange(len(payloads)), counts)
    positions = np.arange(len(rows)) - np.repeat(starts[:-1] - starts[0], counts)
    raw = lists.flatten()
    found = _Found(
        party=party,
        feed=feed,
        seqs=seqs,
        depths=messages.column("depth").to_numpy(),
        times=messages.column("time_ms").to_numpy(),
        counts=counts,
    )
    odd_rows = ~exact
    try:
        operations = read_columns("Operation", raw)
    except ValueError:
        return _read_in_halves(payloads, seqs, party=party, feed=feed, split=split)
    sound = same(write_columns("Operation", operations), raw) & one_of(operations, "Operation")
    creators, fits = _creators(operations.column("feed"), feed)
    local = operations.column("local").to_numpy()
    plain = np.zeros(len(rows), dtype=bool)
    changes: list[pa.Table] = []
    for name in ("property_set", "metadata"):
        if operations.column(name).null_count < len(rows):
            chosen, table = _plain_changes(operations.column(name), metadata=name == "metadata")
            plain |= chosen
            changes.append(table)
    places = (seqs[rows].astype(np.uint64) << np.uint64(16)) | positions.astype(np.uint64)
    # A genesis says its id by its place; the few that name a number of the arc range are left to the wire module.
    is_genesis = operations.column("genesis").is_valid().to_numpy(zero_copy_only=False)
    placed = is_genesis & (local == 0) & (sizes(operations.column("feed")) == 0)
    local = np.where(placed, places, local)
    sound &= fits & (placed | ~is_genesis)
    # In a message of one operation the kernel finds out later whether it is well-formed. In others one bad operation
    # takes out its neighbours, and a creation is counted upon by others: so that has to be known here.
    alone = counts[rows] == 1
    well_formed = sound & ((alone & ~is_genesis) | plain | plain_geneses(operations))
    odd_rows[rows[~well_formed]] = True
    kept = ~odd_rows[rows]
    plain &= kept
    if not split:
        plain[:] = False
    plain_table = _plain_table(changes, plain, feed, creators, local, found.depths[rows], places)
    chosen_rest = np.flatnonzero(kept & ~plain)
    rest_table = pa.table(
        [
            pa.array(creators[chosen_rest]),
            pa.array(local[chosen_rest]),
            pa.array(np.full(len(chosen_rest), int.from_bytes(feed, "big"), dtype=np.uint64)),
            pa.array(found.depths[rows[chosen_rest]]),
            pa.array(places[chosen_rest]),
            pa.array(found.times[rows[chosen_rest]]),
            pa.array(alone[chosen_rest]),
            pa.array(_kinds(operations, chosen_rest)),
            raw.take(pa.array(chosen_rest)),
        ],
        schema=REST_OPERATIONS,
    )
    kinds = rest_table.column("kind").to_numpy()
    asked = _asked(operations, chosen_rest, kinds, rest_table)
    odd = np.flatnonzero(odd_rows)
    if not len(odd):
        return Operations(plain_table, rest_table, asked, [])
    rest, more, malformed = _read_odd(payloads, odd, found)
    return Operations(plain_table, pa.concat_tables([rest_table, rest]), pa.concat_tables([asked, more]), malformed)


def concerned(
    payloads: pa.Array, seqs: np.ndarray[Any, Any], feed: FeedId, items: pl.DataFrame
) -> np.ndarray[Any, Any]:
    """Which of these blocks may concern one of `items` (creator, local). Too many rather than too few: what odd bytes
    mean is not asked here."""
    try:
        lists = read_columns("Message", payloads).column("operations")
        heads = read_columns("OperationHead", lists.flatten())
    except ValueError:
        return np.ones(len(payloads), dtype=bool)
    counts = np.diff(lists.offsets.to_numpy())
    rows = np.repeat(np.arange(len(payloads)), counts)
    positions = np.arange(len(rows)) - np.repeat(lists.offsets.to_numpy()[:-1], counts)
    creators, fits = _creators(heads.column("feed"), feed)
    named = pl.DataFrame({"creator": creators, "local": heads.column("local").to_numpy(), "row": rows})
    placed = pl.DataFrame(
        {
            "creator": np.full(len(rows), int.from_bytes(feed, "big"), dtype=np.uint64),
            "local": (seqs[rows].astype(np.uint64) << np.uint64(16)) | positions.astype(np.uint64),
            "row": rows,
        }
    ).filter(pl.Series(heads.column("genesis").is_valid().to_numpy(zero_copy_only=False)))
    hits = pl.concat([named, placed]).join(items, on=["creator", "local"], how="semi")["row"].to_numpy()
    chosen = np.zeros(len(payloads), dtype=bool)
    chosen[hits] = True
    chosen[rows[~fits]] = True
    return chosen


@dataclass(frozen=True, slots=True)
class _Found:
    """What all rows of a batch share, and what the envelope says of each."""

    party: PartyKey
    feed: FeedId
    seqs: Any
    depths: Any
    times: Any
    counts: Any


def _read_in_halves(
    payloads: pa.Array, seqs: np.ndarray[Any, Any], *, party: PartyKey, feed: FeedId, split: bool
) -> Operations:
    """A batch that columns can't decode: halves, until the one bad message is alone and the wire module tells."""
    count = len(payloads)
    if count == 1:
        found = _Found(party, feed, seqs, None, None, None)
        rest, asked, malformed = _read_odd(payloads, np.array([0]), found)
        return Operations(PLAIN_CHANGES.empty_table(), rest, asked, malformed)
    middle = count // 2
    low, high = (
        read_operations(payloads.slice(start, stop - start), seqs[start:stop], party=party, feed=feed, split=split)
        for start, stop in ((0, middle), (middle, count))
    )
    return Operations(
        pa.concat_tables([low.plain, high.plain]),
        pa.concat_tables([low.rest, high.rest]),
        pa.concat_tables([low.asked, high.asked]),
        low.malformed + high.malformed,
    )


def _read_odd(
    payloads: pa.Array, odd: np.ndarray[Any, Any], found: _Found
) -> tuple[pa.Table, pa.Table, list[tuple[int, str]]]:
    """Odd messages through the wire module: their operations are rest, or the message is malformed."""
    rest: list[tuple[Any, ...]] = []
    asked: list[tuple[Any, ...]] = []
    malformed: list[tuple[int, str]] = []
    for row in odd.tolist():
        seq = int(found.seqs[row])
        envelope = decode_envelope(payloads[row].as_py(), DATA)
        if not isinstance(envelope, Envelope):
            raise Corrupt(
                f"block {seq} of feed {found.feed.hex()} was let through and is {envelope}",
                next_step="Run the audit over the lake; a block like this ends its feed when it is verified.",
            )
        body = envelope.body
        try:
            operations = decode_operations(body, party=found.party, feed=found.feed, seq=seq)
        except OperationRefused as refusal:
            malformed.append((seq, refusal.detail))
            continue
        for at, (operation, decoded) in enumerate(zip(body.operations, operations, strict=True)):
            item = _halves(decoded.item)
            place = (body.depth, int.from_bytes(found.feed, "big"), seq << 16 | at)
            kind = _KINDS[operation.WhichOneof("kind")]
            data = operation.SerializeToString()
            rest.append((*item, place[1], place[0], place[2], body.time_ms, len(operations) == 1, kind, data))
            question = _question(decoded)
            if question is not None:
                why, about = question
                asked.append((*about, *item, *place, why))
    return rows_table(rest, REST_OPERATIONS), rows_table(asked, ASKED_ITEMS), malformed


def _question(operation: ItemOperation) -> tuple[int, tuple[int, int]] | None:
    """Who has to exist for an operation to count, and why it is asked."""
    if operation.field == PLACEMENT:
        parent = operation.body[1]
        return None if parent is None else (PLACED, _halves(parent))
    if operation.field != GENESIS:
        return None
    if operation.body.parent is not None:
        return CREATED, _halves(operation.body.parent)
    return (RIVAL, _halves(operation.item)) if item_local(operation.item) & ARC_BIT else None


def _halves(item: ItemId) -> tuple[int, int]:
    return int.from_bytes(item[:FEED_ID_BYTES], "big"), int.from_bytes(item[FEED_ID_BYTES:], "big")


def _asked(
    operations: pa.RecordBatch, chosen: np.ndarray[Any, Any], kinds: np.ndarray[Any, Any], rest: pa.Table
) -> pa.Table:
    """The questions of rest operations that columns have read; placements are few and read one by one."""
    parents: list[bytes] = []
    whys: list[int] = []
    rows: list[np.ndarray[Any, Any]] = []
    creating = np.flatnonzero(kinds == KIND_GENESIS)
    if len(creating):
        named = operations.column("genesis").field("parent").take(pa.array(chosen[creating]))
        there = sizes(named) == ITEM_ID_BYTES
        rows.append(creating[there])
        parents += named.filter(pa.array(there)).to_pylist()
        whys += [CREATED] * int(there.sum())
    placing = np.flatnonzero(kinds == _KINDS["placement"])
    for row in placing.tolist():
        parent = pb.Placement.FromString(operations.column("placement")[int(chosen[row])].as_py()).parent
        if len(parent) == ITEM_ID_BYTES:
            rows.append(np.array([row]))
            parents.append(parent)
            whys.append(PLACED)
    if not parents:
        return ASKED_ITEMS.empty_table()
    at = pa.array(np.concatenate(rows))
    halves = np.frombuffer(b"".join(parents), dtype=">u8").astype(np.uint64).reshape(-1, 2)
    child = rest.select(["creator", "local", "depth", "feed", "place"]).take(at)
    columns = [pa.array(halves[:, 0]), pa.array(halves[:, 1]), *child.columns, pa.array(np.array(whys, dtype=np.uint8))]
    return pa.table(columns, schema=ASKED_ITEMS)


def rows_table(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    """A table of rows in the order of the schema's fields."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)


def _kinds(operations: pa.RecordBatch, chosen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    kinds = np.zeros(len(chosen), dtype=np.uint8)
    for name, number in _KINDS.items():
        column = operations.column(name)
        if column.null_count < len(column):
            kinds[column.is_valid().to_numpy(zero_copy_only=False)[chosen]] = number
    return kinds


def _creators(feeds: pa.Array, own: FeedId) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The feed part of item ids as numbers that sort like the bytes, and where the length is right."""
    sizes = np.diff(np.frombuffer(feeds.buffers()[1], dtype=np.int32)[feeds.offset : feeds.offset + len(feeds) + 1])
    named = sizes == FEED_ID_BYTES
    fits = named | (sizes == 0)
    creators = np.full(len(feeds), int.from_bytes(own, "big"), dtype=np.uint64)
    if named.any():
        kept = feeds if named.all() else feeds.filter(pa.array(named))
        creators[named] = fixed_numbers(kept)
    return creators, fits


def fixed_numbers(column: pa.Array) -> np.ndarray[Any, Any]:
    """A column of 8 bytes each as numbers that sort like the bytes."""
    start = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset] if len(column) else 0
    data = column.buffers()[2]
    if data is None:
        return np.zeros(0, dtype=np.uint64)
    return np.frombuffer(data, dtype=">u8", count=len(column), offset=int(start)).astype(np.uint64)


def plain_geneses(operations: pa.RecordBatch) -> np.ndarray[Any, Any]:
    """Rows that create an item at their own place and are well-formed; links, views and arcs are left to the wire
    module. Only for rows that are known to be what their columns say."""
    column = operations.column("genesis")
    fits = column.is_valid().to_numpy(zero_copy_only=False) & (operations.column("local").to_numpy() == 0)
    fits &= sizes(operations.column("feed")) == 0
    if not fits.any():
        return fits  # type: ignore[no-any-return]  # pyarrow has no types
    for name, least, most in (("model", 1, NAME_CHARACTERS_MAX), ("type", 0, NAME_CHARACTERS_MAX)):
        length = pc.fill_null(pc.utf8_length(column.field(name)), 0).to_numpy(zero_copy_only=False)
        fits &= (length >= least) & (length <= most)
    for name in ("parent", "forked_from"):
        size = sizes(column.field(name))
        fits &= (size == 0) | (size == ITEM_ID_BYTES)
    for name in ("link", "view"):
        fits &= np.diff(column.field(name).offsets.to_numpy()) == 0
    fits &= pc.fill_null(column.field("version"), 0).to_numpy(zero_copy_only=False) > 0
    return fits  # type: ignore[no-any-return]  # pyarrow has no types


def _plain_changes(column: pa.StructArray, *, metadata: bool) -> tuple[np.ndarray[Any, Any], pa.Table]:
    """Which operations consist of plain changes alone, and all changes with the row of their operation."""
    lists = column.field("changes")
    offsets = lists.offsets.to_numpy()
    counts = np.diff(offsets)
    owners = np.repeat(np.arange(len(column)), counts)
    changes = lists.flatten()
    paths = changes.field("path")
    sets, deletes = changes.field("set"), changes.field("delete")
    is_set = sets.is_valid().to_numpy(zero_copy_only=False)
    good = is_set | deletes.is_valid().to_numpy(zero_copy_only=False)
    good &= one_of(changes, "Change")
    joined, path_good = _joined_paths(paths)
    good &= path_good
    if metadata:
        good &= ~pc.or_(pc.equal(joined, ACCESS_KEY), pc.starts_with(joined, ACCESS_KEY + PATH_SEPARATOR)).to_numpy(
            zero_copy_only=False
        )
    chosen = np.flatnonzero(is_set & good)
    if len(chosen):
        good[chosen] &= canonical_values(sets if len(chosen) == len(sets) else sets.take(pa.array(chosen)))
    plain = column.is_valid().to_numpy(zero_copy_only=False) & (counts > 0)
    plain &= np.diff(column.field("restores").offsets.to_numpy()) == 0
    if not good.all():
        plain[owners[~good]] = False
    table = pa.table(
        {
            "owner": pa.array(owners),
            "metadata": pa.array(np.full(len(owners), metadata)),
            "change": pa.array(
                (np.arange(len(owners)) - np.repeat(offsets[:-1] - offsets[0], counts)).astype(np.uint32)
            ),
            "path": joined,
            "value": sets,
        }
    )
    return plain, table


def _joined_paths(paths: pa.ListArray) -> tuple[pa.Array, np.ndarray[Any, Any]]:
    """Paths as single texts, and which of them are valid."""
    counts = np.diff(paths.offsets.to_numpy())
    steps = paths.flatten()
    lengths = pc.utf8_length(steps).to_numpy(zero_copy_only=False)
    bad = (lengths == 0) | (lengths > KEY_CHARACTERS_MAX)
    bad |= pc.match_substring(steps, PATH_SEPARATOR).to_numpy(zero_copy_only=False)
    good = (counts > 0) & (counts <= PATH_STEPS_MAX)
    if bad.any():
        good[np.repeat(np.arange(len(paths)), counts)[bad]] = False
    if len(steps) == len(paths) and (counts == 1).all():
        return steps, good
    # Joining knows lists of nullable texts only.
    return pc.binary_join(pa.ListArray.from_arrays(paths.offsets, steps), PATH_SEPARATOR), good


def _plain_table(
    changes: list[pa.Table],
    plain: np.ndarray[Any, Any],
    feed: FeedId,
    creators: np.ndarray[Any, Any],
    local: np.ndarray[Any, Any],
    depths: np.ndarray[Any, Any],
    places: np.ndarray[Any, Any],
) -> pa.Table:
    tables = []
    for table in changes:
        owners = table.column("owner").to_numpy()
        chosen = plain[owners]
        if not chosen.any():
            continue
        if not chosen.all():
            table, owners = table.filter(pa.array(chosen)), owners[chosen]
        columns = [
            pa.array(creators[owners]),
            pa.array(local[owners]),
            table.column("metadata"),
            pa.array(np.full(len(owners), int.from_bytes(feed, "big"), dtype=np.uint64)),
            pa.array(depths[owners]),
            pa.array(places[owners]),
            table.column("change"),
            table.column("path"),
            table.column("value"),
        ]
        tables.append(pa.table(columns, schema=PLAIN_CHANGES))
    return pa.concat_tables(tables) if tables else PLAIN_CHANGES.empty_table()
