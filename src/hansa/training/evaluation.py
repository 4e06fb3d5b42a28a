"""Evaluation of a trainer's model on test rows, in batches that fit into memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils import _pytree as trees

from hansa.core.devices import copy_to_device
from hansa.core.errors import HansaError, check_integer
from hansa.core.keys import Key
from hansa.training.batch_sources import (
    Batch,
    BatchSource,
    TensorSource,
    TransformedSource,
    count_rows,
    count_test_rows,
    describe_shapes,
    take_rows,
    test_source,
)
from hansa.training.labels import BUILT_IN_METRICS, count_correct
from hansa.training.losses import strip_weights
from hansa.training.scoring import PartialScore, merge_scores, move_to_cpu, score_user_metric

if TYPE_CHECKING:
    from hansa.training.model_probe import ProbeResult
    from hansa.training.trainer import ModuleTrainer

EVALUATION_BATCH = 500
CHUNK_ROWS = 1000  # test rows evaluated at a time: fixed, so that sums do not depend on the number of workers
_BATCH_BYTES = 1 << 30  # of intermediate results in evaluation: fixed, so that results do not depend on the machine


def evaluation_batch_size(probe: ProbeResult | None) -> int:
    """Return the number of rows per evaluation batch: 500, or fewer if their intermediate results exceed one GiB."""
    return EVALUATION_BATCH if probe is None else max(1, min(EVALUATION_BATCH, _BATCH_BYTES // probe.bytes_per_row))


class NamedTestSet:
    """One of several test sets of a task.

    Args:
        name: Its name.
        inputs: The inputs, like those of the task's data.
        targets: The targets.
    """

    def __init__(self, name: str, inputs: Any, targets: Any) -> None:
        self.name, self.test_inputs, self.test_targets = name, inputs, targets


def named_test_sets(test: Mapping[str, Any] | None, like: Batch) -> dict[str, Any]:
    """Return test sets by name, from pairs (inputs, targets) or from data with a test set; raise for any other."""
    if test is None:
        return {}
    if not isinstance(test, Mapping):
        raise HansaError(f"Task(test={type(test).__name__}): expected a dict of test sets by name.")
    sets: dict[str, Any] = {}
    for name, value in test.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise HansaError(f"Task(test): {name!r}: expected an identifier as the name of a test set.")
        if hasattr(value, "fetch_test") and value.test_count:
            sets[name] = value
            continue
        if getattr(value, "test_inputs", None) is not None:
            pair = value.test_inputs, value.test_targets
        elif isinstance(value, (tuple, list)) and len(value) == 2:
            pair = trees.tree_map(torch.as_tensor, value[0]), trees.tree_map(torch.as_tensor, value[1])
        else:
            raise HansaError(
                f"Task(test): {name} is {type(value).__name__}: expected a pair (inputs, targets), or data with a test "
                "set, such as hansa.data.from_arrays(..., test=...) returns."
            )
        _check_like(name, pair, like)
        sets[name] = NamedTestSet(name, *pair)
    return sets


def _check_like(name: str, pair: tuple[Any, Any], like: Batch) -> None:
    """Raise if a test set does not look like the training data."""
    if not count_rows(pair[1]) or len({len(leaf) for leaf in trees.tree_leaves(pair)}) != 1:
        raise HansaError(f"Task(test): {name} has no rows, or not as many inputs as targets.")
    for mine, theirs, what in ((pair[0], like.inputs, "inputs"), (pair[1], like.targets, "targets")):
        leaves, structure = trees.tree_flatten(mine)
        others, other_structure = trees.tree_flatten(theirs)
        same = structure == other_structure and all(
            leaf.shape[1:] == other.shape[1:] and leaf.dtype.is_floating_point == other.dtype.is_floating_point
            for leaf, other in zip(leaves, others, strict=True)
        )
        if not same:
            raise HansaError(
                f"Task(test): the {what} of {name} are {describe_shapes(mine)}, those of the training data "
                f"{describe_shapes(theirs)}. Prepare them in the same way, for example with hansa.data.from_arrays."
            )


def check_batch_size(batch_size: int | None, probe: ProbeResult | None) -> int:
    """Return the rows per batch in evaluation: those requested, or as many as fit in memory."""
    if batch_size is None:
        return evaluation_batch_size(probe)
    check_integer("Task", "evaluation_batch_size", batch_size)
    return batch_size


class Evaluator:
    """Scores a trainer's model on rows of the task's test sets; ``like`` is another's whose copies it shares."""

    def __init__(self, trainer: ModuleTrainer, like: Evaluator | None = None) -> None:
        self._trainer, self.task = ref(trainer), trainer.task  # weak: a cycle would keep the data of finished runs
        self._sources: dict[str, tuple[BatchSource, bool]] = {} if like is None else like._sources
        self._preparing: threading.Lock = threading.Lock() if like is None else like._preparing

    @property
    def trainer(self) -> ModuleTrainer:
        """The trainer that owns it."""
        trainer = self._trainer()
        assert trainer is not None
        return trainer

    def score(self, name: str, rows: torch.Tensor, seed: int) -> PartialScore:
        """Return the score of the current model on some rows of a test set."""
        source, is_native = self._source(name)
        network = self.trainer.network
        if is_native and network is not None:
            first, count = int(rows[0]), len(rows)
            if isinstance(source, TensorSource) and source.native_inputs is not None and _consecutive(rows):
                inputs = source.native_inputs.logical, source.labels
                loss, hits = network.evaluate(self.trainer.y, *inputs, first, first + count)
            else:
                loss, hits = network.evaluate(self.trainer.y, *source.batch(None, rows))
            return PartialScore(loss, count, hits, labels=count)
        self.trainer.seed(Key(0).child("evaluation", seed))
        self.trainer.module.eval()
        try:
            return merge_scores([self._score_batch(batch) for batch in self._batches(source, rows)])
        finally:
            self.trainer.module.train()

    def _batches(self, source: BatchSource, rows: torch.Tensor) -> Iterator[Batch]:
        """Yield test rows in batches. Rows that are collated, and needed all at once, are collated together."""
        if not self.task.collates_all_test_rows:
            for some in torch.split(rows, self.task.evaluation_batch_size):
                yield source.batch(None, copy_to_device(some, source.index_device))
            return
        batch = source.batch(None, copy_to_device(rows, source.index_device))
        if any(len(leaf) != len(rows) for leaf in trees.tree_leaves(tuple(batch))):
            yield batch
            return
        for some in torch.split(torch.arange(len(rows)), self.task.evaluation_batch_size):
            yield Batch(take_rows(batch.inputs, some), take_rows(batch.targets, some))

    def _score_batch(self, batch: Batch) -> PartialScore:
        task, ask = self.task, self.trainer.call_model
        inputs, target = batch
        output = ask(inputs)
        loss, weight = (0.0, 0.0) if task.loss_sums is None else task.loss_sums(output, target)
        whole, target = target, strip_weights(target)
        hits, own, labels = None, None, 0.0
        if task.metric in BUILT_IN_METRICS:
            hits, labels = task.label_rule.score(task.metric, output, target)
        elif task.metric is not None:
            own = score_user_metric(task.metric, output, target, lambda some: ask(take_rows(inputs, some)))
        outputs: tuple[tuple[Any, Any], ...] = ()
        if task.needs_all_outputs:
            outputs = ((move_to_cpu(output), move_to_cpu(whole if task.loss_sums is None else target)),)
        return PartialScore(loss, weight, hits, own, labels, outputs)

    def _source(self, name: str) -> tuple[BatchSource, bool]:
        """Return the source of a prepared test set, and whether native code evaluates it."""
        with self._preparing:
            if name not in self._sources:
                source = self._prepare(self.task.test_sets[name])
                self._sources[name] = source, self._is_native(source)
            return self._sources[name]

    def _is_native(self, source: BatchSource) -> bool:
        task = self.task
        is_plain = task.metric is count_correct and task.label_rule.is_plain and not task.metrics
        network, inputs = self.trainer.network, source.native_inputs
        if network is None or not is_plain or inputs is None:
            return False
        if network.takes_tokens and not (
            inputs.dtype == torch.int64 and inputs.logical.shape[1:] == network.input_shape
        ):
            return False  # rows of another length, which PyTorch takes
        labels = getattr(source, "labels", None)
        return labels is None or not labels.numel() or int(labels.min()) >= 0

    def _prepare(self, data: Any) -> BatchSource:
        """Return the source of prepared test rows; a single tensor is prepared once."""
        trainer = self.trainer
        form = (trainer.dtype, trainer.device, trainer.layout.channels_last)
        source: Any = test_source(data, *form)
        if not trainer.task.augment.test_pipeline():
            return source  # type: ignore[no-any-return]
        if not isinstance(source, TensorSource) or source.native_inputs is None:
            return TransformedSource(source, trainer.prepare_test_batch)
        rows = torch.arange(count_test_rows(data), device=trainer.device)
        pieces = torch.split(rows, EVALUATION_BATCH)
        inputs = [trainer.prepare_test_batch(source.batch(None, piece)).inputs for piece in pieces]
        return TensorSource(torch.cat(inputs), source.labels, *form)


def _consecutive(rows: torch.Tensor) -> bool:
    return len(rows) == 1 or (int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((rows.diff() == 1).all()))
