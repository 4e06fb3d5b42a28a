"""No framework: the loop that a PyTorch user writes. Variants: "" in one process with all of torch's threads,
"2" in two processes of one thread each, "2 channels_last" with the memory layout that suits convolutions on CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from job import Clock, Job, finish
from modules import Batches, first_module, weights_of
from torch import nn
from torch.nn.functional import cross_entropy

State = dict[str, torch.Tensor]


class Client:
    """A model and the data of all clients; trains one client after the other."""

    def __init__(self, job: Job) -> None:
        self.job, self.batches = job, Batches(job)
        self.model = first_module(job)
        if "channels_last" in job.variant:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.batches.inputs = self.batches.inputs.contiguous(memory_format=torch.channels_last)

    def train(self, state: State, client: int) -> State:
        self.model.load_state_dict(state)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.job.lr)
        for inputs, targets in self.batches.of(client):
            optimizer.zero_grad()
            cross_entropy(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return {name: value.clone() for name, value in self.model.state_dict().items()}


_worker: Client | None = None


def _start_worker(job: Job, count: Any) -> None:
    global _worker
    with count.get_lock():
        count.value += 1
        number = count.value
    torch.set_num_threads(1)
    _worker = Client(job)
    _worker.batches.draw = np.random.default_rng([job.seed, number])


def _train(task: tuple[State, list[int]]) -> State:
    """The sum of the models of a share of the clients: one answer a worker, not one a client."""
    assert _worker is not None
    state, clients = task
    return total([_worker.train(state, client) for client in clients])


def total(trained: list[State]) -> State:
    return {name: torch.stack([one[name] for one in trained]).sum(0) for name in trained[0]}


def main() -> None:
    job = Job.given()
    server: nn.Module = first_module(job)
    draw = np.random.default_rng(job.seed)
    clock = Clock()
    pool = own = None
    if job.variant.startswith("2"):
        context = torch.multiprocessing.get_context("spawn")
        pool = context.Pool(2, _start_worker, (job, context.Value("i", 0)))
    else:
        own = Client(job)
    for _ in range(job.rounds):
        chosen = draw.choice(job.clients, job.cohort, replace=False).tolist()
        state = server.state_dict()
        if pool is not None:
            trained = pool.map(_train, [(state, chosen[::2]), (state, chosen[1::2])], chunksize=1)
        else:
            assert own is not None
            trained = [own.train(state, client) for client in chosen]
        server.load_state_dict({name: value / job.cohort for name, value in total(trained).items()})
        clock.tick()
    if pool is not None:
        pool.close()
        pool.join()
    finish(job, clock, weights_of(server))


if __name__ == "__main__":
    main()
