"""The chain of epochs that all members end with: a function of the set of epoch credentials.

    number        1             2                 3
                  A ◄────────── B ◄────────────── D       D names B: whoever chose B's rival starts again from B
                   ◄── B' (same number, fewer attests or a higher hash: kept as a checkpoint)

E1  An epoch counts whose number is one more than its predecessor's, whose timeframe includes the predecessor's, and
    whose predecessor is in the chain.
E2  Of several with one number, the one that a quorum of identities attested names the number for good; before that,
    the one with the lower hash does.
E3  An identity attests one genesis per number: its first attest in canonical order. The declarer attests by declaring.
E4  A quorum is a majority of the identities that are members.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from echostore.kernel.ids import IdentityKey, PartyKey
from echostore.kernel.party.credentials import EpochAttest, EpochGenesis
from echostore.kernel.party.roster import EpochAct


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of the chain, with who stands for it."""

    genesis: EpochGenesis
    hash: bytes
    declarer: IdentityKey
    attested_by: frozenset[IdentityKey]
    final: bool
    """Whether a quorum attested it."""
    rivals: tuple[bytes, ...]
    """Hashes of others with the same number and predecessor."""


def chain(acts: Iterable[EpochAct], members: Collection[IdentityKey], *, child: PartyKey | None = None) -> list[Epoch]:
    """The epochs that count, by number from 1 on."""
    declared: dict[bytes, EpochAct] = {}
    by_number: dict[int, list[EpochAct]] = defaultdict(list)
    attests: dict[int, dict[IdentityKey, bytes]] = defaultdict(dict)
    for act in sorted(acts, key=lambda each: (each.stamp, each.hash)):
        said = act.act
        if isinstance(said, EpochGenesis):
            if said.child == child:
                declared[act.hash] = act
                by_number[said.number].append(act)
        elif isinstance(said, EpochAttest):
            attests[said.number].setdefault(act.identity, said.genesis)
    for act in sorted(declared.values(), key=lambda each: (each.stamp, each.hash)):
        attests[act.act.number].setdefault(act.identity, act.hash)
    quorum = len(members) // 2 + 1
    found: list[Epoch] = []
    before: EpochAct | None = None
    while candidates := _successors(by_number[len(found) + 1], before):
        number = len(found) + 1
        voters: dict[bytes, set[IdentityKey]] = defaultdict(set)
        for identity, genesis in attests[number].items():
            if identity in members:
                voters[genesis].add(identity)
        best = min(candidates, key=lambda act: (len(voters[act.hash]) < quorum, act.hash))
        said = best.act
        assert isinstance(said, EpochGenesis)
        found.append(
            Epoch(
                genesis=said,
                hash=best.hash,
                declarer=best.identity,
                attested_by=frozenset(voters[best.hash]),
                final=len(voters[best.hash]) >= quorum,
                rivals=tuple(sorted(act.hash for act in candidates if act is not best)),
            )
        )
        before = best
    return found


def _successors(candidates: Iterable[EpochAct], before: EpochAct | None) -> list[EpochAct]:
    found = []
    for act in candidates:
        said = act.act
        assert isinstance(said, EpochGenesis)
        if before is None:
            if not said.previous:
                found.append(act)
        elif said.previous == before.hash and _includes(said, before.act):
            found.append(act)
    return found


def _includes(later: EpochGenesis, earlier: object) -> bool:
    """Whether a timeframe holds all that an earlier one does."""
    assert isinstance(earlier, EpochGenesis)
    reached = {entry.feed: entry.seq for entry in later.timeframe}
    return all(reached.get(entry.feed, -1) >= entry.seq for entry in earlier.timeframe)
