"""Flower: its simulation runtime on Ray, one actor a core, and its FedAvg strategy."""

from __future__ import annotations

import os
import random
import sys

os.environ.update(
    BENCH_JOB=sys.argv[1],
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    OMP_NUM_THREADS="1",
)

from flower_client import app as client_app
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import Clock, Job, finish
from modules import first_module, weights_of


def main() -> None:
    job, clock = Job.given(), Clock()
    cores = len(os.sched_getaffinity(0))
    model = first_module(job)
    random.seed(job.seed)
    server_app = ServerApp()

    @server_app.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, context: Context) -> None:
        def round_ended(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            if number:
                clock.tick()
            return None

        strategy = FedAvg(
            fraction_train=job.cohort / job.clients,
            fraction_evaluate=0.0,
            min_train_nodes=job.cohort,
            min_available_nodes=job.clients,
        )
        result = strategy.start(grid, ArrayRecord(model.state_dict()), job.rounds, evaluate_fn=round_ended)
        model.load_state_dict(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=job.clients,
        backend_config={
            "init_args": {"num_cpus": cores, "logging_level": "error", "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    finish(job, clock, weights_of(model))


if __name__ == "__main__":
    main()
