"""Server and wire kernels against their equations in NumPy float64, and against Hansa's eager forms."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

from core.native.sets import RUN, in_each_set
from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.vectors import kernels
from hansa.core.vectors.kernels import ServerStep

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")
KINDS = ("momentum", "adagrad", "adam", "yogi", "amsgrad", "ams")
Array = np.ndarray[Any, Any]


def draw(size: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(size)


def by_the_book(
    kind: str, delta: Array, m: Array, v: Array, h: Array, t: int, *, b1: float, b2: float, eps: float, **flags: bool
) -> tuple[Array, Array, Array, Array]:
    """The table of server optimizers, line by line."""
    if kind == "momentum":
        m = b1 * m + delta
        return m, m, v, h
    m = b1 * m + (1 - b1) * delta
    if kind == "adagrad":
        v = v + delta**2
    elif kind == "yogi":
        v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
    else:
        v = b2 * v + (1 - b2) * delta**2
    under = v
    if kind == "amsgrad":
        under = h = np.maximum(h, v)
    if kind == "ams":
        under = h = np.maximum(np.maximum(h, v), eps)
    top = m
    if flags["bias_correction"]:
        top = m / (1 - b1**t)
        under = under if kind == "adagrad" else under / (1 - b2**t)
    if kind == "ams":
        return top / np.sqrt(under), m, v, h
    root = np.sqrt(under + eps) if flags["eps_inside"] else np.sqrt(under) + eps
    return top / root, m, v, h


@in_each_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("eps_inside", [False, True])
def test_server_steps_follow_their_equations_for_five_rounds(
    kind: str, bias_correction: bool, eps_inside: bool, dtype: torch.dtype
) -> None:
    size, options = 2500, {"b1": 0.9, "b2": 0.99, "eps": 1e-3}
    flags = {"bias_correction": bias_correction, "eps_inside": eps_inside}
    has_v, has_h = kind != "momentum", kind in ("amsgrad", "ams")
    m, v, h = np.zeros(size), np.full(size, 1e-4), np.zeros(size)
    zeros = torch.zeros(size, dtype=dtype)
    state: ServerStep = ServerStep(zeros, zeros, zeros + 1e-4 if has_v else None, zeros.clone() if has_h else None)
    for t in range(1, 6):
        delta = torch.tensor(draw(size, t) * 10.0 ** (t - 3), dtype=dtype)
        wanted, m, v, h = by_the_book(kind, delta.double().numpy(), m, v, h, t, **options, **flags)
        before = [None if s is None else s.clone() for s in state]
        after = kernels.server_step(kind, delta, state.m, state.v, state.vhat, t=t, **options, **flags)
        assert all(a is None or torch.equal(a, b) for a, b in zip(state, before, strict=True)), "inputs changed"
        state = after
        tight = 1e-6 if dtype == torch.float32 else 1e-14
        pairs = [(state.step, wanted), (state.m, m), (state.v, v), (state.vhat, h)]
        for found, true in pairs:
            if found is not None:
                assert np.abs(found.double().numpy() - true).max() < 2 * tight * np.abs(true).max()
                assert np.linalg.norm(found.double().numpy() - true) < tight * np.linalg.norm(true)


@in_each_set
@pytest.mark.parametrize("kind", ["adagrad", "adam", "yogi", "amsgrad", "ams"])
def test_without_eps_what_never_moved_does_not_move_and_nan_shows(kind: str) -> None:
    delta = torch.tensor([0.0, 1.0, math.nan] * 7)
    zeros = torch.zeros_like(delta)
    vhat = zeros if kind in ("amsgrad", "ams") else None
    found = kernels.server_step(kind, delta, zeros, zeros, vhat, b1=0.9, b2=0.99, eps=0.0)
    assert torch.equal(found.step[::3], zeros[::3])
    assert found.step[1::3].isfinite().all()
    assert found.step[2::3].isnan().all()


def test_wrong_arguments_are_named() -> None:
    ones, zeros = torch.ones(4), torch.zeros(4)
    with pytest.raises(HansaError, match="kind='nadam'"):
        kernels.server_step("nadam", ones, zeros, b1=0.9)
    with pytest.raises(HansaError, match="vhat with amsgrad and ams only"):
        kernels.server_step("amsgrad", ones, zeros, zeros, b1=0.9)
    with pytest.raises(HansaError, match=r"m is float32 \[3\].*expected contiguous float32 of 4 entries"):
        kernels.server_step("momentum", ones, torch.zeros(3), b1=0.9)
    with pytest.raises(HansaError, match="m is float64"):
        kernels.server_step("momentum", ones, zeros.double(), b1=0.9)
    with pytest.raises(HansaError, match="row 1 is"):
        kernels.native_weighted_sum([ones, torch.zeros(8)[::2]], [1.0, 1.0])
    with pytest.raises(HansaError, match="2 rows and 1 weights"):
        kernels.native_weighted_sum([ones, zeros], [1.0])
    with pytest.raises(HansaError, match="bits is uint8"):
        kernels.sign_write(np.zeros(2, np.uint8), 1.0, ones)
    with pytest.raises(HansaError, match="x is int64"):
        kernels.squared_norm(torch.ones(3, dtype=torch.int64))
    with pytest.raises(HansaError, match="x is float64"):
        kernels.sign_pack(np.ones(3))


@in_each_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "dim"), [(1, 5), (2, 1), (5, 1024), (8, 2500), (13, 37)])
def test_mixing_by_links_is_the_product_with_the_matrix(n, dim, dtype):
    draw = np.random.default_rng(n)
    matrix = scipy.sparse.random_array((n, n), density=0.4, rng=draw, format="csr")
    rows = torch.from_numpy(draw.normal(size=(n, dim))).to(dtype)
    out = torch.full_like(rows, 7.0)
    kernels.mix(rows, kernels.CsrWeights.of(matrix), out)
    wanted = torch.from_numpy(matrix.toarray() @ rows.double().numpy())  # type: ignore[attr-defined]
    assert torch.allclose(out.double(), wanted, atol=1e-5 if dtype == torch.float32 else 1e-13)


def test_mixing_refuses_what_does_not_fit():
    links = kernels.CsrWeights.of(scipy.sparse.csr_array(np.eye(3)))
    rows = torch.ones(3, 4)
    with pytest.raises(HansaError, match=r"expected \[3, d\]"):
        kernels.mix(torch.ones(2, 4), links, torch.ones(2, 4))
    with pytest.raises(HansaError, match="apart"):
        kernels.mix(rows, links, rows)
    with pytest.raises(HansaError, match="square"):
        kernels.CsrWeights.of(scipy.sparse.csr_array(np.ones((2, 3))))
    bad = scipy.sparse.csr_array(np.eye(3))
    bad.indices[1] = 9
    with pytest.raises(HansaError, match=r"to 9, expected 0\.\.2"):
        kernels.CsrWeights.of(bad)


def test_inner_products_are_those_of_the_two_vectors_alone_on_every_instruction_set(monkeypatch) -> None:
    for d in (1, 8, 9, 1023, 1025, 5003):
        rows = torch.from_numpy(draw(9 * d, d).astype(np.float32)).view(9, d)
        vectors = torch.from_numpy(draw(7 * d, d + 1).astype(np.float32)).view(7, d)
        found = []
        for name in RUN:
            monkeypatch.setenv("HANSA_NATIVE", name)
            found.append(kernels.native_inner_products(rows, vectors))
        assert all(torch.equal(found[0], other) for other in found)
        assert torch.allclose(found[0], rows.double() @ vectors.double().T, rtol=1e-12, atol=1e-12)
        alone = kernels.native_inner_products(rows[4:5], vectors[6:7])
        assert torch.equal(alone[0, 0], found[0][4, 6])
        assert torch.equal(kernels.native_inner_products(vectors, rows), found[0].T)


def test_inner_products_keep_what_float32_sums_lose() -> None:
    rows = torch.tensor([[1e8, 1.0, -1e8]] * 3)
    assert kernels.native_inner_products(rows, torch.ones(2, 3)).tolist() == [[1.0, 1.0]] * 3


@in_each_set
@pytest.mark.parametrize("piece", [8, 1 << 15, 1 << 20])
def test_inner_products_of_rows_in_a_file_are_those_of_rows_in_memory(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_PIECE", piece)
    d = (1 << 15) + 1003 if piece > 8 else 1003
    rows, vectors = (torch.from_numpy(draw(n * d, n).astype(np.float32)).view(n, d) for n in (6, 7))
    path, order = tmp_path / "rows", [4, 0, 5]
    path.write_bytes(b"before" + rows.numpy().tobytes())
    if not native.load().rows_add:
        pytest.skip("it does not read files")
    with path.open("rb") as file:
        offsets = [6 + 4 * client * d for client in order]
        found, crcs = kernels.file_inner_products(file.fileno(), offsets, vectors)
        assert torch.equal(found, kernels.native_inner_products(rows[order], vectors))
        assert crcs == [zlib.crc32(rows[client].numpy()) for client in order]
        with pytest.raises(OSError, match="the file ends in row 1"):
            kernels.file_inner_products(file.fileno(), [6, 6 + 4 * (5 * d + 10)], vectors)
    with pytest.raises(OSError, match="Bad file descriptor"):
        kernels.file_inner_products(-1, [0], vectors)


@in_each_set
def test_rows_of_a_matrix_are_summed_and_measured_as_single_vectors() -> None:
    rows, weights = torch.randn(37, 163), [0.1 * i for i in range(37)]
    total = kernels.native_weighted_sum(list(rows[:5]), weights[:5])
    assert torch.equal(kernels.native_weighted_sum(rows[:5], weights[:5]), total)
    wanted = kernels.native_weighted_sum([total, *rows[5:]], [1.0, *weights[5:]])
    assert torch.equal(kernels.native_weighted_sum(rows[5:], weights[5:], total), wanted)
    rows[3, 5], rows[4, 6] = math.nan, math.inf
    norms = [math.sqrt(kernels.squared_norm(row)[0]) for row in rows]
    assert repr(kernels.row_norms(rows)) == repr(norms)
    with pytest.raises(HansaError, match="37 rows and 1 weights"):
        kernels.native_weighted_sum(rows, [1.0])
