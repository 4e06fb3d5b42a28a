"""What a run leaves on disk: its configuration, who held which data, every round's numbers, the model, checkpoints.

=======================  =======================================================================
config.yaml              the resolved configuration; ``hansa run config.yaml`` repeats the run
partition.safetensors    who held which samples
environment.json         versions and machine
metrics.jsonl            a line of JSON a round
summary.json             how it ended, in a few numbers
model.safetensors        the model after the last round
checkpoint/, clients/    all that is needed to go on exactly where the run stopped
=======================  =======================================================================
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from hansa import data, native
from hansa.config import Config, algorithm, load, to_text
from hansa.errors import HansaError
from hansa.runs import metrics
from hansa.runs.driver import Record, Run
from hansa.store import io

CONFIG = "config.yaml"
PARTITION = "partition.safetensors"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
CHECKPOINT = "checkpoint"
CLIENTS = "clients"
NAMES = (CONFIG, PARTITION, METRICS, SUMMARY, MODEL, CHECKPOINT, CLIENTS, ENVIRONMENT)
"""All that is ours in a folder, in the order in which it is cleared away: without the first it is no run any more, and
with the last it is still ours."""

FINISHED, STOPPED, FAILED, UNFINISHED = "finished", "stopped", "failed", "unfinished"


class RunFolder:
    """The folder of one run, there or yet to be made."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    @property
    def exists(self) -> bool:
        """Whether a run has been begun here."""
        return (self / CONFIG).is_file()

    @property
    def config(self) -> Config:
        """The configuration that the run was made with."""
        if not self.exists:
            raise HansaError(f"{self}: no run here, for there is no {CONFIG}.")
        return load(self / CONFIG)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of all closed rounds."""
        return metrics.read_history(self / METRICS) if (self / METRICS).is_file() else []

    @property
    def summary(self) -> dict[str, Any]:
        """How the run ended; made from its history where it has not."""
        if (self / SUMMARY).is_file():
            return _read_json(self / SUMMARY)
        return {"status": UNFINISHED, **metrics.summarize(self.history, self.config.evaluate.target)}

    @property
    def environment(self) -> dict[str, Any]:
        """The machine and versions that the run was made with."""
        return _read_json(self / ENVIRONMENT) if (self / ENVIRONMENT).is_file() else {}

    def claim(self, *, overwrite: bool = False) -> None:
        """Refuse a folder that holds something; with ``overwrite`` an older run in it is cleared away."""
        if not self.path.exists():
            return
        if not self.path.is_dir() or not (self.exists or self._barely_begun()):
            raise HansaError(f"{self}: holds something that is not a run. Choose another folder.")
        if self.exists and not overwrite:
            raise HansaError(
                f"{self}: holds a run already. `hansa resume {self}` goes on with it, --overwrite starts anew."
            )
        for name in NAMES:
            io.remove(self / (name + io.ASIDE))
            io.remove(self / name)

    def _barely_begun(self) -> bool:
        """Whether all there is, if anything, was left by a run that was killed before it had its configuration."""
        found = {path.name.removesuffix(io.ASIDE) for path in self.path.iterdir()}
        return not found or (ENVIRONMENT in found and found.issubset(NAMES))

    def begin(self, config: Config, run: Run) -> None:
        """Write down what is known before the first round; the configuration comes when the run can be taken up."""
        held = getattr(run.task, "data", None)
        io.make_folder(self.path.absolute())
        _write_json(self / ENVIRONMENT, environment())
        if isinstance(held, data.FederatedData):
            data.save_split(self / PARTITION, held.split, held.targets, str(config.data.partition))

    def write_config(self, config: Config) -> None:
        """The resolved configuration, led by the composition that it stands for."""
        io.write_file(self / CONFIG, to_text(config, [f"composition: {algorithm(config)!r}"]).encode())

    def record(self, run: Run, record: Record) -> None:
        """A callback that appends a round's numbers, durable before the next round begins."""
        io.append(self / METRICS, (metrics.to_line(record) + "\n").encode())

    def rewind(self, round: int) -> list[dict[str, Any]]:
        """Forget the numbers of rounds after this one, which are about to be run again; return those kept."""
        kept = [record for record in self.history if record["round"] <= round]
        if [record["round"] for record in kept] != list(range(1, round + 1)):
            raise HansaError(f"{self / METRICS}: expected the rounds 1 to {round}, found {len(kept)} of them.")
        io.write_file(self / METRICS, "".join(metrics.to_line(record) + "\n" for record in kept).encode())
        io.remove(self / SUMMARY)
        return kept

    def finish(self, run: Run, status: str, target: float | None = None) -> dict[str, Any]:
        """Write the model and the summary."""
        reasons: Counter[str] = Counter()
        for record in run.history:
            reasons.update(record.get("reasons") or {})
        found = {
            "status": status,
            **metrics.summarize(run.history, target),
            "lost_by_reason": dict(sorted(reasons.items())),
            "parameters": run.params.numel(),
            "clients": run.task.population.count,
        }
        # one fact alone, since several would be written in no fixed order
        io.write_file(self / MODEL, save(_tensors(run), {"run": f"{run.id} after round {run.state.round}"}))
        _write_json(self / SUMMARY, found)
        return found


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
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "native kernels": native.instruction_set() or "none",
        "packages": packages,
    }


def arithmetic() -> str:
    """What the last bits of a result depend on beside the configuration."""
    return f"torch {version('torch')}, {platform.machine()}, native kernels: {native.instruction_set() or 'none'}"


def free_folder(parent: Path | str, title: str) -> Path:
    """A folder below ``parent`` named after the run, numbered where the name is taken.

    >>> free_folder("no/such/place", "FedAMS on fashion-mini!").as_posix()
    'no/such/place/fedams-on-fashion-mini'
    """
    found = Path(parent) / slug(title)
    number = 2
    while found.exists():
        found = Path(parent) / f"{slug(title)}-{number}"
        number += 1
    return found


def slug(title: str) -> str:
    """A title as the name of a folder.

    >>> slug("local.lr=0.1, FedAMS")
    'local.lr-0.1-fedams'
    """
    return re.sub(r"[^a-z0-9._]+", "-", title.lower()).strip("-.") or "run"


def _tensors(run: Run) -> dict[str, torch.Tensor]:
    state: Mapping[str, torch.Tensor] = run.model.state_dict() if hasattr(run.task, "module") else {"x": run.params}
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}


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
        raise HansaError(f"{path}: damaged: not JSON ({error}).") from error
    return dict(found)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    io.write_file(path, (json.dumps(metrics.plain(content), indent=2, allow_nan=False) + "\n").encode())
