"""A Hugging Face dataset whose rows a partitioner of flwr-datasets assigns to clients."""

import os

import datasets
import torch
from flwr_datasets.partitioner import DirichletPartitioner
from torch import nn

import hansa

fashion = hansa.data.load("fashion-mini")  # any Dataset will do: datasets.load_dataset("ylecun/mnist"), for one
columns = {"image": fashion.inputs.numpy(), "label": fashion.targets.numpy()}
test = datasets.Dataset.from_dict({"image": fashion.test_inputs.numpy(), "label": fashion.test_targets.numpy()})
train = datasets.Dataset.from_dict(columns).with_format("numpy")


class Net(nn.Module):
    """A model of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(784, 32), nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(image.flatten(1))))  # type: ignore[no-any-return]


partitioner = DirichletPartitioner(num_partitions=10, partition_by="label", alpha=0.3, min_partition_size=10, seed=1)
clients = hansa.data.from_hf(train, "image", "label", clients=partitioner, test=test.with_format("numpy"))
print(clients.summary())
task = hansa.Task(Net, nn.functional.cross_entropy, clients)
method = hansa.presets.fedams(local_lr=0.05, server_lr=0.05, epochs=1, batch_size=32)
run = hansa.run(method, task, rounds=int(os.environ.get("ROUNDS", "20")))
print(run.table("round", "test_loss", "test_accuracy", "up_bytes"))
