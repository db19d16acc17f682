"""Real peers on loopback, as network tests use them."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import echostore
from echostore.peer.party import Party
from echostore.peer.peer import Peer

PATIENCE_S = 60.0


def until(condition: Callable[[], Any], *, seconds: float = PATIENCE_S) -> Any:
    """Wait for something to become true; it must within the time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
    return found


@contextmanager
def peers(folder: Path, *names: str) -> Iterator[list[Peer]]:
    """Fresh peers that listen on loopback."""
    with ExitStack() as stack:
        opened = []
        for name in names:
            peer = stack.enter_context(echostore.open(folder / name, name=name))
            peer.listen("127.0.0.1:0")
            opened.append(peer)
        yield opened


def address(peer: Peer) -> str:
    return peer.network.addresses[0]


def invited(host: Peer, party: Party, guest: Peer, role: str = "editor") -> Party:
    """The guest joins with ticket and passcode, and has caught up."""
    invitation = party.invite(role)
    joined = guest.join(invitation.ticket, invitation.passcode)
    until(lambda: cid(joined) == cid(party))
    return joined


def cid(party: Party) -> str:
    return party.snapshot().cid


def converged(*parties: Party) -> None:
    """All have the same state, and stay there."""
    for party in parties:
        party.flush()
    until(lambda: len({cid(party) for party in parties}) == 1)


def has(party: Party, item: Any) -> bool:
    """Whether an item of another peer has come here."""
    return party.runtime.state.record(item.id) is not None
