"""The command line. Exit codes: 0 done, 1 it failed, 2 bad usage, configuration or data, 130 stopped by Ctrl-C with
everything saved (143 by SIGTERM, 129 by a hangup)."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

with warnings.catch_warnings():  # typer names things that newer clicks deprecate: not our users' concern
    warnings.simplefilter("ignore", DeprecationWarning)
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


def main() -> None:
    """What the command ``hansa`` runs."""
    from hansa.cli.app import app
    from hansa.cli.console import flushed, forgiving

    forgiving()
    code: int | str | None = 0
    try:
        app()
    except SystemExit as end:
        code = end.code
    sys.exit(code or flushed())
