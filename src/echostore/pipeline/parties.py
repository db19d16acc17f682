"""Which parties of a lake a person means."""

from collections.abc import Sequence
from typing import Any

import pyarrow.compute as pc

from echostore.kernel.errors import NotFound, UsageError
from echostore.kernel.ids import KEY_BYTES


def chosen_parties(version: Any, names: Sequence[str]) -> list[bytes] | None:
    """The keys of parties that are named by key or unique prefix; None for all when none is named."""
    if not names:
        return None
    chosen: set[bytes] = set()
    known: list[str] | None = None
    for name in names:
        text = name.strip().lower()
        if not text or any(digit not in "0123456789abcdef" for digit in text):
            raise UsageError(
                f"{name!r} is no key of a party", next_step="Give hex digits, as `pipeline show` prints them."
            )
        if len(text) == 2 * KEY_BYTES:
            chosen.add(bytes.fromhex(text))
            continue
        if known is None:
            known = [party.hex() for party in pc.unique(version.runs().column("party")).to_pylist()]
        found = [each for each in known if each.startswith(text)]
        if len(found) > 1:
            raise UsageError(f"{len(found)} parties match {name!r}", next_step="Give more of the key.")
        if not found:
            raise _unknown(name)
        chosen.add(bytes.fromhex(found[0]))
    present = set(pc.unique(version.runs(parties=sorted(chosen)).column("party")).to_pylist())
    for key in sorted(chosen - present):
        raise _unknown(key.hex())
    return sorted(chosen)


def _unknown(name: str) -> NotFound:
    return NotFound(f"no party {name[:16]} is in the lake", next_step="`echostore lake stat` tells what is in it.")
