"""``hansa compare``: run and rank several methods."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hansa.cli import options as opt
from hansa.cli.console import note, report_errors
from hansa.cli.report import print_and_write, read_entries
from hansa.cli.run import run_entries
from hansa.core.errors import HansaError, suggestion
from hansa.runs.columns import WINDOW

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.config.yaml_text import Document
    from hansa.study.report import ReportEntry

COMPONENTS = ("uplink", "downlink", "aggregate", "channels")
"""Sections that replace components of one method."""
OWN_LOCAL_KEYS = ("solver", "optimizer", "optimizer_state", "decoupled_weight_decay", "private_blocks")
"""Keys of the section local that belong to one method."""
KEYED, WHOLE = ("compress", "gossip", "server", "local"), ("sample", "pace")
"""Further sections that a method may not take: in part, or as a whole."""


@report_errors
@opt.needs_code
def compare(
    runs: Annotated[list[str], typer.Argument(help="Configuration files, run folders, presets, or MODULE:FUNCTION.")],
    base: Annotated[
        Path | None,
        opt.setting("--config", "-c", help="Configuration file that the presets share."),
    ] = None,
    sets: opt.Sets = None,
    rounds: opt.Rounds = None,
    seed: opt.Seed = None,
    seeds: opt.Seeds = None,
    workers: opt.Workers = None,
    parallel: opt.Parallel = None,
    device: opt.Device = None,
    deterministic: opt.Deterministic = None,
    server_device: opt.ServerDevice = None,
    folder: Annotated[Path, opt.output("--out", "-o", help="Folder for new runs.")] = Path("runs/compare"),
    report: opt.Report = Path("report.html"),
    metric: opt.Metric = None,
    window: opt.Window = WINDOW,
    target: opt.Target = None,
    latex: opt.Latex = None,
    trust: opt.Trust = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Run several methods, rank them, and write a report page.

    Finished runs are not repeated.
    """
    from hansa.runs.folder import RunFolder, SeedGroupFolder
    from hansa.study.report.entries import unique_name

    overrides = opt.changes(sets, rounds, seed, workers, seeds, device, deterministic, server_device)
    folders = [name for name in runs if RunFolder.containing(name).exists or SeedGroupFolder(name).exists]
    finished, problems = read_entries(folders, alone=len(folders) == len(runs))
    requested: dict[str, Config | ReportEntry] = dict(finished)
    for place, item in enumerate(runs):
        if item not in folders:
            config = _read_item(item, base, overrides)
            name = config.title if Path(item).is_file() else item
            requested[unique_name(name, f"{name} {place + 1}", requested)] = config
    entries = run_entries(requested, folder, quiet, parallel=parallel)
    ranked: dict[str, Any] = {"metric": metric, "window": window, "target": target, "latex": latex}
    print_and_write(entries, report, title="Federated runs compared", problems=problems, as_json=as_json, **ranked)


def _read_item(item: str, base: Path | None, overrides: Sequence[str]) -> Config:
    """The configuration of a file; or of a preset or MODULE:FUNCTION, alone or on top of a shared file."""
    from hansa.config import ConfigError, from_preset, load, read_document, validate
    from hansa.config.components import KINDS

    if Path(item).is_file():
        opt.check_trust(Path(item))
        return load(item, overrides)
    if not KINDS["preset"].knows(item):
        raise HansaError(f"{item}: not a file, a run folder or a preset. {suggestion(item, KINDS['preset'].names)}")
    if base is None:
        return from_preset(item, overrides)
    opt.check_trust(base)
    document = read_document(base)
    options = _options_of_other_methods(document, item)
    if options is None:  # the file's own preset
        return validate(document, overrides)
    dropped, document = options, _without(document, options)
    for key in ("name", "algorithm"):
        document.data.pop(key, None)
    document.set(("algorithm", "preset"), item, f"preset {item}")
    while True:
        try:
            config = validate(copy.deepcopy(document), overrides)
            break
        except ConfigError as error:
            refused = _refused_option(document, overrides, len(error.problems))
            if not refused:
                raise
            document = _without(document, refused)
            dropped += refused
    if dropped:
        note(f"{item}: not taken from {base}: {', '.join(map('.'.join, dropped))}", "dim")
    return config


def _options_of_other_methods(document: Document, method: str) -> list[tuple[str, ...]] | None:
    """The options of a shared file that are its own method's: arguments of its preset, components, and what belongs to
    its server unless both servers are adaptive or neither is, since their learning rates are not comparable. None if
    the method is the file's own."""
    from hansa.config.components import KINDS
    from hansa.config.compose import preset_arguments
    from hansa.config.import_path import normalize_name

    data = document.data
    algorithm = data.get("algorithm", "fedavg")
    own = algorithm.get("preset", "fedavg") if isinstance(algorithm, dict) else algorithm
    if normalize_name(str(own)) == normalize_name(method):
        return None
    adaptive = ["eps" in preset_arguments(KINDS["preset"].find(name)) for name in (str(own), method)]
    keys = {section: list(data[section]) if isinstance(data.get(section), dict) else [] for section in data}
    options = [("algorithm", key) for key in keys.get("algorithm", ()) if key != "preset"]
    options += [("server", key) for key in keys.get("server", ()) if key != "weights" and adaptive[0] != adaptive[1]]
    options += [("local", key) for key in keys.get("local", ()) if key in OWN_LOCAL_KEYS]
    return [*options, *((section,) for section in COMPONENTS if data.get(section) is not None)]


def _refused_option(document: Document, overrides: Sequence[str], problems: int) -> list[tuple[str, ...]]:
    """The option of a shared file without which a method has fewer problems, as a list; empty if there is none."""
    from hansa.config import ConfigError, validate

    data = document.data
    options: list[tuple[str, ...]] = [
        (section, key) for section in KEYED if isinstance(data.get(section), dict) for key in data[section]
    ]
    options += [(section,) for section in (*WHOLE, *KEYED[:-1]) if data.get(section) is not None]
    for option in options:
        try:
            validate(_without(document, [option]), overrides)
        except ConfigError as error:
            if len(error.problems) >= problems:
                continue
        return [option]
    return []


def _without(document: Document, options: Sequence[tuple[str, ...]]) -> Document:
    document = copy.deepcopy(document)
    for section, *keys in options:
        if keys:
            del document.data[section][keys[0]]
        else:
            del document.data[section]
    return document
