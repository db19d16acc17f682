"""CAR files: the bytes other tools expect, and nothing wrong with a file goes unnoticed."""

import io
import random
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echostore.kernel.errors import Corrupt
from echostore.kernel.ids import Cid
from echostore.kernel.limits import BLOB_BYTES_MAX
from echostore.wire.car import ROOTS_MAX, read_car, write_car
from echostore.wire.cids import PROTOBUF, RAW, cid_of

Blocks = list[tuple[Cid, bytes]]


def car(roots: list[Cid], blocks: Blocks) -> bytes:
    file = io.BytesIO()
    assert write_car(file, roots, blocks) == len(file.getvalue())
    return file.getvalue()


def read(data: bytes) -> tuple[list[Cid], Blocks]:
    roots, blocks = read_car(io.BytesIO(data))
    return list(roots), list(blocks)


def blocks_of(*contents: bytes) -> Blocks:
    return [(cid_of(content, PROTOBUF if number % 2 else RAW), content) for number, content in enumerate(contents)]


def test_the_bytes_of_a_small_file() -> None:
    """Put together by hand from the CAR v1 and DAG-CBOR specifications."""
    digest = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # SHA-256 of "hello", as everyone knows
    expected = bytes.fromhex(
        "3a"  # the header has 58 bytes
        "a2"  # a map of two
        "65726f6f7473"  # "roots"
        "81"  # an array of one
        "d82a"  # tag 42
        "5825"  # 37 bytes
        "00"  # identity multibase
        f"01551220{digest}"
        "6776657273696f6e"  # "version"
        "01"
        "29"  # the block has 36 + 5 bytes
        f"01551220{digest}"
        "68656c6c6f"
    )
    cid = cid_of(b"hello", RAW)
    assert car([cid], [(cid, b"hello")]) == expected
    assert read(expected) == ([cid], [(cid, b"hello")])


@pytest.mark.parametrize(("count", "head"), [(1, "81"), (23, "97"), (24, "9818"), (255, "98ff"), (256, "990100")])
def test_the_number_of_roots_is_written_in_the_fewest_bytes(count: int, head: str) -> None:
    roots = [cid_of(bytes([number % 256, number // 256]), RAW) for number in range(count)]
    data = car(roots, [])
    assert data[data.index(b"roots") + 5 :].startswith(bytes.fromhex(head) + b"\xd8\x2a")
    assert read(data) == (roots, [])


@given(st.lists(st.binary(max_size=300), max_size=6), st.integers(1, 40))
def test_what_is_written_is_read_back(contents: list[bytes], root_count: int) -> None:
    blocks = blocks_of(*contents)
    roots = [cid_of(bytes([number]), PROTOBUF) for number in range(root_count)]
    assert read(car(roots, blocks)) == (roots, blocks)


def test_the_largest_block_and_no_larger() -> None:
    block = blocks_of(bytes(BLOB_BYTES_MAX))
    assert read(car([block[0][0]], block))[1] == block
    larger = blocks_of(bytes(BLOB_BYTES_MAX + 1))
    with pytest.raises(Corrupt):
        car([larger[0][0]], larger)


def test_the_writer_refuses_a_block_that_is_not_what_it_says() -> None:
    cid = cid_of(b"hello", RAW)
    with pytest.raises(Corrupt, match="does not match"):
        car([cid], [(cid, b"hullo")])


@pytest.mark.parametrize("roots", [[], [cid_of(b"", RAW)] * (ROOTS_MAX + 1), [Cid(b"\x12\x20" + bytes(32))]])
def test_the_writer_refuses_roots_that_no_file_has(roots: list[Cid]) -> None:
    with pytest.raises(AssertionError):
        car(roots, [])


def test_reading_streams() -> None:
    """A block is there before the rest of the file has been looked at, and short reads are put together."""

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, 7))

    blocks = blocks_of(b"one" * 10, b"two" * 10)
    file = Slow(car([blocks[0][0]], blocks))
    _, found = read_car(file)
    assert next(found) == blocks[0]
    assert file.tell() == len(car([blocks[0][0]], blocks[:1]))
    assert list(found) == blocks[1:]


def test_a_file_cut_anywhere_is_found() -> None:
    """Everywhere but between two blocks, where a shorter file is a good one."""
    blocks = blocks_of(b"", b"x" * 200, b"yy")
    data = car([blocks[0][0]], blocks)
    good = {len(car([blocks[0][0]], blocks[:count])) for count in range(len(blocks) + 1)}
    for end in range(len(data)):
        if end in good:
            assert len(read(data[:end])[1]) < len(blocks)
            continue
        with pytest.raises(Corrupt, match=f"At byte {end} of the CAR file"):
            read(data[:end])


def test_a_flipped_bit_anywhere_is_found() -> None:
    """In the header only a root may change unnoticed: it names something else then, which no block vouches for."""
    blocks = blocks_of(b"first", b"x" * 200)
    data = car([blocks[0][0]], blocks)
    root_digest = range(1 + 7 + 1 + 5 + 4, 1 + 7 + 1 + 5 + 36)
    root_codec = 1 + 7 + 1 + 5 + 1
    for at in range(len(data)):
        for bit in range(8):
            flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            if at in root_digest or (at == root_codec and flipped[at] == PROTOBUF):
                assert read(flipped)[0] != [blocks[0][0]]
                continue
            if is_codec_of_a_block(data, at) and flipped[at] in (RAW, PROTOBUF):
                continue
            with pytest.raises(Corrupt, match="At byte"):
                read(flipped)


def is_codec_of_a_block(data: bytes, at: int) -> bool:
    return data[at - 1] == 1 and data[at + 1 : at + 3] == b"\x12\x20"


@pytest.mark.parametrize(
    ("tail", "problem"),
    [
        (b"\x00", "can't hold a CID"),
        (b"\x23" + bytes(35), "can't hold a CID"),
        (b"\x24" + bytes(36), "is not a CID"),
        (b"\xa4\x00" + cid_of(b"", RAW), "not the length"),
        (b"\xff\xff\xff\xff\x0f", "not the length"),
        (b"\xff\xff\xff\x7f", "not the length"),
        (b"\x80", "are missing"),
        (b"\x29" + cid_of(b"hello", RAW) + b"hullo", "does not match its CID"),
        (b"\x27\x12\x20" + sha256(b"hello").digest() + b"hello", "is not a CID"),
    ],
)
def test_a_bad_block_is_told_with_its_place(tail: bytes, problem: str) -> None:
    good = car([cid_of(b"hello", RAW)], blocks_of(b"hello"))
    with pytest.raises(Corrupt, match=problem) as caught:
        read(good + tail)
    place = int(caught.value.what.split()[2])
    assert len(good) <= place <= len(good) + len(tail)


ROOT = b"\xd8\x2a\x58\x25\x00" + cid_of(b"hello", RAW)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xa2\x65roots\x80\x67version\x01",
        b"\xa2\x67version\x01\x65roots\x81" + ROOT,
        b"\xa2\x65roots\x81" + ROOT + b"\x67version\x02",
        b"\xa2\x65roots\x98\x01" + ROOT + b"\x67version\x01",
        b"\xa2\x65roots\x82" + ROOT + b"\x67version\x01",
        b"\xa3\x65roots\x81" + ROOT + b"\x67version\x01\x61x\x00",
        b"\xa1\x67version\x01",
        b"\xbf\x65roots\x81" + ROOT + b"\x67version\x01\xff",
        bytes(60),
    ],
)
def test_a_header_of_another_kind_is_refused(header: bytes) -> None:
    with pytest.raises(Corrupt, match="At byte 1 of the CAR file"):
        read(bytes([len(header)]) + header)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(Corrupt, match="it is empty"):
        read(b"")


def test_a_header_may_not_ask_for_much_memory() -> None:
    with pytest.raises(Corrupt, match="At byte 0"):
        read(b"\xff\xff\xff\x7f")


@given(st.binary(max_size=300))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(Corrupt):
        read(garbage)


def test_garbage_after_the_header_is_refused() -> None:
    chance = random.Random(5)
    good = car([cid_of(b"hello", RAW)], blocks_of(b"hello"))
    for _ in range(2000):
        with pytest.raises(Corrupt):
            read(good + chance.randbytes(chance.randint(1, 80)))
