"""Rounds in columns are those of single orders and reports, bit for bit and record for record."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import data
from hansa.core import native
from hansa.engine import serial
from hansa.rounds import RoundAggregation
from hansa.rounds.many_clients import OrderColumns, ReportColumns, in_cohort_order
from hansa.rounds.messages import Report
from hansa.runs import driver
from hansa.runs.driver import Run

needs_native = pytest.mark.skipif(not native.available(), reason=f"kernels: {native.unavailable_reason()}")
CLIENTS = 40


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(torch.relu(self.inside(x)))
        return logits


class Normalised(Own):
    """LayerNorm, SiLU and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.norm(self.inside(x)))
        logits: torch.Tensor = self.out(x + torch.tanh(self.block(x)))
        return logits


def task(scale: float = 1.0, model: type[nn.Module] = Own) -> hansa.Task:
    """Clients of one to seven rows; ``scale`` multiplies the inputs of client 17."""
    draw = hansa.Key(3).numpy()
    sizes = torch.tensor([1 + client % 7 for client in range(CLIENTS)])
    rows = int(sizes.sum())
    inputs = torch.from_numpy(draw.standard_normal((rows, 6), dtype="float32"))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    inputs[offsets[17] : offsets[18]] *= scale
    targets = torch.from_numpy(draw.integers(0, 3, rows))
    held = data.FederatedData(inputs, targets, torch.arange(rows), offsets, classes=3, name="columns")
    return hansa.Task(model, cross_entropy, held)


def run_both(monkeypatch, algorithm: hansa.Algorithm, made: hansa.Task, **options: Any) -> tuple[Run, Run, list[int]]:
    """The run in columns, the run by single orders, and the numbers of clients that were trained as columns."""
    batches: list[int] = []
    plain: Callable[..., ReportColumns | None] = serial.client_round_columns

    def counting(algorithm: Any, orders: OrderColumns, trainer: Any) -> ReportColumns | None:
        report = plain(algorithm, orders, trainer)
        if report is not None:
            batches.append(len(orders))
        return report

    with monkeypatch.context() as patch:
        patch.setattr(serial, "client_round_columns", counting)
        columns = hansa.run(algorithm, made, rounds=4, workers=1, keep_params=True, **options)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "report_as_columns", lambda algorithm, orders: orders)
        patch.setattr(serial, "client_round_columns", None)
        single = hansa.run(algorithm, made, rounds=4, workers=1, keep_params=True, **options)
    return columns, single, batches


def assert_same(one: Run, other: Run) -> None:
    def facts(run: Run) -> list[dict[str, Any]]:
        return [{name: repr(value) for name, value in record.items() if name != "seconds"} for record in run.history]

    assert torch.equal(one.trajectory, other.trajectory)
    assert facts(one) == facts(other)
    assert one.ledger.state() == other.ledger.state()
    assert one.dropped_clients == other.dropped_clients
    assert repr(one.clients().by_client()) == repr(other.clients().by_client())
    rows, wanted = one.client_record.columns(), other.client_record.columns()
    for name in wanted:
        assert rows[name].tobytes() == wanted[name].tobytes(), name


@needs_native
@pytest.mark.parametrize(
    "algorithm",
    [
        hansa.presets.fedavg(participation=0.5, steps=3, batch_size=2, local_lr=0.1),
        hansa.presets.fedavg(participation=1.0, epochs=2, batch_size=2, local_lr=0.1, weights="samples"),
        hansa.presets.fedprox(mu=0.5, participation=0.7, steps=2, batch_size=4, local_lr=0.2),
        hansa.presets.fedams(server_lr=0.3, participation=0.4, steps=2, batch_size=3, local_lr=0.1),
    ],
    ids=["fedavg", "fedavg by samples", "fedprox", "fedams"],
)
@pytest.mark.parametrize("model", [Own, Normalised])
def test_columns_give_the_bits_and_records_of_single_orders(monkeypatch, model, algorithm) -> None:
    columns, single, batches = run_both(monkeypatch, algorithm, task(model=model))
    assert sum(batches) >= 3 * 15  # all rounds but the first
    assert_same(columns, single)


@needs_native
def test_a_round_in_columns_leaves_no_objects_to_the_garbage_collector() -> None:
    """A few objects per client would start a collection of all objects every few rounds, as long as a round."""
    clients, collections = 3000, list[int]()
    index = torch.arange(4 * clients) % 100
    draw = hansa.Key(3).numpy()
    inputs = torch.from_numpy(draw.standard_normal((100, 6), dtype="float32"))
    offsets = torch.arange(clients + 1) * 4
    held = data.FederatedData(inputs, torch.arange(100) % 3, index, offsets, classes=3, name="many")
    run = Run(
        hansa.presets.fedavg(participation=1.0, steps=2, batch_size=2, local_lr=0.1),
        hansa.Task(Own, cross_entropy, held),
        evaluate_every=0,
    )
    run.advance(2)

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    gc.callbacks.append(collected)
    try:
        run.advance(1)
    finally:
        gc.callbacks.remove(collected)
    assert len(collections) <= clients // gc.get_threshold()[0] // 2


@needs_native
def test_a_refused_update_has_the_same_reason_and_the_others_count(monkeypatch) -> None:
    algorithm = hansa.presets.fedavg(participation=1.0, steps=2, batch_size=2, local_lr=0.1)
    columns, single, batches = run_both(monkeypatch, algorithm, task(scale=300.0), max_norm=30.0)
    assert batches
    assert {(dropped.client, dropped.reason) for _, dropped in columns.dropped_clients} == {(17, "norm")}
    assert_same(columns, single)


@needs_native
def test_a_client_that_diverges_is_dropped_and_the_others_count(monkeypatch) -> None:
    algorithm = hansa.presets.fedavg(participation=1.0, steps=3, batch_size=2, local_lr=0.1)
    columns, single, _ = run_both(monkeypatch, algorithm, task(scale=1e38))
    assert {(dropped.client, dropped.reason) for _, dropped in columns.dropped_clients} == {(17, "non-finite")}
    assert_same(columns, single)


@needs_native
@pytest.mark.parametrize(
    "algorithm",
    [
        hansa.presets.scaffold(participation=0.5, steps=2, batch_size=2, local_lr=0.1),
        hansa.presets.fedavg(participation=0.5, steps=2, batch_size=2, local_lr=0.1, local_momentum=0.9),
        hansa.presets.fedcams(server_lr=0.3, participation=0.5, steps=2, batch_size=2, local_lr=0.1),
    ],
    ids=["scaffold", "momentum", "fedcams"],
)
def test_methods_with_memory_momentum_or_compression_keep_single_orders(monkeypatch, algorithm) -> None:
    columns, single, batches = run_both(monkeypatch, algorithm, task())
    assert not batches
    assert_same(columns, single)


def some_orders() -> OrderColumns:
    made = task()
    run = Run(hansa.presets.fedavg(participation=1.0, steps=2, batch_size=2, local_lr=0.1), made)
    opened = driver.open_paced_round(run.algorithm, run.state, made.population, run.id, run.key)
    assert isinstance(opened.orders, OrderColumns)
    return opened.orders


def test_orders_are_made_when_they_are_asked_for() -> None:
    orders = some_orders()
    assert [order.clients for order in orders] == [(client,) for client in range(CLIENTS)]
    assert [order.cohort for order in orders[10:13]] == [10, 11, 12]
    assert orders[-1].clients == orders[CLIENTS - 1].reporters == (CLIENTS - 1,)
    assert [order.cohort for order in orders[::-2]] == list(range(CLIENTS - 1, 0, -2))
    assert orders.by_client()[7].work == orders.works[7]
    with pytest.raises(IndexError):
        orders[CLIENTS]


def test_columns_that_are_not_next_are_taken_apart() -> None:
    orders = some_orders()
    first, second = (
        ReportColumns(part, torch.zeros(len(part), 3), [0.0] * len(part))
        for part in (orders[:10], orders[10:15])
        if isinstance(part, OrderColumns)
    )
    assert list(in_cohort_order([first, second], orders)) == [first, second]
    taken_apart = list(in_cohort_order([second, first], orders))
    assert taken_apart[0] is first
    assert [report.cohort for report in taken_apart[1:] if isinstance(report, Report)] == [10, 11, 12, 13, 14]


@needs_native
def test_columns_of_clients_that_were_heard_are_refused_as_duplicates() -> None:
    made = task()
    run = Run(hansa.presets.fedavg(participation=1.0, steps=2, batch_size=2, local_lr=0.1), made)
    opened = driver.open_paced_round(run.algorithm, run.state, made.population, run.id, run.key)
    orders = opened.orders
    assert isinstance(orders, OrderColumns)
    dim = run.params.numel()

    def closed(*parts: slice, repeated: tuple[int, ...] = ()) -> Any:
        aggregation = RoundAggregation(run.algorithm, opened.state, orders, made.population, repeated=repeated)
        for part in parts:
            some = orders[part]
            assert isinstance(some, OrderColumns)
            aggregation.add(ReportColumns(some, torch.ones(len(some), dim), [0.0] * len(some)))
        return aggregation.close()

    once = closed(slice(0, 10), slice(10, 15))
    again = closed(slice(0, 10), slice(5, 15))
    assert once.outcome.dropped == ()
    assert {(lost.client, lost.reason) for lost in again.outcome.dropped} == {(c, "duplicate") for c in range(5, 10)}
    assert torch.equal(once.state.vectors["model"], again.state.vectors["model"])
    several = closed(slice(0, 10), repeated=(3,))
    assert [(lost.client, lost.reason) for lost in several.outcome.dropped] == [(3, "duplicate")]
