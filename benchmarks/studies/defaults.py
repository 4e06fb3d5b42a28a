"""The defaults of the presets: does the plain command learn? Every preset on the embedded data with its defaults and
with each value of a grid of its main knob, at participation 0.1 and 1, iid and Dirichlet(0.3). A default must stay
within 5 points of the best of the grid in each of the four settings.

Run: python benchmarks/studies/defaults.py [--preset NAME ...] [--check]. It writes docs/results/defaults.json and the
table of docs/defaults.md; --check measures again and fails if a preset's default falls more than 5 points behind."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch.nn.functional import cross_entropy

import hansa
from hansa import models, presets

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results" / "defaults.json"
PAGE = DOCS / "defaults.md"
MARK = "<!-- table -->"
CLIENTS, ROUNDS, LAST, SEEDS = 50, 20, 5, (0, 1)
POINTS = 5.0
SETTINGS = {
    "iid, 0.1": ("iid", 0.1),
    "iid, 1": ("iid", 1.0),
    "Dirichlet(0.3), 0.1": ("dirichlet", 0.1),
    "Dirichlet(0.3), 1": ("dirichlet", 1.0),
}
"""Partition and participation by name."""

SERVER = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
NARROW = (0.1, 0.03, 0.01)
AVERAGING = (1.5, 1.0, 0.5)
GRIDS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "fedavg": ("server_lr", AVERAGING),
    "fedavgm": ("server_lr", (1.0, 0.5, 0.3)),
    "fedprox": ("mu", (0.001, 0.01, 0.1)),
    "scaffold": ("server_lr", AVERAGING),
    "fednova": ("server_lr", AVERAGING),
    "feddyn": ("alpha", (0.3, 0.1, 0.03)),
    "fedmgda": ("server_lr", (3.0, 1.0, 0.3)),
    **dict.fromkeys(("fedadam", "fedams", "fedcams"), ("server_lr", SERVER)),
    **dict.fromkeys(("fedadagrad", "fedyogi", "fedamsgrad"), ("server_lr", NARROW)),
    "fedaware": ("server_lr", (2.0, 1.5, 1.0)),
    "fedaware_yogi": ("server_lr", (2.0, 1.0, 0.5)),
    **dict.fromkeys(("ha_fed", "afga", "cafga"), ("server_lr", NARROW)),
    **dict.fromkeys(("dsgd", "choco_sgd", "gossip_pga"), ("local_lr", (0.2, 0.1, 0.05))),
    **dict.fromkeys(("dadam", "d_amsgrad"), ("local_lr", (0.05, 0.01, 0.005, 0.002))),
}
"""For each preset, its main knob and the values that it is tuned over."""

SERVERLESS = ("dsgd", "choco_sgd", "gossip_pga", "dadam", "d_amsgrad")


def method(name: str, participation: float, **arguments: Any) -> Any:
    """A preset as the plain command makes it, with this participation; without a server everyone takes part."""
    if name in ("ha_fed", "cafga"):
        arguments["reporters"] = participation
    elif name not in SERVERLESS:
        arguments["participation"] = participation
    return presets.get(name, **arguments)


def accuracy(name: str, setting: str, seed: int, **arguments: Any) -> float:
    """The mean of the last test accuracies, in percent."""
    partition, participation = SETTINGS[setting]
    run = hansa.Run(method(name, participation, **arguments), task(partition, seed), seed=seed)
    run.advance(ROUNDS)
    last = [record["test_accuracy"] for record in run.history][-LAST:]
    return 100 * sum(last) / len(last)


@cache
def task(partition: str, seed: int) -> Any:
    """The embedded data of 50 clients and a small network."""
    rule = hansa.data.iid() if partition == "iid" else hansa.data.dirichlet(0.3)
    data = hansa.data.federate("fashion-mini", clients=CLIENTS, partition=rule, seed=seed)
    return hansa.training.Task(lambda: models.mlp(classes=10, shape=(1, 28, 28), hidden=32), cross_entropy, data)


def default_of(name: str, argument: str) -> float:
    """The default of a preset's argument."""
    value: float = inspect.signature(getattr(presets, name)).parameters[argument].default
    return value


def measure(name: str, values: Iterable[float]) -> dict[str, dict[str, float]]:
    """The accuracy at each value of the knob, by setting."""
    knob, _ = GRIDS[name]
    table: dict[str, dict[str, float]] = {}
    for value in values:
        start = time.perf_counter()
        table[repr(value)] = {}
        for setting in SETTINGS:
            if name in SERVERLESS and setting.endswith("0.1"):
                continue
            scores = [accuracy(name, setting, seed, **{knob: value}) for seed in SEEDS]
            table[repr(value)][setting] = round(sum(scores) / len(scores), 1)
        print(name, knob, value, table[repr(value)], f"{time.perf_counter() - start:.0f} s", flush=True)
    return table


def shortfall(table: Mapping[str, Mapping[str, float]], value: float) -> float:
    """By how many points a value falls behind the best of the grid, in the setting where it falls behind most."""
    settings = next(iter(table.values()))
    best = {setting: max(row[setting] for row in table.values()) for setting in settings}
    return max(best[setting] - table[repr(value)][setting] for setting in settings)


def table_lines(results: Mapping[str, Any]) -> list[str]:
    """The table of the page."""
    columns = list(SETTINGS)
    lines = [f"| preset | knob, default | {' | '.join(columns)} | behind by |", "|---|---|" + "---:|" * 5]
    for name in GRIDS:
        if name not in results:
            continue
        entry = results[name]
        table, knob, value = entry["accuracy"], entry["knob"], entry["default"]
        cells = []
        for setting in columns:
            scores = {float(each): row[setting] for each, row in table.items() if setting in row}
            best = max(scores, key=lambda each, scores=scores: scores[each], default=None)  # type: ignore[misc]
            cells.append("" if best is None else f"{scores[value]} ({scores[best]} at {best:g})")
        lines.append(f"| `{name}` | `{knob}={value:g}` | {' | '.join(cells)} | {shortfall(table, value):.1f} |")
    return lines


def write(results: Mapping[str, Any]) -> None:
    """Write the results and the table of the page."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    head, _, rest = PAGE.read_text().partition(MARK)
    _, _, tail = rest.partition(MARK)
    PAGE.write_text(f"{head}{MARK}\n" + "\n".join(table_lines(results)) + f"\n{MARK}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", nargs="*", default=list(GRIDS))
    parser.add_argument("--check", action="store_true", help="fail if a default falls behind; write nothing")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.preset:
        write(results)
    behind = {}
    for name in options.preset:
        knob, values = GRIDS[name]
        default = default_of(name, knob)
        table = measure(name, sorted({*values, default}, reverse=True))
        results[name] = {"knob": knob, "default": default, "accuracy": table}
        behind[name] = shortfall(table, default)
        if not options.check:
            write(results)
    for name, points in behind.items():
        print(f"{name}: {points:.1f} points behind the best of its grid")
    if options.check and max(behind.values(), default=0.0) > POINTS:
        sys.exit(f"behind by more than {POINTS:g} points: {[n for n, p in behind.items() if p > POINTS]}")


if __name__ == "__main__":
    main()
