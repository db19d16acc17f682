"""The item tree as docs/internals/snapshots.md defines it, slowly: the oracle for `echostore.wire.tree`.

Written from the page, not from the code: it has its own numbers, filters the whole set at every node, lets the
generated classes do the encoding and puts CIDs together itself.
"""

from dataclasses import dataclass, field
from hashlib import sha256

from echostore.wire.generated import snapshot_pb2 as pb

CHUNK = 256 * 1024

RUNS = [(start, width) for width in (8, 4, 2) for start in range(0, 16, width)]
"""First nibble and length, in the order of their letters g to t."""


@dataclass
class SlowTree:
    """The tree of `items` (whole ItemStates by id): `top`, and `blobs` by CID."""

    items: dict[bytes, pb.ItemState]
    page_max: int = 128
    bytes_max: int = 8192
    depth_max: int = 16
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    top: bytes = b""

    def __post_init__(self) -> None:
        self.top = self.node("")

    def node(self, path: str) -> bytes:
        below = self.below([path])
        if self.fits(below, len(path)):
            return self.store(self.page(below), 0x50)
        node = pb.TreeNode()
        branches = b""
        for label, nibbles in self.divided(path, 0, 16):
            paths = [path + nibble for nibble in nibbles]
            there = self.below(paths)
            node.present += 1 << label
            branches += self.node(paths[0]) if label < 16 else self.store(self.page(there), 0x50)
            node.counts.append(len(there))
            node.sizes.append(self.size(paths))
        node.branches = branches
        return self.store(node.SerializeToString(deterministic=True), 0x50)

    def divided(self, path: str, start: int, width: int) -> list[tuple[int, list[str]]]:
        """The branches of an index node from one nibble on: bit of each, and its nibbles."""
        nibbles = [f"{nibble:x}" for nibble in range(start, start + width)]
        there = self.below([path + nibble for nibble in nibbles])
        if not there:
            return []
        if width == 1:
            return [(start, nibbles)]
        if width < 16 and self.fits(there, len(path) + 1):
            return [(16 + RUNS.index((start, width)), nibbles)]
        half = width // 2
        return self.divided(path, start, half) + self.divided(path, start + half, half)

    def below(self, paths: list[str]) -> dict[bytes, pb.ItemState]:
        return {item: state for item, state in self.items.items() if hashed(item).startswith(tuple(paths))}

    def fits(self, items: dict[bytes, pb.ItemState], depth: int) -> bool:
        small = len(items) <= self.page_max and len(self.page(items)) <= self.bytes_max
        return len(items) <= 1 or depth == self.depth_max or small

    def size(self, paths: list[str]) -> int:
        """Bytes of all pages below."""
        return sum(len(self.page({item: state})) for item, state in self.below(paths).items())

    def page(self, items: dict[bytes, pb.ItemState]) -> bytes:
        node = pb.TreeNode()
        for item in sorted(items, key=hashed):
            self.add_item(node, items[item])
        return node.SerializeToString(deterministic=True)

    def add_item(self, page: pb.TreeNode, whole: pb.ItemState) -> None:
        state = pb.ItemState()
        state.CopyFrom(whole)
        if len(state.state) > 2048:
            state.state_cids.extend(self.store_chunks(state.state))
            state.state = b""
        encoded = state.SerializeToString(deterministic=True)
        if len(encoded) > 4096:
            page.large_items.add(item=state.item, cids=self.store_chunks(encoded))
        else:
            page.items.append(state)

    def store_chunks(self, data: bytes) -> list[bytes]:
        return [self.store(data[at : at + CHUNK], 0x55) for at in range(0, len(data), CHUNK)]

    def store(self, data: bytes, codec: int) -> bytes:
        cid = bytes([1, codec, 0x12, 0x20]) + sha256(data).digest()
        self.blobs[cid] = data
        return cid


@dataclass
class SlowPlacements(SlowTree):
    """The tree of placements, which are the keys of `items`."""

    def below(self, paths: list[str]) -> dict[bytes, pb.ItemState]:
        return {each: state for each, state in self.items.items() if placement_hashed(each).startswith(tuple(paths))}

    def size(self, paths: list[str]) -> int:
        return 32 * len(self.below(paths))

    def page(self, items: dict[bytes, pb.ItemState]) -> bytes:
        joined = b"".join(sorted(items, key=placement_hashed))
        return pb.TreeNode(placements=joined).SerializeToString(deterministic=True)


def placement_hashed(placement: bytes) -> str:
    return hashed(placement[:16])[:8] + hashed(placement)[:56]


def hashed(item: bytes) -> str:
    return sha256(item).hexdigest()
