"""Opening one view of a large party out of its epoch, on a device that holds nothing: bytes against the whole snapshot.

    view-open         20,000 items of 1 KiB in 200 views
    view-open-small   the same with items of 100 bytes: eighty and more of them share a page, and pages come whole

ECHOSTORE_BENCH_EPOCHS scales it, as it does the epochs.
"""

import os
from collections.abc import Callable
from pathlib import Path

from echostore.bench import Measure
from echostore.kernel.ids import Cid
from echostore.kernel.order import CONTROL
from echostore.mesh.blob_exchange import Follow
from echostore.peer.bootstrap import believable
from echostore.peer.early_reading import EarlyReader
from echostore.peer.epoch_fetching import Fetch
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.peer import open_peer
from echostore.wire.base_epoch import snapshot_blobs

SCALE = float(os.environ.get("ECHOSTORE_BENCH_EPOCHS", "1"))
VIEWS = max(40, int(200 * SCALE))
ITEMS_PER_VIEW = 100
CLASS = "example.org/bench"


def measure(folder: Path, narrate: Callable[[str], None]) -> list[Measure]:
    return [
        _opened(folder / "kib", "view-open", 1000, 0.05, narrate),
        _opened(folder / "small", "view-open-small", 40, 0.4, narrate),
    ]


def _opened(folder: Path, name: str, size: int, goal: float, narrate: Callable[[str], None]) -> Measure:
    narrate(f"views: {VIEWS * ITEMS_PER_VIEW:,} items with {size} bytes of text in {VIEWS} views, and an epoch of them")
    with (
        open_peer(folder / "host", name="host", background=False) as host,
        open_peer(folder / "guest", name="guest", background=False) as guest,
    ):
        party = host.create_party("bench")
        host.view_classes.register(CLASS)
        views = [party.create_view(CLASS, f"View {number}") for number in range(VIEWS)]
        for number, view in enumerate(views):
            with party.batch():
                for item in range(ITEMS_PER_VIEW):
                    text = f"{number:04d}{item:04d}" + "x" * (size - 8)
                    party.create("property-set", type="task", parent=view, text=text)
        Epochs(party).create()
        snapshot = party.snapshot()
        whole = {cid: len(snapshot.blob(cid)) for cid in snapshot_blobs(snapshot.root, snapshot.blob)}
        theirs = guest.enter(party.members.admit(guest.request_join(party.key)))
        _give_control(party, theirs)
        epoch = believable(theirs.runtime)
        assert epoch is not None
        came: dict[Cid, int] = {}
        reader = EarlyReader(theirs, epoch, _fetching(party, theirs, came))
        found = reader.view(views[-1]._record().genesis.inception_key)
        assert len(found) == ITEMS_PER_VIEW + 1, len(found)
    got, total = sum(came.values()), sum(whole.values())
    detail = f"{got:,} of {total:,} bytes, {len(came)} of {len(whole)} blobs, for {len(found)} items"
    return Measure(name, got / total, goal, detail)


def _give_control(party: Party, theirs: Party) -> None:
    """What a device knows of a party before anything else: its control feeds."""
    for tip in party.sync_port.feeds():
        found = party.sync_port.read(tip.feed, 0, 1000, 1 << 20, tip.tip.link) if tip.kind == CONTROL else None
        if isinstance(found, tuple):
            payloads, head = found
            theirs.sync_port.ingest(tip.feed, tip.kind, 0, payloads, head)


def _fetching(party: Party, theirs: Party, came: dict[Cid, int]) -> Fetch:
    """Blobs out of another store, and what they lead to; `came` has their sizes."""
    there, here = party.runtime.blobs, theirs.runtime.blobs
    assert there is not None
    assert here is not None

    def fetch(cids: list[Cid], follow: Follow | None = None) -> None:
        waiting = list(cids)
        while waiting:
            fresh = {cid: there.get(cid) for cid in here.missing(waiting)}
            here.put_many(fresh)
            came.update((cid, len(data)) for cid, data in fresh.items())
            waiting = [below for cid in waiting for below in follow(cid, here.get(cid))] if follow is not None else []

    return fetch
