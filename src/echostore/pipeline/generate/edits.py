"""Operations on texts, lists and logs: made by the real models, item by item, before feeds are written.

What an operation says depends on what its writer had seen of the item, not on where its block stands. So the edits of
one item can be made by themselves, from the schedule: each writer has a replica, which takes in what others did as far
as the writer has heard of them, and is then edited.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from echostore.kernel.ids import FeedId, ItemId, Stamp
from echostore.kernel.items.operations import ItemOperation
from echostore.kernel.models.growable_array import GrowableArray
from echostore.kernel.models.text import ConcurrentText
from echostore.kernel.models.threaded_log import OwnPost, Post, PostId, Retract, ThreadedLog
from echostore.pipeline.generate.contents import words
from echostore.wire.messages import encode_operation

POOLED_MIN: Final = 5000
"""Edits below which starting other processes would take longer than it saves."""
CHUNK_EDITS: Final = 2000
"""Edits that a process takes at a time."""
REPLIES_BACK: Final = 32
"""A reply is to one of so many last posts."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One operation that an item shall get."""

    round: int
    feed: int
    seq: int


@dataclass(frozen=True, slots=True)
class ItemEdits:
    """All edits of one item, ascending by round, feed and seq: an order in which causes come first."""

    item: ItemId
    model: str
    seed: str
    edits: tuple[Edit, ...]
    heard: npt.NDArray[np.int32]
    """[edit, writer]: the last round of each writer that the edit's own has heard of; writers ascend."""
    writers: tuple[int, ...]
    ids: tuple[FeedId, ...]


def encoded_edits(work: Sequence[ItemEdits], *, processes: int) -> Iterator[list[bytes]]:
    """Of each item its operations, encoded, in the order of its edits."""
    if processes < 2 or sum(len(each.edits) for each in work) < POOLED_MIN:
        yield from map(_encoded, work)
        return
    # A new interpreter each: a fork would copy the threads of Arrow in whatever state they are.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for made in pool.map(_encoded_chunk, _chunks(work)):
            yield from made


def _chunks(work: Sequence[ItemEdits]) -> Iterator[list[ItemEdits]]:
    chunk: list[ItemEdits] = []
    size = 0
    for each in work:
        chunk.append(each)
        size += len(each.edits)
        if size >= CHUNK_EDITS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encoded_chunk(chunk: list[ItemEdits]) -> list[list[bytes]]:
    return [_encoded(each) for each in chunk]


def _encoded(work: ItemEdits) -> list[bytes]:
    bodies = _log_bodies(work) if work.model == ThreadedLog.name else _sequence_bodies(work)
    ids = dict(zip(work.writers, work.ids, strict=True))
    return [
        encode_operation(ids[edit.feed], ItemOperation(work.item, work.model, body)).SerializeToString()
        for edit, body in zip(work.edits, bodies, strict=True)
    ]


def _sequence_bodies(work: ItemEdits) -> list[Any]:
    make, change = _SEQUENCES[work.model]
    chance = random.Random(work.seed)
    place = {writer: number for number, writer in enumerate(work.writers)}
    replicas = [make(work.item) for _ in work.writers]
    for replica, feed in zip(replicas, work.ids, strict=True):
        replica.begin(feed)
    by_writer: list[list[int]] = [[] for _ in work.writers]
    taken = [[0] * len(work.writers) for _ in work.writers]
    bodies: list[Any] = []
    for number, edit in enumerate(work.edits):
        own = place[edit.feed]
        news: list[int] = []
        for other, made in enumerate(by_writer):
            at = taken[own][other]
            if other == own:
                continue
            while at < len(made) and work.edits[made[at]].round <= work.heard[number, other]:
                news.append(made[at])
                at += 1
            taken[own][other] = at
        if news:
            replica_news = [(bodies[each], _stamp(work, place, each), 0) for each in sorted(news)]
            refused = [outcome for outcome in replicas[own].apply_many(replica_news) if outcome is not None]
            assert not refused, f"an edit of {work.item.hex()} builds on what its writer had not heard of: {refused[0]}"
        change(replicas[own], chance)
        sealed = replicas[own].seal()
        if sealed is None:  # a mark on marked text, a value set again: nothing to tell
            replicas[own].append(words(chance, 1))
            sealed = replicas[own].seal()
        bodies.append(sealed)
        by_writer[own].append(number)
    return bodies


def _stamp(work: ItemEdits, place: dict[int, int], number: int) -> Stamp:
    """Sequences look at the feed alone."""
    edit = work.edits[number]
    return Stamp(1 + number, work.ids[place[edit.feed]], edit.seq, 0)


def _edit_text(text: ConcurrentText, chance: random.Random) -> None:
    size, drawn = len(text), chance.random()
    if size > 40 and drawn < 0.25:
        start = chance.randrange(size - 20)
        text.delete(start, chance.randrange(1, 20))
    elif size > 10 and drawn < 0.3:
        start = chance.randrange(size - 5)
        text.mark(start, start + chance.randrange(1, 5), "bold", True)
    else:
        text.insert(chance.randint(0, size), words(chance, chance.randrange(1, 5)) + " ")


def _edit_list(array: GrowableArray, chance: random.Random) -> None:
    size, drawn = len(array), chance.random()
    if size > 4 and drawn < 0.15:
        array.delete(chance.randrange(size))
    elif size > 1 and drawn < 0.3:
        source = chance.randrange(size)
        array.move(source, (source + chance.randrange(1, size)) % size)
    elif size and drawn < 0.45:
        array.set(chance.randrange(size), words(chance, 2))
    else:
        array.insert(chance.randint(0, size), words(chance, 2) if drawn < 0.8 else chance.randrange(1000))


_SEQUENCES: dict[str, tuple[Callable[[ItemId], Any], Callable[[Any, random.Random], None]]] = {
    ConcurrentText.name: (ConcurrentText, _edit_text),
    GrowableArray.name: (GrowableArray, _edit_list),
}


def _log_bodies(work: ItemEdits) -> list[Post | Retract]:
    chance = random.Random(work.seed)
    place = {writer: number for number, writer in enumerate(work.writers)}
    bodies: list[Post | Retract] = []
    for number, edit in enumerate(work.edits):
        other = chance.randrange(max(0, number - REPLIES_BACK), number) if number else None
        if other is None or not isinstance(bodies[other], Post) or chance.random() < 0.4:
            bodies.append(Post(words(chance, chance.randrange(4, 20))))
            continue
        post = work.edits[other]
        if post.feed == edit.feed:
            own = OwnPost(post.seq, 0)
            bodies.append(Retract(own) if chance.random() < 0.1 else Post(words(chance, 5), own))
        elif post.round <= work.heard[number, place[post.feed]]:
            named = PostId(work.ids[place[post.feed]], post.seq, 0)
            bodies.append(Post(words(chance, 5), named))
        else:
            bodies.append(Post(words(chance, 8)))
    return bodies
