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
from hansa.cli.run import Device, Quiet, Rounds, Seed, Seeds, Sets, Workers, changes
from hansa.cli.run_batch import entries_of
from hansa.cli.transfer_config import put_method

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.study.report import Entry, Grid, Holdings, Section, Standing

Report = Annotated[Path, typer.Option("--report", help="Where the page of curves goes.")]


@guarded
def compare(
    runs: Annotated[
        list[str], typer.Argument(help="YAML files, folders of runs, names of presets, or MODULE:FUNCTION of yours.")
    ],
    base: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="A YAML file whose setting the presets share, as far as each understands it."
        ),
    ] = None,
    sets: Sets = None,
    rounds: Rounds = None,
    seed: Seed = None,
    seeds: Seeds = None,
    workers: Workers = None,
    device: Device = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where new runs are kept.")] = Path("runs/compare"),
    report: Report = Path("report.html"),
    quiet: Quiet = False,
) -> None:
    """Run what has not been run yet, rank all by accuracy, and write a page with their curves."""
    from hansa.study.report.run_discovery import fresh_name

    asked = changes(sets, rounds, seed, workers, seeds, device)
    folders = [word for word in runs if is_made(word)]
    made, problems = readable(folders, alone=len(folders) == len(runs))
    found: dict[str, Config | Entry] = dict(made)
    for place, word in enumerate(runs):
        if word not in folders:
            config = _config(word, base, asked)
            name = config.title if Path(word).is_file() else word
            found[fresh_name(name, f"{name} {place + 1}", found)] = config
    entries = entries_of(found, folder, quiet)
    show(entries, report, title="Federated runs compared", problems=problems)


@guarded
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    page: Annotated[Path, typer.Option("--out", "-o", help="Where the page goes.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its heading.")] = "Federated runs",
) -> None:
    """Write a page with the curves, numbers and configurations of finished or unfinished runs, seeds put together."""
    found, problems = readable(runs)
    show(list(found.values()), page, title=title, problems=problems)


@guarded
def demo(
    tiny: Annotated[bool, typer.Option(help="Two rounds on a tenth of the clients: seconds, for a test.")] = False,
    seed: Seed = None,
    seeds: Seeds = None,
    workers: Workers = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where the runs are kept.")] = Path("runs/demo"),
    page: Report = Path("report.html"),
    quiet: Quiet = False,
) -> None:
    """Compare methods on the embedded data, which takes some minutes on two cores, and write report.html."""
    from hansa.cli.demo import LEAD, TITLE, configs, facts, holdings

    asked = configs(tiny, changes(None, None, seed, workers, seeds))
    entries = entries_of(dict(asked), folder, quiet, overwrite=True)
    first = next(iter(asked.values()))
    show(entries, page, title=TITLE, lead=LEAD, facts=facts(first), held=holdings(first), cited=list(asked.values()))


def show(
    entries: Sequence[Entry],
    page: Path,
    *,
    title: str,
    lead: str = "",
    facts: Sequence[str] = (),
    held: Holdings | None = None,
    cited: Sequence[Config] = (),
    problems: Sequence[str] = (),
) -> None:
    """Print the ranked table and write the page."""
    from hansa.study import report

    target = report.common_target(entries)
    console = out()
    console.print(ranked_table(report.rank(entries, target), target, console))
    write_page(entries, page, title=title, lead=lead, facts=facts, held=held, cited=cited, problems=problems)
    out().print(f"\nreport: {page.resolve().as_uri()}", markup=False, soft_wrap=True)


def write_page(
    entries: Sequence[Entry],
    page: Path,
    *,
    title: str,
    lead: str = "",
    facts: Sequence[str] = (),
    held: Holdings | None = None,
    cited: Sequence[Config] = (),
    problems: Sequence[str] = (),
    published: Sequence[Grid] = (),
    sections: Sequence[Section] = (),
) -> None:
    """The page of some entries, with the citations of all parts in use; `hansa.study.report.page` has the words."""
    from hansa.config import cited_by
    from hansa.core.citations import entries as bibtex
    from hansa.study import report

    keys = [key for config in cited for key in cited_by(config)] if cited else _cited(entries)
    citations = bibtex(keys)
    words = {"title": title, "lead": lead, "facts": facts, "holdings": held, "citations": citations}
    report.write(page, entries, **words, problems=problems, published=published, sections=sections)


def _cited(entries: Sequence[Entry]) -> list[str]:
    """What the entries cite. Code that they name, and that did not run here, is not run for its citations."""
    from hansa.config import cited_by, from_text, parse
    from hansa.config.registry.import_path import unknown_code

    found = []
    for entry in entries:
        foreign = unknown_code(parse(entry.config).data)
        if foreign:
            err().print(f"{entry.name}: not cited, for it names code, {', '.join(foreign)}.", markup=False)
        elif entry.config:
            found += cited_by(from_text(entry.config))
    return found


def ranked_table(standings: Sequence[Standing], target: float | None, console: Console) -> Table:
    """The ranking for the terminal, the best of each column in green; columns that do not fit are left to the page."""
    from hansa.study.report.ranking import columns

    shown = columns(standings, target)
    unbounded = console.options.update(width=10_000)
    for key in (*_DISPENSABLE, None):
        table = _ranked_table(standings, shown)
        if key is None or Measurement.get(console, unbounded, table).maximum <= console.width:
            break
        shown = [column for column in shown if column[1] != key]
    return table


_DISPENSABLE = (
    "wall_seconds", "last5_test_loss", "down_bits", "best_test_accuracy", "peer_bits", "lost", "last5_client_accuracy",
    "last5_client_loss",
)  # fmt: skip
"""What a narrow terminal does without, first to last."""


def _ranked_table(standings: Sequence[Standing], shown: Sequence[tuple[str, str, Any, bool]]) -> Table:
    from hansa.study.report.ranking import QUIET, cell

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
            text = cell(standing, key, write)
            cells.append(f"[green]{text}[/]" if key in best and standing.numbers.get(key) == best[key] else text)
        seeds = f" [dim]({len(standing.entry.members)} seeds)[/]" if standing.entry.members else ""
        table.add_row(str(position), escape(standing.entry.name) + seeds, *cells)
    return table


def is_made(path: Path | str) -> bool:
    """Whether this is the folder of a run, or of several seeds."""
    from hansa.study.report.run_discovery import is_run

    return is_run(Path(path))


def readable(folders: Sequence[Path | str], alone: bool = True) -> tuple[dict[str, Entry], list[str]]:
    """The entries of the folders that can be read, and what is wrong with the others, which is also told here. An
    error if none can be and they are ``alone``."""
    from hansa.core.errors import HansaError
    from hansa.study.report import run_discovery

    found, problems = run_discovery.read([Path(folder) for folder in folders])
    if problems and not found and alone:
        raise HansaError(problems[0])
    for problem in problems:
        err().print(f"[yellow]left out:[/] {escape(problem)}", soft_wrap=True)
    return {entry.name: entry for entry in found}, problems


def _config(word: str, base: Path | None, asked: Sequence[str]) -> Config:
    """A file as it is; a preset's name, or MODULE:FUNCTION, on its own or on top of a shared file."""
    from hansa.config import check, from_preset, load, read
    from hansa.config.registry import KINDS
    from hansa.core.errors import HansaError, suggestion

    if Path(word).is_file():
        return load(word, asked)
    if not KINDS["preset"].knows(word):
        known = suggestion(word, KINDS["preset"].names)
        raise HansaError(f"{word}: neither a file, nor the folder of a run, nor a preset. {known}")
    if base is None:
        return from_preset(word, asked)
    document = read(base)
    if dropped := put_method(document, word):
        err().print(f"{word}: not taken from {base}: {', '.join(dropped)}", style="dim", markup=False, soft_wrap=True)
    return check(document, asked)
