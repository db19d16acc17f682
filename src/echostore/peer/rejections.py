"""What of a party did not enter the state, as people are told of it.

The list is a function of the blocks, the admission and the base, and so equal on peers that agree on these. Which branch of
a forked feed a peer holds, and how much of the others it keeps, depends on who came first: from the fork on the feed is
listed once, at the first block that has rivals, and nothing is said of the blocks of single branches.
"""

from collections.abc import Iterable, Iterator

from echostore.kernel.ids import FeedId, feed_id
from echostore.kernel.items.operations import Reject
from echostore.kernel.order import FeedCursor
from echostore.kernel.party.admission import Admission
from echostore.kernel.party.credentials import FeedKind
from echostore.kernel.reasons import Reason

EXCLUSIONS = frozenset({Reason.FORK, Reason.BEYOND_CUT, Reason.RETIRED, Reason.READER, Reason.UNADMITTED})
"""Why the admission keeps a whole block out."""

AFTER_INVALID_LISTED_MAX = 1024
"""Blocks of an ended feed that are listed one by one; a feed may grow for ever after its end."""


def listed_rejects(noted: Iterable[Reject], admission: Admission, cursors: Iterable[FeedCursor]) -> list[Reject]:
    """The noted rejects, the later of two at one place, with the reasons that hold now; what ended feeds; and forks."""
    forked = dict(_forked(admission))
    merged = {(reject.feed, reject.seq, reject.position): reject for reject in noted}
    found = [_as_of_now(reject, admission) for reject in merged.values()]
    for cursor in cursors:
        if cursor.ended is not None:
            found.append(Reject(cursor.id, cursor.length, -1, Reason.INVALID, cursor.ended))
            last = min(cursor.held, cursor.length + AFTER_INVALID_LISTED_MAX)
            found += [Reject(cursor.id, seq, -1, Reason.AFTER_INVALID, "") for seq in range(cursor.length + 1, last)]
    shared = [reject for reject in found if reject.seq < forked.get(FeedId(reject.feed), reject.seq + 1)]
    return sorted([*shared, *(_fork(feed, at, admission) for feed, at in forked.items() if _is_data(feed, admission))])


def _forked(admission: Admission) -> Iterator[tuple[FeedId, int]]:
    """From where on feeds have several branches."""
    for each in admission.followed:
        if each.branches_from is not None:
            yield feed_id(each.feed), each.branches_from


def _is_data(feed: FeedId, admission: Admission) -> bool:
    """Blocks of control feeds are not listed here, but their credentials (`Members.rejected`)."""
    known = admission.follows(feed)
    return known is not None and known.kind is FeedKind.DATA


def _fork(feed: FeedId, at: int, admission: Admission) -> Reject:
    return Reject(feed, at, -1, admission.why_excluded(feed, at) or Reason.FORK, "")


def _as_of_now(reject: Reject, admission: Admission) -> Reject:
    """A block that is excluded still may be so for another reason by now."""
    if reject.position >= 0 or reject.reason not in EXCLUSIONS:
        return reject
    return reject._replace(reason=admission.why_excluded(FeedId(reject.feed), reject.seq) or reject.reason)
