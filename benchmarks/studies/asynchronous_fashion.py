"""Synchronous and asynchronous methods on the embedded Fashion-MNIST subset against virtual time and bytes: logistic
regression, 50 clients, Dirichlet(0.3), 10 at work at a time, 600 updates, three seeds, under equal and heavy-tailed
devices.

Run: python benchmarks/studies/asynchronous_fashion.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from images import image_task

import hansa
from hansa import data, pace, presets
from hansa.local import zipf

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
CHOSEN = {"FedAvg": 1.0, "FedAMS": 0.03, "FedBuff": 0.6, "FADAS": 0.003, "CA2FL": 0.3}
"""Server rates, the best of grids of three or four on another seed with a third of the updates."""


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


def trained(name: str, rate: float, profile: str, seed: int) -> hansa.Run:
    federated = data.partition_dataset(data.load("fashion-mini"), data.dirichlet(0.3), 50, seed)
    algorithm = method(name, rate)
    rounds = steps(algorithm, UPDATES)
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


def draw(results: dict[str, Any]) -> None:
    """Accuracy against virtual time and against megabytes for each profile, one line a seed."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10.4, 6.6), layout="constrained", sharey=True)
    for row, (profile, methods) in zip(axes, results.items(), strict=True):
        for column, (axis, label) in enumerate(zip(row, ("virtual seconds", "megabytes, both ways"), strict=True)):
            for number, (name, runs) in enumerate(methods.items()):
                for seed, run in enumerate(runs):
                    times, scores = [point[column] for point in run["points"]], [point[2] for point in run["points"]]
                    axis.plot(times, scores, color=f"C{number}", label=name if seed == 0 else None)
            axis.set(xlabel=f"{label}, {profile} devices", ylabel="test accuracy", ylim=(0.3, 0.9))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, ncols=5, loc="outside lower center")
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    facts = {"target": TARGET, "updates": UPDATES, "server_lr": CHOSEN, "hansa": hansa.__version__}
    results: dict[str, Any] = {}
    for profile in PROFILES:
        for name, rate in CHOSEN.items():
            curves = [curve(trained(name, rate, profile, seed)) for seed in (0, 1, 2)]
            results.setdefault(profile, {})[name] = curves
            RESULTS.write_text(json.dumps({**facts, "results": results}, separators=(",", ":")) + "\n")
            print(profile, name, [entry["points"][-1] for entry in curves], flush=True)
    draw(results)


if __name__ == "__main__":
    main()
