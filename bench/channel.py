"""What a secure channel costs: the handshake and 64 MiB in one process, both sides counted. `.venv/bin/python bench/channel.py`

Noise XX as the peers use it (`mesh.secure_channel`, with device signatures), against TLS 1.3 through the `ssl` module with a
pinned Ed25519 certificate on each side. Also one exchange of SPAKE2, and what the verifier of a passcode costs.
"""

import datetime
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nacl.pwhash
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from echostore.kernel.ids import DeviceKey
from echostore.mesh.pake import Spake2
from echostore.mesh.secure_channel import SecureChannel
from echostore.wire.signing import SigningKey

ROUNDS = 200
BULK_BYTES = 64 * 1024 * 1024
FRAME_BYTES = 256 * 1024


def noise_pair() -> tuple[SecureChannel, SecureChannel]:
    ann, bob = SigningKey.generate(), SigningKey.generate()
    one = SecureChannel(ann, initiator=True, expected=DeviceKey(bob.public))
    other = SecureChannel(bob, initiator=False)
    while not (one.ready and other.ready):
        other.receive(one.take_outgoing())
        one.receive(other.take_outgoing())
    return one, other


def noise_bulk() -> None:
    one, other = noise_pair()
    frame = bytes(FRAME_BYTES)
    for _ in range(BULK_BYTES // FRAME_BYTES):
        assert len(other.receive(one.send(frame))) == 1


class Certificate:
    """A self-signed device certificate, and who may be on the other side."""

    def __init__(self, folder: Path, name: str) -> None:
        key = Ed25519PrivateKey.generate()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, None)
        )
        self.pem = made.public_bytes(serialization.Encoding.PEM).decode()
        self.path = folder / f"{name}.pem"
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self.path.write_text(self.pem + secret.decode())


def tls_context(own: Certificate, pinned: Certificate, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(own.path)
    context.load_verify_locations(cadata=pinned.pem)
    return context


class TlsPair:
    """Both sides in memory. A context for each handshake, because what is pinned is another device's each time."""

    def __init__(self, ann: Certificate, bob: Certificate) -> None:
        self.to_bob, self.to_ann = ssl.MemoryBIO(), ssl.MemoryBIO()
        client, server = tls_context(ann, bob, server=False), tls_context(bob, ann, server=True)
        self.one = client.wrap_bio(self.to_ann, self.to_bob)
        self.other = server.wrap_bio(self.to_bob, self.to_ann, server_side=True)
        waiting = [self.one, self.other]
        while waiting:
            for side in list(waiting):
                try:
                    side.do_handshake()
                    waiting.remove(side)
                except ssl.SSLWantReadError:
                    pass

    def bulk(self) -> None:
        frame = bytes(FRAME_BYTES)
        for _ in range(BULK_BYTES // FRAME_BYTES):
            self.one.write(frame)
            left = FRAME_BYTES
            while left:
                left -= len(self.other.read(FRAME_BYTES))


def exchange() -> None:
    guest, host = (Spake2(b"password", first=first, name_a=b"a", name_b=b"b") for first in (True, False))
    assert guest.finish(host.share) == host.finish(guest.share)


def verifier() -> None:
    nacl.pwhash.argon2id.kdf(
        32,
        b"123456",
        bytes(nacl.pwhash.argon2id.SALTBYTES),
        opslimit=nacl.pwhash.argon2id.OPSLIMIT_INTERACTIVE,
        memlimit=nacl.pwhash.argon2id.MEMLIMIT_INTERACTIVE,
    )


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """The median of processor time, which a busy machine disturbs less than the clock."""
    work()
    taken = []
    for _ in range(rounds):
        before = time.process_time()
        work()
        taken.append(time.process_time() - before)
    return statistics.median(taken) * 1000


def main() -> None:
    size = BULK_BYTES / 1e6
    print(f"noise   handshake  {milliseconds(noise_pair, ROUNDS):8.2f} ms, both sides")
    print(f"noise   bulk       {size / milliseconds(noise_bulk, 3) * 1000:8.0f} MB/s, encrypted and decrypted")
    with tempfile.TemporaryDirectory() as folder:
        ann, bob = Certificate(Path(folder), "ann"), Certificate(Path(folder), "bob")
        print(f"tls     handshake  {milliseconds(lambda: TlsPair(ann, bob), ROUNDS):8.2f} ms, both sides")
        pair = TlsPair(ann, bob)
        print(f"tls     bulk       {size / milliseconds(pair.bulk, 3) * 1000:8.0f} MB/s, encrypted and decrypted")
    print(f"spake2  exchange   {milliseconds(exchange, ROUNDS):8.2f} ms, both sides")
    print(f"argon2  verifier   {milliseconds(verifier, 10):8.2f} ms, one side")


if __name__ == "__main__":
    main()
