"""The commands, put together. Modules that import torch are imported by the commands that need them, not here."""

from __future__ import annotations

import typer

from hansa import __version__
from hansa.cli import advise, compare, data, federate, inspect, predict, reproduce, run, sweep, watch
from hansa.cli.console import Naming

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated optimization in which neighbours talk first.",
    epilog="Exit codes: 0 done, 1 it failed, 2 bad usage, configuration or data, 130 stopped by Ctrl-C and saved.",
)
app.command("run", cls=Naming)(run.run)
app.command("resume")(run.resume)
app.command("compare", cls=Naming)(compare.compare)
app.command("sweep", cls=Naming)(sweep.sweep)
app.command("reproduce")(reproduce.reproduce)
app.command("advise")(advise.advise)
app.command("predict")(predict.predict)
app.command("export")(predict.export)
app.command("show")(inspect.show)
app.command("report")(compare.report)
app.command("watch")(watch.watch)
app.command("presets", cls=Naming)(inspect.presets)
app.command("parts", cls=Naming)(inspect.parts)
app.command("topology", cls=Naming)(inspect.topology)
app.command("cite", cls=Naming)(inspect.cite)
app.command("demo")(compare.demo)
app.command("serve")(federate.serve)
app.command("join")(federate.join)
app.command("keys")(federate.keys)
app.add_typer(data.app, name="data")
app.add_typer(inspect.config, name="config")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and end.", is_eager=True),
) -> None:
    if version:
        print(f"hansa {__version__}")
        raise typer.Exit
