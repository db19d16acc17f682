"""Links that open the planner page with a capability: to click on, and as a QR code for a phone.

http://HOST:PORT/#CAPABILITY      what stands behind the # is not sent to any server
"""

import sys
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from echostore.cli.opening import party_key
from echostore.cli.output import Output
from echostore.kernel.errors import EchoError, Refused

if TYPE_CHECKING:
    from echostore.peer.capabilities import IssuedCapability
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

PLANNER: Final = "planner"
"""The name of the capability that `serve --thin` issues and uses again."""

LASTS_MS: Final = 24 * 3600 * 1000
"""One that ends sooner is not used again."""


def page_address(thin_url: str) -> str:
    """Where a browser finds the page of a thin service; one that listens everywhere is named by an address of this machine."""
    from echostore.peer.reachable import reachable_addresses

    return f"http://{reachable_addresses([urlsplit(thin_url).netloc])[0]}/"


def page_link(thin_url: str, capability: str) -> str:
    return f"{page_address(thin_url)}#{capability}"


def planner_link(peer: "Peer", thin_url: str) -> tuple[str, str | None]:
    """A link to the only party of a peer, with a capability for all of it that lasts over restarts; and why there is none."""
    try:
        party = peer.party(party_key(peer, None))
        return page_link(thin_url, _planner_capability(party).text), None
    except EchoError as error:
        return page_address(thin_url), str(error)


def _planner_capability(party: "Party") -> "IssuedCapability":
    soon_ms = party.peer.now_ms() + LASTS_MS
    for issued in party.capabilities.issued():
        if issued.name == PLANNER and issued.revoked_ms is None and issued.expires_ms > soon_ms:
            return issued
    try:
        return party.capability(write="*", name=PLANNER)
    except Refused:  # a reader grants no more than it has
        return party.capability(name=PLANNER)


def show_code(output: Output, link: str) -> None:
    """The link as a QR code, where a person looks at a terminal."""
    if output.quiet or output.machine or not sys.stderr.isatty():
        return
    try:
        import segno
    except ModuleNotFoundError:  # the extra `web` is not installed: the link alone will do
        return
    segno.make(link, error="l", micro=False).terminal(out=sys.stderr, border=2, compact=True)
