"""Device profiles: how fast clients compute and communicate, and when they are available."""

from __future__ import annotations

import csv
import hashlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from hansa.core.errors import HansaError, check_non_negative, invalid_argument, suggestion
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
        place = math.fmod(now + self.phase, period)
        return now if place < self.on_seconds else now + (period - place)


_POSITIVE = ("down_bandwidth", "up_bandwidth")
_SPEEDS = (
    "step_seconds", "sample_seconds", "down_bandwidth", "up_bandwidth", "latency", "on_seconds", "off_seconds",
)  # fmt: skip


@runtime_checkable
class Profile(Protocol):
    """The devices of a population, as a function of (client, key)."""

    __slots__ = ()

    @abstractmethod
    def device(self, client: int, samples: int, key: Key) -> Device:
        """Return the device of a client with ``samples`` samples; ``key`` is the run's."""


def require_profile(owner: str, argument: str, value: object) -> None:
    """Raise unless the value is a device profile."""
    check_component(owner, argument, value, Profile, "a device profile", example="hansa.pace.devices() is one.")


@dataclass(frozen=True, slots=True)
class devices:
    """Devices whose speeds are numbers, or distributions drawn once per client.

    A job takes latency + down bytes / down_bandwidth + steps (step_seconds + batch size sample_seconds) + up bytes /
    up_bandwidth seconds. Bytes are the exact length of the packets; where the length depends on the data, the
    compressor's bound. A client with ``off_seconds`` can start jobs in windows of ``on_seconds``, from a random phase;
    a job that has started goes on.

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
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in _SPEEDS:
            value = getattr(self, name)
            if not hasattr(value, "draw"):
                _check_speed("devices", name, value)
        check_non_negative("devices", "jitter", self.jitter, "0.3 varies compute times by about a third.")
        if self.off_seconds != 0.0 and self.on_seconds == math.inf:
            raise invalid_argument("devices", "off_seconds", self.off_seconds, "on_seconds with it")

    def device(self, client: int, samples: int, key: Key) -> Device:
        values = [
            self.step_seconds, self.sample_seconds, self.down_bandwidth, self.up_bandwidth, self.latency,
            self.on_seconds, self.off_seconds,
        ]  # fmt: skip
        drawn = [place for place, value in enumerate(values) if not isinstance(value, (int, float))]
        if not drawn and self.off_seconds == 0.0:
            return self._made([float(value) for value in values], 0.0)  # type: ignore[arg-type]
        chance = key.child("device", client).numpy()
        for place in drawn:
            values[place] = drawn_value(values[place], chance, samples)
            _check_speed(f"devices: client {client}", _SPEEDS[place], values[place])
        on, off = (float(value) for value in values[-2:])  # type: ignore[arg-type]
        phase = float(chance.random()) * (on + off) if off and on < math.inf else 0.0
        return self._made([float(value) for value in values], phase)  # type: ignore[arg-type]

    def _made(self, values: Sequence[float], phase: float) -> Device:
        step, sample, down, up, latency, on, off = values
        return Device(step, sample, down, up, latency, on, off, phase, float(self.jitter), self.tier)


def _check_speed(owner: str, name: str, value: object) -> None:
    """Raise for a speed with which a client would never finish, or never be available."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name in _POSITIVE and not (number and value > 0):  # type: ignore[operator]
        raise invalid_argument(owner, name, value, f"{name} > 0 bytes a second", "math.inf (.inf in YAML) is no limit.")
    if name == "on_seconds" and not (number and value > 0):  # type: ignore[operator]
        raise invalid_argument(owner, name, value, "on_seconds > 0", "A client that is never on cannot train.")
    if name not in (*_POSITIVE, "on_seconds") and not (number and 0 <= value < math.inf):  # type: ignore[operator]
        remedy = "A client that takes forever never reports; leave it out of the data instead."
        raise invalid_argument(owner, name, value, f"a finite {name} >= 0", remedy)


@dataclass(frozen=True, slots=True)
class tiers:
    """Groups of devices, such as phones and servers: each client belongs to one, drawn by ``shares``.

    Args:
        groups: Devices of each tier.
        shares: Share of the clients in each tier, in the same order; equal by default.

    >>> profile = tiers([devices(0.1, tier="fast"), devices(10.0, tier="slow")], shares=[0.9, 0.1])
    >>> sorted({profile.device(client, 1, Key(0)).tier for client in range(100)})
    ['fast', 'slow']
    """

    groups: Sequence[Profile]
    shares: Sequence[float] | None = None
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        groups = tuple(self.groups) if isinstance(self.groups, Sequence) else ()
        if not groups:
            raise invalid_argument("tiers", "groups", self.groups, "at least one group", "[devices(0.1, tier='fast')].")
        for group in groups:
            require_profile("tiers", "groups", group)
        object.__setattr__(self, "groups", groups)
        if self.shares is not None:
            object.__setattr__(self, "shares", tuple(self.shares))
            for value in self.shares:
                check_non_negative("tiers", "shares", value)
            if len(self.shares) != len(groups) or not math.isclose(math.fsum(self.shares), 1.0, rel_tol=1e-9):
                expected = f"{len(groups)} numbers that sum to 1, one a group"
                raise invalid_argument("tiers", "shares", self.shares, expected)

    def device(self, client: int, samples: int, key: Key) -> Device:
        coin = float(key.child("device", "tier", client).numpy().random())
        shares = [1 / len(self.groups)] * len(self.groups) if self.shares is None else self.shares
        at = 0
        while at + 1 < len(shares) and (coin >= shares[at] or not shares[at]):
            coin -= shares[at]
            at += 1
        return self.groups[at].device(client, samples, key)


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
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        try:
            with Path(self.path).open("rb") as file:
                data = file.read(MAX_ROWS_BYTES + 1)
        except OSError as error:
            raise HansaError(
                f"device_table(path={self.path!r}): {error.strerror or error}. Expected a CSV file, one row a client.",
                component="device_table", argument="path", value=self.path,
            ) from error  # fmt: skip
        if len(data) > MAX_ROWS_BYTES:
            raise HansaError(f"device_table(path={self.path!r}): larger than {MAX_ROWS_BYTES >> 20} MiB.")
        digest = hashlib.sha256(data).hexdigest()
        if self.sha256 and self.sha256 != digest:
            raise HansaError(
                f"device_table(path={self.path!r}): the file changed, its SHA-256 is {digest}. Restore it."
            )
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
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise HansaError(f"{path}: not UTF-8 text ({error}).") from error
    reader = csv.DictReader(lines)
    names, known = reader.fieldnames or [], ["client", *Device._fields]
    for name in names:
        if name not in known:
            raise HansaError(f"{path}: no column {name!r} in a device table. {suggestion(str(name), known)}")
    if "client" not in names:
        raise HansaError(f"{path}: the column 'client' is missing; it has {names}.")
    rows: dict[int, Device] = {}
    for line, row in enumerate(reader, start=2):
        if None in row or None in row.values():
            raise HansaError(f"{path}, line {line}: expected {len(names)} cells.")
        values = {name: cell.strip() for name, cell in row.items()}
        client = values.pop("client")
        if not client.isdigit():
            raise HansaError(f"{path}, line {line}: client {client!r}: expected a whole number >= 0.")
        if int(client) in rows:
            raise HansaError(f"{path}, line {line}: client {client} has two rows.")
        tier = values.pop("tier", "")
        numbers = {name: _cell(path, line, name, cell) for name, cell in values.items()}
        rows[int(client)] = Device(**numbers, tier=tier)
    if not rows:
        raise HansaError(f"{path}: no rows. Expected one a client.")
    return rows


def _cell(path: str, line: int, name: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise HansaError(f"{path}, line {line}, column {name}: expected a number, got {cell!r}. Fill the hole.")
    owner = f"{path}, line {line}"
    if name in ("phase", "jitter"):
        check_non_negative(owner, name, value)
    else:
        _check_speed(owner, name, value)
    return value
