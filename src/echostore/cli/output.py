"""What a command prints: results on stdout, everything else on stderr.

    form     a document                          rows
    text     lines for a person                  a table; coloured on a terminal, plain in a pipe
    --json   {"version": 1, ...}                 {"version": 1, "<name>": [...]}
    --nl     the document in one line            one object per line, flushed
    --csv    refused                             a heading and one line per row

rich is imported only where it shows: on a terminal.
"""

import contextlib
import csv
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from echostore.cli.options import Listing, Options
from echostore.cli.values import columns_wide, compact, harmless, one_line
from echostore.kernel.errors import StorageFailed, UsageError

JSON_VERSION = 1
"""The version of every JSON document printed here; it grows when a field changes its meaning or goes."""

Record = Mapping[str, Any]
Tell = Callable[[int, int], None]
"""(done, total): how far something is."""


class Form(Enum):
    TEXT = "text"
    JSON = "--json"
    LINES = "--nl"
    CSV = "--csv"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: the field of the record it shows, and how a person sees it."""

    field: str
    heading: str
    show: Callable[[Any], str] | None = None
    right: bool = False
    style: str = ""

    def cell(self, record: Record) -> str:
        value = record.get(self.field)
        return one_line(self.show(value) if self.show else _plain(value))


class Output:
    """Where one command prints."""

    def __init__(self, form: Form = Form.TEXT, *, quiet: bool = False) -> None:
        self.form = form
        self.quiet = quiet
        self._csv_begun = False

    @staticmethod
    def of(options: Options) -> "Output":
        chosen = [Form.JSON] if options.json else []
        if isinstance(options, Listing):
            chosen += [form for form, wanted in ((Form.LINES, options.nl), (Form.CSV, options.csv)) if wanted]
        if len(chosen) > 1:
            raise UsageError(f"{' and '.join(form.value for form in chosen)} can't be given together")
        return Output(chosen[0] if chosen else Form.TEXT, quiet=options.quiet)

    @property
    def machine(self) -> bool:
        """Whether a program reads the result."""
        return self.form is not Form.TEXT

    # results

    def document(self, fields: Record, text: str | Iterable[str] = ()) -> None:
        """One result: its fields for programs, its lines for people."""
        if self.form is Form.CSV:
            raise UsageError("--csv is for rows, and this prints none")
        if self.form is Form.TEXT:
            for line in [text] if isinstance(text, str) else text:
                _write(harmless(line) + "\n")
        else:
            self._json({"version": JSON_VERSION, **fields})

    def table(
        self, name: str | None, columns: Sequence[Column], records: Iterable[Record], *, empty: str = "", **more: Any
    ) -> None:
        """Rows. Of JSON, `name` is the field that holds them and `more` are its other fields; without a name, a list."""
        if self.form is Form.JSON:
            rows = [dict(record) for record in records]
            self._json(rows if name is None else {"version": JSON_VERSION, **more, name: rows})
        elif self.form is Form.TEXT:
            rows_of_text = [[column.cell(record) for column in columns] for record in records]
            if rows_of_text:
                self._text_table(columns, rows_of_text)
            elif empty:
                self.note(empty)
        else:
            if self.form is Form.CSV:
                self._csv_heading(columns)
            for record in records:
                self.row(columns, record)

    def row(self, columns: Sequence[Column], record: Record, text: str = "") -> None:
        """One row of a listing that has no end, out at once. --json prints it like --nl: there is no whole document."""
        if self.form is Form.TEXT:
            _write(harmless(text) + "\n")
        elif self.form is Form.CSV:
            self._csv_heading(columns)
            csv.writer(_Results(), lineterminator="\n").writerow([_csv_cell(record.get(c.field)) for c in columns])
        else:
            _write(compact(record) + "\n")
        flush_results()

    def line(self, text: str, style: str = "") -> None:
        """One line for a person, out at once; on a terminal in a style, as a number of the terminal's."""
        plain = harmless(text)
        _write((f"\x1b[{style}m{plain}\x1b[0m" if style and sys.stdout.isatty() and colours_wanted() else plain) + "\n")
        flush_results()

    def raw(self, text: str) -> None:
        """A text itself. A terminal gets it without what it would act on, a pipe gets it whole."""
        if sys.stdout.isatty():
            text = harmless(text)
        _write(text if text.endswith("\n") or not sys.stdout.isatty() else text + "\n")

    def _json(self, document: Any) -> None:
        indent = 2 if self.form is Form.JSON and sys.stdout.isatty() else None
        separators = None if indent else (",", ":")
        _write(json.dumps(document, ensure_ascii=False, indent=indent, separators=separators, allow_nan=False) + "\n")

    def _csv_heading(self, columns: Sequence[Column]) -> None:
        if not self._csv_begun:
            self._csv_begun = True
            csv.writer(_Results(), lineterminator="\n").writerow([_csv_name(column) for column in columns])

    def _text_table(self, columns: Sequence[Column], rows: list[list[str]]) -> None:
        if sys.stdout.isatty() and colours_wanted():
            _rich_table(columns, rows)
            return
        widths = [
            max(columns_wide(column.heading), *(columns_wide(row[at]) for row in rows))
            for at, column in enumerate(columns)
        ]
        for row in [[column.heading for column in columns], *rows]:
            cells = [
                _padded(cell, width, column.right) for cell, width, column in zip(row, widths, columns, strict=True)
            ]
            _write("  ".join(cells).rstrip() + "\n")

    # narration

    def note(self, text: str) -> None:
        """Say what is going on; people only, and not if they asked for quiet."""
        if not self.quiet:
            sys.stderr.write(harmless(text) + "\n")

    def aside(self, text: str) -> None:
        """A note before it is clear how things end; not with --json: stderr is then one document if they end badly."""
        if not self.machine:
            self.note(text)

    def warn(self, text: str) -> None:
        sys.stderr.write(f"{coloured('warning:', '33')} {harmless(text)}\n")

    @contextmanager
    def progress(self, title: str) -> Iterator[Tell]:
        """A bar with a real fraction, on a terminal; elsewhere nothing."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda done, total: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(one_line(title, 40), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    @contextmanager
    def waiting(self, title: str) -> Iterator[Callable[[str], None]]:
        """Show from the first moment what is waited for: on a terminal a line with the seconds so far, elsewhere a line
        for each step that is told."""
        if self.quiet:
            yield lambda step: None
            return
        started = time.monotonic()
        if not sys.stderr.isatty():
            yield lambda step: self.aside(f"{title}: {step}")
            self.aside(f"{title}: ready after {time.monotonic() - started:.1f} s")
            return
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task(one_line(title, 60), total=None)
            yield lambda step: shown.update(task, description=one_line(f"{title}: {step}", 60))
        self.aside(f"{title}: ready after {time.monotonic() - started:.1f} s")

    # asking

    def confirm(self, question: str, *, yes: bool, unasked: bool = False, needed: str = "this needs a yes") -> bool:
        """Whether a person agrees. Off a terminal nobody can be asked: then `--yes` has to say so, unless it is done `unasked`."""
        if yes:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            if unasked:
                return True
            raise UsageError(needed, next_step="Give --yes, or --dry-run to see what it would do.")
        sys.stderr.write(f"{harmless(question)} [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def if_interrupted(left: str) -> Iterator[None]:
    """Say what ^C leaves behind inside of this."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(left) from None


def coloured(text: str, code: str) -> str:
    """A text in colour, where stderr is a terminal that wants some."""
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stderr.isatty() and colours_wanted() else text


def colours_wanted() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def age(time_ms: int, now_ms: int | None = None) -> str:
    """How long ago, in one unit."""
    seconds = ((time.time_ns() // 1_000_000 if now_ms is None else now_ms) - time_ms) // 1000
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def size(count: int) -> str:
    """A number of bytes for a person."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError(count)


def counted(count: int, noun: str) -> str:
    """`1 block`, `1,204 blocks`."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count:,} {noun if count == 1 else plural}"


def flush_results() -> None:
    """Get everything printed out of this process."""
    with _printing():
        sys.stdout.flush()


def _write(text: str) -> None:
    with _printing():
        sys.stdout.write(text)


class _Results:
    """stdout for the csv module."""

    write = staticmethod(_write)


@contextmanager
def _printing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        give_up_stdout()
        raise StorageFailed(
            f"the result can't be printed: {error.strerror}", unchanged="What the command did stands."
        ) from error


def give_up_stdout() -> None:
    """Python would try again to write what is left, and complain, when it closes stdout at the end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plain(value: Any) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else compact(value)


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else compact(value)


def _csv_name(column: Column) -> str:
    """Columns are named by their field, those of a person's own properties by their heading."""
    return column.heading if column.field.isdigit() else column.field


def _padded(text: str, width: int, right: bool) -> str:
    blank = " " * (width - columns_wide(text))
    return blank + text if right else text + blank


def _rich_table(columns: Sequence[Column], rows: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            Text(column.heading), justify="right" if column.right else "left", style=column.style, overflow="fold"
        )
    for row in rows:
        # Text and not str: a title may hold what rich takes for markup.
        table.add_row(*map(Text, row))
    Console().print(table)
