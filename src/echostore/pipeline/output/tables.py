"""`echostore.read_tables`: the tables of an output for analysts, without Spark and without Java.

    tables = echostore.read_tables("out")
    tables["items"]                          a pyarrow.Table; the same by tables.arrow("items")
    tables.pandas("properties")              a DataFrame of pandas
    tables.polars("types.task")              a DataFrame of polars: one row for each task, one column for each property
    tables.duckdb().sql("SELECT count(*) FROM types.task WHERE NOT deleted")

A table is read when it is asked for the first time, of the commit that was the newest when `read_tables` was called.
"""

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from echostore.kernel.errors import EngineFailed, NotFound

if TYPE_CHECKING:
    import duckdb
    import pandas
    import polars
    import pyarrow

TYPES = "types."
"""What the names of wide tables begin with, before the type."""

FIXED = ("party", "item", "type", "parent", "deleted")
"""The first columns of a wide table. A property with such a name is called `property.<name>`."""

_EXTRAS = {"duckdb": "sql"}
_TEXT, _JSON = frozenset({"text", "reference"}), frozenset({"list", "map", "blob"})
EXACT_FLOAT_MAX = 1 << 53


def read_tables(out: str | os.PathLike[str], *, commit: int | None = None) -> "Tables":
    """The tables of an output folder: of its newest commit with what a stream has on top, or of a commit by its number."""
    for name in ("pyarrow", "polars"):
        needed(name)
    from echostore.pipeline.folders import FolderKind, folder_kind
    from echostore.pipeline.output.stored_tables import StoredTables

    kind = folder_kind(out)
    if kind is not FolderKind.OUTPUT:
        raise NotFound(
            f"{os.fspath(out)} is a {kind}, and tables are in the output of a pipeline.",
            next_step=_how_to_build(kind),
        )
    return Tables(StoredTables.open(os.fspath(out), commit))


def _how_to_build(kind: str) -> str:
    publish = "`echostore lake publish --lake LAKE`, then " if kind == "home" else ""
    return f"Build one with {publish}`echostore pipeline run --lake LAKE --out OUT`, and name OUT."


def needed(name: str) -> Any:
    """An optional library, imported when it is first needed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EngineFailed(
            f"{name} is not installed.",
            next_step=f"Install it with: pip install 'echostore[{_EXTRAS.get(name, 'arrow')}]'",
        ) from error


class Tables(Mapping[str, "pyarrow.Table"]):
    """The tables of one commit by name; `types.<type>` are wide ones, with a column for each property."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self._read: dict[str, Any] = {}

    def __repr__(self) -> str:
        commit = self._stored.commit
        return f"<Tables of {self._stored.out}, commit {0 if commit is None else commit.number}: {', '.join(self)}>"

    def __iter__(self) -> Iterator[str]:
        yield from self._stored.names
        yield from (f"{TYPES}{each}" for each in self.types)

    def __len__(self) -> int:
        return len(self._stored.names) + len(self.types)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str) and name.startswith(TYPES):
            return name.removeprefix(TYPES) in self.types
        return name in self._stored.names

    def __getitem__(self, name: str) -> "pyarrow.Table":
        if name not in self:
            raise KeyError(name)
        return self.arrow(name)

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The types that items have, ascending. Items without a type are in `items` alone."""
        if "items" not in self._stored.names:
            return ()
        return tuple(sorted(filter(None, set(self.arrow("items")["type"].unique().to_pylist()))))

    def arrow(self, name: str) -> "pyarrow.Table":
        """A table as a pyarrow.Table. NotFound when the commit has none of this name."""
        if name not in self._read:
            self._read[name] = (
                self._wide(name.removeprefix(TYPES)) if name.startswith(TYPES) else self._stored.read(name)
            )
        return self._read[name]

    def pandas(self, name: str) -> "pandas.DataFrame":
        """A table as a DataFrame of pandas."""
        needed("pandas")
        return self.arrow(name).to_pandas()

    def polars(self, name: str) -> "polars.DataFrame":
        """A table as a DataFrame of polars."""
        return needed("polars").from_arrow(self.arrow(name))  # type: ignore[no-any-return]  # imported by its name

    def duckdb(self) -> "duckdb.DuckDBPyConnection":
        """A new DuckDB in memory that has all tables, and the wide ones in the schema `types`. SQL does not tell names
        apart that differ in capital letters alone: the later one of them in the alphabet ends with `_`."""
        connection = needed("duckdb").connect()
        connection.execute("CREATE SCHEMA types")
        taken: set[str] = set()
        for name in self:
            schema, table = ("types", name.removeprefix(TYPES)) if name.startswith(TYPES) else ("main", name)
            while f"{schema}.{table}".lower() in taken:
                table += "_"
            taken.add(f"{schema}.{table}".lower())
            connection.register("arriving", self.arrow(name))
            connection.execute(f"CREATE TABLE {schema}.{_quoted(table)} AS SELECT * FROM arriving")
            connection.unregister("arriving")
        return connection  # type: ignore[no-any-return]  # imported by its name

    def _wide(self, type_name: str) -> "pyarrow.Table":
        if type_name not in self.types:
            raise NotFound(
                f"no item has the type {type_name!r}", next_step=f"Types: {', '.join(self.types) or 'none'}."
            )
        properties = self.arrow("properties") if "properties" in self._stored.names else None
        return wide_table(self.arrow("items"), properties, type_name)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


# wide tables


def wide_table(items: "pyarrow.Table", properties: "pyarrow.Table | None", type_name: str) -> "pyarrow.Table":
    """The items of one type, ascending by party and item: FIXED, `value` where items have one, and a column for each path.

    A column has the type of its values: boolean, integer, number, text (with references), bytes, time. Lists, maps and
    blobs are JSON text, and so are values whose kinds do not mix.
    """
    import polars as pl
    import pyarrow as pa
    import pyarrow.compute as pc

    chosen = items.filter(pc.equal(items["type"], type_name)).sort_by([("party", "ascending"), ("item", "ascending")])
    found = {name: chosen[name] for name in FIXED}
    if chosen["value"].null_count < len(chosen):
        found["value"] = chosen["value"]
    if properties is None:
        return pa.table(found)
    places = list(zip(chosen["party"].to_pylist(), chosen["item"].to_pylist(), strict=True))
    at = pl.DataFrame(
        {"party": [party for party, _ in places], "item": [item for _, item in places], "row": range(len(places))},
        schema={"party": pl.String, "item": pl.String, "row": pl.Int64},
    )
    rows: Any = pl.from_arrow(properties)
    rows = rows.join(at, on=["party", "item"], how="inner")
    for path in sorted(rows["path"].unique().to_list()):
        found[_free(path, found)] = _column(rows.filter(pl.col("path") == path), len(places))
    return pa.table(found)


def _free(name: str, found: Mapping[str, Any]) -> str:
    """A name that no column has, also not in other letters: SQL does not tell them apart."""
    taken = {each.lower() for each in found}
    while name.lower() in taken:
        name = f"property.{name}"
    return name


def _column(rows: Any, count: int) -> "pyarrow.Array":
    """The values of one path, at the rows of their items."""
    import pyarrow as pa

    kinds = set(rows["kind"].unique().to_list()) - {"null"}
    kind, values = _values(rows, kinds, pa)
    column: list[Any] = [None] * count
    for row, value in zip(rows["row"].to_list(), values, strict=True):
        column[row] = value
    return pa.array(column, kind)


def _values(rows: Any, kinds: set[str], pa: Any) -> tuple[Any, list[Any]]:
    """The Arrow type of a column, and its values."""
    if kinds == {"boolean"}:
        return pa.bool_(), rows["boolean"].to_list()
    if kinds == {"integer"}:
        return pa.int64(), rows["integer"].to_list()
    if kinds in ({"number"}, {"integer", "number"}):
        whole = rows["integer"].to_list()
        if all(value is None or abs(value) <= EXACT_FLOAT_MAX for value in whole):
            pairs = zip(rows["number"].to_list(), whole, strict=True)
            return pa.float64(), [number if one is None else float(one) for number, one in pairs]
    if kinds == {"time"}:
        return pa.timestamp("us", tz="UTC"), rows["time"].to_list()
    if kinds == {"bytes"}:
        return pa.binary(), [None if text is None else bytes.fromhex(text) for text in rows["text"].to_list()]
    if kinds <= _TEXT:
        return pa.string(), rows["text"].to_list()
    if kinds <= _JSON:
        return pa.string(), rows["json"].to_list()
    return pa.string(), [_json(row) for row in rows.to_dicts()]


def _json(row: Mapping[str, Any]) -> str | None:
    """A value of any kind as JSON text."""
    kind = row["kind"]
    if kind == "null":
        return None
    if kind in _JSON:
        return str(row["json"])
    if kind == "time":
        return json.dumps(row["time"].isoformat())
    name = kind if kind in ("boolean", "integer", "number") else "text"
    return json.dumps(row[name], ensure_ascii=False)
