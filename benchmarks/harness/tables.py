"""The tables about Hansa alone, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

MEGABYTE = 1 << 20
Cell: TypeAlias = Callable[[Mapping[str, Any]], str]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _number(name: str, form: str, unit: float = 1.0) -> Cell:
    return lambda row: format(row[name] / unit, form) if name in row else ""


def _or_reason(cell: Cell) -> Cell:
    """The cell that shows why a row has no numbers."""
    return lambda row: row["reason"] or cell(row)


def _table(title: str, text: str, columns: Mapping[str, Cell]) -> Callable[[Sequence[Mapping[str, Any]]], list[str]]:
    def render(rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return [f"## {title}", text, table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])]

    return render


def _listed(title: str, text: str, columns: Mapping[str, tuple[str, str, float]], wanted: str = "") -> Any:
    """A table of rows by name.

    ``columns`` are heads with an entry, its format and its unit; the first also shows why there is no row. ``wanted``
    begins the last column's bounds, if there is one.
    """
    (first, entry), *others = columns.items()
    cells: dict[str, Cell] = {"": lambda row: row["what"], first: _or_reason(_number(*entry))}
    cells |= {name: _number(*entry) for name, entry in others}
    if wanted:
        cells["wanted"] = lambda row: f"{wanted} {row['target']:g}" if row.get("target") else ""
    return _table(title, text, cells)


def _scaled(title: str, text: str, *, ratio: bool) -> Any:
    """A table of points; ``ratio`` adds the processor time of a round in those of the first row."""
    columns: dict[str, Cell] = {
        "": lambda row: row["model"],
        "d": _number("dim", ",.0f"),
        "clients": _number("clients", ",.0f"),
        "a round": lambda row: str(row["cohort"]),
        "steps": lambda row: f"{row['steps']} of {row['batch']}",
        "ms a round": _or_reason(_number("round", ".0f", 1e-3)),
        "client-steps/s": lambda row: _number("rate", ".3g" if row.get("rate", 0) < 100 else ".0f")(row),
        "MB": _number("peak", ".0f", MEGABYTE),
    }
    return _table(title, text, columns | ({"x first, processor time": _number("ratio", ".2f")} if ratio else {}))


_overhead = _table(
    "What the engine adds",
    "A round, and after it the same steps on the same batches without the engine, in plain threads that take the next "
    "client when they are done with one; medians of rounds, and of the share in each (wanted: under 5% on W1, under "
    "15% on W2).",
    {
        "": lambda row: f"{row['workload']}, {row['contender'].replace('**', '')}",
        "round ms": _number("round", ".1f", 1e-3),
        "its steps ms": _number("steps", ".1f", 1e-3),
        "overhead": _or_reason(_number("share", ".1%")),
    },
)


def _aware(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    base = next((row.get("round") for row in rows if row["form"] == "naive"), None)
    columns: dict[str, Cell] = {
        "form": lambda row: {"naive": "all in memory, naive", "disk": "rows on disk"}[row["form"]],
        "clients": _number("clients", ",.0f"),
        "ms a round": _or_reason(_number("round", ".0f", 1e-3)),
        "x naive": _number("round", ".2f", base) if base else lambda row: "",
        "processor ms": lambda row: f"{1e3 * statistics.median(row['cpu']):.0f}" if row.get("cpu") else "",
        "MB": _number("peak", ".0f", MEGABYTE),
    }
    text = (
        "`hansa.aggregate.aware` on synthetic updates of 1,000,000 parameters, 20 participants a round, every client "
        "seen before. The naive form holds all rows and makes the whole Gram matrix anew, on one thread (wanted: 2,000 "
        "clients under 1.5 GB and in at most 3,000 ms a round)."
    )
    return _table("FedAWARE's rows on disk", text, columns)(rows)


TABLES = {
    "startup": _listed(
        "Starting",
        "Processor time of all processes, each in a fresh one; medians.",
        {"CPU s": ("seconds", ".2f", 1.0)},
        "at most",
    ),
    "eager": _listed(  # wanted: at least the rate of the plain loop
        "Models without native kernels",
        "Whole rounds of Hansa and the same steps in a plain PyTorch loop, in turns on one thread: client steps per "
        "second of processor time, medians.",
        {"Hansa": ("hansa", ".3g", 1.0), "plain loop": ("plain", ".3g", 1.0), "x plain": ("ratio", ".2f", 1.0)},
    ),
    "overhead": _overhead,
    "population": _scaled(  # wanted: round time within 10%, memory within 200 MB; 100 of 10,000 under 1.5 GB
        "More clients",
        "Two workers. The last column is the processor time of a round in those of the first row.",
        ratio=True,
    ),
    "participants": _scaled("More of them taking part", "Two workers.", ratio=True),
    "dimension": _scaled(
        "Larger models",
        "Two workers; noise of CIFAR's shape for cifar_cnn and resnet18, which trains eagerly.",
        ratio=False,
    ),
    "ratios": _listed(
        "A gossiping step",
        "20 clients in 4 clusters of 5, rings unless another graph is named; a step is one computing client's, mixing "
        "included: all rows are mixed, also for few. Processor time, one thread, turn by turn; medians.",
        {"us a client-step": ("step", ".0f", 1e-6), "x FedAvg": ("ratio", ".2f", 1.0)},
        "at most",
    ),
    "studies": _listed(
        "Studies",
        "24 runs (three methods, eight seeds) of a small model that uses one core, in turns; medians. Runs of 150 "
        "rounds take about half a second; runs of 30 are so short that starting a study counts. The models are the "
        "same, bit for bit.",
        {
            "wall s": ("wall", ".1f", 1.0),
            "CPU s": ("processor", ".1f", 1.0),
            "runs/s": ("runs", ".2f", 1.0),
            "x one after the other": ("ratio", ".2f", 1.0),
        },
        "at least",
    ),
    "scale": _listed("Scale", "Processor time, one thread; medians.", {"value": ("value", ".3g", 1.0)}, "at most"),
    "aware": _aware,
    "vectors": _listed(
        "Server and wire",
        "11,173,962 float32 entries (ResNet-18), one thread, medians of turns that interleave, against a plain copy in "
        'the same turns. "torch" is the same without native code.',
        {"ms": ("seconds", ".1f", 1e-3), "x copy": ("copies", ".2f", 1.0)},
        "at most",
    ),
}
