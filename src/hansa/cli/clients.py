"""``hansa show RUN --clients``: what each client did, and how well it is served."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from hansa.cli.console import out

if TYPE_CHECKING:
    from hansa.runs.client_columns import ClientColumns

_MOST = 12  # rows of the table: the worst and, where there are more, the best


def show_clients(by: ClientColumns, title: str, as_json: bool) -> None:
    """A row a client, the worst served first; as JSON all of them."""
    from hansa.core.errors import HansaError
    from hansa.runs.metrics import plain, smaller_is_better
    from hansa.study.report import formats

    if not by.rows:
        raise HansaError(f"{title}: has no record of clients: no round has closed, or hansa 0.1 made it.")
    if as_json:
        out().print_json(json.dumps(plain({name: values.tolist() for name, values in by.items()}), allow_nan=False))
        return
    metric = rank_by(by)
    order = worst_first(by, metric)
    _say_spread(by, title, metric)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in by:
        table.add_column(name.replace("_", " "), justify="right")
    shown: list[int | None] = list(order)
    if len(shown) > _MOST:
        half = _MOST // 2
        shown = [*shown[:half], None, *shown[-half:]]
    for place in shown:
        table.add_row(*("..." if place is None else _cell(name, by[name][place], formats) for name in by))
    out().print(table)
    falls = "the highest" if smaller_is_better(metric) else "the lowest"
    out().print(
        f"\n{falls} {metric.replace('_', ' ')} first; hansa export RUN -o clients.csv has every round.", style="dim"
    )


def rank_by(by: ClientColumns) -> str:
    """What clients are put in order by: how well they are served, else their last training loss."""
    return next(name for name in ("personal_accuracy", "test_accuracy", "test_loss", "loss") if name in by)


def worst_first(by: ClientColumns, metric: str) -> list[int]:
    """The rows from the worst served on; those of whom nothing is known come last."""
    from hansa.runs.metrics import smaller_is_better

    sign = -1.0 if smaller_is_better(metric) else 1.0
    values = [float(value) for value in by[metric]]
    return sorted(range(len(values)), key=lambda row: (values[row] != values[row], sign * values[row], row))


def _say_spread(by: ClientColumns, title: str, metric: str) -> None:
    from hansa.runs.client_columns import spread
    from hansa.runs.metrics import smaller_is_better
    from hansa.study.report import formats

    out().print(f"[bold]{escape(title)}[/]: {len(by['client'])} clients")
    for name in (*by.tests, "loss"):
        mean, deviation, worst = spread(by[name].tolist(), smaller_is_better(name))
        write = formats.percent if name.endswith("accuracy") else formats.number
        told = f"mean {write(mean)}, deviation {write(deviation)}, worst tenth {write(worst)}"
        out().print(f"  {escape(name.replace('_', ' '))}: {told}")


def _cell(name: str, value: Any, formats: Any) -> str:
    if name.endswith("_bytes"):
        return str(formats.bits(8 * int(value)))
    if value.dtype.kind != "f":
        return str(int(value))
    return str(formats.percent(float(value)) if name.endswith("accuracy") else formats.number(float(value)))
