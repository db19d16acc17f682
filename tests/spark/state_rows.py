"""Rows of `schemas.ITEM_STATES` for tests of what reads them."""

from typing import Any

import pyarrow as pa

from echostore.pipeline.schemas import ITEM_STATES

_BLANK = {"string": "", "binary": b"", "bool": False, "int64": 0, "uint64": 0, "uint32": 0}


def state_row(party: bytes, item: bytes, model: str, state: bytes, **more: Any) -> dict[str, Any]:
    """A row with what readers look at; the rest is blank."""
    row = {field.name: None if field.nullable else _BLANK[str(field.type)] for field in ITEM_STATES}
    return {**row, "party": party, "item": item, "model": model, "version": 1, "state": state, **more}


def state_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, ITEM_STATES)
