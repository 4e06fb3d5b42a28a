"""Compare FedCAMS with four compressors to FedAMS without compression: accuracy and megabytes sent up."""

import os
from typing import Any

import torch

import hansa
from hansa import compress

rounds = int(os.environ.get("ROUNDS", "60"))
clients = hansa.data.federate("fashion-mini", clients=50)
task = hansa.Task(hansa.models.cnn_29k, torch.nn.functional.cross_entropy, clients)
common: dict[str, Any] = {"local_lr": 0.05, "steps": 10, "batch_size": 20, "participation": 0.2, "server_lr": 0.05}
compressors = {
    "16 bits": compress.cast("float16"),
    "quantized": compress.quantize(levels=16),
    "sign": compress.sign(),
    "top 1/64": compress.top_k(1 / 64),
}
methods = {"none": hansa.presets.fedams(**common)}
for name, compressor in compressors.items():
    methods[name] = hansa.presets.fedcams(compressor=compressor, **common)

result = hansa.compare(methods, task, rounds=rounds)
print("compressor  megabytes up  accuracy")
for name, runs in result.items():
    sent = sum(record["up_bytes"] for record in runs[0].history) / 1e6
    print(f"{name:10} {sent:13.3f} {runs.last().mean:9.3f}")
result.plot("compression.pdf", x="server_bits")
