"""Tasks: a model, a loss and federated data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, get_args
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from hansa.core import native
from hansa.core.devices import Device, resolve_devices
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.native.network import Network
from hansa.core.native.tracing import NotEligible
from hansa.core.types import BUFFERS, MODEL, Population, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.layout import widen_module
from hansa.local.trainer import Trainer
from hansa.training import random_state
from hansa.training.augment import Augment, as_pipeline
from hansa.training.batch_sources import Batch, ClientData, all_client_rows, count_test_rows, example_batch
from hansa.training.evaluation import (
    BATCH_BYTES,
    CHUNK_ROWS,
    EVALUATION_BATCH,
    EvaluationChunk,
    EvaluationRows,
    PartialScore,
    check_outputs,
    compute_metrics,
    named_test_sets,
    rows_by_owner,
    total_score,
)
from hansa.training.execution_mode import CompiledLoss, Execution, check_compiled, find_network, impossible
from hansa.training.losses import (
    LossFunction,
    Reduction,
    WeightedTargets,
    check_classes,
    ignored_label,
    is_row_mean,
    known_loss,
    strip_weights,
)
from hansa.training.metric_direction import metric_directions, stated_direction
from hansa.training.metrics import (
    Accuracy,
    Metric,
    RowMetric,
    check_metrics,
    compute_metric,
    default_accuracy,
    is_row_metric,
)
from hansa.training.modules import AUTOCAST_DTYPES, ModelFacts, Trial, check_repeatable, describe_model, fresh
from hansa.training.trainer import ModuleTrainer

log = logging.getLogger("hansa")

VALIDATION = "validation"
"""The name of the test set of validation rows."""
_PROBE_ROWS = 24
_tasks_by_seed: WeakKeyDictionary[Any, WeakValueDictionary[int, Task]] = WeakKeyDictionary()
_trainers: WeakKeyDictionary[Any, WeakValueDictionary[Any, ModuleTrainer]] = WeakKeyDictionary()
"""The trainers in use in this process, by task, dtype and device: later ones share their data and frozen weights."""


class TaskLike(Protocol):
    """The interface of a task for engines: clients with samples, initial vectors, a trainer and an evaluation.

    >>> from hansa.training import quadratic
    >>> task: TaskLike = quadratic(torch.eye(2)[None], torch.ones(1, 2))
    >>> task.evaluate(task.trainer(torch.float32, torch.device("cpu")), task.start(Key(0), torch.float32))
    {'loss': 0.5}
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def population(self) -> Population: ...

    def start(self, key: Key, dtype: torch.dtype) -> Vectors:
        """Return the initial model, and the initial buffers if there are any."""
        ...

    def trainer(self, dtype: torch.dtype, device: torch.device) -> Trainer: ...

    def evaluate(self, trainer: Any, vectors: Vectors) -> dict[str, float]: ...


class Task:
    """A model, a loss and federated data.

    Equal seeds give equal initial models. A model with float64 parameters is trained in float64. Frozen parameters and
    buffers in bfloat16 or float16 keep their dtype if the model converts their inputs to it. Floating-point buffers
    that training changes are averaged. Integer and boolean buffers are sent if the first step moves them in one
    direction, such as counters and flags of the first batch: their average is rounded to the nearest. Other buffers
    keep their initial value. Before each client the remaining state of a module (attributes, hooks, plain objects) is
    reset to that after construction, and its random numbers are seeded from the client's key; a module that cannot be
    reset is refused.

    A model that is equivalent to a stack of convolutions and linear layers with cross-entropy, however its
    ``forward()`` is written, is trained by native code in float32 after three batches have agreed with PyTorch up to
    rounding. Any other model is trained by eager PyTorch, and one log line gives the reason.

    Args:
        model: A function without arguments, or a module class, that returns the model. A parameter ``seed`` receives
            the seed of the run.
        loss: A function of (output, target) that returns one number for a batch. The test loss of torch's and Hansa's
            losses is computed from sums over all test rows; a summed loss is divided by the number of rows. Any other
            loss is called once with the outputs of all test rows, so that it may be a mean or couple the rows, such as
            a Cox or a contrastive loss.
        data: Federated data, such as `hansa.data.federate` returns.
        metric: A function of (output, target) that returns one value per row, such as whether it is correct, or one
            number for all test rows; or an object with ``update`` and ``compute``. It is reported as test_accuracy.
            Default: classification accuracy if targets are class numbers and shapes leave one choice of the classes.
        metrics: Metrics of all test rows by name: ``{"auc": roc_auc}`` is reported as test_auc. A metric is a function
            of (outputs, targets), one of ``sklearn.metrics``, or an object with ``update``, ``compute`` and
            ``higher_is_better`` as in torchmetrics. A function of another name than accuracy, auc, f1, c_index, rmse,
            mae or mse needs `hansa.lower` or `hansa.higher`: ``{"delay": hansa.lower(delay)}``.
        main_metric: The metric that runs are ranked by: "accuracy", "loss", or one of ``metrics``. Default: accuracy if
            there is one, else the first of ``metrics``, else the loss.
        augment: Functions of (batch, generator) that every training batch passes through, such as
            ``[hansa.augment.crop(4), hansa.augment.flip()]``.
        reduction: The reduction of a user-defined loss over a batch: "mean" over its rows, "sum", or "labels" for the
            mean over labels that are not ignored. Its test loss is then summed by batch, without keeping outputs.
        ignored: A label that accuracy and ``reduction="labels"`` ignore. Default: the ``ignore_index`` of the loss.
            Negative labels are always ignored.
        name: Name of the task. Default: the class of the model.
        execution: How clients are trained. "auto": by native code if model and loss have a native form, otherwise by
            eager PyTorch. "native" and "eager": only by that. "vmap": many clients in one program (`torch.func.vmap`),
            for small models without dropout. "compiled": by ``torch.compile``. An impossible execution is refused with
            the reason. Results of different executions differ in their last bits.
        autocast: "bfloat16" runs the model in mixed precision (`torch.autocast`); updates stay float32.
        test: Further test sets by name, each a pair (inputs, targets) or data with a test set. ``{"pooled": ...}`` is
            reported as pooled/test_loss and so on. If ``data`` has no test set, the first one is also reported as
            test_loss and so on.
        evaluation_batch_size: Rows per batch in evaluation. Default: 500, or fewer if the outputs of 500 rows exceed a
            quarter of a GiB. It changes at most the last digits of results.
        device: Where clients train, unless the run sets a device. Native code runs on the CPU only.

    >>> from hansa import data, models
    >>> clients = data.federate("fashion-mini", clients=5)
    >>> task = Task(models.cnn_29k, nn.functional.cross_entropy, clients)
    >>> task.population.count, task.layout.dim
    (5, 28938)
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss: LossFunction,
        data: ClientData,
        *,
        metric: Metric | None = None,
        metrics: Mapping[str, Metric] | None = None,
        main_metric: str | None = None,
        augment: Sequence[Augment] | Augment = (),
        reduction: Reduction | None = None,
        ignored: int | None = None,
        name: str | None = None,
        execution: Execution = "auto",
        autocast: str | None = None,
        test: Mapping[str, Any] | None = None,
        evaluation_batch_size: int | None = None,
        device: Device | None = None,
    ) -> None:
        _check_inputs(model, loss, data)
        if metric is not None and stated_direction("", metric) == "lower":
            remedy = "metrics={'name': ...} takes any metric."
            raise invalid_argument("Task", "metric", metric, "an accuracy, which rises", remedy)
        self.model, self.data, self.augment = model, data, as_pipeline(augment)
        self.device = None if device is None else resolve_devices(device, "Task")
        self.vmap_batch_size: int | None = None  # `with_vmap` sets it for a run
        choices = {"execution": get_args(Execution), "autocast": (*AUTOCAST_DTYPES, None)}
        choices["reduction"] = (*get_args(Reduction), None)
        for argument, value in (("execution", execution), ("autocast", autocast), ("reduction", reduction)):
            if value not in choices[argument]:
                raise invalid_argument("Task", argument, value, " or ".join(map(repr, choices[argument])))
        self.execution, self.autocast, self.reduction = execution, autocast, reduction
        self.population = Population(samples_of(data))
        if 0 in (self.population.samples or (0,)):
            empty = (*self.population.samples, 0).index(0)
            raise HansaError(f"client {empty} has no samples: give it some, or remove it from the data.")
        self.name = name if name is not None else type(self.example_model()).__name__
        self.example = self._example_batch()  # a few rows as in training
        weighted = isinstance(self.example.targets, WeightedTargets)
        self.loss = (known_loss(loss, "mean", None) or loss) if weighted else loss
        label = ignored_label(loss) if ignored is None else ignored
        self.ignored = None if label is None or label < 0 else label
        self.test_sets = self._test_sets(test)
        self._client_test_rows = rows_by_owner(getattr(data, "test_owners", None))
        facts = describe_model(self.name, model, self.loss, self.example, autocast)
        self.layout, self.dtype = facts.layout, facts.dtype
        self.constant_buffers, self.frozen = facts.constant, facts.frozen
        self.network = self._find_network()
        check_metrics({} if metric is None else {"accuracy": metric})
        self._describe_scores(facts, metric, check_metrics({} if metrics is None else metrics))
        self.directions = metric_directions(self.metrics)
        columns = [*([] if self.metric is None and "accuracy" not in self.metrics else ["accuracy"]), *self.metrics]
        columns.append("loss")
        main = columns[0] if main_metric is None else main_metric.removeprefix("test_")
        if main not in columns:
            raise invalid_argument("Task", "main_metric", main_metric, f"one of {', '.join(columns)}")
        self.main_metric = f"test_{main}"
        if evaluation_batch_size is None:
            evaluation_batch_size = max(1, min(EVALUATION_BATCH, BATCH_BYTES // max(1, facts.output_bytes)))
        check_integer("Task", "evaluation_batch_size", evaluation_batch_size)
        self.evaluation_batch_size = evaluation_batch_size
        if execution == "compiled":
            check_compiled(self)
        self._checked_for_state = False
        allocator.trim()  # memory of the comparisons

    def _find_network(self) -> Network | None:
        """Return the native form of the model and its loss, if any; otherwise set `eager_reason`."""
        self.eager_reason: str | None = None
        if self.execution in ("auto", "native"):
            native.warn_if_missing()
        try:
            network = find_network(self)
            log.info("%s: trained by native code (%s)", self.name, native.instruction_set())
            return network
        except NotEligible as reason:
            self.eager_reason = str(reason)
        if self.execution == "native":
            raise impossible("native", f"{self.name} has no native form", self.eager_reason)
        if self.execution == "auto":
            log.info("%s: trained by eager PyTorch: %s", self.name, self.eager_reason)
        return None

    def _describe_scores(self, facts: ModelFacts, metric: Metric | None, metrics: dict[str, Metric]) -> None:
        """Set the scores of test rows: the sums of the loss, accuracy, and metrics of all rows."""
        targets, output, target = getattr(self.data, "targets", self.example.targets), facts.output, facts.target
        reduction = self.reduction if self.network is None else "labels"  # the native loss is cross-entropy
        known = known_loss(self.loss, reduction, self.ignored)
        self.loss_sums, self.sums_rows = getattr(known, "sums", None), getattr(known, "reduction", "") == "sum"
        self.is_row_mean = is_row_mean(known, targets, self.ignored)
        self.metric: Accuracy | RowMetric | None = None
        self.metrics = metrics
        target = strip_weights(target)
        if metric is not None and output is not None and is_row_metric(metric, output, target):
            self.metric = RowMetric(metric)
        elif metric is not None:
            self.metrics = {"accuracy": metric, **metrics}
        elif "accuracy" not in metrics and output is not None:
            self.metric, reason = default_accuracy(self.loss, output, target, strip_weights(targets), self.ignored)
            if reason:
                log.warning("%s: no accuracy: %s. Task(metric=...) takes your own function.", self.name, reason)
        if output is None:
            return
        check_classes(self.loss, output, targets)
        for name, function in metrics.items():
            try:
                compute_metric(name, function, output, target)
            except HansaError:
                raise
            except Exception as error:  # such as one class among few rows; evaluation reports other failures
                log.debug("the metric %s fails on a few rows: %s", name, error)
        rows = max(map(count_test_rows, self.test_sets.values()), default=0)
        check_outputs(facts, rows, self.loss_sums is None, self.metrics)

    def _example_batch(self) -> Batch:
        batch = example_batch(self.data, _PROBE_ROWS)
        if not self.augment:
            return batch
        with random_state.preserve_rng():
            random_state.seed_all(Key(0), torch.device("cpu"))
            return Batch(self.augment(batch.inputs, Key(0), torch.Generator()), batch.targets)

    def __repr__(self) -> str:
        facts = [f"{self.layout.dim:,} parameters", *([f"{len(self.metrics)} metrics"] if self.metrics else [])]
        return f"Task({self.name}, {self.population.count} clients, {', '.join(facts)})"

    def example_model(self) -> nn.Module:
        """Return a new model with the same initial weights every time."""
        return fresh(self.model, Key(0))

    def _test_sets(self, test: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the test sets by name; the name of the data's own is ""."""
        sets = named_test_sets({} if test is None else test, self.example)
        sets = sets if sets and not count_test_rows(self.data) else {"": self.data, **sets}
        return {**sets, **_validation_set(self.data)}

    def start(self, key: Key, dtype: torch.dtype) -> Vectors:
        """Return the initial model and buffers."""
        model, buffers = self.layout.pack(fresh(self.model, key.child("init")), dtype)
        return {MODEL: model, BUFFERS: buffers} if self.layout.buffer_dim else {MODEL: model}

    def kept_weights(self, dtype: torch.dtype) -> frozenset[str]:
        """Return the frozen weights that keep their own dtype in a run with a dtype."""
        return self.layout.own_dtypes if dtype == self.dtype else frozenset()

    def trial(self, dtype: torch.dtype, device: torch.device) -> Trial:
        """Return a new, separate model for gradients of example rows."""
        arguments = self.example_model(), self.loss, self.layout, dtype, device, self.example.inputs
        return Trial(*arguments, keep=self.kept_weights(dtype))

    def trainer(self, dtype: torch.dtype, device: torch.device) -> ModuleTrainer:
        """Return a worker's trainer of the model."""
        in_use = _trainers.setdefault(self, WeakValueDictionary())
        in_use[dtype, device] = trainer = ModuleTrainer(self, dtype, device, like=in_use.get((dtype, device)))
        if not self._checked_for_state and trainer.network is None and device.type == "cpu":
            self._checked_for_state = True  # once, not in every worker
            check_repeatable(self, trainer, ModuleTrainer(self, dtype, device, like=trainer))
        if self.execution == "compiled":
            trainer.compiled = CompiledLoss(trainer)
        return trainer

    @property
    def main_test_set(self) -> str:
        """The name of the test set that is reported as test_loss and so on: "", or the first if the data has none."""
        return next(iter(self.test_sets))

    @property
    def main_test_rows(self) -> int:
        """The number of rows of the main test set."""
        return count_test_rows(self.test_sets[self.main_test_set])

    @property
    def needs_all_outputs(self) -> bool:
        """Whether the loss or a metric is computed from the outputs of all test rows."""
        return bool(self.metrics) or self.loss_sums is None

    @property
    def collates_all_test_rows(self) -> bool:
        """Whether a collate function gets all test rows at once, so that outputs have one shape."""
        return self.needs_all_outputs and any(hasattr(data, "fetch_test") for data in self.test_sets.values())

    def test_chunks(self) -> list[EvaluationChunk]:
        """Return fixed ranges of the rows of all test sets, one set after the other; workers divide them."""
        chunks, offset = [], 0
        for name, data in self.test_sets.items():
            rows = count_test_rows(data)
            step = rows if self.collates_all_test_rows else max(CHUNK_ROWS, self.evaluation_batch_size)
            for start in range(0, rows, max(1, step)):
                chunks.append(EvaluationChunk(start, min(start + step, rows), name, offset + start))
            offset += rows
        return chunks

    def compute_metrics(self, scores: Sequence[PartialScore]) -> dict[str, float]:
        """Return loss, accuracy and metrics of the test sets from one score per chunk; empty without scores."""
        results: dict[str, float] = {}
        for name, set_scores in self._scores_by_set(scores).items():
            values = compute_metrics(set_scores, self.metrics, self._loss_of_all_rows)
            metrics = {f"test_{metric}": value for metric, value in values.items()}
            results |= metrics if name == self.main_test_set else {}
            results |= {f"{name}/{metric}": value for metric, value in metrics.items()} if name else {}
        return results

    def sum_scores(self, scores: Sequence[PartialScore]) -> PartialScore:
        """Return the sums over the main test set, from one score per chunk of `test_chunks`."""
        return total_score(self._scores_by_set(scores)[self.main_test_set], self._loss_of_all_rows)

    def _scores_by_set(self, scores: Sequence[PartialScore]) -> dict[str, list[PartialScore]]:
        by_set: dict[str, list[PartialScore]] = {}
        for chunk, score in zip(self.test_chunks() if scores else (), scores, strict=True):
            by_set.setdefault(chunk.name, []).append(score)
        return by_set

    @property
    def _loss_of_all_rows(self) -> LossFunction | None:
        return self.loss if self.loss_sums is None else None

    def evaluate(self, trainer: ModuleTrainer, vectors: Vectors) -> dict[str, float]:
        """Return test loss, accuracy and metrics of the given vectors; empty without a test set."""
        with random_state.preserve_rng():
            return self.compute_metrics([trainer.evaluate(vectors, *chunk) for chunk in self.test_chunks()])

    @property
    def client_test_sizes(self) -> dict[int, int]:
        """Number of test rows of each client that has its own."""
        return {client: len(rows) for client, rows in self._client_test_rows.items()}

    def evaluate_client(self, trainer: ModuleTrainer, client: int) -> dict[str, float]:
        """Return loss, accuracy and metrics of the trainer's model on a client's own test rows."""
        rows = self._client_test_rows[client]
        scores = [trainer.score(self.main_test_set, rows, int(rows[0]))]
        return compute_metrics(scores, self.metrics, self._loss_of_all_rows, may_be_undefined=True)

    def for_seed(self, seed: int) -> Task:
        """Return the task with the clients, or validation rows, drawn from the seed of a run; itself if they are fixed.

        Repeated calls return the same object as long as it is in use.
        """
        tasks = _tasks_by_seed.setdefault(self, WeakValueDictionary())
        if (result := tasks.get(seed)) is not None:
            return result
        data: Any = self.data
        seed_data = data.for_seed(seed) if hasattr(data, "for_seed") else data
        if seed_data is data:
            return self
        tasks[seed] = task = copy.copy(self)
        task.data, task.population = seed_data, Population(samples_of(seed_data))
        task.test_sets = {name: seed_data if test is data else test for name, test in self.test_sets.items()}
        task.test_sets |= _validation_set(seed_data)
        task._client_test_rows = rows_by_owner(getattr(seed_data, "test_owners", None))
        return task

    def on_training_data(self) -> Task:
        """Return the task with all clients' training rows as test set: ``test_loss`` is the global training loss."""
        task = copy.copy(self)
        task.test_sets = {"": EvaluationRows(*all_client_rows(self.data))}
        task._client_test_rows = {}
        return task

    def module(self, vectors: Vectors) -> nn.Module:
        """Return a new module with the given vectors and their dtype, ready to use or to save. Narrow frozen weights
        keep their own dtype."""
        module = self.example_model()
        widen_module(module, vectors[MODEL].dtype, self.kept_weights(vectors[MODEL].dtype))
        with torch.no_grad():
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for name, value in self.layout.unpack(vectors[MODEL], vectors.get(BUFFERS)).items():
                tensors[name].copy_(value)
        return module


def _check_inputs(model: Any, loss: Any, data: Any) -> None:
    """Raise for a model or a loss that is not a function, or data that is not federated."""
    if isinstance(loss, type) or not callable(loss):
        raise HansaError(
            f"Task(loss={getattr(loss, '__name__', loss)!r}): expected a function of (output, target), such as "
            "torch.nn.functional.cross_entropy or torch.nn.CrossEntropyLoss()."
        )
    if not callable(model):
        raise invalid_argument("Task", "model", model, "a function that returns the model, such as its class")
    if isinstance(model, nn.Module):
        raise HansaError(
            f"Task(model={type(model).__name__} object): expected a function that returns the model, because every "
            f"worker needs its own. Pass the class, or lambda: {type(model).__name__}(...)."
        )
    if not all(hasattr(data, name) for name in ("population", "rows", "samples")):
        raise HansaError(
            f"Task(data={type(data).__name__}): expected federated data, such as hansa.data.from_arrays(inputs, "
            "targets, clients=...) or, for a Dataset or DataLoader, "
            "hansa.data.from_items(dataset, collate, clients=...) return."
        )


def samples_of(data: ClientData) -> tuple[int, ...]:
    """Return the number of samples of each client, without a call per client if the data has ``sizes``."""
    sizes = getattr(data, "sizes", None)
    if isinstance(sizes, torch.Tensor) and sizes.shape == (data.population,):
        return tuple(sizes.tolist())
    return tuple(data.samples(client) for client in range(data.population))


def _validation_set(data: Any) -> dict[str, EvaluationRows]:
    """Return the validation rows of some data as a test set by name; empty if there are none."""
    targets = getattr(data, "validation_targets", None)
    return {} if targets is None else {VALIDATION: EvaluationRows(data.validation_inputs, targets)}
