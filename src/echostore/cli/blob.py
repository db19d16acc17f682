"""`echostore blob`: the content-addressed pieces of snapshots: list, verify."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cyclopts import App

from echostore.cli.feed import INTEGRITY_BROKEN
from echostore.cli.opening import party_key, reading
from echostore.cli.options import LISTING_IN_PARTY, ListingInParty, examples
from echostore.cli.output import Column, Output, counted, if_interrupted, size
from echostore.cli.values import short
from echostore.kernel.errors import Corrupt

if TYPE_CHECKING:
    from echostore.kernel.ids import Cid, PartyKey
    from echostore.peer.peer import Peer
    from echostore.store.blob_store import BlobStore

app = App(
    name="blob",
    help="Blobs: the pieces of snapshots.",
    help_prologue=examples("echostore blob list", "echostore blob verify"),
)

BLOBS = (Column("cid", "CID"), Column("bytes", "SIZE", size, right=True))
NO_BLOB = (
    "no blob here: they are kept when a program takes a snapshot (party.snapshot() in Python); "
    "`echostore party show --snapshot` computes the CID of one and keeps nothing"
)
VERDICTS = (
    Column("party", "PARTY", short, style="cyan"),
    Column("blobs", "BLOBS", right=True),
    Column("bytes", "SIZE", size, right=True),
    Column("sound", "SOUND", lambda sound: "yes" if sound else "NO"),
    Column("damage", "DAMAGE"),
)


@app.command(name="list", help_prologue=examples("echostore blob list", "echostore blob list --party @Trip --csv"))
def list_blobs(*, options: ListingInParty = LISTING_IN_PARTY) -> None:
    """List the blobs of a party with their sizes."""
    output = Output.of(options)
    with reading(options) as peer:
        key = party_key(peer, options.party)
        store = _open(peer, key)
        records = () if store is None else ({"cid": _text(cid), "bytes": length} for cid, length in store.list())
        output.table("blobs", BLOBS, records, empty=NO_BLOB, party=key.hex())
        if store is not None:
            store.close()


@app.command(help_prologue=examples("echostore blob verify", "echostore blob verify --party @Trip --json"))
def verify(*, options: ListingInParty = LISTING_IN_PARTY) -> int:
    """Hash every blob again; of all parties unless one is named. The exit status is 6 when one is damaged."""
    output = Output.of(options)
    with reading(options) as peer, if_interrupted("The check can be started again."):
        keys = [party_key(peer, options.party)] if options.party else [known.key for known in peer.parties()]
        records = [record for key in keys for record in verify_blobs(output, peer, key)]
    sound = all(record["sound"] for record in records)
    output.table("parties", VERDICTS, records, empty="no blob here", sound=sound)
    output.note(f"{counted(sum(record['blobs'] for record in records), 'blob')} {'sound' if sound else 'checked'}")
    return 0 if sound else INTEGRITY_BROKEN


def verify_blobs(output: Output, peer: "Peer", key: "PartyKey") -> Iterator[dict[str, Any]]:
    """The verdict on the blobs of one party; none when it has no blobs."""
    blank: dict[str, Any] = {"party": key.hex(), "blobs": 0, "bytes": 0, "damaged": []}
    try:
        store = _open(peer, key)
        if store is None:
            return
        with store, output.progress(f"blobs of {short(key.hex())}") as tell:
            verdict = store.verify(tell)
    except Corrupt as error:
        yield {**blank, "sound": False, "damage": error.what}
        return
    damaged = [_text(cid) for cid in verdict.damaged]
    yield {
        "party": key.hex(),
        "blobs": verdict.blobs,
        "bytes": verdict.data_bytes,
        "sound": verdict.sound,
        "damaged": damaged,
        "damage": ", ".join(damaged[:3]) + (f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""),
    }


def _open(peer: "Peer", key: "PartyKey") -> "BlobStore | None":
    from echostore.store.blob_store import BlobStore

    path = peer.home.party(key).blobs
    return BlobStore(path, writable=False) if path.exists() else None


def _text(cid: "Cid") -> str:
    from echostore.wire.cids import cid_text, is_cid

    return cid_text(cid) if is_cid(cid) else cid.hex()
