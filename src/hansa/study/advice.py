"""Predict the bytes and the time of methods, compressors, topologies and numbers of local steps on a given network.

The bytes of a round are exact: those of the packets that would be sent. Time is that of the link model plus the local
steps. The number of rounds is not known before training. The ranking uses the orders that the papers prove, without
constants, as ratios to FedAMS with the smallest number of local steps. Compression with error feedback does not change
the order; it slows the beginning, more so for coarser compressors. Pilots (`hansa advise --pilot`) measure it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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

MAX_ENCODED = 1_000_000
"""Packets are encoded for at most this many parameters; those of larger models are extrapolated."""

COMPRESSORS: tuple[tuple[str, Compressor | None], ...] = (
    ("none", None),
    ("sign", sign()),
    ("top_k 1/64", top_k(1 / 64)),
    ("top_k 1/256", top_k(1 / 256)),
)
TOPOLOGIES: tuple[Topology, ...] = (ring(), exponential(), complete())


@dataclass(frozen=True, slots=True)
class NetworkProfile:
    """A federation: its model, its clients and their links.

    Args:
        parameters: The number of parameters of the model.
        clients: The number of clients.
        participants: The number of participants per round.
        links: Bandwidths and latencies.
        step_seconds: The duration of a local step on the slowest client.
        peers: Whether clients can communicate with each other.
    """

    parameters: int
    clients: int
    participants: int
    links: LinkModel = field(default_factory=LinkModel)
    step_seconds: float = 0.0
    peers: bool = True

    def __post_init__(self) -> None:
        for name in ("parameters", "clients", "participants"):
            check_integer("NetworkProfile", name, getattr(self, name))
        if self.participants > self.clients:
            raise HansaError(
                f"NetworkProfile(participants={self.participants}): expected at most clients={self.clients}."
            )
        if self.step_seconds:
            check_positive("NetworkProfile", "step_seconds", self.step_seconds)


@dataclass(frozen=True, slots=True)
class TrainingOption:
    """One way to train: its configuration, the costs of a round, and the rounds that its theorem requires.

    ``rounds`` is relative to FedAMS with the smallest number of local steps.
    """

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
        """A unique description."""
        parts = [self.method, *([f"{self.clusters} x {self.topology}"] if self.topology else [])]
        if self.compressor != "none":
            parts.append(self.compressor + (" both ways" if self.two_way else ""))
        return f"{', '.join(parts)}, {self.steps} steps"

    def bytes(self, rounds: float) -> float:
        """Return the bytes to and from the server if FedAMS needs ``rounds`` rounds."""
        return rounds * self.rounds * (self.up_bytes + self.down_bytes)

    def hours(self, rounds: float) -> float:
        """Return the total time if FedAMS needs ``rounds`` rounds."""
        return rounds * self.rounds * self.seconds / 3600

    def document(self) -> dict[str, Any]:
        """Return the sections of a configuration; learning rates stay at their defaults."""
        sections: dict[str, Any] = {"algorithm": {"preset": self.method}, "local": {"steps": self.steps}}
        if self.topology:
            sections["gossip"] = {"topology": self.topology, "clusters": self.clusters}
        if self.compressor != "none":
            name, _, ratio = self.compressor.partition(" ")
            sections["compress"] = {"compressor": {"kind": name, "ratio": ratio} if ratio else name}
            if self.two_way:
                sections["compress"]["two_way"] = True
        return sections


def packet_bytes(compressor: Compressor | None, parameters: int) -> int:
    """Return the size of one packet; for data-dependent compressors, of a vector with normal entries.

    >>> packet_bytes(None, 1000), packet_bytes(sign(), 1000), packet_bytes(sign(), 10_000_000)
    (4024, 153, 1250028)
    """
    if parameters <= MAX_ENCODED:
        return _encoded_bytes(compressor, parameters)
    large, half = _encoded_bytes(compressor, MAX_ENCODED), _encoded_bytes(compressor, MAX_ENCODED // 2)
    return large + math.ceil((large - half) * (parameters - MAX_ENCODED) / (MAX_ENCODED - MAX_ENCODED // 2))


def _encoded_bytes(compressor: Compressor | None, dim: int) -> int:
    x = torch.randn(dim, generator=Key(0).child("advice", dim).torch())
    packet = direct().send(x, {}, Key(0))[0] if compressor is None else compressor.encode(x, Key(0))
    return packet.nbytes


def list_options(
    network: NetworkProfile, steps: Sequence[int] = (1, 10, 50), compressors: Iterable[str] | None = None
) -> list[TrainingOption]:
    """Return every option that the network allows, with its costs, in no particular order.

    Args:
        network: The federation.
        steps: The numbers of local steps to consider.
        compressors: The names of the compressors to consider; by default all.
    """
    if not steps:
        raise HansaError("list_options(steps=()): expected at least one number of local steps.")
    for count in steps:
        check_integer("list_options", "steps", count)
    first = min(steps)
    options = []
    for name, compressor in COMPRESSORS:
        if compressors is not None and name not in compressors:
            continue
        up, model = packet_bytes(compressor, network.parameters), packet_bytes(None, network.parameters)
        for two_way in (False, True) if compressor is not None else (False,):
            # a client that missed rounds receives their packets, or the model if that is shorter
            down = min(model, math.ceil(up * network.clients / network.participants)) if two_way else model
            for count in steps:
                options.append(_without_gossip(network, name, two_way, count, first, up, down))
                options.extend(_with_gossip(network, name, two_way, count, first, up, down))
    return options


def _without_gossip(
    network: NetworkProfile, name: str, two_way: bool, steps: int, first: int, up: int, down: int
) -> TrainingOption:
    full = network.participants == network.clients
    rounds = first / steps if full else steps / first
    why = (
        "full participation: O(1/sqrt(T tau M)), more local steps save rounds"
        if full
        else "partial participation: O(sqrt(tau)/sqrt(T M)), more local steps cost rounds if clients differ"
    )
    sent, received = network.participants * up, network.participants * down
    seconds = _round_seconds(network, up, down, {}, 0, steps)
    method = "fedams" if name == "none" else "fedcams"
    return TrainingOption(method, name, two_way, "", 0, steps, sent, received, 0, seconds, rounds, why)


def _with_gossip(
    network: NetworkProfile, name: str, two_way: bool, steps: int, first: int, up: int, down: int
) -> Iterator[TrainingOption]:
    if not network.peers or steps == 1:
        return
    for clusters in _cluster_counts(network):
        size, reporters = network.clients // clusters, network.participants // clusters
        if reporters < 1 or size < 2:
            continue
        for topology in TOPOLOGIES:
            model = packet_bytes(None, network.parameters)
            forwarded = size - reporters  # reporters share the forwarding of the broadcast within the cluster
            gossiped = messages(topology.weights(size))
            peer = clusters * (forwarded + steps * gossiped) * model
            busiest = {0: (math.ceil(forwarded / reporters) + steps * math.ceil(gossiped / size)) * model}
            seconds = _round_seconds(network, up, down, busiest, steps, steps)
            ha = corollary(topology, [size] * clusters, reporters)
            af = afga_theorem(topology, [size] * clusters, reporters)
            for method, holds, condition in (
                ("ha_fed", ha.holds, f"Corollary 5.11: rho {ha.rho_max:.3f}, at most {ha.bound:.3f}, and K < n"),
                ("cafga", af.holds, f"{af.name}: rho {af.rho_max:.3f}, at most {af.bound:.3f}"),
            ):
                sending = clusters * reporters
                rounds = (first / steps if holds else steps / first) * network.participants / sending
                why = f"{condition}: {'holds, more local steps save rounds' if holds else 'does not hold'}"
                graph = type(topology).__name__
                costs = (sending * up, sending * down, peer, seconds)
                yield TrainingOption(method, name, two_way, graph, clusters, steps, *costs, rounds, why)


def _cluster_counts(network: NetworkProfile) -> list[int]:
    """Return at most three numbers of equal clusters that divide the clients and have a reporter each."""
    most = min(network.participants, network.clients // 2)
    fitting = [count for count in range(1, most + 1) if network.clients % count == 0]
    return sorted({*fitting[-2:], *fitting[len(fitting) // 2 : len(fitting) // 2 + 1]})


def _round_seconds(
    network: NetworkProfile, up: int, down: int, peer: dict[int, int], exchanges: int, steps: int
) -> float:
    clients = range(network.participants)
    transfer = network.links.seconds(dict.fromkeys(clients, up), dict.fromkeys(clients, down), peer, exchanges)
    return transfer + steps * network.step_seconds


def rank_options(options: Sequence[TrainingOption], rounds: float, by: str = "bytes") -> list[TrainingOption]:
    """Rank options by their bytes to and from the server, or by hours; ties by the other.

    Args:
        options: The options.
        rounds: The number of rounds that FedAMS needs.
        by: "bytes" or "hours".
    """
    if by not in ("bytes", "hours"):
        raise HansaError(f"rank_options(by={by!r}): expected 'bytes' or 'hours'.")

    def key(option: TrainingOption) -> tuple[float, float, str]:
        pair = option.bytes(rounds), option.hours(rounds)
        return (*(pair if by == "bytes" else pair[::-1]), option.name)

    return sorted(options, key=key)


def pareto_front(options: Sequence[TrainingOption], rounds: float) -> list[TrainingOption]:
    """Return the options that no other beats in both bytes and hours, by bytes.

    >>> network = NetworkProfile(parameters=1000, clients=8, participants=4)
    >>> [option.name for option in pareto_front(list_options(network, steps=(1, 8)), 100)][:1]
    ['cafga, 2 x complete, top_k 1/256 both ways, 8 steps']
    """
    front: list[TrainingOption] = []
    least = math.inf
    for option in rank_options(options, rounds):
        if option.hours(rounds) < least:
            front.append(option)
            least = option.hours(rounds)
    return front
