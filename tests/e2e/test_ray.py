"""The Ray engine is equal to the serial one, also when an actor or a node is lost in mid-round. `make e2e` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import hansa
from contracts.five import Net, task
from hansa import presets
from hansa.engine import Serial
from hansa.engine.ray_pool import RayPool
from hansa.runs.driver import Run
from same_runs import assert_same_run

ray = pytest.importorskip(
    "ray", reason="the Ray engine is not exercised: ray is not installed (pip install 'hansa[ray]')"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(os.environ.get("HANSA_E2E") != "1", reason="the Ray engine is exercised by make e2e"),
]

METHODS = {
    "fedavg": presets.fedavg(steps=2, batch_size=3, participation=0.6),
    "two-way fedcams": presets.fedcams(steps=2, batch_size=3, participation=0.6, two_way=True),
    "scaffold": presets.scaffold(steps=2, batch_size=3),
    "cafga": presets.cafga(steps=2, batch_size=3, clusters=2),
    "fedaware": presets.fedaware(steps=2, batch_size=3, participation=0.6),
}


@pytest.fixture
def local():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_every_family_is_the_serial_run(local):
    for method in METHODS.values():
        found = Run(method, task(tested=20), engine=partial(RayPool, workers=2)).advance(3)
        assert_same_run(found, Run(method, task(tested=20), engine=Serial).advance(3))


class Slow(Net):
    def forward(self, x):
        time.sleep(0.2)
        return super().forward(x)


def slow_task():
    made = task(tested=20)
    return hansa.Task(Slow, nn.functional.cross_entropy, made.data)


def test_an_actor_that_is_killed_in_mid_round_costs_time_only(local, caplog):
    method = presets.scaffold(steps=2, batch_size=3)
    pools, killed = [], []

    def engine(*parts):
        pools.append(RayPool(*parts, workers=2))
        return pools[-1]

    def after_the_first_round(run, record):
        if record["round"] == 1:
            killed.append(ray.get(pools[0]._actors[0].handle.pid.remote()))
            threading.Timer(0.5, os.kill, (killed[0], signal.SIGKILL)).start()

    run = Run(method, slow_task(), engine=engine).advance(3, [after_the_first_round])
    assert_same_run(run, Run(method, slow_task(), engine=Serial).advance(3))
    assert killed
    assert "the worker died" in caplog.text


def test_a_node_that_is_lost_in_mid_round_costs_time_only(caplog):
    """Three nodes in a network of their own, an actor each; one of them goes without a word. There is no room for a
    third actor any more: the other two do the work."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    words = {"num_cpus": 1, "node_ip_address": "127.0.0.1"}
    cluster.add_node(**words, include_dashboard=False)
    nodes = [cluster.add_node(**words) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        method = presets.fedcams(steps=2, batch_size=3, two_way=True)
        pools = []

        def engine(*parts):
            pools.append(RayPool(*parts, workers=3).wait_until_ready())
            return pools[0]

        def after_the_first_round(run, record):
            if record["round"] == 1:
                threading.Timer(0.3, lambda: cluster.remove_node(nodes[1], allow_graceful=False)).start()

        run = Run(method, slow_task(), engine=engine).advance(6, [after_the_first_round])
        assert_same_run(run, Run(method, slow_task(), engine=Serial).advance(6))
        assert "the worker died" in caplog.text
        assert sum(node["Alive"] for node in ray.nodes()) == 2
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_the_task_lies_once_on_a_node_however_many_actors_it_has(local):
    """Actors look at the object store: 64 MB of rows make none of them larger by as much."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(1 << 16, 256, generator=draw)
    held = hansa.data.from_arrays(rows, torch.randint(3, (1 << 16,), generator=draw), clients=[0, 1] * (1 << 15))

    def private(pid):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("Private_", "Swap:"))) / 1024

    used = []
    for data in (task(tested=20).data, held):
        inputs = data.inputs.shape[1]
        linear = hansa.Task(partial(nn.Linear, inputs, 3), nn.functional.cross_entropy, data)
        pool = RayPool(presets.fedavg(), linear, torch.float32, torch.device("cpu"), workers=2)
        used.append([private(ray.get(actor.handle.pid.remote())) for actor in pool._actors.workers])
        pool.close()
    assert max(used[1]) < min(used[0]) + 32, used


def test_a_run_by_command_line(tmp_path):
    """`hansa run --engine ray` starts a cluster, ends it, and gives the model of the pool; so does --address."""
    words = ["--preset", "scaffold", "--rounds", "2", "--set", "data.clients=4", "--set", "model=logistic", "--quiet"]
    hansa_command = [Path(sys.executable).parent / "hansa", "run", *words]
    subprocess.run([*hansa_command, "--workers", "1", "--out", tmp_path / "serial"], check=True, timeout=300)
    ray_words = ["--engine", "ray", "--workers", "2"]
    subprocess.run([*hansa_command, *ray_words, "--out", tmp_path / "ray"], check=True, timeout=300)
    ours = [json.loads((tmp_path / name / "summary.json").read_text())["model_sha256"] for name in ("serial", "ray")]
    assert ours[0] == ours[1]
    nowhere = subprocess.run(
        [*hansa_command, "--address", "127.0.0.1:1", "--out", tmp_path / "nowhere"],
        check=False, timeout=300, capture_output=True, text=True,
    )  # fmt: skip
    assert nowhere.returncode == 1
    assert "no Ray cluster answers there" in nowhere.stderr
