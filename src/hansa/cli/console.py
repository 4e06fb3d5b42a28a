"""Output, error messages and exit codes of the commands."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from hansa.core.errors import HansaError
from hansa.core.terminal import Terminal

P = ParamSpec("P")
R = TypeVar("R")

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130


def out() -> Console:
    """Return the console of results: standard output."""
    return Terminal(highlight=False)


def err() -> Console:
    """Return the console of progress and errors: standard error."""
    return Terminal(stderr=True, highlight=False)


def say(text: str, style: str | None = None) -> None:
    """Print plain text to standard output, without wrapping lines."""
    out().print(text, markup=False, soft_wrap=True, style=style)


def note(text: str, style: str | None = None) -> None:
    """Print plain text to standard error, without wrapping lines."""
    err().print(text, markup=False, soft_wrap=True, style=style)


def say_json(value: Any) -> None:
    """Print a value as JSON to standard output."""
    from hansa.runs.record import to_plain_json

    out().print_json(data=to_plain_json(value), allow_nan=False)


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Collection[str] = (), keep: int = 0
) -> None:
    """Print a table without lines; without headings, names and their texts.

    Args:
        headings: The headings.
        rows: The cells of each row, as plain text or with a style.
        right: The headings of right-aligned columns.
        keep: If the table does not fit the console, the last columns are dropped, but never the first ``keep``; 0 wraps
            the text of cells instead.
    """
    console, body = out(), [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    for count in range(len(headings), keep - 1, -1):
        table = Table(box=None, pad_edge=False, header_style="dim") if headings else Table.grid(padding=(0, 2))
        for index, heading in enumerate(headings[:count] or [""]):
            fixed, style = bool(keep) or index == 0 or heading in right, "" if headings else "dim"
            justify: Literal["left", "right"] = "right" if heading in right else "left"
            table.add_column(Text(heading), justify=justify, no_wrap=fixed, style=style)
        for row in body:
            table.add_row(*row[:count] if headings else row)
        unbounded = console.options.update(width=10_000)
        if not keep or Measurement.get(console, unbounded, table).maximum <= console.width:
            break
    console.print(table)


def report_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Let a command report errors that the user can fix with a message and an exit code instead of a traceback."""

    @functools.wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            with _log_warnings():
                return command(*arguments, **options)
        except UnicodeError as error:  # a name that cannot be encoded
            _print_last(f"[bold red]error:[/] not text: {escape(str(error))}")
            raise typer.Exit(USAGE_ERROR) from error
        except HansaError as error:
            print_error(error)
            if folder := getattr(error, "folder", None):
                note(f"completed rounds are in {folder}")  # of a run that failed
            raise typer.Exit(getattr(error, "exit_code", USAGE_ERROR)) from error
        except KeyboardInterrupt as error:  # a signal that stopped runs, a second Ctrl-C, or one outside a run
            code: int | None = getattr(error, "exit_code", None)
            _print_last("[yellow]interrupted[/]" if code is None else escape(str(error)))
            raise typer.Exit(INTERRUPTED if code is None else code) from error
        except BrokenPipeError as error:  # the reader of the output has gone
            discard_output()
            raise typer.Exit(FAILED) from error
        except OSError as error:
            _print_last(f"[bold red]error:[/] {escape(str(error))}")
            raise typer.Exit(FAILED) from error

    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(text.split()) for text in paragraphs)  # typer keeps line breaks
    return run


def _print_last(text: str) -> None:
    """Print to standard error if it is still open."""
    with suppress(OSError):
        err().print(text, soft_wrap=True)


def replace_unencodable() -> None:
    """Print characters that the terminal cannot encode as question marks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def flush_output() -> int:
    """Flush standard output; return exit code 1, with a message, if that fails."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return FAILED
    except OSError as error:
        discard_output()
        _print_last(f"[bold red]error:[/] cannot write the output: {escape(str(error))}")
        return FAILED
    return 0


def discard_output() -> None:
    """Redirect standard output to the null device, so that the interpreter exits without an error."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def print_error(error: Exception) -> None:
    """Print an error; for a configuration, each problem with its line."""
    from hansa.config.yaml_text import ConfigError

    console = err()
    if not isinstance(error, ConfigError):
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return
    for problem in error.problems:
        console.print(f"[bold red]error:[/] {escape(str(problem))}", soft_wrap=True)
        if problem.excerpt:
            console.print(f"[dim]{problem.line:>5} |[/] {escape(problem.excerpt)}", soft_wrap=True)


@contextmanager
def _log_warnings() -> Iterator[None]:
    """Show the package's warnings on standard error while a command runs."""
    log = logging.getLogger("hansa")
    handler = RichHandler(console=err(), show_time=False, show_path=False, markup=False, level=logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
