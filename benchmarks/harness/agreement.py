"""Whether all contenders compute the same thing: a small job without randomness, against a reference in float64.

Every client takes part in every round and every batch is all that a client has. What is left is FedAvg itself: the
model, the loss, the rate, the number of local steps and of rounds, and the mean of the updates. The rate is a tenth of
the workload's, so that errors of rounding do not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from harness.contenders import Contender, launch
from harness.workloads import Workload, modules

CLIENTS, STEPS, ROUNDS = 4, 3, 2
# of the way from the first model to the last; one step more or less is some tenths of it. Near a kink of ReLU or among
# equal entries of a max-pool float32 may take the other side, which moves a model by up to some hundredths.
TOLERANCE = 0.05

State = Mapping[str, Any]


def small(workload: Workload) -> Workload:
    return replace(workload, clients=CLIENTS, cohort=CLIENTS, steps=STEPS, rounds=ROUNDS, lr=workload.lr / 10)


def write_small(workload: Workload, folder: Path, given: Path) -> None:
    """The data of the check from those of the workload: the first rows of its first clients, one batch each."""
    with np.load(given) as held:
        starts = held["offsets"][:CLIENTS]
        rows = np.concatenate([held["index"][start : start + workload.batch] for start in starts])
        inputs, targets = held["inputs"][rows], held["targets"][rows]
    folder.mkdir(parents=True, exist_ok=True)
    offsets = np.arange(0, len(rows) + 1, workload.batch)
    np.savez(
        folder / f"{workload.name}.npz", inputs=inputs, targets=targets, index=np.arange(len(rows)), offsets=offsets
    )


def reference(workload: Workload, arrays: Path, start: Path) -> dict[str, torch.Tensor]:
    """The model that FedAvg arrives at in the small workload, in float64."""
    module = modules.module(workload.model).double()
    with np.load(arrays) as held, np.load(start) as first:
        inputs, targets = torch.from_numpy(held["inputs"]).double(), torch.from_numpy(held["targets"])
        bounds = held["offsets"].tolist()
        state = {name: torch.from_numpy(first[name]).double() for name in first.files}
    for _ in range(ROUNDS):
        total = {name: torch.zeros_like(value) for name, value in state.items()}
        for begin, end in pairwise(bounds):
            module.load_state_dict(state)
            for _ in range(STEPS):
                module.zero_grad()
                cross_entropy(module(inputs[begin:end]), targets[begin:end]).backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    for parameter in module.parameters():
                        assert parameter.grad is not None
                        parameter -= workload.lr * parameter.grad
            for name, value in module.state_dict().items():
                total[name] += value / CLIENTS
        state = total
    return state


def distance(found: Path, wanted: State, start: Path) -> float:
    """How far a model is from the reference, in units of the way that the reference went."""
    with np.load(found) as held, np.load(start) as first:
        if set(held.files) != set(wanted):
            raise ValueError(f"parameters {sorted(held.files)} in place of {sorted(wanted)}")
        for name in held.files:
            if held[name].shape != first[name].shape:
                raise ValueError(f"{name} has shape {held[name].shape} in place of {first[name].shape}")
        off = sum(float(((torch.from_numpy(held[name]).double() - wanted[name]) ** 2).sum()) for name in held.files)
        way = sum(float(((torch.from_numpy(first[name]).double() - wanted[name]) ** 2).sum()) for name in held.files)
    return float((off / way) ** 0.5)


class Check:
    """The small jobs of some workloads. They are not timed, so two run at once."""

    def __init__(self, root: Path, pythons: Mapping[str, Path], say: Callable[[str], None], timeout: float) -> None:
        self.root, self.folder, self.pythons = root, root / "agreement", pythons
        self.say, self.timeout = say, timeout

    def all(self, workloads: Iterable[Workload], contenders: Iterable[Contender]) -> dict[str, dict[str, Any]]:
        """For each workload and contender the distance from the reference, or the reason why there is none."""
        able = list(contenders)
        pairs = [(workload, one) for workload in workloads for one in able if workload.name in one.only]
        for workload in {workload.name: workload for workload, _ in pairs}.values():
            write_small(workload, self.folder / "data", self.root / "data" / f"{workload.name}.npz")
        found: dict[str, dict[str, Any]] = {workload.name: {} for workload, _ in pairs}
        with ThreadPoolExecutor(2) as pool:
            for (workload, contender), told in zip(pairs, pool.map(lambda pair: self.one(*pair), pairs), strict=True):
                found[workload.name][contender.name] = told
                self.say(f"agreement: {workload.name} {contender.name}: {describe(told)}")
        return found

    def one(self, workload: Workload, contender: Contender) -> float | str:
        start, stem = self.root / "data" / f"{workload.name}-start.npz", f"{workload.name}-{contender.name}"
        job = {"start": start, "save": self.folder / f"{stem}.npz", "seed": 0}
        python = self.pythons.get(contender.peer or "")
        workload = small(workload)
        ended = launch(contender, workload, self.folder, stem, job, python=python, timeout=self.timeout)
        if ended["reason"]:
            return str(ended["reason"])
        wanted = reference(workload, self.folder / "data" / f"{workload.name}.npz", start)
        try:
            return distance(job["save"], wanted, start)
        except (OSError, ValueError) as problem:
            return f"{type(problem).__name__}: {problem}"


def agrees(told: float | str) -> bool:
    """Whether a contender came to the reference's model; a reason why it came to none is a no, as is NaN.

    >>> [agrees(told) for told in (2e-6, 0.3, float("nan"), "took longer than 300 s")]
    [True, False, False, False]
    """
    return not isinstance(told, str) and told <= TOLERANCE


def describe(told: float | str) -> str:
    return told if isinstance(told, str) else f"{told:.1e} from the reference"
