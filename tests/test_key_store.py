"""KeyStore: secrets that survive, and do not show (FAULTS X7)."""

import os
import stat
import traceback
from pathlib import Path

import nacl.pwhash
import pytest

from echostore.kernel.errors import Corrupt, EchoError, NotFound, Refused, StorageFailed, UsageError, WrongPassphrase
from echostore.store import durable_file
from echostore.store.key_store import KeyStore, KeyUse, Stretch
from feed_builder import signing_key

QUICK = Stretch(nacl.pwhash.argon2id.OPSLIMIT_MIN, nacl.pwhash.argon2id.MEMLIMIT_MIN)
PHRASE = "correct horse battery"
WRONG = "correct house battery"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def filled(path: Path, passphrase: str | None) -> KeyStore:
    store = KeyStore.create(path, passphrase, stretch=QUICK)
    store.add(KeyUse.IDENTITY, signing_key("identity"), label="me")
    store.add(KeyUse.FEED, signing_key("feed"))
    store.remember(signing_key("ada").public, "Ada")
    return store


@pytest.mark.parametrize("passphrase", [None, PHRASE])
def test_keys_are_there_after_opening_again(path: Path, passphrase: str | None) -> None:
    filled(path, passphrase)
    store = KeyStore.open(path, passphrase)
    assert [own.use for own in store.own()] == [KeyUse.IDENTITY, KeyUse.FEED]
    assert store.own(KeyUse.FEED)[0].public == signing_key("feed").public
    assert store.key(signing_key("feed").public).sign(b"x") == signing_key("feed").sign(b"x")
    assert store.label(signing_key("identity").public) == "me"
    assert store.label(signing_key("ada").public) == "Ada"
    assert store.label(signing_key("nobody").public) is None
    assert [known.label for known in store.known()] == ["Ada"]
    assert store.protected is (passphrase is not None)
    assert not store.has(signing_key("ada").public)
    with pytest.raises(NotFound):
        store.key(signing_key("ada").public)


def test_adding_a_key_twice_keeps_the_first(path: Path) -> None:
    store = filled(path, None)
    again = store.add(KeyUse.FEED, signing_key("identity"), label="other")
    assert (again.use, again.label, len(store.own())) == (KeyUse.IDENTITY, "me", 2)
    fresh = store.add(KeyUse.VIEW)
    assert KeyStore.open(path).has(fresh.public)


def test_the_file_is_private_and_a_loose_one_is_refused(path: Path) -> None:
    old_mask = os.umask(0)
    try:
        filled(path, None)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(Refused, match=r"mode 640.*chmod 600"):
        KeyStore.open(path)
    path.chmod(0o400)
    assert len(KeyStore.open(path).own()) == 2


def test_odd_files_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        KeyStore.open(path)
    filled(tmp_path / "real", None)
    path.symlink_to(tmp_path / "real")
    with pytest.raises(Refused):
        KeyStore.open(path)
    with pytest.raises(Refused, match="already"):
        KeyStore.create(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(Refused):
        KeyStore.open(path)


def test_a_passphrase_is_needed_and_must_be_the_right_one(path: Path) -> None:
    filled(path, PHRASE)
    for wrong in (None, "", "correct horse batterie", PHRASE + " "):
        with pytest.raises(WrongPassphrase):
            KeyStore.open(path, wrong)
    with pytest.raises(UsageError):
        KeyStore.create(path.with_name("other"), "")


def test_the_passphrase_can_change(path: Path) -> None:
    store = filled(path, PHRASE)
    store.change_passphrase("new phrase", stretch=QUICK)
    with pytest.raises(WrongPassphrase):
        KeyStore.open(path, PHRASE)
    opened = KeyStore.open(path, "new phrase")
    opened.change_passphrase(None)
    assert len(KeyStore.open(path).own()) == 2
    KeyStore.open(path).change_passphrase(PHRASE, stretch=QUICK)
    assert KeyStore.open(path, PHRASE).protected


@pytest.mark.parametrize("passphrase", [None, PHRASE])
def test_every_flipped_byte_is_found(path: Path, passphrase: str | None) -> None:
    filled(path, passphrase)
    raw = path.read_bytes()
    for at in range(0, len(raw), 1 if passphrase is None else 5):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x41]) + raw[at + 1 :])
        with pytest.raises((Corrupt, WrongPassphrase, Refused)):
            KeyStore.open(path, passphrase)
    for size in (0, 5, 20, len(raw) - 1):
        path.write_bytes(raw[:size])
        with pytest.raises((Corrupt, WrongPassphrase)):
            KeyStore.open(path, passphrase)


def test_a_file_that_asks_for_endless_work_is_refused(path: Path) -> None:
    filled(path, PHRASE)
    raw = path.read_bytes()
    ops = f'"ops":{QUICK.ops}'.encode()
    assert ops in raw
    grown = raw.replace(ops, b'"ops":99999999')
    at = len(b"echostore/keys/1\n")
    length = int.from_bytes(raw[at : at + 4], "big") + len(grown) - len(raw)
    path.write_bytes(grown[:at] + length.to_bytes(4, "big") + grown[at + 4 :])
    with pytest.raises(Corrupt):
        KeyStore.open(path, PHRASE)


def secrets() -> list[bytes]:
    return [signing_key(name).seed for name in ("identity", "feed")]


def shown(value: bytes) -> list[bytes]:
    """The forms in which bytes could show somewhere."""
    return [value, value.hex().encode(), repr(value)[2:-1].encode()]


def test_no_secret_is_in_a_sealed_file_or_its_leftovers(path: Path) -> None:
    store = filled(path, PHRASE)
    store.change_passphrase("another", stretch=QUICK)
    for file in path.parent.iterdir():
        raw = file.read_bytes()
        for form in [form for secret in secrets() for form in shown(secret)] + [PHRASE.encode(), b"another", b"Ada"]:
            assert form not in raw


def test_no_secret_is_in_a_repr_or_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(path, PHRASE)
    texts = [repr(store), repr(store.own()), repr(store.own()[0].key), repr(store.known()), str(vars(store))]
    raw = path.read_bytes()

    def broken(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    for attempt in (
        lambda: KeyStore.open(path, WRONG),
        lambda: path.write_bytes(raw[:-3]) and KeyStore.open(path, PHRASE),
        lambda: store.key(bytes(32)),
    ):
        try:
            attempt()
        except EchoError as error:
            texts.append("".join(traceback.TracebackException.from_exception(error, capture_locals=False).format()))
    monkeypatch.setattr(durable_file.os, "fsync", broken)
    with pytest.raises(StorageFailed) as caught:
        store.add(KeyUse.PARTY, signing_key("party"))
    texts.append("".join(traceback.format_exception(caught.value)))
    assert len(texts) >= 8
    for text in texts:
        for form in [form for secret in secrets() for form in shown(secret)] + [PHRASE.encode(), WRONG.encode()]:
            assert form not in text.encode()


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_failed_write_leaves_file_and_memory_as_they_were(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = filled(path, None)
    raw = path.read_bytes()

    def broken(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable_file.os, call, broken)
        with pytest.raises(StorageFailed):
            store.add(KeyUse.PARTY, signing_key("party"))
        with pytest.raises(StorageFailed):
            store.change_passphrase(PHRASE, stretch=QUICK)
    assert path.read_bytes() == raw
    assert not store.has(signing_key("party").public)
    assert not store.protected
    store.add(KeyUse.PARTY, signing_key("party"))
    assert KeyStore.open(path).has(signing_key("party").public)


def test_a_key_is_synced_before_it_is_returned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyStore.create(path)
    calls: list[str] = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(
            durable_file.os, name, lambda *arguments, name=name, real=real: (calls.append(name), real(*arguments))[1]
        )
    store.add(KeyUse.FEED)
    assert calls == ["fsync", "rename", "fsync"]
