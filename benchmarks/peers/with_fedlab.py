"""FedLab: its standalone pipeline, its FedAvg handler and serial trainer; a data set of in-memory tensors."""

from __future__ import annotations

import logging
import random
from typing import Any

import no_torchvision  # noqa: F401  first
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.core.standalone import StandalonePipeline
from job import Clock, Job, finish
from modules import Batches, first_module, weights_of


class Dataset:
    """What a FedLab trainer asks of a data set: a loader for a client. One pass of it is the client's local work."""

    def __init__(self, job: Job) -> None:
        self.batches = Batches(job)

    def get_dataloader(self, client: int, batch_size: int) -> Any:
        return self.batches.of(client)


class Pipeline(StandalonePipeline):  # type: ignore[misc]
    clock: Clock

    def evaluate(self) -> None:
        self.clock.tick()


def main() -> None:
    job = Job.given()
    logging.disable(logging.INFO)
    random.seed(job.seed)
    handler = FedAvgServerHandler(first_module(job), job.rounds, job.cohort / job.clients)
    trainer = FedAvgSerialClientTrainer(first_module(job), job.clients)
    trainer.setup_dataset(Dataset(job))
    trainer.setup_optim(1, job.batch, job.lr)
    pipeline = Pipeline(handler, trainer)
    pipeline.clock = Clock()
    pipeline.main()
    finish(job, pipeline.clock, weights_of(handler.model))


if __name__ == "__main__":
    main()
