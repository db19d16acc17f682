"""What a folder holds that a person names: a lake, the home of a peer, or the output of a pipeline."""

import os
from enum import StrEnum
from pathlib import Path

from echostore.kernel.errors import NotFound
from echostore.pipeline.exclusive_folders import check_folder
from echostore.pipeline.lake.layout import LOG
from echostore.pipeline.output.layout import COMMITS
from echostore.pipeline.output.overlay import STREAM
from echostore.store.durable_file import file_error
from echostore.store.home import KEYS, META, PARTIES


class FolderKind(StrEnum):
    LAKE = "lake"
    HOME = "home"
    OUTPUT = "output"


def folder_kind(path: str | os.PathLike[str]) -> FolderKind:
    """What is at a path; NotFound says what was looked for."""
    check_folder(path, "folder")
    folder = Path(os.path.abspath(os.fspath(path)))
    try:
        if any((folder / name).is_dir() for name in (COMMITS, f"{STREAM}/{COMMITS}")):
            return FolderKind.OUTPUT
        if (folder / LOG).is_dir():
            return FolderKind.LAKE
        if (folder / PARTIES).is_dir() and any((folder / name).exists() for name in (META, KEYS)):
            return FolderKind.HOME
        there = folder.exists()
    except (OSError, ValueError) as error:
        raise file_error(error, f"open {os.fspath(path)!r}") from error
    raise NotFound(
        f"{folder} is no output of a pipeline, no lake and no home." if there else f"There is nothing at {folder}.",
        next_step="Name the folder that `echostore pipeline run --out` wrote, a lake, or the home of a peer.",
    )
