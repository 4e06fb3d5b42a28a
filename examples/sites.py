"""One CSV file per hospital: a weighted BCE loss, the AUC of each site, export and prediction. Run: python sites.py"""

import os
import random
import sys
from pathlib import Path

import torch
from torch import nn

import hansa

sites = Path(sys.argv[1] if len(sys.argv) > 1 else "sites")
if not sites.exists():  # generate five sites of unequal size; one patient in five is ill
    sites.mkdir()
    draw = random.Random(0)
    for site in range(5):
        people = [(draw.gauss(50 + site, 15), draw.choice("fm"), draw.gauss(120, 12)) for _ in range(60 + 50 * site)]
        rows = [f"{a},{s},{p},{int(draw.gauss(a - 50 + (p - 120), 8) > 17)}" for a, s, p in people]
        (sites / f"site{site}.csv").write_text("\n".join(["age,sex,pressure,ill", *rows]))

clients = hansa.data.from_csv_folder(sites, "ill", kind="number", test=0.25, scale="pooled")
weight = (clients.targets == 0).sum() / clients.targets.sum()  # an ill patient counts as much as four healthy ones


def auc(output: torch.Tensor, target: torch.Tensor) -> float:
    """The probability that an ill patient is ranked above a healthy one."""
    above = output[target == 1][:, None] - output[target == 0][None]
    return float((above > 0).float().mean() + (above == 0).float().mean() / 2)


model = lambda: nn.Sequential(nn.Linear(clients.shape[0], 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))  # noqa: E731
task = hansa.Task(model, nn.BCEWithLogitsLoss(pos_weight=weight), clients, metrics={"auc": auc}, name="sites")
method = hansa.presets.fedams(local_lr=0.1, epochs=1, batch_size=16, server_lr=0.1)
run = hansa.run(method, task, rounds=int(os.environ.get("ROUNDS", "20")), out="runs/sites", overwrite=True)
print(run.table("round", "test_loss", "test_auc"), "\nAUC by site:", run.clients().by_client()["test_auc"].round(3))
hansa.export("runs/sites", "model.safetensors")  # and its schema, in model.safetensors.preprocessing.json
patient = {"age": 61, "sex": "f", "pressure": 140}  # as in the files: the model has their schema
print("predicted probability:", hansa.load_model("runs/sites", model).predict([patient]).outputs.sigmoid())
