"""Why something was rejected, quarantined or is waiting: one closed list, the same on every peer and in Spark.

The string is stable: it is stored, shown by the CLI, and joined on by analysts.
"""

from enum import StrEnum


class Reason(StrEnum):
    """A typed reason. Feed reasons end or freeze a feed, block reasons exclude a block, operation reasons one operation."""

    # feeds
    BAD_LINK = "bad-link"
    BAD_SIGNATURE = "bad-signature"
    GAP = "gap"
    OVERSIZE = "oversize"
    FORK = "fork"
    INVALID = "invalid"
    AFTER_INVALID = "after-invalid"
    # why a block's envelope is permanently invalid (detail of INVALID)
    UNDECODABLE = "undecodable"
    LYING_DEPTH = "lying-depth"
    TIMEFRAME_BACKWARDS = "timeframe-backwards"
    TIMEFRAME_BRANCH = "timeframe-branch"
    WRONG_KIND = "wrong-kind"
    # blocks
    UNADMITTED = "unadmitted"
    READER = "reader"
    BEYOND_CUT = "beyond-cut"
    RETIRED = "retired"
    WAITING = "waiting"
    # operations
    MALFORMED = "malformed"
    NO_ITEM = "no-item"
    NO_PARENT = "no-parent"
    WRONG_MODEL = "wrong-model"
    DENIED = "denied"
    MODEL_FAILED = "model-failed"
    BAD_PROOF = "bad-proof"
    DUPLICATE = "duplicate"
    DUPLICATE_VIEW = "duplicate-view"
    CYCLE = "cycle"
    FORGED_WRITER = "forged-writer"
    BUILDS_ON_EXCLUDED = "builds-on-excluded"
    DISCARDED = "discarded"
    # credentials
    NOT_AUTHORISED = "not-authorised"
    ISSUER_UNKNOWN = "issuer-unknown"
    ISSUER_REMOVED = "issuer-removed"
    DEVICE_UNKNOWN = "device-unknown"
    DEVICE_REVOKED = "device-revoked"
    FEED_COLLISION = "feed-collision"
    CREATOR_PROTECTED = "creator-protected"
    SELF_CHANGE = "self-change"
    SUPERSEDED = "superseded"
    NOT_GENESIS = "not-genesis"
    CHAIN_BROKEN = "chain-broken"
    OTHER_PARTY = "other-party"
    SUBJECT_UNKNOWN = "subject-unknown"
    TOO_MANY = "too-many"
