"""Forks of a process that has used torch: where they are allowed, and that all of torch works in them."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from hansa.study import parallel
from hansa.study.parallel import can_fork, start_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


@pytest.fixture
def threads():
    """Two threads of OpenMP, which have worked."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    train()
    yield 2
    torch.set_num_threads(before)


def train():
    weight = torch.full((400, 400), 0.01, requires_grad=True)
    (torch.linspace(0, 1, 400 * 400).view(400, 400) @ weight).tanh().sum().backward()
    return weight.grad


def test_a_fork_uses_the_threads_of_openmp_that_its_parent_has_used(threads):
    expected, (receive, send) = train(), os.pipe()

    def work():
        torch.set_num_threads(threads)
        os.write(send, b"same" if torch.equal(train(), expected) else b"other")
        os._exit(7)

    process = start_process(work, (), "fork")
    os.close(send)
    try:
        process.join(timeout=120)
    finally:
        process.kill()
    assert process.exitcode == 7
    assert os.read(receive, 10) == b"same"
    os.close(receive)


def test_a_process_is_not_forked_beside_other_threads_or_accelerators(monkeypatch):
    monkeypatch.setattr(sys, "_current_frames", lambda: {1: None})  # the threads of the test runner
    assert can_fork()
    monkeypatch.setenv("HANSA_FORK", "off")
    assert not can_fork()
    monkeypatch.delenv("HANSA_FORK")
    with monkeypatch.context() as other:
        other.setattr(parallel.torch.cuda, "is_initialized", lambda: True)
        assert not can_fork()
    monkeypatch.undo()
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert not can_fork()
    ended.set()
    thread.join()
