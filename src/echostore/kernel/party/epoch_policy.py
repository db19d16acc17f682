"""The party's policy on epochs: who declares them, when, how many must agree. Set by a Policy credential.

    key                    value                                    default
    epoch.declarers        admins | elect | bot | 32-byte keys      admins
    epoch.bots             32-byte keys of devices or identities    none; whom `bot` means
    epoch.messages         data messages since the last epoch       0: not by count
    epoch.bytes            bytes of data blocks since then          0: not by size
    epoch.age_s            seconds since then, if anything came     0: not by age
    epoch.grace_s          before the next elected device steps in  60
    epoch.join_attests     independent attests that a joiner wants  1 from three devices on, else 0
    epoch.truncate_quorum  identities that must have attested       majority
    epoch.silence_s        after which a silent feed is retired     0: never
    epoch.discard_age_s    age from which epochs leave things out   0: never

A device that can't judge an epoch waits ten grace times for what it lacks, at least ten seconds and at most an hour, and
goes on without that epoch then (`EpochPolicy.patience_s`).

Numbers are written in decimal digits. What can't be read stands as if it were not there, so that a bad value stops
nothing. With no trigger at all, epochs are made by hand alone.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from echostore.kernel.ids import KEY_BYTES, DeviceKey, IdentityKey, PartyKey

EPOCH_DECLARERS: Final = "epoch.declarers"
EPOCH_BOTS: Final = "epoch.bots"
EPOCH_MESSAGES: Final = "epoch.messages"
EPOCH_BYTES: Final = "epoch.bytes"
EPOCH_AGE: Final = "epoch.age_s"
EPOCH_GRACE: Final = "epoch.grace_s"
EPOCH_JOIN_ATTESTS: Final = "epoch.join_attests"
EPOCH_TRUNCATE_QUORUM: Final = "epoch.truncate_quorum"
EPOCH_SILENCE: Final = "epoch.silence_s"
EPOCH_DISCARD_AGE: Final = "epoch.discard_age_s"

ADMINS, ELECT, BOT, NAMED = "admins", "elect", "bot", "named"
MAJORITY: Final = b"majority"

GRACE_S: Final = 60
JOIN_DEVICES_MIN: Final = 3
"""With fewer devices there is nobody independent to ask."""
DISCARD_AHEAD_MS: Final = 600_000
"""How far `discard_before` may lie beyond an attester's own clock: clocks differ."""
PATIENCE_GRACES: Final = 10
"""For how many grace times a device waits for what an epoch lacks before it goes on without it."""
PATIENCE_S_MIN, PATIENCE_S_MAX = 10, 3_600
"""Bounds of that time, whatever the policy says: any admin may set a policy, and must not stop epochs by it."""
NUMBER_DIGITS_MAX: Final = 15
"""More would not be a count of anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPolicy:
    """How a party makes its epochs."""

    declarers: str = ADMINS
    """`admins`, `elect`, `bot` or `named`."""
    named: frozenset[bytes] = frozenset()
    """Keys of identities or devices that may declare, with `bot` or `named`."""
    messages: int = 0
    bytes_: int = 0
    age_s: int = 0
    grace_s: int = GRACE_S
    join_attests: int | None = None
    truncate_quorum: int = 0
    """Identities, at least a majority of them whatever this says; 0 is a majority."""
    silence_s: int = 0
    discard_age_s: int = 0

    @staticmethod
    def of(settings: Mapping[str, bytes]) -> "EpochPolicy":
        """The policy that the settings of a party give (`PartyMachine.policy`)."""
        declarers, named = declarers_of(settings)
        return EpochPolicy(
            declarers=declarers,
            named=named,
            messages=_number(settings.get(EPOCH_MESSAGES), 0),
            bytes_=_number(settings.get(EPOCH_BYTES), 0),
            age_s=_number(settings.get(EPOCH_AGE), 0),
            grace_s=_number(settings.get(EPOCH_GRACE), GRACE_S),
            join_attests=_number(settings.get(EPOCH_JOIN_ATTESTS), -1) if EPOCH_JOIN_ATTESTS in settings else None,
            truncate_quorum=_number(settings.get(EPOCH_TRUNCATE_QUORUM), 0),
            silence_s=_number(settings.get(EPOCH_SILENCE), 0),
            discard_age_s=_number(settings.get(EPOCH_DISCARD_AGE), 0),
        )

    @property
    def by_itself(self) -> bool:
        """Whether epochs are made without anybody asking."""
        return bool(self.messages or self.bytes_ or self.age_s)

    def due(self, *, messages: int, size: int, age_s: float) -> bool:
        """Whether what came since the last epoch asks for the next one."""
        if not messages:
            return False
        by_count = bool(self.messages) and messages >= self.messages
        by_size = bool(self.bytes_) and size >= self.bytes_
        return by_count or by_size or (bool(self.age_s) and age_s >= self.age_s)

    def discard_before_ms(self, now_ms: int) -> int:
        """Before when an epoch that is made now leaves things out; 0: it leaves out nothing by itself."""
        return max(0, now_ms - 1000 * self.discard_age_s) if self.discard_age_s else 0

    @property
    def patience_s(self) -> int:
        """How long a device waits for an epoch that it can't judge before it goes on without it."""
        return min(max(PATIENCE_GRACES * self.grace_s, PATIENCE_S_MIN), PATIENCE_S_MAX)

    def names(self, identity: IdentityKey, device: DeviceKey) -> bool:
        return bytes(identity) in self.named or bytes(device) in self.named

    def attests_to_join(self, devices: int) -> int:
        """How many identities besides the declarer's must stand for an epoch before a newcomer believes it."""
        if self.join_attests is not None and self.join_attests >= 0:
            return self.join_attests
        return 1 if devices >= JOIN_DEVICES_MIN else 0

    def quorum_for_truncation(self, electorate: int) -> int:
        """How many of so many identities must have attested before anything below an epoch is deleted."""
        return max(majority(electorate), min(self.truncate_quorum, electorate))


def majority(electorate: int) -> int:
    return electorate // 2 + 1


def declarers_of(settings: Mapping[str, bytes]) -> tuple[str, frozenset[bytes]]:
    """Who may declare, and the keys that are named for it."""
    value = settings.get(EPOCH_DECLARERS)
    if value is None or value == ADMINS.encode():
        return ADMINS, frozenset()
    if value == ELECT.encode():
        return ELECT, frozenset()
    if value == BOT.encode():
        return BOT, _keys(settings.get(EPOCH_BOTS, b""))
    return NAMED, _keys(value)


def election(party: PartyKey, number: int, devices: Iterable[DeviceKey]) -> list[DeviceKey]:
    """The devices that may declare an epoch, in the order in which they step in: the lowest hash first."""
    return sorted(devices, key=lambda device: (_lot(party, number, device), device))


def turn(order: list[DeviceKey], device: DeviceKey, *, waited_s: float, grace_s: float) -> bool:
    """Whether a device may step in once the epoch was due for `waited_s`: each before it had a grace time of its own."""
    return device in order and waited_s >= (order.index(device) + 1) * grace_s


def _lot(party: PartyKey, number: int, device: DeviceKey) -> bytes:
    return hashlib.sha256(b"echostore/election/1" + party + number.to_bytes(8, "big") + device).digest()


def _keys(value: bytes) -> frozenset[bytes]:
    """Keys one behind the other; nobody when that is not what it is."""
    if len(value) % KEY_BYTES:
        return frozenset()
    return frozenset(value[start : start + KEY_BYTES] for start in range(0, len(value), KEY_BYTES))


def _number(value: bytes | None, default: int) -> int:
    if value is None or not value.isdigit() or len(value) > NUMBER_DIGITS_MAX:
        return default
    return int(value)
