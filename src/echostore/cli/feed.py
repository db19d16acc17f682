"""`echostore feed`: the signed logs under a party: list, tail, verify."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from echostore.cli.moments import parse_duration_s
from echostore.cli.opening import looking, open_party, party_key, reading
from echostore.cli.options import LISTING_IN_PARTY, Count, ListingInParty, Name, examples
from echostore.cli.output import Column, Form, Output, counted, if_interrupted
from echostore.cli.values import short, short_place
from echostore.kernel.errors import EchoError, NotFound, UsageError

if TYPE_CHECKING:
    from echostore.kernel.ids import FeedKey, PartyKey
    from echostore.peer.peer import Peer
    from echostore.store.feed_store import FeedStore

app = App(
    name="feed",
    help="Feeds: the signed logs under a party.",
    help_prologue=examples("echostore feed list", "echostore feed tail --follow"),
)

FEEDS = (
    Column("feed", "FEED", short, style="cyan"),
    Column("kind", "KIND"),
    Column("owner", "OWNER"),
    Column("own", "OWN"),
    Column("start", "START", right=True),
    Column("held", "HELD", right=True),
    Column("processed", "PROCESSED", right=True),
    Column("known", "KNOWN", right=True),
    Column("waits_for", "WAITS FOR", lambda place: short_place(place or "")),
    Column("ended", "ENDED"),
    Column("excluded", "EXCLUDED"),
)
VERDICTS = (
    Column("party", "PARTY", short, style="cyan"),
    Column("feed", "FEED", lambda feed: short(feed or ""), style="cyan"),
    Column("blocks", "BLOCKS", right=True),
    Column("heads", "HEADS", right=True),
    Column("sound", "SOUND", lambda sound: "yes" if sound else "NO"),
    Column("seq", "SEQ", lambda seq: "" if seq is None else str(seq), right=True),
    Column("damage", "DAMAGE"),
)

INTEGRITY_BROKEN = 6


@app.command(name="list", help_prologue=examples("echostore feed list", "echostore feed list --party @Trip --json"))
def list_feeds(*, options: ListingInParty = LISTING_IN_PARTY) -> None:
    """List the feeds of a party: blocks held here, processed into the state, and known to exist.

    Blocks before START are not on disk: the epoch that the party stands on holds what they said.
    """
    from echostore.cli.party import feed_fields

    output = Output.of(options)
    with looking(options) as peer:
        party = open_party(peer, options.party)
        records = [feed_fields(feed) for feed in party.status.feeds]
    output.table("feeds", FEEDS, records, party=party.key.hex())


@app.command(help_prologue=examples("echostore feed tail --lines 20", "echostore feed tail 1e8fc9d0 --follow --nl"))
def tail(
    feed: Name | None = None,
    /,
    *,
    lines: Annotated[int, Parameter(name=["--lines", "-n"])] = 10,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative=(), show_default=False)] = False,
    count: Count = None,
    timeout: str | None = None,
    options: ListingInParty = LISTING_IN_PARTY,
) -> None:
    """Show the last blocks of a feed, or of all feeds of a party, causes before effects.

    Parameters
    ----------
    feed
        Key or unique prefix; without it, all feeds.
    lines
        How many blocks to begin with.
    follow
        Go on with new blocks as they come, until ^C. Works beside the process that writes them.
    count
        While following: end after so many new blocks.
    timeout
        While following: end with status 5 when nothing came for so long.
    """
    from echostore.cli import following
    from echostore.cli.blocks import BLOCKS, Tail, block_line

    output = Output.of(options)
    if lines < 0:
        raise UsageError("--lines counts from 0")
    limit_s = None if timeout is None else parse_duration_s(timeout)
    with reading(options) as peer:
        key = party_key(peer, options.party)
        party = peer.party(key)
        reader = Tail(None if feed is None else find_feed(party.runtime.feeds, feed))
        if not follow:
            records = reader.last(party, lines)
            if output.form is Form.TEXT:
                output.document({}, map(block_line, records))
            else:
                output.table("blocks", BLOCKS, records, party=key.hex())
            return
        new = 0
        for number, now in enumerate(following.follow(peer, key, timeout_s=limit_s)):
            for record in reader.last(now, lines) if number == 0 else reader.new(now):
                output.row(BLOCKS, record, block_line(record))
                new += number > 0
                if count is not None and new >= count:
                    return


@app.command(help_prologue=examples("echostore feed verify", "echostore feed verify 1e8fc9d0 --json"))
def verify(feed: Name | None = None, /, *, options: ListingInParty = LISTING_IN_PARTY) -> int:
    """Hash every block again and check every signature; of all parties unless one is named.

    The exit status is 6 when anything is damaged, and the table names feed and seq of the first damage.

    Parameters
    ----------
    feed
        Key or unique prefix; without it, all feeds.
    """
    output = Output.of(options)
    with reading(options) as peer, if_interrupted("The check can be started again."):
        keys = [party_key(peer, options.party)] if options.party or feed else [known.key for known in peer.parties()]
        records = [record for key in keys for record in verify_party(output, peer, key, feed)]
    output.table("feeds", VERDICTS, records, empty="no feed here", sound=all(record["sound"] for record in records))
    damaged = [record for record in records if not record["sound"]]
    if not damaged:
        output.note(f"{counted(sum(record['blocks'] for record in records), 'block')} sound")
        return 0
    for record in damaged:
        place = f"feed {short(record['feed'])}, seq {record['seq']}" if record["feed"] else "its feeds"
        output.warn(f"party {short(record['party'])}, {place}: {record['damage']}")
    return INTEGRITY_BROKEN


def verify_party(output: Output, peer: "Peer", key: "PartyKey", feed: str | None = None) -> Iterator[dict[str, Any]]:
    """The verdicts on the feeds of one party. A file that can't even be opened is a verdict too."""
    from echostore.kernel.errors import Corrupt
    from echostore.store.feed_store import FeedStore

    blank: dict[str, Any] = {"party": key.hex(), "feed": None, "blocks": 0, "heads": 0, "bytes": 0, "seq": None}
    try:
        store = FeedStore(peer.home.party(key).feeds, key, writable=False)
    except (Corrupt, NotFound) as error:
        yield {**blank, "sound": False, "damage": error.what}
        return
    with store:
        wanted = None if feed is None else find_feed(store, feed)
        for held in store.feeds():
            if wanted not in (None, held.key):
                continue
            with output.progress(f"feed {short(held.key.hex())}") as tell:
                try:
                    verdict = store.verify(held.key, tell)
                except EchoError as error:
                    yield {**blank, "feed": held.key.hex(), "sound": False, "damage": error.what}
                    continue
            seq, damage = verdict.damage or (None, None)
            yield {
                "party": key.hex(),
                "feed": held.key.hex(),
                "kind": str(held.kind),
                "blocks": verdict.blocks,
                "heads": verdict.heads,
                "bytes": verdict.payload_bytes,
                "sound": verdict.sound,
                "seq": seq,
                "damage": damage,
            }


def find_feed(store: "FeedStore", text: str) -> "FeedKey":
    """A feed by a unique prefix of its key."""
    found = [feed.key for feed in store.feeds() if text and feed.key.hex().startswith(text.lower())]
    if not found:
        raise NotFound(f"no feed {text!r} is here", next_step="`echostore feed list` shows the feeds.")
    if len(found) > 1:
        raise UsageError(f"{len(found)} feeds start with {text}", next_step="Give more of the key.")
    return found[0]
