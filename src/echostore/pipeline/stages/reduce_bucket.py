"""The reducer of a bucket of items: operations and the states before -> the states after. Arrow in, Arrow out, no Spark.

    plain changes ─┐             easy   property sets that only plain changes touched: by column
    rest ──────────┼─► per item  other  everything else: by the kernel, one item at a time
    states before ─┘             hard   not here: single operations are needed, which the combining has lost,
                                        or who wrote them, or what was folded long ago

A bucket holds whole items, of one party or of many: all operations of this run on each of them. It may be any set of
items; batch and stream use it alike. Hard items come back in `hard` and nothing else is said of them. The caller reduces
them again from single operations (`single=True`, with the writers), and those that are hard even then from their whole
history, without a state before. Nothing is hard then.

    hard                                   because
    plain changes on what is not there,    each of them is a reject of its own
    or is no property set
    access rules                           they rule over single operations, by their writers
    a late rule, an overtaken edit         what was folded before has to be folded again (`history`)
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from echostore.kernel.ids import FeedId, ItemId, PartyKey, Stamp
from echostore.kernel.items.operations import GENESIS, PLACEMENT, Reject
from echostore.kernel.items.record import ItemRecord
from echostore.kernel.items.tree import TreeMove
from echostore.kernel.models.factory import ModelFactory
from echostore.kernel.models.property_set import PropertySet
from echostore.pipeline.stages.asking import answer
from echostore.pipeline.stages.bucket_results import Results
from echostore.pipeline.stages.item_fold import (
    Folded,
    Given,
    IdentityOf,
    WriterAt,
    fold_item,
    given_plain,
    given_rest,
    restore_record,
)
from echostore.pipeline.stages.message_columns import columns_schema, read_columns, write_columns
from echostore.pipeline.stages.odd_layers import join_odd_layers, tops_of
from echostore.pipeline.stages.operation_columns import (
    KIND_GENESIS,
    KIND_PLACEMENT,
    KIND_PROPERTIES,
    PATH_SEPARATOR,
    WANTED,
    plain_geneses,
)
from echostore.pipeline.stages.property_columns import (
    ITEM,
    LAYER,
    ODD_KINDS,
    bytes_numbers,
    combine,
    combine_upon,
    decode_layers,
    encode_layers,
    item_halves,
    item_ids,
    join_layers,
    split_states,
)
from echostore.pipeline.stages.standing import Bases

_POSITION_MASK = 0xFFFF
_PROPERTY_SET = (PropertySet.name, PropertySet.version)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is to be reduced. The tables have a first column `party`, an index into `parties`; `previous` is
    ITEM_STATES, at most one row per item."""

    parties: list[PartyKey]
    plain: pa.Table
    rest: pa.Table
    asked: pa.Table
    previous: pa.Table


@dataclass(frozen=True, slots=True)
class Writers:
    """Who wrote what, for items with access rules."""

    role_at: dict[PartyKey, WriterAt]
    identity_of: dict[PartyKey, IdentityOf]


@dataclass(frozen=True, slots=True)
class Reduced:
    """What came of a bucket, each table with its schema; `states` has the changed items only."""

    states: pa.Table
    rejects: pa.Table
    moves: pa.Table
    hard: pa.Table
    edges: pa.Table
    blobs: pa.Table
    claims: pa.Table


def reduce_bucket(
    bucket: Bucket,
    factory: ModelFactory,
    *,
    absent: Mapping[PartyKey, frozenset[ItemId]] | None = None,
    lost: Mapping[PartyKey, frozenset[ItemId]] | None = None,
    writers: Writers | None = None,
    history: bool = False,
    bases: Bases | None = None,
) -> Reduced:
    """Fold a bucket. With `writers`, all operations are single ones and only the items that are asked for as WANTED are
    folded, by the kernel; each that changed or does not exist has a row in the states then. With `history` they are folded
    from nothing, or from the epoch that their party stands on, and `previous` tells only who exists by now."""
    out = Results(bucket.parties)
    plain, rest, asked = _frame(bucket.plain), _frame(bucket.rest), _frame(bucket.asked)
    before = _before(bucket)
    named: list[_Key] = []
    if writers is None:
        plain, rest = _fold_easy(plain, rest, before, bucket, out)
    else:
        wanted = asked.filter(pl.col("why") == WANTED).select(ITEM).unique()
        named = list(wanted.iter_rows()) if history else []
        rest = rest.join(wanted, on=ITEM, how="semi")
        expected = wanted if history else wanted.join(before, on=ITEM, how="anti")
        out.expect((key[0], _item(key)) for key in expected.iter_rows())
    fold = _Fold(bucket, factory, absent or {}, lost or {}, writers, history, bases)
    hard = _fold_others(plain, rest, before, fold, out, named)
    states = out.states()
    after = _frame_of_states(states, bucket.parties)
    gone = after.filter(pl.col("gone"))
    existing = pl.concat([after.filter(~pl.col("gone")).select(*ITEM, "genesis_depth"), hard])
    # In the second round the questions of the first would be asked again.
    asked = asked.filter((pl.col("why") != WANTED) & (writers is None or history))
    edges = answer(bucket.parties, asked, before.join(gone, on=ITEM, how="anti"), existing)
    return Reduced(states, out.rejects(), out.moves(), out.hard(), edges, out.blobs(), out.claims())


# What there was


def _frame(table: pa.Table) -> pl.DataFrame:
    found = pl.from_arrow(table)
    assert isinstance(found, pl.DataFrame)
    return found


def _before(bucket: Bucket) -> pl.DataFrame:
    """The items that existed: their key, model and row in `previous`."""
    return _frame_of_states(bucket.previous, bucket.parties).filter(~pl.col("gone"))


def _frame_of_states(states: pa.Table, parties: list[PartyKey]) -> pl.DataFrame:
    creators, local = item_halves(states.column("item"))
    codes = {party: code for code, party in enumerate(parties)}
    return pl.DataFrame(
        {
            "party": np.array(
                [codes[PartyKey(party)] for party in states.column("party").to_pylist()], dtype=np.uint32
            ),
            "creator": creators,
            "local": local,
            "gone": _frame(states.select(["gone"]))["gone"],
            "model": _frame(states.select(["model"]))["model"],
            "version": _frame(states.select(["version"]))["version"],
            "guarded": _frame(states.select(["guarded"]))["guarded"],
            "genesis_depth": _frame(states.select(["genesis_depth"]))["genesis_depth"],
            "row": np.arange(states.num_rows, dtype=np.int64),
        }
    )


# Easy items


def _fold_easy(
    plain: pl.DataFrame, rest: pl.DataFrame, before: pl.DataFrame, bucket: Bucket, out: Results
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Fold the easy items by column; returns what is left of the operations."""
    geneses, others = rest.filter(pl.col("kind") == KIND_GENESIS), rest.filter(pl.col("kind") != KIND_GENESIS)
    # Placements leave the state alone, and of other property operations only their own layer is left to the kernel.
    simple = pl.col("kind").is_in([KIND_PROPERTIES, KIND_PLACEMENT])
    difficult = others.filter(~simple)
    # Made by one plain genesis of a property set and not there before, or a property set that was.
    single = geneses.join(geneses.group_by(ITEM).len().filter(pl.col("len") == 1), on=ITEM, how="semi")
    created = _created(single.join(before, on=ITEM, how="anti").join(difficult, on=ITEM, how="anti"))
    is_plain = (pl.col("model") == _PROPERTY_SET[0]) & (pl.col("version") == _PROPERTY_SET[1]) & ~pl.col("guarded")
    kept = before.filter(is_plain).join(pl.concat([geneses, difficult]), on=ITEM, how="anti")
    kept = kept.join(pl.concat([plain.select(ITEM), others.select(ITEM)]), on=ITEM, how="semi")
    easy = pl.concat([created.select(ITEM), kept.select(ITEM)])
    if easy.is_empty():
        return plain, rest
    rows = plain.join(easy, on=ITEM, how="semi").with_columns(fresh=pl.lit(True))
    singles = _decoded(others.join(easy, on=ITEM, how="semi"), bucket.parties, out)
    heads = _heads(bucket.previous, kept)
    layers = _fold_layers(rows, singles, split_states(_models(heads)))
    stamps = [rows.select(*ITEM, "depth", "feed", "place"), singles.stamps, _last_stamps(kept, bucket.previous)]
    _write_easy(pl.concat([created, heads.select(created.columns)]), layers, pl.concat(stamps), out)
    return plain.join(easy, on=ITEM, how="anti"), rest.join(easy, on=ITEM, how="anti")


@dataclass(frozen=True, slots=True)
class _Singles:
    """Operations on easy items that are no plain changes: by layer, and the stamps of all of them."""

    by_layer: dict[tuple[Any, ...], list[Given]]
    stamps: pl.DataFrame


def _decoded(rest: pl.DataFrame, parties: list[PartyKey], out: Results) -> _Singles:
    """Decode the few; placements are moves at once, since the item exists and nobody is kept from writing it."""
    by_layer: dict[tuple[Any, ...], list[Given]] = defaultdict(list)
    well_formed = []
    columns = [*ITEM, "feed", "depth", "place", "time_ms", "operation"]
    for code, creator, local, feed, depth, place, time_ms, operation in rest.select(columns).iter_rows():
        party, stamp = parties[code], stamp_of(depth, feed, place)
        found = given_rest(party, stamp, time_ms, operation)
        if isinstance(found, Reject):
            out.add_reject(party, found, None)
            continue
        well_formed.append((code, creator, local, depth, feed, place))
        if found.operation.field == PLACEMENT:
            out.add_move(party, TreeMove(stamp, found.operation.item, *found.operation.body))
        else:
            by_layer[code, creator, local, False, feed].append(found)
    names = [*ITEM, "depth", "feed", "place"]
    return _Singles(by_layer, pl.DataFrame(well_formed, schema=rest.select(names).schema, orient="row"))


def _fold_layers(rows: pl.DataFrame, singles: _Singles, before: pl.DataFrame) -> pl.DataFrame:
    """All layers after this run, as their bytes (LAYER and `layer`). Layers that nobody wrote to pass as they are."""
    odd = _odd_keys(singles, rows)
    written = before.join(pl.concat([rows.select(LAYER), odd.select(LAYER)]), on=LAYER, how="semi")
    parts = [before.join(written, on=LAYER, how="anti")]
    rows = rows.with_columns(top=pl.col("path").str.split(PATH_SEPARATOR).list.first())
    fresh, key = rows, [*LAYER, "top"]
    if written.height:
        from_states, more = decode_layers(written)
        odd, passing = _parted(odd, more, fresh)
        from_plain = from_states.drop(ODD_KINDS).join(pl.concat([odd, passing]), on=key, how="anti")
        rows = combine_upon(from_plain, fresh.join(odd, on=key, how="anti").select(from_plain.columns))
        rows = pl.concat([rows, from_states.join(passing, on=key, how="semi")], how="diagonal")
    else:
        rows = combine(rows.join(odd, on=key, how="anti"))
    plain = encode_layers(rows).select(before.columns)
    if odd.is_empty():
        return pl.concat([*parts, plain])
    parts.append(plain.join(odd, on=LAYER, how="anti"))
    given = _given_by_layer(singles, fresh.join(odd, on=key, how="semi"))
    joined = join_odd_layers(odd, given, _bytes_by_layer(written, odd), _bytes_by_layer(plain, odd), before.schema)
    return pl.concat([*parts, joined])


def _parted(odd: pl.DataFrame, more: pl.DataFrame, fresh: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The odd keys that the kernel folds: those of layers where this run wrote to one (`odd` has the single operations),
    or that columns can't carry; and those whose entries pass as they are."""
    key = [*LAYER, "top"]
    folded = pl.concat([odd, more.filter("apart").select(key), more.select(key).join(fresh, on=key, how="semi")])
    with_them = more.select(key).join(folded, on=LAYER, how="semi")
    return pl.concat([folded, with_them]).unique(), more.select(key).join(folded, on=LAYER, how="anti")


def _odd_keys(singles: _Singles, rows: pl.DataFrame) -> pl.DataFrame:
    """The keys (LAYER and `top`) that operations other than plain changes write to."""
    found = {(*key, top) for key, given in singles.by_layer.items() for one in given for top in tops_of(one.operation)}
    return pl.DataFrame(list(found), schema={**rows.select(LAYER).schema, "top": pl.String}, orient="row")


def _given_by_layer(singles: _Singles, rows: pl.DataFrame) -> dict[tuple[Any, ...], list[Given]]:
    """Operations that the kernel has to fold: the single ones, and plain changes of the same keys."""
    given: dict[tuple[Any, ...], list[Given]] = {key: list(each) for key, each in singles.by_layer.items()}
    columns = [*LAYER, "depth", "place", "change", "path", "value"]
    for row in rows.select(columns).iter_rows():
        key, (depth, place, change, path, value) = row[:5], row[5:]
        stamp, item = stamp_of(depth, key[4], place), _item((key[0], key[1], key[2]))
        given.setdefault(key, []).append(given_plain(item, stamp, change, path, value, metadata=key[3]))
    return given


def _bytes_by_layer(layers: pl.DataFrame, odd: pl.DataFrame) -> dict[tuple[Any, ...], bytes]:
    return {row[:5]: row[5] for row in layers.join(odd, on=LAYER, how="semi").select(*LAYER, "layer").iter_rows()}


_GENESIS_FIELDS = ("model", "version", "type", "parent", "forked_from")


def _created(geneses: pl.DataFrame) -> pl.DataFrame:
    """The plain geneses among these, of property sets: ITEM, what the genesis said, and its depth."""
    operations = read_columns("Operation", geneses["operation"].to_arrow().cast(pa.binary()))
    fits = plain_geneses(operations)
    found = operations.column("genesis")
    columns = {name: pl.from_arrow(found.field(name)) for name in _GENESIS_FIELDS}
    created = geneses.select(ITEM).with_columns(
        **columns,  # type: ignore[arg-type]  # names are columns
        genesis_depth=geneses["depth"],
        link_source=pl.lit(b""),
        link_target=pl.lit(b""),
        link_party=pl.lit(b""),
        inception_key=pl.lit(b""),
        id_proof=pl.lit(b""),
    )
    return created.filter(
        pl.Series(fits) & (pl.col("model") == _PROPERTY_SET[0]) & (pl.col("version") == _PROPERTY_SET[1])
    )


def _heads(previous: pa.Table, kept: pl.DataFrame) -> pl.DataFrame:
    """The item states of kept items as columns."""
    data = previous.column("state").take(pa.array(kept["row"].to_numpy()))
    columns = read_columns("ItemState", pa.concat_arrays(data.chunks) if data.num_chunks else pa.array([], pa.binary()))
    found = pl.from_arrow(columns.drop_columns(["item", "state_cids", "access"]))
    assert isinstance(found, pl.DataFrame)
    return pl.concat([kept.select(ITEM), found], how="horizontal")


def _models(heads: pl.DataFrame) -> pl.DataFrame:
    """Both property sets of each item: its own and its metadata."""
    both = [
        heads.select(*ITEM, metadata=pl.lit(metadata), data=name)
        for metadata, name in ((False, "state"), (True, "metadata"))
    ]
    return pl.concat(both)


def _write_easy(heads: pl.DataFrame, layers: pl.DataFrame, stamps: pl.DataFrame, out: Results) -> None:
    encoded = join_layers(layers)
    last = stamps.sort("depth", "feed", "place").group_by(ITEM).last()
    last = last.select(*ITEM, last_depth="depth", last_feed="feed", last_place="place")
    heads = heads.join(last, on=ITEM, how="left", maintain_order="left")
    for metadata, name in ((False, "state"), (True, "metadata")):
        part = encoded.filter(pl.col("metadata") == metadata).select(*ITEM, pl.col("data").alias(name))
        heads = heads.join(part, on=ITEM, how="left", maintain_order="left").with_columns(pl.col(name).fill_null(b""))
    items = item_ids(heads["creator"].to_numpy(), heads["local"].to_numpy())
    schema = columns_schema("ItemState")
    columns = []
    for field in schema:
        if field.name == "item":
            columns.append(pa.array(items, pa.binary()))
        elif field.name in ("state_cids", "access"):
            columns.append(
                pa.ListArray.from_arrays(
                    pa.array(np.zeros(len(items) + 1, dtype=np.int32)), pa.array([], pa.binary()), type=field.type
                )
            )
        else:
            columns.append(heads[field.name].to_arrow().cast(field.type))
    states = write_columns("ItemState", pa.record_batch(columns, schema=schema))
    out.add_easy(heads, items, states)


def _last_stamps(kept: pl.DataFrame, previous: pa.Table) -> pl.DataFrame:
    """The highest stamps of kept items so far."""
    names = ["last_depth", "last_feed", "last_seq", "last_position"]
    last = _frame(previous.select(names).take(pa.array(kept["row"].to_numpy())))
    found = pl.concat([kept.select(ITEM), last], how="horizontal").filter(pl.col("last_depth").is_not_null())
    return found.select(
        *ITEM,
        depth=pl.col("last_depth").cast(pl.UInt64),
        feed=pl.Series(bytes_numbers(found["last_feed"].to_arrow().cast(pa.binary()))),
        place=pl.col("last_seq").cast(pl.UInt64) * 65536 + pl.col("last_position").cast(pl.UInt64),
    )


# All other items


@dataclass(frozen=True, slots=True)
class _Fold:
    """What folding by the kernel needs to know."""

    bucket: Bucket
    factory: ModelFactory
    absent: Mapping[PartyKey, frozenset[ItemId]]
    lost: Mapping[PartyKey, frozenset[ItemId]]
    writers: Writers | None
    history: bool
    bases: Bases | None

    def previous(self, key: "_Key", row: int | None) -> ItemRecord | None:
        """The state that an item is folded from: the last one, or in `history` what the party's base has of it."""
        if not self.history:
            return None if row is None else _restored(self.bucket.previous, row, self.factory)
        party = self.bucket.parties[key[0]]
        return self.bases.opened(party).record(_item(key)) if self.bases and party in self.bases else None

    def moves(self, key: "_Key") -> list[TreeMove]:
        """Those of an item that its party's base has, where it is folded from there."""
        party = self.bucket.parties[key[0]]
        if not self.history or not self.bases or party not in self.bases:
            return []
        return self.bases.opened(party).moves_of([_item(key)])

    def item(self, key: "_Key", previous: ItemRecord | None, given: list[Given]) -> Folded:
        party = self.bucket.parties[key[0]]
        return fold_item(
            party,
            _item(key),
            self.factory,
            previous=previous,
            given=given,
            absent=self.absent.get(party, frozenset()),
            lost=self.lost.get(party, frozenset()),
            writer_at=None if self.writers is None else self.writers.role_at[party],
            identity_of=_nobody if self.writers is None else self.writers.identity_of[party],
            base_length=self.bases.lengths(party) if self.bases else _nothing,
        )


def _nobody(feed: FeedId) -> None:
    """Who a feed belongs to, where nobody asks."""


def _nothing(feed: FeedId) -> int:
    """What of a feed lies inside of no epoch."""
    return 0


def _item(key: "_Key") -> ItemId:
    return ItemId(key[1].to_bytes(8, "big") + key[2].to_bytes(8, "big"))


def _fold_others(
    plain: pl.DataFrame, rest: pl.DataFrame, before: pl.DataFrame, fold: _Fold, out: Results, named: Iterable["_Key"]
) -> pl.DataFrame:
    """Fold by the kernel; returns the hard items that exist all the same, with their genesis's depth. Those that are
    `named` are folded also where nobody wrote to them: what a base has of them stays."""
    bucket = fold.bucket
    existing: list[tuple[int, int, int, int]] = []
    given, refused = _given(plain, rest, bucket.parties)
    rows = {(party, creator, local): row for party, creator, local, row in before.select(*ITEM, "row").iter_rows()}
    for key in named:
        if fold.bases and bucket.parties[key[0]] in fold.bases:
            given.setdefault(key, [])
    plain_items = set(plain.filter(~pl.col("metadata")).select(ITEM).unique().iter_rows())
    metadata_items = set(plain.filter(pl.col("metadata")).select(ITEM).unique().iter_rows())
    for key, operations in given.items():
        party, item = bucket.parties[key[0]], _item(key)
        row = rows.get(key)
        previous = fold.previous(key, row)
        for one in operations:
            if one.operation.field == GENESIS and one.operation.body.inception_key:
                out.add_claim(party, one.operation.body)
        folded = fold.item(key, previous, operations)
        folded.moves += fold.moves(key)
        hard = fold.writers is None and _is_hard(folded, key in plain_items, key in metadata_items)
        if fold.history or (not hard and not folded.late):
            out.add_folded(party, item, folded)
            continue
        out.add_hard(party, item, history=folded.late)
        depth = _genesis_depth(folded, previous, operations)
        if depth is not None:
            existing.append((*key, depth))
    for key, rejects in refused.items():
        for reject in rejects:
            out.add_reject(bucket.parties[key[0]], reject, None)
    schema = {"party": pl.UInt32, "creator": pl.UInt64, "local": pl.UInt64, "genesis_depth": pl.Int64}
    return pl.DataFrame(existing, schema=schema, orient="row")


def _genesis_depth(folded: Folded, previous: ItemRecord | None, operations: list[Given]) -> int | None:
    """When a hard item was created; None when it was not."""
    record = folded.record or previous
    if record is not None:
        return record.genesis.depth
    return min((one.stamp.depth for one in operations if one.operation.field == GENESIS), default=None)


def _is_hard(folded: Folded, plain: bool, metadata: bool) -> bool:
    """Whether single operations are needed: combined ones would be rejects, or rules decide over them."""
    if folded.ruled:
        return True
    if folded.record is None:
        return plain or metadata
    genesis = folded.record.genesis
    return plain and (genesis.model, genesis.version) != _PROPERTY_SET


_Key = tuple[int, int, int]


def _given(
    plain: pl.DataFrame, rest: pl.DataFrame, parties: list[PartyKey]
) -> tuple[dict[_Key, list[Given]], dict[_Key, list[Reject]]]:
    """The operations of each item as the kernel's, and messages that are refused."""
    given: dict[_Key, list[Given]] = defaultdict(list)
    refused: dict[_Key, list[Reject]] = defaultdict(list)
    columns = [*ITEM, "metadata", "feed", "depth", "place", "change", "path", "value"]
    for party, creator, local, metadata, feed, depth, place, change, path, value in plain.select(columns).iter_rows():
        item = _item((party, creator, local))
        stamp = stamp_of(depth, feed, place)
        given[party, creator, local].append(given_plain(item, stamp, change, path, value, metadata=metadata))
    columns = [*ITEM, "feed", "depth", "place", "time_ms", "operation"]
    for party, creator, local, feed, depth, place, time_ms, operation in rest.select(columns).iter_rows():
        found = given_rest(parties[party], stamp_of(depth, feed, place), time_ms, operation)
        if isinstance(found, Reject):
            refused[party, creator, local].append(found)
        else:
            given[party, creator, local].append(found)
    return given, refused


def stamp_of(depth: int, feed: int, place: int) -> Stamp:
    return Stamp(depth, FeedId(feed.to_bytes(8, "big")), place >> 16, place & _POSITION_MASK)


def _restored(previous: pa.Table, row: int, factory: ModelFactory) -> ItemRecord:
    kept = previous.slice(row, 1).to_pylist()[0]
    last = None
    if kept["last_depth"] is not None:
        last = Stamp(kept["last_depth"], FeedId(kept["last_feed"]), kept["last_seq"], kept["last_position"])
    return restore_record(kept["state"], kept["native"], last, factory)
