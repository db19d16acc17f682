"""The quotas of a home: what one feed and one device may bring per second before they stand behind others.

A local setting, kept in the MetaStore. It changes nothing about what is taken in, only in which order
(`kernel.sync.turns`): two peers with different quotas come to the same state.
"""

import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from echostore.kernel.errors import UsageError
from echostore.kernel.sync.turns import Quotas

if TYPE_CHECKING:
    from echostore.store.meta_store import MetaStore

_log = logging.getLogger("echostore")

QUOTAS_SETTING: Final = "quotas"


@dataclass(frozen=True, slots=True)
class IntakeStatus:
    """What has come in since the start, beyond its quota."""

    waiting: int
    """Ranges that wait for their turn now."""
    over_feed_blocks: int
    over_device_blocks: int
    """Blocks that came while the bucket of their feed, or of the device that brought them, was empty."""
    slowed_blocks: int
    """Of these, blocks that others went before."""


def quotas_of(meta: "MetaStore") -> Quotas:
    """The quotas that were set; what was not set, or can't be read, is as by default."""
    kept: Any = meta.setting(QUOTAS_SETTING, {})
    try:
        return Quotas(**kept)
    except (TypeError, UsageError) as error:
        _log.warning("the quotas of this home can't be read, the defaults are used", extra={"why": str(error)})
        return Quotas()


def keep_quotas(meta: "MetaStore", quotas: Quotas) -> None:
    """What is as by default is not kept, so that later defaults count."""
    given, usual = asdict(quotas), asdict(Quotas())
    changed = {name: rate for name, rate in given.items() if rate != usual[name]}
    meta.set_setting(QUOTAS_SETTING, changed or None)
