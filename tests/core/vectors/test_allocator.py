"""Memory that is used again must never be lent while anything still looks at it."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hansa.core.vectors import allocator
from hansa.core.vectors.allocator import Allocator

LONG = torch.zeros(1000)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[3:7],
        lambda x: x.view(10, 100),
        lambda x: x.numpy(),
        lambda x: x.detach(),
        lambda x: x.numpy()[::2],
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: x.untyped_storage(),
        lambda x: x.view(torch.int32),
    ],
)
def test_memory_is_not_lent_again_while_anything_looks_at_it(look):
    spare = Allocator(min_bytes=0)
    x = spare.empty_like(LONG)
    address, seen = x.data_ptr(), look(x)
    del x
    gc.collect()
    assert spare.empty_like(LONG).data_ptr() != address
    del seen
    gc.collect()
    assert address in {one.data_ptr() for one in [spare.empty_like(LONG) for _ in range(3)]}


def test_vectors_alive_at_once_are_apart_and_aligned():
    spare = Allocator(min_bytes=0)
    held = [spare.empty_like(LONG).fill_(i) for i in range(50)]
    for i, vector in enumerate(held):
        assert vector.data_ptr() % 64 == 0
        assert vector.dtype == torch.float32
        assert bool((vector == i).all())
    del held[::2]
    again = [spare.empty(500, torch.float64).fill_(-1) for _ in range(50)]  # as many bytes, another dtype
    assert all(bool((vector == 2 * i + 1).all()) for i, vector in enumerate(held))
    assert all(bool((vector == -1).all()) for vector in again)


def test_no_more_lies_idle_than_allowed():
    spare = Allocator(min_bytes=0, max_idle_bytes=10_000)
    held = [spare.empty_like(LONG) for _ in range(5)]
    held.clear()
    gc.collect()
    assert spare._bytes == 8_000
    assert sum(len(idle) for idle in spare._idle.values()) == 2


def test_small_strided_and_other_vectors_are_torchs_own():
    assert allocator.empty_like(torch.zeros(10)).shape == (10,)
    assert allocator.empty_like(torch.zeros(2, 3)).shape == (2, 3)
    assert allocator.empty(1 << 20, torch.bfloat16).dtype == torch.bfloat16
    assert allocator.empty_like(torch.zeros(2_000_000)[::2]).is_contiguous()
    assert allocator.empty(0, torch.float32).numel() == 0


def test_threads_never_share_memory_by_mistake():
    spare, wrong = Allocator(min_bytes=0), []

    def work(number: int) -> None:
        for turn in range(300):
            held = [spare.empty_like(LONG).fill_(number * 1000 + turn) for _ in range(4)]
            if not all(bool((vector == number * 1000 + turn).all()) for vector in held):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_may_come_back_while_the_same_thread_is_taking_or_giving():
    """Garbage is collected wherever Python allocates, so also inside the room: that must not wait for itself."""
    spare = Allocator(min_bytes=0)

    def work() -> None:
        vector = spare.empty_like(LONG)
        with spare._lock:
            del vector

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert spare._bytes == 4000


def test_vectors_larger_than_all_that_usually_lies_idle_are_kept_all_the_same(monkeypatch):
    monkeypatch.setattr(allocator, "MAX_IDLE_BYTES", 1000)
    memory = Allocator(min_bytes=0)
    lent = [memory.empty(5000, torch.float32) for _ in range(10)]
    places = {vector.data_ptr() for vector in lent}
    del lent
    again = [memory.empty(5000, torch.float32) for _ in range(8)]
    assert {vector.data_ptr() for vector in again} <= places


def test_memory_that_is_lent_when_the_interpreter_ends_is_no_matter():
    script = """
import sys, torch
from hansa.core.vectors import allocator
held = [allocator.empty_like(torch.zeros(1 << 20)) for _ in range(3)]
torch.held = held  # whoever is taken apart last
sys.modules["torch.held"] = held
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_that_was_freed_goes_back_to_the_system():
    statm = Path("/proc/self/statm")
    if allocator._malloc_trim() is None or not statm.exists():
        pytest.skip("this system's C library keeps it")
    held = [b"%d" % turn * 20_000 for turn in range(1000, 2000)]  # too small for mappings of their own
    last = b"last" * 20_000  # keeps the end of the heap in use
    del held
    before = int(statm.read_text().split()[1])
    allocator.trim()
    given = (before - int(statm.read_text().split()[1])) * resource.getpagesize()
    assert given > 40_000_000
    assert last.endswith(b"last")
