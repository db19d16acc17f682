"""The Arrow schemas of all that passes between stages: one block per stage, written down once.

Keys of parties and feeds have 32 bytes, feed ids 8, item ids 16, links 32. Spark knows binary columns of any length only,
so lengths are checked where bytes come from outside.
"""

import pyarrow as pa

# The lake: rows of a blocks file.
BLOCKS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("control", pa.bool_(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("link", pa.binary(), nullable=False),
        # The depth that the envelope claims, 0 when it can't be decoded. A hint: verify compares it with the payload.
        pa.field("depth", pa.int64(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        # On the last block of a head.
        pa.field("signature", pa.binary()),
        # On the first block of a run: link and depth of the block before it.
        pa.field("previous", pa.binary()),
        pa.field("previous_depth", pa.int64()),
    ]
)

# A run: consecutive blocks of one feed in one file, each linked to the one before.
RUNS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("control", pa.bool_(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("previous", pa.binary(), nullable=False),
        pa.field("last_link", pa.binary(), nullable=False),
        pa.field("last_depth", pa.int64(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
    ]
)

# Operations on their way to the items. Inside a parcel (below) feeds and items are numbers that sort like their bytes:
# an item is its creator's feed id and its local number. `place` is seq << 16 | position.

# A plain change: sets one property, or deletes it (no value). Several changes of one operation share its place.
PLAIN_CHANGES = pa.schema(
    [
        pa.field("creator", pa.uint64(), nullable=False),
        pa.field("local", pa.uint64(), nullable=False),
        pa.field("metadata", pa.bool_(), nullable=False),
        pa.field("feed", pa.uint64(), nullable=False),
        pa.field("depth", pa.uint64(), nullable=False),
        pa.field("place", pa.uint64(), nullable=False),
        pa.field("change", pa.uint32(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("value", pa.binary()),
    ]
)

# Any other operation, as its bytes. `kind` is its field in the schema's Operation; `alone`: the only one of its message,
# so that whether it is well-formed need not be known before it is folded.
REST_OPERATIONS = pa.schema(
    [
        pa.field("creator", pa.uint64(), nullable=False),
        pa.field("local", pa.uint64(), nullable=False),
        pa.field("feed", pa.uint64(), nullable=False),
        pa.field("depth", pa.uint64(), nullable=False),
        pa.field("place", pa.uint64(), nullable=False),
        pa.field("time_ms", pa.int64(), nullable=False),
        pa.field("alone", pa.bool_(), nullable=False),
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("operation", pa.binary(), nullable=False),
    ]
)

# What is shuffled: many operations for one bucket of items of one party, as the bytes of an Arrow stream. A million
# operations are a few thousand rows, so that the shuffle moves bytes and looks at nothing.
PARCELS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("bucket", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("plain", pa.binary()),
        pa.field("rest", pa.binary()),
        pa.field("asked", pa.binary()),
        # Where the states before of this bucket are, or what a task has to report (JSON).
        pa.field("note", pa.string()),
    ]
)

# A stretch of a data feed to be demultiplexed. `standing`: as what its blocks count, by intervals (JSON).
SLICES = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("nibbles", pa.int32(), nullable=False),
        pa.field("standing", pa.string(), nullable=False),
    ]
)

# Where the item states of a bucket are: one row group of a file. Of one item the row with the highest `turn` counts; a
# `whole` one has all items of its bucket, so that lower ones need not be read.
STATE_INDEX = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("bucket", pa.string(), nullable=False),
        pa.field("turn", pa.int64(), nullable=False),
        pa.field("whole", pa.bool_(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
    ]
)

# The top of a bucket's subtree. A few items are there themselves (`entries`: item and encoded state, packed), because
# whether they form a page of their own depends on the neighbours. `nodes` are the TREE_NODES below, packed.
TOPS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("bucket", pa.string(), nullable=False),
        pa.field("turn", pa.int64(), nullable=False),
        pa.field("cid", pa.binary()),
        pa.field("count", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("models", pa.string(), nullable=False),
        pa.field("entries", pa.binary()),
        pa.field("nodes", pa.binary()),
    ]
)

# Placements that are there after a round, or not: of items that came, went, or were folded again. Of one placement the row
# with the highest turn counts. `key` is that of the placement tree, `bucket` its first nibbles.
PLACE_CHANGES = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("bucket", pa.string(), nullable=False),
        pa.field("turn", pa.int64(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("placement", pa.binary(), nullable=False),
        pa.field("gone", pa.bool_(), nullable=False),
    ]
)

# The placements of a bucket, 32 bytes each, ascending by key: all of them, or what came and went since the row before.
# `nodes` are the TREE_NODES after it, packed.
PLACE_LISTS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("bucket", pa.string(), nullable=False),
        pa.field("added", pa.binary(), nullable=False),
        pa.field("gone", pa.binary(), nullable=False),
        pa.field("nodes", pa.binary(), nullable=False),
    ]
)

# The top of a bucket of the placement tree, and the row group that has its row of PLACE_LISTS. Few placements are here
# themselves (`entries`, as in a list), because whether they form a page of their own depends on the neighbours; such a
# row has no list, and is whole. Of one bucket the rows from the last `whole` one on make its list. All buckets of a party
# are of one depth: that of its last row.
PLACE_TOPS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("bucket", pa.string(), nullable=False),
        pa.field("turn", pa.int64(), nullable=False),
        pa.field("whole", pa.bool_(), nullable=False),
        pa.field("cid", pa.binary()),
        pa.field("count", pa.int64(), nullable=False),
        pa.field("entries", pa.binary()),
        pa.field("path", pa.string()),
        pa.field("sha256", pa.string()),
        pa.field("bytes", pa.int64()),
        pa.field("group", pa.int64()),
        pa.field("rows", pa.int64()),
    ]
)

# snapshot: one row per party. `unknown` names models in use that the job does not have (comma-separated): no CID then.
ROOTS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("cid", pa.binary()),
        pa.field("root", pa.binary()),
        pa.field("items", pa.int64(), nullable=False),
        pa.field("models", pa.string(), nullable=False),
        pa.field("unknown", pa.string(), nullable=False),
        # Why there is no snapshot of this party, when there is none for another reason.
        pa.field("problem", pa.string(), nullable=False),
    ]
)

# The state of an item after this run. `state` is an ItemState with its whole model state inside; `encoded` what stands
# for it in a page, where that differs; `native` a model's own faster form; `guarded`: it has access rules.
# `gone`: it exists no more. `inception`: the key of a view.
ITEM_STATES = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("item_key", pa.binary(), nullable=False),
        pa.field("item", pa.binary(), nullable=False),
        pa.field("gone", pa.bool_(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("parent", pa.binary()),
        pa.field("inception", pa.binary()),
        pa.field("genesis_depth", pa.int64(), nullable=False),
        pa.field("guarded", pa.bool_(), nullable=False),
        pa.field("state", pa.binary(), nullable=False),
        pa.field("encoded", pa.binary()),
        pa.field("native", pa.binary()),
        # The highest stamp that was folded in, refused ones included.
        pa.field("last_depth", pa.int64()),
        pa.field("last_feed", pa.binary()),
        pa.field("last_seq", pa.int64()),
        pa.field("last_position", pa.int64()),
    ]
)

# What did not enter the state. Position -1 is the whole block. `item` helps to fold an item again and is not shown.
REJECTS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("item", pa.binary()),
    ]
)

# A question to the bucket of another item: does it exist? Asked for the parent of a creation or a placement, for an item
# that an earlier reject lacked, and (about itself) for a creation that may have a rival. `child` is who depends on it.
ASKED_ITEMS = pa.schema(
    [
        pa.field("creator", pa.uint64(), nullable=False),
        pa.field("local", pa.uint64(), nullable=False),
        pa.field("child_creator", pa.uint64(), nullable=False),
        pa.field("child_local", pa.uint64(), nullable=False),
        pa.field("depth", pa.uint64(), nullable=False),
        pa.field("feed", pa.uint64(), nullable=False),
        pa.field("place", pa.uint64(), nullable=False),
        pa.field("why", pa.uint8(), nullable=False),
    ]
)

# The answers: an item, the parent it named, and whether that is absent or doubtful (stages/asking.py).
EDGES = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("item", pa.binary(), nullable=False),
        pa.field("parent", pa.binary()),
        pa.field("why", pa.uint8(), nullable=False),
        pa.field("absent", pa.bool_(), nullable=False),
        pa.field("doubt", pa.bool_(), nullable=False),
    ]
)

# Explicit placements: the state of the party-level tree. A row of kind -1 takes back all of its item with lower turns.
MOVES = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("turn", pa.int64(), nullable=False),
        pa.field("depth", pa.int64(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("item", pa.binary(), nullable=False),
        pa.field("kind", pa.int64(), nullable=False),
        pa.field("parent", pa.binary()),
    ]
)

# Geneses of views: which item claims which inception key (stages/view_claims.py). All that were ever read.
CLAIMS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("inception", pa.binary(), nullable=False),
        pa.field("item", pa.binary(), nullable=False),
        pa.field("depth", pa.int64(), nullable=False),
    ]
)

# Items that have to be folded again from single operations: of this run's blocks, or of all (`history`).
HARD_ITEMS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("item", pa.binary(), nullable=False),
        pa.field("history", pa.bool_(), nullable=False),
    ]
)

BLOBS = pa.schema([pa.field("cid", pa.binary(), nullable=False), pa.field("data", pa.binary(), nullable=False)])

# The nodes of the item tree below a bucket, kept for the next run.
TREE_NODES = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("cid", pa.binary(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
    ]
)

# Which blocks of a party are wanted, where they are and what is known of them: the plan of verify and order. A piece is a
# stretch of one run that no other run begins or ends within, and that lies inside one bucket of seqs.
PIECES = pa.schema(
    [
        pa.field("piece", pa.int64(), nullable=False),
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        # The link it follows; null: that of the row before it in the file.
        pa.field("previous", pa.binary()),
        # How many blocks of the feed are looked at; null: all.
        pa.field("limit", pa.int64()),
        # Verified by an earlier commit: looked at again only where something new depends on it.
        pa.field("old", pa.bool_(), nullable=False),
        pa.field("task", pa.int32(), nullable=False),
    ]
)

# Columns inside a binary column are little-endian int64 side by side ("packed"): Spark copies them as they are.

# verify: one row per piece, and one per piece and named feed (and bucket of that feed).
VERIFIED = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("piece", pa.int64(), nullable=False),
        # Rows of pieces have these, and no `names`.
        pa.field("start", pa.int64()),
        pa.field("end", pa.int64()),
        pa.field("file", pa.string()),
        pa.field("row", pa.int64()),
        pa.field("limit", pa.int64()),
        pa.field("previous", pa.binary()),
        pa.field("last_link", pa.binary()),
        pa.field("last_depth", pa.int64()),
        # Up to where links (and depth hints) are right, and what is wrong there.
        pa.field("good_end", pa.int64()),
        pa.field("fault", pa.string()),
        pa.field("bytes", pa.int64()),
        # The nearest and the farthest signed head, with what lies before the one and after the other.
        pa.field("first_head", pa.int64()),
        pa.field("first_head_bytes", pa.int64()),
        pa.field("last_head", pa.int64()),
        pa.field("tail_bytes", pa.int64()),
        pa.field("bad_head", pa.int64()),
        # What the first block claims: its depth, and the greatest depth that it names.
        pa.field("first_depth", pa.int64()),
        pa.field("first_deepest", pa.int64()),
        # The first block that can't be delivered whatever else is held; `bad_late`: unless a dependency decides first.
        pa.field("bad_seq", pa.int64()),
        pa.field("bad_reason", pa.string()),
        pa.field("bad_late", pa.bool_()),
        # Rows of dependencies have these. Ascending by seq, and by the seq that is named, but for a last one that isn't.
        pa.field("names", pa.binary()),
        pa.field("bucket", pa.int64()),
        pa.field("seqs", pa.binary()),
        pa.field("named_seqs", pa.binary()),
        pa.field("named_links", pa.binary()),  # 16 bytes each
        pa.field("named_depths", pa.binary()),
        pa.field("backwards", pa.bool_()),
    ]
)

# order: pieces that are held (linked from the feed's first block, and under a signed head), as parts of twigs. A twig is
# a stretch of a feed between two forks, named by its first piece.
HELD = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("piece", pa.int64(), nullable=False),
        pa.field("twig", pa.int64(), nullable=False),
        # The twigs from the feed's first one to this one, packed.
        pa.field("path", pa.binary(), nullable=False),
        # Whether it is on the branch that is processed.
        pa.field("main", pa.bool_(), nullable=False),
        pa.field("old", pa.bool_(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        # Empty below the epoch that the party stands on (`planning.NO_FILE`).
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("bad_seq", pa.int64()),
        pa.field("bad_reason", pa.string()),
        pa.field("bad_late", pa.bool_()),
    ]
)

# order: how far each twig is held, and how far it can be processed as far as its own feed goes. `faults` are what is wrong
# with the block at `cut` across pieces: 8 bytes of a named feed and one of what is wrong (0 backwards, 1 another branch).
TWIGS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("twig", pa.int64(), nullable=False),
        pa.field("parent", pa.int64()),
        pa.field("main", pa.bool_(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("cut", pa.int64(), nullable=False),
        pa.field("faults", pa.binary(), nullable=False),
    ]
)

# order: of the piece in which a twig stops, by named feed: what the block at the cut says of it, as it was found, and what
# was said last before.
STOPS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("twig", pa.int64(), nullable=False),
        pa.field("main", pa.bool_(), nullable=False),
        pa.field("names", pa.binary(), nullable=False),
        pa.field("named_seq", pa.int64()),
        pa.field("named_twig", pa.int64()),
        pa.field("fault", pa.string()),
        pa.field("said_seq", pa.int64()),
        pa.field("said_link", pa.binary()),
    ]
)

# order: where dependencies can lead: held pieces in the lake, or delivered control blocks in the row itself.
TARGETS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("names", pa.binary(), nullable=False),
        pa.field("bucket", pa.int64(), nullable=False),
        pa.field("twig", pa.int64(), nullable=False),
        pa.field("path", pa.binary(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("file", pa.string()),
        pa.field("row", pa.int64()),
        pa.field("links", pa.binary()),  # 32 bytes each
        pa.field("depths", pa.binary()),
    ]
)

# order: dependencies that were looked up. `fault` belongs to the last entry: what is wrong with it.
NAMED = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("piece", pa.int64(), nullable=False),
        pa.field("names", pa.binary(), nullable=False),
        pa.field("bucket", pa.int64(), nullable=False),
        pa.field("first_seq", pa.int64(), nullable=False),
        pa.field("last_seq", pa.int64(), nullable=False),
        pa.field("first_named", pa.int64(), nullable=False),
        pa.field("last_named", pa.int64(), nullable=False),
        pa.field("last_link", pa.binary(), nullable=False),
        # The twigs of the first and of the last block that is named; -1: none.
        pa.field("first_twig", pa.int64(), nullable=False),
        pa.field("last_twig", pa.int64(), nullable=False),
        pa.field("first_path", pa.binary()),
        pa.field("fault", pa.string()),
        pa.field("seqs", pa.binary(), nullable=False),
        pa.field("named_seqs", pa.binary(), nullable=False),
        pa.field("named_links", pa.binary(), nullable=False),
        # Null: all in the one twig `first_twig`.
        pa.field("twigs", pa.binary()),
    ]
)

# control: one row per party, and one per child party (`root` is its parent, whose members are its own).
PARTIES = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("root", pa.binary(), nullable=False),
        pa.field("title", pa.string(), nullable=False),
        pa.field("admission", pa.binary(), nullable=False),
        # wire.membership.membership_state of the root.
        pa.field("membership", pa.binary(), nullable=False),
        # The data feed that the genesis names; null without a genesis, and for child parties.
        pa.field("genesis_feed", pa.binary()),
        # The epoch that its state is folded from: number, hash of its genesis, and its whole name
        # (wire.base_epoch.BaseName). Without a hash: one that left something out, and whose snapshot the lake lacks.
        pa.field("base_number", pa.int64()),
        pa.field("base", pa.binary()),
        pa.field("base_name", pa.binary()),
        # Up to where it reaches: keys of data feeds side by side, and their lengths (packed); the links at their ends, and
        # the depths there.
        pa.field("base_feeds", pa.binary()),
        pa.field("base_lengths", pa.binary()),
        pa.field("base_links", pa.binary()),
        pa.field("base_depths", pa.binary()),
    ]
)

# control: which blocks count. One row per interval; a feed of which nothing counts has one without a role.
ADMISSION = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("feed_id", pa.binary(), nullable=False),
        pa.field("control", pa.bool_(), nullable=False),
        pa.field("identity", pa.binary(), nullable=False),
        pa.field("device", pa.binary(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64()),
        pa.field("role", pa.string()),
        pa.field("end_reason", pa.string()),
        pa.field("fork", pa.int64()),
    ]
)

MEMBERS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("identity", pa.binary(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("role", pa.string()),
        pa.field("status", pa.string(), nullable=False),
        pa.field("creator", pa.bool_(), nullable=False),
        pa.field("devices", pa.int64(), nullable=False),
    ]
)

PUBLISHED_MODELS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("descriptor", pa.binary(), nullable=False),
        pa.field("hash", pa.binary(), nullable=False),
    ]
)

# control and order: how far each feed is processed, and why no further. State: open, ended (`reason`), waiting (for the
# block `waits_seq` of the feed id `waits_feed`), forked (no proof of it in control yet). `held` counts the blocks that a
# peer would hold. What the feed last said about others, at `length`, is kept for the next commit.
CUTS = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("feed_id", pa.binary(), nullable=False),
        pa.field("control", pa.bool_(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("link", pa.binary(), nullable=False),
        pa.field("depth", pa.int64(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("waits_feed", pa.binary()),
        pa.field("waits_seq", pa.int64()),
        pa.field("held", pa.int64(), nullable=False),
        pa.field("asserted_feeds", pa.binary(), nullable=False),  # 8 bytes each
        pa.field("asserted_seqs", pa.binary(), nullable=False),  # packed
        pa.field("asserted_links", pa.binary(), nullable=False),  # 16 bytes each
    ]
)

# order: of each data feed the last processed block that counts.
TIMEFRAME = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("feed_id", pa.binary(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("link", pa.binary(), nullable=False),
    ]
)

# verify and order: blocks of the lake that no peer would hold, or that are of no admitted feed.
UNHELD = pa.schema(
    [
        pa.field("party", pa.binary(), nullable=False),
        pa.field("feed", pa.binary(), nullable=False),
        pa.field("control", pa.bool_(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)
