"""Deny by default: every type of message over every link that is not the victim's, at a root and at an edge.

A type of message that is added without a rule, or without an example here, fails these tests.
"""

from dataclasses import replace
from typing import Any, get_args

import pytest

from echostore.kernel.coherence.edge import Edge
from echostore.kernel.coherence.events import UP, ChildOpened, LinkId, Opening, Received, Refusal, Send
from echostore.kernel.coherence.guard import RULES, Guard
from echostore.kernel.coherence.messages import (
    Acquire,
    Announce,
    Arc,
    Attach,
    Attached,
    Backpressure,
    BeginUpdate,
    Below,
    Connectivity,
    Deannounce,
    Denied,
    EndUpdate,
    FollowsEpoch,
    Gone,
    Grant,
    GrantArc,
    GrantSystemId,
    IndexValue,
    IssuedId,
    LaneItem,
    Linked,
    Message,
    MessageId,
    NotifyReplicated,
    NullUpdate,
    Pin,
    PublishOp,
    RejectOp,
    RejectReason,
    ReleaseArc,
    Service,
    Spec,
    SystemId,
    Touched,
    Undelivered,
    Update,
    UserMessage,
    UserQueued,
    UserReceipt,
    WaitForEpoch,
)
from echostore.kernel.coherence.root import Root
from echostore.kernel.coherence.serving import SHOWN_BYTES_MAX, Serving
from echostore.testing.coherence_attack_models import (
    EDGE,
    NEIGHBOUR,
    PROOFS,
    RIGHTS,
    STRAY,
    TARGET,
    THIEF,
    VICTIM,
    credential,
    signed_as,
)
from echostore.testing.coherence_models import PLAIN, ROOT
from echostore.testing.coherence_search import freeze

SPEC = Spec(b"spec")
LINK_ONLY = {Acquire, Touched, Pin, WaitForEpoch}
"""What a link says of nobody but itself."""

UNKNOWN = LinkId("unknown")
"""A link that showed nothing."""


def examples(victim: SystemId, own: SystemId) -> dict[type, Message]:
    """Of every type one message that speaks for the victim, as far as the type speaks for anybody."""
    arc, id, clock = Arc(victim, 1), MessageId(victim, 1, 1), Arc(ROOT)
    op = PublishOp(IssuedId(arc, 1), b"item", b"delta")
    found: list[Message] = [
        Attach(5, victim, wants_arc=True, seen=0),
        Attached((1,), victim, 0, (FollowsEpoch(arc, 1),)),
        GrantSystemId(5, victim),
        GrantArc(Arc(victim, 2), 1 << 24),
        ReleaseArc(arc, 0),
        Linked(clock, 0),
        Update(arc, 0, 1, (), (op,)),
        RejectOp(op.op, RejectReason.EXCLUDED),
        BeginUpdate(arc, 0, 1),
        LaneItem(arc, 1, 0, 0, op),
        EndUpdate(arc, 0, 1, (), ((0, 0),)),
        NullUpdate(arc, 0, 1),
        Acquire(SPEC),
        Grant(SPEC, None, 0, 0, IndexValue(b"lie")),
        Gone(SPEC, 0, 0),
        Denied(SPEC, RejectReason.NOT_ALLOWED),
        Touched((SPEC,)),
        Pin(0),
        NotifyReplicated(arc, 9, ROOT, 0),
        WaitForEpoch(arc, 1),
        Announce(Service(victim, "trap"), 1, 1),
        Deannounce(Service(victim, "chess"), 9, 9),
        Connectivity(victim, affects_all_services=True, turn=(1,)),
        UserMessage(id, 1, own, (), "note", b"forged"),
        UserReceipt(MessageId(own, 1, 1), victim),
        Undelivered(id, RejectReason.EXPIRED),
        UserQueued(id),
        Backpressure("all", 1.0),
    ]
    return {type(each): each for each in found}


TYPES = sorted(get_args(Message), key=lambda each: str(each.__name__))
SAMPLE = examples(SystemId(b"r" * 16, (2,)), SystemId(b"r" * 16, (9,)))


class Tree:
    """A root with an edge; the victim is at the root itself or behind the edge."""

    def __init__(self, *, behind: bool) -> None:
        self.root, self.edge = Root(ROOT, PLAIN, proofs=PROOFS), Edge(PLAIN, proofs=PROOFS)
        for link in (EDGE, THIEF, STRAY, TARGET, UNKNOWN, *(() if behind else (VICTIM,))):
            self.root.receive(ChildOpened(link, 1))
        for link in (VICTIM, NEIGHBOUR, UNKNOWN):
            self.edge.receive(ChildOpened(link, 1))
        self.pass_up(self.edge.receive(Opening(UP, 1, 1)))
        self.names: dict[LinkId, SystemId] = {}
        for number, link in enumerate([VICTIM, TARGET, THIEF, STRAY, NEIGHBOUR]):
            shown = credential(RIGHTS[link].key)
            attach = Attach(100 + number, None, wants_arc=True, seen=0, credential=shown)
            below = link == NEIGHBOUR or (link == VICTIM and behind)
            system = self.edge if below else self.root
            answers = system.receive(Received(link, 1, attach))
            if below:
                self.pass_up(answers)
            owners = self.root.batches.arcs.owners
            self.names[link] = next(name for name, key in owners.items() if key == RIGHTS[link].key)

    def pass_up(self, effects: list[Any]) -> None:
        for up in [each for each in effects if isinstance(each, Send) and each.link == UP]:
            for down in self.root.receive(Received(EDGE, 1, up.message)):
                if isinstance(down, Send) and down.link == EDGE:
                    self.pass_up(self.edge.receive(Received(UP, 1, down.message)))

    def says(self, link: LinkId, message: Message, *, at_edge: bool) -> list[Any]:
        """What comes of a message, which must be refused with everything as it was."""
        system: Root | Edge = self.edge if at_edge else self.root
        return system.receive(Received(link, 1, message))


def test_every_type_of_message_has_a_rule_and_an_example() -> None:
    assert set(RULES) == set(TYPES)
    assert set(SAMPLE) == set(TYPES)


def test_a_type_without_a_rule_is_refused() -> None:
    class Fresh:
        """A message that somebody adds, and nobody thinks of."""

    assert Guard(PROOFS, Tree(behind=False).root.serving).refusal(THIEF, Fresh()) is RejectReason.NOT_ALLOWED  # type: ignore[arg-type]


PLACES = [
    pytest.param(THIEF, False, False, id="a leaf at the root"),
    pytest.param(STRAY, False, False, id="an edge, of a leaf at the root"),
    pytest.param(THIEF, True, False, id="a leaf at the root, of one behind an edge"),
    pytest.param(STRAY, True, False, id="an edge, of a leaf behind another"),
    pytest.param(EDGE, True, False, id="the victim's own edge, without its signature"),
    pytest.param(NEIGHBOUR, True, True, id="a leaf behind the same edge"),
    pytest.param(UNKNOWN, False, False, id="a link at the root that showed nothing"),
    pytest.param(UNKNOWN, True, True, id="a link at the edge that showed nothing"),
]


@pytest.mark.parametrize("said", TYPES, ids=lambda each: each.__name__)
@pytest.mark.parametrize(("link", "behind", "at_edge"), PLACES)
def test_no_link_speaks_for_a_system_that_is_not_its_own(link: LinkId, behind: bool, at_edge: bool, said: type) -> None:
    tree = Tree(behind=behind)
    victim = tree.names[VICTIM]
    message = examples(victim, tree.names.get(link, tree.names[THIEF]))[said]
    if said in LINK_ONLY and link != UNKNOWN:
        return  # nobody is spoken for: see the test below
    if link == EDGE and said in {Attach, Connectivity, LaneItem, BeginUpdate, EndUpdate, NullUpdate}:
        message = _of_its_edge(tree, message)
    before = freeze(tree.root), freeze(tree.edge)
    lies = [message, signed_as(message, RIGHTS[link].key if link in RIGHTS else b"nobody")]
    for lie in lies:
        effects = tree.says(link, lie, at_edge=at_edge)
        passed_up = [each for each in effects if isinstance(each, Send) and each.link == UP]
        if passed_up and said is Attach:  # whose a system is only the root knows
            assert at_edge
            answers = [each for up in passed_up for each in tree.root.receive(Received(EDGE, 1, up.message))]
            assert [type(each) for each in answers] == [Refusal]
            assert freeze(tree.root) == before[0]
            continue
        assert [type(each) for each in effects] == [Refusal], effects
        assert (freeze(tree.root), freeze(tree.edge)) == before


def _of_its_edge(tree: Tree, message: Message) -> Message:
    """What the way to the victim may not say either: of its own system, or of one that is elsewhere."""
    target = tree.names[TARGET]
    match message:
        case Attach():
            return replace(message, turn=(9,), credential=credential(b"edge"))
        case Connectivity():
            return ReleaseArc(Arc(target, 1), 0)
        case _:
            return replace(message, clock=Arc(target, 1))  # type: ignore[call-arg]


@pytest.mark.parametrize("said", sorted(LINK_ONLY, key=lambda each: each.__name__), ids=lambda each: each.__name__)
def test_what_a_link_says_of_itself_concerns_nobody_else(said: type) -> None:
    tree = Tree(behind=False)
    message = examples(tree.names[VICTIM], tree.names[THIEF])[said]
    shown = freeze(tree.root.serving.links[VICTIM]), freeze(tree.root.batches), freeze(tree.root.serving.routes)
    effects = tree.says(THIEF, message, at_edge=False)
    assert all(each.link == THIEF for each in effects if isinstance(each, Send))
    after = freeze(tree.root.serving.links[VICTIM]), freeze(tree.root.batches), freeze(tree.root.serving.routes)
    assert after == shown


def test_an_edge_names_those_who_showed_themselves_and_no_others() -> None:
    tree = Tree(behind=True)
    victim, target = tree.names[VICTIM], tree.names[TARGET]
    below = (
        Below(victim, (1,), credential(b"victim")),
        Below(target, (2,), credential(b"victim")),  # by another's credential
        Below(target, (3,)),
        Below(SystemId(b"r" * 16, (99,)), (4,), credential(b"victim")),
    )
    tree.root.receive(ChildOpened(EDGE, 2))
    effects = tree.root.receive(Received(EDGE, 2, Attach(1, None, False, 0, below)))
    assert sum(isinstance(each, Refusal) for each in effects) == 3
    assert tree.root.serving.leads_to(victim, EDGE)
    assert not tree.root.serving.leads_to(target, EDGE)


def test_to_read_everything_is_not_to_speak_for_anybody() -> None:
    tree = Tree(behind=False)
    victim = tree.names[VICTIM]
    for lie in (
        Attach(7, tree.names[THIEF], False, 0, (Below(victim, (1,)),)),
        Attach(7, tree.names[THIEF], False, 0, (Below(victim, (1,), credential(b"victim")),)),
        Attach(7, victim, False, 0, (), (1,), credential(b"victim")),
    ):
        assert [type(each) for each in tree.says(THIEF, lie, at_edge=False)] == [Refusal]


def test_a_connection_behind_an_edge_never_shows_another_credential() -> None:
    """Else what the root confirmed would be one credential, and what counts below the edge another."""
    tree = Tree(behind=True)
    lower = Attach(70, None, False, 0, credential=credential(b"stray"))
    tree.edge.receive(ChildOpened(STRAY, 1))
    tree.pass_up(tree.edge.receive(Received(STRAY, 1, lower)))
    shown = Attach(71, None, False, 0, (), (4,), credential(b"target"))
    tree.pass_up(tree.edge.receive(Received(STRAY, 1, shown)))
    other = replace(shown, credential=credential(b"thief"))
    assert [type(each) for each in tree.says(STRAY, other, at_edge=True)] == [Refusal]
    assert tree.edge.serving.credentials[STRAY, (4,)] == credential(b"target")


def test_who_is_behind_an_edge_and_worth_nothing_any_more_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(behind=True)
    victim = tree.names[VICTIM]
    assert tree.root.review() == []
    assert tree.root.serving.leads_to(victim, EDGE)
    monkeypatch.setattr(type(PROOFS), "shown", lambda self, credential: None)
    tree.root.review()
    assert not tree.root.serving.leads_to(victim, EDGE)
    assert tree.root.serving.leads_to(tree.names[THIEF], THIEF), "it showed its key here"


def test_credentials_below_an_edge_fit_into_one_message() -> None:
    serving = Serving(Edge(PLAIN).cache.holdings, PLAIN)
    half = bytes(SHOWN_BYTES_MAX // 2)
    assert [serving.show(STRAY, (number,), half) for number in range(3)] == [True, True, False]
    serving.close(STRAY)
    assert (serving.shown_bytes, serving.credentials) == (0, {})
