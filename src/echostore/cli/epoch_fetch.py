"""`echostore epoch fetch`: the snapshot of one epoch, from members that kept it."""

from typing import Annotated

from cyclopts import Parameter

from echostore.cli.epoch_gc import app
from echostore.cli.opening import open_party, writing
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

    Parameters
    ----------
    number
        Counts from 1.
    from_
        Address (host:port) of a member to connect to; not needed for what is here already.
    """
    output = Output.of(options)
    with writing(options) as peer:
        party = open_party(peer, options.party)
        fetched = peer.epochs(party.key).fetch(number, address=from_)
        record = {"party": party.key.hex(), "epoch": number, "items": fetched.items, "fetched": fetched.blobs}
        output.document(
            record, f"epoch {number}: {counted(fetched.items, 'item')}, {counted(fetched.blobs, 'blob')} came"
        )
