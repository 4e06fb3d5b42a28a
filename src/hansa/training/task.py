"""Tasks: a model, a loss and federated data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, get_args
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

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
    CHUNK_ROWS,
    EvaluationRows,
    PartialScore,
    check_outputs,
    compute_metrics,
    default_batch_size,
    named_test_sets,
    rows_by_owner,
    total_score,
)
from hansa.training.execution_mode import ClientBatching, CompiledLoss, Execution, check_compiled, find_network
from hansa.training.losses import (
    LossFunction,
    Reduction,
    WeightedTargets,
    check_classes,
    check_loss,
    ignored_label,
    loss_form,
    strip_weights,
    with_row_weights,
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
_drawn: WeakKeyDictionary[Any, WeakValueDictionary[int, Task]] = WeakKeyDictionary()
_trainers: WeakKeyDictionary[Any, dict[Any, ref[ModuleTrainer]]] = WeakKeyDictionary()
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
    buffers in bfloat16 or float16 keep their dtype if the model converts their inputs to it. Floating buffers that
    training changes are averaged. Of integer and boolean buffers those are sent that the first step raises, such as
    counters and flags that a first batch sets: their average is rounded to the nearest. Other buffers keep their
    initial value. Before each client the rest of a module (attributes, hooks, plain objects) is as after construction,
    and its random draws are seeded from the client's key; a module for which that fails is refused.

    A model that is equivalent to a stack of convolutions and linear layers with cross-entropy, however its
    ``forward()`` is written, is trained by native code in float32 after three batches have agreed with PyTorch to float
    rounding. Any other model is trained by eager PyTorch, and one log line says why.

    Args:
        model: A function without arguments, or a module class, that returns the model. A parameter ``seed`` receives
            the seed of the run.
        loss: A function of (output, target) that returns one number for a batch. The test loss of torch's and Hansa's
            losses is the quotient of their sums over all test rows, a sum divided by the number of rows. Any other loss
            is called once with the outputs of all test rows, so that it may be a mean or couple the rows, such as a Cox
            or a contrastive loss.
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
        reduction: What your own loss is for a batch: "mean" over its rows, "sum", or "labels" for the mean over labels
            that count. Its test loss is then added batch by batch, and outputs are not kept.
        ignored: A label that counts neither in accuracy nor in ``reduction="labels"``. Default: the ``ignore_index`` of
            the loss. Negative labels never count.
        name: Name of the task. Default: the class of the model.
        execution: How clients are trained. "auto": by native code where model and loss have a native form, otherwise by
            eager PyTorch. "native" and "eager": by that only. "vmap": many clients in one program
            (`torch.func.vmap`), for small models without dropout. "compiled": by ``torch.compile``.
            What is asked for and impossible is refused with the reason. Results of different executions differ in
            their last bits.
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
        _check_model_and_data(model, data)
        check_loss(loss)
        if metric is not None and stated_direction("", metric) == "lower":
            remedy = "metrics={'name': ...} takes any metric."
            raise invalid_argument("Task", "metric", metric, "an accuracy, which rises", remedy)
        self.model, self.data, self.augment = model, data, as_pipeline(augment)
        self.device = None if device is None else resolve_devices(device, "Task")
        self.client_batching: ClientBatching | None = None  # `with_vmap` sets it for a run
        words = {"execution": get_args(Execution), "autocast": (*AUTOCAST_DTYPES, None)}
        words["reduction"] = (*get_args(Reduction), None)
        for argument, value in (("execution", execution), ("autocast", autocast), ("reduction", reduction)):
            if value not in words[argument]:
                raise invalid_argument("Task", argument, value, " or ".join(map(repr, words[argument])))
        self.execution, self.autocast, self.reduction = execution, autocast, reduction
        self.population = Population(samples_of(data))
        if 0 in (self.population.samples or (0,)):
            empty = (*self.population.samples, 0).index(0)
            raise HansaError(f"client {empty} has no samples: give it some, or remove it from the data.")
        self.name = name if name is not None else type(self.example_model()).__name__
        self.example = self._example_batch()  # a few rows as the model sees them in training
        self.loss = with_row_weights(loss) if isinstance(self.example.targets, WeightedTargets) else loss
        stated = ignored_label(self.loss) if ignored is None else ignored
        self.ignored = None if stated is None or stated < 0 else stated
        self.test_sets = self._test_sets(test)
        self._client_test_rows = rows_by_owner(getattr(data, "test_owners", None))
        facts = describe_model(self.name, model, self.loss, self.example, autocast)
        self.layout, self.dtype = facts.layout, facts.dtype
        self.constant_buffers, self.frozen = facts.constant, facts.frozen
        self.network = self._find_network()
        self._describe_scores(facts, metric, check_metrics({} if metrics is None else metrics))
        self.directions = metric_directions(self.metrics)
        columns = [*([] if self.metric is None and "accuracy" not in self.metrics else ["accuracy"]), *self.metrics]
        columns.append("loss")
        main = columns[0] if main_metric is None else main_metric.removeprefix("test_")
        if main not in columns:
            raise invalid_argument("Task", "main_metric", main_metric, f"one of {', '.join(columns)}")
        self.main_metric = f"test_{main}"
        self.evaluation_batch_size = default_batch_size(facts)
        if evaluation_batch_size is not None:
            check_integer("Task", "evaluation_batch_size", evaluation_batch_size)
            self.evaluation_batch_size = evaluation_batch_size
        if execution == "compiled":
            check_compiled(self)
        self._checked_for_state = False
        allocator.trim()  # memory of the comparisons

    def _find_network(self) -> Network | None:
        """Return the native form of the model and its loss, if there is one; `eager_reason` says why there is none."""
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
            raise HansaError(
                f"Task(execution='native'): {self.name} has no native form: {self.eager_reason}. Omit execution to "
                "train it by PyTorch."
            )
        if self.execution == "auto":
            log.info("%s: trained by eager PyTorch: %s", self.name, self.eager_reason)
        return None

    def _describe_scores(self, facts: ModelFacts, metric: Metric | None, metrics: dict[str, Metric]) -> None:
        """Set how test rows are scored: the sums of the loss, accuracy, and metrics of all rows."""
        targets, output, target = getattr(self.data, "targets", self.example.targets), facts.output, facts.target
        reduction = self.reduction if self.network is None else "labels"  # it is cross-entropy, however it is written
        self.loss_sums, self.sums_rows, self.is_row_mean = loss_form(self.loss, reduction, self.ignored, targets)
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
                log.warning("%s: no accuracy: %s. Task(metric=...) takes a function of yours.", self.name, reason)
        if output is None:
            return
        check_classes(self.loss, output, targets)
        for name, each in metrics.items():
            try:
                compute_metric(name, each, output, target)
            except HansaError:
                raise
            except Exception as error:  # such as for one class among few rows; if it fails again, evaluation says so
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
        """Return the test sets by name; that of the data itself has the name ""."""
        sets = named_test_sets({} if test is None else test, self.example)
        sets = sets if sets and not count_test_rows(self.data) else {"": self.data, **sets}
        return {**sets, **_validation_set(self.data)}

    def start(self, key: Key, dtype: torch.dtype) -> Vectors:
        """Return the initial model and buffers."""
        model, buffers = self.layout.pack(fresh(self.model, key.child("init")), dtype)
        return {MODEL: model, BUFFERS: buffers} if self.layout.buffer_dim else {MODEL: model}

    def kept_weights(self, dtype: torch.dtype) -> frozenset[str]:
        """Return the frozen weights that keep their own dtype in a run with trained parameters of the given dtype."""
        return self.layout.own_dtypes if dtype == self.dtype else frozenset()

    def trial(self, dtype: torch.dtype, device: torch.device) -> Trial:
        """Return a new model apart from those in training, for gradients of example rows."""
        parts = self.example_model(), self.loss, self.layout, dtype, self.example.inputs
        return Trial(*parts, device=device, keep=self.kept_weights(dtype))

    def trainer(self, dtype: torch.dtype, device: torch.device) -> ModuleTrainer:
        """Return a worker's trainer of the model."""
        in_use = _trainers.setdefault(self, {})
        known = in_use.get((dtype, device))
        trainer = ModuleTrainer(self, dtype, device, like=None if known is None else known())
        in_use[dtype, device] = ref(trainer)
        if not self._checked_for_state and trainer.network is None and device.type == "cpu":
            self._checked_for_state = True  # once, not in every worker
            check_repeatable(self, trainer, ModuleTrainer(self, dtype, device, like=trainer))
        if self.execution == "compiled":
            trainer.compiled = CompiledLoss(self, trainer.module, trainer.parameters)
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
        """Whether test rows that a function collates are collated together, so that outputs have one shape."""
        return self.needs_all_outputs and any(hasattr(data, "fetch_test") for data in self.test_sets.values())

    def test_chunks(self) -> list[tuple[int, int]]:
        """Return the rows of all test sets, one set after the other, as fixed ranges, which workers share."""
        chunks, offset = [], 0
        for data in self.test_sets.values():
            rows = count_test_rows(data)
            step = rows if self.collates_all_test_rows else max(CHUNK_ROWS, self.evaluation_batch_size)
            ranges = [(first, min(first + step, rows)) for first in range(0, rows, max(1, step))]
            chunks += [(offset + first, offset + stop) for first, stop in ranges]
            offset += rows
        return chunks

    def locate_test_rows(self, row: int) -> tuple[str, int]:
        """Return the test set of a row in the numbering of `test_chunks`, and the number of the set's first row."""
        first = 0
        for name, data in self.test_sets.items():
            rows = count_test_rows(data)
            if row < first + rows:
                return name, first
            first += rows
        raise HansaError(f"{self.name}: test row {row} does not exist, there are {first}.")

    def compute_metrics(self, scores: Sequence[PartialScore]) -> dict[str, float]:
        """Return loss, accuracy and metrics of the test sets from one score per chunk; empty without scores."""
        results: dict[str, float] = {}
        for name, own in self._scores_by_set(scores).items():
            rows = count_test_rows(self.test_sets[name])
            found = compute_metrics(own, rows, self.metrics, self._loss_of_all_rows)
            metrics = {f"test_{metric}": value for metric, value in found.items()}
            results |= metrics if name == self.main_test_set else {}
            results |= {f"{name}/{metric}": value for metric, value in metrics.items()} if name else {}
        return results

    def sum_scores(self, scores: Sequence[PartialScore]) -> PartialScore:
        """Return the sums over the main test set, from one score per chunk of `test_chunks`."""
        own = self._scores_by_set(scores)[self.main_test_set]
        return total_score(own, self.main_test_rows, self._loss_of_all_rows)

    def _scores_by_set(self, scores: Sequence[PartialScore]) -> dict[str, list[PartialScore]]:
        by_set: dict[str, list[PartialScore]] = {}
        for (start, _), score in zip(self.test_chunks() if scores else (), scores, strict=True):
            by_set.setdefault(self.locate_test_rows(start)[0], []).append(score)
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
        scores = [trainer.score(rows)]
        return compute_metrics(scores, len(rows), self.metrics, self._loss_of_all_rows, may_be_undefined=True)

    def for_seed(self, seed: int) -> Task:
        """Return the task with the clients, or validation rows, that the seed of a run draws; itself if they are fixed.

        It is the same object as long as a run or the caller holds it.
        """
        known = _drawn.setdefault(self, WeakValueDictionary())
        if (result := known.get(seed)) is not None:
            return result
        data: Any = self.data
        drawn = data.for_seed(seed) if hasattr(data, "for_seed") else data
        if drawn is data:
            return self
        known[seed] = other = copy.copy(self)
        other.data, other.population = drawn, Population(samples_of(drawn))
        other.test_sets = {name: drawn if test is data else test for name, test in self.test_sets.items()}
        other.test_sets |= _validation_set(drawn)
        other._client_test_rows = rows_by_owner(getattr(drawn, "test_owners", None))
        return other

    def on_training_data(self) -> Task:
        """Return the task with all clients' training rows as test set: ``test_loss`` is the global training loss."""
        task = copy.copy(self)
        task.test_sets = {"": EvaluationRows(*all_client_rows(self.data))}
        task._client_test_rows = {}
        return task

    def module(self, vectors: Vectors) -> nn.Module:
        """Return a new module with the given vectors and their dtype, ready to use or to save. Narrow frozen weights
        keep theirs."""
        module = self.example_model()
        widen_module(module, vectors[MODEL].dtype, self.kept_weights(vectors[MODEL].dtype))
        with torch.no_grad():
            named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for name, value in self.layout.unpack(vectors[MODEL], vectors.get(BUFFERS)).items():
                named[name].copy_(value)
        return module


def _check_model_and_data(model: Any, data: Any) -> None:
    """Raise for a model that is no function, and for data that is not federated."""
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
