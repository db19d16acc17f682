"""The encrypted channel: who is there and who may know it, nothing altered, nothing older, nothing larger than said."""

import contextlib
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echostore.mesh import secure_channel
from echostore.mesh.secure_channel import FRAME_BYTES_MAX, ChannelFailed, KnownKeys, Presented, Refusal, SecureChannel
from echostore.wire.signing import SigningKey
from golden.channel import CASES, VECTORS, transcript

ANN, BOB, EVE, ROOT = (SigningKey.from_seed(bytes([number]) * 32) for number in (1, 2, 3, 4))
PARTY = b"p" * 32


def shake(one: SecureChannel, other: SecureChannel) -> None:
    """Carry the handshake to its end."""
    for _ in range(5):
        if data := one.take_outgoing():
            other.receive(data)
        if data := other.take_outgoing():
            one.receive(data)


def pair() -> tuple[SecureChannel, SecureChannel]:
    one, other = SecureChannel(ANN, initiator=True, expected=BOB.public), SecureChannel(BOB, initiator=False)
    shake(one, other)
    return one, other


class Eavesdropper(SecureChannel):
    """A side that keeps every text that it decrypts after the handshake's keys are agreed."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.heard: list[bytes] = []

    def _decrypt(self, message: bytes) -> bytes:
        text = super()._decrypt(message)
        self.heard.append(text)
        return text


def knows_party(presented: Presented) -> bytes | None:
    return PARTY if presented.names(PARTY) else None


def knows_identity(presented: Presented) -> bytes | None:
    return ROOT.public if presented.with_proof and presented.proven_by(ROOT.public) else None


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
    with pytest.raises(ChannelFailed):
        shake(one, other)  # Bob does not know whom Ann looks for
    with pytest.raises(ChannelFailed) as caught:
        one.receive(other.take_outgoing())
    assert caught.value.reason is Refusal.WRONG_DEVICE
    assert not one.ready
    assert not other.ready


def test_a_device_that_answers_for_another_one_is_refused() -> None:
    """It knows whom the initiator looks for, and is not that device."""
    one = SecureChannel(ANN, initiator=True, expected=BOB.public)
    other = SecureChannel(EVE, initiator=False, recognise=lambda presented: BOB.public)
    with pytest.raises(ChannelFailed) as caught:
        shake(one, other)
    assert caught.value.reason is Refusal.WRONG_DEVICE
    assert one.take_outgoing() == b"", "Ann does not show herself"


# strangers


@pytest.mark.parametrize(
    "known",
    [
        KnownKeys(),
        KnownKeys((b"q" * 32, EVE.public)),
        KnownKeys((ROOT.public,)),
        KnownKeys((ROOT.public,), EVE),
        KnownKeys(tuple(bytes([number, place]) * 16 for number in range(4) for place in range(255))),
    ],
    ids=["nothing", "others", "identity without its secret", "identity with another secret", "a thousand keys"],
)
def test_a_stranger_who_dials_never_sees_the_device_key(known: KnownKeys) -> None:
    eve = Eavesdropper(EVE, initiator=True, known=known)

    def recognise(presented: Presented) -> bytes | None:
        return knows_party(presented) or knows_identity(presented)

    bob = SecureChannel(BOB, initiator=False, recognise=recognise)
    with pytest.raises(ChannelFailed) as caught:
        shake(eve, bob)
    assert (caught.value.reason, bob.failed) == (Refusal.NOTHING_SHARED, caught.value)
    with pytest.raises(ChannelFailed) as caught:
        eve.receive(bob.take_outgoing())
    assert caught.value.reason is Refusal.NOTHING_SHARED
    assert eve.heard == [b""], "not a word of who is there"


def test_a_responder_without_a_rule_shows_itself_to_who_knows_its_key_alone() -> None:
    eve, bob = SecureChannel(EVE, initiator=True, known=KnownKeys((PARTY,))), SecureChannel(BOB, initiator=False)
    with pytest.raises(ChannelFailed) as caught:
        shake(eve, bob)
    assert caught.value.reason is Refusal.NOTHING_SHARED


@pytest.mark.parametrize(
    ("known", "recognise"),
    [(KnownKeys((b"q" * 32, PARTY)), knows_party), (KnownKeys((), ROOT), knows_identity)],
    ids=["party", "identity"],
)
def test_who_shares_a_key_sees_the_device_without_knowing_it_before(
    known: KnownKeys, recognise: secure_channel.Recognise
) -> None:
    ann = SecureChannel(ANN, initiator=True, known=known)
    bob = SecureChannel(BOB, initiator=False, recognise=recognise)
    shake(ann, bob)
    assert (ann.remote, bob.remote) == (BOB.public, ANN.public)


def test_an_initiator_does_not_show_itself_to_who_knows_none_of_its_keys() -> None:
    """Eve answers as if she knew a party of Ann's, with any key that she knows."""
    ann = SecureChannel(ANN, initiator=True, known=KnownKeys((PARTY,)))
    eve = Eavesdropper(EVE, initiator=False, recognise=lambda presented: EVE.public)
    with pytest.raises(ChannelFailed) as caught:
        shake(ann, eve)
    assert caught.value.reason is Refusal.NOTHING_SHARED
    assert ann.take_outgoing() == b""
    assert eve.heard == []


def presented_to(responder: SecureChannel, known: KnownKeys) -> bytes:
    """The tags and the proof that Ann shows on a channel with this responder."""
    ann = SecureChannel(ANN, initiator=True, known=known)
    seen: list[bytes] = []
    payload = ann._known_payload
    ann._known_payload = lambda: seen.append(payload()) or seen[0]  # type: ignore[method-assign,func-returns-value]
    with contextlib.suppress(ChannelFailed):
        shake(ann, responder)
    return seen[0]


@pytest.mark.parametrize(
    ("known", "recognise"), [(KnownKeys((PARTY,)), knows_party), (KnownKeys((), ROOT), knows_identity)]
)
def test_tags_and_proofs_that_someone_collected_open_no_other_channel(
    known: KnownKeys, recognise: secure_channel.Recognise
) -> None:
    stolen = presented_to(SecureChannel(EVE, initiator=False), known)
    eve, bob = SecureChannel(EVE, initiator=True), SecureChannel(BOB, initiator=False, recognise=recognise)
    eve._known_payload = lambda: stolen  # type: ignore[method-assign]
    with pytest.raises(ChannelFailed) as caught:
        shake(eve, bob)
    assert caught.value.reason is Refusal.NOTHING_SHARED
    assert bob.failed is caught.value, "Bob refused, and Eve was not shown who he is"


def test_a_tag_sent_back_is_no_answer() -> None:
    """Eve knows no party; of the tags that Ann sent she returns the one that is not random."""

    class Mirror(SecureChannel):
        def _take_known(self, message: bytes) -> None:
            handshake = self._handshake
            assert handshake is not None
            tag = secure_channel._known_tag(self._known_hash, PARTY, initiator=True)
            assert tag in handshake.read(message)
            self._split(handshake)
            signature = EVE.sign(self._statement(EVE.public, b""))
            self._outgoing += b"".join(self._seal(tag + EVE.public + signature))

    ann = SecureChannel(ANN, initiator=True, known=KnownKeys((PARTY,)))
    with pytest.raises(ChannelFailed) as caught:
        shake(ann, Mirror(EVE, initiator=False))
    assert caught.value.reason is Refusal.NOTHING_SHARED


@pytest.mark.parametrize(("keys", "tags"), [(0, 8), (1, 8), (8, 8), (9, 16), (1000, 1024), (2000, 1024)])
def test_the_number_of_tags_tells_little_of_how_many_keys_there_are(keys: int, tags: int) -> None:
    known = KnownKeys(tuple(number.to_bytes(32, "big") for number in range(keys)))
    shown = presented_to(SecureChannel(EVE, initiator=False), known)
    assert len(shown) == tags * 32 + 64


# someone in the middle


def test_someone_in_the_middle_is_seen_for_who_they_are() -> None:
    """Eve knows both devices and ends both channels herself. What Bob signed for hers, she hands on to Ann."""
    towards_bob = Eavesdropper(EVE, initiator=True, expected=BOB.public)
    shake(towards_bob, SecureChannel(BOB, initiator=False))
    stolen = towards_bob.heard[0][32:]
    ann = SecureChannel(ANN, initiator=True, expected=BOB.public)

    class Relay(SecureChannel):
        def _seal(self, text: bytes) -> tuple[bytes, bytes]:
            return super()._seal(text[:32] + stolen)

    with pytest.raises(ChannelFailed) as caught:
        shake(ann, Relay(EVE, initiator=False, recognise=lambda presented: BOB.public))
    assert caught.value.reason is Refusal.HANDSHAKE_FAILED
    assert ann.remote is None


def test_who_was_dialled_can_not_pass_itself_off_as_the_dialler() -> None:
    """Ann dials Eve and signs for that channel; Eve hands Ann's words on to Bob."""
    from_ann = Eavesdropper(EVE, initiator=False)
    shake(SecureChannel(ANN, initiator=True, expected=EVE.public), from_ann)
    stolen = from_ann.heard[0]
    assert stolen.startswith(ANN.public)

    class Relay(SecureChannel):
        def _seal(self, text: bytes) -> tuple[bytes, bytes]:
            return super()._seal(stolen)

    bob = SecureChannel(BOB, initiator=False)
    with pytest.raises(ChannelFailed) as caught:
        shake(Relay(EVE, initiator=True, expected=BOB.public), bob)
    assert caught.value.reason is Refusal.HANDSHAKE_FAILED
    assert bob.remote is None


def test_a_signature_for_one_side_is_of_no_use_on_the_other() -> None:
    """Bob's own words on this channel do not make the dialler Bob."""

    class Mirror(Eavesdropper):
        def _seal(self, text: bytes) -> tuple[bytes, bytes]:
            return super()._seal(self.heard[0][32:])

    bob = SecureChannel(BOB, initiator=False)
    with pytest.raises(ChannelFailed) as caught:
        shake(Mirror(EVE, initiator=True, expected=BOB.public), bob)
    assert caught.value.reason is Refusal.HANDSHAKE_FAILED


@pytest.mark.parametrize("towards", ["initiator", "responder"])
def test_a_bit_changed_in_any_message_of_the_handshake_ends_it(towards: str) -> None:
    outcomes = set()
    for place in range(500):
        one, other = SecureChannel(ANN, initiator=True, expected=BOB.public), SecureChannel(BOB, initiator=False)
        at = place
        with contextlib.suppress(ChannelFailed):
            for _ in range(5):
                for source, target, name in ((one, other, "responder"), (other, one, "initiator")):
                    data = bytearray(source.take_outgoing())
                    if name == towards and 0 <= at < len(data):
                        data[at] ^= 1
                    at -= len(data) if name == towards else 0
                    if data:
                        target.receive(bytes(data))
        victim = other if towards == "responder" else one
        outcomes.add((at < 0, victim.ready))
    assert (True, True) not in outcomes, "whatever was changed, nobody took it"


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


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_of_this_version_stay_as_they_are(case: str) -> None:
    """A change here needs another version: peers would refuse each other without a reason otherwise."""
    assert transcript(case) == json.loads(VECTORS.read_text())[case]


@pytest.mark.parametrize("initiator", [True, False])
@pytest.mark.parametrize("theirs", [(1, 1), (7, 9)], ids=["older", "newer"])
def test_an_older_or_newer_program_is_refused_with_the_versions(initiator: bool, theirs: tuple[int, int]) -> None:
    one = SecureChannel(ANN, initiator=initiator)
    with pytest.raises(ChannelFailed) as caught:
        one.receive(secure_channel.MAGIC + bytes(theirs))
    assert caught.value.reason is Refusal.NO_COMMON_VERSION
    assert f"{theirs[0]} to {theirs[1]}" in caught.value.detail
    assert one.take_outgoing().startswith(b"ECHO\x02\x02"), "so that the other side can tell the reason as well"


@pytest.mark.parametrize("changed", ["initiator", "responder"])
def test_a_downgrade_by_someone_in_the_middle_breaks_the_handshake(
    monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setattr(secure_channel, "VERSION_HIGHEST", 3)
    one, other = SecureChannel(ANN, initiator=True, expected=BOB.public), SecureChannel(BOB, initiator=False)
    asked = one.take_outgoing()
    assert asked.startswith(b"ECHO\x02\x03")
    other.receive((b"ECHO\x02\x02" if changed == "initiator" else asked[:6]) + asked[6:])
    answered = other.take_outgoing()
    with pytest.raises(ChannelFailed) as caught:
        one.receive((b"ECHO\x02\x02" if changed == "responder" else answered[:6]) + answered[6:])
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
            channel.receive(secure_channel.MAGIC + bytes([2, 2]))
        frames = channel.receive(data)
    except ChannelFailed:
        assert channel.failed is not None
    else:
        assert frames == []
        assert not channel.ready


def test_a_frame_that_says_it_is_huge_is_refused_before_it_is_kept() -> None:
    one, other = pair()
    lie = b"".join(one._seal((FRAME_BYTES_MAX + 1).to_bytes(4, "big") + b"x"))
    with pytest.raises(ChannelFailed) as caught:
        other.receive(lie)
    assert caught.value.reason is Refusal.OVERSIZE
    one, other = pair()
    with pytest.raises(ChannelFailed):
        other.receive(b"".join(one._seal((3).to_bytes(4, "big") + b"four")))
