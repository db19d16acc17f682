"""`echostore epoch fetch`: the snapshot of one epoch, from members that kept it."""

from typing import Annotated

from cyclopts import Parameter

from echostore.cli.epoch_gc import app
from echostore.cli.opening import party_key, writing
from echostore.cli.options import IN_PARTY, InParty, examples
from echostore.cli.output import Output, counted

__all__ = ["app"]


@app.command(
    help_prologue=examples("echostore epoch fetch 3 --from 192.0.2.7:4711", "echostore epoch fetch 1 --party @Trip")
)
def fetch(
    number: int,
    /,
    *,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
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
    """
    output = Output.of(options)
    with writing(options) as peer:
        key = party_key(peer, options.party)
        fetched = peer.epochs(key).fetch(number, address=from_)
        record = {"party": key.hex(), "epoch": fetched.epoch, "items": fetched.items, "fetched": fetched.blobs}
        output.document(
            record, f"epoch {fetched.epoch}: {counted(fetched.items, 'item')}, {counted(fetched.blobs, 'blob')} came"
        )
