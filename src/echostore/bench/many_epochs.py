"""A party of many devices and many epochs, each attested by all of them, as one peer has it on disk.

The other devices are keys alone: their control feeds are written here, block by block, as their programs would.
"""

from pathlib import Path

from echostore.kernel.feed import Head
from echostore.kernel.ids import DeviceKey, FeedKey, IdentityKey, PartyKey, feed_id
from echostore.kernel.order import CONTROL, FeedCursor
from echostore.kernel.party.credentials import Claim, DeviceAdmit, EpochAttest, FeedAdmit, FeedKind
from echostore.peer.epochs import Epochs
from echostore.peer.identity import JoinRequest
from echostore.peer.party import Party
from echostore.peer.peer import open_peer
from echostore.peer.positions import dependencies
from echostore.store.feed_store import Ingested
from echostore.wire.credentials import sign_credential, with_feed_proof
from echostore.wire.generated import message_pb2
from echostore.wire.links import block_link, head_bytes, payload_hash
from echostore.wire.signing import SigningKey, verify


class Voter:
    """A member whose device is a key: it attests what the party declares."""

    def __init__(self, party: Party, name: str) -> None:
        self._identity, self._device, self._control = (SigningKey.generate() for _ in range(3))
        data = SigningKey.generate()
        identity, device = IdentityKey(self._identity.public), DeviceKey(self._device.public)
        control, writing = (
            with_feed_proof(FeedAdmit(FeedKey(key.public), kind, identity, device), party.key, key)
            for key, kind in ((self._control, FeedKind.CONTROL), (data, FeedKind.DATA))
        )
        vouching = Claim(PartyKey(b""), identity, DeviceKey(identity), DeviceAdmit(identity, device, name))
        chain = (sign_credential(vouching, self._identity).SerializeToString(),)
        proven = (control.feed, control.proof, writing.feed, writing.proof)
        party.members.admit(JoinRequest(party.key, identity, device, name, *proven, chain))
        self.feed = control.feed

    @property
    def identity(self) -> IdentityKey:
        return IdentityKey(self._identity.public)

    def speak(self, party: Party, said: EpochAttest) -> None:
        """One block to a peer, which names all control messages that the peer has processed."""
        processor = party.runtime.processor
        cursor = processor.orderer.cursors.get(feed_id(self.feed)) or FeedCursor(self.feed, CONTROL)
        seen = dependencies(
            processor.orderer, processor.admission, processor.admission, cursor, processor.orderer.cursors
        )
        depth = 1 + max([cursor.depth, *(each.depth for each in seen)])
        claim = Claim(party.key, self.identity, DeviceKey(self._device.public), said)
        payload = message_pb2.Message(
            depth=depth,
            credentials=[sign_credential(claim, self._device)],
            dependency_feeds=b"".join(each.feed for each in seen),
            dependency_seqs=[each.seq for each in seen],
            dependency_links=b"".join(each.link_prefix for each in seen),
            dependency_depths=[each.depth for each in seen],
        ).SerializeToString()
        length = cursor.length + 1
        link = block_link(self.feed, cursor.length, cursor.link, payload_hash(payload))
        head = Head(length, link, self._control.sign(head_bytes(party.key, self.feed, length, link)))
        feeds = party.runtime.feeds
        feeds.add_feed(self.feed, "control")
        held = feeds.ingest(self.feed, length - 1, [payload], head, verify, durable=False)
        assert isinstance(held, Ingested), held
        processor.grown(self.feed, length - 1, [link], [payload])


def make_party(home: Path, *, devices: int, epochs: int) -> None:
    """A party of so many devices, with so many epochs that all of them attested."""
    with open_peer(home, name="bench", background=False) as peer:
        party = peer.create_party("bench")
        party.create("property-set", type="task", done=0)
        voters = [Voter(party, f"device {number}") for number in range(1, devices)]
        add_epochs(party, voters, epochs)


def add_epochs(party: Party, voters: list[Voter], epochs: int) -> None:
    """Epochs that all attest, with one change before each."""
    (item,) = party.query(type="task").all()
    for _ in range(epochs):
        item["done"] += 1
        Epochs(party).create()
        newest = party.runtime.processor.membership.machine.epoch_tally().latest
        assert newest is not None
        for voter in voters:
            voter.speak(party, EpochAttest(newest.number, newest.hash, newest.genesis.snapshot))
    party.flush()
