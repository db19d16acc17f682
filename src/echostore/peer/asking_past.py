"""A past that is not here, asked of others: the epoch whose snapshot a moment needs, by the CIDs that the chain names.

    as_of(moment) ── needs epoch N ── its blobs are here ───────────────────────────────► the party at that moment
                                  └── on the network: fetched from members that kept it ──┘
                                  └── nobody has it, or nobody was asked ──► Compacted, which says which of the two

What comes is checked against CIDs that members attested, so it does not matter who gives it. It is kept until the next
`epoch gc`; a fetch that was cut short goes on where it ended.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from echostore.kernel.errors import Compacted, TimedOut
from echostore.kernel.ids import Cid

if TYPE_CHECKING:
    from echostore.mesh.blob_exchange import Follow
    from echostore.peer.party import Party

PATIENCE_S: Final = 5.0
"""How long nothing may come before somebody who waits for a past is told that nobody has it."""

_T = TypeVar("_T")


class EpochNotHere(Compacted):
    """A moment needs an epoch whose snapshot is not whole here. `with_others` makes of it what people are told."""

    def __init__(self, number: int) -> None:
        super().__init__(f"that moment needs the snapshot of epoch {number}, which is not here")
        self.number = number


def with_others(party: "Party", read: Callable[[], _T]) -> _T:
    """What `read` gives; an epoch that it needs and that is not here is fetched first, from members that are connected."""
    asked: set[int] = set()
    while True:
        try:
            with party.reading():
                return read()
        except EpochNotHere as lacking:
            number = lacking.number
        if number in asked:
            raise Compacted(f"the snapshot of epoch {number} came, and is gone again", next_step="Try again.")
        fetch_past(party, number)
        asked.add(number)


def fetch_past(party: "Party", number: int) -> None:
    """Get an epoch's snapshot from members that are connected; Compacted when none of them has it, or none was asked."""
    from echostore.peer.bootstrap import fetch_epoch

    why = why_alone(party)
    if why:
        raise Compacted(
            f"that moment needs the snapshot of epoch {number}, which is not here, and nobody was asked: {why}",
            next_step=f"Connect to a member that kept it, or get it with `echostore epoch fetch {number} --from HOST:PORT`.",
        )

    def fetch(cids: list[Cid], follow: "Follow | None" = None) -> None:
        party.peer.network.fetch(party.key, cids, follow=follow, patience_s=PATIENCE_S)

    try:
        fetch_epoch(party, number, fetch)
    except TimedOut:
        raise Compacted(
            f"that moment needs the snapshot of epoch {number}, which is not here, and nobody who is connected has it",
            unchanged="What came of it is kept; the next try goes on from there.",
            next_step=f"Connect to a member that kept it: `echostore epoch fetch {number} --from HOST:PORT`.",
        ) from None


def why_alone(party: "Party") -> str:
    """Why nobody can be asked from here; empty where that is possible."""
    peer = party.peer
    if peer.read_only or not peer.on_network:
        return "this peer is not on the network"
    if party.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks it
        return "inside a batch or a subscriber nothing can be waited for"  # what comes is stored under the same lock
    return ""
