"""Where clients train. The path to an accelerator is run here on pretended tensors of one, which refuse to be mixed
with those of the CPU as real ones do; what needs the hardware is skipped where there is none."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hansa
import warm
from contracts import small
from engine import problems
from hansa.config import build
from hansa.core import devices as places
from hansa.engine import Serial, auto_engine
from hansa.engine.processes import ProcessGroup, WorkerSetup
from hansa.engine.requests import NumericSettings, WorkersUnsupported, single_orders
from hansa.local import BaseTrainer
from hansa.rounds import round
from hansa.runs.driver import Run
from hansa.runs.experiment import build_run

SEEDED = SimpleNamespace(manual_seed=lambda seed: None)
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
    """Torch's device without numbers, of which some can be read nonetheless: a number is 1, what comes home is zero.

    ``reads`` counts what the host reads from the device, ``sent`` the copies to it, ``waits`` those of them that are
    not from pinned memory: the host waits for reads and for these. ``staged`` are the sources of copies under way."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.sent = self.waits = 0
        self.pinned, self.staged = set[int](), list[tuple[torch.Tensor, int]]()

    def reset(self) -> None:
        self.reads = self.sent = self.waits = 0

    def empty_pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Stands in for that of `hansa.core.devices`; what it returned is kept, so that no address is used twice."""
        memory = torch.empty_like(like)
        self.pinned.add(memory.data_ptr())
        return memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func in (aten._local_scalar_dense.default, aten._to_copy.default):
            there, target = args[0].device == META, kwargs.get("device")
            self.reads += there and (func is aten._local_scalar_dense.default or target == torch.device("cpu"))
            self.sent += (goes := not there and target == META)
            behind = goes and kwargs.get("non_blocking") and args[0].data_ptr() in self.pinned
            self.waits += goes and not behind
            if behind:
                self.staged.append((args[0], args[0]._version))
        if func is aten._local_scalar_dense.default and args[0].device == META:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is aten._to_copy.default and args[0].device == META and kwargs.get("device") == torch.device("cpu"):
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


def traffic(method, steps, monkeypatch):
    """Return the reads and copies of one order with so many steps."""
    task = hansa.Task(Smooth, nn.functional.cross_entropy, problems.data(), execution="eager")
    run = Run(method, task)
    opened = round.open_round(run.algorithm, run.state, task.population, "run", run.key)
    first = single_orders(opened.orders[0])[0]
    order = replace(first, works=tuple(work._replace(steps=steps) for work in first.works))
    monkeypatch.setattr(torch, "get_device_module", lambda device: SEEDED)
    got = {name: sent.packets[0].content for name, sent in order.broadcasts.items()}
    with Pretended() as pretended:
        monkeypatch.setattr(places, "PINNED_DEVICES", {"meta"})
        monkeypatch.setattr(places, "empty_pinned", pretended.empty_pinned)
        trainer = task.trainer(torch.float32, META)
        pretended.reset()
        (result,) = round._train(run.algorithm, [order], [got], trainer, task.population)
    assert len(result.changes)
    assert all(memory._version == version for memory, version in pretended.staged)  # not overwritten under way
    return pretended


class Smooth(nn.Module):
    """Without buffers and draws, whose comparison reads bits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(36), nn.Linear(36, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(x.flatten(1))))


SAM = hansa.presets.fedavg(participation=0.4).with_local(solver=hansa.local.sam(0.05))
CLIP = hansa.presets.fedavg(participation=0.4, local_momentum=0.9, max_grad_norm=0.1)
EVERY = {**{name: small.small(name) for name in small.NAMES}, "sam": SAM, "clip and momentum": CLIP}


@pytest.mark.parametrize("name", EVERY)
def test_the_host_waits_for_the_device_once_a_round_and_not_once_a_step(name, monkeypatch):
    """Compressed gossip is the exception: packets are made on the host, so every exchange is one read."""
    method = EVERY[name]
    few, many = (traffic(method, steps, monkeypatch) for steps in (2, 6))
    compressed = method.local.mixing is not None and method.local.mixing.compressor is not None
    assert many.reads - few.reads == (4 if compressed else 0)
    assert many.waits == few.waits
    assert many.staged
    if method.local.mixing is None:
        assert many.sent == few.sent


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
    assert second.test_sources.get(second, "")[0] is first.test_sources.get(first, "")[0]
    other = task.trainer(torch.float32 if dtype == torch.float64 else torch.float64, torch.device("cpu"))
    assert other.source is not first.source


def test_pretended_tensors_do_refuse_to_be_mixed():
    with Pretended(), pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, device=META) + torch.zeros(3)


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

    setup = WorkerSetup(hansa.presets.fedavg(), Recorded(), torch.float32, NumericSettings.current(), TWO)
    monkeypatch.setattr(torch.accelerator, "set_device_index", default.append)
    threads = torch.get_num_threads()
    for number in range(3):
        setup.make_trainer(number)
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
