"""The command line. Exit codes: 0 done, 1 it failed, 2 bad usage, configuration or data, 130 stopped by Ctrl-C with
everything saved (143 by SIGTERM, 129 by a hangup)."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

with warnings.catch_warnings():  # typer names things that newer clicks deprecate: not our users' concern
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer
    import typer.core as _typer

__all__ = ["main"]


def _keep_help(made: Callable[..., None]) -> Callable[..., None]:
    """click 8.5 gives arguments a help of their own, and empties it after typer has said what it is."""

    @functools.wraps(made)
    def make(self: _typer.TyperArgument, *arguments: Any, help: str | None = None, **options: Any) -> None:
        made(self, *arguments, help=help, **options)
        self.help = help

    return make


_typer.TyperArgument.__init__ = _keep_help(_typer.TyperArgument.__init__)  # type: ignore[method-assign]


def _asked(app: typer.Typer, words: list[str]) -> typer.Typer:
    """The commands with the one alone that is asked for, or all of them: typer reads the signature of each."""
    commands = [each for each in app.registered_commands if [each.name] == words]
    groups = [each for each in app.registered_groups if [each.name] == words]
    if not commands and not groups:
        return app
    chosen = copy.copy(app)
    chosen.registered_commands, chosen.registered_groups = commands, groups
    return chosen


def main() -> None:
    """What the command ``hansa`` runs."""
    from hansa.cli.app import app
    from hansa.cli.console import flushed, forgiving

    forgiving()
    code: int | str | None = 0
    try:
        _asked(app, sys.argv[1:2])()
    except SystemExit as end:
        code = end.code
    sys.exit(code or flushed())
