"""`echostore party revive`: an item that an epoch discarded, made anew."""

from typing import Annotated

from echostore.cli.opening import from_dash, open_party, writing, wrote
from echostore.cli.options import FLAG, IN_PARTY, InParty, Name
from echostore.cli.output import Output, counted
from echostore.cli.values import short

EXAMPLES = ("echostore party revive 69e5962b --dry-run", "echostore party revive 69e5962b --party @Trip --json")


def revive(item: Name, /, *, dry_run: Annotated[bool, FLAG] = False, options: InParty = IN_PARTY) -> None:
    """Make an item anew that an epoch discarded, with what was written to it since and is listed as rejected.

    Parameters
    ----------
    item
        Its id or locator; the first digits do where something written to it was rejected.
    dry_run
        Only tell what would come of it.
    """
    from echostore.kernel.ids import item_text

    output = Output.of(options)
    with writing(options) as peer:
        party = open_party(peer, options.party)
        revived = party.revive(from_dash(item), dry_run=dry_run)
        old = item_text(revived.old)
        fields = {
            "old": old,
            "item": None if revived.item is None else item_text(revived.item),
            "epoch": revived.epoch,
            "operations": revived.operations,
            "left": revived.left,
            "dry_run": dry_run,
        }
        source = "its blocks" if revived.epoch is None else f"epoch {revived.epoch}"
        told = f"{short(old)} from {source}, with {counted(revived.operations, 'rejected operation')}"
        for each in revived.left:
            output.warn(f"not brought back: {each}")
        if revived.item is None:
            output.document({**fields, "party": party.key.hex()}, f"would revive {told}")
        else:
            wrote(output, party, fields, f"{item_text(revived.item)}\nrevived {told}")
