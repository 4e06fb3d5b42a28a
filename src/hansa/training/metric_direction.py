"""The direction of metrics: whether a larger or a smaller value is better.

A metric states it itself (`lower`, `higher`, or ``higher_is_better`` as torchmetrics has it). Otherwise its name does,
if it is one that the field agrees on: rmse, mae, perplexity and the like fall, accuracy, auc, f1 and the like rise.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from hansa.core.errors import HansaError, invalid_argument, short_repr

Direction: TypeAlias = Literal["higher", "lower", ""]
DIRECTIONS: dict[str, Direction] = {
    "accuracy": "higher", "auc": "higher", "f1": "higher", "c_index": "higher",
    "rmse": "lower", "mae": "lower", "mse": "lower", "loss": "lower",
}  # fmt: skip
"""The metrics whose direction their name states."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER = _words("""
    loss error err risk regret cost rmse mse mae mape smape wmape mase msle rmsle medae nrmse deviance brier
    brier_score integrated_brier_score ibs ece mce calibration_error perplexity ppl bits_per_character bits_per_byte
    bpc bpb bpd nll cross_entropy wer cer word_information_lost hinge hamming_distance divergence distance fid lpips
    hausdorff hd95 assd ergas total_variation coverage_error ranking_loss eer fpr fnr fdr false_positive_rate
    false_negative_rate false_discovery_rate false_alarm_rate miss_rate gap disparity
""")
"""Names of metrics, and words in names, of which a smaller value is better."""
HIGHER = _words("""
    accuracy acc auc auroc roc_auc auprc aupr pr_auc average_precision ap map mean_average_precision f1 f2 fbeta
    f_beta f_score skill_score brier_skill_score precision recall sensitivity specificity ppv npv tpr tnr
    true_positive_rate true_negative_rate youden jaccard iou miou giou dice dsc kappa cohen_kappa mcc matthews
    matthews_corrcoef r2 r_squared explained_variance d2 pearson spearman kendall kendall_tau correlation corrcoef
    ccc concordance concordance_index c_index cindex harrell likelihood log_likelihood elbo ndcg dcg mrr hit_rate
    hits reciprocal_rank exact_match bleu sacrebleu rouge meteor chrf bert_score psnr ssim ms_ssim uqi vif
    inception_score snr si_snr si_sdr sdr pesq stoi nmi ari ami mutual_information rand_score adjusted_rand
    homogeneity completeness v_measure fowlkes_mallows silhouette calinski_harabasz lift
""")
"""Names of metrics, and words in names, of which a larger value is better."""
_NEGATIONS = ("neg", "negative", "negated")
_LONGEST = max(name.count("_") for name in LOWER | HIGHER) + 1


class DirectedMetric:
    """A metric that states whether a larger value is better; made by `lower` and `higher`."""

    def __init__(self, function: Callable[..., Any], higher_is_better: bool) -> None:
        functools.update_wrapper(self, function, updated=("__dict__",) if hasattr(function, "__dict__") else ())
        self.function, self.higher_is_better = function, higher_is_better

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __repr__(self) -> str:
        return f"{'higher' if self.higher_is_better else 'lower'}({getattr(self.function, '__name__', self.function)})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = getattr(self, "__qualname__", "")
        if getattr(sys.modules.get(getattr(self, "__module__", "")), name, None) is self:  # a decorated function
            return str(name)
        return type(self), (self.function, self.higher_is_better)


def lower(metric: Callable[..., Any]) -> DirectedMetric:
    """State that a smaller value of a metric is better: ``metrics={"delay": hansa.lower(delay)}``, or as a decorator.

    Args:
        metric: A function of (outputs, targets).

    >>> lower(max)
    lower(max)
    """
    return _directed("lower", metric, False)


def higher(metric: Callable[..., Any]) -> DirectedMetric:
    """State that a larger value of a metric is better: ``metrics={"margin": hansa.higher(margin)}``.

    Args:
        metric: A function of (outputs, targets).

    >>> higher(max)(2, 3)
    3
    """
    return _directed("higher", metric, True)


def _directed(name: str, metric: Callable[..., Any], higher_is_better: bool) -> DirectedMetric:
    if not callable(metric):
        raise invalid_argument(name, "metric", metric, "a function of (outputs, targets)")
    return DirectedMetric(metric, higher_is_better)


def known_direction(name: str) -> Direction:
    """Return the direction that a metric's name states; "" if it states none, or two.

    >>> known_direction("val_RMSE"), known_direction("top5_accuracy"), known_direction("spread")
    ('lower', 'higher', '')
    >>> known_direction("neg_mean_squared_error"), known_direction("recall_at_fpr")
    ('higher', '')
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").split("_")
    stated: set[Direction] = set()
    place = negations = 0
    while place < len(words):
        for length in range(min(_LONGEST, len(words) - place), 0, -1):
            phrase = "_".join(words[place : place + length])
            if phrase in LOWER or phrase in HIGHER:
                stated.add("lower" if phrase in LOWER else "higher")
                place += length
                break
        else:
            negations += words[place] in _NEGATIONS
            place += 1
    if len(stated) != 1:
        return ""
    (direction,) = stated
    return direction if negations % 2 == 0 else opposite(direction)


def opposite(direction: Direction) -> Direction:
    """Return the other direction.

    >>> opposite("lower")
    'higher'
    """
    return {"lower": "higher", "higher": "lower"}.get(direction, "")  # type: ignore[return-value]


def stated_direction(name: str, metric: Callable[..., Any]) -> Direction:
    """Return the direction of a metric: its own statement, or that of its name, or of its function's name; or ""."""
    own = getattr(metric, "higher_is_better", None)
    if isinstance(own, bool):
        return "higher" if own else "lower"
    while isinstance(metric, functools.partial):
        metric = metric.func
    function_name = getattr(metric, "__name__", type(metric).__name__)
    return known_direction(name) or known_direction(function_name)


def metric_directions(metrics: Mapping[str, Callable[..., Any]]) -> dict[str, Direction]:
    """Return the direction of every metric of a task, and refuse those without one.

    Args:
        metrics: Functions of (outputs, targets) by name.

    >>> metric_directions({"rmse": max, "margin": higher(max)})
    {'rmse': 'lower', 'margin': 'higher'}
    >>> metric_directions({"margin": max})
    Traceback (most recent call last):
    hansa.core.errors.HansaError: Task(metrics={'margin': ...}): its name does not say whether a larger value is ...
    """
    directions: dict[str, Direction] = {}
    for name, metric in metrics.items():
        directions[name] = stated_direction(name, metric)
        if not directions[name]:
            shown = getattr(metric, "__name__", "f").strip("<>")
            raise HansaError(
                f"Task(metrics={{{short_repr(name)}: ...}}): its name does not say whether a larger value is better. "
                f"Write hansa.higher({shown}) or hansa.lower({shown}); in a file, "
                f"metrics: {{{name}: {{function: MODULE:{shown}, better: lower}}}}."
            )
    return directions


def check_hits(metric: Callable[..., Any] | None) -> None:
    """Refuse a falling metric as accuracy, which is the mean of hits."""
    if getattr(metric, "higher_is_better", True) is False:
        name = getattr(metric, "__name__", "f").strip("<>")
        raise invalid_argument(
            "Task", "metric", metric, "hits, of which more are better", f"metrics={{{name!r}: ...}} takes any metric."
        )


def main_column(metrics: Mapping[str, Any], accuracy: bool, requested: str | None = None) -> str:
    """Return the column that runs of a task are ranked by: the requested one, else accuracy, the first metric, or loss.

    Args:
        metrics: The metrics of the task by name.
        accuracy: Whether the task has an accuracy.
        requested: The name of a metric, "accuracy" or "loss".

    >>> main_column({"c_index": max}, accuracy=False), main_column({"auc": max}, accuracy=True)
    ('test_c_index', 'test_accuracy')
    """
    known = [*(["accuracy"] if accuracy else []), *metrics, "loss"]
    name = known[0] if requested is None else requested.removeprefix("test_")
    if name not in known:
        raise invalid_argument("Task", "main_metric", requested, f"one of {', '.join(known)}")
    return f"test_{name}"
