"""Commands about methods and configurations: presets, parts, models, cite, topology, theory, config."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hansa.cli import options as opt
from hansa.cli.console import note, print_table, say, say_json
from hansa.config.import_path import may_import
from hansa.core.errors import HansaError, printable, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable

    from hansa.algorithm import Algorithm
    from hansa.config import Config
    from hansa.config.components import Kind
    from hansa.gossip import Topology
    from hansa.runs.folder import RunFolder

EXAMPLE = """\
# FedAMS on the embedded data. Override keys on the command line: hansa run FILE --set local.lr=0.1
# `hansa config schema > hansa.schema.json` lets editors complete and check this file.
name: fedams on fashion-mini
seed: 0
rounds: 60
data: {name: fashion-mini, clients: 50, partition: {kind: dirichlet, alpha: 0.3}}
model: cnn_29k
algorithm: fedams                              # or with arguments of the method: {preset: fedprox, mu: 0.01}
local: {lr: 0.05, steps: 24, batch_size: 50}   # lr may be a schedule: {kind: cosine, lr: 0.05, rounds: 60}
server: {lr: 0.03, eps: 1e-4}
sample: {participation: 0.1}
evaluate: {every: 1, target: 0.8}
"""


def presets(
    name: Annotated[str | None, typer.Argument(help="Preset to describe.", show_default=False)] = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the presets, or describe one."""
    from hansa.config.components import KINDS, summary_line

    kind = KINDS["preset"]
    if name is not None:
        with _allow_named_code(name):
            _describe_preset(kind.find(name), as_json)
        return
    if as_json:
        say_json({key: summary_line(preset) for key, preset in kind.items()})
        return
    print_table(("preset", "description"), [(key, _describe(kind, key, preset)) for key, preset in kind.items()])
    say("\n`hansa presets NAME` describes a preset; `hansa parts` lists the components.", "dim")


def _describe_preset(preset: Callable[..., Algorithm], as_json: bool) -> None:
    from hansa.config import compose
    from hansa.config.components import summary_line
    from hansa.core.protocols import citations

    accepted, parameters = compose.preset_arguments(preset), compose.own_arguments(preset)
    sections = {
        section: [key for key, name in table.items() if name in accepted or section in compose.COMPOSED_SECTIONS]
        for section, table in compose.SECTION_ARGUMENTS.items()
    }
    name, algorithm = getattr(preset, "__name__", repr(preset)), preset()
    if as_json:
        say_json({"name": name, "own": list(parameters), "sections": sections, "composition": repr(algorithm)})
        return
    rows = {
        "preset": f"{name}  {summary_line(preset)}",
        "algorithm": ", ".join(
            key if each.default is each.empty else f"{key}={each.default!r}" for key, each in parameters.items()
        ),
        **{section: ", ".join(keys) for section, keys in sections.items()},
        "sample": "participation, count, or another sampler" * any(n in accepted for n in compose.SAMPLING_ARGUMENTS),
        "composition": repr(algorithm),
        "cites": ", ".join(citations(algorithm)) or "nothing",
    }
    print_table((), [(heading, text) for heading, text in rows.items() if text])


def parts(
    name: Annotated[str | None, typer.Argument(help="Kind or component to describe.", show_default=False)] = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the components that methods are composed of."""
    from hansa.config.components import KINDS, signature_of, summary_line, unknown_plugins
    from hansa.config.import_path import normalize_name, warn_once

    for plugin in unknown_plugins():
        warn_once(plugin)
    chosen = {kind.name: dict(kind.items()) for kind in KINDS.values() if kind.name != "preset"}
    if name is not None:
        key = normalize_name(name)
        of_name = {kind: {key: members[key]} for kind, members in chosen.items() if key in members}
        chosen = {key: chosen[key]} if key in chosen else of_name
        if not chosen:
            names = [*KINDS, *(member for kind in KINDS.values() for member in kind.names)]
            raise HansaError(f"{name}: not a kind of component or a component. {suggestion(key, set(names))}")
    if as_json:
        say_json({kind: {key: summary_line(part) for key, part in each.items()} for kind, each in chosen.items()})
        return
    rows = [
        ("" if index else kind, key, ", ".join(signature_of(part).arguments), _describe(KINDS[kind], key, part))
        for kind, members in chosen.items()
        for index, (key, part) in enumerate(members.items())
    ]
    print_table(("kind", "component", "arguments", "description"), rows)


def models(as_json: opt.AsJson = False) -> None:
    """List the built-in models with their input shapes, parameters and sizes."""
    from hansa.config.components import summary_line
    from hansa.training.models import MODELS, describe

    described = [describe(name) for name in MODELS]
    if as_json:
        say_json([model._asdict() for model in described])
        return
    rows = [
        (model.name, " x ".join(map(str, model.shape)), str(model.classes), f"{model.parameters:,}",
         f"{model.megabytes:.2f} MB", summary_line(MODELS[model.name]))
        for model in described
    ]  # fmt: skip
    right = ("outputs", "parameters", "size")
    print_table(("model", "input", *right, "description"), rows, right)
    say("\nIn a file: `model: cnn_29k`, or {name: mlp, options: {hidden: 50}}. `model.factory` names your own.", "dim")


def _describe(kind: Kind, name: str, factory: Callable[..., Any]) -> str:
    """The first paragraph of a component's docstring, and the package of a plug-in."""
    from hansa.config.components import summary_line

    package = f" ({kind.plugins[name].package})" if name in kind.plugins else ""
    return summary_line(factory) + package


def cite(
    items: Annotated[list[str], typer.Argument(help="Presets, configuration files or run folders.")],
) -> None:
    """Print the BibTeX entries of the components in use."""
    from hansa.core.protocols import bibtex_entries

    say(bibtex_entries([key for item in items for key in _citations(item)]))


def _citations(item: str) -> list[str]:
    """The citation keys of a run folder as recorded, of a preset, or of a file that names no code."""
    from hansa.config import cited_works, code_names
    from hansa.config.import_path import NOT_LOADED

    if (folder := opt.run_folder(item)) is not None:
        return folder.marker.cites
    with _allow_named_code(item):
        read = opt.read_config(Path(item), None, [])
        if code_names(read) and not may_import():
            raise HansaError(
                f"{item}: {NOT_LOADED}: {', '.join(code_names(read))}. Only `hansa run` and other commands that train "
                "import code; a run records its citations: hansa cite RUN."
            )
        return cited_works(read)


def _allow_named_code(item: str) -> AbstractContextManager[None]:
    """Allow imports if the command line itself names code as MODULE:NAME, not if a file does."""
    from hansa.config.import_path import allow_code, is_import_path

    return allow_code() if is_import_path(item) and not Path(item).exists() else nullcontext()


def topology(
    name: Annotated[
        str | None, typer.Argument(help="ring, complete, torus, '{kind: erdos_renyi, p: 0.3}', ...", show_default=False)
    ] = None,
    clients: Annotated[int, typer.Option("--clients", "-n", help="Number of clients.", min=1)] = 32,
    clusters: Annotated[int, typer.Option("--clusters", "-k", help="Number of clusters of equal size.", min=1)] = 1,
    participation: Annotated[float | None, typer.Option(help="Fraction of each cluster that reports.")] = None,
    reporters: Annotated[
        int | None, typer.Option("--reporters", "-m", help="Number of clients of each cluster that report.")
    ] = None,
    parameters: Annotated[
        int, typer.Option("--parameters", "-d", help="Parameters of the model, for the costs.", min=1)
    ] = 1_000_000,
    target_rho: Annotated[
        float | None, typer.Option(help="Find a graph with this rho, of the named topology or of any.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Local steps per round, for the theorems.", min=1)] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds, for the theorems.", min=1)] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw the graph of a cluster: .svg, .pdf or .png.", show_default=False)
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Describe a gossip graph: how fast it averages, what it costs, and whether the theorems' conditions hold."""
    from hansa import gossip
    from hansa.gossip.activity import count_of
    from hansa.study.theorems import topology_results

    if reporters is not None and participation is not None:
        raise HansaError(f"--reporters {reporters}, --participation {participation}: expected one of the two.")
    graph = _find_topology(name, target_rho, clients, clusters)
    described = gossip.describe(graph, clients, clusters, dim=parameters)
    requested = reporters if reporters is not None else 1.0 if participation is None else participation
    sizes = described["cluster_sizes"]
    counts = [count_of("topology", "reporters", requested, n) for n in sizes]
    results = topology_results(sizes, counts, described["cluster_rho"], steps, rounds)
    if figure is not None:
        if figure.suffix not in (".svg", ".pdf", ".png"):
            raise HansaError(f"--figure {figure}: expected a name that ends in .svg, .pdf or .png.")
        gossip.draw(graph.sparse(max(sizes))).figure.savefig(figure)
    described["reporters"] = counts
    if as_json:
        say_json({**described, "theorems": [asdict(result) for result in results]})
        return
    rows = []
    for heading, value in described.items():
        numbers = sorted(set(value)) if isinstance(value, list) else [value]
        texts = (f"{number:.3f}" if isinstance(number, float) else str(number) for number in numbers)
        rows.append((heading.replace("_", " "), ", ".join(texts)))
    print_table((), [*rows, *(row for result in results for row in result.rows())])


def _find_topology(name: str | None, target: float | None, clients: int, clusters: int) -> Topology:
    """The named topology, or the one whose rho is nearest to the target."""
    from hansa import gossip
    from hansa.config.components import KINDS
    from hansa.config.fields import ComponentField
    from hansa.config.yaml_text import parse_value
    from hansa.core.keys import Key

    if target is not None:
        groups = gossip.resolve(clusters, clients, Key(0))
        return gossip.with_rho(target, [len(group) for group in groups], name).topology
    if name is None:
        raise HansaError(f"expected a topology ({', '.join(KINDS['topology'].names)}) or --target-rho.")
    with _allow_named_code(name):
        graph: Topology = ComponentField(gossip.Topology).build(parse_value(name, "topology"))
    return graph


def config_schema() -> None:
    """Print the JSON Schema of configurations, for editors."""
    from hansa.config import json_schema

    print(json.dumps(json_schema(), indent=2, allow_nan=False))


def config_show(
    path: Annotated[Path, typer.Argument(help="Configuration file, preset, or MODULE:FUNCTION.")],
    sets: opt.Sets = None,
) -> None:
    """Check a configuration and print it with all defaults.

    Also prints the composition of the method. Code that the file names is not imported: its components are not checked.
    """
    from hansa.config import build_algorithm, code_names, to_yaml
    from hansa.config.import_path import NOT_LOADED

    with _allow_named_code(str(path)):
        read = opt.read_config(path, None, opt.changes(sets))
        code = [] if may_import() else code_names(read)
        comments = [f"{NOT_LOADED}: {', '.join(code)}"] if code else [f"composition: {build_algorithm(read)!r}"]
    print(printable(to_yaml(read, comments)), end="")


def config_example() -> None:
    """Print an example configuration."""
    print(EXAMPLE, end="")


SETTING, CONSTANTS = "Setting", "Constants"


def theory(
    item: Annotated[
        Path | None, typer.Argument(help="Configuration file, preset, or run folder.", show_default=False)
    ] = None,
    sets: opt.Sets = None,
    rounds: opt.Rounds = None,
    clients: Annotated[
        int | None, opt.option(SETTING, help="Number of clients, if the file does not set it.", min=1)
    ] = None,
    steps: Annotated[
        int | None, opt.option(SETTING, help="Local steps, if they follow from the clients' data.", min=1)
    ] = None,
    parameters: Annotated[float | None, opt.option(SETTING, help="Parameters of the model, such as 11e6.")] = None,
    constants: Annotated[
        list[str] | None,
        opt.option(CONSTANTS, "--constant", metavar="NAME=VALUE", help="A constant, such as L=10. Repeatable."),
    ] = None,
    estimate: Annotated[
        bool,
        opt.option(CONSTANTS, "--estimate", help="Measure them at the initial model, with the file's own code."),
    ] = False,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
) -> None:
    """Show what the papers prove about a method, with the numbers of a configuration.

    Conditions, limits on the local rate, orders of the rates and, where the constants are known, the terms of the
    bounds: FedAMS, FedAMSGrad and FedCAMS (q, gamma), HA-Fed (rho), AFGA and CAFGA, FedAWARE (chi^2, Phi_Hetero). A run
    folder adds what the run measured. Orders omit constants: only their ratios are meaningful.
    """
    from hansa.config import build, build_algorithm, code_names
    from hansa.config.import_path import NOT_LOADED, allow_code
    from hansa.study.theory import recorded_values
    from hansa.study.theory import theory as report_on

    try:
        pairs = (text.partition("=") for text in constants or [])
        known = {name: float(value) for name, _, value in pairs}
    except ValueError:
        raise HansaError(f"--constant {constants}: expected NAME=VALUE, such as L=10.") from None
    with allow_code(trust=trust) if estimate else nullcontext():
        folder = None if item is None else opt.run_folder(item)
        path = item if folder is None else folder / "config.yaml"
        config = opt.read_config(path, None, opt.changes(sets, rounds=rounds))
        if config.python is not None:
            raise HansaError(f"{item}: started in Python: no file has its algorithm. Use hansa.theory(...).")
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
            constants=known,
            estimate=estimate,
            measured={} if folder is None else recorded_values(folder.history),
            seed=config.seed,
        )
    if as_json:
        say_json(report.record())
        return
    print_table((), report.rows())
    if not report.problem.known():
        note("\nBounds need constants: --constant L=10 gives one, --estimate measures them.", "dim")


def _clients(config: Config, folder: RunFolder | None) -> int:
    """Return the number of clients, without loading data."""
    from hansa import data
    from hansa.config.build import CLIENTS
    from hansa.runs.folder import PARTITION

    if folder is not None and (folder / PARTITION).is_file():
        return int(data.load_split(folder / PARTITION, None).population)
    dataset = data.DATASETS.get(config.data.name) if config.data.factory is None else None
    partitioned = dataset is not None and dataset.layout in ("embedded", "idx", "cifar")
    if config.data.clients is None and not partitioned:
        raise HansaError(
            f"{config.data.factory or config.data.name}: the number of clients follows from the data. Pass --clients "
            "100, or load the data with --estimate."
        )
    return config.data.clients or CLIENTS
