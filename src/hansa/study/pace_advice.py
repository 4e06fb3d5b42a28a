"""Predict what paces do with given devices: the event loop is simulated exactly, nothing is trained.

The ranking is a rule of thumb, not a theorem: accepted updates per virtual hour, discounted by (1 + staleness)^-1/2
as in FedBuff. Which pace reaches an accuracy first, only a run can tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hansa.aggregate import polynomial
from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, check_integer
from hansa.core.keys import Key
from hansa.core.types import MODEL, Population
from hansa.engine.threads import probe_step
from hansa.pace import Pace, Profile, buffered, deadline, overselect, synchronous
from hansa.pace.clock import VirtualClock
from hansa.presets import fedavg
from hansa.rounds import ServerState
from hansa.rounds.pacing import open_paced_round
from hansa.sample import uniform
from hansa.training import TaskLike

_UPDATES = 40  # per participant: enough for the queue to forget its start


def measured_step_seconds(algorithm: Algorithm, task: TaskLike) -> float:
    """Return the seconds of a local step on this machine, as a unit for device profiles.

    The number differs between machines and from call to call: store it in the profile to make runs reproducible.

    Args:
        algorithm: The method, for its batch size.
        task: The model and the data; the step is that of the largest client.

    >>> import torch
    >>> from hansa.training import quadratic
    >>> measured_step_seconds(fedavg(steps=1), quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))) > 0
    True
    """
    device = torch.device("cpu")
    return probe_step(algorithm, task, task.trainer(task.dtype, device), task.dtype).seconds


@dataclass(frozen=True, slots=True)
class PaceOption:
    """A pace and what it does per virtual hour.

    ``wasted`` is the share of the clients' time that went into updates that were not accepted, ``reached`` the share of
    the selected clients with an accepted update: deadlines and over-selection can exclude slow clients for good.
    ``score`` are the accepted updates per hour, discounted by staleness.
    """

    pace: Pace
    steps_per_hour: float
    updates_per_hour: float
    staleness: float
    staleness_max: int
    utilisation: float
    wasted: float
    reached: float
    score: float


def candidate_paces(participants: int, seconds: Sequence[float] = ()) -> list[Pace]:
    """Return the paces to compare for a number of clients at work.

    Args:
        participants: Clients that train at the same time.
        seconds: Deadlines to consider.

    >>> candidate_paces(10)[:2]
    [synchronous(), overselect(factor=1.3)]
    """
    check_integer("candidate_paces", "participants", participants)
    sizes = sorted({1, max(1, participants // 10), max(1, participants // 5), max(1, participants // 2)})
    paces: list[Pace] = [synchronous(), overselect(1.3)]
    paces += [deadline(limit) for limit in seconds]
    return paces + [buffered(size, participants) for size in sizes]


def rank_paces(
    profile: Profile,
    *,
    clients: int,
    participants: int,
    steps: int,
    parameters: int,
    batch_size: int = 32,
    seed: int = 0,
    paces: Sequence[Pace] | None = None,
) -> list[PaceOption]:
    """Return paces for a profile, best first.

    Args:
        profile: The clients' devices.
        clients: Number of clients.
        participants: Clients that train at the same time.
        steps: Local steps of a job.
        parameters: Parameters of the model, for the time of messages.
        batch_size: Examples per step.
        seed: The seed of the devices.
        paces: The paces to compare; by default several of each kind, with deadlines from the devices' times.

    >>> from hansa.pace import devices
    >>> from hansa.local import zipf
    >>> ranked = rank_paces(devices(step_seconds=zipf(1.7)), clients=50, participants=10, steps=5, parameters=100)
    >>> ranked[-1].pace
    synchronous()
    """
    if participants > clients:
        raise HansaError(f"rank_paces(participants={participants}): expected at most clients={clients}.")
    population, key = Population((batch_size,) * clients), Key(seed)
    clock = VirtualClock(profile, population.samples, key)
    method = fedavg(steps=steps, batch_size=batch_size, sampler=uniform(count=participants))
    model = torch.zeros(parameters)
    if paces is None:
        first = open_paced_round(method, ServerState.start(method, {MODEL: model}, clients), population, "", key, clock)
        assert first.timing is not None
        times = sorted(job.seconds for job in first.timing.jobs.values())
        median = times[len(times) // 2]
        paces = candidate_paces(participants, [1.5 * median, 3 * median] if median > 0 else [])
    updates = participants * _UPDATES
    options = [_simulate(method.with_pace(pace), model, population, key, clock, updates) for pace in paces]
    return sorted(options, key=lambda option: -option.score)


def _simulate(
    algorithm: Algorithm, model: torch.Tensor, population: Population, key: Key, clock: VirtualClock, updates: int
) -> PaceOption:
    algorithm.check(population.count)
    state = ServerState.start(algorithm, {MODEL: model}, population.count)
    ages: list[int] = []
    selected, reached = set[int](), set[int]()
    occupied, wasted, steps, slots, seconds = 0.0, 0.0, 0, 1, 0.0
    while len(ages) < updates:
        opened = open_paced_round(algorithm, state, population, "", key, clock)
        timing = opened.timing
        assert timing is not None
        admitted = [order.clients[0] for order in opened.orders]
        selected.update(timing.jobs)
        reached.update(admitted)
        ages += [state.round - order.round for order in opened.orders]
        occupied, wasted, steps = occupied + timing.occupied, wasted + timing.wasted_seconds(admitted), steps + 1
        slots, seconds = max(slots, timing.slots), timing.end
        state = replace(opened.state, round=state.round + 1)
    hours = seconds / 3600 if seconds > 0 else math.nan
    discount = polynomial(0.5)
    return PaceOption(
        algorithm.pace,
        steps / hours,
        len(ages) / hours,
        math.fsum(ages) / len(ages),
        max(ages),
        occupied / (slots * seconds) if seconds > 0 else math.nan,
        wasted / occupied if occupied else 0.0,
        len(reached) / max(1, len(selected)),
        math.fsum(discount.factor(age) for age in ages) / hours,
    )
