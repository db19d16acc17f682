"""`echostore init`: make a home."""

import os
import sys
from typing import Annotated

from cyclopts import App

from echostore.cli.opening import PASSPHRASE_VARIABLE, ask_passphrase, home_path, writing
from echostore.cli.options import FLAG, OPTIONS, Options, examples
from echostore.cli.output import Output
from echostore.kernel.errors import Refused, UsageError

app = App(
    name="init",
    help_prologue=examples("echostore init --name Laptop", "echostore init --home ./data --name Laptop --protect"),
)


@app.default
def init(
    *,
    name: str | None = None,
    protect: Annotated[bool, FLAG] = False,
    options: Options = OPTIONS,
) -> None:
    """Make a home: the folder with this peer's keys and data.

    Running it again on a home changes nothing but the name, if one is given.

    Parameters
    ----------
    name
        What others see this peer as.
    protect
        Seal the keys with a passphrase, asked for or taken from ECHOSTORE_PASSPHRASE.
    """
    from echostore.store.home import Home

    output = Output.of(options)
    path = home_path(options)
    there = (path / "keys").exists()
    if protect and there:
        raise Refused(f"{path} is a home already, and its keys are as they were made.")
    if protect and not os.environ.get(PASSPHRASE_VARIABLE):
        os.environ[PASSPHRASE_VARIABLE] = _new_passphrase()
    elif not protect and not there:
        # The variable may be set for another home; a new one is sealed only on demand.
        os.environ.pop(PASSPHRASE_VARIABLE, None)
    with writing(options, create=True, name=name) as peer:
        home: Home = peer.home
        fields = {
            "home": str(home.path),
            "created": not there,
            "name": peer.name,
            "identity": peer.identity.hex(),
            "device": peer.device.hex(),
        }
    output.document(fields, str(home.path))
    output.note(f"{'this is a home already' if there else 'made a home'}; identity {str(fields['identity'])[:8]}")
    if not there:
        output.note("next: echostore party create TITLE")


def _new_passphrase() -> str:
    if not sys.stdin.isatty():
        raise UsageError("nobody is here to type a passphrase", next_step=f"Set {PASSPHRASE_VARIABLE}.")
    passphrase = ask_passphrase("New passphrase: ")
    if passphrase != ask_passphrase("The same again: "):
        raise UsageError("the two are not the same")
    return passphrase
