"""`echostore view`: items that applications find by class."""

import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from echostore.cli.opening import find_item, item_id, open_party, reading, writing
from echostore.cli.options import IN_PARTY, LISTING_IN_PARTY, InParty, ListingInParty, Name, examples
from echostore.cli.output import Column, Form, Output, counted
from echostore.cli.tree import draw, nodes, nodes_of
from echostore.cli.values import one_line, short, to_json
from echostore.kernel.errors import NotFound, Refused, TimedOut, UsageError
from echostore.kernel.ids import KEY_BYTES, item_from_text, item_text
from echostore.kernel.models.property_set import PropertySet
from echostore.kernel.values import parse_locator

if TYPE_CHECKING:
    from echostore.kernel.ids import ItemId
    from echostore.kernel.items.record import ItemRecord
    from echostore.peer.peer import Peer
    from echostore.peer.status import PartyStatus
    from echostore.peer.view_reading import Places

LOOK_S = 0.1
"""How often a command that waits for a view looks for it."""
SETTLED_S = 1.0
"""How long nothing more must have come before it is said that there is no such view: a member may tell of more."""

app = App(
    name="view",
    help="Views: items that applications find by class.",
    help_prologue=examples("echostore view list", "echostore view open @Planner"),
)

VIEWS = (
    Column("item", "VIEW", short, style="cyan"),
    Column("view_class", "CLASS"),
    Column("display_name", "NAME"),
    Column("locator", "LOCATOR"),
)


@app.command(
    name="list", help_prologue=examples("echostore view list", "echostore view list example.org/planner --json")
)
def list_views(view_class: str | None = None, /, *, options: ListingInParty = LISTING_IN_PARTY) -> None:
    """List the views of a party.

    Parameters
    ----------
    view_class
        Only views of this class.
    """
    output = Output.of(options)
    with reading(options) as peer:
        party = open_party(peer, options.party)
        records = [_fields(view) for view in party.views(view_class)]
    output.table("views", VIEWS, records, empty="no view here", party=party.key.hex())


@app.command(
    name="open",
    help_prologue=examples(
        "echostore view open @Planner", "echostore view open echo://1f3a.../9c02... --from 192.0.2.7:4711"
    ),
)
def open_view(
    view: Name,
    /,
    *,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    options: InParty = IN_PARTY,
) -> None:
    """Show a view: its class, its values, and the items in it.

    Parameters
    ----------
    view
        Locator, inception key, id, unique prefix or @name.
    from_
        Address (host:port) of a member. The view is read from the party's newest epoch there, and nothing else of the
        party has to be here; without such an epoch, from the history that comes. `view` is a locator then.
    """
    output = Output.of(options)
    if from_ is not None:
        _open_from(view, from_, options, output)
        return
    with reading(options) as peer:
        try:
            found = find_item(peer, options, view)
        except NotFound:
            _check_begun(peer, options, view)
            raise
        _show(output, found, epoch=None)


def _check_begun(peer: "Peer", options: InParty, view: str) -> None:
    """NotFound, with the way to it, where nothing that was written to the party is here yet."""
    party = peer.party(parse_locator(view)[0]) if view.startswith("echo://") else open_party(peer, options.party)
    status = party.status
    if status.epoch is None and not any(feed.held for feed in status.feeds if feed.kind == "data"):
        raise NotFound(
            "nothing of the party is here yet",
            next_step="Read the view from a member, by its locator: `echostore view open LOCATOR --from HOST:PORT`.",
        )


def _show(output: Output, found: Any, **more: Any) -> None:
    """The view as the party has it now."""
    _check_view(found._record())
    fields = _fields(found)
    fields["value"] = to_json(found.value())
    rows = list(nodes(found.party, found))
    if output.form is Form.TEXT:
        lines = [_title(fields), fields["locator"]]
        output.document({}, [*lines, *draw(iter(rows), title=None)])
    else:
        output.document({**fields, **more, "items": [row["item"] for row in rows]})


def _open_from(view: str, address: str, options: InParty, output: Output) -> None:
    """The view as the newest epoch has it, with the few blobs that it takes; else from what comes of the history."""
    from echostore.mesh.blob_exchange import Unavailable
    from echostore.peer.attached import Remote
    from echostore.peer.bootstrap import PATIENCE_S, believable, control_settled
    from echostore.peer.status import REMOVED, REVOKED

    with writing(options) as peer:
        key, name = parse_locator(view)
        if all(known.key != key for known in peer.parties()):
            raise NotFound(
                f"this device is in no party {short(key.hex())}",
                next_step="A view is for members: join the party first, with a ticket of one of them.",
            )
        party = peer.party(key)
        device = peer.connect(address)
        wanted = bytes.fromhex(name) if len(name) == 2 * KEY_BYTES else item_from_text(name)
        early = not issubclass(type(peer), Remote)  # a running `echostore serve` has the epoch soon, and all of it
        until = time.monotonic() + PATIENCE_S
        epoch: int | None = None
        lacks = ""
        settled: float | None = None
        while time.monotonic() < until:
            if early and control_settled(party) and believable(party.runtime) is not None:
                try:
                    reader = peer.network.bootstraps.early(party, timeout_s=PATIENCE_S)
                    places: Places = {}
                    _show_early(output, view, reader.base.name.number, reader.view(wanted, places), places)
                    return
                except NotFound as absent:
                    early, lacks = False, absent.what  # it may be younger than the epoch
                except Unavailable as nothing:
                    raise TimedOut(
                        f"{counted(len(nothing.cids), 'blob')} of the view came from nobody: the member at {address} is gone",
                        unchanged="What came is kept; the next try goes on from there.",
                        next_step="Name another member with --from, or try again.",
                    ) from None
            try:
                party.get(view)
            except NotFound:
                status = party.status
                if status.standing in (REMOVED, REVOKED):
                    raise Refused(
                        f"nobody gives this device the view: {status.standing}",
                        next_step="`echostore party why` says who did it. What was here before stays readable.",
                    ) from None
                if not (_heard(status, device) and peer.network.progress(key).caught_up):
                    settled = None
                elif settled is None:
                    settled = time.monotonic()
                elif time.monotonic() - settled > SETTLED_S:
                    raise NotFound(
                        f"no view {name[:8]} is in the party, and all that the member at {address} has of it is here",
                        unchanged="What came of the party is kept.",
                        next_step="Look at the locator again, or name a member that has more with --from.",
                    ) from None
                time.sleep(LOOK_S)
                continue
            epoch = party.status.epoch
            break
        else:
            raise TimedOut(
                f"{lacks}, and what was written since did not come in {PATIENCE_S:g} s"
                if lacks
                else f"nothing of the view came in {PATIENCE_S:g} s, in an epoch that may be believed or beside one",
                unchanged="What came of the party is kept.",
                next_step="Connect to another member, or try again.",
            )
    with reading(options) as peer:
        _show(output, find_item(peer, options, view), epoch=epoch)


def _heard(status: "PartyStatus", device: bytes) -> bool:
    """Whether a device has said what it has of a party."""
    return any(each.device == device for feed in status.feeds for each in feed.others)


def _check_view(record: "ItemRecord") -> None:
    if not record.genesis.inception_key or not isinstance(record.model, PropertySet):
        raise UsageError(
            f"{short(item_text(record.item))} is not a view", next_step="`echostore view list` shows the views."
        )


def _title(fields: dict[str, Any]) -> str:
    """Class and name. Whoever writes the view may put anything there."""
    return "  ".join(one_line(str(fields[name])) for name in ("view_class", "display_name"))


def _show_early(output: Output, view: str, epoch: int, records: "dict[ItemId, ItemRecord]", places: "Places") -> None:
    """The same of what an epoch has of it."""
    top = next(iter(records.values()))
    _check_view(top)
    values = top.values()
    rows = list(nodes_of(top.item, records, places))
    fields = {
        "item": item_text(top.item),
        "inception_key": top.genesis.inception_key.hex(),
        "view_class": to_json(values.get("view_class")),
        "display_name": to_json(values.get("display_name")),
        "locator": view,
        "epoch": epoch,
        "value": to_json(values),
        "items": [row["item"] for row in rows],
    }
    lines = [_title(fields), view, *draw(iter(rows), title=None)]
    output.document(fields, [*lines, f"as of epoch {epoch}"])


def _fields(view: Any) -> dict[str, Any]:
    return {
        "item": item_id(view),
        "inception_key": view._record().genesis.inception_key.hex(),
        "view_class": to_json(view.get("view_class")),
        "display_name": to_json(view.get("display_name")),
        "locator": view.locator,
    }
