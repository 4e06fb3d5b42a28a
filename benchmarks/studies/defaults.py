"""The defaults of the presets: does the plain command learn? Every preset on the embedded data with a small network:
its defaults and other values of its main rate, at participation 0.1 and 1, iid and Dirichlet(0.3), over two seeds. A
default must stay within 5 points of the best that was measured in each setting.

Run: python benchmarks/studies/defaults.py [--preset NAME ...]. Each result is written to docs/results/defaults.json as
it comes; it fails where a default falls behind."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch.nn.functional import cross_entropy

import hansa
from hansa import models, presets

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "defaults.json"
CLIENTS, ROUNDS, LAST, SEEDS = 50, 20, 5, (0, 1)
STEPS = dict.fromkeys(("fedasync", "fedbuff", "fadas", "ca2fl"), 100)
"""Server steps of asynchronous presets, in place of the rounds: by default a step takes a fifth of the clients."""

POINTS = 5.0
EXCEPTIONS = {"fedmgda": 6.0, "fedaware": 16.0}
"""Presets whose defaults may lack more than `POINTS`, and how many. The updates of fedmgda are unit vectors, so no
rate fits every setting; the paper's rate of fedaware is 1, although 5 is better here: it would also scale the averages
of ``explore=True`` and the unit momenta of ``normalize=True``."""

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
    "fedmgda": ("server_lr", (1.0, 0.7, 0.6, 0.5, 0.4, 0.3)),
    **dict.fromkeys(("fedadam", "fedcams"), ("server_lr", SERVER)),
    "fedams": ("server_lr", (*SERVER, 0.2)),
    **dict.fromkeys(("fedadagrad", "fedyogi", "fedamsgrad"), ("server_lr", NARROW)),
    "fedaware": ("server_lr", (7.0, 5.0, 3.0, 1.0)),
    "fedaware_yogi": ("server_lr", (2.0, 1.0, 0.5)),
    "fedasync": ("alpha", (0.9, 0.6, 0.3)),
    "fedbuff": ("server_lr", (1.0, 0.5, 0.3)),
    "fadas": ("server_lr", (0.03, 0.01, 0.003, 0.001)),
    "ca2fl": ("server_lr", (1.0, 0.5, 0.3, 0.2, 0.1)),
    **dict.fromkeys(("ha_fed", "afga", "cafga"), ("server_lr", (0.03, 0.01, 0.003))),
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


@cache
def task(partition: str, seed: int) -> Any:
    """The embedded data of 50 clients and a network of 32 hidden units."""
    rule = hansa.data.iid() if partition == "iid" else hansa.data.dirichlet(0.3)
    data = hansa.data.federate("fashion-mini", clients=CLIENTS, partition=rule, seed=seed)
    return hansa.Task(lambda: models.build("mlp", classes=10, shape=(1, 28, 28), hidden=32), cross_entropy, data)


def defaults_of(name: str) -> dict[str, float]:
    """The preset's main knob and its local rate, at their defaults."""
    parameters = inspect.signature(getattr(presets, name)).parameters
    return {argument: parameters[argument].default for argument in dict.fromkeys((GRIDS[name][0], "local_lr"))}


def label(form: Mapping[str, float]) -> str:
    """The key of a form in the results, such as "server_lr=0.3, local_lr=0.05"."""
    return ", ".join(f"{argument}={value:g}" for argument, value in form.items())


def settings_of(name: str) -> list[str]:
    """The settings in which a preset is measured; without a server everyone takes part."""
    return [setting for setting in SETTINGS if name not in SERVERLESS or not setting.endswith("0.1")]


def accuracy(name: str, setting: str, form: Mapping[str, float]) -> float:
    """The mean of the last test accuracies over the seeds, in percent."""
    partition, participation = SETTINGS[setting]
    scores = []
    for seed in SEEDS:
        run = hansa.Run(method(name, participation, **form), task(partition, seed), seed=seed)
        run.advance(STEPS.get(name, ROUNDS))
        scores += [record["test_accuracy"] for record in run.history][-LAST:]
    mean = round(100 * sum(scores) / len(scores), 1)
    print(f"{name}, {setting}, {label(form)}: {mean}", flush=True)
    return mean


def shortfall(table: Mapping[str, Mapping[str, float]], default: str) -> float:
    """By how many points a form falls behind the best of its table, in the setting where it falls behind most."""
    return max(max(row.get(setting, 0.0) for row in table.values()) - own for setting, own in table[default].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", nargs="*", default=list(GRIDS), choices=list(GRIDS), metavar="NAME")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    late = []
    for name in options.preset:
        knob, values = GRIDS[name]
        default = defaults_of(name)
        forms = [default, *({**default, knob: value} for value in values if value != default[knob])]
        table = {
            label(form): {setting: accuracy(name, setting, form) for setting in settings_of(name)} for form in forms
        }
        results[name] = table
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        points = shortfall(table, label(default))
        print(f"{name}: {points:.1f} points behind the best that was measured")
        late += [name] if points > EXCEPTIONS.get(name, POINTS) else []
    if late:
        sys.exit(f"behind by more than {POINTS:g} points: {late}")


if __name__ == "__main__":
    main()
