"""The command `echostore`. `main` is its entry point; each noun has a module, loaded when it is used."""

import sys


def main() -> None:
    """Run the command line of this process and end it with the command's exit status."""
    from echostore.cli.app import run

    sys.exit(run(sys.argv[1:]))
