"""The layout of a data folder, and the only place that makes file names in it.

    <home>/meta.db                      MetaStore
    <home>/keys                         KeyStore
    <home>/instance                     which copy of the home this is (instance.py)
    <home>/lock                         who writes it (lock.py)
    <home>/serve.sock                   where `echostore serve` takes local programs (peer/local_socket.py)
    <home>/parties/<party hex>/         feeds.db, items.db, blobs.db
    <home>/parties/<party hex>.gone/    a forgotten party on its way out (meta_store.py)

Names below the home are constants or the hex of a key: nothing that another peer or a user wrote becomes a file name.
Folders and files inside it are never reached through a symbolic link; the home's own path may contain some.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from echostore.kernel.errors import EchoError, NotFound, Refused, UsageError
from echostore.kernel.ids import KEY_BYTES, PartyKey
from echostore.store.durable_file import file_error, make_folder, sync_folder
from echostore.store.lock import HomeLock

META, KEYS, INSTANCE, LOCK, PARTIES = "meta.db", "keys", "instance", "lock", "parties"
GONE_SUFFIX = ".gone"

_PARTY_FOLDER = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")


@dataclass(frozen=True, slots=True)
class PartyFolder:
    """The files of one party."""

    path: Path

    @property
    def feeds(self) -> Path:
        return self.path / "feeds.db"

    @property
    def items(self) -> Path:
        return self.path / "items.db"

    @property
    def blobs(self) -> Path:
        return self.path / "blobs.db"


@dataclass(frozen=True, slots=True)
class Home:
    """A data folder that exists. `Home.open` makes or checks it; nothing is locked or read by that."""

    path: Path

    @staticmethod
    def open(path: str | os.PathLike[str], *, create: bool = False) -> "Home":
        """The home at `path`; with `create`, made when it is missing or an empty folder."""
        try:
            folder = Path(os.path.abspath(os.fspath(path)))
            return _made(folder) if create else _existing(folder)
        except EchoError:
            raise
        except (OSError, ValueError) as error:
            raise file_error(error, f"open the home {_shown(path)}") from error

    @property
    def meta(self) -> Path:
        return self.path / META

    @property
    def keys(self) -> Path:
        return self.path / KEYS

    @property
    def instance(self) -> Path:
        return self.path / INSTANCE

    @property
    def parties(self) -> Path:
        return self.path / PARTIES

    def lock(self) -> HomeLock:
        """Become the one process that writes this home, or raise `Locked` at once with the other's pid."""
        return HomeLock(self.path / LOCK)

    def party(self, party: PartyKey) -> PartyFolder:
        """Where the files of `party` are or would be."""
        assert len(party) == KEY_BYTES, f"a party key has {KEY_BYTES} bytes, got {len(party)}"
        return PartyFolder(self.parties / party.hex())

    def make_party(self, party: PartyKey) -> PartyFolder:
        """The folder of `party`, made when it is missing; durable on return."""
        folder = self.party(party)
        try:
            make_folder(folder.path)
        except EchoError:
            raise
        except OSError as error:
            raise file_error(error, f"make the folder {folder.path}") from error
        return folder

    def party_keys(self) -> list[PartyKey]:
        """The parties with a folder here, in order of their keys. Foreign names and links are passed over."""
        return [PartyKey(bytes.fromhex(name)) for name in self._folders() if _PARTY_FOLDER.fullmatch(name)]

    def gone_folders(self) -> list[Path]:
        """Folders of forgotten parties whose removal was cut short."""
        names = [name for name in self._folders() if name.endswith(GONE_SUFFIX)]
        return [self.parties / name for name in names if _PARTY_FOLDER.fullmatch(name.removesuffix(GONE_SUFFIX))]

    def _folders(self) -> list[str]:
        with os.scandir(self.parties) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def _existing(folder: Path) -> Home:
    if not folder.exists():
        raise NotFound(f"There is no home at {folder}.", next_step="Make one with `echostore init`, or name another.")
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder.", next_step="Name a folder as the home.")
    if not _looks_like_home(folder):
        raise NotFound(f"{folder} holds no echostore data.", next_step="Make it with `echostore init`.")
    return Home(folder)


def _made(folder: Path) -> Home:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder.", next_step="Name a folder as the home.")
    if not folder.exists():
        if not folder.parent.exists():
            # Parents are the user's own folders: made with their usual mode, only the home itself is private.
            folder.parent.mkdir(parents=True)
        make_folder(folder)
    elif not _looks_like_home(folder) and any(folder.iterdir()):
        raise Refused(
            f"{folder} holds other files and no echostore data.",
            next_step="Name a new or empty folder as the home.",
        )
    make_folder(folder / PARTIES)
    sync_folder(folder)
    return Home(folder)


def _looks_like_home(folder: Path) -> bool:
    return os.path.lexists(folder / PARTIES) and (folder / PARTIES).is_dir() and not (folder / PARTIES).is_symlink()


def _shown(path: str | os.PathLike[str]) -> str:
    """A path for an error message: printable, and not kilobytes of it."""
    text = repr(os.fspath(path))
    return text if len(text) <= 200 else text[:197] + "..."
