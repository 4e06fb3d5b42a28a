"""Synchronous and asynchronous methods on the embedded Fashion-MNIST subset against virtual time and bytes: logistic
regression, 50 clients, Dirichlet(0.3), 10 at work at a time, 600 updates, three seeds, under equal and heavy-tailed
devices.

``--tune`` chooses each method's server learning rate on another seed, with a third of the updates.
Run: python benchmarks/studies/asynchronous_fashion.py [--tune]"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import hansa
from hansa import data, pace, presets
from hansa.local import zipf
from study import image_task

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "asynchronous-fashion.json"
FIGURE = Path(__file__).parents[2] / "docs" / "asynchronous-fashion.svg"
UPDATES, SLOTS, TARGET, MODEL = 600, 10, 0.8, "logistic"
COMMON: dict[str, Any] = {"local_lr": 0.05, "steps": 10, "batch_size": 20, "participation": 0.2}
PROFILES = {
    "uniform": pace.devices(step_seconds=0.1, up_bandwidth=1e6, down_bandwidth=4e6, latency=0.1, jitter=0.1),
    "heavy-tailed": pace.devices(
        step_seconds=zipf(1.7, unit=0.1, maximum=200), up_bandwidth=1e6, down_bandwidth=4e6, latency=0.1, jitter=0.1
    ),
}
RATES = {
    "FedAvg": (0.5, 1.0, 2.0),
    "FedAMS": (0.003, 0.01, 0.03, 0.1),
    "FedBuff": (0.3, 0.6, 1.0),
    "FADAS": (0.001, 0.003, 0.01),
    "CA2FL": (0.1, 0.3, 0.6),
}
CHOSEN = {"FedAvg": 1.0, "FedAMS": 0.03, "FedBuff": 0.6, "FADAS": 0.003, "CA2FL": 0.3}
"""What ``--tune`` chose."""


def method(name: str, rate: float) -> hansa.Algorithm:
    """A method, with two updates per server step where it is asynchronous."""
    buffer: dict[str, Any] = {"size": 2, "concurrency": SLOTS, "server_lr": rate, **COMMON}
    make = {
        "FedAvg": lambda: presets.fedavg(server_lr=rate, **COMMON),
        "FedAMS": lambda: presets.fedams(server_lr=rate, eps=1e-3, **COMMON),
        "FedBuff": lambda: presets.fedbuff(**buffer),
        "FADAS": lambda: presets.fadas(eps=1e-2, tau_c=5, **buffer),
        "CA2FL": lambda: presets.ca2fl(**buffer),
    }
    return make[name]()


def steps(algorithm: hansa.Algorithm, updates: int) -> int:
    return updates // (2 if algorithm.pace.asynchronous else SLOTS)


def trained(name: str, rate: float, profile: str, seed: int, updates: int = UPDATES) -> hansa.Run:
    federated = data.partition_dataset(data.load("fashion-mini"), data.dirichlet(0.3), 50, seed)
    algorithm = method(name, rate)
    rounds = steps(algorithm, updates)
    every = max(1, rounds // 30)
    task = image_task(federated, MODEL)
    return hansa.run(algorithm, task, rounds=rounds, seed=seed, profile=PROFILES[profile], evaluate_every=every)


def curve(run: hansa.Run) -> dict[str, Any]:
    """Virtual seconds, megabytes both ways and accuracy at every evaluation, and facts of the whole run."""
    seconds, sent, points = 0.0, 0, []
    for record in run.history:
        seconds += record["simulated_seconds"]
        sent += record["up_bytes"] + record["down_bytes"]
        if "test_accuracy" in record:
            points.append([round(seconds, 2), round(sent / 1e6, 3), round(record["test_accuracy"], 4)])
    ages = [record["staleness_max"] for record in run.history if "staleness_max" in record]
    return {
        "points": points,
        "seconds": round(seconds, 2),
        "staleness_max": max(ages, default=0),
        "utilisation": round(sum(r["utilisation"] for r in run.history) / len(run.history), 3),
    }


def tune() -> None:
    for name, rates in RATES.items():
        found = {rate: curve(trained(name, rate, "heavy-tailed", 99, UPDATES // 3))["points"] for rate in rates}
        scores = {rate: sum(point[2] for point in points[-5:]) / 5 for rate, points in found.items()}
        print(name, {rate: round(score, 4) for rate, score in scores.items()}, flush=True)


def draw(results: dict[str, Any]) -> str:
    """Accuracy against virtual time and against megabytes for each profile, one line a seed."""
    colours = dict(zip(CHOSEN, ("#009e73", "#d55e00", "#0072b2", "#cc79a7", "#7a6a00"), strict=True))
    parts = []
    for row, (profile, methods) in enumerate(results.items()):
        for column, label in enumerate(("virtual seconds", "megabytes, both ways")):
            left, top, wide, high = 60 + 380 * column, 40 + 230 * row, 320, 160
            most = max(point[column] for runs in methods.values() for run in runs for point in run["points"])
            low, best = 0.3, 0.9
            for tick in (0.4, 0.6, 0.8):
                y = top + high * (best - tick) / (best - low)
                parts.append(f'<path d="M{left} {y:.1f}h{wide}" stroke="#e0ddd4"/>')
                parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * tick:.0f}%</text>')
            for name, runs in methods.items():
                for run in runs:
                    line = "L".join(
                        f"{left + wide * point[column] / most:.1f} "
                        f"{top + high * (best - min(best, max(low, point[2]))) / (best - low):.1f}"
                        for point in run["points"]
                    )
                    parts.append(f'<path d="M{line}" fill="none" stroke="{colours[name]}" opacity="0.8"/>')
            under = f'y="{top + high + 18}"'
            parts.append(
                f'<text x="{left}" {under}>0</text><text x="{left + wide}" {under} text-anchor="end">{most:.0f}</text>'
            )
            parts.append(f'<text x="{left + wide / 2}" {under} text-anchor="middle">{label}, {profile} devices</text>')
    for place, (name, colour) in enumerate(colours.items()):
        parts.append(f'<rect x="{60 + 120 * place}" y="12" width="16" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{82 + 120 * place}" y="19">{name}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 500" font-family="Inter, Segoe UI, sans-serif" '
        'font-size="12" fill="#1b2430" role="img" aria-label="Accuracy against virtual time and bytes">'
        f'<rect width="780" height="500" rx="10" fill="#fbfaf7"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    if parser.parse_args().tune:
        tune()
        return
    facts = {"target": TARGET, "updates": UPDATES, "server_lr": CHOSEN, "hansa": hansa.__version__}
    results: dict[str, Any] = {}
    for profile in PROFILES:
        for name, rate in CHOSEN.items():
            curves = [curve(trained(name, rate, profile, seed)) for seed in (0, 1, 2)]
            results.setdefault(profile, {})[name] = curves
            RESULTS.write_text(json.dumps({**facts, "results": results}, separators=(",", ":")) + "\n")
            print(profile, name, [entry["points"][-1] for entry in curves], flush=True)
    FIGURE.write_text(draw(results))


if __name__ == "__main__":
    main()
