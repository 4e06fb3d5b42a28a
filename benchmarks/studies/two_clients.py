"""The two-client study of the HA-Fed paper (F.1): with more local steps FedAMSGrad's global loss gets worse, HA-Fed's
better. Two clients, ten points each, full batch, full participation; HA-Fed's ring of two averages after every step.
FedAMSGrad is the paper's eq. 3.2, eps outside the root; HA-Fed its Alg. 1, eps inside.

The paper names neither rates nor rounds. CHOSEN was searched for on other data and other first models than those of the
seeds reported here: a clear effect on the mean global loss over the run, with every mean below log 2, the loss of
guessing. Run: python benchmarks/studies/two_clients.py"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import data, presets
from hansa.rounds.measures import Probe

DOCS = Path(__file__).parents[2] / "docs"
HIDDEN = {1: 10, 2: 4}
STEPS = (2, 10)
CLAIMS = {"fedamsgrad": "worse", "ha_fed": "better"}
TITLES = {"fedamsgrad": "FedAMSGrad", "ha_fed": "HA-Fed"}
COLOURS = {2: "#4c78a8", 10: "#e45756"}


CHOSEN = {"local_lr": 1.5, "server_lr": 0.15, "rounds": 50, "eps": 1e-8}
"""What both methods and both numbers of local steps share."""


def network(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def curves(method: str, group: int, steps: int, seed: int) -> tuple[list[float], list[float]]:
    """Local loss on the way, and the global loss of the averaged local models, round by round."""
    held = data.two_gaussians(study=group, seed=seed)
    task = hansa.Task(functools.partial(network, HIDDEN[group]), cross_entropy, held, execution="eager")
    shell = task.trainer(torch.float64, torch.device("cpu"))
    inputs, targets = held.inputs.double(), held.targets

    def global_loss(probe: Probe) -> dict[str, float]:
        mean = torch.stack([vectors["model"] for vectors in probe.received.values()]).mean(dim=0)
        shell.load(probe.got["model"] + mean, None)
        with torch.no_grad():
            return {"global_loss": float(cross_entropy(shell.module(inputs), targets))}

    own = {"participation": 1.0} if method == "fedamsgrad" else {"clusters": 1, "reporters": 2}
    words: dict[str, Any] = {name: value for name, value in CHOSEN.items() if name != "rounds"}
    algorithm = presets.get(method, steps=steps, batch_size=None, **words, **own)
    options: dict[str, Any] = {"rounds": CHOSEN["rounds"], "seed": seed, "dtype": torch.float64, "workers": 1}
    run = hansa.run(algorithm, task, evaluate_every=0, measures=[global_loss], **options)
    return [r["train_loss"] for r in run.history], [r["global_loss"] for r in run.history]


def digits(values: np.ndarray) -> list[float]:
    """Seven significant digits: losses near zero are still compared, where decimals would make them equal."""
    return [float(f"{value:.7g}") for value in values]


def runs(seeds: Sequence[int]) -> dict[str, Any]:
    """Every combination over the seeds: mean curves, their quartiles, and one summary a seed."""
    found = {}
    for group in HIDDEN:
        for method in CLAIMS:
            for steps in STEPS:
                pairs = np.array([curves(method, group, steps, seed) for seed in seeds])
                local, total = pairs[:, 0], pairs[:, 1]
                found[f"group {group}, {method}, tau {steps}"] = {
                    "local": local.mean(axis=0).round(5).tolist(),
                    "global": total.mean(axis=0).round(5).tolist(),
                    "global_quartiles": np.quantile(total, (0.25, 0.5, 0.75), axis=0).round(5).tolist(),
                    "mean_global": digits(total.mean(axis=1)),
                    "final_global": digits(total[:, -1]),
                }
    return found


def verdicts(found: dict[str, Any], measure: str) -> dict[str, Any]:
    """For each group and method the means at both numbers of steps, and in how many seeds the paper's claim holds."""
    told = {}
    for group in HIDDEN:
        for method, claim in CLAIMS.items():
            two, ten = (np.array(found[f"group {group}, {method}, tau {steps}"][measure]) for steps in STEPS)
            agree = int((ten > two).sum() if claim == "worse" else (ten < two).sum())
            told[f"group {group}, {method}"] = {
                "tau 2": round(float(two.mean()), 4),
                "tau 10": round(float(ten.mean()), 4),
                "medians": [round(float(np.median(two)), 4), round(float(np.median(ten)), 4)],
                f"tau 10 {claim}": agree,
                "seeds": len(two),
                "sign_test_p": float(f"{binomtest(agree, len(two)).pvalue:.2g}"),
            }
    return told


def study_all(seeds: int) -> dict[str, Any]:
    found = runs(range(seeds))
    verdict = {"mean over the run": verdicts(found, "mean_global"), "last round": verdicts(found, "final_global")}
    return {"seeds": seeds, "rates": CHOSEN, **verdict, "runs": found}


def draw(found: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "two-clients"  # equal results give equal files
    figure, axes = pyplot.subplots(1, 4, figsize=(14, 3.9), sharey=True, layout="constrained")
    for place, (axis, (group, method)) in enumerate(zip(axes, [(g, m) for g in HIDDEN for m in CLAIMS], strict=True)):
        for steps in STEPS:
            run = found["runs"][f"group {group}, {method}, tau {steps}"]
            low, _, high = run["global_quartiles"]
            rounds = np.arange(1, len(run["global"]) + 1)
            axis.fill_between(rounds, low, high, color=COLOURS[steps], alpha=0.15, linewidth=0)
            axis.plot(rounds, run["global"], color=COLOURS[steps], label=f"global, $\\tau$ = {steps}")
            axis.plot(rounds, run["local"], color=COLOURS[steps], linestyle=":", label=f"local, $\\tau$ = {steps}")
        axis.set_title(f"({'abcd'[place]}) group {group}: {TITLES[method]}")
        axis.set_xlabel("round")
        axis.set_xlim(1, len(rounds))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("training loss")
    axes[0].set_yscale("log")
    axes[0].set_ylim(0.01, 2.5)
    axes[0].set_yticks([0.01, 0.03, 0.1, 0.3, 1], ["0.01", "0.03", "0.1", "0.3", "1"])
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=4, loc="outside lower center")
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of results/two-clients.json and two-clients.svg")
    options = parser.parse_args()
    found = study_all(options.seeds)
    (options.out / "results").mkdir(parents=True, exist_ok=True)
    (options.out / "results" / "two-clients.json").write_text(json.dumps(found) + "\n")
    draw(found, options.out / "two-clients.svg")
    print(json.dumps({name: value for name, value in found.items() if name != "runs"}, indent=1))


if __name__ == "__main__":
    main()
