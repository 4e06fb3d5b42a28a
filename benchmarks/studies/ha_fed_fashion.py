"""HA-Fed against FedAMSGrad on Fashion-MNIST, the setting of the HA-Fed paper: 32 clients, 4 rings of 8, p = 0.25, 48
steps of 50, CNN-29k, local rate 0.1, server rate 0.01, eps 1e-8: outside the root in FedAMSGrad (the paper's eq. 3.2),
inside it in HA-Fed (Alg. 2). Run: python benchmarks/studies/ha_fed_fashion.py"""

from __future__ import annotations

from hansa import data, presets
from study import arguments, image_task, keep

SETTING = {
    "data": "fashion-mnist",
    "partition": "200 shards of 300, 6 a client, 32 clients",
    "model": "cnn_29k",
    "published": {"fedamsgrad": 88.79, "ha_fed": 89.25, "rounds": 500},
}


def main() -> None:
    options = arguments(__doc__ or "", rounds=500)
    federated = data.partition_dataset(data.load("fashion-mnist"), data.shards(200, 6), 32, options.seed)
    common = {"local_lr": 0.1, "steps": 48, "batch_size": 50, "server_lr": 0.01, "eps": 1e-8}
    algorithms = {
        "fedamsgrad": presets.fedamsgrad(participation=0.25, **common),
        "ha_fed": presets.ha_fed(clusters=4, reporters=2, **common),
    }
    keep("ha-fed-fashion", algorithms, image_task(federated, "cnn_29k"), SETTING, options)


if __name__ == "__main__":
    main()
