"""Where clients train. The path to an accelerator is run on a simulated one, whose tensors do not mix with the CPU's;
what needs the hardware is skipped where there is none."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

import hansa
import warm
from contracts import small
from engine import problems
from hansa.config import build
from hansa.core import devices as places
from hansa.engine import Serial, auto_engine
from hansa.engine.processes import ProcessGroup, WorkerSetup
from hansa.engine.requests import WorkersUnsupported
from hansa.local import BaseTrainer
from hansa.runs.driver import Run
from hansa.runs.experiment import build_run
from hansa.training.random_state import NumericSettings

GPU = torch.device("cuda:0")


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


METHODS = {
    "scaffold, clip": hansa.presets.scaffold(local_lr=0.1, steps=2, batch_size=5, max_grad_norm=1.0),
    "momentum": hansa.presets.fedavg(local_lr=0.1, steps=2, batch_size=5, local_momentum=0.9),
    "fedprox, decay": hansa.presets.fedprox(mu=0.1, local_lr=0.1, steps=2, batch_size=5, weight_decay=0.1),
    "local adam": hansa.presets.fedavg(local_lr=0.1, steps=2, batch_size=5).with_local(optimizer=hansa.server.adam()),
    "gossip": hansa.presets.ha_fed(local_lr=0.1, steps=2, batch_size=5, clusters=2, topology=hansa.gossip.ring()),
    "choco": hansa.presets.choco_sgd(local_lr=0.1, steps=2, batch_size=5),
    "dsgd": hansa.presets.dsgd(local_lr=0.1, steps=2, batch_size=5, topology=hansa.gossip.ring()),
}


SAM = hansa.presets.fedavg(participation=0.4).with_local(solver=hansa.local.sam(0.05))
CLIP = hansa.presets.fedavg(participation=0.4, local_momentum=0.9, max_grad_norm=0.1)
EVERY = {**{name: small.small(name) for name in small.NAMES}, "sam": SAM, "clip and momentum": CLIP}


def test_an_accelerator_has_one_worker_unless_more_are_requested():
    assert auto_engine(None, 100, devices=(GPU,)) is Serial
    for requested, found, workers in ((3, (GPU,), 3), (None, (GPU, torch.device("cuda:1")), 2)):
        engine = auto_engine(requested, 100, devices=found)
        assert isinstance(engine, functools.partial)
        assert engine.keywords["workers"] == workers


class Adapted(nn.Module):
    """A frozen layer and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(36, 8).requires_grad_(False), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(x.flatten(1))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trainers_on_one_device_share_one_copy_of_data_and_frozen_weights(dtype):
    task = hansa.Task(Adapted, nn.functional.cross_entropy, problems.data(), execution="eager")
    first, second = (task.trainer(dtype, torch.device("cpu")) for _ in range(2))
    assert second.source is first.source
    assert second.module.base.weight.data_ptr() == first.module.base.weight.data_ptr()
    assert second.module.head.weight.data_ptr() != first.module.head.weight.data_ptr()
    vectors = task.start(hansa.Key(0), dtype)
    scores = [task.evaluate(trainer, vectors) for trainer in (first, second)]
    assert scores[0] == scores[1]
    assert second.test_sources[""][0] is first.test_sources[""][0]
    other = task.trainer(torch.float32 if dtype == torch.float64 else torch.float64, torch.device("cpu"))
    assert other.source is not first.source


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_workers_take_the_devices_in_turn(kind, caplog):
    task = problems.task(problems.perceptron, execution="eager")
    method = hansa.presets.fedavg(local_lr=0.1, steps=2, batch_size=8)
    expected = Run(method, task).advance(2)
    several = places.resolve_devices(["cpu", "cpu:0"])
    with caplog.at_level(logging.INFO, "hansa"):
        found = Run(method, task, device=["cpu", "cpu"], engine=auto_engine(None, 2, kind, several)).advance(2)
    assert f"2 workers: {'threads' if kind == 'thread' else 'processes'}" in caplog.text
    assert torch.equal(found.params, expected.params)


TWO = (GPU, torch.device("cuda:1"))


@pytest.mark.parametrize(
    ("found", "kinds"),
    [(TWO, ["process", "thread"]), ((GPU, GPU), ["thread", "process"]), ((GPU,), ["thread", "process"])],
)
def test_several_accelerators_have_a_process_each_and_one_has_threads(found, kinds, monkeypatch):
    """In one process Python's lock would let the workers of two devices start work in turn."""

    class Built:
        def __init__(self, *arguments) -> None:
            self.trainer = BaseTrainer()

    tried = []

    def refuse(*arguments, kind, **options):
        tried.append(kind)
        raise WorkersUnsupported("not here")

    monkeypatch.setattr("hansa.engine.auto.Serial", Built)
    monkeypatch.setattr("hansa.engine.auto.Pool", refuse)
    task = problems.task(problems.perceptron, execution="eager")
    engine = auto_engine(2, 2, devices=found)(hansa.presets.fedavg(), task, torch.float32, found[0])
    assert tried == kinds
    assert isinstance(engine, Built)


def test_a_worker_process_has_its_own_device_and_makes_it_the_default_one(monkeypatch):
    default, trained = [], []

    class Recorded:
        def trainer(self, dtype, device):
            trained.append(device)

    before, threads = NumericSettings.current(), torch.get_num_threads()
    setup = WorkerSetup(hansa.presets.fedavg(), Recorded(), torch.float32, before, TWO)
    monkeypatch.setattr(torch.accelerator, "set_device_index", default.append)
    for number in range(3):
        setup.make_trainer(number)
    assert torch.are_deterministic_algorithms_enabled()
    before.apply_to_process()
    torch.set_num_threads(threads)
    assert trained == [TWO[0], TWO[1], TWO[0]]
    assert default == [0, 1, 0]
    places.use_device(torch.device("cpu"))
    assert len(default) == 3


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
    with closing(ProcessGroup()) as group:
        for _ in range(3):
            group.spawn()
        group.stop(group.workers[1])
        group.spawn()
        group.spawn()
    assert Idle.told == [0, 1, 2, 1, 3]


def test_the_task_says_a_device_and_the_run_another(monkeypatch):
    monkeypatch.setattr(places, "available_devices", lambda: {torch.device("cpu"): "CPU", GPU: "pretended"})
    task = hansa.Task(problems.perceptron, nn.functional.cross_entropy, problems.data(), device="cuda")
    assert Run(hansa.presets.fedavg(), task).devices == (GPU,)
    run = Run(hansa.presets.fedavg(), task, device=["cpu", "cuda:0"])
    assert run.devices == (torch.device("cpu"), GPU)
    assert run.params.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("cuda:3", r"run\(device='cuda:3'\): there is no such device here. There is: cpu \(CPU\)"),
        (["cpu", "mps"], r"run\(device='mps'\): there is no such device"),
        ("gpu", r"run\(device='gpu'\): there is no such device here. There is: cpu \(CPU\)"),
        ("meta", "no such device here"),
        ("cpu:1", "no such device here"),
        ([], r"expected a device such as 'cpu' or 'cuda:0'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(monkeypatch, asked, told):
    monkeypatch.setattr(places, "available_devices", lambda: {torch.device("cpu"): "CPU"})
    with pytest.raises(hansa.HansaError, match=told):
        hansa.run(hansa.presets.fedavg(), problems.task(), rounds=1, device=asked)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", METHODS)
def test_on_a_gpu_any_number_of_workers_gives_the_same_bits_near_those_of_the_cpu(name):
    task = problems.task(Residual, execution="eager")
    plain = Run(METHODS[name], task, device="cuda").advance(2)
    for kind in ("process", "thread"):
        method = METHODS[name]
        again = Run(method, task, device="cuda", engine=auto_engine(2, 2, kind, plain.devices)).advance(2)
        assert torch.equal(again.params, plain.params)
    assert plain.params.device == torch.device("cpu")


def test_the_servers_device_is_the_cpu_unless_another_one_is_named(monkeypatch):
    monkeypatch.setattr(places, "available_devices", lambda: {torch.device("cpu"): "CPU"})
    task = problems.task(problems.perceptron)
    assert Run(hansa.presets.fedavg(), task).server_device == torch.device("cpu")
    assert hansa.config.from_yaml("rounds: 3").server_device == "cpu"
    for asked, told in (
        ("cuda", r"run\(server_device='cuda'\): there is no such device here. There is: cpu \(CPU\). Without"),
        ("gpu", r"run\(server_device='gpu'\): there is no such device here. There is: cpu"),
        (["cpu", "cpu"], r"run\(server_device=\['cpu', 'cpu'\]\): expected one device"),
    ):
        with pytest.raises(hansa.HansaError, match=told):
            hansa.run(hansa.presets.fedavg(), task, rounds=1, server_device=asked)
    config = hansa.config.from_yaml("{server_device: cuda, data: {name: synthetic, clients: 4}, model: logistic}")
    held = build.load_data(config)
    with pytest.raises(hansa.HansaError, match=r"Without server_device the server computes on the CPU"):
        build_run(config, held)


def test_a_server_on_a_device_without_float64_is_refused_for_such_models(monkeypatch):
    mps = torch.device("mps:0")
    monkeypatch.setattr(places, "available_devices", lambda: {torch.device("cpu"): "CPU", mps: "pretended"})
    with pytest.raises(hansa.HansaError, match=r"server_device='mps:0', dtype=torch.float64\): this device has no"):
        Run(hansa.presets.fedavg(), problems.task(problems.perceptron), dtype=torch.float64, server_device="mps")


TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(
    not hasattr(torch._C, "_acc"), reason="no simulated device: torch before 2.9 has no devices written in Python"
)
@pytest.mark.parametrize(("package", "least"), [("training", 7), ("rounds", 100)])
def test_presets_frozen_weights_and_determinism_on_a_simulated_device(package, least):
    file = TESTS / package / "on_simulated_device.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = warm.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout[-2000:]
