"""The command line. Exit codes: 0 success, 1 failure, 2 bad usage, configuration or data, 130 interrupted by Ctrl-C and
saved (143 by SIGTERM, 129 by a hangup)."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

with warnings.catch_warnings():  # typer uses names that newer versions of click deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer
    import typer.core as _typer

__all__ = ["main"]


def _keep_help(original: Callable[..., None]) -> Callable[..., None]:
    """Keep the help of arguments, which click 8.5 resets after typer has set it."""

    @functools.wraps(original)
    def init(self: _typer.TyperArgument, *arguments: Any, help: str | None = None, **options: Any) -> None:
        original(self, *arguments, help=help, **options)
        self.help = help

    return init


_typer.TyperArgument.__init__ = _keep_help(_typer.TyperArgument.__init__)  # type: ignore[method-assign]


def _select_command(app: typer.Typer, arguments: list[str]) -> typer.Typer:
    """Return the app with only the named command, or all of it: typer inspects the signature of each command."""
    commands = [command for command in app.registered_commands if [command.name] == arguments]
    groups = [command for command in app.registered_groups if [command.name] == arguments]
    if not commands and not groups:
        return app
    selected = copy.copy(app)
    selected.registered_commands, selected.registered_groups = commands, groups
    return selected


def main() -> None:
    """Run the command ``hansa``."""
    from hansa.cli.app import app
    from hansa.cli.console import flush_output, replace_unencodable

    replace_unencodable()
    code: int | str | None = 0
    try:
        _select_command(app, sys.argv[1:2])()
    except SystemExit as end:
        code = end.code
    sys.exit(code or flush_output())
