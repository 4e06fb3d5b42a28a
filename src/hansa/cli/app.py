"""The commands of the command line. Modules that import torch are imported by the commands that need them, not here."""

from __future__ import annotations

import typer

from hansa import __version__
from hansa.cli import compare, data, doctor, federate, inspect, predict, reproduce, run, show

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated optimization for PyTorch: train, compare and deploy federated methods.",
    epilog="Exit codes: 0 success, 1 failure, 2 bad usage, configuration or data, 130 interrupted and saved.",
)
TRAIN, INSPECT, CONFIGURE, FEDERATION = "Train", "Inspect results", "Configure", "Federation"

app.command("run", rich_help_panel=TRAIN)(run.run)
app.command("resume", rich_help_panel=TRAIN)(run.resume)
app.command("compare", rich_help_panel=TRAIN)(compare.compare)
app.command("sweep", rich_help_panel=TRAIN)(compare.sweep)
app.command("reproduce", rich_help_panel=TRAIN)(reproduce.reproduce)
app.command("demo", rich_help_panel=TRAIN)(compare.demo)
app.command("show", rich_help_panel=INSPECT)(show.show)
app.command("report", rich_help_panel=INSPECT)(show.report)
app.command("watch", rich_help_panel=INSPECT)(show.watch)
app.command("predict", rich_help_panel=INSPECT)(predict.predict)
app.command("export", rich_help_panel=INSPECT)(predict.export)
app.command("presets", rich_help_panel=CONFIGURE)(inspect.presets)
app.command("parts", rich_help_panel=CONFIGURE)(inspect.parts)
app.command("models", rich_help_panel=CONFIGURE)(inspect.models)
app.add_typer(inspect.config, name="config", rich_help_panel=CONFIGURE)
app.add_typer(data.app, name="data", rich_help_panel=CONFIGURE)
app.command("topology", rich_help_panel=CONFIGURE)(inspect.topology)
app.command("theory", rich_help_panel=CONFIGURE)(inspect.theory)
app.command("cite", rich_help_panel=CONFIGURE)(inspect.cite)
app.command("doctor", rich_help_panel=CONFIGURE)(doctor.doctor)
app.command("serve", rich_help_panel=FEDERATION)(federate.serve)
app.command("join", rich_help_panel=FEDERATION)(federate.join)
app.command("keys", rich_help_panel=FEDERATION)(federate.keys)
app.command("replay", rich_help_panel=FEDERATION)(federate.replay)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
) -> None:
    if version:
        print(f"hansa {__version__}")
        raise typer.Exit
