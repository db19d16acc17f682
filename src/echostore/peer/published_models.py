"""Published models: a party tells its members which models its items use. A descriptor travels, code never does.

An admin publishes a class that runs here. What the credential carries is the name, the version, the docstring and the
SHA-256 of the source file: enough for a member to find the package and to allow exactly that file (`plugins`).
"""

import inspect
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from echostore.kernel.errors import TooLarge, UsageError
from echostore.kernel.party.credentials import ModelPublish

if TYPE_CHECKING:
    from echostore.peer.party import Party

DESCRIPTION_CHARACTERS_MAX = 4096
"""Of the docstring: a descriptor is read by people and held by every member for good."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """What a party says about a model. `sha256` is that of the source file, in hex."""

    name: str
    version: int
    description: str
    sha256: str


class _Descriptor(msgspec.Struct, omit_defaults=True):
    """The JSON inside the credential. Others may write more; that is ignored."""

    name: str = ""
    version: int = 0
    description: str = ""
    source_sha256: str = ""


def publish_model(party: "Party", model: type[Any]) -> PublishedModel:
    """Publish the descriptor of a registered class; only admins may, and each version once."""
    name, version = getattr(model, "name", None), getattr(model, "version", None)
    if not isinstance(name, str) or not isinstance(version, int) or not party.peer.models.known(name, version):
        raise UsageError(f"{model!r:.60} is not a registered model", next_step="Register it first.")
    description = inspect.getdoc(model) or ""
    if len(description) > DESCRIPTION_CHARACTERS_MAX:
        raise TooLarge(
            f"the docstring of {name}@{version} has {len(description)} characters; "
            f"at most {DESCRIPTION_CHARACTERS_MAX} are published"
        )
    digest = sha256(_source(model)).digest()
    descriptor = msgspec.json.encode(_Descriptor(name, version, description, digest.hex()))
    members = party.members
    members._issue([members._sign(ModelPublish(name, version, descriptor, digest))])
    return PublishedModel(name, version, description, digest.hex())


def published_models(party: "Party") -> list[PublishedModel]:
    """What the party has published, by name and version."""
    with party.reading() as runtime:
        return [_shown(said) for said in runtime.processor.membership.machine.models]


def _source(model: type[Any]) -> bytes:
    try:
        path = inspect.getsourcefile(model)
    except TypeError:
        path = None
    if path is None or not Path(path).is_file():
        raise UsageError(f"the source file of {model.__name__} is not here, so it can't be hashed")
    return Path(path).read_bytes()


def _shown(said: ModelPublish) -> PublishedModel:
    try:
        description = msgspec.json.decode(said.descriptor, type=_Descriptor).description
    except msgspec.DecodeError:
        description = ""  # another program's descriptor: the model is published all the same
    return PublishedModel(said.name, said.version, description, said.hash.hex())
