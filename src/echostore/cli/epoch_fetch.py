"""`echostore epoch fetch`: the snapshot of one epoch, from members that kept it."""

import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echostore.cli.epoch_gc import app
from echostore.cli.moments import parse_duration_s
from echostore.cli.opening import party_key, writing
from echostore.cli.options import IN_PARTY, InParty, examples
from echostore.cli.output import Output, counted, if_interrupted
from echostore.kernel.errors import TimedOut

if TYPE_CHECKING:
    from echostore.kernel.ids import PartyKey
    from echostore.peer.peer import Peer

__all__ = ["app"]

KEPT = "What came is kept; the next try goes on from there."
TELL_S = 1.0
"""How often is told what is waited for."""


@app.command(
    help_prologue=examples("echostore epoch fetch 3 --from 192.0.2.7:4711", "echostore epoch fetch 1 --party @Trip")
)
def fetch(
    number: int,
    /,
    *,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    timeout: str = "30s",
    options: InParty = IN_PARTY,
) -> None:
    """Get the snapshot of one epoch, so that its moment can be read here.

    Where blobs are lost of the epoch that the party stands on, they are fetched again, and the party stands on it as before;
    where nobody has it any more, on a newer one.

    Parameters
    ----------
    number
        Counts from 1.
    from_
        Address (host:port) of a member to connect to; not needed for what is here already.
    timeout
        How long nothing may come: 30s, 5m.
    """
    output = Output.of(options)
    patience_s = parse_duration_s(timeout)
    with writing(options) as peer, if_interrupted(KEPT):
        key = party_key(peer, options.party)
        epochs = peer.epochs(key)
        device = epochs.reach(number, address=from_)
        _await(output, peer, key, number, device, patience_s)
        output.aside(f"asking for epoch {number}")
        fetched = epochs.fetch(number, timeout_s=patience_s)
        record = {"party": key.hex(), "epoch": fetched.epoch, "items": fetched.items, "fetched": fetched.blobs}
        output.document(
            record, f"epoch {fetched.epoch}: {counted(fetched.items, 'item')}, {counted(fetched.blobs, 'blob')} came"
        )


def _await(
    output: Output, peer: "Peer", party: "PartyKey", number: int, device: bytes | None, patience_s: float
) -> None:
    """Until the party's control feeds have told of an epoch. That there is none is known only when they are here."""
    epochs = peer.epochs(party)
    best, moved = -1, time.monotonic()
    before = peer.network.progress(party).held
    while not epochs.hear_of(number, device=device, timeout_s=min(TELL_S, patience_s)):
        progress = peer.network.progress(party)
        if progress.held > best:
            best, moved = progress.held, time.monotonic()
        elif time.monotonic() - moved > patience_s:
            raise TimedOut(
                f"what the party's members say of epoch {number} did not come in {patience_s:g} s",
                unchanged=KEPT if progress.held > before else "Nothing came, and nothing was changed.",
                next_step="Connect to another member, or give it more time with --timeout.",
            )
        output.aside(f"waiting for what members say: {progress.held:,} of {progress.known:,} known blocks held")
