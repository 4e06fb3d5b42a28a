"""The command line. Exit codes: 0 done, 1 it failed, 2 bad usage, configuration or data, 130 stopped by Ctrl-C with
everything saved (143 by SIGTERM, 129 by a hangup)."""

from __future__ import annotations

import sys
import warnings

with warnings.catch_warnings():  # typer names things that newer clicks deprecate: not our users' concern
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer as _typer  # noqa: F401

__all__ = ["main"]


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
