"""The command `echostore`. `main` is its entry point; each noun has a module, loaded when it is used."""

import os
import signal
import sys

_INTERRUPTED_STATUS = 130


def main() -> None:
    """Run the command line of this process and end it with the command's exit status.

    ^C is told by `run`. Before it, while modules are loaded, and after it, while the interpreter ends, there is nothing to
    undo and nothing to say.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED_STATUS))
    from echostore.cli.app import run

    status = _INTERRUPTED_STATUS
    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        pass  # on the way into `run`, or out of it
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)
