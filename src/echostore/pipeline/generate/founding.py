"""The control side of a generated party: the credentials that its founder and members really would have written.

founder's control feed    genesis, profile │ admissions of 32 members each │ removals, proofs of forks
a member's control feed   profile, after its own admission
"""

from collections.abc import Iterable, Sequence
from typing import Final

from echostore.kernel.ids import DeviceKey, FeedKey, IdentityKey, PartyKey
from echostore.kernel.party.credentials import (
    Assertion,
    Claim,
    DeviceAdmit,
    FeedAdmit,
    FeedKind,
    MemberAdmit,
    PartyGenesis,
    Profile,
)
from echostore.kernel.timeframe import Dependency
from echostore.pipeline.generate.feeds import Give, SignedFeed
from echostore.pipeline.generate.keys import Member
from echostore.wire.credentials import sign_credential, with_feed_proof
from echostore.wire.generated import credential_pb2, message_pb2
from echostore.wire.signing import SigningKey

ADMITTED_AT_ONCE: Final = 32
"""Members in one message: four credentials each, half of what a message may hold."""

START_MS: Final = 1_700_000_000_000
"""When generated parties begin: their clocks are counters, so that equal seeds give equal bytes."""


class Founding:
    """The control feeds of one party."""

    def __init__(self, party_key: SigningKey, founder: Member, title: str, give: Give) -> None:
        self.party = PartyKey(party_key.public)
        self.founder = founder
        self._give = give
        self._now_ms = START_MS
        self._chains: dict[bytes, credential_pb2.Credential] = {}
        self.feed = SignedFeed(self.party, founder.control_key, give, control=True)
        self._feeds = [self.feed]
        genesis = PartyGenesis(
            self.party,
            founder.identity,
            founder.device,
            founder.control,
            founder.data,
            title,
            created_ms=START_MS,
        )
        claim = Claim(self.party, founder.identity, DeviceKey(self.party), genesis, issued_ms=START_MS)
        self._write(self.feed, [sign_credential(claim, party_key), self._sign(founder, Profile(founder.name))], ())

    def admit(self, members: Iterable[Member]) -> None:
        """Admit members with their devices and feeds; each then writes its profile."""
        waiting = list(members)
        for start in range(0, len(waiting), ADMITTED_AT_ONCE):
            some = waiting[start : start + ADMITTED_AT_ONCE]
            said = [assertion for member in some for assertion in self._admissions(member)]
            self.issue(said)
            for member in some:
                feed = SignedFeed(self.party, member.control_key, self._give, control=True)
                self._feeds.append(feed)
                self._write(feed, [self._sign(member, Profile(member.name))], [self.feed.mark()])

    def issue(self, assertions: Sequence[Assertion]) -> None:
        """A message of the founder's control feed."""
        self._write(self.feed, [self._sign(self.founder, each) for each in assertions], ())

    def flush(self) -> None:
        for feed in self._feeds:
            feed.flush()

    def _admissions(self, member: Member) -> list[Assertion]:
        admissions: list[Assertion] = [
            MemberAdmit(member.identity, member.role, member.name),
            DeviceAdmit(member.identity, member.device, member.name),
        ]
        for key, kind in ((member.control_key, FeedKind.CONTROL), (member.data_key, FeedKind.DATA)):
            admit = FeedAdmit(FeedKey(key.public), kind, member.identity, member.device)
            admissions.append(with_feed_proof(admit, self.party, key))
        return admissions

    def _sign(self, member: Member, assertion: Assertion) -> credential_pb2.Credential:
        claim = Claim(self.party, member.identity, member.device, assertion, issued_ms=self._now_ms)
        return sign_credential(claim, member.device_key, [self._chain(member)])

    def _chain(self, member: Member) -> credential_pb2.Credential:
        """The identity's word for the device."""
        chain = self._chains.get(member.identity)
        if chain is None:
            admit = DeviceAdmit(member.identity, member.device, member.name)
            claim = Claim(PartyKey(b""), IdentityKey(member.identity), DeviceKey(member.identity), admit)
            chain = self._chains[member.identity] = sign_credential(claim, member.identity_key)
        return chain

    def _write(
        self, feed: SignedFeed, credentials: Sequence[credential_pb2.Credential], after: Sequence[Dependency]
    ) -> None:
        named = feed.fresh(after)
        depth = 1 + max([feed.depth, *[each.depth for each in named]])
        self._now_ms += 1
        payload = message_pb2.Message(
            dependency_feeds=b"".join(each.feed for each in named),
            dependency_seqs=[each.seq for each in named],
            dependency_links=b"".join(each.link_prefix for each in named),
            dependency_depths=[each.depth for each in named],
            depth=depth,
            time_ms=self._now_ms,
            credentials=credentials,
        ).SerializeToString()
        feed.append([payload], [depth])
