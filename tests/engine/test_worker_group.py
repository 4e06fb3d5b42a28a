"""How work is shared out, and what happens when workers die: played by this process, on a clock of its own."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hansa
from engine import problems
from hansa import presets
from hansa.engine.pool import Pool
from hansa.engine.requests import Job, JobDone, WorkerExited, WorkerStartError
from hansa.engine.serial import Serial
from hansa.local.work import Work
from hansa.rounds.messages import Report, WorkOrder


@dataclass(eq=False)
class SimulatedWorker:
    ready: bool = False
    jobs: deque[Job] = field(default_factory=deque)


class SimulatedGroup:
    """A group in simulated time: a job takes its cost times ``duration(worker)``; ``crashes(job)`` kills the worker."""

    jobs_per_worker = 2

    def __init__(
        self, duration=lambda worker: 1.0, crashes=lambda job: False, starts=lambda count: True, act=None
    ) -> None:
        self.workers, self.spawned, self.clock = [], 0, 0.0
        self.duration, self.crashes, self.starts = duration, crashes, starts
        self.act = act or (lambda order: Report.without(order, "none", ""))
        self.events: list = []
        self.submitted: list[int] = []

    def set_up(self, *parts) -> None:
        self.algorithm, self.task, self.dtype, *_ = parts

    def spawn(self) -> None:
        worker = SimulatedWorker()
        worker.number = self.spawned
        self.workers.append(worker)
        event = worker if self.starts(self.spawned) else WorkerExited(worker, "exit code 1")
        heapq.heappush(self.events, (self.clock, self.spawned, event))
        self.spawned += 1

    def stop(self, worker) -> None:
        self.workers.remove(worker)

    def publish(self, vectors) -> None: ...

    def divide(self, order, task, workers) -> list[WorkOrder]:
        return [order]

    def close(self) -> None: ...

    reset = close

    def submit(self, worker, job) -> None:
        assert worker.ready
        assert len(worker.jobs) < 2
        worker.jobs.append(job)
        self.submitted.append(job.request.clients[0])
        if len(worker.jobs) == 1:
            self._start_job(worker, job)

    def _start_job(self, worker, job) -> None:
        event = WorkerExited(worker, "killed") if self.crashes(job) else JobDone(worker, job, None)
        heapq.heappush(self.events, (self.clock + job.cost * self.duration(worker.number), 1000 + worker.number, event))

    def wait(self) -> list:
        assert self.events, "the pool waits for nothing"
        self.clock, _, event = heapq.heappop(self.events)
        if isinstance(event, SimulatedWorker):
            event.ready = True
            return []
        if isinstance(event, JobDone):
            event = event._replace(answer=self.act(event.job.request))
            if len(event.worker.jobs) == 2:
                self._start_job(event.worker, event.worker.jobs[1])
        return [event]


def orders(costs: list[int]) -> list[WorkOrder]:
    return [WorkOrder("run", 0, (i,), (Work(cost, 1),), b"", {}, hansa.Key(0)) for i, cost in enumerate(costs)]


def pool(group: SimulatedGroup, workers: int) -> Pool:
    return Pool(presets.fedavg(), problems.bowls(), torch.float64, problems.CPU, workers=workers, group=group)


def makespan(costs: list[int], workers: int) -> float:
    group = SimulatedGroup()
    reports = list(pool(group, workers).run(orders(costs)))
    assert sorted(report.dropped[0].client for report in reports) == list(range(len(costs)))
    return group.clock


def test_the_longest_goes_first():
    group = SimulatedGroup()
    list(pool(group, 1).run(orders([3, 9, 1, 7])))
    assert group.submitted == [1, 3, 0, 2]


def test_nothing_queues_behind_a_long_one():
    assert makespan([100, 10, 9, 8, 7, 1], workers=2) == 100
    assert makespan([50, 50, 50, 50], workers=2) == 100


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 5))
def test_the_time_is_within_the_bound_of_greedy_scheduling(costs, workers):
    """Graham 1969: a list schedule takes at most sum/m + (1 - 1/m) max, which is at most (2 - 1/m) the best."""
    assert makespan(costs, workers) <= sum(costs) / workers + (1 - 1 / workers) * max(costs) + 1e-9


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_any_speed_of_any_worker_and_any_deaths_leave_the_result_as_it_is(seed, workers):
    draw = np.random.default_rng(seed)
    speeds = draw.uniform(0.1, 10, size=100)
    killed: set[int] = set()

    def crashes(job: Job) -> bool:
        """Each cohort kills at most one worker."""
        dies = job.request.clients[0] not in killed and draw.random() < 0.3
        killed.update({job.request.clients[0]} if dies else ())
        return dies

    algorithm, task = presets.scaffold(local_lr=0.05, steps=3), problems.bowls()
    serial = Serial(algorithm, task, torch.float64, problems.CPU)
    group = SimulatedGroup(lambda worker: speeds[worker], crashes, act=lambda order: next(serial.run([order])))
    work = [
        replace(order, works=(Work(int(draw.integers(1, 9)), 1),)) for order in problems.first_orders(algorithm, task)
    ]
    expected = {report.clients[0]: report for report in Serial(algorithm, task, torch.float64, problems.CPU).run(work)}
    found = list(Pool(algorithm, task, torch.float64, problems.CPU, workers=workers, group=group).run(work))
    assert len(found) == len(expected)
    assert all(problems.reports_equal(report, expected[report.clients[0]]) for report in found)
    assert group.spawned == workers + len(killed)


def test_work_that_kills_every_worker_is_an_error_after_three():
    group = SimulatedGroup(crashes=lambda job: job.request.clients[0] == 2)
    with pytest.raises(hansa.HansaError, match=r"round 0, client 2: 3 workers in a row died executing it \(killed\)"):
        list(pool(group, 2).run(orders([5, 4, 9, 3])))
    assert group.spawned == 5


def test_only_the_work_a_worker_was_at_is_blamed_for_its_death():
    """The next job, given in advance, dies with its worker four times but never of itself."""
    deaths = {0: 2, 1: 2}

    def crashes(job: Job) -> bool:
        deaths[job.request.clients[0]] = deaths.get(job.request.clients[0], 0) - 1
        return deaths[job.request.clients[0]] >= 0

    group = SimulatedGroup(crashes=crashes)
    assert len(list(pool(group, 1).run(orders([9, 9, 9, 9])))) == 4
    assert group.spawned == 5


def test_workers_that_never_start_job_are_an_error():
    group = SimulatedGroup(starts=lambda count: False)
    with pytest.raises(WorkerStartError, match="could not start: exit code 1"):
        pool(group, 2).wait_until_ready()


def test_one_worker_that_does_not_start_job_is_replaced():
    group = SimulatedGroup(starts=lambda count: count != 0)
    assert len(list(pool(group, 2).run(orders([1, 2, 3])))) == 3
    assert group.spawned == 3
