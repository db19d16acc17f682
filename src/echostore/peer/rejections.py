"""What of a party did not enter the state, as people are told of it."""

from collections.abc import Iterable

from echostore.kernel.ids import FeedId
from echostore.kernel.items.operations import Reject
from echostore.kernel.order import FeedCursor
from echostore.kernel.party.admission import Admission
from echostore.kernel.reasons import Reason

EXCLUSIONS = frozenset({Reason.FORK, Reason.BEYOND_CUT, Reason.RETIRED, Reason.READER, Reason.UNADMITTED})
"""Why the admission keeps a whole block out."""

AFTER_INVALID_LISTED_MAX = 1024
"""Blocks of an ended feed that are listed one by one; a feed may grow for ever after its end."""


def listed_rejects(noted: Iterable[Reject], admission: Admission, cursors: Iterable[FeedCursor]) -> list[Reject]:
    """The noted rejects, the later of two at one place, with the reasons that hold now; and what ended feeds."""
    merged = {(reject.feed, reject.seq, reject.position): reject for reject in noted}
    found = [_as_of_now(reject, admission) for reject in merged.values()]
    for cursor in cursors:
        if cursor.ended is not None:
            found.append(Reject(cursor.id, cursor.length, -1, Reason.INVALID, cursor.ended))
            last = min(cursor.held, cursor.length + AFTER_INVALID_LISTED_MAX)
            found += [Reject(cursor.id, seq, -1, Reason.AFTER_INVALID, "") for seq in range(cursor.length + 1, last)]
    return sorted(found)


def _as_of_now(reject: Reject, admission: Admission) -> Reject:
    """A block that is excluded still may be so for another reason by now."""
    if reject.position >= 0 or reject.reason not in EXCLUSIONS:
        return reject
    return reject._replace(reason=admission.why_excluded(FeedId(reject.feed), reject.seq) or reject.reason)
