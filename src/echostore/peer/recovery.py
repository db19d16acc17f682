"""Recovery: an identity comes back on an empty machine, from 24 words on paper.

    identity key (32 bytes)  <->  24 words of BIP-39, the last of which holds a checksum

The words are the identity's own key, so that nothing has to be prepared in any party, and a party joined tomorrow comes
back as well. The new machine has a device key of its own. It asks any member that it can reach for the parties; the
identity key signs for the device on that connection, the member gives what it holds, and the device admits itself in each
party by a credential that the identity key signs (`OwnDevices`, `PartyOpener.admit_itself`).

The words are made when they are asked for and kept nowhere. The key is in the key file of the device where the identity
was made, or recovered; `forget_identity_key` takes it off, and then a stolen device can be shut out for good: who has the
identity's key can always let in another device.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from echostore.kernel.errors import EchoError, Refused, Unreachable, UsageError
from echostore.kernel.ids import DeviceKey, IdentityKey, PartyKey
from echostore.mesh.ticket import PREFIX, read_ticket
from echostore.peer.own_devices import check_identity_unused
from echostore.wire.mesh import Parties
from echostore.wire.signing import SigningKey

log = logging.getLogger("echostore.mesh")

if TYPE_CHECKING:
    from mnemonic import Mnemonic

    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

WORDS = 24
FURTHER_MAX = 16
FURTHER_S = 10.0
LAN_S = 10.0
"""How long the local network is looked at."""
"""Devices that the sources tell of are asked at once, so many, and so long."""


def phrase_of(key: SigningKey) -> str:
    """The recovery phrase of an identity key."""
    return str(_words().to_mnemonic(key.seed))


def key_of(phrase: str) -> SigningKey:
    """The identity key in a recovery phrase; UsageError says what is wrong with it, and never repeats a word of it."""
    book = _words()
    known = set(book.wordlist)
    given = [book.expand_word(word) for word in phrase.lower().split()]
    if len(given) != WORDS:
        raise UsageError(f"a recovery phrase has {WORDS} words, this has {len(given)}")
    unknown = [str(place) for place, word in enumerate(given, 1) if word not in known]
    if unknown:
        raise UsageError(
            f"not of the list of words: number {', '.join(unknown)}", next_step="Look for a slip in spelling."
        )
    try:
        return SigningKey(bytes(book.to_entropy(given)))
    except ValueError:
        raise UsageError(
            "these words are no recovery phrase: the checksum does not fit",
            next_step="Look for a wrong or swapped word.",
        ) from None


def recover(
    peer: "Peer",
    phrase: str,
    sources: Iterable[str],
    timeout: float,
    *,
    lan: bool = False,
    interfaces: Sequence[str] = (),
) -> "list[Party]":
    """Make this home a device of the identity in a phrase, and enter the parties that members at `sources` know of.

    A source is an address, or any ticket that a member made. With `lan` and without a source, who knows the identity is
    looked for on the local network (`seeking`), on those of `interfaces`. Again with other sources: what is missing is
    entered.
    """
    wanted = [_source(source) for source in sources]
    key = key_of(phrase)
    myself = peer.myself
    with peer.lock:
        if key.public != peer.identity:
            check_identity_unused(peer)
        if key.public != peer.identity or not myself.holds_identity_key:
            myself.become(IdentityKey(key.public), key=key)
    if not wanted and lan:
        wanted = _neighbours(peer, key, min(timeout, LAN_S), interfaces)
    if not wanted:
        return []
    entered: list[PartyKey] = []
    failures: list[str] = []
    for addresses, device in wanted:
        try:
            answer = _ask(peer, addresses, device, timeout)
        except Refused as refused:  # it answered, and knows nothing of the identity
            log.info("a source knows nothing of the identity", extra={"why": refused.what})
            continue
        except EchoError as error:
            failures.append(error.what)
            continue
        if answer.name:
            myself.take_name(answer.name)
        entered += peer.network.own_devices.enter(answer.entries, again=True)
    for answer in _ask_further(peer, timeout):
        entered += peer.network.own_devices.enter(answer.entries, again=True)
    if len(failures) == len(wanted):
        raise Unreachable(
            "; ".join(failures),
            unchanged="This home has the identity back; its parties are not here yet.",
            next_step="Name a member that runs, and try again.",
        )
    if not entered and not peer.parties():
        raise Refused(
            "nobody who answered is in a party with this identity",
            unchanged="This home has the identity back; its parties are not here yet.",
            next_step="Check the phrase, or name another member.",
        )
    return peer.network.own_devices.settled(entered, timeout)


def _neighbours(
    peer: "Peer", key: SigningKey, seconds: float, interfaces: Sequence[str]
) -> list[tuple[tuple[str, ...], DeviceKey | None]]:
    from echostore.mesh.lan_mdns import check_available

    check_available()
    network = peer.network
    found = network.call(network.own_devices.seeking.find(key, seconds=seconds, interfaces=interfaces), timeout_s=None)
    if not found:
        raise Unreachable(
            "nobody on the local network knows this identity",
            unchanged="This home has the identity back; its parties are not here yet.",
            next_step="Run `echostore serve --lan` on a machine of a member, or name a member.",
        )
    return [((address,), device) for address, device in found]


def _ask(peer: "Peer", addresses: tuple[str, ...], device: DeviceKey | None, timeout: float) -> Parties:
    network = peer.network

    async def ask() -> tuple[Parties, DeviceKey, str]:
        link, address = await network.reach(addresses, device, whom="the member")
        return await network.own_devices.ask(link, prove=True), link.device, address

    answer, found, address = network.call(ask(), timeout)
    network.inviting.remember(found, [address])
    return answer


def _ask_further(peer: "Peer", timeout: float) -> list[Parties]:
    """Ask those of whom the sources have told: other devices of the identity know parties that the sources do not."""
    network = peer.network
    asked = {link.device for link in network.node.links.values()}
    told = {device: each for device, each in network.reach_book.known().items() if device not in asked}

    async def ask(device: DeviceKey, addresses: tuple[str, ...]) -> tuple[Parties, DeviceKey, str] | None:
        try:
            async with asyncio.timeout(min(timeout, FURTHER_S)):
                link, address = await network.reach(addresses, device, whom="the member")
                return await network.own_devices.ask(link, prove=True), device, address
        except (EchoError, TimeoutError) as error:
            log.info("a device was not found", extra={"device": device.hex(), "why": str(error)})
            return None

    async def ask_all() -> list[tuple[Parties, DeviceKey, str] | None]:
        return await asyncio.gather(*(ask(*each) for each in list(told.items())[-FURTHER_MAX:]))

    found = [each for each in network.call(ask_all(), timeout_s=None) if each is not None]
    for _, device, address in found:
        network.inviting.remember(device, [address])
    return [answer for answer, _, _ in found]


def _source(source: str) -> tuple[tuple[str, ...], DeviceKey | None]:
    from echostore.peer.network import parse_address

    if source.strip().lower().startswith(PREFIX):
        ticket = read_ticket(source)
        return ticket.addresses, ticket.host
    parse_address(source)
    return (source,), None


def _words() -> "Mnemonic":
    # Loaded when a phrase is at hand: the list of words is of no use otherwise.
    from mnemonic import Mnemonic

    return Mnemonic("english")
