"""`echostore demo`: see peers write, part, meet again and agree."""

import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from cyclopts import App

from echostore.cli.options import OPTIONS, Options, examples
from echostore.cli.output import Output, if_interrupted
from echostore.kernel.errors import NotFound

app = App(name="demo", help_prologue=examples("echostore demo", "echostore demo --home ./demo-data"))


@app.default
def demo(*, options: Options = OPTIONS) -> int:
    """See peers write, part, meet again and agree.

    Without --home the data is made in a temporary folder and removed again; with it, it stays there to look at.
    """
    output = Output.of(options)
    if importlib.util.find_spec("echostore.demo") is None:
        raise NotFound("the demonstration is not part of this installation")
    run: Any = importlib.import_module("echostore.demo").run
    with if_interrupted("The demonstration ended; nothing of yours was changed."):
        if options.home is not None:
            result = run(options.home, output.note)
        else:
            with tempfile.TemporaryDirectory(prefix="echostore-demo-") as folder:
                result = run(Path(folder), output.note)
    if isinstance(result, dict):
        output.document(result, [f"{name}  {value}" for name, value in result.items()])
    return 0
