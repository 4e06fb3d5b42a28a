"""What a run leaves on disk: its configuration, who held which data, every round's numbers, the model, checkpoints.

=======================  =======================================================================
config.yaml              the resolved configuration; ``hansa run config.yaml`` repeats the run
partition.safetensors    who held which samples
environment.json         versions and machine
metrics.jsonl            a line of JSON a round
summary.json             how it ended, in a few numbers
model.safetensors        the model after the last round
checkpoint/              all that is needed to go on exactly where the run stopped
=======================  =======================================================================
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from hansa import data, metrics
from hansa.comm import Ledger
from hansa.config import Config, algorithm, build, load, slots, to_text
from hansa.errors import HansaError
from hansa.store import io
from hansa.tasks import Task
from hansa.train import Callback, Record, Run

CONFIG = "config.yaml"
PARTITION = "partition.safetensors"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
CHECKPOINT = "checkpoint"


class RunFolder:
    """The folder of one run, existing or yet to be made."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def exists(self) -> bool:
        """Whether a run has been begun here."""
        return (self / CONFIG).is_file()

    @property
    def config(self) -> Config:
        """The configuration that the run was made with."""
        if not self.exists:
            raise HansaError(f"{self.path}: no run here: it has no {CONFIG}.")
        return load(self / CONFIG)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of all rounds that were closed."""
        return metrics.read_history(self / METRICS) if (self / METRICS).is_file() else []

    @property
    def summary(self) -> dict[str, Any]:
        """How the run ended; made from its history where it has not."""
        if (self / SUMMARY).is_file():
            return _read_json(self / SUMMARY)
        return {"status": "unfinished", **metrics.summarize(self.history, self.config.evaluate.target)}

    @property
    def environment(self) -> dict[str, Any]:
        """The machine and versions that the run was made with."""
        return _read_json(self / ENVIRONMENT) if (self / ENVIRONMENT).is_file() else {}

    def create(self, config: Config, *, overwrite: bool = False) -> Run:
        """Make the folder for a new run and return the run, ready to advance."""
        if self.path.exists() and any(self.path.iterdir()):
            if not self.exists:
                raise HansaError(f"{self.path}: holds something that is not a run. Choose another folder.")
            if not overwrite:
                raise HansaError(
                    f"{self.path}: holds a run already. Go on with it by `hansa resume {self.path}`, or --overwrite it."
                )
            self._clear()
        living = living_run(config, build.federated(config))
        held = living.task.data  # type: ignore[attr-defined]
        io.make_folder(self.path)
        data.save_split(self / PARTITION, held.split, held.targets, repr(config.data.partition))
        _write_json(self / ENVIRONMENT, environment())
        # last, since a folder with a configuration is a run
        io.write_file(self / CONFIG, to_text(config, [f"composition: {living.algorithm!r}"]).encode())
        return living

    def reopen(self) -> Run:
        """The run of this folder as it was before its first round, on the very same data."""
        config = self.config
        if config.data.name in data.load_synthetic_names():
            return living_run(config, build.federated(config))
        bare = data.load(config.data.name, config.data.folder, **config.data.options)
        split = data.load_split(self / PARTITION, bare.targets)
        return living_run(config, data.with_clients(bare, split))

    def record(self, run: Run, record: Record) -> None:
        """A callback that appends a round's numbers, durable before the next round begins."""
        io.append(self / METRICS, (metrics.to_line(record) + "\n").encode())

    def finish(self, run: Run, status: str) -> dict[str, Any]:
        """Write the model and the summary."""
        found = {"status": status, **metrics.summarize(run.history, self.config.evaluate.target)}
        found["parameters"] = run.params.numel()
        found["lost_by_reason"] = _count(run)
        io.write_file(self / MODEL, save(_tensors(run), {"rounds": str(run.state.round), "run": run.id}))
        _write_json(self / SUMMARY, found)
        return found

    def _clear(self) -> None:
        for name in (CONFIG, PARTITION, ENVIRONMENT, METRICS, SUMMARY, MODEL, CHECKPOINT):
            io.remove(self / name)


def living_run(config: Config, held: data.FederatedData) -> Run:
    """A run that has not begun, of a configuration on its data."""
    run = Run(
        algorithm(config),
        build.task(config, held),
        seed=config.seed,
        dtype=build.dtype(config),
        quorum=config.quorum,
        evaluate_every=config.evaluate.every,
    )
    run.ledger = Ledger(slots.LINKS.build(config.links))
    return run


def measures(config: Config, run: Run) -> list[Callback]:
    """The callbacks that add what a configuration asks to be measured to each round's record."""
    found: list[Callback] = []
    if run.ledger.links is not None:
        found.append(add_simulated_seconds)
    if config.evaluate.train and isinstance(run.task, Task):
        found.append(global_loss(run.task, config.evaluate.every))
    return found


def add_simulated_seconds(run: Run, record: Record) -> None:
    """The time that the round's messages take on the link model."""
    record["simulated_seconds"] = run.ledger.rounds[-1].seconds


def global_loss(task: Task, every: int = 1) -> Callback:
    """A callback that measures the loss of the server's model on all training data: the global objective."""
    held = task.data
    rows = torch.cat([held.rows(client) for client in range(held.population)])
    whole = replace(held, test_inputs=held.inputs[rows], test_targets=held.targets[rows])  # type: ignore[type-var]
    everything = Task(task.model, task.loss, whole, metric=task.metric)
    shells: list[Any] = []

    def measure(run: Run, record: Record) -> None:
        if every and record["round"] % every == 0:
            if not shells:
                shells.append(everything.shell(run.dtype, run.device))
            record["global_loss"] = everything.evaluate(shells[0], run.state.vectors)["test_loss"]

    return measure


def environment() -> dict[str, Any]:
    """Versions and machine, so that a number can be traced to where it was made."""
    packages = {}
    for name in ("hansa", "torch", "numpy", "scipy", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed as a package"
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(Path(word).name if place == 0 else word for place, word in enumerate(sys.argv)),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": packages,
    }


def free_folder(parent: Path | str, title: str) -> Path:
    """A folder below ``parent`` named after the run, numbered where the name is taken.

    >>> free_folder("no/such/place", "FedAMS on fashion-mini!").as_posix()
    'no/such/place/fedams-on-fashion-mini'
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-.") or "run"
    found = Path(parent) / slug
    number = 2
    while found.exists():
        found = Path(parent) / f"{slug}-{number}"
        number += 1
    return found


def _tensors(run: Run) -> dict[str, torch.Tensor]:
    state = run.model.state_dict() if hasattr(run.task, "module") else {"params": run.params}
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}


def _count(run: Run) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in run.history:
        for reason, count in (record.get("reasons") or {}).items():
            found[reason] = found.get(reason, 0) + int(count)
    return dict(sorted(found.items()))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HansaError(f"{path}: is damaged: not JSON ({error}).") from error
    return dict(found)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    io.write_file(path, (json.dumps(metrics.plain(content), indent=2, allow_nan=False) + "\n").encode())


Stop = Callable[[], bool]
_ = Sequence
