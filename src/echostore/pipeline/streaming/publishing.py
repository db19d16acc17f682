"""Publishing overlays: one exclusive step for each micro-batch, and old ones removed when nobody can be reading them.

Overlays are records of the same form as commits, in the folder `stream` of the output, written by attempts of the same
kind: a driver that dies at any step leaves the overlay before. One stream at a time works on an output; a lock says so.
"""

import contextlib
import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from echostore.kernel.errors import Locked
from echostore.pipeline.output import reading
from echostore.pipeline.output.attempt import Attempt
from echostore.pipeline.output.files import Step, no_step
from echostore.pipeline.output.layout import (
    COMMITS,
    STAGED_PREFIX,
    attempt_folder,
    attempt_id,
    commit_name,
    epoch_number,
    numbered,
)
from echostore.pipeline.output.overlay import STREAM, Overlay, Segment, folder_of, overlay_of
from echostore.pipeline.output.record import Commit, LakePoint, NamedFile
from echostore.pipeline.output.writing import Place
from echostore.store.durable_file import PRIVATE_FILE, PRIVATE_FOLDER, file_error

KEEP_S = 600.0
"""How long a replaced overlay stays: a reader that opened it has so long to read its files."""
KEPT_MIN = 4
LOCK = "lock"

Files = Mapping[str, tuple[NamedFile, ...]]


@contextlib.contextmanager
def only_stream(out: Path) -> Iterator[None]:
    """Be the one stream of an output, or Locked."""
    try:
        folder_of(out).mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        descriptor = os.open(folder_of(out) / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    except OSError as error:
        raise file_error(error, f"open the stream of {out}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(
                f"another stream works on {out}", next_step="End it first, or name another output folder."
            ) from None
        yield
    finally:
        os.close(descriptor)


class Publisher:
    """Writes overlays and removes old ones. Only who holds the lock of the stream makes one."""

    def __init__(self, out: Path, *, keep_s: float = KEEP_S, step: Step = no_step) -> None:
        self._out, self._keep_s, self._step = out, keep_s, step
        self._folder = folder_of(out)
        self._kept: dict[int, tuple[int, frozenset[str]]] = {}
        """Overlays that are still there: when they were made, and the attempts that they name files of."""
        self.newest: Overlay | None = None
        for number in numbered(self._folder):
            record, _ = reading.load(self._folder, number)
            self._remember(record)
            self.newest = overlay_of(record)
        self._remove_strangers()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[tuple[Attempt, Place]]:
        """An attempt at the next overlay, and where its tasks write."""
        with Attempt.begin(self._folder, step=self._step) as attempt:
            yield attempt, Place(str(self._out), f"{STREAM}/{attempt.folder}")

    def publish(
        self,
        attempt: Attempt,
        *,
        base: int,
        covers: int,
        batches: int,
        messages: int,
        segments: tuple[Segment, ...],
    ) -> Overlay:
        """Make these segments the overlay."""
        files: dict[str, list[NamedFile]] = {}
        documents = []
        for segment in segments:
            own = Segment(segment.level, {kind: _own(named) for kind, named in segment.files.items()})
            documents.append(own.document())
            for kind, named in own.files.items():
                files.setdefault(kind, []).extend(named)
        record = attempt.commit(
            files=files,
            lake=LakePoint(covers, ""),
            settings={
                "base": base,
                "covers": covers,
                "batches": batches,
                "messages": messages,
                "segments": documents,
            },
        )
        self._remember(record)
        self.newest = overlay_of(record)
        return self.newest

    def prune(self, now_s: float | None = None) -> int:
        """Remove overlays that were replaced long ago, and files that only they name; returns how many overlays."""
        before_ms = ((time.time() if now_s is None else now_s) - self._keep_s) * 1000
        numbers = sorted(self._kept)
        # An overlay is in use as long as the one after it is young.
        old = [
            number
            for number, following in itertools.pairwise(numbers)
            if self._kept[following][0] < before_ms and number <= numbers[-1] - KEPT_MIN
        ]
        if not old:
            return 0
        gone: set[str] = set()
        try:
            for number in old:
                self._step("prune record")
                (self._folder / COMMITS / commit_name(number)).unlink(missing_ok=True)
                gone |= self._kept.pop(number)[1]
            live = frozenset[str]().union(*(attempts for _, attempts in self._kept.values()))
            for attempt in sorted(gone - live):
                self._step("prune files")
                self._remove(self._folder / attempt)
        except OSError as error:
            raise file_error(error, f"remove old overlays of {self._out}") from error
        return len(old)

    def _remember(self, record: Commit) -> None:
        attempts = {path.rsplit("/", 2)[0] for path in record.named()}
        attempts.add(attempt_folder(record.number, record.attempt))
        self._kept[record.number] = record.created_ms, frozenset(attempts)

    def _remove_strangers(self) -> None:
        """Remove what a driver that died left behind: attempts that no overlay names."""
        live = frozenset[str]().union(*(attempts for _, attempts in self._kept.values()))
        try:
            for name in sorted(os.listdir(self._folder)):
                if name.startswith(STAGED_PREFIX):
                    self._remove(self._folder / name)
                if epoch_number(name) is None:
                    continue
                for attempt in sorted(os.listdir(self._folder / name)):
                    if attempt_id(attempt) is not None and f"{name}/{attempt}" not in live:
                        self._remove(self._folder / name / attempt)
        except OSError as error:
            raise file_error(error, f"look through the stream of {self._out}") from error

    def _remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other attempts may lie beside it
            folder.parent.rmdir()


def _own(files: tuple[NamedFile, ...]) -> tuple[NamedFile, ...]:
    """Files by their paths below the stream's folder."""
    prefix = f"{STREAM}/"
    return tuple(NamedFile(file.path.removeprefix(prefix), file.sha256, file.bytes, file.rows) for file in files)
