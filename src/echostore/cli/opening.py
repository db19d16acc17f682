"""How a command gets at the data: the home, the peer, one party, one item, each by what a person calls it.

Commands that read open the peer read-only, so that they work beside a running writer. Commands that write take the
home's lock. While `echostore serve` has it, they use that process's peer over the home's local socket; beside any other
writer they fail at once and name its pid.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echostore.cli.options import PARTY_VARIABLE, Options, PartyChoice
from echostore.cli.output import Output
from echostore.cli.values import one_line, short
from echostore.kernel.errors import NotFound, UsageError, WrongPassphrase

if TYPE_CHECKING:
    from echostore.kernel.ids import PartyKey
    from echostore.peer.items import Item
    from echostore.peer.party import Party
    from echostore.peer.peer import Peer

PASSPHRASE_VARIABLE = "ECHOSTORE_PASSPHRASE"
NOTHING_CAME = "nothing of the party has come yet: connect to a member, with echostore serve"
"""Of a party that this device was let into and holds nothing of."""
NAMED_MAX = 5
"""Candidates that an error about an ambiguous name lists."""


def home_path(options: Options) -> Path:
    """The data folder: --home, ECHOSTORE_HOME, or the user's own."""
    if options.home is not None:
        return options.home
    import platformdirs

    return Path(platformdirs.user_data_dir("echostore"))


# the peer


@contextmanager
def reading(options: Options) -> "Iterator[Peer]":
    """The peer, read-only."""
    with _opened(options, read_only=True, create=False) as peer:
        yield peer


@contextmanager
def writing(options: Options, *, create: bool = False, name: str | None = None) -> "Iterator[Peer]":
    """The peer, to write with. `create` makes the home when there is none."""
    with _opened(options, read_only=False, create=create, name=name) as peer:
        yield peer


@contextmanager
def serving(options: Options, *, name: str | None = None) -> "Iterator[Peer]":
    """The peer, for a process that keeps it open: nobody else may have it, and writes become durable by themselves."""
    with _opened(options, read_only=False, create=True, name=name, background=True, attach=False) as peer:
        yield peer


@contextmanager
def looking(options: Options) -> "Iterator[Peer]":
    """The peer that `echostore serve` has open, which knows more than the files do; without one, read-only."""
    running = served(options)
    if running is None:
        with reading(options) as peer:
            yield peer
    else:
        with running:
            yield running


def served(options: Options) -> "Peer | None":
    """The peer that `echostore serve` has open now."""
    from echostore.peer.attached import attach
    from echostore.store.home import Home

    found: Peer | None = attach(Home.open(home_path(options)))
    return found


@contextmanager
def _opened(
    options: Options,
    *,
    read_only: bool,
    create: bool,
    name: str | None = None,
    background: bool = False,
    attach: bool = True,
) -> "Iterator[Peer]":
    from echostore.peer.doorstep import open_peer

    path = home_path(options)
    passphrase = os.environ.get(PASSPHRASE_VARIABLE) or None

    def attempt(passphrase: str | None) -> "Peer":
        # A command ends with a flush of its own; a thread that does it too would only race with it.
        return open_peer(
            path,
            name=name,
            passphrase=passphrase,
            create=create,
            read_only=read_only,
            background=background,
            attach=attach,
        )

    try:
        peer = attempt(passphrase)
    except WrongPassphrase:
        if passphrase is not None or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        peer = attempt(ask_passphrase("Passphrase: "))
    with peer:
        yield peer


def ask_passphrase(prompt: str) -> str:
    import getpass

    return getpass.getpass(prompt, stream=sys.stderr)


# parties


def party_key(peer: "Peer", which: str | None) -> "PartyKey":
    """The key of a party by key, prefix or @title. Without any: the one that ECHOSTORE_PARTY names, that `party use`
    chose, or the only one there is. Opens nothing."""
    known = peer.parties()
    if which is None:
        which = os.environ.get(PARTY_VARIABLE) or None
    if which is None:
        chosen = peer.default_party
        if chosen is not None:
            return chosen
        if len(known) == 1:
            return known[0].key
        if not known:
            raise NotFound("there is no party here", next_step="Make one with `echostore party create TITLE`.")
        raise UsageError(
            f"there are {len(known)} parties, and none is named: {_named([_party_label(party) for party in known])}",
            next_step="Name one with --party, or choose one for all commands with `echostore party use PARTY`.",
        )
    which = from_dash(which)
    if which.startswith("@"):
        found = [party for party in known if party.title == which[1:]]
    else:
        found = [party for party in known if which and party.key.hex().startswith(which.lower())]
    if not found:
        raise NotFound(f"no party {which!r} is here", next_step="`echostore party list` shows the parties.")
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} parties match {which!r}: {_named([_party_label(party) for party in found])}",
            next_step="Give more of the key.",
        )
    return found[0].key


def open_party(peer: "Peer", which: str | None) -> "Party":
    return peer.party(party_key(peer, which))


def _party_label(known: Any) -> str:
    return f"{short(known.key.hex())} {one_line(known.title, 30)}"


# items


def find_item(peer: "Peer", options: PartyChoice, text: str) -> "Item":
    """An item by id, unique prefix, @name, or locator; the last names its party too."""
    text = from_dash(text)
    if text.startswith("echo://"):
        from echostore.kernel.values import parse_locator

        party, _ = parse_locator(text)
        item: Item = peer.party(party).get(text)
        return item
    return item_in(open_party(peer, options.party), text)


def item_in(party: "Party", text: str) -> "Item":
    """An item of one party by id, unique prefix, or @name: its display name, or the property title. A deleted one goes by
    its name too, where no other item has it."""
    if not text.startswith("@"):
        found: Item = party.get(text)
        return found
    named = [item for item in party.items() if text[1:] in names_of(item)] or [
        item for item in party.items(deleted=True) if text[1:] in names_of(item)
    ]
    if not named:
        raise NotFound(f"no item is named {text[1:]!r}", next_step=_look_elsewhere(party))
    if len(named) > 1:
        raise UsageError(
            f"{len(named)} items are named {text[1:]!r}: {_named([short(item_id(item)) for item in named])}",
            next_step="Name it by its id.",
        )
    return named[0]


def _look_elsewhere(party: "Party") -> str:
    """Where to look for an item that is not here by its name."""
    next_step, status = "`echostore item tree` shows the items.", party.status
    if status.discards and status.epoch is not None:
        earlier = f"`--at epoch:{status.epoch - 1}`, or an earlier one," if status.epoch > 1 else "`--at` a time before"
        next_step += (
            f" Epoch {status.epoch} and those before it left out what was deleted: {earlier} shows it with its id while that "
            "is kept, and `echostore party revive ID` makes it anew."
        )
    return next_step


def item_id(item: "Item") -> str:
    from echostore.kernel.ids import item_text

    return item_text(item.id)


def names_of(item: "Item") -> set[str]:
    """What a person may call an item."""
    from echostore.peer.item_kinds import PropertySetItem

    names = {item.name}
    if isinstance(item, PropertySetItem):
        title = item.get("title")
        names |= {title} if isinstance(title, str) else set()
    return names - {""}


def _named(labels: list[str]) -> str:
    more = f", and {len(labels) - NAMED_MAX} more" if len(labels) > NAMED_MAX else ""
    return ", ".join(labels[:NAMED_MAX]) + more


# standard input


def from_dash(text: str) -> str:
    """What an argument says; `-` stands for what is on standard input."""
    return read_input().strip() if text == "-" else text


def read_ahead(content: tuple[str, ...]) -> None:
    """Take standard input before anything is opened, if content is to come from there: who types in the middle of a
    batch would hold up everybody else that writes."""
    if "-" in content:
        sys.stdin = io.StringIO(read_input())


def read_input() -> str:
    """All of standard input, once: a second `-` would find nothing and mean something else than it says."""
    if sys.stdin.closed:
        raise UsageError("only one argument can be read from standard input")
    try:
        with sys.stdin:
            return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not text: {error}") from None


def wrote(output: Output, party: "Party", fields: dict[str, Any], text: str) -> None:
    """Make a write durable and tell of it: the result on stdout, its receipt beside it."""
    receipt = party.flush()
    anchor = str(receipt.anchor)
    output.document({**fields, "party": party.key.hex(), "anchor": anchor, "durable": receipt.durable}, text)
