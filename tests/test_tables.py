"""The accuracies of the pages' tables are those of the results kept beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hansa import presets

DOCS = Path(__file__).parents[1] / "docs"
ROWS = {  # page, the start of a row -> the results it is made of
    ("aware.md", "FedAWARE, authors' setting, updates under each other's"): "aware-authors-permuted-ids-seed0",
    ("aware.md", "FedAWARE, authors' setting, every update under its own"): "aware-authors-faithful-ids-seed0",
    ("aware.md", "FedAvgM, beta 0.9, \\|D_i\\| weights"): "aware-authors-fedavgm-samples-seed0",
    ("aware.md", "FedYogi, eta 0.01, \\|D_i\\| weights"): "aware-authors-fedyogi-samples-seed0",
    ("aware.md", "FedAvg |"): "aware-hybrid-plus-fedavg-seed0",
    ("aware.md", "FedAvgM, beta 0.9 |"): "aware-hybrid-plus-fedavgm-seed0",
    ("aware.md", "FedYogi, eta 0.01 |"): "aware-hybrid-plus-fedyogi-seed0",
    ("aware.md", "FedAWARE, Algorithm 1, solved exactly | 200"): "aware-hybrid-plus-fedaware-seed0",
    ("aware.md", "... `explore` |"): "aware-hybrid-plus-fedaware-explore-seed0",
    ("aware.md", "... `normalize` |"): "aware-hybrid-plus-fedaware-normalize-seed0",
    ("aware.md", "... `normalize`, `explore` |"): "aware-hybrid-plus-fedaware-normalize-explore-seed0",
    **{
        ("communication.md", f"{method} | {seed} |"): f"two-way-fashion-{stem}-seed{seed}"
        for method, stem, seeds in (
            ("FedAMS, uncompressed", "fedams", (0, 1, 2)),
            ("FedCAMS, `grid(4.0)` up and down", "fedcams-grid-both", (0, 1, 2)),
            ("FedCAMS, `sign()` up", "fedcams-sign", (0,)),
            ("FedCAMS, `sign()` up and down", "fedcams-sign-both", (0,)),
            ("FedCAMS, `sign()` up, `grid(4.0)` down", "fedcams-sign-grid", (0,)),
            ("FedCAMS, `top_k(1/64)` up and down", "fedcams-topk64-both", (0,)),
        )
        for seed in seeds
    },
}


def expected(title: str, result: dict) -> str | None:
    """What a cell under this title says of a result; None where it is of something else."""
    history = result["history"]
    accuracy = {entry["round"]: entry["test_accuracy"] for entry in history if "test_accuracy" in entry}
    values = list(accuracy.values())
    if after := re.match(r"(?:accuracy )?after (\d+)", title):
        digits = 2 if title.startswith("accuracy") else 1
        return f"{100 * accuracy[int(after[1])]:.{digits}f}%" if int(after[1]) in accuracy else ""
    return {
        "rounds": str(len(history)),
        "best": f"{100 * max(values):.1f}%",
        "last ten evaluations": f"{100 * sum(values[-10:]) / 10:.1f}%",
        "mean of the last three evaluations": f"{100 * sum(values[-3:]) / 3:.2f}%",
        "MB up": f"{result['bytes']['up'] / 1e6:.2f}",
        "MB down": f"{result['bytes']['down'] / 1e6:.2f}",
        "D": f"{sum(entry['diversity'] for entry in history[-50:]) / len(history[-50:]):.1f}",
    }.get(title)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize(("page", "start"), ROWS)
def test_a_row_says_what_its_results_are(page, start):
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"| {start}"))
    head = max(number for number in range(at) if lines[number].startswith("|---")) - 1
    result = json.loads((DOCS / "results" / f"{ROWS[page, start]}.json").read_text())
    found = {
        title: (cell, wanted)
        for title, cell in zip(cells(lines[head]), cells(lines[at]), strict=True)
        if (wanted := expected(title, result)) is not None
    }
    assert len(found) >= 4
    for title, (cell, wanted) in found.items():
        assert cell == wanted, title


def test_the_asynchronous_study_says_what_its_results_are():
    study = json.loads((DOCS / "results" / "asynchronous-fashion.json").read_text())
    lines = (DOCS / "async.md").read_text(encoding="utf-8").splitlines()
    for profile, methods in study["results"].items():
        for method, runs in methods.items():
            reached = [next((p for p in run["points"] if p[2] >= study["target"]), None) for run in runs]
            known = [point for point in reached if point is not None]
            last = [sum(point[2] for point in run["points"][-3:]) / 3 for run in runs]
            wanted = [
                f"{profile}, {method}",
                f"{sum(point[0] for point in known) / len(known):.0f} ({len(known)} of {len(runs)})",
                f"{sum(point[1] for point in known) / len(known):.1f}",
                f"{100 * sum(last) / len(last):.1f}%",
                f"{sum(run['seconds'] for run in runs) / len(runs):.0f}",
                str(max(run["staleness_max"] for run in runs)),
                f"{100 * sum(run['utilisation'] for run in runs) / len(runs):.0f}%",
            ]
            line = next(line for line in lines if line.startswith(f"| {wanted[0]} |"))
            assert cells(line) == wanted


def test_the_speeds_of_the_readme_are_those_of_the_benchmarks():
    """Every median in the README's table stands at the head of a cell of the benchmarks' page."""
    table = (DOCS.parent / "README.md").read_text(encoding="utf-8").split("## How fast")[1].split("\n\n")[2]
    measured = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    numbers = [cell.strip("* ") for line in table.splitlines()[2:] for cell in cells(line)[1:]]
    medians = [number for number in numbers if number.isdigit()]
    assert len(medians) >= 10
    for number in medians:
        assert f"| {number} " in measured, f"{number} is no median of the benchmarks"


def test_every_preset_is_on_the_methods_page():
    rows = [line for line in (DOCS / "methods.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", cells(row)[0])}
    assert named == set(presets.catalogue())


def test_every_table_row_of_results_is_held_against_them():
    """A row of these pages that begins with a method's name is in the list above."""
    known = {page: [start for at, start in ROWS if at == page] for page, _ in ROWS}
    for page, starts in known.items():
        for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
            if line.startswith(("| Fed", "| ... ")) and "%" in line:
                assert any(line.startswith(f"| {start}") for start in starts), f"{page}: {line[:70]}"
