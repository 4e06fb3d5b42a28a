"""A client's whole round in one native call: NumPy's own batches, the steps of the loop, the delta."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
import torch

from core.native.models import STACKS, compile_network, parameters_of, smooth, train
from core.native.sets import in_each_set
from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.native import network as network_module
from hansa.core.native.clients import ClientKernel, mean_losses
from hansa.core.native.network import AffineStep
from hansa.core.native.random_draws import draws_like_numpy, draws_without_replacement, shuffled_rows
from hansa.training.trainer import batch_stream

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")

ROWS = 30


def made(name: str = "CNN-29k"):
    make, shape = STACKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, inputs, labels = smooth(make(), shape, ROWS)
    network = compile_network(module, shape)
    assert network is not None
    return network, parameters_of(module), inputs, labels


def train_one(kernel, x, y, delta, own, steps, batch, key, step):
    """One client whose rows are all of the index."""
    spans, works = np.array([[0, own.numel()]]), np.array([[steps, batch]])
    return kernel.train_rows(x, y, delta[None], own, spans, works, [key], step)


@in_each_set
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["CNN-29k", "residuals", "embeddings", "images, residuals"])
def test_a_round_in_one_call_is_the_loop_over_its_batches_to_the_bit(name, momentum):
    network, x, inputs, labels = made(name)
    own, key = torch.tensor([3, 4, 7, 11, 12, 20, 29]), Key(5).child("batch")
    s = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    options = {
        "lr": 0.03,
        "prox_weight": 0.1,
        "shift": s,
        "weight_decay": 0.01,
        "momentum": momentum,
        "max_grad_norm": 1.0,
    }
    y, delta, velocity = torch.empty_like(x), torch.empty_like(x), torch.zeros_like(x)
    kernel = ClientKernel(network, inputs, labels)
    for _ in range(2):  # a second client finds nothing of the first
        velocity.zero_()
        step = AffineStep(**options, velocity=velocity if momentum else None)
        losses = train_one(kernel, x, y, delta, own, 5, 3, key.digest(16), step)
    expected = x.clone()
    index = own[torch.from_numpy(batch_stream(7, 15, key))].view(5, 3)
    wanted = train(network, expected, inputs, labels, index, AffineStep(anchor=x, **options))
    assert losses == [math.fsum(wanted.tolist()) / 5]
    assert torch.equal(delta, expected - x)


def test_slices_do_not_change_a_bit(monkeypatch):
    network, x, inputs, labels = made("MLP")
    own, found = torch.arange(ROWS), []
    for seconds in (10.0, 0.0):
        monkeypatch.setattr(network_module, "SLICE", seconds)
        monkeypatch.setattr("hansa.core.native.clients.SLICE", seconds)
        y, delta = torch.empty_like(x), torch.empty_like(x)
        losses = train_one(ClientKernel(network, inputs, labels), x, y, delta, own, 9, 4, bytes(16), AffineStep(lr=0.1))
        plain = x.clone()
        train(network, plain, inputs, labels, torch.arange(20).view(5, 4), AffineStep(0.1))
        found.append((losses, delta, plain))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][2], found[1][2])


def test_a_long_call_ends_within_a_moment_when_it_is_told_to_stop():
    network, x, inputs, labels = made()
    kernel = ClientKernel(network, inputs, labels)
    y, delta = torch.empty_like(x), torch.empty_like(x)

    def stop() -> None:
        time.sleep(0.3)
        kernel.stop = True

    threading.Thread(target=stop).start()
    began = time.monotonic()
    with pytest.raises(HansaError, match="stopped"):  # all the steps would take minutes
        train_one(kernel, x, y, delta, torch.arange(ROWS), 100_000, 20, bytes(16), AffineStep(lr=1e-6))
    assert time.monotonic() - began < 20


def test_what_does_not_fit_is_refused_by_name():
    network, x, inputs, labels = made("MLP")
    kernel, y, delta = ClientKernel(network, inputs, labels), torch.empty_like(x), torch.empty_like(x)
    with pytest.raises(HansaError, match=r"index is torch\.int32"):
        train_one(kernel, x, y, delta, torch.arange(3, dtype=torch.int32), 1, 2, bytes(16), AffineStep(lr=0.1))
    with pytest.raises(HansaError, match=f"row {ROWS} is out of range"):
        train_one(kernel, x, y, delta, torch.tensor([ROWS]), 1, 1, bytes(16), AffineStep(lr=0.1))
    with pytest.raises(HansaError, match=r"x is torch\.float64"):
        train_one(kernel, x.double(), y, delta, torch.arange(3), 1, 2, bytes(16), AffineStep(lr=0.1))
    with pytest.raises(HansaError, match="momentum needs a velocity"):
        train_one(kernel, x, y, delta, torch.arange(3), 1, 2, bytes(16), AffineStep(lr=0.1, momentum=0.5))
    own, works = torch.arange(ROWS), np.array([[1, 2]])
    for span in ((5, ROWS + 1), (-1, 5), (5, 5)):
        with pytest.raises(HansaError, match=f"out of range: there are {ROWS}"):
            kernel.train_rows(x, y, x[None].clone(), own, np.array([span]), works, [bytes(16)], AffineStep(lr=0.1))


@in_each_set
def test_rows_of_several_clients_are_shuffled_like_those_of_each():
    index = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    spans, lengths = np.array([[0, 7], [7, 8], [20, 60], [3, 260], [60, 4157]]), np.array([15, 3, 90, 256, 5000])
    keys = [Key(2).child(client).digest(16) for client in range(5)]
    drawn = np.split(shuffled_rows(keys, index, spans, lengths), np.cumsum(lengths)[:-1])
    for key, (first, stop), length, found in zip(keys, spans.tolist(), lengths.tolist(), drawn, strict=True):
        own = index[first:stop]
        alone = shuffled_rows([key], own, np.array([[0, stop - first]]), np.array([length]))
        assert found.tolist() == alone.tolist()
        generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8")))
        passes = [generator.permutation(stop - first) for _ in range(-(-length // (stop - first)))]
        assert found.tolist() == own.numpy()[np.concatenate(passes)[:length]].tolist()
    for wrong in (np.array([[0, 5001]]), np.array([[-1, 5]]), np.array([[5, 5]])):
        with pytest.raises(HansaError, match="rows of 1 clients"):
            shuffled_rows(keys[:1], index, wrong, lengths[:1])


@pytest.mark.parametrize("steps", [1, 2, 3, 17])
@pytest.mark.parametrize("spoilt", [None, np.nan, np.inf])
@pytest.mark.parametrize("spread", [0, 30])
def test_mean_losses_are_exact_sums_rounded_once(steps, spoilt, spread):
    draw = np.random.default_rng(steps)
    losses = draw.standard_normal((200, steps)) * 10.0 ** draw.integers(-spread, spread + 1, (200, steps))
    losses = losses.astype(np.float32)
    if spoilt is not None:
        losses[7, 0] = spoilt
    wanted = [math.fsum(row) / steps for row in losses.tolist()]
    for clients in (200, 10):
        ends = steps * np.arange(1, clients + 1)
        assert repr(mean_losses(losses[:clients].ravel(), ends)) == repr(wanted[:clients])
    uneven = np.concatenate([np.arange(1, 150), [200 * steps]])
    numbers = losses.ravel().tolist()
    expected = [numbers[at] for at in range(149)] + [math.fsum(numbers[149:]) / (200 * steps - 149)]
    assert repr(mean_losses(losses.ravel(), uneven)) == repr(expected)


@pytest.mark.parametrize(
    ("many", "some"), [(1, 1), (5, 2), (5, 5), (20, 1), (20, 19), (9_999, 64), (10_001, 3), (200, 70)]
)
def test_what_is_chosen_is_what_numpy_chooses(many, some):
    assert draws_like_numpy()
    keys = [Key(seed).child("active", many) for seed in range(40)]
    expected = [key.numpy().choice(many, some, replace=False, shuffle=False).tolist() for key in keys]
    assert draws_without_replacement([key.digest(16) for key in keys], many, some) == expected


def test_rare_numbers_are_drawn_again_as_numpy_does():
    """Below 3 x 2^30 every fourth number is rejected: of small ranges almost none is."""
    table, most = native.load(), 3 * 2**30 - 1
    out, differ = np.empty(1, np.int64), set()
    for seed in range(60):
        key = Key(seed).child("rare")
        table.choose(key.digest(16), 1, most + 1, 1, out.ctypes.data)
        raw = key.numpy().integers(0, 2**32, dtype=np.uint32)
        differ.add(int(raw) * (most + 1) >> 32 != int(out[0]))
        bits = np.random.Philox(key=np.frombuffer(key.digest(16), "<u8"))
        halves = bits.random_raw(8).view("<u4").tolist()
        wanted = next(v * (most + 1) >> 32 for v in halves if v * (most + 1) % 2**32 >= 2**32 % (most + 1))
        assert int(out[0]) == wanted
    assert differ == {True, False}
