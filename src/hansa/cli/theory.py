"""``hansa theory``: what the papers prove about a configuration, a preset or a run."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hansa.cli import options as opt
from hansa.cli.console import note, report_errors, say_json
from hansa.cli.inspect import show_table
from hansa.core.errors import HansaError

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.runs.folder import RunFolder

SETTING, CONSTANTS = "Setting", "Constants"


@report_errors
def theory(
    item: Annotated[
        Path | None, typer.Argument(help="Configuration file, preset, or run folder.", show_default=False)
    ] = None,
    sets: opt.Sets = None,
    rounds: opt.Rounds = None,
    clients: Annotated[
        int | None, opt.option(SETTING, help="Number of clients, where the file does not say it.", min=1)
    ] = None,
    steps: Annotated[
        int | None, opt.option(SETTING, help="Local steps, where they follow from the clients' data.", min=1)
    ] = None,
    parameters: Annotated[float | None, opt.option(SETTING, help="Parameters of the model, such as 11e6.")] = None,
    constants: Annotated[
        list[str] | None,
        opt.option(CONSTANTS, "--constant", metavar="NAME=VALUE", help="A constant, such as L=10. Repeatable."),
    ] = None,
    estimate: Annotated[
        bool,
        opt.option(CONSTANTS, "--estimate", help="Measure them at the first model, with the code that the file names."),
    ] = False,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
) -> None:
    """Show what the papers prove about a method, with its own numbers.

    Conditions, limits on the local rate, orders of the rates and, where the constants are known, the terms of the
    bounds: FedAMS, FedAMSGrad and FedCAMS (q, gamma), HA-Fed (rho), AFGA and CAFGA, FedAWARE (chi^2, Phi_Hetero). A run
    folder adds what the run measured. Orders have no constants: only their ratios mean something.
    """
    from hansa.config import build, build_algorithm, code_names
    from hansa.config.import_path import NOT_LOADED, allow_code
    from hansa.study.theory import recorded_values
    from hansa.study.theory import theory as report_on

    with allow_code(trust=trust) if estimate else nullcontext():
        folder, config = _read(item, opt.changes(sets, rounds=rounds))
        method_only = {name: type(config).model_fields[name].default for name in ("data", "model")}
        if not estimate and (code := code_names(config.model_copy(update=method_only))):
            raise HansaError(
                f"{item}: {NOT_LOADED}: {', '.join(code)}. Only --estimate imports code that a file names."
            )
        report = report_on(
            build_algorithm(config),
            build.build_task(config, build.load_data(config)) if estimate else None,
            clients=None if estimate else clients or _clients(config, folder),
            rounds=config.rounds,
            steps=steps,
            parameters=None if parameters is None else int(parameters),
            constants=dict(map(_constant, constants or [])),
            estimate=estimate,
            measured={} if folder is None else recorded_values(folder.history),
            seed=config.seed,
        )
    if as_json:
        say_json(report.record())
        return
    show_table((), list(report.rows()))
    if not report.problem.known():
        note("\nBounds need constants: --constant L=10 gives one, --estimate measures them.", "dim")


def _read(item: Path | None, overrides: list[str]) -> tuple[RunFolder | None, Config]:
    from hansa.runs.folder import RunFolder, SeedGroupFolder

    if item is not None and item.exists():
        folder, group = RunFolder.containing(item), SeedGroupFolder(item)
        folder = group.runs[0] if group.exists and group.runs else folder
        if folder.exists:
            config = opt.read_config(folder / "config.yaml", None, overrides)
            if config.python is None:
                return folder, config
            raise HansaError(
                f"{folder}: started in Python: no file holds its algorithm. Use hansa.theory(algorithm, ...) there."
            )
    return None, opt.read_config(item, None, overrides)


def _clients(config: Config, folder: RunFolder | None) -> int:
    """Return the number of clients, without loading data."""
    from hansa import data
    from hansa.config.build import CLIENTS
    from hansa.runs.folder import PARTITION

    if folder is not None and (folder / PARTITION).is_file():
        return int(data.load_split(folder / PARTITION, None).population)
    known = data.DATASETS.get(config.data.name) if config.data.factory is None else None
    if known is not None and known.layout in ("embedded", "idx", "cifar"):
        return config.data.clients or CLIENTS
    if config.data.clients is None:
        raise HansaError(
            f"{config.data.factory or config.data.name}: the number of clients follows from the data. Give it, "
            "--clients 100, or load the data with --estimate."
        )
    return config.data.clients


def _constant(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise HansaError(f"--constant {text}: expected NAME=VALUE, such as L=10.") from None
