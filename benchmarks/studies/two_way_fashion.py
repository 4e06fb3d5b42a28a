"""Two-way compression under partial participation: FedAMS and FedCAMS on the embedded Fashion-MNIST subset,
100 clients, 10% a round, 60 rounds, all settings equal but for the links. Bytes are those of the packets, both ways.
Run: python benchmarks/studies/two_way_fashion.py [--seed 1] [--only fedams fedcams-grid-both]"""

from __future__ import annotations

from hansa import data, presets
from hansa.compress import grid, sign, top_k
from study import arguments, image_task, keep

SETTING = {"data": "fashion-mini", "partition": "iid, 100 clients", "model": "cnn_29k"}


def main() -> None:
    options = arguments(__doc__ or "", rounds=60)
    federated = data.partition_dataset(data.load("fashion-mini"), data.iid(), 100, options.seed)
    common = {"local_lr": 0.1, "steps": 30, "batch_size": 20, "participation": 0.1, "server_lr": 0.05, "eps": 1e-3}
    algorithms = {
        "fedams": presets.fedams(**common),
        "fedcams-grid-both": presets.fedcams(compressor=grid(4.0), two_way=True, **common),
        "fedcams-sign": presets.fedcams(compressor=sign(), **common),
        "fedcams-sign-both": presets.fedcams(compressor=sign(), two_way=True, **common),
        "fedcams-sign-grid": presets.fedcams(compressor=sign(), two_way=grid(4.0), **common),
        "fedcams-topk64-both": presets.fedcams(compressor=top_k(1 / 64), two_way=True, **common),
    }
    keep("two-way-fashion", algorithms, image_task(federated, "cnn_29k"), SETTING, options)


if __name__ == "__main__":
    main()
