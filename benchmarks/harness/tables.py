"""The tables about Hansa alone, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

MEGABYTE = 1 << 20


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _cell(row: Mapping[str, Any], name: str, form: str, scale: float = 1.0) -> str:
    return format(row[name] / scale, form) if name in row else ""


def _startup(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    body = [
        [
            row["what"],
            row["reason"] or _cell(row, "seconds", ".2f"),
            f"at most {row['target']:g}" if row.get("target") else "",
        ]
        for row in rows
    ]
    text = "Processor time of all processes, each in a fresh one; medians."
    return ["## Starting", text, table(["", "CPU s", "wanted"], body)]


def _eager(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    body = [
        [
            row["model"],
            row["reason"] or _cell(row, "hansa", ".3g"),
            _cell(row, "plain", ".3g"),
            _cell(row, "ratio", ".2f"),
        ]
        for row in rows
    ]
    text = (
        "Models that no native code trains: whole rounds of Hansa and the loop of a PyTorch user, turn by turn "
        "in one process on one thread, in client-steps a second of processor time; medians (wanted: at least 1.0)."
    )
    return ["## Models without a native form", text, table(["", "Hansa", "plain loop", "x plain"], body)]


def _batched(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    body = [
        [
            row["model"],
            row["reason"] or _cell(row, "ratio", ".2f") or row.get("refused", ""),
            *(_cell(row.get("times") or {}, way, ".0f") for way in ("one by one", "together", "native")),
        ]
        for row in rows
    ]
    text = (
        "Small models, 32 clients a round with batches of 16: the ratio of the processor times of one client after "
        "the other and of all in one program, measured in turns. Then microseconds of processor time per client step "
        "of whole rounds, also by native code where it has all stages."
    )
    head = ["", "ratio", "one by one us", "together us", "native us"]
    return ["## Clients in one program", text, table(head, body)]


def _overhead(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    body = [
        [
            f"{row['workload']}, {row['contender'].replace('**', '')}",
            _cell(row, "round", ".1f", 1e-3),
            _cell(row, "steps", ".1f", 1e-3),
            row["reason"] or _cell(row, "share", ".1%"),
        ]
        for row in rows
    ]
    text = (
        "A round, and after it the same steps on the same batches without the engine, in plain threads that take the "
        "next client when they are done with one; medians of rounds, and of the share in each (wanted: under 5% on W1, "
        "under 15% on W2)."
    )
    return ["## What the engine adds", text, table(["", "round ms", "its steps ms", "overhead"], body)]


def _scaled(title: str, text: str, *, ratio: bool) -> Any:
    """A table of points; ``ratio`` adds the processor time of a round in those of the first row."""

    def render(rows: Sequence[Mapping[str, Any]]) -> list[str]:
        last = ["x first, processor time"] * ratio
        head = ["", "d", "clients", "a round", "steps", "ms a round", "client-steps/s", "MB", *last]
        body = [
            [
                row["model"],
                _cell(row, "dim", ",.0f"),
                f"{row['clients']:,}",
                str(row["cohort"]),
                f"{row['steps']} of {row['batch']}",
                row["reason"] or _cell(row, "round", ".0f", 1e-3),
                _cell(row, "rate", ".3g" if row.get("rate", 0) < 100 else ".0f"),
                _cell(row, "peak", ".0f", MEGABYTE),
                *[_cell(row, "ratio", ".2f")] * ratio,
            ]
            for row in rows
        ]
        return [f"## {title}", text, table(head, body)]

    return render


def _gossip(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    base = rows[0].get("round")
    body = [
        [
            f"{row['clients']:,}",
            {"lazy": "lazy, as chosen by the cost rule", "dense": "dense, forced"}[row["rows"]],
            row["reason"] or _cell(row, "round", ".0f", 1e-3),
            f"{row['round'] / base:.2f}" if base and "round" in row else "",
            _cell(row, "peak", ".0f", MEGABYTE),
        ]
        for row in rows
    ]
    text = (
        "AFGA on a ring, 5 clients computing at a step, CNN-29k, 24 steps of 50, one worker. Rows of idle clients need "
        "never exist (wanted: 10,000 clients at most 1.3 times a round of 100, under 1.5 GB). The dense loop holds two "
        "copies of all rows and of W: at 10,000 clients 2.7 GB, and 140 TFLOP a round."
    )
    return ["## Gossip among many", text, table(["clients", "rows", "ms a round", "x first", "MB"], body)]


def _ratios(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    body = [
        [
            row["what"],
            row["reason"] or _cell(row, "step", ".0f", 1e-6),
            _cell(row, "ratio", ".2f"),
            f"at most {row['target']:g}" if row.get("target") and row.get("ratio") != 1 else "",
        ]
        for row in rows
    ]
    text = (
        "20 clients in 4 clusters of 5, rings unless another graph is named; a step is one computing client's, mixing "
        "included: all rows are mixed, also for few. Processor time, one thread, turn by turn; medians."
    )
    return ["## A gossiping step", text, table(["", "us a client-step", "x FedAvg", "wanted"], body)]


def _asynchronous(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    body = [
        [
            row["what"],
            row["reason"] or _cell(row, "update", ".0f", 1e-6),
            _cell(row, "ratio", ".2f"),
            f"at most {row['target']:g}" if row.get("target") else "",
        ]
        for row in rows
    ]
    text = (
        "buffered(100, 1000) and synchronous rounds of 100 clients; logistic regression, one step on four rows, so "
        "that bookkeeping is most of it. Log-normal devices. Processor time, one thread, turn by turn; medians."
    )
    return ["## Asynchronous rounds", text, table(["", "us an update", "ratio", "wanted"], body)]


def _scale(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    body = [
        [
            row["what"],
            row["reason"] or _cell(row, "value", ".3g"),
            f"at most {row['target']:g}" if row.get("target") else "",
        ]
        for row in rows
    ]
    return ["## Scale", "Processor time, one thread; medians.", table(["", "", "wanted"], body)]


def _aware(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    base = next((row.get("round") for row in rows if row["form"] == "naive"), None)
    names = list(dict.fromkeys(name for row in rows for name in row.get("split", {})))
    body = [
        [
            {"naive": "all in memory, naive", "disk": "rows on disk"}[row["form"]],
            f"{row['clients']:,}",
            row["reason"] or _cell(row, "round", ".0f", 1e-3),
            f"{row['round'] / base:.2f}" if base and "round" in row else "",
            f"{1e3 * statistics.median(row['cpu']):.0f}" if row.get("cpu") else "",
            *(_cell(row.get("split", {}), name, ".0f", 1e-3) for name in names),
            f"{statistics.median(row['from_disk']) / MEGABYTE:,.0f}" if row.get("from_disk") else "",
            _cell(row, "peak", ".0f", MEGABYTE),
        ]
        for row in rows
    ]
    text = (
        "`hansa.aggregate.aware` on synthetic updates of 1,000,000 parameters, 20 participants a round, every client "
        "seen before; milliseconds by the clock in all columns but one. The naive form holds all rows and makes the "
        "whole Gram matrix anew, on one thread. "
        "Rows that the system has in memory are not read from the disk; the rest of a round's 4 MB a client is, as "
        "fast as the disk is, and a column says how much that was "
        "(wanted: 2,000 clients under 1.5 GB and in at most 3,000 ms a round)."
    )
    head = ["form", "clients", "ms a round", "x naive", "processor ms", *names, "MB read from the disk", "MB"]
    return ["## FedAWARE's rows on disk", text, table(head, body)]


def _vectors(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    body = [
        [
            row["operation"],
            row["reason"] or _cell(row, "seconds", ".1f", 1e-3),
            _cell(row, "copies", ".2f"),
            f"at most {row['target']:g}" if row.get("target") else "",
        ]
        for row in rows
    ]
    text = (
        "11,173,962 float32 entries (ResNet-18), one thread, medians of turns that interleave, against a plain copy in "
        'the same turns. "torch" is the same without native code.'
    )
    return ["## Server and wire", text, table(["", "ms", "x copy", "wanted"], body)]


def _studies(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    body = [
        [
            row["what"],
            row["reason"] or _cell(row, "wall", ".1f"),
            _cell(row, "processor", ".1f"),
            _cell(row, "idle", ".2f"),
            _cell(row, "runs", ".2f"),
            _cell(row, "ratio", ".2f"),
            f"at least {row['target']:g}" if row.get("target") else "",
        ]
        for row in rows
    ]
    text = (
        "24 runs (three methods, eight seeds) of a small model that uses one core, in turns; medians. Runs of 150 "
        "rounds take about half a second; runs of 30 are so short that starting a study counts. The models are the "
        "same, bit for bit. Two programs that know nothing of each other and execute half of the runs each are the "
        "limit of the machine; idle are the core-seconds in which one of two cores had nothing to do."
    )
    head = ["", "wall s", "CPU s", "idle s", "runs/s", "x one after the other", "wanted"]
    return ["## Studies", text, table(head, body)]


TABLES = {
    "startup": _startup,
    "eager": _eager,
    "batched": _batched,
    "overhead": _overhead,
    "population": _scaled(
        "More clients",
        "As many taking part, two workers; the last row is the frugal case (wanted: round time within 10% and memory "
        "within 200 MB from 100 to 10,000 clients; 100 of 10,000 under 1.5 GB).",
        ratio=True,
    ),
    "participants": _scaled("More of them taking part", "Two workers.", ratio=True),
    "dimension": _scaled(
        "Larger models",
        "Two workers; noise of CIFAR's shape for cifar_cnn and resnet18, which trains eagerly.",
        ratio=False,
    ),
    "ratios": _ratios,
    "asynchronous": _asynchronous,
    "studies": _studies,
    "gossip": _gossip,
    "scale": _scale,
    "aware": _aware,
    "vectors": _vectors,
}
