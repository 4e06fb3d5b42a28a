"""Folders of runs under siege: started at once, their data and code changed.

Runs are started in twos to fours under one name; for every preset there are runs whose data,
targets, partition, model or version changed before they were resumed.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hansa import data
from hansa.config import build, from_preset
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.presets import catalogue
from hansa.runs import provenance
from hansa.runs.experiment import open_run
from hansa.runs.folder import RunFolder
from torture.disks import Hasty, use_disk
from torture.kill import Child, finish

SMALL = ("data.name=synthetic", "data.clients=6", "rounds=3", "local.steps=1", "workers=1")
NETS = """\
import hansa
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(60, 4), nn.Linear(4, 10)

    def forward(self, x):
        return self.last(self.first(x).relu())


@hansa.component
def make():
    return Net()
"""


def words(*more: str, seed: int = 0) -> list[str]:
    sets = [argument for change in (*SMALL, *more) for argument in ("--set", change)]
    return ["--preset", "fedavg", *sets, "--seed", str(seed), "--quiet"]


def model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    left, right = model(one), model(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def starts(count: int, place: Path, seed: int = 0) -> Counter[str]:
    """Runs of several seeds started at the same moment: every one has a folder, and in it its own run whole."""
    draw = Key(seed).child("starts").numpy()
    alone: dict[int, Path] = {}
    for number in range(4):
        alone[number] = place / f"alone {number}"
        finish(Child(["run", *words(seed=number), "--out", str(alone[number])], place / "alone.log"))
    seen: Counter[str] = Counter()
    group = 0
    while seen["started"] < count:
        group += 1
        size, every = 2 + int(draw.integers(3)), int(draw.integers(2))
        (place / f"group {group}").mkdir()
        with chdir(place / f"group {group}"):
            children = [
                Child(["run", *words(f"checkpoint.every={every}", seed=number)], Path(f"{number}.log"))
                for number in range(size)
            ]
            for child in children:
                finish(child)
            found = sorted(Path("runs").iterdir())
            assert len(found) == size, f"group {group}: {len(found)} folders for {size} runs"
            for folder in found:
                run = RunFolder(folder)
                assert [record["round"] for record in run.history] == [1, 2, 3], f"group {group}: {folder}"
                assert same(folder, alone[run.config.seed]), f"group {group}: {folder}"
            assert len({RunFolder(folder).config.seed for folder in found}) == size
        seen["started"] += size
    return seen


def _other_data(which: str) -> Callable[..., data.FederatedData]:
    """The data, one of its numbers another."""
    real = build.load_data

    def changed(*told: Any, **more: Any) -> data.FederatedData:
        held = real(*told, **more)
        tensor = getattr(held, which).clone()
        flat = tensor.reshape(-1)
        flat[len(flat) // 2] = (flat[len(flat) // 2] + 1) % 10
        return replace(held, **{which: tensor})

    return changed


def _other_partition(folder: Path) -> None:
    """Two rows change owners; the file is as whole as the old one."""
    held = build.load_data(RunFolder(folder).config)
    split = data.load_split(folder / "partition.safetensors", held.targets)
    index = split.index.clone()
    index[[0, -1]] = index[[-1, 0]]
    data.save_split(folder / "partition.safetensors", data.Split(index, split.offsets), held.targets)


def changed(preset: str, place: Path) -> Counter[str]:
    """Every kind of change to a run of one preset: refused by name, and gone on with when accepted, which is noted."""
    with pytest.MonkeyPatch.context() as patch:
        return _changed(preset, place, patch)


def _changed(preset: str, place: Path, patch: pytest.MonkeyPatch) -> Counter[str]:
    nets = place / "nets"
    nets.mkdir(parents=True)
    module = "torture_nets"
    (nets / f"{module}.py").write_text(NETS)
    patch.syspath_prepend(nets)
    sys.modules.pop(module, None)
    told = [*SMALL, f"model={{factory: '{module}:make'}}"]
    if preset in ("cafga", "ha_fed"):
        told.append("gossip.clusters=2")
    seen: Counter[str] = Counter()

    def edit(before: str, after: str) -> None:
        assert before in NETS
        (nets / f"{module}.py").write_text(NETS.replace(before, after))
        importlib.reload(sys.modules[module])

    def attempt(kind: str, folder: Path) -> None:
        with pytest.raises(HansaError, match=f"changed since the run was started: {kind}"):
            open_run(None, folder, rounds=4)
        open_run(None, folder, rounds=4, accept=[kind]).execute()
        notes = [note.changed for note in RunFolder(folder).marker.accepted]
        assert notes == [[kind]], f"{preset}, {kind}: not noted"
        # what was accepted is what it is bound to now
        assert open_run(None, folder, rounds=5).execute()["rounds"] == 5
        seen[kind] += 1

    def fresh(kind: str) -> Path:
        open_run(from_preset(preset, told), place / kind).execute()
        return place / kind

    for which in ("inputs", "targets", "test_targets"):
        folder = fresh(which)
        with patch.context() as own:
            own.setattr(build, "load_data", _other_data(which))
            attempt("data", folder)
    _other_partition(folder := fresh("partition"))
    attempt("partition", folder)
    edits = ((".relu()", ".tanh()"), ("nn.Linear(4, 10)", "nn.Linear(4, 10).float()"))
    for number, (before, after) in enumerate(edits):
        folder = fresh(f"model {number}")
        edit(before, after)
        attempt("model", folder)
        edit("", "")
    folder = fresh("version")
    patch.setattr(provenance, "__version__", "0.0.9")
    attempt("version", folder)
    return seen


def run(count: int, place: Path, seed: int = 0) -> Counter[str]:
    """All of it; returns what was tried how often."""
    for name in ("hansa.runs.experiment", "hansa.cli.app", "hansa.study.report.progress", "hansa.study.report"):
        importlib.import_module(name)  # once, for all that are forked
    torch.set_num_threads(1)
    logging.getLogger("hansa").setLevel(logging.ERROR)
    place.mkdir(parents=True, exist_ok=True)
    try:
        (place / "starts").mkdir()
        seen = starts(count, place / "starts", seed)
        with use_disk(Hasty()):
            for preset in list(catalogue())[: max(1, count // 4)]:
                seen += Counter({f"changed {kind}": n for kind, n in changed(preset, place / preset).items()})
        return seen
    finally:
        logging.getLogger("hansa").setLevel(logging.NOTSET)
