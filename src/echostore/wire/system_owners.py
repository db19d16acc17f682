"""Who may speak for which system: a name that a leaf was given is not for another leaf to use.

A system belongs to the key and the capability it was last attached with; whoever comes with one of the two has it. An
edge speaks for the leaves behind it: a link that may read everything may do so, and any other link may attach its own
system and nothing else. For a leaf that is new there, an edge shows what the leaf showed; of those that were there before
its own way up was lost it is believed.
"""

from typing import NamedTuple

from echostore.kernel.coherence.messages import Attach, SystemId
from echostore.wire.capabilities import Grants

OWNERS_MAX = 100_000
"""Systems whose owners are remembered by one that has no disk."""


class Owner(NamedTuple):
    key: bytes
    capability: bytes


class SystemOwners:
    """Owners by system, as far as they are known."""

    def __init__(self) -> None:
        self.owners: dict[SystemId, Owner] = {}

    def allows(self, attach: Attach, grants: Grants, key: bytes) -> bool:
        """Whether a link may attach this."""
        if speaks_for_others(grants):
            return True
        if attach.turn or attach.below:
            return False
        owner = None if attach.system is None else self.owners.get(attach.system)
        return owner is None or owner.key == key or owner.capability == grants.id

    def note(self, system: SystemId, owner: Owner) -> bool:
        """Remember whose it is; whether that is news."""
        if self.owners.get(system) == owner:
            return False
        self.owners.pop(system, None)
        self.owners[system] = owner
        return True

    def shrink(self) -> None:
        while len(self.owners) > OWNERS_MAX:
            del self.owners[next(iter(self.owners))]


def speaks_for_others(grants: Grants) -> bool:
    return any(each.all_items for each in grants.read)
