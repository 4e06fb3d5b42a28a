"""Where clients train. The path to an accelerator is run here on pretended tensors of one, which refuse to be mixed
with those of the CPU as real ones do; what needs the hardware is skipped where there is none."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hansa
from engine import problems
from hansa.core import devices as places
from hansa.engine import auto_engine
from hansa.engine.processes import ProcessGroup
from hansa.rounds import round
from hansa.runs.driver import Run
from hansa.training.module_state import ModuleState

META, GPU = torch.device("meta"), torch.device("cuda:0")


class Residual(nn.Module):
    """As users write them: BatchNorm, dropout, a buffer of its own, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(144, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.stem(x))) + x * self.scale
        return self.head(self.drop(y.flatten(1)))


class Pretended(TorchDispatchMode):
    """Torch's device without numbers, of which some can be read nonetheless: a number is 1, what comes home is zero."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].device == META:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is aten._to_copy.default and args[0].device == META and kwargs.get("device") == places.CPU:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


METHODS = {
    "scaffold, clip": hansa.presets.scaffold(local_lr=0.1, steps=2, batch_size=5, max_grad_norm=1.0),
    "momentum": hansa.presets.fedavg(local_lr=0.1, steps=2, batch_size=5, local_momentum=0.9),
    "fedprox, decay": hansa.presets.fedprox(mu=0.1, local_lr=0.1, steps=2, batch_size=5, weight_decay=0.1),
    "local adam": hansa.presets.fedavg(local_lr=0.1, steps=2, batch_size=5).with_local(optimizer=hansa.server.adam()),
    "gossip": hansa.presets.ha_fed(local_lr=0.1, steps=2, batch_size=5, clusters=2, topology=hansa.gossip.ring()),
    "choco": hansa.presets.choco_sgd(local_lr=0.1, steps=2, batch_size=5),
    "dsgd": hansa.presets.dsgd(local_lr=0.1, steps=2, batch_size=5, topology=hansa.gossip.ring()),
}


@pytest.mark.parametrize("name", METHODS)
def test_training_stays_on_its_device_and_comes_home(name, monkeypatch):
    seen = (hansa.augment.crop(1), hansa.augment.flip()) if name == "momentum" else ()
    task = hansa.Task(Residual, nn.functional.cross_entropy, problems.data(), native=False, augment=seen)
    run = Run(METHODS[name], task)
    opened = round.open_round(run.algorithm, run.state, task.population, "run", run.key)
    order = replace(opened.orders[0], mean=True)
    monkeypatch.setattr("hansa.training.random_state._seed_device", lambda device, seed: None)
    monkeypatch.setattr(
        ModuleState, "check_constant_buffers", lambda private: None
    )  # compares bits, of which there are none
    got = {name: sent.packets[0].content for name, sent in order.broadcasts.items()}
    with Pretended():
        trainer = task.trainer(torch.float32, META)
        source = trainer.source
        assert (trainer.y.device, source.native_inputs.values.device, source.labels.device) == (META, META, META)
        assert {part.device for part in (*trainer.module.parameters(), *trainer.module.buffers())} == {META}
        moved = round.to_device(META, [order], [got])
        assert {vector.device for vector in moved[1][0].values()} == {META}
        (result,) = round._train_there(run.algorithm, *moved, trainer, task.population)
        (update, *_) = result.updates.values()
        assert update.delta.device == META
        assert result.mean.device == META
        back = round.to_cpu(result)
        score = trainer.evaluate(got, 0, 40)
    (update, *_) = back.updates.values()
    rows = [update.delta, update.buffers, back.mean, *update.memory.values()]
    assert {row.device.type for row in rows if row is not None} == {"cpu"}
    assert update.delta.shape == got["model"].shape
    assert score.loss_sum is not None


def test_pretended_tensors_do_refuse_to_be_mixed():
    with Pretended(), pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, device=META) + torch.zeros(3)


def test_everything_that_leaves_a_client_crosses_over(monkeypatch):
    """On a machine without another device the crossing is made to happen between the CPU and itself: same bits."""
    task, crossed = problems.task(Residual, native=False), []

    def train(algorithm, orders, got, trainer, population):
        crossed.append(1)
        results = round._train_there(algorithm, *round.to_device(places.CPU, orders, got), trainer, population)
        return [round.to_cpu(result) for result in results]

    method = METHODS["scaffold, clip"]
    expected = Run(method, task).advance(2)
    with monkeypatch.context() as patch:
        patch.setattr(round, "_train", train)
        found = Run(method, task, device="cpu:0").advance(2)
    assert crossed
    assert torch.equal(found.params, expected.params)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_workers_take_the_devices_in_turn(kind, caplog):
    task = problems.task(problems.perceptron, native=False)
    method = hansa.presets.fedavg(local_lr=0.1, steps=2, batch_size=8)
    expected = Run(method, task).advance(2)
    several = places.resolve_devices(["cpu", "cpu:0"])
    with caplog.at_level(logging.INFO, "hansa"):
        found = Run(method, task, device=["cpu", "cpu"], engine=auto_engine(None, 2, kind, several)).advance(2)
    assert f"2 workers: {'threads' if kind == 'thread' else 'processes'}" in caplog.text
    assert torch.equal(found.params, expected.params)


class Idle:
    """A process that is none."""

    pid, returncode, told = 0, 0, list[int]()

    def __init__(self, command, **options) -> None:
        Idle.told.append(json.loads(command[-1])["number"])

    def terminate(self) -> None: ...

    def wait(self, timeout=None) -> int:
        return 0


def test_a_worker_that_is_replaced_leaves_its_place_among_the_devices(monkeypatch):
    monkeypatch.setattr("hansa.engine.processes.subprocess.Popen", Idle)
    Idle.told.clear()
    with ProcessGroup(3) as group:
        group.stop(group.workers[1])
        group.spawn()
        group.spawn()
    assert Idle.told == [0, 1, 2, 1, 3]


def test_the_task_says_a_device_and_the_run_another(monkeypatch):
    monkeypatch.setattr(places, "available_devices", lambda: {places.CPU: "CPU", GPU: "pretended"})
    task = hansa.Task(problems.perceptron, nn.functional.cross_entropy, problems.data(), device="cuda")
    assert Run(hansa.presets.fedavg(), task).devices == (GPU,)
    run = Run(hansa.presets.fedavg(), task, device=["cpu", "cuda:0"])
    assert run.devices == (places.CPU, GPU)
    assert run.params.device == places.CPU


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("cuda:3", r"run\(device='cuda:3'\): there is no such device here. There is: cpu \(CPU\)"),
        (["cpu", "mps"], r"run\(device='mps'\): there is no such device"),
        ("gpu", r"run\(device='gpu'\): torch knows no such device. There is: cpu \(CPU\)"),
        ("meta", "no such device here"),
        ("cpu:1", "no such device here"),
        ([], r"expected a device such as 'cpu' or 'cuda:0'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(monkeypatch, asked, told):
    monkeypatch.setattr(places, "available_devices", lambda: {places.CPU: "CPU"})
    with pytest.raises(hansa.HansaError, match=told):
        hansa.run(hansa.presets.fedavg(), problems.task(), rounds=1, device=asked)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", METHODS)
def test_on_a_gpu_any_number_of_workers_gives_the_same_bits_near_those_of_the_cpu(name):
    task = problems.task(Residual, native=False)
    plain = Run(METHODS[name], task, device="cuda").advance(2)
    for kind in ("process", "thread"):
        method = METHODS[name]
        again = Run(method, task, device="cuda", engine=auto_engine(2, 2, kind, plain.devices)).advance(2)
        assert torch.equal(again.params, plain.params)
    assert plain.params.device == places.CPU
