"""``hansa compare``: run and rank several methods."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
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
    from hansa.config import Config, ConfigError
    from hansa.config.compose import Preset
    from hansa.config.yaml_text import Document
    from hansa.study.report import ReportEntry

OWN_SECTIONS = ("uplink", "downlink", "aggregate", "channels")
"""Sections that replace components of one method."""
METHOD_SECTIONS = (
    "sample", "pace", "compress", "gossip", "server", "uplink", "downlink", "aggregate", "channels", "local",
)  # fmt: skip
"""Sections whose options a preset may not have; a comparison leaves them out with a note."""
WHOLE_SECTIONS = ("sample", "uplink", "downlink", "aggregate", "pace")
"""Those that are one component."""
OWN_LOCAL_KEYS = ("solver", "optimizer", "optimizer_state", "decoupled_weight_decay", "private_blocks")


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
    from hansa.study.report.run_discovery import is_run_folder, unique_name

    overrides = opt.changes(sets, rounds, seed, workers, seeds, device, deterministic, server_device)
    folders = [name for name in runs if is_run_folder(name)]
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
    from hansa.config.registry import KINDS

    if Path(item).is_file():
        opt.check_trust(Path(item))
        return load(item, overrides)
    if not KINDS["preset"].knows(item):
        raise HansaError(f"{item}: not a file, a run folder or a preset. {suggestion(item, KINDS['preset'].names)}")
    if base is None:
        return from_preset(item, overrides)
    opt.check_trust(base)
    document = read_document(base)
    own, dropped = _preset_of(document), transfer_config(document, item)
    while True:
        try:
            config = validate(copy.deepcopy(document), overrides)
            break
        except ConfigError as error:
            key = None if own == item else _inapplicable_option(document, overrides, error)
            if key is None:
                raise
            _drop(document.data, key)
            dropped.append(".".join(key))
    if dropped:
        note(f"{item}: not taken from {base}: {', '.join(dropped)}", "dim")
    return config


def _inapplicable_option(document: Document, overrides: Sequence[str], error: ConfigError) -> tuple[str, ...] | None:
    """The option of the shared file that a preset does not take: one that a problem names, or one without which there
    is no problem."""
    from hansa.config import ConfigError, validate

    for problem in error.problems:
        if (key := _droppable(document.data, problem.keys)) is not None:
            return key
    for section in METHOD_SECTIONS:
        if document.data.get(section) is not None:
            without = copy.deepcopy(document)
            del without.data[section]
            try:
                validate(without, overrides)
            except ConfigError:
                continue
            return (section,)
    return None


def _preset_of(document: Document) -> Any:
    algorithm = document.data.get("algorithm", "fedavg")
    return algorithm.get("preset", "fedavg") if isinstance(algorithm, dict) else algorithm


def _droppable(data: dict[str, Any], keys: Sequence[str | int]) -> tuple[str, ...] | None:
    """The option of a method that a problem is about, if the shared file has it: a section's key, or a section."""
    if not keys or keys[0] not in METHOD_SECTIONS or data.get(str(keys[0])) is None:
        return None
    section, inner = str(keys[0]), [str(key) for key in keys[1:2]]
    if section in WHOLE_SECTIONS or not inner:
        return (section,)
    return (section, inner[0]) if isinstance(data[section], dict) and inner[0] in data[section] else (section,)


def _drop(data: dict[str, Any], key: tuple[str, ...]) -> None:
    if len(key) == 1:
        del data[key[0]]
    else:
        del data[key[0]][key[1]]


def transfer_config(document: Document, method: str) -> list[str]:
    """Change the preset of a configuration; return the keys that were dropped because they do not apply to it.

    Keys of gossip and compression stay if the new preset accepts them. Keys of the server stay if both servers are
    adaptive or neither is: their learning rates are not comparable. Components that the file replaces, and arguments
    of its own preset, are dropped. Nothing is dropped if the preset stays the same.
    """
    from hansa.config.compose import find_preset
    from hansa.config.registry import normalize_name

    data = document.data
    data.pop("name", None)
    algorithm = data.get("algorithm", "fedavg")
    own = algorithm.get("preset", "fedavg") if isinstance(algorithm, dict) else algorithm
    if isinstance(own, str) and normalize_name(own) == normalize_name(method):
        return []
    dropped = [f"algorithm.{key}" for key in algorithm if key != "preset"] if isinstance(algorithm, dict) else []
    for section, key in list(_inapplicable(data, find_preset(method), own)):
        dropped.append(section if key is None else f"{section}.{key}")
        if key is None:
            del data[section]
        else:
            del data[section][key]
    data.pop("algorithm", None)
    document.set(("algorithm", "preset"), method, f"preset {method}")
    return dropped


def _inapplicable(data: dict[str, Any], preset: Preset, own: Any) -> Iterator[tuple[str, str | None]]:
    """The sections and keys of a configuration that do not apply to another preset."""
    from hansa.config.compose import SECTION_ARGUMENTS, find_preset, preset_arguments

    known = preset_arguments(preset)
    similar_server = isinstance(own, str) and ("eps" in preset_arguments(find_preset(own))) == ("eps" in known)
    for section in ("server", "gossip", "compress"):
        for key in data[section] if isinstance(data.get(section), dict) else ():
            argument = SECTION_ARGUMENTS[section].get(key)
            # unknown keys stay, so that validation reports them
            applies = argument in known if argument is not None else key != "optimizer"
            if not applies or (section == "server" and key != "weights" and not similar_server):
                yield section, key
    local = data["local"] if isinstance(data.get("local"), dict) else {}
    yield from (("local", key) for key in OWN_LOCAL_KEYS if key in local)
    yield from ((section, None) for section in OWN_SECTIONS if data.get(section) is not None)
