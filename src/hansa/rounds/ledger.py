"""Communication cost of a run: bytes per round and link, and simulated time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from hansa.core.errors import HansaError, check_integer, check_non_negative, invalid_argument


@dataclass(frozen=True, slots=True)
class RoundBytes:
    """One round's traffic. ``seconds`` is simulated time, None without a link model."""

    round: int
    up_bytes: int
    down_bytes: int
    peer_bytes: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Simulated time of a round's messages: latency in seconds, bandwidth in bytes per second.

    A participant takes latency + down/down_bandwidth + up/up_bandwidth. The round takes the maximum over participants,
    or the sum if the server is ``serial``. Each gossip exchange adds peer_latency; the client that sends most adds its
    bytes / peer_bandwidth.

    >>> links = LinkModel(up_bandwidth=1e6, down_bandwidth=4e6, latency=0.1)
    >>> links.seconds(up={0: 1_000_000, 1: 500_000}, down={0: 0, 1: 4_000_000})
    1.6
    """

    up_bandwidth: float = math.inf
    down_bandwidth: float = math.inf
    latency: float = 0.0
    peer_bandwidth: float = math.inf
    peer_latency: float = 0.0
    serial: bool = False

    def __post_init__(self) -> None:
        for name in ("up_bandwidth", "down_bandwidth", "peer_bandwidth"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise invalid_argument("LinkModel", name, value, f"{name} > 0 bytes a second", "math.inf is no limit.")
        check_non_negative("LinkModel", "latency", self.latency)
        check_non_negative("LinkModel", "peer_latency", self.peer_latency)

    def seconds(
        self, up: Mapping[int, int], down: Mapping[int, int], peer: Mapping[int, int] | None = None, exchanges: int = 0
    ) -> float:
        """Return the simulated time of one round from each client's bytes and the number of gossip exchanges."""
        times = [
            self.latency + down.get(client, 0) / self.down_bandwidth + up.get(client, 0) / self.up_bandwidth
            for client in sorted(up.keys() | down.keys())
        ]
        server = math.fsum(times) if self.serial else max(times, default=0.0)
        gossip = exchanges * self.peer_latency + max((peer or {}).values(), default=0) / self.peer_bandwidth
        return server + gossip


def afga(messages: int = 1) -> LinkModel:
    """Return the constants of [AFGA] Table 7: 18 s per exchange with the server, 1.8 s per gossip exchange.

    The table's hours correspond to ``afga(messages=20)``, twenty messages per exchange: 5 * 18 * 20 s = 0.5 h per round
    of FedAMSGrad, and 24 * 1.8 * 20 s = 0.24 h more with gossip.
    """
    check_integer("afga", "messages", messages)
    return LinkModel(latency=18.0 * messages, peer_latency=1.8 * messages, serial=True)


@dataclass(slots=True)
class Ledger:
    """Bytes sent: totals, and the last round. Its size does not depend on the number of rounds.

    >>> ledger = Ledger()
    >>> ledger.record(1, up={0: 10, 4: 12}, down={0: 40, 4: 40})
    RoundBytes(round=1, up_bytes=22, down_bytes=80, peer_bytes=0, seconds=None)
    >>> ledger.up_bytes, ledger.down_bytes, ledger.peer_bytes
    (22, 80, 0)
    """

    links: LinkModel | None = None
    up_bytes: int = 0
    """Clients to server."""
    down_bytes: int = 0
    """Server to clients."""
    peer_bytes: int = 0
    """Client to client, counted separately: gossip links are cheap."""
    last: RoundBytes | None = None
    """The last round."""
    _seconds: Fraction = Fraction(0)

    def record(
        self,
        round: int,
        *,
        up: Mapping[int, int],
        down: Mapping[int, int],
        peer: Mapping[int, int] | None = None,
        exchanges: int = 0,
    ) -> RoundBytes:
        """Add a round: bytes by client up, down and to peers, and the number of gossip exchanges."""
        seconds = None if self.links is None else self.links.seconds(up, down, peer, exchanges)
        entry = RoundBytes(round, sum(up.values()), sum(down.values()), sum((peer or {}).values()), seconds)
        self.up_bytes += entry.up_bytes
        self.down_bytes += entry.down_bytes
        self.peer_bytes += entry.peer_bytes
        self._seconds += Fraction(entry.seconds or 0.0)
        self.last = entry
        return entry

    @property
    def seconds(self) -> float:
        """The simulated time of all rounds."""
        if self.links is None:
            raise HansaError("Ledger.seconds: no link model. Ledger(links=LinkModel(...)) or afga() gives one.")
        return float(self._seconds)

    def state(self) -> dict[str, Any]:
        """Return the totals as a plain tree, without the link model."""
        totals = {name: getattr(self, name) for name in ("up_bytes", "down_bytes", "peer_bytes")}
        last = None if self.last is None else asdict(self.last)
        return {**totals, "last": last, "seconds": str(self._seconds)}

    @classmethod
    def restore(cls, state: Mapping[str, Any], links: LinkModel | None = None) -> Ledger:
        """Restore a ledger from its ``state``."""
        last = None if state["last"] is None else RoundBytes(**state["last"])
        up, down, peer = (int(state[name]) for name in ("up_bytes", "down_bytes", "peer_bytes"))
        return cls(links, up, down, peer, last, Fraction(state["seconds"]))
