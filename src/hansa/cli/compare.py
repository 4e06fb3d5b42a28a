"""``hansa compare``, ``sweep`` and ``demo``: run and rank several methods or settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hansa.cli import options as opt
from hansa.cli.console import note, say
from hansa.cli.run import run_entries, session
from hansa.cli.show import print_and_write, read_entries
from hansa.core.errors import HansaError, invalid_argument
from hansa.runs.columns import WINDOW

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.runs.search import Axis, Search
    from hansa.study.report import Ranking, ReportEntry
    from hansa.study.session import Job, Session

OF_METHOD = ("server", "gossip", "compress", "uplink", "downlink", "aggregate", "channels", "pace")
"""Sections of a shared file that belong to its own method; of ``server``, all but the weights."""
OF_METHOD_LOCAL = ("solver", "loop", "optimizer", "optimizer_state", "decoupled_weight_decay", "private_blocks")
"""Keys of the section local that belong to the file's own method."""


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
    from hansa.study.report.entries import unique_name

    overrides = opt.changes(sets, rounds=rounds, seed=seed, seeds=seeds, workers=workers, device=device)
    folders = [name for name in runs if opt.run_folder(name) is not None]
    finished, problems = read_entries(folders, alone=len(folders) == len(runs))
    requested: dict[str, Config | ReportEntry] = dict(finished)
    for index, item in enumerate(runs):
        if item not in folders:
            config = _read_item(item, base, overrides)
            name = config.title if Path(item).is_file() else item
            requested[unique_name(name, f"{name} {index + 1}", requested)] = config
    entries = run_entries(requested, folder, quiet, parallel)
    ranked: dict[str, Any] = {"metric": metric, "window": window, "target": target, "latex": latex}
    print_and_write(entries, report, title="Federated runs compared", problems=problems, as_json=as_json, **ranked)


def _read_item(item: str, base: Path | None, overrides: Sequence[str]) -> Config:
    """Return the configuration of a file, a preset or MODULE:FUNCTION, the latter two with an optional shared file."""
    from hansa.config import read_document, validate
    from hansa.config.components import KINDS
    from hansa.config.compose import preset_arguments
    from hansa.config.import_path import normalize_name

    if base is None or Path(item).is_file():
        return opt.read_config(Path(item), None, overrides)
    opt.check_trust(base)
    document = read_document(base)
    data = document.data
    algorithm = data.get("algorithm", "fedavg")
    base_preset = algorithm.get("preset", "fedavg") if isinstance(algorithm, dict) else algorithm
    if normalize_name(str(base_preset)) != normalize_name(item):
        gossips = "reporters" in preset_arguments(KINDS["preset"].find(item))  # instead of a sampler
        weights = data["server"].get("weights") if isinstance(data.get("server"), dict) else None
        dropped = [name for name in (*OF_METHOD, *["sample"] * gossips) if data.pop(name, None) is not None]
        if weights is not None:
            data["server"] = {"weights": weights}
        local = data["local"] if isinstance(data.get("local"), dict) else {}
        dropped += [f"local.{key}" for key in OF_METHOD_LOCAL if local.pop(key, None) is not None]
        data.pop("name", None)
        data.pop("algorithm", None)
        document.set(("algorithm", "preset"), item, f"preset {item}")
        if dropped:
            note(f"{item}: not taken from {base}: {', '.join(dropped)}", "dim")
    return validate(document, overrides)


def _point_changes(point: Mapping[str, Any]) -> list[str]:
    """Return a point as overrides of a configuration; together they are its name."""
    return [f"{key}={value if isinstance(value, str) else repr(value)}" for key, value in point.items()]


def _write_results(folder: Path, ranking: Ranking, values_of: Mapping[str, Mapping[str, Any]]) -> None:
    """Write ``results.csv``, a row per point with its means over seeds, and ``runs.csv``, a row per run.

    ``values_of`` has the values of each point, by the name of its entry.
    """
    import pandas

    from hansa.runs.store.io import write_file

    names = dict.fromkeys([ranking.score, f"best_{ranking.metric}", ranking.metric])
    columns = {f"final_{name}" if name == ranking.metric else name: name for name in names}
    score = next(iter(columns))
    columns |= {name: name for name in ("rounds", "bits", "wall_seconds")}
    points: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for ranked in ranking:
        values, spread = values_of[ranked.entry.name], ranked.spreads.get(ranking.score)
        points.append({
            **values,
            **{column: ranked.numbers.get(name, "") for column, name in columns.items()},
            **{f"{name}_{score}": "" if spread is None else getattr(spread, name) for name in ("std", "min", "max")},
            "seeds": len(ranked.entry.runs),
            "status": "/".join(dict.fromkeys(str(run.summary.get("status", "")) for run in ranked.entry.runs)),
        })  # fmt: skip
        for run, numbers in ranked.seeds:
            run_columns = {column: numbers.get(name, "") for column, name in columns.items()}
            runs.append({**values, "seed": run.seed, **run_columns})
    for name, rows in (("results.csv", points), ("runs.csv", runs)):
        table = pandas.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")
        write_file(folder / name, table.encode())


def _run_search(
    running: Session,
    configure: Callable[[Mapping[str, Any]], Config],
    axes: Mapping[str, Axis],
    folder: Path,
    trials: int,
    parallel: int | None,
    **options: Any,
) -> Search:
    """Search for the best point, or resume the search; its trials are runs below ``folder``.

    ``configure`` returns the configuration of a point, and for ``{}`` that of the base.
    """
    from hansa.config import build
    from hansa.runs.experiment import digest_name, find_folder
    from hansa.runs.folder import expand_seeds
    from hansa.runs.search import Search
    from hansa.study.session import plan_jobs

    base = configure({})
    configs = expand_seeds(base)
    facts = {"config": digest_name("base", base), "seed_list": [config.seed for config in configs]}
    options |= {"rounds": base.rounds, "seed": base.seed, "seeds": len(configs), "folder": folder, "facts": facts}
    search = Search(axes, task=build.build_task(configs[0], build.load_data(configs[0])), **options)

    def plan(point: Mapping[str, Any]) -> list[Job]:
        name = " ".join(_point_changes(point))
        config = configure(point).model_copy(update={"name": name})
        return plan_jobs(config, find_folder(config, folder, name), "resume", rounds=config.rounds)

    running.run_trials(search, trials, plan, parallel)
    return search


SEARCH = "Search"


@opt.needs_code
def sweep(
    config: Annotated[Path, typer.Argument(help="Configuration file, preset, or MODULE:FUNCTION.")],
    grid: Annotated[
        list[str],
        typer.Argument(metavar="KEY=V1,V2,...", help="Keys and their values; for a search also LOW..HIGH[:log]."),
    ],
    metric: opt.Metric = None,
    window: opt.Window = WINDOW,
    sets: opt.Sets = None,
    rounds: opt.Rounds = None,
    seed: opt.Seed = None,
    seeds: opt.Seeds = None,
    workers: opt.Workers = None,
    parallel: opt.Parallel = None,
    device: opt.Device = None,
    folder: Annotated[Path, opt.output("--out", "-o", help="Folder of the sweep.")] = Path("runs/sweep"),
    report: Annotated[
        Path | None,
        opt.output("--report", help="Where to write the report page. By default in that folder."),
    ] = None,
    target: opt.Target = None,
    latex: opt.Latex = None,
    search: Annotated[
        str | None, opt.option(SEARCH, "--search", help="Search for the best point with this library: optuna.")
    ] = None,
    trials: Annotated[int, opt.option(SEARCH, "--trials", help="Number of points to try.", min=1)] = 20,
    prune: Annotated[bool, opt.option(SEARCH, "--prune/--no-prune", help="Stop points below the median.")] = True,
    trust: opt.Trust = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Run every combination of values, or search for the best one.

    Points are ranked by their mean over --seeds. Run the same command again to continue an interrupted sweep.

    With --search optuna, points are proposed from ranges such as local.lr=1e-3..1:log or from the given values.
    """
    from hansa.runs.columns import facts_of, scores_test_rows
    from hansa.runs.search import DONE, grid_points, parse_axes

    if search not in (None, "optuna"):
        raise invalid_argument("sweep", "search", search, "optuna")
    axes = parse_axes(grid)
    overrides = opt.changes(sets, rounds=rounds, seed=seed, seeds=seeds, workers=workers, device=device)

    def configure(point: Mapping[str, Any]) -> Config:
        return opt.read_config(config, None, [*overrides, *_point_changes(point)])

    result, points = None, [] if search else grid_points(axes)
    with session(quiet) as running:
        if search is not None:
            options: dict[str, Any] = {"metric": metric, "window": window, "prune": prune}
            result = _run_search(running, configure, axes, folder, trials, parallel, **options)
            points = [trial.point for trial in result.trials if trial.status == DONE]
            if not points:
                raise HansaError(f"{folder}: {result.counts()}: no point finished. Try other ranges, or --no-prune.")
        values_of: dict[str, Mapping[str, Any]] = {" ".join(_point_changes(point)): point for point in points}
        configs = {name: configure(point) for name, point in values_of.items()}
        entries = list(running.run_reusable(configs, folder, parallel).values())
    metric = (facts_of(entries[0].histories[0]).tuning or None) if metric is None else metric
    page = folder / "report.html" if report is None else report
    ranked: dict[str, Any] = {"metric": metric, "window": window, "target": target, "latex": latex}
    ranking = print_and_write(entries, page, title=f"Sweep of {config}", as_json=as_json, **ranked)
    _write_results(folder, ranking, values_of)
    if warning := scores_test_rows(ranking.metric):
        note(warning, "yellow")
    best = "  ".join(f"--set {change}" for change in _point_changes(values_of[ranking[0].entry.name]))
    message = "" if result is None else f"{result.counts()}\n"
    if not as_json:
        say(f"{message}best: {best}\nresults: {folder / 'results.csv'}")


TITLE = "Federated methods on Fashion-MNIST"
LEAD = (
    "All methods train a CNN of 28,938 parameters on the same clients and data, with one seed. They differ in "
    "the local training and in how the server applies the updates. Fifty clients hold very different data, "
    "and five of them report each round."
)
SETTING = """
rounds: 40
data: {name: fashion-mini, clients: 50, partition: {kind: dirichlet, alpha: 0.3}}
model: cnn_29k
local: {lr: 0.1, steps: 10, batch_size: 50}
links: {up_bandwidth: 1.25e5, down_bandwidth: 1.25e6, latency: 0.05, peer_bandwidth: 1.25e7, peer_latency: 0.002}
checkpoint: {every: 0}
"""
"""What all methods share. The links: 1 Mbit/s up, 10 down, 50 ms latency; between clients 100 Mbit/s and 2 ms."""
TENTH = "sample: {participation: 0.1}\n"
TOP_K = "compress: {compressor: {kind: top_k, ratio: 1/16}}\n"
METHODS: Mapping[str, str] = {
    "CAFGA": "algorithm: cafga\ngossip: {clusters: 5, reporters: 1, topology: ring}\nserver: {lr: 0.01, eps: 1e-8}",
    "FedAvg": TENTH + "algorithm: fedavg",
    "FedAdam": TENTH + "algorithm: fedadam\nserver: {lr: 0.01, eps: 1e-3}",
    "FedAMS": TENTH + "algorithm: fedams\nserver: {lr: 0.1, eps: 1e-3}",
    "FedCAMS": TENTH + "algorithm: fedcams\nserver: {lr: 0.1, eps: 1e-3}\n" + TOP_K,
    "FedAWARE": TENTH + "algorithm: {preset: fedaware, alpha: 0.5}\nserver: {lr: 1.5}",
}
"""The configuration of each method, added to `SETTING`; the longest run, in which all clients train, is first."""
TINY = ("rounds=2", "data.clients=10", "local.steps=2", "local.batch_size=10")


@opt.needs_code
def demo(
    tiny: Annotated[bool, typer.Option("--tiny", help="Run two rounds with ten clients, as a test.")] = False,
    seed: opt.Seed = None,
    seeds: opt.Seeds = None,
    workers: opt.Workers = None,
    parallel: opt.Parallel = None,
    folder: Annotated[Path, opt.output("--out", "-o", help="Folder for the runs.")] = Path("runs/demo"),
    page: opt.Report = Path("report.html"),
    quiet: opt.Quiet = False,
) -> None:
    """Compare methods on the embedded data and write a report page.

    This takes a few minutes on two cores. Finished runs are not repeated.
    """
    from hansa.config import from_yaml

    overrides = [*(TINY if tiny else ()), *opt.changes(None, seed=seed, seeds=seeds, workers=workers)]
    configs = {name: from_yaml(SETTING + text, overrides, f"demo of {name}") for name, text in METHODS.items()}
    print_and_write(run_entries(dict(configs), folder, quiet, parallel), page, title=TITLE, lead=LEAD)
