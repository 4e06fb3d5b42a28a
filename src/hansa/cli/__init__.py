"""The command line. Exit codes: 0 done, 1 it failed, 2 bad usage, configuration or data, 130 stopped by Ctrl-C with
everything saved (143 by SIGTERM)."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """What the command ``hansa`` runs."""
    from hansa.cli.app import app

    app()
