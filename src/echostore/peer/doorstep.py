"""`echostore.open`. Whether a home can be had is known before anything heavy is loaded: this module imports little."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from echostore.kernel.errors import Locked
from echostore.peer.local_socket import SOCKET_NAME
from echostore.store.home import Home

if TYPE_CHECKING:
    from echostore.peer.peer import Peer


def open_peer(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    passphrase: str | None = None,
    create: bool = True,
    read_only: bool = False,
    background: bool = True,
    now_ms: Callable[[], int] | None = None,
    attach: bool = True,
) -> "Peer":
    """Open the peer whose data is in a folder; with `create`, make it on first use.

    While `echostore serve` has the home open, that process does the work: what is returned stands for its peer. With
    `attach=False` the home is opened by this process or not at all.
    """
    home = Home.open(path, create=create and not read_only)
    try:
        lock = None if read_only else home.lock()
    except Locked:
        if not attach or now_ms is not None or not (home.path / SOCKET_NAME).exists():
            raise
        running = _running(home, name)
        if running is None:
            raise
        return running
    try:
        from echostore.peer.peer import Peer

        return Peer(
            home, name=name, passphrase=passphrase, read_only=read_only, background=background, now_ms=now_ms, lock=lock
        )
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def _running(home: Home, name: str | None) -> "Peer | None":
    """What stands for the peer of the process that serves a home."""
    from echostore.peer.attached import attach

    running: Peer | None = attach(home, name=name)
    return running
