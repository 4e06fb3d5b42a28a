"""How work is shared out, and what happens when workers die: played by this process, on a clock of its own."""

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
from engine import laboratory as lab
from hansa import presets
from hansa.engine.pool import Pool
from hansa.engine.serial import Serial
from hansa.engine.worker_group import Answered, Gone, Job, Ready, StartError
from hansa.local.work import Work
from hansa.rounds.messages import Report, WorkOrder


@dataclass(eq=False)
class Actor:
    ready: bool = False
    jobs: deque[Job] = field(default_factory=deque)


class Stage:
    """A crew in simulated time: a job takes its cost times ``pace(worker)``, and ``fate`` may kill whoever does it."""

    ahead = 2

    def __init__(self, pace=lambda worker: 1.0, fate=lambda job: False, born=lambda count: True, act=None) -> None:
        self.members, self.hired, self.clock = [], 0, 0.0
        self.pace, self.fate, self.born = pace, fate, born
        self.act = act or (lambda order: Report(order.cohort))
        self.events: list = []
        self.given: list[int] = []
        self.begun: dict[Actor, float] = {}

    def set_up(self, *parts) -> None:
        self.algorithm, self.task, self.dtype, *_ = parts

    def hire(self) -> None:
        actor = Actor()
        actor.number = self.hired
        self.members.append(actor)
        event = Ready(actor) if self.born(self.hired) else Gone(actor, "exit code 1")
        heapq.heappush(self.events, (self.clock, self.hired, event))
        self.hired += 1

    def dismiss(self, actor) -> None:
        self.members.remove(actor)

    def publish(self, kind, vectors) -> None: ...

    def close(self) -> None: ...

    def give(self, actor, job) -> None:
        assert actor.ready
        assert len(actor.jobs) < 2
        actor.jobs.append(job)
        self.given.append(job.request.cohort)
        if len(actor.jobs) == 1:
            self._begin(actor)

    def _begin(self, actor) -> None:
        job = actor.jobs[0]
        event = Gone(actor, "killed") if self.fate(job) else Answered(actor, job)
        heapq.heappush(self.events, (self.clock + job.cost * self.pace(actor.number), 1000 + actor.number, event))

    def wait(self, timeout=None) -> list:
        if not self.events:
            assert timeout == 0, "the pool waits for nothing"
            return []
        if timeout == 0 and self.events[0][0] > self.clock:
            return []
        self.clock, _, event = heapq.heappop(self.events)
        if isinstance(event, Ready):
            event.worker.ready = True
        if isinstance(event, Answered):
            event = Answered(event.worker, self.act(event.answer.request))
            if len(event.worker.jobs) == 2:
                waiting = event.worker.jobs[1]
                fatal = Gone(event.worker, "killed") if self.fate(waiting) else Answered(event.worker, waiting)
                at = self.clock + waiting.cost * self.pace(event.worker.number)
                heapq.heappush(self.events, (at, 1000 + event.worker.number, fatal))
        return [event]


def orders(costs: list[int]) -> list[WorkOrder]:
    return [WorkOrder("run", 0, i, (i,), (i,), Work(cost, 1), b"", {}, hansa.Key(0)) for i, cost in enumerate(costs)]


def pool(stage: Stage, workers: int) -> Pool:
    return Pool(presets.fedavg(), lab.bowls(), torch.float64, lab.CPU, workers=workers, crew=stage)


def makespan(costs: list[int], workers: int) -> float:
    stage = Stage()
    reports = list(pool(stage, workers).run(orders(costs)))
    assert sorted(report.cohort for report in reports) == list(range(len(costs)))
    return stage.clock


def test_the_longest_goes_first():
    stage = Stage()
    list(pool(stage, 1).run(orders([3, 9, 1, 7])))
    assert stage.given == [1, 3, 0, 2]


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

    def fate(job: Job) -> bool:
        """Each cohort kills at most one worker."""
        dies = job.request.cohort not in killed and draw.random() < 0.3
        killed.update({job.request.cohort} if dies else ())
        return dies

    algorithm, task = presets.scaffold(local_lr=0.05, steps=3), lab.bowls()
    serial = Serial(algorithm, task, torch.float64, lab.CPU)
    stage = Stage(lambda worker: speeds[worker], fate, act=lambda order: next(serial.run([order])))
    work = [replace(order, work=Work(int(draw.integers(1, 9)), 1)) for order in lab.first_orders(algorithm, task)]
    expected = {report.cohort: report for report in Serial(algorithm, task, torch.float64, lab.CPU).run(work)}
    found = list(Pool(algorithm, task, torch.float64, lab.CPU, workers=workers, crew=stage).run(work))
    assert len(found) == len(expected)
    assert all(lab.reports_equal(report, expected[report.cohort]) for report in found)
    assert stage.hired == workers + len(killed)


def test_work_that_kills_every_worker_is_an_error_after_three():
    stage = Stage(fate=lambda job: job.request.cohort == 2)
    with pytest.raises(hansa.HansaError, match=r"round 0, client 2: 3 workers died of it.*\(killed\)"):
        list(pool(stage, 2).run(orders([5, 4, 9, 3])))
    assert stage.hired == 5


def test_only_the_work_a_worker_was_at_is_blamed_for_its_death():
    """The next job, given in advance, dies with its worker four times but never of itself."""
    deaths = {0: 2, 1: 2}

    def fate(job: Job) -> bool:
        deaths[job.request.cohort] = deaths.get(job.request.cohort, 0) - 1
        return deaths[job.request.cohort] >= 0

    stage = Stage(fate=fate)
    assert len(list(pool(stage, 1).run(orders([9, 9, 9, 9])))) == 4
    assert stage.hired == 5


def test_workers_that_never_begin_are_an_error():
    stage = Stage(born=lambda count: False)
    with pytest.raises(StartError, match="could not begin: exit code 1"):
        pool(stage, 2).start()


def test_one_worker_that_does_not_begin_is_replaced():
    stage = Stage(born=lambda count: count != 0)
    assert len(list(pool(stage, 2).run(orders([1, 2, 3])))) == 3
    assert stage.hired == 3
