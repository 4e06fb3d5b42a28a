"""The virtual clock: the time of clients' jobs, and what a round reports of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hansa.core.keys import Key
from hansa.local.work import Work
from hansa.pace.events import FindGroup, TimedJob
from hansa.pace.profiles import Device, Profile, device_table, devices

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
        self._devices: dict[int, Device] = {}
        self.group: FindGroup | None = None  # clients of a group train one after the other
        if isinstance(self.profile, device_table):
            self.profile.check(len(samples))

    def device(self, client: int) -> Device:
        """Return the device of a client."""
        known = self._devices.get(client)
        if known is None:
            if len(self._devices) >= _MAX_DEVICES:
                self._devices.clear()
            known = self._devices[client] = self.profile.device(client, self._samples[client], self._key)
        return known

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
