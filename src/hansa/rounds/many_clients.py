"""Many clients as columns: orders and reports of clients that train alone, without objects for each of them.

For a tiny model the order, report, packet and update of a client take ten times as long as its steps. Here a batch of
clients is one native call, one matrix of updates and a few passes over columns. Results are those of single orders and
reports, bit for bit; whatever is not plain (a refused update, a failed step) is done again with single objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, overload

from hansa.aggregate import mean
from hansa.algorithm import Algorithm
from hansa.compress import Packet, direct
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import MODEL, Vector
from hansa.local.solvers import prox, sgd
from hansa.local.trainer import BaseTrainer, ClientJob, Trainer
from hansa.local.work import Work
from hansa.rounds.messages import Broadcast, Report, Upload, WorkOrder


@dataclass(frozen=True, slots=True, eq=False)
class OrderColumns(Sequence[WorkOrder]):
    """The orders of clients that train alone. A single order is made when it is asked for.

    ``first`` is the cohort of the first client, the others follow. With ``report_columns`` the engine may answer with
    `ReportColumns`.
    """

    run: str
    round: int
    base: bytes
    broadcasts: Mapping[str, Broadcast]
    key: Key
    clients: tuple[int, ...]
    works: tuple[Work, ...]
    first: int = 0
    report_columns: bool = False

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, place: int) -> WorkOrder: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[WorkOrder]: ...
    def __getitem__(self, place: int | slice) -> WorkOrder | Sequence[WorkOrder]:
        if isinstance(place, slice):
            start, _, step = place.indices(len(self))
            if step != 1:
                return tuple(self)[place]
            return replace(self, clients=self.clients[place], works=self.works[place], first=self.first + start)
        at = range(len(self))[place]
        only = (self.clients[at],)
        return WorkOrder(
            self.run, self.round, self.first + at, only, only, self.works[at], self.base, self.broadcasts, self.key
        )

    def __iter__(self) -> Iterator[WorkOrder]:
        return (self[at] for at in range(len(self)))

    @property
    def cohorts(self) -> range:
        """The cohort of each client."""
        return range(self.first, self.first + len(self.clients))

    def with_report_columns(self) -> OrderColumns:
        """Return the orders, to be answered with columns."""
        return replace(self, report_columns=True)

    def by_client(self) -> OrdersByClient:
        """Return the orders by client."""
        return OrdersByClient(self)


class OrdersByClient(Mapping[int, WorkOrder]):
    """The order of each client, made when it is asked for."""

    def __init__(self, orders: OrderColumns) -> None:
        self._orders = orders

    @cached_property
    def _places(self) -> dict[int, int]:
        return {client: at for at, client in enumerate(self._orders.clients)}

    def __getitem__(self, client: int) -> WorkOrder:
        return self._orders[self._places[client]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._orders.clients)

    def __len__(self) -> int:
        return len(self._orders.clients)


@dataclass(frozen=True, slots=True, eq=False)
class ReportColumns:
    """The reports of a batch of orders: a row of ``changes`` and a loss for each client. Changes are finite."""

    orders: OrderColumns
    changes: Vector
    losses: list[float]

    def reports(self) -> Iterator[Report]:
        """Yield the reports of the single clients."""
        orders = self.orders
        for at, client in enumerate(orders.clients):
            packets = {MODEL: Packet.of(self.changes[at])}
            upload = Upload(orders.run, orders.round, orders.base, client, packets, self.losses[at])
            yield Report(orders.first + at, (upload,), {client: {}})


AnyReport: TypeAlias = Report | ReportColumns


def single_reports(reports: Iterable[AnyReport]) -> Iterator[Report]:
    """Yield the reports one by one."""
    for report in reports:
        if isinstance(report, ReportColumns):
            yield from report.reports()
        else:
            yield report


def report_as_columns(algorithm: Algorithm, orders: Sequence[WorkOrder]) -> Sequence[WorkOrder]:
    """Return the orders, to be answered with columns if the method permits it.

    The server takes a mean of uncompressed updates, and clients keep no memory. The first round is left to single
    objects, which warn of badly scaled models.
    """
    if isinstance(orders, OrderColumns) and orders.round > 0 and _is_plain(algorithm):
        return orders.with_report_columns()
    return orders


def _is_plain(algorithm: Algorithm) -> bool:
    phase, channel = algorithm.local, algorithm.channels[MODEL]
    return (
        len(algorithm.channels) == 1
        and type(channel.uplink) is direct
        and type(channel.aggregate) is mean
        and type(phase.solver) in (sgd, prox)
        and phase.mixing is None
        and phase.private_blocks is None
        and phase.optimizer is None
        and phase.optimizer_state == "fresh"
        and not phase.momentum
        and phase.division.is_default
        and not algorithm.pace.asynchronous
        and not algorithm.serverless
    )


def train_columns(trainer: Trainer, orders: OrderColumns, job: ClientJob) -> ReportColumns | None:
    """Train the clients like the first one, whose job is given; None if the trainer has no fast path for them, or a
    client's model becomes non-finite."""
    parent = orders.key.child("local", orders.round)
    trained = with_defaults(trainer, BaseTrainer).train_rows(job, orders.clients, orders.works, parent)
    return None if trained is None else ReportColumns(orders, *trained)


def in_cohort_order(reports: Iterable[AnyReport], orders: Sequence[WorkOrder]) -> Iterator[AnyReport]:
    """Yield reports in cohort order as soon as possible; reports that match no order come last.

    Columns stay whole if they are of the cohorts that come next in order columns.
    """
    waiting = orders.cohorts if isinstance(orders, OrderColumns) else [order.cohort for order in orders]
    early: dict[int, Report] = {}
    late: list[Report] = []
    at = 0
    expected_cohorts = set(waiting)
    for columns_or_report in reports:
        if isinstance(columns_or_report, ReportColumns):
            cohorts = columns_or_report.orders.cohorts
            if waiting[at : at + len(cohorts)] == cohorts:
                expected_cohorts.difference_update(cohorts)
                at += len(cohorts)
                yield columns_or_report
                continue
        for report in single_reports([columns_or_report]):
            if report.cohort not in expected_cohorts or report.cohort in early:
                late.append(report)
                continue
            expected_cohorts.discard(report.cohort)
            early[report.cohort] = report
        while at < len(waiting) and waiting[at] in early:
            yield early.pop(waiting[at])
            at += 1
    for cohort in waiting[at:]:
        if cohort in early:
            yield early.pop(cohort)
    yield from late
