"""ViewClasses: the registered names by which applications discover views."""

import re

from echostore.kernel.errors import UsageError
from echostore.store.meta_store import MetaStore

_SETTING = "view_classes"
_NAME = re.compile(r"[a-z0-9][a-z0-9._/-]{1,127}")


class ViewClasses:
    """Names of view classes that this peer knows, with a line about each. Kept in the MetaStore."""

    def __init__(self, meta: MetaStore) -> None:
        self._meta = meta

    def register(self, name: str, about: str = "") -> str:
        """Make a view class known; registering it again changes its description."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is not a view class",
                next_step="Use lower case, digits, dots and dashes: example.org/planner.",
            )
        self._meta.set_setting(_SETTING, {**self.all(), name: about})
        return name

    def known(self, name: str) -> bool:
        return name in self.all()

    def all(self) -> dict[str, str]:
        found: dict[str, str] = self._meta.setting(_SETTING, {})
        return found
