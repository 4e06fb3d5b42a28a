"""Metrics over sites: those of each site by its name, those of all sites together, the worst site and the deviation.

Sums (loss, hits) are added. Other metrics of a task are computed by each site on its own test rows. Over all sites they
are pooled if every site that has a value sent a sketch of it (`hansa.training.metrics.MergeableMetric`), else averaged
by the sites' numbers of test rows; `SiteResults.combined_by` says which.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from hansa.federation.messages import ProtocolError, SiteEvaluationReply
from hansa.training.metric_direction import Direction
from hansa.training.metrics import Accuracy, MergeableMetric

log = logging.getLogger("hansa")


class SiteResults(NamedTuple):
    """The columns of a record about an evaluation at the sites, and how each metric was combined over them."""

    metrics: dict[str, float]
    combined_by: dict[str, str]


def combine_replies(replies: Mapping[str, SiteEvaluationReply], task: Any = None) -> SiteResults:
    """Return the metrics of all sites from their replies.

    A site that has no test rows, or fewer than its policy permits to report, has no numbers.

    Args:
        replies: The reply of each site.
        task: The task of the server, with its metrics and their directions.

    >>> def reply(loss, hits): return SiteEvaluationReply("run", 0, b"", 10, loss, 10.0, hits, 10.0)
    >>> metrics = combine_replies({"north": reply(5.0, 9.0), "south": reply(7.0, 5.0)}).metrics
    >>> metrics["sites_test_accuracy"], metrics["north/test_accuracy"]
    (0.7, 0.9)
    >>> metrics["sites_test_accuracy_worst"], metrics["sites_test_accuracy_std"], metrics["sites_test_loss_worst"]
    (0.5, 0.2, 0.7)
    """
    reported = {site: replies[site] for site in sorted(replies) if replies[site].rows}
    if not reported:
        log.warning("no site reports test rows, so nothing is evaluated at the sites")
        return SiteResults({}, {})
    results = SiteResults(_sums(reported), {})
    by_metric = {
        "loss": {site: reply.loss / reply.weight for site, reply in reported.items() if reply.weight},
        "accuracy": {
            site: reply.hits / reply.labels
            for site, reply in reported.items()
            if reply.hits is not None and reply.labels
        },
    }
    directions: dict[str, Direction] = {"loss": "lower", "accuracy": "higher", **getattr(task, "directions", {})}
    for name, metric in getattr(task, "metrics", {}).items():
        values = {site: reply.metrics[name] for site, reply in reported.items() if name in reply.metrics}
        if values:
            by_metric[name] = values
            _combine_metric(results, name, metric, reported, values)
    for site, reply in reported.items():
        results.metrics[f"{site}/test_rows"] = reply.rows
    for name, values in by_metric.items():
        results.metrics.update({f"{site}/test_{name}": value for site, value in values.items()})
        if len(values) > 1:
            worst = max if directions.get(name) == "lower" else min
            finite = all(map(math.isfinite, values.values()))
            results.metrics[f"sites_test_{name}_worst"] = worst(values.values()) if finite else math.nan
            results.metrics[f"sites_test_{name}_std"] = statistics.pstdev(values.values()) if finite else math.nan
    return results


def check_reply(site: str, reply: SiteEvaluationReply, task: Any) -> None:
    """Raise for a reply that cannot be true, or has metrics that were not asked for.

    Args:
        site: The name of the site.
        reply: Its reply.
        task: The task of the server.
    """
    hits, labels = reply.hits or 0.0, reply.labels or 0.0
    metric = getattr(task, "metric", None)
    counts_hits = metric is None or isinstance(metric, Accuracy)  # hits; values of a user's metric may be others
    sums = (reply.weight, hits, labels)
    possible = all(map(math.isfinite, sums)) and min(reply.weight, labels) >= 0 and max(reply.weight, labels) < _MOST
    if not possible or (counts_hits and not -1e-9 <= hits <= labels * (1 + 1e-9)) or (reply.loss and not reply.weight):
        detail = f"{reply.hits} hits of {reply.labels} labels, loss {reply.loss} of weight {reply.weight}"
        raise ProtocolError("marks", f"site {site}: impossible sums: {detail}")
    metrics = getattr(task, "metrics", {})
    unasked = sorted({*reply.metrics, *reply.sketches} - set(metrics))
    if unasked or (reply.metrics and not reply.rows):
        raise ProtocolError("marks", f"site {site} sends metrics {unasked or sorted(reply.metrics)}: not asked")
    if not all(map(math.isfinite, reply.metrics.values())):
        raise ProtocolError("marks", f"site {site} sends a metric that is not finite")
    for name, sketch in reply.sketches.items():
        mergeable = mergeable_metric(metrics[name])
        try:
            if mergeable is None or name not in reply.metrics:
                raise ValueError("no sketch was asked for")
            mergeable.combine([sketch])
        except Exception as error:
            raise ProtocolError("marks", f"site {site}: the sketch of {name} is impossible: {error}") from error


_MOST = 1e15  # of labels and weights


def mergeable_metric(metric: Any) -> MergeableMetric | None:
    """Return a metric that has sketches, also if it is wrapped by `hansa.lower` or `hansa.higher`; None for others."""
    function = getattr(metric, "function", metric)
    return function if isinstance(function, MergeableMetric) else None


def _combine_metric(
    results: SiteResults,
    name: str,
    metric: Any,
    reported: Mapping[str, SiteEvaluationReply],
    values: Mapping[str, float],
) -> None:
    """Add the value of a metric over all sites."""
    sites_without = sorted(set(reported) - set(values))
    left_out = f" (without {', '.join(sites_without)})" if sites_without else ""
    count = f"{len(values)} site{'s' if len(values) > 1 else ''}"
    column, mergeable = f"sites_test_{name}", mergeable_metric(metric)
    if mergeable is not None and all(name in reported[site].sketches for site in values):
        pooled = mergeable.combine([reported[site].sketches[name] for site in values])
        results.metrics[column] = pooled.value
        results.metrics.update({f"{column}_at_least": pooled.at_least, f"{column}_at_most": pooled.at_most})
        results.combined_by[name] = f"pooled from sketches of {count}{left_out}"
    else:
        rows = {site: reported[site].rows for site in values}
        results.metrics[column] = math.fsum(values[site] * rows[site] for site in values) / sum(rows.values())
        results.combined_by[name] = f"mean of {count} by test rows{left_out}"


def _sums(reported: Mapping[str, SiteEvaluationReply]) -> dict[str, float]:
    """Return rows, loss and accuracy over all sites."""
    weight = math.fsum(reply.weight for reply in reported.values())
    losses = [reply.loss for reply in reported.values()]
    finite = all(map(math.isfinite, losses))
    sums: dict[str, float] = {"sites_test_rows": sum(reply.rows for reply in reported.values())}
    sums["sites_test_loss"] = math.fsum(losses) / weight if weight and finite else math.nan
    hits = [reply.hits for reply in reported.values() if reply.hits is not None]
    if len(hits) == len(reported):
        labels = math.fsum(reply.labels or 0.0 for reply in reported.values())
        sums["sites_test_accuracy"] = math.fsum(hits) / max(1.0, labels)
    return sums
