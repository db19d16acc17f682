"""Measure the item tree: python bench/snapshot_tree.py [numbers of items ...]

For each number of items of about 200 bytes: CPU time of a fresh build, share of index nodes in the bytes, blobs on the way
to one item, and time and new bytes of an update after 1 % of the items have changed.
"""

import random
import sys
import time

from echostore.kernel.ids import Cid, FeedId, ItemId, created_item_id
from echostore.kernel.snapshot import NIBBLES, Path, item_key
from echostore.wire.generated import snapshot_pb2 as pb
from echostore.wire.snapshot import EncodedItem, encode_item
from echostore.wire.tree import NodeMap, TreeReader, build, update, verify_tree

STATE_BYTES = 150
PREFIX_NIBBLES = 3


def main() -> None:
    print("   items  build s    items/s  index %  blobs  reads  update ms  new %  verify s")
    for count in [int(each) for each in sys.argv[1:]] or [1_000, 3_000, 10_000, 40_000, 100_000]:
        measure(count, random.Random(count))


def measure(count: int, chance: random.Random) -> None:
    feeds = [FeedId(chance.randbytes(8)) for _ in range(5)]
    ids = [created_item_id(feeds[number % 5], number, 0) for number in range(count)]
    items = {item: encoded(item, chance) for item in ids}
    blobs: dict[Cid, bytes] = {}
    cache = NodeMap()

    started = time.process_time()
    top = build(items.items(), blobs.__setitem__, cache=cache)
    build_s = time.process_time() - started

    total = sum(map(len, blobs.values()))
    index = sum(len(blob) for blob in blobs.values() if blob[:1] == b"\x18")
    reads = max(read_count(top.cid, blobs, item) for item in chance.sample(ids, min(count, 200)))
    started = time.process_time()
    assert verify_tree(top.cid, top.count, blobs.get).ok
    verify_s = time.process_time() - started

    below: dict[Path, list[ItemId]] = {}
    for item in ids:
        below.setdefault(item_key(item)[:PREFIX_NIBBLES], []).append(item)
    dirty = set(chance.sample(ids, count // 100))
    for item in dirty:
        items[item] = encoded(item, chance)
    new: dict[Cid, bytes] = {}
    started = time.process_time()
    top = update(cache, dirty, lambda path: items_under(path, below, items), new.__setitem__)
    update_s = time.process_time() - started
    assert top == build(items.items(), lambda cid, blob: None)

    new_bytes = sum(len(blob) for cid, blob in new.items() if cid not in blobs)
    print(
        f"{count:8} {build_s:8.2f} {count / build_s:10.0f} {index / total * 100:8.1f} {len(blobs):6} {reads:6}"
        f" {update_s * 1000:10.1f} {new_bytes / total * 100:6.1f} {verify_s:9.2f}"
    )


def encoded(item: ItemId, chance: random.Random) -> EncodedItem:
    state = pb.ItemState(item=item, model="property-set", version=1, type="task", state=chance.randbytes(STATE_BYTES))
    return encode_item(state, lambda cid, blob: None)


def read_count(top: Cid, blobs: dict[Cid, bytes], item: ItemId) -> int:
    read: list[Cid] = []

    def get(cid: Cid) -> bytes:
        read.append(cid)
        return blobs[cid]

    assert TreeReader(top, get).item(item) is not None
    return len(read)


def items_under(
    path: Path, below: dict[Path, list[ItemId]], items: dict[ItemId, EncodedItem]
) -> list[tuple[ItemId, EncodedItem]]:
    """An ordered store stood in for: items by the first nibbles of their key."""
    prefixes = [path[:PREFIX_NIBBLES]]
    while len(prefixes[0]) < PREFIX_NIBBLES:
        prefixes = [prefix + nibble for prefix in prefixes for nibble in NIBBLES]
    found = (item for prefix in prefixes for item in below.get(prefix, ()))
    return [(item, items[item]) for item in found if item_key(item).startswith(path)]


if __name__ == "__main__":
    main()
