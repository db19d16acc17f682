"""MetaStore: parties, settings, forgetting for good, and coming back after it was lost (FAULTS S5)."""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from echostore.kernel.errors import Corrupt, NotFound, Refused
from echostore.kernel.ids import FeedKey, IdentityKey, PartyKey
from echostore.store import meta_store
from echostore.store.feed_store import FeedStore
from echostore.store.home import Home
from echostore.store.meta_store import Contact, KnownFeed, KnownParty, MetaStore, PartyState
from feed_builder import PARTY, Writer, payloads, signing_key

OTHER = PartyKey(signing_key("other party").public)
GENESIS = Writer("control")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home", create=True)


@pytest.fixture
def meta(home: Home) -> Iterator[MetaStore]:
    with MetaStore(home.meta) as store:
        yield store


def trip(**changes: object) -> KnownParty:
    return dataclasses.replace(KnownParty(PARTY, "Road trip", GENESIS.key, 5), **changes)  # type: ignore[arg-type]


def founded(home: Home, meta: MetaStore, party: KnownParty) -> KnownParty:
    """A party with a folder, a control feed and a data feed in it."""
    with FeedStore(home.make_party(party.key).feeds, party.key) as feeds:
        feeds.set_about(party.about())
        for writer, kind in ((Writer("control", party.key), "control"), (Writer("data", party.key), "data")):
            feeds.add_feed(writer.key, kind, own=kind == "data")  # type: ignore[arg-type]
            feeds.append(writer.key, *writer.write(*payloads(3)))
            meta.put_feed(KnownFeed(party.key, writer.key, kind, kind == "data"))  # type: ignore[arg-type]
    meta.put_party(party)
    return party


def test_parties_are_kept_in_the_order_they_came(home: Home) -> None:
    first, second = trip(), KnownParty(OTHER, "Chess", None, 3, local=True, child_of=PARTY)
    with MetaStore(home.meta) as meta:
        meta.put_party(first)
        meta.put_party(second)
        meta.put_party(dataclasses.replace(first, title="Summer"))
    with MetaStore(home.meta) as meta:
        assert meta.parties() == [second, dataclasses.replace(first, title="Summer")]
        assert meta.party(OTHER) == second
        meta.set_state(PARTY, PartyState.PAUSED)
        assert meta.party(PARTY).state is PartyState.PAUSED
        with pytest.raises(NotFound):
            meta.party(PartyKey(bytes(32)))


def test_settings_belong_to_the_peer_or_to_a_party(meta: MetaStore) -> None:
    meta.set_setting("name", "Laptop")
    meta.set_setting("limits", {"blocks": 5, "peers": ["a"]}, party=PARTY)
    assert (meta.setting("name"), meta.setting("name", party=PARTY)) == ("Laptop", None)
    assert meta.settings(party=PARTY) == {"limits": {"blocks": 5, "peers": ["a"]}}
    meta.set_setting("name", None)
    assert meta.setting("name", "unnamed") == "unnamed"
    assert meta.settings() == {}


def test_contacts(meta: MetaStore) -> None:
    ada = Contact(IdentityKey(signing_key("ada").public), "Ada", "met in June")
    meta.put_contact(ada)
    assert meta.contacts() == [ada]
    meta.remove_contact(ada.identity)
    assert meta.contacts() == []


def test_forgetting_removes_the_folder_and_nothing_else(home: Home, meta: MetaStore, tmp_path: Path) -> None:
    founded(home, meta, trip())
    other = founded(home, meta, KnownParty(OTHER, "Chess", None, 3))
    meta.set_setting("volume", 3, party=PARTY)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    (home.party(PARTY).path / "link").symlink_to(precious)
    (home.party(PARTY).path / "deep").mkdir()
    (home.party(PARTY).path / "deep" / "link").symlink_to(precious / "file")
    meta.forget(home, PARTY)
    assert (precious / "file").read_text() == "mine"
    assert home.party_keys() == [OTHER]
    assert sorted(os.listdir(home.parties)) == [OTHER.hex()]
    assert meta.parties() == [other]
    assert [party.state for party in meta.parties(forgotten=True)] == [PartyState.ACTIVE, PartyState.FORGOTTEN]
    assert meta.feeds(PARTY) == []
    assert meta.settings(party=PARTY) == {}
    meta.put_party(trip())
    assert meta.party(PARTY).state is PartyState.ACTIVE


def test_a_linked_folder_is_not_forgotten_through_the_link(home: Home, meta: MetaStore, tmp_path: Path) -> None:
    meta.put_party(trip())
    precious = tmp_path / "precious"
    precious.mkdir()
    home.party(PARTY).path.symlink_to(precious)
    with pytest.raises(Refused, match="symbolic link"):
        meta.forget(home, PARTY)
    assert precious.exists()


class Cut(BaseException):
    """The power goes off."""


def cut(*arguments: object) -> None:
    raise Cut


@pytest.mark.parametrize(("owner", "name"), [(meta_store, "_remove_folder"), (os, "rename"), (shutil, "rmtree")])
def test_forgetting_goes_on_after_a_crash(
    home: Home, meta: MetaStore, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    founded(home, meta, trip())
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, cut)
        with pytest.raises(Cut):
            meta.forget(home, PARTY)
    assert meta.parties() == []
    assert meta.finish_forgetting(home) == 1
    assert os.listdir(home.parties) == []
    assert meta.finish_forgetting(home) == 0


def test_a_lost_meta_is_rebuilt_from_the_folders(home: Home, tmp_path: Path) -> None:
    with MetaStore(home.meta) as meta:
        expected = [
            founded(home, meta, KnownParty(OTHER, "Chess ♟", None, 3, local=True, child_of=PARTY)),
            founded(home, meta, trip()),
        ]
        feeds = {party.key: meta.feeds(party.key) for party in expected}
    for file in home.path.glob("meta.db*"):
        file.unlink()
    damaged = home.make_party(PartyKey(signing_key("damaged").public))
    damaged.feeds.write_bytes(b"noise" * 1000)
    home.make_party(PartyKey(signing_key("empty").public))
    with MetaStore(home.meta) as meta:
        rebuilt = meta.rebuild(home)
        assert meta.parties() == expected
        assert {party.key: meta.feeds(party.key) for party in expected} == feeds
        assert {key for key, _ in rebuilt.unreadable} == {
            signing_key("damaged").public,
            signing_key("empty").public,
        }
        assert meta.rebuild(home).parties == ()
    assert damaged.feeds.read_bytes() == b"noise" * 1000


def test_a_damaged_meta_says_so(home: Home) -> None:
    with MetaStore(home.meta) as meta:
        meta.put_party(trip())
    for file in home.path.glob("meta.db-*"):
        file.unlink()
    raw = bytearray(home.meta.read_bytes())
    raw[: len(raw)] = b"x" * len(raw)
    home.meta.write_bytes(raw)
    with pytest.raises(Corrupt):
        MetaStore(home.meta)


def test_known_feeds_are_listed_by_party(meta: MetaStore) -> None:
    feed = KnownFeed(PARTY, FeedKey(GENESIS.key), "control", True)
    meta.put_feed(feed)
    assert meta.feeds(PARTY) == [feed]
    assert meta.feeds(OTHER) == []
