"""What a system knows of indexes: values, each over an interval of the root's ticks.

    spec   ...|----- value a -----|     |--- value b ---->          b is live: it goes on until told otherwise
              3                   7     9               cur

A version is a fact: the index had this value at every tick in [min, max]. Facts stay true, so old versions are kept
while somebody may read them. At most one version of an index is *live*; its end moves with `cur`, at no cost.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from echostore.kernel.coherence.messages import IndexValue, Patch, Spec, Token


class Codec(Protocol):
    """How values are compared and patched. Pure."""

    def token(self, value: IndexValue) -> Token:
        """A hash of the value."""

    def diff(self, old: IndexValue, new: IndexValue) -> Patch | None:
        """What takes `old` to `new`; None when that is not worth sending."""

    def patch(self, old: IndexValue, patch: Patch) -> IndexValue | None:
        """`old` with the patch applied; None when it does not fit."""


class Version(NamedTuple):
    """One value over [min, max]; `max` says nothing while the version is live."""

    min: int
    max: int
    value: IndexValue
    live: bool


class Holdings:
    """Versions by index, newest first, up to the tick `cur`."""

    __slots__ = ("_versions", "cur", "floor")

    def __init__(self, cur: int = 0) -> None:
        self.cur = cur
        self.floor: int | None = None
        """The oldest tick that somebody may read; None: only the current one."""
        self._versions: dict[Spec, tuple[Version, ...]] = {}

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, spec: Spec) -> bool:
        return spec in self._versions

    def specs(self) -> Iterator[Spec]:
        return iter(self._versions)

    def at(self, spec: Spec, tick: int) -> Version | None:
        """The version that holds at a tick, with its end."""
        for version in self._versions.get(spec, ()):
            if version.min <= tick:
                version = self._ended(version)
                if tick <= version.max:
                    return version
        return None

    def newest(self, spec: Spec) -> Version | None:
        versions = self._versions.get(spec)
        return self._ended(versions[0]) if versions else None

    def versions(self, spec: Spec) -> tuple[Version, ...]:
        return tuple(self._ended(version) for version in self._versions.get(spec, ()))

    def covers(self, spec: Spec, first: int, last: int) -> bool:
        """Whether one value is known to hold over all of [first, last]."""
        version = self.at(spec, last)
        return version is not None and version.min <= first

    def is_live(self, spec: Spec) -> bool:
        return any(version.live for version in self._versions.get(spec, ()))

    def learn(self, spec: Spec, fact: Version) -> None:
        """Take a fact in: joined with what is known of the same value, newest first."""
        kept: list[Version] = []
        for version in self._versions.get(spec, ()):  # a window's length of them, with every tick
            ended = self._ended(version) if version.live else version
            if fact.min <= ended.max and ended.min <= fact.max and ended.value == fact.value:
                fact = Version(min(ended.min, fact.min), max(ended.max, fact.max), fact.value, ended.live or fact.live)
            else:
                kept.append(version)
        if kept and _newest_first(fact) < _newest_first(kept[0]):  # as nearly always
            kept.insert(0, fact)
        else:
            kept.append(fact)
            kept.sort(key=_newest_first)
        self._keep(spec, kept)

    def succeed(self, spec: Spec, tick: int, value: IndexValue) -> None:
        """Of one's own state, as `tick` follows on `cur`: what was live ends here, and this is live from then on.

        It leaves what `end` and then `learn` would. A root does this with every tick, for a window's length of versions;
        they follow on each other, so that those to be forgotten stand last.
        """
        assert tick == self.cur + 1, f"tick {tick} after {self.cur}"
        versions = self._versions.get(spec, ())
        if versions and versions[0].live:
            versions = (self._ended(versions[0])._replace(live=False), *versions[1:])
        floor = tick if self.floor is None else min(self.floor, tick)
        kept = len(versions)
        while kept and versions[kept - 1].max < floor:
            kept -= 1
        self._versions[spec] = (Version(tick, tick, value, live=True), *versions[:kept])

    def subscribe(self, spec: Spec, gm: int) -> bool:
        """The version that holds at `gm` is live, and no other one is."""
        found = False
        kept = []
        for version in self._versions.get(spec, ()):
            ended = self._ended(version)
            live = ended.min <= gm <= ended.max
            found = found or live
            kept.append(ended._replace(live=live))
        if kept:
            self._keep(spec, kept)
        return found

    def end(self, spec: Spec) -> None:
        """Nothing is live any more: the value stands for the past only."""
        versions = self._versions.get(spec)
        if versions:
            ended = [self._ended(version)._replace(live=False) if version.live else version for version in versions]
            self._keep(spec, ended)

    def end_all(self) -> None:
        for spec in list(self._versions):
            self.end(spec)

    def evict(self, spec: Spec) -> None:
        self._versions.pop(spec, None)

    def _ended(self, version: Version) -> Version:
        return version._replace(max=max(self.cur, version.min)) if version.live else version

    def _keep(self, spec: Spec, versions: list[Version]) -> None:
        """All that may still be read, and the newest one, which may turn out to hold again."""
        floor = self.cur if self.floor is None else min(self.floor, self.cur)
        kept = [version for version in versions if version.max >= floor or version.live]
        if versions and (not kept or kept[0] is not versions[0]):
            kept.insert(0, versions[0])
        self._versions[spec] = tuple(kept)


def _newest_first(version: Version) -> tuple[int, int]:
    return -version.min, -version.max
