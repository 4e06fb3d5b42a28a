"""fluke: its FedAvg (``CentralizedFL``) with its fast loader, everything in memory, no evaluation on the way."""

from __future__ import annotations

from typing import Any

import no_torchvision  # noqa: F401  first
import numpy as np
from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.data import DummyDataContainer, FastDataLoader
from fluke.utils import FederationObserver
from job import Clock, Job, finish
from modules import Batches, first_module, weights_of


class Loader(FastDataLoader):  # type: ignore[misc]
    """One pass of it is a client's local work: a fixed number of batches."""

    def __init__(self, batches: Batches, client: int, samples: int) -> None:
        rows = batches.arrays.rows(client)[:1]
        super().__init__(
            batches.inputs[rows], batches.targets[rows], num_labels=10, batch_size=batches.job.batch, shuffle=False
        )
        self.batches, self.client, self.size = batches, client, samples

    def __iter__(self) -> Any:
        return self.batches.of(self.client)

    def __len__(self) -> int:
        return self.batches.job.steps


class Splitter:
    """Data that are dealt already."""

    def __init__(self, container: DummyDataContainer) -> None:
        self.container = container

    def assign(self, clients: int, batch_size: int) -> Any:
        return (self.container.clients_tr, self.container.clients_te), self.container.server_data


class Observer(FederationObserver):  # type: ignore[misc]
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def end_round(self, round: int) -> None:
        self.clock.tick()


def main() -> None:
    job = Job.given()
    environment = FlukeENV()
    environment.set_seed(job.seed)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(
        task="classification", n_classes=10, server=False, locals=False, pre_fit=False, post_fit=False
    )
    batches = Batches(job)
    loaders = [Loader(batches, client, len(batches.arrays.rows(client))) for client in range(job.clients)]
    container = DummyDataContainer(loaders, [None] * job.clients, None, 10)
    words = DDict(
        client=DDict(
            batch_size=job.batch,
            local_epochs=1,
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=job.lr),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1),
            persistency=False,
        ),
        server=DDict(weighted=False),
        model=first_module(job),
    )
    federation = CentralizedFL(job.clients, Splitter(container), words)
    clock = Clock()
    federation.set_callbacks(Observer(clock))
    np.random.seed(job.seed)  # noqa: NPY002  fluke draws its clients from it
    federation.run(job.rounds, job.cohort / job.clients, finalize=False)
    finish(job, clock, weights_of(federation.server.model))


if __name__ == "__main__":
    main()
