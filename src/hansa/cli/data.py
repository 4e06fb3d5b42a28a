"""``hansa data``: which sets there are, getting them, checking them, and who would hold what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from hansa.cli.console import FAILED, err, guarded, out

app = typer.Typer(no_args_is_help=True, help="Data sets: list, get, check, show.")
Folder = Annotated[
    Path | None, typer.Option("--folder", help="The data folder; by default HANSA_DATA or the cache folder.")
]
SHADES = " ·░▒▓█"
PLAIN = " .:+*#"


@app.command("list")
@guarded
def list_sets(
    folder: Folder = None,
    long: Annotated[bool, typer.Option("--long", "-l", help="With licences and addresses.")] = False,
) -> None:
    """All data sets, and which are here."""
    from hansa import data
    from hansa.data.loading import OWNED

    table = Table(box=None, pad_edge=False, header_style="dim")
    more = ("licence", "home") if long else ()
    for heading in ("name", "here", "input", "classes", "what it is", *more):
        table.add_column(heading, no_wrap=heading in ("name", "here", "input"))
    for name, entry in data.SOURCES.items():
        here = "[green]yes[/]" if data.present(name, folder) else "no"
        shape = " x ".join(map(str, entry.shape))
        told = (entry.title, *((entry.licence, entry.home) if long else ()))
        table.add_row(f"[bold]{name}[/]", here, shape, str(entry.classes), *map(escape, told))
    for name in data.names():
        if name in data.SOURCES:
            continue
        yours = name in OWNED
        first = OWNED[name] if yours else (getattr(data, name.replace("-", "_")).__doc__ or "").split("\n")[0]
        table.add_row(f"[bold]{name}[/]", "yours" if yours else "[green]made[/]", "", "", escape(first))
    out().print(table)
    out().print(f"\ndata folder: {data.data_folder(folder)}", markup=False, soft_wrap=True, style="dim")


@app.command("get")
@guarded
def get(
    names: Annotated[list[str], typer.Argument(help="Data sets to download.")],
    folder: Folder = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Download data sets from their official addresses: resumed where it broke off, verified by SHA-256."""
    from hansa import data

    for name in names:
        data.source(name)  # all names before the first byte
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=err(),
        disable=quiet or not err().is_terminal,
    )
    for name in names:
        with bar:
            root = data.download(name, folder, _moves(bar))
        out().print(f"{name}: in {root}", markup=False, soft_wrap=True)


@app.command("check")
@guarded
def check(
    names: Annotated[list[str] | None, typer.Argument(help="By default all that seem to be here.")] = None,
    folder: Folder = None,
) -> None:
    """Read every file and compare it with its SHA-256; exit code 1 if one is missing or damaged."""
    from hansa import data

    chosen = [data.source(name).name for name in names or []] or [
        name for name in data.SOURCES if data.present(name, folder)
    ]
    wrong = 0
    colours = {"ok": "green", "missing": "yellow", "damaged": "red"}
    for name in chosen:
        for state in data.check(name, folder):
            out().print(
                f"[{colours[state.state]}]{state.state:8}[/] {escape(name)}  {escape(state.path)}", soft_wrap=True
            )
            if state.state != "ok":
                out().print(f"         {state.detail}", markup=False, soft_wrap=True, style="dim")
                wrong += 1
    if wrong:
        raise typer.Exit(FAILED)


@app.command("show")
@guarded
def show(
    name: Annotated[str, typer.Argument(help="A data set.")] = "fashion-mini",
    clients: Annotated[int | None, typer.Option("--clients", "-n", help="How many clients.", min=1)] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "-p", help="iid, '{kind: dirichlet, alpha: 0.1}', ...")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the partition.", min=0)] = 0,
    folder: Folder = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="Of the data set, such as target=y.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Also write the heat map as a picture.")] = None,
) -> None:
    """Draw who would hold which labels, and say how uneven that is."""
    from hansa.config import from_text
    from hansa.config.build import federated
    from hansa.data.sources import SOURCES
    from hansa.study.report.heatmap import heat_map

    asked = [f"data.name={name}", f"seed={seed}"]
    asked += [f"data.clients={clients}"] if clients is not None else []
    asked += [f"data.partition={partition}"] if partition is not None else []
    asked += [f"data.folder={folder}"] if folder is not None else []
    asked += [f"data.options.{word}" for word in option or []]
    held = federated(from_text("", asked))
    console = out()
    if held.classes is not None and held.targets.ndim == 1:
        counts = held.label_counts().tolist()
        known = SOURCES[held.name].class_names if held.name in SOURCES else ()
        labels = list(known) or [str(label) for label in range(held.classes)]
        console.print(heat_text(counts, labels, console.width, SHADES if console.encoding.startswith("utf") else PLAIN))
        if svg is not None:
            svg.write_text(heat_map(counts, labels).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    console.print(str(held.summary()), markup=False, soft_wrap=True)


def heat_text(counts: Sequence[Sequence[int]], labels: Sequence[str], width: int, shades: str = SHADES) -> Text:
    """A row a label, a column a client (as many as fit), the darker the more.

    >>> print(heat_text([[9, 0], [3, 9]], ["cat", "dog"], 40, PLAIN))
    cat  #+
    dog   #
    clients 0 to 1
    """
    name = max(map(len, labels)) + 2
    shown = counts[: max(1, width - name)]
    most = max((count for row in shown for count in row), default=0) or 1
    text = Text(no_wrap=True)
    for place, label in enumerate(labels):
        text.append(label.ljust(name), style="dim")
        for held in shown:
            level = 0 if held[place] == 0 else 1 + int((len(shades) - 2) * (held[place] / most) ** 0.5 + 0.5)
            text.append(shades[level], style="cyan")
        text.append("\n")
    more = f" of {len(counts)}" if len(shown) < len(counts) else ""
    text.append(f"clients 0 to {len(shown) - 1}{more}", style="dim")
    return text


def _moves(bar: Progress) -> Any:
    tasks: dict[str, Any] = {}

    def moved(file: str, done: int, total: int) -> None:
        if file not in tasks:
            tasks[file] = bar.add_task(file, total=total)
        bar.update(tasks[file], completed=done)

    return moved
