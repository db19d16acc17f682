"""`party export` of a peer that deleted its history, and starting from such a file as a newcomer does."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cli_process import Cli
from echostore.kernel.errors import Corrupt, EchoError, NotFound
from echostore.kernel.ids import Cid
from echostore.peer.epoch_gc import run_gc
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.transfer import TRUNCATED_VERSION, export_party, import_party
from echostore.wire.car import read_car, write_car
from echostore.wire.cids import PROTOBUF, cid_of
from echostore.wire.generated import archive_pb2 as pb
from peer_builder import Circle
from two_peers import open_quiet


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


def fill(party: Party, *, epochs: int = 4) -> None:
    """Epochs, an item that one of them left out, and a tail above the last."""
    gone = party.create("property-set", title="gone")
    gone.delete()
    text = party.create("text")
    text.name = "text"
    for number in range(epochs):
        text.insert(0, f"{number} ")
        party.create("property-set", n=number, long="x" * 3000)
        party.flush()
        Epochs(party).create(discard_before_ms=party.peer.now_ms() if number == 1 else None)
    party.create("property-set", title="tail")
    party.flush()


def truncated(home: Path, car: Path) -> str:
    """A party whose history is gone, exported; its CID."""
    with open_quiet(home) as peer:
        party = peer.create_party("Trip")
        fill(party)
        freed = run_gc(party)
        assert freed.blocks
        assert freed.control_blocks
        done = export_party(party, car)
        assert done.cid == party.snapshot().cid
        return done.cid


def bases(party: Party) -> set[int]:
    return {held.base for held in party.runtime.feeds.feeds()}


def test_a_party_without_its_history_goes_through_a_file(tmp_path: Path) -> None:
    cid = truncated(tmp_path / "home", tmp_path / "trip.car")
    with open_quiet(tmp_path / "other") as peer:
        party = import_party(peer, tmp_path / "trip.car")
        assert party.snapshot().cid == cid
        assert party.status.epoch == 4
        assert bases(party) != {0}
        assert [item["title"] for item in party.query(title="tail").all()] == ["tail"]
        assert str(Epochs(party).verify(4).verdict) == "abstains", "it never had what the epoch sums up"
        for held in party.runtime.feeds.feeds():
            assert party.runtime.feeds.verify(held.key).sound
    with open_quiet(tmp_path / "other") as peer:
        party = peer.party("@Trip")
        assert party.snapshot().cid == cid, "and after it was opened again"
        again = export_party(party, tmp_path / "again.car")
    with open_quiet(tmp_path / "third") as peer:
        assert import_party(peer, tmp_path / "again.car").snapshot().cid == again.cid == cid


def test_the_command_exports_and_imports_it(tmp_path: Path) -> None:
    cid = truncated(tmp_path / "home", tmp_path / "trip.car")
    cli, other = Cli(tmp_path / "home", tmp_path / "state"), Cli(tmp_path / "other", tmp_path / "state")
    told = cli("party", "export", "@Trip", str(tmp_path / "told.car"), "--json").ok()
    assert (told.json()["snapshot"], told.json()["epoch"]) == (cid, 4)
    assert "begins at epoch 4" in told.err
    other("party", "import", str(tmp_path / "told.car")).ok()
    assert other("party", "show", "--snapshot", "--json").ok().json()["snapshot"] == cid


def test_a_party_of_several_members_goes_through_a_file(tmp_path: Path) -> None:
    with Circle(tmp_path, "ann", "bob") as circle:
        ann, bob = circle.party("ann"), circle.party("bob")
        for number in range(3):
            ann.create("property-set", n=number)
            circle.meet_all()
            Epochs(ann).create()
            circle.meet_all()
            Epochs(bob).review()
            circle.meet_all()
        bob.create("property-set", title="tail")
        circle.meet_all()
        assert run_gc(ann).blocks
        done = export_party(ann, tmp_path / "trip.car")
        with open_quiet(tmp_path / "cat") as cat:
            assert import_party(cat, tmp_path / "trip.car").snapshot().cid == done.cid == ann.snapshot().cid


def test_an_older_copy_catches_up_from_a_file(tmp_path: Path) -> None:
    """Blocks between the two are in no file any more: the epoch brings it on."""
    with open_quiet(tmp_path / "ann") as ann, open_quiet(tmp_path / "copy") as copy:
        party = ann.create_party("Trip")
        early = party.create("property-set", title="early")
        export_party(party, tmp_path / "early.car")
        theirs = import_party(copy, tmp_path / "early.car")
        assert bases(theirs) == {0}
        fill(party)
        assert run_gc(party).blocks
        export_party(party, tmp_path / "trip.car")
        import_party(copy, tmp_path / "trip.car")
        assert theirs.snapshot().cid == party.snapshot().cid
        assert theirs.get(early.id)["title"] == "early"


def altered(source: Path, target: Path, change: Callable[[pb.Manifest, dict[Cid, bytes]], None]) -> None:
    """A file with another manifest or other blobs, put together as whoever lies would."""
    with source.open("rb") as file:
        roots, found = read_car(file)
        (first, *rest) = list(found)
    manifest, blobs = pb.Manifest.FromString(first[1]), dict(rest)
    change(manifest, blobs)
    data = manifest.SerializeToString(deterministic=True)
    name = cid_of(data, PROTOBUF)
    with target.open("wb") as file:
        write_car(file, [name, roots[1]], [(name, data), *blobs.items()])


def without_a_blob_of_the_epoch(manifest: pb.Manifest, blobs: dict[Cid, bytes]) -> None:
    chunks = {cid for feed in manifest.feeds for chunk in feed.chunks for cid in chunk.cids}
    kept = {manifest.state_root, manifest.start.evidence}
    # From behind: the epoch's own blobs come after those of the snapshot.
    name = next(cid for cid in reversed(blobs) if cid not in chunks and cid not in kept)
    del blobs[name]


def without_evidence(manifest: pb.Manifest, blobs: dict[Cid, bytes]) -> None:
    del blobs[Cid(manifest.start.evidence)]


def from_another_epoch(manifest: pb.Manifest, blobs: dict[Cid, bytes]) -> None:
    manifest.start.genesis = b"\x01" * 32


def without_a_start(manifest: pb.Manifest, blobs: dict[Cid, bytes]) -> None:
    manifest.ClearField("start")


def as_if_it_were_whole(manifest: pb.Manifest, blobs: dict[Cid, bytes]) -> None:
    manifest.ClearField("start")
    manifest.format_version = 1


def with_no_name_for_evidence(manifest: pb.Manifest, blobs: dict[Cid, bytes]) -> None:
    manifest.start.evidence = b"x"


def without_control(manifest: pb.Manifest, blobs: dict[Cid, bytes]) -> None:
    kept = [feed for feed in manifest.feeds if not feed.control]
    del manifest.feeds[:]
    manifest.feeds.extend(kept)


@pytest.mark.parametrize(
    "change",
    [
        without_a_blob_of_the_epoch,
        without_evidence,
        from_another_epoch,
        without_a_start,
        as_if_it_were_whole,
        with_no_name_for_evidence,
        without_control,
    ],
)
def test_a_file_that_lies_about_its_start_is_refused_and_leaves_nothing(
    tmp_path: Path, change: Callable[[pb.Manifest, dict[Cid, bytes]], None]
) -> None:
    truncated(tmp_path / "home", tmp_path / "trip.car")
    altered(tmp_path / "trip.car", tmp_path / "lie.car", change)
    with open_quiet(tmp_path / "other") as peer:
        with pytest.raises(Corrupt):
            import_party(peer, tmp_path / "lie.car")
        with pytest.raises(NotFound):
            peer.party("@Trip")
        import_party(peer, tmp_path / "trip.car")


def test_an_older_program_is_told_to_update(tmp_path: Path) -> None:
    truncated(tmp_path / "home", tmp_path / "trip.car")
    with (tmp_path / "trip.car").open("rb") as file:
        _, blocks = read_car(file)
        assert pb.Manifest.FromString(next(blocks)[1]).format_version == TRUNCATED_VERSION

    def newer(manifest: pb.Manifest, blobs: dict[Cid, bytes]) -> None:
        manifest.format_version = TRUNCATED_VERSION + 1

    altered(tmp_path / "trip.car", tmp_path / "newer.car", newer)
    with open_quiet(tmp_path / "other") as peer, pytest.raises(EchoError, match="Update"):
        import_party(peer, tmp_path / "newer.car")


def test_a_light_weight_party_without_its_history_goes_through_a_file(tmp_path: Path) -> None:
    with open_quiet(tmp_path / "home") as peer:
        party = peer.create_party("Trip")
        child = peer.create_child(party, "Chess")
        for number in range(3):
            child.create("property-set", n=number)
            Epochs(child).create()
        child.create("property-set", title="tail")
        assert run_gc(child).blocks
        export_party(party, tmp_path / "trip.car")
        cid = export_party(child, tmp_path / "chess.car").cid
    with open_quiet(tmp_path / "other") as peer:
        import_party(peer, tmp_path / "trip.car")
        assert import_party(peer, tmp_path / "chess.car").snapshot().cid == cid
