"""The control state <-> its canonical bytes: what a party's control feeds amount to below a cut.

    ControlState     kept credentials as they were signed, what each feed had seen, where the chain of epochs begins
    FeedCut          per control feed its length, link, depth and what its last message had processed: the orderer's part

Whoever reads it checks every signature again and judges every credential again, so it can be incomplete and not
invented. Equal sets of messages below equal cuts give equal bytes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from google.protobuf.message import DecodeError

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import FEED_ID_BYTES, KEY_BYTES, FeedId, FeedKey, PartyKey, feed_id
from echostore.kernel.party.control_state import ChainStart, ControlFeed, ControlState, Step
from echostore.kernel.party.credentials import ControlMessage, EpochGenesis, VerifiedCredential
from echostore.kernel.party.pins import PinnedEpoch
from echostore.wire.claims import HASH_BYTES
from echostore.wire.control_blobs import Least, check_dense
from echostore.wire.credentials import verify_bytes
from echostore.wire.epochs import FeedCut, cut_entry, read_cut_entry
from echostore.wire.generated import control_state_pb2 as pb
from echostore.wire.signing import SIGNATURE_BYTES
from echostore.wire.snapshot import canonical_message

CONTROL_KEY = "control_state"
"""Under which the FeedStore keeps the state that opening goes on from; empty: none."""

FLOOR_KEY = "control_floor"
"""Under which it keeps the state at which truncated control feeds begin."""

EVIDENCE_KEY = "control_evidence"
"""Under which it keeps the CID of why that one may be believed (`wire.control_evidence`)."""

_LEAST: Least = {
    2: (KEY_BYTES, {}),  # a feed has its key
    3: (SIGNATURE_BYTES, {7: (SIGNATURE_BYTES, {})}),  # a message has credentials
    4: (HASH_BYTES, {4: (HASH_BYTES, {}), 5: (HASH_BYTES, {})}),  # a chain names epochs, and its pins do
}
"""How many bytes the entries of a state have at least, by their numbers in the schema."""

CredentialAt = Callable[[FeedKey, int, int], bytes]
"""The signed bytes of the credential at a place: feed, seq, position."""


Place = tuple[FeedKey, int, int]
"""Of a credential: feed, seq, position."""


@dataclass(frozen=True, slots=True)
class StoredControl:
    """A control state with the cuts of its feeds, and its credentials as they were signed, by their places."""

    state: ControlState
    cuts: dict[FeedKey, FeedCut]
    signed: dict[Place, bytes] = field(default_factory=dict, compare=False, repr=False)


def encode_control_state(stored: StoredControl, credential: CredentialAt) -> bytes:
    """Canonical bytes. The cuts are those of exactly the state's feeds."""
    state = stored.state
    places = {feed.key: at for at, feed in enumerate(state.feeds)}
    return pb.ControlState(
        party=state.party,
        feeds=[_feed(feed, stored.cuts[feed.key]) for feed in state.feeds],
        messages=[
            pb.KeptMessage(
                feed=places[message.feed_key],
                seq=message.seq,
                depth=message.depth,
                clock_feeds=b"".join(sorted(message.clock)),
                clock_seqs=[message.clock[feed] for feed in sorted(message.clock)],
                positions=message.positions,
                credentials=[credential(message.feed_key, message.seq, at) for at in message.positions],
            )
            for message in state.messages
        ],
        chains=[_chain(chain) for chain in state.chains],
    ).SerializeToString(deterministic=True)


def read_control_state(data: bytes, party: PartyKey) -> StoredControl:
    """The state that these bytes are. Corrupt when no peer would have written them, or a signature does not hold."""
    check_dense(data, _LEAST, "a control state")
    message = canonical_message(pb.ControlState, data, "a control state")
    if message.party != party:
        raise Corrupt("a control state of another party")
    cuts = [read_cut_entry(feed.cut) for feed in message.feeds]
    keys = [cut.feed for cut in cuts]
    _ascending(keys, "feeds")
    for cut in cuts:
        if len(cut.feed) != KEY_BYTES or not cut.control or not cut.length:
            raise Corrupt("a control state with a cut of something else")
    feeds = tuple(_read_feed(feed, cut) for feed, cut in zip(message.feeds, cuts, strict=True))
    messages = tuple(_read_message(kept, cuts, party) for kept in message.messages)
    _ascending([(each.depth, each.feed, each.seq) for each in messages], "messages")
    chains = tuple(_read_chain(chain) for chain in message.chains)
    _ascending([chain.child or b"" for chain in chains], "chains")
    begun = {chain.epoch: chain for chain in chains}
    for credential in (credential for each in messages for credential in each.credentials):
        if credential.hash in begun and _begins(begun[credential.hash], credential):
            del begun[credential.hash]
    if begun or len({chain.epoch for chain in chains}) != len(chains):
        raise Corrupt("a control state without the epoch that its chain begins with")
    signed = {
        (cuts[kept.feed].feed, kept.seq, position): raw
        for kept in message.messages
        for position, raw in zip(kept.positions, kept.credentials, strict=True)
    }
    return StoredControl(ControlState(party, feeds, messages, chains), {cut.feed: cut for cut in cuts}, signed)


def read_cuts(data: bytes) -> dict[FeedKey, FeedCut]:
    """The cuts alone, of bytes that were checked when they were kept."""
    try:
        message = pb.ControlState.FromString(data)
    except DecodeError as error:
        raise Corrupt("a control state that can't be read") from error
    return {cut.feed: cut for cut in (read_cut_entry(feed.cut) for feed in message.feeds)}


def _ascending(values: Sequence[object], what: str) -> None:
    if any(not left < right for left, right in pairwise(values)):  # type: ignore[operator]  # the callers compare values of one kind
        raise Corrupt(f"a control state whose {what} do not ascend")


# feeds


def _feed(feed: ControlFeed, cut: FeedCut) -> pb.ControlFeedState:
    assert cut.length == feed.length, f"{feed.key.hex()} is cut at {cut.length}, its state at {feed.length}"
    return pb.ControlFeedState(
        cut=cut_entry(cut),
        step_seqs=[step.seq for step in feed.steps],
        step_feeds=b"".join(step.feed for step in feed.steps),
        step_lasts=[step.last for step in feed.steps],
    )


def _read_feed(feed: pb.ControlFeedState, cut: FeedCut) -> ControlFeed:
    feeds = _ids(feed.step_feeds, len(feed.step_seqs))
    if len(feed.step_lasts) != len(feeds):
        raise Corrupt("a control state with unequal columns")
    steps = tuple(Step(*each) for each in zip(feed.step_seqs, feeds, feed.step_lasts, strict=True))
    seqs = [step.seq for step in steps]
    if seqs != sorted(seqs) or (seqs and seqs[-1] >= cut.length):
        raise Corrupt("a control state with steps beyond the cut")
    return ControlFeed(cut.feed, cut.length, steps)


def _ids(data: bytes, count: int) -> list[FeedId]:
    if len(data) != count * FEED_ID_BYTES:
        raise Corrupt("a control state with unequal columns")
    return [FeedId(data[at : at + FEED_ID_BYTES]) for at in range(0, len(data), FEED_ID_BYTES)]


# messages


def _read_message(kept: pb.KeptMessage, cuts: Sequence[FeedCut], party: PartyKey) -> ControlMessage:
    if kept.feed >= len(cuts) or kept.seq >= cuts[kept.feed].length:
        raise Corrupt("a control state with a message beyond the cut")
    if not kept.positions or len(kept.positions) != len(kept.credentials):
        raise Corrupt("a control state with unequal columns")
    _ascending(kept.positions, "positions")
    key = cuts[kept.feed].feed
    clock = dict(zip(_ids(kept.clock_feeds, len(kept.clock_seqs)), kept.clock_seqs, strict=True))
    credentials = tuple(_verified(raw, party) for raw in kept.credentials)
    return ControlMessage(feed_id(key), key, kept.seq, kept.depth, clock, credentials, tuple(kept.positions))


def _verified(raw: bytes, party: PartyKey) -> VerifiedCredential:
    found = verify_bytes(raw, party)
    if found.fault is not None or found.claim is None:
        raise Corrupt(f"a control state with a credential that does not hold: {found.fault}")
    return found


# chains


def _chain(chain: ChainStart) -> pb.ChainStartState:
    return pb.ChainStartState(
        child=chain.child or b"",
        number=chain.number,
        epoch=chain.epoch,
        rivals=chain.rivals,
        pins=[
            pb.PinnedEpochState(
                hash=pin.hash,
                control_feeds=b"".join(feed for feed, _ in pin.control),
                control_lengths=[length for _, length in pin.control],
                data_feeds=b"".join(feed for feed, _ in pin.data),
                data_lengths=[length for _, length in pin.data],
            )
            for pin in chain.pins
        ],
    )


def _read_chain(chain: pb.ChainStartState) -> ChainStart:
    pins = tuple(
        PinnedEpoch(
            pin.hash, _lengths(pin.control_feeds, pin.control_lengths), _lengths(pin.data_feeds, pin.data_lengths)
        )
        for pin in chain.pins
    )
    if not chain.number or not pins or pins[-1].hash != chain.epoch:
        raise Corrupt("a control state whose chain does not begin with a pinned epoch")
    child = PartyKey(chain.child) if chain.child else None
    return ChainStart(child, chain.number, chain.epoch, tuple(chain.rivals), pins)


def _begins(chain: ChainStart, credential: VerifiedCredential) -> bool:
    said = credential.claim.assertion if credential.claim is not None else None
    return isinstance(said, EpochGenesis) and (said.child, said.number) == (chain.child, chain.number)


def _lengths(feeds: bytes, lengths: Sequence[int]) -> tuple[tuple[FeedId, int], ...]:
    return tuple(zip(_ids(feeds, len(lengths)), lengths, strict=True))


def control_cuts(cuts: Iterable[FeedCut]) -> dict[FeedKey, FeedCut]:
    """The control feeds among an epoch's cuts."""
    return {cut.feed: cut for cut in cuts if cut.control}


def lengths_of(cuts: Mapping[FeedKey, FeedCut]) -> dict[FeedKey, int]:
    return {key: cut.length for key, cut in cuts.items()}
