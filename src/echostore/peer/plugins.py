"""Models from installed packages, each allowed by the hash of its source file.

A package offers a model under the entry point group "echostore.models"; the entry point is named `name@version`:

    [project.entry-points."echostore.models"]
    "counter@2" = "my_models.counter:Counter"

Installing a package does not load its models, and nothing that came over the network ever is. `load_models` reads the
source file, compares its SHA-256 with the one that the caller allows, and only then executes *the bytes it has read*:
neither a file exchanged in between nor a compiled file beside it is looked at. The packages above the module are not
imported either, so a model is one file; what that file imports by name is ordinary installed code.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.abc import InspectLoader
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from echostore.kernel.errors import NotFound, Refused, UsageError
from echostore.kernel.models.factory import ModelFactory

GROUP = "echostore.models"

_PRIVATE = "_echostore_model_"
"""Verified modules get a name of their own, so that they neither hide nor reuse what was imported unverified."""


class ModelRefused(Refused):
    """An installed model that is not allowed, or is not what it says. `sha256` is the hash of the file found."""

    code = "E-MODEL-REFUSED"

    def __init__(self, what: str, *, name: str, sha256: str, next_step: str = "") -> None:
        super().__init__(what, unchanged="It was not loaded.", next_step=next_step)
        self.name = name
        self.sha256 = sha256


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model that an installed package offers. `sha256` is empty when there is no source file to be hashed."""

    name: str
    distribution: str
    target: str
    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """What `load_models` did: the classes it registered, and why it left the other installed ones alone."""

    models: tuple[type, ...]
    refused: tuple[ModelRefused, ...]


def entry_point_hashes() -> list[InstalledModel]:
    """What is installed, with the hashes that would allow it. Nothing is imported."""
    return [offer.installed for offer in _offers()]


def load_models(factory: ModelFactory, allow: Mapping[str, str]) -> LoadedModels:
    """Load and register the models that `allow` names, `{"counter@2": sha256 in hex}`. When one of them is missing,
    differs from its hash or is no such model, none is registered; a file whose hash differs is not executed."""
    offers = _offers()
    wanted = {name: _allowed_hash(name, digest) for name, digest in allow.items()}
    chosen = [_choose(name, digest, offers) for name, digest in wanted.items()]
    models = tuple(_load(offer) for offer in chosen)
    for offer, model in zip(chosen, models, strict=True):
        _check_model(offer, model)
    for model in models:
        factory.register(model)
    return LoadedModels(models, tuple(_not_allowed(offer.installed) for offer in offers if offer not in chosen))


@dataclass(frozen=True, slots=True)
class _Offer:
    """An entry point with the source that was read for it."""

    entry: EntryPoint
    installed: InstalledModel
    source: bytes


def _offers() -> list[_Offer]:
    return [_offer(entry) for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))]


def _offer(entry: EntryPoint) -> _Offer:
    path = _source_path(entry.module)
    source = path.read_bytes() if path else b""
    installed = InstalledModel(
        entry.name,
        entry.dist.name if entry.dist else "",
        entry.value,
        str(path or ""),
        sha256(source).hexdigest() if path else "",
    )
    return _Offer(entry, installed, source)


def _source_path(module: str) -> Path | None:
    """Where a module's source is. Finders are asked directly: `importlib.util.find_spec` would import the parents."""
    places: Iterable[str] | None = None
    name, origin = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        specs = (finder.find_spec(name, list(places) if places is not None else None) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return None
        origin, places = spec.origin, spec.submodule_search_locations or ()
    path = Path(origin) if origin else None
    return path if path and path.suffix == ".py" and path.is_file() else None


def _allowed_hash(name: str, digest: str) -> str:
    if len(digest) != 64 or set(digest.lower()) - set("0123456789abcdef"):
        raise UsageError(f"{name} is allowed by {digest!r}, which is not a SHA-256 in hex")
    return digest.lower()


def _choose(name: str, digest: str, offers: list[_Offer]) -> _Offer:
    """The offer of a name whose source has the allowed hash."""
    named = [offer for offer in offers if offer.installed.name == name]
    if not named:
        known = ", ".join(offer.installed.name for offer in offers) or "none"
        raise NotFound(f"no installed package offers the model {name}", next_step=f"Installed models: {known}.")
    for offer in named:
        if offer.installed.sha256 == digest:
            return offer
    found = named[0].installed
    if not found.sha256:
        raise ModelRefused(f"the model {name} ({found.target}) has no source file here", name=name, sha256="")
    raise ModelRefused(
        f"the source of the model {name}, {found.path}, has the SHA-256 {found.sha256}, allowed is {digest}",
        name=name,
        sha256=found.sha256,
        next_step="Read the file; allow its hash if you trust it.",
    )


def _not_allowed(found: InstalledModel) -> ModelRefused:
    return ModelRefused(
        f"the installed model {found.name} ({found.target}, SHA-256 {found.sha256 or 'unknown'}) is not allowed",
        name=found.name,
        sha256=found.sha256,
        next_step="Read its source; allow its hash if you trust it.",
    )


class _VerifiedSource(InspectLoader):
    """Loads a module from bytes that were checked; nothing is read again."""

    def __init__(self, source: bytes, path: str) -> None:
        self._source = source
        self._path = path

    def get_source(self, fullname: str) -> str:
        return self._source.decode()

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self._path, "exec", dont_inherit=True)

    def is_package(self, fullname: str) -> bool:
        return False


def _load(offer: _Offer) -> Any:
    """What the entry point names, out of the verified source. Loading the same source again gives the same class."""
    installed, entry = offer.installed, offer.entry
    name = _PRIVATE + installed.sha256
    module = sys.modules.get(name)
    try:
        if module is None:
            module = _execute(name, offer.source, installed.path)
        found: Any = module
        for step in entry.attr.split(".") if entry.attr else ():
            found = getattr(found, step)
    except Exception as error:
        raise ModelRefused(
            f"the model {installed.name} ({installed.target}, SHA-256 {installed.sha256}) can't be loaded: "
            f"{type(error).__name__}: {error}",
            name=installed.name,
            sha256=installed.sha256,
        ) from error
    return found


def _execute(name: str, source: bytes, path: str) -> ModuleType:
    loader = _VerifiedSource(source, path)
    spec = spec_from_loader(name, loader, origin=path)
    assert spec is not None
    module = module_from_spec(spec)
    module.__file__ = path
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_model(offer: _Offer, model: Any) -> None:
    """Whether a class is the model that its entry point promises."""
    installed = offer.installed
    said = f"{getattr(model, 'name', None)}@{getattr(model, 'version', None)}"
    problem = ""
    if not isinstance(model, type):
        problem = f"is no class but {model!r:.60}"
    elif said != installed.name:
        problem = f"calls itself {said}"
    else:
        missing = [method for method in ("apply", "value") if not callable(getattr(model, method, None))]
        problem = f"has no method {missing[0]!r}" if missing else ""
    if problem:
        raise ModelRefused(
            f"{installed.target}, offered as the model {installed.name} (SHA-256 {installed.sha256}), {problem}",
            name=installed.name,
            sha256=installed.sha256,
        )
