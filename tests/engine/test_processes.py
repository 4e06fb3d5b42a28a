"""Nothing stays behind: not after a close, not after Ctrl-C, not after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine import problems
from hansa import presets
from hansa.engine.pool import Pool

SCRIPT = '''
import signal, sys, time
import torch
from torch import nn
from engine import problems
import hansa
from hansa.engine.pool import Pool


class Slow(nn.Module):
    """Defined by the script itself: a worker must import that."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 3)

    def forward(self, x):
        time.sleep(0.01)
        return self.layer(x.flatten(1))


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background is started without it
    algorithm, task = hansa.presets.fedavg(local_lr=0.1, steps=100_000), problems.task(Slow)
    orders = problems.first_orders(algorithm, task, torch.float32)
    pool = Pool(algorithm, task, torch.float32, problems.CPU, workers=2).wait_until_ready()
    print(*[worker.popen.pid for worker in pool._group.workers], flush=True)
    try:
        list(pool.run(orders))
    except KeyboardInterrupt:
        print("interrupted", *[worker.popen.poll() for worker in pool._group.workers], flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
'''

pytestmark = pytest.mark.usefixtures("new_interpreters")
on_linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended but was not awaited by anybody does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@on_linux
def test_ctrl_c_reaches_only_the_run_and_workers_end_with_it_even_when_busy_and_even_by_kill_9(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as run:
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 2, run.stderr.read()
        time.sleep(0.2)
        for pid in (run.pid, *pids):
            assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text("utf-8")
        os.killpg(run.pid, signal.SIGINT)
        assert run.stdout.readline().split() == ["interrupted", "None", "None"]
        assert all(map(alive, pids))
        run.kill()
        until = time.monotonic() + 30
        while any(map(alive, pids)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(alive, pids))
        assert run.stderr.read() == ""


@on_linux
@pytest.mark.parametrize("forgotten", [False, True])
def test_closing_or_forgetting_a_pool_frees_every_descriptor_and_awaits_every_worker(forgotten):
    def held() -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    before = held()
    pool = Pool(presets.fedavg(), problems.bowls(), torch.float64, problems.CPU, workers=2)
    workers = [worker.popen for worker in pool._group.workers]
    assert len(held()) > len(before)
    if forgotten:
        del pool
    else:
        pool.close()
        pool.close()
    assert held() == before
    assert all(worker.returncode is not None for worker in workers)
