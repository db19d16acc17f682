"""The tree of commands, and how one of them is run.

Commands are named here and loaded when they are used: a help page costs what it shows, and `--help` imports neither
storage nor cryptography.
"""

import contextlib
import re
import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter, UnknownCommandError, UnknownOptionError

from echostore import __version__
from echostore.cli.failures import INTERRUPTED, INTERRUPTED_STATUS, UNEXPECTED, Failure
from echostore.cli.options import converted, examples, literal_arguments
from echostore.cli.output import flush_results, give_up_stdout
from echostore.kernel.errors import EchoError

NOUNS = {
    "Start here": {
        "init": ("echostore.cli.init:app", "Make a home: the folder with this peer's keys and data."),
        "demo": ("echostore.cli.demo:app", "See peers write, part, meet again and agree."),
        "status": ("echostore.cli.status:app", "Tell what is where: held, processed, known."),
        "doctor": ("echostore.cli.doctor:app", "Check this installation and its data, or explain an error code."),
    },
    "Work with data": {
        "party": ("echostore.cli.party:app", "Parties: data sets with their members."),
        "item": ("echostore.cli.item:app", "Items: read, write, follow, look back."),
        "query": ("echostore.cli.query:app", "Find items by type and values."),
        "view": ("echostore.cli.view:app", "Views: items that applications find by class."),
    },
    "Share with people and devices": {
        "identity": ("echostore.cli.identity:app", "Who this peer is."),
        "device": ("echostore.cli.device:app", "Devices of an identity."),
        "contact": ("echostore.cli.contact:app", "The people this peer shares parties with."),
        "serve": ("echostore.cli.serve:app", "Run this peer as a service: others reach it, commands too."),
        "edge": ("echostore.cli.edge:app", "Run a caching proxy between a peer and thin clients."),
        "mesh": (
            "echostore.cli.mesh:app",
            "Show the thin clients of a running peer or edge: links, indexes, messages.",
        ),
        "quota": ("echostore.cli.quota:app", "Limit how fast one feed or device may send before others go first."),
    },
    "Look inside and free disk space": {
        "epoch": ("echostore.cli.epoch_fetch:app", "Epochs: moments of a party whose state its members agree on."),
        "feed": ("echostore.cli.feed:app", "Feeds: the signed logs under a party."),
        "blob": ("echostore.cli.blob:app", "Blobs: the pieces of snapshots."),
    },
    "Analyse with Spark": {
        "lake": ("echostore.cli.lake:app", "Block lakes: the blocks of many parties as Parquet, for Spark."),
        "pipeline": ("echostore.cli.pipeline:app", "Spark over a block lake: items, snapshots, tables, audit."),
    },
    "Test and measure": {
        "simulate": ("echostore.cli.simulate:app", "Run a whole party in one process, with faults, from one seed."),
        "bench": ("echostore.cli.bench:app", "Measure this build against its goals."),
    },
}
"""The commands by what people want to do, in the order of the help page."""

FLAGS = ("--json", "--nl", "--csv", "--quiet", "-q", "--trace")
OPTIONS = ("--home", "--party", "-p")
"""Shared options that may also stand before the command; the second kind takes a value."""


_NEGATIVE = re.compile(r"-\d")
"""How a negative length of time begins, which cyclopts takes for an option."""


def make_app() -> App:
    app = App(
        name="echostore",
        help="A peer-to-peer database: parties of people share items, offline or on line.",
        help_prologue=examples(
            "echostore demo",
            'echostore --home data party create "Road trip"',
        ),
        help_epilogue="Every command explains itself: echostore party create --help. Exit status: 0 ok, 1 failed, "
        "2 usage, 3 not found, 4 refused, 5 timed out, 6 integrity broken, 7 locked, 130 interrupted.",
        help_format="plaintext",
        group_commands=Group("About this program", sort_key=len(NOUNS)),
        version=__version__,
        # cyclopts would add `--empty-bot` to options that may be given several times.
        default_parameter=Parameter(negative_iterable=(), converter=converted),
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    for place, (task, nouns) in enumerate(NOUNS.items()):
        group = Group(task, sort_key=place)
        for name, (path, about) in nouns.items():
            app.command(path, name=name, help=about, group=group)
    app.register_install_completion_command()
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit status. Never raises, whatever happens inside."""
    as_json = "--json" in arguments
    try:
        status = _run(make_app(), list(arguments))
        flush_results()
    except BrokenPipeError:
        # The reader has what it wanted (`| head`).
        give_up_stdout()
        return 0
    except CycloptsError as error:
        what, step = _usage(error, list(arguments)), "Add --help for examples."
        return Failure("E-USAGE", 2, what, next_step=step).tell(as_json=as_json)
    except EchoError as error:
        return Failure.of(error).tell(as_json=as_json)
    except KeyboardInterrupt as interrupt:
        what = str(interrupt) or "What was written before is complete and durable."
        return Failure(INTERRUPTED, INTERRUPTED_STATUS, "interrupted", what).tell(as_json=as_json)
    except Exception as error:  # noqa: BLE001  # the last resort: one line for a person, the traceback on request
        if "--trace" in arguments:
            traceback.print_exc()
        return _unexpected(error).tell(as_json=as_json)
    return status


def _run(app: App, arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        # Names come from everywhere; a terminal that can't show one gets an escape instead of an error.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a TextIOWrapper, or it has none
    literal_arguments.set(len(arguments) - arguments.index("--") - 1 if "--" in arguments else 0)
    result = app(_options_after_command(app, arguments))
    return result if isinstance(result, int) else 0


def _options_after_command(app: App, arguments: list[str]) -> list[str]:
    """`echostore --home X party list` means `echostore party list --home X`."""
    end = 0
    while end < len(arguments):
        if arguments[end] in FLAGS or (arguments[end].split("=")[0] in OPTIONS and "=" in arguments[end]):
            end += 1
        elif arguments[end] in OPTIONS:
            end += 2
        else:
            break
    leading, rest = arguments[:end], arguments[end:]
    if not leading or not rest:
        return arguments
    path, apps, _ = app.parse_commands(rest)
    behind = rest[len(path) :]
    if apps[-1].default_command is None and behind and not behind[0].startswith("-"):
        return rest  # that is no command, and what the message should name
    return [*rest[: len(path)], *leading, *behind]


def _usage(error: CycloptsError, arguments: list[str]) -> str:
    """What is wrong with a command line, without names of Python's types."""
    behind = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    if isinstance(error, UnknownOptionError) and (error.token.keyword or error.token.value) in behind:
        return f"{error.token.keyword or error.token.value} stands behind --, where no options are read: put it before"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        given = dict(pairwise(arguments))
        found = next((given[name] for name in (error.keyword, *error.argument.names) if name in given), "")
        if _NEGATIVE.match(found):
            return f"{error.keyword or error.argument.name} must not be negative: {found}"
    text = str(error)
    if isinstance(error, UnknownCommandError) and error.unused_tokens and error.unused_tokens[0].startswith("-"):
        noun = " ".join(["echostore", *(error.command_chain or ())])
        return text.replace(f'Unknown command "{error.unused_tokens[0]}"', f"a command is missing behind `{noun}`", 1)
    for name, words in (("int", "a whole number"), ("float", "a number")):
        text = text.replace(f"into {name}.", f"into {words}.")
    return text


def _unexpected(error: Exception) -> Failure:
    if isinstance(error, OSError):
        from echostore.store.durable_file import file_error

        typed = file_error(error, f"use {error.filename}" if error.filename else "go on")
        return Failure.of(typed)
    return Failure(
        UNEXPECTED,
        1,
        f"{type(error).__name__}: {str(error)[:300] or 'no message'}",
        "What was durable before stays durable.",
        "This is a defect in echostore; repeat with --trace for the traceback.",
    )
