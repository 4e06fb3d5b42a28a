"""Two-way compression under partial participation: FedAMS and FedCAMS on the embedded Fashion-MNIST subset,
100 clients, 10% a round, 60 rounds. Bytes are those of the packets, in both directions.
Run: python benchmarks/studies/two_way_fashion.py"""

from __future__ import annotations

from study import arguments, image_task, keep

from hansa import data, presets
from hansa.compress import sign, top_k

SETTING = {"data": "fashion-mini", "partition": "dirichlet(0.6), 100 clients", "model": "cnn_29k"}


def main() -> None:
    options = arguments(__doc__ or "", rounds=60)
    federated = data.partition(data.load("fashion-mini"), data.dirichlet(0.6), 100, options.seed)
    common = {"local_lr": 0.05, "steps": 20, "batch_size": 20, "participation": 0.1, "server_lr": 0.05, "eps": 1e-3}
    fine = top_k(1 / 256, values="float16")
    algorithms = {
        "fedams": presets.fedams(**common),
        "fedcams-sign": presets.fedcams(compressor=sign(), **common),
        "fedcams-sign-both": presets.fedcams(compressor=sign(), two_way=True, **common),
        "fedcams-topk64-both": presets.fedcams(compressor=top_k(1 / 64), two_way=True, **common),
        "fedcams-sign-topk256": presets.fedcams(compressor=sign(), two_way=fine, **common),
        "fedcams-topk64-topk256": presets.fedcams(compressor=top_k(1 / 64), two_way=fine, **common),
    }
    keep("two-way-fashion", algorithms, image_task(federated, "cnn_29k"), SETTING, options)


if __name__ == "__main__":
    main()
