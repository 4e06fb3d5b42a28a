"""Every preset on a simulated accelerator, which computes: a run on it has the bits of the run on the CPU.

test_simulated_device.py runs this file in a process of its own; so does ``python -m pytest`` with its path.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hansa
from engine import problems
from engine.fake_ray import FakeRay
from engine.simulated_device import TRAFFIC, simulated_device
from engine.test_devices import EVERY, METHODS, Residual
from hansa.engine import Pool, ray_pool
from hansa.engine.ray_pool import RayPool
from hansa.runs.driver import Run

BOTH = {**EVERY, **{f"all clients: {name}": method for name, method in METHODS.items()}}


@pytest.fixture
def device(monkeypatch) -> Iterator[torch.device]:
    """The device. Native kernels, which the CPU has and no other device, are off: they differ in the last bits."""
    monkeypatch.setenv("HANSA_NATIVE", "off")
    with simulated_device() as found:
        yield found


@cache
def task(model=Residual, augment=()) -> hansa.Task:
    return hansa.Task(model, nn.functional.cross_entropy, problems.data(test=40), execution="eager", augment=augment)


def same(found: Run, expected: Run) -> None:
    for name, vector in expected.state.vectors.items():
        assert torch.equal(found.state.vectors[name], vector), name
    assert found.store.digest() == expected.store.digest()
    for ours, theirs in zip(found.history, expected.history, strict=True):
        assert repr({**ours, "seconds": 0}) == repr({**theirs, "seconds": 0})


@pytest.mark.parametrize("name", BOTH)
def test_every_preset_has_the_bits_of_the_cpu(name, device):
    words = {"augment": (hansa.augment.crop(1), hansa.augment.flip())} if "momentum" in name else {}
    expected = Run(BOTH[name], task(**words), evaluate_every=2).advance(2)
    assert (TRAFFIC.calls, TRAFFIC.copies_to_device) == (0, 0)
    found = Run(BOTH[name], task(**words), device=device, evaluate_every=2).advance(2)
    assert TRAFFIC.calls > 100
    same(found, expected)


class Attention(nn.Module):
    """Words of pixels: embedding, attention, normalisation and dropout have kernels of their own on many devices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.GroupNorm(2, 36), nn.Linear(8, 3)
        self.encode = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (4 * x.flatten(1)).long().clamp(0, 15)
        with sdpa_kernel(SDPBackend.MATH):  # the CPU has a fused kernel of its own
            return self.head(self.norm(self.encode(self.embed(words))).mean(dim=1))


def test_models_with_attention_and_dropout_have_the_bits_of_the_cpu(device):
    method = hansa.presets.fedadam(local_lr=0.1, steps=2, batch_size=5, participation=0.5)
    same(Run(method, task(Attention), device=device).advance(2), Run(method, task(Attention)).advance(2))


def test_evaluation_by_client_and_measures_have_the_bits_of_the_cpu(device):
    method = hansa.presets.scaffold(local_lr=0.1, steps=2, batch_size=5)
    held = hansa.data.from_arrays(
        *(part[:200] for part in (problems.data().inputs, problems.data().targets)),
        clients=[row % 3 if row % 2 else row % 5 for row in range(200)],
        test=(problems.data().test_inputs[:40], problems.data().test_targets[:40]),
        test_clients=[row % 5 for row in range(40)],
    )
    runs = []
    for place in ("cpu", device):
        mine = hansa.Task(Residual, nn.functional.cross_entropy, held)
        words = {"per_client": True, "personalise": {"steps": 2}, "measures": [hansa.measures.local_mean_loss(mine)]}
        runs.append(Run(method, mine, device=place, **words).advance(2))
    same(runs[1], runs[0])
    assert any(name.startswith("client_") for name in runs[0].history[-1])


def test_threads_on_the_device_share_its_data_and_have_the_bits_of_one(device):
    method = METHODS["scaffold, clip"]
    model = problems.convolution
    expected = Run(method, task(model), device=device).advance(2)
    same(Run(method, task(model), device=device, engine=partial(Pool, workers=2, kind="thread")).advance(2), expected)


@pytest.mark.parametrize("name", ["scaffold, clip", "gossip"])
def test_ray_actors_with_a_fraction_of_the_device_have_the_bits_of_the_cpu(name, device, monkeypatch):
    monkeypatch.setenv("HANSA_WORKER", "")  # which actors set, here in this process
    monkeypatch.setattr(ray_pool, "_import_ray", lambda: FakeRay(gpus=1))
    expected = Run(METHODS[name], task()).advance(2)
    TRAFFIC.reset()
    same(Run(METHODS[name], task(), engine=partial(RayPool, workers=2, gpus=0.5)).advance(2), expected)
    assert TRAFFIC.calls > 100


def test_a_run_resumed_on_the_device_has_the_bits_of_one_that_was_not(device, tmp_path):
    method = METHODS["momentum"]
    expected = hansa.run(method, task(), rounds=4, device=device, seed=3)
    hansa.run(method, task(), rounds=2, device=device, seed=3, out=tmp_path / "run")
    resumed = hansa.resume(tmp_path / "run", method, task(), rounds=4, device=device)
    assert torch.equal(resumed.params, expected.params)


def waits(method, steps: int, device: torch.device) -> tuple[int, int]:
    """Return how often the host waits, and how often it copies to the device, in the second of two rounds."""
    timed = method.with_local(steps=hansa.local.fixed(steps))
    run = Run(timed, task(problems.convolution), device=device, evaluate_every=2).advance(1)
    TRAFFIC.reset()
    run.advance(1)
    return TRAFFIC.waits, TRAFFIC.copies_to_device


@pytest.mark.parametrize("name", [name for name, method in EVERY.items() if method.local.mixing is None])
def test_the_host_waits_once_a_round_and_not_once_a_step(name, device):
    assert waits(EVERY[name], 1, device) == waits(EVERY[name], 3, device)


def test_the_device_counts_what_the_host_waits_for_and_refuses_what_a_device_refuses(device):
    x = torch.arange(6.0).view(2, 3).to(device)
    assert (TRAFFIC.waits, TRAFFIC.copies_to_device) == (0, 1)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.mm(x, torch.ones(3, 2))
    with pytest.raises(TypeError, match="simulated"):
        x.numpy()
    assert torch.equal((x + torch.tensor(1.0)).cpu(), torch.arange(1.0, 7.0).view(2, 3))
    assert (TRAFFIC.waits, TRAFFIC.copies_to_cpu) == (1, 1)
    assert (x[1].sum().item(), bool(x[0, 0] == 0), x.tolist()[1]) == (12.0, True, [3.0, 4.0, 5.0])
    assert TRAFFIC.waits == 4
    assert x[x > 2].device == device
    assert TRAFFIC.waits == 5
    view = x.T[1:]
    view.mul_(2)
    assert torch.equal(x.cpu(), torch.tensor([[0.0, 2.0, 4.0], [3.0, 8.0, 10.0]]))
    assert torch.add(view, view, out=torch.empty(0, device=device)).shape == (2, 2)


def test_outside_of_its_block_there_is_no_such_device():
    with simulated_device():
        assert "simulated:0" in map(str, hansa.core.devices.available_devices())
    with pytest.raises(hansa.HansaError, match="there is no such device here"):
        Run(hansa.presets.fedavg(), task(), device="simulated")
