"""``--parallel``: runs side by side that are interrupted and killed are continued to the same result."""

from __future__ import annotations

import csv
import os
import signal
import time

from hansa.runs.folder import RunFolder

SLOW = """\
import os
import time
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(60, 10)
    def forward(self, x):
        time.sleep(float(os.environ.get("SLOW", 0)))
        return self.layer(torch.tanh(x))
"""
CONFIG = """\
rounds: 120
data: {name: synthetic, clients: 4, options: {largest: 60}}
model: {factory: "slow_model:Net"}
local: {lr: 0.05, steps: 1, batch_size: 10}
evaluate: {every: 40}
checkpoint: {every: 10}
"""


def wait_for(condition, child):
    end = time.monotonic() + 120
    while not condition():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_an_interrupted_and_a_killed_study_are_continued(cli, process, folder, monkeypatch):
    (folder / "slow_model.py").write_text(SLOW)
    (folder / "slow.yaml").write_text(CONFIG)
    words = ["sweep", "slow.yaml", "local.lr=0.05,0.2", "-q"]

    def recorded():
        logs = sorted(folder.glob("out/*/metrics.jsonl"))
        return [len(log.read_text().splitlines()) for log in logs]

    monkeypatch.setenv("SLOW", "0.05")
    first = process(*words, "-o", "out", "--parallel", 2)
    wait_for(lambda: len(recorded()) == 2 and min(recorded()) >= 1, first)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to the command and its workers
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 130, errors
    runs = [RunFolder(path.parent) for path in sorted(folder.glob("out/*/metrics.jsonl"))]
    assert [run.summary["status"] for run in runs] == ["stopped", "stopped"]
    before = recorded()
    second = process(*words, "-o", "out", "--parallel", 2)
    wait_for(lambda: all(now > then for now, then in zip(recorded(), before, strict=True)), second)
    os.kill(second.pid, signal.SIGKILL)
    second.communicate()
    monkeypatch.delenv("SLOW")
    for _ in range(100):  # its worker ends with it, in a moment
        finished = cli(*words, "-o", "out")
        if finished.exit_code == 0:
            break
        assert "in use" in finished.stderr, finished.stderr
        time.sleep(0.1)
    assert cli(*words, "-o", "whole", "--parallel", 1).exit_code == 0
    tables = [list(csv.DictReader((folder / out / "runs.csv").read_text().splitlines())) for out in ("out", "whole")]
    assert [row | {"wall_seconds": ""} for row in tables[0]] == [row | {"wall_seconds": ""} for row in tables[1]]
