"""Arrays that stay in their files: the same rows, the same runs, and nothing copied to workers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import HansaError, presets
from hansa.data import MemmapArray, from_arrays, from_memmap

pytestmark = pytest.mark.usefixtures("shared_workers")

DRAW = np.random.default_rng(8)
X, Y = DRAW.normal(size=(26, 4)).astype(np.float32), DRAW.integers(0, 3, 26)
OWNERS = np.repeat([0, 1, 2], [5, 9, 12])
OPTIONS = {"local_lr": 0.1, "steps": 3, "batch_size": 4}


@pytest.fixture
def folder(tmp_path):
    for name, array in (("inputs", X), ("targets", Y), ("owners", OWNERS), ("test_inputs", X[:7])):
        np.save(tmp_path / f"{name}.npy", array)
    np.save(tmp_path / "test_targets.npy", Y[:7])
    return tmp_path


def trained(data, workers=1, execution="native"):
    layers = lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))  # noqa: E731
    task = hansa.Task(layers, cross_entropy, data, execution=execution)
    return hansa.run(presets.fedavg(**OPTIONS), task, rounds=2, workers=workers)


@pytest.mark.parametrize("execution", ["native", "eager"])
def test_a_run_on_mapped_rows_is_the_run_in_memory(folder, execution):
    """Mapped test rows are evaluated eagerly: with native code for those in memory the loss is that up to rounding."""
    data = from_memmap(folder)
    assert isinstance(data.inputs, MemmapArray)
    wanted = trained(from_arrays(X, Y, clients=OWNERS, test=(X[:7], Y[:7])), execution=execution)
    found = trained(data, execution=execution)
    assert torch.equal(found.params, wanted.params)
    losses = [run.history[-1]["test_loss"] for run in (found, wanted)]
    assert losses[0] == (pytest.approx(losses[1], rel=1e-6) if execution == "native" else losses[1])
    assert torch.equal(trained(data, workers=2, execution=execution).params, wanted.params)


def test_a_worker_is_sent_the_path(folder):
    sent = pickle.dumps(from_memmap(folder).inputs)
    assert len(sent) < 500
    assert torch.equal(pickle.loads(sent).gather(torch.tensor([3, 1])), torch.from_numpy(X[[3, 1]]))  # noqa: S301


def test_bytes_are_pixels_and_dicts_have_names(tmp_path):
    np.save(tmp_path / "inputs.pixels.npy", np.full((3, 1, 2, 2), 255, np.uint8))
    np.save(tmp_path / "inputs.ids.npy", np.arange(6, dtype=np.int32).reshape(3, 2))
    np.save(tmp_path / "targets.npy", np.arange(3))
    data = from_memmap(tmp_path, clients=2)
    assert set(data.inputs) == {"pixels", "ids"}
    assert data.inputs["pixels"].gather(torch.tensor([0])).flatten().tolist() == [1.0] * 4
    assert data.inputs["ids"].gather(torch.tensor([2])).tolist() == [[4, 5]]
    assert data.inputs["ids"].dtype == torch.int64


def test_a_resume_notices_another_file(folder, tmp_path):
    out = tmp_path / "run"
    make = lambda: hansa.Task(lambda: nn.Linear(4, 3), cross_entropy, from_memmap(folder))  # noqa: E731
    hansa.run(presets.fedavg(**OPTIONS), make(), rounds=1, workers=1, out=out)
    np.save(folder / "inputs.npy", X + 1)
    with pytest.raises(HansaError, match="data"):
        hansa.run(presets.fedavg(**OPTIONS), make(), rounds=2, workers=1, out=out)


def test_what_is_no_such_file_is_told(tmp_path):
    with pytest.raises(HansaError, match="No such file"):
        MemmapArray(tmp_path / "inputs.npy")
    (tmp_path / "inputs.npy").write_bytes(b"nothing")
    with pytest.raises(HansaError, match=r"inputs.npy: expected a .npy"):
        MemmapArray(tmp_path / "inputs.npy")
    np.save(tmp_path / "inputs.npy", X)
    with pytest.raises(HansaError, match="no targets"):
        from_memmap(tmp_path)
