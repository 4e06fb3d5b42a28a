"""Compares losses, accuracies, metrics and heterogeneity of random tasks with a plain loop over their rows in float64.

    PYTHONPATH=tests python tests/fuzz/fuzz_evaluation.py [--inputs 3000] [--seed 0]

Tasks are of every kind: classes, one output, regression, several labels, sequences, padded sequences, and losses that
couple rows; with row weights, ignored labels, reductions, subclasses, any batch size, per client and at sites, native
and eager. A difference is reported with the smallest task that shows it.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import hypothesis
import torch
from hypothesis import HealthCheck, given, settings

from training.evaluation_tasks import Problem, check, check_heterogeneity, problems


def run(inputs: int, seed: int = 0) -> Counter[str]:
    """Check as many random tasks; return how many of each kind."""
    kinds: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @settings(max_examples=inputs, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(problems())
    def compare(problem: Problem) -> None:
        kinds[f"{problem.kind}/{problem.name}"] += 1
        check(problem)
        if kinds.total() % 4 == 0 and problem.kind != "ragged":
            check_heterogeneity(problem)

    compare()
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    kinds = run(options.inputs, options.seed)
    for kind, count in sorted(kinds.items()):
        print(f"{kind:28} {count}")
    print(f"{kinds.total()} tasks agree with the plain loop, {time.perf_counter() - began:.0f} seconds")


if __name__ == "__main__":
    main()
