"""Under which addresses others can reach this machine: what stands in a ticket when a peer listens everywhere."""

import socket
from collections.abc import Iterable

from echostore.peer.network import parse_address

_ANYWHERE = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}
_FAR_AWAY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of documentation: choosing a way to them tells the own address, and nothing is sent."""


def reachable_addresses(listening: Iterable[str]) -> tuple[str, ...]:
    """The addresses to tell others; one that means "all of this machine" is replaced by those that it has."""
    found: dict[str, None] = {}
    for address in listening:
        host, port = parse_address(address)
        family = _ANYWHERE.get(host)
        for each in [host] if family is None else own_hosts(family):
            found[f"[{each}]:{port}" if ":" in each else f"{each}:{port}"] = None
    return tuple(found)


def own_hosts(family: socket.AddressFamily) -> list[str]:
    """This machine's own addresses, the one towards the world first; the loopback when there is no other."""
    found: dict[str, None] = {}
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_FAR_AWAY[family], 9))
            found[str(probe.getsockname()[0])] = None
        except OSError:
            found = {}  # no way out of this machine
    try:
        named = socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_STREAM)
    except OSError:
        named = []  # the machine's own name leads nowhere
    for entry in named:
        found[str(entry[4][0])] = None
    outside = [host for host in found if not host.startswith("127.") and host != "::1" and "%" not in host]
    return outside or (["127.0.0.1"] if family == socket.AF_INET else ["::1"])
