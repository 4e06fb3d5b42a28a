"""Predict the bytes and the time of methods, compressors, topologies and numbers of local steps on a given network.

The bytes of a round are those of the packets that would be sent, with those of BatchNorm's statistics; compressed
downlinks under partial participation depend on which rounds a client misses, and their expectation is given. Time is
that of the link model plus the local steps. The number of rounds is not known before training. The ranking uses the
orders that the papers prove, without constants, as ratios to FedAMS with the smallest number of local steps. A
compressor multiplies the rounds by 1/(1 - q) for each direction ([CAMS] Remark 4.22; the bound has sqrt(T), so that
equal bounds would need its square, while error feedback without an adaptive server loses nothing in the leading term).
Pilots (`hansa advise --pilot`) measure it.
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
from hansa.study.theory.setting import compression_q

MAX_ENCODED = 1_000_000
"""Packets are encoded for at most this many parameters; those of larger models are extrapolated."""

COMPRESSORS: tuple[tuple[str, sign | top_k | None], ...] = (
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
        buffers: The number of BatchNorm's statistics, which are sent both ways uncompressed.
    """

    parameters: int
    clients: int
    participants: int
    links: LinkModel = field(default_factory=LinkModel)
    step_seconds: float = 0.0
    peers: bool = True
    buffers: int = 0

    def __post_init__(self) -> None:
        for name in ("parameters", "clients", "participants"):
            check_integer("NetworkProfile", name, getattr(self, name))
        check_integer("NetworkProfile", "buffers", self.buffers, minimum=0)
        if self.participants > self.clients:
            raise HansaError(
                f"NetworkProfile(participants={self.participants}): expected at most clients={self.clients}."
            )
        if self.step_seconds:
            check_positive("NetworkProfile", "step_seconds", self.step_seconds)


@dataclass(frozen=True, slots=True)
class TrainingOption:
    """One way to train: its configuration, the costs of a round, and the rounds that its theorem requires.

    ``rounds`` is relative to FedAMS with the smallest number of local steps. ``participants`` communicate with the
    server in a round, ``reporters`` of each cluster.
    """

    method: str
    compressor: str
    two_way: bool
    topology: str
    clusters: int
    reporters: int
    participants: int
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
            sections["gossip"] = {
                "topology": self.topology,
                "clusters": self.clusters,
                "reporters": self.reporters,
            }
        else:
            sections["sample"] = {"count": self.participants}
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


def expected_downlink(packet: int, model: int, share: float) -> float:
    """Return the expected bytes to a participant of a compressed downlink.

    A client that takes part with probability ``share`` is sent the increments of the g rounds since its last one, with
    probability share (1 - share)^(g - 1), or the whole model once that is smaller.

    Args:
        packet: Bytes of one increment.
        model: Bytes of the model.
        share: Participants divided by clients.

    >>> expected_downlink(10, 100, 1.0), expected_downlink(10, 1_000_000, 0.25), expected_downlink(100, 100, 0.5)
    (10.0, 40.0, 100.0)
    """
    most = (model - 1) // packet  # this many increments are smaller than the model
    missed = 1.0 - share
    if missed == 0.0:
        return float(packet if most else model)
    late = missed**most  # the probability of more
    return packet * ((1 - late) / share - most * late) + model * late


def compression_order(compressor: sign | top_k | None, parameters: int) -> tuple[float, float]:
    """Return q and 1/(1 - q): that of the sign of a vector with normal entries, sqrt(1 - 2/pi), or the bound of others.

    >>> [round(compression_order(each, 2**20)[1], 1) for each in (None, sign(), top_k(1 / 64), top_k(1 / 256))]
    [1.0, 2.5, 127.5, 511.5]
    """
    if compressor is None:
        return 0.0, 1.0
    q = compression_q(compressor, parameters)
    return q, 1 / (1 - q)


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
    options = []
    for name, compressor in COMPRESSORS:
        if compressors is not None and name not in compressors:
            continue
        for two_way in (False, True) if compressor is not None else (False,):
            link = _Link(network, name, compressor, two_way)
            for count in steps:
                options.append(_without_gossip(link, count, min(steps)))
                options.extend(_with_gossip(link, count, min(steps)))
    return options


class _Link:
    """The bytes of a compressor on a network, and its order of rounds."""

    def __init__(self, network: NetworkProfile, name: str, compressor: sign | top_k | None, two_way: bool) -> None:
        self.network, self.name, self.two_way = network, name, two_way
        self.packet = packet_bytes(compressor, network.parameters)
        self.model = packet_bytes(None, network.parameters)
        self.buffers = packet_bytes(None, network.buffers) if network.buffers else 0
        self.between = packet_bytes(None, network.parameters + network.buffers)
        q, order = compression_order(compressor, network.parameters)
        self.order = order**2 if two_way else order
        both = " for each direction" if two_way else ""
        self.why = "" if compressor is None else f"; {name} has q = {q:.3f}: rounds times 1/(1 - q) = {order:.3g}{both}"

    @property
    def up(self) -> int:
        """Bytes from one participant."""
        return self.packet + self.buffers

    def down(self, participants: int) -> float:
        """Bytes to one of so many participants; an expectation where the downlink is compressed."""
        share = participants / self.network.clients
        return self.buffers + (expected_downlink(self.packet, self.model, share) if self.two_way else self.model)


def _without_gossip(link: _Link, steps: int, first: int) -> TrainingOption:
    network = link.network
    sending = network.participants
    full = sending == network.clients
    rounds = (first / steps if full else steps / first) * link.order
    why = (
        "full participation: O(1/sqrt(T tau M)), more local steps save rounds"
        if full
        else "partial participation: O(sqrt(tau)/sqrt(T M)), more local steps cost rounds if clients differ"
    )
    up, down = link.up, link.down(sending)
    seconds = _round_seconds(network, sending, up, down, {}, 0, steps)
    method = "fedams" if link.name == "none" else "fedcams"
    costs = (sending * up, round(sending * down), 0, seconds)
    return TrainingOption(
        method, link.name, link.two_way, "", 0, 0, sending, steps, *costs, rounds=rounds, why=why + link.why
    )


def _with_gossip(link: _Link, steps: int, first: int) -> Iterator[TrainingOption]:
    network = link.network
    if not network.peers or steps == 1:
        return
    for clusters in _cluster_counts(network):
        size, reporters = network.clients // clusters, network.participants // clusters
        if reporters < 1 or size < 2:
            continue
        sending = clusters * reporters
        up, down = link.up, link.down(sending)
        for topology in TOPOLOGIES:
            forwarded = size - reporters  # reporters share the forwarding of the broadcast within the cluster
            gossiped = messages(topology.weights(size))
            peer = clusters * (forwarded + steps * gossiped) * link.between
            busiest = {0: (math.ceil(forwarded / reporters) + steps * math.ceil(gossiped / size)) * link.between}
            seconds = _round_seconds(network, sending, up, down, busiest, steps, steps)
            ha = corollary(topology, [size] * clusters, reporters)
            af = afga_theorem(topology, [size] * clusters, reporters)
            for method, holds, condition in (
                ("ha_fed", ha.holds, f"Corollary 5.11: rho {ha.rho_max:.3f}, at most {ha.bound:.3f}, and K < n"),
                ("cafga", af.holds, f"{af.name}: rho {af.rho_max:.3f}, at most {af.bound:.3f}"),
            ):
                rounds = (first / steps if holds else steps / first) * network.participants / sending * link.order
                why = f"{condition}: {'holds, more local steps save rounds' if holds else 'does not hold'}{link.why}"
                graph = type(topology).__name__
                costs = (sending * up, round(sending * down), peer, seconds)
                setting = (method, link.name, link.two_way, graph, clusters, reporters, sending, steps)
                yield TrainingOption(*setting, *costs, rounds=rounds, why=why)


def _cluster_counts(network: NetworkProfile) -> list[int]:
    """Return at most three numbers of equal clusters that divide the clients and have a reporter each."""
    most = min(network.participants, network.clients // 2)
    fitting = [count for count in range(1, most + 1) if network.clients % count == 0]
    return sorted({*fitting[-2:], *fitting[len(fitting) // 2 : len(fitting) // 2 + 1]})


def _round_seconds(
    network: NetworkProfile, sending: int, up: int, down: float, peer: dict[int, int], exchanges: int, steps: int
) -> float:
    clients = range(sending)
    received = dict.fromkeys(clients, round(down))
    transfer = network.links.seconds(dict.fromkeys(clients, up), received, peer, exchanges)
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
    ['cafga, 2 x complete, sign both ways, 8 steps']
    """
    front: list[TrainingOption] = []
    least = math.inf
    for option in rank_options(options, rounds):
        if option.hours(rounds) < least:
            front.append(option)
            least = option.hours(rounds)
    return front
