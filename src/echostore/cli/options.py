"""The options that commands share. They mean the same on every command, and no letter means two things.

    Options           --home  --json  --quiet  --trace
    Listing           those, and --nl  --csv, for what prints rows
    InParty           those of Options, and --party
    ListingInParty    all of them

A command takes one of these as its parameter `options`; cyclopts spreads its fields into options of the command.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import CoercionError, Group, Parameter, Token, convert

from echostore.kernel.errors import UsageError

HOME_VARIABLE = "ECHOSTORE_HOME"
PARTY_VARIABLE = "ECHOSTORE_PARTY"

SHARED = Group("Home and output", sort_key=100)

FLAG = Parameter(negative=(), show_default=False)
"""A switch that has no opposite."""

YES = Parameter(name=["--yes", "-y"], negative=(), show_default=False)


@Parameter(name="*", group=SHARED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What every command takes."""

    home: Annotated[Path | None, Parameter(env_var=HOME_VARIABLE)] = None
    """Folder with the data; without it, the user's own data folder."""
    json: Annotated[bool, FLAG] = False
    """Print one JSON document; errors become JSON on stderr."""
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=(), show_default=False)] = False
    """No narration and no progress bars."""
    trace: Annotated[bool, FLAG] = False
    """Show the traceback of an unexpected error."""


@Parameter(name="*", group=SHARED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Options):
    """Options of commands that print rows."""

    nl: Annotated[bool, FLAG] = False
    """Print one JSON object per line, each as soon as it is known."""
    csv: Annotated[bool, FLAG] = False
    """Print CSV with a heading."""


@Parameter(name="*", group=SHARED)
@dataclass(frozen=True, slots=True, kw_only=True)
class InParty(Options):
    """Options of commands that look into one party."""

    party: Annotated[str | None, Parameter(name=["--party", "-p"])] = None
    """Party by key, unique prefix or @title. Without it: ECHOSTORE_PARTY, the one of `party use`, or the only one."""


@Parameter(name="*", group=SHARED)
@dataclass(frozen=True, slots=True, kw_only=True)
class ListingInParty(Listing):
    """Options of commands that print rows of one party."""

    party: Annotated[str | None, Parameter(name=["--party", "-p"])] = None
    """Party by key, unique prefix or @title. Without it: ECHOSTORE_PARTY, the one of `party use`, or the only one."""


OPTIONS, LISTING, IN_PARTY, LISTING_IN_PARTY = Options(), Listing(), InParty(), ListingInParty()
"""What the parameters `options` are by default: nothing given."""

PartyChoice = InParty | ListingInParty


def named_party(options: PartyChoice, given: str | None) -> str | None:
    """The party that a command line names, as an argument or with --party; None leaves it to the default."""
    if given is not None and options.party is not None:
        raise UsageError(f"the party is named twice: {given!r} and --party {options.party!r}")
    return options.party if given is None else given


def party_and(options: PartyChoice, *given: str | None) -> tuple[str | None, ...]:
    """Arguments of a command whose first one, the party, may be left out: the party, then the others."""
    there = [each for each in given if each is not None]
    if len(there) == len(given):
        return named_party(options, there[0]), *there[1:]
    return named_party(options, None), *there


# numbers


def converted(wanted: Any, tokens: Sequence[Token]) -> Any:
    """What was given for an option or argument, as its type; a fraction is no whole number, and is not rounded to one."""
    if wanted in (int, int | None) and any("." in token.value for token in tokens):
        raise CoercionError(token=tokens[0], target_type=int)
    return convert(wanted, tokens)


def _from_one(_: object, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError("it counts from 1")


Count = Annotated[int | None, Parameter(validator=_from_one)]
"""How many; without it, all."""


# arguments that begin with a dash


literal_arguments: ContextVar[int] = ContextVar("literal_arguments", default=0)
"""How many arguments stand behind `--`: they are content, whatever they look like."""


def _no_option(_: object, value: object) -> None:
    if isinstance(value, str) and looks_like_option(value):
        raise ValueError(f"unknown option {value}")


def looks_like_option(text: str) -> bool:
    """Whether an argument begins with a dash and is neither standard input nor a number."""
    return text.startswith("-") and text != "-" and not text[1:2].isdigit()


Name = Annotated[str, Parameter(allow_leading_hyphen=True, validator=_no_option)]
"""What names an item or a party; `-` reads it from standard input."""

Content = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""What is put into an item. Commands pass it through `content`."""


def content(given: tuple[str, ...]) -> tuple[str, ...]:
    """What was given as content, without options that were mistyped."""
    for text in given[: len(given) - literal_arguments.get()]:
        if looks_like_option(text):
            raise UsageError(f"unknown option {text!r}", next_step="Put -- before content that begins with a dash.")
    return given


# help


def examples(*lines: str) -> str:
    """What a help page leads with."""
    return "\n".join(["Examples:", *(f"  {line}" for line in lines)])
