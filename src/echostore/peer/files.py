"""Files of a party: content in the blob store, named by a value that can stand in any property.

    photo = party.files.add(Path("beach.jpg"))      ->  BlobRef, durable here
    task["photo"] = photo                           the pointer travels with the feeds, the content on demand
    data = party.files.read(task["photo"])          fetched from connected members if it is not here

Content is cut into chunks of 256 KiB, each under its own CID, so that several peers can give parts of one file.
"""

import mimetypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from echostore.kernel.errors import EchoError, NotFound, Refused, TimedOut, UsageError
from echostore.kernel.ids import Cid
from echostore.kernel.snapshot import CHUNK_BYTES, chunks
from echostore.kernel.values import BlobRef
from echostore.mesh.blob_exchange import Unavailable
from echostore.store.durable_file import file_error, open_private
from echostore.wire.cids import RAW, cid_of

if TYPE_CHECKING:
    from echostore.peer.party import Party
    from echostore.store.blob_store import BlobStore

FILE_CHUNKS_MAX = 16_384
"""A file of 4 GiB. Its pointer still fits into a message."""
_PUT_CHUNKS = 16

Progress = Callable[[int, int], None]


class Files:
    """The files of one party."""

    def __init__(self, party: "Party") -> None:
        self._party = party

    def add(self, source: "Path | str | bytes", *, name: str | None = None, media_type: str | None = None) -> BlobRef:
        """Keep content durably and return the value that points to it. A path is read in pieces."""
        store = self._store()
        if isinstance(source, bytes):
            pieces: Iterator[bytes] = chunks(source)
        elif isinstance(source, str | Path):
            path = Path(source)
            name = name if name is not None else path.name
            try:
                pieces = _pieces(path)
                first = next(pieces, None)
            except OSError as error:
                raise NotFound(f"{path} can't be read: {error.strerror}") from None
            pieces = iter(()) if first is None else _chain(first, pieces)
        else:
            raise UsageError("a file is given as bytes or as a path")
        cids: list[Cid] = []
        size, staged = 0, {}
        for piece in pieces:
            if len(cids) >= FILE_CHUNKS_MAX:
                raise Refused(f"a file of more than {FILE_CHUNKS_MAX} chunks")
            cid = cid_of(piece, RAW)
            cids.append(cid)
            staged[cid] = piece
            size += len(piece)
            if len(staged) >= _PUT_CHUNKS:
                store.put_many(staged)
                staged = {}
        if staged:
            store.put_many(staged)
        kind = media_type if media_type is not None else (mimetypes.guess_type(name)[0] if name else None)
        return BlobRef(tuple(cids), size, kind or "", name or "")

    def missing(self, file: BlobRef) -> list[Cid]:
        """Chunks that are not here."""
        return self._store().missing(dict.fromkeys(file.cids))

    def fetch(self, file: BlobRef, *, timeout: float = 30.0, progress: Progress = lambda done, total: None) -> None:
        """Get what is missing from connected members; TimedOut when nothing has come for so long."""
        missing = self.missing(file)
        if not missing:
            return
        try:
            self._party.peer.network.fetch(self._party.key, missing, patience_s=timeout, progress=progress)
        except Unavailable as nothing:
            raise TimedOut(
                f"{len(nothing.cids)} of {len(file.cids)} chunks of the file came from nobody",
                unchanged="What came is kept; the next try goes on from there.",
                next_step="Connect to a member that holds the file.",
            ) from None

    def read(self, file: BlobRef, *, timeout: float = 30.0) -> bytes:
        """The whole content; fetched first if parts of it are not here."""
        return b"".join(self.chunks(file, timeout=timeout))

    def save(self, file: BlobRef, path: "Path | str", *, timeout: float = 30.0) -> None:
        """Write the content to a file that its owner alone may read; one that is there is replaced once all is written."""
        target = Path(path)
        part = target.with_name(target.name + ".part")
        try:
            with open_private(part) as out:
                for piece in self.chunks(file, timeout=timeout):
                    out.write(piece)
            part.replace(target)
        except EchoError:
            raise
        except OSError as error:
            raise file_error(error, f"write {target}") from error
        finally:
            part.unlink(missing_ok=True)

    def chunks(self, file: BlobRef, *, timeout: float = 30.0) -> Iterator[bytes]:
        """The content in pieces, each checked against its CID."""
        self.fetch(file, timeout=timeout)
        store, size = self._store(), 0
        for cid in file.cids:
            piece = store.get(cid)
            size += len(piece)
            yield piece
        if size != file.size:
            raise Refused(f"the file says it has {file.size} bytes, and its chunks have {size}")

    def _store(self) -> "BlobStore":
        store = self._party.runtime.blobs
        if store is None:
            raise Refused("this party keeps no blobs here: it is the past, or open read-only")
        return store


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as source:
        while piece := source.read(CHUNK_BYTES):
            yield piece


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
