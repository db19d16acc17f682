"""Bare folds: the operations of a lake through the models alone, in two processes.

Nothing is verified, ordered across feeds, hashed or written: each operation is decoded and applied to its item, in
canonical order. What comes before that (reading the lake, sharing items out) is not timed.
"""

import multiprocessing
import time
from pathlib import Path

PROCESSES = 2


def bare_folds_s(lake: Path) -> float:
    """Seconds that the slower of two processes needs for its half of the items."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(PROCESSES) as pool:
        return max(pool.starmap(_fold_part, [(str(lake), part) for part in range(PROCESSES)], chunksize=1))


def _fold_part(lake: str, part: int) -> float:
    import numpy as np
    import polars as pl
    import pyarrow as pa

    from echostore.kernel.ids import FeedKey, ItemId, PartyKey, feed_id
    from echostore.pipeline.lake import Lake
    from echostore.pipeline.lake.reading import read_rows
    from echostore.pipeline.models import model_factory
    from echostore.pipeline.stages.item_fold import Given, fold_item, given_rest
    from echostore.pipeline.stages.operation_columns import read_operations
    from echostore.pipeline.stages.property_columns import ITEM, item_ids
    from echostore.pipeline.stages.reduce_bucket import stamp_of

    runs = Lake.open(lake).at().runs(control=False).to_pylist()
    tables = []
    for run in runs:
        rows = read_rows(lake, run["file"], run["row"], run["row"] + run["end"] - run["start"], ("seq", "payload"))
        for batch in rows:
            party, feed = PartyKey(run["party"]), feed_id(FeedKey(run["feed"]))
            seqs = batch["seq"].to_numpy()
            found = read_operations(batch["payload"], seqs, party=party, feed=feed, split=False).rest
            mixed = found["local"].to_numpy() * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
            tables.append(found.filter(pa.array(mixed % np.uint64(PROCESSES) == part)))
    frame = pl.from_arrow(pa.concat_tables(tables))
    assert isinstance(frame, pl.DataFrame)
    party = PartyKey(runs[0]["party"])
    factory = model_factory(None)
    seconds = 0.0
    key = ITEM[1:]
    for group in frame.sort(*key, "depth", "feed", "place").partition_by(key, maintain_order=True):
        item = ItemId(item_ids(group["creator"].to_numpy()[:1], group["local"].to_numpy()[:1])[0])
        columns = group.select("feed", "depth", "place", "time_ms", "operation").rows()
        before = time.perf_counter()
        given = []
        for feed_number, depth, place, time_ms, operation in columns:
            one = given_rest(party, stamp_of(depth, feed_number, place), time_ms, operation)
            assert isinstance(one, Given), one
            given.append(one)
        fold_item(party, item, factory, previous=None, given=given)
        seconds += time.perf_counter() - before
    return seconds
