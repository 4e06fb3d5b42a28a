"""How good a model is on the test rows: losses and hits that are right however they are added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError, short_repr
from hansa.training.batch_sources import rows_of
from hansa.training.losses import unweighted
from hansa.training.model_probe import Seen, of_rows

Loss: TypeAlias = Callable[[Any, torch.Tensor], torch.Tensor]
Metric: TypeAlias = Callable[[Any, torch.Tensor], Any]


class Hits(NamedTuple):
    """A metric over a range of rows: its values added up, its values times their rows, and which of the two it is."""

    added: float
    averaged: float
    adds: bool
    averages: bool


class Score(NamedTuple):
    """What one range of the test rows came to: ``hits`` among the ``counted`` labels that are not ignored.
    ``outputs`` are there where a metric asks for all rows at once."""

    loss: float
    weight: float
    hits: float | None = None
    own: Hits | None = None
    counted: float = 0.0
    outputs: tuple[tuple[Any, torch.Tensor], ...] = ()


def together(scores: Sequence[Score]) -> Score:
    """The scores of a range's batches as that of the range."""
    own = [score.own for score in scores if score.own is not None]
    hits = [score.hits for score in scores if score.hits is not None]
    return Score(
        math.fsum(score.loss for score in scores),
        math.fsum(score.weight for score in scores),
        math.fsum(hits) if hits else None,
        Hits(
            math.fsum(part.added for part in own),
            math.fsum(part.averaged for part in own),
            all(part.adds for part in own),
            all(part.averages for part in own),
        )
        if own
        else None,
        math.fsum(score.counted for score in scores),
        tuple(piece for score in scores for piece in score.outputs),
    )


def total(scores: Sequence[Score], rows: int, metric: Metric | None, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Loss, accuracy and further metrics of all test rows, from one score a piece in the pieces' order."""
    weight = math.fsum(score.weight for score in scores)
    found = {"test_loss": math.fsum(score.loss for score in scores) / weight if weight else math.nan}
    hits = [score.hits for score in scores if score.hits is not None]
    own = [score.own for score in scores if score.own is not None]
    if hits:
        found["test_accuracy"] = math.fsum(hits) / max(1.0, math.fsum(score.counted for score in scores))
    elif own and all(part.adds for part in own):
        found["test_accuracy"] = math.fsum(part.added for part in own) / rows
    elif own and all(part.averages for part in own):
        found["test_accuracy"] = math.fsum(part.averaged for part in own) / rows
    elif own:
        name = getattr(metric, "__name__", "metric")
        raise HansaError(
            f"Task(metric={name}): its value for a batch is neither the sum nor the mean of those for halves of it, so "
            f"it is no count of hits. Give Task(metrics={{{name.strip('<>')!r}: ...}}), which is computed of all test "
            "rows at once."
        )
    return {**found, **_of_all_rows(scores, metrics)}


def of_one_client(score: Score, rows: int, metric: Metric | None, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Loss, accuracy and further metrics of one client's test rows, each of all of them at once. A metric that these
    rows do not allow (ValueError: an AUC where there is one class alone) is NaN."""
    found = {name.removeprefix("test_"): value for name, value in total([score], rows, metric, {}).items()}
    for name, function in metrics.items():
        try:
            found[name] = _of_all_rows([score], {name: function})[f"test_{name}"]
        except HansaError:
            raise
        except ValueError:
            found[name] = math.nan
    return found


def _of_all_rows(scores: Sequence[Score], metrics: Mapping[str, Metric]) -> dict[str, float]:
    if not metrics:
        return {}
    pieces = [piece for score in scores for piece in score.outputs]
    output, target = joined([piece for piece, _ in pieces]), torch.cat([piece for _, piece in pieces])
    found = {}
    for name, function in metrics.items():
        value = function(output, target)
        try:
            found[f"test_{name}"] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise HansaError(f"Task(metrics): {name} gave {short_repr(value)}: expected one number.") from error
    return found


def joined(outputs: Sequence[Any]) -> Any:
    """Outputs of batches as that of all their rows; they are tensors, or tuples and dicts of tensors."""
    flat = [trees.tree_flatten(output) for output in outputs]
    for leaves, _ in flat:
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise HansaError(
                    f"Task(metrics): the model answers with {short_repr(type(leaf))}, which has no rows. Answer with a "
                    "tensor, or with tuples or dicts of tensors."
                )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return trees.tree_unflatten([torch.cat(column) for column in columns], flat[0][1])


def on_the_cpu(output: Any) -> Any:
    """An output where workers can hand it over."""
    return trees.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, output)


def check_names(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Refuse metrics that would write over the loss or the accuracy, or cannot be called."""
    for name, function in metrics.items():
        fine = isinstance(name, str) and name.isidentifier() and name not in ("loss", "accuracy")
        if not fine or not callable(function):
            raise HansaError(
                f"Task(metrics={{{short_repr(name)}: {short_repr(function)}}}): expected a name of letters other than loss and "
                "accuracy, and a function of (outputs, targets)."
            )
    return dict(metrics)


def own_hits(metric: Metric, output: Any, target: torch.Tensor, again: Callable[[torch.Tensor], Any]) -> Hits:
    """The value of a user's metric for a batch, and whether it adds up or averages over halves of the batch.

    One value a row is added up. ``again`` gives the model's answer for some of the rows.
    """
    rows = len(target)
    value = _number(metric, metric(output, target), rows)
    if rows < 2:
        return Hits(value, value, True, True)
    parts = []
    for half in (torch.arange(0, rows, 2, device=target.device), torch.arange(1, rows, 2, device=target.device)):
        some = of_rows(output, half, rows, partial(again, half))
        parts.append((len(half), _number(metric, metric(some, target[half]), len(half))))
    near = 1e-5 * (abs(value) + sum(abs(part) for _, part in parts))
    adds = abs(value - sum(part for _, part in parts)) <= near
    averages = abs(value - sum(count * part for count, part in parts) / rows) <= near
    return Hits(value, value * rows, adds, averages)


def _number(metric: Metric, value: Any, rows: int) -> float:
    if isinstance(value, torch.Tensor) and value.shape == (rows,) and rows > 1:
        value = value.double().sum()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise HansaError(
            f"Task(metric={getattr(metric, '__name__', 'metric')}): gave {short_repr(value)}: expected the number of hits, "
            "or one value a row."
        ) from error


def default_metric(loss: Loss, seen: Seen | None, targets: Any) -> Metric | None:
    """Hits where targets are class numbers: of the largest output, or of the side of a threshold that one output is on.

    Nothing for other targets, nor where the outputs do not say which axis has the classes.
    """
    targets = unweighted(targets)
    if not hasattr(targets, "is_floating_point") or targets.is_floating_point():
        return None
    if seen is None:
        return accuracy_hits
    output, target = getattr(seen.output, "logits", seen.output), unweighted(seen.target)
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return None
    if output.shape in (target.shape, (*target.shape, 1)):
        return _threshold(loss, output, targets) if target.ndim == 1 else None
    second = output.ndim == target.ndim + 1 and output.shape[2:] == target.shape[1:]
    last = output.ndim == target.ndim + 1 and output.shape[:-1] == target.shape
    if second and (not last or output.ndim == 2 or plain(loss) is not None or _second(loss)):
        return accuracy_hits
    return accuracy_hits_last if last and (not second or getattr(loss, "classes", "") == "last") else None


def check_classes(seen: Seen | None, loss: Loss, targets: Any) -> None:
    """Refuse class numbers that the model has no output for, where the loss is cross-entropy as torch has it."""
    targets = unweighted(targets)
    if seen is None or plain(loss) is None or not isinstance(targets, torch.Tensor) or targets.is_floating_point():
        return
    if not isinstance(seen.output, torch.Tensor) or seen.output.ndim < 2:
        return
    outputs, most = seen.output.shape[1], int(targets.max())
    if most >= outputs:
        raise HansaError(
            f"targets go up to {most}, the model has {outputs} outputs: give it {most + 1}, or number classes from 0."
        )


def _second(loss: Loss) -> bool:
    return getattr(loss, "classes", "") in ("auto", "second")


def _threshold(loss: Loss, output: torch.Tensor, targets: torch.Tensor) -> Metric | None:
    """Above 1/2 is class 1 where the loss of 1/2 is the same for both classes (probabilities, squared error); above 0
    otherwise (logits). Nothing where targets are other numbers than 0 and 1."""
    if int(targets.min()) < 0 or int(targets.max()) > 1:
        return None
    half, zeros = torch.full_like(output[:4], 0.5), torch.zeros_like(targets[:4])
    try:
        apart = abs(float(loss(half, zeros)) - float(loss(half, torch.ones_like(zeros))))
    except Exception:  # a loss that only takes what a model gives
        apart = 1.0
    return probability_hits if apart < 1e-6 else logit_hits


def accuracy_hits(output: Any, target: torch.Tensor) -> torch.Tensor:
    """How many rows have their target as the largest output; for targets with more axes, how many places."""
    return _rows_hit(getattr(output, "logits", output).argmax(dim=1), target)


def accuracy_hits_last(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The same with the classes on the last axis, as language models have them."""
    return _rows_hit(getattr(output, "logits", output).argmax(dim=-1), target)


def logit_hits(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Rows whose one output is above 0 where the target is 1, and not where it is 0."""
    hit: torch.Tensor = (output.reshape(target.shape) > 0) == (target > 0)
    return hit.double().sum()


def probability_hits(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The same with a threshold of 1/2."""
    hit: torch.Tensor = (output.reshape(target.shape) > 0.5) == (target > 0)
    return hit.double().sum()


BUILT_IN = (accuracy_hits, accuracy_hits_last, logit_hits, probability_hits)


def counted(target: torch.Tensor) -> float:
    """How many rows, or places of rows, have a label that is not ignored."""
    return float((target >= 0).sum())


def _rows_hit(guess: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((guess == target) & (target >= 0)).double().sum()  # what is ignored is neither hit nor missed


def plain(loss: Loss) -> tuple[Callable[..., torch.Tensor], dict[str, Any]] | None:
    """The function and the settings of a loss that is cross-entropy or negative log-likelihood of class numbers."""
    if loss in (cross_entropy, nll_loss):
        return loss, {}
    if isinstance(loss, partial) and loss.func in (cross_entropy, nll_loss) and not loss.args:
        return loss.func, dict(loss.keywords)
    if type(loss) is nn.CrossEntropyLoss or type(loss) is nn.NLLLoss:
        names = [name for name in ("weight", "ignore_index", "label_smoothing", "reduction") if hasattr(loss, name)]
        function = cross_entropy if type(loss) is nn.CrossEntropyLoss else nll_loss
        return function, {name: getattr(loss, name) for name in names}
    return None


def summed(loss: Loss, reduction: str) -> Callable[[Any, torch.Tensor], tuple[float, float]]:
    """A loss as a sum and the weight that it is to be divided by, for one batch.

    A mean of n rows counts n times; a sum is divided by the rows too, so that test losses compare. Cross-entropy with
    class weights or ignored labels is sum w_i l_i / sum w_i over all test rows, as torch has it for one batch, and so
    are the losses of `hansa.losses`. Any
    other loss that is neither a mean nor a sum over rows counts by the rows of each batch of 500.
    """
    if hasattr(loss, "sums"):
        return partial(_of_sums, loss.sums)
    known = plain(loss)
    if known is None or known[1].get("reduction", "mean") != "mean":
        return partial(_scaled, loss, reduction == "sum")
    function, settings = known
    settings = {name: value for name, value in settings.items() if name != "reduction"}
    if settings.get("weight") is None:
        return partial(_counted, loss, function, settings, int(settings.get("ignore_index", -100)))
    return partial(_weighted, function, settings, int(settings.get("ignore_index", -100)))


def _of_sums(sums: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]], output: Any, target: Any) -> Any:
    total, weight = sums(output, target)
    return float(total), float(weight)


def _scaled(loss: Loss, is_sum: bool, output: Any, target: Any) -> tuple[float, float]:
    value, rows = float(loss(output, target)), rows_of(target)
    return (value if is_sum else value * rows), float(rows)


def _counted(
    loss: Loss,
    function: Callable[..., torch.Tensor],
    settings: Mapping[str, Any],
    ignored: int,
    output: Any,
    target: torch.Tensor,
) -> tuple[float, float]:
    if target.is_floating_point():
        return _scaled(loss, False, output, target)
    labels = int((target != ignored).sum())
    if labels == target.numel():
        return _scaled(loss, False, output, target)
    each = target.numel() / len(target)
    return float(function(output, target, reduction="sum", **settings)) / each, labels / each


def _weighted(
    function: Callable[..., torch.Tensor], settings: Mapping[str, Any], ignored: int, output: Any, target: torch.Tensor
) -> tuple[float, float]:
    if target.is_floating_point():  # shares of classes: torch divides by the rows
        return _scaled(partial(function, **settings), False, output, target)
    weights = settings["weight"].to(output.device)
    counted = target[target != ignored]
    return float(function(output, target, reduction="sum", **settings)), float(weights[counted].double().sum())
