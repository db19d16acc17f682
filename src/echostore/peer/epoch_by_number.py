"""Getting the snapshot of one epoch by its number: `epochs.fetch`, for `echostore epoch fetch`.

reach      connect, where an address is given; Unreachable at once when nobody could answer
hear_of    whether the epoch is known here; that there is none is said only when a member has told what control it
           has, and all of it is here
fetch      its blobs, from whoever has them
"""

import time
from typing import TYPE_CHECKING, Final

from echostore.kernel.errors import NotFound, TimedOut, Unreachable
from echostore.kernel.ids import Cid
from echostore.peer.bootstrap import LOOK_S, Fetched, control_settled, fetch_epoch
from echostore.peer.control_standing import fold_whole, no_epoch
from echostore.peer.epochs import items_counted
from echostore.peer.older_epochs import is_older

if TYPE_CHECKING:
    from echostore.mesh.blob_exchange import Follow
    from echostore.peer.party import Party

KEPT: Final = "What came is kept; the next try goes on from there."
SETTLED_S: Final = 1.0
"""How long control must have been complete before it is believed: who has just connected may tell of more."""


def reach(party: "Party", number: int, address: str | None) -> bytes | None:
    """Connect to a member, and return its device; without an address, see that anybody is connected who is needed."""
    if number < 1:
        raise no_epoch(party.runtime.processor, number)
    if address is not None:
        return party.peer.connect(address)
    if not _known(party, number) and not _connected(party):
        if party.runtime.processor.membership.machine.genesis is None:
            raise _nobody("nothing of the party has come yet, and")
        raise no_epoch(party.runtime.processor, number)
    return None


def hear_of(party: "Party", number: int, device: bytes | None, timeout_s: float) -> bool:
    """Wait until an epoch is known; False when the time is up first, NotFound when the party has none of the number."""
    deadline = time.monotonic() + timeout_s
    settled = None
    while not _known(party, number):
        now = time.monotonic()
        if not (_heard(party, device) and control_settled(party)):
            settled = None
        elif settled is None:
            settled = now
        elif now - settled > SETTLED_S:
            raise no_epoch(party.runtime.processor, number)
        if now > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def fetch(party: "Party", number: int, *, address: str | None, timeout_s: float) -> Fetched:
    """Get an epoch's snapshot, whole, from members that are connected; `address` names one to connect to."""
    peer = party.peer
    device = reach(party, number, address)
    if _is_damaged(party, number):
        return _mended(party)
    if not hear_of(party, number, device, timeout_s):
        raise TimedOut(
            f"what the party's members say of epoch {number} did not come in {timeout_s:g} s",
            unchanged=KEPT,
            next_step="Connect to another member, or give it more time with --timeout.",
        )
    came, before = 0, _blob_count(party)

    def get(cids: list[Cid], follow: "Follow | None" = None) -> None:
        nonlocal came
        assert party.runtime.blobs is not None
        missing = party.runtime.blobs.missing(cids)
        if missing and not _connected(party):
            raise _nobody(f"epoch {number} is not all here, and")
        if missing or (follow is not None and _connected(party)):
            came += peer.network.fetch(party.key, cids, patience_s=timeout_s, follow=follow)
        elif follow is not None:
            _all_here(party, number, cids, follow)

    try:
        base = fetch_epoch(party, number, get)
    except TimedOut as nothing:
        raise TimedOut(nothing.what, unchanged=_kept(party, before), next_step=nothing.next_step) from None
    return Fetched(number, items_counted(party.runtime, base.root), came)


def _mended(party: "Party") -> Fetched:
    """Fetch what is lost of the epoch that this peer stands on, and stand on it again."""
    damage = party.runtime.processor.damage
    before = _blob_count(party)
    why = party.peer.network.bootstraps.mend(party)
    if why:
        next_step = "Connect to a member that has it, with --from HOST:PORT."
        if damage is not None and damage.nobody_else():
            next_step = damage.next_step
        raise TimedOut(why, unchanged=_kept(party, before), next_step=next_step)
    with party.reading() as runtime:
        base = runtime.processor.base
        assert base is not None
        return Fetched(base.name.number, items_counted(runtime, base.root), max(0, _blob_count(party) - before))


def _kept(party: "Party", before: int) -> str:
    """What a try in vain leaves behind, where so many blobs were here before it."""
    return KEPT if _blob_count(party) > before else "Nothing came, and nothing was changed."


def _blob_count(party: "Party") -> int:
    blobs = party.runtime.blobs
    return sum(1 for _ in blobs.list()) if blobs is not None and not blobs.broken else 0


def _all_here(party: "Party", number: int, cids: list[Cid], follow: "Follow") -> None:
    """Go through blobs that are here, with nobody to ask for those that are not."""
    blobs = party.runtime.blobs
    assert blobs is not None
    waiting = list(cids)
    while waiting:
        cid = waiting.pop()
        try:
            waiting += follow(cid, blobs.get(cid))
        except NotFound:
            raise _nobody(f"epoch {number} is not all here, and") from None


def _is_damaged(party: "Party", number: int) -> bool:
    damage = party.runtime.processor.damage
    return damage is not None and damage.name.number == number


def _known(party: "Party", number: int) -> bool:
    if _is_damaged(party, number):
        return True
    with party.reading() as runtime:
        fold_whole(runtime.processor)
        tally = runtime.processor.membership.machine.epoch_tally(runtime.processor.child_key)
        return tally.accepted(number) is not None or is_older(runtime, number)


def _heard(party: "Party", device: bytes | None) -> bool:
    """Whether a device, or anybody, has said what it has of the party's control feeds."""
    parent = party.runtime.processor.parent
    owner = party if parent is None else party.peer.party(parent.party)
    heard = owner._elsewhere.devices()
    return bool(heard) if device is None else device in heard


def _connected(party: "Party") -> bool:
    peer = party.peer
    return peer.on_network and bool(peer.network.connections())


def _nobody(why: str) -> Unreachable:
    return Unreachable(
        f"{why} no member is connected", next_step="Name one with --from HOST:PORT, or run `echostore serve`."
    )
