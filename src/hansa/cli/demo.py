"""What ``hansa demo`` compares: a table of methods on the embedded data, and the words around their report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hansa.config import Config, build, from_text
from hansa.data.sources import source
from hansa.study.report import Holdings

TITLE = "Federated methods on Fashion-MNIST, side by side"
LEAD = (
    "The same clients, the same data, the same seed: what differs is what the clients do with a round and what the "
    "server makes of their updates. Fifty clients hold very unlike data, and five of them report each round."
)

SETTING = """
rounds: 40
data: {name: fashion-mini, clients: 50, partition: {kind: dirichlet, alpha: 0.3}}
model: cnn_29k
local: {lr: 0.1, steps: 10, batch_size: 50}
links: {up_bandwidth: 1.25e5, down_bandwidth: 1.25e6, latency: 0.05, peer_bandwidth: 1.25e7, peer_latency: 0.002}
checkpoint: {every: 0}
"""
"""What all share. The links: 1 Mbit/s up, 10 down, 50 ms away; neighbours are 100 Mbit/s and 2 ms away."""

TENTH = "sample: {participation: 0.1}\n"

TOP_K = "compress: {compressor: {kind: top_k, ratio: 1/16}}\n"

METHODS: Mapping[str, str] = {
    "FedAvg": TENTH + "algorithm: fedavg",
    "FedAdam": TENTH + "algorithm: fedadam\nserver: {lr: 0.01, eps: 1e-3}",
    "FedAMS": TENTH + "algorithm: fedams\nserver: {lr: 0.1, eps: 1e-3}",
    "FedCAMS": TENTH + "algorithm: fedcams\nserver: {lr: 0.1, eps: 1e-3}\n" + TOP_K,
    "CAFGA": "algorithm: cafga\ngossip: {clusters: 5, reporters: 1, topology: ring}\nserver: {lr: 0.01, eps: 1e-8}",
    "FedAWARE": TENTH + "algorithm: {preset: fedaware, alpha: 0.5}\nserver: {lr: 1.5}",
}
"""Name in the report -> what is its own. A method joins by adding a line."""

TINY = ("rounds=2", "data.clients=10", "local.steps=2", "local.batch_size=10")


def configs(tiny: bool, changes: Sequence[str]) -> dict[str, Config]:
    """The configurations of the demo, by name."""
    asked = [*(TINY if tiny else ()), *changes]
    return {name: from_text(f"{SETTING}{own}\n", asked, source=f"demo of {name}") for name, own in METHODS.items()}


def facts(config: Config) -> list[str]:
    """The setting in a few words."""
    partition = config.data.partition
    return [
        config.data.name,
        f"{config.data.clients} clients",
        f"{partition['kind'].title()}({partition['alpha']})",
        "10% a round",
        "CNN, 28,938 parameters",
        f"{config.local.steps} steps of {config.local.batch_size}",
        f"{config.rounds} rounds",
        f"seed {config.seed}",
    ]


def holdings(config: Config) -> Holdings:
    """Who holds what in the demo."""
    held = build.federated(config)
    return Holdings(
        held.label_counts().tolist(), source(config.data.name).class_names, str(held.summary()).replace("\n", "; ")
    )
