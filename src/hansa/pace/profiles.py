"""Device profiles: how fast clients compute and communicate, and when they are available."""

from __future__ import annotations

import csv
import hashlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from hansa.core.bounds import Checked, bound, rule_or_numbers
from hansa.core.errors import HansaError, argument_error, check_non_negative, check_speed, invalid_argument
from hansa.core.keys import Key
from hansa.core.protocols import check_component
from hansa.local.work import Drawn, Work, drawn_value

MAX_ROWS_BYTES = 1 << 28


class Device(NamedTuple):
    """The speeds of one client's device. Seconds are those of the virtual clock.

    Args:
        step_seconds: Seconds per local step.
        sample_seconds: Seconds per example of a step's batch.
        down_bandwidth: Bytes per second from the server.
        up_bandwidth: Bytes per second to the server.
        latency: Seconds per job that do not depend on sizes.
        on_seconds: Length of the window in which the client can start a job; infinite if it is always available.
        off_seconds: Length of the pause between two windows.
        phase: Seconds that have passed of the client's window at time 0.
        jitter: Sigma of the lognormal factor by which the compute time of a job varies.
        tier: Name of the group of devices, for reports.

    >>> Device(step_seconds=2.0, down_bandwidth=10.0).seconds(Work(5, 8), down_bytes=100, up_bytes=0)
    (10.0, 10.0, 0.0)
    """

    step_seconds: float = 1.0
    sample_seconds: float = 0.0
    down_bandwidth: float = math.inf
    up_bandwidth: float = math.inf
    latency: float = 0.0
    on_seconds: float = math.inf
    off_seconds: float = 0.0
    phase: float = 0.0
    jitter: float = 0.0
    tier: str = ""

    def seconds(self, work: Work, *, down_bytes: int, up_bytes: int, factor: float = 1.0) -> tuple[float, float, float]:
        """Return the seconds of a job's download, with the latency, of its local steps and of its upload.

        Args:
            work: The local work.
            down_bytes: Bytes from the server.
            up_bytes: Bytes to the server.
            factor: The job's jitter.
        """
        compute = work.steps * (self.step_seconds + work.batch_size * self.sample_seconds)
        download = self.latency + down_bytes / self.down_bandwidth
        return download, compute * factor, up_bytes / self.up_bandwidth

    def next_start(self, now: float) -> float:
        """Return the earliest time, from ``now`` on, at which the client can start a job."""
        if self.off_seconds == 0 or self.on_seconds == math.inf:
            return now
        period = self.on_seconds + self.off_seconds
        position = math.fmod(now + self.phase, period)
        return now if position < self.on_seconds else now + (period - position)


_CHECKS = {
    "step_seconds": check_non_negative, "sample_seconds": check_non_negative, "down_bandwidth": check_speed,
    "up_bandwidth": check_speed, "latency": check_non_negative, "on_seconds": check_speed,
    "off_seconds": check_non_negative, "jitter": check_non_negative, "phase": check_non_negative,
}  # fmt: skip
_SPEEDS = tuple(_CHECKS)[:7]


@runtime_checkable
class Profile(Protocol):
    """The devices of a population, as a function of (client, key)."""

    __slots__ = ()

    @abstractmethod
    def device(self, client: int, samples: int, key: Key) -> Device:
        """Return the device of a client with ``samples`` samples; ``key`` is the run's."""


require_profile = partial(
    check_component, protocol=Profile, noun="a device profile", example="hansa.pace.devices() is one."
)


@dataclass(frozen=True, slots=True)
class devices:
    """Devices whose speeds are numbers, or distributions drawn once per client.

    A job takes latency + down bytes / down_bandwidth + steps (step_seconds + batch size sample_seconds) + up bytes /
    up_bandwidth seconds. Bytes are the exact length of the packets; where the length depends on the data, the
    compressor's bound. A client with ``off_seconds`` can start jobs in windows of ``on_seconds``, from a random phase;
    a job that has started continues.

    Args:
        step_seconds: Seconds per local step.
        sample_seconds: Seconds per example of a step's batch.
        down_bandwidth: Bytes per second from the server.
        up_bandwidth: Bytes per second to the server.
        latency: Seconds per job that do not depend on sizes.
        on_seconds: Length of the window in which a client can start a job.
        off_seconds: Length of the pause between two windows; 0 is always available.
        jitter: Sigma of a lognormal factor by which a job's compute time varies from job to job.
        tier: Name of this group of devices, for reports.

    >>> from hansa.local import lognormal
    >>> profile = devices(step_seconds=lognormal(0.1, sigma=1.0), up_bandwidth=1e6)
    >>> profile.device(3, 10, Key(0)) == profile.device(3, 10, Key(0))
    True
    """

    step_seconds: Drawn = 1.0
    sample_seconds: Drawn = 0.0
    down_bandwidth: Drawn = math.inf
    up_bandwidth: Drawn = math.inf
    latency: Drawn = 0.0
    on_seconds: Drawn = math.inf
    off_seconds: Drawn = 0.0
    jitter: float = 0.0
    tier: str = ""

    def __post_init__(self) -> None:
        for name in (*_SPEEDS, "jitter"):
            if not hasattr(value := getattr(self, name), "draw"):
                _CHECKS[name]("devices", name, value)
        if self.off_seconds != 0.0 and self.on_seconds == math.inf:
            raise invalid_argument("devices", "off_seconds", self.off_seconds, "on_seconds with it")

    def device(self, client: int, samples: int, key: Key) -> Device:
        values, phase = {name: getattr(self, name) for name in _SPEEDS}, 0.0
        drawn = [name for name, value in values.items() if not isinstance(value, (int, float))]
        if drawn or self.off_seconds != 0.0:
            chance = key.child("device", client).numpy()
            for name in drawn:
                values[name] = drawn_value(values[name], chance, samples)
                _CHECKS[name](f"devices: client {client}", name, values[name])
            on, off = values["on_seconds"], values["off_seconds"]
            phase = float(chance.random()) * (on + off) if off and on < math.inf else 0.0
        speeds = {name: float(value) for name, value in values.items()}
        return Device(**speeds, phase=phase, jitter=float(self.jitter), tier=self.tier)


@dataclass(frozen=True, slots=True)
class tiers(Checked):
    """Groups of devices, such as phones and servers: each client belongs to one, drawn by ``shares``.

    Args:
        groups: Devices of each tier.
        shares: Share of the clients in each tier, in the same order; equal by default.

    >>> profile = tiers([devices(0.1, tier="fast"), devices(10.0, tier="slow")], shares=[0.9, 0.1])
    >>> sorted({profile.device(client, 1, Key(0)).tier for client in range(100)})
    ['fast', 'slow']
    """

    groups: Sequence[Profile]
    shares: Sequence[float] | None = field(default=None, metadata=bound(rule_or_numbers))

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        groups = tuple(self.groups) if isinstance(self.groups, Sequence) else ()
        if not groups:
            raise invalid_argument("tiers", "groups", self.groups, "at least one group")
        for group in groups:
            require_profile("tiers", "groups", group)
        object.__setattr__(self, "groups", groups)
        shares = [1 / len(groups)] * len(groups) if self.shares is None else self.shares
        if len(shares) != len(groups) or not math.isclose(math.fsum(shares), 1.0, rel_tol=1e-9):
            raise invalid_argument("tiers", "shares", shares, f"{len(groups)} numbers that sum to 1, one a group")

    def device(self, client: int, samples: int, key: Key) -> Device:
        coin = float(key.child("device", "tier", client).numpy().random())
        shares = [1 / len(self.groups)] * len(self.groups) if self.shares is None else self.shares
        tier = 0
        while tier + 1 < len(shares) and (coin >= shares[tier] or not shares[tier]):
            coin -= shares[tier]
            tier += 1
        return self.groups[tier].device(client, samples, key)


@dataclass(frozen=True, slots=True)
class device_table:
    """Devices from a CSV file: one row per client, with a header.

    The column ``client`` is required. The others are those of `Device`; a missing column has its default there. Every
    client needs one row and every cell a number.

    Args:
        path: The file.
        sha256: Digest of the file, computed if empty. A run is resumed only with the same file.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "devices.csv"
    >>> _ = file.write_text("client,step_seconds,tier\\n0,0.5,fast\\n1,8,slow\\n")
    >>> device_table(str(file)).device(1, 10, Key(0)).step_seconds
    8.0
    """

    path: str
    sha256: str = ""
    _rows: Mapping[int, Device] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            with Path(self.path).open("rb") as file:
                data = file.read(MAX_ROWS_BYTES + 1)
        except OSError as error:
            raise argument_error("device_table", "path", self.path, f"{error.strerror or error}.") from error
        if len(data) > MAX_ROWS_BYTES:
            raise argument_error("device_table", "path", self.path, f"larger than {MAX_ROWS_BYTES >> 20} MiB.")
        digest = hashlib.sha256(data).hexdigest()
        if self.sha256 and self.sha256 != digest:
            changed = f"the file changed, its SHA-256 is {digest}. Restore it."
            raise argument_error("device_table", "path", self.path, changed)
        object.__setattr__(self, "sha256", digest)
        object.__setattr__(self, "_rows", _read_table(self.path, data))

    def device(self, client: int, samples: int, key: Key) -> Device:
        if client not in self._rows:
            raise HansaError(
                f"{self.path}: no row for client {client}. The table needs one row for every client of the run."
            )
        return self._rows[client]

    def check(self, population: int) -> None:
        """Raise unless every client has a row.

        Args:
            population: Number of clients.
        """
        for client in range(population):
            self.device(client, 0, Key(0))


def _read_table(path: str, data: bytes) -> dict[int, Device]:
    try:
        reader = csv.DictReader(data.decode("utf-8-sig").splitlines())
    except UnicodeDecodeError as error:
        raise HansaError(f"{path}: not UTF-8 text ({error}).") from error
    names, allowed = set(reader.fieldnames or ()), {"client", *Device._fields}
    if "client" not in names or names - allowed:
        expected = f"expected client and any of {', '.join(Device._fields)}"
        raise HansaError(f"{path}: its columns are {', '.join(sorted(names)) or 'none'}: {expected}.")
    rows: dict[int, Device] = {}
    for line, row in enumerate(reader, start=2):
        location = f"{path}, line {line}"
        if None in row or None in row.values():
            raise HansaError(f"{location}: expected {len(names)} cells.")
        cells = {name: cell.strip() for name, cell in row.items()}
        client, tier = cells.pop("client"), cells.pop("tier", "")
        if not client.isdigit() or int(client) in rows:
            raise HansaError(f"{location}: client {client!r}: expected a whole number >= 0, once.")
        rows[int(client)] = Device(**{name: _number(location, name, cell) for name, cell in cells.items()}, tier=tier)
    return rows


def _number(location: str, name: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError as error:
        raise HansaError(f"{location}, column {name}: expected a number, got {cell!r}. Fill the hole.") from error
    _CHECKS[name](location, name, value)
    return value
