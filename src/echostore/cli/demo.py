"""`echostore demo`: see peers write, part, meet again and agree."""

import os
from pathlib import Path

from cyclopts import App

from echostore.cli.options import HOME_VARIABLE, OPTIONS, Options, examples
from echostore.cli.output import Output, if_interrupted

app = App(name="demo", help_prologue=examples("echostore demo", "echostore demo --home ./demo-data"))


@app.default
def demo(*, options: Options = OPTIONS) -> None:
    """See peers write, part, meet again and agree.

    The data stays in a folder of its own to look at: --home, or one in the user's cache. ECHOSTORE_HOME is not used,
    so that the demonstration never meets real data.
    """
    from echostore.demo.story import run

    output = Output.of(options)
    folder = _folder(options)

    def say(line: str, style: str = "") -> None:
        # The story is the result for a person, and narration for a program.
        if output.machine:
            output.note(line)
        else:
            output.line(line, style)

    with if_interrupted(f"What the demonstration made is in {folder}; nothing else was changed."):
        cids = run(folder, say, output.waiting)
    if output.machine:
        output.document({"home": str(folder), "agreed": len(set(cids.values())) == 1, "peers": cids})


def _folder(options: Options) -> Path:
    if options.home is not None and str(options.home) != os.environ.get(HOME_VARIABLE):
        return options.home
    import platformdirs

    return Path(platformdirs.user_cache_dir("echostore")) / "demo"
