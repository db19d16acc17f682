"""Evidence for a control state <-> its bytes: the genesis that names it, and the attests of that, as they were signed.

Who has the evidence has all that a newcomer asks for: which state, and who stands for it. What it says is checked twice:
every signature here, and by `kernel.party.control_trust` whether those who signed it could.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import KEY_BYTES, Cid, FeedKey, PartyKey, feed_id
from echostore.kernel.limits import SEQ_MAX
from echostore.kernel.party.control_trust import confirmed
from echostore.kernel.party.credentials import ControlMessage, EpochGenesis
from echostore.kernel.party.epoch_chain import Epoch
from echostore.wire.cids import is_cid
from echostore.wire.control_blobs import Least, check_dense
from echostore.wire.control_state import StoredControl, read_control_state
from echostore.wire.credentials import verify_bytes
from echostore.wire.generated import control_state_pb2 as pb
from echostore.wire.signing import SIGNATURE_BYTES
from echostore.wire.snapshot import canonical_message

_LEAST: Least = {3: (SIGNATURE_BYTES, {})}
"""What is said has a signature."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A signed credential and where it stands."""

    feed: FeedKey
    seq: int
    depth: int
    signed: bytes


@dataclass(frozen=True, slots=True)
class Evidence:
    """Which control state, and what is said of it: the genesis of an epoch, then its attests."""

    state: Cid
    said: tuple[ControlMessage, ...]


def encode_evidence(party: PartyKey, state: Cid, said: Iterable[Placed]) -> bytes:
    return pb.ControlEvidence(
        party=party,
        state=state,
        said=[
            pb.PlacedCredential(feed=each.feed, seq=each.seq, depth=each.depth, credential=each.signed) for each in said
        ],
    ).SerializeToString(deterministic=True)


def read_evidence(data: bytes, party: PartyKey) -> Evidence:
    """The evidence in these bytes; Corrupt when it is of another party, malformed, or a signature does not hold."""
    check_dense(data, _LEAST, "evidence for a control state")
    message = canonical_message(pb.ControlEvidence, data, "evidence for a control state")
    if message.party != party:
        raise Corrupt("evidence for a control state of another party")
    if not is_cid(message.state):
        raise Corrupt("evidence for a control state without its CID")
    return Evidence(Cid(message.state), tuple(_read_placed(each, party) for each in message.said))


def _read_placed(placed: pb.PlacedCredential, party: PartyKey) -> ControlMessage:
    if len(placed.feed) != KEY_BYTES or placed.seq > SEQ_MAX:
        raise Corrupt("evidence for a control state with a place that there is not")
    found = verify_bytes(placed.credential, party)
    if found.fault is not None or found.claim is None:
        raise Corrupt(f"evidence for a control state with a credential that does not hold: {found.fault}")
    key = FeedKey(placed.feed)
    return ControlMessage(feed_id(key), key, placed.seq, placed.depth, {}, (found,))


def believed(evidence: Evidence, data: bytes, party: PartyKey) -> tuple[StoredControl, Epoch]:
    """The control state that these bytes are, and the epoch that stands for it; Corrupt when it is not to be believed."""
    stored = read_control_state(data, party)
    epoch = confirmed(stored.state, evidence.state, evidence.said)
    if isinstance(epoch, str):
        raise Corrupt(f"a control state that is not to be believed: {epoch}")
    _check_links(stored, epoch.genesis)
    return stored, epoch


def _check_links(stored: StoredControl, genesis: EpochGenesis) -> None:
    links = {entry.feed: entry.link for entry in genesis.control_timeframe}
    if any(links[key] != cut.link for key, cut in stored.cuts.items()):
        raise Corrupt("a control state whose cut does not end where its epoch does")
