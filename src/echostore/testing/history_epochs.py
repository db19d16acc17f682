"""The checker's judgement of epochs (I8, I10): who declared and attested what, and which chain each peer came to.

It folds for itself: the state at a timeframe is the set of entries appended up to it, and its hash is the SHA-256 of
their hashes, sorted, one per line. Only histories whose events say `"fold": "sha256-lines"`, and epochs, are judged so.
Standard library only.
"""

import hashlib
from typing import Any

from echostore.testing.verdict import Report

Event = dict[str, Any]
Places = dict[str, dict[int, str]]

FOLD = "sha256-lines"
UNTOLD = "untold"
"""A truth that nobody knows any more."""


def fold(places: Places, timeframe: dict[str, list[Any]]) -> str | None:
    """The hash of the state at a timeframe; None when it names entries that nobody appended."""
    found = []
    for feed, (last, digest) in timeframe.items():
        place = places.get(feed, {})
        hashes = [place.get(seq) for seq in range(last + 1)]
        if None in hashes or hashes[-1] != digest:
            return None
        found += hashes
    return hashlib.sha256("\n".join(sorted(str(each) for each in found)).encode()).hexdigest()


class EpochFacts:
    """The first reading: what was declared and attested, by anybody."""

    def __init__(self) -> None:
        self.declared: dict[str, Event] = {}
        self.voters: dict[str, set[str]] = {}
        """By genesis: the identities that stand for it."""
        self.truths: dict[str, str] = {}
        """By genesis: what somebody who kept all messages folded them to, where a history has that."""

    def declare(self, event: Event) -> None:
        self.declared[event["genesis"]] = event
        self.voters.setdefault(event["genesis"], set()).add(event["identity"])

    def attest(self, event: Event) -> None:
        self.voters.setdefault(event["genesis"], set()).add(event["identity"])

    def truth(self, event: Event) -> None:
        self.truths[event["genesis"]] = event["snapshot"]

    def quorate(self, genesis: str) -> bool:
        electorate = set(self.declared[genesis]["electorate"])
        return 2 * len(self.voters.get(genesis, set()) & electorate) > len(electorate)


class EpochConduct:
    """The second reading: what correct peers did."""

    def __init__(self, facts: EpochFacts, places: Places, cuts: dict[str, int], report: Report) -> None:
        self._facts, self._places, self._cuts, self._report = facts, places, cuts, report
        self._folds: dict[str, str | None] = {}
        self._attested: dict[tuple[str, int], str] = {}
        self._finals: dict[int, tuple[str, str]] = {}
        self._chains: dict[str, list[str]] = {}

    def declare(self, number: int, event: Event) -> None:
        peer, genesis, previous = event["peer"], event["genesis"], event["previous"]
        self._vote(number, event, event["number"], genesis)
        before = self._facts.declared.get(previous)
        if (event["number"] == 1) is not (previous == "") or (previous and before is None):
            self._report.add("I10", number, f"{peer} declared epoch {event['number']} on nothing that was declared")
        elif before is not None and (before["number"] != event["number"] - 1 or not self._grows(event, before)):
            self._report.add(
                "I10", number, f"{peer} declared epoch {event['number']}, which does not follow its predecessor"
            )
        if self._true(genesis) is not True and self._facts.truths.get(genesis) != UNTOLD:
            self._report.add("I8", number, f"{peer} declared a state that its timeframe does not give")

    def attest(self, number: int, event: Event) -> None:
        peer, genesis = event["peer"], event["genesis"]
        declared = self._facts.declared.get(genesis)
        if declared is None or declared["number"] != event["number"] or declared["snapshot"] != event["snapshot"]:
            self._report.add("I10", number, f"{peer} attested what nobody declared")
            return
        self._vote(number, event, event["number"], genesis)
        if self._true(genesis) is not True and self._facts.truths.get(genesis) != UNTOLD:
            self._report.add("I8", number, f"{peer} attested epoch {event['number']}, whose state is another")

    def dispute(self, number: int, event: Event) -> None:
        if self._true(event["genesis"]) is True:
            self._report.add("I10", number, f"{event['peer']} disputed epoch {event['number']}, which is true")

    def _vote(self, number: int, event: Event, epoch: int, genesis: str) -> None:
        key = (event["identity"], epoch)
        if self._attested.setdefault(key, genesis) != genesis:
            self._report.add("I10", number, f"{event['peer']} stands for two epochs {epoch}")

    def _true(self, genesis: str) -> bool | None:
        declared = self._facts.declared.get(genesis)
        if declared is None:
            return None
        if genesis not in self._folds:
            folded = self._facts.truths.get(genesis)
            self._folds[genesis] = folded if folded is not None else fold(self._places, declared["timeframe"])
        return bool(self._folds[genesis] == declared["snapshot"])

    def chain(self, number: int, event: Event) -> None:
        """A peer's chain: consecutive, growing, and what is final in it is so for good and for all."""
        peer = event["peer"]
        names = [genesis for genesis, _ in event["epochs"]]
        before: Event | None = None
        for at, genesis in enumerate(names, 1):
            declared = self._facts.declared.get(genesis)
            if declared is None:
                self._report.add("I10", number, f"the chain of {peer} holds what nobody declared")
                return
            follows = declared["previous"] == (before["genesis"] if before else "") and declared["number"] == at
            final = event["epochs"][at - 1][1]
            if not follows or (final and before is not None and not self._grows(declared, before)):
                self._report.add("I10", number, f"the chain of {peer} does not hold together at {at}")
            before = declared
        self._chains[peer] = names
        quorate = False
        for at in range(len(names), 0, -1):
            genesis, final = event["epochs"][at - 1]
            quorate = quorate or self._facts.quorate(genesis)
            if not final:
                continue
            if not quorate:
                self._report.add("I10", number, f"{peer} holds epoch {at} final without a quorum")
            known, other = self._finals.setdefault(at, (genesis, peer))
            if known != genesis:
                self._report.add("I10", number, f"{peer} and {other} hold two epochs {at} final")
        for at, (genesis, other) in self._finals.items():
            if at <= len(names) and names[at - 1] != genesis and event["epochs"][at - 1][1]:
                self._report.add("I10", number, f"{peer} replaced epoch {at}, which was final at {other}")

    def state(self, number: int, event: Event) -> None:
        """I8: however the peer came to its state, by all messages or from an epoch, it is what the messages give."""
        if event.get("fold") == FOLD and fold(self._places, event["timeframe"]) != event["state_hash"]:
            self._report.add("I8", number, f"the state of {event['peer']} is not what its entries give")

    def quiesce(self, number: int, peers: list[str]) -> None:
        chains = {tuple(self._chains[peer]) for peer in peers if peer in self._chains}
        if len(chains) > 1:
            self._report.add("I10", number, f"{len(chains)} different chains although nothing is under way")

    def _grows(self, later: Event, earlier: Event) -> bool:
        """Whether a timeframe holds an earlier one, but for blocks that a removal cut and no quorum stands for."""
        pinned = self._facts.quorate(earlier["genesis"])
        for feed, (last, _) in earlier["timeframe"].items():
            cut = self._cuts.get(feed, last)
            if later["timeframe"].get(feed, [-1, ""])[0] < (last if pinned else min(last, cut)):
                return False
        return True
