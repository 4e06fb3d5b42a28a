"""FedAWARE against FedAvg, FedAvgM and FedYogi on CIFAR-10 in the hybrid+ setting of the FedAWARE paper: 100 clients,
10%, Dirichlet(0.1), local rate 0.01, epochs from {2..5} and batch from {10..n} per round and client.
Run: python benchmarks/studies/aware_cifar.py"""

from __future__ import annotations

from hansa import data, presets
from hansa.local import hybrid_plus
from study import arguments, image_task, keep

SETTING = {
    "data": "cifar10",
    "partition": "dirichlet(0.1), 100 clients",
    "model": "cifar_cnn",
    "published": {"fedavg": 46.10, "fedavgm": 56.83, "fedyogi": 57.64, "fedaware": 61.28},
}


def main() -> None:
    options = arguments(__doc__ or "", rounds=200)
    federated = data.partition_dataset(data.load("cifar10"), data.dirichlet(0.1), 100, options.seed)
    common = {"local_lr": 0.01, "steps": hybrid_plus(epochs=(2, 5), min_batch=10), "participation": 0.1}
    algorithms = {
        "fedaware-normalize-explore": presets.fedaware(alpha=0.5, normalize=True, explore=True, **common),
        "fedavg": presets.fedavg(**common),
        "fedyogi": presets.fedyogi(server_lr=0.01, eps=1e-4, **common),
        "fedavgm": presets.fedavgm(momentum=0.9, **common),
        "fedaware": presets.fedaware(alpha=0.5, **common),
        "fedaware-normalize": presets.fedaware(alpha=0.5, normalize=True, **common),
        "fedaware-explore": presets.fedaware(alpha=0.5, explore=True, **common),
    }
    keep("aware-hybrid-plus", algorithms, image_task(federated, "cifar_cnn"), SETTING, options)


if __name__ == "__main__":
    main()
