"""Evaluation: losses and metrics of test rows that do not depend on how the rows are divided into batches.

Chunks of test rows are scored by trainers (`Evaluator`), and the sums over chunks added (`compute_metrics`). Clients
may be evaluated each on its own test rows, also after local fine-tuning (`run_evaluation`).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from hansa.algorithm import Algorithm, LocalPhase
from hansa.core import trees
from hansa.core.bounds import Checked, bound, or_none
from hansa.core.devices import copy_to_device
from hansa.core.errors import HansaError, check_integer, check_non_negative
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.local import Work
from hansa.local.trainer import ClientJobs, LocalStep, train
from hansa.training.batch_sources import (
    Batch,
    BatchSource,
    count_rows,
    count_test_rows,
    describe_shapes,
    has_rows,
    take_rows,
)
from hansa.training.losses import LossFunction, strip_weights
from hansa.training.metric_direction import unwrapped
from hansa.training.metrics import Accuracy, GroupedMetric, MergeableMetric, Metric, Sketch, compute_metric

if TYPE_CHECKING:
    from hansa.training.modules import ModelFacts
    from hansa.training.trainer import ModuleTrainer

log = logging.getLogger("hansa")

EVALUATION_BATCH = 500
CHUNK_ROWS = 1000  # test rows evaluated at a time: fixed, so that sums do not depend on the number of workers
BATCH_BYTES = 1 << 28  # of the outputs of a batch in evaluation: fixed, so that results do not depend on the machine
_OUTPUT_BYTES = 1 << 30  # of the outputs of a test set that are kept for the loss
_MAX_CLIENTS, _MAX_ROWS = 64, 4000  # of one job; results do not depend on them
_preparing = threading.Lock()

ClientMetrics: TypeAlias = dict[str, float]
"""Metrics of one client: test_loss, test_accuracy, personal_loss, ..."""


class EvaluationChunk(NamedTuple):
    """A range of the rows of a test set, and the number that seeds the random numbers of its evaluation."""

    start: int
    stop: int
    name: str
    seed: int


class PartialScore(NamedTuple):
    """Sums over a range of test rows: the loss and its weight, and the ``correct`` among the ``labels`` that count; and
    outputs and targets, if the loss or a metric needs all rows at once."""

    loss_sum: float
    weight: float
    correct: float | None = None
    labels: float = 0.0
    outputs: tuple[Any, Any] | None = None


def total_score(scores: Sequence[PartialScore], loss: LossFunction | None = None) -> PartialScore:
    """Add the scores of several batches or chunks, in order. A ``loss`` that needs all rows at once is computed."""
    correct = [score.correct for score in scores if score.correct is not None]
    kept = [score.outputs for score in scores if score.outputs is not None]
    total = PartialScore(
        math.fsum(score.loss_sum for score in scores),
        math.fsum(score.weight for score in scores),
        math.fsum(correct) if correct else None,
        math.fsum(score.labels for score in scores),
        concatenate_outputs(kept) if kept else None,
    )
    if loss is None or total.outputs is None:
        return total
    with torch.no_grad():
        return total._replace(loss_sum=float(loss(*total.outputs)) * total.weight)


def compute_metrics(
    scores: Sequence[PartialScore],
    metrics: Mapping[str, Metric],
    loss: LossFunction | None = None,
    *,
    may_be_undefined: bool = False,
) -> dict[str, float]:
    """Return loss, accuracy and further metrics of test rows from the scores of their chunks, in order.

    With ``may_be_undefined``, a metric that raises ValueError, such as an AUC of a single class, is NaN.
    """
    score = total_score(scores, loss)
    results = {"loss": score.loss_sum / score.weight if score.weight else math.nan}
    if score.correct is not None:
        results["accuracy"] = score.correct / max(1.0, score.labels)
    for name, metric in metrics.items():
        try:
            results[name] = compute_metric(name, metric, *(score.outputs or (None, None)))
        except ValueError as error:
            if not may_be_undefined or isinstance(error, HansaError):
                raise
            results[name] = math.nan
    return results


class SiteMetrics(NamedTuple):
    """What a site of a federation may send about its test rows: metrics by name, and sketches of some of them; and why
    it keeps others back, which is for the site only."""

    values: dict[str, float]
    sketches: dict[str, Sketch]
    kept_back: dict[str, str]


def compute_site_metrics(score: PartialScore, metrics: Mapping[str, Metric], fewest: int, sketch: bool) -> SiteMetrics:
    """Return the metrics of a site's test rows, each computed by the site.

    A metric that says something about fewer than ``fewest`` rows, such as an AUC with a rare class, or that fails, is
    left out, and ``kept_back`` says why.
    """
    results = SiteMetrics({}, {}, {})
    output, target = score.outputs or (None, None)
    for name, metric in metrics.items():
        function = unwrapped(metric)
        try:
            group = function.smallest_group(target) if isinstance(function, GroupedMetric) else count_rows(target)
            if group < fewest:
                results.kept_back[name] = f"{group} rows in its smallest group, the policy has {fewest}"
                continue
            value = compute_metric(name, metric, output, target)
            if math.isfinite(value):
                results.values[name] = value
            mergeable = function if sketch and isinstance(function, MergeableMetric) else None
            if mergeable is not None and (summary := mergeable.sketch(output, target, fewest)) is not None:
                results.sketches[name] = summary
        except Exception as error:
            results.kept_back[name] = f"{type(error).__name__}: {error}"
            log.warning("metric %s is left out: %s", name, results.kept_back[name])
    return results


def concatenate_outputs(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of batches: tensors, or tuples and dicts of tensors."""
    flat = [trees.tree_flatten(output) for output in outputs]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    for column in columns:
        shapes = {tuple(leaf.shape[1:]) for leaf in column}
        if len(shapes) > 1 or not all(leaf.ndim for leaf in column):
            raise HansaError(
                f"the loss or a metric needs all test rows at once, but batches have outputs or targets of different "
                f"shapes ({', '.join(map(str, sorted(shapes)))} a row). Pad them to one length, or use a loss of "
                "torch or hansa.losses, or Task(reduction=...), and metric= with one value per row."
            )
    return trees.tree_unflatten([torch.cat(column) for column in columns], flat[0][1])


def check_outputs(facts: ModelFacts, test_rows: int, for_loss: bool, metrics: Mapping[str, Any]) -> None:
    """Raise if the loss or a metric needs the outputs of all test rows, and these have no rows or are too large."""
    if facts.output is None or not test_rows or not (for_loss or metrics):
        return
    size, problem = facts.output_bytes * test_rows, ""
    if not has_rows(facts.output, count_rows(facts.target)):
        returned = type(facts.output).__name__
        problem = f"but the model returns {returned} with values that are not tensors of one entry per row"
    elif for_loss and size > _OUTPUT_BYTES:
        problem = f"which take {size / 2**30:.1f} GiB for {test_rows:,} rows"
    if problem and not for_loss:
        raise HansaError(
            f"Task(metrics) needs the outputs of all test rows at once, {problem}. Return a tensor, or tuples or dicts "
            "of such tensors."
        )
    if problem:
        raise HansaError(
            "Task(loss): a loss that is neither torch's nor of hansa.losses is computed from the outputs of all test "
            f"rows at once, {problem}. State how it reduces a batch: Task(reduction='mean') over rows, 'sum', or "
            "'labels' for a mean over labels that count."
        )


@dataclass(frozen=True, eq=False)
class EvaluationRows:
    """A test set with inputs and targets like those of the task's data."""

    test_inputs: Any
    test_targets: Any


def named_test_sets(test: Mapping[str, Any], like: Batch) -> dict[str, Any]:
    """Return test sets by name, from pairs (inputs, targets) or from data with a test set; raise for any other."""
    sets: dict[str, Any] = {}
    if not isinstance(test, Mapping):
        raise HansaError(f"Task(test={type(test).__name__}): expected a dict of test sets by name.")
    for name, value in test.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise HansaError(f"Task(test): {name!r}: expected an identifier as the name of a test set.")
        if hasattr(value, "fetch_test") and value.test_count:
            sets[name] = value
            continue
        if getattr(value, "test_inputs", None) is not None:
            pair = Batch(value.test_inputs, value.test_targets)
        elif isinstance(value, (tuple, list)) and len(value) == 2:
            pair = Batch(*trees.tree_map(torch.as_tensor, tuple(value)))
        else:
            raise HansaError(
                f"Task(test): {name} is {type(value).__name__}: expected a pair (inputs, targets), or data with a test "
                "set, such as hansa.data.from_arrays(..., test=...) returns."
            )
        if not count_rows(pair.targets) or len({len(leaf) for leaf in trees.tree_leaves(pair)}) != 1:
            raise HansaError(f"Task(test): {name} has no rows, or not as many inputs as targets.")
        for part, values, expected in zip(Batch._fields, pair, like, strict=True):
            if _row_forms(values) != _row_forms(expected):
                raise HansaError(
                    f"Task(test): the {part} of {name} are {describe_shapes(values)}, those of the training data "
                    f"{describe_shapes(expected)}. Prepare them in the same way, as by hansa.data.from_arrays."
                )
        sets[name] = EvaluationRows(*pair)
    return sets


def _row_forms(tree: Any) -> Any:
    leaves, structure = trees.tree_flatten(tree)
    return structure, [(leaf.shape[1:], leaf.dtype.is_floating_point) for leaf in leaves]


def score_rows(trainer: ModuleTrainer, name: str, rows: torch.Tensor, seed: int) -> PartialScore:
    """Return the score of a trainer's current model on some rows of a test set, which is prepared once for all trainers
    of a dtype and device."""
    with _preparing:
        if name not in trainer.test_sources:
            source = _prepare(trainer, trainer.task.test_sets[name])
            trainer.test_sources[name] = source, _is_native(trainer, source)
        source, is_native = trainer.test_sources[name]
    if is_native and trainer.network is not None:
        start, count, inputs = int(rows[0]), len(rows), source.native_inputs
        if inputs is not None and int(rows[-1]) - start == count - 1 and bool((rows.diff() == 1).all()):
            loss, hits = trainer.network.evaluate(trainer.y, inputs.logical, source.labels, start, start + count)
        else:
            loss, hits = trainer.network.evaluate(trainer.y, *source.batch(None, rows))
        return PartialScore(loss, count, math.nan if math.isnan(loss) else hits, labels=count)
    trainer.seed(Key(0).child("evaluation", seed))
    trainer.module.eval()
    try:
        score = total_score([_score_batch(trainer, batch) for batch in _test_batches(trainer, source, rows)])
        return score if trainer.task.loss_sums is not None else score._replace(weight=float(len(rows)))
    finally:
        trainer.module.train()


def _test_batches(trainer: ModuleTrainer, source: BatchSource, rows: torch.Tensor) -> Iterator[Batch]:
    """Return test rows in batches. Rows that are collated, and needed all at once, are collated together."""

    def read(some: torch.Tensor) -> Batch:
        batch = source.batch(None, copy_to_device(some, source.index_device))
        return batch if source.native_inputs is not None else trainer.prepare_test_batch(batch)

    size = trainer.task.evaluation_batch_size
    if not trainer.task.collates_all_test_rows:
        return map(read, torch.split(rows, size))
    batch, parts = read(rows), torch.split(torch.arange(len(rows)), size)
    return (take_rows(batch, part) for part in parts) if has_rows(batch, len(rows)) else iter([batch])


def _score_batch(trainer: ModuleTrainer, batch: Batch) -> PartialScore:
    task, (inputs, target) = trainer.task, batch
    output = trainer.call_model(inputs)
    loss, weight = (0.0, 0.0) if task.loss_sums is None else task.loss_sums(output, target)
    target = strip_weights(target)
    hits, labels = (None, 0.0) if task.metric is None else task.metric.score(output, target)
    score = PartialScore(float(loss), float(weight), hits, labels)
    if not task.needs_all_outputs:
        return score
    to_cpu = trees.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, (output, target))
    return score._replace(outputs=to_cpu)


def _is_native(trainer: ModuleTrainer, source: BatchSource) -> bool:
    """Return whether native code evaluates test rows: with plain accuracy, and tokens of the known length."""
    task, network, inputs = trainer.task, trainer.network, source.native_inputs
    if network is None or task.metric != Accuracy() or task.metrics or inputs is None:
        return False
    if network.takes_tokens and (inputs.dtype != torch.int64 or inputs.logical.shape[1:] != network.input_shape):
        return False
    return not source.labels.numel() or int(source.labels.min()) >= 0


def _prepare(trainer: ModuleTrainer, data: Any) -> BatchSource:
    """Return the source of test rows; a single tensor is prepared once, others batch by batch."""
    form = (trainer.dtype, trainer.device, trainer.layout.channels_last)
    source = BatchSource(data, *form, test=True)
    if source.native_inputs is None or not trainer.task.augment.test_pipeline():
        return source
    chunks = torch.split(torch.arange(count_test_rows(data), device=trainer.device), EVALUATION_BATCH)
    inputs = [trainer.prepare_test_batch(source.batch(None, chunk)).inputs for chunk in chunks]
    return BatchSource(EvaluationRows(torch.cat(inputs), source.labels), *form, test=True)


@dataclass(frozen=True, slots=True)
class personalise(Checked):
    """Fine-tune each client's model with plain SGD on its training rows before it is evaluated.

    The run itself is not affected.

    Args:
        steps: Number of local steps.
        lr: Learning rate.
        batch_size: Rows per step; None takes all rows of the client.

    >>> personalise(steps=5, batch_size=None).work(samples=7)
    Work(steps=5, batch_size=7)
    """

    steps: int = field(default=5, metadata=bound(check_integer))
    lr: float = field(default=0.01, metadata=bound(check_non_negative))
    batch_size: int | None = field(default=32, metadata=bound(or_none, check_integer, "None takes all of its rows."))

    def work(self, samples: int) -> Work:
        """Return the local work of a client with this many samples."""
        return Work(self.steps, samples if self.batch_size is None else min(self.batch_size, samples))


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationJob:
    """Clients to evaluate after a round, with the server's vectors and the clients' memory."""

    vectors: Vectors
    clients: tuple[int, ...]
    round: int
    key: Key
    personalisation: personalise | None = None
    memory: Mapping[int, Vectors] = field(default_factory=dict)


def split_job(test_sizes: Mapping[int, int], job: EvaluationJob) -> Iterator[EvaluationJob]:
    """Split the evaluation of many clients into jobs of bounded size, given the clients' numbers of test rows."""
    clients: list[int] = []
    rows = 0
    for client, count in test_sizes.items():
        if clients and (len(clients) == _MAX_CLIENTS or rows + count > _MAX_ROWS):
            yield replace(job, clients=tuple(clients))
            clients, rows = [], 0
        clients.append(client)
        rows += count
    if clients:
        yield replace(job, clients=tuple(clients))


def run_evaluation(algorithm: Algorithm, task: Any, trainer: Any, job: EvaluationJob) -> list[ClientMetrics]:
    """Return the metrics of each client of a job; they depend only on the vectors, the client's memory and the key."""
    phase, tuning, results = algorithm.local, job.personalisation, []
    for client in job.clients:
        model, buffers = client_model(phase, job.vectors, job.memory.get(client, {}))
        trainer.load(model, buffers)
        results.append({f"test_{name}": value for name, value in task.evaluate_client(trainer, client).items()})
        if tuning is None:
            continue
        model, work = model.to(trainer.y.device), tuning.work(task.population.samples[client])
        step = LocalStep(tuning.lr, model, max_grad_norm=phase.max_grad_norm, frozen_blocks=phase.frozen_blocks)
        key, starts = job.key.child("personalise", job.round), None if buffers is None else (buffers,)
        trained = train(trainer, ClientJobs.of(model, client, work, step, key, keep_models=True, buffers=starts))
        trainer.load(trained.models[0], trained.buffers[0] if trained.buffers else None)
        results[-1] |= {f"personal_{name}": value for name, value in task.evaluate_client(trainer, client).items()}
    return results


def client_model(phase: LocalPhase, vectors: Vectors, memory: Mapping[str, Vector]) -> tuple[Vector, Vector | None]:
    """Return a client's model and buffers: its local model if clients keep theirs, otherwise the server's model with
    the client's private blocks."""
    model, buffers = vectors[MODEL], vectors.get(BUFFERS)
    if phase.mixing is not None and phase.mixing.keep_local_models:
        row = memory.get("local/row")
        if row is None:
            return model, buffers
        return row[: model.numel()], None if buffers is None else row[model.numel() :]
    model = phase.client_start(model, memory)
    return model, None if buffers is None else phase.client_start(buffers, memory, of_buffers=True)


def rows_by_owner(owners: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """Return the rows of each client that has some.

    >>> rows_by_owner(torch.tensor([2, -1, 0, 2]))
    {0: tensor([2]), 2: tensor([0, 3])}
    """
    if owners is None:
        return {}
    order = torch.argsort(owners, stable=True)
    clients, counts = torch.unique_consecutive(owners[order], return_counts=True)
    groups = zip(clients.tolist(), torch.split(order, counts.tolist()), strict=True)
    return {client: rows for client, rows in groups if client >= 0}
