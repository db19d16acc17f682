"""PartyMachine: folds the control feeds of a party into who belongs to it and which blocks count.

Control messages go in, in any order in which causes come before effects; what comes out depends on their set alone.

    ControlMessage ─► verdicts ─► ledger ─┬─► admission   which blocks count, in which role (digest)
                      (which credentials  ├─► roster      members, devices, groups, epochs, policy
                       count, and why not)└─► rejected, why(key)

    machine.receive(message)                    O(what is said about its issuer and subject)
    machine.admission(child=None).digest        recomputed only when membership changed
    machine.members, .rejected, .why(key) ...   read-only values

Called by the live PartyProcessor and by the Spark pipeline, with credentials that `echostore.wire.credentials` has
verified. It knows no clock: invitations do not expire here.
"""

from dataclasses import dataclass

from echostore.kernel.ids import FeedId, FeedKey, PartyKey, feed_id
from echostore.kernel.party import explain, roster
from echostore.kernel.party.admission import Admission, FeedAdmission, build
from echostore.kernel.party.credentials import ControlMessage, ModelPublish, PartyGenesis
from echostore.kernel.party.ledger import Ledger
from echostore.kernel.party.verdicts import Verdicts
from echostore.kernel.reasons import Reason


@dataclass(frozen=True, slots=True)
class Rejection:
    """A credential that does not count, and why."""

    feed: FeedId
    seq: int
    position: int
    reason: Reason
    detail: str


class PartyMachine:
    """The membership of one party as a function of the set of control messages received."""

    def __init__(self, party: PartyKey) -> None:
        self.party = party
        self._verdicts = Verdicts(party)
        self._admissions: dict[PartyKey | None, Admission] = {}
        self._admissions_revision = -1

    def receive(self, message: ControlMessage) -> None:
        """Takes in a control message whose causal past was received before; a repeated one changes nothing."""
        assert message.feed == feed_id(message.feed_key), f"{message.feed!r} is not the id of {message.feed_key!r}"
        self._verdicts.receive(message)

    # --- which blocks count -----------------------------------------------------------------------------------

    def admission(self, child: PartyKey | None = None) -> Admission:
        """The admission of the party, or of a child party: that one has data feeds of its own and no others."""
        ledger = self._ledger()
        if self._admissions_revision != self._verdicts.revision:
            self._admissions.clear()
            self._admissions_revision = self._verdicts.revision
        found = self._admissions.get(child)
        if found is None:
            found = self._admissions[child] = build(ledger, self._verdicts.forks, child)
        return found

    @property
    def revision(self) -> int:
        """Changes whenever an admission may have changed; equal revisions mean equal admissions."""
        self._verdicts.settle()
        return self._verdicts.revision

    @property
    def folds(self) -> int:
        """How often all credentials were judged anew: what an arrival may cost at most."""
        return self._verdicts.folds

    @property
    def feeds(self) -> tuple[FeedAdmission, ...]:
        """The feeds of the party and of all its child parties, ascending by key."""
        admitted = [*self.admission().feeds]
        for child, _ in self.children:
            admitted += self.admission(child).feeds
        return tuple(sorted(admitted, key=lambda each: each.feed))

    @property
    def forks(self) -> dict[FeedKey, int]:
        """Where feeds were proven to fork, also feeds that are not admitted."""
        return dict(self._verdicts.forks)

    # --- who belongs ------------------------------------------------------------------------------------------

    @property
    def genesis(self) -> PartyGenesis | None:
        return roster.genesis(self._ledger())

    @property
    def members(self) -> tuple[roster.Member, ...]:
        return roster.members(self._ledger())

    @property
    def devices(self) -> tuple[roster.Device, ...]:
        return roster.devices(self._ledger())

    @property
    def groups(self) -> tuple[roster.Group, ...]:
        return roster.groups(self._ledger())

    @property
    def invitations(self) -> tuple[roster.OpenInvitation, ...]:
        return roster.invitations(self._ledger())

    @property
    def children(self) -> tuple[tuple[PartyKey, str], ...]:
        return roster.children(self._ledger())

    @property
    def policy(self) -> dict[str, bytes]:
        return roster.policy(self._ledger())

    @property
    def models(self) -> tuple[ModelPublish, ...]:
        return roster.models(self._ledger())

    @property
    def epochs(self) -> tuple[roster.EpochAct, ...]:
        return roster.epoch_acts(self._ledger().epochs)

    @property
    def attests(self) -> tuple[roster.EpochAct, ...]:
        return roster.epoch_acts(self._ledger().attests)

    @property
    def disputes(self) -> tuple[roster.EpochAct, ...]:
        return roster.epoch_acts(self._ledger().disputes)

    # --- why --------------------------------------------------------------------------------------------------

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        """Every credential that does not count, in canonical order."""
        self._verdicts.settle()
        refused = sorted(self._verdicts.refusals, key=lambda event: (event.stamp, event.hash))
        found = []
        for event in refused:
            refusal = self._verdicts.refusal(event)
            assert refusal is not None, f"{event} is refused without a reason"
            found.append(Rejection(event.feed, event.seq, event.position, refusal.reason, refusal.detail))
        return tuple(found)

    def why(self, key: bytes) -> list[explain.Step]:
        """The credentials that concern a member, group, device or feed, and what the valid ones rest on."""
        self._verdicts.settle()
        return explain.why(self._verdicts, key)

    def _ledger(self) -> Ledger:
        self._verdicts.settle()
        return self._verdicts.ledger
