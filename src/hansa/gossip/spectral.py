"""Mixing rates of topologies, and the traffic of a gossip step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import scipy

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.gossip.weights import as_sparse, check_mixing_matrix

if TYPE_CHECKING:
    from hansa.gossip.topology import Topology
    from hansa.gossip.weights import Array, Matrix, WeightMatrix

DENSE_UP_TO = 1024  # clients: dense singular values take 0.4 s at this size, 3.6 s at twice the size


def rho(W: Matrix) -> float:
    """Return rho = ||W - 11'/n||_2: a gossip step contracts the distance to the mean by at least this factor.

    It is 0 for the complete graph and approaches 1 for sparse graphs. The papers call it the spectral gap ([HAFED]
    Assumption 5.5). Dense singular values up to 1024 clients, Lanczos on the sparse matrix beyond.

    Args:
        W: A doubly stochastic matrix.

    >>> from hansa.gossip import ring
    >>> [round(rho(ring()(n)), 3) for n in (8, 10, 50)]
    [0.805, 0.873, 0.995]
    """
    check_mixing_matrix(W, connected=False)
    S = as_sparse(W)
    n = S.shape[0]
    # ||W - 11'/n||_F bounds rho: if it is zero, so is rho
    if float(np.square(S.data - 1 / n).sum()) + (n * n - S.nnz) / n**2 < 1e-28:
        return 0.0
    if n <= DENSE_UP_TO:
        A = S.toarray() - 1 / n
        return float(np.abs(np.linalg.eigvalsh(A)).max() if _symmetric(S) else np.linalg.norm(A, ord=2))
    return _second_eigenvalue(S) if _symmetric(S) else float(np.sqrt(_second_eigenvalue(S, squared=True)))


def rho_max(topology: Topology, sizes: Iterable[int]) -> float:
    """Return the largest rho over clusters of these sizes.

    Args:
        topology: Topology of every cluster, or `by_cluster`.
        sizes: Sizes of the clusters.

    >>> from hansa.gossip import ring
    >>> round(rho_max(ring(), [8, 8, 10]), 3)
    0.873
    """
    return max(cluster_rho(topology, sizes))


def cluster_rho(topology: Topology, sizes: Iterable[int]) -> tuple[float, ...]:
    """Return rho of each cluster; equal graphs of equal size are measured once.

    Args:
        topology: Topology of every cluster, or `by_cluster`.
        sizes: Sizes of the clusters.

    >>> from hansa.gossip import by_cluster, complete, ring
    >>> [round(value, 3) for value in cluster_rho(by_cluster([complete(), ring()]), [8, 10])]
    [0.0, 0.873]
    """
    clusters = list(sizes)
    if not clusters:
        raise HansaError("rho_max(sizes=[]): expected at least one cluster.")
    topology.check_clusters(len(clusters))
    measured: dict[tuple[str, int], float] = {}
    values = []
    for number, n in enumerate(clusters):
        graph = topology.of_cluster(number)
        if (repr(graph), n) not in measured:
            measured[repr(graph), n] = rho(graph.sparse(n))
        values.append(measured[repr(graph), n])
    return tuple(values)


def edge_count(W: Matrix) -> int:
    """Return the number of connected pairs of clients, in either direction.

    Args:
        W: Mixing matrix.

    >>> from hansa.gossip import ring
    >>> edge_count(ring().weights(8))
    8
    """
    S = as_sparse(W)
    return int(scipy.sparse.triu(S + S.T, k=1).nnz)


def messages(W: Matrix) -> int:
    """Return the number of models sent in one gossip step: one for every w_ij > 0 off the diagonal.

    Args:
        W: Mixing matrix.

    >>> from hansa.gossip import exponential, ring
    >>> messages(ring()(8)), messages(exponential()(8))
    (16, 24)
    """
    S = as_sparse(W)
    return int(S.nnz - np.count_nonzero(S.diagonal()))


def _symmetric(S: WeightMatrix) -> bool:
    return bool(abs(S - S.T).max() < 1e-12)


def _second_eigenvalue(S: WeightMatrix, squared: bool = False) -> float:
    """Return max |lambda| of B - 11'/n for symmetric B = W, or B = W'W if ``squared``."""
    linalg = scipy.sparse.linalg
    n = S.shape[0]
    T = S.T.tocsr()
    start = Key(0).child("rho", n).numpy().standard_normal(n)

    def beyond_mean(x: Array) -> Array:
        x = x.ravel()
        y = S @ (x - x.mean())
        y = T @ y if squared else y
        return np.asarray(y - y.mean())

    operator = linalg.LinearOperator((n, n), matvec=beyond_mean, dtype=np.dtype(np.float64))
    try:
        eigenvalues = linalg.eigsh(
            operator, k=1, which="LM", v0=start, maxiter=40, tol=1e-12, return_eigenvectors=False
        )
        return min(1.0, float(abs(eigenvalues[0])))
    except linalg.ArpackNoConvergence:
        # eigenvalues cluster near 1 on long rings and paths, which factor cheaply: shift just outside the spectrum
        B = scipy.sparse.csc_array(T @ S if squared else S)
        top = float(linalg.eigsh(B, k=2, sigma=1 + 1e-6, v0=start, return_eigenvectors=False).min())
        if squared or 2 * B.diagonal().min() - 1 >= -top:  # Gershgorin: no eigenvalue below -top
            return min(1.0, top)
        bottom = float(linalg.eigsh(B, k=1, sigma=-1 - 1e-6, v0=start, return_eigenvectors=False)[0])
        return min(1.0, max(top, -bottom))
