"""Agreement on epochs, told a second time and slowly: from the set of control messages alone.

Written from the design and the fault model, not from the product: nothing of `echostore` is imported but the values that
messages are made of. Every question walks over all messages; an answer is kept only to give the same one again.

    oracle = EpochOracle(messages)
    oracle.chain()               which genesis names each number, from 1 on
    oracle.final(genesis)        a quorum attested it, or something that rests on it
    oracle.joinable()            the newest that somebody believes who can't recompute
    oracle.truncatable()         the newest below which feeds may be cut off
    oracle.may_attest(...)       whether an honest member stands for it, given how it voted before

It is about epochs. Of membership it knows what these need, and takes for granted that only the founder, with one control
feed, admits, removes, retires and sets policy (`party_machine` is the reference for the rest), that nobody comes back,
and that an identity has one control feed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

from echostore.kernel.ids import FeedKey, IdentityKey, feed_id
from echostore.kernel.party.credentials import (
    Assertion,
    Claim,
    ControlMessage,
    DeviceAdmit,
    EpochAttest,
    EpochDispute,
    EpochGenesis,
    FeedAdmit,
    FeedKind,
    FeedRetire,
    MemberAdmit,
    MemberRemove,
    PartyGenesis,
    Policy,
    Role,
    RoleChange,
    TimeframeEntry,
)

JOIN_FROM_DEVICES = 3
P = ParamSpec("P")
R = TypeVar("R")


def remembered(method: Callable[P, R]) -> Callable[P, R]:
    """Work an answer out once: the set of messages does not change under an oracle."""

    @wraps(method)
    def answer(*args: P.args, **kwargs: P.kwargs) -> R:
        oracle: Any = args[0]
        question = (method.__name__, *args[1:])
        if question not in oracle.answers:
            oracle.answers[question] = method(*args, **kwargs)
        found: R = oracle.answers[question]
        return found

    return answer


@dataclass(frozen=True, eq=False)
class Said:
    """One credential and its place."""

    message: ControlMessage
    position: int
    claim: Claim
    hash: bytes

    @property
    def what(self) -> Assertion:
        return self.claim.assertion

    @property
    def who(self) -> IdentityKey:
        return self.claim.issuer

    def before(self, other: "Said") -> bool:
        """Whether this happened before the other, as far as the other's writer shows."""
        if self.message.feed == other.message.feed:
            return (self.message.seq, self.position) < (other.message.seq, other.position)
        return self.message.seq <= other.message.clock.get(self.message.feed, -1)


class EpochOracle:
    """See the module."""

    def __init__(self, messages: Iterable[ControlMessage]) -> None:
        self.answers: dict[tuple[Any, ...], Any] = {}
        self.said: list[Said] = []
        for message in sorted(messages, key=lambda each: (each.depth, each.feed_key, each.seq)):
            for position, credential in enumerate(message.credentials):
                assert credential.claim is not None
                self.said.append(Said(message, position, credential.claim, credential.hash))
        self.party = next(said for said in self.said if isinstance(said.what, PartyGenesis))
        self.founder = self.party.who
        self.geneses = {said.hash: said for said in self.said if isinstance(said.what, EpochGenesis)}

    # membership, as seen from a place (None: from everywhere)

    @remembered
    def _orders(self, at: Said | None) -> list[Said]:
        """What the founder has said about others, as far as it is in the past of a place."""
        return [said for said in self.said if said.who == self.founder and (at is None or said.before(at))]

    @remembered
    def member(self, identity: IdentityKey, at: Said | None) -> bool:
        if identity == self.founder:
            return True
        orders = [said.what for said in self._orders(at)]
        admitted = any(isinstance(what, MemberAdmit) and what.member == identity for what in orders)
        return admitted and not any(isinstance(what, MemberRemove) and what.member == identity for what in orders)

    @remembered
    def role(self, identity: IdentityKey, at: Said | None) -> Role | None:
        if identity == self.founder:
            return Role.OWNER
        if not self.member(identity, at):
            return None
        role = None
        for said in self._orders(at):
            if isinstance(said.what, MemberAdmit | RoleChange) and said.what.member == identity:
                role = said.what.role
        return role

    @remembered
    def control_feeds(self, identity: IdentityKey, at: Said | None) -> set[FeedKey]:
        """Its admitted control feeds that are not retired."""
        feeds: set[FeedKey] = set()
        if identity == self.founder:
            assert isinstance(self.party.what, PartyGenesis)
            feeds.add(self.party.what.control_feed)
        for said in self._orders(at):
            what = said.what
            if isinstance(what, FeedAdmit) and what.identity == identity and what.kind is FeedKind.CONTROL:
                feeds.add(what.feed)
            elif isinstance(what, FeedRetire):
                feeds.discard(what.feed)
        return feeds

    @remembered
    def silenced(self, identity: IdentityKey, at: Said | None) -> bool:
        """Whether it had data feeds, and each of them was retired."""
        feeds: set[FeedKey] = set()
        if identity == self.founder:
            assert isinstance(self.party.what, PartyGenesis)
            feeds.add(self.party.what.data_feed)
        orders = [said.what for said in self._orders(at)]
        for what in orders:
            if isinstance(what, FeedAdmit) and what.identity == identity and what.kind is FeedKind.DATA:
                feeds.add(what.feed)
        retired = {what.feed for what in orders if isinstance(what, FeedRetire)}
        return bool(feeds) and feeds <= retired

    @remembered
    def voters(self, at: Said | None) -> set[IdentityKey]:
        """Members with a control feed that is not retired: they may say something yet."""
        everybody = {self.founder} | {said.what.member for said in self.said if isinstance(said.what, MemberAdmit)}
        return {each for each in everybody if self.member(each, at) and self.control_feeds(each, at)}

    @remembered
    def electorate(self, at: Said | None) -> set[IdentityKey]:
        """Those of them who were not silenced: an epoch does not wait for who went away."""
        return {each for each in self.voters(at) if not self.silenced(each, at)}

    def devices(self) -> int:
        """Devices of members, for the joiner's rule."""
        orders = [said.what for said in self._orders(None)]
        return 1 + sum(isinstance(what, DeviceAdmit) and self.member(what.identity, None) for what in orders)

    @remembered
    def policy(self, at: Said | None) -> dict[str, bytes]:
        settings: dict[str, bytes] = {}
        for said in self._orders(at):
            if isinstance(said.what, Policy):
                settings.update(said.what.entries)
        return settings

    @remembered
    def _authorised(self, said: Said) -> bool:
        """Whether its issuer might speak there at all: a member, through its own admitted, unretired feed."""
        return self.member(said.who, said) and said.message.feed_key in self.control_feeds(said.who, said)

    @remembered
    def _overtaken(self, said: Said) -> list[Said]:
        """Removals of its issuer (its membership, its feed, a lower role) that happened at the same time or later."""
        found = []
        for order in self._orders(None):
            what = order.what
            aimed = (
                (isinstance(what, MemberRemove) and what.member == said.who)
                or (isinstance(what, FeedRetire) and what.feed == said.message.feed_key)
                or (
                    isinstance(what, RoleChange)
                    and what.member == said.who
                    and what.role < (self.role(said.who, order) or Role.READER)
                )
            )
            if aimed and not order.before(said):
                found.append(order)
        return found

    # epochs

    @remembered
    def _declarer(self, said: Said) -> bool:
        """Whether the party's policy, as its past has it, lets this issuer declare."""
        settings = self.policy(said)
        wanted, role = settings.get("epoch.declarers", b"admins"), self.role(said.who, said)
        assert role is not None
        if wanted == b"admins":
            return role >= Role.ADMIN
        if wanted == b"elect":
            return True
        keys = settings.get("epoch.bots", b"") if wanted == b"bot" else wanted
        named = {keys[at : at + 32] for at in range(0, len(keys), 32)} if len(keys) % 32 == 0 else set()
        return bytes(said.who) in named or bytes(said.claim.device) in named

    @remembered
    def _declared(self, genesis: Said) -> bool:
        """Said by who may declare, at its place, and about its own past alone: else it is nothing, not even a vote."""
        what = genesis.what
        assert isinstance(what, EpochGenesis)
        if not self._authorised(genesis) or not self._declarer(genesis):
            return False
        for entry in what.control_timeframe:
            own = genesis.message.seq - 1 if entry.feed == genesis.message.feed_key else -1
            if entry.seq > max(own, genesis.message.clock.get(feed_id(entry.feed), -1)):
                return False
        return True

    @remembered
    def _lawful(self, genesis: Said) -> bool:
        """Declared, on top of what is lawful: the number follows, the timeframes grow."""
        what = genesis.what
        assert isinstance(what, EpochGenesis)
        if not self._declared(genesis):
            return False
        if what.number == 1:
            return what.previous == b""
        before = self.geneses.get(what.previous)
        if before is None or not self._lawful_number(before, what.number - 1):
            return False
        earlier = before.what
        assert isinstance(earlier, EpochGenesis)
        # What was cut since, in its past, may be missing, unless a quorum had pinned it.
        cut = set() if self.quorate(before.hash) else self._ended_feeds(genesis)
        return (
            what.discard_before_ms >= earlier.discard_before_ms
            and _grew(what.control_timeframe, earlier.control_timeframe)
            and _grew(what.timeframe, [entry for entry in earlier.timeframe if entry.feed not in cut])
        )

    def _lawful_number(self, genesis: Said, number: int) -> bool:
        assert isinstance(genesis.what, EpochGenesis)
        return genesis.what.number == number and number >= 1 and self._lawful(genesis)

    def _ended_feeds(self, at: Said) -> set[FeedKey]:
        """Feeds of which a removal, a change of role or a retirement may have cut blocks, as seen from a place."""
        orders = [said.what for said in self._orders(at)]
        gone = {what.member for what in orders if isinstance(what, MemberRemove | RoleChange)}
        ended = {what.feed for what in orders if isinstance(what, FeedAdmit) and what.identity in gone}
        return ended | {what.feed for what in orders if isinstance(what, FeedRetire)}

    @remembered
    def vote(self, identity: IdentityKey, number: int) -> bytes | None:
        """The one genesis of a number that an identity stands for: the first that it declared or attested.

        Who computed another CID, disputed before, or stood for something later that does not rest on it, does not attest.
        """
        disputed: set[bytes] = set()
        later: list[bytes] = []  # what it stood for already, of later numbers
        for said in sorted(self.said, key=lambda each: (each.message.seq, each.position)):
            what = said.what
            if said.who != identity or not self._authorised(said):
                continue
            if isinstance(what, EpochGenesis) and what.number == number and self._declared(said):
                return said.hash
            if isinstance(what, EpochDispute) and what.genesis in self.geneses:
                if self.geneses[what.genesis].before(said):
                    disputed.add(what.genesis)
            elif isinstance(what, EpochAttest) and what.number == number and what.genesis not in disputed:
                if self._attests(said, what) and all(what.genesis in self._ancestry(each) for each in later):
                    return what.genesis
            elif isinstance(what, EpochGenesis | EpochAttest) and what.number > number:
                stood = said.hash if isinstance(what, EpochGenesis) else what.genesis
                if self.vote(identity, what.number) == stood:
                    later.append(stood)
        return None

    def _attests(self, said: Said, what: EpochAttest) -> bool:
        """Whether it is about a declared genesis of its own past, and finds the same."""
        named = self.geneses.get(what.genesis)
        if named is None or not named.before(said) or not self._declared(named):
            return False
        assert isinstance(named.what, EpochGenesis)
        return (named.what.number, named.what.snapshot) == (what.number, what.snapshot)

    @remembered
    def attested_by(self, genesis: bytes) -> set[IdentityKey]:
        said = self.geneses[genesis]
        return {each for each in self.electorate(said) if self.vote(each, _number(said)) == genesis}

    @remembered
    def disputers(self, genesis: bytes) -> set[IdentityKey]:
        """Who says that it is wrong, with a right to vote on it or not."""
        number = _number(self.geneses[genesis])
        return {
            each.who
            for each in self.said
            if isinstance(each.what, EpochDispute)
            and (each.what.genesis, each.what.number) == (genesis, number)
            and self.geneses[genesis].before(each)
            and self._authorised(each)
        }

    def disputed_by(self, genesis: bytes) -> set[IdentityKey]:
        return self.disputers(genesis) & self.electorate(self.geneses[genesis])

    @remembered
    def quorate(self, genesis: bytes) -> bool:
        electorate = self.electorate(self.geneses[genesis])
        return len(self.attested_by(genesis)) > len(electorate) / 2

    def _ancestry(self, genesis: bytes) -> list[bytes]:
        """What it rests on, itself first: number by number."""
        found = [genesis]
        while True:
            what = self.geneses[genesis].what
            assert isinstance(what, EpochGenesis)
            before = self.geneses.get(what.previous)
            if before is None or _number(before) != what.number - 1:
                return found
            genesis = what.previous
            found.append(genesis)

    @remembered
    def _counts(self, genesis: bytes) -> bool:
        """Lawful all the way down. One whose declarer was removed meanwhile needs a quorum, of its own or on top of it."""
        for each in self._ancestry(genesis):
            if not self._lawful(self.geneses[each]):
                return False
            if self._overtaken(self.geneses[each]) and self._settled(each) is None:
                return False
        return True

    @remembered
    def _settled(self, genesis: bytes) -> tuple[int, int] | None:
        """The lowest number with a quorum at or above it, of those that rest on it; then the most votes, counted down."""
        return min(
            (
                (_number(said), -len(self.attested_by(other)))
                for other, said in self.geneses.items()
                if genesis in self._ancestry(other) and self._lawful(said) and self.quorate(other)
            ),
            default=None,
        )

    @remembered
    def chain(self, but_for: IdentityKey | None = None) -> list[bytes]:
        """From number 1 on; for somebody, without what it disputes and no quorum stands for.

        A quorum names the number, then what the lowest quorum rests on, or of two the greater, then whom fewer dispute,
        then the votes, then the hash.
        """
        found: list[bytes] = []
        while True:
            candidates = [
                genesis
                for genesis, said in self.geneses.items()
                if isinstance(said.what, EpochGenesis)
                and said.what.number == len(found) + 1
                and said.what.previous == (found[-1] if found else b"")
                and self._counts(genesis)
                and (self._is_open(genesis, but_for) or self._settled(genesis) is not None)
            ]
            if not candidates:
                return found
            found.append(min(candidates, key=self._preference))

    def _is_open(self, genesis: bytes, but_for: IdentityKey | None) -> bool:
        """Whether it may count without a quorum: its declarer, who votes once per number, stands for it."""
        said = self.geneses[genesis]
        return but_for not in self.disputers(genesis) and self.vote(said.who, _number(said)) == genesis

    def _preference(self, genesis: bytes) -> tuple[bool, tuple[int, int], bool, int, bytes]:
        votes = len(self.attested_by(genesis))
        doubted = len(self.disputed_by(genesis)) > votes
        settled = self._settled(genesis)
        return settled is None, settled or (0, 0), doubted, -votes, genesis

    @remembered
    def final(self, genesis: bytes) -> bool:
        """Final on the chain: with a quorum, or below something on the chain that has one."""
        chain = self.chain()
        return genesis in chain and any(self.quorate(each) for each in chain[chain.index(genesis) :])

    def joinable(self) -> bytes | None:
        """The newest epoch that enough stand for besides its declarer."""
        settings = self.policy(None)
        wanted = settings.get("epoch.join_attests")
        need = int(wanted) if wanted is not None else int(self.devices() >= JOIN_FROM_DEVICES)
        for genesis in reversed(self.chain()):
            if len(self.attested_by(genesis) - {self.geneses[genesis].who}) >= need:
                return genesis
        return None

    def truncatable(self) -> bytes | None:
        """The newest epoch with the policy's quorum that has a final one above it."""
        chain = self.chain()
        wanted = int(self.policy(None).get("epoch.truncate_quorum", b"0").replace(b"majority", b"0"))
        for below, above in reversed(list(pairwise(chain))):
            electorate = len(self.electorate(self.geneses[below]))
            need = max(electorate // 2 + 1, min(wanted, electorate))
            if self.final(above) and len(self.attested_by(below)) >= need:
                return below
        return None

    # what the honest do

    def may_attest(self, genesis: bytes, identity: IdentityKey) -> bool:
        """Whether it names its number for this identity, who may vote, has not, and has helped nothing against it.

        Or whether this identity stands for something above that rests on it, and so could vote for nothing else there.
        """
        said, chain = self.geneses[genesis], self.chain(identity)
        if identity not in self.electorate(said):
            return False
        if self.vote(identity, _number(said)) is not None or identity in self.disputers(genesis):
            return False
        if self._voted_against(genesis, identity):
            return False
        if self._owed(genesis, identity):
            return True
        if genesis not in chain:
            return False
        below = chain[: chain.index(genesis)]
        if below and not self._includes(genesis, below[-1]) and self._might_win(below[-1]):
            return False  # with a quorum below, this one would not be lawful
        return not any(self._contradicts(each, identity) for each in below)

    def _owed(self, genesis: bytes, identity: IdentityKey) -> bool:
        """Whether a vote of this identity for the next number that it voted for rests on this, and nothing above is final."""
        number = _number(self.geneses[genesis])
        if any(self.final(each) and _number(self.geneses[each]) >= number for each in self.chain()):
            return False
        later = sorted({_number(said) for said in self.geneses.values() if _number(said) > number})
        votes = [vote for each in later if (vote := self.vote(identity, each)) is not None]
        return bool(votes) and votes[0] in self.geneses and genesis in self._ancestry(votes[0])

    def _voted_against(self, genesis: bytes, identity: IdentityKey) -> bool:
        """Whether it stands for something later that does not rest on this."""
        later = [_number(said) for said in self.geneses.values() if _number(said) > _number(self.geneses[genesis])]
        votes = [vote for number in later if (vote := self.vote(identity, number)) is not None]
        return any(genesis not in self._ancestry(vote) for vote in votes)

    def _includes(self, later: bytes, earlier: bytes) -> bool:
        one, other = self.geneses[later].what, self.geneses[earlier].what
        assert isinstance(one, EpochGenesis)
        assert isinstance(other, EpochGenesis)
        return _grew(one.timeframe, other.timeframe)

    def _contradicts(self, genesis: bytes, identity: IdentityKey) -> bool:
        """Whether it is a rival of what this identity voted for, and that one might still get its quorum."""
        mine = self.vote(identity, _number(self.geneses[genesis]))
        if mine is None or mine == genesis or self.final(genesis):
            return False
        return mine in self.geneses and self._might_win(mine)

    def _might_win(self, genesis: bytes) -> bool:
        """Whether enough of its electorate stand for it or may do so yet."""
        said = self.geneses[genesis]
        electorate, now = self.electorate(said), self.voters(None)
        still = {
            each
            for each in electorate & now
            if self.vote(each, _number(said)) is None
            and each not in self.disputed_by(genesis)
            and not self._voted_against(genesis, each)
        }
        return len(self.attested_by(genesis) | still) > len(electorate) / 2


def _number(genesis: Said) -> int:
    assert isinstance(genesis.what, EpochGenesis)
    return genesis.what.number


def _grew(later: Iterable[TimeframeEntry], earlier: Iterable[TimeframeEntry]) -> bool:
    last = {entry.feed: entry for entry in later}
    return all(
        entry.feed in last
        and (
            last[entry.feed].seq > entry.seq or (last[entry.feed].seq, last[entry.feed].link) == (entry.seq, entry.link)
        )
        for entry in earlier
    )
