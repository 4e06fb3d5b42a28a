"""A batch of clients gives the bits and records of one client after the other, whatever the size of the batch."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from contracts.small import bowls
from golden import problems
from golden.cases import CASES
from hansa import data
from hansa.core import native
from hansa.engine import Serial
from hansa.engine.requests import BatchSizer
from hansa.rounds import RoundAggregation, in_client_order
from hansa.rounds.messages import DroppedClient, Report, WorkOrder
from hansa.runs import driver
from hansa.runs.driver import Run
from same_runs import assert_same_run

needs_native = pytest.mark.skipif(not native.available(), reason=f"kernels: {native.unavailable_reason()}")


@needs_native
@pytest.mark.parametrize(
    "name",
    [
        *("many: fedavg / many", "aggregate: mean by samples / mlp", "fedprox / mlp", "fedams / mlp", "scaffold / mlp"),
        *("momentum / mlp", "fedcams / mlp", "fedaware / mlp", "fedavg / cnn", "fedavg / dropping"),
        *("fedavg, bad updates / mlp", "overflow: fedavg / spoilt"),
    ],
)
def test_a_batch_gives_the_bits_and_records_of_single_clients(monkeypatch, name) -> None:
    """Golden cases, of which the last two refuse updates."""
    case, sizes, real = CASES[name], list[int](), RoundAggregation.add
    task: Any = problems.task(case.task)
    options: Any = case.options(task) if callable(case.options) else case.options

    def counting(self: RoundAggregation, report: Report) -> None:
        sizes.append(len(report.clients))
        real(self, report)

    monkeypatch.setattr(RoundAggregation, "add", counting)
    runs = []
    for most in (16, 1):
        sizes.clear()
        monkeypatch.setattr(BatchSizer, "size", lambda *_, most=most: most)
        runs.append(hansa.run(case.method(), task, rounds=4, workers=1, keep_params=True, **options))
        assert (max(sizes) > 1) == (most > 1)
    assert_same_run(*runs)


@needs_native
def test_a_round_of_many_clients_leaves_no_objects_to_the_garbage_collector() -> None:
    """A few objects per client would start a collection of all objects every few rounds, as long as a round."""
    clients, collections = 3000, list[int]()
    index = torch.arange(4 * clients) % 100
    draw = hansa.Key(3).numpy()
    inputs = torch.from_numpy(draw.standard_normal((100, 6), dtype="float32"))
    offsets = torch.arange(clients + 1) * 4
    held = data.FederatedData(inputs, torch.arange(100) % 3, index, offsets, classes=3, name="many")
    run = Run(
        hansa.presets.fedavg(participation=1.0, steps=2, batch_size=2, local_lr=0.1),
        hansa.Task(lambda: nn.Linear(6, 3), cross_entropy, held),
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


def opened() -> tuple[Run, WorkOrder]:
    run = Run(hansa.presets.fedavg(participation=1.0, steps=2, local_lr=0.1), bowls(40, dtype=torch.float32))
    (order,) = driver.open_paced_round(run.algorithm, run.state, run.task.population, run.id, run.key).orders
    return run, order


def report_of(order: WorkOrder, dim: int = 3) -> Report:
    count = len(order.clients)
    rows = {"model": torch.ones(count, dim)}
    return Report(order.run, order.round, order.base, None, order.clients, rows, [0.0] * count)


def test_reports_come_in_the_order_of_the_clients_and_are_divided_where_others_come_between():
    _, order = opened()
    first, second = (report_of(order.part(part)) for part in (slice(0, 10), slice(10, 40)))
    assert list(in_client_order([second, first], [order])) == [first, second]
    even, odd = (report_of(order.part(slice(start, 40, 2))) for start in (0, 1))
    found = list(in_client_order([odd, even], [order]))
    assert [client for report in found for client in report.clients] == list(range(40))
    stranger = report_of(order.part([0]))
    last = list(in_client_order([stranger, first, second], [order]))
    assert last[0] is stranger
    assert {id(report) for report in last} == {id(stranger), id(first), id(second)}


def test_clients_that_drop_out_do_not_hold_up_those_that_follow():
    _, order = opened()
    gone = Report(order.run, order.round, order.base, dropped=(DroppedClient(1, "lost"), DroppedClient(3, "lost")))
    rest = [report_of(order.part([client])) for client in (0, 2)]
    found = in_client_order(iter([gone, *rest, report_of(order.part(slice(4, 40)))]), [order])
    assert [list(next(found).clients) for _ in range(3)] == [[0], [2], list(range(4, 40))]
    missing = in_client_order(iter([report_of(order.part([client])) for client in (0, 2)]), [order], {1})
    assert [list(next(missing).clients) for _ in range(2)] == [[0], [2]]


@needs_native
def test_clients_that_were_heard_are_refused_as_duplicates() -> None:
    run, order = opened()
    dim = run.params.numel()

    def closed(*parts: slice) -> Any:
        aggregation = RoundAggregation(run.algorithm, run.state, [order], run.task.population)
        for part in parts:
            aggregation.add(report_of(order.part(part), dim))
        return aggregation.close()

    once = closed(slice(0, 10), slice(10, 15))
    again = closed(slice(0, 10), slice(5, 15))
    assert once.outcome.dropped == ()
    assert {(lost.client, lost.reason) for lost in again.outcome.dropped} == {(c, "duplicate") for c in range(5, 10)}
    assert torch.equal(once.state.vectors["model"], again.state.vectors["model"])


@needs_native
def test_an_error_names_the_client_that_it_came_of(monkeypatch) -> None:
    monkeypatch.setattr(BatchSizer, "size", lambda *_: 4)
    held = copy.deepcopy(problems.federated((20,)))
    held.index[-1] = 10_000
    spoilt = hansa.Task(problems.Mlp, cross_entropy, held)
    with pytest.raises(hansa.HansaError, match=r"client 13: .*row 10000 is out of range"):
        Run(hansa.presets.fedavg(participation=1.0, steps=2), spoilt, evaluate_every=0, engine=Serial).advance(1)


@needs_native
def test_what_is_not_native_or_takes_long_is_done_alone() -> None:
    _, order = opened()
    fast, eager = (problems.task(name).trainer(torch.float32, torch.device("cpu")) for name in ("mlp", "mlp, eager"))
    for trainer, seconds, expected in ((eager, 1e-6, 1), (fast, 1e-6, 2048), (fast, 0.01, 5), (fast, 1.0, 1)):
        sizer = BatchSizer(trainer)
        assert sizer.size(order) == 1  # as long as nothing is known
        sizer.record([order.part(slice(0, 4))], 4 * seconds)
        assert sizer.size(order) == expected
