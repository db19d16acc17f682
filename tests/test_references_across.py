"""References to items of another party: written, queried, linked and followed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import echostore
from echostore.kernel.errors import NotFound
from echostore.kernel.values import Reference
from echostore.peer.local_server import LocalServer
from echostore.peer.party import Party
from echostore.peer.peer import Peer


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with echostore.open(tmp_path / "home") as peer:
        yield peer


@pytest.fixture
def here(peer: Peer) -> Party:
    return peer.create_party("Here")


@pytest.fixture
def there(peer: Peer) -> Party:
    return peer.create_party("There")


def test_a_query_finds_who_refers_to_an_item_of_another_party(here: Party, there: Party) -> None:
    a, b = here.create(type="a"), there.create(type="b")
    a["r"] = b
    assert a["r"] == Reference(b.id, there.key)
    for value in (b, b.reference, Reference(b.id, there.key), a["r"]):
        assert here.query(r=value).all() == [a]
        assert here.query(r__in=[value]).all() == [a]
    a["several"] = [b]
    assert here.query(several__contains=b).all() == [a]
    assert there.query(r=b).all() == []


def test_an_indexed_reference_is_found_too(here: Party, there: Party) -> None:
    here.index("r")
    a, b = here.create(type="a", r=there.create()), there.create()
    a["r"] = b.reference
    here.flush()
    assert here.query(r=b).all() == [a]


def test_a_reference_to_an_item_of_the_party_itself_stays_short(here: Party) -> None:
    a, b = here.create(), here.create()
    for value in (b, b.reference, Reference(b.id), Reference(b.id, here.key)):
        a["r"] = value
        assert (a["r"], a["r"].party) == (Reference(b.id), None)
        assert here.query(r=value).all() == [a]


def test_a_query_over_parties_finds_references_from_inside_and_outside(peer: Peer, here: Party, there: Party) -> None:
    b = there.create(type="b")
    inside, outside = there.create(r=b), here.create(r=b)
    here.create(r=there.create())
    assert set(peer.query(r=b).all()) == {inside, outside}
    assert set(peer.query(type="b").where(item=b).all()) == {b}
    assert inside not in peer.query(r__ne=b).all()


def test_a_live_query_follows_a_reference_to_another_party(here: Party, there: Party) -> None:
    a, b = here.create(), there.create()
    changes = []
    with here.query(r=b).subscribe(changes.append):
        a["r"] = b
    assert [change.added for change in changes] == [(a,)]


def test_a_link_to_a_reference_of_another_party_leads_there(here: Party, there: Party) -> None:
    a, b = here.create(), there.create()
    for end in (b, b.reference, Reference(b.id, there.key)):
        link = here.link(a, end)
        assert link.target == b
        assert not link.dangling
    assert len(here.query().where(echostore.field("@target") == b).all()) == 3


def test_a_link_to_an_own_item_by_its_full_reference_is_an_own_link(here: Party) -> None:
    a, b = here.create(), here.create()
    link = here.link(a, Reference(b.id, here.key))
    assert link in b.links()


def test_a_reference_to_another_party_is_not_looked_up_in_this_one(here: Party, there: Party) -> None:
    b = there.create()
    for reference in (b.reference, Reference(b.id, there.key)):
        with pytest.raises(NotFound, match="another party"):
            here.get(reference)
    assert there.get(b.reference) == b


def test_an_attached_program_refers_across_parties(peer: Peer, here: Party, there: Party) -> None:
    server = LocalServer(peer)
    try:
        with echostore.open(peer.home.path) as attached:
            one, two = attached.party("@Here"), attached.party("@There")
            a, b = one.create(), two.create()
            a["r"] = b.reference
            assert one.query(r=b).all() == [a]
            assert one.link(a, b.reference).target == b
    finally:
        server.close()
