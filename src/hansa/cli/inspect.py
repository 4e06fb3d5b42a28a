"""Commands that only look: ``show``, ``presets``, ``parts``, ``cite``, ``topology`` and ``config``."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hansa.cli.console import guarded, out
from hansa.cli.run import Sets, changes, read_config, summary_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hansa.algorithm import Algorithm
    from hansa.config.registry import Kind
    from hansa.gossip import Topology
    from hansa.runs.metrics_log import Columns

Json = Annotated[bool, typer.Option("--json", help="As JSON, for other programs.")]
config = typer.Typer(no_args_is_help=True, help="Configurations: check, resolve, describe.")

_EXAMPLE = """\
# A run of FedAMS on the embedded data. Every key may be changed on the command line: hansa run FILE --set local.lr=0.1
# `hansa config schema > hansa.schema.json` makes editors complete and check this file.
name: fedams on fashion-mini
seed: 0
rounds: 60
data: {name: fashion-mini, clients: 50, partition: {kind: dirichlet, alpha: 0.3}}
model: cnn_29k
algorithm: fedams                              # or {preset: fedprox, mu: 0.01}: a method and words of its own
local: {lr: 0.05, steps: 24, batch_size: 50}   # lr may be {kind: cosine, lr: 0.05, rounds: 60}
server: {lr: 0.03, eps: 1e-4}
sample: {participation: 0.1}
evaluate: {every: 1, target: 0.8}
"""


@guarded
def show(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    clients: Annotated[
        bool, typer.Option("--clients", help="Who was served how: a row a client, the worst first.")
    ] = False,
    as_json: Json = False,
) -> None:
    """How a run stands: its numbers, its curve, its last rounds; or the seeds of one."""
    from hansa.runs import metrics
    from hansa.runs.folder import MODEL, RunFolder
    from hansa.runs.seed_group import GroupFolder
    from hansa.study.report import formats

    if (group := GroupFolder(folder)).exists:
        from hansa.cli.run_batch import show_group
        from hansa.study.report import Entry

        show_group(group, Entry.of_group(folder), as_json)
        return
    found = RunFolder.holding(folder)
    if clients:
        from hansa.cli.clients import show_clients

        show_clients(found.by_client(), str(found), as_json)
        return
    read, history = found.config, found.numbers
    summary = found.summary_of(history)
    if as_json:
        out().print_json(json.dumps(metrics.plain({"config": read.model_dump(), "summary": summary})))
        return
    console = out()
    console.print(summary_table(str(found), summary))
    if (found / MODEL).is_file():
        found.read_model()  # proves that it is the one that was written
    metric = next((m for m in (metrics.ACCURACY, "test_loss", "loss", "train_loss") if _known(history, m)), None)
    if metric is not None:
        curve = [value for value in history.floats(metric) if math.isfinite(value)]
        console.print(
            f"\n{escape(metric.replace('_', ' '))} [cyan]{sparkline(curve, 60, console.options.ascii_only)}[/]"
        )
    table = Table(box=None, pad_edge=False, header_style="dim")
    columns = (
        "round", metrics.ACCURACY, "test_loss", "client_accuracy", "client_accuracy_worst", "personal_accuracy",
        "train_loss", "diversity", "participants", "lost",
    )  # fmt: skip
    shown = [name for name in columns if _known(history, name)]
    for name in shown:
        table.add_column(name.replace("_", " "), justify="right")
    for record in history[-5:]:
        table.add_row(*(_cell(name, record.get(name), formats) for name in shown))
    if shown:
        console.print(table)


@guarded
def presets(
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None,
    as_json: Json = False,
) -> None:
    """The methods, or all that one of them may be told."""
    from hansa.config.registry import KINDS, Misfit, plugins
    from hansa.config.registry.signatures import first_line
    from hansa.core.errors import HansaError

    kind = KINDS["preset"]
    if name is not None:
        try:
            _one_preset(kind.find(name), as_json)
        except Misfit as misfit:
            raise HansaError(misfit.message) from misfit
        return
    known = dict(kind.items())
    if as_json:
        out().print_json(json.dumps({each: first_line(made) for each, made in known.items()}))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("preset", style="bold", no_wrap=True)
    table.add_column("what it is")
    for each, made in known.items():
        table.add_row(each, escape(first_line(made) + _origin(kind, each)))
    out().print(table)
    brought = [f"{plugin.name} ({plugin.kind})" for plugin in plugins.installed()]
    if brought:
        out().print(f"\nplug-ins bring {', '.join(brought)}.", markup=False)
    out().print("\n`hansa presets NAME` says what one may be told, `hansa parts` what they are made of.", style="dim")


@guarded
def parts(
    what: Annotated[str | None, typer.Argument(help="A kind of parts, or a part, by name.")] = None,
    as_json: Json = False,
) -> None:
    """The parts that methods are made of, Hansa's and those of plug-ins, by kind."""
    from hansa.config.registry import KINDS, plain, signature_of, strays
    from hansa.config.registry.plugins import warn_once
    from hansa.config.registry.signatures import first_line
    from hansa.core.errors import HansaError, suggestion

    for stray in strays():
        warn_once(stray)
    chosen = {kind.name: dict(kind.items()) for kind in KINDS.values() if kind.name != "preset"}
    if what is not None:
        wanted = plain(what)
        alone = {kind: {wanted: known[wanted]} for kind, known in chosen.items() if wanted in known}
        chosen = {wanted: chosen[wanted]} if wanted in chosen else alone
        if not chosen:
            names = [*KINDS, *(name for kind in KINDS.values() for name in kind.names)]
            raise HansaError(f"{what}: neither a kind of parts nor a part. {suggestion(wanted, set(names))}")
    if as_json:
        told = {kind: {name: first_line(made) for name, made in known.items()} for kind, known in chosen.items()}
        out().print_json(json.dumps(told))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading, style in (("kind", "dim"), ("part", "bold"), ("may be told", None), ("what it is", None)):
        table.add_column(heading, style=style)
    for kind, known in chosen.items():
        for place, (name, made) in enumerate(known.items()):
            arguments = ", ".join(signature_of(made).arguments)
            described = first_line(made) + _origin(KINDS[kind], name)
            table.add_row("" if place else kind, name, escape(arguments), escape(described))
    out().print(table)


@guarded
def cite(
    what: Annotated[list[str], typer.Argument(help="Presets, YAML files or folders of runs.")],
) -> None:
    """BibTeX of exactly the parts in use."""
    from hansa.config import cited_by, to_data
    from hansa.config.registry.import_path import unknown_code
    from hansa.core.citations import entries
    from hansa.core.errors import HansaError
    from hansa.runs.folder import CONFIG, RunFolder
    from hansa.runs.seed_group import GROUP, GroupFolder

    keys: list[str] = []
    for word in what:
        known = ((RunFolder.holding(word), CONFIG), (GroupFolder(word), GROUP))
        folder, file = next(((found, name) for found, name in known if found.exists), (None, ""))
        read = read_config(Path(word), None, []) if folder is None else folder.config
        foreign = unknown_code(to_data(read)) if folder is not None and Path(word).is_dir() else []
        if foreign:
            raise HansaError(
                f"{word}: names code, {', '.join(foreign)}, which is not run for looking at a run. "
                f"If you trust it: hansa cite {Path(word) / file}."
            )
        keys += cited_by(read)
    out().print(entries(keys), markup=False, soft_wrap=True)


@guarded
def topology(
    name: Annotated[str | None, typer.Argument(help="ring, complete, torus, star, erdos-renyi, ...")] = None,
    clients: Annotated[int, typer.Option("--clients", "-n", help="Clients in all.", min=1)] = 32,
    clusters: Annotated[int, typer.Option("--clusters", "-k", help="Clusters, as equal as can be.", min=1)] = 1,
    participation: Annotated[float | None, typer.Option(help="The share of each cluster that reports.")] = None,
    reporters: Annotated[int | None, typer.Option("--reporters", "-m", help="Or how many of each.")] = None,
    parameters: Annotated[
        int, typer.Option("--parameters", "-d", help="Numbers a message carries.", min=1)
    ] = 1_000_000,
    options: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Of the topology, such as p=0.3.")
    ] = None,
    target_rho: Annotated[
        float | None, typer.Option(help="Find a graph with this rho, of the kind named or of any.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Local steps a round, for the theorems.", min=1)] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of the run, for the theorems.", min=1)] = None,
    svg: Annotated[Path | None, typer.Option(help="Also write the graph as a picture.")] = None,
    as_json: Json = False,
) -> None:
    """A gossip graph in numbers: how fast it averages, what it costs, whether more local steps pay."""
    from hansa import gossip

    graph = _graph(name, options or [], target_rho, clients, clusters)
    found = gossip.describe(
        graph,
        clients,
        clusters,
        reporters=reporters,
        participation=participation,
        dim=parameters,
        steps=steps,
        rounds=rounds,
    )
    if svg is not None:
        svg.write_text(gossip.svg(graph.sparse(max(found.sizes))), encoding="utf-8")
    if as_json:
        out().print_json(json.dumps(found.record()))
    else:
        out().print(found)


def _graph(name: str | None, options: Sequence[str], target: float | None, clients: int, clusters: int) -> Topology:
    """The topology that a command line names, or the one whose rho is nearest to the target."""
    from hansa import gossip
    from hansa.config.registry import KINDS, Misfit, slot
    from hansa.config.yaml_text import read_value
    from hansa.core.errors import HansaError
    from hansa.core.keys import Key

    if target is not None:
        if options:
            raise HansaError("--option and --target-rho: expected one of the two, the search finds the options.")
        groups = gossip.resolve(clusters, clients, Key(0))
        return gossip.with_rho(target, [len(group) for group in groups], name).topology
    if name is None:
        raise HansaError(f"which topology? One of {', '.join(KINDS['topology'].names)}; or --target-rho finds one.")
    told = {}
    for word in options:
        key, equals, value = word.partition("=")
        if not equals:
            raise HansaError(f"--option {word}: expected NAME=VALUE, such as p=0.3.")
        told[key] = read_value(value, f"--option {word}")
    try:
        graph: Topology = slot(gossip.Topology).make(name, told)
    except Misfit as misfit:
        raise HansaError(misfit.message) from misfit
    return graph


@config.command("schema")
@guarded
def config_schema() -> None:
    """JSON Schema of a configuration, for editors."""
    from hansa.config import json_schema

    print(json.dumps(json_schema(), indent=2, allow_nan=False))


@config.command("show")
@guarded
def config_show(
    path: Annotated[Path, typer.Argument(help="A YAML file, a preset's name, or MODULE:FUNCTION of yours.")],
    sets: Sets = None,
) -> None:
    """Check a configuration and print it resolved, with the composition it stands for and the Python that makes it."""
    from hansa.config import composition, to_text

    read = read_config(path, None, changes(sets))
    print(to_text(read, composition(read).remarks), end="")


@config.command("example")
@guarded
def config_example() -> None:
    """A configuration to begin with."""
    print(_EXAMPLE, end="")


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """A curve in one line of text.

    >>> sparkline([0, 1, 2, 3], 4), sparkline([0, 1, 2, 3], 4, ascii_only=True)
    ('▁▃▆█', '_-*#')
    """
    blocks = "_.-=+*%#" if ascii_only else "▁▂▃▄▅▆▇█"
    if not values:
        return ""
    count = min(width, len(values))
    picked = [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]
    low, high = min(picked), max(picked)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[int((value - low) * scale + 0.5)] for value in picked)


def _one_preset(preset: Callable[..., Algorithm], as_json: bool) -> None:
    from hansa.config.arguments import COMPOSED, SAMPLING, TABLES, own_words, title, words
    from hansa.config.registry.signatures import first_line
    from hansa.core.citations import citations

    known, own = words(preset), own_words(preset)
    sections = {
        section: [key for key, word in table.items() if word in known or section in COMPOSED]
        for section, table in TABLES.items()
    }
    defaults = {word.name: repr(word.default) for word in own.values() if word.default is not inspect.Parameter.empty}
    made = preset()
    if as_json:
        described = {"name": title(preset), "own": list(own), "sections": sections, "composition": repr(made)}
        out().print_json(json.dumps(described))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("preset", f"[bold]{title(preset)}[/]  {escape(first_line(preset))}")
    if own:
        told = ", ".join(f"{word}={defaults[word]}" if word in defaults else word for word in own)
        table.add_row("algorithm", escape(told))
    for section, keys in sections.items():
        if keys:
            table.add_row(section, ", ".join(keys))
    if known.keys() & set(SAMPLING):
        table.add_row("sample", "participation, count, or another sampler")
    table.add_row("composition", escape(repr(made)))
    table.add_row("cites", ", ".join(citations(made)) or "nothing")
    out().print(table)


def _origin(kind: Kind, name: str) -> str:
    """Which package brings a part, if it is not Hansa."""
    return f" ({kind.plugins[name].package})" if name in kind.plugins else ""


def _known(history: Columns, name: str) -> bool:
    return name in history.names


def _cell(name: str, value: Any, formats: Any) -> str:
    if value is None:
        return "–"
    if name.endswith(("accuracy", "accuracy_worst")):
        return str(formats.percent(value))
    return str(value) if isinstance(value, int) else str(formats.number(value))
