"""The event queue of asynchronous rounds: jobs in flight, ordered by their arrival on the virtual clock.

The queue is a plain tree, part of the server's state. `collect_arrivals` is a pure function of it: it takes the next
arrivals and starts jobs in the slots that become free. Only the jobs in flight are stored, never the idle clients.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import State
from hansa.local.work import Work
from hansa.pace.profiles import Device, Profile, device_table, devices

_MIN_TRIES = 64
"""Candidates that are tried at least for a free slot before it stays empty until the next event."""


_MAX_OLDEST = 64
"""Server steps for which the oldest version in flight is kept; a site keeps the memory that older ones need."""


class TimedJob(NamedTuple):
    """A client's job on the virtual clock. Jobs sort by arrival, and at the same instant by client."""

    arrival: float
    client: int
    version: int
    start: float
    download: float
    compute: float
    upload: float
    steps: int = 0
    batch_size: int = 0

    @property
    def seconds(self) -> float:
        """The seconds that the client spends on it."""
        return self.arrival - self.start


class Arrivals(NamedTuple):
    """What happened until a server step: the jobs that it uses, those refused, and the queue afterwards.

    ``occupied`` is the integral of the number of jobs in flight over the time of the step.
    """

    jobs: tuple[TimedJob, ...]
    refused: tuple[TimedJob, ...]
    begin: float
    end: float
    occupied: float
    queue: State


StartJob = Callable[[int, float], TimedJob]
"""Returns the job of a client that starts at a time with the newest version."""
Select = Callable[[int], list[int]]
"""Returns the candidates of a wave, in the order in which they get slots."""
FindDevice = Callable[[int], Device]
Wait = Callable[[], tuple[int, float]]
"""Waits for the next arrival of jobs on real machines, and returns its client and time."""
FindGroup = Callable[[int], Hashable]
"""Returns the group of a client; a group has one job at a time."""


def empty_queue(concurrency: int) -> State:
    """Return the queue before the first step: all slots are free."""
    return {"now": 0.0, "vacant": concurrency, "wave": 0, "candidates": [], "jobs": [], "oldest": []}


def collect_arrivals(
    queue: State,
    version: int,
    *,
    size: int,
    max_staleness: int | None,
    population: int,
    select: Select,
    device: FindDevice,
    start: StartJob,
    wait: Wait | None = None,
    group: FindGroup | None = None,
) -> Arrivals:
    """Return the next ``size`` arrivals, after starting jobs in the slots that became free before them.

    Slots that become free at an instant are filled after all arrivals of that instant: a server step at that instant
    comes first, so that the new jobs start from its version. A client is idle if it has no job in flight and none that
    arrived since the last server step.

    Args:
        queue: The queue after the last step.
        version: The newest version, the number of server steps so far.
        size: Arrivals to collect.
        max_staleness: Jobs of older versions are refused.
        population: Number of clients.
        select: The sampler, by wave.
        device: The device of a client.
        start: Makes the job of a client.
        wait: Waits for arrivals of real machines, whose times are not known before.
        group: Clients of a group, such as a site, train one after the other.
    """
    heap: list[list[float | int]] = list(queue["jobs"])
    slots = _Slots(queue, heap, population, select, device, group)
    jobs: list[TimedJob] = []
    refused: list[TimedJob] = []
    now = begin = float(queue["now"])
    occupied = 0.0
    while len(jobs) < size:
        if slots.vacant and (not heap or heap[0][0] > now):
            for client, start_time in slots.fill(now):
                heapq.heappush(heap, list(start(client, start_time)))
            if heap and heap[0][0] <= now:  # a job that takes no time
                continue
        if not heap:
            raise HansaError(
                f"buffered(size={size}): the clock stands still at {now:g} s: {len(jobs)} of {size} updates have "
                f"arrived, no client is at work, and the sampler selects no idle client. Use a smaller size, or a "
                "sampler that selects more clients.",
                component="buffered", argument="size", value=size,
            )  # fmt: skip
        job = TimedJob._make(heapq.heappop(heap)) if wait is None else _take_arrival(heap, now, *wait())
        slots.release(job.client)
        occupied += (len(heap) + 1) * (job.arrival - now)
        now = job.arrival
        slots.vacant += 1
        stale = max_staleness is not None and version - job.version > max_staleness
        (refused if stale else jobs).append(job)
    at_start = min((int(entry[2]) for entry in queue["jobs"]), default=version)
    new_queue = {
        "now": now, "vacant": slots.vacant, "wave": slots.wave, "candidates": slots.candidates, "jobs": heap,
        "oldest": [*queue["oldest"], [version, at_start]][-_MAX_OLDEST:],
    }  # fmt: skip
    return Arrivals(tuple(jobs), tuple(refused), begin, now, occupied, new_queue)


def _take_arrival(heap: list[list[float | int]], now: float, client: int, time: float) -> TimedJob:
    """Take the job of a real machine off the queue; arrivals are at different times."""
    index = next(index for index, entry in enumerate(heap) if entry[1] == client)
    job = TimedJob._make(heap.pop(index))
    heapq.heapify(heap)
    arrival = max(time, math.nextafter(now, math.inf))
    return job._replace(arrival=arrival, compute=arrival - job.start)


def oldest_version(queue: State, step: int) -> int:
    """Return the oldest version from which a job may have started that arrived in this server step or later.

    Sites keep the memory of clients from this version on, so that the server can resume from the step.

    >>> oldest_version({"oldest": [[3, 1], [4, 3]]}, 4), oldest_version({"oldest": [[3, 1], [4, 3]]}, 2)
    (3, 0)
    >>> oldest_version({}, 4)
    4
    """
    if "oldest" not in queue:
        return step
    return max((int(version) for newest, version in queue["oldest"] if newest <= step), default=0)


def versions_in_flight(queue: State) -> set[int]:
    """Return the versions that jobs in flight started from."""
    return {int(entry[2]) for entry in queue["jobs"]}


class _Slots:
    """The free slots and the candidates for them. The population is never walked."""

    def __init__(
        self,
        queue: State,
        heap: list[list[float | int]],
        population: int,
        select: Select,
        device: FindDevice,
        group: FindGroup | None,
    ) -> None:
        self.vacant, self.wave = int(queue["vacant"]), int(queue["wave"])
        self.candidates = list(queue["candidates"])
        self._busy = {int(entry[1]) for entry in heap}  # also those that arrived since the last step
        self._population, self._select, self._device, self._group = population, select, device, group
        self._busy_groups = set() if group is None else {group(client) for client in self._busy}

    def fill(self, now: float) -> Iterator[tuple[int, float]]:
        """Yield clients for the free slots, and the time at which each starts."""
        while self.vacant:
            candidate = self._next_idle(now)
            if candidate is None:
                return
            self._busy.add(candidate[0])
            if self._group is not None:
                self._busy_groups.add(self._group(candidate[0]))
            self.vacant -= 1
            yield candidate

    def release(self, client: int) -> None:
        """Free the group of a client whose job has arrived; the client itself rests until the server has stepped."""
        if self._group is not None:
            self._busy_groups.discard(self._group(client))

    def _next_idle(self, now: float) -> tuple[int, float] | None:
        """Return the next idle candidate that is available; of many that are not, the one that is available first."""
        idle = self._population - len(self._busy)
        if idle <= 0:
            return None
        tries = max(_MIN_TRIES, 8 * (self._population // idle))
        later: tuple[float, int, int] | None = None
        waiting = 0
        while tries and waiting < _MIN_TRIES:
            if not self.candidates:
                self.candidates = self._select(self.wave)
                self.candidates.reverse()
                self.wave += 1
                if not self.candidates:
                    break
            client = self.candidates.pop()
            if client in self._busy or (self._group is not None and self._group(client) in self._busy_groups):
                tries -= 1
                continue
            opens = self._device(client).next_start(now)
            if opens <= now:
                return client, now
            waiting += 1
            if later is None or opens < later[0]:
                later = opens, waiting, client
        if later is None or not math.isfinite(later[0]):
            return None
        return later[2], later[0]


_MAX_DEVICES = 1 << 16
"""Devices that are kept; they are a function of the client, so that others are computed again."""


class VirtualClock:
    """The time of jobs on the devices of a profile.

    Args:
        profile: The devices; None is one second per local step and no time for messages.
        samples: Number of samples of each client.
        key: The run's key.
    """

    def __init__(self, profile: Profile | None, samples: Sequence[int], key: Key) -> None:
        self.profile: Profile = devices() if profile is None else profile
        self._samples, self._key = samples, key
        self.device: FindDevice = lru_cache(_MAX_DEVICES)(self._device)
        self.group: FindGroup | None = None  # clients of a group train one after the other
        if isinstance(self.profile, device_table):
            self.profile.check(len(samples))

    def _device(self, client: int) -> Device:
        """Return the device of a client."""
        return self.profile.device(client, self._samples[client], self._key)

    def job(self, client: int, version: int, start: float, work: Work, *, down_bytes: int, up_bytes: int) -> TimedJob:
        """Return the job of a client that starts at a time."""
        device, factor = self.device(client), 1.0
        if device.jitter:
            normal = self._key.child("device", "jitter", version, client).numpy().standard_normal()
            factor = math.exp(device.jitter * float(normal))
        seconds = device.seconds(work, down_bytes=down_bytes, up_bytes=up_bytes, factor=factor)
        download, compute, upload = seconds
        arrival = start + (download + compute + upload)
        return TimedJob(arrival, client, version, start, download, compute, upload, work.steps, work.batch_size)


class RecordedClock(VirtualClock):
    """The clock of a replay: jobs arrive when they did in the recorded run, and others never.

    Args:
        arrivals: The time of arrival of each job, by client and version.
        group: The site of a client.
        samples: Number of samples of each client.
        key: The run's key.
    """

    def __init__(
        self, arrivals: Mapping[tuple[int, int], float], group: FindGroup, samples: Sequence[int], key: Key
    ) -> None:
        super().__init__(None, samples, key)
        self._arrivals, self.group = arrivals, group

    def job(self, client: int, version: int, start: float, work: Work, *, down_bytes: int, up_bytes: int) -> TimedJob:
        arrival = self._arrivals.get((client, version), math.inf)
        return TimedJob(arrival, client, version, start, 0.0, arrival - start, 0.0, work.steps, work.batch_size)


class RoundTiming(NamedTuple):
    """A round on the virtual clock: its jobs by client, whether their updates counted or not.

    ``slots`` is the number of clients that could be at work at a time, ``occupied`` the integral of those that were.
    ``versions`` and ``version_bytes`` are those kept for jobs in flight after the round.
    """

    begin: float
    end: float
    jobs: Mapping[int, TimedJob]
    slots: int
    occupied: float
    versions: int = 0
    version_bytes: int = 0
    real: bool = False
    """Whether the times are those of real machines; their arrivals are then part of the run's record."""

    @property
    def utilisation(self) -> float:
        """The share of the slots' time in which a client was at work; NaN for a round that took no time."""
        return self.occupied / (self.slots * (self.end - self.begin)) if self.end > self.begin else math.nan

    def wasted_seconds(self, admitted: Sequence[int]) -> float:
        """Return the seconds that clients spent on jobs whose updates did not count."""
        accepted = set(admitted)
        lost = (job for client, job in sorted(self.jobs.items()) if client not in accepted)
        return math.fsum(max(0.0, min(job.arrival, self.end) - job.start) for job in lost)
