"""The control state that an epoch names: made by who declares it, made again by who attests it.

    epoch N     control timeframe ──► control state at it ──► its CID is in the genesis

Its bytes are not kept: whoever truncates its control feeds there makes it once more (`control_floor`), and keeps it then.
It is made from the state of the last epoch that was looked at and what came since, so it costs that much. What is made
is a function of the messages below the cut; where this peer can't be sure of that, it says so, and neither names a state
nor disputes one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echostore.kernel.ids import FeedKey
from echostore.kernel.party.compaction import compact, compact_from, is_closed
from echostore.kernel.party.control_state import ControlState
from echostore.peer.control_standing import Credentials
from echostore.wire.control_blobs import CONTROL_BYTES_MAX, name_of
from echostore.wire.control_state import StoredControl, control_cuts, encode_control_state, lengths_of
from echostore.wire.epochs import FeedCut

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor


@dataclass(frozen=True, slots=True)
class MadeControl:
    """The control state at an epoch's cut, as this peer makes it."""

    data: bytes
    """Canonical bytes; empty when there is none."""
    why: str = ""
    """Why there is none, or why it may be another than that of others."""
    wrong: bool = False
    """Whether nobody can make one at such a cut."""

    @property
    def cid(self) -> bytes:
        return name_of(self.data) if self.data else b""

    @property
    def to_name(self) -> bytes:
        """What a genesis names: nothing where others might find another."""
        return b"" if self.why else self.cid


def control_at(processor: "PartyProcessor", cuts: Iterable[FeedCut]) -> MadeControl:
    """The control state at the control feeds' part of an epoch's cuts. Called under the peer's lock."""
    if processor.parent is not None:
        return MadeControl(b"", "a child party has no control feeds")
    control = control_cuts(cuts)
    lengths = lengths_of(control)
    machine = processor.membership.machine
    begun = machine.start.lengths if machine.start is not None else {}
    if any(lengths.get(key, 0) < length for key, length in begun.items()):
        return MadeControl(b"", "what lies below that cut is gone here")
    if any(processor.membership.length_of(key) < length for key, length in lengths.items()):
        return MadeControl(b"", "control messages below that cut are not here")
    if not is_closed(machine, lengths):
        return MadeControl(b"", "its control timeframe leaves out what it builds on", wrong=True)
    state = _from_the_last(processor, lengths) or compact(machine, lengths)
    known = Credentials(processor.feeds, processor.control_named, processor.control_start)
    stored = StoredControl(state, control, known.used)
    data = encode_control_state(stored, known.at)
    if len(data) > CONTROL_BYTES_MAX:
        return MadeControl(b"", f"it has {len(data)} bytes, and at most {CONTROL_BYTES_MAX} are read")
    if machine.late:
        return MadeControl(data, "something came late that speaks of what this peer has no more")
    if any(processor.feeds.branches(key) for key in control):
        return MadeControl(data, "a control feed has branches")
    processor.control_named = stored
    return MadeControl(data)


def _from_the_last(processor: "PartyProcessor", lengths: dict[FeedKey, int]) -> ControlState | None:
    """Made from the state that was made last, where that lies below."""
    last, machine = processor.control_named, processor.membership.machine
    if last is None or machine.late:
        return None
    begun = machine.start.lengths if machine.start is not None else {}
    if any(last.state.lengths.get(key, 0) < length for key, length in begun.items()):
        return None  # what the machine holds does not begin where that one ends
    return compact_from(machine, last.state, lengths)
