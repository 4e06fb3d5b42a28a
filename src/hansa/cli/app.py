"""The commands, put together. Modules that import torch are imported by the commands that need them, not here."""

from __future__ import annotations

import typer

from hansa.cli import comparing, data, looking, running, sweeping

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated optimization in which neighbours talk first.",
    epilog="Exit codes: 0 done, 1 it failed, 2 bad usage, configuration or data, 130 stopped by Ctrl-C and saved.",
)
app.command("run")(running.run)
app.command("resume")(running.resume)
app.command("compare")(comparing.compare)
app.command("sweep")(sweeping.sweep)
app.command("show")(looking.show)
app.command("report")(comparing.report)
app.command("presets")(looking.presets)
app.command("topology")(looking.topology)
app.command("cite")(looking.cite)
app.command("demo")(comparing.demo)
app.add_typer(data.app, name="data")
app.add_typer(looking.config, name="config")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and end.", is_eager=True),
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"hansa {installed('hansa')}")
        raise typer.Exit
