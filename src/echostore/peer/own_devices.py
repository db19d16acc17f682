"""The devices of one identity: how they know each other, and how all of them get into all of its parties.

    device joins      the ticket's host signs a chain for it; it introduces itself with that chain
    identity returns  a new device has the identity's own key from the recovery phrase; it introduces itself to any member
    party is made     its device tells the others of the identity

Whoever is introduced to answers with the parties that it shares with that identity. A device of the same identity admits
the other one first. The newcomer enters them with feeds of its own, and admits these itself in the first block of its
control feed, as soon as the party's control feeds say that it may (`PartyOpener.admit_itself`).

    phone                                         laptop
    Introduction  identity, chain         ---->   the chain holds, nobody has revoked the phone: DeviceAdmit in every party
                                          <----   Parties
    takes control feeds, then block 0: FeedAdmit, FeedAdmit

A device that was revoked in any party is not told of others. A member that is not of this identity tells its parties, and
gives their blocks, only to a device for which the identity key itself has signed on this very connection: a chain alone
could be that of a device which was revoked where this member does not see it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from echostore.kernel.errors import EchoError, NotFound, Refused, TimedOut, Unreachable, UsageError
from echostore.kernel.ids import DeviceKey, FeedId, IdentityKey, PartyKey
from echostore.kernel.party.credentials import DeviceAdmit
from echostore.mesh.node import Link, Standing
from echostore.peer.identity import Welcome, check_title, read_chain
from echostore.peer.opening import OPENS_ITSELF
from echostore.peer.seeking import Seeking
from echostore.store.meta_store import PartyState
from echostore.wire.credentials import device_vouched
from echostore.wire.mesh import Introduction, MeshFrame, Parties, PartyEntry, Seek, introduction_bytes
from echostore.wire.signing import verify
from echostore.wire.sync import MalformedFrame

if TYPE_CHECKING:
    from echostore.peer.network import Network
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

log = logging.getLogger("echostore.mesh")

ANSWER_S: Final = 20.0
"""How long a device waits for the answer to its introduction."""
FRAMES_MAX: Final = 1_000
"""Introductions and lists on one connection: each costs signatures or a look at every party."""
_SETTING = "own_devices"


class OwnDevices:
    """The other devices of this peer's identity. Handles the introductions on its mesh node, in the node's thread."""

    def __init__(self, peer: "Peer", network: "Network") -> None:
        self._peer, self._network = peer, network
        self._introduced: set[Link] = set()
        self._told: dict[Link, Parties] = {}
        self._answers: dict[Link, asyncio.Future[Parties]] = {}
        self._proven: dict[Link, IdentityKey] = {}
        self._frames: Counter[Link] = Counter()
        self._unsettled = {known.key for known in peer.parties() if peer.meta.setting(OPENS_ITSELF, party=known.key)}
        self.seeking = Seeking(peer, network)

    # who

    def known(self) -> dict[DeviceKey, str]:
        """The other devices of this identity with their names, without those that were revoked anywhere."""
        peer = self._peer
        with peer.lock:
            kept = peer.meta.setting(_SETTING, {}).get(peer.identity.hex(), {})
            found = {DeviceKey(bytes.fromhex(device)): str(name) for device, name in kept.items()}
            revoked: set[DeviceKey] = set()
            for party in self.parties():
                for device in party.runtime.processor.membership.machine.devices:
                    if device.identity == peer.identity:
                        found[device.device] = device.name or found.get(device.device, "")
                        revoked |= {device.device} if device.revoked else set()
            return {device: name for device, name in found.items() if device not in revoked and device != peer.device}

    def remember(self, device: DeviceKey, name: str) -> None:
        """Keep a device of this identity, also while no party tells of it."""
        peer = self._peer
        with peer.lock:
            kept = dict(peer.meta.setting(_SETTING, {}))
            mine = dict(kept.get(peer.identity.hex(), {}))
            if mine.get(device.hex()) != name and (name or device.hex() not in mine):
                mine[device.hex()] = name
                # Those of an identity that this device has left are of no use any more.
                peer.meta.set_setting(_SETTING, {peer.identity.hex(): mine})

    def revoke(self, device: DeviceKey) -> "list[Party]":
        """Revoke a device of this identity in every party where it counts."""
        peer = self._peer
        mine = dict(peer.meta.setting(_SETTING, {}).get(peer.identity.hex(), {}))
        found = [
            party
            for party in self.parties()
            for each in party.runtime.processor.membership.machine.devices
            if each.device == device and each.identity == peer.identity and not each.revoked
        ]
        if not found and device.hex() not in mine:
            raise NotFound(f"no device {device.hex()[:8]} of this identity counts anywhere")
        for party in found:
            party.members.revoke_device(peer.identity, device)
            party.flush()
        if mine.pop(device.hex(), None) is not None:
            peer.meta.set_setting(_SETTING, {peer.identity.hex(): mine})
        return found

    def proven(self, device: DeviceKey, members: Iterable[IdentityKey]) -> bool:
        """Whether one of these identities has signed for the device on its connection."""
        return any(link.device == device and identity in members for link, identity in self._proven.items())

    def trusts(self, link: Link) -> bool:
        """Whether the device may tell where others are: one of this identity, or a member that was asked to help."""
        return link in self._answers or link.device in self.known()

    # from the node

    def receive(self, link: Link, frame: MeshFrame) -> None:
        self._frames[link] += 1
        if self._frames[link] > FRAMES_MAX:
            raise MalformedFrame("introductions without end")
        if isinstance(frame, Introduction):
            self._introduction(link, frame)
        elif isinstance(frame, Parties):
            answer = self._answers.pop(link, None)
            if answer is not None and not answer.done():
                answer.set_result(frame)
            elif link.device in self.known():
                self.enter(frame.entries)
        elif isinstance(frame, Seek):
            self.seeking.receive(link, frame)

    def closed(self, link: Link) -> None:
        self.seeking.closed(link)
        self._introduced.discard(link)
        for kept in (self._told, self._proven, self._frames):
            kept.pop(link, None)
        answer = self._answers.pop(link, None)
        if answer is not None and not answer.done():
            answer.set_exception(Unreachable("the connection was lost", next_step="Try again."))

    def review(self) -> None:
        """Parties, members or connections have changed: settle in, and tell the other devices what is new."""
        with self._peer.lock:
            self._settle()
            links = list(self._network.node.links.values())
            known = self.known() if links else {}  # which opens all parties
            for link in links:
                if link.device in known:
                    self._introduce(link)
                    self._network.reach_book.tell_all(link, IdentityKey(self._peer.identity))
                    self._tell(link, known[link.device])

    def watch(self, party: "Party") -> None:
        """Look again whenever something of a party has come in that this device waits to be admitted to."""

        def processed(moved: set[FeedId]) -> None:
            if party.key in self._unsettled:
                self._network.soon(self.review)

        party.runtime.processor.on_processed.append(processed)

    def _introduction(self, link: Link, frame: Introduction) -> None:
        try:
            chain = read_chain(frame.chain)
        except Refused as refused:
            raise MalformedFrame(refused.what) from None
        if not device_vouched(chain, frame.identity, link.device):
            raise MalformedFrame("an introduction by a chain that does not lead to the device")
        signed = introduction_bytes(link.connection.handshake_hash, frame.identity, link.device)
        if frame.proof and not verify(frame.identity, signed, frame.proof):
            raise MalformedFrame("an introduction that the identity has not signed")
        peer = self._peer
        with peer.lock:
            mine = frame.identity == peer.identity
            if frame.proof:
                self._proven[link] = frame.identity
            if mine and not self._revoked(link.device):
                self.remember(link.device, "")
                self._introduce(link)
                self._network.reach_book.tell_all(link, frame.identity)
                self._tell(link, self.known().get(link.device, ""), answer=True)
            elif frame.proof:
                self._network.reach_book.tell_all(link, frame.identity)  # first: the answer ends the asking
                link.connection.send(self._shared_with(frame.identity, link.device))
            else:
                link.connection.send(Parties(()))
                log.warning("an introduction was turned away", extra={"device": link.device.hex()})
        link.review()

    # telling

    def _introduce(self, link: Link) -> None:
        if link not in self._introduced:
            self._introduced.add(link)
            link.connection.send(self._introduction_of_this(link))

    def _introduction_of_this(self, link: Link, *, prove: bool = False) -> Introduction:
        myself = self._peer.myself
        signed = introduction_bytes(link.connection.handshake_hash, myself.identity, myself.device)
        proof = myself.identity_key.sign(signed) if prove else b""
        return Introduction(myself.identity, tuple(each.SerializeToString() for each in myself.chain()), proof)

    def _tell(self, link: Link, name: str, *, answer: bool = False) -> None:
        """Admit a device of this identity where it is not yet, and tell it the parties."""
        admitted = [self._admit(party, link.device, name) for party in self.parties()]
        if any(admitted):
            link.review()  # no feed was admitted, so nobody else looks at the connection again
        parties = self._shared_with(IdentityKey(self._peer.identity), link.device)
        if answer or self._told.get(link) != parties:
            self._told[link] = parties
            link.connection.send(parties)

    def _admit(self, party: "Party", device: DeviceKey, name: str) -> bool:
        """Admit a device of this identity to a party; False when it is admitted already, or can't be from here."""
        peer, runtime = self._peer, party.runtime
        machine = runtime.processor.membership.machine
        if any(each.device == device and each.identity == peer.identity for each in machine.devices):
            return False
        own = runtime.control
        admitted = own is not None and own.feed in runtime.processor.admission.by_id
        if not admitted or not any(each.identity == peer.identity and each.role for each in machine.members):
            return False
        try:
            party.members.issue_claim(DeviceAdmit(IdentityKey(peer.identity), device, name))
        except EchoError as error:
            log.warning("a device could not be admitted", extra={"party": party.key.hex(), "why": error.what})
            return False
        return True

    def _shared_with(self, identity: IdentityKey, device: DeviceKey) -> Parties:
        entries, names = [], []
        for party in self.parties():
            machine = party.runtime.processor.membership.machine
            member = next((each for each in machine.members if each.identity == identity and each.role), None)
            if member is None or machine.genesis is None or self._network.standing(party.key, device) is not _MEMBER:
                continue
            entries.append(PartyEntry(party.key, machine.genesis.control_feed, party.title))
            names.append(member.name)
        return Parties(tuple(entries), next((name for name in names if name), ""))

    def identities(self) -> set[IdentityKey]:
        """This peer's identity, and those of the members of its parties."""
        with self._peer.lock:
            found = {IdentityKey(self._peer.identity)}
            for party in self.parties():
                members = party.runtime.processor.membership.machine.members
                found |= {member.identity for member in members if member.role}
            return found

    def parties(self) -> "list[Party]":
        """Parties with members of their own that are open here."""
        found = []
        for known in self._peer.parties():
            if known.state in (PartyState.ACTIVE, PartyState.PAUSED) and not known.local and known.child_of is None:
                try:
                    found.append(self._peer.held(known.key))
                except EchoError as error:  # damaged: `status` and `doctor` say so
                    log.info("a party is left out", extra={"party": known.key.hex(), "why": error.what})
        return found

    def _revoked(self, device: DeviceKey) -> bool:
        return any(
            each.revoked and each.device == device and each.identity == self._peer.identity
            for party in self.parties()
            for each in party.runtime.processor.membership.machine.devices
        )

    # entering

    def enter(self, entries: Iterable[PartyEntry], *, again: bool = False) -> list[PartyKey]:
        """Enter parties of this identity that are not here; with `again`, also those that were forgotten here."""
        peer = self._peer
        entered = []
        with peer.lock:
            here = {known.key for known in peer.meta.parties(forgotten=not again)}
            for entry in entries:
                if entry.party not in here:
                    here.add(entry.party)
                    self._unsettled.add(entry.party)
                    peer.enter_as_device(Welcome(entry.party, entry.genesis_feed, _title(entry)))
                    entered.append(entry.party)
        return entered

    def _settle(self) -> None:
        """Admit this device's feeds in the parties that it has just entered, where control allows it by now."""
        done = set()
        for key in self._unsettled:
            try:
                party = self._peer.held(key)
                if self._peer.opener.admit_itself(party):
                    done.add(key)
                    party.notify()
                    self._network.bootstraps.consider(party)  # an own block moves nothing that it hears of
            except EchoError as error:
                log.info("a party is not entered yet", extra={"party": key.hex(), "why": error.what})
        self._unsettled -= done

    def settled(self, entered: Iterable[PartyKey], timeout: float | None) -> "list[Party]":
        """Parties that were just entered, once this device may use all of them and others know it; at once without a timeout."""
        parties = [self._peer.held(key) for key in entered]
        if timeout is not None:
            deadline = time.monotonic() + timeout
            for party in parties:
                party.wait_admitted(max(0.0, deadline - time.monotonic()))
            for party in parties:
                party.wait_arrived(max(0.0, deadline - time.monotonic()))
        return parties

    # asking

    async def ask(self, link: Link, *, prove: bool) -> Parties:
        """Introduce this device to another one and wait for its parties."""
        answer: asyncio.Future[Parties] = asyncio.get_running_loop().create_future()
        self._answers[link] = answer
        self._introduced.add(link)
        link.connection.send(self._introduction_of_this(link, prove=prove))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise TimedOut(
                "the other peer did not answer", unchanged="This device acts for the identity.", next_step="Try again."
            ) from None
        finally:
            self._answers.pop(link, None)


_MEMBER = Standing.MEMBER


def check_identity_unused(peer: "Peer") -> None:
    """Refused when this home's identity is in a party: it would be lost there."""
    used = [known for known in peer.meta.parties(forgotten=True) if not known.local]
    for known in peer.parties():
        if known.local and known.state is not PartyState.CLOSED:
            members = peer.held(known.key).members.all()
            used += [known] if any(member.identity == peer.identity for member in members) else []
    if used:
        raise Refused(
            f"this home has an identity of its own, which is or was in {len(used)} "
            f"{'party' if len(used) == 1 else 'parties'}",
            next_step="Use an empty home: --home DIR.",
        )


def _title(entry: PartyEntry) -> str:
    try:
        check_title(entry.title)
    except UsageError:
        return entry.party.hex()[:8]
    return entry.title


def devices_shown(peer: "Peer") -> dict[bytes, Any]:
    """Names of this identity's other devices that only this home knows of; works on a home that is open read-only."""
    kept: dict[str, str] = peer.meta.setting(_SETTING, {}).get(peer.identity.hex(), {})
    return {bytes.fromhex(device): name for device, name in kept.items()}
