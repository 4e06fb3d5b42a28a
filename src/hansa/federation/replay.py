"""Replay of an asynchronous federation in simulation: the recorded order of arrivals gives the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hansa.algorithm import Algorithm
from hansa.config import allow_code, build
from hansa.config.sections import EngineSection, EvaluateSection
from hansa.core.errors import HansaError
from hansa.federation.serve import clients_by_site
from hansa.pace.events import RecordedClock
from hansa.rounds.messages import DroppedClient, Report, WorkOrder
from hansa.runs.driver import Run
from hansa.runs.experiment import build_run
from hansa.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Replay:
    """A replayed run, and whether its vectors equal those of the recorded run, channel by channel."""

    run: Run
    equal: dict[str, bool]

    @property
    def exact(self) -> bool:
        """Whether all vectors are equal to the bit."""
        return all(self.equal.values())


@dataclass(frozen=True, slots=True)
class _RecordedLosses:
    """The updates that the recorded run did not accept, by client and version."""

    lost: frozenset[tuple[int, int]]

    def apply_to_orders(self, orders: Sequence[WorkOrder]) -> tuple[list[WorkOrder], list[DroppedClient]]:
        lost = [order for order in orders if (order.clients[0], order.round) in self.lost]
        dropped = [DroppedClient(order.clients[0], "lost", "in the recorded run") for order in lost]
        return [order for order in orders if order not in lost], dropped

    def apply_to_reports(
        self, algorithm: Algorithm, orders: Sequence[WorkOrder], reports: Iterable[Report]
    ) -> Iterator[Report]:
        yield from reports


@allow_code()
def replay_run(path: Path | str, *, trust: bool = False) -> Replay:
    """Run the recorded server steps of an asynchronous federation in simulation, with all data on this machine.

    Args:
        path: The run folder of the server.
        trust: Import code that the folder names even if this user did not create it on this machine.
    """
    folder = RunFolder.containing(path)
    folder.require_trust(trust=trust)
    config, history = folder.config, list(folder.history)
    if not history or any("arrivals" not in record for record in history):
        raise HansaError(
            f"{folder}: no recorded arrivals. `hansa replay` needs a run of `hansa serve` with pace: buffered."
        )
    state, meta = folder.load_checkpoint()
    steps = int(meta["round"])
    arrivals: dict[tuple[int, int], float] = {}
    lost: set[tuple[int, int]] = set()
    for record in history[:steps]:
        for client, version, seconds, admitted in record["arrivals"]:
            arrivals[int(client), int(version)] = float(seconds)
            if not admitted:
                lost.add((int(client), int(version)))
    site_of = {client: name for name, clients in clients_by_site(config.engine).items() for client in clients}
    changes: dict[str, Any] = {"engine": EngineSection(), "rounds": steps, "evaluate": EvaluateSection(every=0)}
    simulated = config.model_copy(update=changes)
    run = build_run(simulated, build.load_data(simulated))
    run.one_by_one = True  # as the sites did
    if run.task.population.count != len(site_of):
        raise HansaError(
            f"{folder}: the data here has {run.task.population.count} clients, the federation {len(site_of)}. A replay "
            "needs the data of all sites."
        )
    run.clock = RecordedClock(arrivals, site_of.__getitem__, run.task.population.samples, run.key)
    run.options = replace(run.options, faults=_RecordedLosses(frozenset(lost)))  # type: ignore[arg-type]
    run.advance(steps)
    recorded: dict[str, torch.Tensor] = state["server"]["vectors"]
    vectors = run.host_vectors
    return Replay(run, {name: torch.equal(vectors[name], vector) for name, vector in recorded.items()})
