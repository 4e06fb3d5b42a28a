"""The two-client study of the HA-Fed paper (F.1): with more local steps FedAMSGrad's global loss gets worse, HA-Fed's
better. Two clients, ten points each, full batch, full participation. Run: python benchmarks/studies/two_clients.py"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import data, presets
from hansa.measures import Probe

DOCS = Path(__file__).parents[2] / "docs"
HIDDEN = {1: 10, 2: 4}


def network(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def curves(method: str, study: int, steps: int, seed: int, rounds: int) -> tuple[list[float], list[float]]:
    """Local loss on the way, and the global loss of the averaged local models, round by round."""
    held = data.two_gaussians(study=study, seed=seed)
    task = hansa.Task(functools.partial(network, HIDDEN[study]), cross_entropy, held, native=False)
    shell = task.shell(torch.float64, torch.device("cpu"))
    inputs, targets = held.inputs.double(), held.targets

    def global_loss(probe: Probe) -> dict[str, float]:
        mean = torch.stack([vectors["model"] for vectors in probe.received.values()]).mean(dim=0)
        shell.load(probe.got["model"] + mean, None)
        with torch.no_grad():
            return {"global_loss": float(cross_entropy(shell.module(inputs), targets))}

    common: dict[str, Any] = {"local_lr": 0.3, "steps": steps, "batch_size": None, "server_lr": 0.01, "eps": 1e-8}
    algorithm = (
        presets.fedamsgrad(participation=1.0, eps_inside=True, **common)
        if method == "fedamsgrad"
        else presets.ha_fed(clusters=1, reporters=2, **common)
    )
    run = hansa.run(
        algorithm,
        task,
        rounds=rounds,
        seed=seed,
        dtype=torch.float64,
        evaluate_every=0,
        measures=[global_loss],
        workers=1,
    )
    return [r["train_loss"] for r in run.history], [r["global_loss"] for r in run.history]


def study_all(seeds: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"seeds": seeds, "rounds": rounds, "runs": {}}
    for study in (1, 2):
        for method in ("fedamsgrad", "ha_fed"):
            for steps in (2, 10):
                pairs = [curves(method, study, steps, seed, rounds) for seed in range(seeds)]
                found["runs"][f"group {study}, {method}, tau {steps}"] = {
                    "local": np.mean([p[0] for p in pairs], axis=0).round(5).tolist(),
                    "global": np.mean([p[1] for p in pairs], axis=0).round(5).tolist(),
                    "final_global": [round(p[1][-1], 5) for p in pairs],
                }
    return found


def draw(found: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.4), sharey=False, layout="constrained")
    colours = {2: "#4c78a8", 10: "#e45756"}
    for place, (study, method) in enumerate([(1, "fedamsgrad"), (1, "ha_fed"), (2, "fedamsgrad"), (2, "ha_fed")]):
        axis = axes[place]
        for steps in (2, 10):
            run = found["runs"][f"group {study}, {method}, tau {steps}"]
            axis.plot(run["global"], color=colours[steps], label=f"global, tau = {steps}")
            axis.plot(run["local"], color=colours[steps], linestyle=":", label=f"local, tau = {steps}")
        axis.set_title(f"({'abcd'[place]}) group {study}: {'FedAMSGrad' if method == 'fedamsgrad' else 'HA-Fed'}")
        axis.set_xlabel("round")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("training loss")
    axes[0].legend(frameon=False)
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    found = study_all(options.seeds, options.rounds)
    (DOCS / "results").mkdir(parents=True, exist_ok=True)
    (DOCS / "results" / "two-clients.json").write_text(json.dumps(found) + "\n")
    draw(found, DOCS / "two-clients.svg")
    for name, run in found["runs"].items():
        finals = np.array(run["final_global"])
        print(f"{name}: final global loss {finals.mean():.4f} (sd {finals.std():.4f}), local {run['local'][-1]:.4f}")
    for study in (1, 2):
        for method, sign in (("fedamsgrad", 1), ("ha_fed", -1)):
            two, ten = (np.array(found["runs"][f"group {study}, {method}, tau {t}"]["final_global"]) for t in (2, 10))
            verdict, count = "worse" if sign > 0 else "better", int((sign * (ten - two) > 0).sum())
            print(f"group {study}, {method}: tau 10 {verdict} than tau 2 in {count} of {len(two)} seeds")


if __name__ == "__main__":
    main()
