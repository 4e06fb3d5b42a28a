"""Commands about methods and configurations: ``presets``, ``parts``, ``models``, ``cite``, ``topology``, ``config``."""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hansa.cli import options as opt
from hansa.cli.console import out, plain_table, plugin_names, report_errors, say, say_json
from hansa.config.import_path import may_import
from hansa.core.errors import HansaError, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hansa.algorithm import Algorithm
    from hansa.config.components import Kind
    from hansa.gossip import Topology

config = typer.Typer(no_args_is_help=True, help="Check, resolve and describe configurations.")

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


@report_errors
def presets(
    name: Annotated[str | None, typer.Argument(help="Preset to describe.", show_default=False)] = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the presets, or describe one."""
    from hansa.config.components import KINDS, ConfigValueError, summary_line

    kind = KINDS["preset"]
    if name is not None:
        try:
            with _named_here(name):
                _describe_preset(kind.find(name), as_json)
        except ConfigValueError as error:
            raise HansaError(error.message) from error
        return
    known = dict(kind.items())
    if as_json:
        _show_json({each: summary_line(preset) for each, preset in known.items()})
        return
    show_table(("preset", "description"), [(each, _about(kind, each, preset)) for each, preset in known.items()])
    if names := plugin_names():
        say(f"\nPlug-ins provide {names}.")
    say("\n`hansa presets NAME` describes a preset; `hansa parts` lists the components.", "dim")


def _describe_preset(preset: Callable[..., Algorithm], as_json: bool) -> None:
    from hansa.config import compose
    from hansa.config.components import summary_line
    from hansa.core.citations import citations

    known, own = compose.preset_arguments(preset), compose.own_arguments(preset)
    sections = {
        section: [key for key, argument in table.items() if argument in known or section in compose.COMPOSED_SECTIONS]
        for section, table in compose.SECTION_ARGUMENTS.items()
    }
    name, algorithm = getattr(preset, "__name__", repr(preset)), preset()
    if as_json:
        _show_json({"name": name, "own": list(own), "sections": sections, "composition": repr(algorithm)})
        return
    rows = {
        "preset": f"{name}  {summary_line(preset)}",
        "algorithm": ", ".join(
            each.name if each.required else f"{each.name}={each.default!r}" for each in own.values()
        ),
        **{section: ", ".join(keys) for section, keys in sections.items()},
        "sample": "participation, count, or another sampler" if known.keys() & {*compose.SAMPLING_ARGUMENTS} else "",
        "composition": repr(algorithm),
        "cites": ", ".join(citations(algorithm)) or "nothing",
    }
    show_table((), [(heading, text) for heading, text in rows.items() if text])


@report_errors
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
        wanted = normalize_name(name)
        alone = {kind: {wanted: known[wanted]} for kind, known in chosen.items() if wanted in known}
        chosen = {wanted: chosen[wanted]} if wanted in chosen else alone
        if not chosen:
            names = [*KINDS, *(each for kind in KINDS.values() for each in kind.names)]
            raise HansaError(f"{name}: not a kind of component or a component. {suggestion(wanted, set(names))}")
    if as_json:
        _show_json({kind: {each: summary_line(part) for each, part in known.items()} for kind, known in chosen.items()})
        return
    rows = [
        ("" if place else kind, each, ", ".join(signature_of(part).arguments), _about(KINDS[kind], each, part))
        for kind, known in chosen.items()
        for place, (each, part) in enumerate(known.items())
    ]
    show_table(("kind", "component", "arguments", "description"), rows)


@report_errors
def models(
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="C,H,W", help="Shape of one input. By default that of the model's paper."),
    ] = None,
    classes: Annotated[int | None, typer.Option("--classes", help="Number of outputs.", min=1)] = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the built-in models with their input shapes, parameters and sizes."""
    from hansa.config.components import summary_line
    from hansa.training.models import MODELS, describe

    if shape is not None and not re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)*", shape):
        raise HansaError(f"--shape {shape}: expected positive sizes that are separated by commas, such as 3,32,32.")
    sizes = None if shape is None else tuple(map(int, shape.split(",")))
    described = [describe(name, sizes, classes) for name in MODELS]
    if as_json:
        _show_json([each._asdict() for each in described])
        return
    rows = []
    for each in described:
        counts = ["", ""] if each.parameters is None else [f"{each.parameters:,}", f"{each.megabytes:.2f} MB"]
        about = summary_line(MODELS[each.name]) if each.error is None else each.error
        rows.append((each.name, " x ".join(map(str, each.shape)), str(each.classes), *counts, about))
    show_table(("model", "input", "outputs", "parameters", "size", "description"), rows)
    say("\nIn a file: `model: cnn_29k`, or {name: mlp, options: {hidden: 50}}. `model.factory` names your own.", "dim")


def _about(kind: Kind, name: str, factory: Callable[..., Any]) -> str:
    """The first paragraph of a component's docstring, and the package of a plug-in."""
    from hansa.config.components import summary_line

    package = f" ({kind.plugins[name].package})" if name in kind.plugins else ""
    return summary_line(factory) + package


def _show_json(value: Any) -> None:
    out().print_json(json.dumps(value))


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; without headings, pairs of a name and a text."""
    if headings:
        numbers = ("outputs", "parameters", "size")
        table = plain_table(*headings, left=tuple({*headings} - {*numbers}), no_wrap=(headings[0], *numbers))
    else:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
    for row in rows:
        table.add_row(*map(escape, row))
    out().print(table)


@report_errors
def cite(
    items: Annotated[list[str], typer.Argument(help="Presets, configuration files or run folders.")],
) -> None:
    """Print the BibTeX entries of the components in use."""
    from hansa.core.citations import bibtex_entries

    say(bibtex_entries([key for item in items for key in _citations(item)]))


def _citations(item: str) -> list[str]:
    """The citation keys of a run folder as recorded, of a preset, or of a file that names no code."""
    from hansa.config import cited_works, code_names
    from hansa.config.import_path import NOT_LOADED
    from hansa.runs.folder import RunFolder, SeedGroupFolder

    folder, group = RunFolder.containing(item), SeedGroupFolder(item)
    if group.exists and group.runs:
        folder = group.runs[0]
    if folder.exists:
        return folder.citations()
    with _named_here(item):
        read = group.config if group.exists else opt.read_config(Path(item), None, [])
        if code_names(read) and not may_import():
            raise HansaError(
                f"{item}: {NOT_LOADED}: {', '.join(code_names(read))}. Only `hansa run` and other commands that train "
                "import code; a run records its citations: hansa cite RUN."
            )
        return cited_works(read)


def _named_here(item: str) -> AbstractContextManager[None]:
    """Permit the code that the command line itself names, as MODULE:NAME; a file may not name any."""
    from hansa.config.import_path import allow_code, is_import_path

    return allow_code() if is_import_path(item) and not Path(item).exists() else nullcontext()


@report_errors
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
        texts = (f"{each:.3f}" if isinstance(each, float) else str(each) for each in numbers)
        rows.append((heading.replace("_", " "), ", ".join(texts)))
    show_table((), [*rows, *(row for result in results for row in result.rows())])


def _find_topology(name: str | None, target: float | None, clients: int, clusters: int) -> Topology:
    """The named topology, or the one whose rho is nearest to the target."""
    from hansa import gossip
    from hansa.config.components import KINDS, ConfigValueError
    from hansa.config.fields import ComponentField
    from hansa.config.yaml_text import parse_value
    from hansa.core.keys import Key

    if target is not None:
        groups = gossip.resolve(clusters, clients, Key(0))
        return gossip.with_rho(target, [len(group) for group in groups], name).topology
    if name is None:
        raise HansaError(f"expected a topology ({', '.join(KINDS['topology'].names)}) or --target-rho.")
    try:
        with _named_here(name):
            graph: Topology = ComponentField(gossip.Topology).build(parse_value(name, "topology"))
    except ConfigValueError as error:
        raise HansaError(error.message) from error
    return graph


@config.command("schema")
@report_errors
def config_schema() -> None:
    """Print the JSON Schema of configurations, for editors."""
    from hansa.config import json_schema

    print(json.dumps(json_schema(), indent=2, allow_nan=False))


@config.command("show")
@report_errors
def config_show(
    path: Annotated[Path, typer.Argument(help="Configuration file, preset, or MODULE:FUNCTION.")],
    sets: opt.Sets = None,
) -> None:
    """Check a configuration and print it with all defaults.

    Also prints the composition of the method. Code that the file names is not imported: its components are not checked.
    """
    from hansa.config import build_algorithm, code_names, to_yaml
    from hansa.config.import_path import NOT_LOADED

    with _named_here(str(path)):
        read = opt.read_config(path, None, opt.changes(sets))
        code = [] if may_import() else code_names(read)
        comments = [f"{NOT_LOADED}: {', '.join(code)}"] if code else [f"composition: {build_algorithm(read)!r}"]
    print(to_yaml(read, comments), end="")


@config.command("example")
@report_errors
def config_example() -> None:
    """Print an example configuration."""
    print(EXAMPLE, end="")
