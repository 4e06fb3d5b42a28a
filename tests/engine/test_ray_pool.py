"""The Ray engine over as much of Ray as it uses, in this process; tests/e2e has it over Ray itself."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from contracts.five import OWNERS, Net
from contracts.five import task as clients
from contracts.small import NAMES, small
from engine.fake_ray import FakeRay
from hansa import presets
from hansa.core.errors import HansaError
from hansa.engine import Serial, ray_pool
from hansa.engine.ray_pool import ObjectStoreMemory, RayPool
from hansa.engine.shared_memory import Packer, SharedMemory, unpack_object
from hansa.runs.driver import Run
from same_runs import assert_same_run


@pytest.fixture(autouse=True)
def no_worker(monkeypatch):
    """An actor says in its environment that it is one; here that is also ours."""
    monkeypatch.setenv("HANSA_WORKER", "")


def on(ray, method, rounds=3, workers=2, monkeypatch=None, **words):
    monkeypatch.setattr(ray_pool, "_import_ray", lambda: ray)
    return Run(method, clients(tested=20), engine=partial(RayPool, workers=workers, **words)).advance(rounds)


def serial(method, rounds=3):
    return Run(method, clients(tested=20), engine=Serial).advance(rounds)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_the_serial_run(name, monkeypatch):
    method = small(name, batch_size=3)
    assert_same_run(on(FakeRay(), method, 2, monkeypatch=monkeypatch), serial(method, 2))


METHOD = presets.fedcams(steps=2, batch_size=3, two_way=True)


@pytest.mark.parametrize("at", range(8))
def test_an_actor_lost_at_any_order_costs_nothing_but_time(at, monkeypatch, caplog):
    ray = FakeRay([False] * at + [True, False, True])
    assert_same_run(on(ray, METHOD, monkeypatch=monkeypatch), serial(METHOD))
    assert "the worker died (the actor died); it is replaced" in caplog.text
    assert ray.spawned >= 4


def test_clients_are_evaluated_on_actors_as_they_are_serially(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(65, 6, generator=draw), torch.randint(3, (65,), generator=draw)
    test = (inputs[:20], targets[:20])
    held = hansa.data.from_arrays(inputs, targets, clients=OWNERS, test=test, test_clients=[n % 5 for n in range(20)])
    monkeypatch.setattr(ray_pool, "_import_ray", FakeRay)
    runs = []
    for engine in (Serial, partial(RayPool, workers=2)):
        mine = hansa.Task(Net, nn.functional.cross_entropy, held)
        method = presets.scaffold(steps=1, batch_size=3)
        runs.append(Run(method, mine, engine=engine, per_client=True, personalise={"steps": 2}).advance(2))
    assert_same_run(runs[1], runs[0])
    assert any(name.startswith("client_") for name in runs[0].history[-1])


def test_actors_that_cannot_start_are_not_waited_for(monkeypatch):
    ray = FakeRay(room=1)
    assert_same_run(on(ray, METHOD, workers=3, monkeypatch=monkeypatch), serial(METHOD))
    assert (ray.spawned, ray.killed) == (3, 3)


def test_vectors_go_into_the_object_store_once_a_round_whatever_the_number_of_clients(monkeypatch):
    ray = FakeRay()
    on(ray, METHOD, rounds=3, monkeypatch=monkeypatch)
    assert ray.puts == 1 + 3 + 3  # the task, each round's broadcast, each evaluation
    assert not ray.ended, "a cluster that was there is left as it is"


def test_large_tensors_of_a_task_are_looked_at_in_place_and_small_ones_are_ones_own():
    memory = SharedMemory()
    large, little = torch.arange(1 << 16, dtype=torch.float32), torch.arange(3)
    wide = torch.randn(2, 3, 40, 40).to(memory_format=torch.channels_last)
    packed = Packer(memory).pack(
        {"large": large, "little": little, "wide": wide, "none": torch.empty(0, 4), "f": clients}
    )
    stored = np.frombuffer(memory.mapped(sum(packed)), np.uint8, sum(packed)).copy()
    stored.setflags(write=False)
    found = unpack_object(packed, [ObjectStoreMemory(stored, copy=False)], copy=False)
    first, last = stored.ctypes.data, stored.ctypes.data + stored.nbytes
    assert first <= found["large"].data_ptr() < last
    assert not first <= found["little"].data_ptr() < last
    assert torch.equal(found["large"], large)
    assert torch.equal(found["wide"], wide)
    assert found["wide"].is_contiguous(memory_format=torch.channels_last)
    assert found["none"].shape == (0, 4)
    own = unpack_object(packed, [ObjectStoreMemory(stored, copy=True)], copy=False)
    assert not first <= own["large"].data_ptr() < last


def test_invalid_arguments_are_refused(monkeypatch):
    monkeypatch.setattr(ray_pool, "_import_ray", FakeRay)
    with pytest.raises(HansaError, match="workers=0"):
        RayPool(METHOD, clients(tested=20), torch.float32, torch.device("cpu"), workers=0)
    for fraction in (0, 1.5, -1):
        with pytest.raises(
            HansaError, match=rf"gpus={fraction}\): expected 0 < gpus <= 1. 0.25 lets four actors share"
        ):
            RayPool(METHOD, clients(tested=20), torch.float32, torch.device("cpu"), gpus=fraction)
    with pytest.raises(HansaError, match=r"expected cpu. Set gpus \(engine.gpus\) to the fraction of a GPU"):
        RayPool(METHOD, clients(tested=20), torch.float32, torch.device("meta"))


@pytest.mark.parametrize(
    ("cpus", "gpus", "fraction", "actors"),
    [(16, 2, 0.25, 8), (16, 2, 0.4, 4), (3, 2, 0.25, 3), (16, 1, 1.0, 1), (16, 0, 0.5, 1), (4, 2, None, 4)],
)
def test_actors_reserve_fractions_of_a_gpu_and_are_as_many_as_fit(cpus, gpus, fraction, actors, monkeypatch):
    ray = FakeRay(cpus=cpus, gpus=gpus)
    monkeypatch.setattr(ray_pool, "_import_ray", lambda: ray)
    RayPool(METHOD, clients(tested=20), torch.float32, torch.device("cpu"), gpus=fraction)
    assert ray.spawned == actors
    assert ray.reserved == {"num_cpus": 1, "max_restarts": 0} | ({} if fraction is None else {"num_gpus": fraction})


def test_a_node_whose_torch_finds_no_gpu_is_named(monkeypatch):
    monkeypatch.setattr(ray_pool, "available_devices", lambda: {torch.device("cpu"): "CPU"})
    with pytest.raises(
        HansaError, match=r"worker could not start: .*gpus=0\.5: Ray assigned a GPU .* torch finds none"
    ):
        on(FakeRay(gpus=1), METHOD, monkeypatch=monkeypatch, gpus=0.5)


def test_an_address_without_a_cluster_is_an_immediate_error():
    with pytest.raises(HansaError, match=r"engine\.address='127\.0\.0\.1:1': no Ray cluster answers there"):
        ray_pool._connect(FakeRay(), 2, "127.0.0.1:1")


def test_the_actors_devices_are_recorded(monkeypatch):
    assert on(FakeRay(), METHOD, monkeypatch=monkeypatch).remote_devices == ["cpu"]


@pytest.mark.parametrize("wanted", [None, True, False])
def test_the_runs_choice_of_determinism_goes_to_every_actor(wanted, monkeypatch):
    sent, whole = [], ray_pool.NumericSettings.apply

    def noted(settings, device):
        sent.append(settings.deterministic)
        whole(settings, device)

    monkeypatch.setattr(ray_pool.NumericSettings, "apply", noted)
    monkeypatch.setattr(ray_pool, "_import_ray", FakeRay)
    Run(METHOD, clients(tested=20), deterministic=wanted, engine=partial(RayPool, workers=2)).advance(1)
    assert sent == [wanted is not False] * 2
