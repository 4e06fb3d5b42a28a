"""The page of the leaderboard, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from hansa.runs.paired import paired_interval
from hansa.runs.seed_statistics import SeedStatistics, seed_statistics
from hansa.study.leaderboard.entry import Entry, EntryRow
from hansa.study.recipes.recipe import RecipeMeasure, library
from hansa.study.report.formats import format_bits, format_duration

HEAD = """# Leaderboard

Results of [recipes](reproduction.md), from files that anybody can send: see [how](#send-an-entry). This page is
built by `hansa leaderboard build` from `docs/leaderboard/`; nothing on it is written by hand. Every entry was
checked: its configurations have the recipe's data, model and rounds, its hashes fit, and no seed is missing.

- **rank** is by the mean over seeds. Rows whose paired difference from the best is within its 95% interval, or that
  have fewer than three seeds, are marked "undecided": these seeds do not show that they are worse.
- **bits** are all bits sent in a run, **time** its wall time on the machine that the entry names; times of
  different machines do not compare.
"""
TAIL = """## Send an entry

1. Run a recipe, or your own method in its setting, with all its seeds: `hansa reproduce cams-figure-4 --scale cpu`.
2. Write the entry: `hansa leaderboard entry cams-figure-4 --scale cpu --title "FedCAMS on two cores" --author
   "A. Name"`. It takes numbers, bits, times and the digests of data, partitions and models from the run folders.
3. Check it: `hansa leaderboard check docs/leaderboard/cams-figure-4.json`.
4. Send it as a pull request that adds the file to `docs/leaderboard/`. `hansa leaderboard build` writes this page;
   a test checks both.

For a method of your own, copy the recipe's file, add a row with your configuration, and run that file; rows may use
any preset, component or rate, but the data, model and rounds of the recipe. The entry then names your rows. Its
configurations must name components that others can install.

A check shows mistakes, not lies: a seal can be computed anew. But a result can be repeated: the same configuration,
seed and platform give the same model, bit for bit, and the entry has its SHA-256. Maintainers repeat a run before
they merge an entry that comes first.
"""


class RankedRow(NamedTuple):
    """A row of a table of the leaderboard."""

    rank: int
    row: EntryRow
    entry: Entry
    statistics: SeedStatistics
    reached: bool
    """Whether all seeds reached the target, if the measure has one."""
    decided: bool
    """Whether it is worse than the best by more than chance explains."""


def leaderboard_page(entries: Sequence[Entry]) -> str:
    """Return the page of some checked entries.

    Args:
        entries: The entries, in any order.
    """
    boards: dict[tuple[str, str, str], list[tuple[EntryRow, Entry]]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.title, entry.sha256)):
        for row in entry.rows:
            boards.setdefault((entry.recipe, entry.scale, row.column), []).append((row, entry))
    order = list(library())
    parts = [HEAD]
    last = ""
    for recipe, scale, column in sorted(boards, key=lambda board: (order.index(board[0]), board[1:])):
        title = f"{recipe}, scale {scale}"
        if title != last:
            known = library()[recipe]
            reduction = known.at(scale).reduction
            reduced = f" **Reduced at this scale:** {reduction}" if reduction else ""
            parts.append(f"## {title}\n\n{known.reference}: {known.summary}{reduced}\n")
            last = title
        rows = boards[recipe, scale, column]
        name, measure = next(iter(library()[recipe].measured(scale).items()))
        parts.append("\n".join(_table(column, name, measure, rank_rows(rows, name, measure))) + "\n")
    parts += ["\n".join(["## Entries", "", *_sources(entries)]) + "\n", TAIL]
    return "\n".join(parts)


def rank_rows(rows: Sequence[tuple[EntryRow, Entry]], name: str, measure: RecipeMeasure) -> list[RankedRow]:
    """Rank rows by the mean over seeds of a measure; those of which a seed did not reach its target are last.

    Args:
        rows: The rows with their entries.
        name: The name of the measure.
        measure: The measure, which knows its direction.
    """
    sign = 1 if measure.smaller_is_better or measure.statistic in ("rounds_to", "hours_to", "jitter") else -1
    values = [{one.seed: one.values[name] for one in row.seeds} for row, _ in rows]
    reached = [all(name not in one.not_reached for one in row.seeds) for row, _ in rows]
    order = sorted(range(len(rows)), key=lambda place: (not reached[place], sign * fmean(values[place].values())))
    best = values[order[0]]
    places = []
    for rank, place in enumerate(order, 1):
        row, entry = rows[place]
        statistics = seed_statistics(list(values[place].values()))
        assert statistics is not None
        decided = reached[place] and _worse(values[place], best, sign)
        places.append(RankedRow(rank, row, entry, statistics, reached[place], decided))
    return places


def _worse(values: Mapping[int, float], best: Mapping[int, float], sign: int) -> bool:
    shared = sorted(values.keys() & best.keys())
    if not shared:
        return False
    return sign * paired_interval([values[seed] for seed in shared], [best[seed] for seed in shared]).sign > 0


def _table(column: str, name: str, measure: RecipeMeasure, places: Sequence[RankedRow]) -> Iterator[str]:
    unit = f" ({measure.unit})" if measure.unit else ""
    yield f"| rank | {_cell(column) or 'method'} | {name}{unit} | smallest to largest | seeds | bits | time | entry |"
    yield "|---:|---|---:|---:|---:|---:|---:|---|"
    for place in places:
        row, spread = place.row, place.statistics
        note = "" if place.rank == 1 or place.decided else " (undecided)"
        note = note if place.reached else " (target not reached by all seeds)"
        cells = [
            str(place.rank),
            _cell(row.row) + note,
            f"{'' if place.reached else 'over '}{spread.mean:.4g} ± {spread.std:.2g}",
            f"{spread.min:.4g} to {spread.max:.4g}",
            str(len(row.seeds)),
            format_bits(fmean(one.bits for one in row.seeds)),
            format_duration(fmean(one.seconds for one in row.seeds)),
            f"{_cell(place.entry.title)}, `{place.entry.sha256[:8]}`",
        ]
        yield f"| {' | '.join(cells)} |"


def _sources(entries: Sequence[Entry]) -> Iterator[str]:
    yield "| entry | recipe | by | machine | software |"
    yield "|---|---|---|---|---|"
    for entry in sorted(entries, key=lambda entry: (entry.recipe, entry.title, entry.sha256)):
        machine, software = entry.hardware, entry.software
        title = f"[{_cell(entry.title)}]({entry.url})" if entry.url else _cell(entry.title)
        versions = ", ".join(f"{name} {software[name]}" for name in ("hansa", "torch") if name in software)
        yield (
            f"| {title}, `{entry.sha256[:8]}` | {entry.recipe} | {_cell(', '.join(entry.authors))} | "
            f"{_cell(machine.processor)}, {machine.cores} cores, {_cell(machine.system)} | {_cell(versions)} |"
        )


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("[", "\\[").replace("`", "'")
