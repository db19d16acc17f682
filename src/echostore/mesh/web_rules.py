"""Which requests the web service of thin clients answers, and what browsers are told about its pages.

    Host     an address, localhost, the name of this machine or of the listening address, or that of an allowed origin
    Origin   none (no browser), the page's own, or one that is allowed

A name that somebody else's DNS points here is not among them, so no foreign page gets at the service by renaming it. Programs send
no Origin; browsers always do.
"""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""With every answer, also with those that refuse."""


class BadOrigin(ValueError):
    """Not an origin."""


class WebRules:
    """For one service."""

    def __init__(self, host: str, origins: Iterable[str] = ()) -> None:
        self.origins: Final = frozenset(map(parse_origin, origins))
        named = {urlsplit(each).hostname or "" for each in self.origins}
        self._names: Final = {"localhost", host.lower(), socket.gethostname().lower(), *named} - {""}

    def why_not(self, hosts: list[str], origins: list[str]) -> str | None:
        """Why a request with these headers is not answered: `host` or `origin`; None when it is."""
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return "host"
        if not origins:
            return None
        try:
            origin = parse_origin(origins[0]) if len(origins) == 1 else ""
        except BadOrigin:
            return "origin"
        own = {f"{scheme}://{_shortened(scheme, hosts[0].lower())}" for scheme in ("http", "https")}
        return None if origin in self.origins | own else "origin"

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            _ = urlsplit(f"//{host}").port
        except ValueError:
            return False
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def parse_origin(text: str) -> str:
    """An origin in its one form, `https://app.example` or with a port; BadOrigin when it is none."""
    try:
        parts = urlsplit(text)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise BadOrigin(f"{text!r} is not an origin") from None
    if not named or text.lower().rstrip("/") != f"{parts.scheme}://{parts.netloc}".lower() or "@" in parts.netloc:
        raise BadOrigin(f"{text!r} is not an origin")
    return f"{parts.scheme}://{_shortened(parts.scheme, parts.netloc.lower())}"


def _shortened(scheme: str, netloc: str) -> str:
    """Without the port that the scheme has anyway."""
    return netloc.removesuffix(":443" if scheme == "https" else ":80")
