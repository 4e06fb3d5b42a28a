"""``hansa demo``: a comparison of methods on the embedded data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hansa.cli import options as opt
from hansa.cli.console import report_errors
from hansa.cli.report import print_and_write
from hansa.cli.run import run_entries

if TYPE_CHECKING:
    from hansa.config import Config

TITLE = "Federated methods on Fashion-MNIST"
LEAD = (
    "All methods use the same clients, data and seed. They differ in the local training and in how the server applies "
    "the updates. Fifty clients hold very different data, and five of them report each round."
)
SETTING = """
rounds: 40
data: {name: fashion-mini, clients: 50, partition: {kind: dirichlet, alpha: 0.3}}
model: cnn_29k
local: {lr: 0.1, steps: 10, batch_size: 50}
links: {up_bandwidth: 1.25e5, down_bandwidth: 1.25e6, latency: 0.05, peer_bandwidth: 1.25e7, peer_latency: 0.002}
checkpoint: {every: 0}
"""
"""What all methods share. The links: 1 Mbit/s up, 10 down, 50 ms latency; between clients 100 Mbit/s and 2 ms."""
TENTH = "sample: {participation: 0.1}\n"
TOP_K = "compress: {compressor: {kind: top_k, ratio: 1/16}}\n"
METHODS: Mapping[str, str] = {
    "CAFGA": "algorithm: cafga\ngossip: {clusters: 5, reporters: 1, topology: ring}\nserver: {lr: 0.01, eps: 1e-8}",
    "FedAvg": TENTH + "algorithm: fedavg",
    "FedAdam": TENTH + "algorithm: fedadam\nserver: {lr: 0.01, eps: 1e-3}",
    "FedAMS": TENTH + "algorithm: fedams\nserver: {lr: 0.1, eps: 1e-3}",
    "FedCAMS": TENTH + "algorithm: fedcams\nserver: {lr: 0.1, eps: 1e-3}\n" + TOP_K,
    "FedAWARE": TENTH + "algorithm: {preset: fedaware, alpha: 0.5}\nserver: {lr: 1.5}",
}
"""The configuration of each method, added to `SETTING`; first that in which all clients train, the longest run."""
TINY = ("rounds=2", "data.clients=10", "local.steps=2", "local.batch_size=10")


@report_errors
@opt.needs_code
def demo(
    tiny: Annotated[bool, typer.Option("--tiny", help="Run two rounds with ten clients, as a test.")] = False,
    seed: opt.Seed = None,
    seeds: opt.Seeds = None,
    workers: opt.Workers = None,
    parallel: opt.Parallel = None,
    folder: Annotated[Path, opt.output("--out", "-o", help="Folder for the runs.")] = Path("runs/demo"),
    page: opt.Report = Path("report.html"),
    quiet: opt.Quiet = False,
) -> None:
    """Compare methods on the embedded data and write a report page.

    This takes a few minutes on two cores.
    """
    from hansa.config import build
    from hansa.data.sources import dataset_info
    from hansa.study.report import LabelCounts

    configs = demo_configs([*(TINY if tiny else ()), *opt.changes(None, None, seed, workers, seeds)])
    entries = run_entries(dict(configs), folder, quiet, overwrite=True, parallel=parallel)
    config = next(iter(configs.values()))
    data, partition = build.load_data(config), config.data.partition
    facts = [
        config.data.name,
        f"{config.data.clients} clients",
        f"{partition['kind'].title()}({partition['alpha']})",
        "10% participation",
        "CNN, 28,938 parameters",
        f"{config.local.steps} local steps, batch size {config.local.batch_size}",
        f"{config.rounds} rounds",
        f"seed {config.seed}",
    ]
    counts = data.label_counts().tolist()
    names = dataset_info(config.data.name).class_names
    distribution = LabelCounts(counts, names, str(data.summary()).replace("\n", "; "))
    print_and_write(entries, page, title=TITLE, lead=LEAD, facts=facts, partition=distribution)


def demo_configs(overrides: Sequence[str] = ()) -> dict[str, Config]:
    """Return the configurations of the demo by name."""
    from hansa.config import from_yaml

    return {name: from_yaml(f"{SETTING}{own}\n", overrides, source=f"demo of {name}") for name, own in METHODS.items()}
