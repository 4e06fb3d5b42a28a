"""Tasks from Lightning modules: ``forward`` is the model, ``training_step`` the loss, ``validation_step`` the metrics.

Lightning itself is not imported: any module with these methods will do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError, invalid_argument, short_repr
from hansa.core.keys import Key
from hansa.training import random_state
from hansa.training.batch_sources import ClientData, example_batch
from hansa.training.metric_direction import higher, lower
from hansa.training.model_probe import bitwise_equal
from hansa.training.scoring import Metric
from hansa.training.task import Task
from hansa.training.trainer import fresh

log = logging.getLogger("hansa")

_ROWS = 8
_HOOKS = (
    "backward", "configure_gradient_clipping", "lr_scheduler_step", "manual_backward", "on_after_backward",
    "on_before_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end",
    "on_train_batch_start", "on_train_epoch_end", "on_train_epoch_start", "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip
"""Hooks that change or accompany training; local steps are the method's, so they would never be called."""
_PREFIXES = ("validation_", "valid_", "val_", "test_")


class StepReplay:
    """Calls ``training_step`` or ``validation_step`` of a module with a given output in place of that of ``forward``.

    Args:
        factory: The class or function that returns the module.
        step: The name of the method.
        example: Inputs of a few rows, for the shape of what stands in for the inputs.
    """

    def __init__(self, factory: Callable[[], nn.Module], step: str, example: Any) -> None:
        self.factory, self.step = factory, step
        self.shapes = trees.tree_map(lambda leaf: (leaf.shape[1:], leaf.dtype), example)
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._local = threading.local()

    def __repr__(self) -> str:
        return f"{getattr(self.factory, '__name__', 'module')}.{self.step}"

    def __call__(self, output: Any, target: Any) -> tuple[Any, dict[str, Any]]:
        """Return what the step returns, and what it logs."""
        if not hasattr(self._local, "module"):
            self._local.module = fresh(self.factory, Key(0)).train(self.step == "training_step")
        module: Any = self._local.module
        rows = len(trees.tree_leaves(target)[0])
        leaves = [torch.zeros((), dtype=dtype).expand(rows, *shape) for shape, dtype in self._leaves()]
        stand_in = trees.tree_unflatten(leaves, self._structure())
        for part in module.modules():
            if hasattr(part, "compute") and hasattr(part, "reset"):  # a metric of torchmetrics
                part.reset()
        module.forward = lambda *inputs, **named: output
        return run_step(module, self.step, stand_in, target)

    def _leaves(self) -> list[Any]:
        return trees.tree_leaves(self.shapes, is_leaf=_is_shape)

    def _structure(self) -> Any:
        return trees.tree_structure(self.shapes, is_leaf=_is_shape)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Size)


def run_step(module: Any, step: str, inputs: Any, target: Any) -> tuple[Any, dict[str, Any]]:
    """Call a step with the batch (inputs, target); return its result and what it logs."""
    logged: dict[str, Any] = {}
    module.log = lambda name, value, *rest, **options: logged.__setitem__(name, value)
    module.log_dict = lambda values, *rest, **options: logged.update(values)
    result = getattr(module, step)((inputs, target), 0)
    return result, {name: value.compute() if hasattr(value, "compute") else value for name, value in logged.items()}


class _LightningLoss:
    def __init__(self, replay: StepReplay) -> None:
        self.replay = replay

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        return loss_of(self.replay(output, target)[0], repr(self.replay))

    def __repr__(self) -> str:
        return repr(self.replay)


class _LightningMetric:
    def __init__(self, replay: StepReplay, name: str) -> None:
        self.replay, self.name = replay, name

    def __call__(self, output: Any, target: Any) -> float:
        return float(self.replay(output, target)[1][self.name])


def loss_of(result: Any, step: str) -> torch.Tensor:
    """Return the loss that a training step returns: a tensor, or the entry ``loss`` of a dict."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, torch.Tensor):
        raise HansaError(f"{step} returned {short_repr(result)}: expected the loss, or a dict with the key loss.")
    return loss


def from_lightning(
    module: Callable[[], nn.Module],
    data: ClientData,
    *,
    better: Mapping[str, Literal["lower", "higher"]] | None = None,
    **options: Any,
) -> Task:
    """A task from a Lightning module: ``forward`` is the model, ``training_step`` the loss.

    What ``validation_step`` logs, other than a loss, becomes metrics over all test rows: ``val_f1`` is reported as
    test_f1. Batches are pairs (inputs, targets) of ``data``. The loss must be a function of ``self(inputs)`` and the
    targets; this is compared with a real step when the task is created. Optimizers and schedulers of
    ``configure_optimizers`` are not used, because clients take the local steps of the method. A module with manual
    optimization, or with hooks that take part in training, is refused.

    Args:
        module: The class of the module, or a function without arguments that returns it.
        data: Federated data, such as `hansa.data.from_arrays` returns.
        better: For logged names that do not say whether larger values are better: ``{"delay": "lower"}``.
        options: Further arguments of `hansa.Task`.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.head = nn.Linear(3, 2)
    ...     def forward(self, x):
    ...         return self.head(x)
    ...     def training_step(self, batch, number):
    ...         return nn.functional.cross_entropy(self(batch[0]), batch[1])
    >>> from hansa.data import from_arrays
    >>> from_lightning(Net, from_arrays(torch.rand(9, 3), torch.arange(9) % 2, clients=3))
    Task(Net, 3 clients, 8 parameters)
    """
    if isinstance(module, nn.Module):
        kind = type(module).__name__
        raise HansaError(f"from_lightning({kind} object): expected the class, or lambda: {kind}(...).")
    inputs, targets = example_batch(data, _ROWS)
    first = fresh(module, Key(0))
    _check_module(first)
    loss = _LightningLoss(StepReplay(module, "training_step", inputs))
    _check_loss(first, loss, inputs, targets)
    metrics = _metrics(module, first, inputs, targets, better or {})
    metrics.update(options.pop("metrics", None) or {})
    return Task(module, loss, data, metrics=metrics, **options)


def _check_module(module: Any) -> None:
    name = type(module).__name__
    if not callable(getattr(module, "training_step", None)):
        raise HansaError(f"from_lightning({name}): expected a module with training_step(batch, batch_idx).")
    if getattr(module, "automatic_optimization", True) is False:
        raise HansaError(f"from_lightning({name}): manual optimization: the steps of clients are the method's. Return "
                         "the loss from training_step, and choose a local optimizer in the method.")  # fmt: skip
    if used := [hook for hook in _HOOKS if _overrides(module, hook)]:
        raise HansaError(f"from_lightning({name}): {', '.join(used)} would not be called: the steps of clients are the "
                         "method's (local_lr, max_grad_norm, optimizer). Remove it.")  # fmt: skip
    if _overrides(module, "configure_optimizers"):
        log.info("%s: configure_optimizers is not used: the steps of clients are the method's", name)


def _overrides(module: Any, hook: str) -> bool:
    base = next((each for each in type(module).__mro__ if each.__name__ == "LightningModule"), nn.Module)
    own = getattr(type(module), hook, None)
    return own is not None and own is not getattr(base, hook, None)


def _check_loss(module: Any, loss: _LightningLoss, inputs: Any, targets: Any) -> None:
    """Raise unless the loss of a real step, and its gradients, are those of the replayed step on the output."""
    name = type(module).__name__
    expects = (
        f"from_lightning({name}): expected training_step((inputs, targets), batch_idx) that calls self(inputs) once, "
        "with the inputs as they are, and computes the loss from that output and the targets alone"
    )
    calls: list[Any] = []
    module.register_forward_hook(lambda _, inputs, output: calls.append(output))
    parameters = [each for each in module.parameters() if each.requires_grad]
    results = []
    try:
        for replayed in (False, True):
            with random_state.preserve_rng(), torch.enable_grad():
                random_state.seed_all(Key(0), torch.device("cpu"))
                if replayed:
                    calls.clear()
                    value = loss(module(inputs), targets)
                else:
                    value = loss_of(run_step(module, "training_step", inputs, targets)[0], f"{name}.training_step")
                    if len(calls) != 1:
                        raise HansaError(f"{expects}: it calls self(...) {len(calls)} times.")
                gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
                results.append([value.detach(), *gradients])
    except HansaError:
        raise
    except Exception as error:  # of the user's module
        raise HansaError(f"{expects}: {type(error).__name__}: {error}.") from error
    if not all(bitwise_equal(one, other) for one, other in zip(*results, strict=True)):
        real, replayed_loss = (float(result[0]) for result in results)
        raise HansaError(
            f"{expects}: on the first rows its loss ({real:.6g}) or its gradients are not those computed so "
            f"({replayed_loss:.6g}). Move what it does to the inputs into forward(); use weight_decay of the method "
            "for penalties."
        )


def _metrics(
    factory: Callable[[], nn.Module], module: Any, inputs: Any, targets: Any, better: Mapping[str, str]
) -> dict[str, Metric]:
    """Return the metrics that validation_step logs, other than losses."""
    if not _overrides(module, "validation_step"):
        return {}
    module.eval()
    with torch.no_grad():
        logged: Sequence[str] = [*run_step(module, "validation_step", inputs, targets)[1]]
    replay, metrics = StepReplay(factory, "validation_step", inputs), {}
    for name in logged:
        plain = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
        direction = better.get(name, better.get(plain))
        if plain == "loss":
            continue
        if direction not in (None, "lower", "higher"):
            raise invalid_argument("from_lightning", "better", direction, "lower or higher")
        metric: Metric = _LightningMetric(replay, name)
        metrics[plain] = metric if direction is None else lower(metric) if direction == "lower" else higher(metric)
    return metrics
