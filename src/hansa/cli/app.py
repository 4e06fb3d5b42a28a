"""The commands of the command line. Modules that import torch are imported by the commands that need them, not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import typer

from hansa import __version__
from hansa.cli import compare, data, doctor, federate, inspect, reproduce, run, show
from hansa.cli.console import report_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated optimization for PyTorch: train, compare and deploy federated methods.",
    epilog="Exit codes: 0 success, 1 failure, 2 bad usage, configuration or data, 130 interrupted and saved.",
)


Commands: TypeAlias = dict[str, Callable[..., None]]
COMMANDS: dict[str, Commands] = {
    "Train": {"run": run.run, "resume": run.resume, "compare": compare.compare, "sweep": compare.sweep,
              "reproduce": reproduce.reproduce, "demo": compare.demo},
    "Inspect results": {"show": show.show, "report": show.report, "watch": show.watch,
                        "predict": data.predict, "export": data.export},
    "Configure": {"presets": inspect.presets, "parts": inspect.parts, "models": inspect.models,
                  "topology": inspect.topology, "theory": inspect.theory, "cite": inspect.cite,
                  "doctor": doctor.doctor},
    "Federation": {"serve": federate.serve, "join": federate.join, "keys": federate.keys,
                   "replay": federate.replay},
}  # fmt: skip
GROUPS: dict[str, tuple[str, Commands]] = {
    "config": (
        "Check, resolve and describe configurations.",
        {"schema": inspect.config_schema, "show": inspect.config_show, "example": inspect.config_example},
    ),
    "data": (
        "List, download, verify and partition data sets; infer schemas of tables.",
        {"list": data.list_sets, "get": data.get, "check": data.check, "show": data.show, "schema": data.schema},
    ),
}


def _add_commands(to: typer.Typer, commands: Commands, panel: str | None = None) -> None:
    for name, command in commands.items():
        to.command(name, rich_help_panel=panel)(report_errors(command))


for panel, commands in COMMANDS.items():
    _add_commands(app, commands, panel)
for name, (summary, commands) in GROUPS.items():
    group = typer.Typer(no_args_is_help=True, help=summary)
    _add_commands(group, commands)
    app.add_typer(group, name=name, rich_help_panel="Configure")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
) -> None:
    if version:
        print(f"hansa {__version__}")
        raise typer.Exit
