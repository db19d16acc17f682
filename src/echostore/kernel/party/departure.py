"""Departure: what of the control feeds proves to a device that it was removed, and nothing beyond.

A removal or a revocation counts with its causal past, so that this past, up to and with the credential itself, is the
proof. What was said after it is none of the departed device's business.
"""

from echostore.kernel.ids import DeviceKey, FeedId
from echostore.kernel.party.ledger import Event, Ledger, group_of


def departure(ledger: Ledger, device: DeviceKey) -> dict[FeedId, int]:
    """How much of each control feed proves that a device does not belong any more; empty when nothing says so."""
    reach: dict[FeedId, int] = {}
    for event in _said(ledger, device):
        for feed in (event.feed, *event.clock):
            reach[feed] = max(reach.get(feed, 0), event.reach(feed))
    return {feed: length for feed, length in reach.items() if length}


def _said(ledger: Ledger, device: DeviceKey) -> list[Event]:
    """The credentials that removed the identities of a device, or groups that they are in, or revoked the device."""
    found: list[Event] = []
    for identity in {identity for identity, each in ledger.device_admits if each == device}:
        found += ledger.device_revokes.get((identity, device), ())
        for subject in (identity, *(group_of(event) for event in ledger.listed.get(identity, ()))):
            found += ledger.removals.get(subject, ())
    return found
