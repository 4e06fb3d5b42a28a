"""Diagnostics of a closed round, and measures: ``hansa.run(..., measures=[hansa.measures.compression])`` or a callback.

Diversity, chi^2 and norms are always recorded. Measures read what happened and cannot change the result. Those of the
clients' full gradients are the heterogeneity that the papers' theorems assume bounded, and estimates of the smoothness
L and of the gradient bound G.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hansa.aggregate import BaseAggregator, client_weights
from hansa.aggregate.aware import chi_square, diversity, surrogate_diversity
from hansa.aggregate.base import Participants, Weights, normalize_weights, sum_updates
from hansa.algorithm import Algorithm
from hansa.compress import Compressor, decode, error_feedback
from hansa.core.bounds import rule_or_numbers
from hansa.core.errors import HansaError, check_integer
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors.arithmetic import norm, tree_to
from hansa.local.work import Work
from hansa.rounds.aggregation import RoundAggregation
from hansa.rounds.round import decode_broadcasts
from hansa.training import TaskLike

__all__ = [
    "Heterogeneity",
    "Measure",
    "Probe",
    "Smoothness",
    "chi_square",
    "compression",
    "diversity",
    "gamma",
    "heterogeneity",
    "local_mean_loss",
    "q",
    "smoothness",
    "surrogate_diversity",
    "take_measures",
    "track_heterogeneity",
    "wants_mean",
]

PIECE = 500  # samples per gradient evaluation
MAX_CACHED_NUMBERS = 1 << 25  # entries: above this, the clients' gradients are computed twice instead of cached
STEP = 1e-4  # of the differences of gradients, times the size of the model; exact for quadratics at any size


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The input of a measure: the broadcast vectors, each client's accepted vectors and its memory before and after,
    and the ``mean`` of all local models in rounds where a measure's ``wants_mean(round)`` is true.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> def up_norm(probe: Probe) -> dict[str, float]:
    ...     return {"clients_heard": float(len(probe.received))}
    >>> hansa.run(hansa.presets.fedavg(steps=2), task, rounds=1, measures=[up_norm]).history[0]["clients_heard"]
    4.0
    """

    round: int
    algorithm: Algorithm
    key: Key
    got: Vectors
    received: Mapping[int, Vectors]
    before: Mapping[int, Vectors]
    after: Mapping[int, Vectors]
    mean: Vectors | None = None


Measure: TypeAlias = Callable[[Probe], dict[str, float]]


def wants_mean(measures: Sequence[Measure], round: int) -> bool:
    """Return whether any measure needs the mean of all local models in a round.

    >>> wants_mean([], round=1)
    False
    """
    return any(measure.wants_mean(round) for measure in measures if hasattr(measure, "wants_mean"))


def take_measures(measures: Sequence[Measure], probe: Probe) -> dict[str, float]:
    """Return all measures of a round in one record.

    >>> take_measures([lambda probe: {"answer": 42.0}], None)
    {'answer': 42.0}
    """
    return {name: value for measure in measures for name, value in measure(probe).items()}


def diagnose(
    algorithm: Algorithm,
    closed: RoundAggregation,
    measures: Sequence[Measure],
    read_memory: Callable[[int], Vectors],
    new_memory: Mapping[int, Vectors],
    key: Key,
) -> dict[str, float]:
    """Return the diversity and aggregate norm of a round, and the requested measures.

    ``before`` reads a client's memory as it was when the round began, ``after`` is what will be committed.
    """
    length = norm(closed.combined[MODEL].vector)
    diagnostics = {"diversity": _diversity(algorithm, closed, length), "aggregate_norm": length}
    if not measures:
        return diagnostics
    uploads: dict[int, Vectors] = {}
    for name, updates in closed.updates.items():
        for update in updates:
            uploads.setdefault(update.client, {})[name] = update.vector.cpu()
    got = decode_broadcasts(algorithm, closed.orders[0], {})
    assert got is not None
    vectors, memory = tree_to(got, torch.device("cpu")), {client: read_memory(client) for client in uploads}
    probe = Probe(closed.state.round, algorithm, key, vectors, uploads, memory, new_memory, closed.mean_model())
    return {**diagnostics, **take_measures(measures, probe)}


def _diversity(algorithm: Algorithm, closed: RoundAggregation, length: float) -> float:
    """D = sqrt(sum w_i ||Delta_i||^2 / ||sum w_i Delta_i||^2) with the objective's weights; ``length`` is the
    aggregate's norm."""
    aggregate = with_defaults(algorithm.channels[MODEL].aggregate, BaseAggregator)
    rule: Weights = aggregate.weights
    clients = sorted(closed.norms)
    weights = normalize_weights(rule, Participants.of(clients, closed.cohorts, closed.population.samples))
    updates = closed.updates.get(MODEL)
    if updates is not None and not aggregate.running:  # a running aggregate is a mean
        length = norm(sum_updates(sorted(updates, key=lambda update: update.client), weights))
    squares = [closed.norms[client] * closed.norms[client] for client in clients]  # ** would raise on overflow
    return diversity(squares, weights, length * length)


def compression(probe: Probe) -> dict[str, float]:
    """gamma = ||C(mean(Delta_i+e_i)) - mean C(Delta_i+e_i)|| / ||mean Delta_i|| (Assumption 4.17 of the FedCAMS paper),
    and q, the mean over clients of ||C(x)-x||/||x|| at x = Delta_i+e_i. Empty for links without error feedback.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> done = hansa.run(hansa.presets.fedcams(steps=2), task, rounds=2, measures=[compression])
    >>> sorted({"gamma", "q"} & done.history[-1].keys())
    ['gamma', 'q']
    """
    link = probe.algorithm.channels[MODEL].uplink
    if not isinstance(link, error_feedback):
        return {}
    row = f"uplink/{MODEL}/residual"
    deltas: list[torch.Tensor] = []
    residuals: list[torch.Tensor | None] = []
    ratios: list[float] = []
    for client in sorted(probe.received):
        remainder = probe.after[client][row]
        total = probe.received[client][MODEL] + remainder
        residual = probe.before.get(client, {}).get(row)
        deltas.append(total if residual is None else total - residual)
        residuals.append(residual)
        length = float(torch.linalg.vector_norm(total))
        ratios.append(float(torch.linalg.vector_norm(remainder)) / length if length else 0.0)
    round_gamma = gamma(link.compressor, deltas, residuals, probe.key.child("gamma", probe.round))
    return {"gamma": round_gamma, "q": math.fsum(ratios) / len(ratios)}


def q(x: Tensor, compressed: Tensor) -> float:
    """Return ||C(x) - x|| / ||x||, the smallest q of [CAMS] Assumption 4.14 for this vector; 0 for x = 0.

    >>> q(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0]))
    0.6
    """
    size = float(torch.linalg.vector_norm(x.double()))
    return float(torch.linalg.vector_norm(compressed.double() - x.double())) / size if size else 0.0


def gamma(compressor: Compressor, deltas: Sequence[Tensor], residuals: Sequence[Tensor | None], key: Key) -> float:
    """Return the compression dissimilarity of a round ([CAMS] Assumption 4.17); inf if only the mean update is zero.

    gamma = ||C(mean(Delta_i + e_i)) - mean C(Delta_i + e_i)|| / ||mean Delta_i||, e_i = 0 where a residual is None.

    >>> import torch
    >>> from hansa.compress import sign
    >>> from hansa.core.keys import Key
    >>> round(gamma(sign(), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])], [None, None], Key(0)), 3)
    0.767
    """
    if not deltas or len(deltas) != len(residuals):
        raise HansaError(f"gamma: {len(deltas)} updates, {len(residuals)} residuals: expected one residual per update.")
    totals = [delta if e is None else delta + e for delta, e in zip(deltas, residuals, strict=True)]

    def compressed(x: Tensor, key: Key) -> Tensor:
        return decode(compressor.encode(x, key), compressor, dim=x.numel())

    mean_of_compressed = _mean([compressed(total, key.child(i)) for i, total in enumerate(totals)])
    compressed_mean = compressed(_mean(totals).to(deltas[0].dtype), key.child("mean")).double()
    distance = float(torch.linalg.vector_norm(compressed_mean - mean_of_compressed))
    length = float(torch.linalg.vector_norm(_mean(deltas)))
    if length:
        return distance / length
    return math.inf if distance else 0.0


def _mean(vectors: Sequence[Tensor]) -> Tensor:
    """Return the mean in float64, summed in order."""
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector in vectors:
        total += vector
    return total / len(vectors)


class local_mean_loss:
    """f_global = f(w') at w' = mean_i w_i, where w_i is client i's model after the round's local work and f is the mean
    loss over all clients' training samples ([HAFED] F.1); recorded as ``local_mean_loss``.

    The mean is over all clients that trained, reporters or not, before any compression. It is not the server's next
    model, whose training loss is ``global_loss``. ``train_loss`` is the paper's f_local. Measured every ``every``-th
    round: ``hansa.run(..., measures=[hansa.measures.local_mean_loss(task)])``.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> done = hansa.run(hansa.presets.fedavg(steps=2), task, rounds=2, measures=[local_mean_loss(task)])
    >>> round(done.history[-1]["local_mean_loss"], 4)
    0.4083
    """

    def __init__(self, task: Any, every: int = 1) -> None:
        check_integer("local_mean_loss", "every", every)
        self.every = every
        self._task = task.on_training_data() if hasattr(task, "on_training_data") else task
        self._trainer: Any = None

    def wants_mean(self, round: int) -> bool:
        """Return whether the measure needs the mean in this round."""
        return (round + 1) % self.every == 0

    def __call__(self, probe: Probe) -> dict[str, float]:
        if probe.mean is None:
            return {}
        like = probe.mean[MODEL]
        if self._trainer is None:
            self._trainer = self._task.trainer(like.dtype, like.device)
        metrics = self._task.evaluate(self._trainer, probe.mean)
        return {"local_mean_loss": metrics["test_loss"] if "test_loss" in metrics else metrics["loss"]}


class ClientGradients:
    """The full gradients of all clients at one model, in float64."""

    def __init__(self, caller: str, task: TaskLike, x: Vectors | Vector | None, key: Key, dtype: torch.dtype) -> None:
        start = task.start(key, dtype)
        vectors: Vectors = start if x is None else {**start, MODEL: x} if isinstance(x, torch.Tensor) else x
        self.dim = start[MODEL].numel()
        if vectors[MODEL].shape != start[MODEL].shape:
            raise HansaError(
                f"{caller}(at): a vector of shape {tuple(vectors[MODEL].shape)}, the model has ({self.dim},)."
            )
        self.trainer = task.trainer(dtype, torch.device("cpu"))
        self.weighted: Any = getattr(self.trainer, "weighted_gradient", None)
        couples_rows = self.weighted is not None and getattr(task, "loss_sums", True) is None
        self.is_row_mean = self.weighted is None or getattr(task, "is_row_mean", True)
        self.samples, self.key = task.population.samples, key
        piece = min(PIECE, int(getattr(task, "evaluation_batch_size", PIECE)))
        self.piece = max(self.samples) if couples_rows else piece
        self.model, self.buffers = vectors[MODEL].to(dtype), vectors.get(BUFFERS)
        self.load(self.model)
        if hasattr(self.trainer, "module"):
            self.trainer.module.eval()
        self.gradients: list[Vector] | None = [] if len(self.samples) * self.dim <= MAX_CACHED_NUMBERS else None

    def load(self, model: Vector) -> None:
        """Take all further gradients at a model."""
        self.trainer.load(model, self.buffers)

    def by_client(self) -> Iterator[tuple[int, Vector]]:
        if self.gradients:
            yield from enumerate(self.gradients)
            return
        for client in range(len(self.samples)):
            gradient = self.full(client)
            if self.gradients is not None:
                self.gradients.append(gradient)
            yield client, gradient

    def full(self, client: int) -> Vector:
        rows = self.rows(client)
        if rows is None:
            return self.flat(client, None)
        total, divisor = torch.zeros(self.dim, dtype=torch.float64), 0.0
        for piece in torch.split(rows, self.piece):
            weight, gradient = self.piece_gradient(client, piece)
            if weight:  # zero if all labels are ignored
                total.add_(gradient, alpha=weight)
                divisor += weight
        return total / divisor if divisor else total

    def loss(self, client: int) -> float:
        """Return the mean loss of a client's rows, in pieces weighted by their rows."""
        rows = self.rows(client)
        if rows is None:
            return float(self.trainer.gradient(client, None)[0])
        pieces = torch.split(rows, self.piece)
        return math.fsum(float(self.trainer.gradient(client, piece)[0]) * len(piece) for piece in pieces) / len(rows)

    def noise(self, client: int, full: Vector, batch_size: int, samples: int | None) -> float:
        """E||g(batch) - g||^2 for batches without replacement: (n - B)/((n - 1) B) of a single sample's."""
        rows = self.rows(client)
        if rows is None or len(rows) == 1:
            return 0.0
        n, draw = len(rows), self.key.child("heterogeneity", client).numpy()
        batch = min(batch_size, n)
        if not self.is_row_mean and batch > 1:  # the mean over batches that are drawn
            count = n if samples is None else samples
            batches = (rows[torch.from_numpy(draw.choice(n, batch, replace=False))] for _ in range(count))
            return math.fsum(square(self.flat(client, picked) - full) for picked in batches) / count
        if samples is not None and samples < n:
            rows = rows[torch.from_numpy(draw.choice(n, samples, replace=False, shuffle=False))]
        squares = [square(self.flat(client, rows[i : i + 1]) - full) for i in range(len(rows))]
        single = math.fsum(squares) / len(rows)
        return single * (n - batch) / ((n - 1) * batch)

    def rows(self, client: int) -> torch.Tensor | None:
        """Return all rows of a client, in order."""
        key = self.key.child("heterogeneity", "rows")
        batches: Any = self.trainer.batches(client, Work(1, self.samples[client]), key)
        return None if batches is None else getattr(batches, "rows", batches)[0].sort().values

    def flat(self, client: int, rows: torch.Tensor | None) -> Vector:
        return self.piece_gradient(client, rows)[1]

    def piece_gradient(self, client: int, rows: torch.Tensor | None) -> tuple[float, Vector]:
        """Return the gradient on some rows, and its weight in that on more rows."""
        weight, gradients = (
            (float(0 if rows is None else len(rows)), self.trainer.gradient(client, rows)[1])
            if self.weighted is None or rows is None
            else self.weighted(client, rows)
        )
        flat = torch.cat([gradient.detach().reshape(-1).to(torch.float64) for gradient in gradients])
        return weight, flat if weight or rows is None else torch.zeros_like(flat)


def square(vector: Vector) -> float:
    """Return the squared norm."""
    return float(vector @ vector)


@dataclass(frozen=True, slots=True)
class Heterogeneity:
    """With g_i the full gradient of client i, lambda the objective's weights and g = sum lambda_i g_i:

    - ``zeta``: ||g_i - g||^2 of every client ([AWARE] Corollary 3.2);
    - ``sigma_g``: sqrt(sum lambda_i ||g_i - g||^2) ([AWARE] Assumption 3.1, [AFGA] 4.4);
    - ``sigma_l``: sqrt(mean_i E||g_i(batch) - g_i||^2), the noise of a batch ([AWARE] Assumption 2.2);
    - ``sigma_within``: sqrt(mean_k mean_{i in k} ||g_i - g_k||^2) with g_k the mean gradient of cluster k ([HAFED]
      Assumption 5.4, the average of its sigma_k^2), ``sigma_between``: sqrt(mean_k ||g_k - mean_k g_k||^2), its sigma_g
      at alpha = 1; None without clusters;
    - ``gradient_norm``: ||g||, and ``diversity``: D of the g_i ([AWARE] Definition 3.1).

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> heterogeneity(task, torch.zeros(2)).sigma_g
    0.0
    """

    zeta: tuple[float, ...]
    sigma_g: float
    sigma_l: float
    sigma_within: float | None
    sigma_between: float | None
    gradient_norm: float
    diversity: float

    def record(self) -> dict[str, Any]:
        """Return the measured values as plain data, for a round's record."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {**values, "zeta": list(self.zeta), "gradient_diversity": values.pop("diversity")}


def heterogeneity(
    task: TaskLike,
    at: Vectors | Vector | None = None,
    *,
    clusters: Sequence[Sequence[int]] | None = None,
    weights: Weights = "uniform",
    batch_size: int = 1,
    samples: int | None = 64,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Heterogeneity:
    """Measure a task's heterogeneity at a model, by default the initial model of ``seed``, from full gradients.

    ``at`` is a flat vector, or ``run.state.vectors``. The noise is that of batches of ``batch_size`` drawn without
    replacement, estimated from at most ``samples`` per-sample gradients per client (None: all), or from that many
    batches (None: as many as the client has rows) if the loss of a batch is not the mean of the losses of its rows.
    Models are in evaluation mode, so dropout and batch statistics add no noise. Tasks with full gradients only have no
    noise. A full gradient is that of the loss of all of a client's rows: with class weights or ignored labels that of
    the weighted mean, and for a loss that sums that of the sum divided by the rows.

    Two clients with f_i = (x - b_i)^2/2 at x = 0, b = 1 and 3: g_i = -1 and -3, g = -2.

    >>> from hansa.training import quadratic
    >>> found = heterogeneity(quadratic([[[1.0]], [[1.0]]], [[1.0], [3.0]]))
    >>> found.zeta, found.sigma_g, found.gradient_norm
    ((1.0, 1.0), 1.0, 2.0)
    """
    check_integer("heterogeneity", "batch_size", batch_size)
    if samples is not None:
        check_integer("heterogeneity", "samples", samples, "None takes all of a client's samples.")
    weights = rule_or_numbers("heterogeneity", "weights", weights, "uniform", "samples")
    groups = _groups(clusters, task.population.count)
    key = Key(seed)
    measuring = ClientGradients("heterogeneity", task, at, key, task.dtype if dtype is None else dtype)
    client_shares = client_weights(weights, range(task.population.count), task.population.samples)

    noise = []
    total = torch.zeros(measuring.dim, dtype=torch.float64)
    means = [torch.zeros_like(total) for _ in groups]
    cluster_of = {client: k for k, group in enumerate(groups) for client in group}
    squares = []
    for client, gradient in measuring.by_client():
        total.add_(gradient, alpha=client_shares[client])
        if cluster_of:
            means[cluster_of[client]].add_(gradient, alpha=1 / len(groups[cluster_of[client]]))
        squares.append(float(gradient @ gradient))
        noise.append(measuring.noise(client, gradient, batch_size, samples))
    zeta = []
    within = [0.0] * len(groups)
    for client, gradient in measuring.by_client():
        zeta.append(square(gradient - total))
        if cluster_of:
            k = cluster_of[client]
            within[k] += square(gradient - means[k]) / len(groups[k])
    centre = torch.stack(means).mean(dim=0) if means else total
    length = float(total @ total)
    return Heterogeneity(
        zeta=tuple(zeta),
        sigma_g=math.sqrt(math.fsum(w * z for w, z in zip(client_shares, zeta, strict=True))),
        sigma_l=math.sqrt(math.fsum(noise) / len(noise)),
        sigma_within=math.sqrt(math.fsum(within) / len(groups)) if groups else None,
        sigma_between=math.sqrt(math.fsum(square(mean - centre) for mean in means) / len(means)) if means else None,
        gradient_norm=math.sqrt(length),
        diversity=diversity(squares, client_shares, length),
    )


def track_heterogeneity(every: int = 1, **options: Any) -> Callable[[Any, dict[str, Any]], None]:
    """Return a callback that adds `heterogeneity` at the server's model to the record of every ``every``-th round.

    Clusters and weights default to those of the run's method and objective; ``options`` override them.

    ``hansa.run(..., callbacks=[hansa.measures.track_heterogeneity(every=10)])``

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> done = hansa.run(hansa.presets.fedavg(steps=2), task, rounds=2, callbacks=[track_heterogeneity()])
    >>> "sigma_g" in done.history[-1]
    True
    """
    check_integer("track_heterogeneity", "every", every)

    def measure(run: Any, record: dict[str, Any]) -> None:
        if record["round"] % every:
            return
        mixing = run.algorithm.local.mixing
        weights = with_defaults(run.algorithm.channels[MODEL].aggregate, BaseAggregator).weights
        arguments = {
            "clusters": None if mixing is None else mixing.cluster_lists(),
            "weights": "uniform" if weights == "clusters" else weights,
            "seed": run.key.seed,
            "dtype": run.dtype,
            **options,
        }
        record.update(heterogeneity(run.task, run.host_vectors, **arguments).record())

    return measure


def _groups(clusters: Sequence[Sequence[int]] | None, population: int) -> list[list[int]]:
    if clusters is None:
        return []
    groups = [[int(client) for client in group] for group in clusters]
    if sorted(client for group in groups for client in group) != list(range(population)) or not all(groups):
        raise HansaError(f"heterogeneity(clusters): expected every one of the {population} clients in one cluster.")
    return groups


@dataclass(frozen=True, slots=True)
class Smoothness:
    """Estimates at one model. The theorems assume bounds at every model: the true constants are at least these.

    - ``L``: the largest, over the ``clients`` measured, of max |eigenvalue| of the Hessian of the client's loss;
    - ``G``: the largest norm of the measured stochastic gradients;
    - ``loss``: the mean of the clients' losses, f_0 if the model is the first one. It bounds f_0 - f* for losses that
      are never negative.

    >>> from hansa.training import quadratic
    >>> found = smoothness(quadratic([[[2.0]], [[3.0]]], [[0.0], [3.0]]))  # f_i = (a_i x - b_i)^2/2
    >>> round(found.L, 6), round(found.G, 6), found.loss
    (9.0, 9.0, 2.25)
    """

    L: float
    G: float
    loss: float
    clients: tuple[int, ...]


def smoothness(
    task: TaskLike,
    at: Vectors | Vector | None = None,
    *,
    clients: int | None = 16,
    iterations: int = 30,
    batch_size: int = 1,
    batches: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Smoothness:
    """Estimate L and G of a task at a model, by default the initial model of ``seed``.

    L is found by power iteration on differences of full gradients, G as the largest norm among random batches.

    Args:
        task: A task.
        at: A flat vector, or ``run.state.vectors``.
        clients: How many clients to measure, drawn with the seed; None measures all.
        iterations: Steps of the power iteration of each client, of two full gradients each.
        batch_size: Rows of a stochastic gradient.
        batches: Stochastic gradients per client.
        seed: Seed of the first model and of all draws.
        dtype: Dtype of the arithmetic; differences of gradients lose most digits of float32.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.diag(torch.tensor([1.0, 2.0])).expand(3, 2, 2), torch.ones(3, 2))
    >>> round(smoothness(task).L, 6)  # A'A/2 has eigenvalues 1/2 and 2
    2.0
    """
    for name, number in (("iterations", iterations), ("batch_size", batch_size), ("batches", batches)):
        check_integer("smoothness", name, number)
    population, key = task.population.count, Key(seed)
    if clients is not None:
        check_integer("smoothness", "clients", clients, "None measures all.")
    chosen: Sequence[int] = range(population)
    if clients is not None and clients < population:
        drawn = key.child("smoothness", "clients").numpy().choice(population, clients, replace=False, shuffle=False)
        chosen = sorted(drawn.tolist())
    measuring = ClientGradients("smoothness", task, at, key, dtype)
    step = STEP * max(1.0, math.sqrt(square(measuring.model.double())))
    largest, longest, losses = 0.0, 0.0, []
    for client in chosen:
        losses.append(measuring.loss(client))
        longest = max(longest, _longest_gradient(measuring, client, batch_size, batches))
        largest = max(largest, _largest_eigenvalue(measuring, client, iterations, step))
    if not math.isfinite(largest + longest):
        raise HansaError("smoothness: a gradient at this model is not finite. Give a model with finite gradients.")
    return Smoothness(largest, longest, math.fsum(losses) / len(losses), tuple(chosen))


def _longest_gradient(measuring: ClientGradients, client: int, batch_size: int, batches: int) -> float:
    """Return the largest norm of a client's stochastic gradients: of all rows alone if there are few, else of draws."""
    rows = measuring.rows(client)
    if rows is None:
        return math.sqrt(square(measuring.flat(client, None)))
    size, draw = min(batch_size, len(rows)), measuring.key.child("smoothness", client).numpy()
    if len(rows) <= batches and size == 1:
        drawn = [rows[i : i + 1] for i in range(len(rows))]
    else:
        drawn = [rows[torch.from_numpy(draw.choice(len(rows), size, replace=False))] for _ in range(batches)]
    return math.sqrt(max(square(measuring.flat(client, batch)) for batch in drawn))


def _largest_eigenvalue(measuring: ClientGradients, client: int, iterations: int, step: float) -> float:
    """Return max |eigenvalue| of the Hessian: power iteration on (g(x + h v) - g(x - h v))/(2h)."""
    x, eigenvalue = measuring.model, 0.0
    direction = measuring.key.child("smoothness", client, "direction").numpy().standard_normal(measuring.dim)
    v = torch.from_numpy(direction)
    v /= torch.linalg.vector_norm(v)
    for _ in range(iterations):
        sides = []
        for sign in (1.0, -1.0):
            measuring.load((x.double() + sign * step * v).to(x.dtype))
            sides.append(measuring.full(client))
        product = (sides[0] - sides[1]) / (2 * step)
        length = math.sqrt(square(product))
        if length == 0.0 or not math.isfinite(length):
            eigenvalue = max(eigenvalue, length)
            break
        eigenvalue, v = length, product / length
    measuring.load(x)
    return eigenvalue
