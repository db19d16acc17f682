"""Who was removed while it slept is told, also where the members keep no control block that says so any more (DESIGN 5, 9)."""

from pathlib import Path

import pytest

from cli_process import Cli
from echostore.kernel.errors import Refused
from echostore.kernel.ids import DeviceKey
from echostore.kernel.order import DATA
from echostore.mesh.blob_exchange import Unavailable
from echostore.mesh.node import Standing
from echostore.peer.epoch_gc import run_gc
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.peer.status import REMOVED, REVOKED
from network_peers import address, converged, invited, peers, until
from test_control_floor import agreed_over_the_network, control_base


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))


class Asleep:
    """Ann and cyd have a party; bob was in it, sleeps, and was shut out; the control feeds begin after that by now."""

    def __init__(self, folder: Path, ann: Peer, cyd: Peer, *, revoke: bool = False) -> None:
        self.trip = ann.create_party("Trip")
        self.item = self.trip.create("property-set", type="task", done=-1)
        self.theirs = invited(ann, self.trip, cyd, role="admin")
        with peers(folder, "bob") as (bob,):
            guest = invited(ann, self.trip, bob)
            guest.get(self.item.id)["note"] = "before I slept"
            self.chess = bob.create_child(guest, "Chess").key
            converged(self.trip, self.theirs, guest)
            self.identity, self.device = bob.identity, bob.device
        if revoke:
            self.trip.members.revoke_device(self.identity, self.device)
        else:
            self.trip.members.remove(self.identity)
        agreed_over_the_network(self.trip, self.theirs, self.item, 4)
        self.secret = self.trip.create("property-set", type="secret")
        self.trip.flush()
        for each in (self.trip, self.theirs):
            assert run_gc(each).control_blocks


def blocks(party: Party) -> dict[bytes, tuple[int, int]]:
    return {feed.key: (feed.base, feed.length) for feed in party.runtime.feeds.feeds() if feed.kind == DATA}


@pytest.mark.parametrize("revoke", [False, True])
def test_who_wakes_after_the_proof_was_truncated_is_told(tmp_path: Path, revoke: bool) -> None:
    with peers(tmp_path, "ann", "cyd") as (ann, cyd):
        story = Asleep(tmp_path, ann, cyd, revoke=revoke)
        with peers(tmp_path, "bob") as (bob,):
            party = bob.party(story.trip.key)
            before = blocks(party)
            assert party.status.standing == "editor"
            bob.connect(address(ann))
            said = REVOKED if revoke else REMOVED
            until(lambda: party.status.standing == said)
            assert control_base(party) == control_base(story.trip)
            assert bob.party(story.chess).status.standing == said
            # What it has stays readable, and nothing of what came later is here.
            assert party.get(story.item.id)["note"] == "before I slept"
            assert blocks(party) == before
            assert not party.has(story.secret.id)
            with pytest.raises(Refused, match=said):
                party.create(type="note")
            act = "DeviceRevoke" if revoke else "MemberRemove"
            about = story.device if revoke else story.identity
            assert any(step.act == act for step in party.members.why(about))
            until(lambda: not bob.network.connections())
            until(lambda: ann.network.node.counters.ended["removed"] == 1)
        # It stays so after a restart, and the command says it.
        echo = Cli(tmp_path / "bob", tmp_path / "state")
        shown = echo("party", "show", story.trip.key.hex(), "--json").ok().json()
        assert shown["standing"] == said
        assert said in echo("party", "show", story.trip.key.hex()).ok().out
        assert said in echo("status").ok().out


def test_it_is_given_the_proof_and_no_other_blob(tmp_path: Path) -> None:
    with peers(tmp_path, "ann", "cyd") as (ann, cyd):
        story = Asleep(tmp_path, ann, cyd)
        blobs = story.trip.runtime.blobs
        assert blobs is not None
        base = story.trip.runtime.processor.base
        assert base is not None
        allowed = set(ann.network.departure_blobs(story.trip.key))
        assert allowed
        assert base.name.snapshot not in allowed
        assert ann.network.standing(story.trip.key, DeviceKey(story.device)) is Standing.REMOVED
        with peers(tmp_path, "bob") as (bob,):
            party = bob.party(story.trip.key)
            bob.network.bootstraps.refused.update({(party.key, each): "it would be over too soon" for each in allowed})
            bob.connect(address(ann))
            until(lambda: any(link.channels for link in ann.network.node.links.values()))
            assert bob.network.fetch(party.key, sorted(allowed)) == len(allowed)
            with pytest.raises(Unavailable):
                bob.network.fetch(party.key, [base.name.snapshot], patience_s=1.0)
            assert party.status.standing == "editor", "it did not look at them"
