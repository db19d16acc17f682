"""The encrypted channel: who is there, nothing altered, nothing older, nothing larger than said."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.mesh import secure_channel
from echostore.mesh.secure_channel import FRAME_BYTES_MAX, ChannelFailed, Refusal, SecureChannel
from echostore.wire.signing import SigningKey

ANN, BOB, EVE = (SigningKey.from_seed(bytes([number]) * 32) for number in (1, 2, 3))


def shake(one: SecureChannel, other: SecureChannel) -> None:
    """Carry the handshake to its end."""
    for _ in range(4):
        if data := one.take_outgoing():
            other.receive(data)
        if data := other.take_outgoing():
            one.receive(data)


def pair() -> tuple[SecureChannel, SecureChannel]:
    one, other = SecureChannel(ANN, initiator=True), SecureChannel(BOB, initiator=False)
    shake(one, other)
    return one, other


def test_both_sides_learn_who_is_there_and_share_one_hash() -> None:
    one, other = pair()
    assert one.ready
    assert other.ready
    assert (one.remote, other.remote) == (BOB.public, ANN.public)
    assert one.handshake_hash == other.handshake_hash
    assert one.handshake_hash != pair()[0].handshake_hash, "another channel has another hash"


@settings(max_examples=50)
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 100, 65_515, 65_516, 65_519, 65_520, 200_000, FRAME_BYTES_MAX]), min_size=1, max_size=5
    ),
    cuts=st.lists(st.integers(1, 70_000), min_size=1, max_size=20),
)
def test_frames_of_any_size_arrive_whole_however_the_stream_is_cut(sizes: list[int], cuts: list[int]) -> None:
    one, other = pair()
    frames = [random.Random(size).randbytes(size) for size in sizes]
    stream = b"".join(one.send(frame) for frame in frames)
    came: list[bytes] = []
    at = number = 0
    while at < len(stream):
        cut = cuts[number % len(cuts)] * (1 if number < 200 else 100)
        came += other.receive(stream[at : at + cut])
        at, number = at + cut, number + 1
    assert came == frames
    assert not other.in_frame


def test_a_device_that_was_not_expected_is_refused_before_anything_is_said() -> None:
    one, other = SecureChannel(ANN, initiator=True, expected=EVE.public), SecureChannel(BOB, initiator=False)
    with pytest.raises(ChannelFailed) as caught:
        shake(one, other)
    assert caught.value.reason is Refusal.WRONG_DEVICE
    assert not one.ready
    assert not other.ready


def test_someone_in_the_middle_is_seen_for_who_they_are() -> None:
    """A relay that decrypts has to show its own key: it can't hand on the signature that it got from the other side."""
    towards_ann, towards_bob = SecureChannel(EVE, initiator=False), SecureChannel(EVE, initiator=True)
    ann, bob = SecureChannel(ANN, initiator=True, expected=BOB.public), SecureChannel(BOB, initiator=False)
    shake(towards_bob, bob)
    stolen = bytes(bob._identity())
    towards_ann._identity = lambda: stolen  # type: ignore[method-assign]  # Eve shows Bob's signature
    with pytest.raises(ChannelFailed) as caught:
        shake(ann, towards_ann)
    assert caught.value.reason is Refusal.HANDSHAKE_FAILED
    assert ann.remote is None


def test_a_signature_for_one_side_is_of_no_use_on_the_other() -> None:
    ann, mirror = SecureChannel(ANN, initiator=True), SecureChannel(ANN, initiator=False)
    mirror._identity = lambda: (
        ANN.public
        + ANN.sign(  # type: ignore[method-assign]
            secure_channel._statement(secure_channel._x25519_public(mirror._static), initiator=True)
        )
    )
    with pytest.raises(ChannelFailed):
        shake(ann, mirror)


@given(flip=st.integers(0, 10_000), bit=st.integers(0, 7), size=st.integers(0, 70_000))
def test_a_flipped_bit_is_never_delivered(flip: int, bit: int, size: int) -> None:
    one, other = pair()
    frame = random.Random(size).randbytes(size)
    data = bytearray(one.send(frame))
    data[flip % len(data)] ^= 1 << bit
    came: list[bytes] = []
    with contextlib.suppress(ChannelFailed):
        came = other.receive(bytes(data))
    assert came == [], "refused, or the length was made longer and the rest never comes"
    if other.failed is not None:
        assert other.failed.reason in (Refusal.TAMPERED, Refusal.OVERSIZE)
        with pytest.raises(ChannelFailed):
            other.receive(one.send(b"later"))


def test_messages_can_not_be_repeated_dropped_or_swapped() -> None:
    for arrange in (lambda a, b: a + a, lambda a, b: b, lambda a, b: b + a):
        one, other = pair()
        first, second = one.send(b"first"), one.send(b"second")
        with pytest.raises(ChannelFailed) as caught:
            other.receive(arrange(first, second))
        assert caught.value.reason is Refusal.TAMPERED


def test_keys_change_and_both_sides_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_channel, "REKEY_MESSAGES", 3)
    one, other = pair()
    before = one.send(b"0")
    assert other.receive(before) == [b"0"]
    for number in range(1, 20):
        assert other.receive(one.send(str(number).encode())) == [str(number).encode()]
        assert one.receive(other.send(b"back")) == [b"back"]


def test_an_older_or_newer_program_is_refused_politely(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SecureChannel(ANN, initiator=True)
    with pytest.raises(ChannelFailed) as caught:
        one.receive(secure_channel.MAGIC + bytes([7, 9]))
    assert caught.value.reason is Refusal.NO_COMMON_VERSION
    assert "7 to 9" in caught.value.detail


def test_a_downgrade_by_someone_in_the_middle_breaks_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_channel, "VERSION_HIGHEST", 2)
    one, other = SecureChannel(ANN, initiator=True), SecureChannel(BOB, initiator=False)
    preamble = one.take_outgoing()
    assert preamble == b"ECHO\x01\x02"
    other.receive(b"ECHO\x01\x01")  # changed under way
    one.receive(other.take_outgoing()[:6])
    other.receive(one.take_outgoing())
    with pytest.raises(ChannelFailed) as caught:
        one.receive(other.take_outgoing())
    assert caught.value.reason is Refusal.HANDSHAKE_FAILED


def test_a_web_browser_is_told_apart_with_its_first_bytes() -> None:
    with pytest.raises(ChannelFailed) as caught:
        SecureChannel(BOB, initiator=False).receive(b"GET / HTTP/1.1\r\n")
    assert caught.value.reason is Refusal.NOT_ECHOSTORE


@given(data=st.binary(max_size=2000), initiator=st.booleans(), after=st.booleans())
def test_random_bytes_are_refused_with_a_reason_or_wait_for_more(data: bytes, initiator: bool, after: bool) -> None:
    channel = SecureChannel(ANN, initiator=initiator)
    try:
        if after:
            channel.receive(secure_channel.MAGIC + bytes([1, 1]))
        frames = channel.receive(data)
    except ChannelFailed:
        assert channel.failed is not None
    else:
        assert frames == []
        assert not channel.ready


def test_a_frame_that_says_it_is_huge_is_refused_before_it_is_kept() -> None:
    one, other = pair()
    lie = one._seal((FRAME_BYTES_MAX + 1).to_bytes(4, "big") + b"x")
    with pytest.raises(ChannelFailed) as caught:
        other.receive(lie)
    assert caught.value.reason is Refusal.OVERSIZE
    one, other = pair()
    with pytest.raises(ChannelFailed):
        other.receive(one._seal((3).to_bytes(4, "big") + b"four"))
