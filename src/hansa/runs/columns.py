"""Every column of a run's history and of its client record, declared once: name, unit, meaning, direction, charts.

The history, the summary, the command line, the report page and the documentation read these tables. A new column needs
an entry here and the code that measures it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["count", "fraction", "number", "bits", "bytes", "seconds", "flag", "list"]
Direction: TypeAlias = Literal["higher", "lower", ""]
Chart: TypeAlias = Literal["axis", "outcome", "detail"]


@dataclass(frozen=True, slots=True)
class Column:
    """A number in the record of a round, or a running total of one.

    Args:
        name: The key in the record, in ``metrics.jsonl`` and in ``Run.frame()``.
        label: The heading in tables and charts.
        unit: The unit; determines the number format.
        meaning: One sentence for the documentation, without a full stop.
        better: Which direction is better, or "" where neither is.
        charts: Where the report page draws it: as a choice of x axis, as an outcome, or as a small chart.
        axis: The label of the x axis, for columns with an "axis" chart.
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


@dataclass(frozen=True, slots=True)
class ClientColumn:
    """A column of the client record, with one row for each client in each round.

    Args:
        name: The key in ``Run.clients()``.
        dtype: The NumPy type.
        meaning: One sentence for the documentation, without a full stop.
        total: The name of its sum over rounds in ``Run.clients().by_client()``; "" where the last value counts.
    """

    name: str
    dtype: str
    meaning: str
    total: str = ""


_BOTH, _ALL = ("up_bytes", "down_bytes"), ("up_bytes", "down_bytes", "peer_bytes")
_AXIS: tuple[Chart, ...] = ("axis",)
_OUTCOME: tuple[Chart, ...] = ("outcome",)
_DETAIL: tuple[Chart, ...] = ("detail",)

COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("round", "rounds", "count", "the round, from 1", "", _AXIS, "communication rounds"),
        Column("up_bits", "sent up", "bits", "bits from clients to the server so far", "lower",
               _AXIS, "bits sent up", ("up_bytes",)),
        Column("down_bits", "sent down", "bits", "bits from the server to clients so far", "lower",
               sum_of=("down_bytes",)),
        Column("peer_bits", "to peers", "bits", "bits between clients so far", "lower",
               sum_of=("peer_bytes",), hide_zero=True),
        Column("server_bits", "server bits", "bits", "bits to and from the server so far", "lower",
               _AXIS, "bits to and from the server", _BOTH),
        Column("bits", "all bits", "bits", "all bits so far", "lower", _AXIS, "bits sent", _ALL),
        Column("simulated_total_seconds", "simulated time", "seconds", "simulated time so far", "lower",
               _AXIS, "simulated time, seconds", ("simulated_seconds",)),
        Column("wall_seconds", "wall time", "seconds", "wall time so far", "lower",
               _AXIS, "wall time, seconds", ("seconds",)),
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
        Column("reasons", "drop reasons", "list", "how many clients were dropped for each reason"),
        Column("moved", "applied", "flag", "whether the server applied an update"),
        Column("up_bytes", "bytes up", "bytes", "bytes from clients to the server in this round", "lower"),
        Column("down_bytes", "bytes down", "bytes", "bytes from the server to clients in this round", "lower"),
        Column("peer_bytes", "bytes to peers", "bytes", "bytes between clients in this round", "lower"),
        Column("sites", "sites", "list", "bytes of each site of a federation"),
        Column("seconds", "seconds", "seconds", "wall time of this round", "lower"),
        Column("simulated_seconds", "simulated seconds", "seconds", "time of this round by the link model", "lower"),
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
"""Ranking metrics in order of preference; the first one that was measured is used."""
AXES = {name: column.axis for name, column in COLUMNS.items() if "axis" in column.charts}
"""The columns available as x axes, with their labels."""
CHARTED = tuple(name for name, column in COLUMNS.items() if column.charts)
"""All columns that the report page draws."""
BITS = {name: column.sum_of[0] for name, column in COLUMNS.items() if column.unit == "bits" and len(column.sum_of) == 1}
"""Running totals in bits, and the byte columns that they sum."""
TOTALS = tuple(name for name, column in COLUMNS.items() if column.sum_of)
EVALUATED = ("test_", "client_", "personal_")
"""Prefixes of evaluated metrics: on all test rows, over clients, over clients after local steps."""
_LOWER = ("loss", "bits", "bytes", "seconds", "consensus", "lost")


def lower_is_better(name: str) -> bool:
    """Return whether a smaller value of a column is better: losses, costs, and deviations over clients.

    >>> lower_is_better("test_loss"), lower_is_better("test_accuracy"), lower_is_better("client_loss_worst")
    (True, False, True)
    """
    if name in COLUMNS:
        return COLUMNS[name].better == "lower"
    if name.startswith(("client_", "personal_")):
        if name.endswith("_std"):
            return True
        name = name.removesuffix("_worst")
    return name.endswith(_LOWER)


def column_of(name: str) -> Column:
    """Return the column of a name, including summaries (``best_``, ``last5_``) and user-defined metrics.

    >>> column_of("last5_test_loss").label, column_of("test_recall").better
    ('test loss', 'higher')
    """
    plain = name.removeprefix("best_").removeprefix("last5_")
    if plain in COLUMNS:
        return COLUMNS[plain]
    unit: Unit = "fraction" if plain.endswith("accuracy") else "number"
    label = plain.replace("_", " ")
    return Column(plain, label, unit, label, "lower" if lower_is_better(plain) else "higher")


def markdown_table(columns: Sequence[Column] | None = None) -> str:
    """Return the columns as a Markdown table for the documentation."""
    rows = [
        f"| `{each.name}` | {each.unit} | {each.better or 'n/a'} | {each.meaning} |"
        for each in (tuple(COLUMNS.values()) if columns is None else columns)
    ]
    return "\n".join(["| column | unit | better | meaning |", "|---|---|---|---|", *rows])
