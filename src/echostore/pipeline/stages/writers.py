"""What the tasks of a later round are given beside its parcels: who wrote what, and as what, since access rules decide over
single operations; and which items are absent."""

import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from echostore.kernel.ids import FeedId, IdentityKey, ItemId, PartyKey
from echostore.kernel.items.operations import WriterRole
from echostore.pipeline.output.writing import Place
from echostore.pipeline.stages.reduce_bucket import Writers


def writers_of(admission: pa.Table) -> Writers:
    """Who wrote what, out of rows of ADMISSION."""
    roles: dict[PartyKey, dict[FeedId, list[tuple[int, int | None, WriterRole]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    identities: dict[PartyKey, dict[FeedId, IdentityKey]] = defaultdict(dict)
    for row in admission.to_pylist():
        party, feed, identity = PartyKey(row["party"]), FeedId(row["feed_id"]), IdentityKey(row["identity"])
        identities[party][feed] = identity
        if row["role"] is not None:
            roles[party][feed].append((row["start"], row["end"], WriterRole(identity, row["role"])))

    def role_at(party: PartyKey) -> Any:
        def found(feed: FeedId, seq: int) -> WriterRole:
            for start, end, writer in roles[party][feed]:
                if start <= seq and (end is None or seq < end):
                    return writer
            raise AssertionError(f"block {seq} of feed {feed.hex()} does not count")

        return found

    return Writers(
        {party: role_at(party) for party in identities}, {party: known.get for party, known in identities.items()}
    )


def read_arrow(path: str) -> pa.Table:
    with pa.OSFile(path, "rb") as file:
        return pa.ipc.open_file(file).read_all()


def write_arrow(place: Place, name: str, table: pa.Table) -> str:
    """A table for the tasks of one round, in the attempt's folder. No commit names it."""
    path = Path(place.out, place.folder, f"{name}-{uuid.uuid4().hex}.arrow")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(path)


def absent_items(path: str) -> dict[PartyKey, frozenset[ItemId]]:
    found: dict[PartyKey, set[ItemId]] = defaultdict(set)
    for row in read_arrow(path).to_pylist():
        found[PartyKey(row["party"])].add(ItemId(row["item"]))
    return {party: frozenset(items) for party, items in found.items()}
