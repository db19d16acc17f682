"""Where things are in a block lake, and the only place that makes file names in it.

    LAKE/log/00000000000000000001.json       one entry per publish or compaction; the number is the version
    LAKE/blocks/<first 2>/<sha256>.parquet   rows of `schemas.BLOCKS`, named by their content, never changed
    LAKE/runs/<sha256>.parquet               rows of `schemas.RUNS`: which blocks are where
    LAKE/bases/<genesis hash>.parquet        rows of `schemas.BLOBS`: the snapshot of an epoch that left something out
    LAKE/writing/<random>                    files on their way; nobody reads them

A name that comes out of the log or out of a runs file is checked against these shapes before it becomes a path.
"""

import os
import re
from pathlib import Path

from echostore.kernel.errors import Corrupt, EchoError, NotFound, Refused, UsageError
from echostore.pipeline.exclusive_folders import check_folder, check_links
from echostore.store.durable_file import file_error, sync_folder

LOG, BLOCKS_FOLDER, RUNS_FOLDER, WRITING, BASES_FOLDER = "log", "blocks", "runs", "writing", "bases"
VERSION_DIGITS = 20

_ENTRY = re.compile(rf"[0-9]{{{VERSION_DIGITS}}}\.json")
_BLOCKS_FILE = re.compile(r"blocks/([0-9a-f]{2})/(\1[0-9a-f]{62})\.parquet")
_HASH = re.compile("[0-9a-f]{64}")
_RUNS_FILE = re.compile(r"runs/([0-9a-f]{64})\.parquet")


def blocks_name(sha256: str) -> str:
    return f"{BLOCKS_FOLDER}/{sha256[:2]}/{sha256}.parquet"


def runs_name(sha256: str) -> str:
    return f"{RUNS_FOLDER}/{sha256}.parquet"


def bases_of(party: bytes) -> str:
    """The folder of the snapshots of a party's epochs."""
    return f"{BASES_FOLDER}/{party.hex()}"


def base_name(party: bytes, genesis: bytes) -> str:
    """The file of an epoch's snapshot, by the hash of its genesis."""
    return f"{bases_of(party)}/{genesis.hex()}.parquet"


def genesis_in(path: Path) -> bytes | None:
    """The hash in the name of such a file; None for other files."""
    return bytes.fromhex(path.stem) if _HASH.fullmatch(path.stem) else None


def entry_name(version: int) -> str:
    return f"{LOG}/{version:0{VERSION_DIGITS}d}.json"


def hash_in_name(name: str) -> str | None:
    """The hash that a file's name promises; None when it is no name of a file in a lake."""
    found = _BLOCKS_FILE.fullmatch(name) or _RUNS_FILE.fullmatch(name)
    return None if found is None else str(found[found.lastindex or 1])


def is_blocks_name(name: str) -> bool:
    return _BLOCKS_FILE.fullmatch(name) is not None


def path_of(lake: Path, name: str) -> Path:
    """The path of a file of the lake; Corrupt when the name is no such name."""
    if hash_in_name(name) is None:
        raise Corrupt(
            f"{name[:120]!r} is not the name of a file in the lake {lake}.",
            next_step="Run `echostore lake stat --full`; publish again into a new lake if it is damaged.",
        )
    return lake / name


def version_in_name(name: str) -> int | None:
    """The version of an entry by its file name; None for foreign files."""
    return int(name[:VERSION_DIGITS]) if _ENTRY.fullmatch(name) else None


def make_lake(path: str | os.PathLike[str]) -> Path:
    """The folder of a lake, made when it is missing or empty; an existing lake is left as it is."""
    check_folder(path, "lake")
    try:
        folder = Path(os.path.abspath(os.fspath(path)))
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file, not a folder.", next_step="Name a folder as the lake.")
        if folder.is_dir() and not (folder / LOG).is_dir() and any(folder.iterdir()):
            raise Refused(
                f"{folder} holds other files and no lake.", next_step="Name a new or empty folder as the lake."
            )
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / LOG).is_dir():
            check_links(folder)
        for name in (BLOCKS_FOLDER, RUNS_FOLDER, WRITING, LOG):
            # The log comes last: a folder with a log has everything else.
            (folder / name).mkdir(exist_ok=True)
        sync_folder(folder)
    except EchoError:
        raise
    except (OSError, ValueError) as error:
        raise file_error(error, f"make the lake {os.fspath(path)!r}") from error
    return folder


def find_lake(path: str | os.PathLike[str]) -> Path:
    """The folder of a lake that exists."""
    check_folder(path, "lake")
    try:
        folder = Path(os.path.abspath(os.fspath(path)))
        if (folder / LOG).is_dir():
            return folder
        there = folder.exists()
    except (OSError, ValueError) as error:
        raise file_error(error, f"open the lake {os.fspath(path)!r}") from error
    raise NotFound(
        f"{folder} holds no lake." if there else f"There is no lake at {folder}.",
        next_step="Make one with `echostore lake publish --lake DIR`, or name another folder.",
    )
