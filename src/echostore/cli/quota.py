"""`echostore quota`: how much of one feed and from one device goes before others."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App

from echostore.cli.opening import looking, writing
from echostore.cli.options import FLAG, OPTIONS, Options, examples
from echostore.cli.output import Output
from echostore.kernel.errors import UsageError

if TYPE_CHECKING:
    from echostore.kernel.sync.turns import Quotas
    from echostore.peer.peer import Peer

app = App(
    name="quota",
    help="How much of one feed, and from one device, goes before others.",
    help_prologue=examples("echostore quota show", "echostore quota set --feed-blocks 200"),
)


@app.command(help_prologue=examples("echostore quota show", "echostore quota show --json | jq .slowed_blocks"))
def show(*, options: Options = OPTIONS) -> None:
    """Show the quotas of this home, and what a running `echostore serve` has made wait for others."""
    from echostore.peer.quotas import quotas_of

    output = Output.of(options)
    with looking(options) as peer:
        _tell(output, quotas_of(peer.meta), None if peer.read_only else _intake(peer))


@app.command(
    name="set",
    help_prologue=examples(
        "echostore quota set --feed-blocks 200 --feed-bytes 262144", "echostore quota set --default --json"
    ),
)
def set_quotas(
    *,
    feed_blocks: float | None = None,
    feed_bytes: float | None = None,
    device_blocks: float | None = None,
    device_bytes: float | None = None,
    default: Annotated[bool, FLAG] = False,
    options: Options = OPTIONS,
) -> None:
    """Set how much, per second, one feed and one device may bring before they stand behind others.

    Nothing is refused or lost: what is over its quota is taken when nobody else waits. A running `echostore serve` heeds it
    at once.

    Parameters
    ----------
    feed_blocks
        Blocks of one feed.
    feed_bytes
        Bytes of one feed.
    device_blocks
        Blocks that one device brings, of all feeds and parties.
    device_bytes
        Bytes that one device brings.
    default
        Everything that is not given is as it was at first.
    """
    output = Output.of(options)
    given = {
        "feed_blocks": feed_blocks,
        "feed_bytes": feed_bytes,
        "device_blocks": device_blocks,
        "device_bytes": device_bytes,
    }
    changes = {name: rate for name, rate in given.items() if rate is not None}
    if not changes and not default:
        raise UsageError("no quota was given", next_step="Give one, as in --feed-blocks 200, or --default.")
    with writing(options) as peer:
        quotas = peer.network.set_quotas(changes, default=default)
        _tell(output, quotas, _intake(peer))


def _intake(peer: "Peer") -> dict[str, Any]:
    return asdict(peer.network.intake)


def _tell(output: Output, quotas: "Quotas", intake: dict[str, Any] | None) -> None:
    rates = asdict(quotas)
    lines = [
        f"one feed    {rates['feed_blocks']:,.10g} blocks/s, {rates['feed_bytes']:,.10g} bytes/s",
        f"one device  {rates['device_blocks']:,.10g} blocks/s, {rates['device_bytes']:,.10g} bytes/s",
    ]
    if intake is not None:
        lines.append(f"slowed      {intake['slowed_blocks']:,} blocks stood behind others; {intake['waiting']} wait")
    usual = dict.fromkeys(("waiting", "over_feed_blocks", "over_device_blocks", "slowed_blocks"))
    output.document({**rates, **(intake or usual)}, lines)
