"""Memory that processes share: what is laid into it comes back as it was, and is not copied."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hansa
from engine import problems
from hansa import presets
from hansa.engine.shared_memory import CodeChecker, Packer, SharedMemory, unpack_object
from hansa.training.batch_sources import SampleStore

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64]


@st.composite
def tensors(draw) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    permuted = tensor.permute(draw(st.permutations(range(len(shape)))))
    return permuted[::2] if permuted.ndim and draw(st.booleans()) else permuted


trees = st.recursive(
    tensors() | st.binary(max_size=3000) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        dense = left.numel() and (left.is_contiguous() or left.stride() == torch.empty_like(left).stride())
        strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (left, right)]
        return left.dtype == right.dtype and torch.equal(left, right) and (not dense or strides[0] == strides[1])
    if isinstance(left, (list, dict)):
        keys = left if isinstance(left, dict) else range(len(left))
        return len(left) == len(right) and all(same(left[key], right[key]) for key in keys)
    return left == right


@settings(deadline=None, max_examples=150)
@given(trees, st.integers(0, 100), st.booleans())
def test_anything_comes_back_as_it_was_with_its_strides(tree, start, copy):
    memory = SharedMemory()
    found = unpack_object(Packer(memory, start=start).pack(tree), [SharedMemory(os.dup(memory.fd))], copy=copy)
    assert same(tree, found)


class Opener:
    @classmethod
    @hansa.config.allow_code()
    def open(cls, name):
        return cls.__name__, name, hansa.config.import_path.may_import()


class Derived(Opener):
    pass


def test_class_methods_are_sent_by_name_whatever_decorates_them():
    """A decorator that is a context manager holds a generator, which cannot be sent."""

    class Local:
        @classmethod
        def open(cls, name):
            return cls.__name__, name, True

    for owner in (Opener, Derived, Local):
        method = partial(owner.open, "x")
        assert CodeChecker().check(method) == ""
        memory = SharedMemory()
        assert unpack_object(Packer(memory).pack(method), [memory], copy=False)() == (owner.__name__, "x", True)


def test_a_tensor_that_is_met_twice_is_laid_once():
    memory, row = SharedMemory(), torch.ones(1000)
    packer = Packer(memory)
    left, right = unpack_object(packer.pack([row, row]), [memory], copy=False)
    assert left.data_ptr() == right.data_ptr()
    assert packer.end < 2 * 4000


def test_a_memory_grows_and_earlier_views_stay_valid():
    memory = SharedMemory()
    reader = SharedMemory(os.dup(memory.fd))
    first = unpack_object(Packer(memory).pack(torch.arange(4)), [reader], copy=False)
    large = unpack_object(Packer(memory, start=4096).pack(torch.ones(10**6)), [reader], copy=False)
    assert large.sum() == 10**6
    assert first.tolist() == [0, 1, 2, 3]


def test_the_data_of_a_task_are_shared_and_no_worker_copies_them():
    """Channels-last images stay so: the store a shell makes of them is the shared memory itself."""
    task = problems.task(problems.convolution)
    memory = SharedMemory()
    packed = Packer(memory).pack(task)
    worker = unpack_object(packed, [SharedMemory(os.dup(memory.fd), private=True)], copy=False)
    assert torch.equal(worker.data.inputs, task.data.inputs)
    assert worker.data.inputs.stride() == task.data.inputs.stride()
    assert (
        SampleStore(worker.data.inputs, torch.float32, problems.CPU).values.data_ptr() == worker.data.inputs.data_ptr()
    )
    if hasattr(os, "memfd_create"):
        assert region(worker.data.inputs.data_ptr()) == "/memfd:hansa"


def region(address: int) -> str:
    """What the memory at an address is a map of."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        span, *rest = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return rest[4]
    raise AssertionError(f"{address:x} is not mapped")


def test_what_a_worker_writes_into_the_data_is_seen_by_nobody_else():
    memory = SharedMemory()
    packed = Packer(memory).pack(torch.zeros(4))
    mine, other = (unpack_object(packed, [SharedMemory(os.dup(memory.fd), private=True)], copy=False) for _ in range(2))
    mine.fill_(1)
    assert other.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("clients", [10, 1000])
def test_an_order_is_small_whatever_the_population(clients):
    """A row of the client's own memory and the broadcast, which lies elsewhere, are not in the skeleton."""
    algorithm = presets.scaffold(sampler=hansa.sample.uniform(2 / clients))
    task = hansa.training.function(problems.diverging, clients=clients, x0=torch.zeros(2000))
    order = problems.first_orders(algorithm, task, torch.float32)[0]
    packer = Packer(SharedMemory())
    spans = {id(vector): packer.write_tensor(vector, 1) for vector in problems.vectors_of(order).values()}
    assert Packer(SharedMemory(), spans=spans).pack(order).size < 1000
