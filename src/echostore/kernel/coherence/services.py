"""Who offers what: last-writer registers that live as long as they are repeated.

    Announce(system, service, gen, seq)     the greater (gen, seq) wins
    Deannounce(...)                         the same register, with nothing in it
    Connectivity(system, affects_all)       a system is gone; with all its services, or only as a way to others

The index of services is soft state. It is told and cached like any index, so nobody polls for it.
"""

from typing import NamedTuple

from echostore.kernel.coherence.messages import (
    Announce,
    Connectivity,
    Deannounce,
    IndexValue,
    Service,
    Spec,
    SystemId,
)

SERVICES_MAX = 10_000
"""Services known to one system."""

SERVICES_SPEC = b"services/"
"""Specs that begin like this name the services whose names begin with the rest."""

SERVICE_TTL_S = 30.0
"""A service that is not announced again for so long is gone."""


class Register(NamedTuple):
    gen: int
    seq: int
    detail: bytes | None
    """None: it was taken back."""


class Services:
    """The registers that one system knows."""

    __slots__ = ("registers", "unreachable")

    def __init__(self) -> None:
        self.registers: dict[Service, Register] = {}
        self.unreachable: frozenset[SystemId] = frozenset()

    def take(self, message: Announce | Deannounce) -> bool:
        """Whether this is news."""
        known = self.registers.get(message.service)
        if known is not None and (message.gen, message.seq) <= (known.gen, known.seq):
            return False
        if known is None and len(self.registers) >= SERVICES_MAX:
            return False
        detail = message.detail if isinstance(message, Announce) else None
        self.registers[message.service] = Register(message.gen, message.seq, detail)
        self.unreachable -= {message.service.system}
        return True

    def lost(self, message: Connectivity) -> bool:
        """A system can't be reached. Its registers stay, so that an old announcement does not bring it back."""
        if message.system in self.unreachable:
            return False
        if message.affects_all_services:
            self.unreachable |= {message.system}
        return message.affects_all_services

    def expire(self, service: Service) -> bool:
        """Not heard of for too long."""
        return self.registers.pop(service, None) is not None

    def forget_root(self, root: bytes) -> bool:
        """A root can't be reached: what its systems offer is told anew when it is back."""
        gone = [service for service in self.registers if service.system.root == root]
        for service in gone:
            del self.registers[service]
        self.unreachable = frozenset(system for system in self.unreachable if system.root != root)
        return bool(gone)

    def announcements(self) -> list[Announce]:
        """All that is offered, as it was said."""
        return [
            Announce(service, self.registers[service].gen, self.registers[service].seq, detail)
            for service, detail in self.offered()
        ]

    def offered(self, prefix: str = "") -> list[tuple[Service, bytes]]:
        return [
            (service, register.detail)
            for service, register in sorted(self.registers.items())
            if register.detail is not None
            and service.system not in self.unreachable
            and service.name.startswith(prefix)
        ]

    def value(self, spec: Spec) -> IndexValue:
        """The index of services that a spec names: one line for each, equal for equal registers."""
        prefix = spec.removeprefix(SERVICES_SPEC).decode("utf-8", "replace")
        lines = [
            " ".join(
                [
                    service.system.root.hex(),
                    ".".join(map(str, service.system.path)),
                    service.name.encode().hex(),
                    detail.hex(),
                ]
            )
            for service, detail in self.offered(prefix)
        ]
        return IndexValue("\n".join(lines).encode())
