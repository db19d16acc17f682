"""Sealed answers: a leaf shows what the root signed, and nothing that somebody on the way made of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import echostore
from echostore.kernel.coherence.messages import Grant, IndexValue, Spec
from echostore.kernel.errors import Corrupt
from echostore.thin import driver
from echostore.thin.hashes import check_seal, sealers
from echostore.thin.thin_party import ThinParty, connect
from echostore.wire.coherence import LinkFrame
from echostore.wire.index_spec import index_items, index_seal, index_value
from echostore.wire.signing import SigningKey
from network_peers import until


@pytest.fixture
def leaf(tmp_path: Path) -> Iterator[ThinParty]:
    with echostore.open(tmp_path / "home", name="Root") as peer:
        party = peer.create_party("Sealed")
        party.create("property-set", type="task", title="a", done=False)
        party.create("property-set", type="task", title="b", done=True)
        text = party.create("text", type="task")
        text.append("hello")
        capability = party.capability(read="*", write="*").text
        with connect(peer.serve_thin("127.0.0.1:0"), capability, timeout_s=20) as found:
            yield found


def held(leaf: ThinParty) -> tuple[Spec, IndexValue]:
    query = leaf.query(type="task").sealed()
    assert len(query.all()) == 3
    version = leaf.driver.read(query.spec)
    assert version is not None
    return query.spec, version.value


def test_what_the_root_signed_is_accepted_and_nothing_else(leaf: ThinParty) -> None:
    spec, value = held(leaf)
    items, keys = index_items(value), sealers(leaf.driver.grants)
    check_seal(spec, value, items, keys)
    other = leaf.query(type="note").sealed().spec
    changed = [replace(items[0], values={**items[0].values, "title": "forged"}), *items[1:]]
    moved = [items[1], items[0], *items[2:]]
    bent: list[tuple[Any, ...]] = [
        (spec, value, changed, keys),
        (spec, value, [replace(items[0], type="forged"), *items[1:]], keys),
        (spec, value, moved, keys),
        (spec, value, items[1:], keys),
        (spec, value, items, (SigningKey.generate().public,)),
        (other, value, items, keys),
        (spec, index_value(items, bytes(64)), items, keys),
        (spec, index_value(items), items, keys),
    ]
    for each in bent:
        with pytest.raises(Corrupt, match="forged"):
            check_seal(*each)


def test_a_forged_value_is_not_shown_and_ends_the_link(leaf: ThinParty) -> None:
    decode, forging = driver.decode_frame, [True]

    def on_the_way(data: bytes) -> LinkFrame:
        frame = decode(data)
        message = frame.message
        if forging[0] and isinstance(message, Grant) and message.value:
            items = index_items(message.value)
            items[0] = replace(items[0], values={"title": "forged"})
            value = index_value(items, index_seal(message.value))
            return LinkFrame(frame.generation, replace(message, value=value))
        return frame

    with patch.object(driver, "decode_frame", on_the_way):
        with pytest.raises(Corrupt, match="forged"):
            leaf.query(type="task").sealed().all()
        forging[0] = False
        until(lambda: leaf.connected and leaf.status()["links"] == 2)
        assert len(leaf.query(type="task").sealed().all()) == 3
