"""The item tree as docs/internals/snapshots.md defines it, slowly: the oracle for `echostore.wire.tree`.

Written from the page, not from the code: it has its own numbers, filters the whole set at every node, lets the
generated classes do the encoding and puts CIDs together itself.
"""

from dataclasses import dataclass, field
from hashlib import sha256

from echostore.wire.generated import snapshot_pb2 as pb

CHUNK = 256 * 1024


@dataclass
class SlowTree:
    """The tree of `items` (whole ItemStates by id): `top`, and `blobs` by CID."""

    items: dict[bytes, pb.ItemState]
    page_max: int = 12
    depth_max: int = 16
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    top: bytes = b""

    def __post_init__(self) -> None:
        self.top = self.node("")

    def node(self, path: str) -> bytes:
        below = {item: state for item, state in self.items.items() if hashed(item).startswith(path)}
        node = pb.TreeNode()
        if len(below) <= self.page_max or len(path) == self.depth_max:
            for item in sorted(below, key=hashed):
                self.add_item(node, below[item])
        else:
            branches = b""
            for branch in range(16):
                nibble = f"{branch:x}"
                count = sum(hashed(item).startswith(path + nibble) for item in below)
                if count:
                    node.present += 1 << branch
                    branches += self.node(path + nibble)
                    node.counts.append(count)
            node.branches = branches
        return self.store(node.SerializeToString(deterministic=True), 0x50)

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


def hashed(item: bytes) -> str:
    return sha256(item).hexdigest()
