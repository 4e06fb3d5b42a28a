"""The rows of a study's table from its results: python benchmarks/studies/table.py aware-authors 100 200 300 400 500
One row a method: rounds, accuracy after some of them, the best, the mean of the last ten evaluations, D and D~ over the
last 50 rounds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from curves import DOCS, load


def row(name: str, history: list[dict[str, Any]], rounds: list[int]) -> str:
    accuracy = {entry["round"]: entry["test_accuracy"] for entry in history if "test_accuracy" in entry}
    values = list(accuracy.values())
    cells = [
        name,
        str(len(history)),
        *(f"{100 * accuracy[n]:.1f}%" if n in accuracy else "" for n in rounds),
        f"{100 * max(values):.1f}%",
        f"{100 * sum(values[-10:]) / len(values[-10:]):.1f}%",
        *(mean(history[-50:], measure) for measure in ("diversity", "surrogate_diversity")),
    ]
    return f"| {' | '.join(cells)} |"


def mean(history: list[dict[str, Any]], measure: str) -> str:
    values = [entry[measure] for entry in history if measure in entry]
    return f"{sum(values) / len(values):.1f}" if values else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study")
    parser.add_argument("rounds", nargs="+", type=int)
    parser.add_argument("--results", type=Path, default=DOCS / "results")
    options = parser.parse_args()
    after = " | ".join(f"after {n}" for n in options.rounds)
    print(f"| | rounds | {after} | best | last ten evaluations | D | D~ |")
    print("|---" * (len(options.rounds) + 6) + "|")
    for name, histories in load(options.study, options.results).items():
        print(row(name, histories[0], options.rounds))


if __name__ == "__main__":
    main()
