"""A command line to test: in a folder of its own, on data that is made in a moment."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

import pytest

import warm
from command_line import run_command

SMALL = """\
name: small
rounds: 3
workers: 1
data: {name: synthetic, clients: 6, options: {largest: 60}}
model: logistic
local: {lr: 0.05, steps: 2, batch_size: 10}
"""
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
"""A model that takes a while where the variable SLOW says so."""


def wait_for(condition, *children):
    """Wait until a condition holds, while processes are alive."""
    end = time.monotonic() + 120
    while not condition():
        for child in children:
            assert child.poll() is None, child.communicate()
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder of a test, with a small configuration in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path


@pytest.fixture
def cli(folder):
    """Run a command in this process: ``cli("run", "small.yaml").exit_code``; ``cli.ok`` asserts that it is 0,
    ``cli.refused`` that it is 2."""

    class Command:
        def __call__(self, *arguments, width=160):
            before = list(logging.getLogger("hansa").handlers)
            result = run_command(*arguments, width=width)
            assert logging.getLogger("hansa").handlers == before
            return result

        def ok(self, *arguments, code=0, **options):
            result = self(*arguments, **options)
            assert result.exit_code == code, result.output
            return result

        def refused(self, *arguments, **options):
            return self.ok(*arguments, code=2, **options)

    return Command()


@pytest.fixture
def process(folder):
    """Start a command as a process of its own, for signals; what is still running is ended with the test."""
    started = []

    def start(*arguments, cwd=None):
        # under nohup a hangup is ignored, and children inherit that: the command starts with the default
        program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from hansa.cli import main; main()"
        command = [sys.executable, "-c", program, *map(str, arguments)]
        child = warm.Popen(
            command,
            cwd=cwd or folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()
