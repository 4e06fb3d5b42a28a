"""pfl: its simulated backend and FederatedAveraging, in-memory user data. The variant "2" is run by torchrun, two
worker processes of one thread each, which is how pfl uses several cores."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from job import Arrays, Clock, Job, finish, passes
from modules import first_module, weights_of
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn.functional import cross_entropy


class Module(nn.Module):
    """What pfl asks of a module: its loss, and its metrics."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.layers(inputs), targets)

    def metrics(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        return {}


class Rounds(TrainingProcessCallback):  # type: ignore[misc]
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Metrics]:
        self.clock.tick()
        return False, Metrics()


def main() -> None:
    job = Job.given()
    rank = int(os.environ.get("RANK", "0"))
    arrays = Arrays(job)
    inputs, targets = torch.from_numpy(arrays.inputs), torch.from_numpy(arrays.targets)
    draw = np.random.default_rng([job.seed, rank])

    def user(client: int) -> Dataset:
        """A client's local work as one pass: pfl stops after a pass, however many steps are asked for."""
        rows = torch.from_numpy(passes(arrays.rows(client), job.steps, job.batch, draw).reshape(-1))
        return Dataset(raw_data=[inputs[rows], targets[rows]], user_id=str(client))

    np.random.seed(job.seed)  # noqa: NPY002  pfl draws users from it, alike in all workers
    how = "random" if job.cohort < job.clients else "minimize_reuse"  # "random" may draw a user twice a round
    population = FederatedDataset(user, get_user_sampler(how, list(range(job.clients))))
    layers = first_module(job)
    module = Module(layers)
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=job.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(population, population, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=job.lr, local_batch_size=job.batch
        ),
        callbacks=[Rounds(clock)],
        send_metrics_to_platform=False,
    )
    if rank == 0:
        finish(job, clock, weights_of(layers))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # the results are written; the threads of gloo, now and then, abort a regular end of the process


if __name__ == "__main__":
    main()
