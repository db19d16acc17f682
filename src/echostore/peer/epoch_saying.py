"""What this peer says of an epoch, in a word or two: shown beside it in lists."""

from echostore.kernel.ids import IdentityKey
from echostore.kernel.party.epoch_chain import Epoch, Tally


def said_of(tally: Tally, epoch: Epoch, identity: IdentityKey, judged: dict[str, list[str]], *, passed: bool) -> str:
    """`judged` has what it found by the hash of the epoch, where it did not vote. `passed`: it goes on without the epoch."""
    if tally.voted(epoch.number, identity) == epoch.hash:
        return "declared" if epoch.declarer == identity else "attested"
    if tally.disputed(epoch.hash, identity):
        return "disputed"
    other = tally.voted(epoch.number, identity)
    rival = tally.named(other) if other is not None else None
    if rival is not None:
        return f"{'declared' if rival.declarer == identity else 'attested'} a rival"
    verdict, detail, *_ = judged.get(epoch.hash.hex(), ["not judged", ""])
    said = f"{verdict}: {detail}" if detail else verdict
    return f"{said}; passed over" if passed else said
