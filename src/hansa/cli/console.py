"""What the commands share: where they print, how they say that something is wrong, which code they end with."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        from hansa.registry.plugins import installed

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
        from hansa.errors import HansaError

        try:
            with _logged():
                return command(*arguments, **options)
        except HansaError as error:
            complain(error)
            raise typer.Exit(BAD) from error
        except KeyboardInterrupt as error:  # a second Ctrl-C, or one outside a run
            err().print("[yellow]stopped at once[/]")
            raise typer.Exit(INTERRUPTED) from error
        except OSError as error:
            err().print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(FAILED) from error

    return run


def complain(error: Exception) -> None:
    """Print an error; of a configuration, each problem with its line."""
    from hansa.config.text import ConfigError

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
