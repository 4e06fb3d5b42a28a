"""Mixing matrices: validation, and construction from a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import scipy
import torch

from hansa.core.errors import HansaError, invalid_argument

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Array: TypeAlias = NDArray[np.float64]
    WeightMatrix: TypeAlias = scipy.sparse.csr_array[np.float64, tuple[int, int]]
    Matrix: TypeAlias = Tensor | NDArray[np.floating] | WeightMatrix | Sequence[Sequence[float]]
else:
    WeightMatrix = "scipy.sparse.csr_array[np.float64, tuple[int, int]]"
"""Sparse mixing weights W of a topology: row i holds the weights of the models that client i receives."""


def as_sparse(W: Matrix, name: str = "W") -> WeightMatrix:
    """Convert a square matrix to float64 CSR without stored zeros.

    >>> as_sparse([[0.5, 0.5], [0.5, 0.5]]).nnz
    4
    """
    if not scipy.sparse.issparse(W):
        if isinstance(W, torch.Tensor):
            W = W.detach().cpu().to(torch.float64).to_dense().numpy()
        try:
            W = np.asarray(W, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise HansaError(f"{name}: expected a matrix of numbers with rows of equal length ({error}).") from error
    if W.ndim != 2 or W.shape[0] != W.shape[1] or W.shape[0] == 0:
        raise HansaError(f"{name} has shape {' x '.join(map(str, W.shape))}: expected a square matrix.")
    S: WeightMatrix = scipy.sparse.csr_array(cast("Any", W), dtype=np.float64)
    if not S.has_canonical_format or not S.data.all():
        S = S.copy()  # do not modify the caller's arrays
        S.sum_duplicates()
        S.eliminate_zeros()
    return S


def to_dense(W: Matrix) -> Tensor:
    """Convert a matrix to a float64 tensor.

    Args:
        W: Matrix in any form.

    >>> from hansa.gossip import ring
    >>> to_dense(ring().weights(3))[0]
    tensor([0.3333, 0.3333, 0.3333], dtype=torch.float64)
    """
    return torch.from_numpy(as_sparse(W).toarray())


def check_mixing_matrix(W: Matrix, *, connected: bool = True, name: str = "W") -> None:
    """Raise unless the matrix is doubly stochastic and reaches consensus.

    W must be square and finite, W_ij >= 0, W 1 = 1, 1'W = 1', and W^t -> 11'/n: connected and aperiodic. The tolerance
    of the sums depends on the dtype.

    Args:
        W: Matrix in any form.
        connected: Whether the graph must be connected.
        name: Name of the matrix, for the error message.

    >>> check_mixing_matrix([[0.5, 0.5], [0.4, 0.6]])
    Traceback (most recent call last):
    hansa.core.errors.HansaError: W: column 0 sums to 0.9, expected 1. gossip.sinkhorn(W) makes it doubly stochastic.
    """
    S = as_sparse(W, name)
    tolerance = _tolerance(W)
    if S.nnz == 0:
        raise HansaError(f"{name}: row 0 sums to 0, expected 1.")
    for kind, invalid in (("finite", ~np.isfinite(S.data)), ("non-negative", S.data < 0)):
        if invalid.any():
            rows, columns = S.nonzero()
            index = int(np.argmax(invalid))
            raise HansaError(f"{name}[{rows[index]}, {columns[index]}] = {S.data[index]:g}: expected {kind} weights.")
    for axis, line in ((1, "row"), (0, "column")):
        sums: Array = np.asarray(S.sum(axis=axis))
        off = np.abs(sums - 1) > tolerance
        if off.any():
            first = int(np.argmax(off))
            raise HansaError(
                f"{name}: {line} {first} sums to {sums[first]:.12g}, expected 1. "
                "gossip.sinkhorn(W) makes it doubly stochastic."
            )
    if connected:
        _check_agreement(S, name)


def _tolerance(W: Matrix) -> float:
    """Return the tolerance of sums by dtype: 1e-9 for float64, 1e-5 for float32, 1e-2 for half precision."""
    if not scipy.sparse.issparse(W) and isinstance(W, torch.Tensor):
        digits = torch.finfo(W.dtype).eps if W.dtype.is_floating_point else 0.0
    else:
        kind = getattr(W, "dtype", np.dtype(np.float64))
        digits = float(np.finfo(kind).eps) if np.issubdtype(kind, np.floating) else 0.0
    return 1e-9 if digits < 1e-12 else 1e-5 if digits < 1e-6 else 1e-2


def _check_agreement(S: WeightMatrix, name: str) -> None:
    components, label = scipy.sparse.csgraph.connected_components(S, directed=True, connection="strong")
    if components > 1:
        unreached = int(np.argmax(label != label[0]))
        raise HansaError(
            f"{name} is disconnected: {components} components, and client {unreached} receives nothing from client 0. "
            "Add an edge between them, or use gossip.isolated() for no communication."
        )
    if not S.diagonal().any() and _periodic(S):
        raise HansaError(
            f"{name} is periodic: models never agree (rho = 1). Give every client a positive weight on itself."
        )


def _periodic(S: WeightMatrix) -> bool:
    import networkx  # thirty megabytes, rarely needed

    return not networkx.is_aperiodic(networkx.from_scipy_sparse_array(S, create_using=networkx.DiGraph))


def metropolis(n: int, pairs: Iterable[tuple[int, ...]] | NDArray[np.integer]) -> WeightMatrix:
    """Return Metropolis-Hastings weights: w_ij = 1/(1 + max(d_i, d_j)) on edges, the rest on the diagonal.

    Symmetric, so doubly stochastic on any graph; on a regular graph all are 1/(1 + d). Xiao, Boyd and Kim (2007).

    Args:
        n: Number of clients.
        pairs: Edges as pairs of positions.

    >>> metropolis(3, [(0, 1), (1, 2)]).toarray().round(3).tolist()
    [[0.667, 0.333, 0.0], [0.333, 0.333, 0.333], [0.0, 0.333, 0.667]]
    """
    ends = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs), dtype=np.int64).reshape(-1, 2)
    unique = np.unique(ends.min(axis=1) * n + ends.max(axis=1))  # merge duplicate and reversed edges
    low, high = np.divmod(unique, n)
    low, high = low[low != high], high[low != high]
    i, j = np.concatenate([low, high]), np.concatenate([high, low])
    self_weights = 1.0 / (1 + np.bincount(i, minlength=n))
    w = np.minimum(self_weights[i], self_weights[j])
    # 1 - sum_j w_ij, written as a sum of non-negative terms: exact 1/(1 + d) on regular graphs
    diagonal = self_weights + np.bincount(i, weights=self_weights[i] - w, minlength=n)
    clients = np.arange(n)
    return scipy.sparse.csr_array(
        scipy.sparse.coo_array(
            (np.concatenate([w, diagonal]), (np.concatenate([i, clients]), np.concatenate([j, clients]))), shape=(n, n)
        )
    )


def circulant(n: int, offsets: Iterable[int]) -> WeightMatrix:
    """Return equal weights from every client's own model and those at ``offsets`` positions ahead.

    >>> circulant(4, (1,)).toarray().tolist()[0]
    [0.5, 0.5, 0.0, 0.0]
    """
    shifts = np.array(sorted({0, *(offset % n for offset in offsets)}))
    columns = (np.arange(n)[:, None] + shifts) % n
    start = np.arange(0, n * len(shifts) + 1, len(shifts))
    W: WeightMatrix = scipy.sparse.csr_array(
        (np.full(columns.size, 1 / len(shifts)), columns.ravel(), start), shape=(n, n)
    )
    W.sort_indices()
    return W


def sinkhorn(A: Matrix, sweeps: int = 10_000) -> Tensor:
    """Return D_1 A D_2 with unit row and column sums, by alternating scaling. Sinkhorn and Knopp (1967).

    Args:
        A: Matrix of non-negative numbers.
        sweeps: Largest number of sweeps.

    >>> sinkhorn([[1.0, 2.0], [2.0, 1.0]])[0].mul(3).round().tolist()
    [1.0, 2.0]
    """
    P = as_sparse(A, "sinkhorn").toarray()
    if not np.isfinite(P).all() or (P < 0).any() or not (P.any(axis=0).all() and P.any(axis=1).all()):
        raise HansaError("sinkhorn: expected finite numbers >= 0 with a positive one in every row and column.")
    for sweep in range(1, sweeps + 1):
        P /= P.sum(axis=1, keepdims=True)
        P /= P.sum(axis=0, keepdims=True)
        off = float(np.abs(P.sum(axis=1) - 1).max())
        if off < 1e-13:
            return torch.from_numpy(P)
        if off < 1e-3 and sweep % 50 == 0:
            # sweeps converge at rate rho^2, slowly on a long ring; near the solution Newton is quadratic
            P = _newton_scaling(P)
    raise HansaError(
        f"sinkhorn: rows are still off by {off:.2g} after {sweeps} sweeps: the zeros of the matrix leave no doubly "
        "stochastic matrix of that pattern. Fill some of them, or use Metropolis weights: gossip.edges([...])."
    )


def _newton_scaling(P: Array) -> Array:
    """Return P_ij (1 + u_i + v_j) with unit sums to first order, or P if a weight would become negative."""
    n = len(P)
    rows, columns = P.sum(axis=1), P.sum(axis=0)
    system = np.block([[np.diag(rows), P], [P.T, np.diag(columns)]])
    u_v = np.linalg.lstsq(system, np.concatenate([1 - rows, 1 - columns]), rcond=None)[0]
    factor = 1 + u_v[:n, None] + u_v[n:]
    return P * factor if (factor > 0).all() else P


def reroute(W: Matrix, alive: Sequence[bool]) -> WeightMatrix:
    """Return W over the survivors s after clients d drop out: W_ss + W_sd (I - W_dd)^-1 W_ds (stochastic complement).

    Weight through a dropped client is rerouted directly between its neighbours. The result is doubly stochastic and
    connected if W is, and does not depend on the order of dropouts. Meyer (1989), SIAM Review 31.

    >>> reroute([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]], [True, False, True]).toarray().tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    S = as_sparse(W)
    check_mixing_matrix(W)
    alive_rows = np.flatnonzero(np.asarray(alive, dtype=bool))
    if len(alive) != S.shape[0] or len(alive_rows) == 0:
        expected = f"one True or False for each of {S.shape[0]} clients, at least one True"
        raise invalid_argument("over_survivors", "alive", alive, expected)
    dropped = np.setdiff1d(np.arange(len(alive)), alive_rows)
    W_ss, W_sd, W_ds = S[alive_rows][:, alive_rows], S[alive_rows][:, dropped], S[dropped][:, alive_rows]
    if len(dropped) == 0 or W_ds.nnz == 0:
        return scipy.sparse.csr_array(W_ss)
    touched = np.unique(W_ds.indices)
    transfer = scipy.sparse.linalg.splu(
        scipy.sparse.csc_array(sparse_identity(len(dropped)) - S[dropped][:, dropped])
    ).solve(W_ds[:, touched].toarray())
    rows, columns = np.nonzero(transfer)
    detour = scipy.sparse.csr_array((transfer[rows, columns], (rows, touched[columns])), shape=W_ds.shape)
    return scipy.sparse.csr_array(W_ss + W_sd @ detour)


def sparse_identity(n: int) -> WeightMatrix:
    """Return the sparse identity matrix."""
    return scipy.sparse.csr_array((np.ones(n), np.arange(n), np.arange(n + 1)), shape=(n, n))
