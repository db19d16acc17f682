"""`echostore epoch fetch`: the snapshot of one epoch, from members that kept it."""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echostore.cli.epoch_gc import app
from echostore.cli.opening import open_party, writing
from echostore.cli.options import IN_PARTY, InParty, examples
from echostore.cli.output import Output, counted

if TYPE_CHECKING:
    from echostore.kernel.ids import Cid

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
    from echostore.peer.bootstrap import fetch_epoch

    output = Output.of(options)
    with writing(options) as peer:
        party = open_party(peer, options.party)
        if from_ is not None:
            peer.connect(from_)
        fetched: list[int] = []

        def get(cids: "list[Cid]") -> None:
            assert party.runtime.blobs is not None
            missing = party.runtime.blobs.missing(cids)
            if missing:
                peer.network.fetch(party.key, missing)
                fetched.append(len(missing))

        base = fetch_epoch(party, number, get)
        record = {"party": party.key.hex(), "epoch": number, "items": base.root.item_count, "fetched": sum(fetched)}
        output.document(record, f"epoch {number}: {counted(base.root.item_count, 'item')}, {sum(fetched)} blobs came")
