"""A hostile member: a hundred thousand frames that no honest peer sends. Nothing crashes, nothing is let in.

The frames go through the real link, session and store; only the socket is left out, so that each costs microseconds.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import echostore
from echostore.kernel.feed import Head
from echostore.kernel.ids import DeviceKey, FeedKey, IdentityKey, PartyKey
from echostore.kernel.ids import Link as BlockLink
from echostore.kernel.sync.frames import (
    Ack,
    AckEntry,
    Announce,
    Blocks,
    FeedTip,
    Frame,
    Hello,
    Refusal,
    RefusalReason,
    Request,
    Tip,
)
from echostore.mesh.connection import Ended
from echostore.mesh.node import Link, Node
from echostore.wire.cids import RAW, cid_of
from echostore.wire.generated import mesh_pb2 as pb
from echostore.wire.mesh import (
    Blob,
    Blobs,
    Goodbye,
    Have,
    Introduction,
    Invitation,
    Leave,
    MeshFrame,
    Offer,
    Parties,
    PartyEntry,
    Ping,
    Pong,
    Reach,
    Roots,
    Seek,
    Sync,
    Want,
    channel_of,
    decode_mesh_frame,
    encode_mesh_frame,
    party_tag,
)
from echostore.wire.sync import MalformedFrame, encode_frame

SEEDS = 8
FRAMES = 100_000 // SEEDS
"""Of each seed; together a hundred thousand. Several tests, so that none is long and all cores share them."""
HASH = bytes(range(32))


class Wire:
    """The end of a connection that leads nowhere: what is sent is counted, what ends it is kept."""

    def __init__(self, remote: DeviceKey) -> None:
        self.remote, self.handshake_hash, self.address, self.writable = remote, HASH, "nowhere:0", True
        self.sent: Counter[str] = Counter()
        self.ended: Ended | None = None
        self.dialled, self.meter = False, None
        self.on_writable: Callable[[bool], None] = lambda writable: None

    def send(self, frame: MeshFrame) -> None:
        self.sent[type(frame).__name__] += 1

    def read_at_once(self, size_bytes: int) -> None:
        pass

    def expect_frame(self, size_bytes: int) -> None:
        pass

    def end(self, ended: Ended) -> None:
        self.ended = self.ended or ended


class Fuzzer:
    """Makes frames: some only bent, some well formed with hostile contents."""

    def __init__(self, seed: int, channel: int, feeds: list[FeedKey]) -> None:
        self.chance = random.Random(seed)
        self.channel, self.feeds = channel, feeds

    def bytes(self, most: int) -> bytes:
        return self.chance.randbytes(self.chance.randrange(most + 1))

    def number(self) -> int:
        return self.chance.choice([0, 1, 2, 7, 63, 2**31, 2**32 - 1, 2**40, 2**63 - 1])

    def key(self) -> FeedKey:
        return self.chance.choice([*self.feeds, FeedKey(self.chance.randbytes(32))])

    def link(self) -> BlockLink:
        return BlockLink(self.chance.randbytes(32))

    def tips(self) -> tuple[FeedTip, ...]:
        kinds = ("control", "data")
        return tuple(
            FeedTip(
                self.key(),
                self.chance.choice(kinds),
                Tip(self.number() % 2**40, self.link()),
                self.chance.random() < 0.2,
            )
            for _ in range(self.chance.randrange(6))
        )

    def sync(self) -> Frame:
        kind = self.chance.randrange(6)
        if kind == 0:
            return Hello(self.chance.choice([1, 1, 1, 2, 0]), self.tips(), (self.chance.randbytes(32),))
        if kind == 1:
            return Announce(self.tips())
        if kind == 2:
            number, limit = self.number(), 1 + self.chance.randrange(2**20)
            return Request(number, self.key(), self.number() % 2**40, limit, limit, self.link())
        if kind == 3:
            payloads = tuple(self.bytes(60) for _ in range(1 + self.chance.randrange(3)))
            start = self.chance.randrange(4)
            head = Head(start + len(payloads), self.link(), self.chance.randbytes(64))
            return Blocks(self.key(), start, payloads, head, self.chance.random() < 0.5)
        if kind == 4:
            return Refusal(self.key(), self.number() % 2**40, self.chance.choice(list(RefusalReason)), self.number())
        entries = tuple(
            AckEntry(self.key(), self.number() % 2**40, self.number() % 2**40, self.link()) for _ in range(3)
        )
        return Ack(entries)

    def mesh(self) -> MeshFrame:
        channel = self.channel if self.chance.random() < 0.9 else self.chance.getrandbits(64)
        kind = self.chance.randrange(16)
        cid = b"\x01\x55\x12\x20" + self.chance.randbytes(32)
        invitation = self.chance.randbytes(16)
        steps: list[pb.MeshInvitation] = [
            pb.MeshInvitation(knock=pb.InvitationKnock(share=self.bytes(40), proof=self.bytes(70))),
            pb.MeshInvitation(share=pb.InvitationShare(share=self.bytes(40), confirm=self.bytes(40))),
            pb.MeshInvitation(confirm=pb.InvitationConfirm(confirm=self.bytes(40))),
            pb.MeshInvitation(request=pb.InvitationRequest(sealed=self.bytes(200))),
            pb.MeshInvitation(welcome=pb.InvitationWelcome(sealed=self.bytes(200))),
            pb.MeshInvitation(refusal=pb.InvitationRefusal(reason=pb.InvitationRefusal.EXPIRED)),
        ]
        choices: list[MeshFrame] = [
            Offer((self.chance.randbytes(32),)),
            Leave(self.chance.getrandbits(64), "gone"),
            Want(channel, (cid,), self.chance.random() < 0.5),  # type: ignore[arg-type]
            Have(channel, (cid,), (cid,)),  # type: ignore[arg-type]
            Blobs(channel, (cid_of(b"x", RAW), cid_of(b"y", RAW)), (b"x", b"y")),
            Invitation(invitation, self.chance.choice(steps)),
            Ping(self.number()),
            Pong(self.number()),
            Goodbye("x", "y"),
            Introduction(IdentityKey(self.chance.randbytes(32)), (self.bytes(150),), self.bytes(64)),
            Parties((PartyEntry(PartyKey(self.chance.randbytes(32)), self.key(), "Bait"),), "x"),
            Reach({DeviceKey(self.chance.randbytes(32)): ("127.0.0.1:1", "nowhere")}),
            Seek(self.chance.randbytes(32), self.chance.choice((b"", self.chance.randbytes(64)))),
            Roots(channel, self.chance.randbytes(16), self.chance.choice((b"", self.bytes(60)))),
        ]
        return choices[kind] if kind < len(choices) else Sync(channel, encode_frame(self.sync()))

    def frame(self) -> bytes:
        style = self.chance.random()
        if style < 0.05:
            return self.bytes(200)
        data = bytearray(encode_mesh_frame(self.mesh()))
        if style < 0.55 or not data:
            return bytes(data)
        for _ in range(1 + self.chance.randrange(3)):
            at = self.chance.randrange(len(data))
            bend = self.chance.randrange(4)
            if bend == 0:
                data[at] ^= 1 << self.chance.randrange(8)
            elif bend == 1:
                del data[at:]
            elif bend == 2:
                data[at:at] = self.bytes(12)
            else:
                data[at:at] = data[: self.chance.randrange(len(data)) + 1]
            if not data:
                break
        return bytes(data)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_hundred_thousand_hostile_frames_change_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with echostore.open(tmp_path / "ann", name="Ann") as ann, echostore.open(tmp_path / "eve", name="Eve") as eve:
        trip = ann.create_party("Trip")
        trip.create("property-set", type="task", n=1)
        trip.members.admit(eve.request_join(trip.key), role="editor")
        trip.flush()
        before = trip.snapshot().cid
        rejected = len(trip.rejected())
        node: Node = ann.network.node
        seen: Counter[str] = Counter()

        async def storm() -> None:
            fuzzer = Fuzzer(
                seed, channel_of(party_tag(HASH, trip.key)), [held.key for held in trip.runtime.feeds.feeds()]
            )
            link, wire = fresh()
            for _ in range(FRAMES):
                if wire.ended is not None:
                    link.stop()
                    link, wire = fresh()
                try:
                    frame: Any = decode_mesh_frame(fuzzer.frame())
                    link.receive(frame)
                    seen["taken"] += 1
                except MalformedFrame:
                    seen["malformed"] += 1
                    wire.end(Ended("malformed"))
                if wire.ended is not None:
                    seen[wire.ended.reason] += 1
            link.stop()

        def fresh() -> tuple[Link, Wire]:
            wire = Wire(DeviceKey(eve.device))
            link = Link(node, wire)  # type: ignore[arg-type]  # all that a link needs of a connection
            link.receive(Offer((party_tag(HASH, trip.key),)))
            assert link.channels, "eve is a member, so her frames reach the session"
            return link, wire

        with contextlib.closing(asyncio.new_event_loop()) as loop:
            loop.run_until_complete(storm())
        assert trip.snapshot().cid == before
        assert len(trip.rejected()) == rejected
        assert len(trip.members.all()) == 2
        assert [known.key for known in ann.parties()] == [trip.key]
        assert seen["taken"] > FRAMES / 4
        assert seen["malformed"] > FRAMES / 50
        trip.create("property-set", type="task", n=2)
        assert trip.query(type="task").count() == 2


def test_a_blob_nobody_asked_for_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOSTORE_STATE", str(tmp_path / "state"))
    with echostore.open(tmp_path / "ann", name="Ann") as ann, echostore.open(tmp_path / "eve", name="Eve") as eve:
        trip = ann.create_party("Trip")
        trip.members.admit(eve.request_join(trip.key), role="editor")
        node: Node = ann.network.node

        async def give() -> Wire:
            wire = Wire(DeviceKey(eve.device))
            link = Link(node, wire)  # type: ignore[arg-type]
            link.receive(Offer((party_tag(HASH, trip.key),)))
            channel = next(iter(link.channels))
            link.receive(Blob(channel, cid_of(b"unasked", RAW), b"unasked"))
            link.receive(Blob(channel, cid_of(b"other", RAW), b"poison"))
            link.stop()
            return wire

        with contextlib.closing(asyncio.new_event_loop()) as loop:
            wire = loop.run_until_complete(give())
        assert wire.ended is not None
        assert wire.ended.reason == "poison"
        assert trip.runtime.blobs is not None
        assert list(trip.runtime.blobs.list()) == []
