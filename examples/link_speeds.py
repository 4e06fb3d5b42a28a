"""Rank methods for given link speeds: each is trained once, and the bytes that it sent give the time on any links."""

import os
from typing import Any

import torch

import hansa
from hansa import compress, gossip, presets
from hansa.rounds.ledger import LinkModel

rounds, target = int(os.environ.get("ROUNDS", "80")), float(os.environ.get("TARGET", "0.7"))
CLIENTS, STEPS, STEP_SECONDS = 40, 10, 0.02
LINKS = {  # bandwidths up, down and between peers in bytes a second; latencies in seconds
    "phones": LinkModel(2e5, 1e6, latency=0.2, peer_bandwidth=1e5, peer_latency=0.2),
    "campus": LinkModel(1e6, 1e6, latency=0.2, peer_bandwidth=1e8, peer_latency=0.001),
}
data = hansa.data.federate("fashion-mini", clients=CLIENTS)
task = hansa.Task(hansa.models.cnn_29k, torch.nn.functional.cross_entropy, data)
common: dict[str, Any] = {"local_lr": 0.05, "server_lr": 0.05, "steps": STEPS, "batch_size": 20}
methods = {
    "FedAMS": presets.fedams(participation=0.2, **common),
    "FedCAMS, sign": presets.fedcams(compressor=compress.sign(), participation=0.2, **common),
    "FedCAMS, top 1/64": presets.fedcams(compressor=compress.top_k(1 / 64), participation=0.2, **common),
    "HA-Fed, ring": presets.ha_fed(topology=gossip.ring(), clusters=4, reporters=2, **common),
}


def seconds(record: dict[str, Any], links: LinkModel) -> float:
    """Return the time of a round: its participants send alike, as do neighbours."""
    up, down = ({0: record[key] // record["participants"]} for key in ("up_bytes", "down_bytes"))
    peer = record["peer_bytes"] // CLIENTS
    return links.seconds(up, down, {0: peer}, STEPS if peer else 0) + STEPS * STEP_SECONDS


result = hansa.compare(methods, task, rounds=rounds)
for setting, links in LINKS.items():
    times = {}
    for name, runs in result.items():
        reached = runs.rounds_to(target, "test_accuracy")
        history = runs[0].history[: int(reached.mean)] if reached else []
        times[name] = sum(seconds(record, links) for record in history) if reached else float("inf")
    print(f"seconds to {target:.0%} on the links of {setting}:")
    for name in sorted(times, key=times.__getitem__):
        print(f"  {name:18}{times[name]:8.1f}")
