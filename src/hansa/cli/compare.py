"""``hansa compare``, ``hansa report`` and ``hansa demo``: several runs side by side, in a table and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from hansa.cli.console import err, guarded, out
from hansa.cli.run import Quiet, Rounds, Seed, Sets, Workers, changes, follow

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.report import Entry, Holdings, Standing

METHOD = ("name", "algorithm", "server", "gossip", "compress", "uplink", "downlink", "aggregate", "channels")
"""What is a method's own: rates that suit one server are nonsense for another."""

Report = Annotated[Path, typer.Option("--report", help="Where the page of curves goes.")]


@guarded
def compare(
    runs: Annotated[
        list[str], typer.Argument(help="YAML files, folders of runs, names of presets, or MODULE:FUNCTION of yours.")
    ],
    base: Annotated[
        Path | None, typer.Option("--config", "-c", help="A YAML file whose setting the presets share, not its method.")
    ] = None,
    sets: Sets = None,
    rounds: Rounds = None,
    seed: Seed = None,
    workers: Workers = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where new runs are kept.")] = Path("runs/compare"),
    report: Report = Path("report.html"),
    quiet: Quiet = False,
) -> None:
    """Run what has not been run yet, rank all by accuracy, and write a page with their curves."""
    from hansa.report import Entry
    from hansa.runs.folder import RunFolder

    asked = changes(sets, rounds, seed, workers)
    found: dict[str, Config | Entry] = {}
    for place, word in enumerate(runs):
        if RunFolder(word).exists:
            entry = Entry.of_folder(word)
            found[_fresh_name(entry.name, Path(word).name, found)] = entry
        else:
            config = _config(word, base, asked)
            name = config.title if Path(word).is_file() else word
            found[_fresh_name(name, f"{name} {place + 1}", found)] = config
    entries = carry_out_all(found, folder, quiet)
    show(entries, report, title="Federated runs compared")


@guarded
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    page: Annotated[Path, typer.Option("--out", "-o", help="Where the page goes.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its heading.")] = "Federated runs",
) -> None:
    """Write a page with the curves, numbers and configurations of finished or unfinished runs."""
    from hansa.report import Entry

    found: dict[str, Any] = {}
    for path in runs:
        entry = Entry.of_folder(path)
        found[_fresh_name(entry.name, path.name, found)] = entry
    show([_named(entry, name) for name, entry in found.items()], page, title=title)


@guarded
def demo(
    tiny: Annotated[bool, typer.Option(help="Two rounds on a tenth of the clients: seconds, for a test.")] = False,
    seed: Seed = None,
    workers: Workers = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where the runs are kept.")] = Path("runs/demo"),
    page: Report = Path("report.html"),
    quiet: Quiet = False,
) -> None:
    """Compare methods on the embedded data in under two minutes, and write report.html."""
    from hansa.cli.demo import LEAD, TITLE, configs, facts, holdings

    asked = configs(tiny, changes(None, None, seed, workers))
    entries = carry_out_all(dict(asked), folder, quiet, overwrite=True)
    first = next(iter(asked.values()))
    show(entries, page, title=TITLE, lead=LEAD, facts=facts(first), held=holdings(first), cited=list(asked.values()))


def carry_out_all(
    found: dict[str, Config | Entry], folder: Path, quiet: bool, *, overwrite: bool = False
) -> list[Entry]:
    """Run those that are configurations, one after the other; the others have been run."""
    from hansa.cli.progress import Stopper, progress
    from hansa.config import Config
    from hansa.report import Entry
    from hansa.runs.experiment import Experiment
    from hansa.runs.folder import slug

    console = err()
    entries = []
    with Stopper(console) as stopper, progress(console, quiet) as shown:
        for name, item in found.items():
            if not isinstance(item, Config):
                entries.append(_named(item, name))
                continue
            config = item.model_copy(update={"name": name})
            made = Experiment.new(config, folder / slug(name), overwrite=overwrite, numbered=not overwrite)
            place = made.folder.path
            follow(made, shown, stopper)
            if stopper.code:
                console.print(f"stopped: `hansa resume {place}` goes on with {name}.", markup=False, soft_wrap=True)
                raise typer.Exit(stopper.code)
            entries.append(Entry.of_folder(place, name))
    return entries


def show(
    entries: Sequence[Entry],
    page: Path,
    *,
    title: str,
    lead: str = "",
    facts: Sequence[str] = (),
    held: Holdings | None = None,
    cited: Sequence[Config] = (),
) -> None:
    """Print the ranked table and write the page."""
    from hansa import report
    from hansa.citations import bibtex
    from hansa.config import algorithm, from_text

    target = report.common_target(entries)
    console = out()
    console.print(ranked_table(report.rank(entries, target), target, console))
    configs = cited or [from_text(entry.config) for entry in entries if entry.config]
    citations = bibtex([algorithm(config) for config in configs])
    report.write(page, entries, title=title, lead=lead, facts=facts, target=target, holdings=held, citations=citations)
    out().print(f"\nreport: {page.resolve().as_uri()}", markup=False, soft_wrap=True)


def ranked_table(standings: Sequence[Standing], target: float | None, console: Console) -> Table:
    """The ranking for the terminal, the best of each column in green; columns that do not fit are left to the page."""
    from hansa.report.page import columns

    shown = columns(standings, target)
    unbounded = console.options.update(width=10_000)
    for key in (*_DISPENSABLE, None):
        table = _ranked_table(standings, shown)
        if key is None or Measurement.get(console, unbounded, table).maximum <= console.width:
            break
        shown = [column for column in shown if column[1] != key]
    return table


_DISPENSABLE = ("wall_seconds", "last5_test_loss", "down_bits", "best_test_accuracy", "peer_bits", "lost")
"""What a narrow terminal does without, first to last."""


def _ranked_table(standings: Sequence[Standing], shown: Sequence[tuple[str, str, Any, bool]]) -> Table:
    from hansa.report.page import QUIET

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("#", justify="right", style="dim", no_wrap=True)
    table.add_column("method", style="bold", no_wrap=True)
    best: dict[str, Any] = {}
    for heading, key, _, smaller in shown:
        table.add_column(heading, justify="right", no_wrap=True)
        values = [s.numbers[key] for s in standings if s.numbers.get(key) is not None]
        if len(set(values)) > 1 and key not in QUIET:
            best[key] = min(values) if smaller else max(values)
    for position, standing in enumerate(standings, start=1):
        cells = []
        for _, key, write, _ in shown:
            value = standing.numbers.get(key)
            text = write(value) if value is not None or key == "rounds_to_target" else "–"
            cells.append(f"[green]{text}[/]" if key in best and value == best[key] else text)
        table.add_row(str(position), escape(standing.entry.name), *cells)
    return table


def _config(word: str, base: Path | None, asked: Sequence[str]) -> Config:
    """A file as it is; a preset's name, or MODULE:FUNCTION, on its own or on top of a shared file."""
    from hansa.config import check, from_preset, load, read
    from hansa.errors import HansaError, near
    from hansa.registry import KINDS

    if Path(word).is_file():
        return load(word, asked)
    if not KINDS["preset"].knows(word):
        known = near(word, KINDS["preset"].names)
        raise HansaError(f"{word}: neither a file, nor the folder of a run, nor a preset. {known}")
    if base is None:
        return from_preset(word, asked)
    document = read(base)
    for section in METHOD:
        document.data.pop(section, None)
    local = document.data.get("local")
    if isinstance(local, dict):
        for key in ("solver", "optimizer"):
            local.pop(key, None)
    document.put(("algorithm", "preset"), word, f"preset {word}")
    return check(document, asked)


def _fresh_name(name: str, other: str, taken: dict[str, Any]) -> str:
    if name not in taken:
        return name
    number = 2
    while other in taken:
        other = f"{name} {number}"
        number += 1
    return other


def _named(entry: Entry, name: str) -> Entry:
    from dataclasses import replace

    return replace(entry, name=name)
