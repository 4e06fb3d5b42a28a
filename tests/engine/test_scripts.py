"""What a script, a notebook or a closure defines travels to worker processes by value, with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import hansa
from engine import problems
from hansa.engine.pool import Pool
from hansa.engine.serial import Serial
from hansa.engine.shared_memory import Packer, SharedMemory, unpack_object

pytestmark = pytest.mark.usefixtures("new_interpreters")

SCRIPT = """
import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import hansa

logging.basicConfig(level=logging.INFO)
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(90, 4, generator=generator)
targets = (inputs.sum(1, keepdim=True) > 0).float()
owners = torch.repeat_interleave(torch.arange(4), torch.tensor([9, 17, 24, 40]))
width = 6


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, width), nn.Dropout(0.2), nn.Linear(width, 1)

    def forward(self, x):
        return self.second(self.drop(torch.tanh(self.first(x))))


def weighted(positive):
    weight = torch.tensor(positive)
    return lambda output, target: nn.functional.binary_cross_entropy_with_logits(output, target, pos_weight=weight)


@dataclass(frozen=True, slots=True)
class signs(hansa.compress.Coder):
    scale: float = 0.01

    def payload(self, x, key):
        return [np.packbits(x < 0)]

    def read(self, payload, dim, dtype):
        negative = np.unpackbits(np.frombuffer(payload, np.uint8), count=dim)
        return (self.scale * (1 - 2.0 * negative)).astype(dtype)

    def max_payload(self, dim, itemsize):
        return -(-dim // 8)


held = hansa.data.from_arrays(inputs, targets, clients=owners, test=(inputs[:30], targets[:30]))
task = hansa.Task(lambda: Net(width), weighted(3.0), held, metric=lambda o, t: ((o > 0) == (t > 0.5)).flatten())
method = hansa.presets.fedcams(local_lr=0.1, steps=3, batch_size=5, compressor=signs(), server_lr=0.1)
runs = [hansa.run(method, task, rounds=2, workers=1)]
with hansa.workers(2) as block:
    runs.append(hansa.run(method, task, rounds=2))
    pids = [worker.popen.pid for worker in block._group.workers]
    found = hansa.compare({"a": method, "b": hansa.presets.fedavg(local_lr=0.1, steps=2)}, task, rounds=1, seeds=2)
    assert pids == [worker.popen.pid for worker in block._group.workers]
assert all(torch.equal(run.params, runs[0].params) for run in runs)
assert runs[0].history[-1]["test_accuracy"] == runs[1].history[-1]["test_accuracy"]
print("equal", len(pids), "in", __name__)
"""


def test_a_script_without_a_guard_uses_workers(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    found = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert found.stdout == "equal 2 in __main__\n", found.stderr
    assert found.stderr.count("workers: processes") == 5
    assert "serially" not in found.stderr


def test_a_class_that_only_the_script_has_comes_back_from_a_worker_as_itself():
    """Packers on both sides fall back to code by value; its tracker makes it the same class again."""
    kind = type("Own", (tuple,), {"__module__": "__main__"})
    there, back = SharedMemory(), SharedMemory()
    packed = Packer(there).pack({"row": torch.arange(3.0), "own": kind([1, 2])})
    found = unpack_object(packed, [there], copy=True)
    again = unpack_object(Packer(back).pack(found), [back], copy=True)
    assert type(again["own"]) is kind
    assert torch.equal(again["row"], torch.arange(3.0))


def test_memory_is_freed_between_runs_and_an_interrupted_run_leaves_the_workers_usable():
    task = problems.task(problems.convolution, execution="eager")
    method = hansa.presets.fedavg(local_lr=0.1, steps=2, batch_size=8)
    orders = problems.first_orders(method, task, torch.float32)
    expected = list(Serial(method, task, torch.float32, problems.CPU).run(orders))
    with hansa.workers(2) as block:
        group = block.acquire()
        assert block.acquire() is None
        pool = Pool(method, task, torch.float32, problems.CPU, workers=2, group=group).wait_until_ready()
        left = pool.run(orders)
        next(left)
        pool.close()
        memories = [group._shared, *(slot for worker in group.workers for slot in worker.slots)]
        assert [os.fstat(memory.fd).st_size for memory in memories] == [0] * len(memories)
        assert group._setup is None
        with Pool(method, task, torch.float32, problems.CPU, workers=2, group=group).wait_until_ready() as pool:
            reports = sorted(pool.run(orders), key=lambda report: report.clients[0])
        assert all(problems.reports_equal(a, b) for a, b in zip(reports, expected, strict=True))
        pids = [worker.popen for worker in group.workers]
    assert all(worker.returncode is not None for worker in pids)


def test_a_number_of_workers_that_is_none_is_refused():
    with pytest.raises(hansa.HansaError, match=r"workers\(count=0\).*None uses all cores"):
        hansa.workers(0)
