"""The checker's judgement of liveness (I14): what members asked for has come about, whatever the faulty did.

An `ask` names entries that were there when it was made. An epoch that was asked for is there when a final epoch of every
correct peer contains them; an invitation or a recovery, when the peer that it was for has a state with them. Standard
library only.
"""

from typing import Any

from echostore.testing.history_epochs import EpochFacts
from echostore.testing.verdict import Report

Event = dict[str, Any]
Timeframe = dict[str, list[Any]]

EPOCH, INVITATION, RECOVERY = "epoch", "invitation", "recovery"


class Liveness:
    """What was asked for, and what each correct peer has."""

    def __init__(self, facts: EpochFacts, cuts: dict[str, int], report: Report) -> None:
        self._facts, self._cuts, self._report = facts, cuts, report
        self._asked: list[Event] = []
        self._finals: dict[str, list[str]] = {}
        self._states: dict[str, Timeframe] = {}

    def ask(self, number: int, event: Event) -> None:
        if event["what"] not in (EPOCH, INVITATION, RECOVERY):
            self._report.add("H", number, f"nobody can ask for {event['what']!r}")
            return
        self._asked.append({"what": event["what"], "peer": event["peer"], "timeframe": dict(event["timeframe"])})

    def chain(self, event: Event) -> None:
        self._finals[event["peer"]] = [genesis for genesis, final in event["epochs"] if final]

    def state(self, event: Event) -> None:
        self._states[event["peer"]] = event["timeframe"]

    def quiesce(self, number: int, peers: list[str]) -> None:
        for asked in self._asked:
            wanted, who = asked["timeframe"], asked["peer"]
            if asked["what"] == EPOCH:
                for peer in peers:
                    if not any(self._holds(self._contents(each), wanted) for each in self._finals.get(peer, ())):
                        self._report.add("I14", number, f"{who} asked for an epoch, and {peer} has none that is final")
            elif who not in peers or not self._holds(self._states.get(who, {}), wanted):
                self._report.add("I14", number, f"the {asked['what']} of {who} did not come about")

    def _contents(self, genesis: str) -> Timeframe:
        declared = self._facts.declared.get(genesis)
        return declared["timeframe"] if declared is not None else {}

    def _holds(self, contents: Timeframe, wanted: Timeframe) -> bool:
        """Whether something holds what was asked for, but for what a removal has cut."""
        return all(
            contents.get(feed, [-1])[0] >= min(last, self._cuts.get(feed, last)) for feed, (last, *_) in wanted.items()
        )
