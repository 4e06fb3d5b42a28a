"""A slow reference of a task's reported numbers: every test row on its own, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Vectors
from hansa.local.work import Work
from hansa.testing.contracts import ContractError
from hansa.training.batch_sources import count_rows
from hansa.training.losses import WeightedTargets
from hansa.training.metrics import Accuracy, compute_metric
from hansa.training.model_probe import model_caller
from hansa.training.task import Task
from hansa.training.trainer import ModuleTrainer

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CheckedNumber:
    """A number that Hansa reports, its slow reference, and the difference that rounding explains.

    >>> CheckedNumber("test_loss", 0.5, 0.5000001, 1e-5).ok
    True
    """

    name: str
    reported: float
    reference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the two agree; NaN agrees with NaN."""
        if math.isnan(self.reported) or math.isnan(self.reference):
            return math.isnan(self.reported) and math.isnan(self.reference)
        return self.reported == self.reference or abs(self.reported - self.reference) <= self.tolerance


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """The checked numbers of a task; its text is a table.

    Args:
        task: The name of the task.
        numbers: The numbers with their references.

    >>> print(TaskCheck("mine", (CheckedNumber("test_loss", 0.5, 0.25, 1e-5),)))
    mine: some numbers differ from the slow reference
      test_loss  reported 0.5           reference 0.25          DIFFERS
    """

    task: str
    numbers: tuple[CheckedNumber, ...]

    @property
    def ok(self) -> bool:
        """Whether all numbers agree."""
        return all(number.ok for number in self.numbers)

    def __str__(self) -> str:
        width = max([len(number.name) for number in self.numbers], default=4)
        lines = [
            f"{self.task}: {'all numbers agree with' if self.ok else 'some numbers differ from'} the slow reference"
        ]
        for number in self.numbers:
            mark = "ok" if number.ok else "DIFFERS"
            lines.append(
                f"  {number.name:<{width}}  reported {number.reported:<12.8g}  reference {number.reference:<12.8g}  "
                f"{mark}"
            )
        return "\n".join(lines)


def check_task(
    task: Task, *, vectors: Vectors | None = None, seed: int = 0, clients: int = 3, tolerance: float = 1e-4
) -> TaskCheck:
    """Compare the numbers that Hansa reports for a task with a slow reference, and return both; raise if they differ.

    The reference passes every test row through the model on its own, in float64, and computes the loss and the metrics
    of all rows at once. Checked are the losses and metrics of all test sets, those of a few clients on their own test
    rows, and the gradients of a few clients.

    Args:
        task: The task.
        vectors: The model to evaluate, such as ``run.state.vectors``. Default: the initial model of ``seed``.
        seed: Seed of the initial model and of the batches.
        clients: How many clients to check.
        tolerance: Relative difference that rounding to the task's dtype explains.

    >>> import hansa
    >>> rows = hansa.data.from_arrays(torch.rand(40, 3), torch.arange(40) % 2, clients=4, test=([[0.0, 1, 2]], [1]))
    >>> check_task(hansa.Task(lambda: nn.Linear(3, 2), nn.functional.cross_entropy, rows)).ok
    True
    """
    if not isinstance(task, Task):
        raise HansaError(f"check_task({type(task).__name__}): expected a hansa.Task.")
    vectors = task.start(Key(seed), task.dtype) if vectors is None else vectors
    trainer = task.trainer(vectors[MODEL].dtype, _CPU)
    reference = _Reference(task, vectors, tolerance)
    numbers: list[CheckedNumber] = []
    reported = task.evaluate(trainer, vectors)
    for name in task.test_sets:
        rows = torch.arange(reference.test_rows(name))
        if not len(rows):
            continue
        expected = reference.evaluate(name, rows)
        for prefix in ([""] if name == task.main_test_set else []) + ([f"{name}/"] if name else []):
            numbers += _compare(f"{prefix}test_", reported, expected)
    trainer.load(vectors[MODEL], vectors.get(BUFFERS))
    for client in list(task.client_test_sizes)[:clients]:
        own = task._client_test_rows[client]
        results = {f"test_{key}": value for key, value in task.evaluate_client(trainer, client).items()}
        for number in _compare("test_", results, reference.evaluate(task.main_test_set, own)):
            numbers.append(CheckedNumber(f"client {client} {number.name}", *_values(number)))
    for client in range(min(clients, task.population.count)):
        numbers += reference.compare_gradient(trainer, client, seed)
    check = TaskCheck(task.name, tuple(numbers))
    if not check.ok:
        raise ContractError(str(check))
    return check


def _values(number: CheckedNumber) -> tuple[float, float, float]:
    return number.reported, number.reference, number.tolerance


def _compare(prefix: str, reported: dict[str, float], expected: dict[str, tuple[float, float]]) -> list[CheckedNumber]:
    return [
        CheckedNumber(prefix + name, reported.get(prefix + name, math.inf), value, allowed)
        for name, (value, allowed) in expected.items()
    ]


class _Reference:
    """The task in float64, without batches."""

    def __init__(self, task: Task, vectors: Vectors, tolerance: float) -> None:
        self.task, self.tolerance = task, tolerance
        self.module = task.module(vectors).double().eval()
        self.call = model_caller(self.module, task.example[0])
        self._wide_loss = _in_float64(task.loss)
        wide = {name: vector.double() for name, vector in vectors.items()}
        self.trainer = ModuleTrainer(task, torch.float64, _CPU)
        self.trainer.load(wide[MODEL], wide.get(BUFFERS))

    def test_rows(self, name: str) -> int:
        """Return the number of rows of a test set."""
        data = self.task.test_sets[name]
        if hasattr(data, "fetch_test"):
            return int(data.test_count)
        return 0 if data.test_inputs is None else count_rows(data.test_targets)

    @torch.no_grad()
    def evaluate(self, name: str, rows: torch.Tensor) -> dict[str, tuple[float, float]]:
        """Return loss, accuracy and metrics of some rows, each with the difference that rounding explains."""
        output, target = self._outputs(name, rows)
        weights = target.weight.double() if isinstance(target, WeightedTargets) else torch.ones(len(rows)).double()
        labels = target.target if isinstance(target, WeightedTargets) else target
        loss = self._loss(output, target, weights)
        results = {"loss": (loss, self.tolerance * (1.0 + abs(loss)))}
        rounded = trees.tree_map(lambda leaf: _as(leaf, torch.float32), output)
        if (accuracy := self._accuracy(output, labels, len(rows))) is not None:
            results["accuracy"] = accuracy
        for metric, function in self.task.metrics.items():
            value = _number_or_nan(function, output, labels)
            spread = abs(value - _number_or_nan(function, rounded, labels))
            results[metric] = value, 10 * self.tolerance * (1.0 + abs(value)) + (2 * spread if spread == spread else 0)
        return results

    def _outputs(self, name: str, rows: torch.Tensor) -> tuple[Any, Any]:
        """Return the outputs and targets of rows that pass through the model one by one, or together if padded."""
        source = self.trainer.evaluator._source(name)[0]
        whole = source.batch(None, rows)
        if hasattr(self.task.test_sets[name], "fetch_test"):
            return self.call(whole.inputs), whole.targets
        outputs = [self.call(source.batch(None, rows[place : place + 1]).inputs) for place in range(len(rows))]
        if not all(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in trees.tree_leaves(outputs[0])):
            return self.call(whole.inputs), whole.targets  # such as a loss that the model computes
        flat = [trees.tree_flatten(output) for output in outputs]
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return trees.tree_unflatten([torch.cat(column) for column in columns], flat[0][1]), whole.targets

    def _loss(self, output: Any, target: Any, weights: torch.Tensor) -> float:
        """Return the loss of all rows at once; a sum is divided by the rows' weights."""
        value = float(self.loss(output, target))
        if self.task.reduction == "sum":
            return value / float(weights.sum())
        if hasattr(self.task.loss, "sums") and not float(self.task.loss.sums(output, target)[1]):
            return math.nan
        return value

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Return the loss of outputs in float64, or rounded if it does not take float64."""
        try:
            return self._wide_loss(output, target)  # type: ignore[no-any-return]
        except RuntimeError:
            narrow = [trees.tree_map(lambda leaf: _as(leaf, self.task.dtype), tree) for tree in (output, target)]
            return self.task.loss(*narrow)

    def _accuracy(self, output: Any, target: torch.Tensor, rows: int) -> tuple[float, float] | None:
        """Return the share of correct predictions, label by label, and that of predictions that are nearly tied."""
        metric = self.task.metric
        if metric is None:
            return None
        if not isinstance(metric, Accuracy):
            values = []
            for place in range(rows):
                own = torch.tensor([place])
                one = trees.tree_map(lambda leaf, own=own: leaf[own], output)
                values.append(metric.score(one, target[own])[0])
            value = math.fsum(values) / rows
            return value, 10 * self.tolerance * (1 + abs(value)) + 2.0 / rows
        scores = getattr(output, "logits", output)
        if metric.threshold is not None:
            scores = torch.stack([torch.zeros(rows).double(), scores.reshape(rows).double() - metric.threshold], 1)
        else:
            scores = scores.movedim(metric.axis, 1)
        positions = target.reshape(rows, -1)
        scores = scores.reshape(rows, scores.shape[1], -1)
        correct = labels = tied = 0
        for row in range(rows):
            for place in range(positions.shape[1]):
                label = int(positions[row, place])
                if label < 0 or label == metric.ignored:
                    continue
                best, second = torch.topk(scores[row, :, place], 2).values.tolist()
                labels += 1
                tied += best - second <= self.tolerance * (1 + abs(best))
                correct += int(scores[row, :, place].argmax()) == label
        return (correct / labels if labels else 0.0), tied / max(1, labels) + 1e-9

    def compare_gradient(self, trainer: ModuleTrainer, client: int, seed: int) -> list[CheckedNumber]:
        """Compare a client's loss and gradient on a batch with float64, both in evaluation mode."""
        count = min(self.task.population.samples[client], 32)
        key = Key(seed).child("check", client)
        for each in (trainer, self.trainer):
            each.module.eval()
        try:
            loss, parts = trainer.gradient(client, trainer.batches(client, Work(1, count), key)[0])
            batch = self.trainer.batch(client, self.trainer.batches(client, Work(1, count), key)[0])
            with torch.enable_grad():
                wide = self.loss(self.trainer.call_model(batch.inputs), batch.targets)
                expected = torch.autograd.grad(wide, self.trainer.parameters, allow_unused=True, materialize_grads=True)
        finally:
            for each in (trainer, self.trainer):
                each.module.train()
        own, other, wide = _flat(parts), _flat(expected), wide.detach()
        norm = float(other.norm())
        distance = float((own - other).norm())
        allowed = 100 * self.tolerance * (norm + 1e-6)
        return [
            CheckedNumber(
                f"client {client} batch loss", float(loss), float(wide), self.tolerance * (1 + abs(float(wide)))
            ),
            CheckedNumber(f"client {client} gradient error", distance, 0.0, allowed),
        ]


def _as(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.detach().reshape(-1).double() for part in parts])


def _number_or_nan(metric: Any, output: Any, target: Any) -> float:
    try:
        return compute_metric("metric", metric, output, target)
    except ValueError:
        return math.nan


def _in_float64(loss: Any) -> Any:
    """Return a loss whose own tensors, such as class weights, are in float64."""
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).double()
    keywords = getattr(loss, "keywords", None)
    if keywords and any(isinstance(value, torch.Tensor) for value in keywords.values()):
        wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in keywords.items()}
        return lambda output, target: loss.func(output, target, *loss.args, **wide)
    return loss
