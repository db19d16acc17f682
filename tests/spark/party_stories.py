"""Random small parties, lived through by real peers and published to a lake: the same case for both engines.

    with Stories(folder, seed=7) as stories:
        told = [stories.tell(number) for number in range(200)]
        lake = stories.publish()                 # blocks of all parties; told[n] has what the peers say of them

Three peers share each party: they create, write, part, meet, change roles, remove and lie. In the end all that are
still honest and members agree, and what they agree on is the answer. Keys, clocks and chance come from the seed.
"""

import os
import random
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import echostore
from echostore.kernel.errors import EchoError, ModelFailed, Refused, UsageError
from echostore.kernel.feed import Head
from echostore.kernel.ids import ItemId, Link, PartyKey
from echostore.kernel.items.operations import Reject
from echostore.kernel.timeframe import Dependency
from echostore.peer.epochs import Epochs
from echostore.peer.party import Party
from echostore.peer.peer import Peer
from echostore.pipeline.generate.lakes import generate
from echostore.pipeline.generate.shape import Shape
from echostore.pipeline.lake import Lake
from echostore.pipeline.lake.publish import publish
from echostore.testing.inmemory import link
from echostore.testing.lake_answers import PartyAnswer, lake_answers
from echostore.wire.generated import message_pb2 as pb
from echostore.wire.links import block_link, head_bytes, payload_hash
from echostore.wire.signing import SEED_BYTES, SigningKey
from peer_builder import Liar
from spark.story_models import Gadget, register

NAMES = ("ann", "bob", "cat")
IN_MEMORY = Path("/dev/shm")
"""Homes lie in memory where that is possible: three durable stores a party would cost ten times the rest."""
STEPS = (4, 26)
EPOCH_EVERY = 8
"""One story in so many goes on from an epoch that leaves out what was deleted."""
STORIES_PER_HOME = 20
"""After so many parties the peers begin with new homes: some of what a peer does grows with the number of its parties."""


@dataclass(frozen=True, slots=True)
class Told:
    """One party and what the peers say of it."""

    number: int
    party: PartyKey
    parent: PartyKey | None
    cid: str
    items: int
    rejected: tuple[Reject, ...]
    """Those of blocks above the epoch that the party stands on, if it does: what lies inside of one is done with."""
    moments: tuple[tuple[str, str], ...]
    """Anchors in the middle of the story, each with the CID that a peer had there."""
    deeds: frozenset[str]
    """What happened, for those who look for a story with something in it."""
    unknown_model: bool
    """Whether an engine that knows the shared models alone lacks one."""


@dataclass(slots=True)
class _Story:
    """A party while its story is told."""

    number: int
    key: PartyKey
    chance: random.Random
    members: list[str]
    """Who acts: a removed member and a liar don't, any more."""
    watching: list[str]
    """Who is told everything and must agree in the end."""
    deeds: set[str] = field(default_factory=set)
    moments: list[tuple[str, str]] = field(default_factory=list)
    children: list[PartyKey] = field(default_factory=list)
    child_deeds: set[str] = field(default_factory=set)


class Stories:
    """Three peers with many parties. Close it to close them."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.folder = folder
        self._seed = seed
        self._chance = random.Random(seed)
        self._stack = ExitStack()
        self._time_ms = 0
        self.peers: dict[str, Peer] = {}
        self._founders: list[Path] = []
        """The homes of those who founded the parties."""
        self._count = 0

    def __enter__(self) -> Self:
        scratch = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
        self._homes = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="stories-", dir=scratch)))
        before = SigningKey.generate
        SigningKey.generate = staticmethod(self._seeded)  # type: ignore[method-assign]  # undone on exit
        self._stack.callback(lambda: setattr(SigningKey, "generate", staticmethod(before)))
        self._stack.callback(self._close_peers)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _open_peers(self) -> None:
        self._close_peers()
        folder = self._homes / str(len(self._founders))
        for name in NAMES:
            peer = echostore.open(folder / name, name=name, background=False, now_ms=self._now_ms)
            self.peers[name] = peer
            register(peer.models)
            peer.view_classes.register("board")
        self.peers["ann"].models.register(Gadget)
        self._founders.append(folder / "ann")

    def _close_peers(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()

    def _seeded(self) -> SigningKey:
        return SigningKey.from_seed(self._chance.randbytes(SEED_BYTES))

    def _now_ms(self) -> int:
        self._time_ms += 1
        return self._time_ms

    # telling

    def tell(self, number: int) -> list[Told]:
        """Live through one story; returns its party, and its light-weight parties after it."""
        if self._count % STORIES_PER_HOME == 0:
            self._open_peers()
        self._count += 1
        story = self._begin(number)
        if number % 25:  # every so often nothing happens at all
            steps = story.chance.randrange(*STEPS)
            for step in range(steps):
                if number % EPOCH_EVERY == EPOCH_EVERY - 1 and step == 2 * steps // 3:
                    self._epoch(story)
                self._step(story)
        return self._end(story)

    def publish(self) -> Lake:
        """All parties so far, out of the homes of the peers that founded them."""
        for home in self._founders:
            publish(home, self.folder / "lake")
        return Lake.open(self.folder / "lake")

    def _begin(self, number: int) -> _Story:
        chance = random.Random(f"story {self._seed} {number}")
        ann = self.peers["ann"]
        if number % 25 == 7:
            party = ann.create_party("Alone", local=True)
            return _Story(number, party.key, chance, ["ann"], ["ann"], {"local"})
        party = ann.create_party(f"Story {number}")
        story = _Story(number, party.key, chance, ["ann"], ["ann"])
        if number % 25:
            for name in NAMES[1 : 1 + chance.choice((1, 2, 2, 2))]:
                self._join(story, name, chance.choice(("admin", "editor", "editor", "editor", "reader")))
        else:
            story.deeds.add("empty")
        return story

    def _join(self, story: _Story, name: str, role: str) -> None:
        party = self._party(story, "ann")
        self.peers[name].enter(party.members.admit(self.peers[name].request_join(story.key), role=role))
        story.watching.append(name)
        if role != "reader":
            story.members.append(name)
        else:
            story.deeds.add("reader")
        self._meet(story, "ann", name)

    def _end(self, story: _Story) -> list[Told]:
        for _ in range(3):
            for name in story.watching[1:]:
                self._meet(story, "ann", name)
                if "base epoch" in story.deeds:  # who was away has all blocks now, and can stand on it too
                    Epochs(self._party(story, name)).review()
        told = [self._told(story, story.key)]
        told += [self._told(story, child) for child in story.children]
        for name in story.watching:
            if name != "ann":
                for key in (*story.children, story.key):
                    self._forget(name, key)
        for key in (*story.children, story.key):
            self.peers["ann"].party(key).close()
        return told

    def _forget(self, name: str, key: PartyKey) -> None:
        if any(known.key == key for known in self.peers[name].parties()):
            self.peers[name].forget_party(key)

    def _told(self, story: _Story, key: PartyKey) -> Told:
        ann = self.peers["ann"].party(key)
        cid, rejected = ann.snapshot().cid, _above_base(ann)
        for name in story.watching[1:]:
            peer = self.peers[name]
            if any(known.key == key for known in peer.parties()):
                theirs = peer.party(key)
                if name not in story.members and _base(theirs) != _base(ann):
                    continue  # who may not speak any more does not work out later epochs
                assert theirs.snapshot().cid == cid, (story.number, name, story.deeds)
                assert _above_base(theirs) == rejected, (story.number, name, story.deeds)
        child = key != story.key
        return Told(
            story.number,
            key,
            story.key if child else None,
            cid,
            ann.snapshot().item_count,
            rejected,
            () if child else tuple(story.moments),
            frozenset({"child", *story.child_deeds} if child else story.deeds),
            any(each.model == Gadget.name for each in ann.snapshot().root.models),
        )

    # what happens

    def _step(self, story: _Story) -> None:
        deed: Callable[[_Story], None] = story.chance.choices(
            [self._write, self._meet_some, self._govern, self._lie, self._look, self._play],
            weights=[60, 24, 6, 4, 3, 3],
        )[0]
        deed(story)

    def _party(self, story: _Story, name: str) -> Party:
        return self.peers[name].party(story.key)

    def _meet(self, story: _Story, one: str, other: str) -> None:
        for key in (story.key, *story.children):
            peers = [self.peers[name] for name in (one, other)]
            if all(any(known.key == key for known in peer.parties()) for peer in peers):
                for peer in peers:
                    _flush(peer.party(key))
                link(peers[0], peers[1], key).pump().cut()

    def _meet_some(self, story: _Story) -> None:
        if len(story.watching) > 1:
            one, other = story.chance.sample(story.watching, 2)
            self._meet(story, one, other)

    def _look(self, story: _Story) -> None:
        party = self._party(story, "ann")
        cid = party.snapshot().cid
        story.moments.append((str(party.anchor()), cid))

    def _write(self, story: _Story) -> None:
        """A few writes by one member, now and then in a batch. One that is refused here is none."""
        name = story.chance.choice(story.members)
        party = self._party(story, name)
        try:
            if story.chance.random() < 0.2:
                story.deeds.add("batch")
                with party.batch():
                    for _ in range(story.chance.randrange(2, 5)):
                        write_something(party, story.chance, story.deeds)
            else:
                for _ in range(story.chance.randrange(1, 6)):
                    write_something(party, story.chance, story.deeds)
        except (Refused, UsageError):
            story.deeds.add("refused")

    def _epoch(self, story: _Story) -> None:
        """Everybody has seen everything, and the party goes on without what was deleted; who is away hears of it later."""
        for name in story.members:
            items = [item for item in self._party(story, name).items() if item.access is None]
            if items and story.chance.random() < 0.7:
                items[story.chance.randrange(len(items))].delete()
        self._meet_all(story)
        for name in story.members:
            self._party(story, name).create("property-set", type="seen")
        self._meet_all(story)
        away = {name for name in story.members if name != "ann" and story.chance.random() < 0.3}
        for name in away:
            self._party(story, name).create("property-set", type="away")
            for _ in range(3):
                try:
                    write_something(self._party(story, name), story.chance, set())
                except (Refused, UsageError):
                    story.deeds.add("refused")
        Epochs(self._party(story, "ann")).create(discard_before_ms=self._now_ms())
        for _ in range(2):
            self._meet_all(story, without=away)
            for name in story.watching:
                if name not in away and name != "ann":
                    Epochs(self._party(story, name)).review()
        self._meet_all(story, without=away)
        base = self._party(story, "ann").runtime.processor.base
        story.deeds.add("epoch" if base is None else "base epoch")

    def _meet_all(self, story: _Story, without: Collection[str] = ()) -> None:
        for _ in range(2):
            for name in story.watching:
                if name != "ann" and name not in without:
                    self._meet(story, "ann", name)

    def _play(self, story: _Story) -> None:
        """A light-weight party below this one."""
        parent = self._party(story, "ann")
        if "local" in story.deeds or story.children or "ann" not in story.members:
            return
        story.deeds.add("parent")
        child = self.peers["ann"].create_child(parent, "Game")
        story.children.append(child.key)
        write_something(child, story.chance, story.child_deeds)
        if "bob" in story.members and "bob" in story.watching:
            self._meet(story, "ann", "bob")
            try:
                theirs = self.peers["bob"].enter_child(self._party(story, "bob"), child.key)
                write_something(theirs, story.chance, story.child_deeds)
            except Refused:
                return
            self._meet(story, "ann", "bob")

    def _govern(self, story: _Story) -> None:
        """Ann changes who may do what; the others may not have heard of each other's last words."""
        party, others = self._party(story, "ann"), [name for name in story.members if name != "ann"]
        deed = story.chance.choice(("role", "remove", "retire", "profile", "policy", "group", "revoke"))
        if deed in ("role", "remove", "retire", "revoke") and not others:
            return
        who = story.chance.choice(others) if others else ""
        peer = self.peers.get(who)
        try:
            if deed == "role" and peer is not None:
                role = story.chance.choice(("reader", "editor", "admin"))
                party.members.change_role(peer.identity, role)
            elif deed == "remove" and peer is not None:
                write_something(self._party(story, who), story.chance, set())  # nobody has seen this one
                party.members.remove(peer.identity)
            elif deed == "retire" and peer is not None:
                own = self._party(story, who).runtime.data
                assert own is not None
                party.members.retire_feed(own.cursor.key)
            elif deed == "revoke" and peer is not None:
                party.members.revoke_device(peer.identity, peer.device)
            elif deed == "profile":
                party.members.set_profile(f"ann {story.chance.randrange(100)}")
            elif deed == "policy":
                party.members.set_policy({"colour": story.chance.randbytes(3)})
            elif deed == "group":
                members = [self.peers[name].identity for name in others]
                party.members.admit_group(story.chance.randbytes(32), "friends", "reader", members)
        except (Refused, UsageError):
            return
        story.deeds.add(deed)
        if deed in ("remove", "revoke", "retire"):
            story.members.remove(who)

    def _lie(self, story: _Story) -> None:
        """A member's keys act past its program: from then on it is not among the honest."""
        others = [name for name in story.members if name != "ann"]
        if not others or "lie" in story.deeds:
            return
        who = story.chance.choice(others)
        self._meet(story, "ann", who)
        peer, party = self.peers[who], self._party(story, who)
        own = party.runtime.data
        if own is None or own.cursor.length == 0:
            return
        story.deeds.add("lie")
        story.members.remove(who)
        story.watching.remove(who)
        liar = Liar(peer, party)
        lies = [_fork, _undecodable, _lying_depth, _malformed, _no_item, _waiting]
        lie = story.chance.choice(lies)
        story.deeds.add(lie.__name__.strip("_"))
        lie(self, story, liar)

    def deliver(self, story: _Story, liar: Liar, start: int, payloads: list[bytes], head: Head) -> None:
        self.peers["ann"].sync_port(story.key).ingest(liar.key, "data", start, payloads, head)


# --- lies -------------------------------------------------------------------------------------------------------------


def _fork(stories: Stories, story: _Story, liar: Liar) -> None:
    """Another last block than the one that everybody has."""
    feeds = stories.peers["ann"].party(story.key).runtime.feeds
    seq = liar.length - 1
    held = feeds.block(liar.key, seq)
    message = pb.Message.FromString(held.payload)
    message.time_ms += 1
    payload = message.SerializeToString()
    before = feeds.link_at(liar.key, seq - 1) if seq else Link(bytes(32))
    assert before is not None
    at = block_link(liar.key, seq, before, payload_hash(payload))
    head = Head(seq + 1, at, liar._key.sign(head_bytes(story.key, liar.key, seq + 1, at)))
    stories.deliver(story, liar, seq, [payload], head)


def _undecodable(stories: Stories, story: _Story, liar: Liar) -> None:
    stories.deliver(story, liar, *liar.signed(b"\xff\xff\xff", liar.message()))


def _lying_depth(stories: Stories, story: _Story, liar: Liar) -> None:
    stories.deliver(story, liar, *liar.signed(liar.message(depth=liar.depth + 9)))


def _malformed(stories: Stories, story: _Story, liar: Liar) -> None:
    stories.deliver(story, liar, *liar.signed(liar.message(pb.Operation(local=3))))


def _no_item(stories: Stories, story: _Story, liar: Liar) -> None:
    item = ItemId(b"nobody!!" + bytes(8))
    stories.deliver(story, liar, *liar.signed(liar.message(liar.set(item, n=1), liar.genesis())))


def _waiting(stories: Stories, story: _Story, liar: Liar) -> None:
    future = Dependency(liar.feed[::-1], 99, b"x" * 16, 500)  # type: ignore[arg-type]  # a FeedId of nobody
    stories.deliver(story, liar, *liar.signed(liar.message(after=[future])))


# --- writes -----------------------------------------------------------------------------------------------------------


def write_something(party: Party, chance: random.Random, deeds: set[str]) -> None:
    """One write of any kind that the items here allow."""
    items = party.items()
    if len(items) < 2 or chance.random() < 0.25:
        _create(party, items, chance, deeds)
        return
    item = chance.choice(items)
    if chance.random() < 0.25:
        _arrange(party, item, items, chance, deeds)
    else:
        _edit(item, chance, deeds)


def _create(party: Party, items: list[Any], chance: random.Random, deeds: set[str]) -> None:
    parent = chance.choice(items) if items and chance.random() < 0.4 else None
    kind = chance.choice(
        (
            "property-set",
            "property-set",
            "text",
            "growable-array",
            "threaded-log",
            "tally",
            "sum",
            "view",
            "link",
            "gadget",
        )
    )
    if kind == "gadget" and (party.peer.name != "ann" or chance.random() < 0.8):
        return
    deeds.add(kind)
    if kind == "view":
        party.create_view("board", f"Board {chance.randrange(9)}", parent=parent)
    elif kind == "link":
        if len(items) > 1:
            party.link(*chance.sample(items, 2), type="near", far=chance.randrange(9))
    elif kind == "property-set":
        party.create(kind, type=chance.choice(("task", "note")), parent=parent, n=chance.randrange(9), text="new")
    else:
        made = party.create(kind, type="thing", parent=parent)
        if chance.random() < 0.3:
            made.name = "named"


def _edit(item: Any, chance: random.Random, deeds: set[str]) -> None:
    number, drawn = chance.randrange(100), chance.random()
    if item.model == "property-set":
        _edit_properties(item, number, drawn)
    elif item.model == "text":
        if len(item) > 8 and drawn < 0.3:
            item.delete(number % (len(item) - 3), 3)
        elif len(item) > 4 and drawn < 0.4:
            item.mark(0, 3, "bold", True)
        else:
            item.insert(number % (len(item) + 1), f"w{number} ")
    elif item.model == "growable-array":
        if len(item) > 2 and drawn < 0.2:
            del item[number % len(item)]
        elif len(item) > 2 and drawn < 0.4:
            item.move_element(number % len(item), (number + 1) % len(item))
        else:
            item.insert(number % (len(item) + 1), number)
    elif item.model == "threaded-log":
        posts = item.posts()
        item.post(f"post {number}", reply_to=chance.choice(posts) if posts and drawn < 0.5 else None)
    elif not item.opaque:
        with suppress(ModelFailed):  # what a model raises on is refused where it is written
            item.apply(number if item.model == "sum" else ("no" if drawn < 0.1 else f"said {number}"))
    deeds.add(f"edit {item.model}")


def _edit_properties(item: Any, number: int, drawn: float) -> None:
    if drawn < 0.5:
        item[("n", "text", "done")[number % 3]] = number
    elif drawn < 0.6:
        item[("deep", "er")] = {"list": [number, None, 1.5], "b": b"bytes"}
    elif drawn < 0.7:
        item.increment("count", number)
    elif drawn < 0.8:
        item.add("tags", f"t{number % 3}")
    elif drawn < 0.9:
        item.remove("tags", f"t{number % 3}")
    elif "text" in item:
        del item["text"]


def _arrange(party: Party, item: Any, items: list[Any], chance: random.Random, deeds: set[str]) -> None:
    deed = chance.choice(("move", "embed", "delete", "name", "restrict", "undo", "top", "restore"))
    deeds.add(deed)
    try:
        if deed == "move":
            item.move(chance.choice(items))
        elif deed == "top":
            item.move(None)
        elif deed == "embed":
            item.embed_in(chance.choice(items))
        elif deed == "delete":
            item.delete()
        elif deed == "restore":
            for gone in party.items(deleted=True)[:1]:
                gone.restore()
        elif deed == "name":
            item.name = f"name {chance.randrange(9)}"
        elif deed == "restrict":
            item.restrict(roles=[chance.choice(("admin", "editor"))])
        elif deed == "undo" and not party.runtime.in_batch:
            party.undo()
    except (Refused, UsageError):  # a cycle, nothing to undo, somebody's rule
        deeds.add("refused")


def _base(party: Party) -> Any:
    base = party.runtime.processor.base
    return None if base is None else base.name


def _above_base(party: Party) -> tuple[Reject, ...]:
    base = party.runtime.processor.base
    inside = base if base is not None and base.name.discards else None
    return tuple(each for each in party.rejected() if inside is None or each.seq >= inside.length(each.feed))


def _flush(party: Party) -> None:
    try:
        party.flush()
    except EchoError:  # open edits of one who may not write any more
        party.flush()


def many_feeds(folder: Path, *, feeds: int = 1000) -> tuple[Lake, PartyAnswer]:
    """A party with more members than one would open peers for: generated, and answered by a peer."""
    lake = Lake.create(folder / "lake")
    generate(Shape(feeds=feeds, messages=8 * feeds, items=feeds // 2), lake)
    scratch = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="observer-", dir=scratch) as home:
        (answer,) = lake_answers(lake, Path(home))
    return lake, answer
