"""Builders for feeds in tests: keys from a name, blocks linked and signed the way a writer does it."""

from dataclasses import dataclass, field

from echostore.kernel.feed import Head
from echostore.kernel.ids import NO_LINK, FeedKey, Link, PartyKey
from echostore.wire.links import chain, head_bytes, payload_hash
from echostore.wire.signing import SigningKey


def signing_key(name: str) -> SigningKey:
    return SigningKey.from_seed(payload_hash(name.encode()))


PARTY = PartyKey(signing_key("party").public)


@dataclass
class Writer:
    """A feed's writer that remembers what it wrote: the oracle of what a store should hold."""

    name: str
    party: PartyKey = PARTY
    payloads: list[bytes] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    secret: SigningKey = field(init=False)

    def __post_init__(self) -> None:
        self.secret = signing_key(self.name)

    @property
    def key(self) -> FeedKey:
        return FeedKey(self.secret.public)

    def write(self, *payloads: bytes) -> tuple[int, list[bytes], list[Link], Head]:
        """Append blocks; returns (start seq, payloads, links, head)."""
        start = len(self.payloads)
        links = chain(self.key, start, self.links[-1] if self.links else NO_LINK, payloads)
        self.payloads += payloads
        self.links += links
        return start, list(payloads), links, self.head()

    def head(self, length: int | None = None) -> Head:
        length = len(self.payloads) if length is None else length
        link = self.links[length - 1] if length else NO_LINK
        return Head(length, link, self.secret.sign(head_bytes(self.party, self.key, length, link)))

    def range(self, start: int, end: int | None = None) -> tuple[list[bytes], Head]:
        """Payloads from `start` up to `end` and the head there: what a peer would send."""
        end = len(self.payloads) if end is None else end
        return self.payloads[start:end], self.head(end)

    def branch(self, at: int) -> "Writer":
        """A second writer with the same key that shares the first `at` blocks: the start of a fork."""
        return Writer(self.name, self.party, self.payloads[:at], self.links[:at])


def payloads(count: int, label: str = "block", size: int = 40) -> list[bytes]:
    return [f"{label} {number} ".encode().ljust(size, b".") for number in range(count)]
