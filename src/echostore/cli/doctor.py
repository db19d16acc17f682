"""`echostore doctor`: check this installation and its data, or explain an error code."""

from typing import Annotated

from cyclopts import App

from echostore.cli.failures import EXPLANATIONS
from echostore.cli.feed import INTEGRITY_BROKEN
from echostore.cli.opening import home_path
from echostore.cli.options import FLAG, OPTIONS, Options, examples
from echostore.cli.output import Output, counted, if_interrupted
from echostore.cli.values import one_line
from echostore.kernel.errors import NotFound

app = App(name="doctor", help_prologue=examples("echostore doctor --full", "echostore doctor E-LOCKED"))


@app.default
def doctor(
    code: str | None = None,
    /,
    *,
    full: Annotated[bool, FLAG] = False,
    options: Options = OPTIONS,
) -> int:
    """Check this installation and its data, or explain an error code.

    The report names no title, no person and no whole key, so that it can be pasted into a bug report. The exit
    status is 6 when data is damaged. Nothing is changed.

    Parameters
    ----------
    code
        The code of an error, such as E-LOCKED, to have it explained.
    full
        Hash every block and blob again, and fold every party from its feeds to compare its items.
    """
    from echostore.cli.checkup import Level, examine

    output = Output.of(options)
    if code is not None:
        _explain(output, code)
        return 0
    with if_interrupted("The check can be started again."):
        findings = list(examine(home_path(options), output, full=full))
    broken = [finding for finding in findings if finding.level is Level.BROKEN]
    warnings = [finding for finding in findings if finding.level is Level.WARNING]
    summary = f"{counted(len(findings), 'check')}: {len(broken)} broken, {counted(len(warnings), 'warning')}"
    output.document(
        {
            "sound": not broken,
            "full": full,
            "checks": [
                {"name": each.name, "level": each.level.value, "what": each.what, "next_step": each.next_step}
                for each in findings
            ],
        },
        [*(finding.line() for finding in findings), summary],
    )
    return INTEGRITY_BROKEN if broken else 0


def _explain(output: Output, code: str) -> None:
    wanted = code.upper()
    wanted = wanted if wanted.startswith("E-") else f"E-{wanted}"
    if wanted not in EXPLANATIONS:
        raise NotFound(f"there is no error code {one_line(code)!r}", next_step=f"Codes are {', '.join(EXPLANATIONS)}.")
    output.document({"code": wanted, "explanation": EXPLANATIONS[wanted]}, f"{wanted}\n{EXPLANATIONS[wanted]}")
