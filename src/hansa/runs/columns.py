"""Every column of a run's history and of its client record, declared once: name, unit, meaning, direction, charts.

The history, the summary, the command line, the report page and the documentation read these tables. A new column needs
an entry here and the code that measures it. A task declares its own metrics: the run folder records which of them ranks
the run and the direction of each, and every table, page and search reads them there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from hansa.core.errors import HansaError, invalid_argument
from hansa.training.metric_direction import DIRECTIONS, Direction

Unit: TypeAlias = Literal["count", "fraction", "number", "bits", "bytes", "seconds", "flag", "list", "dict"]
Chart: TypeAlias = Literal["outcome", "detail"]


@dataclass(frozen=True, slots=True)
class Column:
    """A number in the record of a round, or a running total of one.

    Args:
        name: The key in the record, in ``metrics.jsonl`` and in ``Run.frame()``.
        label: The heading in tables and charts.
        unit: The unit; determines the number format.
        meaning: One sentence for the documentation, without a full stop.
        better: Which direction is better, or "" where neither is.
        charts: Where the report page draws it: as an outcome, or as a small chart.
        axis: Its label as an x axis of the report page, "" if it is no choice.
        sum_of: For running totals, the columns of a round that are added up (bytes to bits).
        hide_zero: Whether tables omit it if it is 0 for all runs.
    """

    name: str
    label: str
    unit: Unit
    meaning: str
    better: Direction = ""
    charts: tuple[Chart, ...] = ()
    axis: str = ""
    sum_of: tuple[str, ...] = ()
    hide_zero: bool = False


class ClientColumn(NamedTuple):
    """A column of the client record, which has a row for each client in each round: its key in ``Run.clients()``, NumPy
    type and meaning, and the name of its sum over rounds in ``by_client()``, "" where the last value counts."""

    name: str
    dtype: str
    meaning: str
    total: str = ""


_BOTH, _ALL = ("up_bytes", "down_bytes"), ("up_bytes", "down_bytes", "peer_bytes")
_OUTCOME: tuple[Chart, ...] = ("outcome",)
_DETAIL: tuple[Chart, ...] = ("detail",)

COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("round", "rounds", "count", "the round, from 1", axis="communication rounds"),
        Column("rounds", "rounds", "count", "the rounds of a run"),
        Column("rounds_to_target", "rounds to target", "count", "the first round that reached the target", "lower"),
        Column("bits_to_target", "bits to target", "bits", "the bits of all links until then", "lower"),
        Column("up_bits", "sent up", "bits", "bits from clients to the server so far", "lower",
               axis="bits sent up", sum_of=("up_bytes",)),
        Column("down_bits", "sent down", "bits", "bits from the server to clients so far", "lower",
               sum_of=("down_bytes",)),
        Column("peer_bits", "to peers", "bits", "bits between clients so far", "lower",
               sum_of=("peer_bytes",), hide_zero=True),
        Column("server_bits", "server bits", "bits", "bits to and from the server so far", "lower",
               axis="bits to and from the server", sum_of=_BOTH),
        Column("bits", "all bits", "bits", "all bits so far", "lower", axis="bits sent", sum_of=_ALL),
        Column("simulated_total_seconds", "simulated time", "seconds", "simulated time so far", "lower",
               axis="simulated time, seconds", sum_of=("simulated_seconds",)),
        Column("wall_seconds", "wall time", "seconds", "wall time so far", "lower",
               axis="wall time, seconds", sum_of=("seconds",)),
        Column("test_accuracy", "accuracy", "fraction", "accuracy on all test rows", "higher", _OUTCOME),
        Column("test_loss", "test loss", "number", "mean loss on all test rows", "lower", _OUTCOME),
        Column("global_loss", "global loss", "number", "mean loss of the server's model on all training rows", "lower",
               _OUTCOME),
        Column("loss", "loss", "number", "objective of a function task", "lower", _OUTCOME),
        Column("train_loss", "local loss", "number", "mean training loss of the clients during their local steps",
               "lower", ("outcome", "detail")),
        Column("local_mean_loss", "loss at the local mean", "number",
               "training loss at the mean of all local models after the local work", "lower", _OUTCOME),
        Column("client_accuracy", "client accuracy", "fraction", "mean accuracy of clients on their own test rows",
               "higher"),
        Column("client_accuracy_std", "client deviation", "fraction", "standard deviation of client_accuracy",
               "lower"),
        Column("client_accuracy_worst", "worst tenth", "fraction", "mean of client_accuracy over the worst tenth",
               "higher"),
        Column("personal_accuracy", "personal accuracy", "fraction", "client_accuracy after steps on their own rows",
               "higher"),
        Column("diversity", "diversity", "number", "sqrt(sum lambda_i |Delta_i|^2 / |sum lambda_i Delta_i|^2)",
               charts=_DETAIL),
        Column("surrogate_diversity", "surrogate diversity", "number", "diversity of FedAWARE's momentum rows",
               charts=_DETAIL),
        Column("gamma", "gamma", "number", "dissimilarity under compression, as in FedCAMS", charts=_DETAIL),
        Column("q", "q", "number", "mean |C(x) - x| / |x| of the compressor on this round's updates", charts=_DETAIL),
        Column("consensus", "consensus distance", "number", "distance of the clients' models from their mean", "lower",
               _DETAIL),
        Column("update_norm", "update norm", "number", "mean |Delta_i| of the accepted updates", charts=_DETAIL),
        Column("aggregate_norm", "aggregate norm", "number", "|Delta| before the server's step", charts=_DETAIL),
        Column("sigma_l", "sigma_l", "number", "deviation of the gradients of samples within a client"),
        Column("sigma_g", "sigma_g", "number", "deviation of the clients' full gradients", charts=_DETAIL),
        Column("participants", "participants", "count", "clients whose update was accepted"),
        Column("clients", "clients", "list", "their numbers"),
        Column("lost", "dropped", "count", "clients that were asked and whose update was not accepted", "lower",
               _DETAIL, hide_zero=True),
        Column("reasons", "drop reasons", "dict", "how many clients were dropped for each reason"),
        Column("moved", "applied", "flag", "whether the server applied an update"),
        Column("up_bytes", "bytes up", "bytes", "bytes from clients to the server in this round", "lower"),
        Column("down_bytes", "bytes down", "bytes", "bytes from the server to clients in this round", "lower"),
        Column("peer_bytes", "bytes to peers", "bytes", "bytes between clients in this round", "lower"),
        Column("sites", "sites", "dict", "bytes and seconds of each site of a federation"),
        Column("combined_by", "combined by", "dict",
               "how a metric over all sites was computed: pooled from sketches, or mean by test rows"),
        Column("left_out", "left out", "dict", "sites without numbers in an evaluation, and why"),
        Column("seconds", "seconds", "seconds", "wall time of this round", "lower"),
        Column("work_seconds", "work", "seconds", "work of the site that the round waited for longest", "lower"),
        Column("transport_seconds", "transport", "seconds", "polls, TLS and transfer to and from that site", "lower"),
        Column("staleness", "staleness", "number", "mean server steps since the versions that the updates started from",
               "lower", _DETAIL),
        Column("staleness_max", "oldest update", "count", "the largest staleness of an accepted update", "lower"),
        Column("utilisation", "utilisation", "fraction", "share of virtual time in which clients were at work",
               "higher", _DETAIL),
        Column("wasted_seconds", "wasted work", "seconds",
               "virtual seconds that clients spent on updates that were not accepted", "lower", hide_zero=True),
        Column("arrivals", "arrivals", "list",
               "client, version, time and acceptance of every update that real sites sent, in order of arrival"),
        Column("versions", "versions", "count", "versions of the model kept for clients at work"),
        Column("version_bytes", "version memory", "bytes", "memory of these versions"),
        Column("simulated_seconds", "simulated seconds", "seconds",
               "time of this round by the link model or on the virtual clock", "lower"),
    )
}  # fmt: skip
"""The columns of a history by name, in the order in which reports show them. Evaluations add ``test_NAME`` for each
metric of a task, and ``client_NAME``, ``client_NAME_std``, ``client_NAME_worst`` and ``personal_NAME`` over clients."""

CLIENT_COLUMNS: dict[str, ClientColumn] = {
    column.name: column
    for column in (
        ClientColumn("round", "int32", "the round, from 1"),
        ClientColumn("client", "int32", "the client's number"),
        ClientColumn("asked", "bool", "whether the server asked it to report", "asked"),
        ClientColumn("admitted", "bool", "whether its update was accepted", "participations"),
        ClientColumn("loss", "float32", "its mean training loss; for clients that gossip, that of their cluster"),
        ClientColumn("norm", "float32", "the norm of its update"),
        ClientColumn("up_bytes", "int64", "bytes it sent to the server", "up_bytes"),
        ClientColumn("down_bytes", "int64", "bytes it received from the server", "down_bytes"),
        ClientColumn("peer_bytes", "int64", "bytes it sent to other clients", "peer_bytes"),
    )
}
"""The columns of every client record; those of evaluations (``test_...``, ``personal_...``) follow them as float32."""

ACCURACY = "test_accuracy"
OUTCOMES = tuple(name for name, column in COLUMNS.items() if "outcome" in column.charts)
"""Columns drawn as outcomes. `main_metric` says which column ranks runs."""
LOSSES = ("test_loss", "sites_test_loss", "global_loss", "loss", "train_loss")
"""The losses, in the order in which tables and progress displays prefer them."""
COSTS = ("up_bits", "down_bits", "peer_bits", "simulated_total_seconds", "wall_seconds", "lost")
"""The costs of a run in the order of tables; a table omits those that a run does not have."""
AXES = {name: column.axis for name, column in COLUMNS.items() if column.axis}
"""The columns available as x axes, with their labels."""
CHARTED = tuple(name for name, column in COLUMNS.items() if column.charts or column.axis)
"""All columns that the report page draws."""
BITS = {name: column.sum_of[0] for name, column in COLUMNS.items() if column.unit == "bits" and len(column.sum_of) == 1}
"""Running totals in bits, and the byte columns that they sum."""
TOTALS = tuple(name for name, column in COLUMNS.items() if column.sum_of)
EVALUATED = ("test_", "client_", "personal_", "sites_test_")
"""Prefixes of evaluated metrics: on all test rows, over clients, over clients after local steps, at the sites of a
federation. Metrics of a named test set are prefixed with its name: ``validation/test_accuracy``."""
WINDOW = 5
"""The default number of last measurements that a score averages; one setting for tables, pages, CSV and searches."""
VALIDATION = "validation"
"""The name of the test set of validation rows, as in `hansa.training.task`, which needs torch."""
_SUMMARY = re.compile(r"(best|final|last\d+)_")


def plain_name(name: str) -> str:
    """Return the column of a summary: ``best_test_loss``, ``final_test_loss`` and ``last5_test_loss`` are test_loss.

    >>> plain_name("last10_test_loss"), plain_name("bits")
    ('test_loss', 'bits')
    """
    return name if name in COLUMNS else _SUMMARY.sub("", name, count=1)


def lower_is_better(name: str, better: Mapping[str, Direction] | None = None) -> bool:
    """Return whether a smaller value of a column is better; raise if this is unknown.

    Args:
        name: A column, or a summary of one.
        better: The directions that the task declares, by metric.

    >>> [lower_is_better(name) for name in ("client_loss_worst", "client_f1_std", "last5_lost", "test_f1")]
    [True, True, True, False]
    """
    direction = column_of(name, better).better
    if not direction:
        raise HansaError(
            f"{name}: not known whether a larger value is better. Write {name}:lower or {name}:higher; a task declares "
            "it as metrics={...: hansa.lower(f)}."
        )
    return direction == "lower"


def split_metric(metric: str, better: Mapping[str, Direction] | None = None) -> tuple[str, dict[str, Direction]]:
    """Split COLUMN:DIRECTION; return the column, and the directions with this one added.

    Args:
        metric: A column, or COLUMN:lower or COLUMN:higher.
        better: The directions that the task declares.

    >>> split_metric("test_delay:lower"), split_metric("test_loss")
    (('test_delay', {'test_delay': 'lower'}), ('test_loss', {}))
    """
    name, colon, direction = metric.partition(":")
    if not colon:
        return name, dict(better or {})
    if direction not in ("lower", "higher"):
        raise invalid_argument("metric", "better", direction, "lower or higher", f"Write {name}:lower.")
    return name, {**(better or {}), name: "lower" if direction == "lower" else "higher"}


def column_of(name: str, better: Mapping[str, Direction] | None = None) -> Column:
    """Return the column of a name, including summaries (``best_``, ``last5_``), test sets and a task's own metrics.

    Its direction is "" where neither is better, or where nothing declares it: the run's record decides, then the table
    of columns, then the short list of `hansa.training.metric_direction`.

    Args:
        name: A column, or a summary of one.
        better: The directions that the run recorded, by metric.

    >>> [column_of(name).better for name in ("last5_client_rmse_worst", "test_auc", "test_margin")]
    ['lower', 'higher', '']
    >>> column_of("north/test_loss").label, column_of("test_margin", {"margin": "lower"}).better
    ('north test loss', 'lower')
    """
    plain, better = plain_name(name), better or {}
    test_set, _, metric = plain.rpartition("/")
    if metric in COLUMNS:
        column = COLUMNS[metric]
    else:
        label, prefix = metric.replace("_", " "), _evaluated_prefix(metric)
        statistic = next((end for end in ("_worst", "_std") if prefix and metric.endswith(end)), "")
        base = metric.removesuffix(statistic).removeprefix(prefix)
        direction = "lower" if statistic == "_std" else better.get(base) or DIRECTIONS.get(base, "")
        column = Column(metric, label, "fraction" if base.endswith("accuracy") else "number", label, direction)
    if test_set:
        column = replace(column, name=plain, label=f"{test_set} {column.label}", charts=())
    return replace(column, better=better[plain]) if plain in better else column


def _evaluated_prefix(name: str) -> str:
    """Return the prefix of an evaluated column, such as ``client_``; "" for other columns and for summaries."""
    metric = name.rpartition("/")[2] if name == plain_name(name) else name
    return next((prefix for prefix in EVALUATED if metric.startswith(prefix)), "")


def check_record(record: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a value in the record of a round that is not of its column's kind: a folder of somebody
    else may hold any. Columns that are in no table may have any value."""
    for name, value in record.items():
        unit = COLUMNS[name].unit if name in COLUMNS else "number" if _evaluated_prefix(name) else ""
        if value is None or not unit:
            continue
        if unit == "dict":  # of texts and numbers; for sites, one for each site
            tables = value.values() if name == "sites" and isinstance(value, dict) else [value]
            fits = all(isinstance(table, dict) and all(map(_is_text_or_number, table.values())) for table in tables)
        elif unit in ("flag", "list"):
            fits = isinstance(value, bool if unit == "flag" else list)
        else:
            fits = is_number(value) and (unit not in ("count", "bytes") or 0 <= value < 1 << 62)
        if not fits:
            raise ValueError(f"{name!r} is {value!r:.60}")


def _is_text_or_number(value: object) -> bool:
    return isinstance(value, str) or is_number(value)


def is_number(value: object) -> bool:
    """Return whether this is a number that a float can hold; a flag is none.

    >>> is_number(0.5), is_number(float("nan")), is_number(True), is_number(10**400)
    (True, True, False, False)
    """
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 999
    )


def evaluated_metrics(names: Iterable[str]) -> list[str]:
    """Return the evaluated columns among some names, sorted.

    >>> evaluated_metrics({"round", "test_auc", "sites_test_rows", "sites_test_auc_at_least"})
    ['test_auc']
    """
    bounds = re.compile(r"sites_test_.*_at_(least|most)|.*_rows")
    return sorted(name for name in names if _evaluated_prefix(name) and not bounds.fullmatch(name))


def base_metric(name: str) -> str:
    """Return the metric of an evaluated column, without its test set or prefix.

    >>> base_metric("north/test_auc"), base_metric("sites_test_auc"), base_metric("train_loss")
    ('auc', 'auc', 'train_loss')
    """
    metric = name.rpartition("/")[2]
    test_metric = metric.removeprefix("sites_")
    return test_metric.removeprefix("test_") if test_metric.startswith("test_") else metric


SITE_PREFIX = "sites_"
"""The prefix of columns over all sites of a federation: ``sites_test_accuracy`` beside ``test_accuracy``."""


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """The metadata of a run's metrics: the run can be ranked without its code.

    Args:
        main: The column that the run is ranked by; "" if the task declares none.
        better: The direction of the task's own metrics by name, without prefixes such as ``test_``.
        chance: The accuracy of always predicting the most frequent test label; None if unknown.
        validation: Whether there are validation rows, on which hyperparameters are scored.
    """

    main: str = ""
    better: Mapping[str, Direction] = field(default_factory=dict)
    chance: float | None = None
    validation: bool = False

    @property
    def tuning(self) -> str:
        """The column that hyperparameters are scored by: the main metric, on validation rows if there are any."""
        metric = self.main.rpartition("/")[2]
        return f"{VALIDATION}/{metric}" if self.validation and metric.startswith("test_") else self.main

    @classmethod
    def of_task(cls, task: Any) -> MetricFacts:
        """Return the facts of a task."""
        import torch

        chance, targets = None, getattr(getattr(task, "data", None), "test_targets", None)
        if isinstance(targets, torch.Tensor) and not targets.is_floating_point() and targets.ndim == 1:
            labels = targets[targets >= 0]
            chance = float(labels.bincount().max()) / len(labels) if len(labels) else None
        main, directions = getattr(task, "main_metric", ""), dict(getattr(task, "directions", {}))
        return cls(main, directions, chance, VALIDATION in getattr(task, "test_sets", ()))

    @classmethod
    def from_json(cls, stored: object) -> MetricFacts:
        """Read the facts of a run folder; invalid contents count as none."""
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls).validate_python(stored)
        except ValidationError:
            return cls()


NO_FACTS = MetricFacts()


class RunHistory(list[dict[str, Any]]):
    """The records of a run, with the facts of its metrics."""

    def __init__(self, records: Iterable[dict[str, Any]] = (), facts: MetricFacts = NO_FACTS) -> None:
        super().__init__(records)
        self.facts, self.digest = facts, ""


def facts_of(history: Sequence[Mapping[str, Any]]) -> MetricFacts:
    """Return the facts that a history carries, if any."""
    return history.facts if isinstance(history, RunHistory) else NO_FACTS


def scores_test_rows(metric: str) -> str:
    """Return a sentence that warns of tuning on test rows; "" if the metric is measured on others.

    >>> scores_test_rows("validation/test_loss"), scores_test_rows("train_loss")
    ('', '')
    """
    if not metric.startswith(("test_", "client_", "personal_")):
        return ""
    return (
        f"scored by {metric}, on test rows: the best value is then biased. data.validation: 0.1, or in Python "
        "hansa.data.with_validation(data, 0.1), takes rows for tuning out of training."
    )


def main_metric(names: Iterable[str], facts: MetricFacts = NO_FACTS) -> str:
    """Return the column that a run with these columns is ranked by: the first in this order of preference.

    The metric that the task declares, on the server's test rows or at the sites; accuracy; the first other metric with
    a known direction; the loss on test rows, on all training rows, or of the clients.

    >>> main_metric(["test_c_index", "test_loss"]), main_metric(["train_loss"])
    ('test_c_index', 'train_loss')
    >>> main_metric(["train_loss", "sites_test_loss"])
    'sites_test_loss'
    """
    available = set(names)
    metrics = [name for name in evaluated_metrics(available - {*LOSSES}) if not name.endswith(("_worst", "_std"))]
    directed = [name for name in metrics if column_of(name, facts.better).better]
    server, sites = ([name for name in directed if name.startswith(prefix)] for prefix in ("test_", "sites_test_"))
    losses = ("test_loss", "sites_test_loss", *OUTCOMES)
    order = (facts.main, SITE_PREFIX + facts.main, ACCURACY, *server, "sites_test_accuracy", *sites, *losses)
    return next((name for name in order if name in available), ACCURACY)
