"""Carrying out configurations one after the other, each with all its seeds: what is finished is not run again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hansa.cli.console import err, out
from hansa.cli.run import follow, summary_table

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.runs.experiment import Experiment
    from hansa.runs.folder import RunFolder
    from hansa.runs.seed_group import GroupFolder
    from hansa.study.report import Entry
    from hansa.study.report.progress import Bars, Lines, Silence, Stopper


def entries_of(
    asked: Mapping[str, Config | Entry], folder: Path, quiet: bool, *, overwrite: bool = False
) -> list[Entry]:
    """An entry for each name: configurations are run, with ``overwrite`` anew; what has been run is taken as it is."""
    from dataclasses import replace

    from hansa.config import Config
    from hansa.study.report import Entry
    from hansa.study.report.progress import Stopper, progress

    if not any(isinstance(item, Config) for item in asked.values()):  # nothing to run, and no torch to wait for
        return [replace(item, name=name) for name, item in asked.items() if isinstance(item, Entry)]
    from hansa.engine import keep_workers
    from hansa.runs.run_cache import each_made_or_begun

    console = err()
    found = []
    with keep_workers(), Stopper(console) as stopper, progress(console, quiet) as shown:
        for name, item in asked.items():
            if not isinstance(item, Config):
                found.append(replace(item, name=name))
                continue
            config = item.model_copy(update={"name": name})
            made = each_made_or_begun(config, folder, name, overwrite=overwrite)
            runs = carry_out_each(made, config.seeds is not None, shown, stopper)
            found.append(Entry.of_seeds(name, [Entry.of_folder(run.path) for run in runs]))
    return found


def carry_out_each(
    made: Iterable[RunFolder | Experiment],
    several: bool,
    shown: Bars | Lines | Silence,
    stopper: Stopper,
    track: Sequence[str] = (),
) -> list[RunFolder]:
    """Run those that are not finished; a stop ends the command, and says that it may be given again."""
    from hansa.runs.experiment import Experiment

    found = []
    for each in made:
        if not isinstance(each, Experiment):
            found.append(each)
            continue
        config = each.config
        follow(each, shown, stopper, track, f"{config.title}, seed {config.seed}" if several else config.title)
        if stopper.code:
            told = f"stopped: the same command goes on with the rest; `hansa resume {each.folder}` with {config.title}."
            err().print(told, markup=False, soft_wrap=True)
            raise typer.Exit(stopper.code)
        found.append(each.folder)
    return found


def carry_out_group(
    config: Config,
    group: GroupFolder,
    quiet: bool,
    track: Sequence[str] = (),
    *,
    overwrite: bool = False,
    fallback: bool = False,
    accept: Sequence[str] = (),
) -> None:
    """Run all seeds of a configuration in a folder of theirs, and print what came out as one."""
    from hansa.engine import keep_workers
    from hansa.runs.run_cache import seeds_made_or_begun
    from hansa.study.report import Entry
    from hansa.study.report.progress import Stopper, progress

    group.write_config(config)
    console = err()
    with keep_workers(), Stopper(console) as stopper, progress(console, quiet) as shown:
        made = seeds_made_or_begun(config, group, overwrite=overwrite, fallback=fallback, accept=accept)
        runs = carry_out_each(made, True, shown, stopper, track)
    show_group(group, Entry.of_seeds(config.title, [Entry.of_folder(run.path) for run in runs]))


def show_group(group: GroupFolder, entry: Entry, as_json: bool = False) -> None:
    """The numbers of a group over its seeds, and a line a seed."""
    import json

    from rich.table import Table

    from hansa.runs.metrics import plain
    from hansa.runs.seed_statistics import combined
    from hansa.study.report import formats, rank
    from hansa.study.report.entries import ranking_metric

    numbers, spreads = combined(entry.histories, group.config.evaluate.target)
    if as_json:
        told = {"config": group.config.model_dump(), "seeds": {str(run.seed): run.summary for run in entry.runs}}
        over = {name: apart._asdict() for name, apart in spreads.items()}
        out().print_json(json.dumps(plain({**told, "summary": numbers, "over_seeds": over})))
        return
    status = dict.fromkeys(str(run.summary.get("status", "?")) for run in entry.runs)
    title = f"{group}, {len(entry.runs)} seeds"
    out().print(summary_table(title, {**numbers, "status": ", ".join(status)}, spreads))
    metric = f"last5_{ranking_metric(rank([entry]))}"
    write = formats.percent if metric.endswith("accuracy") else formats.number
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("seed", "rounds", metric.removeprefix("last5_").replace("_", " "), "status"):
        table.add_column(heading, justify="left" if heading == "status" else "right")
    for run in entry.runs:
        of = run.summary
        table.add_row(str(run.seed), str(of["rounds"]), write(of.get(metric)), str(of.get("status", "?")))
    out().print(table)
