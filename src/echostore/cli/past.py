"""A party and its items at `--at`. What of a past is with other members is fetched by the `echostore serve` of the home."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from echostore.cli.moments import parse_moment
from echostore.cli.opening import from_dash, item_in, open_party, served
from echostore.cli.options import PartyChoice
from echostore.kernel.errors import Compacted, NotFound

if TYPE_CHECKING:
    from echostore.peer.items import Item
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

_T = TypeVar("_T")


def party_then(options: PartyChoice, party: "Party", at: str) -> "Party":
    moment = parse_moment(at)
    return with_running(options, party, [moment], lambda: party.as_of(moment))


def item_then(peer: "Peer", options: PartyChoice, text: str, at: str) -> "Item":
    """An item as it was: by what it is called now, or by what it was called then if an epoch has left it out since."""
    text = from_dash(text)
    party = _party_of(peer, options, text)
    then = party_then(options, party, at)
    try:
        return then.handle(item_in(party, text).id)
    except NotFound:
        return item_in(then, text)


def with_running(options: PartyChoice, party: "Party", moments: list[Any], read: Callable[[], _T]) -> _T:
    """What `read` finds in the files of the home, once a running service has fetched what they lack of these moments."""
    try:
        return read()
    except Compacted:
        running = served(options)
        if running is None:
            raise
    with running:
        for moment in moments:
            running.party(party.key).as_of(moment)
    return read()


def _party_of(peer: "Peer", options: PartyChoice, text: str) -> "Party":
    if not text.startswith("echo://"):
        return open_party(peer, options.party)
    from echostore.kernel.values import parse_locator

    return peer.party(parse_locator(text)[0])
