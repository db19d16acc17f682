"""Histories of `dag_story` with real bytes: payloads, links, signed heads and credentials, as rows of a block lake.

    story = SignedStory("seed", feeds=5, control=2)      # a party; its founder's control feed admits all feeds
    story.tell(chance, steps=40, forks=1)                # honest blocks
    story.lie(chance)                                    # a block that no honest program writes
    rows = story.rows(held)                              # what a lake holds, by (feed id, branch) -> length

`outcome(held)` is the slow orderer's word on the same blocks.
"""

import hashlib
import random
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from dag_story import History, Mind, name
from echostore.kernel.ids import NO_LINK, DeviceKey, FeedId, FeedKey, IdentityKey, Link, PartyKey
from echostore.kernel.order import CONTROL, DATA, Envelope
from echostore.kernel.party.credentials import Assertion, Claim, FeedAdmit, FeedKind, PartyGenesis
from echostore.kernel.reasons import Reason
from echostore.kernel.timeframe import Dependency
from echostore.pipeline import schemas
from echostore.wire.credentials import sign_credential, with_feed_proof
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.links import block_link, head_bytes, payload_hash
from echostore.wire.messages import decode_envelope
from echostore.wire.signing import SigningKey
from reference.orderer import Block, Outcome, settle

Held = Mapping[tuple[FeedId, int], int]


class SignedMind(Mind):
    """A writer whose blocks are bytes. `payloads` and `links` are those of `blocks`."""

    def begin(self, secret: SigningKey, payloads: Iterable[bytes] = ()) -> "SignedMind":
        self.secret, self.payloads = secret, list(payloads)
        return self

    def append(self, dependencies: tuple[Dependency, ...], depth: int, fault: Reason | None = None) -> Block:
        return self.append_payload(message(dependencies, depth, note=f"{self.branch}").SerializeToString())

    def append_payload(self, payload: bytes) -> Block:
        before = Link(self.blocks[-1].link) if self.blocks else NO_LINK
        link = block_link(self.key, len(self.blocks), before, payload_hash(payload))
        read = decode_envelope(payload, self.kind)
        if isinstance(read, Envelope):
            block = Block(link, read.dependencies, read.depth)
        else:
            block = Block(link, (), self.depth + 1, read)
        self.blocks.append(block)
        self.payloads.append(payload)
        for dependency in block.dependencies:
            self.asserted[dependency.feed] = dependency
        return block


def message(dependencies: Iterable[Dependency], depth: int, *, note: str = "", **fields: Any) -> pb.Message:
    found = pb.Message(depth=depth, time_ms=1_700_000_000_000, **fields)
    for dependency in dependencies:
        found.dependency_feeds += dependency.feed
        found.dependency_seqs.append(dependency.seq)
        found.dependency_links += dependency.link_prefix
        found.dependency_depths.append(dependency.depth)
    if note:
        found.undoes = 1 + int.from_bytes(note.encode()[:4], "big")
    return found


class SignedStory(History):
    """One party. Mind 0 is the founder's control feed; `unadmitted` data feeds come last."""

    def __init__(self, seed: str, feeds: int, *, control: int = 1, unadmitted: int = 0) -> None:
        super().__init__(0)
        self.seed = seed
        self._party_key, self._device_key = self._key("party"), self._key("device")
        self.party = PartyKey(self._party_key.public)
        self.unadmitted: set[FeedId] = set()
        for number in range(feeds + unadmitted):
            secret = self._key(f"feed {number}")
            kind = CONTROL if number < control else DATA
            self.minds.append(SignedMind(FeedKey(secret.public), kind).begin(secret))
        self.founder = self.minds[0]
        self.unadmitted = {mind.id for mind in self.minds[feeds:]}
        self._write_genesis(self.minds[1:feeds])

    def _key(self, name: str) -> SigningKey:
        return SigningKey.from_seed(hashlib.sha256(f"{self.seed}/{name}".encode()).digest())

    def _write_genesis(self, admitted: list[Mind]) -> None:
        me, device = IdentityKey(self._device_key.public), DeviceKey(self._device_key.public)
        first = next((mind for mind in admitted if mind.kind == DATA), self.founder)
        genesis = PartyGenesis(self.party, me, device, self.founder.key, first.key, "Trip", created_ms=1)
        claim = Claim(self.party, me, DeviceKey(self.party), genesis, issued_ms=1)
        credentials = [sign_credential(claim, self._party_key)]
        for mind in admitted:
            if mind is not first:
                kind = FeedKind.CONTROL if mind.kind == CONTROL else FeedKind.DATA
                admit = with_feed_proof(FeedAdmit(mind.key, kind, me, device), self.party, mind.secret)
                credentials.append(self.signed(admit))
        self.register(self.founder, message((), 1, credentials=credentials).SerializeToString())

    def signed(self, assertion: Assertion) -> Any:
        """A credential of the founder."""
        device = DeviceKey(self._device_key.public)
        return sign_credential(Claim(self.party, IdentityKey(device), device, assertion, issued_ms=2), self._device_key)

    def issue(self, *assertions: Assertion) -> Block:
        """A control message of the founder with credentials."""
        dependencies = tuple(self.news(self.founder))
        depth = 1 + max([self.founder.depth, *(dependency.depth for dependency in dependencies)])
        credentials = [self.signed(assertion) for assertion in assertions]
        return self.register(self.founder, message(dependencies, depth, credentials=credentials).SerializeToString())

    def fork(self, mind: Mind) -> Mind:
        other = SignedMind(
            mind.key, mind.kind, 1, list(mind.blocks), dict(mind.asserted), set(mind.past), dict(mind.sides)
        )
        self.minds.append(other.begin(mind.secret, mind.payloads))
        return other

    def register(self, mind: Mind, payload: bytes) -> Block:
        """A block by its bytes; others may process it like any."""
        before = mind.blocks[-1].link if mind.blocks else None
        block = mind.append_payload(payload)
        self.places[block.link] = (mind, len(mind.blocks) - 1)
        own = self.pasts[before] | {before} if before is not None else frozenset()
        self.pasts[block.link] = frozenset(mind.past) | own
        mind.past.add(block.link)
        return block

    def tell(self, chance: random.Random, *, steps: int, forks: int = 0, reads: int = 3) -> None:
        """Honest steps: a random writer reads some places of others and writes."""
        when = {chance.randrange(1, max(2, steps)) for _ in range(forks)}
        for step in range(steps):
            if step in when:
                mind = chance.choice([mind for mind in self.minds if mind is not self.founder])
                if mind.blocks and not self._forked(mind.id):
                    self.fork(mind)
            writer = chance.choice(self.minds)
            for _ in range(chance.randrange(reads + 1)):
                other = chance.choice(self.minds)
                self.process(writer, other, chance.randrange(len(other.blocks) + 1))
            self.write(writer)

    def lie(self, chance: random.Random) -> str:
        """One bad block of a random writer, which goes on as if nothing had happened."""
        writer = chance.choice(self.minds[1:])
        lies = sorted(LIES)
        kind = chance.choice(lies)
        payload = LIES[kind](self, writer, chance)
        if payload is None:
            return "none"
        self.register(writer, payload)
        return kind

    # what is held

    def lengths(self, chance: random.Random | None = None) -> dict[tuple[FeedId, int], int]:
        """All blocks; or, with chance, less of some feeds. A branch of a fork keeps at least one block of its own."""
        found = {}
        for mind in self.minds:
            length = len(mind.blocks)
            if chance is not None and length and chance.random() < 0.4 and mind is not self.founder:
                length = chance.randrange(length + 1)
            found[mind.id, mind.branch] = length
        return found

    def outcome(self, held: Held) -> Outcome:
        """The slow orderer's word. Feeds of which nothing is held, and unadmitted ones, are not followed."""
        known = [
            feed
            for feed in self.feeds(dict(held))
            if feed.id not in self.unadmitted and (feed.kind == DATA or any(feed.branches))
        ]
        return settle(known)

    def rows(
        self, held: Held, *, start: Held | None = None, chance: random.Random | None = None
    ) -> list[dict[str, Any]]:
        """Rows of `schemas.BLOCKS` of what is held, from `start` on, signed at the end and here and there before it."""
        runs = []
        for mind in self.minds:
            length = held[mind.id, mind.branch]
            first = (start or {}).get((mind.id, mind.branch), 0)
            if mind.branch:
                first = max(first, self._fork_at(mind))
            if first < length:
                runs.append(
                    (mind.kind != CONTROL, mind.key, mind.branch, _run(self.party, mind, first, length, chance))
                )
        return [row for _, _, _, rows in sorted(runs, key=lambda run: run[:3]) for row in rows]

    def _fork_at(self, branch: Mind) -> int:
        main = next(mind for mind in self.minds if mind.id == branch.id and mind.branch == 0)
        at = 0
        while at < min(len(main.blocks), len(branch.blocks)) and main.blocks[at].link == branch.blocks[at].link:
            at += 1
        return at


def head_signature(party: PartyKey, mind: Mind, length: int) -> bytes:
    return mind.secret.sign(head_bytes(party, mind.key, length, Link(mind.blocks[length - 1].link)))


def _run(party: PartyKey, mind: Mind, first: int, length: int, chance: random.Random | None) -> list[dict[str, Any]]:
    rows = []
    for seq in range(first, length):
        block = mind.blocks[seq]
        signed = seq == length - 1 or (chance is not None and chance.random() < 0.3)
        before = (mind.blocks[seq - 1].link if seq else NO_LINK) if seq == first else None
        rows.append(
            {
                "party": party,
                "feed": mind.key,
                "control": mind.kind == CONTROL,
                "seq": seq,
                "link": block.link,
                "depth": 0 if block.fault is not None else block.depth,
                "payload": mind.payloads[seq],
                "signature": head_signature(party, mind, seq + 1) if signed else None,
                "previous": before,
                "previous_depth": (mind.blocks[seq - 1].depth if seq else 0) if seq == first else None,
            }
        )
    return rows


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schemas.BLOCKS)


# Lies: (story, writer, chance) -> payload, or None where there is nothing to lie about


def _honest(story: SignedStory, writer: Mind) -> tuple[list[Dependency], int]:
    dependencies = list(story.news(writer))
    return dependencies, 1 + max([writer.depth, *(dependency.depth for dependency in dependencies)])


def _any_other(story: SignedStory, writer: Mind, chance: random.Random) -> Dependency | None:
    """A block of another feed that the writer has not named yet."""
    found = []
    for mind in story.minds:
        known = writer.asserted.get(mind.id)
        first = known.seq + 1 if known else 0
        if mind.id != writer.id and mind.kind in (CONTROL, writer.kind) and first < len(mind.blocks):
            found.append(name(mind, chance.randrange(first, len(mind.blocks))))
    return chance.choice(found) if found else None


def _with_changed(change: Any, more: int = 0) -> Any:
    def lie(story: SignedStory, writer: Mind, chance: random.Random) -> bytes | None:
        other = _any_other(story, writer, chance)
        if other is None:
            return None
        named = {dependency.feed: dependency for dependency in story.news(writer)}
        named[other.feed] = change(other)
        depth = 1 + more + max([writer.depth, *(dependency.depth for dependency in named.values())])
        return message([named[feed] for feed in sorted(named)], depth).SerializeToString()

    return lie


def _plain(**fields: Any) -> Any:
    def lie(story: SignedStory, writer: Mind, chance: random.Random) -> bytes:
        dependencies, depth = _honest(story, writer)
        return message(dependencies, fields.get("depth", depth + fields.get("more", 0))).SerializeToString()

    return lie


def _backwards(story: SignedStory, writer: Mind, chance: random.Random) -> bytes | None:
    if not writer.asserted:
        return None
    known = chance.choice(sorted(writer.asserted.values()))
    named = {dependency.feed: dependency for dependency in story.news(writer)}
    named[known.feed] = known
    depth = 1 + max([writer.depth, *(dependency.depth for dependency in named.values())])
    return message([named[feed] for feed in sorted(named)], depth).SerializeToString()


def _own(story: SignedStory, writer: Mind, chance: random.Random) -> bytes | None:
    if not writer.blocks:
        return None
    return message([name(writer, len(writer.blocks) - 1)], writer.depth + 1).SerializeToString()


def _unknown_feed(story: SignedStory, writer: Mind, chance: random.Random) -> bytes:
    named = sorted([*story.news(writer), Dependency(FeedId(chance.randbytes(8)), 3, bytes(16), 1)])
    depth = 1 + max([writer.depth, *(dependency.depth for dependency in named)])
    return message(named, depth).SerializeToString()


def _wrong_kind(story: SignedStory, writer: Mind, chance: random.Random) -> bytes:
    dependencies, depth = _honest(story, writer)
    found = message(dependencies, depth)
    if writer.kind == CONTROL:
        found.operations.add(local=1)
    else:
        found.credentials.add(claim=b"x")
    return found.SerializeToString()


def _names_data(story: SignedStory, writer: Mind, chance: random.Random) -> bytes | None:
    data = [mind for mind in story.minds if mind.kind == DATA and mind.blocks]
    if writer.kind != CONTROL or not data:
        return None
    named = name(chance.choice(data), 0)
    return message([named], 1 + max(writer.depth, named.depth)).SerializeToString()


def _garbage(story: SignedStory, writer: Mind, chance: random.Random) -> bytes:
    return b"\xff\xff\xff" + chance.randbytes(4)


def _nested_garbage(story: SignedStory, writer: Mind, chance: random.Random) -> bytes:
    dependencies, depth = _honest(story, writer)
    return message(dependencies, depth).SerializeToString() + b"\x3a\x02\x1a\x05"  # an operation cut short


def _crooked(story: SignedStory, writer: Mind, chance: random.Random) -> bytes:
    dependencies, depth = _honest(story, writer)
    found = message(dependencies, depth)
    found.dependency_links += b"x"
    return found.SerializeToString()


def _twice(story: SignedStory, writer: Mind, chance: random.Random) -> bytes:
    """No lie: the depth is written twice, and the last one counts."""
    dependencies, depth = _honest(story, writer)
    return pb.Message(depth=7).SerializeToString() + message(dependencies, depth).SerializeToString()


def _twice_false(story: SignedStory, writer: Mind, chance: random.Random) -> bytes:
    dependencies, depth = _honest(story, writer)
    return message(dependencies, depth).SerializeToString() + pb.Message(depth=depth + 1).SerializeToString()


def _unordered(story: SignedStory, writer: Mind, chance: random.Random) -> bytes | None:
    dependencies, depth = _honest(story, writer)
    if len(dependencies) < 2:
        return None
    return message(dependencies[::-1], depth).SerializeToString()


LIES: dict[str, Any] = {
    "depth too great": _plain(more=1),
    "depth too small": _plain(more=-1),
    "no depth": _plain(depth=0),
    "absurd depth": _plain(depth=(1 << 60)),
    "depth of another wrong": _with_changed(lambda named: named._replace(depth=named.depth + 1)),
    "depth of another absurd": _with_changed(lambda named: named._replace(depth=(1 << 64) - 2)),
    "another content": _with_changed(lambda named: named._replace(link_prefix=bytes(16))),
    "the future": _with_changed(lambda named: named._replace(seq=named.seq + 1000)),
    "the future, and too deep": _with_changed(lambda named: named._replace(seq=named.seq + 1000), more=1),
    "no such seq": _with_changed(lambda named: named._replace(seq=(1 << 50))),
    "backwards": _backwards,
    "own feed": _own,
    "unknown feed": _unknown_feed,
    "wrong kind": _wrong_kind,
    "control names data": _names_data,
    "garbage": _garbage,
    "garbage inside": _nested_garbage,
    "crooked columns": _crooked,
    "depth twice": _twice,
    "depth twice, false": _twice_false,
    "unordered": _unordered,
}
