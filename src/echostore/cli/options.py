"""The options that commands share. They mean the same on every command, and no letter means two things.

    Options           --home  --json  --quiet  --trace
    Listing           those, and --nl  --csv, for what prints rows
    InParty           those of Options, and --party
    ListingInParty    all of them

A command takes one of these as its parameter `options`; cyclopts spreads its fields into options of the command.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

HOME_VARIABLE = "ECHOSTORE_HOME"

SHARED = Group("Home and output", sort_key=100)

_FLAG = Parameter(negative=(), show_default=False)


@Parameter(name="*", group=SHARED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What every command takes."""

    home: Annotated[Path | None, Parameter(env_var=HOME_VARIABLE)] = None
    """Folder with the data; without it, the user's own data folder."""
    json: Annotated[bool, _FLAG] = False
    """Print one JSON document; errors become JSON on stderr."""
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=(), show_default=False)] = False
    """No narration and no progress bars."""
    trace: Annotated[bool, _FLAG] = False
    """Show the traceback of an unexpected error."""


@Parameter(name="*", group=SHARED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Options):
    """Options of commands that print rows."""

    nl: Annotated[bool, _FLAG] = False
    """Print one JSON object per line, each as soon as it is known."""
    csv: Annotated[bool, _FLAG] = False
    """Print CSV with a heading."""


@Parameter(name="*", group=SHARED)
@dataclass(frozen=True, slots=True, kw_only=True)
class InParty(Options):
    """Options of commands that look into one party."""

    party: Annotated[str | None, Parameter(name=["--party", "-p"])] = None
    """Party by key, unique prefix or @title; not needed when there is only one."""


@Parameter(name="*", group=SHARED)
@dataclass(frozen=True, slots=True, kw_only=True)
class ListingInParty(Listing):
    """Options of commands that print rows of one party."""

    party: Annotated[str | None, Parameter(name=["--party", "-p"])] = None
    """Party by key, unique prefix or @title; not needed when there is only one."""


PartyChoice = InParty | ListingInParty


def examples(*lines: str) -> str:
    """What a help page leads with."""
    return "\n".join(["Examples:", *(f"  {line}" for line in lines)])
