"""The server's arithmetic on a simulated accelerator, which computes with the CPU's kernels: the bits are those of the
CPU without native kernels. tests/engine/test_devices.py runs this in a process of its own, since torch must
know a device before the first gradient of a process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import hansa
from engine import problems
from engine.simulated_device import MODULE, TRAFFIC, Traffic, empty_pinned, simulated_device
from engine.test_devices import EVERY, METHODS, Residual
from golden import problems as golden
from golden.cases import CASES
from hansa import aggregate, presets, server
from hansa.aggregate.base import Combined
from hansa.cli.app import app
from hansa.compress import Packet
from hansa.core import devices as places
from hansa.core.vectors.arithmetic import fingerprint
from hansa.engine import Loopback, Pool
from hansa.engine.requests import single_orders
from hansa.local.solvers import Correction, SolverResult
from hansa.rounds import round
from hansa.runs.driver import Run
from hansa.runs.folder import RunFolder
from recorded import through_disk

BOTH = {**EVERY, **{f"all clients: {name}": method for name, method in METHODS.items()}}


@pytest.fixture(autouse=True)
def device(monkeypatch) -> Iterator[torch.device]:
    """The device. Native kernels, which the CPU has and no other device, are off: they differ in the last bits."""
    monkeypatch.setenv("HANSA_NATIVE", "off")
    with simulated_device() as found:
        yield found


@cache
def task(model: Any = Residual) -> hansa.Task:
    return hansa.Task(model, nn.functional.cross_entropy, problems.data(test=40), execution="eager")


class Wide(nn.Module):
    """A model that is large beside its data, for regression."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4096), nn.Linear(4096, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@cache
def regression() -> hansa.Task:
    """Five clients with unequal numbers of rows."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 6, generator=draw), torch.randn(60, 24, generator=draw)
    owners = [min(row // 3 % 7, 4) for row in range(60)]
    held = hansa.data.from_arrays(x, y, clients=owners, test=(x[:9], y[:9]))
    return hansa.Task(Wide, squared_error, held, execution="eager")


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (dict, list)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(each)


def on_cpu(tree: Any) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors(tree)]


def same(found: Run, expected: Run) -> None:
    """All that a checkpoint holds, the clients' memory and the history are equal, bit for bit."""
    ours, theirs = (on_cpu(run.state.tree()) for run in (found, expected))
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) or (a.isnan() == b.isnan()).all() for a, b in zip(ours, theirs, strict=True))
    for name, vector in expected.host_vectors.items():
        assert torch.equal(found.host_vectors[name], vector), name
    assert found.store.digest() == expected.store.digest()
    for a, b in zip(found.history, expected.history, strict=True):
        assert json.dumps({**a, "seconds": 0}) == json.dumps({**b, "seconds": 0})  # as files have them


def pair(method: hansa.Algorithm, device: torch.device, rounds: int = 3, made: Any = None, **words: Any) -> Run:
    """Return a run on the device that has the bits of the run on the CPU."""
    made = task() if made is None else made
    expected = Run(method, made, **words).advance(rounds)
    found = Run(method, made, device=device, server_device=device, **words).advance(rounds)
    assert {vector.device for vector in found.state.vectors.values()} == {device}
    same(found, expected)
    return found


@pytest.mark.parametrize("name", BOTH)
def test_every_preset_has_the_bits_of_the_cpu(name, device):
    found = pair(BOTH[name], device)
    places = {tensor.device for tensor in tensors(found.state.server)}
    assert places <= {device}, "the optimizer's state is where the vectors are"
    assert found.params.device == torch.device("cpu")


@pytest.mark.parametrize("on_device", ["device", "server_device"])
@pytest.mark.parametrize("name", ["fedams", "scaffold", "fedcams", "fedbuff", "gossip", "momentum"])
def test_clients_or_the_server_alone_on_the_device_have_the_bits_of_the_cpu(name, on_device, device):
    seen = (hansa.augment.crop(1), hansa.augment.flip()) if name == "momentum" else ()
    made = hansa.Task(Residual, nn.functional.cross_entropy, problems.data(test=40), execution="eager", augment=seen)
    method = {**BOTH, **METHODS}[name]
    expected = Run(method, made, evaluate_every=2).advance(3)
    assert (TRAFFIC.calls, TRAFFIC.copies_to_device) == (0, 0)
    same(Run(method, made, evaluate_every=2, **{on_device: device}).advance(3), expected)
    assert TRAFFIC.calls > 10


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("server: ", "aggregate: "))])
def test_every_server_optimizer_and_aggregator_has_the_bits_of_the_cpu(name, device):
    found = pair(CASES[name].method(), device, made=golden.task(CASES[name].task))
    assert all(tensor.device == device for tensor in tensors(found.state.server))


SEEN: dict[str, set[str]] = {}


def saw(name: str, *vectors: torch.Tensor) -> None:
    SEEN.setdefault(name, set()).update(vector.device.type for vector in vectors)


@dataclass(frozen=True)
class numpy_mean:
    """An aggregator as a user writes it, with NumPy and without traits."""

    def init(self, dim, population):
        return {"count": torch.zeros(1)}

    def combine(self, updates, state, ctx):
        saw("aggregate", *(update.vector for update in updates), state["count"])
        rows = [update.vector.numpy() for update in sorted(updates, key=lambda update: update.client)]
        return Combined(torch.from_numpy(sum(rows) / len(rows)), {"count": state["count"] + 1}, {})


@dataclass(frozen=True)
class numpy_momentum:
    """A server transform with NumPy."""

    def init(self, x):
        return {"m": torch.zeros_like(x)}

    def update(self, delta, state, ctx):
        saw("server", delta, state["m"])
        m = torch.from_numpy(0.5 * state["m"].numpy() + delta.numpy())
        return m, {"m": m}


@dataclass(frozen=True)
class halving:
    """An uplink with NumPy that sends half of an update and keeps the rest."""

    memory: ClassVar[tuple[str, ...]] = ("rest",)

    def send(self, x, memory, key):
        saw("uplink", x, *memory.values())
        total = x.numpy() + (memory["rest"].numpy() if memory else 0)
        half = torch.from_numpy(0.5 * total)
        return Packet.of(half), {"rest": torch.from_numpy(total) - half}

    def receive(self, packet, *, dim, dtype):
        return hansa.compress.decode(packet, dim=dim, dtype=dtype)


@dataclass(frozen=True)
class numpy_solver:
    """A local solver whose report and memory are made with NumPy."""

    channels: ClassVar[tuple[str, ...]] = ("control",)
    memory: ClassVar[tuple[str, ...]] = ("last",)

    def correction(self, got, memory):
        return Correction(shift=0.1 * got["control"])

    def finish(self, change, steps, lr, got, memory):
        saw("solver", change, *got.values(), *memory.values())
        last = torch.from_numpy(change.numpy() / steps)
        return SolverResult({"control": last - memory["last"] if memory else last}, {"last": last})


def test_own_components_that_use_numpy_are_given_tensors_of_the_cpu(device):
    SEEN.clear()
    method = presets.fedavg(steps=2, batch_size=5, participation=0.7).exchange(
        local={"solver": numpy_solver()},
        channels={
            "model": {"aggregate": numpy_mean(), "server": numpy_momentum(), "uplink": halving()},
            "control": {"server": server.scale(0.5)},
        },
    )
    found = pair(method, device)
    assert {name: {"cpu"} for name in ("aggregate", "server", "uplink", "solver")} == SEEN
    assert found.state.server["model"]["m"].device == torch.device("cpu")
    assert server.chain(server.momentum(), server.scale(0.5)).on_device
    assert not server.chain(server.momentum(), numpy_momentum()).on_device


def traffic(method: hansa.Algorithm, device: torch.device, **words: Any) -> tuple[float, float]:
    """Return the bytes from the device to the host and back in a round, in models."""
    counted: list[tuple[int, int]] = []

    def count(run: Run, record: Any) -> None:
        counted.append((TRAFFIC.bytes_to_cpu, TRAFFIC.bytes_to_device))
        TRAFFIC.reset()

    run = Run(method, regression(), device=device, **words).advance(3, [count])
    home, out = counted[-1]
    return home / run.params.nbytes, out / run.params.nbytes


UNCOMPRESSED = {
    "fedavg": presets.fedavg(steps=2, batch_size=4),
    "fedams": presets.fedams(steps=2, batch_size=4, weights="samples"),
    "fedprox": presets.fedprox(mu=0.1, steps=2, batch_size=4),
    "median": presets.fedavg(steps=2, batch_size=4).on("model", aggregate=aggregate.median()),
    "gossip": presets.ha_fed(steps=2, batch_size=4, clusters=2),
    "fedbuff": presets.fedbuff(steps=2, batch_size=4),
}


@pytest.mark.parametrize("name", UNCOMPRESSED)
def test_neither_the_model_nor_an_uncompressed_update_visits_the_host(name, device):
    """Of the model only the sums of its fingerprint are read, a thousandth of it."""
    home, out = traffic(UNCOMPRESSED[name], device, server_device=device)
    assert home < 0.01
    assert out < 0.02  # of 5 clients: positions of batches
    home, out = traffic(UNCOMPRESSED[name], device)
    assert home >= 1
    assert out >= 1


def test_declared_copies_of_compressed_uplinks_and_of_client_memory(device):
    """An update is copied to the host to be encoded, and as often to the device as it is decoded; SCAFFOLD's control
    variates are the clients' memory, which is on the host; FedAWARE's aggregate is made there."""
    compressed = traffic(presets.fedcams(steps=2, batch_size=4), device, server_device=device)
    assert 5 <= compressed[0] < 5.02
    assert 10 <= compressed[1] < 10.02
    controlled = traffic(presets.scaffold(steps=2, batch_size=4), device, server_device=device)
    assert 5 <= controlled[0] < 5.02
    assert 10 <= controlled[1] < 10.02
    on_host = traffic(presets.fedaware(steps=2, batch_size=4), device, server_device=device)
    assert 5 <= on_host[0] < 5.02
    assert 1 <= on_host[1] < 1.02


def test_a_checkpoint_copies_every_vector_once(device, tmp_path):
    run = Run(presets.fedams(steps=2, batch_size=4), regression(), device=device, server_device=device).advance(2)
    state, size = run.checkpoint_state(), run.params.nbytes
    TRAFFIC.reset()
    through_disk(tmp_path, state)
    assert (TRAFFIC.copies_to_cpu, TRAFFIC.bytes_to_cpu) == (4, 4 * size)  # the model, m, v and vhat


@pytest.mark.parametrize("name", ["fedams", "fedcams", "scaffold", "fedaware", "fedbuff"])
def test_a_run_that_died_after_a_checkpoint_is_resumed_with_the_same_bits(name, device, tmp_path):
    method, words = EVERY[name], {"device": device, "server_device": device}
    expected = hansa.run(method, task(), rounds=5, **words)

    def die(run: Run, record: Any) -> None:
        if record["round"] == 3:
            raise KeyError("in the third round")

    with pytest.raises(KeyError):
        hansa.run(method, task(), rounds=5, out=tmp_path / "run", checkpoint_every=2, callbacks=[die], **words)
    point, meta, _ = RunFolder(tmp_path / "run").load_checkpoint()
    assert meta["round"] == 2
    assert all(tensor.device.type == "cpu" for tensor in tensors(point))
    same(hansa.resume(tmp_path / "run", method, task(), rounds=5, **words), expected)


def test_resuming_keeps_the_servers_device_or_says_that_another_one_rounds_differently(device, tmp_path, caplog):
    method, folder = presets.fedams(steps=2, batch_size=5), tmp_path / "run"
    expected = hansa.run(method, task(), rounds=4)
    hansa.run(method, task(), rounds=2, out=folder, server_device=device)
    assert RunFolder(folder).config.server_device == "simulated:0"
    kept = hansa.resume(folder, method, task(), rounds=3)
    assert kept.server_device == device
    assert next(tensors(kept.state.server)).device == device
    assert not caplog.text
    moved = hansa.resume(folder, method, task(), rounds=4, server_device="cpu")
    assert "server on simulated (simulated accelerator), resumed with" in caplog.text
    assert RunFolder(folder).config.server_device == "cpu"
    same(moved, expected)
    with pytest.raises(hansa.HansaError, match=r"run\(server_device='cuda"):
        hansa.resume(folder, method, task(), rounds=5, server_device="cuda:7")


def test_files_and_the_command_line_name_the_servers_device_and_records_say_it(device, tmp_path):
    from command_line import CliRunner  # after hansa.cli, which silences a warning of its import

    words = ["--preset", "fedams", "--rounds", "2", "-s", "data.clients=4", "-s", "model=logistic", "--quiet"]
    run = CliRunner().invoke(app, ["run", *words, "-s", "server_device=simulated", "--out", str(tmp_path / "run")])
    assert run.exit_code == 0, run.output
    assert RunFolder(tmp_path / "run").config.server_device == "simulated"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["devices"], summary["server_device"]) == (["cpu"], "simulated:0 (simulated accelerator)")
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")])
    assert "clients cpu; server simulated:0 (simulated accelerator)" in " ".join(shown.output.split())
    again = CliRunner().invoke(app, ["resume", str(tmp_path / "run"), "--rounds", "3", "--server-device", "cpu", "-q"])
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["server_device"] == "cpu"
    assert hansa.resume(tmp_path / "run", rounds=4, server_device="simulated").server_device.type == "simulated"


ENGINES = {
    "two threads": partial(Pool, workers=2, kind="thread"),
    "three threads": partial(Pool, workers=3, kind="thread"),
    "loopback": Loopback,
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("preset", ["fedams", "scaffold", "fedcams"])
def test_engines_on_the_device_have_the_bits_of_one_worker(name, preset, device):
    method, made = EVERY[preset], task(problems.convolution)
    expected = Run(method, made).advance(3)
    same(Run(method, made, device=device, server_device=device, engine=ENGINES[name]).advance(3), expected)


@pytest.mark.parametrize("fault", ["nan", "scaled", "flipped", "stale", "upload"])
def test_bad_updates_are_refused_on_the_device_for_the_same_reasons(fault, device):
    plan = hansa.faults(**{fault: 0.4}, factor=1e9)
    found = pair(presets.fedams(steps=2, batch_size=5), device, faults=plan, max_norm=1e6)
    reasons = {"nan": "non-finite", "scaled": "norm", "flipped": None, "stale": "round", "upload": "lost"}
    assert {lost.reason for _, lost in found.dropped_clients} == {reasons[fault]} - {None}


def test_measures_evaluation_by_client_and_kept_models_have_the_bits_of_the_cpu(device):
    made = task()
    words = {"measures": [hansa.measures.compression, hansa.measures.local_mean_loss(made)], "keep_params": True}
    method = presets.fedcams(steps=2, batch_size=5)
    expected = Run(method, made, **words).advance(2)
    found = Run(method, made, device=device, server_device=device, **words).advance(2)
    same(found, expected)
    assert torch.equal(found.trajectory, expected.trajectory)
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), expected.model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fingerprints_on_the_device_are_those_of_the_host(dtype, device):
    for entries in (1, 2, 5, 4095, 4096, 4097, 3 * 4096 + 7, 1100 * 4096 + 3):
        vector = torch.randn(entries, dtype=dtype, generator=torch.Generator().manual_seed(entries))
        there = vector.to(device)
        TRAFFIC.reset()
        assert fingerprint(there) == fingerprint(vector)
        assert TRAFFIC.bytes_to_cpu <= 16 * (1 + vector.nbytes // (1 << 14))


@pytest.fixture
def pinned(monkeypatch) -> None:
    """The device copies from pinned memory, as CUDA does."""
    monkeypatch.setattr(places, "PINNED_DEVICES", {"simulated"})
    monkeypatch.setattr(places, "empty_pinned", empty_pinned)


def trained(method: hansa.Algorithm, device: torch.device, **words: Any) -> tuple[Any, Traffic]:
    """Return the result of an order of the first round with a number of steps or other words, and its traffic."""
    run = Run(method, golden.task("norm"))
    opened = round.open_round(run.algorithm, run.state, run.task.population, "run", run.key)
    order = single_orders(opened.orders[0])[0]
    if steps := words.pop("steps", None):
        words["works"] = tuple(work._replace(steps=steps) for work in order.works)
    order, trainer = replace(order, **words), run.task.trainer(torch.float32, device)
    TRAFFIC.reset()
    got = {name: sent.packets[0].content for name, sent in order.broadcasts.items()}
    (result,) = round._train(run.algorithm, [order], [got], trainer, run.task.population)
    assert len(result.rows["model"])
    return result, replace(TRAFFIC)


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("name", EVERY)
def test_the_host_waits_for_the_device_once_a_round_and_not_once_a_step(name, device):
    """Compressed gossip is the exception: packets are made on the host, so every exchange is one read."""
    method = EVERY[name]
    (_, few), (_, many) = (trained(method, device, steps=steps) for steps in (2, 6))
    compressed = method.local.mixing is not None and method.local.mixing.compressor is not None
    assert many.waits - few.waits == (4 if compressed else 0)
    assert many.unpinned == few.unpinned
    assert many.staged
    assert all(memory._version == version for memory, version in many.staged)  # not overwritten under way
    if method.local.mixing is None:
        assert many.copies_to_device == few.copies_to_device


@pytest.mark.parametrize("name", ["dsgd", "cafga", "ha_fed"])
def test_a_device_without_float64_computes_the_spread_on_the_host(name, device, monkeypatch):
    """Apple's devices have none."""
    monkeypatch.setattr(places, "has_float64", lambda found: found != device)
    monkeypatch.setattr(MODULE, "has_float64", False)
    result, _ = trained(EVERY[name], device, mean=True)
    assert result.mean is not None


class OnDemand:
    """Data that is fetched, of which nothing is on the device, and which reuses one buffer for its batches."""

    classes, name, test_count = 3, "fetched", 40

    def __init__(self) -> None:
        self._data, self.asked = problems.data(test=40), set[torch.device]()
        self.population = self._data.population
        self.rows, self.samples = self._data.rows, self._data.samples
        self._buffer = torch.empty(600, 1, 6, 6)

    def fetch(self, client, rows):
        self.asked.add(rows.device)
        batch = self._buffer[: len(rows)].copy_(self._data.inputs[rows])
        return batch, self._data.targets[rows]

    def fetch_test(self, rows):
        self.asked.add(rows.device)
        return self._data.test_inputs[rows], self._data.test_targets[rows]


@pytest.mark.usefixtures("pinned")
def test_data_on_the_host_is_asked_for_rows_there_and_copied_from_pinned_memory(device):
    data = OnDemand()
    made = hansa.Task(problems.perceptron, nn.functional.cross_entropy, data, execution="eager")
    vectors, trainer = made.start(hansa.Key(0), torch.float32), made.trainer(torch.float32, device)
    TRAFFIC.reset()
    rows = trainer.batches(0, hansa.local.Work(4, 5), hansa.Key(0))
    batches = [trainer.batch(0, rows[step]) for step in range(4)]
    trainer.evaluate({name: vector.to(device) for name, vector in vectors.items()}, *made.test_chunks()[0])
    assert data.asked == {torch.device("cpu")}
    assert {leaf.device for batch in batches for leaf in batch} == {device}
    batches_sent = [memory for memory, _ in TRAFFIC.staged if memory.ndim == 4]
    assert len({memory.data_ptr() for memory in batches_sent}) == len(batches_sent) == 5
    assert all(memory._version == version for memory, version in TRAFFIC.staged)
    first = data._data.inputs[rows.rows[0]]
    assert torch.equal(batches[0].inputs.cpu(), first)  # although the data has written three batches over it since


@pytest.mark.usefixtures("pinned")
def test_a_copy_that_gets_smaller_is_converted_first_and_otherwise_on_the_device(device):
    for given, wanted, sent in ((torch.float64, torch.float32, 4), (torch.uint8, torch.float32, 1)):
        copied = places.copy_to_device(torch.ones(3, dtype=given), device, wanted)
        assert copied.dtype == wanted
        assert TRAFFIC.staged[-1][0].element_size() == sent
    assert TRAFFIC.unpinned == 0
    values = torch.arange(3)
    assert places.copy_to_device(values, torch.device("cpu")) is values
