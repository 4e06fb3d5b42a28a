"""Which method, compressor, topology and number of local steps a network bears: bytes and time predicted for each.

Bytes of a round are exact: those of the packets that would travel. Time is the link model's, plus the local steps. How
many rounds each needs is not known before training: the papers prove orders, and these, constants left out, are what
the ranking uses, as ratios to FedAMS with the first number of local steps. Compression with error feedback leaves the
order as it is and slows the beginning, the more the coarser it is. Pilots (`hansa advise --pilot`) measure instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hansa.compress import Compressor, direct, sign, top_k
from hansa.core.errors import HansaError, check_integer, check_positive
from hansa.core.keys import Key
from hansa.gossip import complete, exponential, ring
from hansa.gossip.spectral import messages
from hansa.gossip.theory import afga_theorem, corollary
from hansa.gossip.topology import Topology
from hansa.rounds.ledger import LinkModel

MEASURED = 1_000_000
"""Packets are encoded for as many parameters at most; those of larger models are scaled from it."""

COMPRESSORS: tuple[tuple[str, Compressor | None], ...] = (
    ("none", None),
    ("sign", sign()),
    ("top_k 1/64", top_k(1 / 64)),
    ("top_k 1/256", top_k(1 / 256)),
)
TOPOLOGIES: tuple[Topology, ...] = (ring(), exponential(), complete())


@dataclass(frozen=True, slots=True)
class Network:
    """What there is: a model of so many parameters, clients, how many of them take part, and links."""

    parameters: int
    clients: int
    participants: int
    links: LinkModel = field(default_factory=LinkModel)
    step_seconds: float = 0.0
    """Of one local step of the slowest client."""
    peers: bool = True
    """Whether clients can talk to each other."""

    def __post_init__(self) -> None:
        check_integer("Network", "parameters", self.parameters)
        check_integer("Network", "clients", self.clients)
        check_integer("Network", "participants", self.participants)
        if self.participants > self.clients:
            raise HansaError(f"Network(participants={self.participants}): expected at most clients={self.clients}.")
        if self.step_seconds:
            check_positive("Network", "step_seconds", self.step_seconds)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to train: its words in a configuration, what a round of it costs, and how many rounds its theorem asks
    for, relative to FedAMS with the first number of steps."""

    method: str
    compressor: str
    two_way: bool
    topology: str
    clusters: int
    steps: int
    up_bytes: int
    down_bytes: int
    peer_bytes: int
    seconds: float
    rounds: float
    why: str

    @property
    def name(self) -> str:
        """What tells it from the others."""
        words = [self.method, *([f"{self.clusters} x {self.topology}"] if self.topology else [])]
        if self.compressor != "none":
            words.append(self.compressor + (" both ways" if self.two_way else ""))
        return f"{', '.join(words)}, {self.steps} steps"

    def bytes(self, rounds: float) -> float:
        """Between clients and server, where FedAMS needs ``rounds`` rounds."""
        return rounds * self.rounds * (self.up_bytes + self.down_bytes)

    def hours(self, rounds: float) -> float:
        """In all, where FedAMS needs ``rounds`` rounds."""
        return rounds * self.rounds * self.seconds / 3600

    def document(self) -> dict[str, Any]:
        """The sections of a configuration that say it; rates are left to the reader, or to a sweep."""
        found: dict[str, Any] = {"algorithm": {"preset": self.method}, "local": {"steps": self.steps}}
        if self.topology:
            found["gossip"] = {"topology": self.topology, "clusters": self.clusters}
        if self.compressor != "none":
            name, _, ratio = self.compressor.partition(" ")
            found["compress"] = {"compressor": {"kind": name, "ratio": ratio} if ratio else name}
            if self.two_way:
                found["compress"]["two_way"] = True
        return found


def packet_bytes(compressor: Compressor | None, parameters: int) -> int:
    """The bytes of one packet, as it would travel: of a vector with normal entries, where they depend on it.

    >>> packet_bytes(None, 1000), packet_bytes(sign(), 1000), packet_bytes(sign(), 10_000_000)
    (4024, 153, 1250028)
    """
    if parameters <= MEASURED:
        return _encoded(compressor, parameters)
    whole_, half = _encoded(compressor, MEASURED), _encoded(compressor, MEASURED // 2)
    return whole_ + math.ceil((whole_ - half) * (parameters - MEASURED) / (MEASURED - MEASURED // 2))


def _encoded(compressor: Compressor | None, dim: int) -> int:
    x = torch.randn(dim, generator=Key(0).child("advice", dim).torch())
    packet = direct().send(x, {}, Key(0))[0] if compressor is None else compressor.encode(x, Key(0))
    return packet.nbytes


def options(
    network: Network, steps: Sequence[int] = (1, 10, 50), compressors: Iterable[str] | None = None
) -> list[Option]:
    """Everything that fits the network, each with its costs; in no order."""
    if not steps:
        raise HansaError("options(steps=()): expected at least one number of local steps.")
    for count in steps:
        check_integer("options", "steps", count)
    chosen = [(name, made) for name, made in COMPRESSORS if compressors is None or name in compressors]
    first = min(steps)
    found = []
    for name, compressor in chosen:
        up = packet_bytes(compressor, network.parameters)
        whole_model = packet_bytes(None, network.parameters)
        for two_way in (False, True) if compressor is not None else (False,):
            # a client that was away is sent what it missed, packet by packet, or the model, whichever is shorter
            down = min(whole_model, math.ceil(up * network.clients / network.participants)) if two_way else whole_model
            for count in steps:
                found.append(_plain(network, name, two_way, count, first, up, down))
                found.extend(_gossiping(network, name, two_way, count, first, up, down))
    return found


def _plain(n: Network, name: str, two_way: bool, steps: int, first: int, up: int, down: int) -> Option:
    full = n.participants == n.clients
    rounds = first / steps if full else steps / first
    why = (
        "full participation: O(1/sqrt(T tau M)), more local steps save rounds"
        if full
        else "partial participation: O(sqrt(tau)/sqrt(T M)), more local steps cost rounds where clients differ"
    )
    return Option(
        "fedams" if name == "none" else "fedcams",
        name,
        two_way,
        "",
        0,
        steps,
        n.participants * up,
        n.participants * down,
        0,
        _seconds(n, up, down, {}, 0, steps),
        rounds,
        why,
    )


def _gossiping(n: Network, name: str, two_way: bool, steps: int, first: int, up: int, down: int) -> Iterable[Option]:
    if not n.peers or steps == 1:
        return
    for clusters in _clusterings(n):
        size = n.clients // clusters
        reporters = n.participants // clusters
        if reporters < 1 or size < 2:
            continue
        for topology in TOPOLOGIES:
            W = topology.weights(size)
            model = packet_bytes(None, n.parameters)
            handed = size - reporters  # reporters hand the broadcast on inside the cluster, each its share
            heard = messages(W)
            peer = clusters * (handed + steps * heard) * model
            busiest = {0: (math.ceil(handed / reporters) + steps * math.ceil(heard / size)) * model}
            seconds = _seconds(n, up, down, busiest, steps, steps)
            gossip = type(topology).__name__
            ha = corollary(topology, [size] * clusters, reporters)
            af = afga_theorem(topology, [size] * clusters, reporters)
            for method, holds, told in (
                ("ha_fed", ha.holds, f"Corollary 5.11: rho {ha.rho_max:.3f}, at most {ha.bound:.3f}, and K < n"),
                ("cafga", af.holds, f"{af.name}: rho {af.rho_max:.3f}, at most {af.bound:.3f}"),
            ):
                rounds = (first / steps if holds else steps / first) * n.participants / (clusters * reporters)
                why = f"{told}: {'holds, more local steps save rounds' if holds else 'does not hold'}"
                yield Option(
                    method,
                    name,
                    two_way,
                    gossip,
                    clusters,
                    steps,
                    clusters * reporters * up,
                    clusters * reporters * down,
                    peer,
                    seconds,
                    rounds,
                    why,
                )


def _clusterings(n: Network) -> list[int]:
    """Numbers of equal clusters that divide the clients, and of which each has a reporter: three of them at most."""
    fitting = [k for k in range(1, min(n.participants, n.clients // 2) + 1) if n.clients % k == 0]
    return sorted({*fitting[-2:], *(fitting[len(fitting) // 2 : len(fitting) // 2 + 1])})


def _seconds(n: Network, up: int, down: int, peer: dict[int, int], exchanges: int, steps: int) -> float:
    who = range(n.participants)
    return n.links.seconds(dict.fromkeys(who, up), dict.fromkeys(who, down), peer, exchanges) + steps * n.step_seconds


def ranked(found: Sequence[Option], rounds: float, by: str = "bytes") -> list[Option]:
    """Best first, by predicted bytes between clients and server or by hours; equal ones by the other."""
    if by not in ("bytes", "hours"):
        raise HansaError(f"ranked(by={by!r}): expected 'bytes' or 'hours'.")

    def key(option: Option) -> tuple[float, float, str]:
        pair = option.bytes(rounds), option.hours(rounds)
        return (*(pair if by == "bytes" else pair[::-1]), option.name)

    return sorted(found, key=key)


def front(found: Sequence[Option], rounds: float) -> list[Option]:
    """Those that nothing else beats in both bytes and hours, by bytes.

    >>> net = Network(parameters=1000, clients=8, participants=4)
    >>> [option.name for option in front(options(net, steps=(1, 8)), 100)][:1]
    ['cafga, 2 x complete, top_k 1/256 both ways, 8 steps']
    """
    kept: list[Option] = []
    least = math.inf
    for option in ranked(found, rounds):
        if option.hours(rounds) < least:
            kept.append(option)
            least = option.hours(rounds)
    return kept
