"""A runner of commands in this process. It builds the tree of commands once, which takes longer than most commands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
import typer
from click import testing


class CliRunner(testing.CliRunner):
    """`typer.testing.CliRunner`, which builds the tree in every call."""

    def invoke(self, app: typer.Typer, args: Sequence[str], **options: Any) -> testing.Result:  # type: ignore[override]
        """Run a command."""
        return super().invoke(_command_tree(app), args, **options)


@cache
def _command_tree(app: typer.Typer) -> Any:
    return typer.main.get_command(app)


def run_command(*words: object, width: int = 200) -> testing.Result:
    """Run a command as on a plain terminal; only its exit is caught."""
    result = CliRunner(env={"COLUMNS": str(width), "TERM": "dumb"}).invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_well(*words: object, width: int = 200) -> testing.Result:
    """Run a command that must succeed."""
    result = run_command(*words, width=width)
    assert result.exit_code == 0, result.output
    return result


__all__ = ["CliRunner", "app", "run_command", "run_well"]
