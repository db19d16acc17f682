"""The tables for analysts: their columns as they are stored. docs/operate/tables.md says what they mean.

Ids are text here, as the command line prints them: parties and feeds as hex, items in their text form. Tables of items
are kept as changes: each run adds rows of what changed, and the row with the highest `commit` counts. The views that
`echostore.pipeline.output.views` makes show the rows that count, and leave out the two columns that say so.
"""

from typing import Final

import pyarrow as pa

TEXT = pa.string()
MOMENT = pa.timestamp("us", tz="UTC")

_CHANGES = [pa.field("commit", pa.int64(), nullable=False)]


def _required(*names: str) -> list[pa.Field]:
    return [pa.field(name, TEXT, nullable=False) for name in names]


ITEMS: Final = pa.schema(
    [
        *_required("party", "item", "model"),
        pa.field("version", pa.int64(), nullable=False),
        *_required("type", "name"),
        pa.field("deleted", pa.bool_(), nullable=False),
        pa.field("opaque", pa.bool_(), nullable=False),
        pa.field("created_in", TEXT),
        *_required("creator"),
        pa.field("depth", pa.int64(), nullable=False),
        pa.field("view_key", TEXT),
        pa.field("forked_from", TEXT),
        pa.field("state_bytes", pa.int64(), nullable=False),
        pa.field("value", TEXT),
        *_CHANGES,
        pa.field("gone", pa.bool_(), nullable=False),
    ]
)

PROPERTIES: Final = pa.schema(
    [
        *_required("party", "item", "path", "kind"),
        pa.field("text", TEXT),
        pa.field("integer", pa.int64()),
        pa.field("number", pa.float64()),
        pa.field("boolean", pa.bool_()),
        pa.field("time", MOMENT),
        pa.field("json", TEXT),
        *_CHANGES,
    ]
)

LINKS: Final = pa.schema(
    [
        *_required("party", "item", "type"),
        pa.field("deleted", pa.bool_(), nullable=False),
        pa.field("source", TEXT),
        pa.field("target", TEXT),
        pa.field("target_party", TEXT),
        *_CHANGES,
    ]
)

PLACEMENTS: Final = pa.schema(
    [
        *_required("party", "item"),
        pa.field("parent", TEXT),
        pa.field("embedded_in", pa.list_(TEXT), nullable=False),
        *_CHANGES,
    ]
)

MEMBERS: Final = pa.schema(
    [
        *_required("party", "identity", "name"),
        pa.field("role", TEXT),
        *_required("status"),
        pa.field("creator", pa.bool_(), nullable=False),
        pa.field("devices", pa.int64(), nullable=False),
        *_CHANGES,
    ]
)

REJECTS: Final = pa.schema(
    [
        *_required("party", "feed"),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        *_required("reason", "detail"),
        *_CHANGES,
    ]
)

RUNS: Final = pa.schema(
    [
        pa.field("commit", pa.int64(), nullable=False),
        pa.field("created", MOMENT, nullable=False),
        pa.field("lake_version", pa.int64(), nullable=False),
        *_required("stage"),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
    ]
)

BLOCKS: Final = pa.schema(
    [
        *_required("party", "feed"),
        pa.field("control", pa.bool_(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        *_required("link"),
        pa.field("depth", pa.int64(), nullable=False),
        pa.field("payload_bytes", pa.int64(), nullable=False),
        pa.field("signed", pa.bool_(), nullable=False),
        *_CHANGES,
    ]
)

MESSAGES: Final = pa.schema(
    [
        *_required("party", "feed"),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("depth", pa.int64(), nullable=False),
        pa.field("time", MOMENT, nullable=False),
        pa.field("operations", pa.int64(), nullable=False),
        pa.field("dependencies", pa.int64(), nullable=False),
        pa.field("payload_bytes", pa.int64(), nullable=False),
        *_required("state"),
        *_CHANGES,
    ]
)

PARTIES: Final = pa.schema(
    [
        *_required("party", "root_party", "title", "state", "detail"),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("cid", TEXT),
        pa.field("root", pa.binary()),
        pa.field("control", pa.binary()),
        *_required("models", "at"),
        *(
            pa.field(name, pa.int64(), nullable=False)
            for name in ("messages", "applied", "rejected", "waiting", "items")
        ),
        pa.field("since", pa.int64(), nullable=False),
        pa.field("built", pa.int64(), nullable=False),
        *_CHANGES,
    ]
)
"""One row for each party and build; the row with the highest commit counts. `root_party` is the parent of a child party,
and the party itself otherwise. `root` is the state root, `control` the control feeds' timeframe it was folded under
(an EpochGenesis with nothing else in it). `models` are those in use, `at` is the anchor that was asked for. Rows of items
count from commit `since` on: there the party was built from scratch. `built` is the commit of its last build that did not
fail, and the one of the rows that count of tables which are written anew with each build."""

TABLES: Final[dict[str, pa.Schema]] = {
    "items": ITEMS,
    "properties": PROPERTIES,
    "links": LINKS,
    "members": MEMBERS,
    "rejects": REJECTS,
    "runs": RUNS,
    "messages": MESSAGES,
    "blocks": BLOCKS,
}
"""By name, as `--tables` takes them."""


def table_kind(name: str) -> str:
    """The kind of the files of a table; the stages keep files of their own under plain names."""
    return f"table_{name}"


DEFAULT_TABLES: Final = ("items", "properties", "links", "members", "rejects", "runs")
"""Those that grow with the state. Messages and blocks grow with the history, and only some want them."""
