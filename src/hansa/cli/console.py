"""What the commands share: where they print, how they say that something is wrong, which code they end with."""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

import typer
from click import Context, HelpFormatter
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from typer.core import TyperCommand

P = ParamSpec("P")
R = TypeVar("R")

FAILED, BAD, INTERRUPTED = 1, 2, 130


class Naming(TyperCommand):
    """A command that takes names: its help ends with those that plug-ins bring."""

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        from hansa.config.registry.plugins import installed

        names = ", ".join(f"{plugin.name} ({plugin.kind})" for plugin in installed())
        self.epilog = f"Plug-ins bring {names}." if names else None
        super().format_help(ctx, formatter)


def out() -> Console:
    """Results go to standard output."""
    return Console(highlight=False)


def err() -> Console:
    """Progress and problems go to standard error."""
    return Console(stderr=True, highlight=False)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose mendable errors end in a message and an exit code, not in a traceback."""

    @functools.wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        from hansa.core.errors import HansaError

        try:
            with _logged():
                return command(*arguments, **options)
        except UnicodeError as error:  # a name that is no text, on its way to a file
            _tell(f"[bold red]error:[/] not text: {escape(str(error))}")
            raise typer.Exit(BAD) from error
        except HansaError as error:
            complain(error)
            raise typer.Exit(BAD) from error
        except KeyboardInterrupt as error:  # a second Ctrl-C, or one outside a run
            _tell("[yellow]stopped at once[/]")
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:  # whoever read the output has gone: nothing to tell, and nobody to tell it to
            hush()
            raise typer.Exit(FAILED) from error
        except OSError as error:
            _tell(f"[bold red]error:[/] {escape(str(error))}")
            raise typer.Exit(FAILED) from error
        except ValueError as error:
            if "null byte" not in str(error):
                raise
            _tell(f"[bold red]error:[/] a name with a NUL in it: {escape(repr(str(error)))}")
            raise typer.Exit(BAD) from error

    return run


def _tell(text: str) -> None:
    """A last word on standard error, if there is still somebody to hear it."""
    with suppress(OSError):
        err().print(text, soft_wrap=True)


def forgiving() -> None:
    """What a terminal has no letters for is printed as a question mark, not as a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def flushed() -> int:
    """Write out what is still waiting; the exit code is 1 if it does not fit, and the reason is told."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        hush()
        return FAILED
    except OSError as error:
        hush()
        _tell(f"[bold red]error:[/] the output could not be written: {escape(str(error))}")
        return FAILED
    return 0


def hush() -> None:
    """Send what is still to come nowhere, so that the interpreter does not stumble over it as it ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def complain(error: Exception) -> None:
    """Print an error; of a configuration, each problem with its line."""
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
def _logged() -> Iterator[None]:
    """The package's warnings, shown on standard error while a command runs."""
    log = logging.getLogger("hansa")
    handler = RichHandler(console=err(), show_time=False, show_path=False, markup=False, level=logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
