"""The handshake of a channel with fixed keys, byte for byte: `python tests/golden/channel.py` writes channel.json anew.

Do that only with a new version of the protocol: peers of the old one would be refused otherwise without a reason.
"""

import json
from pathlib import Path
from unittest import mock

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from echostore.kernel.ids import DeviceKey
from echostore.mesh import noise, secure_channel
from echostore.mesh.secure_channel import KnownKeys, SecureChannel
from echostore.wire.signing import SigningKey

VECTORS = Path(__file__).parent / "channel.json"
INITIATOR, RESPONDER, IDENTITY = (SigningKey.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
PARTY = bytes([4]) * 32
CASES = {
    "device": {"expected": DeviceKey(RESPONDER.public)},
    "party": {"known": KnownKeys((PARTY,))},
    "identity": {"known": KnownKeys((), IDENTITY)},
}


def transcript(case: str) -> dict[str, list[str] | str]:
    """What each side sends until one frame has gone each way, and the hash that both are bound to."""
    numbers = iter(range(16, 64))

    def fixed() -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(bytes([next(numbers)]) * 32)

    def recognise(presented: secure_channel.Presented) -> bytes | None:
        keys = (RESPONDER.public, PARTY)
        named = next(filter(presented.names, keys), None)
        return named or (IDENTITY.public if presented.proven_by(IDENTITY.public) else None)

    with (
        mock.patch.object(noise, "new_key", fixed),
        mock.patch.object(secure_channel.secrets, "token_bytes", lambda size: bytes([next(numbers)]) * size),
    ):
        one = SecureChannel(INITIATOR, initiator=True, **CASES[case])
        other = SecureChannel(RESPONDER, initiator=False, recognise=recognise)
        sent: dict[str, list[str]] = {"initiator": [], "responder": []}
        while not (one.ready and other.ready):
            for side, target, name in ((one, other, "initiator"), (other, one, "responder")):
                if data := side.take_outgoing():
                    sent[name].append(data.hex())
                    target.receive(data)
    sent["initiator"].append(one.send(b"from the initiator").hex())
    sent["responder"].append(other.send(b"from the responder").hex())
    return {**sent, "hash": one.handshake_hash.hex()}


if __name__ == "__main__":
    VECTORS.write_text(json.dumps({case: transcript(case) for case in CASES}, indent=1) + "\n")
