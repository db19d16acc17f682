"""A base of which blobs are lost: who notices, what is said of it, and what can still be done meanwhile.

    closed   its root, its cut, or pages that opening needs are gone: nothing is read or written before they are back
    open     single pages are gone: their items can't be read, all else can; no checkpoint is taken of such a state

The feeds are whole either way: blocks above the base are kept, and folded on top once it is. What is lost comes from other
members (`base_mending`). That something is, is kept in the FeedStore, so that a restart goes on where this process ended.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echostore.kernel.errors import Corrupt, NotFound
from echostore.kernel.ids import Cid
from echostore.kernel.order import DATA
from echostore.wire.base_epoch import BASE_KEY, MENDING_KEY, BaseName

if TYPE_CHECKING:
    from echostore.peer.processor import PartyProcessor
    from echostore.store.feed_store import FeedStore


@dataclass(frozen=True, slots=True)
class BaseDamage:
    """Which base lost blobs, how that was found, and whether the party is closed for it."""

    name: BaseName
    what: str
    closed: bool
    nobody_else: Callable[[], bool] = field(compare=False)
    """Whether no other device could have it. Asked late: a party is found damaged before its members are known."""

    @staticmethod
    def of(processor: "PartyProcessor", name: BaseName, what: str, *, closed: bool) -> "BaseDamage":
        return BaseDamage(name, what, closed, lambda: only_copy(processor))

    @property
    def text(self) -> str:
        lost = "the snapshot of the epoch that the party stands on is lost"
        if not self.closed:
            lost = "pages of the epoch that the party stands on are lost"
        return f"{lost} (epoch {self.name.number}): {self.what}"

    @property
    def unchanged(self) -> str:
        kept = "" if self.closed else "Items of other pages can be read and written. "
        return f"{kept}What was written since that epoch is kept, and is folded on top of it once it is back."

    @property
    def next_step(self) -> str:
        if self.nobody_else():
            return (
                "Restore blobs.db of the party from a backup: nobody else is in it, so no other peer has this. Do not "
                "forget the party, or what was written since is gone too."
            )
        return (
            "Connect to a member, and it is fetched again by itself: `echostore serve --connect HOST:PORT`, or "
            f"`echostore epoch fetch {self.name.number} --from HOST:PORT`. Where no member has it: restore blobs.db of "
            "the party from a backup, or forget the party here and join it again."
        )

    def error(self) -> Corrupt:
        return Corrupt(self.text, unchanged=self.unchanged, next_step=self.next_step)


def only_copy(processor: "PartyProcessor") -> bool:
    """Whether this is the only device of the party's only member: what is not here is nowhere."""
    return processor.membership.machine.member_devices == 1


def missing(blobs: int) -> str:
    """So many blobs of the base were found to be missing; there may be more below them."""
    return f"at least {blobs:,} {'blob of it is' if blobs == 1 else 'blobs of it are'} missing"


def truncated(processor: "PartyProcessor") -> bool:
    """Whether blocks of data feeds are gone: then only the base has what they said."""
    return is_truncated(processor.feeds)


def is_truncated(feeds: "FeedStore") -> bool:
    return any(held.base for held in feeds.feeds() if held.kind == DATA)


def watched_blobs(processor: "PartyProcessor") -> Callable[[Cid], bytes]:
    """Gives the blobs of the base and of the tree of live items. One that is lost or damaged is noticed."""

    def get(cid: Cid) -> bytes:
        try:
            if processor.blobs is None:
                raise NotFound("there is no blobs.db")
            return processor.blobs.get(cid)
        except (NotFound, Corrupt) as error:
            notice(processor, error.what)
            raise

    return get


def notice(processor: "PartyProcessor", what: str) -> None:
    """Blobs that the party needs are lost: from now on no checkpoint is taken, and they are asked for."""
    base = processor.base
    if base is None or processor.damage is not None:
        return
    processor.damage = BaseDamage.of(processor, base.name, what, closed=False)
    mark(processor)
    for told in list(processor.on_damage):
        told()


def mark(processor: "PartyProcessor") -> None:
    """Keep it over the end of the process that blobs of the base are lost."""
    snapshot = _snapshot_named(processor)
    if snapshot is not None and writes(processor) and not is_marked(processor):
        processor.feeds.set_about({MENDING_KEY: snapshot})


def unmark(processor: "PartyProcessor") -> None:
    if writes(processor):
        processor.feeds.set_about({MENDING_KEY: None})


def writes(processor: "PartyProcessor") -> bool:
    """Whether this processor may write its stores: a reader and a look at the past may not."""
    return processor.items is not None and processor.items.database.writable


def is_marked(processor: "PartyProcessor") -> bool:
    """Whether blobs of the base that the FeedStore names were found lost."""
    marked = processor.feeds.about(MENDING_KEY)
    return marked is not None and marked == _snapshot_named(processor)


def _snapshot_named(processor: "PartyProcessor") -> Cid | None:
    stored = processor.feeds.about(BASE_KEY)
    try:
        return BaseName.decode(stored).snapshot if stored else None
    except Corrupt:
        return None  # of feeds.db, which says so itself
